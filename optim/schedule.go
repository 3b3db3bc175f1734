package optim

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/cuda"
)

// Schedule gives the learning rate of each step. It is a pure function, so the number of steps is
// the whole state of a [Scheduler]. A step is a batch or an epoch, depending on when the program
// calls Scheduler.Step.
//
// The schedules of this package have the values of torch.optim.lr_scheduler. Where PyTorch
// computes a rate from the previous one, they use the closed formula, which differs by rounding.
type Schedule interface {
	// LR returns the rate of a step, counted from 0, for a group with the initial rate base. The
	// schedules of this package may return NaN if their options are out of range. NewScheduler
	// refuses such options.
	LR(base float64, step int) float64
}

// ScheduleFunc is a Schedule that a function computes.
type ScheduleFunc func(base float64, step int) float64

// LR calls the function.
func (f ScheduleFunc) LR(base float64, step int) float64 { return f(base, step) }

// checked is a Schedule that can check its options.
type checked interface{ check() error }

// checkSchedule refuses a schedule whose options are out of range.
func checkSchedule(s Schedule) error {
	switch s := s.(type) {
	case nil:
		return fmt.Errorf("the schedule is nil: %w", cuda.ErrInvalidArgument)
	case checked:
		return s.check()
	}
	return nil
}

// momentumSchedule is a Schedule that may set the momentum too.
type momentumSchedule interface {
	Momentum(step int) float64
	cyclesMomentum() bool
}

// momentumOf returns the schedule as a momentumSchedule, or nil if it does not set the momentum.
func momentumOf(s Schedule) momentumSchedule {
	if m, ok := s.(momentumSchedule); ok && m.cyclesMomentum() {
		return m
	}
	return nil
}

// checkPart checks a schedule that is a part of another one. The options must be in range, and the
// part must not set the momentum: after such a part, a step's momentum would depend on earlier
// steps.
func checkPart(s Schedule) error {
	if momentumOf(s) != nil {
		return invalid("CycleMomentum is for a schedule by itself")
	}
	return checkSchedule(s)
}

// invalid returns the error of an option that is out of range.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%s: %w", fmt.Sprintf(format, args...), cuda.ErrInvalidArgument)
}

// StepLR multiplies the rate by Gamma after every Size steps (torch.optim.lr_scheduler.StepLR).
type StepLR struct {
	Size  int
	Gamma float64 // 0 stands for 0.1
}

// LR returns the rate of a step.
func (s StepLR) LR(base float64, step int) float64 {
	if s.Size < 1 {
		return math.NaN()
	}
	return base * math.Pow(orDefault(s.Gamma, 0.1), float64(step/s.Size))
}

func (s StepLR) check() error {
	if s.Size < 1 {
		return invalid("StepLR: Size is %d: it must be positive", s.Size)
	}
	return checkFactor("StepLR: Gamma", s.Gamma)
}

// MultiStepLR multiplies the rate by Gamma at each milestone
// (torch.optim.lr_scheduler.MultiStepLR). A milestone that is listed twice counts twice.
type MultiStepLR struct {
	Milestones []int
	Gamma      float64 // 0 stands for 0.1
}

// LR returns the rate of a step.
func (s MultiStepLR) LR(base float64, step int) float64 {
	for _, m := range s.Milestones {
		if step >= m {
			base *= orDefault(s.Gamma, 0.1)
		}
	}
	return base
}

func (s MultiStepLR) check() error { return checkFactor("MultiStepLR: Gamma", s.Gamma) }

// ExponentialLR multiplies the rate by Gamma after every step
// (torch.optim.lr_scheduler.ExponentialLR).
type ExponentialLR struct{ Gamma float64 }

// LR returns the rate of a step.
func (s ExponentialLR) LR(base float64, step int) float64 {
	return base * math.Pow(s.Gamma, float64(step))
}

func (s ExponentialLR) check() error {
	if s.Gamma == 0 {
		return invalid("ExponentialLR: Gamma is 0: it must be positive")
	}
	return checkFactor("ExponentialLR: Gamma", s.Gamma)
}

