package optim

import (
	"github.com/torchstream/torchstream/torch"
)

// LAMB implements LAMB (You et al., Large Batch Optimization for Deep Learning, algorithm 2, with
// bias correction), where g is the gradient, p the parameter and t the number of the parameter's
// step, from 1 on:
//
//	m = β1*m + (1-β1)*g
//	v = β2*v + (1-β2)*g*g
//	u = m/(1-β1^t) / (√v/√(1-β2^t) + Eps) + WeightDecay*p
//	r = |p|/|u|, or 1 if one of the norms is 0
//	p = p - LR*r*u
//
// PyTorch has no LAMB. The state has the names of Adam's: step, exp_avg and exp_avg_sq. t is in
// device memory, so that a captured Step increments it. Step needs memory for two more copies of
// the parameters.
type LAMB struct{ engine }

// LAMBOptions are the options of [NewLAMB].
type LAMBOptions struct {
	LR            float64     // learning rate; 0 stands for 0.001
	Betas         *[2]float64 // β1 and β2, from 0 to below 1; nil stands for {0.9, 0.999}
	Eps           float64     // 0 stands for 1e-6
	WeightDecay   float64     // 0 stands for 0.01
	NoWeightDecay bool        // turns weight decay off
	Maximize      bool        // maximizes the objective: uses -g instead of g

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

// NewLAMB returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them.
func NewLAMB(params []*torch.Tensor, o LAMBOptions) (*LAMB, error) {
	decay, err := decoupled("LAMB", o.WeightDecay, o.NoWeightDecay, 0.01)
	if err != nil {
		return nil, err
	}
	c := common{lr: orDefault(o.LR, 0.001), decay: decay, keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights, maximize: o.Maximize}
	adam, err := newAdamRule("LAMB", c, o.Betas, orDefault(o.Eps, 1e-6))
	if err != nil {
		return nil, err
	}
	l := &LAMB{}
	if err := l.init("LAMB", c, lambRule{adam}, params, o.Groups); err != nil {
		return nil, err
	}
	return l, nil
}

// lambRule uses Adam's state and options.
type lambRule struct{ adamRule }

// dense returns false: Adam's operator does not run on the parameters themselves.
func (r lambRule) dense(bool) bool { return false }

func (r lambRule) skips(*batch) bool { return false }

// step calls Adam's operator on zeros, with learning rate 1. The operator then writes the first
// term of -u.
func (r lambRule) step(b *batch) error {
	if err := b.count(); err != nil {
		return err
	}
	u, err := b.own(torch.ForeachMul(b.params, 0))
	if err != nil {
		return err
	}
	if err := r.fused(b, u, 1, nil, 0); err != nil {
		return err
	}
	if b.g.decay != 0 {
		if err := torch.ForeachAdd_(u, b.params, -b.g.decay); err != nil {
			return err
		}
	}
	scope := torch.NewScope("optim.LAMB.Step")
	defer scope.Close()
	ratios, err := trustRatios(scope, b, u)
	if err != nil {
		return err
	}
	for _, alike := range b.byShape() {
		if err := r.apply(b, pick(u, alike), pick(ratios, alike), pick(b.params, alike)); err != nil {
			return err
		}
	}
	return nil
}

// trustRatios returns |p|/|u| for every parameter, as scalar tensors of the scope.
func trustRatios(scope *torch.Scope, b *batch, u []*torch.Tensor) ([]*torch.Tensor, error) {
	of, err := b.own(torch.ForeachNorm(b.params, 2))
	if err != nil {
		return nil, err
	}
	by, err := b.own(torch.ForeachNorm(u, 2))
	if err != nil {
		return nil, err
	}
	p, q := scope.Own(torch.Stack(of, 0)), scope.Own(torch.Stack(by, 0))
	defined := p.Minimum(q).GtScalar(0)
	return torch.Where(defined, p.Div(q), p.ZerosLike().Fill_(1)).Unbind(0)
}

// apply adds the updates -u, each times its ratio and the learning rate, to parameters of one
// shape.
func (r lambRule) apply(b *batch, u, ratios, params []*torch.Tensor) error {
	scope := torch.NewScope("optim.LAMB.Step")
	defer scope.Close()
	updates := scope.Own(torch.Stack(u, 0))
	if err := updates.Err(); err != nil {
		return err
	}
	column := make([]int64, len(updates.Shape()))
	for i := range column {
		column[i] = 1
	}
	column[0] = int64(len(u))
	scaled, err := updates.Mul_(torch.Stack(ratios, 0).View(column...)).Unbind(0)
	if err != nil {
		return err
	}
	return b.subtract(params, scaled, -1, true)
}
