package torch_test

import (
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// The device memory of a loop without a Close is constant, and never exceeds the memory of one
// turn.
func TestDeviceMemoryIsFlat(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	// cuBLAS keeps a workspace (32 MiB on Hopper) for every OS thread that ever multiplied a
	// matrix. On another thread than the warm-up's the loop would allocate one more.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	settled(t)
	data, err := torch.Rand(gpu, torch.Float32, 64, 256)
	must(t, data, err)
	w, err := torch.Rand(gpu, torch.Float32, 256, 256)
	must(t, w, err)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	var first cuda.MemoryStats
	for turn := range 2000 {
		s := torch.NewScope("turn")
		if err := data.In(s).MatMul(w).ReLU().Mean().Backward(); err != nil {
			t.Fatal(err)
		}
		if err := torch.ClearGrads(w); err != nil {
			t.Fatal(err)
		}
		s.Close()
		if turn == 10 {
			if first, err = gpu.Memory(); err != nil {
				t.Fatal(err)
			}
		}
	}
	last, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if last.Allocated != first.Allocated || last.PeakAllocated != first.PeakAllocated ||
		last.Reserved != first.Reserved {
		t.Errorf("turn 2000: %+v, want turn 10's memory: %+v", last, first)
	}
}

// A tensor keeps its scope alive after the program has dropped the Scope itself.
func TestReachableTensorKeepsItsScope(t *testing.T) {
	x := floats(t, []float32{1, 2}).In(torch.NewScope("dropped"))
	for range 5 {
		runtime.GC()
	}
	wantValues(t, x.Add(x), 2, 4)
	runtime.KeepAlive(x)
}

func TestScopeTravelsWithTheData(t *testing.T) {
	old, young := torch.NewScope("old"), torch.NewScope("young")
	defer old.Close()
	w := floats(t, []float32{1, 2})
	a, b := w.In(old), w.In(young)
	for name, c := range map[string]struct {
		x    *torch.Tensor
		want *torch.Scope
	}{
		"none with none":     {w.Add(w), nil},
		"none with old":      {w.Add(a), old},
		"old with none":      {a.Add(w), old},
		"old with young":     {a.Add(b), young},
		"young with old":     {b.Add(a), young},
		"in a list":          {torch.Cat([]*torch.Tensor{w, b, a}, 0), young},
		"marked":             {a.NoGrad().Mul(b), young},
		"optional operand":   {w.Reshape(1, 2).Linear(w.Reshape(1, 2), a.Sum().Reshape(1)), old},
		"kept":               {b.Keep(), nil},
		"kept, then used":    {b.Keep().Add(a), old},
		"in the other scope": {b.In(old), old},
		"a second result":    {func() *torch.Tensor { _, i := b.MaxDim(0, false); return i }(), young},
	} {
		t.Run(name, func(t *testing.T) {
			if err := c.x.Err(); err != nil {
				t.Error(err)
			}
			if got := c.x.Scope(); got != c.want {
				t.Errorf("joined %q, want %q", got.Name(), c.want.Name())
			}
		})
		if c.x.Scope() == nil {
			c.x.Close()
		}
	}
	kept, sum := b.Keep(), b.Sum()
	defer kept.Close()
	owned := young.Own(floats(t, []float32{3}))
	if young.Len() < 3 {
		t.Errorf("the scope owns %d tensors, want at least 3", young.Len())
	}
	for range 2 {
		if err := young.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if young.Len() != 0 {
		t.Errorf("the closed scope owns %d tensors, want 0", young.Len())
	}
	wantValues(t, kept, 1, 2)
	wantValues(t, a, 1, 2)
	for _, x := range []*torch.Tensor{b, sum, owned, b.NoGrad(), young.Own(floats(t, []float32{1}))} {
		if _, err := x.Float32s(); !errors.Is(err, torch.ErrClosed) || !strings.Contains(err.Error(), `"young"`) {
			t.Errorf("after the end of the scope: got %v, want ErrClosed with the scope's name", err)
		}
	}
	if err := a.Add(b).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("an operand of the ended scope: got %v, want ErrClosed", err)
	}
}

func TestScopeFreesEverything(t *testing.T) {
	before := settled(t)
	s := torch.NewScope("many")
	x, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	x = s.Own(x)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			y := x
			for i := range 200 {
				z := y.Add(x)
				if i%3 == 0 && y != x {
					y.Close() // before the scope's Close
				}
				y = z
			}
			if err := y.Err(); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if got := torch.LiveTensors() - before; got != int64(s.Len()) || got < 8*100 {
		t.Errorf("%d references, %d tensors in the scope, want as many, and at least %d",
			got, s.Len(), 8*100)
	}
	s.Close()
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references remain, want 0", live-before)
	}
}

// A long-lived scope does not grow when its tensors are closed individually.
func TestLongScopeDoesNotGrow(t *testing.T) {
	s := torch.NewScope("long")
	defer s.Close()
	x := floats(t, []float32{1}).In(s)
	before := settled(t)
	for range 5000 {
		x.Add(x).Close()
	}
	if live, n := torch.LiveTensors(), s.Len(); live != before || n != 1 {
		t.Errorf("%d more references, and %d tensors in the scope, want 0 and 1", live-before, n)
	}
	wantValues(t, x, 1)
}

