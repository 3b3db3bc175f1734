package optim_test

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func leaf(t *testing.T, data ...float32) *torch.Tensor {
	t.Helper()
	x, err := torch.FromFloat32s(data)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	if err := x.SetRequiresGrad(true); err != nil {
		t.Fatal(err)
	}
	return x
}

func want(t *testing.T, x *torch.Tensor, values ...float32) {
	t.Helper()
	got, err := x.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(got, values) {
		t.Errorf("got %v, want %v", got, values)
	}
}

// turn computes the gradient of the sum of squares, which is 2w.
func turn(t *testing.T, w *torch.Tensor) {
	t.Helper()
	s := torch.NewScope("turn")
	defer s.Close()
	if err := w.In(s).Square().Sum().Backward(); err != nil {
		t.Fatal(err)
	}
}

func TestStep(t *testing.T) {
	w, still := leaf(t, 1, -2), leaf(t, 5)
	opt, err := optim.NewSGD([]*torch.Tensor{w, still}, optim.SGDOptions{LR: 0.25, WeightDecay: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	if err := opt.Step(); !errors.Is(err, optim.ErrNoGradients) {
		t.Errorf("Step without gradients: %v, want optim.ErrNoGradients", err)
	}
	want(t, w, 1, -2)
	turn(t, w)
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	want(t, w, 0.25, -0.5) // 1 - 0.25*(2+1)
	want(t, still, 5)      // a parameter without a gradient does not decay
	if g := w.Grad(); g != nil {
		t.Errorf("Grad() after Step = %v, want nil", g)
	}
	if err := opt.SetLR(0); err != nil {
		t.Fatal(err)
	}
	turn(t, w)
	if err := opt.Step(); err != nil || opt.LR() != 0 {
		t.Fatal(err)
	}
	want(t, w, 0.25, -0.5)
	if !w.RequiresGrad() {
		t.Error("RequiresGrad() of the parameter after Step = false, want true")
	}
}

func TestGradientsAccumulateUntilStep(t *testing.T) {
	w := leaf(t, 1)
	opt, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 0.125})
	if err != nil {
		t.Fatal(err)
	}
	turn(t, w)
	turn(t, w)
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	want(t, w, 0.5)
}

func TestKeepGradientsLeavesThemUnchanged(t *testing.T) {
	w := leaf(t, 1)
	opt, err := optim.NewSGD([]*torch.Tensor{w},
		optim.SGDOptions{LR: 0.125, Momentum: 0.5, WeightDecay: 1, Nesterov: true, KeepGradients: true})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	turn(t, w)
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	g := w.Grad()
	defer g.Close()
	want(t, g, 2)
	if err := opt.ZeroGrad(); err != nil || w.Grad() != nil {
		t.Errorf("after ZeroGrad: %v, gradient %v, want nil, nil", err, w.Grad())
	}
}

func TestParameterWithALaterFirstGradientStartsItsOwnVelocity(t *testing.T) {
	a, b := leaf(t, 8), leaf(t, 8)
	opt, err := optim.NewSGD([]*torch.Tensor{a, b}, optim.SGDOptions{LR: 0.125, Momentum: 0.5, Dampening: 0.5})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	turn(t, a)
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	want(t, a, 6) // v = 16
	turn(t, a)
	turn(t, b)
	if err := opt.Step(); err != nil {
		t.Fatal(err)
	}
	want(t, a, 4.25) // v = 8 + 0.5*12
	want(t, b, 6)    // not dampened in its first step
}

func TestInvalidParametersAndOptions(t *testing.T) {
	w := leaf(t, 1)
	constant, err := torch.FromFloat32s([]float32{1})
	if err != nil {
		t.Fatal(err)
	}
	defer constant.Close()
	ok := []*torch.Tensor{w}
	for _, c := range []struct {
		name   string
		params []*torch.Tensor
		o      optim.SGDOptions
		text   string
	}{
		{"no parameters", nil, optim.SGDOptions{}, "no parameters"},
		{"nil", []*torch.Tensor{w, nil}, optim.SGDOptions{}, "parameter 1"},
		{"twice", []*torch.Tensor{w, w}, optim.SGDOptions{}, "parameter 1 is in the list twice"},
		{"constant", []*torch.Tensor{constant}, optim.SGDOptions{},
			"none of the 1 parameters requires gradients: call nn.Unfreeze with the part"},
		{"failed", []*torch.Tensor{torch.Fail("x", cuda.ErrInvalidArgument)}, optim.SGDOptions{}, "parameter 0"},
		{"negative rate", ok, optim.SGDOptions{LR: -1}, "negative"},
		{"NaN", ok, optim.SGDOptions{LR: math.NaN()}, "finite"},
		{"infinite", ok, optim.SGDOptions{WeightDecay: math.Inf(1)}, "finite"},
		{"Nesterov without momentum", ok, optim.SGDOptions{Nesterov: true}, "Nesterov"},
		{"Nesterov with dampening", ok, optim.SGDOptions{Nesterov: true, Momentum: 0.5, Dampening: 0.1}, "Nesterov"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if _, err := optim.NewSGD(c.params, c.o); !errors.Is(err, cuda.ErrInvalidArgument) ||
				!strings.Contains(err.Error(), c.text) {
				t.Error(err)
			}
		})
	}
	gone := leaf(t, 1)
	opt, err := optim.NewSGD([]*torch.Tensor{w, gone}, optim.SGDOptions{})
	if err != nil {
		t.Fatal(err)
	}
	gone.Close()
	if err := opt.Step(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("Step with a closed parameter: %v, want torch.ErrClosed", err)
	}
	if err := opt.ZeroGrad(); !errors.Is(err, torch.ErrClosed) {
		t.Errorf("ZeroGrad with a closed parameter: %v, want torch.ErrClosed", err)
	}
}

