package torch

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// moduleRecorder is a moduleDevice without a GPU. A replay runs the captured function again, and
// copies its results to the memory of the first run, as a graph does.
type moduleRecorder struct {
	recorder
	m       *GraphedModule
	stream  cuda.Stream // the current stream
	follows []string
	outer   bool // the current stream is being captured
}

func (r *moduleRecorder) capturing(cuda.Device) (bool, error) { return r.outer, nil }

func (r *moduleRecorder) follow(_ cuda.Device, last *cuda.Stream) (cuda.Stream, error) {
	if last != nil && *last != r.stream {
		r.follows = append(r.follows, fmt.Sprintf("%v after %v", r.stream, *last))
	}
	return r.stream, nil
}

func (r *moduleRecorder) release(*Tensor, cuda.Stream) error { return nil }

func (r *moduleRecorder) replay(g replayer, d cuda.Device) error {
	if err := r.recorder.replay(g, d); err != nil {
		return err
	}
	e := r.m.entry
	if g == e.forward {
		outputs, recorded := e.outputs, e.recorded
		e.outputs, e.recorded = nil, nil
		err := e.captureForward(r.m.fn)
		for i, t := range e.outputs {
			err = errors.Join(err, outputs[i].CopyFrom(t, CopyOptions{}))
		}
		closeAll(e.outputs)
		closeAll(recorded)
		e.outputs = outputs
		return err
	}
	gradients := e.gradients
	var outputs, given []*Tensor
	for i, t := range e.recorded {
		if e.given[i] != nil {
			outputs, given = append(outputs, t), append(given, e.given[i])
		}
	}
	err := e.captureBackward(outputs, given, r.m.parameters)
	for i, t := range e.gradients {
		if t != nil {
			err = errors.Join(err, gradients[i].CopyFrom(t, CopyOptions{}))
			t.Close()
		}
	}
	e.gradients = gradients
	return err
}

func module(t *testing.T, fn func([]*Tensor) ([]*Tensor, error), parameters []*Tensor,
	o GraphedModuleOptions) (*GraphedModule, *moduleRecorder) {
	t.Helper()
	m := NewGraphedModule(fn, parameters, o)
	r := &moduleRecorder{m: m}
	m.pool.on = r
	t.Cleanup(func() { m.Close() })
	return m, r
}

func trainable(t *testing.T, values ...float32) *Tensor {
	t.Helper()
	w, err := FromFloat32s(values, int64(len(values)))
	if err == nil {
		err = w.SetRequiresGrad(true)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.Close() })
	return w
}

func valuesOf(t *testing.T, x *Tensor) []float32 {
	t.Helper()
	v, err := x.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	return v
}

// affine returns x*w + b and its square, and the sum of x, which has no gradient here.
func affine(w, b *Tensor) func([]*Tensor) ([]*Tensor, error) {
	return func(in []*Tensor) ([]*Tensor, error) {
		y := in[0].Mul(w).Add(b)
		return []*Tensor{y, y.Square(), in[0].Detach().Sum()}, nil
	}
}

// step makes one step of training and returns the losses, the gradient of x, and w.
func step(t *testing.T, forward func(...*Tensor) ([]*Tensor, error), w, b, start *Tensor, n int) string {
	t.Helper()
	scope := NewScope("step")
	defer scope.Close()
	x := scope.Own(start.In(scope).AddScalar(float64(n)).Detach())
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	h := x.MulScalar(2)
	out, err := forward(h)
	if err != nil {
		t.Fatal(err)
	}
	loss := out[0].Sum().Add(out[1].Mean())
	if n%2 == 1 {
		loss = out[1].Sum() // the gradient of out[0] is zeros
	}
	if err := loss.Backward(); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprint(valuesOf(t, loss), valuesOf(t, out[2]), valuesOf(t, x.Grad()),
		valuesOf(t, w.In(scope).Grad()), valuesOf(t, b.In(scope).Grad()))
	if n%3 != 0 { // otherwise the next step adds to the gradients
		for _, p := range []*Tensor{w, b} {
			if err := p.NoGrad().Sub_(p.In(scope).Grad().MulScalar(1e-3)).Err(); err != nil {
				t.Fatal(err)
			}
		}
		if err := ClearGrads(w, b); err != nil {
			t.Fatal(err)
		}
	}
	return text
}

