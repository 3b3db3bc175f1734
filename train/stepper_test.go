package train_test

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// small is a network with its optimizer, and data without a scope.
type small struct {
	net    nn.Module
	opt    optim.Optimizer
	x, y   *torch.Tensor
	device cuda.Device
}

func newSmall(t *testing.T, device cuda.Device) *small {
	t.Helper()
	if err := torch.ManualSeed(3); err != nil {
		t.Fatal(err)
	}
	s := &small{device: device}
	s.net = nn.NewSequential(nn.NewLinear(6, 8, nn.LinearOptions{}), nn.NewReLU(),
		nn.NewLinear(8, 4, nn.LinearOptions{}))
	s.x = s.rows(t, 5)
	y, err := torch.FromInt64s([]int64{0, 1, 2, 3, 0})
	if err != nil {
		t.Fatal(err)
	}
	s.y = kept(t, y.To(device))
	y.Close()
	err = nn.To(s.net, device)
	if err == nil {
		s.opt, err = optim.NewAdamW(nn.Parameters(s.net), optim.AdamWOptions{LR: 0.01, Capturable: true})
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.opt.Close()
		nn.Close(s.net)
		for _, x := range []*torch.Tensor{s.x, s.y} {
			x.Close()
		}
	})
	return s
}

func (s *small) rows(t *testing.T, n int) *torch.Tensor {
	t.Helper()
	values := make([]float32, n*6)
	for i := range values {
		values[i] = float32(math.Sin(float64(i)))
	}
	host, err := torch.FromFloat32s(values, int64(n), 6)
	if err != nil {
		t.Fatal(err)
	}
	defer host.Close()
	return kept(t, host.To(s.device))
}

// kept returns a handle that the caller owns, and closes the operator's result.
func kept(t *testing.T, x *torch.Tensor) *torch.Tensor {
	t.Helper()
	defer x.Close()
	k := x.Keep()
	if err := k.Err(); err != nil {
		t.Fatal(err)
	}
	return k
}

// losses returns the losses of n steps.
func (s *small) losses(t *testing.T, step *train.Stepper, n int) []float64 {
	t.Helper()
	var all []float64
	for range n {
		output, loss, err := step.Step(s.x, s.y)
		if err != nil {
			t.Fatal(err)
		}
		if output.Err() != nil || output.RequiresGrad() || loss.RequiresGrad() {
			t.Fatalf("output %v, loss %v", output, loss)
		}
		v, err := loss.Float64()
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
	return all
}

// A Stepper computes the same results as a handwritten loop, and keeps no tensors of a step.
func TestStepperEqualsALoop(t *testing.T) {
	schedule := optim.CosineLR{Steps: 12}
	var want []float64
	{
		s := newSmall(t, cuda.CPU)
		scheduler, err := optim.NewScheduler(s.opt, schedule)
		if err != nil {
			t.Fatal(err)
		}
		scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{InitScale: 1024, GrowthInterval: 3})
		if err != nil {
			t.Fatal(err)
		}
		defer scaler.Close()
		for range 12 {
			scope := torch.NewScope("step")
			loss := s.net.Forward(s.x.In(scope).Autocast(torch.Float16)).CrossEntropy(s.y)
			err := errors.Join(scaler.Backward(loss), scaler.Unscale(s.opt))
			norm, err2 := optim.ClipGradNorm(nn.Parameters(s.net), 0.5, optim.ClipOptions{})
			norm.Close()
			if err := errors.Join(err, err2, scaler.Step(s.opt), scaler.Update(), scheduler.Step()); err != nil {
				t.Fatal(err)
			}
			v, err := loss.Float64()
			if err != nil {
				t.Fatal(err)
			}
			want = append(want, v)
			scope.Close()
		}
	}
	for _, graph := range []bool{false, true} { // the CPU has no graphs
		s := newSmall(t, cuda.CPU)
		scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{InitScale: 1024, GrowthInterval: 3})
		if err != nil {
			t.Fatal(err)
		}
		defer scaler.Close()
		step, err := train.NewStepper(train.StepperOptions{
			Model: s.net, Optimizer: s.opt, Schedule: schedule, ClipNorm: 0.5, Autocast: torch.Float16,
			Scaler: scaler, Graph: graph,
		})
		if err != nil {
			t.Fatal(err)
		}
		defer step.Close()
		got := s.losses(t, step, 2)
		live, caught := settle.Wait(t, torch.LiveTensors), torch.Caught() // after collecting the garbage of earlier tests
		got = append(got, s.losses(t, step, 10)...)
		if n := torch.LiveTensors(); n != live || torch.Caught() != caught {
			t.Errorf("%d tensors live after two steps and %d after twelve, %d caught", live, n, torch.Caught()-caught)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("graph %v: losses %v\nwant %v", graph, got, want)
		}
		if stats := step.Stats(); stats != (train.StepperStats{Steps: 12}) {
			t.Errorf("%+v", stats)
		}
	}
}

