package cuda

import (
	"log/slog"
	"runtime"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

// Event marks a point in a stream's queue. Another stream can wait for it ([Stream.WaitEvent]), the
// host can ask for it ([Event.Query]) or wait for it ([Event.Synchronize]). An event can be
// recorded again and again; each use means its latest Record. All records must be on streams of one
// device.
//
// An Event may be used by several goroutines at once, and Close is safe beside other calls: those
// that have begun finish, later ones return [ErrClosed]. An event must be closed; one that becomes
// unreachable before is freed by the garbage collector, some time, and counted by [Leaks].
type Event struct {
	*event
	cleanup runtime.Cleanup
}

// event is the part that outlives its Event for as long as a call uses it.
type event struct {
	c      *capi.Event
	closed atomic.Bool
	refs   atomic.Int64 // calls in progress, and one until it is closed
}

// EventOptions are the options of [NewEvent]. The zero value is the cheapest event, for ordering.
type EventOptions struct {
	Timing   bool // the event takes the time: needed by Elapsed
	Blocking bool // Synchronize lets the OS thread sleep instead of spin: a little later, and a free core

	// Interprocess makes an event that other processes can use: see Export. Not with Timing.
	Interprocess bool
}

// NewEvent makes an event that is not recorded yet.
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
	if o.Timing && o.Interprocess {
		return nil, invalid("NewEvent", "an event between processes takes no time: Timing and Interprocess exclude each other")
	}
	c, err := capi.NewEvent(flags)
	if err != nil {
		return nil, checked(err)
	}
	return newEvent(c), nil
}

func newEvent(c *capi.Event) *Event {
	e := &Event{event: &event{c: c}}
	e.refs.Store(1)
	e.cleanup = runtime.AddCleanup(e, func(inner *event) {
		leakedEvents.Add(1)
		slog.Debug("cuda: an Event became unreachable before Close; freed")
		inner.close()
	}, e.event)
	return e
}

// use returns the C event for a call; done follows the call.
func (e *Event) use(origin string) (*capi.Event, error) {
	if e == nil || e.event == nil {
		return nil, invalid(origin, "a nil or zero Event: NewEvent makes events")
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
		e.done()
	}
}

// EventHandle names an event of another process of the same machine. It is plain data, to be sent
// there by any means.
type EventHandle [64]byte

// Export returns a handle by which another process opens the event, with [ImportEvent]; the event
// needs EventOptions.Interprocess. Both processes may then record it, on streams of the GPU d, and
// wait for it. It must not be closed before the other process is through with it.
//
// What another process records cannot be seen from here. So an exported event counts as recorded: a
// wait for it before there is a record is no error any more, and orders nothing. Record it, then
// send the handle; or tell the other process when there is a record.
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

// ImportEvent opens an event that another process exported; d is the same GPU, whatever its index
// there. It counts as recorded, as Export says. Close it.
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

// Record puts the event at the end of the stream's queue: it is done when everything queued on s so
// far is. The host does not wait.
func (e *Event) Record(s Stream) error {
	c, err := e.use("Event.Record")
	if err != nil {
		return err
	}
	defer e.done()
	return checked(capi.RecordEvent(c, s.s))
}

// Query reports whether the work before the latest Record is done. It does not wait.
// [ErrNotRecorded] before the first Record; [ErrCapture] if the latest was captured into a graph,
// where nothing comes to it.
func (e *Event) Query() (done bool, err error) {
	c, err := e.use("Event.Query")
	if err != nil {
		return false, err
	}
	defer e.done()
	done, err = capi.QueryEvent(c)
	return done, checked(err)
}

// Synchronize blocks until the work before the latest Record is done. The goroutine's OS thread is
// blocked with it; other goroutines go on. [ErrNotRecorded] before the first Record, [ErrCapture]
// as with Query.
func (e *Event) Synchronize() error {
	c, err := e.use("Event.Synchronize")
	if err != nil {
		return err
	}
	defer e.done()
	return checked(capi.SynchronizeEvent(c))
}

// Close frees the event. Streams that wait for it already go on waiting. Further calls do nothing;
// it never fails.
func (e *Event) Close() error {
	if e != nil && e.event != nil {
		e.cleanup.Stop()
		e.close()
	}
	return nil
}

// Acquire returns the C event for this module's other packages, and keeps it alive, whoever closes
// the Event, until Release.
func (e *Event) Acquire() (*capi.Event, error) { return e.use("Event.Acquire") }

// Release follows each Acquire that succeeded.
func (e *Event) Release() { e.done() }

// Elapsed returns the time on the device between two records, with a resolution of about half a
// microsecond. [ErrNotRecorded] unless both events have EventOptions.Timing and are recorded;
// [ErrInvalidArgument] unless both are done (Synchronize end first) and of one device.
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
	ms, err := capi.EventElapsed(s, e)
	return time.Duration(float64(ms) * float64(time.Millisecond)), checked(err)
}
