package train_test

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/png"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

const (
	side    = 8  // pixels of an image's side
	classes = 3  // in the archive
	perC    = 11 // images per class
	batch   = 8  // so that the last batch of an epoch is short
	perE    = 5  // steps per epoch
)

// archive writes a tar of small images. Each class has a main colour.
func archive(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "images.tar")
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for n := range classes * perC {
		class := n % classes
		img := image.NewRGBA(image.Rect(0, 0, 12, 12))
		for i := range 144 {
			shade := [3]uint8{uint8(n * 5), uint8(i), uint8(n + i)}
			shade[class] = 255
			img.Set(i%12, i/12, color.RGBA{shade[0], shade[1], shade[2], 255})
		}
		var file bytes.Buffer
		if err := png.Encode(&file, img); err != nil {
			t.Fatal(err)
		}
		if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("%c/%02d.png", 'a'+class, n),
			Size: int64(file.Len()), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(file.Bytes()); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// job is a training run of a small network. Each simulated process makes a new job.
type job struct {
	train.Config
	path     string
	withEval bool
	dropout  bool
	adam     bool
	ema      bool
	gpu      bool
	noNorm   bool // no BatchNorm
	wrapped  bool // the feed's source only wraps the loader, so Run does not know the loader
}

// wrapper is a source that is not an image loader.
type wrapper struct{ *imageloader.Loader }

// newJob returns a training run, with two epochs if Epochs is 0.
func newJob(t *testing.T, o job) *job {
	t.Helper()
	if o.path == "" {
		o.path = archive(t)
	}
	loader, err := imageloader.Open(o.path,
		imageloader.Options{BatchSize: batch, Transform: imageloader.Train(side), Shuffle: true, Seed: 3, Workers: 2})
	if err != nil {
		t.Fatal(err)
	}
	device := cuda.CPU
	if o.gpu {
		device = cuda.Device(0)
	}
	o.Feed = feedOn(t, device, loader)
	if o.wrapped {
		o.Feed = feedOn(t, device, wrapper{loader})
	}
	if o.withEval {
		held, err := imageloader.Open(o.path,
			imageloader.Options{BatchSize: batch, Transform: imageloader.Eval(side, side), Workers: 2})
		if err != nil {
			t.Fatal(err)
		}
		o.Eval = feedOn(t, device, held)
		t.Cleanup(func() { held.Close() })
	}
	t.Cleanup(func() { loader.Close() })
	if err := torch.ManualSeed(5); err != nil {
		t.Fatal(err)
	}
	drop := nn.Module(nn.NewIdentity())
	if o.dropout {
		drop = nn.NewDropout(0.5)
	}
	norm := nn.Module(nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}))
	if o.noNorm {
		norm = nn.NewIdentity()
	}
	o.Model = nn.NewSequential(
		nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{Padding: 1}), norm,
		nn.NewReLU(),
		nn.NewFlatten(), drop, nn.NewLinear(4*side*side, classes, nn.LinearOptions{}),
	)
	if err := nn.To(o.Model, device); err != nil {
		t.Fatal(err)
	}
	o.Optimizer, err = optim.NewSGD(nn.Parameters(o.Model),
		optim.SGDOptions{LR: 0.01, Momentum: 0.9, Capturable: o.Graph})
	if o.adam {
		o.Optimizer, err = optim.NewAdamW(nn.Parameters(o.Model), optim.AdamWOptions{LR: 0.001, Capturable: o.Graph})
	}
	if err != nil {
		t.Fatal(err)
	}
	if o.ema {
		if o.EMA, err = optim.NewEMA(nn.State(o.Model), optim.EMAOptions{Decay: 0.9}); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { o.EMA.Close() })
	}
	t.Cleanup(func() {
		o.Optimizer.Close()
		for _, n := range nn.State(o.Model) {
			n.Tensor.Close()
		}
	})
	if o.Epochs == 0 {
		o.Epochs = 2
	}
	return &o
}

func feed(t *testing.T, source prefetcher.Source) *prefetcher.Prefetcher {
	t.Helper()
	return feedOn(t, cuda.CPU, source)
}

func feedOn(t *testing.T, device cuda.Device, source prefetcher.Source) *prefetcher.Prefetcher {
	t.Helper()
	p, err := prefetcher.New(source, prefetcher.Options{Device: device})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.Close() })
	return p
}

func (j *job) run(t *testing.T) *train.Report {
	t.Helper()
	report, err := train.Run(context.Background(), j.Config)
	if err != nil {
		t.Fatal(err)
	}
	return report
}

// bits returns the bits of all parameters, buffers and averages.
func (j *job) bits(t *testing.T) map[string][]uint64 {
	t.Helper()
	all := map[string][]uint64{}
	add := func(prefix string, named []torch.Named) {
		for _, n := range named {
			wide := n.Tensor.NoGrad().ToDType(torch.Float64)
			values, err := wide.Float64s()
			if err != nil {
				t.Fatal(err)
			}
			wide.Close()
			for _, v := range values {
				all[prefix+n.Name] = append(all[prefix+n.Name], math.Float64bits(v))
			}
		}
	}
	add("", nn.State(j.Model))
	if j.EMA != nil {
		add("ema ", j.EMA.State())
	}
	return all
}

