package torch_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

var (
	deterministic = torch.Numerics{Deterministic: true}
	measured      = torch.Numerics{Benchmark: true}
)

// putter returns an operator that writes an element into a copy of x. Its backward writes too. If
// kernels must be deterministic, LibTorch refuses both, because writes to repeated indices have no
// order.
func putter(t *testing.T) func(x *torch.Tensor) *torch.Tensor {
	index, source := ints(t, []int64{0}, 1), floats(t, []float32{5}, 1)
	return func(x *torch.Tensor) *torch.Tensor { return torch.Call1("put", x, index, source) }
}

// refused reports whether the error is LibTorch's refusal of an operator without a deterministic
// kernel. Other errors end the test.
func refused(t *testing.T, err error) bool {
	t.Helper()
	if err != nil && !strings.Contains(err.Error(), "does not have a deterministic implementation") {
		t.Errorf("another error: %v", err)
	}
	return err != nil
}

func TestNumericsTravel(t *testing.T) {
	x, put := floats(t, []float32{1, 2, 3, 4}, 2, 2), putter(t)
	scope := torch.NewScope("batch")
	defer scope.Close()
	a := x.In(scope).Numerics(deterministic)
	parts, err := torch.Call("chunk", a, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		x       *torch.Tensor
		refuses bool
	}{
		"marked":                 {a, true},
		"a result":               {a.Add(x), true},
		"the second operand":     {x.Add(a), true},
		"a view":                 {a.Reshape(4), true},
		"a copy":                 {a.ToDType(torch.Float64).ToDType(torch.Float32), true},
		"In":                     {a.In(scope), true},
		"under NoGrad":           {a.NoGrad(), true},
		"under autocast":         {a.Autocast(torch.BFloat16), true},
		"an element of a list":   {parts[0], true},
		"in place":               {x.Clone().In(scope).Add_(a), true},
		"in place by name":       {torch.Call1("add_.Tensor", x.Clone().In(scope), a), true},
		"of a function":          {identity.Apply1(a), true},
		"not marked":             {x, false},
		"NoNumerics":             {a.NoNumerics(), false},
		"NoNumerics of a result": {a.Add(x).NoNumerics(), false},
		"others":                 {a.Numerics(measured), false},
		"none":                   {a.Numerics(torch.Numerics{}), false},
	} {
		y := put(c.x)
		if refused(t, y.Err()) != c.refuses {
			t.Errorf("%s: got %v, want a refusal: %v", name, y.Err(), c.refuses)
		}
		y.Close()
	}
	if err := a.Add(x.Numerics(measured)).Err(); err == nil || !strings.Contains(err.Error(), "different switches") {
		t.Errorf("operands of different switches: %v, want an error with \"different switches\"", err)
	}
	if err := a.Add(x.Numerics(deterministic)).Err(); err != nil {
		t.Errorf("operands of equal switches: %v, want no error", err)
	}
}

var identity = torch.Function{
	Name:     "identity",
	Forward:  func(_ *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) { return in, nil },
	Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) { return g, nil },
}

func TestProcessNumerics(t *testing.T) {
	before, err := torch.ProcessNumerics()
	if err != nil {
		t.Fatal(err)
	}
	if before != (torch.Numerics{ConvolutionTF32: true}) {
		t.Errorf("at the start: %+v, want %v", before, (torch.Numerics{ConvolutionTF32: true}))
	}
	defer torch.SetProcessNumerics(before)
	x, put := floats(t, []float32{1, 2}), putter(t)
	for _, want := range []torch.Numerics{{MatmulTF32: true}, {Benchmark: true}, {Deterministic: true}, {}} {
		if err := torch.SetProcessNumerics(want); err != nil {
			t.Fatal(err)
		}
		own := put(x.Numerics(torch.Numerics{Deterministic: !want.Deterministic}))
		others := put(x)
		if refused(t, own.Err()) == want.Deterministic || refused(t, others.Err()) != want.Deterministic {
			t.Errorf("%+v: %v, and %v for a marked tensor", want, others.Err(), own.Err())
		}
		own.Close()
		others.Close()
		if got, err := torch.ProcessNumerics(); err != nil || got != want {
			t.Errorf("%+v, want %+v, %v", got, want, err)
		}
	}
}

