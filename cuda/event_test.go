//go:build linux

package cuda

import (
	"bytes"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

func BenchmarkEventUse(b *testing.B) {
	e := newEvent(nil)
	defer e.Close()
	for b.Loop() {
		if _, err := e.use("bench"); err != nil {
			b.Fatal(err)
		}
		e.done()
	}
}

func eventCalls(e *Event) map[string]func() error {
	return map[string]func() error{
		"Record":           func() error { return e.Record(Stream{}) },
		"Stream.Record":    func() error { return Stream{}.Record(e) },
		"Stream.WaitEvent": func() error { return Stream{}.WaitEvent(e) },
		"Query":            func() error { _, err := e.Query(); return err },
		"Synchronize":      e.Synchronize,
		"Elapsed":          func() error { _, err := Elapsed(e, e); return err },
		"Export":           func() error { _, err := e.Export(0); return err },
		"Acquire":          func() error { _, err := e.Acquire(); return err },
	}
}

func TestClosedEventIsRefused(t *testing.T) {
	e := newEvent(nil)
	for range 2 {
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for name, call := range eventCalls(e) {
		t.Run(name, func(t *testing.T) {
			if err := call(); !errors.Is(err, ErrClosed) {
				t.Errorf("got %v, want ErrClosed", err)
			}
		})
	}
}

func TestNilEventIsRefused(t *testing.T) {
	for _, e := range []*Event{nil, {}} {
		for name, call := range eventCalls(e) {
			t.Run(name, func(t *testing.T) {
				if err := call(); !errors.Is(err, ErrInvalidArgument) {
					t.Errorf("got %v, want ErrInvalidArgument", err)
				}
			})
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A call in progress keeps a closed event alive; further calls are refused.
func TestClosedEventLivesUntilItsCallsEnd(t *testing.T) {
	e := newEvent(nil)
	if _, err := e.Acquire(); err != nil {
		t.Fatal(err)
	}
	e.Close()
	if n := e.refs.Load(); n != 1 {
		t.Errorf("%d references during the call, want 1", n)
	}
	for name, call := range eventCalls(e) {
		t.Run(name, func(t *testing.T) {
			if err := call(); !errors.Is(err, ErrClosed) {
				t.Errorf("got %v, want ErrClosed", err)
			}
		})
	}
	e.Release()
	if n := e.refs.Load(); n != 0 {
		t.Errorf("%d references at the end, want 0", n)
	}
}

// Close during other calls: the event lives until the last call ends, is freed once, and refuses
// later calls.
func TestEventCloseBesideUse(t *testing.T) {
	for range 200 {
		e := newEvent(nil)
		var closed atomic.Bool
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for {
					after := closed.Load()
					_, err := e.use("test")
					if err != nil {
						if !errors.Is(err, ErrClosed) {
							t.Errorf("got %v, want ErrClosed", err)
						}
						return
					}
					if after {
						t.Error("use after Close had returned: got no error, want ErrClosed")
					}
					if refs := e.refs.Load(); refs < 1 {
						t.Errorf("%d references during a use, want at least 1", refs)
					}
					e.done()
					runtime.Gosched()
				}
			})
		}
		for range 2 {
			all.Go(func() {
				runtime.Gosched()
				e.Close()
				closed.Store(true)
			})
		}
		all.Wait()
		if n := e.refs.Load(); n != 0 {
			t.Fatalf("%d references at the end, want 0", n)
		}
	}
}

func TestQueryAndElapsed(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	stream := newStreams(t, 1)[0]
	start := must[*Event](t)(NewEvent(EventOptions{Timing: true}))
	end := must[*Event](t)(NewEvent(EventOptions{Timing: true, Blocking: true}))
	plain := must[*Event](t)(NewEvent(EventOptions{}))
	for _, e := range []*Event{start, end, plain} {
		defer e.Close()
		for name, call := range map[string]func() error{
			"Query":       func() error { _, err := e.Query(); return err },
			"Synchronize": e.Synchronize,
			"WaitEvent":   func() error { return stream.WaitEvent(e) },
			"Elapsed":     func() error { _, err := Elapsed(e, e); return err },
		} {
			if err := call(); !errors.Is(err, ErrNotRecorded) {
				t.Errorf("%s before Record: got %v, want ErrNotRecorded", name, err)
			}
		}
	}
	begin := time.Now()
	check(t, start.Record(stream))
	check(t, WithStream(stream, load.queue))
	check(t, end.Record(stream))
	check(t, stream.Record(plain))
	for name, query := range map[string]func() (bool, error){"Stream.Query": stream.Query, "Event.Query": end.Query} {
		if done := must[bool](t)(query()); done {
			t.Errorf("%s: done while the work runs", name)
		}
	}
	if _, err := Elapsed(start, end); err == nil {
		t.Error("Elapsed of work that runs: got no error, want one")
	}
	check(t, end.Synchronize())
	wall := time.Since(begin)
	check(t, stream.Synchronize())
	for name, query := range map[string]func() (bool, error){"Stream.Query": stream.Query, "Event.Query": end.Query} {
		if done := must[bool](t)(query()); !done {
			t.Errorf("%s: not done after Synchronize", name)
		}
	}
	elapsed := must[time.Duration](t)(Elapsed(start, end))
	if elapsed <= time.Millisecond || elapsed > wall {
		t.Errorf("elapsed %v on the device, %v on the host", elapsed, wall)
	}
	if _, err := Elapsed(start, plain); !errors.Is(err, ErrInvalidArgument) ||
		!strings.Contains(err.Error(), "without timing") {
		t.Errorf("Elapsed without Timing: got %v, want ErrInvalidArgument", err)
	}
}

// A closed event still holds back a stream that waits for it.
func TestCloseOfAnEventInUse(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	const n = 1024
	made, read := tensor(t, n, 3), tensor(t, n, 0)
	side := newStreams(t, 2)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	check(t, WithStream(side[0], func() error { return errors.Join(load.queue(), fill(made, 7)) }))
	check(t, event.Record(side[0]))
	check(t, side[1].WaitEvent(event))
	check(t, event.Close())
	check(t, WithStream(side[1], func() error { return capi.CopyTensor(read, made, true) }))
	check(t, side[1].Synchronize())
	if got := firstAndLast(t, read, n); got != [2]float32{7, 7} {
		t.Errorf("read %v, want 7", got)
	}
}

func TestEventFromManyGoroutines(t *testing.T) {
	onGPU(t, 1)
	for range 50 {
		event := must[*Event](t)(NewEvent(EventOptions{}))
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 50 {
					_, queried := event.Query()
					for _, err := range []error{event.Record(Stream{}), queried, Stream{}.WaitEvent(event),
						event.Synchronize()} {
						if err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNotRecorded) {
							t.Error(err)
						}
					}
				}
			})
		}
		all.Go(func() {
			for range 100 {
				runtime.Gosched()
			}
			event.Close()
		})
		all.Wait()
	}
}

