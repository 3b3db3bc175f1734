//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_sanitizer_take
#cgo nocallback ts_sanitizer_take
*/
import "C"

import (
	"unsafe"

	"github.com/torchstream/torchstream/internal/racecheck"
)

// entry has the layout of ts_sanitizer_entry.
type entry struct {
	kind, device            int32
	address, handle, nbytes uintptr
	ofCall                  bool
}

const (
	_ = -(unsafe.Sizeof(entry{}) ^ unsafe.Sizeof(C.ts_sanitizer_entry{}))
	_ = -(unsafe.Offsetof(entry{}.address) ^ unsafe.Offsetof(C.ts_sanitizer_entry{}.address))
	_ = -(unsafe.Offsetof(entry{}.nbytes) ^ unsafe.Offsetof(C.ts_sanitizer_entry{}.bytes))
	_ = -(unsafe.Offsetof(entry{}.ofCall) ^ unsafe.Offsetof(C.ts_sanitizer_entry{}.of_call))
)

const (
	logAllocated          = C.TS_SANITIZER_ALLOCATED
	logFreed              = C.TS_SANITIZER_FREED
	logUnmapped           = C.TS_SANITIZER_UNMAPPED
	logEventRecorded      = C.TS_SANITIZER_EVENT_RECORDED
	logEventAwaited       = C.TS_SANITIZER_EVENT_AWAITED
	logEventDeleted       = C.TS_SANITIZER_EVENT_DELETED
	logStreamSynchronized = C.TS_SANITIZER_STREAM_SYNCHRONIZED
	logEventSynchronized  = C.TS_SANITIZER_EVENT_SYNCHRONIZED
	logDeviceSynchronized = C.TS_SANITIZER_DEVICE_SYNCHRONIZED
	logRead               = C.TS_SANITIZER_READ
	logWritten            = C.TS_SANITIZER_WRITTEN
	logUsed               = C.TS_SANITIZER_USED
)

// takeLog moves the oldest log entries into room, and returns their number.
func takeLog(room []entry) int {
	return int(C.ts_sanitizer_take((*C.ts_sanitizer_entry)(unsafe.Pointer(unsafe.SliceData(room))),
		C.int64_t(len(room))))
}

// take applies LibTorch's internal actions since the last call: first the memory actions of all
// threads and the order of backward passes, in log order, and then the events and waits of this
// call. what names the call as the place of frees and allocations; at is its place, or nil. take
// returns the entries of this call, for finish.
//
// LibTorch waits for some events before an operator's work, and records others after it. So the
// events and waits of a call apply before its accesses, and again after them.
func (s *Sanitizer) take(what string, at *racecheck.Place) (own []entry) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for n := len(s.room); n == len(s.room); {
		n = s.log(s.room[:])
		for i := range s.room[:n] {
			e := &s.room[i]
			if at == nil && e.placed() {
				at = s.check.Here(what, 1)
			}
			own = s.applyLocked(e, at, own)
		}
	}
	return own
}

// placed reports whether findings may name the entry's place.
func (e *entry) placed() bool {
	switch e.kind {
	case logAllocated, logFreed, logRead, logWritten:
		return true
	}
	return false
}

// applyLocked applies an entry. It appends an entry of the calling thread's call to own.
func (s *Sanitizer) applyLocked(e *entry, at *racecheck.Place, own []entry) []entry {
	if e.ofCall {
		s.eventLocked(e)
		return append(own, *e)
	}
	switch e.kind {
	case logAllocated:
		s.check.Allocate(e.device, e.address, e.nbytes, s.handleLocked(e.device, e.handle), at)
	case logFreed:
		s.check.Free(e.device, e.address, at)
	case logUnmapped:
		s.check.Unmap(e.device, e.address, e.nbytes)
	case logRead, logWritten:
		s.accessLocked(e, at)
	case logUsed:
		s.check.Use(e.device, e.address, s.handleLocked(e.device, e.handle))
	default:
		s.eventLocked(e)
		s.endLocked(e)
	}
	return own
}

// finish applies a call's entries after its accesses.
func (s *Sanitizer) finish(own []entry) {
	if len(own) == 0 {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	for i := range own {
		s.eventLocked(&own[i])
		s.endLocked(&own[i])
	}
}

// eventLocked applies a record of a LibTorch event, or a wait for one.
func (s *Sanitizer) eventLocked(e *entry) {
	switch e.kind {
	case logEventRecorded:
		s.check.Record(e.key(), s.handleLocked(e.device, e.handle), nil)
	case logEventAwaited:
		s.check.WaitEvent(s.handleLocked(e.device, e.handle), e.key())
	case logEventSynchronized:
		s.check.WaitEvent(racecheck.Host, e.key())
	}
}

// endLocked applies the end of an event, and waits by the host for a stream or a device.
func (s *Sanitizer) endLocked(e *entry) {
	switch e.kind {
	case logEventDeleted:
		s.check.Drop(e.key(), nil)
	case logStreamSynchronized:
		s.check.Wait(racecheck.Host, s.handleLocked(e.device, e.handle))
	case logDeviceSynchronized:
		s.check.WaitAll(e.device)
	}
}

// key distinguishes LibTorch's events from this library's, which may reuse the address of a deleted
// one.
func (e *entry) key() uintptr { return e.address | 1<<63 }

// accessLocked applies a read or write by the library itself.
func (s *Sanitizer) accessLocked(e *entry, at *racecheck.Place) {
	s.check.Do(racecheck.Launch{At: at, Accesses: []racecheck.Access{{
		Memory: racecheck.Memory{Device: e.device, Storage: e.address, StorageBytes: e.nbytes,
			Region: racecheck.Bytes(e.address, e.nbytes)},
		Queue: s.handleLocked(e.device, e.handle), Write: e.kind == logWritten,
	}}})
}

// freed follows a call without accesses that may have freed tensors.
func (s *Sanitizer) freed(what string) { s.finish(s.take(what, nil)) }

// passing precedes a backward pass.
func (s *Sanitizer) passing(what string) {
	at := s.check.Here(what, 1)
	s.mu.Lock()
	s.pass = at
	s.mu.Unlock()
}

// calledBack precedes a callback's code. The pass's work so far is ordered before the callback's
// work, and is not part of it. If several passes run at once, findings may name another pass's
// place.
//
// The engine records a gradient as used on the stream of each node that receives it. The log does
// not show that.
func (s *Sanitizer) calledBack(gradients []*Tensor) {
	s.mu.Lock()
	at := s.pass
	s.mu.Unlock()
	s.finish(s.take("a backward pass", at))
	var room [16]C.ts_tensor_extent
	all := extents(room[:], gradients)
	for i := range all {
		if e := &all[i]; e.device >= 0 {
			s.check.Use(int32(e.device), uintptr(e.storage), s.queueOf(e))
		}
	}
}
