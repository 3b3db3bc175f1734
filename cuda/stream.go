package cuda

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/internal/capi"
)

// Stream is a queue of work on a GPU. Work on one stream runs in the order in which it was queued;
// work on two streams runs in any order, also at the same time, unless [Stream.Wait] or an [Event]
// orders it.
//
// A Stream is a small value: it is compared with ==, copied freely, used as a map key, and needs no
// Close. It may be used by any number of goroutines at once. The zero value is the default stream
// of the first GPU. All methods may be called on any thread.
type Stream struct{ s capi.Stream }

// StreamOptions are the options of [NewStream]. The zero value is a stream of normal priority.
type StreamOptions struct {
	// Priority: 0 is normal, -1 and lower are more urgent, down to what PriorityRange says. Others
	// are refused with ErrInvalidArgument. The device starts queued work of urgent streams first;
	// it does not stop work that runs already.
	Priority int
}

// PoolStreams is how many streams LibTorch's pool has for each device and priority.
const PoolStreams = 32

// NewStream takes the next stream of LibTorch's pool. The pool has [PoolStreams] for each device
// and priority and hands them out in turn, to everybody in the process: the 33rd call returns the
// first stream again (the two are ==), and work on the two then runs in one queue. Take the streams
// of long-lived parts once and keep them, or take them from [NewOwnedStream], which shares none.
//
// A pool stream is not ordered against the default stream: before it reads what was queued there,
// it has to [Stream.Wait] for it.
func NewStream(d Device, o StreamOptions) (Stream, error) {
	if err := d.gpu("NewStream"); err != nil {
		return Stream{}, err
	}
	s, err := capi.StreamFromPool(int32(d), int32(max(math.MinInt32, min(o.Priority, math.MaxInt32))))
	return Stream{s}, checked(err)
}

// PriorityRange returns the priorities that streams can have: least is 0, greatest (the most
// urgent) is negative.
func PriorityRange() (least, greatest int, err error) {
	l, g, err := capi.StreamPriorityRange()
	return int(l), int(g), checked(err)
}

// DefaultStream returns the device's default stream: the one that work is queued on by goroutines
// that were told of no other. It does not fail; where there is no such device, the calls that use
// the stream do.
func DefaultStream(d Device) Stream { return Stream{capi.Stream{ID: 0, Device: int32(d)}} }

// ExternalStream wraps a cudaStream_t that other code made on device d, and that stays its maker's:
// it must not be destroyed before the last tensor that was used on the stream is freed. Handle 0 is
// the default stream. The special handles cudaStreamLegacy (1) and cudaStreamPerThread (2) are
// refused with [ErrInvalidArgument].
//
// The handle's device is checked: d must be it. The stream is not == to the Stream of the pool that
// has the same handle, if there is one; [Stream.SameQueue] says so. Call [Stream.Forget] before the
// maker destroys the stream.
func ExternalStream(handle uintptr, d Device) (Stream, error) {
	if err := d.gpu("ExternalStream"); err != nil {
		return Stream{}, err
	}
	s, err := capi.ExternalStream(handle, int32(d))
	return Stream{s}, checked(err)
}

// Forget ends the use of a stream of [ExternalStream], before its maker destroys it: every later
// call with it is refused with [ErrInvalidArgument] instead of reaching a stream that is gone,
// until the handle is wrapped again. Streams that were not wrapped are refused with
// ErrInvalidArgument.
func (s Stream) Forget() error { return checked(capi.ForgetStream(s.s)) }

// SameQueue reports whether the two streams are one queue, so that work on them runs one after the
// other: they are == (as the pool's 33rd stream and its first), or one CUDA stream that was
// obtained in two ways.
func (s Stream) SameQueue(other Stream) (bool, error) {
	same, err := capi.SameStream(s.s, other.s)
	return same, checked(err)
}

// Device returns the GPU that the stream belongs to.
func (s Stream) Device() Device { return Device(s.s.Device) }

// String returns a name for messages: "cuda:0 default stream", "cuda:0 stream 35".
func (s Stream) String() string {
	if s.s.ID == 0 {
		return fmt.Sprintf("%v default stream", s.Device())
	}
	return fmt.Sprintf("%v stream %d", s.Device(), s.s.ID)
}

// Wait makes work that is queued on s from now on start after everything queued on other so far.
// The host does not wait. The streams may be of two devices.
func (s Stream) Wait(other Stream) error { return WaitCUDAStream(s, other) }

// WaitEvent makes work that is queued on s from now on start after the latest Record of e. The host
// does not wait. A later Record of e does not change what this call waits for. An event that was
// never recorded orders nothing and is refused with [ErrNotRecorded].
func (s Stream) WaitEvent(e *Event) error {
	c, err := e.use("Stream.WaitEvent")
	if err != nil {
		return err
	}
	defer e.done()
	return checked(capi.StreamWaitEvent(s.s, c))
}

// Record is e.Record(s).
func (s Stream) Record(e *Event) error { return e.Record(s) }

// Query reports whether all work queued on the stream so far is done. It does not wait. While the
// stream is captured it is refused with [ErrInvalidArgument], and so is Synchronize.
func (s Stream) Query() (done bool, err error) {
	done, err = s.s.Query()
	return done, checked(err)
}

// Synchronize blocks until all work queued on the stream so far is done. The goroutine's OS thread
// is blocked with it; other goroutines go on.
func (s Stream) Synchronize() error { return checked(s.s.Synchronize()) }

// Handle returns the stream's cudaStream_t, for code that talks to CUDA by itself. The handle stays
// ours: it is never destroyed.
func (s Stream) Handle() (uintptr, error) {
	h, err := s.s.Handle()
	return h, checked(err)
}

// Priority returns the stream's priority: 0 is normal, lower is more urgent.
func (s Stream) Priority() (int, error) {
	p, err := s.s.Priority()
	return int(p), checked(err)
}

// CAPI returns the stream as this module's other packages hand it to the C++ side.
func (s Stream) CAPI() capi.Stream { return s.s }
