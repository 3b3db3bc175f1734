package main

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"os"
	"strings"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/cli"
)

// resumeRun is one process of a training that is interrupted, as lab/resume/resume.py describes it.
type resumeRun struct {
	archive    string
	epochs     int
	leave      int    // leave epoch 0 after this number of batches; 0: never
	stop       int    // save and end after this number of batches; 0: never
	wait       bool   // after stop, wait for a signal
	load, save string // files of states

	loader *imageloader.Loader
	out    *json.Encoder
	taken  int
}

// resumeBatch is a line of output.
type resumeBatch struct {
	Epoch   int      `json:"epoch"`
	Samples []string `json:"samples"` // members of the archive
}

// runResume prints the samples of each batch, and saves and restores the loader's state.
func runResume(ctx context.Context, args []string, stdout, stderr io.Writer) (err error) {
	r := resumeRun{out: json.NewEncoder(stdout)}
	o := imageloader.Options{Transform: imageloader.Eval(8, 8), Shuffle: true, Seed: 1}
	set := cli.Flags("torchstream-lab resume -archive FILE",
		"Prints the samples of each batch as a line of JSON. A state that -stop saves is the start of a run with -load.\n"+
			"lab/resume/resume.py compares an interrupted run with an undisturbed one.", stderr)
	set.StringVar(&r.archive, "archive", "", "`FILE` of images")
	set.IntVar(&o.BatchSize, "batch", 8, "images of a batch")
	set.IntVar(&o.Workers, "workers", 1, "goroutines that decode")
	set.IntVar(&o.Rank, "rank", 0, "number of this process")
	set.IntVar(&o.World, "world", 1, "processes that train together")
	set.IntVar(&r.epochs, "epochs", 2, "epochs of the training")
	set.IntVar(&r.leave, "leave", 0, "leave the loop of epoch 0 after this number of batches; 0: never")
	set.IntVar(&r.stop, "stop", 0, "save the state after this number of batches (since -leave) and end; 0: never")
	set.BoolVar(&r.wait, "wait", false, "after -stop, print that the state is saved and wait to be killed")
	set.StringVar(&r.load, "load", "", "`FILES` of states, one of each former rank, separated by commas")
	set.StringVar(&r.save, "save", "", "`FILE` for the state")
	skip := set.Bool("skip", false, "skip bad images")
	if err := cli.Parse(set, args, 0); err != nil {
		return err
	}
	if r.archive == "" {
		return cli.UsageError{Message: "resume needs -archive FILE"}
	}
	if *skip {
		o.BadSamples = imageloader.Skip
	}
	if r.loader, err = imageloader.OpenContext(ctx, r.archive, o); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.loader.Close()) }()
	return r.run(ctx)
}

func (r *resumeRun) run(ctx context.Context) error {
	first, err := r.restore(ctx)
	if err != nil {
		return err
	}
	for epoch := first; epoch < r.epochs; epoch++ {
		stopped, err := r.epoch(ctx, epoch)
		if stopped || err != nil {
			return err
		}
	}
	return nil
}

// epoch prints an epoch, or the rest of a restored one. It reports whether the run has stopped.
func (r *resumeRun) epoch(ctx context.Context, epoch int) (stopped bool, err error) {
	taken := 0
	for batch, err := range r.loader.Epoch(ctx, epoch) {
		if err != nil {
			return false, err
		}
		if err := r.print(epoch, batch); err != nil {
			return false, err
		}
		taken++
		if epoch == 0 && r.leave > 0 {
			if taken == r.leave {
				return false, nil
			}
			continue
		}
		if r.taken++; r.taken == r.stop {
			return true, r.end(ctx, batch.State)
		}
	}
	return false, nil
}

func (r *resumeRun) print(epoch int, batch *imageloader.Batch) error {
	line := resumeBatch{Epoch: epoch, Samples: make([]string, batch.N)}
	for i, sample := range batch.Samples {
		line.Samples[i] = sample.Name
	}
	return r.out.Encode(line)
}

// end saves the state of the last batch.
func (r *resumeRun) end(ctx context.Context, state imageloader.State) error {
	data, err := json.Marshal(state)
	if err != nil {
		return err
	}
	if err := os.WriteFile(r.save, data, 0o666); err != nil {
		return err
	}
	if !r.wait {
		return nil
	}
	err = r.out.Encode(map[string]bool{"saved": true})
	<-ctx.Done()
	return err
}

// restore continues after the states of -load, and returns the epoch to start with.
func (r *resumeRun) restore(ctx context.Context) (epoch int, err error) {
	if r.load == "" {
		return 0, nil
	}
	files := strings.Split(r.load, ",")
	states := make([]imageloader.State, len(files))
	for i, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			return 0, err
		}
		if err := json.Unmarshal(data, &states[i]); err != nil {
			return 0, err
		}
	}
	return states[0].Epoch(), r.loader.Restore(ctx, states...)
}
