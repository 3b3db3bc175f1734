//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_store_connect
#cgo nocallback ts_store_connect
#cgo noescape ts_store_new_local
#cgo nocallback ts_store_new_local
#cgo nocallback ts_store_free
#cgo noescape ts_store_set
#cgo nocallback ts_store_set
#cgo noescape ts_store_get
#cgo nocallback ts_store_get
#cgo noescape ts_group_new
#cgo nocallback ts_group_new
#cgo nocallback ts_group_shutdown
#cgo nocallback ts_group_abort
#cgo nocallback ts_group_free
#cgo noescape ts_group_get_fault
#cgo nocallback ts_group_get_fault
#cgo noescape ts_group_broadcast
#cgo nocallback ts_group_broadcast
#cgo noescape ts_group_all_reduce
#cgo nocallback ts_group_all_reduce
#cgo noescape ts_group_reduce_scatter
#cgo nocallback ts_group_reduce_scatter
#cgo noescape ts_group_all_gather
#cgo nocallback ts_group_all_gather
#cgo noescape ts_group_all_to_all
#cgo nocallback ts_group_all_to_all
#cgo noescape ts_group_send
#cgo nocallback ts_group_send
#cgo noescape ts_group_receive
#cgo nocallback ts_group_receive
#cgo nocallback ts_work_wait
#cgo nocallback ts_work_abort
#cgo nocallback ts_work_free
#cgo noescape ts_reducer_new
#cgo nocallback ts_reducer_new
#cgo nocallback ts_reducer_free
#cgo noescape ts_reducer_arrange
#cgo nocallback ts_reducer_arrange
#cgo nocallback ts_reducer_begin
#cgo noescape ts_reducer_join
#cgo nocallback ts_reducer_join
#cgo nocallback ts_reducer_cancel
#cgo nocallback ts_reducer_abort
#cgo noescape ts_reducer_get_order
#cgo nocallback ts_reducer_get_order
*/
import "C"

import (
	"runtime"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Store is a ts_store.
type Store = C.ts_store

// Group is a ts_group.
type Group = C.ts_group

// Work is a ts_work.
type Work = C.ts_work

const (
	ReduceSum     = C.TS_REDUCTION_SUM
	ReduceAverage = C.TS_REDUCTION_AVERAGE
	ReduceProduct = C.TS_REDUCTION_PRODUCT
	ReduceMin     = C.TS_REDUCTION_MIN
	ReduceMax     = C.TS_REDUCTION_MAX

	FaultNone          = C.TS_GROUP_FAULT_NONE
	FaultTimeout       = C.TS_GROUP_FAULT_TIMEOUT
	FaultCommunication = C.TS_GROUP_FAULT_COMMUNICATION
)

// collective bounds the calls that wait for other processes. It is separate from the other gates,
// so that the goroutines of several ranks in one process cannot block each other.
var collective = newGate(max(256, 2*runtime.NumCPU()))

// ConnectStore blocks until the server answers, for at most the timeout.
func ConnectStore(host string, port int, serve bool, prefix string, timeout time.Duration) (s *Store, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	collective.enter()
	defer collective.leave()
	h, p := C.CString(host), C.CString(prefix)
	defer C.free(unsafe.Pointer(h))
	defer C.free(unsafe.Pointer(p))
	err = failure(C.ts_store_connect(h, C.int32_t(port), C.bool(serve), p, C.int64_t(timeout), &s))
	return s, err
}

// LocalStore makes a store within the process.
func LocalStore(timeout time.Duration) (s *Store, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_store_new_local(C.int64_t(timeout), &s))
	return s, err
}

func FreeStore(s *Store) {
	collective.enter()
	defer collective.leave()
	C.ts_store_free(s)
}

func SetStore(s *Store, key string, value []byte) error {
	collective.enter()
	defer collective.leave()
	return withString(key, func(k *C.char) error {
		return failure(C.ts_store_set(s, k, (*C.uint8_t)(unsafe.SliceData(value)), C.size_t(len(value))))
	})
}

// GetStore returns the value of the key, at most 64 KiB. It blocks until the key has a value.
func GetStore(s *Store, key string) ([]byte, error) {
	collective.enter()
	defer collective.leave()
	value := make([]byte, 64<<10)
	var n C.size_t
	err := withString(key, func(k *C.char) error {
		return failure(C.ts_store_get(s, k, (*C.uint8_t)(unsafe.SliceData(value)), C.size_t(len(value)), &n))
	})
	return value[:n], err
}

// NewGroup blocks until all ranks have called it.
func NewGroup(s *Store, name string, rank, size int, ranks []int32, device int32,
	timeout time.Duration) (g *Group, err error) {
	collective.enter()
	defer collective.leave()
	if len(ranks) != size {
		return nil, imagecapi.NewFailure(CodeInvalidArgument, "there are not size ranks")
	}
	err = withString(name, func(n *C.char) error {
		return failure(C.ts_group_new(s, n, C.int32_t(rank), C.int32_t(size), (*C.int32_t)(unsafe.SliceData(ranks)),
			C.int32_t(device), C.int64_t(timeout), &g))
	})
	return g, err
}

func ShutdownGroup(g *Group) error {
	collective.enter()
	defer collective.leave()
	return failure(C.ts_group_shutdown(g))
}

// AbortGroup does not enter the gate, because the calls that it ends may fill the gate.
func AbortGroup(g *Group) error { return failure(C.ts_group_abort(g)) }

func FreeGroup(g *Group) {
	collective.enter()
	defer collective.leave()
	C.ts_group_free(g)
}

// GroupFault returns one of FaultNone, FaultTimeout and FaultCommunication.
func GroupFault(g *Group) (int, error) {
	var fault C.int32_t
	err := failure(C.ts_group_get_fault(g, &fault))
	return int(fault), err
}

