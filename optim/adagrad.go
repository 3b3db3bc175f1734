package optim

import "github.com/torchstream/torchstream/torch"

// Adagrad implements torch.optim.Adagrad by PyTorch's formula, where g is the gradient, p the
// parameter and t the number of the parameter's step, from 1 on:
//
//	g = g + WeightDecay*p
//	s = s + g*g    (s is InitialAccumulator before the first step)
//	p = p - LR/(1+(t-1)*LRDecay) * g / (√s + Eps)
//
// Its state is t and s; PyTorch calls them step and sum. t is in device memory, so that a captured
// Step increments it.
type Adagrad struct{ engine }

// AdagradOptions are the options of [NewAdagrad].
type AdagradOptions struct {
	LR                 float64 // learning rate; 0 stands for 0.01
	LRDecay            float64
	WeightDecay        float64
	InitialAccumulator float64
	Eps                float64 // 0 stands for 1e-10
	Maximize           bool    // maximizes the objective: uses -g instead of g

	// Groups holds further parameters. Each group has its own options.
	Groups []Group

	// KeepGradients makes Step keep the gradients until ZeroGrad. By default Step drops them.
	KeepGradients bool

	// Capturable keeps the learning rate in a tensor on the parameters' device, so that a captured
	// Step follows SetLR. All parameters of a group must be on one device. The tensor is float32.
	Capturable bool

	// MasterWeights keeps and updates float32 copies of 16-bit parameters, with float32 gradients
	// and state: see the package documentation.
	MasterWeights bool
}

// NewAdagrad returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them.
func NewAdagrad(params []*torch.Tensor, o AdagradOptions) (*Adagrad, error) {
	o.LR, o.Eps = orDefault(o.LR, 0.01), orDefault(o.Eps, 1e-10)
	if err := check("Adagrad", option{"LR", o.LR, 0}, option{"LRDecay", o.LRDecay, 0},
		option{"WeightDecay", o.WeightDecay, 0},
		option{"InitialAccumulator", o.InitialAccumulator, 0}, option{"Eps", o.Eps, 0}); err != nil {
		return nil, err
	}
	a := &Adagrad{}
	c := common{lr: o.LR, decay: o.WeightDecay, keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights, maximize: o.Maximize}
	if err := a.init("Adagrad", c, adagradRule{o}, params, o.Groups); err != nil {
		return nil, err
	}
	return a, nil
}

type adagradRule struct{ o AdagradOptions }

func (r adagradRule) states() []string { return []string{stepName, "sum"} }

func (r adagradRule) start(g *group, s *slot) error {
	if err := g.zeros(s); err != nil || r.o.InitialAccumulator == 0 {
		return err
	}
	return s.state[1].Fill_(r.o.InitialAccumulator).Err()
}

func (r adagradRule) dense(bool) bool { return true }

func (r adagradRule) skips(*batch) bool { return false }

func (r adagradRule) options() map[string]any {
	return map[string]any{"lr_decay": r.o.LRDecay, "eps": r.o.Eps,
		"initial_accumulator_value": r.o.InitialAccumulator, "maximize": r.o.Maximize}
}

func (r adagradRule) step(b *batch) error {
	if err := b.count(); err != nil {
		return err
	}
	grads, err := b.flat(b.grads)
	if err != nil {
		return err
	}
	if b.g.rate != nil {
		return torch.FusedAdagradLR_(b.params, grads, b.state(1), b.state(0), b.g.rate, r.o.LRDecay,
			b.g.decay, r.o.Eps, r.o.Maximize)
	}
	return torch.FusedAdagrad_(b.params, grads, b.state(1), b.state(0), b.g.lr, r.o.LRDecay, b.g.decay,
		r.o.Eps, r.o.Maximize)
}
