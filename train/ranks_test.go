package train_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// team is a training run whose ranks are goroutines of this process. The zero value trains for two
// epochs of four steps. In a step, all ranks together train on eight images.
type team struct {
	path, dir string
	epochs    int
	norm      bool // the network has a BatchNorm
	resume    bool
	saveSteps int
	wrapped   bool // the feed's source only wraps the loader, so Run does not know the loader
	change    func(ctx context.Context, rank int, c *train.Config) context.Context
}

// modelMu prevents ranks of one process from drawing their parameters at the same time.
var modelMu sync.Mutex

func (k team) model() (nn.Module, error) {
	modelMu.Lock()
	defer modelMu.Unlock()
	if err := torch.ManualSeed(5); err != nil {
		return nil, err
	}
	norm := nn.Module(nn.NewIdentity())
	if k.norm {
		norm = nn.NewBatchNorm2d(4, nn.BatchNorm2dOptions{})
	}
	return nn.NewSequential(nn.NewConv2d(3, 4, 3, nn.Conv2dOptions{Padding: 1}), norm, nn.NewReLU(), nn.NewFlatten(),
		nn.NewLinear(4*side*side, classes, nn.LinearOptions{})), nil
}

// ranRank is the result of one rank's Run.
type ranRank struct {
	report   *train.Report
	err      error
	weights  []float64
	progress string
}

// rank runs one rank. world is nil for a run in one process.
func (k team) rank(ctx context.Context, world *distributed.Group, path string) (o ranRank, err error) {
	rank, size := 0, 1
	if world != nil {
		rank, size = world.Rank(), world.Size()
	}
	loader, err := imageloader.Open(path, imageloader.Options{BatchSize: batch / size, Transform: imageloader.Train(side),
		Shuffle: true, Seed: 3, Workers: 2, DropLast: true, Rank: rank, World: size})
	if err != nil {
		return o, err
	}
	defer loader.Close()
	held, err := imageloader.Open(path, imageloader.Options{BatchSize: batch / size, Rank: rank, World: size, Workers: 2,
		Transform: imageloader.Eval(side, side)})
	if err != nil {
		return o, err
	}
	defer held.Close()
	var out bytes.Buffer
	c := train.Config{Epochs: max(k.epochs, 2), World: world, Dir: k.dir, Resume: k.resume,
		SaveSteps: k.saveSteps, Progress: &out, Seed: 9}
	source := prefetcher.Source(loader)
	if k.wrapped {
		source = wrapper{loader}
	}
	for _, f := range []struct {
		to     **prefetcher.Prefetcher
		source prefetcher.Source
	}{{&c.Feed, source}, {&c.Eval, held}} {
		feed, err := prefetcher.New(f.source, prefetcher.Options{Device: cuda.CPU})
		if err != nil {
			return o, err
		}
		defer feed.Close()
		*f.to = feed
	}
	if c.Model, err = k.model(); err != nil {
		return o, err
	}
	defer nn.Close(c.Model)
	opt, err := optim.NewSGD(nn.Parameters(c.Model), optim.SGDOptions{LR: 0.01, Momentum: 0.9})
	if err != nil {
		return o, err
	}
	defer opt.Close()
	c.Optimizer = opt
	if k.change != nil {
		ctx = k.change(ctx, rank, &c)
	}
	o.report, o.err = train.Run(ctx, c)
	o.progress = out.String()
	for _, p := range nn.State(c.Model) {
		v, err := p.Tensor.NoGrad().ToDType(torch.Float64).Flatten(0, -1).Float64s()
		if err != nil {
			return o, err
		}
		o.weights = append(o.weights, v...)
	}
	return o, nil
}