// figures returns the parts of a report that do not depend on time.
func figures(r *train.Report) []train.Epoch {
	epochs := append([]train.Epoch(nil), r.Epochs...)
	for i := range epochs {
		epochs[i].Seconds, epochs[i].SamplesPerSecond, epochs[i].WaitShare = 0, 0, 0
		// a resumed run has captured a different number of graphs
		epochs[i].AllocatedBytes, epochs[i].ReservedBytes = 0, 0
		if e := epochs[i].Eval; e != nil {
			held := *e
			held.Confusion = nil
			epochs[i].Eval = &held
		}
	}
	return epochs
}

// A run is stopped after any step by its context, and resumed with new objects. Its parameters,
// averages and metrics are bit-identical to an uninterrupted run's.
func TestResumeIsExact(t *testing.T) {
	path := archive(t)
	for name, o := range map[string]job{
		"SGD, schedule, clipping, averages, evaluation": {withEval: true, ema: true, Config: train.Config{
			Schedule: optim.CosineLR{Steps: 3 * perE}, ClipNorm: 0.5}},
		"AdamW, Dropout with a seed": {adam: true, dropout: true, Config: train.Config{Seed: 9}},
		"autocast, Dropout":          {dropout: true, Config: train.Config{Autocast: torch.BFloat16}},
		"micro-batches":              {withEval: true, Config: train.Config{MicroBatch: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			o.path, o.Epochs = path, 3
			whole := newJob(t, o)
			want := whole.run(t)
			bits := whole.bits(t)
			if want.Steps != 3*perE || len(want.Epochs) != 3 || want.Stopped {
				t.Fatalf("%+v, want want.Steps = %v, len(want.Epochs) = 3, want.Stopped = false",
					want, 3*perE)
			}
			allStops := [][]int{{perE}, {2, 4, perE + 1}, {1}, {perE - 1}, {perE + 2}, {3*perE - 1}, {3 * perE}}
			if o.adam || o.dropout { // their state does not depend on where in an epoch a run stops
				allStops = allStops[:2]
			}
			for _, stops := range allStops {
				for _, plain := range []bool{false, true} {
					t.Run(fmt.Sprintf("stops %v, without loader %v", stops, plain), func(t *testing.T) {
						o.Dir, o.Resume, o.wrapped = t.TempDir(), true, plain
						for _, stop := range stops {
							newJob(t, o).stopAfter(t, stop)
						}
						resumed := newJob(t, o)
						got := resumed.run(t)
						if !reflect.DeepEqual(figures(got), figures(want)) || got.Steps != want.Steps {
							t.Errorf("figures %+v\nwant %+v", figures(got), figures(want))
						}
						for name, values := range resumed.bits(t) {
							if !reflect.DeepEqual(values, bits[name]) {
								t.Errorf("%s differs, want the bits of the whole run", name)
							}
						}
					})
				}
			}
		})
	}
}

// TestRunKnowsTheFeedsLoader: without Config.Loader, Run takes the loader from the feed. It resumes
// neither with the options of another run nor with a Loader that the feed does not read from.
func TestRunKnowsTheFeedsLoader(t *testing.T) {
	o := job{path: archive(t), Config: train.Config{Dir: t.TempDir(), Resume: true}}
	newJob(t, o).stopAfter(t, 2)
	for want, options := range map[string]imageloader.Options{
		"Seed": {BatchSize: batch, Transform: imageloader.Train(side), Shuffle: true, Seed: 4},
		"Feed reads from another loader than Loader": {BatchSize: batch},
	} {
		loader, err := imageloader.Open(o.path, options)
		if err != nil {
			t.Fatal(err)
		}
		defer loader.Close()
		c := newJob(t, o).Config
		if want == "Seed" {
			c.Feed = feed(t, loader)
		} else {
			c.Loader = loader
		}
		if _, err := train.Run(t.Context(), c); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got the error %v, want one with %q", err, want)
		}
	}
}

// stopAfter runs the job until its context ends after a step.
func (j *job) stopAfter(t *testing.T, step int) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	j.OnStep = func(s train.Step) error {
		if s.Step == step {
			cancel()
		}
		return nil
	}
	report, err := train.Run(ctx, j.Config)
	if !errors.Is(err, context.Canceled) || !strings.Contains(err.Error(), "last.pt") ||
		!strings.Contains(err.Error(), "Resume") {
		t.Fatalf("stopped after step %d: %v, want the error %v with %q and %q",
			step, err, context.Canceled, "last.pt", "Resume")
	}
	if report.Steps != step || !report.Stopped {
		t.Fatalf("stopped after step %d: %+v, want report.Steps = %v, report.Stopped = true",
			step, report, step)
	}
}

// A run that dies suddenly resumes from the last checkpoint that SaveSteps wrote.
func TestSaveSteps(t *testing.T) {
	o := job{path: archive(t)}
	whole := newJob(t, o)
	whole.run(t)
	o.Dir, o.Resume, o.SaveSteps = t.TempDir(), true, 2
	dead := newJob(t, o)
	died := errors.New("died")
	dead.OnStep = func(s train.Step) error {
		if s.Step == perE+4 {
			return died
		}
		return nil
	}
	if _, err := train.Run(context.Background(), dead.Config); !errors.Is(err, died) {
		t.Fatal(err)
	}
	resumed, first := newJob(t, o), 0
	resumed.OnStep = func(s train.Step) error {
		if first == 0 {
			first = s.Step
		}
		return nil
	}
	resumed.run(t)
	if first != perE+4 { // step 8 was saved
		t.Errorf("resumed at step %d, want %d", first, perE+4)
	}
	if !reflect.DeepEqual(resumed.bits(t), whole.bits(t)) {
		t.Error("the resumed run has other parameters, want the bits of the whole run")
	}
}