// backwards are the ways to run a pass from a scalar to x.
var backwards = map[string]func(loss, x *torch.Tensor) error{
	"Backward": func(loss, _ *torch.Tensor) error {
		return loss.BackwardWith(torch.BackwardOptions{RetainGraph: true})
	},
	"Grad": func(loss, x *torch.Tensor) error {
		g, err := torch.Grad([]*torch.Tensor{loss}, []*torch.Tensor{x}, torch.GradOptions{RetainGraph: true})
		for _, each := range g {
			each.Close()
		}
		return err
	},
}

// Goroutines under three values of the switches run forward and backward passes at once, and each
// operator finds its own switches. Each goroutine continues until all have done their part, so the
// test does not end if some keep others out.
func TestNumericsOfNeighbours(t *testing.T) {
	const passes = 200
	put := putter(t)
	var working atomic.Int64
	var all sync.WaitGroup
	for _, n := range []*torch.Numerics{nil, nil, &deterministic, &deterministic, &measured} {
		for way, backward := range backwards {
			x := leaf(t, []float32{1, 2})
			working.Add(1)
			all.Go(func() {
				for i := 0; working.Load() > 0; i++ {
					if i == passes {
						working.Add(-1)
					}
					err := forwardAndBackward(t, put, x, n, backward)
					if err != nil {
						t.Errorf("%s under %+v: %v, want no error", way, n, err)
						if i < passes {
							working.Add(-1)
						}
						return
					}
				}
			})
		}
	}
	all.Wait()
}

// forwardAndBackward runs operators. Under deterministic some of them must be refused.
func forwardAndBackward(t *testing.T, put func(*torch.Tensor) *torch.Tensor, x *torch.Tensor,
	n *torch.Numerics, backward func(loss, x *torch.Tensor) error) error {
	scope := torch.NewScope("pass")
	defer scope.Close()
	x = x.In(scope)
	own := x
	if n != nil {
		own = x.Numerics(*n)
	}
	refuses := n != nil && n.Deterministic
	if y := put(own); refused(t, y.Err()) != refuses {
		return fmt.Errorf("forward: %v", y.Err())
	}
	loss := put(x).Sum()
	if err := loss.Err(); err != nil {
		return fmt.Errorf("forward without switches: %w", err)
	}
	if n != nil {
		loss = loss.Numerics(*n)
	}
	if err := backward(loss, x); refused(t, err) != refuses {
		return fmt.Errorf("backward: %w", err)
	}
	if err := backward(loss.NoNumerics(), x); err != nil {
		return fmt.Errorf("backward without switches: %w", err)
	}
	return nil
}

