//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_device_get_info
#cgo nocallback ts_device_get_info
#cgo noescape ts_device_get_memory
#cgo nocallback ts_device_get_memory
#cgo noescape ts_stream_from_pool
#cgo nocallback ts_stream_from_pool
#cgo noescape ts_stream_get_default
#cgo nocallback ts_stream_get_default
#cgo noescape ts_stream_from_handle
#cgo nocallback ts_stream_from_handle
#cgo nocallback ts_stream_forget
#cgo noescape ts_stream_acquire
#cgo nocallback ts_stream_acquire
#cgo noescape ts_stream_acquire_bounded
#cgo nocallback ts_stream_acquire_bounded
#cgo nocallback ts_stream_release
#cgo noescape ts_stream_is_same
#cgo nocallback ts_stream_is_same
#cgo noescape ts_stream_get_handle
#cgo nocallback ts_stream_get_handle
#cgo noescape ts_stream_get_priority
#cgo nocallback ts_stream_get_priority
#cgo noescape ts_stream_get_priority_range
#cgo nocallback ts_stream_get_priority_range
#cgo noescape ts_stream_is_capturing
#cgo nocallback ts_stream_is_capturing
#cgo noescape ts_event_get_handle
#cgo nocallback ts_event_get_handle
#cgo noescape ts_stream_query
#cgo nocallback ts_stream_query
#cgo noescape ts_get_current_cuda_stream
#cgo nocallback ts_get_current_cuda_stream
#cgo nocallback ts_set_cuda_stream
#cgo nocallback ts_wait_cuda_stream
#cgo noescape ts_stream_guard_enter
#cgo nocallback ts_stream_guard_enter
#cgo nocallback ts_stream_guard_exit
#cgo noescape ts_event_new
#cgo nocallback ts_event_new
#cgo noescape ts_event_query
#cgo nocallback ts_event_query
#cgo noescape ts_event_get_elapsed
#cgo nocallback ts_event_get_elapsed
#cgo noescape ts_pinned_new
#cgo nocallback ts_pinned_new
*/
import "C"

import (
	"time"
	"unsafe"
)

const (
	DeviceCPU     = C.TS_DEVICE_CPU
	DeviceCurrent = C.TS_DEVICE_CURRENT
)

func DeviceCount() int {
	if Check() != nil {
		return 0
	}
	return int(C.ts_device_count())
}

type DeviceProperties struct {
	Name            string
	Major, Minor    int
	Multiprocessors int
	AsyncEngines    int
	TotalBytes      int64
}

func DescribeDevice(device int32) (DeviceProperties, error) {
	if err := Check(); err != nil {
		return DeviceProperties{}, err
	}
	p := C.ts_device_info{size: C.sizeof_ts_device_info}
	if err := failure(C.ts_device_get_info(C.int32_t(device), &p)); err != nil {
		return DeviceProperties{}, err
	}
	return DeviceProperties{C.GoString(&p.name[0]), int(p.major), int(p.minor), int(p.multiprocessors),
		int(p.async_engines), int64(p.total_bytes)}, nil
}

// MemoryStats has the fields of ts_device_memory, all in bytes.
type MemoryStats struct {
	Allocated, PeakAllocated, Reserved, PeakReserved, Free, Total int64
}

func DeviceMemory(device int32) (MemoryStats, error) {
	if err := Check(); err != nil {
		return MemoryStats{}, err
	}
	computing.enter()
	defer computing.leave()
	m := C.ts_device_memory{size: C.sizeof_ts_device_memory}
	if err := failure(C.ts_device_get_memory(C.int32_t(device), &m)); err != nil {
		return MemoryStats{}, err
	}
	return MemoryStats{int64(m.allocated_bytes), int64(m.peak_allocated_bytes), int64(m.reserved_bytes),
		int64(m.peak_reserved_bytes), int64(m.free_bytes), int64(m.total_bytes)}, nil
}

func ResetPeak(device int32) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_device_reset_peak_memory(C.int32_t(device)))
}

func EmptyCache() error {
	return awaitCapture(func() error { return failure(C.ts_allocator_empty_cache()) })
}

func SynchronizeDevice(device int32) error {
	wait := func() error {
		return awaitCapture(func() error { return failure(C.ts_device_synchronize(C.int32_t(device))) })
	}
	s := sanitizer.Load()
	if s == nil {
		return wait()
	}
	return s.call(wait, func() {
		s.freed("Device.Synchronize")
		s.check.WaitAll(device)
	})
}

// Stream has the layout of ts_stream.
type Stream struct {
	ID     int64
	Device int32
}