// LinearWarmup changes the rate linearly from Start times to End times the base rate over Steps
// steps, and then keeps it (torch.optim.lr_scheduler.LinearLR).
type LinearWarmup struct {
	Steps int
	Start float64 // above 0, at most 1; 0 stands for 1/3
	End   float64 // at most 1; 0 stands for 1
}

// LR returns the rate of a step.
func (s LinearWarmup) LR(base float64, step int) float64 {
	start, end := orDefault(s.Start, 1.0/3), orDefault(s.End, 1)
	return base * (start + (end-start)*float64(min(step, s.Steps))/float64(s.Steps))
}

func (s LinearWarmup) check() error {
	switch {
	case s.Steps < 1:
		return invalid("LinearWarmup: Steps is %d: it must be positive", s.Steps)
	case !(s.Start >= 0 && s.Start <= 1):
		return invalid("LinearWarmup: Start is %v: it must be from 0 to 1", s.Start)
	case !(s.End >= 0 && s.End <= 1):
		return invalid("LinearWarmup: End is %v: it must be from 0 to 1", s.End)
	}
	return nil
}

// CosineLR lowers the rate along half a cosine from the base rate to Min over Steps steps
// (torch.optim.lr_scheduler.CosineAnnealingLR). Beyond Steps, the rate rises again, as in PyTorch.
type CosineLR struct {
	Steps int
	Min   float64
}

// LR returns the rate of a step.
func (s CosineLR) LR(base float64, step int) float64 {
	return cosine(base, s.Min, float64(step)/float64(s.Steps))
}

func (s CosineLR) check() error { return checkCosine("CosineLR", s.Steps, s.Min) }

// CosineRestarts is a CosineLR that starts again from the base rate after Steps steps; each cycle
// is Multiply times as long as the one before
// (torch.optim.lr_scheduler.CosineAnnealingWarmRestarts).
type CosineRestarts struct {
	Steps    int
	Multiply int // 0 stands for 1
	Min      float64
}

// LR returns the rate of a step.
func (s CosineRestarts) LR(base float64, step int) float64 {
	if s.check() != nil {
		return math.NaN()
	}
	length := s.Steps
	if s.Multiply <= 1 {
		step %= length
	}
	for step >= length {
		step -= length
		length *= s.Multiply
	}
	return cosine(base, s.Min, float64(step)/float64(length))
}

func (s CosineRestarts) check() error {
	if s.Multiply < 0 {
		return invalid("CosineRestarts: Multiply is %d: it must not be negative", s.Multiply)
	}
	return checkCosine("CosineRestarts", s.Steps, s.Min)
}

func checkCosine(name string, steps int, minimum float64) error {
	if steps < 1 {
		return invalid("%s: Steps is %d: it must be positive", name, steps)
	}
	return checkFactor(name+": Min", minimum)
}

func checkFactor(name string, v float64) error {
	if !finite(v) || v < 0 {
		return invalid("%s is %v: it must be finite and not negative", name, v)
	}
	return nil
}

// cosine interpolates between start and end along half a cosine. part is from 0 to 1.
func cosine(start, end, part float64) float64 {
	return end + (start-end)*(1+math.Cos(math.Pi*part))/2
}

// OneCycleLR raises the rate from base/DivFactor to the base rate and lowers it to
// base/DivFactor/FinalDivFactor, in Steps steps (torch.optim.lr_scheduler.OneCycleLR, whose max_lr
// is the base rate). With CycleMomentum, PyTorch's default, the momentum falls while the rate
// rises, and rises while the rate falls. The momentum is [SGD]'s Momentum, or β1 of [Adam] and
// [AdamW].
type OneCycleLR struct {
	Steps          int
	RiseShare      float64 // fraction of the steps in which the rate rises; 0 stands for 0.3 (PyTorch's pct_start)
	Linear         bool    // changes linearly rather than along cosines
	DivFactor      float64 // 0 stands for 25
	FinalDivFactor float64 // 0 stands for 10,000
	ThreePhase     bool    // after the rise, falls to the initial rate in as many steps, and then to the final rate

	// CycleMomentum makes the [Scheduler] set the momentum of all groups of the optimizer, which
	// must have a method SetMomentum. A part of Sequential or Chained must not set it.
	CycleMomentum bool
	BaseMomentum  float64 // at the highest rate; 0 stands for 0.85
	MaxMomentum   float64 // at the start and the end; 0 stands for 0.95
}

