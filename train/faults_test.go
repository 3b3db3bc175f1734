package train_test

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/csv"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// withTexts returns the path of a checkpoint that has the values of a dict and the states of the
// generators.
func withTexts(t *testing.T, folder string, dict map[string]any) string {
	t.Helper()
	state, err := torch.GeneratorState(cuda.CPU)
	if err != nil {
		t.Fatal(err)
	}
	defer state.Close()
	all := map[string]any{"metadata": map[string]any{}, "generators": map[string]any{"cpu": state}}
	for key, value := range dict {
		all[key] = value
	}
	path := filepath.Join(folder, "last.pt")
	if err := checkpoint.SavePyTorch(path, all); err != nil {
		t.Fatal(err)
	}
	return path
}

// State of another kind in a checkpoint is an error of Load that names the file and what is wrong.
func TestDamagedCheckpointIsAnError(t *testing.T) {
	net := nn.NewLinear(2, 3, nn.LinearOptions{})
	defer nn.Close(net)
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	scheduler, err := optim.NewScheduler(opt, optim.CosineLR{Steps: 9})
	if err != nil {
		t.Fatal(err)
	}
	ema, err := optim.NewEMA(nn.State(net), optim.EMAOptions{Decay: 0.9})
	if err != nil {
		t.Fatal(err)
	}
	defer ema.Close()
	scaler, err := optim.NewGradScaler(cuda.CPU, optim.GradScalerOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer scaler.Close()
	short, err := torch.Zeros(cuda.CPU, torch.Uint8, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer short.Close()
	for name, c := range map[string]struct {
		dict map[string]any
		into train.Checkpoint
		says string
	}{
		"a loader's position that is no JSON": {map[string]any{"loader": "{"}, train.Checkpoint{}, `"loader": unexpected end`},
		"another model": {map[string]any{"state_dict": map[string]any{"weight": short}}, train.Checkpoint{Model: net},
			"weight"},
		"averages that are no tensors": {map[string]any{"ema": map[string]any{"weight": "text"}}, train.Checkpoint{EMA: ema},
			`"ema": weight is no tensor`},
		"a negative count of steps": {map[string]any{"lr_scheduler": map[string]any{"last_epoch": -1}},
			train.Checkpoint{Scheduler: scheduler}, "-1 steps"},
		"no count of steps": {map[string]any{"lr_scheduler": "text"}, train.Checkpoint{Scheduler: scheduler},
			"no state of a scheduler"},
		"an impossible scale": {map[string]any{"scaler": map[string]any{"scale": -1.0, "_growth_tracker": 0}},
			train.Checkpoint{Scaler: scaler}, "no state of a scaler"},
		"a generator's state that is too short": {map[string]any{"generators": map[string]any{"cpu": short}},
			train.Checkpoint{}, "RNG state"},
		"a generator's state that is no tensor": {map[string]any{"generators": map[string]any{"cpu": "text"}},
			train.Checkpoint{}, "no state of the random generators"},
	} {
		c.into.Device = cuda.CPU
		path := withTexts(t, t.TempDir(), c.dict)
		if err := c.into.Load(path); err == nil || !strings.Contains(err.Error(), path) ||
			!strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got error %v, want one of %s with %q", name, err, path, c.says)
		}
	}
}

// Run does not resume from a position that no run can have saved, and leaves the folder as it is.
func TestImpossiblePositionIsNotResumed(t *testing.T) {
	path := archive(t)
	for says, text := range map[string]string{
		`"train": unexpected end`:                            "{",
		"it is of version 99, and this program reads":        `{"version": 99}`,
		"its place is impossible: epoch -1":                  `{"version": 2, "at": {"epoch": -1}}`,
		"its place is impossible: epoch 0, step 1, batch 2":  `{"version": 2, "at": {"step": 1, "batches": 2}}`,
		"it has the results of 0 epochs, and 1 are complete": `{"version": 2, "at": {"epoch": 1, "step": 5}}`,
		"its epoch 1 has no metrics of training":             `{"version": 2, "at": {"epoch": 1, "step": 5}, "epochs": [{}]}`,
	} {
		folder := t.TempDir()
		last := withTexts(t, folder, map[string]any{"train": text})
		before, err := os.ReadFile(last)
		if err != nil {
			t.Fatal(err)
		}
		j := newJob(t, job{path: path, Config: train.Config{Dir: folder, Resume: true}})
		if _, err := train.Run(t.Context(), j.Config); err == nil || !strings.Contains(err.Error(), last) ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("got error %v, want one of %s with %q", err, last, says)
		}
		if after, err := os.ReadFile(last); err != nil || !bytes.Equal(after, before) {
			t.Errorf("%s: last.pt has changed, or %v", says, err)
		}
	}
}

