package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// AllocatorStats describes how LibTorch's caching allocator uses a device's memory, in addition to
// the byte counts of [MemoryStats]. Counts are since the start of the process unless their comment
// says otherwise.
type AllocatorStats struct {
	// RequestedBytes is the sum of the sizes that live tensors requested. MemoryStats.Allocated is
	// the same sum, rounded up to blocks.
	RequestedBytes int64
	// ActiveBytes counts blocks that are live, or freed but still used by a recorded stream.
	ActiveBytes int64
	// SplitBytes counts free parts of segments that are otherwise in use: the allocator cannot
	// return them to the driver (fragmentation).
	SplitBytes       int64
	Allocations      int64 // now live
	TotalAllocations int64
	// Segments is the number of pieces of memory now held from the driver.
	Segments int64
	// DriverAllocations counts calls of cudaMalloc. It stays constant in steady state.
	DriverAllocations int64
	DriverFrees       int64
	// Retries counts how often the allocator returned its cache to make room. A retry is slow,
	// because it waits for the device.
	Retries     int64
	OutOfMemory int64 // allocations that failed even after a retry
}

// Allocator returns the state of the device's caching allocator.
func (d Device) Allocator() (AllocatorStats, error) {
	if err := d.gpu("Device.Allocator"); err != nil {
		return AllocatorStats{}, err
	}
	s, err := capi.DeviceAllocator(int32(d))
	return AllocatorStats(s), checked(err)
}

// PinnedStats describes LibTorch's caching allocator of pinned host memory, which serves
// torch.TensorOptions.Pinned, Tensor.PinMemory and NonBlocking copies to the host. The buffers of
// [NewPinned] are not part of it: see [PinnedBytes]. Counts are since the start of the process
// unless their comment says otherwise.
type PinnedStats struct {
	// ActiveBytes is the size of live tensors, each rounded up to a power of two. LibTorch also
	// counts some freed tensors of a few bytes that graphs made.
	ActiveBytes int64
	// ReservedBytes is the size of live tensors and of the memory that is kept for later ones.
	// EmptyCache returns the latter to the driver.
	ReservedBytes int64
	PeakBytes     int64 // the maximum of ReservedBytes
	Allocations   int64 // now live
	// DriverAllocations counts calls of cudaHostAlloc, which take milliseconds. It stays constant
	// in steady state.
	DriverAllocations int64
	DriverFrees       int64
	DriverTime        time.Duration // spent in allocations and frees
}

// PinnedAllocator returns the state of LibTorch's caching allocator of pinned host memory. It
// returns [ErrNoDevice] on a machine without a GPU.
func PinnedAllocator() (PinnedStats, error) {
	s, err := capi.HostAllocator()
	if err != nil {
		return PinnedStats{}, checked(err)
	}
	return PinnedStats{
		ActiveBytes: s.ActiveBytes, ReservedBytes: s.ReservedBytes, PeakBytes: s.PeakBytes, Allocations: s.Allocations,
		DriverAllocations: s.DriverAllocations, DriverFrees: s.DriverFrees,
		DriverTime: time.Duration(s.DriverNanoseconds),
	}, nil
}

// LimitMemory limits the caching allocator to this fraction of the device's memory, greater than 0
// and at most 1. Allocations beyond the limit fail with [ErrOutOfMemory]. 1 removes the limit.
func (d Device) LimitMemory(fraction float64) error {
	if err := d.gpu("Device.LimitMemory"); err != nil {
		return err
	}
	return checked(capi.LimitMemory(int32(d), fraction))
}

// MemoryLimit returns the fraction of [Device.LimitMemory]; 1 means no limit.
func (d Device) MemoryLimit() (float64, error) {
	if err := d.gpu("Device.MemoryLimit"); err != nil {
		return 0, err
	}
	fraction, err := capi.MemoryLimit(int32(d))
	return fraction, checked(err)
}

// ConfigureAllocator changes the settings of LibTorch's allocators in the process, in the form of
// the variable PYTORCH_ALLOC_CONF: "expandable_segments:True,garbage_collection_threshold:0.8".
// Settings that are not named are reset to their defaults. Memory that is already allocated does
// not change. It needs a GPU.
func ConfigureAllocator(settings string) error { return checked(capi.ConfigureAllocator(settings)) }

