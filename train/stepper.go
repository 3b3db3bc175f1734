package train

import (
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
)

// StepperOptions configures a Stepper. Model and Optimizer are required.
type StepperOptions struct {
	Model     nn.Module
	Optimizer optim.Optimizer
	// Loss computes a scalar from the model's output and the targets of Step. nil means the
	// cross-entropy of the output and the first target.
	Loss func(output *torch.Tensor, targets []*torch.Tensor) *torch.Tensor
	// Autocast runs the forward pass under autocast to BFloat16 or Float16. 0 means none. All
	// weights are cast at the start of a step ([torch.ParameterCasts]), so Forward must not change
	// them.
	Autocast torch.DType
	// Scaler, if not nil, scales the loss and skips steps whose gradients overflowed.
	Scaler *optim.GradScaler
	// ClipNorm, if over 0, is the maximum norm of all gradients together.
	ClipNorm float64
	// Schedule sets the learning rates before each step, counted from 0. nil leaves them unchanged.
	Schedule optim.Schedule
	// EMA, if not nil, is updated after each step.
	EMA *optim.EMA
	// Backward, if not nil, receives each step's backward pass and must call it once. For example,
	// distributed.DataParallel.Around averages the gradients of several processes. If Model is a
	// distributed.FullyShardedDataParallel, use its Around here and its NewOptimizer for Optimizer.
	Backward func(pass func() error) error
	// MicroBatch, if over 0, is the number of rows in one forward and backward pass. A larger batch
	// is divided into parts whose sizes differ by at most one row. A part has at most MicroBatch
	// rows, or one more if there would otherwise be a part of a single row. The gradients of the
	// parts add up to the gradients of the whole batch (gradient accumulation), and a step needs
	// only the memory of one part. The loss must be a mean over the rows, and the targets must have
	// as many rows as the input. BatchNorm computes its statistics from each part. MicroBatch and
	// Backward cannot be combined.
	MicroBatch int

	// Graph captures the step on a GPU as a CUDA graph and replays it. The host then makes a few
	// calls per step instead of thousands. The optimizer must be Capturable. There is one graph for
	// each address of the input and targets, so use tensors at fixed addresses, such as a
	// prefetcher's slots.
	//
	// A batch whose shape differs from the largest so far, such as the short last one, runs without
	// a graph. So does a step that cannot be captured because it waits for the device. On the CPU
	// the option has no effect.
	Graph bool
	// Log reports which steps run without a graph, and why. It also warns of a dtype for which
	// LibTorch has no fast kernels on the CPU. nil means silence.
	Log *slog.Logger
}

// Stepper runs training steps: forward, loss, backward, clipping, optimizer, schedule, averages.
// Only one goroutine may use a Stepper at a time.
type Stepper struct {
	o         StepperOptions
	scheduler *optim.Scheduler
	params    []*torch.Tensor
	sharded   *distributed.FullyShardedDataParallel // Model, if it is one
	counts    *nn.BatchCounts
	casts     *torch.ParameterCasts // with Autocast
	graphed   *torch.Graphed
	shapes    [][]int64 // shapes of the input and targets for which graphs are captured
	said      map[string]bool
	looked    bool // checked for a slow dtype
	stats     StepperStats
}

// StepperStats counts steps.
type StepperStats struct {
	Steps   int64
	Replays int64 // steps that replayed a graph
	// Captures counts the graphs captured. The first step with larger shapes than all before runs
	// without a graph, and then captures the graph that later steps of these shapes replay.
	Captures int64
}

