package torch_test

import (
	"errors"
	"fmt"
	"reflect"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// The steps of a prefetcher by hand: copy pinned memory to the device on a copy stream, normalise
// there, and use the result on the default stream after the event.
func TestCopyBatchAndNormalizeOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	ready, err := cuda.NewEvent(cuda.EventOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Close()
	p, err := cuda.NewPinned(2 * 4 * 4 * 3)
	if err != nil {
		t.Fatal(err)
	}
	defer p.Close()
	src, err := torch.FromMemory(p.Bytes(), torch.Uint8, 2, 4, 4, 3)
	must(t, src, err)
	if !src.IsPinned() {
		t.Error("IsPinned() of a tensor over pinned memory = false, want true")
	}
	dev, err := torch.Empty(gpu, torch.Uint8, 2, 4, 4, 3)
	must(t, dev, err)
	out, err := torch.EmptySpec(gpu,
		torch.Spec{DType: torch.Float32, Shape: []int64{3, 4, 4}, MemoryFormat: torch.ChannelsLast}, 2)
	must(t, out, err)
	// The default stream, which allocated both, may still have work on their memory.
	if err := stream.Wait(cuda.DefaultStream(gpu)); err != nil {
		t.Fatal(err)
	}
	for round := range 20 {
		for i := range p.Bytes() {
			p.Bytes()[i] = byte(round + i)
		}
		if err := torch.CopyBatch(stream, nil, []*torch.Tensor{dev}, []*torch.Tensor{src}, nil); err != nil {
			t.Fatal(err)
		}
		err := cuda.WithStream(stream, func() error {
			if err := torch.NormalizeImages(out, dev, []float32{0, 0, 0}, []float32{1, 1, 1}); err != nil {
				return err
			}
			return stream.Record(ready)
		})
		if err != nil {
			t.Fatal(err)
		}
		if err := cuda.DefaultStream(gpu).WaitEvent(ready); err != nil {
			t.Fatal(err)
		}
		got, err := out.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		for n := range 2 {
			for c := range 3 {
				for i := range 16 {
					want := float32(byte(round+n*48+i*3+c)) / 255
					if d := got[n*48+c*16+i] - want; d > 1e-6 || d < -1e-6 {
						t.Fatalf("round %d: image %d channel %d pixel %d: %v, want %v", round, n, c, i,
							got[n*48+c*16+i], want)
					}
				}
			}
		}
	}
	pageable, err := torch.Zeros(cuda.CPU, torch.Uint8, 2, 4, 4, 3)
	must(t, pageable, err)
	if err := torch.CopyBatch(stream, nil, []*torch.Tensor{dev}, []*torch.Tensor{pageable},
		ready); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("pageable memory: got %v, want ErrInvalidArgument", err)
	}
}

func TestConcurrentTrainingOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			if err := trainAlone(float32(i)); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

// trainAlone runs backward on its own stream and checks the gradient.
func trainAlone(value float32) error {
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		return err
	}
	return cuda.WithStream(stream, func() error {
		s := torch.NewScope("goroutine")
		defer s.Close()
		w, err := torch.Full(gpu, torch.Float32, float64(value), 4)
		if err != nil {
			return err
		}
		w = s.Own(w)
		if err := w.SetRequiresGrad(true); err != nil {
			return err
		}
		for range 100 {
			if err := w.Square().Sum().Backward(); err != nil {
				return err
			}
		}
		got, err := w.Grad().Float32s()
		if err != nil {
			return err
		}
		if g := 200 * value; !reflect.DeepEqual(got, []float32{g, g, g, g}) {
			return fmt.Errorf("gradient %v, want %v", got, g)
		}
		return nil
	})
}

