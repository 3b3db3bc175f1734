package torch

import (
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// BackwardOptions are the options of [Tensor.BackwardWith].
type BackwardOptions struct {
	Gradient    *Tensor // of the tensor, with its shape; nil: 1, for a scalar
	RetainGraph bool    // keep what backward needs, for another call
}

// Backward computes the gradients of the scalar t with respect to the leaves that require them, and
// adds them to what the leaves have (see [Tensor.Grad]). It blocks until all backward work is
// enqueued, not until the device has done it. Gradients are ordered on the stream that is current
// here.
func (t *Tensor) Backward() error { return t.BackwardWith(BackwardOptions{}) }

// BackwardWith is [Tensor.Backward] with options.
func (t *Tensor) BackwardWith(o BackwardOptions) error {
	return t.use("Backward", func(c *capi.Tensor) error {
		if o.Gradient == nil {
			return capi.Backward(c, nil, o.RetainGraph)
		}
		g, err := o.Gradient.acquire()
		if err != nil {
			return err
		}
		defer o.Gradient.h.release()
		return capi.Backward(c, g, o.RetainGraph)
	})
}

// Grad returns the gradient of a leaf, or nil if there is none. The handle is the caller's like an
// operator's result: it joins t's scope, and without one the caller closes it. The gradient itself
// lives on until it is dropped.
func (t *Tensor) Grad() *Tensor {
	var g *capi.Tensor
	err := t.use("Grad", func(c *capi.Tensor) (err error) {
		g, err = capi.Grad(c)
		return err
	})
	switch {
	case err != nil:
		return failed(err)
	case g == nil:
		return nil
	}
	return provenance{t.scope, t.noGrad}.tensor(g)
}

// SetGrad replaces the gradient of a leaf; nil drops it.
func (t *Tensor) SetGrad(gradient *Tensor) error {
	return t.use("SetGrad", func(c *capi.Tensor) error {
		if gradient == nil {
			return capi.SetGrad(c, nil)
		}
		g, err := gradient.acquire()
		if err != nil {
			return err
		}
		defer gradient.h.release()
		return capi.SetGrad(c, g)
	})
}

// ClearGrads drops the gradients of all the tensors in one call. They have none afterwards, rather
// than zeros.
func ClearGrads(tensors ...*Tensor) error {
	return with("ClearGrads", tensors, capi.ClearGrads)
}

// RequiresGrad reports whether operators on t record what backward needs: true for a parameter and
// for what was computed from one, false under NoGrad and for a tensor that failed or is closed.
func (t *Tensor) RequiresGrad() bool {
	i, _ := t.info()
	return i.RequiresGrad && !t.noGrad
}

// SetRequiresGrad makes a leaf (a tensor that no operator computed) a parameter, or a constant
// again.
func (t *Tensor) SetRequiresGrad(requires bool) error {
	return t.use("SetRequiresGrad", func(c *capi.Tensor) error { return capi.SetRequiresGrad(c, requires) })
}

// with runs fn on the C tensors of all operands.
func with(op string, tensors []*Tensor, fn func([]*capi.Tensor) error) error {
	cs := make([]*capi.Tensor, len(tensors))
	for i, t := range tensors {
		c, err := t.acquire()
		if err != nil {
			for _, held := range tensors[:i] {
				held.h.release()
			}
			if t == nil || t.failure() == nil {
				err = opError(op, tensors, err)
			}
			return err
		}
		cs[i] = c
	}
	err := fn(cs)
	if err != nil {
		err = opError(op, tensors, err)
	}
	for _, t := range tensors {
		t.h.release()
	}
	return err
}

// NormalizeImages is what turns decoded images into a network's input: dst[n,c,h,w] =
// (src[n,h,w,c]/255 - mean[c]) / std[c], computed in float32. src is uint8 [N H W C] contiguous,
// dst float32, float16 or bfloat16 [N C H W], Contiguous or ChannelsLast, on the same device; C is
// 1 to 4. mean and std have C values. The work is enqueued on the current stream; nothing is
// allocated on the device and nothing waits.
func NormalizeImages(dst, src *Tensor, mean, std []float32) error {
	pair := [2]*Tensor{dst, src}
	return with("NormalizeImages", pair[:], func(c []*capi.Tensor) error { return capi.NormalizeImages(c[0], c[1], mean, std) })
}

// CopyBatch is one step of a prefetcher in one call, enqueued on the stream: wait for after, copy
// every src[i] to dst[i] without blocking, record done. Either event may be nil. Pairs have the
// same shape and dtype, and host memory is pinned: otherwise it is an error and nothing is
// enqueued. The memory must stay as it is until done.
func CopyBatch(stream cuda.Stream, after *cuda.Event, dst, src []*Tensor, done *cuda.Event) error {
	all := make([]*Tensor, 0, 16)
	all = append(append(all, dst...), src...)
	if len(dst) != len(src) {
		return opError("CopyBatch", all, invalid("%d destinations and %d sources", len(dst), len(src)))
	}
	var a, d *capi.Event
	var err error
	if after != nil {
		if a, err = after.Acquire(); err != nil {
			return opError("CopyBatch", all, err)
		}
		defer after.Release()
	}
	if done != nil {
		if d, err = done.Acquire(); err != nil {
			return opError("CopyBatch", all, err)
		}
		defer done.Release()
	}
	return with("CopyBatch", all, func(c []*capi.Tensor) error {
		return capi.CopyBatch(stream.CAPI(), a, c[:len(dst)], c[len(dst):], d)
	})
}

// RecordStream tells LibTorch's allocator that the tensor's memory is used on the stream: once
// freed, it is not handed out again before the stream's work so far is done. Needed for a tensor
// that is used on another stream than the one it was made on and closed without waiting for that.
func (t *Tensor) RecordStream(s cuda.Stream) error {
	return t.use("RecordStream", func(c *capi.Tensor) error { return capi.RecordStream(c, s.CAPI()) })
}

// ManualSeed seeds the default random generators of all devices: with the same seed, operators draw
// the same numbers, and PyTorch's.
func ManualSeed(seed uint64) error { return capi.ManualSeed(seed) }

// SetNumThreads sets how many threads LibTorch uses inside one operator on the CPU, in the whole
// process. Set it once, early; a good value is the CPUs that the process may use, less those that
// loader workers keep busy. It has no effect on GPUs.
func SetNumThreads(n int) error {
	if n < 1 || n > 1<<16 {
		return opError("SetNumThreads", nil, invalid("%d threads: need 1 or more", n))
	}
	return capi.SetNumThreads(int32(n))
}

// NumThreads returns what SetNumThreads sets.
func NumThreads() int { return capi.NumThreads() }
