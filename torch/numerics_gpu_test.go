package torch_test

import (
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// randomMatrix returns random numbers.
func randomMatrix(t *testing.T) *torch.Tensor {
	x, err := torch.Randn(gpu, torch.Float32, 256, 256)
	return must(t, x, err)
}

// products returns the elements of a float32 product of x and w, and of the gradient of w. The mark
// of x applies to the product and to the pass.
func products(t *testing.T, x, w *torch.Tensor) [2][]float32 {
	scope := torch.NewScope("products")
	defer scope.Close()
	y := x.In(scope).MatMul(w)
	loss := y.Square().Sum()
	g, err := torch.Grad([]*torch.Tensor{loss}, []*torch.Tensor{w}, torch.GradOptions{RetainGraph: true})
	if err != nil {
		t.Error(err)
		return [2][]float32{}
	}
	if err := loss.Backward(); err != nil {
		t.Error(err)
	}
	accumulated := w.Grad().In(scope)
	if same, err := accumulated.Equal(g[0]); err != nil || !same {
		t.Errorf("Backward and Grad differ: %v", err)
	}
	if err := torch.ClearGrads(w); err != nil {
		t.Error(err)
	}
	var found [2][]float32
	for i, r := range []*torch.Tensor{y.Detach(), g[0]} {
		if found[i], err = r.Float32s(); err != nil {
			t.Error(err)
		}
	}
	return found
}

// Some goroutines run forward and backward passes under TF32, and others run them in full precision
// at the same time. Each goroutine gets the same bits in every pass, and the two kinds differ.
func TestGPUNumericsOfNeighbours(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const passes = 200
	x, w := randomMatrix(t), randomMatrix(t)
	marked := map[string]*torch.Tensor{
		"of the process": x, "full": x.Numerics(torch.Numerics{}), "TF32": x.Numerics(torch.Numerics{MatmulTF32: true}),
	}
	alone := map[string][2][]float32{}
	for name, x := range marked {
		own := must(t, w.Clone(), nil)
		if err := own.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
		alone[name] = products(t, x, own)
	}
	for i, what := range []string{"forward", "backward"} {
		if !slices.Equal(alone["of the process"][i], alone["full"][i]) {
			t.Errorf("%s: the process's switches are not those of full precision", what)
		}
		if slices.Equal(alone["full"][i], alone["TF32"][i]) {
			t.Errorf("%s: TF32 makes no difference", what)
		}
	}
	var working atomic.Int64
	var all sync.WaitGroup
	for name, x := range marked {
		for range 2 {
			own := must(t, w.Clone(), nil)
			if err := own.SetRequiresGrad(true); err != nil {
				t.Fatal(err)
			}
			working.Add(1)
			all.Go(func() {
				for i := 0; working.Load() > 0; i++ {
					if i == passes {
						working.Add(-1)
					}
					for j, found := range products(t, x, own) {
						if !slices.Equal(found, alone[name][j]) {
							t.Errorf("%s: result %d of pass %d has other bits than alone", name, j, i)
							if i < passes {
								working.Add(-1)
							}
							return
						}
					}
				}
			})
		}
	}
	all.Wait()
}

// A graph keeps the switches of its operators, even if other work runs during its replays.
// Arguments with other switches make another graph.
func TestGPUNumericsOfGraphs(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := randomMatrix(t)
	product := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		y := in[0].MatMul(in[0])
		return []*torch.Tensor{y}, y.Err()
	}
	g := torch.NewGraphed(product, torch.GraphedOptions{})
	defer g.Close()
	results := map[bool][]float32{}
	for _, tf32 := range []bool{false, true, false, true} {
		in := x.Numerics(torch.Numerics{MatmulTF32: tf32})
		eager := must(t, in.MatMul(in), nil)
		want, err := eager.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		results[tf32] = want
		for i := range 4 {
			out, err := g.Call(in)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := out[0].Float32s(); err != nil || !slices.Equal(got, want) {
				t.Errorf("TF32 %v: call %d has other bits than the eager product (%v)", tf32, i, err)
			}
		}
	}
	if slices.Equal(results[false], results[true]) {
		t.Error("the product has the same bits with and without TF32, want others")
	}
	if s := g.Stats(); s.Captures != 2 {
		t.Errorf("%+v, want Captures 2", s)
	}
}

// Operators that wait for the device run at the same time under different switches, and all of them
// return.
func TestGPUNumericsOfWaitingOperators(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, []float32{1, 0, 2}, 3)
	var all sync.WaitGroup
	for _, n := range []torch.Numerics{{}, {MatmulTF32: true}, {ConvolutionTF32: true}} {
		all.Go(func() {
			scope := torch.NewScope("waiting")
			defer scope.Close()
			x := x.In(scope).Numerics(n)
			for range 200 {
				found := torch.Call1("masked_select", x, torch.Call1("gt.Scalar", x, 0))
				if v, err := found.Float32s(); err != nil || len(v) != 2 {
					t.Errorf("%+v: %v, %v, want length 2, nil", n, v, err)
					return
				}
			}
		})
	}
	all.Wait()
}

// Operators with the fastest kind of call, such as CrossEntropy, wait for their switches too. Its
// kernel adds with atomics, so LibTorch refuses it if kernels must be deterministic.
func TestGPUNumericsOfAFrequentOperator(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, []float32{1, 2, 3, 4, 5, 6, 7, 8}, 1, 2, 2, 2)
	labels := must(t, ints(t, []int64{0, 1, 1, 0}, 1, 2, 2).To(gpu), nil)
	for _, refuses := range []bool{true, false, true} {
		loss := must(t, x.Numerics(torch.Numerics{Deterministic: refuses}).CrossEntropy(labels), nil)
		if refused(t, loss.Err()) != refuses {
			t.Errorf("deterministic %v: %v", refuses, loss.Err())
		}
	}
}
