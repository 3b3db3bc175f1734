package torch_test

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// register fails the test if a registration does.
func register(t *testing.T, h *torch.Hook, err error) *torch.Hook {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Remove)
	return h
}

func backward(t *testing.T, loss *torch.Tensor) {
	t.Helper()
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
}

func wantGrad(t *testing.T, w *torch.Tensor, want ...float64) {
	t.Helper()
	g := w.Grad()
	if g == nil {
		t.Fatalf("no gradient, want %v", want)
	}
	defer g.Close()
	wantValues(t, g, want...)
}

func TestHooksChangeGradientsInTheirOrder(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	var seen []float64
	see := func(g *torch.Tensor) (*torch.Tensor, error) {
		v, err := g.Float64s()
		seen = append(seen, v...)
		return nil, err
	}
	double := func(g *torch.Tensor) (*torch.Tensor, error) { return g.MulScalar(2), nil }
	for _, hook := range []func(*torch.Tensor) (*torch.Tensor, error){see, double, see} {
		h, err := w.RegisterHook(hook)
		register(t, h, err)
	}
	for range 2 {
		backward(t, w.Square().Sum())
	}
	wantGrad(t, w, 8, 16)
	if want := []float64{2, 4, 4, 8, 2, 4, 4, 8}; fmt.Sprint(seen) != fmt.Sprint(want) {
		t.Errorf("the hooks saw %v, want %v", seen, want)
	}
}

// A hook on a result changes the gradient that is passed on, and so does a hook on each of several
// results.
func TestHooksOnResults(t *testing.T) {
	w := leaf(t, []float32{1, 2, 3, 4}, 2, 2)
	halves, err := w.Chunk(2, 0)
	if err != nil {
		t.Fatal(err)
	}
	for i, half := range halves {
		defer half.Close()
		h, err := half.RegisterHook(func(g *torch.Tensor) (*torch.Tensor,
			error) {
			return g.MulScalar(float64(10 * (i + 1))), nil
		})
		register(t, h, err)
	}
	backward(t, halves[0].Add(halves[1]).Sum())
	wantGrad(t, w, 10, 10, 20, 20)

	// Grad returns the result's own gradient, changed unless the pass continues to another input.
	x := leaf(t, []float32{3})
	y := x.Square()
	defer y.Close()
	h, err := y.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) { return g.MulScalar(5), nil })
	register(t, h, err)
	for _, c := range []struct {
		inputs []*torch.Tensor
		want   []float64
	}{
		{[]*torch.Tensor{y}, []float64{5}},
		{[]*torch.Tensor{x}, []float64{30}},
		{[]*torch.Tensor{y, x}, []float64{1, 30}},
	} {
		found, err := torch.Grad([]*torch.Tensor{y.Sum()}, c.inputs, torch.GradOptions{RetainGraph: true})
		if err != nil {
			t.Fatal(err)
		}
		for i, g := range found {
			wantValues(t, g, c.want[i])
			g.Close()
		}
	}
}

func TestPostAccumulateGradHooks(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	calls := 0
	h, err := w.RegisterPostAccumulateGradHook(func(p *torch.Tensor) error {
		calls++
		wantGrad(t, p, 2*float64(calls)*1, 2*float64(calls)*2)
		return nil
	})
	register(t, h, err)
	backward(t, w.Square().Sum())
	backward(t, w.Square().Sum())
	found, err := torch.Grad([]*torch.Tensor{w.Square().Sum()}, []*torch.Tensor{w}, torch.GradOptions{})
	if err != nil {
		t.Fatal(err)
	}
	found[0].Close()
	if calls != 2 {
		t.Errorf("%d calls, want 2: Grad accumulates nothing", calls)
	}
	y := w.Square()
	defer y.Close()
	if _, err := y.RegisterPostAccumulateGradHook(func(*torch.Tensor) error { return nil }); !errors.Is(err,
		cuda.ErrInvalidArgument) {
		t.Errorf("on a result: got %v, want ErrInvalidArgument", err)
	}
}