// check returns an error for options that are wrong or exclude each other.
func (o *StepperOptions) check() error {
	switch {
	case o.Model == nil || o.Optimizer == nil:
		return fmt.Errorf("train.NewStepper: it needs Model and Optimizer: %w", cuda.ErrInvalidArgument)
	case isNil(o.Optimizer):
		return fmt.Errorf("train.NewStepper: Optimizer is a nil %T: its constructor failed, and "+
			"returned an error that says why: %w", o.Optimizer, cuda.ErrInvalidArgument)
	case !(o.ClipNorm >= 0) || math.IsInf(o.ClipNorm, 0):
		return fmt.Errorf("train.NewStepper: ClipNorm is %v, and must be finite and not negative: %w",
			o.ClipNorm, cuda.ErrInvalidArgument)
	case o.MicroBatch < 0 || o.MicroBatch > 0 && o.Backward != nil:
		return fmt.Errorf("train.NewStepper: MicroBatch is %d: it must not be negative, and must be 0 with "+
			"Backward (use smaller batches on each rank instead): %w", o.MicroBatch, cuda.ErrInvalidArgument)
	case o.Autocast != 0 && o.Autocast != torch.BFloat16 && o.Autocast != torch.Float16:
		return fmt.Errorf("train.NewStepper: Autocast is %v, and must be BFloat16 or Float16: %w",
			o.Autocast, cuda.ErrInvalidArgument)
	}
	if c, ok := o.Optimizer.(interface{ Capturable() bool }); o.Graph && ok && !c.Capturable() {
		return fmt.Errorf("train.NewStepper: Graph needs an optimizer with Capturable, or the graph "+
			"would keep its first learning rate: %w", cuda.ErrInvalidArgument)
	}
	return nil
}

// NewStepper returns a Stepper. The caller closes it, and keeps ownership of the objects in the
// options.
func NewStepper(o StepperOptions) (*Stepper, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Stepper{o: o, params: nn.Parameters(o.Model), counts: nn.NewBatchCounts(o.Model), said: map[string]bool{}}
	if s.sharded, _ = o.Model.(*distributed.FullyShardedDataParallel); s.sharded != nil {
		if _, ok := o.Optimizer.(*distributed.FullyShardedOptimizer); !ok || o.Backward == nil {
			return nil, fmt.Errorf("train.NewStepper: a FullyShardedDataParallel needs its Around as "+
				"Backward and an Optimizer of its NewOptimizer: %w", cuda.ErrInvalidArgument)
		}
	}
	if o.Schedule != nil {
		var err error
		if s.scheduler, err = optim.NewScheduler(o.Optimizer, o.Schedule); err != nil {
			return nil, err
		}
	}
	if o.Autocast != 0 && s.sharded == nil { // sharded weights are absent at the start of a step
		var err error
		if s.casts, err = torch.NewParameterCasts(o.Autocast, s.params); err != nil {
			return nil, err
		}
	}
	s.graphed = torch.NewGraphed(s.run, torch.GraphedOptions{Fallback: true, WarmOnce: true})
	return s, nil
}

// isNil reports whether an optimizer is a nil pointer. For example, optim.NewSGD returns a nil
// pointer together with an error. isNil cannot call a method to find out: every method of a nil
// *optim.SGD panics, because SGD embeds its engine.
func isNil(o optim.Optimizer) bool {
	v := reflect.ValueOf(o)
	return v.Kind() == reflect.Pointer && v.IsNil()
}

// Step trains on an input and its targets, which are on one device. It returns the model's output
// and the loss, detached. The output and the loss belong to the scope of input and targets (the
// youngest, if these differ), or to the Stepper if input and targets have no scope. They are valid
// until the next Step. All other tensors of the step are freed when Step returns. Step queues work
// for the device and does not wait for it, except while it captures.
//
// After an error, such as cuda.ErrOutOfMemory in any part of the step, no gradient remains. The
// next Step, perhaps on a smaller batch, starts clean. If the optimizer's step failed, some
// parameters may be updated and others not.
func (s *Stepper) Step(input *torch.Tensor, targets ...*torch.Tensor) (output, loss *torch.Tensor, err error) {
	s.sayIfSlow(input.Device())
	arguments := append([]*torch.Tensor{input}, targets...)
	var results []*torch.Tensor
	if s.o.Graph && input.Device() != cuda.CPU && s.fits(arguments) {
		results, err = s.replay(arguments)
	} else {
		results, err = s.graphed.CallEager(arguments...)
	}
	if err != nil {
		// The backward pass may have computed some gradients, and the next one would add to them.
		return nil, nil, errors.Join(err, s.abandon())
	}
	if s.scheduler != nil {
		if err := s.scheduler.Step(); err != nil {
			return nil, nil, err
		}
	}
	s.stats.Steps++
	return results[0], results[1], nil
}