// AllocatorSettings returns the settings of the latest [ConfigureAllocator]. Before the first call
// it returns the settings of the variable PYTORCH_ALLOC_CONF. Settings that the text does not name
// have their defaults. It needs a GPU.
func AllocatorSettings() (string, error) {
	s, err := capi.AllocatorSettings()
	return s, checked(err)
}

// RecordMemoryHistory starts to record the allocations and frees of all devices. It keeps the
// latest maxEntries, and drops earlier records. 0 stops the recording. [MemorySnapshot] contains
// the history. Recording makes each allocation a little slower.
func RecordMemoryHistory(maxEntries int) error {
	if maxEntries < 0 {
		return invalid("RecordMemoryHistory", "%d entries: must be 0 or more", maxEntries)
	}
	return checked(capi.RecordHistory(int64(maxEntries)))
}

// MemorySnapshot returns the segments and blocks of all caching allocators, their settings, and the
// history of [RecordMemoryHistory], as a file that PyTorch's memory viewer opens
// (https://pytorch.org/memory_viz).
func MemorySnapshot() ([]byte, error) {
	b, err := capi.DumpAllocator()
	return b, checked(err)
}

// CanAccessPeer reports whether the device reads and writes the memory of peer directly, over
// NVLink or PCI Express. Copies between the two are then direct; otherwise the driver routes them
// through the host. A device can access itself.
func (d Device) CanAccessPeer(peer Device) (bool, error) {
	if err := errors.Join(d.gpu("Device.CanAccessPeer"), peer.gpu("Device.CanAccessPeer")); err != nil {
		return false, err
	}
	can, err := capi.CanAccessPeer(int32(d), int32(peer))
	return can, checked(err)
}

// MemoryPool is a separate part of the caching allocator. Its allocations share no segment with
// other memory. It therefore neither fragments other memory nor is fragmented by it, and returns to
// the driver as a whole.
//
// Any number of goroutines may use a pool, one at a time: [MemoryPool.Use] makes the others wait.
// Close every pool. The garbage collector eventually closes a pool that becomes unreachable before
// its Close.
type MemoryPool struct {
	*memoryPool
	cleanup runtime.Cleanup
}

type memoryPool struct {
	made   origin.Origin
	mu     sync.Mutex
	c      *capi.MemoryPool // nil after Close
	device Device
	user   atomic.Int64 // the OS thread that Use has locked; 0 if none
	closed atomic.Bool
	free   func(*capi.MemoryPool) error
}

// NewMemoryPool makes an empty pool on the device.
func NewMemoryPool(d Device) (*MemoryPool, error) {
	if err := d.gpu("NewMemoryPool"); err != nil {
		return nil, err
	}
	c, err := capi.NewMemoryPool(int32(d))
	if err != nil {
		return nil, checked(err)
	}
	return newMemoryPool(c, d, capi.FreeMemoryPool), nil
}

func newMemoryPool(c *capi.MemoryPool, d Device, free func(*capi.MemoryPool) error) *MemoryPool {
	p := &MemoryPool{memoryPool: &memoryPool{made: origin.New("memory pool"), c: c, device: d, free: free}}
	p.cleanup = runtime.AddCleanup(p, func(inner *memoryPool) {
		inner.made.Leaked()
		slog.Debug("cuda: a MemoryPool became unreachable before Close; closed", "error", inner.close())
	}, p.memoryPool)
	return p
}

// Device returns the GPU that the pool belongs to.
func (p *MemoryPool) Device() Device {
	if p == nil || p.memoryPool == nil {
		return 0
	}
	return p.device
}

