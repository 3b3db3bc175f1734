package cuda

import (
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// AllocatorStats says how LibTorch's caching allocator keeps a device's memory, beside the bytes of
// [MemoryStats]. Counts are since the start of the process unless said otherwise.
type AllocatorStats struct {
	RequestedBytes    int64 // what live tensors asked for; MemoryStats.Allocated has it rounded up to blocks
	ActiveBytes       int64 // in blocks that are live, or freed but still used by a recorded stream
	SplitBytes        int64 // free parts of segments that are in use elsewhere: they cannot be given back (fragmentation)
	Allocations       int64 // live now
	TotalAllocations  int64
	Segments          int64 // pieces held from the driver now
	DriverAllocations int64 // calls of cudaMalloc: in steady state this stands still
	DriverFrees       int64
	Retries           int64 // the cache was given back to make room: slow, since it waits for the device
	OutOfMemory       int64 // there was no room even so
}

// Allocator returns the state of the device's caching allocator.
func (d Device) Allocator() (AllocatorStats, error) {
	if err := d.gpu("Device.Allocator"); err != nil {
		return AllocatorStats{}, err
	}
	s, err := capi.DeviceAllocator(int32(d))
	return AllocatorStats(s), checked(err)
}

// LimitMemory lets the caching allocator take at most this share of the device's memory, over 0 to
// 1, from the driver. Beyond it allocations fail with [ErrOutOfMemory].
func (d Device) LimitMemory(fraction float64) error {
	if err := d.gpu("Device.LimitMemory"); err != nil {
		return err
	}
	return checked(capi.LimitMemory(int32(d), fraction))
}

// CanAccessPeer reports whether the device reads and writes the memory of peer by itself, over
// NVLink or PCI Express. Copies between the two are then direct; otherwise the driver takes them
// through the host. A device can access itself.
func (d Device) CanAccessPeer(peer Device) (bool, error) {
	if err := errors.Join(d.gpu("Device.CanAccessPeer"), peer.gpu("Device.CanAccessPeer")); err != nil {
		return false, err
	}
	can, err := capi.CanAccessPeer(int32(d), int32(peer))
	return can, checked(err)
}

// MemoryPool is a part of the caching allocator of its own. What is allocated in it shares no
// segment with other memory, so it neither fragments that nor is fragmented by it, and goes back to
// the driver whole.
//
// It may be used by any number of goroutines, one after the other: [MemoryPool.Use] takes turns. It
// should be closed; one that becomes unreachable before is closed by the garbage collector, some
// time.
type MemoryPool struct {
	*memoryPool
	cleanup runtime.Cleanup
}

type memoryPool struct {
	mu     sync.Mutex
	c      *capi.MemoryPool // nil: closed
	device Device
	user   atomic.Int64 // the OS thread that Use has locked; 0: none
	free   func(*capi.MemoryPool) error
}

// NewMemoryPool makes a pool on the device. It takes no memory yet.
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
	p := &MemoryPool{memoryPool: &memoryPool{c: c, device: d, free: free}}
	p.cleanup = runtime.AddCleanup(p, func(inner *memoryPool) {
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

// Use runs fn, and what fn allocates on the pool's device comes from the pool. For that time the
// goroutine is locked to its OS thread. It holds for fn's own goroutine alone: not for those that
// fn starts, nor for what backward allocates on the threads of LibTorch. While fn runs, other
// goroutines' Use waits, and every allocation in the process is a little slower, and memory that is
// freed after RecordStream comes back only when no Use of any pool is running: with Uses that
// always overlap, never. Inside fn, another Use of the same pool and its Close are refused with
// [ErrInvalidArgument], [Capture] with [ErrCapture], and [EmptyCache] with [ErrBusy]; Use inside a
// captured function is [ErrCapture].
//
// It returns fn's error. Everything is undone also when fn panics or ends the goroutine.
func (p *MemoryPool) Use(fn func() error) (err error) {
	if p == nil || p.memoryPool == nil || fn == nil {
		return invalid("MemoryPool.Use", "a nil or zero MemoryPool, or no function to call: NewMemoryPool makes pools")
	}
	if p.inside() {
		return invalid("MemoryPool.Use", "this goroutine is inside a Use of the pool already")
	}
	// Before it waits for a Use in another goroutine, which may wait for the capture's end.
	if here, err := capi.CaptureHere(); err != nil {
		return checked(err)
	} else if here {
		return &Error{Code: capi.CodeCapture, Origin: "MemoryPool.Use", Message: "entering a memory pool is not possible while a graph is captured: what the function allocates is the graph's"}
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
			err = errors.Join(err, fmt.Errorf("the memory pool could not be left, and its goroutine stays locked to its OS thread: %w", left))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// Bytes returns how much memory the pool holds from the driver, and how much of it is in live
// tensors. It walks the allocator's segments: not for every step. It waits for a Use in another
// goroutine; in a captured function that is [ErrBusy] instead.
func (p *MemoryPool) Bytes() (reserved, allocated int64, err error) {
	if p == nil || p.memoryPool == nil {
		return 0, 0, invalid("MemoryPool.Bytes", "a nil or zero MemoryPool: NewMemoryPool makes pools")
	}
	if !p.inside() {
		if err := p.lock("MemoryPool.Bytes"); err != nil {
			return 0, 0, err
		}
		defer p.mu.Unlock()
	}
	if p.c == nil {
		return 0, 0, ErrClosed
	}
	reserved, allocated, err = capi.MemoryPoolBytes(p.c)
	return reserved, allocated, checked(err)
}

// Close ends the pool. Tensors in it stay good: when they are freed their memory goes back to the
// driver, at the allocator's next need or with [EmptyCache]. It waits for a Use that runs in
// another goroutine; in a captured function that is [ErrBusy] instead, and inside the goroutine's
// own Use it is [ErrInvalidArgument]: nothing was done then, and it may be called again. Captures
// and other pools in use are no hindrance: what is free then goes back at the next Capture or the
// next pool's Close. Further calls, and calls on nil, do nothing and return nil.
func (p *MemoryPool) Close() error {
	if p == nil || p.memoryPool == nil {
		return nil
	}
	err := p.close()
	if !refused(err) {
		p.cleanup.Stop()
	}
	return checked(err)
}

// refused reports that close has done nothing.
func refused(err error) bool { return errors.Is(err, ErrInvalidArgument) || errors.Is(err, ErrBusy) }

func (p *memoryPool) close() error {
	if p.inside() {
		return invalid("MemoryPool.Close", "this goroutine is inside a Use of the pool: leave it first")
	}
	if err := p.lock("MemoryPool.Close"); err != nil {
		return err
	}
	defer p.mu.Unlock()
	if p.c == nil {
		return nil
	}
	err := p.free(p.c)
	if !refused(err) {
		p.c = nil
	}
	return err
}

// lock waits for a Use in another goroutine, but not in a captured function: that Use may wait for
// the capture's end.
func (p *memoryPool) lock(origin string) error {
	if p.mu.TryLock() {
		return nil
	}
	if here, err := capi.CaptureHere(); err != nil {
		return err
	} else if here {
		return &Error{Code: capi.CodeBusy, Origin: origin, Message: "another goroutine is inside a Use of the pool, and a captured function does not wait for it: call again after the capture"}
	}
	p.mu.Lock()
	return nil
}

// inside reports whether the calling goroutine is inside a Use of the pool: it alone runs on that
// thread.
func (p *memoryPool) inside() bool {
	user := p.user.Load()
	return user != 0 && user == capi.ThreadID()
}
