package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// calls are all that need a GPU of the given index.
func calls(d Device) map[string]func() error {
	stream := DefaultStream(d)
	return map[string]func() error{
		"Device.Properties":    func() error { _, err := d.Properties(); return err },
		"Device.Memory":        func() error { _, err := d.Memory(); return err },
		"Device.ResetPeak":     d.ResetPeak,
		"Device.Allocator":     func() error { _, err := d.Allocator(); return err },
		"Device.LimitMemory":   func() error { return d.LimitMemory(0.5) },
		"Device.CanAccessPeer": func() error { _, err := d.CanAccessPeer(d); return err },
		"NewMemoryPool":        func() error { _, err := NewMemoryPool(d); return err },
		"ImportEvent":          func() error { _, err := ImportEvent(d, EventHandle{}); return err },
		"WithStreams": func() error {
			return WithStreams([]Stream{stream}, func() error { return errors.New("fn was called") })
		},
		"Device.Synchronize": d.Synchronize,
		"Capture": func() error {
			_, err := Capture(CaptureOptions{Stream: stream}, func() error { return errors.New("fn was called") })
			return err
		},
		"NewStream":            func() error { _, err := NewStream(d, StreamOptions{}); return err },
		"NewOwnedStream":       func() error { _, err := NewOwnedStream(d, StreamOptions{}); return err },
		"ExternalStream":       func() error { _, err := ExternalStream(0, d); return err },
		"GetCurrentCUDAStream": func() error { _, err := GetCurrentCUDAStream(d); return err },
		"SetCUDAStream":        func() error { _, err := SetCUDAStream(stream); return err },
		"WaitCUDAStream":       func() error { return WaitCUDAStream(stream, stream) },
		"WithStream":           func() error { return WithStream(stream, func() error { return errors.New("fn was called") }) },
		"Stream.Wait":          func() error { return stream.Wait(stream) },
		"Stream.Query":         func() error { _, err := stream.Query(); return err },
		"Stream.Synchronize":   stream.Synchronize,
		"Stream.Notify":        func() error { _, err := stream.Notify(); return err },
		"Stream.Forget":        stream.Forget,
		"Stream.SameQueue":     func() error { _, err := stream.SameQueue(stream); return err },
		"Stream.Handle":        func() error { _, err := stream.Handle(); return err },
		"Stream.Priority":      func() error { _, err := stream.Priority(); return err },
	}
}

func TestWithoutGPU(t *testing.T) {
	if DeviceCount() > 0 {
		t.Skip("this machine has a GPU")
	}
	all := calls(0)
	all["NewEvent"] = func() error { _, err := NewEvent(EventOptions{}); return err }
	all["NewPinned"] = func() error { _, err := NewPinned(4096); return err }
	all["NewSlab"] = func() error { _, err := NewSlab(2, 4096); return err }
	all["RegisterPinned"] = func() error { _, err := RegisterPinned(mapped(t, 4096)); return err }
	all["PriorityRange"] = func() error { _, _, err := PriorityRange(); return err }
	all["EmptyCache"] = EmptyCache
	for name, call := range all {
		err := call()
		if !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: got %v, want ErrNoDevice", name, err)
		} else if !strings.Contains(err.Error(), "nvidia-smi") || !strings.Contains(err.Error(), "cuda.CPU") {
			t.Errorf("%s: %q does not say what to do", name, err)
		}
	}
}

// A device that is not there is said to be not there, on every machine.
func TestNoSuchDevice(t *testing.T) {
	for name, call := range calls(1000) {
		if err := call(); !errors.Is(err, ErrNoDevice) {
			t.Errorf("%s: got %v, want ErrNoDevice", name, err)
		}
	}
}

// What is no GPU has no streams: Device(-2) must not reach LibTorch, to which it means the current
// device.
func TestNotAGPU(t *testing.T) {
	for _, d := range []Device{CPU, -2, -1000} {
		for name, call := range calls(d) {
			if err := call(); !errors.Is(err, ErrInvalidArgument) && !errors.Is(err, ErrNoDevice) {
				t.Errorf("%v: %s: got %v, want ErrInvalidArgument or ErrNoDevice", d, name, err)
			}
		}
	}
}

func TestSentinels(t *testing.T) {
	sentinels := []error{ErrInvalidArgument, ErrOutOfMemory, ErrNoDevice, ErrCUDA, ErrWrongThread, ErrOutOfOrder, ErrNotRecorded, ErrInternal, ErrCapture, ErrStale, ErrClosed}
	for i, a := range sentinels {
		for j, b := range sentinels {
			if got := errors.Is(fmt.Errorf("batch 3: %w", a), b); got != (i == j) {
				t.Errorf("errors.Is(%v, %v) is %v", a, b, got)
			}
		}
	}
	err := invalid("NewPinned", "%d bytes", 0)
	var e *Error
	if !errors.As(err, &e) || e.Origin != "NewPinned" || e.Message != "0 bytes" || !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %#v", err)
	}
}

