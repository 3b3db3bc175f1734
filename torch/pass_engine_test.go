package torch_test

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// LibTorch's engine runs each node of Grad. The hooks in a pass of Backward see the same values as
// the hooks in Grad.

// noteGradient registers a hook on x that records its name and sample's result.
func noteGradient(t *testing.T, x *torch.Tensor, name string, notes *[]string, sample func() string) {
	h, err := x.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		*notes = append(*notes, name+sample())
		return nil, nil
	})
	register(t, h, err)
}

// Nodes that several threads made have equal sequence numbers. The queue decides which of them runs
// first.
func TestBackwardRunsNodesInTheOrderOfGrad(t *testing.T) {
	const threads = 3
	var turns [threads]chan func()
	done := make(chan struct{})
	for i := range turns {
		turns[i] = make(chan func())
		go func() {
			runtime.LockOSThread()
			for step := range turns[i] {
				step()
				done <- struct{}{}
			}
		}()
		defer close(turns[i])
	}
	for seed := range uint64(30) {
		r := rand.New(rand.NewPCG(seed, 2))
		scope := torch.NewScope("graph")
		var notes []string
		nothing := func() string { return "" }
		leaves := make([]*torch.Tensor, 6)
		in := make([]*torch.Tensor, len(leaves))
		for i := range leaves {
			leaves[i] = leaf(t, []float32{1, 2, 3, float32(math.Pow(10, float64(i)))}, 4)
			in[i] = leaves[i].In(scope)
			noteGradient(t, leaves[i], fmt.Sprint("leaf", i), &notes, nothing)
		}
		pool := slices.Clone(in)
		pick := func() *torch.Tensor { return pool[r.IntN(len(pool))] }
		for i := range 60 {
			turns[r.IntN(threads)] <- func() {
				x, y := pick(), pick()
				if r.IntN(2) == 0 {
					pool = append(pool, x.Mul(y).Tanh())
				} else {
					pool = append(pool, x.Sub(y).Softmax(0))
				}
				noteGradient(t, pool[len(pool)-1], fmt.Sprint("result", i), &notes, nothing)
			}
			<-done
		}
		loss := torch.Stack(pool, 0).Sum()
		if _, err := torch.Grad([]*torch.Tensor{loss}, leaves, torch.GradOptions{RetainGraph: true}); err != nil {
			t.Fatal(err)
		}
		want := notes
		notes = nil
		backward(t, loss)
		if !slices.Equal(notes, want) {
			t.Errorf("seed %d: hooks ran in the order\n%v, want\n%v", seed, notes, want)
		}
		scope.Close()
	}
}

// A pass frees each node's saved tensors when the node has run, and each gradient when it was used.
func TestBackwardFreesMemoryAsGrad(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	settled(t)
	w := onDevice(t, make([]float32, 1<<16), 1<<16)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	bytes := func() string {
		s, err := gpu.Allocator()
		if err != nil {
			t.Error(err)
		}
		return fmt.Sprint(" ", s.RequestedBytes)
	}
	pass := func(run func(loss *torch.Tensor) error) []string {
		var notes []string
		scope := torch.NewScope("graph")
		defer scope.Close()
		x := w.In(scope)
		y := x
		for i := range 8 {
			y = y.Sin().Mul(y)
			noteGradient(t, y, fmt.Sprint("product", i), &notes, bytes)
		}
		z := y.Exp().Add(x).Exp()
		noteGradient(t, z, "exp", &notes, bytes)
		loss := z.Sum().Keep()
		scope.Close() // the graph alone keeps what its nodes saved
		defer loss.Close()
		if err := run(loss); err != nil {
			t.Fatal(err)
		}
		return notes
	}
	pass((*torch.Tensor).Backward) // kernels and libraries are loaded
	if err := torch.ClearGrads(w); err != nil {
		t.Fatal(err)
	}
	want := pass(func(loss *torch.Tensor) error {
		g, err := torch.Grad([]*torch.Tensor{loss}, []*torch.Tensor{w}, torch.GradOptions{})
		if err == nil {
			g[0].Close()
		}
		return err
	})
	got := pass((*torch.Tensor).Backward)
	if !slices.Equal(got, want) {
		t.Errorf("allocated at the hooks\n%v, want\n%v", got, want)
	}
}

// tiedLoss is a network whose weight [100 64] is an embedding and, transposed, the head. The head's
// gradient comes first, and is a view.
func tiedLoss(t *testing.T, w *torch.Tensor, scope *torch.Scope) *torch.Tensor {
	t.Helper()
	rows, err := torch.FromInt64s([]int64{3, 7, 3, 99})
	if err != nil {
		t.Fatal(err)
	}
	x := torch.Embedding(w.In(scope), scope.Own(scope.Own(rows).To(w.Device())))
	return x.Tanh().Linear(w, nil).Sin().Sum()
}