// An optimizer's step inside of backward: no gradient outlives its hook.
func TestStepInAHook(t *testing.T) {
	w := leaf(t, []float32{4})
	h, err := w.RegisterPostAccumulateGradHook(func(p *torch.Tensor) error {
		if err := p.NoGrad().Sub_(p.Grad().MulScalar(0.25)).Err(); err != nil {
			return err
		}
		return p.SetGrad(nil)
	})
	register(t, h, err)
	for range 3 {
		backward(t, w.Square().Sum())
	}
	wantValues(t, w, 0.5)
	if g := w.Grad(); g != nil {
		t.Errorf("Grad() after the hook's SetGrad(nil) = %v, want nil", g)
	}
}

func TestRemovedHooksAreNotCalled(t *testing.T) {
	before := liveCallbacks(t)
	w := leaf(t, []float32{1})
	var hooks [3]*torch.Hook
	var calls [3]int
	for i := range hooks {
		h, err := w.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
			calls[i]++
			hooks[i].Remove() // each removes itself while it runs
			return nil, nil
		})
		hooks[i] = register(t, h, err)
	}
	hooks[1].Remove()
	hooks[1].Remove()
	backward(t, w.Square().Sum())
	backward(t, w.Square().Sum())
	if calls != [3]int{1, 0, 1} {
		t.Errorf("calls %v, want [1 0 1]", calls)
	}
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left, want 0", n-before)
	}
	if _, err := w.RegisterHook(nil); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a nil hook: %v, want cuda.ErrInvalidArgument", err)
	}
	constant := floats(t, []float32{1})
	if _, err := constant.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
		return nil,
			nil
	}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("on a constant: %v, want cuda.ErrInvalidArgument", err)
	}
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left of registrations that failed, want 0", n-before)
	}
}

// The Go function is released with the tensor, or with the graph node, that it is registered on.
func TestHooksEndWithTheirTensor(t *testing.T) {
	before := liveCallbacks(t)
	nothing := func(*torch.Tensor) (*torch.Tensor, error) { return nil, nil }
	w, err := torch.Ones(cuda.CPU, torch.Float32, 2)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("step")
	y := w.In(scope).Square()
	for _, x := range []*torch.Tensor{w, y} {
		if _, err := x.RegisterHook(nothing); err != nil {
			t.Fatal(err)
		}
	}
	if n := capi.LiveCallbacks() - before; n != 2 {
		t.Fatalf("%d callbacks, want 2", n)
	}
	scope.Close()
	if n := capi.LiveCallbacks() - before; n != 1 {
		t.Errorf("%d callbacks after the end of the result's scope, want 1", n)
	}
	w.Close()
	if n := capi.LiveCallbacks() - before; n != 0 {
		t.Errorf("%d callbacks after the end of the leaf, want 0", n)
	}
}

var errPlanned = errors.New("planned")

func TestBackwardReturnsErrorsOfHooks(t *testing.T) {
	live := settled(t)
	for name, c := range map[string]struct {
		fail func() (*torch.Tensor, error)
		is   error
		says string
	}{
		"error": {func() (*torch.Tensor, error) { return nil, fmt.Errorf("no: %w", errPlanned) },
			errPlanned, "no: planned"},
		"panic":      {func() (*torch.Tensor, error) { panic("boom") }, nil, "panic at "},
		"panicError": {func() (*torch.Tensor, error) { panic(errPlanned) }, errPlanned, "planned"},
		"nil": {func() (*torch.Tensor, error) { var h *struct{ x *torch.Tensor }; return h.x, nil },
			nil, "nil pointer dereference"},
		"failed": {func() (*torch.Tensor, error) { return torch.Fail("Mine", errPlanned), nil },
			errPlanned, "Mine"},
		"shape": {func() (*torch.Tensor, error) {
			x,
				err := torch.Ones(cuda.CPU, torch.Float32, 3)
			return x, err
		}, cuda.ErrInvalidArgument, "another shape"},
		"dtype": {func() (*torch.Tensor, error) {
			x,
				err := torch.Ones(cuda.CPU, torch.Float64, 1)
			return x, err
		}, cuda.ErrInvalidArgument, "another dtype"},
	} {
		t.Run(name, func(t *testing.T) {
			w := leaf(t, []float32{1})
			var made *torch.Tensor
			h, err := w.RegisterHook(func(*torch.Tensor) (x *torch.Tensor, err error) {
				made, err = c.fail()
				return made, err
			})
			file, line := here(t)
			register(t, h, err)
			err = w.Square().Sum().Backward()
			made.Close()
			if err == nil {
				t.Fatalf("Backward() = nil, want the hook's error %v", c.is)
			}
			if c.is != nil && !errors.Is(err, c.is) {
				t.Errorf("%v is not %v", err, c.is)
			}
			var e *torch.Error
			if !errors.As(err, &e) || e.Op != "Backward" {
				t.Errorf("%v is not an error of Backward", err)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %q, want it to contain %q", err, c.says)
			}
			// A refused result is found after the hook's call.
			if place := fmt.Sprintf("%s:%d", file, line-4); c.is != cuda.ErrInvalidArgument &&
				!strings.Contains(err.Error(), place) {
				t.Errorf("%q does not name the registration at %s", err, place)
			}
			h.Remove()
			backward(t, w.Square().Sum()) // the next pass works
			wantGrad(t, w, 2)
		})
	}
	if n := settled(t); n != live {
		t.Errorf("%d tensors are left, want 0", n-live)
	}
}