// abandon drops the leftovers of an unfinished step.
func (s *Stepper) abandon() error {
	err := s.o.Optimizer.ZeroGrad()
	if s.o.Scaler != nil {
		err = errors.Join(err, s.o.Scaler.Abandon(s.o.Optimizer))
	}
	return err
}

// run runs the step, except the schedule. The schedule must stay outside of a graph, because it
// runs on the host, and a replay runs no host code.
func (s *Stepper) run(in []*torch.Tensor) ([]*torch.Tensor, error) {
	if s.casts != nil {
		if err := s.casts.Begin(in[0].Scope()); err != nil {
			return nil, err
		}
	}
	pass := s.whole
	if rows := in[0].Shape(); s.o.MicroBatch > 0 && len(rows) > 0 && rows[0] > int64(s.o.MicroBatch) {
		pass = s.inParts
	}
	output, loss, err := pass(in)
	if err != nil {
		return nil, err
	}
	if err := s.update(); err != nil {
		return nil, err
	}
	if s.o.EMA != nil {
		if err := s.o.EMA.Update(); err != nil {
			return nil, err
		}
	}
	return []*torch.Tensor{output, loss}, nil
}

// forward computes the output and the loss.
func (s *Stepper) forward(in []*torch.Tensor) (output, loss *torch.Tensor, err error) {
	s.counts.Begin(in[0].Scope())
	output = s.o.Model.Forward(autocast(in[0], s.o.Autocast))
	if err := s.counts.End(); err != nil && output.Err() == nil {
		return nil, nil, err
	}
	return output, s.loss(output, in[1:]), nil
}

// whole runs the forward and the backward pass of a whole batch.
func (s *Stepper) whole(in []*torch.Tensor) (output, loss *torch.Tensor, err error) {
	if output, loss, err = s.forward(in); err != nil {
		return nil, nil, err
	}
	return output, loss, s.backward(loss)
}

// inParts runs the forward and the backward pass of each part of a batch. The tensors of a part are
// freed before the next part.
func (s *Stepper) inParts(in []*torch.Tensor) (output, loss *torch.Tensor, err error) {
	scope, rows := in[0].Scope(), in[0].Shape()[0]
	var outputs []*torch.Tensor
	start := int64(0)
	for _, n := range partSizes(rows, int64(s.o.MicroBatch)) {
		part := make([]*torch.Tensor, len(in))
		for i, t := range in {
			part[i] = t.Narrow(0, start, n)
		}
		start += n
		share := torch.Tidy(func(in ...*torch.Tensor) *torch.Tensor {
			var output, loss *torch.Tensor
			if output, loss, err = s.forward(in); err != nil {
				return torch.Fail("train.Stepper", err)
			}
			share := loss.MulScalar(float64(n) / float64(rows))
			if err = s.backward(share); err != nil {
				return torch.Fail("train.Stepper", err)
			}
			outputs = append(outputs, scope.Own(output.Detach().Keep()))
			return share.Detach()
		}, part...)
		switch {
		case err != nil:
			return nil, nil, err
		case loss == nil:
			loss = share
		default:
			loss = loss.Add(share)
		}
		if err := loss.Err(); err != nil {
			return nil, nil, err
		}
	}
	return torch.Cat(outputs, 0), loss, nil
}

// partSizes divides rows into parts of about equal size, at most micro rows. If micro and rows are
// over one, no part has a single row, because BatchNorm may not be able to compute statistics of
// one row. A part may then have micro+1 rows.
func partSizes(rows, micro int64) (sizes []int64) {
	parts := (rows + micro - 1) / micro
	if micro > 1 {
		parts = max(1, min(parts, rows/2))
	}
	for i := range parts {
		sizes = append(sizes, (i+1)*rows/parts-i*rows/parts)
	}
	return sizes
}

