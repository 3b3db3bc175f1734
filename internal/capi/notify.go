//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_notifier_new
#cgo nocallback ts_notifier_new
#cgo nocallback ts_notifier_fd
#cgo noescape ts_notifier_take
#cgo nocallback ts_notifier_take
#cgo nocallback ts_notifier_post
#cgo nocallback ts_notifier_free
#cgo nocallback ts_stream_notify
#cgo noescape ts_range_start
#cgo nocallback ts_range_start
#cgo nocallback ts_range_end
#cgo nocallback ts_range_mark
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"
)

// Notifier is a ts_notifier.
type Notifier = C.ts_notifier

func NewNotifier() (n *Notifier, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_notifier_new(&n))
	return n, err
}

// NotifierFD returns a file descriptor, which the notifier continues to own.
func NotifierFD(n *Notifier) int { return int(C.ts_notifier_fd(n)) }

// TakeNotices writes pending tokens to tokens and returns their number.
func TakeNotices(n *Notifier, tokens []uint64) (int, error) {
	var count C.int64_t
	err := failure(C.ts_notifier_take(n, (*C.uint64_t)(unsafe.SliceData(tokens)), C.int64_t(len(tokens)), &count))
	if s := sanitizer.Load(); s != nil {
		s.noticed(tokens[:count])
	}
	return int(count), err
}

func PostNotice(n *Notifier, token uint64) error {
	return failure(C.ts_notifier_post(n, C.uint64_t(token)))
}

func FreeNotifier(n *Notifier) { C.ts_notifier_free(n) }

func NotifyStream(s Stream, n *Notifier, token uint64) error {
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	if on := sanitizer.Load(); on != nil {
		on.notified(s, token) // before the notice can arrive
	}
	return failure(C.ts_stream_notify(s.c(), n, C.uint64_t(token)))
}

var rangeListeners = sync.OnceValue(func() *int32 {
	if Check() != nil {
		return new(int32)
	}
	return (*int32)(unsafe.Pointer(C.ts_range_listeners()))
})

// RangeListening reports whether ranges have a listener. It reads one word of shared memory and
// makes no call into C.
func RangeListening() bool { return atomic.LoadInt32(rangeListeners()) != 0 }

func StartRange(name string) (id uint64, err error) {
	if err := Check(); err != nil {
		return id, err
	}
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	err = failure(C.ts_range_start(c, (*C.uint64_t)(&id)))
	return id, err
}

func EndRange(id uint64) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_range_end(C.uint64_t(id)))
}

func MarkRange(name string) error {
	if err := Check(); err != nil {
		return err
	}
	c := C.CString(name)
	defer C.free(unsafe.Pointer(c))
	return failure(C.ts_range_mark(c))
}
