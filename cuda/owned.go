package cuda

import (
	"log/slog"
	"math"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// OwnedStream is a stream that nobody else gets, where those of [NewStream] may be shared: for
// long-lived parts of a program, and when more than the pool's 32 are wanted. Its Stream is used
// like any other.
//
// It must be closed. One that becomes unreachable before is not taken back, since copies of its
// Stream may be anywhere: [Leaks] counts it.
type OwnedStream struct {
	Stream
	closed  atomic.Bool
	cleanup runtime.Cleanup
}

// NewOwnedStream returns a stream of its owner's alone, on the device and of the priority asked
// for, with no work on it. It is not ordered against the default stream. How many there are is
// bounded by the driver's memory alone; the hardware works on some tens of queues at a time. It
// does not wait for the device.
func NewOwnedStream(d Device, o StreamOptions) (*OwnedStream, error) {
	if err := d.gpu("NewOwnedStream"); err != nil {
		return nil, err
	}
	s, err := capi.NewStream(int32(d), int32(max(math.MinInt32, min(o.Priority, math.MaxInt32))))
	if err != nil {
		return nil, checked(err)
	}
	return newOwnedStream(Stream{s}), nil
}

func newOwnedStream(s Stream) *OwnedStream {
	o := &OwnedStream{Stream: s}
	o.cleanup = runtime.AddCleanup(o, func(s Stream) {
		leakedStreams.Add(1)
		slog.Debug("cuda: an OwnedStream became unreachable before Close; it is not used again", "stream", s.String())
	}, s)
	return o
}

// Close gives the stream back. It waits for nothing: work that is queued goes on, and the stream
// gets its next owner only when that is done. It must not be current on any goroutine any more.
// Every later call with the stream, or a copy of it, is refused with [ErrInvalidArgument] (until it
// has another owner, whose it then is). The CUDA stream itself is kept, because LibTorch remembers
// the streams on which memory was used and operators ran longer than their owners do.
//
// A stream that is being captured is not given back: that is an error, and Close may be called
// again. Further calls, and calls on nil, do nothing and return nil.
func (o *OwnedStream) Close() error {
	if o == nil || o.closed.Swap(true) {
		return nil
	}
	if err := capi.FreeStream(o.s); err != nil {
		o.closed.Store(false)
		return checked(err)
	}
	o.cleanup.Stop()
	return nil
}
