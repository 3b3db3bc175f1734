//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_memory_observer_new
#cgo nocallback ts_memory_observer_new
#cgo nocallback ts_memory_observer_free
#cgo nocallback ts_memory_observer_fd
#cgo noescape ts_memory_observer_take
#cgo nocallback ts_memory_observer_take
#cgo noescape ts_allocator_get_pools
#cgo nocallback ts_allocator_get_pools
#cgo noescape ts_memory_pool_get_stats
#cgo nocallback ts_memory_pool_get_stats
#cgo noescape ts_allocator_get_settings
#cgo nocallback ts_allocator_get_settings
*/
import "C"

import "unsafe"

// MemoryObserver is a ts_memory_observer.
type MemoryObserver = C.ts_memory_observer

// OutOfMemory is a ts_out_of_memory.
type OutOfMemory struct {
	Number                                   int64
	Device                                   int32
	Snapshot                                 bool
	Wanted, Free, Limit, Allocated, Reserved int64
}

// NewMemoryObserver makes an observer. snapshotPrefix may be empty.
func NewMemoryObserver(snapshotPrefix string, maxSnapshots int64) (o *MemoryObserver, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter() // the first call may initialise CUDA
	defer computing.leave()
	var prefix *C.char
	if snapshotPrefix != "" {
		prefix = C.CString(snapshotPrefix)
		defer C.free(unsafe.Pointer(prefix))
	}
	err = failure(C.ts_memory_observer_new(prefix, C.int64_t(maxSnapshots), &o))
	return o, err
}

func FreeMemoryObserver(o *MemoryObserver) { C.ts_memory_observer_free(o) }

// MemoryObserverFD returns a file descriptor, which the observer continues to own.
func MemoryObserverFD(o *MemoryObserver) int { return int(C.ts_memory_observer_fd(o)) }

// TakeOutOfMemory returns the pending entries.
func TakeOutOfMemory(o *MemoryObserver) (all []OutOfMemory) {
	var some [16]C.ts_out_of_memory
	for n := len(some); n == len(some); {
		var count C.int64_t
		if failure(C.ts_memory_observer_take(o, &some[0], C.int64_t(len(some)), &count)) != nil {
			return all // happens only for invalid arguments
		}
		n = int(count)
		for i := range some[:n] {
			e := &some[i]
			all = append(all, OutOfMemory{
				Number: int64(e.number), Device: int32(e.device), Snapshot: bool(e.snapshot),
				Wanted: int64(e.wanted_bytes),
				Free:   int64(e.free_bytes), Limit: int64(e.limit_bytes), Allocated: int64(e.allocated_bytes),
				Reserved: int64(e.reserved_bytes),
			})
		}
	}
	return all
}

const (
	PoolDefault    = C.TS_POOL_KIND_DEFAULT
	PoolMemoryPool = C.TS_POOL_KIND_MEMORY_POOL
	PoolGraph      = C.TS_POOL_KIND_GRAPH
	PoolEnded      = C.TS_POOL_KIND_ENDED
)

// PoolStats is a ts_pool_stats.
type PoolStats struct {
	ID                                              int64
	Kind, Device                                    int32
	Reserved, Allocated, Requested, Active, MaxFree int64
	Allocations, Segments                           int64
}

func poolStats(s *C.ts_pool_stats) PoolStats {
	return PoolStats{
		ID: int64(s.id), Kind: int32(s.kind), Device: int32(s.device), Reserved: int64(s.reserved_bytes),
		Allocated: int64(s.allocated_bytes),
		Requested: int64(s.requested_bytes), Active: int64(s.active_bytes), MaxFree: int64(s.max_free_bytes),
		Allocations: int64(s.allocations), Segments: int64(s.segments),
	}
}

// Pools returns the state of every pool of the device's allocator.
func Pools(device int32) ([]PoolStats, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	for room := int64(16); ; {
		c := make([]C.ts_pool_stats, room)
		var count C.int64_t
		if err := failure(C.ts_allocator_get_pools(C.int32_t(device), &c[0], C.int64_t(room), &count)); err != nil {
			return nil, err
		}
		if int64(count) > room { // pools may be created before the next call
			room = 2 * int64(count)
			continue
		}
		all := make([]PoolStats, count)
		for i := range all {
			all[i] = poolStats(&c[i])
		}
		return all, nil
	}
}

func MemoryPoolStats(p *MemoryPool) (PoolStats, error) {
	computing.enter()
	defer computing.leave()
	var s C.ts_pool_stats
	if err := failure(C.ts_memory_pool_get_stats(p, &s)); err != nil {
		return PoolStats{}, err
	}
	return poolStats(&s), nil
}

// AllocatorSettings returns the text passed to the latest ConfigureAllocator, or set in the
// environment.
func AllocatorSettings() (string, error) {
	if err := Check(); err != nil {
		return "", err
	}
	computing.enter()
	defer computing.leave()
	for text := make([]byte, 256); ; {
		var length C.size_t
		if err := failure(C.ts_allocator_get_settings((*C.char)(unsafe.Pointer(&text[0])),
			C.size_t(len(text)), &length)); err != nil {
			return "", err
		}
		if int(length) < len(text) {
			return string(text[:length]), nil
		}
		text = make([]byte, int(length)+1)
	}
}