// An epoch has 5 steps, of which the second and the fourth are logged, with their losses.
func TestLogEveryWritesALineForTheStep(t *testing.T) {
	var out bytes.Buffer
	j := newJob(t, job{Config: train.Config{Epochs: 2, Progress: &out, LogEvery: 2}})
	losses := map[int]float64{}
	j.OnStep = func(s train.Step) error {
		loss, err := s.Loss.Float64()
		losses[s.Step] = loss
		return err
	}
	j.run(t)
	var got []string
	for line := range strings.Lines(out.String()) {
		if strings.Contains(line, "  step ") {
			got = append(got, line)
		}
	}
	if len(got) != 5 {
		t.Fatalf("got %d lines %q, want 5", len(got), got)
	}
	for i, line := range got {
		step := 2 * (i + 1)
		want := fmt.Sprintf("epoch %d of 2  step %d of 5  loss %.4f  lr ", (step-1)/perE+1, (step-1)%perE+1, losses[step])
		if !strings.HasPrefix(line, want) || !strings.HasSuffix(line, " samples/s\n") {
			t.Errorf("got line %q, want one that begins with %q", line, want)
		}
	}
}

func TestFiles(t *testing.T) {
	var lines bytes.Buffer
	j := newJob(t, job{withEval: true,
		Config: train.Config{Epochs: 3, Dir: filepath.Join(t.TempDir(), "new", "run"), Progress: &lines,
			Metadata: map[string]string{"classes": `["a","b","c"]`}}})
	best := map[int]map[string][]uint64{} // parameters after each epoch
	j.OnEpoch = func(e train.Epoch) error {
		best[e.Epoch] = j.bits(t)
		return nil
	}
	report := j.run(t)
	last := j.bits(t)
	for file, want := range map[string]map[string][]uint64{"last.pt": last, "best.pt": best[report.Best().Epoch]} {
		t.Run(file, func(t *testing.T) {
			other := newJob(t, job{path: j.path})
			metadata, err := nn.Load(filepath.Join(j.Dir, file), other.Model)
			if err != nil {
				t.Fatal(err)
			}
			if metadata["classes"] != `["a","b","c"]` {
				t.Errorf("metadata = %v, want classes a, b and c", metadata)
			}
			if !reflect.DeepEqual(other.bits(t), want) {
				t.Errorf("%s has other parameters, want the bits at the end of its epoch", file)
			}
		})
	}
	text, err := os.ReadFile(filepath.Join(j.Dir, "log.csv"))
	if rows := strings.Split(strings.TrimSpace(string(text)), "\n"); err != nil || len(rows) != 4 ||
		!strings.HasPrefix(rows[3], "3,15,0.01,") {
		t.Errorf("log.csv: %v\n%s, len(rows) %v\nwant no error, len(rows) = 4, rows[3] beginning with %q",
			err, text, len(rows), "3,15,0.01,")
	}
	if got := confusionFile(t, j.Dir); !reflect.DeepEqual(got, report.Best().Eval.Confusion) {
		t.Errorf("confusion.csv has %v, and the best epoch %v", got, report.Best().Eval.Confusion)
	}
	out := lines.String()
	if rows := strings.Split(out, "\n"); len(rows) != 5 || !strings.Contains(rows[0], "lr at end") ||
		!strings.Contains(rows[3], " GB RSS") || strings.Contains(out, "\r") ||
		// the first epoch is the best so far
		!strings.Contains(rows[0], "best") || strings.Index(rows[1], "*") != strings.Index(rows[0], "best") {
		t.Errorf("progress:\n%s", out)
	}
	files, err := os.ReadDir(j.Dir)
	if err != nil || len(files) != 6 {
		t.Errorf("%d files in the folder, %v, want no error, len(files) = 6", len(files), err)
	}
}

// fixed is a source of given rows. Before each batch, it calls the function before.
type fixed struct {
	rows   [][classes + 4]float32
	labels []int64
	before func()
}

func (f *fixed) Fields() []torch.Spec {
	return []torch.Spec{{Name: "values", DType: torch.Float32, Shape: []int64{classes + 4}},
		{Name: "labels", DType: torch.Int64}}
}
func (f *fixed) BatchSize() int { return 2 }
func (f *fixed) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for at := 0; at < len(f.rows); at += 2 {
		if f.before != nil {
			f.before()
		}
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		n := min(2, len(f.rows)-at)
		for i := range n {
			for k, v := range f.rows[at+i] {
				binary.LittleEndian.PutUint32(slot[0][(i*(classes+4)+k)*4:], math.Float32bits(v))
			}
			binary.LittleEndian.PutUint64(slot[1][i*8:], uint64(f.labels[at+i]))
		}
		if err := deliver(n, nil); err != nil {
			return err
		}
	}
	return nil
}

// scaled is a model that multiplies its input by one parameter.
type scaled struct{ factor *torch.Tensor }

func (s *scaled) Forward(x *torch.Tensor) *torch.Tensor { return x.Mul(s.factor) }
func (s *scaled) Parts() nn.Parts {
	return nn.Parts{Parameters: []torch.Named{{Name: "factor", Tensor: s.factor}}}
}

