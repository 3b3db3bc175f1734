package torch

import (
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/internal/origin"
)

// handle is one reference to a LibTorch tensor. It frees the tensor after close, when the last user
// has left. Every use of the C pointer is between acquire and release. Both keep the handle
// reachable, so that the garbage collector's cleanup cannot run between them.
type handle struct {
	made  origin.Origin
	c     *capi.Tensor
	state atomic.Int64 // number of users, plus closing after close
}

// owned is the handle of a tensor without a scope, with the cleanup that frees an unreachable
// tensor.
type owned struct {
	handle
	more more
}

// closing marks a closed handle in handle.state. It exceeds any number of users, and fits into an
// instruction as a constant.
const closing = 1 << 29

var caught atomic.Int64

// Caught returns the number of tensors, since the start of the process, that the garbage collector
// freed because neither they nor their scope were closed. They were freed late. In a correct
// training loop this number stays constant. Package leaks reports where the program made them.
func Caught() int64 { return caught.Load() }

// LiveTensors returns the number of references to LibTorch tensors that the process holds: open
// tensors of open scopes, or without a scope. It excludes autograd's own references.
func LiveTensors() int64 { return capi.TensorCount() }

// newOwned takes ownership of c.
func newOwned(c *capi.Tensor) *owned {
	o := &owned{handle: handle{made: origin.New("tensor"), c: c}}
	o.more.cleanup = runtime.AddCleanup(o, unreachable.free, unreachable{o.made, c})
	return o
}

// unreachable holds the tensor of an owned handle that the garbage collector has found.
type unreachable struct {
	made origin.Origin
	c    *capi.Tensor
}

func (u unreachable) free() {
	capi.FreeTensor(u.c)
	reclaim()
	caught.Add(1)
	u.made.Leaked()
	u.made.Closed()
}

// acquire returns nil if the handle is closed. Otherwise a call of release must follow. acquire and
// release are small enough to be inlined: each operator calls both for each operand.
func (h *handle) acquire() *capi.Tensor {
	if h.state.Add(1) < closing {
		return h.c
	}
	h.release() // the added count may have prevented the last user's free
	return nil
}

func (h *handle) release() {
	if h.state.Add(-1) == closing {
		h.free()
	}
}

// free frees the tensor of a closed handle after its last user has left.
//
//go:noinline
func (h *handle) free() {
	if h.state.CompareAndSwap(closing, 2*closing) {
		capi.FreeTensor(h.c)
	}
}

// detach closes the handle and returns the C tensor, which the caller must free. It returns nil if
// the handle was already closed, or if its last user will free the tensor.
func (h *handle) detach() *capi.Tensor {
	for {
		n := h.state.Load()
		switch {
		case n >= closing:
			return nil
		case n == 0:
			if h.state.CompareAndSwap(0, 2*closing) {
				h.made.Closed()
				return h.c
			}
		default:
			if h.state.CompareAndSwap(n, n+closing) {
				h.made.Closed()
				return nil
			}
		}
	}
}

func (h *handle) close() {
	if c := h.detach(); c != nil {
		capi.FreeTensor(c)
	}
}
