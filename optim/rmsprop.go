package optim

import "github.com/torchstream/torchstream/torch"

// RMSprop implements torch.optim.RMSprop by PyTorch's formula, where g is the gradient and p the
// parameter:
//
//	g = g + WeightDecay*p
//	v = Alpha*v + (1-Alpha)*g*g
//	a = Alpha*a + (1-Alpha)*g      (only with Centered; else a = 0)
//	u = g / (√(v-a*a) + Eps)
//	u = Momentum*b + u, and b = u  (only with Momentum)
//	p = p - LR*u
//
// Its state is v, a and b; PyTorch calls them square_avg, grad_avg and momentum_buffer. The state
// also has step, because PyTorch cannot load a state without it.
type RMSprop struct{ engine }

// RMSpropOptions are the options of [NewRMSprop].
type RMSpropOptions struct {
	LR          float64 // learning rate; 0 stands for 0.01
	Alpha       float64 // 0 stands for 0.99
	Eps         float64 // 0 stands for 1e-8
	WeightDecay float64
	Momentum    float64
	Centered    bool // divides by the standard deviation rather than the root of the mean square
	Maximize    bool // maximizes the objective: uses -g instead of g

	// Groups holds further parameters. Each group has its own options.
	Groups []Group

	// KeepGradients makes Step keep the gradients unchanged, until ZeroGrad. By default Step works
	// in their memory and drops them.
	KeepGradients bool

	// Capturable keeps the learning rate in a tensor on the parameters' device, so that a captured
	// Step follows SetLR. All parameters of a group must be on one device. The tensor is float32.
	Capturable bool

	// MasterWeights keeps and updates float32 copies of 16-bit parameters, with float32 gradients
	// and state: see the package documentation.
	MasterWeights bool
}

// NewRMSprop returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them.
func NewRMSprop(params []*torch.Tensor, o RMSpropOptions) (*RMSprop, error) {
	o.LR, o.Alpha, o.Eps = orDefault(o.LR, 0.01), orDefault(o.Alpha, 0.99), orDefault(o.Eps, 1e-8)
	if err := check("RMSprop", option{"LR", o.LR, 0}, option{"Alpha", o.Alpha, 0}, option{"Eps", o.Eps, 0},
		option{"WeightDecay", o.WeightDecay, 0}, option{"Momentum", o.Momentum, 0}); err != nil {
		return nil, err
	}
	p := &RMSprop{}
	c := common{lr: o.LR, decay: o.WeightDecay, keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights, maximize: o.Maximize}
	if err := p.init("RMSprop", c, rmspropRule{o}, params, o.Groups); err != nil {
		return nil, err
	}
	return p, nil
}

type rmspropRule struct{ o RMSpropOptions }

func (r rmspropRule) states() []string {
	names := []string{stepName, "square_avg"}
	if r.o.Centered {
		names = append(names, "grad_avg")
	}
	if r.o.Momentum != 0 {
		names = append(names, "momentum_buffer")
	}
	return names
}

func (r rmspropRule) start(g *group, s *slot) error { return g.zeros(s) }

func (r rmspropRule) dense(bool) bool { return false }

func (r rmspropRule) skips(*batch) bool { return false }

func (r rmspropRule) options() map[string]any {
	return map[string]any{"momentum": r.o.Momentum, "alpha": r.o.Alpha, "eps": r.o.Eps,
		"centered": r.o.Centered, "maximize": r.o.Maximize}
}

func (r rmspropRule) step(b *batch) error {
	if err := b.count(); err != nil {
		return err
	}
	if err := b.adjustGrads(); err != nil {
		return err
	}
	deviation, err := r.deviation(b)
	if err != nil {
		return err
	}
	switch {
	case r.o.Momentum != 0:
		velocity := b.state(len(r.states()) - 1)
		if err := torch.ForeachMul_(velocity, r.o.Momentum); err != nil {
			return err
		}
		if err := torch.ForeachAddcdiv_(velocity, b.grads, deviation, 1); err != nil {
			return err
		}
		return b.subtract(b.params, velocity, 1, false)
	case b.g.rate == nil:
		return torch.ForeachAddcdiv_(b.params, b.grads, deviation, -b.g.lr)
	}
	update, err := b.own(torch.ForeachDiv(b.grads, deviation))
	if err != nil {
		return err
	}
	return b.subtract(b.params, update, 1, true)
}

// deviation updates the averages and returns the divisors of the gradients.
func (r rmspropRule) deviation(b *batch) ([]*torch.Tensor, error) {
	squares := b.state(1)
	if err := torch.ForeachMul_(squares, r.o.Alpha); err != nil {
		return nil, err
	}
	if err := torch.ForeachAddcmul_(squares, b.grads, b.grads, 1-r.o.Alpha); err != nil {
		return nil, err
	}
	var roots []*torch.Tensor
	var err error
	if r.o.Centered {
		means := b.state(2)
		if err := torch.ForeachLerp_(means, b.grads, 1-r.o.Alpha); err != nil {
			return nil, err
		}
		if roots, err = b.own(torch.ForeachAddcmul(squares, means, means, -1)); err == nil {
			err = torch.ForeachSqrt_(roots)
		}
	} else {
		roots, err = b.own(torch.ForeachSqrt(squares))
	}
	if err != nil {
		return nil, err
	}
	return roots, torch.ForeachAddScalar_(roots, r.o.Eps)
}
