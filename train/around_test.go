package train_test

import (
	"fmt"
	"math"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// Modes of ranks whose Steppers average gradients by distributed.DataParallel.
const (
	aroundWay    = "step around a reduction"
	gpuAroundWay = "step around a reduction on GPUs"
)

// stepAround runs steps, all except the first as replays of one graph on a GPU. It compares the
// weights with steps without a graph, and with one process that trains on the whole batch.
func stepAround(t *testing.T, world *distributed.Group) {
	const steps, rows = 8, 4
	d := world.Device()
	run := func(parallel, graph bool) ([]float64, train.StepperStats) {
		s := newSmall(t, d)
		var o train.StepperOptions
		if parallel {
			p, err := distributed.NewDataParallel(world, s.net, distributed.DataParallelOptions{BucketBytes: 128})
			if err != nil {
				t.Fatal(err)
			}
			defer p.Close()
			o.Backward = p.Around
		}
		o.Model, o.Optimizer, o.Schedule, o.ClipNorm, o.Graph = s.net, s.opt, optim.CosineLR{Steps: steps}, 0.5, graph
		step, err := train.NewStepper(o)
		if err != nil {
			t.Fatal(err)
		}
		defer step.Close()
		scope := torch.NewScope("steps")
		defer scope.Close()
		// A graph needs inputs at fixed addresses.
		whole := scope.Own(s.rows(t, rows*world.Size()))
		labels := make([]int64, rows*world.Size())
		for i := range labels {
			labels[i] = int64(i * i % 4)
		}
		host, err := torch.FromInt64s(labels)
		if err != nil {
			t.Fatal(err)
		}
		x, y := whole, scope.Own(host).To(d)
		if parallel {
			x, y = x.Narrow(0, int64(rows*world.Rank()), rows), y.Narrow(0, int64(rows*world.Rank()), rows)
		}
		for range steps {
			if _, _, err := step.Step(x, y); err != nil {
				t.Fatal(err)
			}
		}
		var weights []float64
		for _, p := range nn.Parameters(s.net) {
			v, err := p.NoGrad().In(scope).Float64s()
			if err != nil {
				t.Fatal(err)
			}
			weights = append(weights, v...)
		}
		return weights, step.Stats()
	}
	alone, _ := run(false, false)
	for _, graph := range []bool{false, true} {
		got, stats := run(true, graph)
		for i := range alone {
			if math.Abs(got[i]-alone[i]) > 1e-5*(1+math.Abs(alone[i])) {
				t.Errorf("graph %v: weight %d is %v, and %v of a rank alone", graph, i, got[i], alone[i])
			}
		}
		all, err := distributed.AllGatherObject(world, fmt.Sprint(got))
		if err != nil {
			t.Fatal(err)
		}
		for rank, other := range all {
			if other != all[0] {
				t.Errorf("graph %v: rank %d has the weights %s, want rank 0's, %s", graph, rank, other,
					all[0])
			}
		}
		want := train.StepperStats{Steps: steps}
		if graph && d != cuda.CPU {
			want.Captures, want.Replays = 1, stats.Replays
			if stats.Replays < steps/2 {
				t.Errorf("%d of %d steps were replays, want at least %v", stats.Replays, steps, steps/2)
			}
		}
		if stats != want {
			t.Errorf("graph %v: %+v, want %+v", graph, stats, want)
		}
	}
	fmt.Println("compared")
}

func requireCompared(t *testing.T, way string) {
	t.Helper()
	for rank, said := range startJob(t, 2, way, "", 0) {
		if !strings.Contains(said, "compared") {
			t.Errorf("rank %d: %s, want it with %q", rank, said, "compared")
		}
	}
}

// A Stepper whose Backward is distributed.DataParallel.Around trains like a single process.
func TestStepperAroundDataParallel(t *testing.T) { requireCompared(t, aroundWay) }

// On GPUs the step's graph includes the gradient reduction.
func TestGPUStepperAroundDataParallelIsAGraph(t *testing.T) {
	cudatest.RequireGPUs(t, 2)
	requireCompared(t, gpuAroundWay)
}
