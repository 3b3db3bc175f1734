package torch

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/settle"
)

// recorder is a capturer without a GPU: a replay counts, a capture runs the function. Its fields
// make calls fail.
type recorder struct {
	captured, open, replays int
	shared                  int
	emptied                 int
	stale                   bool // the next replay reports a moved tensor
	refuse                  error
	inside                  bool
}

type recorded struct{ r *recorder }

func (g *recorded) Close() error { g.r.open--; return nil }

func (r *recorder) captures(cuda.Device) bool { return true }

func (r *recorder) begin(_ cuda.Device, fn func() error) error {
	if r.inside {
		return errors.New("two calls at once")
	}
	r.inside = true
	defer func() { r.inside = false }()
	return fn()
}

func (r *recorder) capture(_ cuda.Device, share replayer, fn func() error) (replayer, error) {
	if err := fn(); err != nil {
		return nil, err
	}
	if r.refuse != nil {
		return nil, r.refuse
	}
	if share != nil {
		r.shared++
	}
	r.captured++
	r.open++
	return &recorded{r}, nil
}

func (r *recorder) makeRoom(_ cuda.Device, needed bool) error {
	if needed {
		r.emptied++
	}
	return nil
}

func (r *recorder) replay(replayer, cuda.Device) error {
	if r.stale {
		r.stale = false
		return stale("a parameter")
	}
	r.replays++
	return nil
}

func (r *recorder) publish(cuda.Device, []*Tensor) error { return nil }

func (r *recorder) close() error { return nil }

func graphed(fn func([]*Tensor) ([]*Tensor, error), o GraphedOptions) (*Graphed, *recorder) {
	g, r := NewGraphed(fn, o), &recorder{}
	g.on = r
	return g, r
}

func double(in []*Tensor) ([]*Tensor, error) { return []*Tensor{in[0].MulScalar(2)}, nil }

