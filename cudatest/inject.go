package cudatest

import (
	"math"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// Delay queues a kernel on the stream that does nothing for at least d, up to a minute. Work queued
// on the stream later starts after it. A missing edge, a wait that another stream should have made,
// thus becomes visible: the other stream reads memory that has not been written yet. Delay itself
// does not wait. Inside a [cuda.Capture] of the stream the kernel becomes part of the graph.
func Delay(t testing.TB, s cuda.Stream, d time.Duration) {
	t.Helper()
	if err := capi.DelayStream(s.CAPI(), d); err != nil {
		t.Fatal(err)
	}
}

// Poison fills the tensors on the current stream with values that no test expects: NaN, for
// booleans true, and for integers the bytes 0xA5 (of an int64, the lower half). Poison outputs
// before the work that has to write them, so that a test can't take an earlier run's results for
// new ones.
func Poison(t testing.TB, tensors ...*torch.Tensor) {
	t.Helper()
	for _, x := range tensors {
		if err := poison(x).Err(); err != nil {
			t.Fatal(err)
		}
	}
}

func poison(x *torch.Tensor) *torch.Tensor {
	value := math.NaN()
	switch x.DType() {
	case torch.Bool:
		value = 1
	case torch.Uint8:
		value = 0xA5
	case torch.Int8:
		value = -0x5B
	case torch.Int16:
		value = -0x5A5B
	case torch.Int32, torch.Int64:
		value = -0x5A5A5A5B
	}
	return x.NoGrad().Fill_(value)
}

// OutOfMemory makes allocations of device memory fail with [cuda.ErrOutOfMemory] until the returned
// function is called, or the test ends. The allocator returns its unused memory to the driver, and
// may then reserve no more than it still holds. Small tensors may still fit into memory that is
// already reserved.
func OutOfMemory(t testing.TB, d cuda.Device) (restore func()) {
	t.Helper()
	if err := cuda.EmptyCache(); err != nil {
		t.Fatal(err)
	}
	m, err := d.Memory()
	if err != nil {
		t.Fatal(err)
	}
	before, err := d.MemoryLimit()
	if err != nil {
		t.Fatal(err)
	}
	if err := d.LimitMemory(max(float64(m.Reserved), 1) / float64(m.Total)); err != nil {
		t.Fatal(err)
	}
	restore = func() {
		t.Helper()
		if err := d.LimitMemory(before); err != nil {
			t.Errorf("lifting the limit of memory: %v", err)
		}
	}
	t.Cleanup(restore)
	return restore
}