// Operators on a gradient are not recorded, unless the pass records them; other operators are, on
// any goroutine.
func TestModesInHooks(t *testing.T) {
	w := leaf(t, []float32{3})
	other := leaf(t, []float32{1})
	for _, create := range []bool{false, true} {
		called := false
		h, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
			called = true
			if got := g.Mul(other).RequiresGrad(); got != create {
				t.Errorf("CreateGraph %v: a product of the gradient requires gradients: %v", create, got)
			}
			done := make(chan bool)
			go func() { done <- g.Mul(other).RequiresGrad() }()
			if got := <-done; got != create {
				t.Errorf("CreateGraph %v, on another goroutine: %v", create, got)
			}
			square := other.Square()
			defer square.Close()
			if !square.RequiresGrad() {
				t.Error("RequiresGrad() of a parameter's square in a hook = false, want true")
			}
			return nil, nil
		})
		register(t, h, err)
		scope := torch.NewScope("pass")
		found, err := torch.Grad([]*torch.Tensor{w.In(scope).Autocast(torch.BFloat16).Square().Sum()},
			[]*torch.Tensor{w}, torch.GradOptions{CreateGraph: create})
		if err != nil || !called {
			t.Fatalf("called %v: %v", called, err)
		}
		for _, g := range found {
			g.Close()
		}
		scope.Close()
		h.Remove()
	}
}

// Tensors that a hook makes end with its call, unless it keeps them.
func TestScopesOfHooks(t *testing.T) {
	w := leaf(t, []float32{3})
	var gone, kept *torch.Tensor
	h, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		gone = g.MulScalar(2)
		kept = gone.Keep()
		return nil, nil
	})
	register(t, h, err)
	backward(t, w.Square().Sum())
	defer kept.Close()
	wantValues(t, kept, 12)
	if _, err := gone.Float64(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("after the hook: got %v, want ErrClosed", err)
	}
}

func TestBackwardInsideOfHooks(t *testing.T) {
	w, v := leaf(t, []float32{3}), leaf(t, []float32{5})
	h, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		scope := g.Scope()
		if err := v.In(scope).Square().Sum().Backward(); err != nil {
			return nil, err
		}
		found, err := torch.Grad([]*torch.Tensor{v.In(scope).Square().Mul(v).Sum()}, []*torch.Tensor{v},
			torch.GradOptions{})
		if err != nil {
			return nil, err
		}
		return found[0], nil
	})
	register(t, h, err)
	backward(t, w.Square().Sum())
	wantGrad(t, v, 10)
	wantGrad(t, w, 75)

	refused, err := v.RegisterPostAccumulateGradHook(func(p *torch.Tensor) error { return w.Square().Sum().Backward() })
	register(t, refused, err)
	if err := v.Square().Sum().Backward(); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "post-accumulate-gradient hook") {
		t.Errorf("in a post-accumulate-gradient hook: %v,"+
			" want cuda.ErrInvalidArgument with \"post-accumulate-gradient hook\"", err)
	}
}

