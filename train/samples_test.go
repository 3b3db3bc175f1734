package train_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
	"github.com/torchstream/torchstream/prefetcher"
	"github.com/torchstream/torchstream/torch"
	"github.com/torchstream/torchstream/train"
)

// A run that resumes in an epoch of a SampleSource needs the options with which the epoch started.
func TestResumeNeedsSameOptionsOfSamples(t *testing.T) {
	dir := t.TempDir()
	run := func(o prefetcher.SamplesOptions, stop bool) error {
		t.Helper()
		model := identity(t, cuda.CPU)
		opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 0.1})
		if err != nil {
			t.Fatal(err)
		}
		_, err = train.Run(t.Context(), train.Config{Model: model, Optimizer: opt, Epochs: 2, MultiLabel: true,
			Feed: rankedFeed(t, cuda.CPU, torch.Float32, o), Dir: dir, Resume: true, SaveSteps: 1,
			OnStep: func(s train.Step) error {
				if stop && s.Step == 2 {
					return errors.New("stopped")
				}
				return nil
			}})
		return err
	}
	first := prefetcher.SamplesOptions{BatchSize: 4, Shuffle: true, Seed: 7, Data: "a"}
	if err := run(first, true); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Fatalf("got %v, want the error of OnStep", err)
	}
	for want, change := range map[string]func(o *prefetcher.SamplesOptions){
		"SamplesOptions.Seed is 8 here, and was 7":           func(o *prefetcher.SamplesOptions) { o.Seed = 8 },
		"SamplesOptions.BatchSize is 2 here, and was 4":      func(o *prefetcher.SamplesOptions) { o.BatchSize = 2 },
		"SamplesOptions.Shuffle is false here, and was true": func(o *prefetcher.SamplesOptions) { o.Shuffle = false },
		"SamplesOptions.World is 2 here, and was 1":          func(o *prefetcher.SamplesOptions) { o.World, o.BatchSize = 2, 2 },
		`SamplesOptions.Data is "b" here, and was "a"`:       func(o *prefetcher.SamplesOptions) { o.Data = "b" },
	} {
		o := first
		change(&o)
		if err := run(o, false); err == nil || !strings.Contains(err.Error(), want) ||
			!strings.Contains(err.Error(), "last.pt") {
			t.Errorf("got %v, want an error with last.pt and %q", err, want)
		}
	}
	ranked := func(rank int) prefetcher.SamplesOptions {
		return prefetcher.SamplesOptions{BatchSize: 2, Rank: rank, World: 2}
	}
	shared := dir
	dir = t.TempDir()
	if err := run(ranked(0), true); err == nil || !strings.Contains(err.Error(), "stopped") {
		t.Fatalf("got %v, want the error of OnStep", err)
	}
	if err := run(ranked(1), false); err == nil || !strings.Contains(err.Error(), "SamplesOptions.Rank is 1 here, and was 0") {
		t.Errorf("another rank: got %v, want an error with both ranks", err)
	}
	if err := run(ranked(0), false); err != nil {
		t.Errorf("the same rank: got %v, want no error", err)
	}
	dir = shared
	first.Workers = 3 // does not change the batches
	if err := run(first, false); err != nil {
		t.Errorf("the same options: %v, want no error", err)
	}
}

// TestResumeOfSamplesIsExact: a run over a SampleSource that is stopped after any step, or ended by
// an error of a sample, resumes with the bits of an undisturbed run.
func TestResumeOfSamplesIsExact(t *testing.T) {
	const epochs, size = 2, 2
	n := len(rankedOutputs)
	perEpoch := (n + size - 1) / size
	run := func(dir string, stop, bad int) (bits []float32, steps int, err error) {
		t.Helper()
		model := identity(t, cuda.CPU)
		opt, err := optim.NewSGD(nn.Parameters(model), optim.SGDOptions{LR: 0.1})
		if err != nil {
			t.Fatal(err)
		}
		defer opt.Close()
		source, err := prefetcher.Samples(n, []torch.Spec{
			{Name: "outputs", DType: torch.Float32, Shape: []int64{4}}, {Name: "labels", DType: torch.Float32, Shape: []int64{4}},
		}, func(i int, s *prefetcher.Sample) error {
			if i == bad {
				return errors.New("unreadable")
			}
			copy(s.Float32("outputs"), rankedOutputs[i][:])
			copy(s.Float32("labels"), rankedLabels[i][:])
			return nil
		}, prefetcher.SamplesOptions{BatchSize: size, Shuffle: true, Seed: 7})
		if err != nil {
			t.Fatal(err)
		}
		report, err := train.Run(t.Context(), train.Config{Model: model, Optimizer: opt, Epochs: epochs, MultiLabel: true,
			Feed: feedOn(t, cuda.CPU, source), Dir: dir, Resume: true, SaveSteps: 1, OnStep: func(s train.Step) error {
				if s.Step == stop {
					return errors.New("stopped")
				}
				return nil
			}})
		if err != nil {
			return nil, 0, err
		}
		bits, err = nn.Parameters(model)[0].NoGrad().Float32s()
		return bits, report.Steps, err
	}
	want, steps, err := run(t.TempDir(), 0, -1)
	if err != nil || steps != epochs*perEpoch {
		t.Fatalf("undisturbed: %d steps, error %v, want %d and none", steps, err, epochs*perEpoch)
	}
	check := func(what string, stop, bad int) {
		t.Helper()
		dir := t.TempDir()
		if _, _, err := run(dir, stop, bad); err == nil {
			t.Errorf("%s: no error, want one", what)
		}
		if got, n, err := run(dir, 0, -1); err != nil || n != steps || !slices.Equal(got, want) {
			t.Errorf("%s: resumed, %d steps, parameters %v, error %v, want %d, %v and none", what, n, got, err, steps, want)
		}
	}
	for stop := 2; stop <= steps; stop++ { // its own state is not saved: the hook comes first
		check(fmt.Sprintf("stopped at step %d", stop), stop, -1)
	}
	for bad := range n {
		check(fmt.Sprintf("sample %d unreadable", bad), 0, bad)
	}
}
