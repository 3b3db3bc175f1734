package torch_test

import (
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/torch"
)

var cube = torch.Function{
	Name: "cube",
	Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
		c.SaveForBackward(in[0])
		return []*torch.Tensor{in[0].Square().Mul(in[0])}, nil
	},
	Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{g[0].Mul(c.SavedTensors()[0].Square()).MulScalar(3)}, nil
	},
}

// Every level of gradients of x cubed: 3 x x, 6 x, 6.
func TestFunctionHasGradientsOfGradients(t *testing.T) {
	before := liveCallbacks(t)
	live := settled(t)
	scope := torch.NewScope("pass")
	w := leaf(t, []float32{2, 3})
	y := cube.Apply1(w.In(scope))
	wantValues(t, y, 8, 27)
	of := []*torch.Tensor{y.Sum()}
	for _, want := range [][]float64{{12, 27}, {12, 18}, {6, 6}} {
		found, err := torch.Grad(of, []*torch.Tensor{w}, torch.GradOptions{CreateGraph: true})
		if err != nil {
			t.Fatal(err)
		}
		wantValues(t, found[0], want...)
		of = []*torch.Tensor{found[0].Sum()}
	}
	backward(t, cube.Apply1(w.In(scope)).Sum())
	wantGrad(t, w, 12, 27)
	scope.Close()
	if err := torch.ClearGrads(w); err != nil {
		t.Fatal(err)
	}
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left, want 0", n-before)
	}
	if n := torch.LiveTensors(); n != live+1 {
		t.Errorf("%d tensors are left, want 0", n-live-1)
	}
}

// The function has several inputs and outputs. One of its outputs has no gradient, and one is an
// integer.
func TestFunctionWithSeveralInputsAndOutputs(t *testing.T) {
	var got []*torch.Tensor
	var needs []bool
	f := torch.Function{
		Name: "several",
		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
			product, sum, largest := in[0].Mul(in[1]), in[0].Add(in[2]), in[0].ArgMax(0, false)
			constant := in[0].MulScalar(2)
			c.SaveForBackward(in[0], product, in[1])
			c.MarkNonDifferentiable(constant)
			c.Data = 10.0
			return []*torch.Tensor{product, sum, largest, constant}, nil
		},
		Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
			got = nil
			for _, each := range g {
				if each != nil {
					each = each.Keep()
				}
				got = append(got, each)
			}
			needs = nil
			for i := range 4 {
				needs = append(needs, c.NeedsInputGrad(i))
			}
			saved := c.SavedTensors()
			wantValues(t, saved[1], 3, 8)
			return []*torch.Tensor{g[0].Mul(saved[2]).Add(g[1]),
				g[0].Mul(saved[0]).MulScalar(c.Data.(float64)), g[1]}, nil
		},
	}
	a, b, c := leaf(t, []float32{1, 2}), leaf(t, []float32{3, 4}), floats(t, []float32{5, 6})
	scope := torch.NewScope("pass")
	defer scope.Close()
	out, err := f.Apply(a.In(scope), b, c)
	if err != nil {
		t.Fatal(err)
	}
	if r := []bool{out[0].RequiresGrad(), out[1].RequiresGrad(), out[2].RequiresGrad(),
		out[3].RequiresGrad()}; fmt.Sprint(r) != "[true true false false]" {
		t.Errorf("outputs that require gradients: %v, want \"[true true false false]\"", r)
	}
	wantValues(t, out[3], 2, 4)
	backward(t, out[0].Sum()) // out[1] is not used
	for _, g := range got {
		defer g.Close()
	}
	wantValues(t, got[0], 1, 1)
	wantValues(t, got[1], 0, 0)
	if got[2] != nil || got[3] != nil {
		t.Errorf("the gradients of outputs without one are %v and %v, want nil", got[2], got[3])
	}
	if fmt.Sprint(needs) != "[true true false false]" {
		t.Errorf("needs %v, want \"[true true false false]\"", needs)
	}
	wantGrad(t, a, 3, 4)
	wantGrad(t, b, 10, 20)
	if g := c.Grad(); g != nil {
		t.Errorf("Grad() of a constant input = %v, want nil", g)
	}
}