func TestGraphedModuleTrainsAsItsFunction(t *testing.T) {
	capi.ReleaseCallbacks() // callbacks of earlier tests
	before := capi.LiveCallbacks()
	run := func(graph bool) (steps []string) {
		w, b, start := trainable(t, 1, 2, 3), trainable(t, 4, 5, 6), vector(t, 3)
		fn := affine(w, b)
		forward := func(in ...*Tensor) ([]*Tensor, error) { return fn(in) }
		if graph {
			m, r := module(t, fn, []*Tensor{w, b}, GraphedModuleOptions{Warmup: 2})
			forward = m.Forward
			defer func() {
				if s := m.Stats(); s.Calls != 10 || s.Eager != 2 || s.Replays != 8 || s.Backward != 8 ||
					s.Captures != 1 || r.captured != 2 {
					t.Errorf("%+v, %d captures,"+
						" want Calls 10, Eager 2, Replays 8, Backward 8, Captures 1, 2", s, r.captured)
				}
			}()
		}
		for n := range 10 {
			steps = append(steps, step(t, forward, w, b, start, n))
		}
		return steps
	}
	want, got := run(false), run(true)
	for n := range want {
		if want[n] != got[n] {
			t.Errorf("step %d:\n%s, want\n%s", n, got[n], want[n])
		}
	}
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left, want 0", n-before)
	}
}

// passes makes forward and backward passes until the module replays.
func passes(t *testing.T, m *GraphedModule, x *Tensor) {
	t.Helper()
	for n := 0; m.Stats().Replays == 0; n++ {
		if n == 10 {
			t.Fatalf("no replay: %+v", m.Stats())
		}
		scope := NewScope("pass")
		out, err := m.Forward(x.In(scope))
		if err == nil {
			err = out[0].Sum().Backward()
		}
		if err != nil {
			t.Fatal(err)
		}
		scope.Close()
	}
}

func TestGraphedModuleFallsBack(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	m, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{})
	x := vector(t, 3)
	passes(t, m, x)
	s := NewScope("arguments")
	defer s.Close()
	for name, c := range map[string]struct {
		x    *Tensor
		says string
	}{
		"shape": {vector(t, 2),
			"argument 1 is float32[2] cpu with strides [1], and the graph is for float32[3] cpu"},
		"dtype":    {x.In(s).ToDType(Float64), "float64[3]"},
		"autocast": {x.In(s).Autocast(BFloat16), "autocast to bfloat16"},
		"gradient": {trainable(t, 1, 2, 3), "requiring gradients"},
		"NoGrad":   {x.In(s).NoGrad(), "NoGrad"},
	} {
		before := m.Stats()
		out, err := m.Forward(c.x)
		if err != nil {
			t.Fatal(err)
		}
		for _, y := range out {
			defer y.Close()
		}
		after := m.Stats()
		if after.Eager != before.Eager+1 || after.Fallback == nil || !strings.Contains(after.Fallback.Error(), c.says) {
			t.Errorf("%s: %+v, want a fallback that says %q", name, after, c.says)
		}
	}
	r.outer = true
	if out, err := m.Forward(x.In(s)); err != nil || m.Stats().Fallback == nil || !out[0].RequiresGrad() {
		t.Errorf("in a capture: %v, %+v", err, m.Stats())
	}
	r.outer = false
	if _, err := m.Forward(x.In(s)); err != nil || m.Stats().Fallback != nil || m.Stats().Captures != 1 {
		t.Errorf("Forward: %v, %+v, want nil, Fallback nil, Captures 1", err, m.Stats())
	}
	onCPU := NewGraphedModule(affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{})
	defer onCPU.Close()
	for range 5 {
		if _, err := onCPU.Forward(x.In(s)); err != nil {
			t.Fatal(err)
		}
	}
	if st := onCPU.Stats(); st.Eager != 5 || !strings.Contains(st.Fallback.Error(), "graphs are for GPUs") {
		t.Errorf("on the CPU: %+v, want Eager 5 and a Fallback with \"graphs are for GPUs\"", st)
	}
}

