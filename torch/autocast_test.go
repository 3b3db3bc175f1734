package torch_test

import (
	"errors"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// The mark propagates from operands to results, and through views, scopes and lists. Operators
// without it compute as before.
func TestAutocastTravels(t *testing.T) {
	x, w := floats(t, []float32{1, 2, 3, 4}, 2, 2), leaf(t, []float32{1, 0, 0, 1}, 2, 2)
	scope := torch.NewScope("batch")
	defer scope.Close()
	a := x.In(scope).Autocast(torch.BFloat16)
	if d := a.DType(); d != torch.Float32 {
		t.Errorf("the marked tensor itself is %v, want float32", d)
	}
	parts, err := torch.Call("chunk", a, 2, 1)
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		y    *torch.Tensor
		want torch.DType
	}{
		"product":                    {a.MatMul(w), torch.BFloat16},
		"the weight first":           {w.MatMul(a), torch.BFloat16},
		"after another operator":     {a.Add(w).MatMul(w), torch.BFloat16},
		"under NoGrad":               {a.NoGrad().MatMul(w), torch.BFloat16},
		"a view":                     {a.Reshape(2, 2).MatMul(w), torch.BFloat16},
		"In":                         {a.In(scope).MatMul(w), torch.BFloat16},
		"an element of a list":       {parts[0].MatMul(parts[0].Reshape(1, 2)), torch.BFloat16},
		"an operator in float32":     {a.MatMul(w).MSELoss(x), torch.Float32},
		"an operator of no list":     {a.MatMul(w).ReLU(), torch.BFloat16},
		"float16":                    {a.Autocast(torch.Float16).MatMul(w), torch.Float16},
		"no autocast":                {x.In(scope).MatMul(w), torch.Float32},
		"NoAutocast":                 {a.NoAutocast().MatMul(w), torch.Float32},
		"NoAutocast of a result":     {a.MatMul(w).NoAutocast().ToDType(torch.Float32).MatMul(w), torch.Float32},
		"NoAutocast beside a marked": {a.NoAutocast().MatMul(w).MatMul(a), torch.BFloat16},
		"in place":                   {x.Clone().In(scope).Add_(a).MatMul(w), torch.BFloat16},
		"in place by name":           {torch.Call1("add_.Tensor", x.Clone().In(scope), a).MatMul(w), torch.BFloat16},
	} {
		if err := c.y.Err(); err != nil {
			t.Errorf("%s: %v, want no error", name, err)
		} else if d := c.y.DType(); d != c.want {
			t.Errorf("%s: %v, want %v", name, d, c.want)
		}
	}
	if marked, plain := a.NoGrad().MatMul(w).RequiresGrad(), a.MatMul(w).RequiresGrad(); marked || !plain {
		t.Errorf("RequiresGrad() under autocast, with and without NoGrad = %v, %v, want false, true", marked, plain)
	}
}

// Under autocast a parameter keeps its dtype and gets gradients of that dtype. The next pass sees
// its new value.
func TestAutocastOfAParameter(t *testing.T) {
	w, x := leaf(t, []float32{3}, 1, 1), floats(t, []float32{2}, 1, 1)
	for _, want := range []float64{6, 8} {
		y := x.Autocast(torch.BFloat16).MatMul(w)
		// Two uses of the weight: 2 of the product, and 6 or 8 of its square.
		loss := y.MatMul(w).Add(y).Sum()
		if err := loss.Backward(); err != nil {
			t.Fatal(err)
		}
		wantValues(t, y, want)
		g := w.Grad()
		if g.DType() != torch.Float32 || w.DType() != torch.Float32 {
			t.Errorf("parameter %v with gradient %v, want float32, float32", w.DType(), g.DType())
		}
		wantValues(t, g, 2*want+2) // d(2ww + 2w) = 4w + 2
		g.Close()
		if err := errors.Join(torch.ClearGrads(w), w.NoGrad().AddScalar_(1).Err()); err != nil {
			t.Fatal(err)
		}
		loss.Close()
		y.Close()
	}
}

func TestAutocastRefuses(t *testing.T) {
	x := floats(t, []float32{1}, 1, 1)
	closed := x.Clone()
	closed.Close()
	for says, y := range map[string]*torch.Tensor{
		"to float32: give BFloat16 or Float16": x.Autocast(torch.Float32),
		"the tensor was closed":                closed.Autocast(torch.BFloat16).ReLU(),
		"two dtypes":                           x.Autocast(torch.BFloat16).MatMul(x.Autocast(torch.Float16)),
		"nil":                                  (*torch.Tensor)(nil).Autocast(torch.Float32),
	} {
		if err := y.Err(); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
}

// On a GPU the marks select the same operators as on the CPU, also while a graph is captured.
func TestAutocastOnGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := onDevice(t, []float32{1, 0, 0, 1}, 2, 2)
	if err := w.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	x := onDevice(t, []float32{1, 2, 3, 4}, 2, 2)
	forward := func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		y := in[0].MatMul(w)
		loss := y.MSELoss(in[0])
		return []*torch.Tensor{y, loss}, errors.Join(y.Err(), loss.Err())
	}
	g := torch.NewGraphed(forward, torch.GraphedOptions{})
	defer g.Close()
	for i := range 4 {
		out, err := g.Call(x.Autocast(torch.BFloat16))
		if err != nil {
			t.Fatal(err)
		}
		if a, b := out[0].DType(), out[1].DType(); a != torch.BFloat16 || b != torch.Float32 {
			t.Fatalf("call %d: %v and %v, want bfloat16, float32", i, a, b)
		}
		wantValues(t, out[0], 1, 2, 3, 4)
	}
	// An argument with another mark gets another graph.
	out, err := g.Call(x)
	if err != nil || out[0].DType() != torch.Float32 {
		t.Errorf("%v, %v, want float32, nil", out, err)
	}
	if s := g.Stats(); s.Captures != 2 || s.Hits != 3 {
		t.Errorf("%+v, want Captures 2, Hits 3", s)
	}
}

func TestGeneratorState(t *testing.T) {
	for device := cuda.CPU; int(device) < min(1, cuda.DeviceCount()); device++ {
		draw := func() float64 {
			x, err := torch.Rand(device, torch.Float64)
			v, err2 := must(t, x, err).Float64()
			if err2 != nil {
				t.Fatal(err2)
			}
			return v
		}
		if err := torch.ManualSeed(3); err != nil {
			t.Fatal(err)
		}
		draw()
		state, err := torch.GeneratorState(device)
		if err != nil {
			t.Fatal(err)
		}
		if state.Device() != cuda.CPU || state.DType() != torch.Uint8 {
			t.Errorf("%v: the state is %v, want cpu, uint8", device, state)
		}
		first := draw()
		if next := draw(); next == first {
			t.Errorf("%v: two draws are %v", device, next)
		}
		if err := torch.SetGeneratorState(device, state); err != nil {
			t.Fatal(err)
		}
		if again := draw(); again != first {
			t.Errorf("%v: %v, and %v before", device, again, first)
		}
		state.Close()
		if err := torch.SetGeneratorState(device, state); !errors.Is(err, torch.ErrClosed) {
			t.Error(err)
		}
	}
	if _, err := torch.GeneratorState(cuda.Device(cuda.DeviceCount())); !errors.Is(err, cuda.ErrNoDevice) {
		t.Error(err)
	}
}
