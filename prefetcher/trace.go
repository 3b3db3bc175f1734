package prefetcher

import (
	"errors"
	"fmt"
	"log/slog"
	"sync"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/trace"
)

// tracer records Options.Trace's batches. A nil tracer has nothing to record, and does nothing.
type tracer struct {
	window     trace.Window
	first, end int          // batches
	copies     *cuda.Stream // nil on the CPU
	logger     *slog.Logger

	mu       sync.Mutex
	recorder *trace.Recorder // while it records
	over     bool
	failed   error // returned by Close: a recording that fails does not end an epoch
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
	first, end := w.Turns()
	return &tracer{window: w, first: first, end: end, logger: logger}, nil
}

// copiesOn says where the stream P will be.
func (t *tracer) copiesOn(p *cuda.Stream) {
	if t != nil {
		t.copies = p
	}
}

// turn is called before the consumer gets a batch; what it returns, after its turn.
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

// start is called with mu held, as are stop and fail.
func (t *tracer) start() {
	recorder, err := trace.Start(trace.Options{})
	if err == nil && t.copies != nil {
		err = recorder.NameStream(*t.copies, "prefetcher")
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
			picture.Title = fmt.Sprintf("epoch %d, batches %d to %d", t.window.Epoch, t.first, t.end-1)
		}
		if err = recorded.WriteFile(t.window.File, picture); err == nil {
			t.logger.Info("prefetcher: recorded", "file", t.window.File, "summary", recorded.Summary().String())
		}
	}
	t.fail(err)
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

// close returns what went wrong, once.
func (t *tracer) close() error {
	if t == nil {
		return nil
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if !t.over {
		t.over = true
		t.fail(fmt.Errorf("nothing was recorded to %s: batch %d of epoch %d did not come", t.window.File, t.first, t.window.Epoch))
	}
	err := t.failed
	t.failed = nil
	return err
}