func vector(t *testing.T, n int) *Tensor {
	t.Helper()
	x, err := Ones(cuda.CPU, Float32, int64(n))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

func TestGraphedCapturesForEachKindOfArgument(t *testing.T) {
	g, r := graphed(double, GraphedOptions{})
	defer g.Close()
	call := func(x *Tensor) {
		t.Helper()
		if _, err := g.Call(x); err != nil {
			t.Fatal(err)
		}
	}
	x := vector(t, 4)
	s := NewScope("other handles")
	defer s.Close()
	for range 3 {
		call(x)
	}
	call(x.In(s)) // another handle to the same tensor
	if r.captured != 1 || r.replays != 3 {
		t.Fatalf("%d captures and %d replays, want 1, 3", r.captured, r.replays)
	}
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	n := 1
	for name, y := range map[string]*Tensor{
		"another address":     vector(t, 4),
		"another shape":       x.NoGrad().View(2, 2).In(s),
		"other strides":       x.NoGrad().View(2, 2).T().In(s),
		"an offset":           x.NoGrad().Narrow(0, 1, 3).In(s),
		"another dtype":       x.NoGrad().ToDType(Float64).In(s),
		"requiring gradients": x,
		"without gradients":   x.NoGrad(),
	} {
		t.Run(name, func(t *testing.T) {
			n++
			call(y)
			if r.captured != n {
				t.Errorf("%d captures after the first call, want %d", r.captured, n)
			}
			call(y)
			if r.captured != n {
				t.Errorf("%d captures after the second call, want %d", r.captured, n)
			}
		})
	}
	if _, err := g.Call(x, x); err != nil || r.captured != n+1 {
		t.Errorf("another argument: %v, want %v, nil", err, n+1)
	}
	captures := int64(n + 1)
	want := GraphedStats{Calls: 2*captures + 1, Hits: captures + 1, Eager: captures, Captures: captures,
		Evicted: max(0, captures-8), Graphs: int(min(8, captures))}
	if g.Stats() != want {
		t.Errorf("got %+v, want %+v", g.Stats(), want)
	}
	if r.shared != n {
		t.Errorf("%d of %d later graphs share memory, want all", r.shared, n)
	}
}

// Results of a call without a graph end with the scope of the arguments, before the next call.
func TestGraphedKeepsNoResultsOfAScope(t *testing.T) {
	g, _ := graphed(double, GraphedOptions{})
	defer g.Close()
	x := vector(t, 2)
	live := settle.Wait(t, LiveTensors)
	for range 2 {
		scope := NewScope("call")
		results, err := g.CallEager(scope.Own(x.Keep()))
		if err != nil {
			t.Fatal(err)
		}
		if got, err := results[0].Float64s(); err != nil || !slices.Equal(got, []float64{2, 2}) {
			t.Errorf("%v, %v, want 2 and 2", got, err)
		}
		scope.Close()
		if kept := LiveTensors() - live; kept != 0 {
			t.Errorf("%d tensors are kept, want none", kept)
		}
	}
}

func TestGraphedIsBounded(t *testing.T) {
	g, r := graphed(double, GraphedOptions{MaxGraphs: 2})
	a, b, c := vector(t, 1), vector(t, 2), vector(t, 3)
	live := settle.Wait(t, LiveTensors)
	for _, x := range []*Tensor{a, b, a, c, a, b} { // c replaces b, b replaces c
		if _, err := g.Call(x); err != nil {
			t.Fatal(err)
		}
		if r.open > 2 {
			t.Fatalf("%d graphs, want at most 2", r.open)
		}
	}
	if want := (GraphedStats{Calls: 6, Hits: 2, Eager: 4, Captures: 4, Evicted: 2, Graphs: 2}); g.Stats() != want {
		t.Errorf("got %+v, want %+v", g.Stats(), want)
	}
	if kept := LiveTensors() - live; kept != 3 {
		t.Errorf("%d tensors are kept, want 3: one per graph and one of the last eager call", kept)
	}
	for range 2 {
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if r.open != 0 || LiveTensors() != live {
		t.Errorf("%d graphs and %d tensors after Close, want 0, 0", r.open, LiveTensors()-live)
	}
	if _, err := g.Call(a); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: got %v, want ErrClosed", err)
	}
}

// If the arguments of each call are new, each call captures. The cache is emptied a few times, and
// the memory of WarmOnce stays bounded.
func TestGraphedOfEndlessArgumentsIsBounded(t *testing.T) {
	for _, once := range []bool{false, true} {
		g, r := graphed(double, GraphedOptions{MaxGraphs: 3, WarmOnce: once})
		for n := range 2 * maxWarmed {
			x, err := Ones(cuda.CPU, Float32, int64(n+1))
			if err == nil {
				_, err = g.Call(x)
			}
			if err := errors.Join(err, x.Close()); err != nil {
				t.Fatal(err)
			}
		}
		if r.captured != 2*maxWarmed || r.emptied != 3 {
			t.Errorf("WarmOnce %v: %d captures, the cache was emptied %d times, want 3", once, r.captured, r.emptied)
		}
		if n := len(g.warmed); n > maxWarmed || once && n == 0 {
			t.Errorf("WarmOnce %v: %d kinds of arguments are remembered, want at most %d", once, n, maxWarmed)
		}
		g.Close()
	}
}

// With WarmOnce, only the call that runs the function before its capture empties the cache.
func TestGraphedWarmOnceEmptiesTheCacheOnce(t *testing.T) {
	g, r := graphed(double, GraphedOptions{WarmOnce: true})
	defer g.Close()
	for range 4 {
		if _, err := g.Call(vector(t, 4)); err != nil {
			t.Fatal(err)
		}
	}
	if r.captured != 4 || r.emptied != 1 {
		t.Errorf("%d captures, the cache was emptied %d times, want 4 and 1", r.captured, r.emptied)
	}
}

func TestGraphedFollowsItsOptions(t *testing.T) {
	runs := 0
	count := func(in []*Tensor) ([]*Tensor, error) { runs++; return double(in) }
	x, y := vector(t, 2), vector(t, 2)

	g, r := graphed(count, GraphedOptions{Warmup: 3})
	defer g.Close()
	for i := range 5 {
		if _, err := g.Call(x); err != nil {
			t.Fatal(err)
		}
		if want := min(i+1, 3) + max(0, min(1, i-1)); runs != want {
			t.Errorf("call %d: the function has run %d times, want %d", i+1, runs, want)
		}
	}
	if r.captured != 1 || r.replays != 2 {
		t.Errorf("%d captures, %d replays, want 1, 2", r.captured, r.replays)
	}

	g, r = graphed(count, GraphedOptions{ReplayFirst: true})
	defer g.Close()
	first, err := g.Call(x)
	if err != nil || r.replays != 1 {
		t.Fatalf("%d replays, %v, want 1, nil", r.replays, err)
	}
	again, err := g.Call(x)
	if err != nil || again[0] != first[0] {
		t.Errorf("the first call did not return the graph's results: %v, want %v, nil", err, first[0])
	}

	g, r = graphed(count, GraphedOptions{FixedArguments: true})
	defer g.Close()
	if _, err := g.Call(x); err != nil {
		t.Fatal(err)
	}
	_, err = g.Call(y)
	if !errors.Is(err, cuda.ErrStale) ||
		!strings.Contains(err.Error(), "argument 1 is float32[2] cpu at 0x") || r.captured != 1 {
		t.Errorf("another address: got %v, want ErrStale with the argument", err)
	}
	if _, err := g.Call(x, y); !errors.Is(err, cuda.ErrStale) || !strings.Contains(err.Error(), "2 arguments") {
		t.Errorf("more arguments: got %v, want ErrStale", err)
	}
	r.stale = true
	if _, err := g.Call(x); !errors.Is(err, cuda.ErrStale) {
		t.Errorf("a parameter that moved: got %v, want ErrStale", err)
	}
	if _, err := g.Call(x); err != nil || r.captured != 1 {
		t.Errorf("the first arguments again: %v, want 1, nil", err)
	}
}

func TestGraphedCapturesAgainWhenSomethingMoved(t *testing.T) {
	g, r := graphed(double, GraphedOptions{})
	defer g.Close()
	x := vector(t, 2)
	for i := range 4 {
		r.stale = i == 2
		out, err := g.Call(x)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := out[0].Float32s(); err != nil || v[1] != 2 {
			t.Errorf("got %v, %v, want 2, nil", v, err)
		}
	}
	if want := (GraphedStats{Calls: 4, Hits: 2, Eager: 2, Captures: 2, Stale: 1, Graphs: 1}); g.Stats() != want {
		t.Errorf("got %+v, want %+v", g.Stats(), want)
	}
}

// Another goroutine may move a tensor between the capture and the first replay, in the same call.
func TestGraphedServesACallWhoseGraphIsStaleAtOnce(t *testing.T) {
	for _, o := range []GraphedOptions{{ReplayFirst: true}, {WarmOnce: true}, {WarmOnce: true, ReplayFirst: true}} {
		runs, movedIn, factor := 0, 0, 2.0
		var g *Graphed
		var r *recorder
		g, r = graphed(func(in []*Tensor) ([]*Tensor, error) {
			if runs++; runs == movedIn {
				r.stale, factor = true, 3
			}
			return []*Tensor{in[0].MulScalar(factor)}, nil
		}, o)
		x, y := vector(t, 2), vector(t, 2)
		call := func(x *Tensor) float32 {
			t.Helper()
			out, err := g.Call(x)
			if err != nil {
				t.Fatalf("%+v: got the error %v, want none", o, err)
			}
			v, err := out[0].Float32s()
			if err != nil {
				t.Fatal(err)
			}
			return v[0]
		}
		call(x) // runs 1, and 2 in the capture
		movedIn = 4
		if o.WarmOnce {
			movedIn = 3 // y needs no run before the capture
		}
		first := call(y)
		if want := map[bool]float32{true: 3, false: 2}[o.WarmOnce]; first != want {
			t.Errorf("%+v: got %v, want %v", o, first, want)
		}
		for _, x := range []*Tensor{x, y, x, y} {
			if v := call(x); v != 3 {
				t.Errorf("%+v: a later call got %v, want 3", o, v)
			}
		}
		if s := g.Stats(); s.Stale != 2 || s.Graphs != 2 || r.open != 2 {
			t.Errorf("%+v: got %+v and %d open graphs, want 2 stale and 2 open ones", o, s, r.open)
		}
		if err := g.Close(); err != nil {
			t.Error(err)
		}
	}
	g, r := graphed(double, GraphedOptions{ReplayFirst: true, FixedArguments: true})
	defer g.Close()
	r.stale = true
	if _, err := g.Call(vector(t, 2)); !errors.Is(err, cuda.ErrStale) {
		t.Errorf("with FixedArguments: got the error %v, want ErrStale", err)
	}
}

// A stale graph's tensors are usually the other graphs' too, and these would keep them in memory.
func TestGraphedDropsAllGraphsIfOneIsStale(t *testing.T) {
	g, r := graphed(double, GraphedOptions{ReplayFirst: true})
	defer g.Close()
	all := []*Tensor{vector(t, 1), vector(t, 2), vector(t, 3)}
	for _, x := range all {
		if _, err := g.Call(x); err != nil {
			t.Fatal(err)
		}
	}
	r.stale = true
	if _, err := g.Call(all[1]); err != nil {
		t.Fatal(err)
	}
	if s := g.Stats(); s.Stale != 3 || s.Graphs != 1 || r.open != 1 {
		t.Errorf("got %+v and %d open graphs, want 3 stale ones and 1 open", s, r.open)
	}
}

func TestGraphedReturnsErrors(t *testing.T) {
	x := vector(t, 2)
	live := settle.Wait(t, LiveTensors)
	broken := errors.New("broken")
	fails := true
	g, r := graphed(func(in []*Tensor) ([]*Tensor, error) {
		if fails {
			return nil, broken
		}
		return []*Tensor{in[0].Square(), in[0].Add(in[1])}, nil
	}, GraphedOptions{})
	if _, err := g.Call(x, x); !errors.Is(err, broken) {
		t.Errorf("the function fails: got %v, want its error", err)
	}
	fails = false
	r.refuse = fmt.Errorf("aten::nonzero: %w", cuda.ErrCapture)
	if _, err := g.Call(x, x); !errors.Is(err, cuda.ErrCapture) {
		t.Errorf("the capture fails: got %v, want ErrCapture", err)
	}
	r.refuse = nil
	if _, err := g.Call(x, x); err != nil || r.captured != 1 {
		t.Errorf("the next capture: %v, %d captures, want nil, 1", err, r.captured)
	}
	if _, err := g.Call(x, nil); !errors.Is(err, cuda.ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "argument 2") {
		t.Errorf("nil: %v, want cuda.ErrInvalidArgument with \"argument 2\"", err)
	}
	if _, err := g.Call(x, Fail("x", broken)); !errors.Is(err, broken) {
		t.Errorf("a failed argument: %v, want %v", err, broken)
	}
	g.Close()
	if LiveTensors() != live {
		t.Errorf("%d tensors remain, want 0", LiveTensors()-live)
	}
	var none *Graphed
	if _, err := none.Call(x); !errors.Is(err, cuda.ErrInvalidArgument) || none.Close() != nil ||
		none.Stats() != (GraphedStats{}) {
		t.Errorf("a nil Graphed: %v, want cuda.ErrInvalidArgument, Close without an error and zero Stats",
			err)
	}
	if _, err := NewGraphed(nil, GraphedOptions{}).Call(x); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("no function: %v, want cuda.ErrInvalidArgument", err)
	}
}