// launch makes the call of a collective, which writes and reads tensors on the stream. what names
// the call for the sanitizer. In a CPU group the work holds the tensors until it is done.
func launch(what string, on Stream, gpu bool, writes, reads []*Tensor,
	call func(work **C.ts_work) *C.ts_error) (*Work, error) {
	collective.enter()
	defer collective.leave()
	s := sanitizer.Load()
	if !gpu {
		s.begin()
		defer s.end()
		var work *C.ts_work
		err := failure(call(&work))
		if s != nil && err == nil {
			s.used(what, nil, writes, reads)
		}
		return work, err
	}
	if s == nil {
		return nil, failure(call(nil))
	}
	return nil, s.call(func() error { return failure(call(nil)) }, func() { s.transferred(what, on, writes, reads) })
}

func Broadcast(g *Group, on Stream, gpu bool, t *Tensor, root int) (*Work, error) {
	return launch("a broadcast", on, gpu, []*Tensor{t}, nil, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_broadcast(g, on.c(), t, C.int32_t(root), work)
	})
}

func AllReduce(g *Group, on Stream, gpu bool, t *Tensor, reduction int32) (*Work, error) {
	return launch("an all-reduce", on, gpu, []*Tensor{t}, nil, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_all_reduce(g, on.c(), t, C.int32_t(reduction), work)
	})
}

func ReduceScatter(g *Group, on Stream, gpu bool, out, in *Tensor, reduction int32) (*Work, error) {
	return launch("a reduce-scatter", on, gpu, []*Tensor{out}, []*Tensor{in}, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_reduce_scatter(g, on.c(), out, in, C.int32_t(reduction), work)
	})
}

func AllGather(g *Group, on Stream, gpu bool, out, in *Tensor) (*Work, error) {
	return launch("an all-gather", on, gpu, []*Tensor{out}, []*Tensor{in}, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_all_gather(g, on.c(), out, in, work)
	})
}

// AllToAll sends inRows[r] rows to rank r and receives outRows[r] rows from it. If both are nil,
// the parts are equal. Otherwise each has one number per rank of the group; the caller checks that.
func AllToAll(g *Group, on Stream, gpu bool, out, in *Tensor, outRows, inRows []int64) (*Work, error) {
	return launch("an all-to-all", on, gpu, []*Tensor{out}, []*Tensor{in}, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_all_to_all(g, on.c(), out, in, sizes(outRows), sizes(inRows), work)
	})
}

func Send(g *Group, on Stream, gpu bool, t *Tensor, to int, timeout time.Duration) (*Work, error) {
	return launch("a send", on, gpu, nil, []*Tensor{t}, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_send(g, on.c(), t, C.int32_t(to), C.int64_t(timeout), work)
	})
}

func Receive(g *Group, on Stream, gpu bool, t *Tensor, from int, timeout time.Duration) (*Work, error) {
	return launch("a receive", on, gpu, []*Tensor{t}, nil, func(work **C.ts_work) *C.ts_error {
		return C.ts_group_receive(g, on.c(), t, C.int32_t(from), C.int64_t(timeout), work)
	})
}

// WaitWork blocks until the work is done or AbortWork is called.
func WaitWork(w *Work) error {
	collective.enter()
	defer collective.leave()
	return failure(C.ts_work_wait(w))
}

// AbortWork does not enter the gate, because calls of WaitWork may fill the gate.
func AbortWork(w *Work) error { return failure(C.ts_work_abort(w)) }

func FreeWork(w *Work) {
	collective.enter()
	defer collective.leave()
	C.ts_work_free(w)
}

// Reducer is a ts_reducer.
type Reducer = C.ts_reducer

// NewReducer makes a reducer without buckets. A dtype of -1 keeps the parameters' dtype.
func NewReducer(g *Group, on Stream, parameters []*Tensor, dtype int32) (r *Reducer, err error) {
	computing.enter()
	defer computing.leave()
	err = failure(C.ts_reducer_new(g, on.c(), unsafe.SliceData(parameters), C.int64_t(len(parameters)),
		C.int32_t(dtype), &r))
	return r, err
}

func FreeReducer(r *Reducer) {
	computing.enter()
	defer computing.leave()
	C.ts_reducer_free(r)
}

// ArrangeReducer makes the buckets. order lists the number of every parameter; the caller checks
// it.
func ArrangeReducer(r *Reducer, order, ends []int64) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_reducer_arrange(r, sizes(order), sizes(ends), C.int64_t(len(ends))))
}

func BeginReducer(r *Reducer) error { return failure(C.ts_reducer_begin(r)) }

// JoinReducer sets unused, which has one element per parameter. On the CPU it waits for other
// ranks, until AbortReducer.
func JoinReducer(r *Reducer, unused []bool) error {
	collective.enter()
	defer collective.leave()
	err := failure(C.ts_reducer_join(r, (*C.bool)(unsafe.SliceData(unused))))
	if s := sanitizer.Load(); s != nil {
		s.freed("the reduction of gradients") // the log of all threads has the whole reduction
	}
	return err
}

func CancelReducer(r *Reducer) error { return failure(C.ts_reducer_cancel(r)) }

// AbortReducer does not enter the gate, because calls of JoinReducer may fill the gate.
func AbortReducer(r *Reducer) error { return failure(C.ts_reducer_abort(r)) }

// ReducerOrder returns the parameters in the order in which the last backward pass produced their
// gradients. parameters is the total number.
func ReducerOrder(r *Reducer, parameters int) ([]int64, error) {
	order := make([]int64, parameters)
	var n C.int64_t
	err := failure(C.ts_reducer_get_order(r, sizes(order), &n))
	return order[:n], err
}
