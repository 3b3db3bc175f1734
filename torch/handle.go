package torch

import (
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// A handle is one reference to a LibTorch tensor and says when it may be freed: after close, when
// nobody uses it any more. Every use of the C pointer lies between acquire and release, which also
// keep the handle reachable, so that the garbage collector's cleanup cannot come between.
type handle struct {
	c     *capi.Tensor
	state atomic.Int64 // users inside, plus closing once it is closed
}

// owned is the handle of a tensor without a scope, and the garbage collector's net for it.
type owned struct {
	handle
	more more
}

const closing = 1 << 40

var caught atomic.Int64

// Caught returns how many tensors the garbage collector has freed because neither they nor their
// scope were closed, since the start of the process. They were freed late: a training loop keeps
// this number where it is.
func Caught() int64 { return caught.Load() }

// LiveTensors returns how many references to LibTorch tensors the process holds now: tensors not
// closed, and of scopes not closed. Autograd's own references are not among them.
func LiveTensors() int64 { return capi.TensorCount() }

// newOwned takes ownership of c.
func newOwned(c *capi.Tensor) *owned {
	o := &owned{handle: handle{c: c}}
	o.more.cleanup = runtime.AddCleanup(o, func(c *capi.Tensor) {
		capi.FreeTensor(c)
		caught.Add(1)
	}, c)
	return o
}

// acquire returns nil if the handle is closed; otherwise release must follow.
func (h *handle) acquire() *capi.Tensor {
	if h.state.Add(1) > closing {
		h.release() // the count may have held the last user's free back
		return nil
	}
	return h.c
}

func (h *handle) release() {
	if h.state.Add(-1) == closing && h.state.CompareAndSwap(closing, 2*closing) {
		capi.FreeTensor(h.c)
	}
}

// detach closes the handle. The caller that gets a pointer frees it; nil: somebody closed it
// before, or its last user will free it.
func (h *handle) detach() *capi.Tensor {
	for {
		n := h.state.Load()
		switch {
		case n >= closing:
			return nil
		case n == 0:
			if h.state.CompareAndSwap(0, 2*closing) {
				return h.c
			}
		default:
			if h.state.CompareAndSwap(n, n+closing) {
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