// run runs n ranks. If n is 0, it runs one process without a world.
func (k team) run(t *testing.T, n int) []ranRank {
	t.Helper()
	if k.path == "" {
		k.path = archive(t)
	}
	if n == 0 {
		o, err := k.rank(t.Context(), nil, k.path)
		if err != nil {
			t.Fatal(err)
		}
		return []ranRank{o}
	}
	all := make([]ranRank, n)
	errs := make([]error, n)
	closed := ranksInProcess(t, n, func(world *distributed.Group) error {
		all[world.Rank()], errs[world.Rank()] = k.rank(t.Context(), world, k.path)
		return nil
	})
	for rank := range n {
		if all[rank].err == nil { // Close returns an error if the job has failed
			errs[rank] = errors.Join(errs[rank], closed[rank])
		}
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	return all
}

// text returns the report's figures and the weights.
func (o *ranRank) text(t *testing.T) string {
	t.Helper()
	epochs, err := json.Marshal(figures(o.report))
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprint(string(epochs), o.weights)
}

// requireDone fails unless all ranks have returned the same report and weights.
func requireDone(t *testing.T, all []ranRank) ranRank {
	t.Helper()
	for rank, o := range all {
		if o.err != nil {
			t.Fatalf("rank %d: %v", rank, o.err)
		}
		if got, want := o.text(t), all[0].text(t); got != want {
			t.Errorf("rank %d has another report or other weights than rank 0:\n got %.300s\nwant %.300s", rank, got, want)
		}
	}
	return all[0]
}

// near requires that two runs have the same metrics and weights, except for rounding.
func near(t *testing.T, what string, got, want ranRank) {
	t.Helper()
	if got.report.Steps != want.report.Steps || len(got.report.Epochs) != len(want.report.Epochs) {
		t.Fatalf("%s: %d epochs and %d steps, want %d and %d", what, len(got.report.Epochs), got.report.Steps,
			len(want.report.Epochs), want.report.Steps)
	}
	for i, e := range got.report.Epochs {
		w := want.report.Epochs[i]
		for name, m := range map[string][2]*train.Metrics{"training": {e.Train, w.Train}, "evaluation": {e.Eval, w.Eval}} {
			if m[0].Samples != m[1].Samples || math.Abs(m[0].Loss-m[1].Loss) > 1e-4 {
				t.Errorf("%s, epoch %d, %s: %d samples with loss %v, want %d with %v", what, i+1, name, m[0].Samples,
					m[0].Loss, m[1].Samples, m[1].Loss)
			}
		}
	}
	for i, v := range got.weights {
		if math.Abs(v-want.weights[i]) > 1e-4 {
			t.Fatalf("%s: weight %d is %v, want %v", what, i, v, want.weights[i])
		}
	}
}

// Two and three ranks get the same result as one process, because the mean gradient is over the
// same samples: each rank has a half or a third of the batch. The metrics cover all ranks, and no
// metric counts padding.
func TestRanksOfRunEqualOneProcess(t *testing.T) {
	path := archive(t)
	want := requireDone(t, team{path: path}.run(t, 0))
	if n := want.report.Epochs[0].Eval.Samples; n != classes*perC {
		t.Fatalf("one process evaluates %d samples, want %d", n, classes*perC)
	}
	for _, n := range []int{1, 2, 4} {
		all := team{path: path}.run(t, n)
		near(t, fmt.Sprint(n, " ranks"), requireDone(t, all), want)
		for rank, o := range all {
			if printed := o.progress != ""; printed != (rank == 0) {
				t.Errorf("rank %d of %d printed %q, want the table of rank 0 alone", rank, n, o.progress)
			}
			if rank == 0 && len(o.report.Epochs[1].Eval.Confusion) != classes {
				t.Errorf("the confusion matrix has %d rows, want %d", len(o.report.Epochs[1].Eval.Confusion), classes)
			}
		}
	}
}

// All ranks evaluate the model of rank 0, with its running statistics.
func TestRanksEvaluateTheSameBuffers(t *testing.T) {
	requireDone(t, team{norm: true, dir: filepath.Join(t.TempDir(), "run")}.run(t, 2))
}

// cancelAt ends the context of one rank in a step.
func cancelAt(rank, step int) func(context.Context, int, *train.Config) context.Context {
	return func(ctx context.Context, r int, c *train.Config) context.Context {
		if r != rank {
			return ctx
		}
		ctx, cancel := context.WithCancel(ctx)
		c.OnStep = func(s train.Step) error {
			if s.Step == step {
				cancel()
			}
			return nil
		}
		return ctx
	}
}

// If the context of one rank ends, all ranks stop after the same step. A job that resumes with the
// same number of ranks has the bits of an uninterrupted job. With another number of ranks it has
// the same results except for rounding.
func TestJobOfRunResumes(t *testing.T) {
	path := archive(t)
	whole := team{path: path, epochs: 3, norm: true, dir: filepath.Join(t.TempDir(), "whole")}
	want := requireDone(t, whole.run(t, 2))
	for _, step := range []int{2, 5} { // in the first and in the second epoch
		k := team{path: path, epochs: 3, norm: true, dir: filepath.Join(t.TempDir(), "run"), change: cancelAt(1, step)}
		stopped := 0
		for rank, o := range k.run(t, 2) {
			var e *train.InterruptedError
			if !errors.As(o.err, &e) || !errors.Is(o.err, context.Canceled) || e.Step < step || e.Step > step+2 {
				t.Fatalf("rank %d: got %v, want an interruption soon after step %d", rank, o.err, step)
			}
			if rank > 0 && e.Step != stopped {
				t.Errorf("rank %d stopped after step %d, rank 0 after %d", rank, e.Step, stopped)
			}
			stopped = e.Step
		}
		k.change, k.resume = nil, true
		got := requireDone(t, k.run(t, 2))
		if a, b := got.text(t), want.text(t); a != b {
			t.Errorf("interrupted in step %d: the resumed job differs:\n got %.400s\nwant %.400s", step, a, b)
		}
	}
	plain := requireDone(t, team{path: path, epochs: 3}.run(t, 0))
	for _, change := range [][2]int{{2, 0}, {0, 2}, {2, 4}} {
		k := team{path: path, epochs: 3, dir: filepath.Join(t.TempDir(), "other"), change: cancelAt(0, 6)}
		k.run(t, change[0])
		k.change, k.resume = nil, true
		near(t, fmt.Sprint("resumed with other ranks ", change), requireDone(t, k.run(t, change[1])), plain)
	}
}

// An error on one rank ends the job. The errors of the other ranks name that rank.
func TestFailedRankEndsTheJobOfRun(t *testing.T) {
	broken := errors.New("broken")
	all := team{change: func(ctx context.Context, rank int, c *train.Config) context.Context {
		if rank == 1 {
			c.OnStep = func(s train.Step) error {
				if s.Step == 3 {
					return broken
				}
				return nil
			}
		}
		return ctx
	}}.run(t, 2)
	if !errors.Is(all[1].err, broken) {
		t.Errorf("rank 1: got %v, want its error", all[1].err)
	}
	var e *distributed.Error
	if !errors.As(all[0].err, &e) || e.Culprit != 1 || strings.Contains(all[0].err.Error(), "\n") {
		t.Errorf("rank 0: got %v, want an error that names rank 1", all[0].err)
	}
}

// Only rank 0 examines the folder. All ranks return rank 0's error.
func TestRanksAgreeOnTheFolder(t *testing.T) {
	k := team{path: archive(t), dir: filepath.Join(t.TempDir(), "run")}
	requireDone(t, k.run(t, 2))
	for rank, o := range k.run(t, 2) { // without Resume
		if o.err == nil || !strings.Contains(o.err.Error(), "is the checkpoint of an earlier run") {
			t.Errorf("rank %d: got %v, want the error about the folder", rank, o.err)
		}
	}
}

// Without a Loader, a job can only resume within an epoch if it has the same number of ranks.
func TestOtherRanksNeedALoaderWithinAnEpoch(t *testing.T) {
	k := team{path: archive(t), dir: filepath.Join(t.TempDir(), "run"), wrapped: true, change: cancelAt(0, 2)}
	k.run(t, 2)
	k.change, k.resume = nil, true
	if err := k.run(t, 0)[0].err; err == nil || !strings.Contains(err.Error(), "2 ranks have started") {
		t.Errorf("one process: got %v, want an error that names the 2 ranks", err)
	}
	requireDone(t, k.run(t, 2))
}

// A shuffled evaluation is an error, because padding cannot be told apart from other samples.
func TestShuffledEvaluationOfRanksIsAnError(t *testing.T) {
	k := team{path: archive(t)}
	k.change = func(ctx context.Context, _ int, c *train.Config) context.Context {
		c.Eval, c.Progress = c.Feed, io.Discard
		return ctx
	}
	for rank, o := range k.run(t, 2) {
		if o.err == nil || !strings.Contains(o.err.Error(), "not in order") && !strings.Contains(o.err.Error(), "rank") {
			t.Errorf("rank %d: got %v, want an error about the order", rank, o.err)
		}
	}
}
