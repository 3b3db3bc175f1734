package train

import (
	"bytes"
	"cmp"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/optim"
)

const (
	lastFile = "last.pt"
	bestFile = "best.pt"
	logFile  = "log.csv"

	positionKey = "train" // of last.pt: the JSON text of a saved
	emaKey      = "ema"
	version     = 1
)

// position is a place in the training: right after a step, or between epochs.
type position struct {
	Epoch   int     `json:"epoch"`   // the running or next one, from 0
	Step    int     `json:"step"`    // over all epochs
	Batches int     `json:"batches"` // of the epoch that were trained on
	LR      float64 `json:"lr"`      // of the last step
	Sums    sums    `json:"sums"`    // of the epoch so far, when it was saved

	meter *meter // of the running epoch; nil between epochs
}

// saved is what last.pt has beside the tensors.
type saved struct {
	Version int                `json:"version"`
	At      position           `json:"at"`
	Loader  *imageloader.State `json:"loader,omitempty"`
	Epochs  []Epoch            `json:"epochs"`
}

func (r *runner) path(name string) string { return filepath.Join(r.Dir, name) }

// openDir makes the folder, and resumes from it.
func (r *runner) openDir(ctx context.Context) error {
	if r.Dir == "" {
		return nil
	}
	if err := os.MkdirAll(r.Dir, 0o777); err != nil {
		return err
	}
	if err := cmp.Or(safefile.Check(r.path(bestFile), safefile.PyTorch), safefile.Check(r.path(logFile), logKind())); err != nil {
		return err
	}
	path := r.path(lastFile)
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	} else if err != nil {
		return err
	}
	if !r.Resume {
		return fmt.Errorf("%s is the checkpoint of an earlier run: resume it, or name another folder", path)
	}
	if err := r.load(ctx, path); err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// load continues from a checkpoint.
func (r *runner) load(ctx context.Context, path string) error {
	c, err := nn.OpenCheckpoint(path)
	if err != nil {
		return err
	}
	defer c.Close()
	value, err := c.Value(positionKey)
	text, ok := value.(string)
	if err != nil || !ok {
		return fmt.Errorf("it is no checkpoint of a training: it has no text %q", positionKey)
	}
	var s saved
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return fmt.Errorf("%q: %w", positionKey, err)
	}
	if s.Version != version {
		return fmt.Errorf("it is of version %d, and this program reads %d", s.Version, version)
	}
	if a := s.At; a.Epoch < 0 || a.Step < 0 || a.Batches < 0 || a.Batches > a.Step {
		return fmt.Errorf("its place is impossible: epoch %d, step %d, batch %d", a.Epoch, a.Step, a.Batches)
	}
	if s.Loader != nil && s.At.Batches > 0 && r.Loader == nil {
		s.Loader = nil // train reads and drops the batches before
	}
	// The loader compares archive and options with the checkpoint's, before anything changes.
	if s.Loader != nil {
		if err := r.Loader.Restore(ctx, *s.Loader); err != nil {
			return err
		}
	}
	if _, err := nn.Load(path, r.Model); err != nil {
		return err
	}
	if err := optim.Load(path, r.Optimizer); err != nil {
		return err
	}
	if r.EMA != nil {
		if err := loadEMA(c, r.EMA); err != nil {
			return err
		}
	}
	if r.stepper.scheduler != nil {
		if err := r.stepper.scheduler.SetCount(s.At.Step); err != nil {
			return err
		}
	}
	r.at, r.state, r.report.Epochs = s.At, s.Loader, s.Epochs
	return nil
}

func loadEMA(c *nn.Checkpoint, ema *optim.EMA) error {
	value, err := c.Value(emaKey)
	dict, ok := value.(map[any]any)
	if err != nil || !ok {
		return fmt.Errorf("it has no averages: the interrupted run had no EMA")
	}
	var state []nn.Named
	defer func() {
		for _, n := range state {
			n.Tensor.Close()
		}
	}()
	for name, value := range dict {
		key, isName := name.(string)
		stored, isTensor := value.(*nn.StoredTensor)
		if !isName || !isTensor {
			return fmt.Errorf("%q: %v is no tensor", emaKey, name)
		}
		t, err := stored.Read()
		if err != nil {
			return err
		}
		state = append(state, nn.Named{Name: key, Tensor: t})
	}
	return ema.LoadState(state)
}

// saveLast writes the place of the run, with all that it takes to go on. It waits for the device.
func (r *runner) saveLast(of string) error {
	if r.Dir == "" {
		return nil
	}
	s := saved{Version: version, At: r.at, Loader: r.state, Epochs: r.report.Epochs}
	if r.at.meter != nil {
		var err error
		if s.At.Sums, err = r.at.meter.read(of); err != nil {
			return err
		}
	}
	text, err := json.Marshal(s)
	if err != nil {
		return err
	}
	state, err := r.Optimizer.State()
	if err != nil {
		return err
	}
	optimizer, err := state.PyTorch()
	if err != nil {
		return err
	}
	file := map[string]any{
		"state_dict": nn.State(r.Model), "optimizer": optimizer, "metadata": metadata(r.Metadata), positionKey: string(text),
	}
	if r.EMA != nil {
		file[emaKey] = r.EMA.State()
	}
	return nn.SavePyTorch(r.path(lastFile), file)
}

// saveBest writes the model, or its averages.
func (r *runner) saveBest() error {
	if r.Dir == "" {
		return nil
	}
	tensors := nn.State(r.Model)
	if r.EMA != nil {
		tensors = r.EMA.State()
	}
	return nn.SavePyTorch(r.path(bestFile), map[string]any{"state_dict": tensors, "metadata": metadata(r.Metadata)})
}

func metadata(of map[string]string) map[string]any {
	dict := make(map[string]any, len(of))
	for key, value := range of {
		dict[key] = value
	}
	return dict
}

// logKind is the kind of file that saveLog writes.
func logKind() safefile.Kind { return safefile.Prefix("a log of a training", "epoch,steps,lr,") }

// saveLog writes the table of all epochs. A new file takes the old one's place.
func (r *runner) saveLog() error {
	if r.Dir == "" {
		return nil
	}
	var text bytes.Buffer
	w := csv.NewWriter(&text)
	w.Write([]string{"epoch", "steps", "lr", "train_loss", "train_top1", "train_top5", "eval_loss", "eval_top1", "eval_top5",
		"images_per_second", "seconds", "wait_share", "device_allocated_bytes"})
	for _, e := range r.report.Epochs {
		row := []string{strconv.Itoa(e.Epoch), strconv.Itoa(e.Steps), number(e.LR)}
		row = append(row, e.Train.columns()...)
		row = append(row, e.Eval.columns()...)
		w.Write(append(row, number(e.ImagesPerSecond), number(e.Seconds), number(e.WaitShare), strconv.FormatInt(e.AllocatedBytes, 10)))
	}
	w.Flush() // a bytes.Buffer takes everything
	temporary := r.path(logFile + ".new")
	if err := os.WriteFile(temporary, text.Bytes(), 0o666); err != nil {
		return err
	}
	return os.Rename(temporary, r.path(logFile))
}

// columns are loss, top-1 and top-5; empty if there are none.
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
