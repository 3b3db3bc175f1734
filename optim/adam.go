package optim

import (
	"errors"

	"github.com/torchstream/torchstream/torch"
)

// Adam implements torch.optim.Adam by PyTorch's formula, where g is the gradient, p the parameter
// and t the number of the parameter's step, from 1 on:
//
//	g = g + WeightDecay*p
//	m = β1*m + (1-β1)*g
//	v = β2*v + (1-β2)*g*g
//	w = v, or the maximum of v so far with AMSGrad
//	p = p - LR * m/(1-β1^t) / (√w/√(1-β2^t) + Eps)
//
// Its state is t, m, v and w; PyTorch calls them step, exp_avg, exp_avg_sq and max_exp_avg_sq. t is
// in device memory, so that a captured Step increments it. m, v and w have the parameter's dtype.
type Adam struct{ engine }

// AdamW is [Adam] with decoupled weight decay, which does not change m and v (torch.optim.AdamW).
// The first line of Adam's formula becomes
//
//	p = p - LR*WeightDecay*p
type AdamW struct{ engine }

// AdamOptions are the options of [NewAdam].
type AdamOptions struct {
	LR          float64     // learning rate; 0 stands for 0.001
	Betas       *[2]float64 // β1 and β2, from 0 to below 1; nil stands for {0.9, 0.999}
	Eps         float64     // 0 stands for 1e-8
	WeightDecay float64
	AMSGrad     bool // divides by the maximum of v so far
	Maximize    bool // maximizes the objective: uses -g instead of g

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

// AdamWOptions are the options of [NewAdamW].
type AdamWOptions struct {
	LR            float64     // learning rate; 0 stands for 0.001
	Betas         *[2]float64 // β1 and β2, from 0 to below 1; nil stands for {0.9, 0.999}
	Eps           float64     // 0 stands for 1e-8
	WeightDecay   float64     // 0 stands for 0.01
	NoWeightDecay bool        // turns weight decay off
	AMSGrad       bool        // divides by the maximum of v so far
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

// NewAdam returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them.
func NewAdam(params []*torch.Tensor, o AdamOptions) (*Adam, error) {
	c := common{lr: orDefault(o.LR, 0.001), decay: o.WeightDecay, keep: o.KeepGradients,
		capturable: o.Capturable, masters: o.MasterWeights, maximize: o.Maximize}
	r, err := newAdamRule("Adam", c, o.Betas, o.Eps)
	if err != nil {
		return nil, err
	}
	r.amsgrad = o.AMSGrad
	a := &Adam{}
	if err := a.init("Adam", c, r, params, o.Groups); err != nil {
		return nil, err
	}
	return a, nil
}

// NewAdamW returns an optimizer for the parameters and the groups. All parameters must be leaves.
// The caller keeps ownership of them.
func NewAdamW(params []*torch.Tensor, o AdamWOptions) (*AdamW, error) {
	r, c, err := o.rule("AdamW")
	if err != nil {
		return nil, err
	}
	a := &AdamW{}
	if err := a.init("AdamW", c, r, params, o.Groups); err != nil {
		return nil, err
	}
	return a, nil
}

// rule returns the formula with its options, for an optimizer of the given name.
func (o AdamWOptions) rule(name string) (adamRule, common, error) {
	decay, err := decoupled(name, o.WeightDecay, o.NoWeightDecay, 0.01)
	if err != nil {
		return adamRule{}, common{}, err
	}
	c := common{lr: orDefault(o.LR, 0.001), decay: decay, keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights, maximize: o.Maximize}
	r, err := newAdamRule(name, c, o.Betas, o.Eps)
	r.amsgrad, r.decoupled = o.AMSGrad, true
	return r, c, err
}

// SetMomentum sets β1 of all groups, from the next step on. beta1 must be at least 0 and below 1.
// The optimizer must have been made without Capturable. An error changes nothing. LoadState does
// not restore β1; a resumed [Scheduler] sets it.
func (a *Adam) SetMomentum(beta1 float64) error { return a.setMomentum(beta1) }

// Momentum returns the current β1.
func (a *Adam) Momentum() float64 { return a.firstMomentum() }

// SetMomentum replaces β1, as [Adam.SetMomentum] does.
func (a *AdamW) SetMomentum(beta1 float64) error { return a.setMomentum(beta1) }

// Momentum returns the current β1.
func (a *AdamW) Momentum() float64 { return a.firstMomentum() }

type adamRule struct {
	beta1, beta2, eps            float64
	amsgrad, decoupled, maximize bool
}

func newAdamRule(name string, c common, betas *[2]float64, eps float64) (adamRule, error) {
	if betas == nil {
		betas = &[2]float64{0.9, 0.999}
	}
	r := adamRule{beta1: betas[0], beta2: betas[1], eps: orDefault(eps, 1e-8), maximize: c.maximize}
	return r, check(name, option{"LR", c.lr, 0}, option{"Betas[0]", r.beta1, 1},
		option{"Betas[1]", r.beta2, 1}, option{"Eps", r.eps, 0}, option{"WeightDecay", c.decay, 0})
}

func (r adamRule) momentum() float64 { return r.beta1 }

func (r adamRule) withMomentum(beta1 float64) (rule, error) {
	if beta1 >= 1 {
		return nil, errors.New("β1 must be below 1")
	}
	r.beta1 = beta1
	return r, nil
}

func (r adamRule) states() []string {
	names := []string{stepName, "exp_avg", "exp_avg_sq"}
	if r.amsgrad {
		names = append(names, "max_exp_avg_sq")
	}
	return names
}

func (r adamRule) start(g *group, s *slot) error { return g.zeros(s) }

func (r adamRule) dense(bool) bool { return true }

func (r adamRule) skips(*batch) bool { return true }

func (r adamRule) options() map[string]any {
	return map[string]any{"betas": []float64{r.beta1, r.beta2}, "eps": r.eps, "amsgrad": r.amsgrad,
		"maximize": r.maximize, "decoupled_weight_decay": r.decoupled}
}

func (r adamRule) step(b *batch) error {
	if err := b.count(); err != nil {
		return err
	}
	return r.fused(b, b.params, b.g.lr, b.g.rate, b.g.decay)
}

// fused runs the formula's fused operator on target, which holds the parameters or the tensors that
// replace them.
func (r adamRule) fused(b *batch, target []*torch.Tensor, lr float64, rate *torch.Tensor, decay float64) error {
	steps, m, v := b.state(0), b.state(1), b.state(2)
	var maxima []*torch.Tensor
	if r.amsgrad {
		maxima = b.state(3)
	}
	grads, err := b.flat(b.grads)
	if err != nil {
		return err
	}
	if b.e.found != nil {
		return r.fusedUnlessFound(b, target, grads, maxima, lr, rate, decay)
	}
	switch {
	case rate == nil && r.decoupled:
		return torch.FusedAdamW_(target, grads, m, v, maxima, steps, lr, r.beta1, r.beta2, decay, r.eps,
			r.amsgrad, r.maximize)
	case rate == nil:
		return torch.FusedAdam_(target, grads, m, v, maxima, steps, lr, r.beta1, r.beta2, decay, r.eps,
			r.amsgrad, r.maximize)
	case r.decoupled:
		return torch.FusedAdamWLR_(target, grads, m, v, maxima, steps, rate, r.beta1, r.beta2, decay, r.eps,
			r.amsgrad, r.maximize)
	}
	return torch.FusedAdamLR_(target, grads, m, v, maxima, steps, rate, r.beta1, r.beta2, decay, r.eps,
		r.amsgrad, r.maximize)
}

// fusedUnlessFound runs the fused operator. If the device has found gradients that are not finite,
// the operator changes nothing.
func (r adamRule) fusedUnlessFound(b *batch, target, grads, maxima []*torch.Tensor, lr float64,
	rate *torch.Tensor, decay float64) error {
	name := "_fused_adam_"
	if r.decoupled {
		name = "_fused_adamw_"
	}
	o := torch.Keywords{
		"lr": lr, "beta1": r.beta1, "beta2": r.beta2, "weight_decay": decay, "eps": r.eps, "amsgrad": r.amsgrad,
		"maximize": r.maximize, "found_inf": b.e.found,
	}
	if rate != nil {
		name, o["lr"] = name+".tensor_lr", rate
	}
	_, err := torch.Call(name, target, grads, b.state(1), b.state(2), maxima, b.state(0), o)
	return err
}
