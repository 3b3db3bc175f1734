package cuda

import (
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Range begins a range of time with a name, which profilers show beside what the device does in it
// (Nsight Systems, and package trace), and returns the function that ends it:
//
//	defer cuda.Range("forward")()
//
// A range is NVTX's of the kind that belongs to no thread (nvtxRangeStart): it may end on another
// goroutine and another thread than it began on, and ranges need not nest. Ending it again does
// nothing. It is about the host: kernels that were queued in a range may run after it.
//
// While nobody listens, a range costs a few nanoseconds and allocates nothing. Any goroutine may
// call it, without a GPU too.
func Range(name string) (end func()) {
	if !capi.RangeListening() {
		return func() {}
	}
	// The one way to fail is to run out of memory, and a name is not worth an error in every
	// caller.
	id, _ := capi.StartRange(name)
	var ended atomic.Bool
	return func() {
		if !ended.Swap(true) {
			capi.EndRange(id)
		}
	}
}

// Mark names a point in time, as [Range] does a range.
func Mark(name string) {
	if capi.RangeListening() {
		capi.MarkRange(name)
	}
}