func TestBackwardAccumulatesGradients(t *testing.T) {
	w := leaf(t, []float32{2, 3})
	x := floats(t, []float32{5, 7})
	if g := w.Grad(); g != nil {
		t.Fatalf("a gradient before backward: %v, want nil", g)
	}
	for range 2 {
		if err := w.Mul(x).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 10, 14) // accumulated
	if err := torch.ClearGrads(w, x); err != nil {
		t.Fatal(err)
	}
	if g := w.Grad(); g != nil {
		t.Fatalf("Grad() after ClearGrads = %v, want nil", g)
	}
	if err := w.Mul(x).BackwardWith(torch.BackwardOptions{Gradient: floats(t, []float32{1, 10})}); err != nil {
		t.Fatal(err)
	}
	g = w.Grad()
	defer g.Close()
	wantValues(t, g, 5, 70)
	if err := w.SetGrad(x); err != nil {
		t.Fatal(err)
	}
	g = w.Grad()
	defer g.Close()
	wantValues(t, g, 5, 7)
	if err := w.SetGrad(nil); err != nil || w.Grad() != nil {
		t.Fatalf("SetGrad(nil) = %v and then Grad() = %v, want nil, nil", err, w.Grad())
	}
	loss := w.Square().Sum()
	if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: true}); err != nil {
		t.Fatal(err)
	}
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	if loss.Backward() == nil {
		t.Fatal("Backward() after the graph's data was freed = nil, want an error")
	}
}

// Autograd has its own references: closing the results of forward does not affect backward.
func TestScopeEndsBetweenForwardAndBackward(t *testing.T) {
	w := leaf(t, []float32{2, 3})
	scope := torch.NewScope("forward")
	loss := w.In(scope).Square().Exp().Log().Sum().Keep() // d/dw = 2w
	defer loss.Close()
	scope.Close()
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	wantValues(t, g, 4, 6)
}

func TestNoGradTravelsWithTheData(t *testing.T) {
	w, b := leaf(t, []float32{1, 2, 3, 4}, 2, 2), leaf(t, []float32{1, 1})
	x := floats(t, []float32{1, 0}, 1, 2)
	if y := x.Linear(w, b); !y.RequiresGrad() {
		t.Fatal("RequiresGrad() of Linear without NoGrad = false, want true")
	}
	marked := x.NoGrad()
	y := marked.Linear(w, b)
	for name, z := range map[string]*torch.Tensor{
		"result": y, "result's result": y.Mul(w), "list": torch.Cat([]*torch.Tensor{b, y.Reshape(2)}, 0),
		"kept": y.Keep(), "parameter": w.NoGrad(),
		"both results": func() *torch.Tensor { v, _ := y.Add(b).MaxDim(1, false); return v.Add(w) }(),
	} {
		t.Run(name, func(t *testing.T) {
			if err := z.Err(); err != nil {
				t.Error(err)
			}
			if z.RequiresGrad() {
				t.Error("RequiresGrad() = true, want false")
			}
		})
	}
	if err := y.Sum().Backward(); err == nil {
		t.Error("Backward() without recorded data = nil, want an error")
	}
	if !w.RequiresGrad() {
		t.Error("RequiresGrad() of the parameter itself = false, want true")
	}
	// In place: under the mark a leaf may be changed, no matter which operand is marked, and the
	// mark propagates.
	step := floats(t, []float32{1, 1})
	if err := b.Sub_(step).Err(); err == nil {
		t.Error("Sub_ on a leaf while recording: got no error, want one")
	}
	if err := b.NoGrad().Sub_(step).Err(); err != nil {
		t.Error(err)
	}
	got := b.Sub_(step.NoGrad()).MulScalar_(2)
	if err := got.Err(); err != nil {
		t.Error(err)
	}
	wantValues(t, b, -2, -2)
	if !b.RequiresGrad() || got.RequiresGrad() {
		t.Errorf("RequiresGrad() of the leaf and of the result = %v, %v, want true, false",
			b.RequiresGrad(), got.RequiresGrad())
	}
	if err := x.Linear(w, b).Sum().Backward(); err != nil {
		t.Fatal(err)
	}
}