// LR returns the rate of a step. After the last step the rate stays the same.
func (s OneCycleLR) LR(base float64, step int) float64 {
	initial := base / orDefault(s.DivFactor, 25)
	return s.at(step, initial, base, initial/orDefault(s.FinalDivFactor, 1e4))
}

// Momentum returns the momentum of a step, with CycleMomentum. After the last step it stays the
// same.
func (s OneCycleLR) Momentum(step int) float64 {
	outer := orDefault(s.MaxMomentum, 0.95)
	return s.at(step, outer, orDefault(s.BaseMomentum, 0.85), outer)
}

func (s OneCycleLR) cyclesMomentum() bool { return s.CycleMomentum }

// at interpolates the value of a step. initial is the first step's value, top the value at the
// highest rate, and final the last step's value.
func (s OneCycleLR) at(step int, initial, top, final float64) float64 {
	last := float64(s.Steps - 1)
	rise := orDefault(s.RiseShare, 0.3) * float64(s.Steps)
	at := min(float64(step), last)
	if at <= rise-1 {
		return s.between(initial, top, at/(rise-1))
	}
	if !s.ThreePhase {
		return s.between(top, final, (at-(rise-1))/(last-(rise-1)))
	}
	fall := 2*rise - 2
	if at <= fall {
		return s.between(top, initial, (at-(rise-1))/(fall-(rise-1)))
	}
	return s.between(initial, final, (at-fall)/(last-fall))
}

func (s OneCycleLR) between(start, end, part float64) float64 {
	if s.Linear {
		return start + (end-start)*part
	}
	return cosine(start, end, part)
}

func (s OneCycleLR) check() error {
	rise := orDefault(s.RiseShare, 0.3)
	switch {
	case s.Steps < 1:
		return invalid("OneCycleLR: Steps is %d: it must be positive", s.Steps)
	case !(rise > 0 && rise <= 1):
		return invalid("OneCycleLR: RiseShare is %v: it must be from 0 to 1", s.RiseShare)
	case rise*float64(s.Steps) <= 1 || rise*float64(s.Steps) >= float64(s.Steps) && s.ThreePhase:
		return invalid("OneCycleLR: RiseShare is %v of %d steps: each phase needs more than one step", rise, s.Steps)
	}
	for name, m := range map[string]float64{"BaseMomentum": s.BaseMomentum, "MaxMomentum": s.MaxMomentum} {
		if !(m >= 0 && m < 1) {
			return invalid("OneCycleLR: %s is %v: it must be from 0 to below 1", name, m)
		}
		if m != 0 && !s.CycleMomentum {
			return invalid("OneCycleLR: %s is %v without CycleMomentum", name, m)
		}
	}
	if err := checkFactor("OneCycleLR: DivFactor", s.DivFactor); err != nil {
		return err
	}
	return checkFactor("OneCycleLR: FinalDivFactor", s.FinalDivFactor)
}

// Phase is one schedule of a [Sequential].
type Phase struct {
	Steps    int // the length of the phase; ignored in the last phase, which has no end
	Schedule Schedule
}

// Sequential runs one schedule after another, each from its step 0 on
// (torch.optim.lr_scheduler.SequentialLR):
//
//	optim.Sequential{
//		{Steps: 500, Schedule: optim.LinearWarmup{Steps: 500, Start: 0.01}},
//		{Schedule: optim.CosineLR{Steps: 9500}},
//	}
type Sequential []Phase

