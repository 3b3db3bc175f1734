package torch

import (
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// Hook is a function that [Tensor.RegisterHook] or [Tensor.RegisterPostAccumulateGradHook]
// registered. It ends with Remove, or with its tensor; a Hook that the program drops stays
// registered.
//
// # Where a hook runs
//
// Hooks, the backward of a [Function] and callbacks at the end of a pass run inside of the call of
// Backward or Grad, one at a time for each device. For tensors on the CPU they run on the goroutine
// that called Backward. For tensors on a GPU they run on a goroutine of LibTorch's thread of that
// GPU, while the caller waits. The goroutine is locked to its OS thread. Work that it enqueues goes
// to the stream on which the forward operator ran, which is the current stream there (for a leaf,
// the stream that was current when a forward pass first used it); LibTorch orders the gradient
// before that work, and what follows in the backward pass after it. A stream that the hook leaves
// set there ends with the hook. A callback at the end of the pass finds the streams that were
// current where Backward was called.
//
// Handles that a hook gets, and what it computes from them, belong to a scope that ends with the
// hook's call: Keep what must live longer. Gradients are marked NoGrad, unless the pass records
// them ([GradOptions].CreateGraph), have the pass's mark of Numerics, and no mark of Autocast.
//
// A hook may call everything, Backward and Grad included, on the goroutine that it runs on. It must
// not wait for another goroutine that runs a backward pass, because that pass may need the thread
// of the hook. It must not end its goroutine (runtime.Goexit, and so t.Fatal). Its error, or its
// panic, ends the pass and is in the error of Backward, with the place of the registration;
// errors.Is finds it. Gradients of leaves that the pass had reached are then accumulated.
type Hook struct {
	c       *capi.Hook // freed when h is unreachable
	removed atomic.Bool
}

// Remove unregisters the hook. A call of the hook that is under way ends as usual. Any goroutine
// may call Remove, the hook included; further calls do nothing.
func (h *Hook) Remove() {
	if h == nil || h.c == nil || h.removed.Swap(true) {
		return
	}
	capi.RemoveHook(h.c)
	runtime.KeepAlive(h)
}

// RegisterHook registers fn, which Backward and [Grad] call with the gradient of t each time that
// they have computed it, before they use it. The gradient has t's shape, dtype and device. If fn
// returns a tensor, that takes the gradient's place; it must have the same shape, dtype and device.
// Hooks of a tensor run in the order of registration. t requires gradients; it may be a leaf or a
// result. For a leaf a hook sees the gradient of each pass before it is accumulated. Where t itself
// is an input of Grad, the result is the gradient after the hooks, unless the pass goes on from t
// to another input: then it is the gradient before them, as in PyTorch. [Hook] says where fn runs.
// Do not register a hook while a backward pass that uses t is under way.
//
//	clip := func(g *torch.Tensor) (*torch.Tensor, error) { return g.Clamp(-1, 1), nil }
//	hook, err := w.RegisterHook(clip)
func (t *Tensor) RegisterHook(fn func(gradient *Tensor) (*Tensor, error)) (*Hook, error) {
	if fn == nil {
		return nil, opError("RegisterHook", []*Tensor{t}, invalid("the hook is nil"))
	}
	return t.register("RegisterHook", capi.AddGradientHook, func(in []*Tensor) ([]*Tensor, error) {
		g, err := fn(in[0])
		return []*Tensor{g}, err
	})
}

// RegisterPostAccumulateGradHook registers fn, which Backward calls with t after each time that it
// has added to t's gradient; t.Grad() inside of fn returns the sum. t is a leaf that requires
// gradients. [Grad] accumulates nothing, and does not call fn. [Hook] says where fn runs. In fn
// Backward is an error, because the pass holds the lock of t's gradient; Grad is possible.
//
//	hook, err := w.RegisterPostAccumulateGradHook(func(w *torch.Tensor) error {
//		return w.NoGrad().Sub_(w.Grad().MulScalar(0.1)).Err() // a step of SGD inside of Backward
//	})
func (t *Tensor) RegisterPostAccumulateGradHook(fn func(t *Tensor) error) (*Hook, error) {
	const op = "RegisterPostAccumulateGradHook"
	if fn == nil {
		return nil, opError(op, []*Tensor{t}, invalid("the hook is nil"))
	}
	return t.register(op, capi.AddAccumulationHook, func(in []*Tensor) ([]*Tensor, error) {
		in[0] = in[0].unmarked()
		return nil, fn(in[0])
	})
}

func (t *Tensor) register(op string, add func(*capi.Tensor, capi.Callback) (*capi.Hook, error), fn func([]*Tensor) ([]*Tensor, error)) (*Hook, error) {
	var c *capi.Hook
	err := t.use(op, func(ct *capi.Tensor) (err error) {
		c, err = add(ct, callback(op, fn))
		return err
	})
	if err != nil {
		return nil, err
	}
	h := &Hook{c: c}
	runtime.AddCleanup(h, capi.FreeHook, c)
	return h, nil
}

// QueueCallback makes the backward pass that calls the calling hook, or the calling backward of a
// [Function], call fn at its end: all gradients are accumulated, and ordered on the streams that
// are current for the caller of Backward, which are current in fn too. Callbacks run in the order
// of their registration. fn's error, or its panic, is that of Backward. A pass that fails does not
// call fn. Outside of a backward pass QueueCallback is an error. [Hook] says where fn runs.
func QueueCallback(fn func() error) error {
	if fn == nil {
		return opError("QueueCallback", nil, invalid("the callback is nil"))
	}
	err := capi.AddBackwardCallback(callback("QueueCallback", func([]*Tensor) ([]*Tensor, error) { return nil, fn() }))
	if err != nil {
		return opError("QueueCallback", nil, err)
	}
	return nil
}

// callback returns fn in the form of package capi. fn gets handles of a scope that ends with the
// call, nil for an undefined gradient, and returns handles, or nil.
func callback(op string, fn func([]*Tensor) ([]*Tensor, error)) capi.Callback {
	file, line := caller()
	return func(tensors, results []*capi.Tensor, createGraph bool, numerics int32) (err error) {
		defer func() {
			if v := recover(); v != nil {
				err = panicked(v)
			}
			if err != nil {
				err = &Error{Op: op, File: file, Line: line, Err: err}
			}
		}()
		scope := NewScope(fmt.Sprintf("a call of what %s registered", op))
		defer scope.Close()
		p := provenance{scope: scope, marks: marks(numerics)}
		if !createGraph {
			p.marks |= noGrad
		}
		in := make([]*Tensor, len(tensors))
		for i, c := range tensors {
			if c == nil {
				continue
			}
			own, err := capi.RetainTensor(c)
			if err != nil {
				return err
			}
			in[i] = p.tensor(own)
		}
		out, err := fn(in)
		if err != nil {
			return err
		}
		return deliver(out, results)
	}
}

// deliver writes new references to the tensors, of which some may be nil.
func deliver(tensors []*Tensor, results []*capi.Tensor) error {
	for i, t := range tensors {
		if t == nil {
			continue
		}
		c, err := t.acquire()
		if err != nil {
			return err
		}
		results[i], err = capi.RetainTensor(c)
		t.h.release()
		if err != nil {
			return err
		}
	}
	return nil
}

// unmarked returns a handle without marks.
func (t *Tensor) unmarked() *Tensor { return &Tensor{h: t.h, scope: t.scope, more: t.more} }

// panicked returns the error of a panic that a deferred function has recovered.
func panicked(v any) error {
	file, line := panicPlace()
	if err, ok := v.(error); ok {
		return fmt.Errorf("panic at %s:%d: %w", file, line, err)
	}
	return fmt.Errorf("panic at %s:%d: %w", file, line, errors.New(fmt.Sprint(v)))
}

// panicPlace returns the line of the panic that a deferred function of its caller's caller has
// recovered.
func panicPlace() (file string, line int) {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(1, pcs[:])])
	panicking := false
	for {
		f, more := frames.Next()
		inRuntime := strings.HasPrefix(f.Function, "runtime.")
		if panicking && !inRuntime {
			return f.File, f.Line
		}
		panicking = panicking || inRuntime
		if !more {
			return "", 0
		}
	}
}
