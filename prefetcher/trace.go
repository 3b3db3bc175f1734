package prefetcher

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/trace"
)

// tracer records the batches that Options.Trace selects. A nil tracer does nothing.
type tracer struct {
	window     trace.Window
	first, end int                           // numbers of batches: first is included, end is not
	streams    func() map[string]cuda.Stream // the streams by their names in the recording; nil on the CPU
	logger     *slog.Logger

	mu       sync.Mutex
	recorder *trace.Recorder // nil while nothing is recorded
	last     int             // the last recorded batch
	over     bool
	failed   error // returned by Close, because a failed recording does not end an epoch
}

func newTracer(w trace.Window, logger *slog.Logger) (*tracer, error) {
	if w == (trace.Window{}) {
		var err error
		if w, err = trace.FromEnvironment(); err != nil || w == (trace.Window{}) {
			return nil, err
		}
	}
	if err := w.Check(); err != nil {
		return nil, err
	}
	if err := writable(w.File); err != nil {
		return nil, fmt.Errorf("the recording that Options.Trace or %s requests cannot be written: %w",
			trace.Environment, err)
	}
	first, end := w.Turns()
	return &tracer{window: w, first: first, end: end, logger: logger}, nil
}

// writable checks whether the recording's file can be written, so that an error is reported before
// the epoch and not after it. It leaves an existing file unchanged, and creates none. A dangling
// link, and a path that is neither a file nor a folder, can only be checked by writing.
func writable(name string) error {
	flags := os.O_WRONLY
	if info, err := os.Stat(name); err == nil {
		if !info.Mode().IsRegular() && !info.IsDir() {
			return nil
		}
	} else if _, err := os.Lstat(name); err == nil {
		return nil
	} else {
		flags |= os.O_CREATE | os.O_EXCL
	}
	f, err := os.OpenFile(name, flags, 0o666)
	if err != nil {
		return err
	}
	err = f.Close()
	if flags&os.O_EXCL != 0 {
		err = errors.Join(err, os.Remove(name))
	}
	return err
}

// name sets the function that returns the streams and their names in the recording.
func (t *tracer) name(streams func() map[string]cuda.Stream) {
	if t != nil {
		t.streams = streams
	}
}

// turn is called before the consumer gets a batch. It returns a function that is called after the
// batch's turn.
func (t *tracer) turn(epoch, batch int) (end func()) {
	none := func() {}
	if t == nil {
		return none
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.over || epoch != t.window.Epoch {
		return none
	}
	if t.recorder != nil && batch >= t.end {
		t.stop()
	} else if t.recorder == nil && batch == t.first {
		t.start()
	}
	if t.recorder == nil {
		return none
	}
	t.last = batch
	return cuda.Range(fmt.Sprintf("batch %d", batch))
}

func (t *tracer) recording() bool {
	if t == nil {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.recorder != nil
}

// start starts the recording. mu is held when start, stop or fail is called.
func (t *tracer) start() {
	recorder, err := trace.Start(trace.Options{})
	if err == nil && t.streams != nil {
		for name, stream := range t.streams() {
			err = errors.Join(err, recorder.NameStream(stream, name))
		}
	}
	if recorder == nil {
		t.over = true
	}
	t.recorder = recorder
	t.fail(err)
}

func (t *tracer) stop() {
	recorder := t.recorder
	t.recorder, t.over = nil, true
	recorded, err := recorder.Stop()
	if err == nil {
		picture := t.window.Picture
		if picture.Title == "" {
			picture.Title = t.title()
		}
		if err = recorded.WriteFile(t.window.File, picture); err == nil {
			t.logger.Info("prefetcher: recorded", "file", t.window.File, "summary", recorded.Summary().String())
		}
	}
	t.fail(err)
}

// title names the recorded batches. They may be fewer than the window's batches, because an epoch
// may be shorter or end early.
func (t *tracer) title() string {
	if t.last == t.first {
		return fmt.Sprintf("epoch %d, batch %d", t.window.Epoch, t.first)
	}
	return fmt.Sprintf("epoch %d, batches %d to %d", t.window.Epoch, t.first, t.last)
}

func (t *tracer) fail(err error) {
	if err != nil {
		t.failed = errors.Join(t.failed, err)
		t.logger.Warn("prefetcher: the recording failed", "error", err)
	}
}

// leave is called after an epoch.
func (t *tracer) leave() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.recorder != nil {
		t.stop()
	}
}

// close returns the recording's errors. A second call returns none.
func (t *tracer) close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over {
		t.over = true
		t.fail(fmt.Errorf("nothing was recorded to %s: batch %d of epoch %d did not come", t.window.File,
			t.first, t.window.Epoch))
	}
	err := t.failed
	t.failed = nil
	return err
}
