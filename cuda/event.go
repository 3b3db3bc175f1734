package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// Event marks a point in a stream's queue. Another stream can wait for the event
// ([Stream.WaitEvent]). The host can query it ([Event.Query]) or wait for it ([Event.Synchronize]).
// An event can be recorded repeatedly, and every use refers to its latest Record. All records must
// be on streams of one device.
//
// Several goroutines may use an Event at once. Close is safe during other calls: running calls
// finish, and later calls return [ErrClosed]. Close every event. The garbage collector eventually
// frees an event that becomes unreachable before its Close, and [Leaks] counts it.
type Event struct {
	*event
	cleanup runtime.Cleanup
}

// event is the part of an Event that lives until the last call that uses it returns.
type event struct {
	made   origin.Origin
	c      *capi.Event
	closed atomic.Bool
	refs   atomic.Int64 // calls in progress, plus one until Close
}

// EventOptions are the options of [NewEvent]. The zero value is the cheapest event, for ordering.
type EventOptions struct {
	// Timing records the time: Elapsed needs it.
	Timing bool
	// Blocking lets the OS thread sleep in Synchronize instead of spinning: Synchronize returns a
	// little later and leaves the core free.
	Blocking bool

	// Interprocess makes an event that other processes can use, by Export. It excludes Timing.
	Interprocess bool

	// External makes a Record or a wait in a captured function a node of the graph. Every replay
	// then records the event, or waits for its latest record, as a queued call does. So other work
	// can wait for a point inside a replay, and a replay can wait for other work. Two events with
	// Timing measure the time between two points of a replay, once that replay is done. Without
	// External a captured Record and wait only order the nodes of the graph, and other work cannot
	// use them.
	//
	// The event counts as recorded from the graph's first replay on. A captured wait needs an
	// earlier Record outside of the capture, or it returns ErrNotRecorded. The graph keeps the
	// event alive even after the event's Close.
	External bool
}

// NewEvent makes an event, initially not recorded.
func NewEvent(o EventOptions) (*Event, error) {
	var flags int32
	if o.Timing {
		flags |= capi.EventTiming
	}
	if o.Blocking {
		flags |= capi.EventBlocking
	}
	if o.Interprocess {
		flags |= capi.EventInterprocess
	}
	if o.External {
		flags |= capi.EventExternal
	}
	if o.Timing && o.Interprocess {
		return nil, invalid("NewEvent",
			"Timing and Interprocess exclude each other: an event between processes records no time")
	}
	c, err := capi.NewEvent(flags)
	if err != nil {
		return nil, checked(err)
	}
	return newEvent(c), nil
}

func newEvent(c *capi.Event) *Event {
	e := &Event{event: &event{made: origin.New("event"), c: c}}
	e.refs.Store(1)
	e.cleanup = runtime.AddCleanup(e, func(inner *event) {
		leakedEvents.Add(1)
		inner.made.Leaked()
		slog.Debug("cuda: an Event became unreachable before Close; freed")
		inner.close()
	}, e.event)
	return e
}

// use returns the C event for a call. A call of done must follow.
func (e *Event) use(origin string) (*capi.Event, error) {
	if e == nil || e.event == nil {
		return nil, invalid(origin, "the Event is nil or zero: make events with NewEvent")
	}
	for {
		n := e.refs.Load()
		if n == 0 || e.closed.Load() {
			return nil, ErrClosed
		}
		if e.refs.CompareAndSwap(n, n+1) {
			return e.c, nil
		}
	}
}

func (e *event) done() {
	if e.refs.Add(-1) == 0 {
		capi.FreeEvent(e.c)
	}
}

func (e *event) close() {
	if !e.closed.Swap(true) {
		e.made.Closed()
		e.done()
	}
}

// EventHandle lets another process on the same machine open an event. It is plain data, and may be
// sent to that process by any means.
type EventHandle [64]byte

