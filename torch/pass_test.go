package torch_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// randomLoss computes a scalar from the leaves [8] by a random program. The program uses some
// tensors many times and others never, and some of its operators have several results. The terms of
// its sums differ in size, so another order of addition gives other bits. Each step runs inside a
// call of turn.
func randomLoss(r *rand.Rand, leaves []*torch.Tensor, turn func(step func())) *torch.Tensor {
	pool := append([]*torch.Tensor(nil), leaves...)
	pick := func() *torch.Tensor { return pool[r.IntN(len(pool))] }
	split := func(x *torch.Tensor, size int64) []*torch.Tensor {
		parts, err := x.Split(size, 0)
		if err != nil {
			parts = []*torch.Tensor{torch.Fail("Split", err), torch.Fail("Split", err)}
		}
		return parts
	}
	for range 60 {
		turn(func() {
			x := pick()
			switch r.IntN(7) {
			case 0:
				pool = append(pool, x.Add(pick()))
			case 1:
				pool = append(pool, x.Mul(pick()).Tanh())
			case 2:
				pool = append(pool, x.MulScalar(1e3).Sin())
			case 3:
				halves := split(x, 4)
				pool = append(pool, torch.Cat([]*torch.Tensor{halves[1], halves[0].MulScalar(0.37)}, 0))
			case 4:
				max, _ := x.Reshape(2, 4).MaxDim(1, true)
				pool = append(pool, max.Expand(2, 4).Reshape(8).Mul(pick()))
			case 5:
				pool = append(pool, x.Softmax(0).Sub(pick()))
			case 6:
				pool = append(pool, pick().Mul(split(x, 3)[0].Sum())) // two of three results have no gradient
			}
		})
	}
	var loss *torch.Tensor
	turn(func() { loss = torch.Stack(pool[len(pool)-12:], 0).Sum() })
	return loss
}

// Backward runs the nodes of a graph itself where it can; Grad leaves them to LibTorch's engine.
func TestBackwardHasTheBitsOfGrad(t *testing.T) {
	check := func(t *testing.T, device cuda.Device, seed uint64, turn func(step func())) {
		r := rand.New(rand.NewPCG(seed, 1))
		leaves := make([]*torch.Tensor, 3)
		for i := range leaves {
			values := make([]float32, 8)
			for j := range values {
				values[j] = float32(r.NormFloat64() * math.Pow(10, float64(r.IntN(4)-2)))
			}
			moved := floats(t, values, 8).To(device)
			leaves[i] = moved.Keep()
			moved.Close()
			must(t, leaves[i], leaves[i].SetRequiresGrad(true))
		}
		scope := torch.NewScope("graph")
		defer scope.Close()
		in := make([]*torch.Tensor, len(leaves))
		for i, x := range leaves {
			in[i] = x.In(scope)
		}
		loss := randomLoss(r, in, turn)
		want, err := torch.Grad([]*torch.Tensor{loss}, leaves, torch.GradOptions{RetainGraph: true, AllowUnused: true})
		if err != nil {
			t.Fatal(err)
		}
		for _, retain := range []bool{true, false} {
			if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: retain}); err != nil {
				t.Fatal(err)
			}
			for i, x := range leaves {
				g := x.Grad()
				if g == nil || want[i] == nil {
					if g != want[i] {
						t.Fatalf("seed %d: the gradient of leaf %d is %v, want %v", seed, i, g, want[i])
					}
					continue
				}
				if got, want := read(t, g), read(t, want[i]); !sameBits(got, want) {
					t.Errorf("seed %d: the gradient of leaf %d is %v, want %v", seed, i, got, want)
				}
				g.Close()
				if err := torch.ClearGrads(x); err != nil {
					t.Fatal(err)
				}
			}
		}
		if err := loss.Backward(); err == nil || !strings.Contains(err.Error(), "second time") {
			t.Errorf("seed %d: backward through a graph that is gone: %v,"+
				" want an error with \"second time\"", seed, err)
		}
	}
	here := func(step func()) { step() }
	t.Run("CPU", func(t *testing.T) {
		for seed := range uint64(40) {
			check(t, cuda.CPU, seed, here)
		}
	})
	t.Run("GPU", func(t *testing.T) {
		cudatest.RequireGPUs(t, 1)
		for seed := range uint64(10) {
			check(t, gpu, seed, here)
		}
	})
	t.Run("streams", func(t *testing.T) {
		cudatest.RequireGPUs(t, 1)
		streams := []cuda.Stream{cudatest.Stream(t, gpu), cuda.DefaultStream(gpu)}
		at := 1
		for seed := range uint64(10) {
			check(t, gpu, seed, func(step func()) {
				before := streams[at]
				at = 1 - at
				err := streams[at].Wait(before)
				if err == nil {
					err = cuda.WithStream(streams[at], func() error { step(); return nil })
				}
				if err != nil {
					t.Fatal(err)
				}
			})
		}
	})
}