// One of the two gradients is a view, and the other is not. Their sum is written to the memory of
// the gradient that is not a view. It has the bits of LibTorch's sum.
func TestBackwardOfATiedWeightEqualsGrad(t *testing.T) {
	values := make([]float32, 100*64)
	for i := range values {
		values[i] = float32(math.Sin(float64(i)))
	}
	w := leaf(t, values, 100, 64)
	scope := torch.NewScope("graph")
	defer scope.Close()
	g, err := torch.Grad([]*torch.Tensor{tiedLoss(t, w, scope)}, []*torch.Tensor{w}, torch.GradOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer g[0].Close()
	backward(t, tiedLoss(t, w, scope))
	if got, want := read(t, w.In(scope).Grad()), read(t, g[0]); !slices.Equal(got, want) {
		t.Errorf("Backward's gradient = %v, want Grad's bits, %v", got, want)
	}
}

func TestBackwardOfATiedWeightHoldsOneGradientLess(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	settled(t)
	w := onDevice(t, make([]float32, 100*64), 100, 64)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	peak := func(run func(loss *torch.Tensor) error) int64 {
		scope := torch.NewScope("graph")
		loss := tiedLoss(t, w, scope).Keep()
		scope.Close()
		defer loss.Close()
		if err := errors.Join(gpu.ResetPeak(), run(loss)); err != nil {
			t.Fatal(err)
		}
		after, err := gpu.Memory()
		if err != nil {
			t.Fatal(err)
		}
		return after.PeakAllocated
	}
	byEngine := func(loss *torch.Tensor) error {
		g, err := torch.Grad([]*torch.Tensor{loss}, []*torch.Tensor{w}, torch.GradOptions{})
		if err == nil {
			g[0].Close()
		}
		return err
	}
	pass := func(loss *torch.Tensor) error { return errors.Join(loss.Backward(), torch.ClearGrads(w)) }
	peak(byEngine) // kernels and libraries are loaded
	peak(pass)
	const gradient = 100 * 64 * 4 // the other tensors of a pass have 1 KB at most
	if engine, got := peak(byEngine), peak(pass); got > engine-gradient/2 {
		t.Errorf("a pass holds %d bytes at its peak, and the engine's %d: want a gradient of %d less", got,
			engine, gradient)
	}
}

// If a hook leaves another stream set, the other nodes' streams do not change.
func TestBackwardRestoresTheStreamAfterAHook(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	other := cudatest.Stream(t, gpu)
	w := onDevice(t, []float32{3})
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("graph")
	defer scope.Close()
	y := w.In(scope).Square()
	z := y.Square()
	h, err := z.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
		_, err := cuda.SetCUDAStream(other)
		return nil, err
	})
	register(t, h, err)
	var saw cuda.Stream
	h, err = y.RegisterHook(func(*torch.Tensor) (g *torch.Tensor, err error) {
		saw, err = cuda.GetCurrentCUDAStream(gpu)
		return nil, err
	})
	register(t, h, err)
	backward(t, z.Sum())
	if saw != cuda.DefaultStream(gpu) {
		t.Errorf("the current stream is %v, want that of the forward pass, %v", saw, cuda.DefaultStream(gpu))
	}
}

func TestBackwardNeedsARealScalar(t *testing.T) {
	w, err := torch.Full(cuda.CPU, torch.Complex64, 1)
	must(t, w, err)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	y := w.Mul(w)
	must(t, y, y.Err())
	if err := y.Backward(); err == nil || !strings.Contains(err.Error(), "real scalar") {
		t.Errorf("a complex scalar without a gradient: got %v, want an error with \"real scalar\"", err)
	}
}

// Passes of several goroutines share the nodes of a graph and the leaf that they add to.
func TestBackwardOfGoroutinesThroughOneGraph(t *testing.T) {
	const passes = 50
	w := leaf(t, []float32{1, 2, 3}, 3)
	scope := torch.NewScope("graph")
	defer scope.Close()
	trunk := w.In(scope).MulScalar(3)
	for range 20 {
		trunk = trunk.Add(w).Sub(w)
	}
	var wg sync.WaitGroup
	for range 4 {
		head := trunk.MulScalar(1).Sum()
		wg.Go(func() {
			for range passes {
				if err := head.BackwardWith(torch.BackwardOptions{RetainGraph: true}); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	wantGrad(t, w, 4*passes*3, 4*passes*3, 4*passes*3)
}

// A pass that fails frees the gradients that it had.
func TestFailedBackwardFreesItsGradients(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	settled(t)
	errPlanned := errors.New("planned")
	w := onDevice(t, make([]float32, 1<<16), 1<<16)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	fail := func() error {
		scope := torch.NewScope("graph")
		defer scope.Close()
		x := w.In(scope).Sin()
		h, err := x.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) { return nil, errPlanned })
		if err != nil {
			return err
		}
		defer h.Remove()
		// The gradient of each term waits for the other terms' gradients when the hook fails.
		return x.Mul(w).Add(x.Exp()).Add(w.In(scope).Square()).Sum().Backward()
	}
	var before int64
	for i := range 3 {
		err := fail()
		if !errors.Is(err, errPlanned) {
			t.Fatalf("got %v, want %v", err, errPlanned)
		}
		if err := torch.ClearGrads(w); err != nil {
			t.Fatal(err)
		}
		s, err := gpu.Allocator()
		if err != nil {
			t.Fatal(err)
		}
		if i > 0 && s.RequestedBytes != before {
			t.Errorf("%d bytes are allocated after a failed pass, %d after the one before", s.RequestedBytes, before)
		}
		before = s.RequestedBytes
	}
}