// newFixed returns a training run on the source's rows. The model's factor is 1, so the outputs
// equal the rows.
func newFixed(t *testing.T, source *fixed) train.Config {
	t.Helper()
	model := &scaled{nn.NewParameter(nn.Constant(1), 1)}
	opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 1e-12})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { opt.Close(); model.factor.Close() })
	return train.Config{Model: model, Optimizer: opt, Epochs: 1, Feed: feed(t, source)}
}

// Loss, top-1, top-5 and confusion equal values computed on the host, with a short last batch.
func TestMetrics(t *testing.T) {
	source := &fixed{}
	const outputs = classes + 4
	want := train.Metrics{Samples: 5, Classes: outputs, Confusion: make([][]int64, outputs)}
	for i := range want.Confusion {
		want.Confusion[i] = make([]int64, outputs)
	}
	for n := range 5 {
		var row [outputs]float32
		for k := range row {
			row[k] = float32((k*5+n*3)%outputs) * 0.7
		}
		label := (n*n + 4) % outputs
		source.rows, source.labels = append(source.rows, row), append(source.labels, int64(label))
		sum, above, top := 0.0, 0, 0
		for k, v := range row {
			sum += math.Exp(float64(v))
			if v > row[label] {
				above++
			}
			if v > row[top] {
				top = k
			}
		}
		want.Loss += (math.Log(sum) - float64(row[label])) / 5
		if above == 0 {
			want.Top1 += 0.2
		}
		if above < 5 {
			want.Top5 += 0.2
		}
		want.Confusion[label][top]++
	}
	c := newFixed(t, source)
	c.Eval = feed(t, source)
	report, err := train.Run(context.Background(), c)
	if err != nil {
		t.Fatal(err)
	}
	near := func(a, b float64) bool { return math.Abs(a-b) < 1e-6 }
	for name, got := range map[string]*train.Metrics{"train": report.Epochs[0].Train, "eval": report.Epochs[0].Eval} {
		if got.Samples != want.Samples || got.Classes != want.Classes || !near(got.Loss, want.Loss) ||
			!near(got.Top1, want.Top1) || !near(got.Top5, want.Top5) {
			t.Errorf("%s: %+v, want %+v", name, *got, want)
		}
	}
	if got := report.Epochs[0].Eval.Confusion; !reflect.DeepEqual(got, want.Confusion) {
		t.Errorf("confusion %v, want %v", got, want.Confusion)
	}
	if want.Top1 == 0 || want.Top5 == 1 {
		t.Errorf("the test's rows are too easy: %+v, want Top1 over 0 and Top5 below 1", want)
	}
}

// A run whose context ends during an evaluation repeats the evaluation when it resumes.
func TestInterruptedEvaluationIsRepeated(t *testing.T) {
	source := &fixed{rows: make([][classes + 4]float32, 4), labels: make([]int64, 4)}
	c := newFixed(t, source)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	held := *source
	held.before = cancel
	c.Eval, c.Dir, c.Resume = feed(t, &held), t.TempDir(), true
	if report, err := train.Run(ctx, c); !errors.Is(err, context.Canceled) || report.Steps != 2 ||
		len(report.Epochs) != 0 {
		t.Fatalf("%+v, %v, want the error %v, report.Steps = 2, len(report.Epochs) = 0",
			report, err, context.Canceled)
	}
	c.Eval = feed(t, source)
	report, err := train.Run(context.Background(), c)
	if err != nil || report.Steps != 2 || len(report.Epochs) != 1 || report.Epochs[0].Eval.Samples != 4 ||
		report.Epochs[0].Train.Samples != 4 {
		t.Errorf("%+v, %v, want no error, report.Steps = 2, len(report.Epochs) = 1, "+
			"report.Epochs[0].Eval.Samples = 4, report.Epochs[0].Train.Samples = 4", report, err)
	}
}

// A NaN loss is an error, and damages no checkpoint.
func TestLossIsNotFinite(t *testing.T) {
	source := &fixed{rows: make([][classes + 4]float32, 4), labels: make([]int64, 4)}
	source.rows[3][0] = float32(math.NaN())
	c := newFixed(t, source)
	c.Dir = t.TempDir()
	_, err := train.Run(context.Background(), c)
	if err == nil || !strings.Contains(err.Error(), "the training loss is NaN") {
		t.Error(err)
	}
	// The folder is unchanged, and no lock remains.
	if files, err := os.ReadDir(c.Dir); err != nil || len(files) > 0 {
		t.Errorf("files are left: %v, %v, want no error, len(files) = 0", files, err)
	}
	// The checkpoint of the first step does not change.
	dir := c.Dir
	c = newFixed(t, source)
	c.Dir, c.SaveSteps = dir, 1
	if _, err := train.Run(context.Background(), c); err == nil ||
		!strings.Contains(err.Error(), "the training loss is NaN") {
		t.Error(err)
	}
	for _, tensor := range nn.State(c.Model) {
		x := stored(t, filepath.Join(c.Dir, "last.pt"), "state_dict", tensor.Name)
		values, err := x.ToDType(torch.Float64).Float64s()
		if err != nil {
			t.Fatal(err)
		}
		for _, v := range values {
			if math.IsNaN(v) {
				t.Fatalf("%s in the checkpoint has a NaN", tensor.Name)
			}
		}
	}
	if _, err := os.Stat(filepath.Join(c.Dir, "best.pt")); err == nil {
		t.Error("there is a best.pt, want none after epochs with NaN")
	}
}

