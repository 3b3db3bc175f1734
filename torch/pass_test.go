package torch_test

import (
	"errors"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// randomLoss computes a scalar from the leaves [8] by a random program: tensors are used many times
// or never, operators have several results, and the sums' terms differ in size, so that another
// order of adding has other bits. Each step of it runs inside of turn.
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
			leaves[i] = floats(t, values, 8).To(device).Keep()
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
			t.Errorf("seed %d: backward through a graph that is gone: %v", seed, err)
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
