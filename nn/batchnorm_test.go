package nn_test

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

// state returns the values of y and of the module's tensors.
func state(t *testing.T, norm *nn.BatchNorm2d, y *torch.Tensor) [][]float32 {
	t.Helper()
	var all [][]float32
	for _, x := range []*torch.Tensor{y, norm.RunningMean, norm.RunningVar, norm.NumBatches.ToDType(torch.Float32)} {
		values, err := x.Float32s()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, values)
	}
	return all
}

// noise returns random images.
func noise(t *testing.T, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.Randn(cuda.CPU, torch.Float32, shape...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { x.Close() })
	return x
}

// ForwardReLU computes the same as normalisation, sum and ReLU one after the other: in training, in
// evaluation, and with a function passed to Synchronize.
func TestForwardReLUIsThreeOperators(t *testing.T) {
	x, residual := noise(t, 2, 3, 4, 5), noise(t, 2, 3, 4, 5)
	calls := 0
	negative := func(x, weight, bias, runningMean, runningVar *torch.Tensor, momentum, eps float64) *torch.Tensor {
		calls++
		return x.Neg()
	}
	for name, prepare := range map[string]func(*nn.BatchNorm2d){
		"training":    func(*nn.BatchNorm2d) {},
		"evaluation":  func(b *nn.BatchNorm2d) { nn.Train(b, false) },
		"synchronise": func(b *nn.BatchNorm2d) { b.Synchronize(negative) },
	} {
		for kind, sum := range map[string]*torch.Tensor{"alone": nil, "residual": residual} {
			t.Run(name+"/"+kind, func(t *testing.T) {
				results := func(forward func(b *nn.BatchNorm2d) *torch.Tensor) [][]float32 {
					b := nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{Momentum: 0.3})
					defer nn.Close(b)
					prepare(b)
					return state(t, b, forward(b))
				}
				got := results(func(b *nn.BatchNorm2d) *torch.Tensor { return b.ForwardReLU(x, sum) })
				want := results(func(b *nn.BatchNorm2d) *torch.Tensor {
					y := b.Forward(x)
					if sum != nil {
						y = y.Add(sum)
					}
					return y.ReLU()
				})
				for i := range want {
					if !slices.Equal(got[i], want[i]) {
						t.Errorf("values %d are %v, want %v", i, got[i], want[i])
					}
				}
			})
		}
	}
	if calls != 4 {
		t.Errorf("%d calls of the function of Synchronize, want 4", calls)
	}
}

func TestForwardReLUNamesItsLayer(t *testing.T) {
	b := nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{})
	defer nn.Close(b)
	for name, y := range map[string]*torch.Tensor{
		"rank":     b.ForwardReLU(images(t, 2, 3), nil),
		"values":   b.ForwardReLU(images(t, 1, 3, 1, 1), nil),
		"channels": b.ForwardReLU(images(t, 2, 4, 2, 2), nil),
		"residual": b.ForwardReLU(images(t, 2, 3, 2, 2), images(t, 7)),
	} {
		if err := y.Err(); err == nil || !strings.Contains(err.Error(), "nn: BatchNorm2d made at batchnorm_test.go:") {
			t.Errorf("%s: got %v, want an error with the layer's line in batchnorm_test.go", name, err)
		}
	}
	failed := torch.Fail("x", errors.New("earlier"))
	if y := b.ForwardReLU(failed, nil); y.Err() != failed.Err() {
		t.Errorf("the error is %v, want that of the input", y.Err())
	}
}

// In a Sequential, a normalisation followed by a ReLU computes the same values as the two modules
// one after the other. Both modules keep their names.
func TestSequentialOfNormAndReLU(t *testing.T) {
	x := noise(t, 2, 3, 4, 5)
	norm, other := nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{}), nn.NewBatchNorm2d(3, nn.BatchNorm2dOptions{})
	net := nn.NewSequential(norm, nn.NewReLU(), nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.MulScalar(3) }))
	defer nn.Close(net)
	defer nn.Close(other)
	got := state(t, norm, net.Forward(x))
	want := state(t, other, other.Forward(x).ReLU().MulScalar(3))
	for i := range want {
		if !slices.Equal(got[i], want[i]) {
			t.Errorf("values %d are %v, want %v", i, got[i], want[i])
		}
	}
	if err := net.Forward(images(t, 2, 3)).Err(); err == nil || !strings.Contains(err.Error(), "0: BatchNorm2d") {
		t.Errorf("the error is %v, want that of module 0", err)
	}
	var made *torch.Tensor
	norm.Synchronize(func(x, weight, bias, runningMean, runningVar *torch.Tensor, momentum, eps float64) *torch.Tensor {
		made = x.Neg()
		return made
	})
	if y := net.Forward(x); y.Err() != nil {
		t.Error(y.Err())
	}
	if lowest, err := made.Min().Float64(); err != nil || lowest >= 0 {
		t.Errorf("the minimum of a function's result after ReLU is %v, %v, want less than 0, nil",
			lowest, err)
	}
	last := nn.NewSequential(nn.NewIdentity(), other)
	if y := last.Forward(x); y.Err() != nil {
		t.Error(y.Err())
	}
}

// In training on a GPU, a normalisation followed by a ReLU launches only two kernels.
func TestNormAndReLUAreTwoKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	x, err := torch.Randn(0, torch.BFloat16, 2, 8, 6, 6)
	if err != nil {
		t.Fatal(err)
	}
	scope := torch.NewScope("test")
	defer scope.Close()
	x = scope.Own(x).Contiguous(torch.ChannelsLast)
	norm := nn.NewBatchNorm2d(8, nn.BatchNorm2dOptions{})
	net := nn.NewSequential(norm, nn.NewReLU())
	defer nn.Close(net)
	if err := nn.To(net, 0); err != nil {
		t.Fatal(err)
	}
	kernels := func(training bool, forward func() *torch.Tensor) int {
		nn.Train(net, training)
		pass := func() error { return forward().Err() }
		if err := pass(); err != nil {
			t.Fatal(err)
		}
		g, err := cuda.Capture(cuda.CaptureOptions{}, pass)
		if err != nil {
			t.Fatal(err)
		}
		defer g.Close()
		kinds, err := g.NodeKinds()
		if err != nil {
			t.Fatal(err)
		}
		return kinds.Kernels
	}
	const counted = 1 // the kernel that counts the batches
	if n := kernels(true, func() *torch.Tensor { return net.Forward(x) }); n != 2+counted {
		t.Errorf("%d kernels of a Sequential, want 2 and that of the count", n)
	}
	if n := kernels(true, func() *torch.Tensor { return norm.ForwardReLU(x, x) }); n != 2+counted {
		t.Errorf("%d kernels of ForwardReLU, want 2 and that of the count", n)
	}
	of := kernels(false, func() *torch.Tensor { return norm.Forward(x).ReLU_() })
	if n := kernels(false, func() *torch.Tensor { return net.Forward(x) }); n != of {
		t.Errorf("%d kernels in evaluation, want the %d of two operators", n, of)
	}
}