// A new run that ends before its first step, or fails in its first epoch, leaves a folder that
// accepts the next new run. A resumed run keeps the file that it found.
func TestFailedRunLeavesTheFolder(t *testing.T) {
	path, dir := archive(t), t.TempDir()
	last := filepath.Join(dir, "last.pt")
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := train.Run(ended,
		newJob(t, job{path: path, Config: train.Config{Dir: dir}}).Config); !errors.Is(err, context.Canceled) ||
		!strings.Contains(err.Error(), "nothing is saved") {
		t.Error(err)
	}
	if _, err := os.Stat(last); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("last.pt after an interruption: %v, want the error %v", err, fs.ErrNotExist)
	}
	failed := errors.New("failed")
	fails := newJob(t, job{path: path, Config: train.Config{Dir: dir}})
	fails.OnStep = func(train.Step) error { return failed }
	if _, err := train.Run(context.Background(), fails.Config); !errors.Is(err, failed) {
		t.Error(err)
	}
	newJob(t, job{path: path, Config: train.Config{Dir: dir, Epochs: 1}}).run(t)
	if _, err := train.Run(ended,
		newJob(t, job{path: path, Config: train.Config{Dir: dir, Resume: true}}).Config); !errors.Is(err,
		context.Canceled) {
		t.Error(err)
	} else if interrupted := (*train.InterruptedError)(nil); !errors.As(err, &interrupted) ||
		interrupted.Checkpoint != last || interrupted.Epoch != 2 ||
		!strings.HasPrefix(err.Error(), "train: interrupted in epoch 2 after step") ||
		!strings.Contains(err.Error(), "Resume goes on from "+last) {
		t.Error(err)
	}
	if _, err := os.Stat(last); err != nil {
		t.Error(err)
	}
}

// A new run that fails in its first epoch removes the folders that it made, except those with
// another program's files. It removes no folder that existed before.
func TestFailedRunRemovesTheFoldersItMade(t *testing.T) {
	path, root := archive(t), t.TempDir()
	for name, c := range map[string]struct {
		there, dir, file string // existing folders; the run's folder; what another program writes during the run
		left             []string
	}{
		"nested":          {"a", "a/b/c/", "", nil},
		"already there":   {"d", "d", "", nil},
		"with a stranger": {"e", "e/f/g", "e/f/notes", []string{"f"}},
	} {
		t.Run(name, func(t *testing.T) {
			there := filepath.Join(root, c.there)
			if err := os.Mkdir(there, 0o777); err != nil {
				t.Fatal(err)
			}
			failed := errors.New("failed")
			j := newJob(t, job{path: path, Config: train.Config{Dir: root + "/" + c.dir}})
			j.OnStep = func(train.Step) error {
				if c.file != "" {
					if err := os.WriteFile(filepath.Join(root, c.file), nil, 0o666); err != nil {
						t.Error(err)
					}
				}
				return failed
			}
			if _, err := train.Run(context.Background(), j.Config); !errors.Is(err, failed) {
				t.Error(err)
			}
			var left []string
			entries, err := os.ReadDir(there)
			for _, e := range entries {
				left = append(left, e.Name())
			}
			if err != nil || !slices.Equal(left, c.left) {
				t.Errorf("%v is left in %s, %v; want %v", left, there, err, c.left)
			}
		})
	}
}

// While a run writes to a folder, a second run there is refused, new or resumed, and changes
// nothing.
func TestFolderHasOneRun(t *testing.T) {
	path, dir := archive(t), filepath.Join(t.TempDir(), "run")
	if err := train.Busy(dir); err != nil {
		t.Errorf("Busy before the run: %v, want nil", err)
	}
	first := newJob(t, job{path: path, Config: train.Config{Dir: dir}})
	first.OnStep = func(s train.Step) error {
		if s.Step != 1 {
			return nil
		}
		if err := train.Busy(dir); !errors.As(err, new(*train.BusyError)) {
			t.Errorf("Busy during the run: %v, want a *BusyError", err)
		}
		for _, resume := range []bool{false, true} {
			second := newJob(t, job{path: path, Config: train.Config{Dir: dir, Resume: resume}})
			_, err := train.Run(context.Background(), second.Config)
			var busy *train.BusyError
			if want := fmt.Sprintf("process %d on ", os.Getpid()); !errors.As(err, &busy) ||
				busy.Dir != dir || !strings.HasPrefix(busy.Holder, want) {
				t.Errorf("Resume %t: error %v, want a *BusyError of %s with the holder %q", resume, err, dir, want)
			} else if text := "another run writes to " + dir + ": " + busy.Holder; !strings.Contains(err.Error(), text) {
				t.Errorf("Resume %t: error %v, want one with %q", resume, err, text)
			}
		}
		return nil
	}
	first.run(t)
	if err := train.Busy(dir); err != nil {
		t.Errorf("Busy after the run: %v, want nil", err)
	}
	if _, err := os.Lstat(filepath.Join(dir, "run.lock")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("run.lock after the run: %v, want no file", err)
	}
}