func TestTimingAndInterprocessExcludeEachOther(t *testing.T) {
	if _, err := NewEvent(EventOptions{Timing: true, Interprocess: true}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
}

const eventOfParent = "TORCHSTREAM_TEST_EVENT"

// An event of this process holds back a stream of another process, which runs this test again.
func TestEventBetweenProcesses(t *testing.T) {
	onGPU(t, 1)
	if handle := os.Getenv(eventOfParent); handle != "" {
		var h EventHandle
		copy(h[:], must[[]byte](t)(hex.DecodeString(handle)))
		e := must[*Event](t)(ImportEvent(0, h))
		defer e.Close()
		stream := newStreams(t, 1)[0]
		check(t, stream.WaitEvent(e))
		check(t, stream.Synchronize())
		if done := must[bool](t)(e.Query()); !done {
			t.Error("Query after the wait for the parent's event = false, want true")
		}
		return
	}
	load := newWork(t)
	stream := newStreams(t, 1)[0]
	e := must[*Event](t)(NewEvent(EventOptions{Interprocess: true}))
	defer e.Close()
	if _, err := must[*Event](t)(NewEvent(EventOptions{})).Export(0); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("export of a plain event: got %v, want ErrInvalidArgument", err)
	}
	if _, err := ImportEvent(0, EventHandle{}); err == nil {
		t.Error("ImportEvent of a zero handle: got no error, want one")
	}
	check(t, WithStream(stream, load.queue))
	check(t, e.Record(stream))
	h := must[EventHandle](t)(e.Export(0))
	self := must[string](t)(os.Executable())
	child := exec.Command(self, "-test.run", "^TestEventBetweenProcesses$", "-test.v")
	child.Env = append(os.Environ(), eventOfParent+"="+hex.EncodeToString(h[:]))
	if out, err := child.CombinedOutput(); err != nil ||
		!bytes.Contains(out, []byte("--- PASS: TestEventBetweenProcesses")) {
		t.Errorf("the child process: %v\n%s", err, out)
	}
	check(t, stream.Synchronize())
}
