package main

import (
	"cmp"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/loaderbench"
	"github.com/torchstream/torchstream/models"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// issueMethod describes how issue times are measured, here and in pytorch_train.py.
const issueMethod = "the median of 5 rounds, each after the device was idle: 10 steps of 2 small " +
	"samples, during which the device waits for the host and its queue " +
	"cannot fill up, or one replay of a graph"

// trainee is a network with everything that a step needs.
type trainee struct {
	b     *trainBench
	model string
	net   nn.Module
	opt   interface {
		optim.Optimizer
		Close() error
	}
	step *train.Stepper
	// Total times of the parts of steps without a graph, if the steps have no other Backward.
	forward, backward, rest time.Duration
	passed                  time.Time // end of the latest part
}

// newTrainee makes a network on the device.
func (b *trainBench) newTrainee(model, mode string) (*trainee, error) {
	return b.newTraineeAround(model, mode, nil)
}

// newTraineeAround is newTrainee with a Backward for the steps' options.
func (b *trainBench) newTraineeAround(model, mode string, around func(pass func() error) error) (_ *trainee,
	err error) {
	t := &trainee{b: b, model: model}
	defer func() {
		if err != nil {
			t.close()
		}
	}()
	options := models.Options{}
	if strings.HasPrefix(model, "vit") {
		options.ImageSize = b.size
	}
	if t.net, err = models.ByName(model, options); err != nil {
		return nil, err
	}
	if err = nn.To(t.net, b.device); err != nil {
		return nil, err
	}
	o := b.stepperOptions(model)
	o.Model, o.Graph, o.Backward = t.net, mode == "graph", around
	if around == nil {
		o.Backward = t.pass
	}
	if !isGPT(model) {
		if err = nn.ToMemoryFormat(t.net, torch.ChannelsLast); err != nil {
			return nil, err
		}
	}
	params := nn.Parameters(t.net)
	if strings.HasPrefix(model, "vit") || isGPT(model) {
		t.opt, err = optim.NewAdamW(params, optim.AdamWOptions{LR: 1e-4, Capturable: true})
	} else {
		t.opt, err = optim.NewSGD(params, optim.SGDOptions{LR: 0.01, Momentum: 0.9, Capturable: true})
	}
	if err != nil {
		return nil, err
	}
	o.Optimizer = t.opt
	t.step, err = train.NewStepper(o)
	return t, err
}

// stepperOptions returns the options of a network's steps without Model, Optimizer and Backward.
func (b *trainBench) stepperOptions(model string) train.StepperOptions {
	var o train.StepperOptions
	if b.device != cuda.CPU {
		o.Autocast = torch.BFloat16
	}
	if isGPT(model) {
		o.Loss = func(logits *torch.Tensor, targets []*torch.Tensor) *torch.Tensor {
			return logits.Flatten(0, 1).CrossEntropy(targets[0].Flatten(0, 1))
		}
	}
	return o
}

// close frees the network and everything that a step left.
func (t *trainee) close() error {
	var errs []error
	if t.step != nil {
		errs = append(errs, t.step.Close())
	}
	if t.opt != nil {
		errs = append(errs, t.opt.Close())
	}
	if t.net != nil {
		errs = append(errs, nn.Close(t.net))
	}
	if t.b.device != cuda.CPU {
		errs = append(errs, cuda.EmptyCache(), t.b.device.ResetPeak())
	}
	return errors.Join(errs...)
}

// data returns a batch on the device. The scope owns it.
func (t *trainee) data(scope *torch.Scope, batch, size, context int) (input, target *torch.Tensor, err error) {
	device := t.b.device
	classes := func(n int, shape ...int64) *torch.Tensor {
		numbers := make([]int64, shape[0])
		if len(shape) > 1 {
			numbers = make([]int64, shape[0]*shape[1])
		}
		for i := range numbers {
			numbers[i] = int64(i * 31 % n)
		}
		x, made := torch.FromInt64s(numbers)
		if made != nil {
			err = errors.Join(err, made)
			return nil
		}
		return scope.Own(scope.Own(x).View(shape...).To(device))
	}
	if isGPT(t.model) {
		shape := []int64{int64(batch), int64(context)}
		return classes(50257, shape...), classes(50251, shape...), err
	}
	images, err := torch.Randn(device, torch.Float32, int64(batch), 3, int64(size), int64(size))
	if err != nil {
		return nil, nil, err
	}
	input = scope.Own(scope.Own(images).Contiguous(torch.ChannelsLast))
	return input, classes(1000, int64(batch)), err
}

// call returns a function that runs a step and frees its results, as with a batch.
func (t *trainee) call(input, target *torch.Tensor) func() error {
	return func() error {
		t.passed = time.Now()
		turn := torch.NewScope("step")
		_, _, err := t.step.Step(input.In(turn), target.In(turn))
		turn.Close()
		t.rest += t.part()
		return err
	}
}

// pass is a Stepper's Backward that measures the step's parts.
func (t *trainee) pass(pass func() error) error {
	t.forward += t.part()
	err := pass()
	t.backward += t.part()
	return err
}

// part returns the time since the last call of part, or since the start of the step.
func (t *trainee) part() time.Duration {
	before := t.passed
	t.passed = time.Now()
	return t.passed.Sub(before)
}

// parts returns the means of the parts over n steps, and resets them.
func (t *trainee) parts(n int) issueParts {
	ms := func(d time.Duration) float64 { return d.Seconds() * 1e3 / float64(n) }
	p := issueParts{ms(t.forward), ms(t.backward), ms(t.rest)}
	t.forward, t.backward, t.rest = 0, 0, 0
	return p
}

// measure trains a network for a while. With issue it also measures the host's time per step. It
// frees all its memory.
func (b *trainBench) measure(row *trainRow, issue bool) (_ *issueRow, err error) {
	// LibTorch plans cuDNN's convolutions once per thread.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	t, err := b.newTrainee(row.Model, row.Mode)
	if err != nil {
		return nil, err
	}
	scope := torch.NewScope("train")
	defer func() { err = errors.Join(err, scope.Close(), t.close()) }()
	input, target, err := t.data(scope, row.Batch, b.size, b.context)
	if err != nil {
		return nil, err
	}
	step := t.call(input, target)
	times, err := b.time(step)
	if err != nil {
		return nil, err
	}
	row.Go = b.figure(row, times)
	if s := t.step.Stats(); row.Mode == "graph" && (s.Captures != 1 || s.Replays != s.Steps-1) {
		return nil, fmt.Errorf("%d of %d steps replayed a graph, and %d were captured", s.Replays, s.Steps, s.Captures)
	}
	if b.device != cuda.CPU {
		memory, err := b.device.Memory()
		if err != nil {
			return nil, err
		}
		row.MemoryBytes = memory.PeakReserved
	}
	if !issue {
		return nil, nil
	}
	result, rounds := &issueRow{Model: row.Model, Mode: row.Mode}, 1
	if row.Mode == "eager" {
		rounds = 10
		small, smallTarget, err := t.data(scope, 2, b.smallSize(row.Model), min(b.context, 128))
		if err != nil {
			return nil, err
		}
		step = t.call(small, smallTarget)
	}
	result.Go, err = b.issue(t, step, rounds)
	if result.Go != nil && row.Mode == "graph" {
		result.Go.issueParts = issueParts{} // a replay has no parts
	}
	return result, err
}

// smallSize returns the image size for measuring issue times. A ViT accepts only its fixed size.
func (b *trainBench) smallSize(model string) int {
	if strings.HasPrefix(model, "vit") {
		return b.size
	}
	return min(b.size, 64)
}

// wait waits for the device.
func (b *trainBench) wait() error {
	if b.device == cuda.CPU {
		return nil
	}
	return b.device.Synchronize()
}

// repeat runs n steps, and returns the time until the device has finished them.
func (b *trainBench) repeat(n int, step func() error) (time.Duration, error) {
	if err := b.wait(); err != nil {
		return 0, err
	}
	start := time.Now()
	for range n {
		if err := step(); err != nil {
			return 0, err
		}
	}
	err := b.wait()
	return time.Since(start), err
}

// time measures a step, after three warm-up steps.
func (b *trainBench) time(step func() error) (times stepTimes, err error) {
	if _, err := b.repeat(3, step); err != nil {
		return times, err
	}
	took, err := b.repeat(3, step)
	if err != nil {
		return times, err
	}
	n := max(5, int(b.seconds/max(1e-6, took.Seconds()/3)))
	before, err := loaderbench.CPUTime()
	if err != nil {
		return times, err
	}
	if took, err = b.repeat(n, step); err != nil {
		return times, err
	}
	after, err := loaderbench.CPUTime()
	return stepTimes{MS: took.Seconds() * 1e3 / float64(n), CPUMS: (after - before).Seconds() * 1e3 / float64(n)}, err
}

// issue measures the host's time per step, in rounds of n steps. The parts are from the round with
// the median time.
func (b *trainBench) issue(t *trainee, step func() error, n int) (*issueFigure, error) {
	if _, err := b.repeat(3, step); err != nil {
		return nil, err
	}
	var rounds [5]issueFigure
	for i := range rounds {
		t.parts(1)
		start := time.Now()
		for range n {
			if err := step(); err != nil {
				return nil, err
			}
		}
		queued := time.Now()
		if err := b.wait(); err != nil {
			return nil, err
		}
		rounds[i] = issueFigure{queued.Sub(start).Seconds() * 1e3 / float64(n),
			time.Since(queued).Seconds() * 1e3, t.parts(n)}
	}
	slices.SortFunc(rounds[:], func(a, b issueFigure) int { return cmp.Compare(a.DrainMS, b.DrainMS) })
	drain := rounds[2].DrainMS
	slices.SortFunc(rounds[:], func(a, b issueFigure) int { return cmp.Compare(a.IssueMS, b.IssueMS) })
	rounds[2].DrainMS = drain
	return &rounds[2], nil
}

// searchAlgorithms makes cuDNN benchmark its algorithms, as the peer does, until restore is called.
func searchAlgorithms() (restore func(), err error) {
	before, err := torch.ProcessNumerics()
	if err != nil {
		return nil, err
	}
	during := before
	during.Benchmark = true
	if err := torch.SetProcessNumerics(during); err != nil {
		return nil, err
	}
	return func() { torch.SetProcessNumerics(before) }, nil
}
