package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/torchstream/torchstream/internal/printable"
)

// swappedWeights are two files of weights, of which a server reads one through a symbolic link.
type swappedWeights struct {
	folder string
	link   string
	files  [2]string
	state  atomic.Int64 // twice the number of swaps; odd during a swap
	read   int64        // bytes of the server's output that were read
}

// newSwappedWeights makes the link in a new folder.
func newSwappedWeights(models, model string) (*swappedWeights, error) {
	w := &swappedWeights{files: [2]string{filepath.Join(models, model+".safetensors"),
		filepath.Join(models, model+"-other.safetensors")}}
	for _, path := range w.files {
		if _, err := os.Stat(path); err != nil {
			return nil, fmt.Errorf("-swap-every needs two files of make_models.py --replaceable: %w", err)
		}
	}
	var err error
	if w.folder, err = os.MkdirTemp("", "soak-*"); err != nil {
		return nil, err
	}
	w.link = filepath.Join(w.folder, "weights.safetensors")
	if err := os.Symlink(w.files[0], w.link); err != nil {
		return nil, errors.Join(err, w.remove())
	}
	return w, nil
}

func (w *swappedWeights) remove() error { return os.RemoveAll(w.folder) }

// now returns the state; 0 of nil weights.
func (w *swappedWeights) now() int64 {
	if w == nil {
		return 0
	}
	return w.state.Load()
}

// setOf returns the index of the set of a state, and whether the server has read it. During a swap
// it may have either set.
func setOf(state int64) (set int, known bool) { return int(state / 2 % 2), state%2 == 0 }

// maxSwap is the longest time in which a server reads its weights, also at a low priority on a busy
// machine.
const maxSwap = 3 * time.Minute

// swap lets the server read the other file, and waits until the server reports the new weights.
func (w *swappedWeights) swap(ctx context.Context, s *serverProcess) error {
	state := w.state.Add(1)
	next, _ := setOf(state + 1)
	part := w.link + ".part"
	if err := errors.Join(os.Symlink(w.files[next], part), os.Rename(part, w.link)); err != nil {
		return err
	}
	if err := w.skip(s); err != nil {
		return err
	}
	if err := s.command.Process.Signal(syscall.SIGUSR1); err != nil {
		return fmt.Errorf("new weights: %w", err)
	}
	for began := time.Now(); ; {
		text, err := s.outputFrom(w.read)
		switch {
		case err != nil:
			return err
		case strings.Contains(text, "new weights from "):
			w.state.Add(1)
			return nil
		case strings.Contains(text, "the weights are not replaced"):
			return fmt.Errorf("the server has not replaced its weights: %s", printable.Text(text))
		case time.Since(began) > maxSwap:
			return fmt.Errorf("the server has not reported new weights in %v", maxSwap)
		case !wait(ctx, 10*time.Millisecond):
			return context.Cause(ctx)
		}
	}
}

// skip passes over the output of earlier swaps.
func (w *swappedWeights) skip(s *serverProcess) error {
	text, err := s.outputFrom(w.read)
	w.read += int64(len(text))
	return err
}