// If a step fails when the context ends, Run returns the step's error and keeps the previous
// checkpoint, because the step may have changed only a part of the state.
func TestStepErrorAtCancellationIsReturned(t *testing.T) {
	failed := errors.New("failed")
	for name, fail := range map[string]func(c *train.Config, cancel context.CancelCauseFunc){
		"hook": func(c *train.Config, cancel context.CancelCauseFunc) {
			c.OnStep = func(s train.Step) error {
				if s.Step < 3 {
					return nil
				}
				cancel(errors.New("the cause"))
				return failed
			}
		},
		"loss": func(c *train.Config, cancel context.CancelCauseFunc) {
			steps := 0
			c.Loss = func(output *torch.Tensor, b *prefetcher.Batch) *torch.Tensor {
				if steps++; steps < 3 {
					return output.CrossEntropy(b.Labels)
				}
				cancel(nil)
				return torch.Fail("loss", failed)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			j := newJob(t, job{Config: train.Config{Dir: t.TempDir(), SaveSteps: 1}})
			if name == "hook" {
				j.SaveSteps = 2
			}
			ctx, cancel := context.WithCancelCause(context.Background())
			defer cancel(nil)
			fail(&j.Config, cancel)
			if _, err := train.Run(ctx, j.Config); !errors.Is(err, failed) ||
				errors.As(err, new(*train.InterruptedError)) {
				t.Error(err)
			}
			resumed, first := newJob(t, job{path: j.path, Config: train.Config{Dir: j.Dir, Resume: true}}), 0
			resumed.OnStep = func(s train.Step) error {
				if first == 0 {
					first = s.Step
				}
				return nil
			}
			resumed.run(t)
			if first != 3 {
				t.Errorf("the checkpoint is of step %d, want 2", first-1)
			}
		})
	}
}

// If the context ends during an evaluation of the averages, and swapping the parameters back into
// the model fails, Run's error is not an InterruptedError. The previous checkpoint stays, with the
// parameters.
func TestFailedSwapOfAveragesIsNoInterruption(t *testing.T) {
	source := &fixed{rows: make([][classes + 4]float32, 4), labels: make([]int64, 4)}
	c := newFixed(t, source)
	ema, err := optim.NewEMA(nn.State(c.Model), optim.EMAOptions{})
	if err != nil {
		t.Fatal(err)
	}
	defer ema.Close()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	held := *source
	last := filepath.Join(t.TempDir(), "last.pt")
	var before []byte
	held.before = func() {
		if before, err = os.ReadFile(last); err != nil {
			t.Error(err)
		}
		ema.Close() // makes the second Swap fail
		cancel()
	}
	c.EMA, c.Eval, c.Dir, c.SaveSteps = ema, feed(t, &held), filepath.Dir(last), 1
	_, err = train.Run(ctx, c)
	if !errors.Is(err, torch.ErrClosed) || errors.As(err, new(*train.InterruptedError)) ||
		!strings.Contains(err.Error(), "may be left with its averages") {
		t.Error(err)
	}
	if after, err := os.ReadFile(last); err != nil || !bytes.Equal(after, before) {
		t.Errorf("the checkpoint was written again: %v", err)
	}
}

// A context that ends with a cause interrupts the run just like a context without a cause.
func TestContextCauseInterruptsRun(t *testing.T) {
	j := newJob(t, job{})
	ctx, cancel := context.WithCancelCause(context.Background())
	j.OnStep = func(train.Step) error {
		cancel(errors.New("the cause"))
		return nil
	}
	if _, err := train.Run(ctx, j.Config); !errors.Is(err, context.Canceled) ||
		!errors.As(err, new(*train.InterruptedError)) {
		t.Error(err)
	}
}

// A model with fewer outputs than the loader has classes is refused before training.
func TestTooFewOutputs(t *testing.T) {
	j := newJob(t, job{})
	j.Model = nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*side*side, classes-1, nn.LinearOptions{}))
	report, err := train.Run(context.Background(), j.Config)
	if err == nil || !strings.Contains(err.Error(), "the model has 2 outputs, and the loader 3 classes") ||
		report.Steps != 0 {
		t.Errorf("%+v, %v, want an error with %q, report.Steps = 0",
			report, err, "the model has 2 outputs, and the loader 3 classes")
	}
}

// A hook that returns ErrStop ends the training without an error and with a checkpoint.
func TestHooks(t *testing.T) {
	for name, stop := range map[string]error{"ErrStop": train.ErrStop, "another error": errors.New("no more")} {
		t.Run(name, func(t *testing.T) {
			j := newJob(t, job{Config: train.Config{Dir: t.TempDir()}})
			j.OnEpoch = func(train.Epoch) error { return fmt.Errorf("hook: %w", stop) }
			report, err := train.Run(context.Background(), j.Config)
			if (err == nil) != (stop == train.ErrStop) || err != nil && !errors.Is(err, stop) {
				t.Error(err)
			}
			if len(report.Epochs) != 1 || report.Steps != perE || report.Stopped != (err == nil) {
				t.Errorf("%+v, want len(report.Epochs) = 1, report.Steps = %v, report.Stopped = %v",
					report, perE, (err == nil))
			}
		})
	}
}

