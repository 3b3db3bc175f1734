package train_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/foldersync"
	"github.com/torchstream/torchstream/train"
)

// If rank 0 cannot sync the folder, Save returns ErrNotDurable on all ranks, and the new file is in
// place. A program that warns and continues then does so on all ranks.
func TestNotDurableSaveIsTheSameErrorOnAllRanks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "last.pt")
	inProcess(t, 2, func(world *distributed.Group) error {
		c := &train.Checkpoint{Device: cuda.CPU, World: world, Metadata: map[string]string{"version": "old"}}
		if err := c.Save(path); err != nil {
			return err
		}
		if world.Rank() == 0 {
			if err := foldersync.Break(); err != nil {
				return err
			}
		}
		c.Metadata["version"] = "new"
		if err := c.Save(path); !errors.Is(err, checkpoint.ErrNotDurable) ||
			!strings.Contains(err.Error(), "train: rank 0 ") || strings.Contains(err.Error(), "rank 1 ") {
			return fmt.Errorf("Save: got error %w, want ErrNotDurable of rank 0", err)
		}
		return nil
	})
	c := train.Checkpoint{Device: cuda.CPU}
	if err := c.Load(path); err != nil || c.Metadata["version"] != "new" {
		t.Errorf("the file has version %q, %v, want the new one", c.Metadata["version"], err)
	}
}

// An error of another kind is not ErrNotDurable on any rank.
func TestFailedSaveIsNotErrNotDurable(t *testing.T) {
	path := filepath.Join(t.TempDir(), "none", "last.pt")
	inProcess(t, 2, func(world *distributed.Group) error {
		err := (&train.Checkpoint{Device: cuda.CPU, World: world}).Save(path)
		if err == nil || errors.Is(err, checkpoint.ErrNotDurable) {
			return fmt.Errorf("Save: got error %w, want another than ErrNotDurable", err)
		}
		return nil
	})
}

// breakAfter makes the folders of the run unsyncable after a step, and then calls then.
func breakAfter(step int, then func(train.Step)) func(train.Step) error {
	return func(s train.Step) error {
		if s.Step == step {
			if err := foldersync.Break(); err != nil {
				return err
			}
		}
		then(s)
		return nil
	}
}

// runAlone is train.Run in a goroutine that ends with the run.
func runAlone(ctx context.Context, c train.Config) (report *train.Report, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		report, err = train.Run(ctx, c)
	}()
	<-done
	return report, err
}

// A folder that cannot be synced does not end a run. Run logs a warning for each save, and writes
// the confusion matrix of the new best.pt.
func TestRunContinuesIfTheFolderCannotBeSynced(t *testing.T) {
	var log bytes.Buffer
	j := newJob(t, job{withEval: true, Config: train.Config{Dir: t.TempDir(), SaveSteps: 3,
		Log: slog.New(slog.NewTextHandler(&log, nil))}})
	j.OnStep = breakAfter(1, func(train.Step) {})
	report, err := runAlone(t.Context(), j.Config)
	if err != nil || report.Steps != 2*perE {
		t.Fatalf("got %d steps and error %v, want %d steps and no error", report.Steps, err, 2*perE)
	}
	saves := 2*perE/3 + 2 + 1 // of SaveSteps, epochs and the first best.pt
	if got := strings.Count(log.String(), "msg=\"train: a loss of power may undo"); got < saves {
		t.Errorf("the log has %d warnings, want at least %d:\n%s", got, saves, &log)
	}
	want := report.Best().Eval.Confusion
	if got := confusionFile(t, j.Dir); !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("the folder has the confusion matrix %v, want that of the best epoch, %v", got, want)
	}
}

// An interrupted run whose folder cannot be synced returns both errors, and can be resumed.
func TestInterruptionKeepsErrNotDurable(t *testing.T) {
	o := job{path: archive(t), Config: train.Config{Dir: t.TempDir()}}
	j := newJob(t, o)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	j.OnStep = breakAfter(3, func(s train.Step) {
		if s.Step == 3 {
			cancel()
		}
	})
	_, err := runAlone(ctx, j.Config)
	var interrupted *train.InterruptedError
	last := filepath.Join(o.Dir, "last.pt")
	if !errors.Is(err, checkpoint.ErrNotDurable) || !errors.Is(err, context.Canceled) ||
		!errors.As(err, &interrupted) || interrupted.Checkpoint != last || interrupted.Step != 3 {
		t.Fatalf("got error %v, want ErrNotDurable and an InterruptedError after step 3 with %s", err, last)
	}
	o.Resume = true
	if got := newJob(t, o).run(t).Stepper.Steps; got != 2*perE-3 {
		t.Errorf("the resumed run made %d steps, want %d", got, 2*perE-3)
	}
}

// If rank 0's folder cannot be synced, all ranks of a run continue.
func TestRanksContinueIfTheFolderCannotBeSynced(t *testing.T) {
	var log bytes.Buffer
	requireDone(t, team{dir: t.TempDir(), saveSteps: 3,
		change: func(ctx context.Context, rank int, c *train.Config) context.Context {
			if rank == 0 {
				c.Log = slog.New(slog.NewTextHandler(&log, nil))
				c.OnStep = breakAfter(1, func(train.Step) {})
			}
			return ctx
		}}.run(t, 2))
	if got := strings.Count(log.String(), "msg=\"train: a loss of power may undo"); got < 4 { // 2 of SaveSteps, 2 of epochs
		t.Errorf("rank 0's log has %d warnings, want at least 4:\n%s", got, &log)
	}
}
