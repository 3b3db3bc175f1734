package cuda

import (
	"fmt"
	"math"

	"github.com/torchstream/torchstream/internal/capi"
)

// Stream is a queue of work on a GPU. Work on one stream runs in the order in which it was queued.
// Work on two streams runs in any order, possibly at the same time, unless [Stream.Wait] or an
// [Event] orders it.
//
// A Stream is a small value: compare it with ==, copy it, use it as a map key. It needs no Close.
// Any number of goroutines may use a Stream at once, and all methods may be called on any thread.
// The zero value is the default stream of the first GPU.
type Stream struct{ s capi.Stream }

// StreamOptions are the options of [NewStream] and [NewOwnedStream]. The zero value is a stream of
// normal priority.
type StreamOptions struct {
	// Priority is 0 for normal. Lower values are more urgent, down to the minimum of PriorityRange.
	// Values outside of that range are refused with ErrInvalidArgument. The device starts queued
	// work of urgent streams first. It does not interrupt running work.
	Priority int
	// MaxMultiprocessors limits the number of the device's multiprocessors that run the stream's
	// kernels, and leaves the others to other work. 0 means no limit. Only [NewOwnedStream] accepts
	// it, because all callers share the pool's streams. The driver rounds it down (to a multiple of
	// 8 on an H100): see [OwnedStream.Multiprocessors]. All streams of a device with the same limit
	// share the same multiprocessors. Streams without a limit may use them too. Copies are not
	// limited. A value below the driver's minimum (8 on an H100) is refused with
	// ErrInvalidArgument. The option needs a driver of CUDA 12.5 or later.
	MaxMultiprocessors int
}

// PoolStreams is the number of streams in LibTorch's pool for each device and priority.
const PoolStreams = 32

// NewStream returns the next stream of LibTorch's pool. The pool has [PoolStreams] streams for each
// device and priority and hands them out in turn to all callers in the process. The 33rd call
// returns the first stream again (the two are ==), and the work of both then runs in one queue.
// Take the streams of long-lived parts once and keep them, or use [NewOwnedStream], whose streams
// are exclusive.
//
// A pool stream is not ordered against the default stream: it has to [Stream.Wait] for the default
// stream before it reads a result that was queued there.
func NewStream(d Device, o StreamOptions) (Stream, error) {
	if err := d.gpu("NewStream"); err != nil {
		return Stream{}, err
	}
	if o.MaxMultiprocessors != 0 {
		return Stream{}, fmt.Errorf(
			"%w: cuda: NewStream: the pool's streams have no StreamOptions.MaxMultiprocessors: use "+
				"NewOwnedStream", ErrInvalidArgument)
	}
	s, err := capi.StreamFromPool(int32(d), int32(max(math.MinInt32, min(o.Priority, math.MaxInt32))))
	return Stream{s}, checked(err)
}

// PriorityRange returns the range of stream priorities in CUDA's terms: least is 0, and greatest,
// the most urgent, is negative.
func PriorityRange() (least, greatest int, err error) {
	l, g, err := capi.StreamPriorityRange()
	return int(l), int(g), checked(err)
}

// DefaultStream returns the device's default stream, which receives the work of goroutines that
// have set no other stream. It does not fail, even if the device does not exist. Calls that use the
// stream then fail.
func DefaultStream(d Device) Stream { return Stream{capi.Stream{ID: 0, Device: int32(d)}} }

// ExternalStream wraps a cudaStream_t that other code made on device d. That code keeps ownership
// of the stream, and must not destroy it before the last tensor that was used on the stream is
// freed. Handle 0 is the default stream. The special handles cudaStreamLegacy (1) and
// cudaStreamPerThread (2) are refused with [ErrInvalidArgument].
//
// ExternalStream checks that the handle's device is d. The result is not == to a Stream of the pool
// with the same handle, but [Stream.SameQueue] reports that the two are one queue. Call
// [Stream.Forget] before the other code destroys the stream.
func ExternalStream(handle uintptr, d Device) (Stream, error) {
	if err := d.gpu("ExternalStream"); err != nil {
		return Stream{}, err
	}
	s, err := capi.ExternalStream(handle, int32(d))
	return Stream{s}, checked(err)
}

// Forget ends the use of a stream of [ExternalStream]; call it before the other code destroys the
// stream. Every later call with the stream is refused with [ErrInvalidArgument] instead of reaching
// a destroyed stream, until the handle is wrapped again. For a stream that ExternalStream did not
// return, Forget returns ErrInvalidArgument.
func (s Stream) Forget() error { return checked(capi.ForgetStream(s.s)) }

// SameQueue reports whether the two streams are one queue, so that their work runs one after the
// other. That is the case if they are == (such as the pool's 33rd stream and its first), or if both
// stand for the same CUDA stream.
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

// Wait orders s after other. Work that is queued on s after the call starts only when everything
// that was queued on other before the call is done. The host does not wait. The streams may belong
// to two devices.
func (s Stream) Wait(other Stream) error { return WaitCUDAStream(s, other) }

// WaitEvent orders s after the latest Record of e. Work that is queued on s after the call starts
// only when the work before that record is done. The host does not wait. A later Record of e does
// not change this wait. An event that was never recorded orders nothing and is refused with
// [ErrNotRecorded].
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

// Capturing reports whether work that is queued on the stream is captured into a graph now, by any
// goroutine or by other code of the process.
func (s Stream) Capturing() (bool, error) {
	capturing, err := s.s.Capturing()
	return capturing, checked(err)
}

// Query reports whether all work queued on the stream so far is done. It does not wait. Query
// and Synchronize return [ErrCapture], without harm to the capture, while the stream is captured,
// and in a captured function.
func (s Stream) Query() (done bool, err error) {
	done, err = s.s.Query()
	return done, checked(err)
}

// Synchronize blocks until all work queued on the stream so far is done. It also blocks the
// goroutine's OS thread; other goroutines continue.
func (s Stream) Synchronize() error { return checked(s.s.Synchronize()) }

// Handle returns the stream's cudaStream_t, for code that calls CUDA directly. The package keeps
// the ownership of the handle and never destroys it.
func (s Stream) Handle() (uintptr, error) {
	h, err := s.s.Handle()
	return h, checked(err)
}

// Priority returns the stream's priority: 0 is normal, lower values are more urgent.
func (s Stream) Priority() (int, error) {
	p, err := s.s.Priority()
	return int(p), checked(err)
}

// CAPI returns the stream in the form in which this module's other packages pass it to the C++
// side.
func (s Stream) CAPI() capi.Stream { return s.s }
