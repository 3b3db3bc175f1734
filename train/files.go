package train

import (
	"bytes"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/torchstream/torchstream/checkpoint"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/internal/tfevents"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/prefetcher"
)

const (
	lastFile = "last.pt"
	bestFile = "best.pt"
	logFile  = "log.csv"
	pngFile  = "curves.png"
	lockFile = "run.lock" // locks the folder for one run

	version = 2 // version of type saved
)

// position is a position in the training: directly after a step, or between epochs.
type position struct {
	Epoch   int     `json:"epoch"`           // the current or next epoch, from 0
	Step    int     `json:"step"`            // over all epochs
	Batches int     `json:"batches"`         // trained on in this epoch
	LR      float64 `json:"lr"`              // of the last step
	Sums    sums    `json:"sums"`            // totals of the epoch so far, at the time of saving
	Ranks   int     `json:"ranks,omitempty"` // number of ranks; 0 without Config.World
	// Samples is the position in a SampleSource in an epoch. In a job, this is rank 0's.
	Samples *prefetcher.SampleState `json:"samples,omitempty"`

	meter *meter // of the current epoch; nil between epochs
}

// saved is what Run adds to the Checkpoint in last.pt.
type saved struct {
	Version int      `json:"version"`
	At      position `json:"at"`
	Epochs  []Epoch  `json:"epochs"`
}

func (s *saved) check() error {
	if s.Version != version {
		return fmt.Errorf("it is of version %d, and this program reads %d: go on with the program that "+
			"wrote it, or begin again in another folder", s.Version, version)
	}
	if a := s.At; a.Epoch < 0 || a.Step < 0 || a.Batches < 0 || a.Batches > a.Step {
		return fmt.Errorf("its place is impossible: epoch %d, step %d, batch %d", a.Epoch, a.Step, a.Batches)
	}
	if len(s.Epochs) != s.At.Epoch {
		return fmt.Errorf("it is damaged: it has the results of %d epochs, and %d are complete",
			len(s.Epochs), s.At.Epoch)
	}
	for i, e := range s.Epochs {
		if e.Train == nil {
			return fmt.Errorf("its epoch %d has no metrics of training", i+1)
		}
	}
	return nil
}

// figures returns the names of the files that a run writes besides checkpoints, and how to
// recognise an old one.
func figures() map[string]safefile.Kind {
	return map[string]safefile.Kind{logFile: logKind(), pngFile: safefile.PNG,
		confusionCSV: confusionKind(), confusionPNG: safefile.PNG}
}

func (r *runner) path(name string) string { return filepath.Join(r.Dir, name) }

// openDir makes the folder, and resumes from it if asked.
func (r *runner) openDir(ctx context.Context) error {
	if r.Dir == "" {
		return nil
	}
	resumes := false
	if err := r.job.lead(func() (err error) { resumes, err = r.prepareDir(); return err }); err != nil {
		return err
	}
	if r.job.world != nil {
		var err error
		if resumes, err = distributed.BroadcastObject(r.job.world, resumes, 0); err != nil {
			return err
		}
	}
	if resumes {
		return r.load(ctx, r.path(lastFile))
	}
	// Save a last.pt before any best.pt, because prepareDir refuses a folder that has only a
	// best.pt. So the folder stays usable even if the process is killed.
	if err := r.warnNotDurable(r.saveLast("training")); err != nil {
		return err
	}
	r.folder.first = r.job.leads()
	return nil
}

// prepareDir makes the folder and claims it for this run. It reports whether the folder has a run
// to resume.
func (r *runner) prepareDir() (resumes bool, err error) {
	r.folder.made = missing(r.Dir)
	if err := os.MkdirAll(r.Dir, 0o777); err != nil {
		return false, fmt.Errorf("train: %w", err)
	}
	if err := r.claimDir(); err != nil {
		return false, err
	}
	if err := safefile.Check(r.path(bestFile), safefile.PyTorch); err != nil {
		return false, fmt.Errorf("train: %w", err)
	}
	for name, kind := range figures() {
		if err := safefile.Check(r.path(name), kind); err != nil {
			return false, fmt.Errorf("train: %w", err)
		}
	}
	path := r.path(lastFile)
	_, err = os.Lstat(path)
	switch {
	case err == nil && !r.Resume:
		return false, fmt.Errorf("train: %s is the checkpoint of an earlier run: resume it by Config.Resume "+
			"with the same options, name another folder in Config.Dir, or delete %s", path, r.Dir)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return false, fmt.Errorf("train: %w", err)
	}
	r.removeUnfinished()
	if err == nil {
		return true, nil
	}
	if _, err := os.Lstat(r.path(bestFile)); !errors.Is(err, fs.ErrNotExist) {
		if err != nil {
			return false, fmt.Errorf("train: %w", err)
		}
		return false, fmt.Errorf("train: %s is of an earlier run, whose %s is gone, and this run would replace "+
			"it: move it away, or name another folder", r.path(bestFile), lastFile)
	}
	return false, nil
}

