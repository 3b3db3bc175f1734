package train_test

import (
	"bytes"
	"context"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// ranked are the outputs and labels of 14 samples for four classes. Some outputs are equal, and no
// sample has the last class.
var (
	rankedOutputs = [][4]float32{{1.0, 1.75, -2.0, -1.25}, {-1.25, -0.25, 0.25, -1.0}, {-0.5, 1.0, -1.75, -0.5},
		{-0.25, 1.5, -0.75, 1.25}, {0.0, 0.25, 2.0, -0.75}, {1.75, 1.75, -2.0, -1.25}, {1.5, -0.25, -2.0, -1.75},
		{0.25, -2.0, 0.5, -1.25}, {0.75, -1.5, -2.0, -2.0}, {-1.0, -0.75, -0.5, 0.0}, {1.75, -1.0, 0.25, 0.5},
		{-1.75, -1.75, -0.25, 0.25}, {-1.25, -0.5, 0.75, 1.5}, {-2.0, 1.5, -1.25, 1.0}}
	rankedLabels = [][4]float32{{0, 0, 0, 0}, {1, 1, 1, 0}, {1, 0, 1, 0}, {0, 1, 1, 0}, {0, 1, 0, 0}, {0, 0, 0, 0},
		{0, 1, 1, 0}, {1, 1, 1, 0}, {1, 0, 1, 0}, {0, 1, 1, 0}, {1, 0, 1, 0}, {1, 1, 1, 0}, {0, 1, 1, 0}, {0, 0, 1, 0}}
	// average_precision_score(labels[:, c], outputs[:, c]) of scikit-learn 1.9.1.
	rankedPrecision = []float64{0.45377492877492875, 0.48109737484737486, 0.7902236652236652, math.NaN()}
)

const rankedMean = 0.575031989615323 // of the first three classes

// rankedFeed gives the outputs as the model's input.
func rankedFeed(t *testing.T, device cuda.Device, labels torch.DType, o prefetcher.SamplesOptions) *prefetcher.Prefetcher {
	t.Helper()
	source, err := prefetcher.Samples(len(rankedOutputs), []torch.Spec{
		{Name: "outputs", DType: torch.Float32, Shape: []int64{4}}, {Name: "labels", DType: labels, Shape: []int64{4}},
	}, func(i int, s *prefetcher.Sample) error {
		copy(s.Float32("outputs"), rankedOutputs[i][:])
		if labels == torch.Float32 {
			copy(s.Float32("labels"), rankedLabels[i][:])
		}
		return nil
	}, o)
	if err != nil {
		t.Fatal(err)
	}
	return feedOn(t, device, source)
}

// identity is a network of one layer that returns its input.
func identity(t *testing.T, device cuda.Device) nn.Module {
	t.Helper()
	l := nn.NewLinear(4, 4, nn.LinearOptions{NoBias: true})
	one, err := torch.FromSlice([]float32{1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1}, 4, 4)
	if err != nil {
		t.Fatal(err)
	}
	defer one.Close()
	if err := nn.Parameters(l)[0].NoGrad().Copy_(one).Err(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { nn.Close(l) })
	if err := nn.To(l, device); err != nil {
		t.Fatal(err)
	}
	return l
}

func requireRanked(t *testing.T, what string, m *train.Metrics) {
	t.Helper()
	if m.Classes != 0 || m.Top1 != 0 || m.Confusion != nil || math.Abs(m.MAP-rankedMean) > 1e-12 ||
		len(m.AveragePrecision) != len(rankedPrecision) {
		t.Fatalf("%s: got %+v, want the mean average precision %v", what, m, rankedMean)
	}
	loss := 0.0 // log(1 + e^x) - x*y
	for i, row := range rankedOutputs {
		for c, x := range row {
			loss += math.Log1p(math.Exp(float64(x))) - float64(x*rankedLabels[i][c])
		}
	}
	if want := loss / float64(4*len(rankedOutputs)); math.Abs(m.Loss-want) > 1e-6 {
		t.Errorf("%s: got the loss %v, want %v", what, m.Loss, want)
	}
	for c, want := range rankedPrecision {
		if got := m.AveragePrecision[c]; math.IsNaN(got) != math.IsNaN(want) || math.Abs(got-want) > 1e-12 {
			t.Errorf("%s: class %d: got the average precision %v, want %v", what, c, got, want)
		}
	}
}

func TestAveragePrecisionEqualsScikitLearn(t *testing.T) { averagePrecision(t, cuda.CPU) }

func TestGPUAveragePrecision(t *testing.T) {
	averagePrecision(t, cudatest.RequireGPUs(t, 1)[0])
}

func averagePrecision(t *testing.T, device cuda.Device) {
	for _, batch := range []int{1, 5, 14} {
		f, model := rankedFeed(t, device, torch.Float32, prefetcher.SamplesOptions{BatchSize: batch}), identity(t, device)
		live := torch.LiveTensors()
		m, err := train.Evaluate(t.Context(), model, f, train.EvaluateOptions{MultiLabel: true})
		if err != nil {
			t.Fatal(err)
		}
		requireRanked(t, "Evaluate", m)
		if now := torch.LiveTensors(); now != live {
			t.Errorf("%d tensors live, and %d before", now, live)
		}
		// The outputs are exact in bfloat16, so the ranks are the same.
		m, err = train.Evaluate(t.Context(), model, f, train.EvaluateOptions{MultiLabel: true, Autocast: torch.BFloat16})
		if err != nil || math.Abs(m.MAP-rankedMean) > 1e-12 {
			t.Errorf("under autocast: got %+v, %v, want the mean average precision %v", m, err, rankedMean)
		}
	}
}

// Ranks return the metrics of all samples, without those that are repeated. The best epoch is that
// of the highest precision, and the files have it.
func TestRunMeasuresAveragePrecision(t *testing.T) {
	dir := t.TempDir()
	rank := func(world *distributed.Group) error {
		r, n := 0, 1
		if world != nil {
			r, n = world.Rank(), world.Size()
		}
		f := rankedFeed(t, cuda.CPU, torch.Float32, prefetcher.SamplesOptions{BatchSize: 4, Rank: r, World: n})
		model := identity(t, cuda.CPU)
		opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 1e-9})
		if err != nil {
			return err
		}
		defer opt.Close()
		var out bytes.Buffer
		c := train.Config{Model: model, Optimizer: opt, Feed: f, Eval: rankedFeed(t, cuda.CPU, torch.Float32,
			prefetcher.SamplesOptions{BatchSize: 4, Rank: r, World: n}), Epochs: 2, MultiLabel: true, World: world,
			Progress: &out}
		if world == nil {
			c.Dir = dir
		}
		report, err := train.Run(t.Context(), c)
		if err != nil {
			return err
		}
		for _, e := range report.Epochs {
			requireRanked(t, "Run", e.Eval)
			if e.Train.MAP != 0 || e.Train.AveragePrecision != nil {
				t.Errorf("training: got %+v, want a loss alone", e.Train)
			}
		}
		if text := out.String(); r == 0 && (!strings.Contains(text, "test mAP") || !strings.Contains(text, "0.5750")) {
			t.Errorf("got the table\n%s\nwant %q and %q", text, "test mAP", "0.5750")
		}
		return nil
	}
	if err := rank(nil); err != nil {
		t.Fatal(err)
	}
	log, err := os.ReadFile(filepath.Join(dir, "log.csv"))
	if lines := strings.Split(string(log), "\n"); err != nil || !strings.HasSuffix(lines[0], ",eval_map") ||
		!strings.HasSuffix(lines[1], ",0.57503199") {
		t.Errorf("%v, %s, want the column eval_map with 0.57503199", err, log)
	}
	for r, err := range ranksInProcess(t, 3, rank) {
		if err != nil {
			t.Errorf("rank %d: %v, want no error", r, err)
		}
	}
}

func TestMultiLabelNeedsRowsOfLabels(t *testing.T) {
	f := rankedFeed(t, cuda.CPU, torch.Int64, prefetcher.SamplesOptions{BatchSize: 4})
	_, err := train.Evaluate(context.Background(), identity(t, cuda.CPU), f, train.EvaluateOptions{MultiLabel: true})
	if err == nil || !strings.Contains(err.Error(), "the labels are int64[4 4], and the model's outputs [4 4]") {
		t.Errorf("got the error %v, want one that names the labels", err)
	}
	few := nn.NewLinear(4, 3, nn.LinearOptions{})
	defer nn.Close(few)
	f = rankedFeed(t, cuda.CPU, torch.Float32, prefetcher.SamplesOptions{BatchSize: 4})
	_, err = train.Evaluate(context.Background(), few, f, train.EvaluateOptions{MultiLabel: true})
	if err == nil || !strings.Contains(err.Error(), "the model's outputs [4 3]") {
		t.Errorf("got the error %v, want one that names the outputs", err)
	}
}
