package torch_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// blocks is a network of two blocks, each of which can be a GraphedModule.
type blocks struct {
	t       *testing.T
	weights [2]*torch.Tensor
	forward [2]func(...*torch.Tensor) ([]*torch.Tensor, error)
	modules []*torch.GraphedModule
	hooks   int
	sums    int
}

func newBlocks(t *testing.T, graph bool) *blocks {
	t.Helper()
	if err := torch.ManualSeed(7); err != nil {
		t.Fatal(err)
	}
	b := &blocks{t: t}
	for i := range b.weights {
		w, err := torch.Randn(cuda.CPU, torch.Float32, 64, 64)
		must(t, w, err)
		moved := w.MulScalar(0.1).To(gpu)
		w = moved.Keep()
		moved.Close()
		b.weights[i] = must(t, w, errors.Join(w.Err(), w.SetRequiresGrad(true)))
		fn := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
			y := in[0].MatMul(w).ReLU().Dropout(0.25, true).Add(in[0])
			return []*torch.Tensor{y, y.Square().Mean()}, y.Err()
		}
		b.forward[i] = func(in ...*torch.Tensor) ([]*torch.Tensor, error) { return fn(in) }
		if graph {
			o := torch.GraphedModuleOptions{Warmup: 2}
			if i > 0 {
				o.SharePool = b.modules[0]
			}
			m := torch.NewGraphedModule(fn, []*torch.Tensor{w}, o)
			t.Cleanup(func() { m.Close() })
			b.modules, b.forward[i] = append(b.modules, m), m.Forward
		}
		h, err := w.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
			b.hooks++
			return g.MulScalar(2), nil
		})
		register(t, h, err)
		h, err = w.RegisterPostAccumulateGradHook(func(*torch.Tensor) error { b.sums++; return nil })
		register(t, h, err)
	}
	return b
}

// step makes one step, in the order of the blocks or in the other one, and returns the loss.
func (b *blocks) step(n int, autocast bool) float32 {
	b.t.Helper()
	scope := torch.NewScope("step")
	defer scope.Close()
	x, err := torch.Full(gpu, torch.Float32, 0.01*float64(n+1), 32, 64)
	x = scope.Own(x)
	err = errors.Join(err, x.SetRequiresGrad(true)) // so the inputs of both blocks require gradients
	if autocast {
		x = x.Autocast(torch.BFloat16)
	}
	order := [2]int{0, 1}
	if n%2 == 1 {
		order = [2]int{1, 0}
	}
	h, loss := x, x.Sum().MulScalar(0)
	for _, i := range order {
		out, e := b.forward[i](h)
		if e != nil {
			b.t.Fatal(e)
		}
		h, loss = out[0], loss.Add(out[1])
	}
	loss = loss.Add(h.Mean())
	if err = errors.Join(err, loss.Backward()); err != nil {
		b.t.Fatal(err)
	}
	if n%3 != 0 { // otherwise the next step adds to the gradients
		for _, w := range b.weights {
			err = errors.Join(err, w.NoGrad().Sub_(w.In(scope).Grad().MulScalar(0.1)).Err())
		}
		err = errors.Join(err, torch.ClearGrads(b.weights[:]...))
	}
	value, e := loss.Float64()
	if err = errors.Join(err, e); err != nil {
		b.t.Fatal(err)
	}
	return float32(value)
}