func sameBits(a, b []float32) bool {
	bits := func(v []float32) []uint32 {
		out := make([]uint32, len(v))
		for i, x := range v {
			out[i] = math.Float32bits(x)
		}
		return out
	}
	return reflect.DeepEqual(bits(a), bits(b))
}

// Each node of a graph of two streams runs on the stream of its forward.
func TestBackwardKeepsStreams(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, []float32{1, 2, 3})
	must(t, x, x.SetRequiresGrad(true))
	scope := torch.NewScope("graph")
	defer scope.Close()
	streams := []cuda.Stream{cudatest.Stream(t, gpu), cudatest.Stream(t, gpu)}
	saw := make([]cuda.Stream, 4)
	y, before := x.In(scope), cuda.DefaultStream(gpu)
	for i := range saw {
		on := streams[i%2]
		err := on.Wait(before)
		if err == nil {
			err = cuda.WithStream(on, func() error { y = y.Square(); return y.Err() })
		}
		if err != nil {
			t.Fatal(err)
		}
		before = on
		h, err := y.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
			var err error
			saw[i], err = cuda.GetCurrentCUDAStream(gpu)
			return nil, err
		})
		register(t, h, err)
	}
	ones := onDevice(t, []float32{1, 1, 1})
	if err := cuda.DefaultStream(gpu).Wait(before); err != nil {
		t.Fatal(err)
	}
	if err := y.BackwardWith(torch.BackwardOptions{Gradient: ones}); err != nil {
		t.Fatal(err)
	}
	for i, s := range saw {
		if s != streams[i%2] {
			t.Errorf("node %d ran on %v, want %v", i, s, streams[i%2])
		}
	}
}

// A graph that crosses devices has LibTorch's engine run its nodes.
func TestBackwardAcrossDevices(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := leaf(t, []float32{1, 2, 3}, 3)
	scope := torch.NewScope("graph")
	defer scope.Close()
	if err := x.In(scope).Square().To(gpu).Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	wantGrad(t, x, 4, 32, 108)
}

// A node that fails ends the pass with its error, and the next pass is whole.
func TestBackwardAfterAFailedNode(t *testing.T) {
	fault := errors.New("a fault")
	x := leaf(t, []float32{1, 2}, 2)
	y := x.Square()
	must(t, y, nil)
	fail := true
	h, err := y.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		if fail {
			return nil, fault
		}
		return nil, nil
	})
	register(t, h, err)
	loss := y.Sum().Add(x.Sum())
	must(t, loss, nil)
	if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: true}); !errors.Is(err, fault) {
		t.Fatalf("got %v, want %v", err, fault)
	}
	if err := torch.ClearGrads(x); err != nil {
		t.Fatal(err)
	}
	fail = false
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	wantGrad(t, x, 3, 5)
}

// Roots of all kinds: a leaf, a result of several, a chain of many nodes.
func TestBackwardFromAnyResult(t *testing.T) {
	scope := torch.NewScope("graph")
	defer scope.Close()
	x := leaf(t, []float32{3}, 1)
	backward(t, x)
	wantGrad(t, x, 1)

	x = leaf(t, []float32{1, 2, 3}, 3)
	parts, err := x.In(scope).Square().Split(1, 0)
	if err != nil {
		t.Fatal(err)
	}
	backward(t, parts[1])
	wantGrad(t, x, 0, 4, 0)

	x = leaf(t, []float32{1, 2}, 2)
	with := floats(t, []float32{10, 100}, 2)
	if err := x.In(scope).Square().BackwardWith(torch.BackwardOptions{Gradient: with}); err != nil {
		t.Fatal(err)
	}
	wantGrad(t, x, 20, 400)

	x = leaf(t, []float32{1}, 1)
	y := x.In(scope)
	for range 5000 {
		y = y.MulScalar(1)
	}
	backward(t, y)
	wantGrad(t, x, 1)
}

