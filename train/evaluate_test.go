package train_test

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// Evaluate returns the metrics that Run computes for the same parameters. That also holds for a
// model in training mode, whose running statistics stay unchanged.
func TestEvaluateEqualsRun(t *testing.T) {
	for name, dtype := range map[string]torch.DType{"float32": 0, "autocast": torch.BFloat16} {
		t.Run(name, func(t *testing.T) {
			j := newJob(t, job{withEval: true, dropout: true, Config: train.Config{Epochs: 1, Autocast: dtype}})
			want := j.run(t).Epochs[0].Eval
			before := j.bits(t)
			nn.Train(j.Model, true)
			live := torch.LiveTensors()
			got, err := train.Evaluate(t.Context(), j.Model, j.Eval, train.EvaluateOptions{Autocast: dtype})
			if err != nil || !reflect.DeepEqual(got, want) {
				t.Errorf("%+v, %v; want %+v", got, err, want)
			}
			if !reflect.DeepEqual(j.bits(t), before) {
				t.Error("Evaluate has changed parameters or running statistics, want the same bits as before")
			}
			if now := torch.LiveTensors(); now != live {
				t.Errorf("%d tensors live, and %d before", now, live)
			}
			other, err := train.Evaluate(t.Context(), j.Model, j.Eval,
				train.EvaluateOptions{Autocast: torch.BFloat16 - dtype})
			if err != nil || other.Loss == want.Loss {
				t.Errorf("%+v, %v: the loss of the other precision is the same, want no error, "+
					"other.Loss not %v", other, err, want.Loss)
			}
		})
	}
}

// On a GPU Evaluate also returns the metrics of Run's evaluation. A model with too few outputs is
// refused before the device gets a label that is too large for the outputs, so CUDA stays usable.
func TestGPUEvaluate(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	j := newJob(t, job{gpu: true, withEval: true, Config: train.Config{Epochs: 1}})
	want := j.run(t).Epochs[0].Eval
	few := nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*side*side, classes-1, nn.LinearOptions{}))
	defer nn.Close(few)
	if err := nn.To(few, j.Eval.Device()); err != nil {
		t.Fatal(err)
	}
	if _, err := train.Evaluate(t.Context(), few, j.Eval, train.EvaluateOptions{}); err == nil ||
		!strings.Contains(err.Error(), "the model has 2 outputs") {
		t.Fatal(err)
	}
	got, err := train.Evaluate(t.Context(), j.Model, j.Eval, train.EvaluateOptions{})
	if err != nil || got.Samples != want.Samples || math.Abs(got.Loss-want.Loss) > 1e-5*want.Loss {
		t.Errorf("%+v, %v; want %+v", got, err, want)
	}
}

// A custom loss replaces the cross-entropy, and gets outputs without a graph.
func TestEvaluateWithAnotherLoss(t *testing.T) {
	c := newFixed(t, &fixed{rows: make([][classes + 4]float32, 3), labels: []int64{1, 0, 2}})
	m, err := train.Evaluate(t.Context(), c.Model, c.Feed, train.EvaluateOptions{
		Loss: func(output *torch.Tensor, b *prefetcher.Batch) *torch.Tensor {
			if output.RequiresGrad() {
				t.Error("RequiresGrad() of an evaluation's output = true, want false")
			}
			return output.Mean().AddScalar(float64(b.N))
		},
	})
	if err != nil || m.Samples != 3 || math.Abs(m.Loss-(2*2+1)/3.0) > 1e-6 {
		t.Errorf("%+v, %v", m, err)
	}
}

