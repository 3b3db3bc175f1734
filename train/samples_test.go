package train_test

import (
	"errors"
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
