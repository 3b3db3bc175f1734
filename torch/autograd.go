package torch

import (
	"errors"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// BackwardOptions are the options of [Tensor.BackwardWith].
type BackwardOptions struct {
	Gradient    *Tensor // gradient of t, with t's shape; nil means 1, and t must be a scalar
	RetainGraph bool    // keep the data of the backward pass for another call
}

// Backward computes the gradients of the scalar t with respect to the leaves that require them, and
// adds them to the leaves' gradients (see [Tensor.Grad]). Backward blocks until all backward work
// is enqueued, not until the device has finished it. The gradients are ordered on the current
// stream of the caller. The whole pass runs under the switches of t (see [Tensor.Numerics]), even
// if the forward operators ran under others.
func (t *Tensor) Backward() error { return t.BackwardWith(BackwardOptions{}) }

// BackwardWith is [Tensor.Backward] with options.
func (t *Tensor) BackwardWith(o BackwardOptions) error {
	return t.use("Backward", func(c *capi.Tensor) error {
		flags := int32(t.marks & numericsMarks)
		if o.RetainGraph {
			flags |= capi.GradRetainGraph
		}
		if o.Gradient == nil {
			return capi.Backward(c, nil, flags)
		}
		g, err := o.Gradient.acquire()
		if err != nil {
			return err
		}
		defer o.Gradient.h.release()
		return capi.Backward(c, g, flags)
	})
}

// Grad returns the gradient of a leaf, or nil if the leaf has none. The handle is owned like an
// operator's result: it joins t's scope, and without a scope the caller must close it. The gradient
// itself lives until it is dropped.
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
	return provenance{t.scope, t.marks}.result(g)
}

