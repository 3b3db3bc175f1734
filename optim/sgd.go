// Package optim provides optimizers, which update parameters in place from their gradients.
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
// Step consumes the gradients: it drops them at the end, so that the next Backward starts from zero
// and no ZeroGrad is needed. To accumulate gradients over several batches, call Backward several
// times before one Step. With KeepGradients they stay until ZeroGrad, as in PyTorch.
package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// SGD is stochastic gradient descent with momentum, by PyTorch's formula (torch.optim.SGD), where g
// is the gradient, p the parameter and v its velocity:
//
//	g = g + WeightDecay*p
//	v = Momentum*v + (1-Dampening)*g    (v = g in the first step)
//	g = g + Momentum*v with Nesterov, else g = v
//	p = p - LR*g
//
// An SGD serves one goroutine at a time.
//
// Step can be captured in a CUDA graph after at least one Step outside of a capture, which
// allocates the velocities. A graph keeps the values that it was captured with, including LR. With
// Capturable the learning rate lies in device memory, and SetLR applies to the graph's next replay.
type SGD struct {
	o        SGDOptions
	params   []*torch.Tensor
	marked   []*torch.Tensor // the same tensors under NoGrad
	velocity []*torch.Tensor // one per parameter, nil before its first step
	// Capturable's learning rate, on the parameters' device; nil before the first step.
	lr *torch.Tensor
}

// SGDOptions are the options of NewSGD.
type SGDOptions struct {
	LR          float64 // learning rate; 0 stands for 0.001
	Momentum    float64
	Dampening   float64
	WeightDecay float64
	Nesterov    bool // requires Momentum and no Dampening

	// KeepGradients makes Step keep the gradients unchanged, until ZeroGrad. By default Step works
	// in their memory and drops them.
	KeepGradients bool

	// Capturable keeps the learning rate in a tensor on the parameters' device, so that a captured
	// Step follows SetLR. Step then runs one kernel for all parameters of a dtype (LibTorch's fused
	// SGD), and all parameters must be on one device.
	Capturable bool
}

