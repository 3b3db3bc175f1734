package optim

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// SGD implements torch.optim.SGD, stochastic gradient descent with momentum, by PyTorch's formula,
// where g is the gradient, p the parameter and v its velocity:
//
//	g = g + WeightDecay*p
//	v = Momentum*v + (1-Dampening)*g    (v = g in the first step)
//	g = g + Momentum*v with Nesterov, else g = v
//	p = p - LR*g
//
// Its state is the velocity, which PyTorch calls momentum_buffer. Without Momentum there is no
// state.
type SGD struct{ engine }

// SGDOptions are the options of [NewSGD].
type SGDOptions struct {
	LR          float64 // learning rate; 0 stands for 0.001
	Momentum    float64
	Dampening   float64
	WeightDecay float64
	Nesterov    bool // requires Momentum and no Dampening
	Maximize    bool // maximizes the objective: uses -g instead of g

	// Groups holds further parameters. Each group has its own options.
	Groups []Group

	// KeepGradients makes Step keep the gradients unchanged, until ZeroGrad. By default Step works
	// in their memory and drops them.
	KeepGradients bool

	// Capturable keeps the learning rate in a tensor on the parameters' device, so that a captured
	// Step follows SetLR. Step then runs one kernel for all parameters of a dtype (LibTorch's fused
	// SGD), and all parameters of a group must be on one device.
	Capturable bool

	// MasterWeights keeps and updates float32 copies of 16-bit parameters, with float32 gradients
	// and state: see the package documentation.
	MasterWeights bool
}

// NewSGD returns an optimizer for the parameters and the groups. All parameters must be leaves. The
// caller keeps ownership of them.
func NewSGD(params []*torch.Tensor, o SGDOptions) (*SGD, error) {
	o.LR = orDefault(o.LR, 0.001)
	if err := check("SGD", option{"LR", o.LR, 0}, option{"Momentum", o.Momentum, 0},
		option{"WeightDecay", o.WeightDecay, 0}); err != nil {
		return nil, err
	}
	switch {
	case !finite(o.Dampening):
		return nil, fmt.Errorf("optim.NewSGD: Dampening is %v: it must be finite: %w", o.Dampening,
			cuda.ErrInvalidArgument)
	case o.Nesterov && (o.Momentum == 0 || o.Dampening != 0):
		return nil, fmt.Errorf("optim.NewSGD: %+v: Nesterov needs Momentum and no Dampening: %w", o,
			cuda.ErrInvalidArgument)
	}
	s := &SGD{}
	c := common{lr: o.LR, decay: o.WeightDecay, keep: o.KeepGradients, capturable: o.Capturable,
		masters: o.MasterWeights, maximize: o.Maximize}
	if err := s.init("SGD", c, sgdRule{o}, params, o.Groups); err != nil {
		return nil, err
	}
	return s, nil
}

// SetMomentum sets Momentum of all groups, from the next step on. The optimizer must have been made
// with a Momentum, and without Capturable. An error changes nothing. LoadState does not restore the
// momentum; a resumed [Scheduler] sets it.
func (s *SGD) SetMomentum(m float64) error { return s.setMomentum(m) }

// Momentum returns the current momentum.
func (s *SGD) Momentum() float64 { return s.firstMomentum() }

type sgdRule struct{ o SGDOptions }

func (r sgdRule) momentum() float64 { return r.o.Momentum }

func (r sgdRule) withMomentum(m float64) (rule, error) {
	if r.o.Momentum == 0 || m == 0 {
		return nil, errors.New("0 is an optimizer without velocities, which cannot begin or end: give " +
			"NewSGD a Momentum")
	}
	r.o.Momentum = m
	return r, nil
}

func (r sgdRule) states() []string {
	if r.o.Momentum == 0 {
		return nil
	}
	return []string{"momentum_buffer"}
}

// start leaves the velocity to the first step, which sets it to the gradient.
func (r sgdRule) start(*group, *slot) error { return nil }

func (r sgdRule) dense(fused bool) bool { return fused }

// skips returns false with dampening: the host must then tell the operator whether a step is the
// velocity's first.
func (r sgdRule) skips(b *batch) bool {
	return !r.unfusable(b) && (r.o.Momentum == 0 || r.o.Dampening == 0)
}

// unfusable reports whether LibTorch's fused operator would do nothing. The operator of LibTorch
// 2.11 does not change 16-bit parameters on a CPU.
func (r sgdRule) unfusable(b *batch) bool { return b.device == cuda.CPU && narrow(b.dtype) }