// Gradients returns the gradients of leaves as [Tensor.Grad] does, nil for a leaf without one.
// Their handles belong to the scope, which closes them together. The gradients themselves live
// until they are dropped. For many leaves, such as an optimizer's, Gradients is faster than a call
// of Grad for each.
func Gradients(scope *Scope, leaves ...*Tensor) ([]*Tensor, error) {
	if scope == nil || scope.s == nil {
		return nil, opError("Gradients", nil, invalid("the scope is nil, or was not made by NewScope"))
	}
	found := make([]*capi.Tensor, len(leaves))
	if err := with("Gradients", leaves,
		func(cs []*capi.Tensor) error { return capi.LeafGrads(cs, found) }); err != nil {
		return nil, err
	}
	gradients := make([]*Tensor, len(leaves))
	var err error
	for i, c := range found {
		if c == nil {
			continue
		}
		gradients[i] = provenance{scope, leaves[i].marks}.tensor(c) // frees c if the scope has ended
		if failure := gradients[i].failure(); failure != nil && err == nil {
			err = opError("Gradients", []*Tensor{leaves[i]}, failure)
		}
	}
	if err != nil {
		return nil, err
	}
	return gradients, nil
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

// ClearGrads drops the gradients of all tensors in one call. The tensors then have no gradients,
// rather than zero gradients.
func ClearGrads(tensors ...*Tensor) error {
	return with("ClearGrads", tensors, capi.ClearGrads)
}

// RequiresGrad reports whether operators on t record data for backward. It is true for a parameter
// and for a tensor computed from one. It is false under NoGrad and for a failed or closed tensor.
func (t *Tensor) RequiresGrad() bool {
	i, _ := t.info()
	return i.RequiresGrad && t.marks&noGrad == 0
}

// SetRequiresGrad makes a leaf (a tensor that no operator computed) a parameter, or makes a
// parameter constant again.
func (t *Tensor) SetRequiresGrad(requires bool) error {
	err := t.use("SetRequiresGrad", func(c *capi.Tensor) error { return capi.SetRequiresGrad(c, requires) })
	if err == nil && requires && t.more != nil {
		t.more.loose.Store(false) // In does not close a parameter
	}
	return err
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

// NormalizeImages converts decoded images to a network's input: dst[n,c,h,w] = (src[n,h,w,c]/255 -
// mean[c]) / std[c], computed in float32. src is uint8 [N H W C], contiguous. dst is float32,
// float16 or bfloat16 [N C H W], Contiguous or ChannelsLast, on the same device. C is 1 to 4. mean
// and std have C values. The work is enqueued on the current stream. NormalizeImages allocates
// nothing on the device and does not wait.
func NormalizeImages(dst, src *Tensor, mean, std []float32) error {
	pair := [2]*Tensor{dst, src}
	return with("NormalizeImages", pair[:],
		func(c []*capi.Tensor) error { return capi.NormalizeImages(c[0], c[1], mean, std) })
}

// CopyBatch enqueues one step of a prefetcher on the stream in one call: it waits for after, copies
// every src[i] to dst[i] without blocking, and records done. Either event may be nil. Pairs must
// have the same shape and dtype, and host memory must be pinned; otherwise CopyBatch returns an
// error and enqueues nothing. The memory must stay unchanged until the event done is reached.
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

// RecordStream tells LibTorch's allocator that the stream uses the tensor's memory. When the tensor
// is freed, its memory is not reused until the work that is on the stream at that time is done.
// Call it for a tensor that another stream uses, if the tensor is closed without waiting for that
// use.
func (t *Tensor) RecordStream(s cuda.Stream) error {
	return t.use("RecordStream", func(c *capi.Tensor) error { return capi.RecordStream(c, s.CAPI()) })
}

// ManualSeed seeds the default random generators of all devices. Operators draw the same numbers
// for the same seed, and the same numbers as PyTorch.
func ManualSeed(seed uint64) error { return capi.ManualSeed(seed) }

// GeneratorState returns the state of a device's default random generator, uint8 on the CPU: the
// bytes of PyTorch's torch.get_rng_state and torch.cuda.get_rng_state. The caller closes the
// tensor. While another goroutine captures a graph, reading a GPU's generator waits for the end of
// the capture.
func GeneratorState(device cuda.Device) (*Tensor, error) {
	c, err := capi.GeneratorState(int32(device))
	if err != nil {
		err = opError("GeneratorState", nil, err)
		return failed(err), err
	}
	return provenance{}.tensor(c), nil
}

// SetGeneratorState replaces the state of a device's default random generator. Operators then draw
// the same numbers as after the call of [GeneratorState]. It copies the state.
func SetGeneratorState(device cuda.Device, state *Tensor) error {
	return state.use("SetGeneratorState",
		func(c *capi.Tensor) error { return capi.SetGeneratorState(int32(device), c) })
}

// SetNumThreads sets the number of threads, 1 to 65536, that LibTorch uses inside one operator on
// the CPU, in the whole process. Call it once, early: an OS thread that has already computed keeps
// the number that was set then. The default is in the package's documentation, under "Threads". A
// loader's workers compete for the same CPUs. If they limit training on the CPU, a good value is
// the number of CPUs minus the workers' CPUs. It has no effect on GPUs.
func SetNumThreads(n int) error {
	if n < 1 || n > 1<<16 {
		return opError("SetNumThreads", nil, invalid("%d threads: must be 1 to %d", n, 1<<16))
	}
	return capi.SetNumThreads(int32(n))
}

// NumThreads returns the number of threads that LibTorch uses inside one operator on the CPU.
func NumThreads() int { return capi.NumThreads() }

// GradOptions are the options of [Grad].
type GradOptions struct {
	// Gradients has the gradient of each output, with the output's shape. nil means 1, and the
	// output must be a scalar.
	Gradients []*Tensor
	// RetainGraph keeps the data of the backward pass for another call.
	RetainGraph bool
	// CreateGraph records the computation of the gradients, so that they can be differentiated too.
	// It also keeps the data of the backward pass.
	CreateGraph bool
	// AllowUnused returns nil for an input that no output depends on, instead of an error.
	AllowUnused bool

	// noLeafHooks skips the hooks of leaves, in a captured pass.
	noLeafHooks bool
}

// Grad returns the gradients of the outputs with respect to the inputs, one for each input, and
// accumulates nothing into leaves. An input may be any tensor that requires gradients: a parameter,
// or a result. The gradients join scopes like the results of an operator on all outputs and inputs.
// Grad blocks until all backward work is enqueued. Each operator of backward runs on the stream of
// its forward, and the gradients are ordered on the current stream of the caller. The whole pass
// runs under the switches of the outputs (see [Tensor.Numerics]), which must agree. The gradients
// have the outputs' marks.
func Grad(outputs, inputs []*Tensor, o GradOptions) ([]*Tensor, error) {
	all := append(append([]*Tensor(nil), outputs...), inputs...)
	if len(outputs) == 0 || len(inputs) == 0 {
		return nil, opError("Grad", all, invalid("there are no outputs or no inputs"))
	}
	if o.Gradients != nil && len(o.Gradients) != len(outputs) {
		return nil, opError("Grad", all, invalid("%d gradients for %d outputs", len(o.Gradients), len(outputs)))
	}
	at := make([]int, len(outputs)) // index in all of the output's gradient; 0: it has none
	for i, g := range o.Gradients {
		if g != nil {
			at[i] = len(all)
			all = append(all, g)
		}
	}
	var p provenance
	for _, t := range outputs {
		if t != nil {
			p.marks |= t.marks & numericsMarks
		}
	}
	flags := int32(p.marks)
	for flag, set := range map[int32]bool{
		capi.GradRetainGraph: o.RetainGraph, capi.GradCreateGraph: o.CreateGraph, capi.GradAllowUnused: o.AllowUnused,
		capi.GradNoLeafHooks: o.noLeafHooks,
	} {
		if set {
			flags |= flag
		}
	}
	var found []*capi.Tensor
	err := with("Grad", all, func(c []*capi.Tensor) (err error) {
		gradients := make([]*capi.Tensor, len(outputs))
		for i, at := range at {
			if at > 0 {
				gradients[i] = c[at]
			}
		}
		found, err = capi.Grads(c[:len(outputs)], gradients, c[len(outputs):len(outputs)+len(inputs)], flags)
		return err
	})
	if err != nil {
		return nil, err
	}
	for _, t := range all {
		p.scope = youngest(p.scope, t.scope)
	}
	results := make([]*Tensor, len(found))
	for i, c := range found {
		if c != nil {
			results[i] = p.result(c)
			err = errors.Join(err, results[i].failure())
		}
	}
	return results, err
}