// LibTorch allows passes to nest to a depth of 60 on one thread. Deeper passes continue on other
// threads.
func TestDeepBackwardInsideOfHooks(t *testing.T) {
	const depth = 70
	w := leaf(t, []float32{1})
	level := 0
	var pass func() error
	pass = func() error {
		scope := torch.NewScope("pass")
		defer scope.Close()
		x := w.In(scope).Square()
		h, err := x.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
			if level++; level < depth {
				return nil, pass()
			}
			return nil, nil
		})
		if err != nil {
			return err
		}
		defer h.Remove()
		return x.Sum().Backward()
	}
	if err := pass(); err != nil {
		t.Fatal(err)
	}
	wantGrad(t, w, 2*depth)
}

func TestCallbacksAtTheEndOfBackward(t *testing.T) {
	before := liveCallbacks(t)
	if err := torch.QueueCallback(func() error { return nil }); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("outside of a pass: got %v, want ErrInvalidArgument", err)
	}
	a, b := leaf(t, []float32{1}), leaf(t, []float32{2})
	fail := false
	var order []string
	h, err := a.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
		for _, name := range []string{"first", "second"} {
			err := torch.QueueCallback(func() error {
				order = append(order, name)
				wantGrad(t, a, 2)
				wantGrad(t, b, 4)
				if fail {
					return errPlanned
				}
				return nil
			})
			if err != nil {
				return nil, err
			}
		}
		return nil, nil
	})
	register(t, h, err)
	pass := func() error {
		if err := torch.ClearGrads(a, b); err != nil {
			return err
		}
		return a.Square().Add(b.Square()).Sum().Backward()
	}
	if err := pass(); err != nil {
		t.Fatal(err)
	}
	if fmt.Sprint(order) != "[first second]" {
		t.Errorf("callbacks %v, want \"[first second]\"", order)
	}
	fail = true
	if err := pass(); !errors.Is(err, errPlanned) {
		t.Errorf("got %v, want the callback's error", err)
	}
	h.Remove()
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left, want 0", n-before)
	}
}

// More goroutines than the gates let in run passes whose hooks compute and run passes themselves.
func TestHooksOfManyGoroutines(t *testing.T) {
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			scope := torch.NewScope("goroutine")
			defer scope.Close()
			w, err := torch.Full(cuda.CPU, torch.Float32, 3, 1)
			if err != nil {
				t.Error(err)
				return
			}
			w = scope.Own(w)
			if err := w.SetRequiresGrad(true); err != nil {
				t.Error(err)
				return
			}
			_, err = w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
				in, err := torch.Grad([]*torch.Tensor{w.Square().Sum()}, []*torch.Tensor{w.Square()},
					torch.GradOptions{AllowUnused: true})
				if err != nil || in[0] != nil {
					return nil, errors.Join(err, errors.New("a gradient of what the output does not use"))
				}
				return g.MulScalar(2), nil
			})
			if err != nil {
				t.Error(err)
				return
			}
			for range 10 {
				// The hook's own pass would call the hook of w: its gradient is that of w.Square().
				if err := w.MulScalar(1).Sum().Backward(); err != nil {
					t.Error(err)
					return
				}
			}
			if v, err := w.Grad().Float64(); err != nil || v != 20 {
				t.Errorf("gradient %v, %v, want 20, nil", v, err)
			}
		})
	}
	wg.Wait()
}

func TestOperatorsThatRunBackwardAreRefused(t *testing.T) {
	w := leaf(t, []float32{3})
	loss := w.Square().Sum()
	defer loss.Close()
	if _, err := torch.Call("_backward", loss, []*torch.Tensor{w}); err == nil ||
		!strings.Contains(err.Error(), "call torch.Tensor.Backward instead") {
		t.Errorf("got %v, want an error with \"call torch.Tensor.Backward instead\"", err)
	}
}