// A folder that cannot be used is an error before the first step.
func TestFoldersThatCannotBeUsedAreRefused(t *testing.T) {
	path, file := archive(t), filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, []byte("mine"), 0o644); err != nil {
		t.Fatal(err)
	}
	for dir, says := range map[string]string{
		file:                                   file,
		filepath.Join(file, "below"):           file,
		withFile(t, "best.pt", "my own text"):  "only a PyTorch file is replaced",
		withFile(t, "run.lock", "my own lock"): "only a claim is replaced",
	} {
		j := newJob(t, job{path: path, Config: train.Config{Dir: dir}})
		j.OnStep = func(train.Step) error { return errors.New("a step was taken") }
		if _, err := train.Run(t.Context(), j.Config); err == nil || !strings.HasPrefix(err.Error(), "train: ") ||
			!strings.Contains(err.Error(), says) {
			t.Errorf("%s: got error %v, want one with %q", dir, err, says)
		}
	}
	if text, err := os.ReadFile(file); err != nil || string(text) != "mine" {
		t.Errorf("the file has %q, %v, want it unchanged", text, err)
	}
	if err := (&train.Metrics{Confusion: [][]int64{{1}}}).SaveConfusion(filepath.Join(file, "below"), nil); err == nil ||
		!strings.Contains(err.Error(), file) {
		t.Errorf("SaveConfusion below a file: got error %v, want one that names it", err)
	}
}

// rows is a source of batches of two rows: a row of values, and one of labels.
type rows struct {
	values [][]float32
	labels [][]float32 // of one number: int64 class labels
	soft   bool
}

func (r *rows) Fields() []torch.Spec {
	label := torch.Spec{Name: "labels", DType: torch.Int64}
	if r.soft {
		label.DType, label.Shape = torch.Float32, []int64{int64(len(r.labels[0]))}
	}
	return []torch.Spec{{Name: "values", DType: torch.Float32, Shape: []int64{int64(len(r.values[0]))}}, label}
}

func (r *rows) BatchSize() int { return 2 }

func (r *rows) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for at := 0; at < len(r.values); at += 2 {
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		n := min(2, len(r.values)-at)
		for i := range n {
			for k, v := range r.values[at+i] {
				binary.LittleEndian.PutUint32(slot[0][(i*len(r.values[0])+k)*4:], math.Float32bits(v))
			}
			for k, v := range r.labels[at+i] {
				if r.soft {
					binary.LittleEndian.PutUint32(slot[1][(i*len(r.labels[0])+k)*4:], math.Float32bits(v))
				} else {
					binary.LittleEndian.PutUint64(slot[1][i*8:], uint64(v))
				}
			}
		}
		if err := deliver(n, nil); err != nil {
			return err
		}
	}
	return nil
}

// meanOutput is a loss of outputs of any shape.
func meanOutput(output *torch.Tensor, _ *prefetcher.Batch) *torch.Tensor { return output.Mean() }

// Evaluate measures the accuracy if the labels are classes, or have one component of a class
// mixture for each output. Otherwise it only measures the loss.
func TestAccuracyNeedsAClassifiersLabels(t *testing.T) {
	values := [][]float32{{3, 2, 1}, {1, 2, 3}, {1, 3, 2}}
	for name, c := range map[string]struct {
		source rows
		want   train.Metrics
	}{
		"class labels": {rows{values: values, labels: [][]float32{{0}, {1}, {1}}},
			train.Metrics{Classes: 3, Top1: 2.0 / 3}},
		"mixed labels": {rows{values: values, soft: true, labels: [][]float32{{0.6, 0.4, 0}, {0.1, 0.8, 0.1}, {0, 1, 0}}},
			train.Metrics{Classes: 3, Top1: 2.0 / 3}},
		"two numbers to predict": {rows{values: values, soft: true, labels: [][]float32{{1, 0}, {0, 1}, {1, 1}}},
			train.Metrics{}},
		"one number to predict": {rows{values: [][]float32{{3}, {1}}, soft: true, labels: [][]float32{{2}, {1}}},
			train.Metrics{}},
		"one output": {rows{values: [][]float32{{3}, {1}}, labels: [][]float32{{0}, {0}}}, train.Metrics{}},
	} {
		net := &scaled{nn.NewParameter(nn.Constant(1), 1)}
		m, err := train.Evaluate(t.Context(), net, feed(t, &c.source), train.EvaluateOptions{Loss: meanOutput})
		net.factor.Close()
		if err != nil {
			t.Errorf("%s: got error %v, want none", name, err)
			continue
		}
		if m.Samples != int64(len(c.source.values)) || m.Classes != c.want.Classes || math.Abs(m.Top1-c.want.Top1) > 1e-6 ||
			(m.Confusion != nil) != (c.want.Classes > 0) {
			t.Errorf("%s: got %+v, want %d classes and top-1 %v", name, *m, c.want.Classes, c.want.Top1)
		}
	}
}

