//go:build linux

package capi

/*
#include <stdlib.h>
#include "torchstream.h"
#cgo noescape ts_function_attach
#cgo nocallback ts_function_attach
#cgo noescape ts_tensor_check_leaves
#cgo nocallback ts_tensor_check_leaves
#cgo noescape ts_tensor_forget_accumulators
#cgo nocallback ts_tensor_forget_accumulators
#cgo nocallback ts_hook_remove
#cgo nocallback ts_hook_free
#cgo nocallback ts_callback_depth
#cgo noescape ts_callbacks_take
#cgo nocallback ts_callbacks_take
#cgo nocallback ts_backward_add_callback
#cgo noescape ts_tensor_add_gradient_hook
#cgo nocallback ts_tensor_add_gradient_hook
#cgo noescape ts_tensor_add_accumulation_hook
#cgo nocallback ts_tensor_add_accumulation_hook

ts_error* torchstreamAutogradCallback(int64_t, int32_t, ts_tensor**, int64_t, ts_tensor**, int64_t);

// Go cannot declare pointers to const.
static ts_error* call_go(int64_t context, int32_t flags, ts_tensor* const* tensors, int64_t count, ts_tensor** results,
                         int64_t result_count) {
	return torchstreamAutogradCallback(context, flags, (ts_tensor**)tensors, count, results, result_count);
}
static ts_autograd_callback autograd_callback(void) { return call_go; }
*/
import "C"

