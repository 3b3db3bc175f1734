//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_stream_fork
#cgo nocallback ts_stream_fork
#cgo noescape ts_stream_join
#cgo nocallback ts_stream_join
*/
import "C"

import "unsafe"

func ForkStreams(from Stream, to []Stream) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_stream_fork(from.c(), cstream(unsafe.SliceData(to)), C.int64_t(len(to))))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.fork(from, to)
	}
	return err
}

func JoinStreams(into Stream, from []Stream) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_stream_join(into.c(), cstream(unsafe.SliceData(from)), C.int64_t(len(from))))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.join(into, from)
	}
	return err
}