func TestStepLeavesNothingBehind(t *testing.T) {
	w := leaf(t, 1, 2, 3)
	for name, o := range map[string]optim.SGDOptions{
		"plain":          {},
		"Nesterov":       {Momentum: 0.9, WeightDecay: 0.1, Nesterov: true},
		"keep gradients": {Momentum: 0.9, WeightDecay: 0.1, Nesterov: true, KeepGradients: true},
	} {
		t.Run(name, func(t *testing.T) {
			before := settled(t)
			opt, err := optim.NewSGD([]*torch.Tensor{w}, o)
			if err != nil {
				t.Fatal(err)
			}
			for range 100 {
				turn(t, w)
				if err := opt.Step(); err != nil {
					t.Fatal(err)
				}
				if err := opt.ZeroGrad(); err != nil {
					t.Fatal(err)
				}
			}
			kept := int64(0)
			if o.Momentum != 0 {
				kept = 1
			}
			if live := torch.LiveTensors() - before; live != kept {
				t.Errorf("%d references, want %d", live, kept)
			}
			opt.Close()
			if live := torch.LiveTensors() - before; live != 0 {
				t.Errorf("%d references after Close, want 0", live)
			}
		})
	}
}

func TestSetLRRejectsInvalidRates(t *testing.T) {
	w := leaf(t, 1)
	for _, capturable := range []bool{false, true} {
		t.Run(fmt.Sprintf("capturable=%v", capturable), func(t *testing.T) {
			opt, err := optim.NewSGD([]*torch.Tensor{w}, optim.SGDOptions{LR: 0.5, Capturable: capturable})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			for _, lr := range []float64{math.NaN(), math.Inf(1), -0.1} {
				if err := opt.SetLR(lr); !errors.Is(err, cuda.ErrInvalidArgument) || opt.LR() != 0.5 {
					t.Errorf("%v: %v, and the rate is %v, want cuda.ErrInvalidArgument, 0.5",
						lr, err, opt.LR())
				}
			}
		})
	}
}

// The fused operator computes the same as the plain steps, for every option. This also holds when a
// parameter gets its first gradient later, and when the rate changes.
func TestCapturableStepEqualsPlainStep(t *testing.T) {
	for name, o := range map[string]optim.SGDOptions{
		"plain":          {LR: 0.125},
		"weight decay":   {LR: 0.125, WeightDecay: 0.5},
		"momentum":       {LR: 0.125, Momentum: 0.5},
		"dampening":      {LR: 0.125, Momentum: 0.5, Dampening: 0.25, WeightDecay: 0.5},
		"Nesterov":       {LR: 0.125, Momentum: 0.5, WeightDecay: 0.5, Nesterov: true},
		"keep gradients": {LR: 0.125, Momentum: 0.5, WeightDecay: 0.5, Nesterov: true, KeepGradients: true},
	} {
		t.Run(name, func(t *testing.T) {
			run := func(capturable bool) [][]float32 {
				o := o
				o.Capturable = capturable
				a, b := leaf(t, 8, -4, 2), leaf(t, 16)
				opt, err := optim.NewSGD([]*torch.Tensor{a, b}, o)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				for i := range 4 {
					turn(t, a)
					if i > 0 {
						turn(t, b)
					}
					if i == 2 {
						if err := opt.SetLR(0.0625); err != nil {
							t.Fatal(err)
						}
					}
					if err := opt.Step(); err != nil {
						t.Fatal(err)
					}
					if err := opt.ZeroGrad(); err != nil {
						t.Fatal(err)
					}
				}
				av, err := a.Float32s()
				if err != nil {
					t.Fatal(err)
				}
				bv, err := b.Float32s()
				if err != nil {
					t.Fatal(err)
				}
				return [][]float32{av, bv}
			}
			plain, fused := run(false), run(true)
			for i := range plain {
				for j := range plain[i] {
					if d := math.Abs(float64(plain[i][j] - fused[i][j])); d > 1e-5 {
						t.Errorf("parameter %d is %v, want %v, as with Capturable", i, plain[i], fused[i])
					}
				}
			}
		})
	}
}

// After a leaf moves to the GPU, as nn.To moves it, its velocity and Capturable's rate follow.
func TestVelocitiesFollowParameters(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	for _, capturable := range []bool{false, true} {
		t.Run(fmt.Sprintf("capturable=%v", capturable), func(t *testing.T) {
			w := leaf(t, 8)
			opt, err := optim.NewSGD([]*torch.Tensor{w},
				optim.SGDOptions{LR: 0.125, Momentum: 0.5, Capturable: capturable})
			if err != nil {
				t.Fatal(err)
			}
			defer opt.Close()
			turn(t, w)
			if err := opt.Step(); err != nil { // v = 16
				t.Fatal(err)
			}
			moved := w.NoGrad().To(0)
			if err := w.SetData(moved); err != nil {
				t.Fatal(err)
			}
			moved.Close()
			turn(t, w)
			if err := opt.Step(); err != nil { // v = 8 + 12
				t.Fatal(err)
			}
			want(t, w, 3.5)
		})
	}
}
