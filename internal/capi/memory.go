//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_allocator_get_stats
#cgo nocallback ts_allocator_get_stats
#cgo nocallback ts_allocator_limit
#cgo noescape ts_allocator_get_limit
#cgo nocallback ts_allocator_get_limit
#cgo noescape ts_allocator_configure
#cgo nocallback ts_allocator_configure
#cgo nocallback ts_allocator_record_history
#cgo noescape ts_allocator_dump
#cgo nocallback ts_allocator_dump
#cgo noescape ts_host_allocator_get_stats
#cgo nocallback ts_host_allocator_get_stats
#cgo noescape ts_device_can_access_peer
#cgo nocallback ts_device_can_access_peer
#cgo noescape ts_memory_pool_new
#cgo nocallback ts_memory_pool_new
#cgo nocallback ts_memory_pool_destroy
#cgo nocallback ts_memory_pool_enter
#cgo nocallback ts_memory_pool_exit
#cgo noescape ts_memory_pool_get_bytes
#cgo nocallback ts_memory_pool_get_bytes
#cgo noescape ts_pinned_register
#cgo nocallback ts_pinned_register
#cgo noescape ts_event_export
#cgo nocallback ts_event_export
#cgo noescape ts_event_import
#cgo nocallback ts_event_import
#cgo noescape ts_tensor_copy_peer
#cgo nocallback ts_tensor_copy_peer

#include <stdlib.h>

static void look(const uint8_t* const* at) { (void)at; }
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

type AllocatorStats struct {
	RequestedBytes, ActiveBytes, SplitBytes int64
	Allocations, TotalAllocations, Segments int64
	DriverAllocations, DriverFrees          int64
	Retries, OutOfMemory                    int64
}

func DeviceAllocator(device int32) (AllocatorStats, error) {
	if err := Check(); err != nil {
		return AllocatorStats{}, err
	}
	computing.enter()
	defer computing.leave()
	s := C.ts_allocator_stats{size: C.sizeof_ts_allocator_stats}
	if err := failure(C.ts_allocator_get_stats(C.int32_t(device), &s)); err != nil {
		return AllocatorStats{}, err
	}
	return AllocatorStats{
		RequestedBytes: int64(s.requested_bytes), ActiveBytes: int64(s.active_bytes), SplitBytes: int64(s.split_bytes),
		Allocations: int64(s.allocations), TotalAllocations: int64(s.total_allocations), Segments: int64(s.segments),
		DriverAllocations: int64(s.driver_allocations), DriverFrees: int64(s.driver_frees),
		Retries: int64(s.retries), OutOfMemory: int64(s.out_of_memory),
	}, nil
}

type HostStats struct {
	ActiveBytes, ReservedBytes, PeakBytes       int64
	Allocations, DriverAllocations, DriverFrees int64
	DriverNanoseconds                           int64
}

func HostAllocator() (HostStats, error) {
	if err := Check(); err != nil {
		return HostStats{}, err
	}
	computing.enter()
	defer computing.leave()
	s := C.ts_host_stats{size: C.sizeof_ts_host_stats}
	if err := failure(C.ts_host_allocator_get_stats(&s)); err != nil {
		return HostStats{}, err
	}
	return HostStats{
		ActiveBytes: int64(s.active_bytes), ReservedBytes: int64(s.reserved_bytes), PeakBytes: int64(s.peak_bytes),
		Allocations: int64(s.allocations), DriverAllocations: int64(s.driver_allocations),
		DriverFrees:       int64(s.driver_frees),
		DriverNanoseconds: int64(s.driver_nanoseconds),
	}, nil
}

func LimitMemory(device int32, fraction float64) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return failure(C.ts_allocator_limit(C.int32_t(device), C.double(fraction)))
}

func MemoryLimit(device int32) (float64, error) {
	if err := Check(); err != nil {
		return 0, err
	}
	computing.enter()
	defer computing.leave()
	var f C.double
	err := failure(C.ts_allocator_get_limit(C.int32_t(device), &f))
	return float64(f), err
}

func ConfigureAllocator(settings string) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return withString(settings, func(s *C.char) error { return failure(C.ts_allocator_configure(s)) })
}

func RecordHistory(maxEntries int64) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	return failure(C.ts_allocator_record_history(C.int64_t(maxEntries)))
}

// DumpAllocator returns the allocators' state in the file format of PyTorch's memory viewer.
func DumpAllocator() ([]byte, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	return written("torchstream-*.pickle", func(path *C.char) error { return failure(C.ts_allocator_dump(path)) })
}