func TestStepperRefuses(t *testing.T) {
	s := newSmall(t, cuda.CPU)
	plain, err := optim.NewSGD(nn.Parameters(s.net), optim.SGDOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for says, o := range map[string]train.StepperOptions{
		"needs Model":                     {Optimizer: s.opt},
		"Optimizer is a nil *optim.AdamW": {Model: s.net, Optimizer: (*optim.AdamW)(nil)},
		"ClipNorm is -1":                  {Model: s.net, Optimizer: s.opt, ClipNorm: -1},
		"ClipNorm is NaN":                 {Model: s.net, Optimizer: s.opt, ClipNorm: math.NaN()},
		"ClipNorm is +Inf":                {Model: s.net, Optimizer: s.opt, ClipNorm: math.Inf(1)},
		"must be BFloat16":                {Model: s.net, Optimizer: s.opt, Autocast: torch.Float64},
		"Capturable":                      {Model: s.net, Optimizer: plain, Graph: true},
	} {
		if _, err := train.NewStepper(o); !errors.Is(err, cuda.ErrInvalidArgument) ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v", says, err)
		}
	}
	step, err := train.NewStepper(train.StepperOptions{Model: s.net, Optimizer: s.opt})
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := step.Step(s.x); err == nil || !strings.Contains(err.Error(), "needs a target") {
		t.Error(err)
	}
	if _, _, err := step.Step(s.y, s.y); err == nil || !strings.Contains(err.Error(), "Linear") {
		t.Error(err)
	}
	step.Close()
	if _, _, err := step.Step(s.x, s.y); !errors.Is(err, torch.ErrClosed) {
		t.Error(err)
	}
}

// disagreeing is an optimizer whose step fails once, with the error of ranks that disagree about
// their gradients.
type disagreeing struct {
	optim.Optimizer
	err error
}

func (d *disagreeing) AgreeOnFound(*torch.Tensor) error {
	err := d.err
	d.err = nil
	return err
}

// A step that fails between Unscale and Update leaves nothing in the GradScaler.
func TestStepperAbandonsAFailedStep(t *testing.T) {
	newScaler := func() *optim.GradScaler {
		scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{InitScale: 1024})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { scaler.Close() })
		return scaler
	}
	newStepper := func(o train.StepperOptions) *train.Stepper {
		step, err := train.NewStepper(o)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { step.Close() })
		return step
	}
	s, failed, scaler := newSmall(t, cuda.CPU), errors.New("failed"), newScaler()
	first := func() []float32 {
		values, err := nn.Parameters(s.net)[0].Float32s()
		if err != nil {
			t.Fatal(err)
		}
		return values
	}
	// Gradients that are not finite affect only the failed step.
	step := newStepper(train.StepperOptions{Model: s.net, Optimizer: &disagreeing{s.opt, failed}, Scaler: scaler})
	infinite := kept(t, s.x.MulScalar(math.Inf(1)))
	defer infinite.Close()
	if _, _, err := step.Step(infinite, s.y); !errors.Is(err, failed) {
		t.Fatal(err)
	}
	before := first()
	if _, _, err := step.Step(s.x, s.y); err != nil {
		t.Fatal(err)
	}
	if reflect.DeepEqual(first(), before) {
		t.Error("the step after the failed one changed no parameter, want it taken")
	}
	if scale, err := scaler.Scale(); err != nil || scale != 1024 {
		t.Error(scale, err)
	}
	// Clipping fails on a closed parameter, after Unscale.
	closed := nn.NewParameter(nn.Constant(1), 1)
	model := &withParameter{s.net, closed}
	step = newStepper(train.StepperOptions{Model: model, Optimizer: s.opt, Scaler: newScaler(), ClipNorm: 1})
	closed.Close()
	for range 2 {
		if _, _, err := step.Step(s.x, s.y); !errors.Is(err, torch.ErrClosed) {
			t.Error(err)
		}
	}
}

