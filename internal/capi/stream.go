package capi

/*
#include "torchstream.h"
#cgo noescape ts_device_describe
#cgo nocallback ts_device_describe
#cgo noescape ts_device_memory
#cgo nocallback ts_device_memory
#cgo noescape ts_stream_from_pool
#cgo nocallback ts_stream_from_pool
#cgo noescape ts_stream_default
#cgo nocallback ts_stream_default
#cgo noescape ts_stream_external
#cgo nocallback ts_stream_external
#cgo nocallback ts_stream_forget
#cgo noescape ts_stream_new
#cgo nocallback ts_stream_new
#cgo nocallback ts_stream_free
#cgo noescape ts_stream_same
#cgo nocallback ts_stream_same
#cgo noescape ts_stream_handle
#cgo nocallback ts_stream_handle
#cgo noescape ts_stream_priority
#cgo nocallback ts_stream_priority
#cgo noescape ts_stream_priority_range
#cgo nocallback ts_stream_priority_range
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
#cgo noescape ts_event_elapsed
#cgo nocallback ts_event_elapsed
#cgo noescape ts_pinned_new
#cgo nocallback ts_pinned_new
#cgo nocallback ts_noop
#cgo noescape ts_bench_add
#cgo nocallback ts_bench_add
*/
import "C"

import "unsafe"

const (
	DeviceCPU     = C.TS_DEVICE_CPU
	DeviceCurrent = C.TS_DEVICE_CURRENT
)

func DeviceCount() int { return int(C.ts_device_count()) }

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
	var p C.ts_device_properties
	if err := failure(C.ts_device_describe(C.int32_t(device), &p)); err != nil {
		return DeviceProperties{}, err
	}
	return DeviceProperties{C.GoString(&p.name[0]), int(p.major), int(p.minor), int(p.multiprocessors), int(p.async_engines), int64(p.total_bytes)}, nil
}

// MemoryStats has the layout of ts_memory_stats. All in bytes.
type MemoryStats struct {
	Allocated, PeakAllocated, Reserved, PeakReserved, Free, Total int64
}

func DeviceMemory(device int32) (m MemoryStats, err error) {
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_device_memory(C.int32_t(device), (*C.ts_memory_stats)(unsafe.Pointer(&m))))
	return m, err
}

func ResetPeak(device int32) error { return failure(C.ts_device_reset_peak(C.int32_t(device))) }

func EmptyCache() error {
	return awaitCapture(func() error { return failure(C.ts_device_empty_cache()) })
}

func SynchronizeDevice(device int32) error {
	return awaitCapture(func() error { return failure(C.ts_device_synchronize(C.int32_t(device))) })
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
	computing.enter() // the first call makes the pools of the device
	defer computing.leave()
	err = failure(C.ts_stream_from_pool(C.int32_t(device), C.int32_t(priority), cstream(&s)))
	return s, err
}

func DefaultStream(device int32) (s Stream, err error) {
	err = failure(C.ts_stream_default(C.int32_t(device), cstream(&s)))
	return s, err
}

func ExternalStream(handle uintptr, device int32) (s Stream, err error) {
	err = failure(C.ts_stream_external(C.uintptr_t(handle), C.int32_t(device), cstream(&s)))
	return s, err
}

func ForgetStream(s Stream) error { return failure(C.ts_stream_forget(s.c())) }

func NewStream(device, priority int32) (s Stream, err error) {
	if err := Check(); err != nil {
		return s, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_stream_new(C.int32_t(device), C.int32_t(priority), cstream(&s)))
	return s, err
}

func FreeStream(s Stream) error { return failure(C.ts_stream_free(s.c())) }

func SameStream(a, b Stream) (bool, error) {
	var same C.bool
	err := failure(C.ts_stream_same(a.c(), b.c(), &same))
	return bool(same), err
}

func (s Stream) Handle() (uintptr, error) {
	var h C.uintptr_t
	err := failure(C.ts_stream_handle(s.c(), &h))
	return uintptr(h), err
}

func (s Stream) Priority() (int32, error) {
	var p C.int32_t
	err := failure(C.ts_stream_priority(s.c(), &p))
	return int32(p), err
}

func StreamPriorityRange() (least, greatest int32, err error) {
	var l, g C.int32_t
	err = failure(C.ts_stream_priority_range(&l, &g))
	return int32(l), int32(g), err
}

func (s Stream) Query() (bool, error) {
	var done C.bool
	err := failure(C.ts_stream_query(s.c(), &done))
	return bool(done), err
}

func (s Stream) Synchronize() error {
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_stream_synchronize(s.c()))
}

func GetCurrentCUDAStream(device int32) (s Stream, err error) {
	err = failure(C.ts_get_current_cuda_stream(C.int32_t(device), cstream(&s)))
	return s, err
}

func SetCUDAStream(s Stream) error { return failure(C.ts_set_cuda_stream(s.c())) }

func WaitCUDAStream(waiter, on Stream) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_wait_cuda_stream(waiter.c(), on.c()))
}

// StreamGuard has the layout of ts_stream_guard.
type StreamGuard struct {
	Thread, Serial uint64
}

func StreamGuardEnter(s Stream) (g StreamGuard, err error) {
	err = failure(C.ts_stream_guard_enter(s.c(), (*C.ts_stream_guard)(unsafe.Pointer(&g))))
	return g, err
}

func (g StreamGuard) Exit() error {
	return failure(C.ts_stream_guard_exit(C.ts_stream_guard{thread: C.uint64_t(g.Thread), serial: C.uint64_t(g.Serial)}))
}

// Event is a ts_event.
type Event = C.ts_event

const (
	EventTiming   = C.TS_EVENT_TIMING
	EventBlocking = C.TS_EVENT_BLOCKING
)

func NewEvent(flags int32) (e *Event, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_event_new(C.int32_t(flags), &e))
	return e, err
}

// FreeEvent destroys the CUDA event: the driver's lock.
func FreeEvent(e *Event) {
	computing.enter()
	C.ts_event_free(e)
	computing.leave()
}

func RecordEvent(e *Event, s Stream) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_event_record(e, s.c()))
}

func StreamWaitEvent(s Stream, e *Event) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_stream_wait_event(s.c(), e))
}

func QueryEvent(e *Event) (bool, error) {
	var done C.bool
	err := failure(C.ts_event_query(e, &done))
	return bool(done), err
}

func SynchronizeEvent(e *Event) error {
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_event_synchronize(e))
}

// EventElapsed returns milliseconds.
func EventElapsed(start, end *Event) (float32, error) {
	var ms C.float
	err := failure(C.ts_event_elapsed(start, end, &ms))
	return float32(ms), err
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
	return p, err
}

// PinnedBytes returns the memory itself: valid until the buffer is freed, and not known to the Go garbage collector.
func PinnedBytes(p *Pinned) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(C.ts_pinned_data(p))), int(C.ts_pinned_size(p)))
}

// FreePinned may wait for the device: the driver unmaps the memory.
func FreePinned(p *Pinned) error {
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_pinned_free(p))
}

func PinnedBytesLive() int64 { return int64(C.ts_pinned_bytes_live()) }

func ThreadCount() int64 { return int64(C.ts_thread_count()) }
func ThreadID() int64    { return int64(C.ts_thread_id()) }
func Noop()              { C.ts_noop() }

func BenchAdd(device int32, rounds int) (inPlace, outOfPlace, held float64, err error) {
	computing.enter()
	defer computing.leave()
	var i, o, h C.double
	err = failure(C.ts_bench_add(C.int32_t(device), C.int32_t(rounds), &i, &o, &h))
	return float64(i), float64(o), float64(h), err
}