// Recorded gradients have gradients themselves.
func TestBackwardOfGradients(t *testing.T) {
	scope := torch.NewScope("graph")
	defer scope.Close()
	x := leaf(t, []float32{1, 2}, 2)
	in := x.In(scope)
	g, err := torch.Grad([]*torch.Tensor{in.Mul(in).Mul(in).Sum()}, []*torch.Tensor{in},
		torch.GradOptions{CreateGraph: true})
	if err != nil {
		t.Fatal(err)
	}
	backward(t, g[0].Sum())
	wantGrad(t, x, 6, 12)
	if grad := x.Grad(); grad.RequiresGrad() {
		t.Error("RequiresGrad() of the gradient = true, want false")
	}
}

// Nodes that get no gradient run, and pass no gradient on.
func TestBackwardWithoutSomeGradients(t *testing.T) {
	scope := torch.NewScope("graph")
	defer scope.Close()
	stop := torch.Function{
		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{in[0].MulScalar(2)}, nil
		},
		Backward: func(c *torch.FunctionContext, grads []*torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{nil}, nil
		},
	}
	x, only := leaf(t, []float32{1, 2}, 2), leaf(t, []float32{1, 2}, 2)
	stopped := stop.Apply1(x.In(scope).Square().Mul(only.In(scope)))
	backward(t, stopped.Sum().Add(x.In(scope).Sum()))
	wantGrad(t, x, 1, 1)
	if g := only.Grad(); g != nil {
		t.Errorf("a leaf without gradients has %v, want nil", g)
	}
}

// Passes through one graph may run at once, as LibTorch's may.
func TestBackwardsThroughOneGraphAtOnce(t *testing.T) {
	scope := torch.NewScope("graph")
	defer scope.Close()
	x := leaf(t, []float32{1, 2, 3}, 3)
	in := x.In(scope)
	loss := in.Mul(in).Add(in.Tanh().Mul(in)).Sum()
	if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: true}); err != nil {
		t.Fatal(err)
	}
	g := x.Grad()
	once := read(t, g)
	g.Close()
	var passes sync.WaitGroup
	for range 7 {
		passes.Go(func() {
			for range 9 {
				if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: true}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	passes.Wait()
	g = x.Grad()
	defer g.Close()
	for i, v := range read(t, g) {
		if want := 64 * once[i]; math.Abs(float64(v-want)) > 1e-4*math.Abs(float64(want)) {
			t.Errorf("element %d is %v after 64 passes, want %v", i, v, want)
		}
	}
}

// A node's saved tensors are freed when the node has run, and gradients when they were used. Near
// its end a pass holds as much memory as LibTorch's.
func TestBackwardFreesTheGraphDuringThePass(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x := onDevice(t, make([]float32, 1<<16), 1<<16)
	must(t, x, x.SetRequiresGrad(true))
	allocated := func() int64 {
		m, err := gpu.Memory()
		if err != nil {
			t.Error(err)
		}
		return m.Allocated
	}
	freed := func(pass func(loss *torch.Tensor) error) int64 {
		scope := torch.NewScope("graph")
		defer scope.Close()
		y := x.In(scope).Sin()
		atEnd := int64(-1)
		h, err := y.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
			atEnd = allocated()
			return nil, nil
		})
		register(t, h, err)
		for range 20 {
			next := y.Exp() // saves its result
			y.Close()
			y = next
		}
		loss := y.Sum()
		y.Close()
		before := allocated()
		if err := pass(loss); err != nil {
			t.Fatal(err)
		}
		if atEnd < 0 {
			t.Fatal("the hook was not called, want one call")
		}
		return before - atEnd
	}
	ours := freed(func(loss *torch.Tensor) error { return loss.Backward() })
	if err := torch.ClearGrads(x); err != nil {
		t.Fatal(err)
	}
	engines := freed(func(loss *torch.Tensor) error {
		g, err := torch.Grad([]*torch.Tensor{loss}, []*torch.Tensor{x}, torch.GradOptions{})
		for _, each := range g {
			each.Close()
		}
		return err
	})
	const size = 1 << 18 // of a result
	if ours < engines-size/2 || ours < 15*size {
		t.Errorf("near its end a pass has freed %d bytes, want at least %d and near the engine's %d",
			ours, 15*size, engines)
	}
}
