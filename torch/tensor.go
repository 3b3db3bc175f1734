package torch

import (
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// Tensor is a handle to a LibTorch tensor, or to the error of its construction. Handles are
// immutable, so any number of goroutines may use one; the package documentation describes
// concurrent access to the data.
type Tensor struct {
	h     *handle
	scope *Scope // nil: the code that made the tensor owns it
	more  *more  // nil for a tensor of a scope that did not fail
	marks marks
}

// more holds the fields that few tensors need, so that the results of most operators are small.
type more struct {
	err     error           // the failure of the tensor
	cleanup runtime.Cleanup // frees an unreachable tensor without a scope
	// loose marks an operator's result that no scope owns, until In or SetRequiresGrad.
	loose atomic.Bool
	ends  atomic.Pointer[scopeState] // the scope that In made the owner of a loose tensor
}

// failure returns the error that t carries.
func (t *Tensor) failure() error {
	if t.more == nil {
		return nil
	}
	return t.more.err
}

// Err returns the first error of the chain that led to this tensor, or nil. Err does not report a
// later Close; the next use of the tensor does.
func (t *Tensor) Err() error {
	switch {
	case t == nil:
		return invalid("the tensor is nil")
	case t.failure() != nil:
		return t.failure()
	case t.h == nil:
		return errZero
	}
	return nil
}

// acquire returns the C tensor. A call of t.h.release must follow unless acquire fails.
func (t *Tensor) acquire() (*capi.Tensor, error) {
	if err := t.Err(); err != nil {
		return nil, err
	}
	if c := t.h.acquire(); c != nil {
		return c, nil
	}
	return nil, t.gone()
}

// gone returns the error of a tensor without a handle or with a closed one.
func (t *Tensor) gone() error {
	if t.h == nil {
		return errZero
	}
	if t.scope != nil && t.scope.s.isClosed() {
		return t.scope.s.ended()
	}
	if t.more != nil {
		if s := t.more.ends.Load(); s != nil && s.isClosed() {
			return s.endedByIn()
		}
	}
	return closedError("the tensor was closed")
}

// use runs fn on the C tensor and adds the operator's name and place to its error.
func (t *Tensor) use(op string, fn func(c *capi.Tensor) error) error {
	c, err := t.acquire()
	if err == nil {
		defer t.h.release()
		err = fn(c)
	}
	if err != nil && (t == nil || t.failure() == nil) {
		err = opError(op, []*Tensor{t}, err)
	}
	return err
}

// info implements methods that cannot return an error.
func (t *Tensor) info() (i capi.TensorInfo, ok bool) {
	c, err := t.acquire()
	if err != nil {
		return i, false
	}
	defer t.h.release()
	i, err = capi.DescribeTensor(c)
	return i, err == nil
}

// Shape returns the sizes of the dimensions: empty for a scalar, nil if the tensor failed or is
// closed.
func (t *Tensor) Shape() []int64 {
	return t.perDimension(func(c *capi.Tensor, out []int64) error { return capi.TensorShape(c, out, nil) })
}

// Strides returns the distance in elements between neighbours in each dimension, or nil if the
// tensor failed or is closed.
func (t *Tensor) Strides() []int64 {
	return t.perDimension(func(c *capi.Tensor, out []int64) error { return capi.TensorShape(c, nil, out) })
}

func (t *Tensor) perDimension(read func(c *capi.Tensor, out []int64) error) []int64 {
	c, err := t.acquire()
	if err != nil {
		return nil
	}
	defer t.h.release()
	i, err := capi.DescribeTensor(c)
	if err != nil {
		return nil
	}
	out := make([]int64, i.Dims)
	if read(c, out) != nil {
		return nil
	}
	return out
}

// Elements returns the number of elements, or 0 if the tensor failed or is closed.
func (t *Tensor) Elements() int64 {
	i, _ := t.info()
	return i.NumElements
}

// DType returns the type of the elements, or DType(-1) if the tensor failed or is closed.
func (t *Tensor) DType() DType {
	i, ok := t.info()
	if !ok {
		return noDType
	}
	return DType(i.DType)
}

// Device returns the device of the tensor's memory, or cuda.CPU if the tensor failed or is closed.
func (t *Tensor) Device() cuda.Device {
	i, ok := t.info()
	if !ok {
		return cuda.CPU
	}
	return cuda.Device(i.Device)
}

// DevicesAndDTypes returns the device and the dtype of each tensor. It makes one call to LibTorch
// for all tensors, unlike [Tensor.Device] and [Tensor.DType]. It fails if a tensor failed, is
// closed or is nil.
func DevicesAndDTypes(tensors ...*Tensor) ([]cuda.Device, []DType, error) {
	numbers := make([]int32, 2*len(tensors))
	devices, dtypes := numbers[:len(tensors)], numbers[len(tensors):]
	if err := with("DevicesAndDTypes", tensors,
		func(cs []*capi.Tensor) error { return capi.TensorKinds(cs, devices, dtypes) }); err != nil {
		return nil, nil, err
	}
	on, of := make([]cuda.Device, len(tensors)), make([]DType, len(tensors))
	for i := range tensors {
		on[i], of[i] = cuda.Device(devices[i]), DType(dtypes[i])
	}
	return on, of, nil
}

// IsContiguous reports whether the elements are in memory in the given order without gaps.
func (t *Tensor) IsContiguous(f MemoryFormat) bool {
	i, ok := t.info()
	switch {
	case !ok:
		return false
	case f == ChannelsLast:
		return i.ChannelsLast
	}
	return i.Contiguous
}

// IsPinned reports whether the memory is page-locked host memory, from which copies to a GPU are
// asynchronous.
func (t *Tensor) IsPinned() bool {
	i, _ := t.info()
	return i.Pinned
}

// Scope returns the scope that owns the tensor, or nil if no scope does.
func (t *Tensor) Scope() *Scope {
	if t == nil {
		return nil
	}
	return t.scope
}

// Close frees the tensor. If operators are using the tensor, the last of them frees it. Close also
// closes the handles that NoGrad, Autocast, Numerics and their opposites made from t. It does not
// affect other references (Keep, In, views, autograd's). A tensor may be closed before its scope.
// Closing a failed, nil or closed tensor does nothing. The error is always nil: it makes Tensor an
// io.Closer.
func (t *Tensor) Close() error {
	if t != nil && t.h != nil {
		if t.more != nil {
			t.more.cleanup.Stop()
		}
		t.h.close()
		reclaim()
	}
	return nil
}

// Keep returns a handle to the same tensor that no scope owns. The caller must close it. t itself
// still ends with its scope.
//
// Keep refuses memory that its owner refills, such as the fields of a prefetcher's batch and their
// views, with cuda.ErrInvalidArgument: the kept tensor would change its values with a later batch.
// Clone such a tensor.
func (t *Tensor) Keep() *Tensor {
	err := t.use("Keep", func(c *capi.Tensor) error {
		lent, err := capi.IsLent(c)
		if lent {
			err = invalid("the tensor is in a slot, which later batches overwrite: Clone the tensor and " +
				"keep the clone, or Retain the batch")
		}
		return err
	})
	if err != nil {
		return failed(err)
	}
	return t.reference("Keep", nil)
}

// Lend marks the tensor's memory, which its views share, as refilled by its owner. Keep then
// refuses such tensors. It is for packages that reuse memory, as prefetcher does. The mark ends
// with the memory, or with Lend(false).
func (t *Tensor) Lend(lent bool) error {
	return t.use("Lend", func(c *capi.Tensor) error { return capi.SetLent(c, lent) })
}

// In returns a handle to the same tensor that the scope s owns. The ownership of t does not change
// if t comes from a constructor, from Keep or from another scope, or is a parameter (see
// [Tensor.SetRequiresGrad]).
//
// If t is the result of an operator and no scope owns it, t ends with s too, because nothing else
// would close it: w.Narrow(0, 0, n).In(s) leaves nothing behind. To use such a result after the end
// of s, give it to a longer-lived scope before the first In:
//
//	mask = program.Own(ones.Tril(0)) // not mask := ones.Tril(0)
//
// A function that takes tensors of its caller, and must not end them, writes s.Own(t.Keep()) for
// tensors without a scope.
func (t *Tensor) In(s *Scope) *Tensor {
	in := t.within(s)
	if in.failure() == nil && t.scope == nil {
		s.adopt(t)
	}
	return in
}

// within returns a handle that s owns, and does not change t.
func (t *Tensor) within(s *Scope) *Tensor {
	if s == nil || s.s == nil {
		if t != nil && t.failure() != nil {
			return failed(t.failure())
		}
		return failed(opError("In", []*Tensor{t}, invalid("the scope is nil, or was not made by NewScope")))
	}
	return t.reference("In", s)
}

func (t *Tensor) reference(op string, s *Scope) *Tensor {
	var r *capi.Tensor
	err := t.use(op, func(c *capi.Tensor) (err error) {
		r, err = capi.RetainTensor(c)
		return err
	})
	if err != nil {
		return failed(err)
	}
	n := provenance{scope: s, marks: t.marks}.tensor(r)
	if err := n.failure(); err != nil {
		return failed(opError(op, []*Tensor{t}, err))
	}
	return n
}

// NoGrad returns a marked handle to the same tensor, with the same owner. Operators with a marked
// operand record nothing for backward, and mark their results. NoGrad makes no call to LibTorch.
func (t *Tensor) NoGrad() *Tensor { return t.mark("NoGrad", 0, noGrad) }

// EnableGrad returns a handle to the same tensor without the mark of NoGrad, with the same owner.
// It is for a hook, or the Backward of a [Function], that runs a forward pass and needs its
// gradients, because the handles that such a function gets are marked. EnableGrad makes no call to
// LibTorch.
func (t *Tensor) EnableGrad() *Tensor { return t.mark("EnableGrad", noGrad, 0) }

// Autocast returns a marked handle to the same tensor, with the same owner. Operators with a marked
// operand run under LibTorch's autocast, and mark their results. Products and convolutions cast
// their float32 operands to dtype, which is [BFloat16] or [Float16]. Losses, norms and other
// operators that need range or precision cast to float32. Other operators run in their operands'
// dtype. The lists of operators are PyTorch's for torch.autocast, on the CPU and on a GPU. Autocast
// makes no call to LibTorch.
//
//	loss := net.Forward(batch.Images.Autocast(torch.BFloat16)).CrossEntropy(batch.Labels)
//	err := loss.Backward()
//
// Parameters stay float32 and get float32 gradients. Only their casts are of lower precision.
// Unlike in PyTorch, an operator keeps no cast for the next operator. A weight that a forward pass
// uses several times is therefore cast each time, and its gradients are added in float32.
// [ParameterCasts] casts the weights of a pass once. Backward runs each operator in the dtypes of
// its forward pass, outside of autocast. Float16 needs a scaled loss: see GradScaler in package
// optim. Operands of one operator that are marked with different dtypes are an error.
func (t *Tensor) Autocast(dtype DType) *Tensor {
	var as marks
	switch dtype {
	case BFloat16:
		as = autocastBFloat16
	case Float16:
		as = autocastFloat16
	default:
		if t.Err() != nil {
			return t.mark("Autocast", 0, 0) // t's own error comes first
		}
		return failed(opError("Autocast", []*Tensor{t},
			invalid("to %v: give BFloat16 or Float16, or end autocast with NoAutocast", dtype)))
	}
	return t.mark("Autocast", autocastBFloat16|autocastFloat16, as)
}

// NoAutocast returns a handle to the same tensor without the mark of [Tensor.Autocast]. The dtype
// stays: convert it with ToDType if the following operators need float32.
func (t *Tensor) NoAutocast() *Tensor {
	return t.mark("NoAutocast", autocastBFloat16|autocastFloat16, 0)
}

// mark returns a handle to the same tensor. It removes the marks in without and adds the marks in
// with.
func (t *Tensor) mark(op string, without, with marks) *Tensor {
	if err := t.Err(); err != nil {
		if t == nil || t.failure() == nil {
			err = opError(op, []*Tensor{t}, err)
		}
		return failed(err)
	}
	return &Tensor{h: t.h, scope: t.scope, more: t.more, marks: t.marks&^without | with}
}

// marked returns a handle that has the marks of t and also m. It returns t if t has them all.
func (t *Tensor) marked(m marks) *Tensor {
	if t.marks|m == t.marks {
		return t
	}
	return &Tensor{h: t.h, scope: t.scope, more: t.more, marks: t.marks | m}
}

// describe formats the tensor for an error, such as "float32[2 3] cpu".
func (t *Tensor) describe() string {
	switch {
	case t == nil:
		return "nil"
	case t.failure() != nil:
		return "failed"
	}
	c, err := t.acquire()
	if err != nil {
		return "closed"
	}
	defer t.h.release()
	i, err := capi.DescribeTensor(c)
	if err != nil {
		return "unknown"
	}
	size := make([]int64, i.Dims)
	if err := capi.TensorShape(c, size, nil); err != nil {
		return "unknown"
	}
	return header(DType(i.DType), size, cuda.Device(i.Device))
}

func header(d DType, size []int64, device cuda.Device) string {
	return fmt.Sprintf("%v%v %v", d, size, device)
}