// In a run without classes, the files and the table show no accuracies.
func TestRunWithoutClassesHasNoAccuracy(t *testing.T) {
	net := &scaled{nn.NewParameter(nn.Constant(1), 1)}
	defer net.factor.Close()
	opt, err := optim.NewSGD(nn.Parameters(net), optim.SGDOptions{LR: 0.1})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	var table bytes.Buffer
	source := &rows{values: [][]float32{{3}, {1}}, soft: true, labels: [][]float32{{2}, {1}}}
	dir := t.TempDir()
	if _, err := train.Run(t.Context(), train.Config{Model: net, Optimizer: opt, Epochs: 1, Feed: feed(t, source),
		Eval: feed(t, source), Loss: meanOutput, Dir: dir, Progress: &table, TensorBoard: true}); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile(filepath.Join(dir, "log.csv"))
	if err != nil {
		t.Fatal(err)
	}
	log, err := csv.NewReader(bytes.NewReader(text)).ReadAll()
	if err != nil || len(log) != 2 {
		t.Fatalf("got the log %q, error %v, want a line", text, err)
	}
	for i, column := range log[0] {
		want := strings.Contains(column, "_top")
		if empty := log[1][i] == ""; empty != want {
			t.Errorf("log.csv, %s: got %q, empty %t, want empty %t", column, log[1][i], empty, want)
		}
	}
	lines := strings.Split(strings.TrimSpace(table.String()), "\n")
	if cells := strings.Fields(lines[len(lines)-1]); len(cells) < 6 || cells[3] != "-" || cells[5] != "-" {
		t.Errorf("got the table's line %q, want - for both accuracies", lines[len(lines)-1])
	}
	events, err := filepath.Glob(filepath.Join(dir, "events.out.tfevents.*"))
	if err != nil || len(events) != 1 {
		t.Fatalf("got the event files %q, error %v, want one", events, err)
	}
	if text, err := os.ReadFile(events[0]); err != nil || !bytes.Contains(text, []byte("loss/eval")) ||
		bytes.Contains(text, []byte("top1")) {
		t.Errorf("got the events %q, error %v, want the losses alone", text, err)
	}
}

// Padding is not counted, even if it is in a batch with other samples instead of a batch by itself.
func TestPaddingInABatchIsNotCounted(t *testing.T) {
	path := archive(t)
	change := func(ctx context.Context, rank int, c *train.Config) context.Context {
		size := 1
		if c.World != nil {
			size = c.World.Size()
		}
		held, err := imageloader.Open(path, imageloader.Options{BatchSize: 3, Rank: rank, World: size, Workers: 2,
			Transform: imageloader.Eval(side, side)})
		if err != nil {
			t.Error(err)
			return ctx
		}
		t.Cleanup(func() { held.Close() })
		c.Eval = feed(t, held)
		return ctx
	}
	want := requireDone(t, team{path: path, change: change}.run(t, 0))
	all := team{path: path, change: change}.run(t, 2) // 17 samples a rank, of which one is padding
	near(t, "2 ranks", requireDone(t, all), want)
	got, alone := all[0].report.Epochs[1].Eval, want.report.Epochs[1].Eval
	if fmt.Sprint(got.Confusion) != fmt.Sprint(alone.Confusion) {
		t.Errorf("got the confusion matrix %v, want one process's %v", got.Confusion, alone.Confusion)
	}
}

// Done is closed when writing the file has ended, even with an error.
func TestSavingIsDone(t *testing.T) {
	dir := t.TempDir()
	for name, want := range map[string]error{"run.pt": nil, filepath.Join("none", "run.pt"): os.ErrNotExist} {
		path := filepath.Join(dir, name)
		s, err := (&train.Checkpoint{Device: cuda.CPU, Metadata: map[string]string{"run": "7"}}).SaveAsync(path)
		if err != nil {
			t.Fatal(err)
		}
		<-s.Done()
		c := train.Checkpoint{Device: cuda.CPU}
		if err := c.Load(path); !errors.Is(err, want) || want == nil && c.Metadata["run"] != "7" {
			t.Errorf("%s: Load after Done: got error %v, metadata %v, want %v", name, err, c.Metadata, want)
		}
		if err := s.Wait(); !errors.Is(err, want) {
			t.Errorf("%s: Wait: got error %v, want %v", name, err, want)
		}
	}
}