func TestGraphedResultsJoinTheArgumentsScope(t *testing.T) {
	g, _ := graphed(double, GraphedOptions{})
	defer g.Close()
	x := vector(t, 2)
	for range 3 {
		turn := NewScope("turn")
		out, err := g.Call(x.In(turn))
		if err != nil || out[0].Scope() != turn {
			t.Fatalf("Call = %v, %v, want results in %v, nil", out, err, turn)
		}
		sum := out[0].Sum()
		turn.Close()
		if _, err := sum.Float64(); !errors.Is(err, ErrClosed) {
			t.Errorf("after the end of the scope: got %v, want ErrClosed", err)
		}
	}
	out, err := g.Call(x)
	if err != nil {
		t.Fatal(err)
	}
	if v, err := out[0].Float32s(); err != nil || v[0] != 2 || out[0].RequiresGrad() {
		t.Errorf("got %v, %v", v, err)
	}
}

// On the CPU there are no graphs.
func TestGraphedRunsTheFunctionOnTheCPU(t *testing.T) {
	g := NewGraphed(double, GraphedOptions{})
	defer g.Close()
	x := vector(t, 2)
	for i := range 3 {
		out, err := g.Call(x)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := out[0].Float32s(); err != nil || v[0] != float32(int(2)<<i) {
			t.Errorf("got %v, %v", v, err)
		}
		x.MulScalar_(2)
	}
	if want := (GraphedStats{Calls: 3, Eager: 3}); g.Stats() != want {
		t.Errorf("got %+v, want %v", g.Stats(), want)
	}
}