// Two modules in one pool, in both orders, train as they do without graphs: with dropout, hooks,
// gradients that are added over two steps, and under autocast.
func TestGraphedModulesTrainAsWithoutGraphs(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for name, autocast := range map[string]bool{"float32": false, "autocast": true} {
		t.Run(name, func(t *testing.T) {
			const steps = 24
			eager := newBlocks(t, false)
			var want [steps]float32
			for n := range want {
				want[n] = eager.step(n, autocast)
			}
			graphed := newBlocks(t, true)
			var reserved int64
			for n := range want {
				got := graphed.step(n, autocast)
				if d := got - want[n]; d > 1e-2*want[n] || d < -1e-2*want[n] {
					t.Errorf("step %d: loss %v, want %v", n, got, want[n])
				}
				if n == steps/2-1 { // without gradients, as after the last step
					m, err := gpu.Memory()
					if err != nil {
						t.Fatal(err)
					}
					reserved = m.Allocated
				}
			}
			m, err := gpu.Memory()
			if err != nil {
				t.Fatal(err)
			}
			if m.Allocated > reserved+64<<10 { // LibTorch's thread may still free what it used
				t.Errorf("%d bytes after %d steps, %d after %d", m.Allocated, steps, reserved, steps/2)
			}
			tolerance := cudatest.Tolerance{Relative: 2e-2, Absolute: 2e-3}
			for i, w := range graphed.weights {
				cudatest.Equal(t, w, eager.weights[i], tolerance)
			}
			for i, m := range graphed.modules {
				replays := int64(steps - 2)
				// Both modules are captured in a step of the other order, so module 1 is captured
				// first. In the steps of the first order, module 1 then does not replay: module 0
				// waits for its backward.
				if i == 1 {
					replays /= 2
				}
				if s := m.Stats(); s.Captures != 1 || s.Replays != replays || s.Backward != replays ||
					s.Refused != nil {
					t.Errorf("module %d: %+v, want Captures 1, Replays %v, Backward %v, Refused nil",
						i, s, replays, replays)
				}
			}
			if graphed.hooks != 2*steps || graphed.sums != 2*steps {
				t.Errorf("%d and %d calls of hooks, want %d of each", graphed.hooks, graphed.sums, 2*steps)
			}
		})
	}
}

// In a captured function a GraphedModule runs eagerly, as part of that graph.
func TestGraphedModuleInACapture(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := onDevice(t, []float32{3})
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	m := torch.NewGraphedModule(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{in[0].Mul(w)}, nil
	}, []*torch.Tensor{w}, torch.GraphedModuleOptions{Warmup: 1})
	defer m.Close()
	outer := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) { return m.Forward(in...) },
		torch.GraphedOptions{})
	defer outer.Close()
	x := onDevice(t, []float32{5})
	for range 4 {
		out, err := outer.Call(x)
		if err != nil {
			t.Fatal(err)
		}
		wantValues(t, out[0], 15)
	}
	if s := m.Stats(); s.Replays != 0 || s.Fallback == nil ||
		!strings.Contains(s.Fallback.Error(), "is being captured") {
		t.Errorf("%+v", s)
	}
}

// product returns a module that multiplies tensors of an ordering by w, which is 2. Its graphs are
// captured already.
func product(o *ordering) (m *torch.GraphedModule, w *torch.Tensor) {
	w, err := torch.Full(gpu, torch.Float32, 2, 1)
	o.check(err)
	w = o.scope.Own(w)
	o.check(w.SetRequiresGrad(true))
	m = torch.NewGraphedModule(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{in[0].Mul(w)}, nil
	}, []*torch.Tensor{w}, torch.GraphedModuleOptions{Warmup: 1})
	o.t.Cleanup(func() { m.Close() })
	o.check(gpu.Synchronize())
	for n := 0; m.Stats().Replays == 0; n++ {
		if n == 10 {
			o.t.Fatalf("no replay: %+v", m.Stats())
		}
		o.on(o.streams[0], func() error {
			scope := torch.NewScope("warm up")
			defer scope.Close()
			return trained(m, o.src.In(scope)).Err()
		})
	}
	o.check(errors.Join(torch.ClearGrads(w), gpu.Synchronize()))
	return m, w
}

// trained returns the result of a forward pass, after its backward pass.
func trained(m *torch.GraphedModule, x *torch.Tensor) *torch.Tensor {
	out, err := m.Forward(x)
	if err == nil {
		err = out[0].Sum().Backward()
	}
	if err != nil {
		return torch.Fail("trained", err)
	}
	return out[0]
}