func TestFunctionWithoutHistory(t *testing.T) {
	before := liveCallbacks(t)
	w, x := leaf(t, []float32{2}), floats(t, []float32{2})
	for name, in := range map[string]*torch.Tensor{"constant": x, "NoGrad": w.NoGrad()} {
		y := cube.Apply1(in)
		wantValues(t, y, 8)
		if y.RequiresGrad() {
			t.Errorf("%s: the output requires gradients", name)
		}
		y.Close()
	}
	// A parameter that is no input gets no gradient.
	f := cube
	f.Forward = func(*torch.FunctionContext, []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{w.Square()}, nil
	}
	y := f.Apply1(x)
	defer y.Close()
	if y.RequiresGrad() || capi.LiveCallbacks() != before {
		t.Errorf("requires gradients: %v, %d callbacks", y.RequiresGrad(), capi.LiveCallbacks()-before)
	}
	wantValues(t, y, 4)
}

// An output may be an input, or a view of one.
func TestFunctionReturnsItsInput(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	for name, forward := range map[string]func(in *torch.Tensor) *torch.Tensor{
		"input": func(in *torch.Tensor) *torch.Tensor { return in },
		"view":  func(in *torch.Tensor) *torch.Tensor { return in.View(2) },
	} {
		double := torch.Function{
			Forward: func(_ *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
				return []*torch.Tensor{forward(in[0])}, nil
			},
			Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
				return []*torch.Tensor{g[0].MulScalar(2)}, nil
			},
		}
		y := double.Apply1(w)
		backward(t, y.Sum())
		y.Close()
		t.Log(name)
		wantGrad(t, w, 2, 2)
		if err := torch.ClearGrads(w); err != nil {
			t.Fatal(err)
		}
	}
}

func TestErrorsOfFunctions(t *testing.T) {
	good := func(_ *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) { return in, nil }
	for name, c := range map[string]struct {
		f    torch.Function
		is   error
		says string
	}{
		"nothing": {torch.Function{}, cuda.ErrInvalidArgument, "no Forward"},
		"forward": {torch.Function{Forward: func(*torch.FunctionContext,
			[]*torch.Tensor) ([]*torch.Tensor, error) {
			return nil, errPlanned
		}, Backward: good}, errPlanned, ""},
		"no outputs": {torch.Function{Forward: func(*torch.FunctionContext,
			[]*torch.Tensor) ([]*torch.Tensor, error) {
			return nil, nil
		}, Backward: good}, cuda.ErrInvalidArgument, "no outputs"},
		"failed output": {torch.Function{Forward: func(_ *torch.FunctionContext,
			in []*torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{in[0].MatMul(in[0].View(1, 1, 1, 1, 1)).View(7)}, nil
		}, Backward: good}, nil, "View"},
		"nil output": {torch.Function{Forward: func(*torch.FunctionContext, []*torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{nil}, nil
		}, Backward: good}, cuda.ErrInvalidArgument, "nil"},
		"backward": {torch.Function{Forward: cube.Forward,
			Backward: func(*torch.FunctionContext, []*torch.Tensor) ([]*torch.Tensor, error) {
				return nil,
					errPlanned
			}}, errPlanned, "planned"},
		"panic": {torch.Function{Forward: cube.Forward,
			Backward: func(*torch.FunctionContext, []*torch.Tensor) ([]*torch.Tensor,
				error) {
				panic(errPlanned)
			}}, errPlanned, "panic at "},
		"too few": {torch.Function{Forward: cube.Forward,
			Backward: func(*torch.FunctionContext, []*torch.Tensor) ([]*torch.Tensor, error) {
				return nil,
					nil
			}}, cuda.ErrInvalidArgument, "0 gradients for 1 inputs"},
		"too many": {torch.Function{Forward: cube.Forward,
			Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
				return append(g, g[0]), nil
			}}, cuda.ErrInvalidArgument, "2 gradients for 1 inputs"},
		"shape": {torch.Function{Name: "mine", Forward: cube.Forward,
			Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
				return []*torch.Tensor{g[0].Sum()}, nil
			}}, nil, "mine"},
		"closed": {torch.Function{Forward: cube.Forward,
			Backward: func(_ *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
				g[0].Close()
				return g, nil
			}}, torch.ErrClosed, ""},
		"changed output": {torch.Function{Forward: func(c *torch.FunctionContext,
			in []*torch.Tensor) ([]*torch.Tensor, error) {
			y := in[0].Exp()
			c.SaveForBackward(y)
			return []*torch.Tensor{y}, nil
		}, Backward: good}, nil, "modified by an inplace operation"},
	} {
		t.Run(name, func(t *testing.T) {
			before := liveCallbacks(t)
			w := leaf(t, []float32{1, 2})
			scope := torch.NewScope("pass")
			y := c.f.Apply1(w.In(scope))
			if name == "changed output" {
				y.Detach().MulScalar_(2)
			}
			err := y.Sum().Backward()
			if err == nil {
				t.Fatalf("Backward() = nil, want the error %v with %q", c.is, c.says)
			}
			if c.is != nil && !errors.Is(err, c.is) || !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %v, want %v with %q", err, c.is, c.says)
			}
			scope.Close()
			if n := capi.LiveCallbacks(); n != before {
				t.Errorf("%d callbacks are left, want 0", n-before)
			}
		})
	}
}