// Export returns a handle with which another process can open the event: see [ImportEvent]. The
// event needs EventOptions.Interprocess. Both processes may then record the event, on streams of
// the GPU d, and wait for it. Do not close the event before the other process has finished with it.
//
// This process cannot see the records of another process. An exported event therefore counts as
// recorded: a wait for it before any record is no error and orders nothing. Record the event before
// sending the handle, or tell the other process when a record exists.
func (e *Event) Export(d Device) (EventHandle, error) {
	if err := d.gpu("Event.Export"); err != nil {
		return EventHandle{}, err
	}
	c, err := e.use("Event.Export")
	if err != nil {
		return EventHandle{}, err
	}
	defer e.done()
	h, err := capi.ExportEvent(c, int32(d))
	return EventHandle(h), checked(err)
}

// ImportEvent opens an event that another process exported. d is the same GPU, which may have
// another index in the other process. The event counts as recorded: see [Event.Export]. The caller
// must close it.
func ImportEvent(d Device, h EventHandle) (*Event, error) {
	if err := d.gpu("ImportEvent"); err != nil {
		return nil, err
	}
	c, err := capi.ImportEvent(int32(d), capi.EventHandle(h))
	if err != nil {
		return nil, checked(err)
	}
	return newEvent(c), nil
}

// Record puts the event at the end of the stream's queue: the event is done when everything queued
// on s so far is done. The host does not wait.
func (e *Event) Record(s Stream) error {
	c, err := e.use("Event.Record")
	if err != nil {
		return err
	}
	defer e.done()
	return checked(capi.RecordEvent(c, s.s))
}

// Handle returns the event's cudaEvent_t, for code that calls CUDA directly, and the GPU of its
// records. The handle is valid until Close. Handle returns [ErrNotRecorded] before the first
// Record, which makes the cudaEvent_t.
func (e *Event) Handle() (handle uintptr, d Device, err error) {
	c, err := e.use("Event.Handle")
	if err != nil {
		return 0, 0, err
	}
	defer e.done()
	device, handle, err := capi.EventHandleOf(c)
	return handle, Device(device), checked(err)
}

// String returns a name for messages: "event 0x7f... of cuda:0", "event that was never recorded",
// "closed event".
func (e *Event) String() string {
	handle, d, err := e.Handle()
	switch {
	case errors.Is(err, ErrNotRecorded):
		return "event that was never recorded"
	case err != nil:
		return "closed event"
	}
	return fmt.Sprintf("event %#x of %v", handle, d)
}

// Query reports whether the work before the latest Record is done. It does not wait. It returns
// [ErrNotRecorded] before the first Record, and [ErrCapture] if the latest Record was captured into
// a graph, because no replay reaches the event itself.
func (e *Event) Query() (done bool, err error) {
	c, err := e.use("Event.Query")
	if err != nil {
		return false, err
	}
	defer e.done()
	done, err = capi.QueryEvent(c)
	return done, checked(err)
}

// Synchronize blocks until the work before the latest Record is done. It also blocks the
// goroutine's OS thread; other goroutines continue. It returns [ErrNotRecorded] and [ErrCapture] in
// the same cases as [Event.Query].
func (e *Event) Synchronize() error {
	c, err := e.use("Event.Synchronize")
	if err != nil {
		return err
	}
	defer e.done()
	return checked(capi.SynchronizeEvent(c))
}

// Close frees the event. Streams that already wait for the event continue to wait. Further calls do
// nothing. Close never fails.
func (e *Event) Close() error {
	if e != nil && e.event != nil {
		e.cleanup.Stop()
		e.close()
	}
	return nil
}

// Acquire returns the C event for this module's other packages, and keeps it alive until Release,
// even if the Event is closed meanwhile.
func (e *Event) Acquire() (*capi.Event, error) { return e.use("Event.Acquire") }

// Release must follow each Acquire that succeeded.
func (e *Event) Release() { e.done() }

// Elapsed returns the time on the device between two records, with a resolution of about half a
// microsecond. Both events must have EventOptions.Timing, be done (Synchronize end first) and
// belong to one device. Otherwise Elapsed returns [ErrInvalidArgument]. If an event has not been
// recorded, it returns [ErrNotRecorded].
func Elapsed(start, end *Event) (time.Duration, error) {
	s, err := start.use("Elapsed")
	if err != nil {
		return 0, err
	}
	defer start.done()
	e, err := end.use("Elapsed")
	if err != nil {
		return 0, err
	}
	defer end.done()
	ns, err := capi.EventElapsed(s, e)
	return time.Duration(ns), checked(err)
}