// BusyError is the error of [Run] and [Busy] for a folder that another run is writing to.
type BusyError struct {
	Dir    string
	Holder string // the other run: "process 12 on host-3 since 2026-01-31 10:11:12"
}

func (e *BusyError) Error() string {
	return fmt.Sprintf("train: another run writes to %s: %s: wait until it ends, or name another folder",
		e.Dir, e.Holder)
}

// Busy returns a *BusyError if a [Run] of any process is writing to the folder now, and nil
// otherwise. Run refuses such a folder itself. Call Busy before long preparations, to fail early.
func Busy(dir string) error { return busyDir(dir, safefile.Claimed(filepath.Join(dir, lockFile))) }

// busyDir returns a *BusyError instead of err if another process holds the claim on the folder.
func busyDir(dir string, err error) error {
	var busy *safefile.BusyError
	if errors.As(err, &busy) {
		return &BusyError{dir, busy.Holder}
	}
	return err
}

// claimDir reserves the folder for this run. Two runs would overwrite each other's files.
func (r *runner) claimDir() (err error) {
	r.folder.claim, err = safefile.NewClaim(r.path(lockFile))
	if errors.Is(err, safefile.ErrNoLocks) {
		if r.Log != nil {
			r.Log.Warn("train: the folder cannot be locked against a second run: start none in it; on "+
				"NFS, mount with local_lock=flock or run the server's lock daemon",
				"folder", r.Dir, "reason", err)
		}
		return nil
	}
	if err != nil && !errors.As(err, new(*safefile.BusyError)) {
		return fmt.Errorf("train: %w", err)
	}
	return busyDir(r.Dir, err)
}

// missing returns the missing folders among dir and its parents, innermost first.
func missing(dir string) (paths []string) {
	for dir = filepath.Clean(dir); ; {
		parent := filepath.Dir(dir)
		if _, err := os.Lstat(dir); !errors.Is(err, fs.ErrNotExist) || parent == dir {
			return paths
		}
		paths, dir = append(paths, dir), parent
	}
}

// removeFirst removes the initial last.pt of a new run that has saved nothing else. If that file
// stayed, the next new run would refuse the folder. removeFirst also removes the empty folders that
// the run made. If the process is killed, last.pt stays, and the next run can resume from it.
func (r *runner) removeFirst() {
	if r.folder.first {
		os.Remove(r.path(lastFile)) // if this fails, the next new run is refused with an error that says why
	}
	r.folder.release()
	for _, dir := range r.folder.made {
		if os.Remove(dir) != nil {
			return // the folder has files of this run or of another program
		}
	}
}

// removeUnfinished removes the temporary tables and pictures of a run that was killed while it
// wrote them. Checkpoint.Save removes temporary checkpoints.
func (r *runner) removeUnfinished() {
	files, _ := os.ReadDir(r.Dir) // after an error the files stay, and do no harm
	for _, f := range files {
		for name := range figures() {
			if strings.HasPrefix(f.Name(), name+".") && strings.HasSuffix(f.Name(), ".tmp") {
				os.Remove(r.path(f.Name()))
			}
		}
	}
}

