package cuda

import "sync/atomic"

var leakedGraphs, leakedEvents, leakedStreams, leakedPinned, leakedPinnedBytes atomic.Int64

// LeakCounts counts the objects that became unreachable without a Close, by kind.
type LeakCounts struct {
	Events int64 // the collector freed them
	Graphs int64 // the collector freed them
	// Streams counts OwnedStreams. They are not returned to the package, since copies of their
	// Stream may exist.
	Streams int64
	// Pinned counts buffers. They are not freed, since slices of the memory may exist.
	Pinned      int64
	PinnedBytes int64
}

// Leaks returns the counts since the start of the process. The garbage collector finds an object
// some time after it became unreachable. slog.Debug also logs each object. In a build with the tag
// debug, package leaks reports where the program made them.
func Leaks() LeakCounts {
	return LeakCounts{
		Events:      leakedEvents.Load(),
		Graphs:      leakedGraphs.Load(),
		Streams:     leakedStreams.Load(),
		Pinned:      leakedPinned.Load(),
		PinnedBytes: leakedPinnedBytes.Load(),
	}
}