func TestConcurrentBackward(t *testing.T) {
	x := floats(t, []float32{1, 2, 3, 4}, 2, 2)
	var wg sync.WaitGroup
	for i := range 8 {
		w := leaf(t, []float32{float32(i), 1, 1, float32(i)}, 2, 2)
		wg.Go(func() {
			for range 100 {
				s := torch.NewScope("turn")
				if err := x.In(s).MatMul(w).Sum().Backward(); err != nil {
					t.Error(err)
				}
				s.Close()
			}
			g := w.Grad()
			defer g.Close()
			v, err := g.Float32s()
			if err != nil || !reflect.DeepEqual(v, []float32{400, 400, 600, 600}) {
				t.Errorf("got %v, %v, want [400 400 600 600], nil", v, err)
			}
		})
	}
	wg.Wait()
}

func TestRandomIsSeeded(t *testing.T) {
	draw := func() []float32 {
		if err := torch.ManualSeed(3); err != nil {
			t.Fatal(err)
		}
		a, err := torch.Rand(cuda.CPU, torch.Float32, 3)
		must(t, a, err)
		b, err := torch.Randn(cuda.CPU, torch.Float32, 3)
		must(t, b, err)
		v, err := torch.Cat([]*torch.Tensor{a, b}, 0).Float32s()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
	if a, b := draw(), draw(); !reflect.DeepEqual(a, b) {
		t.Errorf("the same seed drew %v and %v", a, b)
	}
}

func TestNormalizeImages(t *testing.T) {
	src, err := torch.FromBytes([]byte{0, 51, 102, 255, 204, 153}, 1, 1, 2, 3)
	must(t, src, err)
	mean, std := []float32{0, 0.2, 0.4}, []float32{1, 0.5, 0.25}
	for _, f := range []torch.MemoryFormat{torch.Contiguous, torch.ChannelsLast} {
		t.Run(fmt.Sprintf("format=%d", f), func(t *testing.T) {
			dst, err := torch.EmptySpec(cuda.CPU,
				torch.Spec{DType: torch.Float32, Shape: []int64{3, 1, 2}, MemoryFormat: f}, 1)
			must(t, dst, err)
			if err := torch.NormalizeImages(dst, src, mean, std); err != nil {
				t.Fatal(err)
			}
			wantValues(t, dst, 0, 1, 0, 1.2, 0, 0.8)
		})
	}
	if err := torch.NormalizeImages(src, src, mean, std); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("got %v, want cuda.ErrInvalidArgument", err)
	}
}

func TestGradientsBelongToTheScope(t *testing.T) {
	scope := torch.NewScope("parameters")
	defer scope.Close()
	a, b := scope.Own(floats(t, []float32{1, 2}, 2)), scope.Own(floats(t, []float32{3}, 1))
	for _, p := range []*torch.Tensor{a, b} {
		if err := p.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
	}
	if err := a.Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
	step := torch.NewScope("step")
	got, err := torch.Gradients(step, a.NoGrad(), b)
	if err != nil {
		t.Fatal(err)
	}
	if values, err := got[0].Float64s(); err != nil || !reflect.DeepEqual(values, []float64{2, 4}) || got[1] != nil {
		t.Errorf("got %v %v, %v, want [2 4], nil, nil", got, values, err)
	}
	if of, product := got[0].Scope(), got[0].MulScalar(2).Scope(); of != step || product != step {
		t.Errorf("the gradient and its product are in %v and %v, want both in %v", of, product, step)
	}
	if got[0].Mul(a).RequiresGrad() {
		t.Error("RequiresGrad() of a product with a NoGrad leaf's gradient = true, want false")
	}
	step.Close()
	if _, err := got[0].Float64s(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("after the scope: %v, want torch.ErrClosed", err)
	}
	if g := a.Grad(); g == nil || g.Err() != nil {
		t.Errorf("the gradient ended with the scope: %v", g)
	}
	before := torch.LiveTensors()
	if _, err := torch.Gradients(step, a, b, a); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("in a closed scope: %v, want torch.ErrClosed", err)
	}
	if n := torch.LiveTensors(); n != before {
		t.Errorf("a closed scope left %d references, want 0", n-before)
	}
	if _, err := torch.Gradients(nil, a); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("without a scope: %v, want cuda.ErrInvalidArgument", err)
	}
	other := torch.NewScope("another")
	defer other.Close()
	b.Close()
	if _, err := torch.Gradients(other, a, b); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("of a closed tensor: %v, want torch.ErrClosed", err)
	}
}