// On a GPU hooks run on LibTorch's thread, with the stream of the forward pass.
func TestStreamsOfHooks(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	streams := []cuda.Stream{cudatest.Stream(t, gpu), cudatest.Stream(t, gpu)}
	forward, caller := streams[0], streams[1]
	w := onDevice(t, []float32{3})
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	current := func() cuda.Stream {
		s, err := cuda.GetCurrentCUDAStream(gpu)
		if err != nil {
			t.Error(err)
		}
		return s
	}
	thread := capi.ThreadID()
	saw := map[string]cuda.Stream{}
	threads := map[string]int64{}
	see := func(name string) {
		saw[name], threads[name] = current(), capi.ThreadID()
	}
	scope := torch.NewScope("step")
	defer scope.Close()
	var loss *torch.Tensor
	if err := forward.Wait(cuda.DefaultStream(gpu)); err != nil {
		t.Fatal(err)
	}
	err := cuda.WithStream(forward, func() error {
		y := w.In(scope).Square()
		loss = y.Sum()
		h, err := y.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
			see("result")
			return g.MulScalar(2), torch.QueueCallback(func() error { see("end"); return nil })
		})
		register(t, h, err)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	h, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) { see("leaf"); return nil, nil })
	register(t, h, err)
	h, err = w.RegisterPostAccumulateGradHook(func(w *torch.Tensor) error { see("accumulated"); return nil })
	register(t, h, err)
	if err := caller.Wait(forward); err != nil {
		t.Fatal(err)
	}
	err = cuda.WithStream(caller, func() error {
		thread = capi.ThreadID()
		if err := loss.Backward(); err != nil {
			return err
		}
		wantGrad(t, w, 12)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]cuda.Stream{"result": forward, "leaf": forward,
		"accumulated": forward, "end": caller} {
		if saw[name] != want {
			t.Errorf("%s: current stream %v, want %v", name, saw[name], want)
		}
	}
	for _, name := range []string{"result", "leaf", "accumulated"} {
		if threads[name] == thread || threads[name] == 0 {
			t.Errorf("%s: on thread %d, Backward on %d", name, threads[name], thread)
		}
	}
}

// Hooks on a GPU use the libraries, read values and run backward passes on LibTorch's thread.
func TestWorkInHooksOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	a := onDevice(t, []float32{1, 2, 3, 4}, 2, 2)
	v := onDevice(t, []float32{5})
	for _, x := range []*torch.Tensor{a, v} {
		if err := x.SetRequiresGrad(true); err != nil {
			t.Fatal(err)
		}
	}
	h, err := a.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
		if _, err := g.Float32s(); err != nil {
			return nil, err
		}
		if err := v.In(g.Scope()).Square().Sum().Backward(); err != nil {
			return nil, err
		}
		return g.MatMul(g), nil
	})
	register(t, h, err)
	for range 20 {
		scope := torch.NewScope("step")
		if err := a.In(scope).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
		scope.Close()
	}
	wantGrad(t, a, 40, 40, 40, 40)
	wantGrad(t, v, 200)

	failing, err := a.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) { panic(errPlanned) })
	register(t, failing, err)
	if err := a.Sum().Backward(); !errors.Is(err, errPlanned) {
		t.Errorf("got %v, want the panic of the hook", err)
	}
}

// Registers the first hooks of a tensor on two goroutines at once. Every hook must be called.
func TestHooksOfOneTensorMayBeRegisteredAtOnce(t *testing.T) {
	for range 500 {
		w := leaf(t, []float32{1, 2})
		result := w.Square()
		var waiting, ofLeaf, ofResult, accumulated atomic.Int64
		counting := func(count *atomic.Int64) func(*torch.Tensor) (*torch.Tensor, error) {
			return func(*torch.Tensor) (*torch.Tensor, error) { count.Add(1); return nil, nil }
		}
		add := func() error {
			waiting.Add(1)
			for waiting.Load() < 2 {
				runtime.Gosched()
			}
			_, a := w.RegisterPostAccumulateGradHook(func(*torch.Tensor) error { accumulated.Add(1); return nil })
			_, b := w.RegisterHook(counting(&ofLeaf))
			_, c := result.RegisterHook(counting(&ofResult))
			return errors.Join(a, b, c)
		}
		other := make(chan error)
		go func() { other <- add() }()
		if err := errors.Join(add(), <-other); err != nil {
			t.Fatal(err)
		}
		backward(t, result.Sum())
		if a, b, c := ofLeaf.Load(), ofResult.Load(), accumulated.Load(); a != 2 || b != 2 || c != 2 {
			t.Fatalf("%d hooks of the leaf, %d of the result and %d after accumulation were called, want "+
				"2 of each", a, b, c)
		}
	}
}