// Of two epochs with equal top-1, the one with the lower evaluation loss is better: for best.pt,
// for Patience and after a resume.
func TestEqualTop1ComparesLosses(t *testing.T) {
	o := job{path: archive(t), withEval: true,
		Config: train.Config{Epochs: 9, Patience: 2, Dir: t.TempDir(), Resume: true}}
	after := map[int]map[string][]uint64{} // parameters by epoch
	epoch := 1                             // the current epoch
	run := func(stop int) *train.Report {
		j := newJob(t, o)
		j.Model = nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*side*side, classes, nn.LinearOptions{}))
		opt, err := optim.NewSGD(nn.Parameters(j.Model), optim.SGDOptions{LR: 0.01})
		if err != nil {
			t.Fatal(err)
		}
		defer opt.Close()
		j.Optimizer = opt
		// The loss of epoch n is |n-3| plus a small contribution of the network. Its gradient is
		// the same for the outputs of all classes, so the top-1 does not change.
		j.Loss = func(output *torch.Tensor, _ *prefetcher.Batch) *torch.Tensor {
			return output.Mean().MulScalar(1e-3).AddScalar(math.Abs(float64(epoch) - 3))
		}
		j.OnEpoch = func(e train.Epoch) error {
			after[e.Epoch] = j.bits(t)
			if epoch = e.Epoch + 1; e.Epoch == stop {
				return train.ErrStop
			}
			return nil
		}
		return j.run(t)
	}
	run(2)
	report := run(0)
	if len(report.Epochs) != 5 || report.Best().Epoch != 3 || !report.Stopped {
		t.Fatalf("%d epochs, best %+v, stopped %v", len(report.Epochs), report.Best(), report.Stopped)
	}
	for i, e := range report.Epochs {
		if e.Best != (i < 3) || e.Eval.Top1 != report.Epochs[0].Eval.Top1 {
			t.Errorf("epoch %d: best %v, evaluation %+v", e.Epoch, e.Best, e.Eval)
		}
	}
	if reflect.DeepEqual(after[2], after[3]) {
		t.Error("epoch 3 has the parameters of epoch 2, want others")
	}
	net := nn.NewSequential(nn.NewFlatten(), nn.NewLinear(3*side*side, classes, nn.LinearOptions{}))
	if _, err := nn.Load(filepath.Join(o.Dir, "best.pt"), net); err != nil {
		t.Fatal(err)
	}
	if saved := (&job{Config: train.Config{Model: net}}).bits(t); !reflect.DeepEqual(saved, after[3]) {
		t.Error("best.pt has other parameters, want epoch 3's")
	}
}

// The parameters and running statistics of a frozen part do not change.
func TestFrozenPart(t *testing.T) {
	j := newJob(t, job{withEval: true})
	trunk := nn.NewSequential(nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{Padding: 1}),
		nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{}))
	head := nn.NewSequential(nn.NewFlatten(), nn.NewLinear(4*side*side, classes, nn.LinearOptions{}))
	j.Model = nn.NewSequential(trunk, head)
	if err := nn.Freeze(trunk); err != nil {
		t.Fatal(err)
	}
	opt, err := optim.NewSGD(nn.Parameters(j.Model), optim.SGDOptions{LR: 0.01})
	if err != nil {
		t.Fatal(err)
	}
	defer opt.Close()
	j.Optimizer = opt
	before := j.bits(t)
	j.run(t)
	for name, values := range j.bits(t) {
		if same := reflect.DeepEqual(values, before[name]); same != strings.HasPrefix(name, "0.") {
			t.Errorf("%s: unchanged %v", name, same)
		}
	}
}

// A run ends after Patience epochs without a better one, and reports this again when it is resumed.
// Its event files contain the epochs.
func TestPatienceAndTensorBoard(t *testing.T) {
	o := job{Config: train.Config{Epochs: 9, Patience: 2, Dir: t.TempDir(), Resume: true, TensorBoard: true}}
	j := newJob(t, o)
	j.Loss = func(output *torch.Tensor, b *prefetcher.Batch) *torch.Tensor {
		// Epoch 2 is the best: the loss of epoch n is |n-2| plus a small contribution of the
		// network.
		return output.Mean().MulScalar(1e-6).AddScalar(math.Abs(float64(b.Epoch) - 1))
	}
	for range 2 {
		report := j.run(t)
		if len(report.Epochs) != 4 || report.Best().Epoch != 2 || !report.Stopped {
			t.Fatalf("%d epochs, best %+v, stopped %v", len(report.Epochs), report.Best(), report.Stopped)
		}
	}
	files, err := filepath.Glob(filepath.Join(j.Dir, "events.out.tfevents.*"))
	if err != nil || len(files) != 1 {
		t.Fatalf("%v, %v, want no error, len(files) = 1", files, err)
	}
	text, err := os.ReadFile(files[0])
	if n := bytes.Count(text, []byte("loss/train")); err != nil || n != 4 {
		t.Errorf("%d epochs in the event file, %v, want no error, n = 4", n, err)
	}
}

func TestRunKeepsNoTensor(t *testing.T) {
	j := newJob(t, job{withEval: true, ema: true, Config: train.Config{ClipNorm: 1, Dir: t.TempDir(), Epochs: 3}})
	var live, caught []int64
	j.OnEpoch = func(train.Epoch) error {
		// Collect the garbage of earlier tests first, so that Caught only counts the garbage of
		// this run.
		live = append(live, settle.Wait(t, torch.LiveTensors))
		caught = append(caught, torch.Caught())
		return nil
	}
	j.run(t)
	if live[1] != live[2] || caught[1] != caught[2] {
		t.Errorf("%v tensors live and %v are caught after each epoch, want as many after the last two", live, caught)
	}
}

