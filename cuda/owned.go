package cuda

import (
	"log/slog"
	"math"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// OwnedStream is an exclusive stream. The streams of [NewStream] may be shared instead. Use an
// OwnedStream for long-lived parts of a program, and if you need more streams than the pool's 32.
// Use its Stream like any other stream.
//
// Close every OwnedStream. The package does not take back a stream that becomes unreachable before
// its Close, since copies of its Stream may exist; [Leaks] counts it.
type OwnedStream struct {
	Stream
	multiprocessors int
	made            origin.Origin
	closed          atomic.Bool
	cleanup         runtime.Cleanup
}

// NewOwnedStream returns an exclusive stream on the device, with the requested priority and no work
// on it. The stream is not ordered against the default stream. Only the driver's memory bounds the
// number of owned streams; the hardware works on some tens of queues at a time. NewOwnedStream does
// not wait for the device.
func NewOwnedStream(d Device, o StreamOptions) (*OwnedStream, error) {
	if err := d.gpu("NewOwnedStream"); err != nil {
		return nil, err
	}
	clamped := func(n int) int32 { return int32(max(math.MinInt32, min(n, math.MaxInt32))) }
	if o.MaxMultiprocessors == 0 {
		s, err := capi.NewStream(int32(d), clamped(o.Priority))
		if err != nil {
			return nil, checked(err)
		}
		return newOwnedStream(Stream{s}), nil
	}
	s, count, err := capi.NewBoundedStream(int32(d), clamped(o.Priority), clamped(o.MaxMultiprocessors))
	if err != nil {
		return nil, checked(err)
	}
	own := newOwnedStream(Stream{s})
	own.multiprocessors = int(count)
	return own, nil
}

// NewSideStream returns an exclusive stream with the device and the priority of another stream, for
// work that runs in parallel with that stream. Nothing orders the two streams: see [Fork].
// NewSideStream does not wait for the device.
func NewSideStream(of Stream) (*OwnedStream, error) {
	priority, err := of.Priority()
	if err != nil {
		return nil, err
	}
	_, greatest, err := PriorityRange()
	if err != nil {
		return nil, err
	}
	// An external stream may have a priority beyond LibTorch's.
	return NewOwnedStream(of.Device(), StreamOptions{Priority: max(priority, greatest)})
}

// Multiprocessors returns the number of multiprocessors that run the stream's kernels, as limited
// by StreamOptions.MaxMultiprocessors. 0 means all.
func (o *OwnedStream) Multiprocessors() int { return o.multiprocessors }

func newOwnedStream(s Stream) *OwnedStream {
	o := &OwnedStream{Stream: s, made: origin.New("stream")}
	o.cleanup = runtime.AddCleanup(o, lostStream.report, lostStream{o.made, s})
	return o
}

// lostStream is an OwnedStream that the garbage collector has found.
type lostStream struct {
	made   origin.Origin
	stream Stream
}

func (l lostStream) report() {
	leakedStreams.Add(1)
	l.made.Leaked()
	l.made.Closed()
	slog.Debug("cuda: an OwnedStream became unreachable before Close; it is not used again", "stream",
		l.stream.String())
}

// Close returns the stream to the package. It does not wait: queued work continues, and the stream
// gets its next owner only when that work is done. The stream must not be current on any goroutine.
// Every later call with the stream, or a copy of it, returns [ErrInvalidArgument], until the stream
// has another owner. Such calls then reach the new owner's stream. The CUDA stream itself is not
// destroyed, because LibTorch remembers the streams on which memory was used and operators ran,
// even after their owners have gone.
//
// While the stream is being captured, Close returns an error and does not return the stream. It may
// then be called again. Further calls, and calls on nil, do nothing and return nil.
func (o *OwnedStream) Close() error {
	if o == nil || o.closed.Swap(true) {
		return nil
	}
	if err := capi.FreeStream(o.s); err != nil {
		o.closed.Store(false)
		return checked(err)
	}
	o.cleanup.Stop()
	o.made.Closed()
	return nil
}