// withParameter is a module with a parameter that does not affect its output.
type withParameter struct {
	nn.Module
	parameter *torch.Tensor
}

func (w *withParameter) Parts() nn.Parts {
	return nn.Parts{Modules: []nn.Child{{Name: "module", Module: w.Module}},
		Parameters: []torch.Named{{Name: "parameter", Tensor: w.parameter}}}
}

// On a GPU, steps with a graph compute the same as steps without. A batch of fewer rows runs
// without the graph and is logged once.
func TestStepperGraph(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	schedule := optim.CosineLR{Steps: 20}
	run := func(graph bool, o train.StepperOptions) ([]float64, train.StepperStats, string) {
		s := newSmall(t, cuda.Device(0))
		var log bytes.Buffer
		o.Model, o.Optimizer, o.Schedule, o.ClipNorm, o.Graph = s.net, s.opt, schedule, 0.5, graph
		o.Log = slog.New(slog.NewTextHandler(&log, nil))
		step, err := train.NewStepper(o)
		if err != nil {
			t.Fatal(err)
		}
		defer step.Close()
		all := s.losses(t, step, 5)
		whole, targets := s.x, s.y
		short, few := s.rows(t, 2), kept(t, s.y.Narrow(0, 0, 2))
		defer short.Close()
		defer few.Close()
		for range 3 {
			s.x, s.y = short, few
			all = append(all, s.losses(t, step, 1)...)
			s.x, s.y = whole, targets
			all = append(all, s.losses(t, step, 3)...)
		}
		return all, step.Stats(), log.String()
	}
	for name, o := range map[string]train.StepperOptions{"float32": {}, "bfloat16": {Autocast: torch.BFloat16}} {
		t.Run(name, func(t *testing.T) {
			want, none, silent := run(false, o)
			got, stats, log := run(true, o)
			for i := range want {
				if math.Abs(got[i]-want[i]) > 1e-4*(1+math.Abs(want[i])) {
					t.Errorf("loss %d is %v, and %v without a graph", i, got[i], want[i])
				}
			}
			if stats != (train.StepperStats{Steps: 17, Replays: 13, Captures: 1}) ||
				none != (train.StepperStats{Steps: 17}) {
				t.Errorf("%+v, and without a graph %+v", stats, none)
			}
			if strings.Count(log, "other shapes") != 1 || silent != "" {
				t.Errorf("log %q, and without a graph %q", log, silent)
			}
		})
	}
}

// On the CPU, which has no graphs, nothing is logged about batches of different shapes.
func TestStepperGraphOnTheCPU(t *testing.T) {
	s := newSmall(t, cuda.CPU)
	var log bytes.Buffer
	step, err := train.NewStepper(train.StepperOptions{Model: s.net, Optimizer: s.opt, Graph: true,
		Log: slog.New(slog.NewTextHandler(&log, nil))})
	if err != nil {
		t.Fatal(err)
	}
	defer step.Close()
	s.losses(t, step, 1)
	whole, targets := s.x, s.y
	s.x, s.y = s.rows(t, 2), kept(t, s.y.Narrow(0, 0, 2))
	s.losses(t, step, 1)
	s.x.Close()
	s.y.Close()
	s.x, s.y = whole, targets
	s.losses(t, step, 1)
	if got := step.Stats(); got != (train.StepperStats{Steps: 3}) || log.Len() > 0 {
		t.Errorf("%+v, log %q", got, &log)
	}
}

// countBatches runs steps and requires that the normalisation layers have counted every batch.
func countBatches(t *testing.T, device cuda.Device, graph bool) {
	t.Helper()
	s := newSmall(t, device)
	first, second := nn.NewBatchNorm1d(6, nn.BatchNorm1dOptions{}), nn.NewBatchNorm1d(4, nn.BatchNorm1dOptions{})
	net := nn.NewSequential(first, s.net, second)
	defer nn.Close(nn.NewSequential(first, second))
	if err := nn.To(net, device); err != nil {
		t.Fatal(err)
	}
	step, err := train.NewStepper(train.StepperOptions{Model: net, Optimizer: s.opt, Graph: graph})
	if err != nil {
		t.Fatal(err)
	}
	defer step.Close()
	for want := int64(1); want <= 5; want++ {
		s.losses(t, step, 1)
		for i, n := range []*nn.BatchNorm1d{first, second} {
			if got, err := n.NumBatches.Int64(); err != nil || got != want {
				t.Errorf("normalisation %d counted %d batches of %d: %v, want no error, got = %v",
					i, got, want, err, want)
			}
		}
	}
}

