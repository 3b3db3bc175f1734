package train_test

import (
	"errors"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// microBatched trains a network for some steps and returns its parameters, and the outputs and
// losses of all steps.
func microBatched(t *testing.T, device cuda.Device, o train.StepperOptions) (values []float32) {
	t.Helper()
	s := newSmall(t, device)
	sgd, err := optim.NewSGD(nn.Parameters(s.net), optim.SGDOptions{LR: 0.1, Momentum: 0.9, Capturable: true})
	if err != nil {
		t.Fatal(err)
	}
	defer sgd.Close()
	o.Model, o.Optimizer = s.net, sgd
	if o.Autocast == torch.Float16 {
		if o.Scaler, err = optim.NewGradScaler(device, optim.GradScalerOptions{}); err != nil {
			t.Fatal(err)
		}
		defer o.Scaler.Close()
	}
	stepper, err := train.NewStepper(o)
	if err != nil {
		t.Fatal(err)
	}
	defer stepper.Close()
	collect := func(list ...*torch.Tensor) {
		for _, x := range list {
			of, err := x.NoGrad().ToDType(torch.Float32).Float32s()
			if err != nil {
				t.Fatal(err)
			}
			values = append(values, of...)
		}
	}
	for range 4 {
		output, loss, err := stepper.Step(s.x, s.y)
		if err != nil {
			t.Fatalf("MicroBatch %d: %v, want no error", o.MicroBatch, err)
		}
		collect(output, loss)
	}
	collect(nn.Parameters(s.net)...)
	if o.Graph && device != cuda.CPU && stepper.Stats().Replays == 0 {
		t.Errorf("MicroBatch %d: got no replay of a graph, want some", o.MicroBatch)
	}
	return values
}

// checkMicroBatches compares steps in parts with steps of the whole batch.
func checkMicroBatches(t *testing.T, device cuda.Device, o train.StepperOptions, tolerance float64) {
	t.Helper()
	want := microBatched(t, device, o)
	for _, micro := range []int{1, 2, 3, 4, 5, 9} {
		o.MicroBatch = micro
		got := microBatched(t, device, o)
		if len(got) != len(want) {
			t.Fatalf("MicroBatch %d: got %d numbers, want %d", micro, len(got), len(want))
		}
		for i, v := range got {
			if d := math.Abs(float64(v - want[i])); !(d <= tolerance) {
				t.Errorf("MicroBatch %d: number %d is %v, want %v within %v", micro, i, v, want[i], tolerance)
				break
			}
		}
	}
}

// The gradients of the parts add up to the gradients of the whole batch, within rounding. The test
// divides 5 rows into parts of 1 to 5.
func TestMicroBatchesGiveTheWholeBatchsSteps(t *testing.T) {
	checkMicroBatches(t, cuda.CPU, train.StepperOptions{}, 1e-6)
	checkMicroBatches(t, cuda.CPU, train.StepperOptions{ClipNorm: 0.1, Schedule: optim.CosineLR{Steps: 9}}, 1e-6)
	checkMicroBatches(t, cuda.CPU, train.StepperOptions{Autocast: torch.BFloat16}, 0.02)
}

func TestGPUMicroBatchesGiveTheWholeBatchsSteps(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	device := cuda.Device(0)
	for _, graph := range []bool{false, true} {
		checkMicroBatches(t, device, train.StepperOptions{Graph: graph}, 1e-5)
		checkMicroBatches(t, device, train.StepperOptions{Graph: graph, Autocast: torch.Float16, ClipNorm: 1}, 0.02)
	}
}

// A run that divides its batches has the losses and accuracies of a run of whole batches, even if
// the last batch of an epoch is short.
func TestRunInMicroBatches(t *testing.T) {
	path := archive(t)
	whole := newJob(t, job{path: path, withEval: true, noNorm: true})
	want := whole.run(t)
	parts := newJob(t, job{path: path, withEval: true, noNorm: true})
	parts.MicroBatch = 3
	got := parts.run(t)
	for i, e := range got.Epochs {
		w := want.Epochs[i]
		if math.Abs(e.Train.Loss-w.Train.Loss) > 1e-5 || e.Train.Top1 != w.Train.Top1 || e.Train.Samples != w.Train.Samples ||
			math.Abs(e.Eval.Loss-w.Eval.Loss) > 1e-5 || e.Steps != w.Steps {
			t.Errorf("epoch %d: got %+v and %+v, want %+v and %+v", i+1, e.Train, e.Eval, w.Train, w.Eval)
		}
	}
}

func TestMicroBatchIsChecked(t *testing.T) {
	s := newSmall(t, cuda.CPU)
	for _, o := range []train.StepperOptions{{MicroBatch: -1},
		{MicroBatch: 2, Backward: func(pass func() error) error { return pass() }}} {
		o.Model, o.Optimizer = s.net, s.opt
		if _, err := train.NewStepper(o); !errors.Is(err, cuda.ErrInvalidArgument) || !strings.Contains(err.Error(), "MicroBatch") {
			t.Errorf("%+v: got the error %v, want one about MicroBatch", o.MicroBatch, err)
		}
	}
}
