package torch_test

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// package nn compares the values and gradients with PyTorch's.
func TestGaussianNLLLossReduces(t *testing.T) {
	of := func(values ...float32) *torch.Tensor {
		x, err := torch.FromSlice(values)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	x, target, variance := of(1, 2), of(3, 2), of(4, -1)
	before := torch.LiveTensors()
	each := x.GaussianNLLLoss(target, variance, torch.GaussianNLLLossOptions{Eps: 0.5, Reduction: torch.ReduceNone})
	if n := torch.LiveTensors() - before; n != 1 {
		t.Errorf("%d tensors more, want the loss", n)
	}
	got, err := each.Float64s()
	if err != nil {
		t.Fatal(err)
	}
	each.Close()
	for i, want := range []float64{(math.Log(4) + 1) / 2, math.Log(0.5) / 2} {
		if math.Abs(got[i]-want) > 1e-6 {
			t.Errorf("element %d is %v, want %v", i, got[i], want)
		}
	}
	if v, err := variance.Float32s(); err != nil || v[1] != -1 {
		t.Errorf("the variance is %v afterwards, %v, want -1, nil", v, err)
	}
	bad := x.GaussianNLLLoss(target, variance, torch.GaussianNLLLossOptions{Reduction: 7})
	if err := bad.Err(); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("a reduction of 7: %v, want cuda.ErrInvalidArgument", err)
	}
}