// Saved tensors are freed by the first pass without RetainGraph.
func TestFunctionBackwardTwice(t *testing.T) {
	w := leaf(t, []float32{2})
	y := cube.Apply1(w)
	defer y.Close()
	loss := y.Sum()
	defer loss.Close()
	for _, retain := range []bool{true, false} {
		if err := loss.BackwardWith(torch.BackwardOptions{RetainGraph: retain}); err != nil {
			t.Fatal(err)
		}
	}
	wantGrad(t, w, 24)
	if err := loss.Backward(); err == nil || !strings.Contains(err.Error(), "second time") {
		t.Errorf("a third pass: %v, want an error with \"second time\"", err)
	}
}

// Forward computes under the inputs' autocast, and Backward outside of it.
func TestFunctionUnderAutocast(t *testing.T) {
	f := torch.Function{
		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
			c.SaveForBackward(in...)
			return []*torch.Tensor{in[0].MatMul(in[1])}, nil
		},
		Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
			if g[0].DType() != torch.BFloat16 {
				t.Errorf("a gradient of %v, want bfloat16", g[0].DType())
			}
			saved, to := c.SavedTensors(), g[0].ToDType(torch.Float32)
			a, b := to.MatMul(saved[1].T()), saved[0].T().MatMul(to)
			if a.DType() != torch.Float32 {
				t.Errorf("Backward computes in %v, want float32", a.DType())
			}
			return []*torch.Tensor{a, b}, nil
		},
	}
	a, b := leaf(t, []float32{1, 2, 3, 4}, 2, 2), leaf(t, []float32{1, 0, 0, 1}, 2, 2)
	scope := torch.NewScope("pass")
	defer scope.Close()
	y := f.Apply1(a.In(scope).Autocast(torch.BFloat16), b)
	if y.DType() != torch.BFloat16 || y.MatMul(b).DType() != torch.BFloat16 {
		t.Errorf("the output is %v, and a product of it %v, want bfloat16, bfloat16",
			y.DType(), y.MatMul(b).DType())
	}
	backward(t, y.ToDType(torch.Float32).Sum())
	wantGrad(t, a, 1, 1, 1, 1)
	wantGrad(t, b, 4, 4, 6, 6)
}

