package cuda

import "sync/atomic"

var leakedGraphs, leakedEvents, leakedStreams, leakedPinned, leakedPinnedBytes atomic.Int64

// LeakCounts says what the garbage collector found that should have been closed.
type LeakCounts struct {
	Events      int64 // freed then
	Graphs      int64 // freed then
	Streams     int64 // owned ones; not given back, since copies of their Stream may be anywhere
	Pinned      int64 // not freed, since slices of the memory may be anywhere
	PinnedBytes int64
}

// Leaks returns the counts since the start of the process. The collector finds an object some time
// after it became unreachable; each is also logged with slog.Debug.
func Leaks() LeakCounts {
	return LeakCounts{Graphs: leakedGraphs.Load(), Events: leakedEvents.Load(), Streams: leakedStreams.Load(), Pinned: leakedPinned.Load(), PinnedBytes: leakedPinnedBytes.Load()}
}