func TestNames(t *testing.T) {
	for got, want := range map[string]string{
		Device(0).String():        "cuda:0",
		Device(7).String():        "cuda:7",
		CPU.String():              "cpu",
		DefaultStream(1).String(): "cuda:1 default stream",
		Stream{capi.Stream{ID: 35, Device: 2}}.String(): "cuda:2 stream 35",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if DefaultStream(0) != (Stream{}) {
		t.Error("the zero Stream is not the default stream of the first GPU")
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

func TestClosedEvent(t *testing.T) {
	e := newEvent(nil)
	for range 2 {
		if err := e.Close(); err != nil {
			t.Fatal(err)
		}
	}
	for name, call := range eventCalls(e) {
		if err := call(); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: got %v, want ErrClosed", name, err)
		}
	}
}

func TestNilEvent(t *testing.T) {
	for _, e := range []*Event{nil, {}} {
		for name, call := range eventCalls(e) {
			if err := call(); !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%s: got %v, want ErrInvalidArgument", name, err)
			}
		}
		if err := e.Close(); err != nil {
			t.Error(err)
		}
	}
}

// A call in progress keeps a closed event alive, but lets no further call in.
func TestClosedEventInUse(t *testing.T) {
	e := newEvent(nil)
	if _, err := e.Acquire(); err != nil {
		t.Fatal(err)
	}
	e.Close()
	if n := e.refs.Load(); n != 1 {
		t.Errorf("%d references during the call, want its own", n)
	}
	for name, call := range eventCalls(e) {
		if err := call(); !errors.Is(err, ErrClosed) {
			t.Errorf("%s: got %v, want ErrClosed", name, err)
		}
	}
	e.Release()
	if n := e.refs.Load(); n != 0 {
		t.Errorf("%d references are left", n)
	}
}

// Close beside calls in progress: the event lives until the last has ended, is freed once, and
// nobody begins to use it afterwards.
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
							t.Errorf("got %v", err)
						}
						return
					}
					if after {
						t.Error("used after Close had returned")
					}
					if e.refs.Load() < 1 {
						t.Error("freed while in use")
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
			t.Fatalf("%d references are left", n)
		}
	}
}

// until collects garbage until done says so.
func until(t *testing.T, what string, done func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !done(); {
		if time.Now().After(end) {
			t.Fatalf("%s: not within 20 s", what)
		}
		runtime.GC()
		runtime.Gosched()
	}
}

func TestLeaksAreCounted(t *testing.T) {
	before := Leaks()
	closed := newEvent(nil)
	closed.Close()
	inner := newEvent(nil).event // its Event is unreachable from here on
	newPinned(nil, make([]byte, 100))
	newOwnedStream(Stream{})
	until(t, "cleanups", func() bool {
		after := Leaks()
		return after.Events > before.Events && after.Pinned > before.Pinned && after.Streams > before.Streams
	})
	after := Leaks()
	if after.Events != before.Events+1 || after.Streams != before.Streams+1 || after.Pinned != before.Pinned+1 || after.PinnedBytes != before.PinnedBytes+100 {
		t.Errorf("got %+v after %+v", after, before)
	}
	until(t, "free", func() bool { return inner.refs.Load() == 0 })
}

func TestPinnedArguments(t *testing.T) {
	for _, bytes := range []int{0, -1} {
		if _, err := NewPinned(bytes); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("NewPinned(%d): got %v, want ErrInvalidArgument", bytes, err)
		}
	}
}

// What NewPinned returns beside an error can be closed, as an Event can.
func TestNilPinned(t *testing.T) {
	var p *Pinned
	if err := p.Close(); err != nil || p.Bytes() != nil {
		t.Errorf("Close: %v; Bytes: %v", err, p.Bytes())
	}
}

func TestWithStreamNeedsAFunction(t *testing.T) {
	if err := WithStream(Stream{}, nil); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
}

// threadsUsed runs fn in goroutines one after the other and returns on how many threads. A
// goroutine that ends locked takes its thread with it, so that many threads mean that fn left its
// goroutine locked.
func threadsUsed(goroutines int, fn func()) int {
	threads := map[int64]bool{}
	for range goroutines {
		done := make(chan int64)
		go func() {
			fn()
			done <- capi.ThreadID()
		}()
		threads[<-done] = true
	}
	return len(threads)
}

func TestFailureLeavesNoLock(t *testing.T) {
	const goroutines = 300
	nowhere := DefaultStream(1000)
	for name, fn := range map[string]func(){
		"WithStream":    func() { WithStream(nowhere, func() error { return nil }) },
		"SetCUDAStream": func() { SetCUDAStream(nowhere) },
	} {
		if n := threadsUsed(goroutines, fn); n > goroutines/2 {
			t.Errorf("%s: %d goroutines used %d threads: they ended locked", name, goroutines, n)
		}
	}
	if n := threadsUsed(goroutines, runtime.LockOSThread); n <= goroutines/2 {
		t.Errorf("%d goroutines that ended locked used %d threads: the test shows nothing", goroutines, n)
	}
}