func TestGraphedModuleNeedsTheBackwardOfItsLastPass(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	m, _ := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	x := vector(t, 2)
	passes(t, m, x)
	first := NewScope("first")
	out, err := m.Forward(x.In(first))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Forward(x); !errors.Is(err, ErrPendingBackward) {
		t.Errorf("before the backward pass: got %v, want ErrPendingBackward", err)
	}
	if eval, err := m.Forward(x.In(first).NoGrad()); err != nil || eval[0].RequiresGrad() {
		t.Errorf("an evaluation: %v", err)
	}
	loss := out[0].Sum()
	if err := loss.BackwardWith(BackwardOptions{RetainGraph: true}); err != nil {
		t.Fatal(err)
	}
	if err := loss.BackwardWith(BackwardOptions{RetainGraph: true}); err != nil {
		t.Errorf("the same pass again: %v, want no error", err)
	}
	second := NewScope("second")
	if _, err := m.Forward(x.In(second)); err != nil {
		t.Fatal(err)
	}
	if err := loss.Backward(); !errors.Is(err, ErrOverwritten) {
		t.Errorf("after another forward pass: got %v, want ErrOverwritten", err)
	}
	second.Close() // its pass has no backward
	if out, err = m.Forward(x.In(first)); err != nil {
		t.Fatalf("after a pass without backward: %v, want no error", err)
	}
	if _, err := Grad([]*Tensor{out[0].Sum()}, []*Tensor{w},
		GradOptions{CreateGraph: true}); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("CreateGraph: got %v, want ErrInvalidArgument", err)
	}
	loss = out[0].Sum()
	m.Close()
	if err := loss.Backward(); !errors.Is(err, ErrClosed) {
		t.Errorf("Backward after Close: got %v, want ErrClosed", err)
	}
	if _, err := m.Forward(x); !errors.Is(err, ErrClosed) {
		t.Errorf("Forward after Close: got %v, want ErrClosed", err)
	}
	first.Close()
}

func TestGraphedModuleCapturesAgain(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	if err := b.SetRequiresGrad(false); err != nil {
		t.Fatal(err)
	}
	m, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	x := vector(t, 2)
	want := func(captures, stale, open int) {
		t.Helper()
		passes(t, m, x)
		for range 2 {
			scope := NewScope("pass")
			out, err := m.Forward(x.In(scope))
			if err == nil {
				err = out[0].Sum().Backward()
			}
			if err != nil {
				t.Fatal(err)
			}
			scope.Close()
		}
		if s := m.Stats(); s.Captures != int64(captures) || s.Stale != int64(stale) || r.open != open {
			t.Errorf("%+v and %d graphs, want %d captures, %d stale, %d graphs", s, r.open, captures, stale, open)
		}
	}
	want(1, 0, 2)
	r.stale = true // a parameter has other memory
	want(2, 1, 2)
	if err := b.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	want(3, 2, 2)
	if g := b.Grad(); g == nil {
		t.Error("Grad() of an unfrozen parameter = nil, want a gradient")
	} else {
		g.Close()
	}
	m.Close()
	if r.open != 0 {
		t.Errorf("%d graphs are open, want 0", r.open)
	}
}

func TestGraphedModuleThatCannotBeCaptured(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	x := vector(t, 2)
	s := NewScope("pass")
	defer s.Close()
	m, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	r.refuse = &capi.Error{Code: capi.CodeCapture, Origin: "test", Message: "it waits"}
	for range 4 {
		if _, err := m.Forward(x.In(s)); err != nil {
			t.Fatal(err)
		}
	}
	if st := m.Stats(); st.Eager != 4 || !errors.Is(st.Refused, cuda.ErrCapture) || st.Fallback == nil || r.open != 0 {
		t.Errorf("%+v and %d graphs", st, r.open)
	}

	missing, _ := module(t, affine(w, b), []*Tensor{w}, GraphedModuleOptions{Warmup: 1})
	var err error
	for range 2 {
		_, err = missing.Forward(x.In(s))
	}
	if !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "a leaf that is not given") {
		t.Errorf("a parameter that is not listed: %v,"+
			" want cuda.ErrInvalidArgument with \"a leaf that is not given\"", err)
	}

	failing, _ := module(t, func([]*Tensor) ([]*Tensor, error) { return nil, errTest }, []*Tensor{w},
		GraphedModuleOptions{Warmup: 1})
	for range 3 {
		if _, err := failing.Forward(x.In(s)); !errors.Is(err, errTest) {
			t.Errorf("got %v, want the function's error", err)
		}
	}
	panics := 0
	broken, _ := module(t, func(in []*Tensor) ([]*Tensor, error) {
		if panics++; panics == 2 {
			panic(errTest)
		}
		return affine(w, b)(in)
	}, []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	func() {
		defer func() { recover() }()
		for range 2 {
			broken.Forward(x.In(s))
		}
	}()
	for range 2 {
		if _, err := broken.Forward(x.In(s)); err != nil {
			t.Errorf("after a panic in the capture: %v, want no error", err)
		}
	}
	if st := broken.Stats(); st.Replays != 1 {
		t.Errorf("after a panic in the capture: %+v, want Replays 1", st)
	}
}

