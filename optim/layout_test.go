package optim_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/trace"
)

// onEach runs a test with each optimizer, with and without Capturable. The test gets a function
// that makes the optimizer for a parameter.
func onEach(t *testing.T, test func(t *testing.T, of func(w *torch.Tensor) optim.Optimizer)) {
	for name, make := range makers {
		if name == "adamw-groups" { // needs several parameters
			continue
		}
		for _, capturable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(t *testing.T) {
				test(t, func(w *torch.Tensor) optim.Optimizer {
					t.Helper()
					if err := w.SetRequiresGrad(true); err != nil {
						t.Fatal(err)
					}
					opt, err := make([]*torch.Tensor{w}, capturable)
					if err != nil {
						t.Fatal(err)
					}
					return opt
				})
			})
		}
	}
}

// A step gives the same values for every memory order of parameter, gradient and state.
func TestStepDoesNotDependOnTheMemoryFormat(t *testing.T) {
	const n = 2 * 3 * 2 * 2
	numbers := make([]float32, n)
	for i := range numbers {
		numbers[i] = float32(i*i%17) / 8
	}
	tensorOf := func(last bool) *torch.Tensor {
		x, err := torch.FromFloat32s(numbers, 2, 3, 2, 2)
		if err != nil {
			t.Fatal(err)
		}
		if last {
			y := x.Contiguous(torch.ChannelsLast)
			x.Close()
			x = y
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	onEach(t, func(t *testing.T, of func(w *torch.Tensor) optim.Optimizer) {
		run := func(grads []bool, change bool) []float64 {
			w, err := torch.Ones(cuda.CPU, torch.Float32, 2, 3, 2, 2)
			if err != nil {
				t.Fatal(err)
			}
			defer w.Close()
			opt := of(w)
			defer opt.Close()
			for i, last := range grads {
				if change && i == 1 {
					y := w.NoGrad().Contiguous(torch.ChannelsLast)
					if err := w.SetData(y); err != nil {
						t.Fatal(err)
					}
					y.Close()
				}
				if err := w.SetGrad(tensorOf(last)); err != nil {
					t.Fatal(err)
				}
				if err := opt.Step(); err != nil {
					t.Fatal(err)
				}
			}
			return values(t, w)
		}
		want := run([]bool{false, false, false}, false)
		if got := run([]bool{true, false, true}, false); !slices.Equal(got, want) {
			t.Errorf("gradients in channels last: %v, want %v", got, want)
		}
		if got := run([]bool{false, true, true}, true); !slices.Equal(got, want) {
			t.Errorf("a parameter that becomes channels last: %v, want %v", got, want)
		}
	})
}

// A step does not copy gradients in channels_last, although LibTorch's fused operators would do so
// on a CPU.
func TestStepCopiesNoGradientInChannelsLast(t *testing.T) {
	onEach(t, func(t *testing.T, of func(w *torch.Tensor) optim.Optimizer) {
		ones, err := torch.Ones(cuda.CPU, torch.Float32, 2, 3, 2, 2)
		if err != nil {
			t.Fatal(err)
		}
		defer ones.Close()
		w := ones.Contiguous(torch.ChannelsLast)
		defer w.Close()
		opt := of(w)
		defer opt.Close()
		backward := func() {
			if err := w.Mul(w).Sum().Backward(); err != nil {
				t.Fatal(err)
			}
		}
		backward()
		if err := opt.Step(); err != nil { // starts the state
			t.Fatal(err)
		}
		backward()
		recording, err := trace.Start(trace.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if err := opt.Step(); err != nil {
			t.Error(err)
		}
		recorded, err := recording.Stop()
		if err != nil {
			t.Fatal(err)
		}
		if len(recorded.Events) == 0 {
			t.Error("0 events were recorded, want the step's operators")
		}
		for _, e := range recorded.Events {
			if e.Name == "aten::clone" {
				t.Errorf("the step calls %s at %v", e.Name, e.Start)
			}
		}
	})
}

// If a parameter is a view with gaps, Step either updates it and leaves the gaps unchanged, or
// refuses it.
func TestStepLeavesGapsAlone(t *testing.T) {
	onEach(t, func(t *testing.T, of func(w *torch.Tensor) optim.Optimizer) {
		base, err := torch.Ones(cuda.CPU, torch.Float32, 4, 4)
		if err != nil {
			t.Fatal(err)
		}
		defer base.Close()
		w := base.Narrow(1, 0, 2)
		defer w.Close()
		opt := of(w)
		defer opt.Close()
		if err := w.Mul(w).Sum().Backward(); err != nil {
			t.Fatal(err)
		}
		err = opt.Step()
		checkGaps(t, base, err)
	})
}

// checkGaps checks the 4 x 4 tensor base, initially ones, after a Step on its left half returned
// the error step. Without an error exactly the left half must have changed, and with an error
// nothing.
func checkGaps(t *testing.T, base *torch.Tensor, step error) {
	t.Helper()
	for i, v := range values(t, base) {
		if inside := i%4 < 2; (v != 1) != (inside && step == nil) {
			t.Errorf("element %d is %v after Step's error %v", i, v, step)
		}
	}
	if step != nil && !strings.Contains(step.Error(), "parameter 0 has the shape [4 2] and the strides [4 1]") {
		t.Error(step)
	}
}

// A gradient that the program sets may have gaps if the parameter has them.
func TestStepLeavesTheGapsOfParameterAndGradientAlone(t *testing.T) {
	for name, make := range makers {
		if name == "adamw-groups" { // needs several parameters
			continue
		}
		for _, capturable := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/capturable=%v", name, capturable), func(t *testing.T) {
				s := torch.NewScope("gaps")
				defer s.Close()
				ones, err := torch.Ones(cuda.CPU, torch.Float32, 4, 4)
				if err != nil {
					t.Fatal(err)
				}
				base := ones.In(s)
				w, grad := base.Narrow(1, 0, 2), base.MulScalar(2).Narrow(1, 0, 2)
				if err := w.SetRequiresGrad(true); err != nil {
					t.Fatal(err)
				}
				if err := w.SetGrad(grad); err != nil {
					t.Fatal(err)
				}
				opt, err := make([]*torch.Tensor{w}, capturable)
				if err != nil {
					t.Fatal(err)
				}
				defer opt.Close()
				err = opt.Step()
				checkGaps(t, ones, err)
			})
		}
	}
}