// A run on a GPU is interrupted, and resumed from a checkpoint that the CPU can read too. Its
// metrics are close to an uninterrupted run's, but not equal: kernels may add in another order.
func TestResumeOnGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	o := job{gpu: true, adam: true, dropout: true, ema: true, withEval: true, path: archive(t),
		Config: train.Config{ClipNorm: 1, Seed: 9, Epochs: 3}}
	want := newJob(t, o).run(t)
	o.Dir, o.Resume = t.TempDir(), true
	newJob(t, o).stopAfter(t, perE+2)
	got := newJob(t, o).run(t)
	for i, e := range got.Epochs {
		if a, b := e.Train.Loss, want.Epochs[i].Train.Loss; math.Abs(a-b) > 1e-2*b {
			t.Errorf("epoch %d: loss %v, and %v without an interruption", e.Epoch, a, b)
		}
		if e.AllocatedBytes <= 0 || e.Eval.Samples != classes*perC {
			t.Errorf("%+v, want e.AllocatedBytes above 0, e.Eval.Samples = %v", e, classes*perC)
		}
	}
	if len(got.Epochs) != 3 || got.Steps != want.Steps {
		t.Errorf("%+v, want len(got.Epochs) = 3, got.Steps = %v", got, want.Steps)
	}
	cpu := newJob(t, job{path: o.path, dropout: true})
	if _, err := nn.Load(filepath.Join(o.Dir, "last.pt"), cpu.Model); err != nil {
		t.Error(err)
	}
}

func TestMistakes(t *testing.T) {
	path := archive(t)
	folder := t.TempDir()
	newJob(t, job{path: path, Config: train.Config{Dir: folder, Epochs: 1}}).run(t)
	for says, change := range map[string]func(c *train.Config){
		"needs Model": func(c *train.Config) { c.Model = nil },
		"Optimizer is a nil *optim.SGD": func(c *train.Config) {
			c.Optimizer,
				_ = optim.NewSGD(nil, optim.SGDOptions{})
		},
		"Epochs is -1": func(c *train.Config) { c.Epochs = -1 },
		"SaveSteps is -1, Patience 0 and LogEvery 0": func(c *train.Config) { c.SaveSteps, c.Dir = -1, t.TempDir() },
		"SaveSteps is 0, Patience -2 and LogEvery 0": func(c *train.Config) { c.Patience = -2 },
		"SaveSteps is 0, Patience 0 and LogEvery -3": func(c *train.Config) { c.LogEvery = -3 },
		"need Dir": func(c *train.Config) { c.Resume = true },
		"earlier run: resume it by Config.Resume with the same options, name another folder in " +
			"Config.Dir": func(c *train.Config) { c.Dir = folder },
		"had no EMA": func(c *train.Config) {
			c.Dir, c.Resume, c.EMA = folder, true,
				&optim.EMA{}
		},
		"whose last.pt is gone":        func(c *train.Config) { c.Dir = withBest(t, c.Model) },
		"best.pt is of an earlier run": func(c *train.Config) { c.Dir, c.Resume = withBest(t, c.Model), true },
		"ClipNorm is NaN":              func(c *train.Config) { c.ClipNorm = math.NaN() },
		"a file of another kind":       func(c *train.Config) { c.Dir = withFile(t, "log.csv", "my own table") },
		"only a confusion matrix": func(c *train.Config) {
			c.Dir = withFile(t, "confusion.csv",
				"my own table")
		},
		"it is no checkpoint of a training": func(c *train.Config) { c.Dir, c.Resume = withModel(t, c.Model), true },
		"the batches have no field":         func(c *train.Config) { c.Feed = feed(t, unlabelled{}) },
	} {
		t.Run(says, func(t *testing.T) {
			c := newJob(t, job{path: path}).Config
			change(&c)
			if _, err := train.Run(context.Background(), c); err == nil || !strings.Contains(err.Error(), says) {
				t.Error(err)
			}
		})
	}
	t.Run("another optimizer", func(t *testing.T) {
		j := newJob(t, job{path: path, adam: true, Config: train.Config{Dir: folder, Resume: true}})
		if _, err := train.Run(context.Background(), j.Config); err == nil ||
			!strings.Contains(err.Error(), "last.pt") {
			t.Error(err)
		}
	})
	t.Run("resume without a checkpoint starts", func(t *testing.T) {
		newJob(t, job{path: path, Config: train.Config{Dir: t.TempDir(), Resume: true}}).run(t)
	})
	t.Run("resume a complete run", func(t *testing.T) {
		j := newJob(t, job{path: path, Config: train.Config{Dir: folder, Resume: true, Epochs: 1}})
		if report := j.run(t); len(report.Epochs) != 1 || report.Steps != perE || report.Stopped {
			t.Errorf("%+v, want len(report.Epochs) = 1, report.Steps = %v, report.Stopped = false",
				report, perE)
		}
	})
}

type unlabelled struct{}

func (unlabelled) Fields() []torch.Spec {
	return []torch.Spec{{Name: "images", DType: torch.Float32, Shape: []int64{3, side, side}}}
}
func (unlabelled) BatchSize() int { return 1 }
func (unlabelled) Fill(ctx context.Context, _ int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	if _, err := lend(ctx); err != nil {
		return err
	}
	return deliver(1, nil)
}

func withFile(t *testing.T, name, text string) string {
	t.Helper()
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return folder
}

func withBest(t *testing.T, m nn.Module) string {
	t.Helper()
	folder := t.TempDir()
	if err := nn.Save(filepath.Join(folder, "best.pt"), m, nil); err != nil {
		t.Fatal(err)
	}
	return folder
}

func withModel(t *testing.T, m nn.Module) string {
	t.Helper()
	folder := t.TempDir()
	if err := nn.Save(filepath.Join(folder, "last.pt"), m, nil); err != nil {
		t.Fatal(err)
	}
	return folder
}
