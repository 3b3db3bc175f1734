package optim_test

import (
	"fmt"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

func TestOptimizersAndGroupsPrintTheirOptions(t *testing.T) {
	leaf := func() *torch.Tensor {
		x, err := torch.Ones(cuda.CPU, torch.Float32, 3)
		if err == nil {
			err = x.SetRequiresGrad(true)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		return x
	}
	a, b := leaf(), leaf()
	sgd, err := optim.NewSGD([]*torch.Tensor{a, b}, optim.SGDOptions{LR: 0.1, Momentum: 0.9, Nesterov: true})
	if err != nil {
		t.Fatal(err)
	}
	defer sgd.Close()
	adam, err := optim.NewAdamW([]*torch.Tensor{a}, optim.AdamWOptions{WeightDecay: 0.25,
		Groups: []optim.Group{{Params: []*torch.Tensor{b}, LR: 0.5, NoWeightDecay: true}}})
	if err != nil {
		t.Fatal(err)
	}
	defer adam.Close()
	for _, c := range []struct {
		of   any
		want string
	}{
		{sgd, "SGD(2 parameters, lr 0.1, momentum 0.9, nesterov true)"},
		{adam, `AdamW(
  group 0: 1 parameters, lr 0.001, weight_decay 0.25, betas [0.9 0.999], decoupled_weight_decay true, eps 1e-08
  group 1: 1 parameters, lr 0.5, betas [0.9 0.999], decoupled_weight_decay true, eps 1e-08
)`},
		{adam.Groups(), "[Group(1 parameters, LR 0.001, WeightDecay 0.25) Group(1 parameters, LR 0.5, NoWeightDecay)]"},
	} {
		if got := fmt.Sprint(c.of); got != c.want {
			t.Errorf("got\n%s\nwant\n%s", got, c.want)
		}
	}
}