// A training loop without a Close holds as many references after 10,000 turns as after one, and
// leaves no tensor to the garbage collector.
func TestTrainingLoopIsFlat(t *testing.T) {
	w, b := leaf(t, []float32{0.5, -0.5, 0.25, 0.1}, 2, 2), leaf(t, []float32{0, 0}, 2)
	data, target := floats(t, []float32{1, 2, 3, 4, 5, 6}, 3, 2), floats(t, make([]float32, 6), 3, 2)
	settled(t)
	caught, after := torch.Caught(), int64(0)
	for turn := range 10_000 {
		scope := torch.NewScope("turn")
		x := data.In(scope)
		loss := x.MatMul(w).Add(b).ReLU().MSELoss(target)
		if err := loss.Backward(); err != nil {
			t.Fatal(err)
		}
		for _, p := range []*torch.Tensor{w, b} {
			g := p.In(scope).Grad()
			if err := p.NoGrad().AddScaled_(g, -0.001).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := torch.ClearGrads(w, b); err != nil {
			t.Fatal(err)
		}
		scope.Close()
		if turn == 0 {
			after = torch.LiveTensors()
		}
	}
	if live := torch.LiveTensors(); live != after {
		t.Errorf("%d references after one turn, %d after 10,000", after, live)
	}
	runtime.GC()
	if got := torch.Caught(); got != caught {
		t.Errorf("%d tensors were left to the garbage collector, want 0", got-caught)
	}
}

// A result of an operator on parameters has no scope. In gives it to the scope, so that an
// expression that ends in In leaves nothing open.
func TestInLeavesNothingBehind(t *testing.T) {
	w := leaf(t, []float32{1, 2, 3, 4}, 2, 2)
	turn := func() {
		s := torch.NewScope("turn")
		defer s.Close()
		row := w.Narrow(0, 0, 1).In(s)
		if err := row.Add(torch.Call1("square", w).In(s)).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
		parts, err := w.NoGrad().Unbind(0)
		if err != nil {
			t.Fatal(err)
		}
		for _, part := range append(parts, w.Grad(), w.NoGrad().Exp().NoGrad()) {
			if err := part.In(s).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := torch.ClearGrads(w); err != nil {
			t.Fatal(err)
		}
	}
	before, caught := settled(t), torch.Caught()
	for range 1000 {
		turn()
	}
	if live := torch.LiveTensors(); live != before {
		t.Errorf("%d references remain, want 0", live-before)
	}
	settled(t)
	if got := torch.Caught(); got != caught {
		t.Errorf("%d tensors were left to the garbage collector, want 0", got-caught)
	}
}

func TestInEndsResultsWithoutAScope(t *testing.T) {
	program := torch.NewScope("program")
	defer program.Close()
	w := floats(t, []float32{1, 2})
	scaled := w.MulScalar(2)
	kept := scaled.Keep()
	defer kept.Close()
	parameter := w.MulScalar(0.5)
	defer parameter.Close()
	if err := parameter.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	owned := program.Own(w.AddScalar(1))
	borrowed := w.AddScalar(3)
	defer borrowed.Close()
	for turn := range 2 {
		s := torch.NewScope("turn")
		for _, x := range []*torch.Tensor{w, kept, parameter, owned} {
			if err := x.In(s).Err(); err != nil {
				t.Errorf("turn %d: %v, want no error", turn, err)
			}
		}
		if err := s.Own(borrowed.Keep()).Err(); err != nil {
			t.Errorf("turn %d: %v, want no error", turn, err)
		}
		if turn == 0 {
			wantValues(t, scaled.In(s), 2, 4)
			wantValues(t, scaled, 2, 4) // until the scope's end
			if n := s.Len(); n != 7 {
				t.Errorf("the scope owns %d tensors, want 7", n)
			}
		}
		s.Close()
	}
	err := scaled.In(program).Err()
	if !errors.Is(err, torch.ErrClosed) || !strings.Contains(err.Error(), `"turn"`) ||
		!strings.Contains(err.Error(), "Own it") {
		t.Errorf("after the end of the scope: got %v, want ErrClosed with the scope's name and what to do", err)
	}
	wantValues(t, kept, 2, 4)
	late := w.MulScalar(3)
	ended := torch.NewScope("ended")
	ended.Close()
	if err := late.In(ended).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("In of an ended scope: got %v, want ErrClosed", err)
	}
	wantValues(t, late, 3, 6)
	late.Close()
}

// A scope that lives long does not grow by results that In gave to it and the program closed.
func TestLongScopeForgetsClosedResults(t *testing.T) {
	s := torch.NewScope("long")
	defer s.Close()
	w := floats(t, []float32{1})
	before := settled(t)
	for range 5000 {
		x := w.Add(w)
		x.In(s).Close()
		x.Close()
	}
	if live, n := torch.LiveTensors(), s.Len(); live != before || n != 0 {
		t.Errorf("%d more references, and %d tensors in the scope, want 0 and 0", live-before, n)
	}
}