// A pass has the switches of its starting tensor, also after a hook. A hook has the switches of its
// handles. A hook may wait for a goroutine that needs other switches than the pass.
func TestNumericsOfHooks(t *testing.T) {
	put := putter(t)
	for way, backward := range backwards {
		t.Run(way, func(t *testing.T) {
			x, other := leaf(t, []float32{1, 2}), floats(t, []float32{1, 2})
			y := must(t, put(x), nil)
			z := must(t, y.MulScalar(2), nil)
			loss := must(t, z.Sum(), nil)
			var called []error
			hook, err := z.RegisterHook(func(g *torch.Tensor) (*torch.Tensor, error) {
				scope := torch.NewScope("hook")
				defer scope.Close()
				called = append(called, put(g.In(scope)).Err(), put(other.In(scope)).Err(),
					put(g.In(scope).NoNumerics()).Err())
				elsewhere := make(chan error)
				go func() { elsewhere <- put(other.In(scope).Numerics(measured)).Err() }()
				called = append(called, <-elsewhere)
				go func() { elsewhere <- put(other.In(scope)).Err() }()
				called = append(called, <-elsewhere)
				return nil, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			defer hook.Remove()
			for _, refuses := range []bool{true, false} {
				called = nil
				from := loss
				if refuses {
					from = loss.Numerics(deterministic)
				}
				if err := backward(from, x); refused(t, err) != refuses {
					t.Errorf("deterministic %v: %v", refuses, err)
				}
				for i, err := range called {
					if refused(t, err) != (refuses && i == 0) {
						t.Errorf("deterministic %v: operator %d of the hook: %v", refuses, i, err)
					}
				}
				if len(called) != 5 {
					t.Errorf("%d operators of the hook, want 5", len(called))
				}
			}
		})
	}
}

// A pass inside of a hook has its own switches, and the pass around it keeps its own.
func TestNumericsOfPassInHook(t *testing.T) {
	put := putter(t)
	for outside, backward := range backwards {
		for inside, inner := range backwards {
			t.Run(outside+" around "+inside, func(t *testing.T) {
				x, w := leaf(t, []float32{1, 2}), leaf(t, []float32{1, 2})
				// Backward reaches the hook on z before put.
				z := must(t, must(t, put(x), nil).MulScalar(2), nil)
				loss := must(t, z.Sum(), nil)
				innerLoss := must(t, must(t, put(w), nil).Sum(), nil)
				var with, without error
				hook, err := z.RegisterHook(func(*torch.Tensor) (*torch.Tensor, error) {
					with, without = inner(innerLoss.Numerics(deterministic), w), inner(innerLoss, w)
					return nil, nil
				})
				if err != nil {
					t.Fatal(err)
				}
				defer hook.Remove()
				for _, refuses := range []bool{true, false} {
					from := loss
					if refuses {
						from = loss.Numerics(deterministic)
					}
					if err := backward(from, x); refused(t, err) != refuses {
						t.Errorf("deterministic %v: %v", refuses, err)
					}
					if !refused(t, with) || refused(t, without) {
						t.Errorf("inside, deterministic %v: %v and %v", refuses, with, without)
					}
				}
			})
		}
	}
}

// Like hooks, other functions that a pass calls may wait for goroutines with other switches, and
// find the marks of the pass.
func TestNumericsOfCallbacks(t *testing.T) {
	put := putter(t)
	other := floats(t, []float32{1, 2})
	elsewhere := func() error {
		done := make(chan error)
		go func() {
			y := put(other.Numerics(measured))
			defer y.Close()
			done <- y.Err()
		}()
		return <-done
	}
	for way, backward := range backwards {
		var ofGradient, waited, ended error
		calls := 0
		f := torch.Function{Name: "f", Forward: identity.Forward,
			Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
				calls++
				ofGradient, waited = put(g[0]).Err(), elsewhere()
				return g, torch.QueueCallback(func() error {
					calls++
					ended = elsewhere()
					return nil
				})
			}}
		x := leaf(t, []float32{1, 2})
		hook, err := x.RegisterPostAccumulateGradHook(func(x *torch.Tensor) error {
			calls++
			y := put(x.NoGrad())
			defer y.Close()
			return errors.Join(y.Err(), elsewhere())
		})
		if err != nil {
			t.Fatal(err)
		}
		defer hook.Remove()
		loss := must(t, must(t, f.Apply1(x), nil).Sum(), nil)
		if err := backward(loss.Numerics(deterministic), x); err != nil || waited != nil || ended != nil {
			t.Errorf("%s: %v, %v, %v, want nil, nil, nil", way, err, waited, ended)
		}
		if !refused(t, ofGradient) {
			t.Errorf("%s: the gradient is not marked", way)
		}
		if want := map[string]int{"Backward": 3, "Grad": 2}[way]; calls != want {
			t.Errorf("%s: %d calls, want %d", way, calls, want)
		}
	}
}
