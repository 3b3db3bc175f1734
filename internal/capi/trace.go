//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_trace_get_lane
#cgo nocallback ts_trace_get_lane
#cgo noescape ts_trace_stop
#cgo nocallback ts_trace_stop
*/
import "C"

import "unsafe"

// Kinds of TraceEvent.
const (
	TraceKernel   = C.TS_TRACE_KIND_KERNEL
	TraceMemcpy   = C.TS_TRACE_KIND_MEMCPY
	TraceMemset   = C.TS_TRACE_KIND_MEMSET
	TraceRuntime  = C.TS_TRACE_KIND_RUNTIME
	TraceOperator = C.TS_TRACE_KIND_OPERATOR
	TraceRange    = C.TS_TRACE_KIND_RANGE

	TraceNoOperators = C.TS_TRACE_FLAG_NO_OPERATORS
)

// TraceEvent has the layout of ts_trace_event.
type TraceEvent struct {
	Start, Duration, Bytes, Correlation, Lane int64
	Device, Kind, Name                        int32
	_                                         int32
}

const (
	_ = -(unsafe.Sizeof(TraceEvent{}) ^ unsafe.Sizeof(C.ts_trace_event{}))
	_ = -(unsafe.Offsetof(TraceEvent{}.Lane) ^ unsafe.Offsetof(C.ts_trace_event{}.lane))
	_ = -(unsafe.Offsetof(TraceEvent{}.Name) ^ unsafe.Offsetof(C.ts_trace_event{}.name))
)

// TraceLaunch has the layout of ts_trace_launch.
type TraceLaunch struct {
	Blocks                          int64
	Threads, Registers, SharedBytes int32
	_                               int32
	Occupancy                       float64
}

const (
	_ = -(unsafe.Sizeof(TraceLaunch{}) ^ unsafe.Sizeof(C.ts_trace_launch{}))
	_ = -(unsafe.Offsetof(TraceLaunch{}.SharedBytes) ^ unsafe.Offsetof(C.ts_trace_launch{}.shared_bytes))
	_ = -(unsafe.Offsetof(TraceLaunch{}.Occupancy) ^ unsafe.Offsetof(C.ts_trace_launch{}.occupancy))
)

// TraceLane returns the Lane of the stream's work.
func TraceLane(s Stream) (int64, error) {
	if err := Check(); err != nil {
		return 0, err
	}
	var lane C.int64_t
	err := failure(C.ts_trace_get_lane(s.c(), &lane))
	return int64(lane), err
}

// StartTrace starts recording. A process's first call may take a second.
func StartTrace(flags int32) error {
	if err := Check(); err != nil {
		return err
	}
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_trace_start(C.int32_t(flags)))
}

// Recorded is a finished recording: unordered events, one launch per kernel event in the events'
// order, and the names that TraceEvent.Name indexes.
type Recorded struct {
	Events   []TraceEvent
	Launches []TraceLaunch
	Names    []string
}

// StopTrace ends the recording and returns it.
func StopTrace() (r Recorded, err error) {
	if err := Check(); err != nil {
		return r, err
	}
	waiting.enter()
	defer waiting.leave()
	var t *C.ts_trace
	if err := failure(C.ts_trace_stop(&t)); err != nil {
		return r, err
	}
	defer C.ts_trace_free(t)
	r.Events = append(r.Events, unsafe.Slice((*TraceEvent)(unsafe.Pointer(C.ts_trace_events(t))),
		int(C.ts_trace_event_count(t)))...)
	r.Launches = append(r.Launches, unsafe.Slice((*TraceLaunch)(unsafe.Pointer(C.ts_trace_launches(t))),
		int(C.ts_trace_launch_count(t)))...)
	for _, name := range unsafe.Slice(C.ts_trace_names(t), int(C.ts_trace_name_count(t))) {
		r.Names = append(r.Names, C.GoString(name))
	}
	return r, nil
}