// Use runs fn and serves fn's allocations on the pool's device from the pool. During the call the
// goroutine is locked to its OS thread. The pool serves only fn's own goroutine: not the goroutines
// that fn starts, and not the allocations of backward on LibTorch's threads.
//
// While fn runs, a Use of the pool in another goroutine waits, and every allocation in the process
// is a little slower. Memory that is freed after RecordStream becomes available again only when no
// Use of any pool is running. If Uses always overlap, it never becomes available. Inside fn,
// another Use of the same pool and its Close return [ErrInvalidArgument], [Capture] returns
// [ErrCapture], and [EmptyCache] returns [ErrBusy]. Use inside a captured function returns
// [ErrCapture].
//
// Use returns fn's error. It also leaves the pool and unlocks the thread if fn panics or ends the
// goroutine.
func (p *MemoryPool) Use(fn func() error) (err error) {
	if p == nil || p.memoryPool == nil || fn == nil {
		return invalid("MemoryPool.Use", "the MemoryPool is nil or zero, or fn is nil: make pools with NewMemoryPool")
	}
	if p.inside() {
		return invalid("MemoryPool.Use", "this goroutine is already inside a Use of the pool")
	}
	// Check this before waiting for a Use in another goroutine, because that goroutine may wait for
	// the end of this capture.
	if here, err := capi.CaptureHere(); err != nil {
		return checked(err)
	} else if here {
		return &Error{
			Code: capi.CodeCapture, Origin: "cuda.MemoryPool.Use",
			Message: "entering a memory pool is not possible while a graph is captured: " +
				"the graph's own memory serves the captured function",
		}
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.c == nil {
		return ErrClosed
	}
	runtime.LockOSThread()
	if err := capi.EnterMemoryPool(p.c); err != nil {
		runtime.UnlockOSThread()
		return checked(err)
	}
	p.user.Store(capi.ThreadID())
	defer func() {
		p.user.Store(0)
		if left := capi.ExitMemoryPool(p.c); left != nil {
			err = errors.Join(err, fmt.Errorf(
				"leaving the memory pool failed, and its goroutine stays locked to its OS thread: %w", left))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// Bytes returns the number of bytes that the pool holds from the driver, and the number of bytes in
// live tensors. It walks the allocator's segments, so do not call it at every step. It waits for a
// Use in another goroutine. In a captured function it returns [ErrBusy] instead.
func (p *MemoryPool) Bytes() (reserved, allocated int64, err error) {
	err = p.read("MemoryPool.Bytes", func(c *capi.MemoryPool) (err error) {
		reserved, allocated, err = capi.MemoryPoolBytes(c)
		return err
	})
	return reserved, allocated, err
}

// read calls fn while no other goroutine is inside a Use of the pool.
func (p *MemoryPool) read(origin string, fn func(*capi.MemoryPool) error) error {
	if p == nil || p.memoryPool == nil {
		return invalid(origin, "the MemoryPool is nil or zero: make pools with NewMemoryPool")
	}
	if !p.inside() {
		if err := p.lock(origin); err != nil {
			return err
		}
		defer p.mu.Unlock()
	}
	if p.c == nil {
		return ErrClosed
	}
	return checked(fn(p.c))
}

// Close ends the pool. Tensors in the pool stay valid. The memory of a tensor that is freed later
// returns to the driver when the allocator next needs memory, or by [EmptyCache]. Close waits for a
// Use in another goroutine. In a captured function it returns [ErrBusy] instead. Inside the
// goroutine's own Use it returns [ErrInvalidArgument]. After any error nothing has changed, and
// Close may be called again. Close also works during captures and while other pools are in use:
// free memory then returns to the driver at the next Capture or at the next pool's Close. Further
// calls, and calls on nil, do nothing and return nil.
func (p *MemoryPool) Close() error {
	if p == nil || p.memoryPool == nil {
		return nil
	}
	err := p.close()
	if err == nil {
		p.cleanup.Stop()
	}
	return checked(err)
}

func (p *memoryPool) close() error {
	if p.inside() {
		return invalid("MemoryPool.Close", "this goroutine is inside a Use of the pool: leave the Use first")
	}
	if err := p.lock("MemoryPool.Close"); err != nil {
		return err
	}
	defer p.mu.Unlock()
	if p.c == nil {
		return nil
	}
	if err := p.free(p.c); err != nil {
		return err
	}
	p.c = nil
	p.closed.Store(true)
	p.made.Closed()
	return nil
}

// lock waits for a Use in another goroutine, except in a captured function, because the other Use
// may wait for the end of the capture.
func (p *memoryPool) lock(origin string) error {
	if p.mu.TryLock() {
		return nil
	}
	if here, err := capi.CaptureHere(); err != nil {
		return err
	} else if here {
		return &Error{
			Code: capi.CodeBusy, Origin: "cuda." + origin,
			Message: "another goroutine is inside a Use of the pool, and a captured function does not wait " +
				"for the other goroutine: call again after the capture",
		}
	}
	p.mu.Lock()
	return nil
}

// inside reports whether the calling goroutine is inside a Use of the pool. Comparing threads is
// enough, because Use locks its goroutine to the thread.
func (p *memoryPool) inside() bool {
	user := p.user.Load()
	return user != 0 && user == capi.ThreadID()
}