// checkpoint computes fn again in Backward, with a backward pass inside of the pass.
func checkpoint(fn func(*torch.Tensor) *torch.Tensor) torch.Function {
	return torch.Function{
		Name: "checkpoint",
		Forward: func(c *torch.FunctionContext, in []*torch.Tensor) ([]*torch.Tensor, error) {
			c.SaveForBackward(in[0])
			return []*torch.Tensor{fn(in[0])}, nil
		},
		Backward: func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
			x := c.SavedTensors()[0].Detach().EnableGrad()
			if err := x.SetRequiresGrad(true); err != nil {
				return nil, err
			}
			found, err := torch.Grad([]*torch.Tensor{fn(x)}, []*torch.Tensor{x}, torch.GradOptions{Gradients: g})
			return found, err
		},
	}
}

func TestFunctionThatComputesForwardAgain(t *testing.T) {
	w := leaf(t, []float32{1, 2})
	c := checkpoint(func(x *torch.Tensor) *torch.Tensor { return x.Square().Mul(x) })
	for range 3 {
		scope := torch.NewScope("pass")
		backward(t, c.Apply1(c.Apply1(w.In(scope))).Sum()) // x to the power of 9
		scope.Close()
	}
	wantGrad(t, w, 27, 27*256)
}

// liveCallbacks returns the number of callbacks after the release of earlier tests' callbacks, some
// of which wait for the collector.
func liveCallbacks(t testing.TB) int64 {
	t.Helper()
	return settle.Wait(t, func() int64 {
		capi.ReleaseCallbacks()
		return capi.LiveCallbacks()
	})
}

func TestFunctionOfManyGoroutines(t *testing.T) {
	before := liveCallbacks(t)
	var wg sync.WaitGroup
	for range 32 {
		wg.Go(func() {
			for range 5 {
				scope := torch.NewScope("goroutine")
				w, err := torch.Full(cuda.CPU, torch.Float32, 2, 3)
				w = scope.Own(w)
				if err = errors.Join(err, w.SetRequiresGrad(true), cube.Apply1(w).Sum().Backward()); err != nil {
					t.Error(err)
				} else if v, err := w.Grad().Float32s(); err != nil || v[2] != 12 {
					t.Errorf("gradient %v, %v, want 12, nil", v, err)
				}
				scope.Close()
			}
		})
	}
	wg.Wait()
	capi.ReleaseCallbacks()
	if n := capi.LiveCallbacks(); n != before {
		t.Errorf("%d callbacks are left, want 0", n-before)
	}
}

// On a GPU Backward runs on the stream of Forward, in order with the work before and after it.
func TestFunctionOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	forward, caller := cudatest.Stream(t, gpu), cudatest.Stream(t, gpu)
	f := cube
	f.Backward = func(c *torch.FunctionContext, g []*torch.Tensor) ([]*torch.Tensor, error) {
		if s, err := cuda.GetCurrentCUDAStream(gpu); err != nil || s != forward {
			t.Errorf("Backward on %v, %v, want %v", s, err, forward)
		}
		cudatest.Delay(t, forward, 1e6) // what follows must wait
		return cube.Backward(c, g)
	}
	const n = 1 << 16
	w, err := torch.Full(gpu, torch.Float32, 2, n)
	must(t, w, err)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	if err := cuda.Fork(cuda.DefaultStream(gpu), forward, caller); err != nil {
		t.Fatal(err)
	}
	for range 20 {
		scope := torch.NewScope("step")
		var loss *torch.Tensor
		err := cuda.WithStream(forward, func() error {
			loss = f.Apply1(w.In(scope)).Sum()
			return loss.Err()
		})
		if err != nil {
			t.Fatal(err)
		}
		err = cuda.WithStream(caller, func() error {
			if err := caller.Wait(forward); err != nil {
				return err
			}
			if err := loss.Backward(); err != nil {
				return err
			}
			got, err := w.In(scope).Grad().Sum().Float64()
			if err == nil && got != 12*n {
				err = fmt.Errorf("the gradients add up to %v, want %v", got, 12*n)
			}
			return errors.Join(err, torch.ClearGrads(w), forward.Wait(caller))
		})
		if err != nil {
			t.Fatal(err)
		}
		scope.Close()
	}
}