var errTest = errors.New("test")

func TestGraphedModulesShareAPool(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	x := vector(t, 2)
	live := LiveTensors()
	first, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	passes(t, first, x)
	second := NewGraphedModule(affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1, SharePool: first})
	first.Close()
	r.m = second
	passes(t, second, x)
	if r.captured != 4 || r.shared != 2 || r.open != 2 {
		t.Errorf("%d captures, %d share, %d open, want 4, 2, 2", r.captured, r.shared, r.open)
	}
	second.Close()
	second.Close()
	if r.open != 0 || second.pool.users != 0 {
		t.Errorf("%d graphs and %d users are left, want 0, 0", r.open, second.pool.users)
	}
	if n := LiveTensors(); n > live { // the collector may free tensors of other tests
		t.Errorf("%d tensors are left, want none", n-live)
	}
}

// The graph of an earlier module in the pool may overwrite data that a later module keeps for its
// backward pass. So the earlier module does not replay between the forward and the backward pass of
// the later one.
func TestGraphedModulesOfAPoolDoNotOverwriteEachOther(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	x := vector(t, 2)
	first, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	passes(t, first, x)
	second := NewGraphedModule(affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1, SharePool: first})
	defer second.Close()
	r.m = second
	passes(t, second, x)
	scope := NewScope("test")
	defer scope.Close()
	loss := func(m *GraphedModule) *Tensor {
		r.m = m
		out, err := m.Forward(x.In(scope))
		if err != nil {
			t.Fatal(err)
		}
		return out[0].Sum()
	}
	backward := func(m *GraphedModule, loss *Tensor) error {
		r.m = m
		return loss.Backward()
	}
	late := loss(second)
	before := first.Stats()
	early := loss(first)
	if s := first.Stats(); s.Fallback != errOverwrites || s.Replays != before.Replays || s.Eager != before.Eager+1 {
		t.Errorf("the earlier module while the later one waits: %+v, before %+v,"+
			" want Fallback %v, Replays %v, Eager %v", s, before, errOverwrites, before.Replays, before.Eager+1)
	}
	if err := errors.Join(early.Backward(), backward(second, late)); err != nil {
		t.Error(err)
	}
	early, late = loss(first), loss(second)
	if s := first.Stats(); s.Fallback != nil || s.Replays != before.Replays+1 {
		t.Errorf("the earlier module first: %+v, want Fallback nil, Replays %v", s, before.Replays+1)
	}
	if err := backward(first, early); err != nil {
		t.Error(err)
	}
	if err := backward(second, late); !errors.Is(err, ErrOverwritten) {
		t.Errorf("the later module after a pass of the earlier one: got %v, want ErrOverwritten", err)
	}
	early, late = loss(first), loss(second)
	if err := errors.Join(backward(second, late), backward(first, early)); err != nil {
		t.Error(err)
	}
}

// A call on another stream follows the previous call. Calls on the same stream are in order without
// further waits.
func TestGraphedModuleFollowsItsLastStream(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	m, r := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	x := vector(t, 2)
	passes(t, m, x)
	for _, s := range []cuda.Stream{{}, cuda.DefaultStream(1), cuda.DefaultStream(1), cuda.DefaultStream(2)} {
		r.stream = s
		scope := NewScope("pass")
		if _, err := m.Forward(x.In(scope)); err != nil {
			t.Fatal(err)
		}
		scope.Close()
	}
	if len(r.follows) != 2 {
		t.Errorf("waits: %v, want length 2", r.follows)
	}
}

// Training on one goroutine and evaluation on others.
func TestGraphedModuleBesideEvaluation(t *testing.T) {
	w, b := trainable(t, 1), trainable(t, 2)
	m, _ := module(t, affine(w, b), []*Tensor{w, b}, GraphedModuleOptions{Warmup: 1})
	x := vector(t, 2)
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for range 50 {
				scope := NewScope("evaluation")
				if _, err := m.Forward(x.In(scope).NoGrad()); err != nil {
					t.Error(err)
				}
				m.Stats()
				scope.Close()
			}
		})
	}
	for range 50 {
		scope := NewScope("training")
		out, err := m.Forward(x.In(scope))
		if err == nil {
			err = out[0].Sum().Backward()
		}
		if err != nil {
			t.Error(err)
		}
		scope.Close()
	}
	wg.Wait()
}