// withString calls fn with a C string.
func withString(s string, fn func(*C.char) error) error {
	c := C.CString(s)
	defer C.free(unsafe.Pointer(c))
	return fn(c)
}

func CanAccessPeer(device, peer int32) (bool, error) {
	if err := Check(); err != nil {
		return false, err
	}
	var can C.bool
	err := failure(C.ts_device_can_access_peer(C.int32_t(device), C.int32_t(peer), &can))
	return bool(can), err
}

// MemoryPool is a ts_memory_pool.
type MemoryPool = C.ts_memory_pool

func NewMemoryPool(device int32) (p *MemoryPool, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_memory_pool_new(C.int32_t(device), &p))
	return p, err
}

// FreeMemoryPool destroys the pool. If it fails, the pool is unchanged. It may return memory to the
// driver, which then waits for the device.
func FreeMemoryPool(p *MemoryPool) error {
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_memory_pool_destroy(p))
}

func EnterMemoryPool(p *MemoryPool) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_memory_pool_enter(p))
}

func ExitMemoryPool(p *MemoryPool) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_memory_pool_exit(p))
}

func MemoryPoolBytes(p *MemoryPool) (reserved, allocated int64, err error) {
	computing.enter()
	defer computing.leave()
	var r, a C.size_t
	err = failure(C.ts_memory_pool_get_bytes(p, &r, &a))
	return int64(r), int64(a), err
}

// RegisterPinned pins memory until the buffer is freed. It refuses Go memory, unless a
// runtime.Pinner holds it.
func RegisterPinned(memory []byte) (p *Pinned, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	if mustNotKeep((*C.uint8_t)(unsafe.SliceData(memory))) {
		return nil, imagecapi.NewFailure(CodeInvalidArgument, "Go memory cannot be pinned, since the "+
			"garbage collector may reuse it: use NewPinned, or memory from mmap or C")
	}
	waiting.enter()
	defer waiting.leave()
	err = failure(C.ts_pinned_register((*C.uint8_t)(unsafe.SliceData(memory)), C.size_t(len(memory)), &p))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.pinned(p)
	}
	return p, err
}

// RegisterReadOnly lets devices read memory that is not Go's until the buffer is freed.
func RegisterReadOnly(memory []byte) (p *Pinned, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	if mustNotKeep((*C.uint8_t)(unsafe.SliceData(memory))) {
		return nil, imagecapi.NewFailure(CodeInvalidArgument, "Go memory cannot be pinned, since the "+
			"garbage collector may reuse it: use NewPinned, or memory from mmap or C")
	}
	waiting.enter()
	defer waiting.leave()
	err = failure(C.ts_pinned_register_read_only((*C.uint8_t)(unsafe.SliceData(memory)), C.size_t(len(memory)), &p))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.registered(p)
	}
	return p, err
}

// mustNotKeep reports whether C must not keep the pointer, because it points to Go memory that no
// runtime.Pinner holds. Only the Go runtime knows this: at every call into C it panics if an
// argument points to such a pointer, unless GODEBUG=cgocheck=0 disables the check.
func mustNotKeep(memory *C.uint8_t) (must bool) {
	defer func() { must = recover() != nil }()
	behind := new(*C.uint8_t)
	*behind = memory
	C.look(behind)
	return false
}

const EventInterprocess = C.TS_EVENT_FLAG_INTERPROCESS

// EventHandle identifies an event to other processes.
type EventHandle [C.TS_EVENT_HANDLE_BYTES]byte

func ExportEvent(e *Event, device int32) (h EventHandle, err error) {
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_event_export(e, C.int32_t(device), (*C.uint8_t)(&h[0])))
	return h, err
}

func ImportEvent(device int32, h EventHandle) (e *Event, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_event_import(C.int32_t(device), (*C.uint8_t)(&h[0]), &e))
	return e, err
}

// CopyPeer calls ts_tensor_copy_peer.
func CopyPeer(dstStream Stream, dst []*Tensor, srcStream Stream, src []*Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	if len(dst) != len(src) {
		return imagecapi.NewFailure(CodeInvalidArgument, "dst and src have different lengths")
	}
	s := sanitizer.Load()
	s.begin()
	defer s.end()
	err := failure(C.ts_tensor_copy_peer(dstStream.c(), unsafe.SliceData(dst), srcStream.c(),
		unsafe.SliceData(src), C.int64_t(len(dst))))
	if s != nil && err == nil {
		s.copyPeer(dstStream, dst, srcStream, src)
	}
	return err
}