// load continues from a checkpoint.
func (r *runner) load(ctx context.Context, path string) error {
	c := r.checkpoint(&saved{})
	c.Scheduler = nil // the program may use another schedule now
	if err := c.Load(path); err != nil {
		return err
	}
	at := c.position.At
	noPlace := r.Loader == nil || c.Loader == nil && len(c.loaders) == 0
	if was := max(1, at.Ranks); at.Batches > 0 && noPlace && was != r.job.size() {
		return fmt.Errorf("train: %s is of an epoch that %d ranks have started, and there are %d now: only a run with "+
			"an image loader goes on with another number of ranks in an epoch: %w", path, was, r.job.size(),
			cuda.ErrInvalidArgument)
	}
	if r.Loader == nil {
		c.Loader = nil // train reads and drops the batches before the position
	} else if err := c.RestoreLoader(ctx, r.Loader); err != nil {
		// The error says how the loader's archive or options differ from the checkpoint's.
		return fmt.Errorf("train: %s: %w", path, err)
	}
	if err := r.checkSamples(&at); err != nil {
		return fmt.Errorf("train: %s: %w", path, err)
	}
	if !r.job.leads() {
		at.Sums = sums{Classes: at.Sums.Classes} // the totals cover all ranks, so only rank 0 continues with them
	}
	if s := r.stepper.scheduler; s != nil {
		if err := s.SetCount(at.Step); err != nil {
			return err
		}
	}
	r.at, r.state, r.report.Epochs = at, c.Loader, c.position.Epochs
	return nil
}

// checkSamples returns an error if the epoch of a SampleSource has other batches now than at the
// time of saving. In a job, each rank has its own share of that epoch.
func (r *runner) checkSamples(at *position) error {
	source, ok := r.Feed.Source().(*prefetcher.SampleSource)
	if !ok || at.Samples == nil {
		return nil
	}
	if at.Batches > 0 {
		rank, world := source.Share()
		wasRank, wasWorld := at.Samples.Share()
		if world != wasWorld {
			return fmt.Errorf("the samples can't go on in the epoch: SamplesOptions.World is %d here, and was %d", world, wasWorld)
		}
		if rank != wasRank && r.job.world == nil {
			return fmt.Errorf("the samples can't go on in the epoch: SamplesOptions.Rank is %d here, and was %d", rank, wasRank)
		}
	}
	return source.CheckState(*at.Samples)
}

// checkpoint returns a Checkpoint with all state that a resume needs.
func (r *runner) checkpoint(position *saved) *Checkpoint {
	return &Checkpoint{
		Model: r.Model, Optimizer: r.Optimizer, Scheduler: r.stepper.scheduler, EMA: r.EMA, Scaler: r.Scaler,
		Loader: r.state, Device: r.Feed.Device(), Metadata: r.Metadata, World: r.job.world, position: position,
	}
}

// saveLast writes the run's position and all state that a resume needs. It waits for the device.
func (r *runner) saveLast(of string) error {
	if r.Dir == "" {
		return nil
	}
	s := saved{Version: version, At: r.at, Epochs: r.report.Epochs}
	if n := r.job.size(); n > 1 {
		s.At.Ranks = n
	}
	var err error
	if r.at.meter != nil {
		s.At.Sums, err = r.at.meter.read(of)
	}
	sum, err := r.job.add(tally{Sums: s.At.Sums}, err)
	if err != nil {
		return err
	}
	s.At.Sums = sum.Sums
	r.folder.first = false // even if Save fails: the new file may exist
	return r.checkpoint(&s).Save(r.path(lastFile))
}

// saveBest writes the model, or its averages, and the epoch's confusion matrix.
func (r *runner) saveBest(e Epoch) error {
	if r.Dir == "" {
		return nil
	}
	r.folder.first = false // last.pt must stay, because best.pt belongs to it
	tensors := nn.State(r.Model)
	if r.EMA != nil {
		tensors = r.EMA.State()
	}
	if err := r.warnNotDurable(checkpoint.SavePyTorch(r.path(bestFile),
		map[string]any{"state_dict": tensors, "metadata": metadata(r.Metadata)})); err != nil {
		return err
	}
	return r.saveConfusion(e)
}

// warnNotDurable returns the error of a save, or nil if the new file is in place. A later save may
// sync the folder, so a warning in the log is enough.
func (r *runner) warnNotDurable(err error) error {
	if !errors.Is(err, checkpoint.ErrNotDurable) {
		return err
	}
	if r.Log != nil && r.job.leads() {
		r.Log.Warn("train: a loss of power may undo the last save, because the folder cannot be synced",
			"folder", r.Dir, "reason", err)
	}
	return nil
}