// LR returns the rate of a step.
func (s Sequential) LR(base float64, step int) float64 {
	if s.check() != nil {
		return math.NaN()
	}
	for _, p := range s[:len(s)-1] {
		if step < p.Steps {
			return p.Schedule.LR(base, step)
		}
		step -= p.Steps
	}
	return s[len(s)-1].Schedule.LR(base, step)
}

func (s Sequential) check() error {
	if len(s) == 0 {
		return invalid("Sequential: no phases")
	}
	for i, p := range s {
		if p.Steps < 1 && i < len(s)-1 {
			return invalid("Sequential: phase %d: Steps is %d: it must be positive", i, p.Steps)
		}
		if err := checkPart(p.Schedule); err != nil {
			return fmt.Errorf("Sequential: phase %d: %w", i, err)
		}
	}
	return nil
}

// Chained applies several schedules at once: the rate is the base rate times the factor of each
// schedule. For schedules that multiply the rate, these are the values of
// torch.optim.lr_scheduler.ChainedScheduler: StepLR, MultiStepLR, ExponentialLR, LinearWarmup, and,
// up to its Steps, CosineLR without Min. For other schedules PyTorch's values differ, because each
// of PyTorch's schedules starts from the rate that the previous one has set.
type Chained []Schedule

// LR returns the rate of a step.
func (s Chained) LR(base float64, step int) float64 {
	if s.check() != nil {
		return math.NaN()
	}
	lr := base
	for _, part := range s {
		lr *= part.LR(base, step) / base
	}
	return lr
}

func (s Chained) check() error {
	if len(s) == 0 {
		return invalid("Chained: no schedules")
	}
	for i, part := range s {
		if err := checkPart(part); err != nil {
			return fmt.Errorf("Chained: schedule %d: %w", i, err)
		}
	}
	return nil
}

// Scheduler applies a [Schedule] to the groups of an optimizer. Its state is its number of steps.
// Only one goroutine at a time may use a Scheduler.
type Scheduler struct {
	opt      Optimizer
	schedule Schedule
	count    int
}

// NewScheduler returns a Scheduler and sets the rates of step 0. Call Scheduler.Step after every
// batch, or after every epoch.
func NewScheduler(opt Optimizer, schedule Schedule) (*Scheduler, error) {
	if err := checkSchedule(schedule); err != nil {
		return nil, fmt.Errorf("optim.NewScheduler: %w", err)
	}
	s := &Scheduler{opt: opt, schedule: schedule}
	if err := s.SetCount(0); err != nil {
		return nil, err
	}
	return s, nil
}

// Step sets the rates, and the momentum, of the next step. With Capturable optimizers it enqueues
// the rates on the current stream.
func (s *Scheduler) Step() error { return s.SetCount(s.count + 1) }

// Count returns the number of steps: the state to save.
func (s *Scheduler) Count() int { return s.count }

// SetCount sets the number of steps, and the rates and the momentum of the step with that number.
// Use it to resume a schedule.
func (s *Scheduler) SetCount(count int) error {
	if count < 0 {
		return fmt.Errorf("optim.Scheduler.SetCount: %d steps: %w", count, cuda.ErrInvalidArgument)
	}
	groups := s.opt.Groups()
	rates := make([]float64, len(groups))
	for i, g := range groups {
		rates[i] = s.schedule.LR(g.LR, count)
	}
	if m := momentumOf(s.schedule); m != nil {
		opt, ok := s.opt.(interface{ SetMomentum(float64) error })
		if !ok {
			return fmt.Errorf("optim.Scheduler: CycleMomentum: %T has no SetMomentum: use SGD, Adam or "+
				"AdamW: %w", s.opt, cuda.ErrInvalidArgument)
		}
		if err := opt.SetMomentum(m.Momentum(count)); err != nil {
			return err
		}
	}
	if err := s.opt.SetLR(rates...); err != nil {
		return err
	}
	s.count = count
	return nil
}