func TestGraphedFromManyGoroutines(t *testing.T) {
	g, r := graphed(double, GraphedOptions{MaxGraphs: 3})
	defer g.Close()
	var all sync.WaitGroup
	for n := range 6 {
		x := vector(t, n+1)
		all.Go(func() {
			for range 50 {
				turn := NewScope("turn")
				if _, err := g.Call(x.In(turn)); err != nil {
					t.Error(err)
				}
				turn.Close()
				g.Stats()
			}
		})
	}
	all.Wait()
	if s := g.Stats(); s.Calls != 300 || s.Hits+s.Eager != 300 || s.Graphs != r.open || r.open > 3 {
		t.Errorf("got %+v, and %d graphs are open", s, r.open)
	}
}

// A call does not close its arguments. This also holds for arguments without a scope, which In
// would give to the call's scope.
func TestGraphedLeavesItsArgumentsOpen(t *testing.T) {
	g, _ := graphed(double, GraphedOptions{})
	defer g.Close()
	x := vector(t, 4).AddScalar(1)
	defer x.Close()
	for range 3 {
		if _, err := g.Call(x); err != nil {
			t.Fatal(err)
		}
	}
	if got, err := x.Float64s(); err != nil || got[0] != 2 {
		t.Errorf("after the calls: %v, %v, want 2, nil", got, err)
	}
}