// saveConfusion writes the confusion matrix of the best epoch. If the epoch has none, saveConfusion
// removes the matrix of an earlier epoch, since it no longer belongs to best.pt.
func (r *runner) saveConfusion(e Epoch) error {
	if e.Eval != nil && e.Eval.Confusion != nil {
		var classes []string
		if r.Loader != nil {
			classes = r.Loader.Classes()
		}
		return e.Eval.SaveConfusion(r.Dir, classes)
	}
	for _, name := range []string{confusionCSV, confusionPNG} {
		if err := os.Remove(r.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func metadata(of map[string]string) map[string]any {
	dict := make(map[string]any, len(of))
	for key, value := range of {
		dict[key] = value
	}
	return dict
}

// logKind recognises the files that saveLog writes.
func logKind() safefile.Kind { return safefile.Prefix("a log of a training", "epoch,steps,lr,") }

// saveLog writes the table of all epochs. The new file replaces the old one.
func (r *runner) saveLog() error {
	if r.Dir == "" {
		return nil
	}
	var text bytes.Buffer
	w := csv.NewWriter(&text)
	header := []string{"epoch", "steps", "lr", "train_loss", "train_top1", "train_top5", "eval_loss",
		"eval_top1", "eval_top5", "samples_per_second", "seconds", "wait_share", "device_allocated_bytes"}
	if r.MultiLabel {
		header = append(header, "eval_map")
	}
	w.Write(header)
	for _, e := range r.report.Epochs {
		row := []string{strconv.Itoa(e.Epoch), strconv.Itoa(e.Steps), number(e.LR)}
		row = append(row, e.Train.columns()...)
		row = append(row, e.Eval.columns()...)
		row = append(row, number(e.SamplesPerSecond), number(e.Seconds), number(e.WaitShare),
			strconv.FormatInt(e.AllocatedBytes, 10))
		switch {
		case r.MultiLabel && e.Eval != nil:
			row = append(row, number(e.Eval.MAP))
		case r.MultiLabel:
			row = append(row, "")
		}
		w.Write(row)
	}
	w.Flush() // a bytes.Buffer never fails
	f, err := safefile.Replace(r.path(logFile), logKind(), 0o644, func(f *os.File) error {
		_, err := f.Write(text.Bytes())
		return err
	})
	if err != nil {
		return err
	}
	return errors.Join(f.Close(), r.saveCurves())
}

// saveCurves draws the curves of all epochs. The new file replaces the old one.
func (r *runner) saveCurves() error {
	f, err := safefile.Replace(r.path(pngFile), safefile.PNG, 0o644,
		func(f *os.File) error { return writeCurves(f, r.report.Epochs) })
	if err != nil {
		return err
	}
	return f.Close()
}

// event writes the metrics of an epoch for TensorBoard.
func (r *runner) event(e Epoch) error {
	if !r.TensorBoard || r.Dir == "" {
		return nil
	}
	if r.events == nil {
		first := int64(r.at.Step) - r.stepper.Stats().Steps + 1 // first step of this process
		w, err := tfevents.Create(r.Dir, first)
		if err != nil {
			return err
		}
		r.events = w
	}
	scalars := []tfevents.Scalar{{Tag: "lr", Value: e.LR},
		{Tag: "samples_per_second", Value: e.SamplesPerSecond}, {Tag: "wait_share", Value: e.WaitShare}}
	for _, of := range []struct {
		name string
		m    *Metrics
	}{{"train", e.Train}, {"eval", e.Eval}} {
		if of.m == nil {
			continue
		}
		scalars = append(scalars, tfevents.Scalar{Tag: "loss/" + of.name, Value: of.m.Loss})
		if of.m.Classes > 0 {
			scalars = append(scalars, tfevents.Scalar{Tag: "top1/" + of.name, Value: of.m.Top1},
				tfevents.Scalar{Tag: "top5/" + of.name, Value: of.m.Top5})
		}
		if of.m.MAP > 0 {
			scalars = append(scalars, tfevents.Scalar{Tag: "map/" + of.name, Value: of.m.MAP})
		}
	}
	return r.events.Write(int64(e.Steps), scalars...)
}

// columns returns loss, top-1 and top-5 as text, empty where there is none.
func (m *Metrics) columns() []string {
	switch {
	case m == nil:
		return []string{"", "", ""}
	case m.Classes == 0:
		return []string{number(m.Loss), "", ""}
	}
	return []string{number(m.Loss), number(m.Top1), number(m.Top5)}
}

func number(v float64) string { return strconv.FormatFloat(v, 'g', 8, 64) }