import (
	"errors"
	"runtime/cgo"
	"strconv"
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Callback is Go code called from a backward pass. tensors are borrowed for the call, and may be
// nil. The callback writes new references to results, or leaves nil. createGraph says whether the
// gradients' computation is recorded, and numerics has the pass's CallNumerics flags. The callback
// must not panic.
//
// It runs on the OS thread of the backward pass, and its goroutine is locked to that thread. For
// CPU tensors that is the thread that called Backward; for others it is LibTorch's thread for the
// device.
type Callback func(tensors []*Tensor, results []*Tensor, createGraph bool, numerics int32) error

// call implements ts_autograd_callback.
func call(context int64, flags int32, tensors, results []*Tensor) *C.ts_error {
	if s := sanitizer.Load(); s != nil {
		gradients := tensors
		if len(results) == 0 {
			gradients = nil // a leaf; its gradient is accumulated already
		}
		s.calledBack(gradients)
	}
	err := cgo.Handle(context).Value().(lent).fn(tensors, results,
		flags&C.TS_CALLBACK_FLAG_CREATE_GRAPH != 0, flags&CallNumerics)
	if err == nil {
		return nil
	}
	return (*C.ts_error)(imagecapi.NewError(CodeCallback, strconv.FormatInt(keepError(err), 10)))
}

// callbackErrors holds callback errors while they pass through C to the caller of Backward. A pass
// with several GPUs may have several errors, of which LibTorch returns only the first. The others
// stay here, and the oldest are dropped when there are too many.
var callbackErrors struct {
	mu   sync.Mutex
	last int64
	of   map[int64]error
}

const maxCallbackErrors = 256

// keepError keeps the error and returns its number.
func keepError(err error) int64 {
	e := &callbackErrors
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.of == nil {
		e.of = map[int64]error{}
	}
	e.last++
	e.of[e.last] = err
	delete(e.of, e.last-maxCallbackErrors)
	return e.last
}

// callbackError returns the callback's error if the C error stands for one.
func callbackError(err error) error {
	var c *Error
	if !errors.As(err, &c) || c.Code != CodeCallback {
		return err
	}
	number, _ := strconv.ParseInt(c.Message, 10, 64)
	e := &callbackErrors
	e.mu.Lock()
	defer e.mu.Unlock()
	if kept := e.of[number]; kept != nil {
		delete(e.of, number)
		return kept
	}
	return err
}

// differentiate makes a call that runs a backward pass. A backward pass that a callback runs does
// not enter the gate, because the passes inside the gate may wait for that callback.
func differentiate(what string, fn func() *C.ts_error) error {
	if C.ts_callback_depth() == 0 {
		differentiating.enter()
		defer differentiating.leave()
	}
	defer ReleaseCallbacks()
	pass := func() error { return callbackError(failure(fn())) }
	if s := sanitizer.Load(); s != nil {
		s.passing(what)
		return s.call(pass, func() { s.freed(what) })
	}
	return pass()
}

// callbacks is the number of callbacks that C may call.
var callbacks atomic.Int64

// lent is the Go value behind a C callback's context.
type lent struct {
	fn    Callback
	ended func() // nil, or called when C can no longer call fn
}

// lendCallback calls lend with a context for fn.
func lendCallback(fn Callback, ended func(), lend func(context C.int64_t) *C.ts_error) error {
	h := cgo.NewHandle(lent{fn, ended})
	callbacks.Add(1)
	err := failure(lend(C.int64_t(h)))
	if err != nil {
		h.Delete()
		callbacks.Add(-1)
	}
	return err
}

// LiveCallbacks returns the number of callbacks that C may call, or that ReleaseCallbacks has yet
// to release.
func LiveCallbacks() int64 { return callbacks.Load() }

// ReleaseCallbacks releases callbacks that C can no longer call, because their hooks were removed,
// or their tensors or graph nodes freed.
func ReleaseCallbacks() {
	if callbacks.Load() == 0 {
		return
	}
	var contexts [32]int64
	for n := len(contexts); n == len(contexts); {
		n = int(C.ts_callbacks_take(sizes(contexts[:]), C.int64_t(len(contexts))))
		for _, context := range contexts[:n] {
			h := cgo.Handle(context)
			ended := h.Value().(lent).ended
			h.Delete()
			if ended != nil {
				ended()
			}
		}
		callbacks.Add(int64(-n))
	}
}

// Hook is a ts_hook.
type Hook = C.ts_hook

// AddGradientHook registers fn, which gets the gradient of t and may return another one.
func AddGradientHook(t *Tensor, fn Callback) (h *Hook, err error) {
	err = lendCallback(fn, nil, func(context C.int64_t) *C.ts_error {
		return C.ts_tensor_add_gradient_hook(t, C.autograd_callback(), context, &h)
	})
	return h, err
}

// AddAccumulationHook registers fn. After each accumulation fn gets the leaf t.
func AddAccumulationHook(t *Tensor, fn Callback) (h *Hook, err error) {
	err = lendCallback(fn, nil, func(context C.int64_t) *C.ts_error {
		return C.ts_tensor_add_accumulation_hook(t, C.autograd_callback(), context, &h)
	})
	return h, err
}

func RemoveHook(h *Hook) {
	C.ts_hook_remove(h)
	ReleaseCallbacks()
}

func FreeHook(h *Hook) { C.ts_hook_free(h) }

// AddBackwardCallback registers fn for the end of the backward pass that the calling thread runs.
func AddBackwardCallback(fn Callback) error {
	if err := Check(); err != nil {
		return err
	}
	return lendCallback(fn, nil, func(context C.int64_t) *C.ts_error {
		return C.ts_backward_add_callback(C.autograd_callback(), context)
	})
}

// Function is a ts_function.
type Function struct {
	Name                   string
	Inputs, Outputs, Saved []*Tensor
	Constant               []bool // one per output
	Backward               Callback
	Ended                  func() // nil, or called after the graph node is freed; it must not block
}

// AttachFunction creates a graph node for the function, and returns its outputs attached to that
// node.
func AttachFunction(f Function) ([]*Tensor, error) {
	if err := Check(); err != nil {
		return nil, err
	}
	computing.enter()
	defer computing.leave()
	name := C.CString(f.Name)
	defer C.free(unsafe.Pointer(name))
	results := make([]*Tensor, len(f.Outputs))
	err := lendCallback(f.Backward, f.Ended, func(context C.int64_t) *C.ts_error {
		return C.ts_function_attach(C.ts_function{
			name: name, inputs: unsafe.SliceData(f.Inputs), input_count: C.int64_t(len(f.Inputs)),
			outputs: unsafe.SliceData(f.Outputs), output_count: C.int64_t(len(f.Outputs)),
			constant: (*C.bool)(unsafe.Pointer(unsafe.SliceData(f.Constant))),
			saved:    unsafe.SliceData(f.Saved), saved_count: C.int64_t(len(f.Saved)),
			backward: C.autograd_callback(), context: context,
		}, unsafe.SliceData(results))
	})
	return results, err
}

// ForgetAccumulators makes graphs recorded from now on use separate nodes to accumulate the leaves'
// gradients.
func ForgetAccumulators(leaves []*Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_tensor_forget_accumulators(unsafe.SliceData(leaves), C.int64_t(len(leaves))))
}

// CheckLeaves returns an error if the outputs depend on a leaf that requires gradients and is not
// in leaves.
func CheckLeaves(outputs, leaves []*Tensor) error {
	if err := Check(); err != nil {
		return err
	}
	return failure(C.ts_tensor_check_leaves(unsafe.SliceData(outputs), C.int64_t(len(outputs)),
		unsafe.SliceData(leaves), C.int64_t(len(leaves))))
}