func (r sgdRule) options() map[string]any {
	return map[string]any{"momentum": r.o.Momentum, "dampening": r.o.Dampening, "nesterov": r.o.Nesterov,
		"maximize": r.o.Maximize}
}

func (r sgdRule) step(b *batch) error {
	switch {
	case b.e.found != nil:
		return r.fusedUnlessFound(b)
	case b.g.rate != nil && !r.unfusable(b):
		return r.fused(b)
	}
	return r.plain(b)
}

// plain computes the formula with foreach operators. It works in the gradients' memory, or in
// copies of them with KeepGradients.
func (r sgdRule) plain(b *batch) error {
	if err := b.adjustGrads(); err != nil {
		return err
	}
	if r.o.Momentum != 0 {
		v, err := r.accelerate(b)
		if err != nil {
			return err
		}
		if !r.o.Nesterov {
			b.grads = v
		} else if err := b.addToGrads(v, r.o.Momentum); err != nil {
			return err
		}
	}
	return b.subtract(b.params, b.grads, 1, false)
}

// accelerate updates and returns the velocities.
func (r sgdRule) accelerate(b *batch) ([]*torch.Tensor, error) {
	var old, push []*torch.Tensor
	for i, s := range b.slots {
		if s.state[0] != nil {
			old, push = append(old, s.state[0]), append(push, b.grads[i])
		}
	}
	if len(old) > 0 {
		if err := torch.ForeachMul_(old, r.o.Momentum); err != nil {
			return nil, err
		}
		if err := torch.ForeachAdd_(old, push, 1-r.o.Dampening); err != nil {
			return nil, err
		}
	}
	for i, s := range b.slots {
		if s.state[0] == nil {
			if err := s.begin(b.grads[i]); err != nil {
				return nil, err
			}
		}
	}
	return b.state(0), nil
}

// begin sets the parameter's velocity to a copy of the gradient.
func (s *slot) begin(grad *torch.Tensor) error {
	v := grad.Clone().Keep() // the gradient's scope ends with the step
	if err := v.Err(); err != nil {
		return err
	}
	s.state[0] = v
	return nil
}

// fused computes the formula in one operator, which reads the learning rate from device memory. In
// a parameter's first step the velocity is the gradient. Such parameters need a separate call.
func (r sgdRule) fused(b *batch) error {
	if r.o.Momentum == 0 {
		return r.fuse(b, *b, nil, false)
	}
	var old, fresh batch
	for i, s := range b.slots {
		part := &old
		if s.state[0] == nil {
			part = &fresh
			if err := s.begin(b.grads[i]); err != nil { // the operator overwrites the copy's value
				return err
			}
		}
		part.slots, part.params, part.grads = append(part.slots, s), append(part.params,
			b.params[i]), append(part.grads, b.grads[i])
	}
	if len(old.slots) > 0 {
		if err := r.fuse(b, old, old.state(0), false); err != nil {
			return err
		}
	}
	if len(fresh.slots) > 0 {
		return r.fuse(b, fresh, fresh.state(0), true)
	}
	return nil
}

// fuse updates a part of the batch.
func (r sgdRule) fuse(b *batch, part batch, velocity []*torch.Tensor, first bool) error {
	grads, err := b.flat(part.grads)
	if err != nil {
		return err
	}
	return torch.FusedSGD_(part.params, grads, velocity, b.g.decay, r.o.Momentum, b.g.rate, r.o.Dampening,
		r.o.Nesterov, r.o.Maximize, first)
}

// fusedUnlessFound runs the fused operator. If the device has found gradients that are not finite,
// the operator changes nothing. A velocity starts as zero instead of the first gradient. Without
// dampening both give the same first step, and a skipped step keeps the zero.
func (r sgdRule) fusedUnlessFound(b *batch) error {
	velocity := []*torch.Tensor{}
	if r.o.Momentum != 0 {
		for _, s := range b.slots {
			if s.state[0] != nil {
				continue
			}
			v := s.target().ZerosLike()
			if err := v.Err(); err != nil {
				return err
			}
			s.state[0] = v
		}
		velocity = b.state(0)
	}
	grads, err := b.flat(b.grads)
	if err != nil {
		return err
	}
	name, lr := "_fused_sgd_", any(b.g.lr)
	if b.g.rate != nil {
		name, lr = "_fused_sgd_.tensor_lr", b.g.rate
	}
	_, err = torch.Call(name, b.params, grads, velocity, torch.Keywords{
		"weight_decay": b.g.decay, "momentum": r.o.Momentum, "lr": lr, "dampening": 0.0, "nesterov": r.o.Nesterov,
		"maximize": r.o.Maximize, "is_first_step": false, "found_inf": b.e.found,
	})
	return err
}
