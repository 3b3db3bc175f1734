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
// registered. It ends with Remove, or with its tensor. A Hook that the program drops stays
// registered.
//
// # Where a hook runs
//
// Hooks, the backward of a [Function], and callbacks at the end of a pass run inside of the call of
// Backward or Grad, one at a time for each device. For tensors on the CPU they run on the goroutine
// that called Backward. For tensors on a GPU they run on the OS thread that LibTorch has for that
// GPU, in a goroutine that is locked to this thread, while the caller waits.
//
// A hook's work is enqueued on the stream on which the forward operator ran, which is current in
// the hook. For a leaf, this is the stream that was current when a forward pass first used it.
// LibTorch orders the gradient before the hook's work, and the rest of the backward pass after it.
// If the hook sets another current stream, that stream is current only until the hook returns. A
// callback at the end of the pass runs with the streams that were current where Backward was
// called.
//
// Handles that a hook gets, and tensors that it computes from them, belong to a scope that ends
// with the hook's call. Keep tensors that must live longer. Gradients are marked NoGrad, unless the
// pass records them ([GradOptions].CreateGraph). They have the pass's mark of Numerics, and no mark
// of Autocast.
//
// A hook may call everything, including Backward and Grad, on the goroutine that it runs on. It
// must not wait for another goroutine that runs a backward pass, because that pass may need the
// thread of the hook. It must not end its goroutine (runtime.Goexit, and so t.Fatal). Its error or
// panic ends the pass. The error of Backward then contains it, with the location of the
// registration, and errors.Is finds it. Gradients of leaves that the pass had reached are then
// accumulated.
type Hook struct {
	c       *capi.Hook // freed when h is unreachable
	removed atomic.Bool
}

// Remove unregisters the hook. A running call of the hook ends as usual. Any goroutine may call
// Remove, including the hook. Further calls do nothing.
func (h *Hook) Remove() {
	if h == nil || h.c == nil || h.removed.Swap(true) {
		return
	}
	capi.RemoveHook(h.c)
	runtime.KeepAlive(h)
}

// RegisterHook registers fn. Backward and [Grad] call fn with the gradient of t each time that they
// have computed it, before they use it. The gradient has t's shape, dtype and device. If fn returns
// a tensor, it replaces the gradient and must have the same shape, dtype and device. Hooks of a
// tensor run in the order of registration.
//
// t must require gradients. It may be a leaf or a result. For a leaf, a hook gets the gradient of
// each pass before it is accumulated. If t itself is an input of Grad, the result is the gradient
// after the hooks. If the pass continues from t to another input, the result is the gradient before
// them, as in PyTorch. [Hook] documents where fn runs. Do not register a hook during a backward
// pass that uses t.
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

// RegisterPostAccumulateGradHook registers fn. Backward calls fn with t each time after it has
// added to t's gradient. Inside of fn, t.Grad() returns the sum. t must be a leaf that requires
// gradients. [Grad] accumulates nothing, and does not call fn. [Hook] documents where fn runs. In
// fn, Backward is an error, because the pass holds the lock of t's gradient. Grad is possible.
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

func (t *Tensor) register(op string, add func(*capi.Tensor, capi.Callback) (*capi.Hook, error),
	fn func([]*Tensor) ([]*Tensor, error)) (*Hook, error) {
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

// QueueCallback registers fn to run at the end of a backward pass. It must be called in that pass,
// from a hook or from the Backward of a [Function]. When fn runs, all gradients are accumulated.
// They are ordered on the streams that are current for the caller of Backward, and these streams
// are current in fn too. Callbacks run in the order of their registration. Backward returns fn's
// error or panic. If the pass fails, fn is not called. Outside of a backward pass QueueCallback
// returns an error. [Hook] documents where fn runs.
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

// callback converts fn to the form of package capi. fn gets handles of a scope that ends with the
// call, and nil for an undefined gradient. It returns handles or nil.
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

// deliver writes new references to the tensors into results. A tensor may be nil.
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