// If a call is on another stream than the previous call, whose work has yet to run, its work runs
// after that: neither call uses the other's argument.
func TestGraphedModuleIsOrdered(t *testing.T) {
	o := newOrdering(t)
	m, w := product(o)
	for _, other := range o.others() {
		o.reset()
		o.check(errors.Join(o.dst.Fill_(freshValue).Err(), torch.ClearGrads(w), gpu.Synchronize()))
		o.on(o.streams[0], func() error {
			if err := o.busy(); err != nil {
				return err
			}
			return o.read.CopyFrom(trained(m, o.src.In(o.scope)), torch.CopyOptions{})
		})
		var second []float32
		o.on(other, func() error {
			scope := torch.NewScope("another stream")
			defer scope.Close()
			out, err := m.Forward(o.dst.In(scope))
			if err == nil {
				second, err = out[0].Float32s()
			}
			return err
		})
		o.want("the result of the earlier call", 2*staleValue)
		if second[0] != 2*freshValue || second[orderedElements-1] != 2*freshValue {
			t.Errorf("the result of the later call: %v and %v, want %v", second[0],
				second[orderedElements-1], 2*freshValue)
		}
		g := w.Grad()
		wantValues(t, g, staleValue*orderedElements)
		g.Close()
	}
}

// Close frees the graphs' memory while a replay, and the copies of its results out of that memory,
// are still queued. The next module that is captured in the same pool does not write to this memory
// before the copies are done.
func TestGraphedModuleMayBeClosed(t *testing.T) {
	o := newOrdering(t)
	const parts, elements = 128, 1 << 25
	full := func(value float64, n int64) *torch.Tensor {
		x, err := torch.Full(gpu, torch.Float32, value, n)
		o.check(err)
		return o.scope.Own(x)
	}
	early, late, w := full(staleValue, elements), full(freshValue, elements), full(1, 1)
	o.check(w.SetRequiresGrad(true))
	o.check(gpu.Synchronize()) // the calls are on other streams
	// The results are copied one after the other, for longer than one kernel needs to write the
	// memory of all of them.
	fn := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		rows, err := in[0].MulScalar(2).View(parts, elements/parts).Unbind(0)
		return append([]*torch.Tensor{w.In(in[0].Scope()).MulScalar(2)}, rows...), err
	}
	module := func(share *torch.GraphedModule) *torch.GraphedModule {
		m := torch.NewGraphedModule(fn, []*torch.Tensor{w}, torch.GraphedModuleOptions{Warmup: 1, SharePool: share})
		t.Cleanup(func() { m.Close() })
		return m
	}
	call := func(m *torch.GraphedModule, x *torch.Tensor, scope *torch.Scope) []*torch.Tensor {
		out, err := m.Forward(x.In(scope))
		o.check(err)
		return out
	}
	keeper := module(nil) // of the pool
	for _, other := range o.others()[:3] {
		closed, next := module(keeper), module(keeper)
		scope := torch.NewScope("calls")
		o.on(o.streams[0], func() error {
			warm := torch.NewScope("warm up")
			call(keeper, early, warm)
			call(closed, early, warm)
			warm.Close()
			return gpu.Synchronize()
		})
		var out []*torch.Tensor
		o.on(o.streams[0], func() error {
			cudatest.Delay(t, o.streams[0], 300*time.Millisecond)
			out = call(closed, early, scope)[1:]
			return closed.Close()
		})
		o.on(other, func() error {
			call(next, late, scope)
			call(next, late, scope)
			return nil
		})
		if a, b := closed.Stats(), next.Stats(); a.Replays != 1 || b.Replays != 1 {
			t.Fatalf("no replay: %+v, %+v, want Replays 1, Replays 1", a, b)
		}
		o.check(gpu.Synchronize())
		for i, x := range out {
			got, err := x.Float32s()
			o.check(err)
			if slices.Min(got) != 2*staleValue || slices.Max(got) != 2*staleValue {
				t.Fatalf("result %d: from %v to %v, want %v: another module's replay wrote there", i,
					slices.Min(got), slices.Max(got), 2*staleValue)
			}
		}
		scope.Close()
		o.check(next.Close())
	}
}