func (s *Stepper) loss(output *torch.Tensor, targets []*torch.Tensor) *torch.Tensor {
	if s.o.Loss != nil {
		return s.o.Loss(output, targets)
	}
	if len(targets) == 0 {
		return torch.Fail("train.Stepper",
			fmt.Errorf("the cross-entropy needs a target: give one to Step, or set Loss: %w", cuda.ErrInvalidArgument))
	}
	return output.CrossEntropy(targets[0])
}

// backward runs the backward pass.
func (s *Stepper) backward(loss *torch.Tensor) error {
	if err := loss.Err(); err != nil {
		return err // checked before Backward is called: an error in Backward ends a job
	}
	pass := loss.Backward
	if s.o.Scaler != nil {
		pass = func() error { return s.o.Scaler.Backward(loss) }
	}
	if s.o.Backward == nil {
		return pass()
	}
	return s.o.Backward(pass)
}

// update clips the gradients and steps the optimizer.
func (s *Stepper) update() error {
	if s.o.Scaler == nil {
		if err := s.clip(); err != nil {
			return err
		}
		return s.o.Optimizer.Step()
	}
	if s.o.ClipNorm > 0 {
		if err := s.o.Scaler.Unscale(s.o.Optimizer); err != nil {
			return err
		}
		if err := s.clip(); err != nil {
			return err
		}
	}
	if err := s.o.Scaler.Step(s.o.Optimizer); err != nil {
		return err
	}
	return s.o.Scaler.Update()
}

func (s *Stepper) clip() error {
	if s.o.ClipNorm == 0 {
		return nil
	}
	var norm *torch.Tensor
	var err error
	if s.sharded != nil {
		norm, err = s.sharded.ClipGradNorm(s.o.ClipNorm, optim.ClipOptions{})
	} else {
		norm, err = optim.ClipGradNorm(s.params, s.o.ClipNorm, optim.ClipOptions{})
	}
	if err != nil {
		return err
	}
	return norm.Close()
}

// replay runs the step through a graph, or captures one.
func (s *Stepper) replay(arguments []*torch.Tensor) ([]*torch.Tensor, error) {
	before := s.graphed.Stats()
	results, err := s.graphed.Call(arguments...)
	if err != nil {
		return nil, err
	}
	after := s.graphed.Stats()
	s.stats.Replays += after.Hits - before.Hits
	s.stats.Captures += after.Captures - before.Captures
	if after.Refused != nil && before.Refused == nil {
		s.say("the step cannot be captured, and runs without a graph", "reason", after.Refused)
		// A failed capture computes nothing, but may have allocated gradients, whose contents are
		// then meaningless.
		if err := s.abandon(); err != nil {
			return nil, err
		}
	}
	return results, nil
}

// fits reports whether the arguments have the shapes of the largest batch so far, for which graphs
// are captured.
func (s *Stepper) fits(arguments []*torch.Tensor) bool {
	shapes := make([][]int64, len(arguments))
	for i, t := range arguments {
		shapes[i] = t.Shape()
	}
	if s.shapes == nil || larger(shapes, s.shapes) {
		s.shapes = shapes
		return true
	}
	if slices.EqualFunc(shapes, s.shapes, slices.Equal) {
		return true
	}
	if text := fmt.Sprint(shapes); !s.said[text] {
		s.said[text] = true
		s.say("a batch of other shapes than the graph's runs without it", "shapes", text, "graph", fmt.Sprint(s.shapes))
	}
	return false
}

// larger reports whether a has more rows than b.
func larger(a, b [][]int64) bool {
	return len(a) == len(b) && len(a[0]) > 0 && len(b[0]) > 0 && a[0][0] > b[0][0] && slices.Equal(a[0][1:], b[0][1:])
}

func (s *Stepper) say(message string, arguments ...any) {
	if s.o.Log != nil {
		s.o.Log.Info("train: "+message, arguments...)
	}
}

// Stats returns the counts so far.
func (s *Stepper) Stats() StepperStats { return s.stats }

// Close frees the graphs and the results of the last Step.
func (s *Stepper) Close() error { return s.graphed.Close() }