// With Fallback a function that cannot be captured runs at every call, and its results equal the
// run's. Other errors stay errors.
func TestGraphedFallback(t *testing.T) {
	g, r := graphed(double, GraphedOptions{Fallback: true})
	defer g.Close()
	r.refuse = cuda.ErrCapture
	x := vector(t, 2)
	for range 3 {
		out, err := g.Call(x)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := out[0].Float64s(); err != nil || v[0] != 2 {
			t.Fatalf("%v, %v, want 2, nil", v, err)
		}
	}
	if s := g.Stats(); s.Eager != 3 || s.Captures != 0 || s.Hits != 0 || !errors.Is(s.Refused, cuda.ErrCapture) {
		t.Errorf("%+v, want Eager 3, Captures 0, Hits 0, cuda.ErrCapture", s)
	}
	r.refuse = cuda.ErrOutOfMemory
	if _, err := g.Call(vector(t, 3)); !errors.Is(err, cuda.ErrOutOfMemory) {
		t.Error(err)
	}
	strict, r := graphed(double, GraphedOptions{})
	defer strict.Close()
	r.refuse = cuda.ErrCapture
	if _, err := strict.Call(x); !errors.Is(err, cuda.ErrCapture) {
		t.Error(err)
	}
}

// CallEager captures nothing, and its results are handled like Call's.
func TestGraphedCallEager(t *testing.T) {
	g, r := graphed(double, GraphedOptions{})
	scope := NewScope("batch")
	defer scope.Close()
	x := vector(t, 2)
	for _, in := range []*Tensor{x, x.In(scope)} {
		out, err := g.CallEager(in)
		if err != nil {
			t.Fatal(err)
		}
		if v, err := out[0].Float64s(); err != nil || v[0] != 2 || out[0].Scope() != in.Scope() {
			t.Errorf("%v of %v, %v, want 2, %v, nil", v, out[0].Scope().Name(), err, in.Scope())
		}
	}
	if s := g.Stats(); r.captured != 0 || s.Eager != 2 || s.Calls != 2 {
		t.Errorf("%d captures, %+v, want 0, Eager 2, Calls 2", r.captured, s)
	}
	if _, err := g.CallEager(nil); err == nil {
		t.Error("CallEager(nil): got no error, want one")
	}
	g.Close()
	if _, err := g.CallEager(x); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
}

// The arguments of two calls differ only in their addresses. With WarmOnce, only the first of the
// two calls runs the function before its capture. Each call has one effect, and a stale graph
// starts anew.
func TestGraphedWarmOnce(t *testing.T) {
	runs := 0
	g, r := graphed(func(in []*Tensor) ([]*Tensor, error) { runs++; return double(in) },
		GraphedOptions{WarmOnce: true, Fallback: true})
	defer g.Close()
	call := func(x *Tensor) {
		t.Helper()
		if out, err := g.Call(x); err != nil || len(out) != 1 {
			t.Fatal(out, err)
		}
	}
	a, b, c, other := vector(t, 2), vector(t, 2), vector(t, 2), vector(t, 3)
	want := func(what string, captured, replays, ran int, s GraphedStats) {
		t.Helper()
		got := g.Stats()
		got.Refused = nil
		if r.captured != captured || r.replays != replays || runs != ran || got != s {
			t.Errorf("%s: %d captures, %d replays, %d runs, %+v, want %v, %v, %v, %v",
				what, r.captured, r.replays, runs, got, captured, replays, ran, s)
		}
	}
	call(a) // runs, and runs again in the capture
	call(b)
	call(b)
	want("two addresses", 2, 2, 3, GraphedStats{Calls: 3, Hits: 2, Eager: 1, Captures: 2, Graphs: 2})
	call(other)
	want("another shape", 3, 2, 5, GraphedStats{Calls: 4, Hits: 2, Eager: 2, Captures: 3, Graphs: 3})
	r.stale = true
	call(a)
	want("a stale graph", 4, 2, 7, GraphedStats{Calls: 5, Hits: 2, Eager: 3, Captures: 4, Stale: 3, Graphs: 1})
	r.refuse = cuda.ErrCapture
	call(c) // fails to capture, and runs
	want("a refused capture", 4, 2, 9, GraphedStats{Calls: 6, Hits: 2, Eager: 4, Captures: 4, Stale: 3, Graphs: 1})
	call(c)
	want("without a graph", 4, 2, 10, GraphedStats{Calls: 7, Hits: 2, Eager: 5, Captures: 4, Stale: 3, Graphs: 1})
}