func TestEvaluateMistakes(t *testing.T) {
	j := newJob(t, job{withEval: true})
	few := nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*side*side, classes-1, nn.LinearOptions{}))
	defer nn.Close(few)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	infinite := &fixed{rows: make([][classes + 4]float32, 1), labels: []int64{0}}
	infinite.rows[0][1] = float32(math.Inf(1))
	rows := newFixed(t, infinite)
	beyond := feed(t, &fixed{rows: make([][classes + 4]float32, 2), labels: []int64{0, classes + 4}})
	for says, c := range map[string]struct {
		ctx   context.Context
		model nn.Module
		feed  *prefetcher.Prefetcher
	}{
		"needs a model and a feed":                          {feed: j.Eval},
		"train.Evaluate: needs a model":                     {model: j.Model},
		"the model has 2 outputs, and the loader 3 classes": {model: few, feed: j.Eval},
		"the batches have no field \"labels\": set Loss": {model: j.Model,
			feed: feed(t, unlabelled{})},
		"the evaluation feed has no samples": {model: rows.Model,
			feed: feed(t, &fixed{})},
		"train.Evaluate: the evaluation loss is ":                             {model: rows.Model, feed: rows.Feed},
		"the model has 7 outputs, for the labels 0 to 6: torch: CrossEntropy": {model: rows.Model, feed: beyond},
		"nn.NewLinear": {model: nn.NewLinear(-1, 3, nn.LinearOptions{}), feed: j.Eval},
		"train.Evaluate: context canceled": {ctx: ended, model: j.Model,
			feed: j.Eval},
	} {
		if c.ctx == nil {
			c.ctx = t.Context()
		}
		m, err := train.Evaluate(c.ctx, c.model, c.feed, train.EvaluateOptions{})
		if m != nil || err == nil || !strings.Contains(err.Error(), says) || c.ctx == ended &&
			!errors.Is(err, context.Canceled) {
			t.Errorf("%+v, %v does not say %q", m, err, says)
		}
	}
}

// confusionFile returns the counts of confusion.csv.
func confusionFile(t *testing.T, dir string) [][]int64 {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(dir, "confusion.csv"))
	if err != nil {
		t.Fatal(err)
	}
	rows, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || !slices.Equal(rows[0], []string{`true\predicted`, "a", "b", "c"}) {
		t.Fatalf("%v, %v, want no error, rows[0] = %+v",
			rows, err, []string{`true\predicted`, "a", "b", "c"})
	}
	var counts [][]int64
	for _, row := range rows[1:] {
		var of []int64
		for _, cell := range row[1:] {
			n, err := strconv.ParseInt(cell, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			of = append(of, n)
		}
		counts = append(counts, of)
	}
	return counts
}

// The confusion matrix in the folder belongs to best.pt. A better epoch without an evaluation
// removes the matrix, and a worse epoch keeps it.
func TestConfusionFilesAreOfTheBestEpoch(t *testing.T) {
	for name, better := range map[string]bool{"better": true, "worse": false} {
		t.Run(name, func(t *testing.T) {
			o := job{path: archive(t), withEval: true, Config: train.Config{Epochs: 1, Dir: t.TempDir(), Resume: true}}
			newJob(t, o).run(t)
			o.withEval, o.Epochs = false, 2
			o.Loss = func(output *torch.Tensor, _ *prefetcher.Batch) *torch.Tensor {
				if better {
					return output.Mean().MulScalar(1e-6)
				}
				return output.Mean().MulScalar(1e-6).AddScalar(1e6)
			}
			if best := newJob(t, o).run(t).Best().Epoch; (best == 2) != better {
				t.Fatalf("the best epoch is %d", best)
			}
			for _, file := range []string{"confusion.csv", "confusion.png"} {
				if _, err := os.Stat(filepath.Join(o.Dir, file)); (err == nil) == better {
					t.Errorf("%s: %v", file, err)
				}
			}
		})
	}
}

// The next run removes unfinished tables and pictures of a killed run. Other files stay.
func TestUnfinishedFilesAreRemoved(t *testing.T) {
	o := job{Config: train.Config{Epochs: 1, Dir: t.TempDir()}}
	for name, stays := range map[string]bool{
		"log.csv.12.tmp": false, "curves.png.3.tmp": false, "confusion.csv.4.tmp": false,
		"confusion.png.5.tmp": false, "mine.csv.6.tmp": true, "log.csv.old": true,
	} {
		path := filepath.Join(o.Dir, name)
		if err := os.WriteFile(path, nil, 0o666); err != nil {
			t.Fatal(err)
		}
		defer func() {
			if _, err := os.Stat(path); (err == nil) != stays {
				t.Errorf("%s: %v", name, err)
			}
		}()
	}
	newJob(t, o).run(t)
}