func (s Stream) c() C.ts_stream { return C.ts_stream{id: C.int64_t(s.ID), device: C.int32_t(s.Device)} }

func cstream(s *Stream) *C.ts_stream { return (*C.ts_stream)(unsafe.Pointer(s)) }

func StreamFromPool(device, priority int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	computing.enter() // the first call creates the device's stream pools
	defer computing.leave()
	err = failure(C.ts_stream_from_pool(C.int32_t(device), C.int32_t(priority), cstream(&s)))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.madeStream(s, "cuda.NewStream", true)
	}
	return s, err
}

func DefaultStream(device int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	err = failure(C.ts_stream_get_default(C.int32_t(device), cstream(&s)))
	return s, err
}

func ExternalStream(handle uintptr, device int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	err = failure(C.ts_stream_from_handle(C.uintptr_t(handle), C.int32_t(device), cstream(&s)))
	return s, err
}

func ForgetStream(s Stream) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_stream_forget(s.c()))
}

func NewStream(device, priority int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_stream_acquire(C.int32_t(device), C.int32_t(priority), cstream(&s)))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.madeStream(s, "cuda.NewOwnedStream", false)
	}
	return s, err
}

// NewBoundedStream is NewStream for a stream whose kernels run on at most maxMultiprocessors
// multiprocessors. It also returns their number, 0 for all.
func NewBoundedStream(device, priority, maxMultiprocessors int32) (s Stream, multiprocessors int32, err error) {
	if err := Check(); err != nil {
		return s, 0, err
	}
	computing.enter()
	defer computing.leave()
	var count C.int32_t
	err = failure(C.ts_stream_acquire_bounded(C.int32_t(device), C.int32_t(priority),
		C.int32_t(maxMultiprocessors), cstream(&s), &count))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.madeStream(s, "cuda.NewOwnedStream", false)
	}
	return s, int32(count), err
}

func FreeStream(s Stream) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_stream_release(s.c()))
}

func SameStream(a, b Stream) (bool, error) {
	if err := Check(); err != nil {
		return false, err
	}
	var same C.bool
	err := failure(C.ts_stream_is_same(a.c(), b.c(), &same))
	return bool(same), err
}

func (s Stream) Handle() (uintptr, error) {
	if err := Check(); err != nil {
		return 0, err
	}
	var h C.uintptr_t
	err := failure(C.ts_stream_get_handle(s.c(), &h))
	return uintptr(h), err
}

func (s Stream) Priority() (int32, error) {
	if err := Check(); err != nil {
		return 0, err
	}
	var p C.int32_t
	err := failure(C.ts_stream_get_priority(s.c(), &p))
	return int32(p), err
}

func StreamPriorityRange() (least, greatest int32, err error) {
	if err := Check(); err != nil {
		return least, greatest, err
	}
	var l, g C.int32_t
	err = failure(C.ts_stream_get_priority_range(&l, &g))
	return int32(l), int32(g), err
}

func (s Stream) Query() (bool, error) {
	if err := Check(); err != nil {
		return false, err
	}
	var done C.bool
	err := failure(C.ts_stream_query(s.c(), &done))
	if on := sanitizer.Load(); on != nil && err == nil && bool(done) {
		on.synchronized(s)
	}
	return bool(done), err
}

func (s Stream) Synchronize() error {
	if err := Check(); err != nil {
		return err
	}
	waiting.enter()
	defer waiting.leave()
	wait := func() error { return failure(C.ts_stream_synchronize(s.c())) }
	on := sanitizer.Load()
	if on == nil {
		return wait()
	}
	return on.call(wait, func() {
		on.freed("Stream.Synchronize")
		on.synchronized(s)
	})
}

func GetCurrentCUDAStream(device int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	err = failure(C.ts_get_current_cuda_stream(C.int32_t(device), cstream(&s)))
	return s, err
}

func SetCUDAStream(s Stream) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_set_cuda_stream(s.c()))
}

func WaitCUDAStream(waiter, on Stream) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_wait_cuda_stream(waiter.c(), on.c()))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.wait(waiter, on)
	}
	return err
}

// StreamGuard has the layout of ts_stream_guard.
type StreamGuard struct {
	Thread, Serial uint64
}

func StreamGuardEnter(s Stream) (g StreamGuard, err error) {
	if err := Check(); err != nil {
		return g, err
	}
	err = failure(C.ts_stream_guard_enter(s.c(), (*C.ts_stream_guard)(unsafe.Pointer(&g))))
	return g, err
}

func (g StreamGuard) Exit() error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_stream_guard_exit(C.ts_stream_guard{thread: C.uint64_t(g.Thread),
		serial: C.uint64_t(g.Serial)}))
}

