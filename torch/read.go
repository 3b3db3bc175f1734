package torch

import (
	"fmt"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
)

// Float64 returns the element of a tensor with exactly one element, converted to float64. It blocks
// until the value is computed.
func (t *Tensor) Float64() (float64, error) {
	var v float64
	err := t.use("Float64", func(c *capi.Tensor) (err error) {
		v, err = capi.TensorItem(c)
		return err
	})
	return v, err
}

// Int64 returns the element of a tensor of integers or booleans with exactly one element. It blocks
// until the value is computed.
func (t *Tensor) Int64() (int64, error) {
	var v int64
	err := t.use("Int64", func(c *capi.Tensor) (err error) {
		v, err = capi.TensorItemInt(c)
		return err
	})
	return v, err
}

// Float32s returns a copy of the elements in logical order, converted to float32. It blocks until
// the elements are computed.
func (t *Tensor) Float32s() ([]float32, error) { return read[float32](t, "Float32s", Float32) }

// Float64s returns a copy of the elements as [Tensor.Float32s] does, converted to float64.
func (t *Tensor) Float64s() ([]float64, error) { return read[float64](t, "Float64s", Float64) }

// Complex128s returns a copy of the elements as [Tensor.Float32s] does, converted to complex128.
func (t *Tensor) Complex128s() ([]complex128, error) {
	return read[complex128](t, "Complex128s", Complex128)
}

// Bools returns a copy of the elements of a bool tensor in logical order. It blocks until they are
// computed.
func (t *Tensor) Bools() ([]bool, error) { return read[bool](t, "Bools", Bool) }

// Int64s returns a copy of the elements in logical order, widened to int64. It refuses
// floating-point tensors, and blocks until the elements are computed.
func (t *Tensor) Int64s() ([]int64, error) { return read[int64](t, "Int64s", Int64) }

func read[T any](t *Tensor, op string, as DType) ([]T, error) {
	var values []T
	err := t.use(op, func(c *capi.Tensor) error {
		i, err := capi.DescribeTensor(c)
		if err != nil {
			return err
		}
		switch d := DType(i.DType); {
		case as == Int64 && !integral(d):
			return invalid("the elements are %v, not integers: convert them with ToDType", d)
		case as == Bool && d != Bool:
			return invalid("the elements are %v, not bool: compare them, or convert them with ToDType", d)
		case isComplex(d) && !isComplex(as):
			return invalid("the elements are %v: read them with Complex128s, or take Real or Abs", d)
		}
		// This bound is in bytes. make panics not far above it, and an expanded tensor can have any
		// number of elements.
		const maxBytes = 1 << 46
		if i.NumElements > maxBytes/int64(as.Size()) {
			return &capi.Error{
				Code: capi.CodeOutOfMemory, Origin: "torch",
				Message: fmt.Sprintf("%d elements do not fit into memory: read a part (Narrow)", i.NumElements),
			}
		}
		src := c
		if DType(i.DType) != as {
			if src, err = capi.TensorTo(c, i.Device, int32(as), false); err != nil {
				return err
			}
			defer capi.FreeTensor(src)
		}
		values = make([]T, i.NumElements)
		return capi.ReadTensor(src, bytesOf(values))
	})
	if err != nil {
		return nil, err
	}
	return values, nil
}

// Memory returns the memory of a contiguous CPU tensor as a slice of its elements, without copying.
// The rules of [Tensor.Bytes] apply. The dtype must be T's. A library that takes slices, such as
// gonum's mat.NewDense(rows, columns, values) for a matrix of float64, then works on the tensor
// itself.
func Memory[T Element](t *Tensor) ([]T, error) {
	var values []T
	err := t.use("Memory", func(c *capi.Tensor) error {
		i, err := capi.DescribeTensor(c)
		if err != nil {
			return err
		}
		if d := DType(i.DType); d != dtypeOf[T]() {
			return invalid("the elements are %v, not %v: convert them with ToDType", d, dtypeOf[T]())
		}
		b, err := capi.TensorBytes(c)
		if err == nil && len(b) > 0 {
			values = unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(b))), int(i.NumElements))
		}
		return err
	})
	return values, err
}

// Bytes returns the memory of a contiguous CPU tensor (Contiguous or ChannelsLast) without copying.
// It first waits for running copies into the tensor. Later copies are not ordered with it. Writes
// to the slice change the tensor. The slice is valid until the tensor, and everything that shares
// its storage, is closed. The caller must keep the tensor reachable until then; defer t.Close()
// does so.
func (t *Tensor) Bytes() ([]byte, error) {
	var b []byte
	err := t.use("Bytes", func(c *capi.Tensor) (err error) {
		b, err = capi.TensorBytes(c)
		return err
	})
	return b, err
}

// ReadBytes copies the elements to dst, in logical order and without gaps. dst must have exactly
// their size. ReadBytes blocks until the elements are computed.
func (t *Tensor) ReadBytes(dst []byte) error {
	return t.use("ReadBytes", func(c *capi.Tensor) error { return capi.ReadTensor(c, dst) })
}

// CopyOptions are the options of [Tensor.CopyFrom].
type CopyOptions struct {
	// NonBlocking returns without waiting where the hardware allows it: between pinned host memory
	// and a GPU, with the same dtype, both contiguous. The source must then stay unchanged until
	// the copy is done. Host reads of a tensor through this package (Float32s, Bytes, an operator)
	// wait for the copies into it. A slice that Bytes returned before the copy shows the new values
	// when the copy is done.
	NonBlocking bool
}

// CopyFrom copies the elements of src into t. src must have t's shape, or a shape that broadcasts
// to t's; it may have any dtype and any device. Gradients do not flow through the copy: use
// [Tensor.Copy_] for a copy that backward sees.
func (t *Tensor) CopyFrom(src *Tensor, o CopyOptions) error {
	e := *opCopy_.entry()
	e.flags |= capi.CallNoGrad
	if !o.NonBlocking {
		e.flags |= capi.CallWaits
	}
	_, err := invoke(&e, []*Tensor{t, src}, []capi.Arg{tensorArg(0), tensorArg(1), boolArg(o.NonBlocking)}, nil, nil)
	return err
}

// Pointer returns the address of the first element, on the host or on the device, for libraries
// that need addresses. It is valid as long as the slice of [Tensor.Bytes].
func (t *Tensor) Pointer() (uintptr, error) {
	var p uintptr
	err := t.use("Pointer", func(c *capi.Tensor) (err error) {
		i, err := capi.DescribeTensor(c)
		if err != nil {
			return err
		}
		p, err = capi.TensorData(c, i.Device)
		return err
	})
	return p, err
}
