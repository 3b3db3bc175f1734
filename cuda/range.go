package cuda

import (
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Range starts a named time range and returns the function that ends it. Profilers (Nsight Systems,
// and package trace) show the range together with the device's work:
//
//	defer cuda.Range("forward")()
//
// The range is an NVTX range that belongs to no thread (nvtxRangeStart). It may start and end on
// different goroutines and threads, and ranges need not nest. Ending a range again does nothing.
// The range measures the host: kernels that were queued in the range may run after it.
//
// Without a listening profiler, a range costs a few nanoseconds and allocates nothing. Any
// goroutine may call Range, also without a GPU.
func Range(name string) (end func()) {
	if !capi.RangeListening() {
		return func() {}
	}
	// Ignore the error: only running out of memory causes it, and a name does not justify an error
	// in every caller.
	id, _ := capi.StartRange(name)
	var ended atomic.Bool
	return func() {
		if !ended.Swap(true) {
			capi.EndRange(id)
		}
	}
}

// Mark names a point in time, as [Range] names a time range.
func Mark(name string) {
	if capi.RangeListening() {
		capi.MarkRange(name)
	}
}
