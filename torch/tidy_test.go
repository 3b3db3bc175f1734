package torch_test

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// Tensors that a function computes in a Tidy end with it, except for its result and the tensors
// that backward needs.
func TestTidyEndsWhatAFunctionComputes(t *testing.T) {
	scope := torch.NewScope("test")
	defer scope.Close()
	x := scope.Own(floats(t, []float32{0.5, 1, 1.5}, 3))
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	var left *torch.Tensor
	before := torch.LiveTensors()
	y := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
		left = in[0].Mul(in[1])
		return left.Exp().Sum()
	}, x, x)
	if live := torch.LiveTensors() - before; live != 1 {
		t.Errorf("%d tensors are left, want the result", live)
	}
	if y.Scope() != scope {
		t.Errorf("the result is in %v, want %v", y.Scope(), scope)
	}
	if err := left.Add(x).Err(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("an operator on a tensor of the function: %v, want torch.ErrClosed", err)
	}
	if err := y.Backward(); err != nil {
		t.Fatal(err)
	}
	gradient := make([]float64, 3) // of the sum of exp(x*x)
	for i := range gradient {
		at := float64(i+1) / 2
		gradient[i] = 2 * at * math.Exp(at*at)
	}
	wantValues(t, x.Grad(), gradient...)
}

// The result has the same scope as an operator's result: the youngest of the operands' scopes, or
// none.
func TestTidyResultBelongsToTheYoungestScope(t *testing.T) {
	older, younger := torch.NewScope("older"), torch.NewScope("younger")
	defer older.Close()
	defer younger.Close()
	a, b, loose := older.Own(floats(t, []float32{1}, 1)), younger.Own(floats(t, []float32{2}, 1)), floats(t,
		[]float32{3}, 1)
	defer loose.Close()
	same := func(in ...*torch.Tensor) *torch.Tensor { return in[0] }
	for _, c := range []struct {
		name string
		in   []*torch.Tensor
		want *torch.Scope
	}{{"the younger one last", []*torch.Tensor{a, b}, younger},
		{"the younger one first", []*torch.Tensor{b, a}, younger},
		{"a tensor without a scope", []*torch.Tensor{loose, a}, older}, {"no scope", []*torch.Tensor{loose}, nil}} {
		y := torch.Tidy(same, c.in...)
		if y.Err() != nil || y.Scope() != c.want {
			t.Errorf("%s: the result is in %v: %v, want %v, nil", c.name, y.Scope(), y.Err(), c.want)
		}
		y.Close()
		y = torch.Tidy(func(...*torch.Tensor) *torch.Tensor { return c.in[0] })
		if want := c.in[0].Scope(); y.Err() != nil || y.Scope() != want {
			t.Errorf("%s: a tensor of the caller's is in %v: %v, want %v, nil",
				c.name, y.Scope(), y.Err(), want)
		}
		y.Close()
		if c.in[0].Add(c.in[0]).Err() != nil {
			t.Errorf("%s: the end of the result ended the operand, want it open", c.name)
		}
	}
}

// Modes and casts hold in a Tidy as outside of it.
func TestTidyKeepsModesAndCasts(t *testing.T) {
	w := floats(t, []float32{1, 2, 3, 4}, 2, 2)
	defer w.Close()
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	casts, err := torch.NewParameterCasts(torch.BFloat16, []*torch.Tensor{w})
	if err != nil {
		t.Fatal(err)
	}
	layer := func(in ...*torch.Tensor) *torch.Tensor { return in[0].MatMul(w) }
	for pass := range 2 {
		scope := torch.NewScope("pass")
		x := scope.Own(floats(t, []float32{1, 1}, 1, 2))
		if err := casts.Begin(scope); err != nil {
			t.Fatal(err)
		}
		made := scope.Len()
		y := torch.Tidy(layer, x.NoGrad().Autocast(torch.BFloat16))
		if y.DType() != torch.BFloat16 || y.RequiresGrad() || y.AddScalar(1).DType() != torch.BFloat16 {
			t.Errorf("pass %d: the result is %v, recorded: %v: %v", pass, y.DType(), y.RequiresGrad(), y.Err())
		}
		if want := 1 + pass; made != want { // the second pass casts the weight that the first one used
			t.Errorf("pass %d begins with %d tensors, want %d", pass, made, want)
		}
		scope.Close()
	}
}

func TestTidyPassesErrorsOn(t *testing.T) {
	x := floats(t, []float32{1, 2, 3}, 3)
	called := false
	bad := torch.Fail("test", cuda.ErrInvalidArgument)
	if err := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { called = true; return in[0] }, x,
		bad).Err(); !errors.Is(err, cuda.ErrInvalidArgument) || called {
		t.Errorf("of an operand: %v, called: %v", err, called)
	}
	if err := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return bad }, x).Err(); !errors.Is(err,
		cuda.ErrInvalidArgument) {
		t.Errorf("of the function: %v, want cuda.ErrInvalidArgument", err)
	}
	if torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return nil }, x).Err() == nil {
		t.Error("Tidy of a function that returns nil: got no error, want one")
	}
	x.Close()
	if err := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor { return in[0] }, x).Err(); !errors.Is(err,
		torch.ErrClosed) {
		t.Errorf("of a closed operand: %v, want torch.ErrClosed", err)
	}
}

func BenchmarkTidy(b *testing.B) {
	x, err := torch.Zeros(cuda.CPU, torch.Float32, 1)
	if err != nil {
		b.Fatal(err)
	}
	defer x.Close()
	scope := torch.NewScope("bench")
	defer scope.Close()
	x = scope.Own(x)
	same := func(in ...*torch.Tensor) *torch.Tensor { return in[0] }
	for b.Loop() {
		torch.Tidy(same, x).Close()
	}
}
