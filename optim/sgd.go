// Package optim has optimizers: they change parameters in place by their gradients.
//
// A training step is
//
//	loss := net.Forward(batch.Images).CrossEntropy(batch.Labels)
//	if err := loss.Backward(); err != nil {
//		return err
//	}
//	if err := opt.Step(); err != nil {
//		return err
//	}
//
// Step uses the gradients up: it drops them when it is done, so that the next Backward starts afresh and no ZeroGrad is needed. To accumulate gradients over several
// batches, call Backward several times before one Step. With KeepGradients they stay until ZeroGrad, as in PyTorch.
package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// SGD is stochastic gradient descent with momentum, by PyTorch's formula (torch.optim.SGD): with g the gradient, p the parameter, v its velocity,
//
//	g = g + WeightDecay*p
//	v = Momentum*v + (1-Dampening)*g    (v = g in the first step)
//	g = g + Momentum*v with Nesterov, else g = v
//	p = p - LR*g
//
// An SGD serves one goroutine at a time.
type SGD struct {
	o        SGDOptions
	params   []*torch.Tensor
	marked   []*torch.Tensor // the same tensors under NoGrad
	velocity []*torch.Tensor // one for each parameter, nil before its first step
}

// SGDOptions are the options of NewSGD.
type SGDOptions struct {
	LR          float64 // learning rate; 0 stands for 0.001
	Momentum    float64
	Dampening   float64
	WeightDecay float64
	Nesterov    bool // needs Momentum and no Dampening

	// KeepGradients makes Step leave the gradients as they are, until ZeroGrad. By default Step works in their memory and drops them.
	KeepGradients bool
}

// NewSGD returns an optimizer of the parameters, which are leaves that require gradients. They stay the caller's.
func NewSGD(params []*torch.Tensor, o SGDOptions) (*SGD, error) {
	if o.LR == 0 {
		o.LR = 0.001
	}
	for _, v := range []float64{o.LR, o.Momentum, o.Dampening, o.WeightDecay} {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			return nil, fmt.Errorf("optim.NewSGD: %+v: options must be finite: %w", o, cuda.ErrInvalidArgument)
		}
	}
	switch {
	case o.LR < 0 || o.Momentum < 0 || o.WeightDecay < 0:
		return nil, fmt.Errorf("optim.NewSGD: %+v: LR, Momentum and WeightDecay must not be negative: %w", o, cuda.ErrInvalidArgument)
	case o.Nesterov && (o.Momentum == 0 || o.Dampening != 0):
		return nil, fmt.Errorf("optim.NewSGD: %+v: Nesterov needs Momentum and no Dampening: %w", o, cuda.ErrInvalidArgument)
	case len(params) == 0:
		return nil, fmt.Errorf("optim.NewSGD: no parameters: %w", cuda.ErrInvalidArgument)
	}
	s := &SGD{o: o, params: append([]*torch.Tensor(nil), params...), velocity: make([]*torch.Tensor, len(params))}
	seen := make(map[*torch.Tensor]bool, len(params))
	for i, p := range s.params {
		if err := p.Err(); err != nil {
			return nil, fmt.Errorf("optim.NewSGD: parameter %d: %w", i, err)
		}
		if seen[p] {
			return nil, fmt.Errorf("optim.NewSGD: parameter %d is in the list twice: %w", i, cuda.ErrInvalidArgument)
		}
		seen[p] = true
		if !p.RequiresGrad() {
			return nil, fmt.Errorf("optim.NewSGD: parameter %d does not require gradients: %w", i, cuda.ErrInvalidArgument)
		}
		s.marked = append(s.marked, p.NoGrad())
	}
	return s, nil
}

// LR returns the learning rate.
func (s *SGD) LR() float64 { return s.o.LR }

// SetLR sets the learning rate from the next step on.
func (s *SGD) SetLR(lr float64) { s.o.LR = lr }

// ZeroGrad drops the gradients of all parameters.
func (s *SGD) ZeroGrad() error { return torch.ClearGrads(s.params...) }

// Step changes the parameters by their gradients and then drops the gradients, unless KeepGradients says otherwise. A parameter without a gradient is left alone. The work is
// enqueued on the current stream, in a few calls for all parameters; nothing waits for the device and no memory is left for the garbage collector. After an error parameters may be half way
// through the step.
func (s *SGD) Step() error {
	var open []*torch.Tensor // handles to close
	defer func() {
		for _, t := range open {
			t.Close()
		}
	}()
	own := func(t *torch.Tensor) *torch.Tensor {
		open = append(open, t)
		return t
	}
	n := len(s.params)
	open = make([]*torch.Tensor, 0, 2*n)
	params, grads, at := make([]*torch.Tensor, 0, n), make([]*torch.Tensor, 0, n), make([]int, 0, n)
	written := s.o.WeightDecay != 0 || s.o.Nesterov // the formula changes g
	for i, p := range s.marked {
		g := p.Grad()
		if g == nil {
			continue
		}
		own(g)
		if s.o.KeepGradients && written {
			g = own(g.Clone())
		}
		params, grads, at = append(params, p), append(grads, g), append(at, i)
	}
	if len(params) == 0 {
		return nil
	}
	if s.o.WeightDecay != 0 {
		if err := torch.ForeachAdd_(grads, params, s.o.WeightDecay); err != nil {
			return err
		}
	}
	if s.o.Momentum != 0 {
		v, err := s.accelerate(grads, at)
		if err != nil {
			return err
		}
		if !s.o.Nesterov {
			grads = v
		} else if err := torch.ForeachAdd_(grads, v, s.o.Momentum); err != nil {
			return err
		}
	}
	if err := torch.ForeachAdd_(params, grads, -s.o.LR); err != nil {
		return err
	}
	if s.o.KeepGradients {
		return nil
	}
	return s.ZeroGrad()
}

// accelerate returns the velocities of the parameters with a gradient, after this step's.
func (s *SGD) accelerate(grads []*torch.Tensor, at []int) ([]*torch.Tensor, error) {
	all := make([]*torch.Tensor, len(at))
	var old, push []*torch.Tensor
	for i, p := range at {
		if s.velocity[p] != nil {
			old, push = append(old, s.velocity[p]), append(push, grads[i])
		}
	}
	if len(old) > 0 {
		if err := torch.ForeachMul_(old, s.o.Momentum); err != nil {
			return nil, err
		}
		if err := torch.ForeachAdd_(old, push, 1-s.o.Dampening); err != nil {
			return nil, err
		}
	}
	for i, p := range at {
		if s.velocity[p] == nil {
			v := grads[i].Clone()
			if err := v.Err(); err != nil {
				return nil, err
			}
			s.velocity[p] = v
		}
		all[i] = s.velocity[p]
	}
	return all, nil
}

// Close frees what the optimizer keeps beside the parameters. The next Step starts without velocities.
func (s *SGD) Close() error {
	for i, v := range s.velocity {
		if v != nil {
			v.Close()
			s.velocity[i] = nil
		}
	}
	return nil
}