// NewSGD returns an optimizer for the parameters, which must be leaves that require gradients. The
// caller keeps ownership of them.
func NewSGD(params []*torch.Tensor, o SGDOptions) (*SGD, error) {
	if o.LR == 0 {
		o.LR = 0.001
	}
	for _, v := range []float64{o.LR, o.Momentum, o.Dampening, o.WeightDecay} {
		if !finite(v) {
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

func finite(v float64) bool { return !math.IsNaN(v) && !math.IsInf(v, 0) }

// LR returns the learning rate.
func (s *SGD) LR() float64 { return s.o.LR }

// SetLR sets the learning rate from the next step on. 0 is allowed; a negative or infinite rate or
// NaN is an error and changes nothing. With Capturable, SetLR enqueues the new rate on the current
// stream: call it on the stream that replays the graph.
func (s *SGD) SetLR(lr float64) error {
	if !finite(lr) || lr < 0 {
		return fmt.Errorf("optim.SGD.SetLR: %v: a learning rate must be finite and not negative: %w", lr, cuda.ErrInvalidArgument)
	}
	if s.lr != nil {
		if err := s.lr.Fill_(lr).Err(); err != nil {
			return err
		}
	}
	s.o.LR = lr
	return nil
}

// ZeroGrad drops the gradients of all parameters.
func (s *SGD) ZeroGrad() error { return torch.ClearGrads(s.params...) }

// Step updates the parameters from their gradients and then drops the gradients, unless
// KeepGradients is set. A parameter without a gradient stays unchanged. Velocities follow
// parameters that moved to another device (nn.To). Step enqueues its work on the current stream, in
// a few calls for all parameters. It does not wait for the device and leaves no memory to the
// garbage collector. Step checks its arguments before it changes anything; after any other error
// some parameters may be updated and others not.
func (s *SGD) Step() error {
	open := make(handles, 0, 2*len(s.params))
	defer open.close()
	st := step{}
	for i, p := range s.marked {
		g := p.Grad()
		if g == nil {
			continue
		}
		st.add(i, p, open.add(g))
		if err := g.Err(); err != nil {
			return err
		}
	}
	if len(st.params) == 0 {
		return nil
	}
	if err := s.follow(st); err != nil {
		return err
	}
	var err error
	if s.o.Capturable {
		err = s.fused(st)
	} else {
		err = s.plain(st, &open)
	}
	if err != nil || s.o.KeepGradients {
		return err
	}
	return s.ZeroGrad()
}

// step lists the parameters that have a gradient, in parallel slices.
type step struct {
	params, grads []*torch.Tensor
	at            []int // index of the parameter in SGD.params
}

func (st *step) add(i int, p, g *torch.Tensor) {
	st.params, st.grads, st.at = append(st.params, p), append(st.grads, g), append(st.at, i)
}

// follow moves the velocities and the learning rate to the parameters' current device.
func (s *SGD) follow(st step) error {
	first := st.grads[0].Device()
	for i, p := range st.at {
		if s.velocity[p] == nil && !s.o.Capturable {
			continue
		}
		device := st.grads[i].Device()
		if s.o.Capturable && device != first {
			return fmt.Errorf("optim.SGD.Step: the gradients of parameters %d and %d are on %v and %v, and Capturable needs them on one device: use one SGD per device: %w",
				st.at[0], p, first, device, cuda.ErrInvalidArgument)
		}
		if err := moveTo(&s.velocity[p], device); err != nil {
			return fmt.Errorf("optim.SGD.Step: the velocity of parameter %d: %w", p, err)
		}
	}
	if !s.o.Capturable {
		return nil
	}
	if s.lr == nil {
		var err error
		s.lr, err = torch.Full(first, torch.Float32, s.o.LR)
		return err
	}
	return moveTo(&s.lr, first)
}

func moveTo(t **torch.Tensor, device cuda.Device) error {
	if *t == nil || (*t).Device() == device {
		return nil
	}
	moved := (*t).To(device)
	if err := moved.Err(); err != nil {
		return err
	}
	(*t).Close()
	*t = moved
	return nil
}

// plain computes the formula with foreach operators. It works in the gradients' memory, or in
// copies of them with KeepGradients.
func (s *SGD) plain(st step, open *handles) error {
	grads := st.grads
	if s.o.KeepGradients && (s.o.WeightDecay != 0 || s.o.Nesterov) { // the formula changes g
		grads = make([]*torch.Tensor, len(st.grads))
		for i, g := range st.grads {
			grads[i] = open.add(g.Clone())
		}
	}
	if s.o.WeightDecay != 0 {
		if err := torch.ForeachAdd_(grads, st.params, s.o.WeightDecay); err != nil {
			return err
		}
	}
	if s.o.Momentum != 0 {
		v, err := s.accelerate(grads, st.at)
		if err != nil {
			return err
		}
		if !s.o.Nesterov {
			grads = v
		} else if err := torch.ForeachAdd_(grads, v, s.o.Momentum); err != nil {
			return err
		}
	}
	return torch.ForeachAdd_(st.params, grads, -s.o.LR)
}

// fused computes the formula in one operator, which reads the learning rate from device memory.
// Parameters in their first step, whose velocity is the gradient, need a call of their own.
func (s *SGD) fused(st step) error {
	if s.o.Momentum == 0 {
		return s.fuse(st, nil, false)
	}
	var old, fresh step
	var oldV, freshV []*torch.Tensor
	for i, p := range st.at {
		if v := s.velocity[p]; v != nil {
			old.add(p, st.params[i], st.grads[i])
			oldV = append(oldV, v)
			continue
		}
		v := st.grads[i].Clone() // the operator overwrites the copy's value
		if err := v.Err(); err != nil {
			return err
		}
		s.velocity[p] = v
		fresh.add(p, st.params[i], st.grads[i])
		freshV = append(freshV, v)
	}
	if len(oldV) > 0 {
		if err := s.fuse(old, oldV, false); err != nil {
			return err
		}
	}
	if len(freshV) > 0 {
		return s.fuse(fresh, freshV, true)
	}
	return nil
}

func (s *SGD) fuse(st step, velocity []*torch.Tensor, first bool) error {
	return torch.FusedSGD_(st.params, st.grads, velocity, s.o.WeightDecay, s.o.Momentum, s.lr, s.o.Dampening, s.o.Nesterov, first)
}

// accelerate updates and returns the velocities of the parameters that have a gradient.
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

// Close frees the velocities and the learning rate tensor. The next Step starts without velocities.
func (s *SGD) Close() error {
	for i, v := range s.velocity {
		if v != nil {
			v.Close()
			s.velocity[i] = nil
		}
	}
	s.lr.Close()
	s.lr = nil
	return nil
}
