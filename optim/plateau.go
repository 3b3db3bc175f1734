package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
)

// PlateauOptions are the options of [NewPlateau].
type PlateauOptions struct {
	Maximize  bool    // the metric improves by rising, like an accuracy, not by falling, like a loss
	Factor    float64 // of each reduction, below 1; 0 stands for 0.1
	Patience  int     // number of steps without improvement to tolerate; 0 stands for 10, a negative number for none
	Threshold float64 // the minimum improvement that counts; 0 stands for 0.0001
	Absolute  bool    // Threshold is a difference, not a fraction of the best metric
	Cooldown  int     // steps after a reduction that do not count as bad
	Min       float64 // minimum learning rate
}

// Plateau reduces the learning rates when a metric stops improving, by the rules and defaults of
// torch.optim.lr_scheduler.ReduceLROnPlateau. It skips reductions by 1e-8 or less.
type Plateau struct {
	opt   Optimizer
	o     PlateauOptions
	state PlateauState
}

// PlateauState is the state of a [Plateau], for a checkpoint. The optimizer's state holds the
// learning rates.
type PlateauState struct {
	Best     *float64 // the best metric; nil before the first
	Bad      int      // steps without improvement
	Cooldown int      // remaining steps that do not count as bad
}

// NewPlateau returns a Plateau for the optimizer.
func NewPlateau(opt Optimizer, o PlateauOptions) (*Plateau, error) {
	o.Factor, o.Threshold = orDefault(o.Factor, 0.1), orDefault(o.Threshold, 1e-4)
	if err := check("Plateau", option{"Factor", o.Factor, 1}, option{"Threshold", o.Threshold, 0},
		option{"Min", o.Min, 0},
		option{"Cooldown", float64(o.Cooldown), 0}); err != nil {
		return nil, err
	}
	switch {
	case o.Patience == 0:
		o.Patience = 10
	case o.Patience < 0:
		o.Patience = 0
	}
	return &Plateau{opt: opt, o: o}, nil
}

// Step takes the current metric, usually once per epoch. After more than Patience steps without
// improvement it reduces the rates of all groups. NaN does not count as an improvement.
func (p *Plateau) Step(metric float64) error {
	s := p.state
	if p.better(metric) {
		s.Best, s.Bad = &metric, 0
	} else {
		s.Bad++
	}
	if s.Cooldown > 0 {
		s.Cooldown--
		s.Bad = 0
	}
	if s.Bad > p.o.Patience {
		s.Cooldown, s.Bad = p.o.Cooldown, 0
		rates := p.opt.LRs()
		for i, lr := range rates {
			if reduced := max(lr*p.o.Factor, p.o.Min); lr-reduced > 1e-8 {
				rates[i] = reduced
			}
		}
		if err := p.opt.SetLR(rates...); err != nil {
			return err
		}
	}
	p.state = s
	return nil
}

func (p *Plateau) better(metric float64) bool {
	if p.state.Best == nil {
		return !math.IsNaN(metric)
	}
	best := *p.state.Best
	switch {
	case p.o.Maximize && p.o.Absolute:
		return metric > best+p.o.Threshold
	case p.o.Maximize:
		return metric > best*(1+p.o.Threshold)
	case p.o.Absolute:
		return metric < best-p.o.Threshold
	}
	return metric < best*(1-p.o.Threshold)
}

// State returns the state.
func (p *Plateau) State() PlateauState { return p.state }

// LoadState replaces the state.
func (p *Plateau) LoadState(s PlateauState) error {
	if s.Bad < 0 || s.Cooldown < 0 {
		return fmt.Errorf("optim.Plateau.LoadState: %+v: a number is negative: %w", s, cuda.ErrInvalidArgument)
	}
	p.state = s
	return nil
}