func TestStepperCountsBatches(t *testing.T) { countBatches(t, cuda.CPU, false) }

func TestGPUStepperCountsBatches(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	countBatches(t, cuda.Device(0), false)
	countBatches(t, cuda.Device(0), true)
}

// curious is a model that reads a value from the device, which a graph cannot capture.
type curious struct{ nn.Module }

func (c curious) Forward(x *torch.Tensor) *torch.Tensor {
	y := c.Module.Forward(x)
	if _, err := y.Sum().Float64(); err != nil {
		return torch.Fail("curious", err)
	}
	return y
}

// A step that cannot be captured runs without a graph and computes the same.
func TestStepperFallsBack(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	var losses [2][]float64
	for i, graph := range []bool{false, true} {
		s := newSmall(t, cuda.Device(0))
		var log bytes.Buffer
		step, err := train.NewStepper(train.StepperOptions{
			Model: curious{s.net}, Optimizer: s.opt, Graph: graph, Log: slog.New(slog.NewTextHandler(&log, nil)),
		})
		if err != nil {
			t.Fatal(err)
		}
		losses[i] = s.losses(t, step, 5)
		if stats := step.Stats(); stats != (train.StepperStats{Steps: 5}) ||
			strings.Contains(log.String(), "cannot be captured") != graph {
			t.Errorf("%+v, log %q", stats, log.String())
		}
		step.Close()
	}
	for i := range losses[0] {
		if math.Abs(losses[0][i]-losses[1][i]) > 1e-5 {
			t.Errorf("losses %v\nwant %v", losses[1], losses[0])
			break
		}
	}
}

// On a GPU, a run with graphs ends close to a run without them. Both runs have two slots, short
// batches, an evaluation, Dropout and averages.
func TestRunWithGraphs(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	path := archive(t)
	run := func(graph bool) *train.Report {
		o := job{gpu: true, adam: true, dropout: true, ema: true, withEval: true, path: path,
			Config: train.Config{ClipNorm: 1, Seed: 9, Epochs: 4, Graph: graph,
				Schedule: optim.CosineLR{Steps: 4 * perE}}}
		return newJob(t, o).run(t)
	}
	want, got := run(false), run(true)
	for i, e := range got.Epochs {
		if a, b := e.Train.Loss, want.Epochs[i].Train.Loss; math.Abs(a-b) > 1e-2*b {
			t.Errorf("epoch %d: loss %v, and %v without graphs", e.Epoch, a, b)
		}
		if a, b := e.Eval.Loss, want.Epochs[i].Eval.Loss; math.Abs(a-b) > 1e-2*b {
			t.Errorf("epoch %d: loss of the evaluation %v, and %v without graphs", e.Epoch, a, b)
		}
	}
	// There are 16 whole batches in 2 slots. At most one per slot runs without a graph.
	if g := got.Stepper; g.Steps != 4*perE || g.Captures > 3 || g.Replays < 16-3 || want.Stepper.Captures != 0 {
		t.Errorf("%+v, and without graphs %+v, want g.Steps = %v, g.Captures at most 3, g.Replays at "+
			"least %v, want.Stepper.Captures = 0", got.Stepper, want.Stepper, 4*perE, 16-3)
	}
}

// With autocast in training and evaluation, the metrics are close to the metrics in float32.
func TestRunWithAutocast(t *testing.T) {
	path := archive(t)
	for device := range min(2, cuda.DeviceCount()+1) {
		t.Run(fmt.Sprint("GPUs ", device), func(t *testing.T) {
			o := job{gpu: device > 0, withEval: true, path: path}
			want := newJob(t, o).run(t)
			o.Autocast = torch.BFloat16
			got := newJob(t, o).run(t)
			for i, e := range got.Epochs {
				a, b := e.Train.Loss, want.Epochs[i].Train.Loss
				if a == b || math.Abs(a-b) > 0.05*b {
					t.Errorf("epoch %d: loss %v, and %v in float32", e.Epoch, a, b)
				}
			}
		})
	}
}