// Event is a ts_event.
type Event = C.ts_event

const (
	EventTiming   = C.TS_EVENT_FLAG_TIMING
	EventBlocking = C.TS_EVENT_FLAG_BLOCKING
)

func NewEvent(flags int32) (e *Event, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_event_new(C.int32_t(flags), &e))
	if s := sanitizer.Load(); s != nil && err == nil && flags&EventExternal != 0 {
		s.check.External(eventKey(e))
	}
	return e, err
}

// FreeEvent destroys the CUDA event, which takes the driver's lock.
func FreeEvent(e *Event) {
	computing.enter()
	if s := sanitizer.Load(); s != nil {
		s.dropped(e)
	}
	C.ts_event_free(e)
	computing.leave()
}

// DelayStream keeps the stream busy for at least d.
func DelayStream(s Stream, d time.Duration) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return failure(C.ts_stream_delay(s.c(), C.int64_t(d.Nanoseconds())))
}

func RecordEvent(e *Event, s Stream) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_event_record(e, s.c()))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.recorded(e, s)
	}
	return err
}

func StreamWaitEvent(s Stream, e *Event) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_stream_wait_event(s.c(), e))
	if on := sanitizer.Load(); on != nil {
		on.awaited(s, e, err)
	}
	return err
}

// Capturing reports whether work queued on the stream is captured.
func (s Stream) Capturing() (bool, error) {
	if err := Check(); err != nil {
		return false, err
	}
	var capturing C.bool
	err := failure(C.ts_stream_is_capturing(s.c(), &capturing))
	return bool(capturing), err
}

// EventHandleOf returns the device of the event's records and its cudaEvent_t.
func EventHandleOf(e *Event) (device int32, handle uintptr, err error) {
	var d C.int32_t
	var h C.uintptr_t
	err = failure(C.ts_event_get_handle(e, &d, &h))
	return int32(d), uintptr(h), err
}

const EventExternal = C.TS_EVENT_FLAG_EXTERNAL

func QueryEvent(e *Event) (bool, error) {
	var done C.bool
	err := failure(C.ts_event_query(e, &done))
	if s := sanitizer.Load(); s != nil && err == nil && bool(done) {
		s.reached(e)
	}
	return bool(done), err
}

func SynchronizeEvent(e *Event) error {
	waiting.enter()
	defer waiting.leave()
	err := failure(C.ts_event_synchronize(e))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.reached(e)
	}
	return err
}

// EventElapsed returns the nanoseconds between two events recorded with timing.
func EventElapsed(start, end *Event) (int64, error) {
	var ns C.int64_t
	err := failure(C.ts_event_get_elapsed(start, end, &ns))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.reached(start)
		s.reached(end)
	}
	return int64(ns), err
}

// Pinned is a ts_pinned.
type Pinned = C.ts_pinned

func NewPinned(bytes int) (p *Pinned, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	waiting.enter()
	defer waiting.leave()
	err = failure(C.ts_pinned_new(C.size_t(bytes), &p))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.pinned(p)
	}
	return p, err
}

// PinnedBytes returns the buffer's memory without copying. The slice is valid until the buffer is
// freed; the Go garbage collector does not keep the buffer alive for it.
func PinnedBytes(p *Pinned) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(C.ts_pinned_data(p))), int(C.ts_pinned_size(p)))
}

// FreePinned frees the buffer. It may wait for the device, because the driver unmaps the memory.
func FreePinned(p *Pinned) error {
	waiting.enter()
	defer waiting.leave()
	s := sanitizer.Load()
	if s == nil {
		return failure(C.ts_pinned_destroy(p))
	}
	// The checker may read the memory whenever a goroutine waits, so it must forget the memory
	// first.
	b := PinnedBytes(p)
	s.unpinned(uintptr(unsafe.Pointer(unsafe.SliceData(b))), uintptr(len(b)))
	err := failure(C.ts_pinned_destroy(p))
	if err != nil {
		s.pinned(p)
	}
	return err
}

func PinnedBytesLive() int64 {
	if Check() != nil {
		return 0
	}
	return int64(C.ts_pinned_live_bytes())
}

func ThreadCount() int64 {
	if Check() != nil {
		return 0
	}
	return int64(C.ts_thread_count())
}
func ThreadID() int64 {
	if Check() != nil {
		return 0
	}
	return int64(C.ts_thread_id())
}

// LibraryThreads returns the number of OS threads with handles of cuBLAS and similar libraries.
func LibraryThreads() int64 {
	if Check() != nil {
		return 0
	}
	return int64(C.ts_library_thread_count())
}
