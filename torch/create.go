package torch

import (
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// made returns the result of a constructor. No scope owns it: the caller does.
func made(op string, c *capi.Tensor, err error) (*Tensor, error) {
	if err != nil {
		err = opError(op, nil, err)
		return failed(err), err
	}
	return provenance{}.tensor(c), nil
}

func noDevice(device cuda.Device) error {
	return &capi.Error{
		Code: capi.CodeNoDevice, Origin: "torch",
		Message: "there is no " + device.String() + " on this machine: run on cuda.CPU, or run torchstream doctor",
	}
}

// Empty returns a tensor with undefined values. As with every constructor of this package, the
// caller owns the tensor, and closes it or puts it into a scope with [Scope.Own]. Without a shape
// the tensor is a scalar.
func Empty(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.empty("Empty", shape)
}

// EmptySpec returns an undefined tensor for a batch of the spec's samples: shape [batch,
// spec.Shape...], in the spec's memory format.
func EmptySpec(device cuda.Device, spec Spec, batch int64) (*Tensor, error) {
	o := TensorOptions{Device: device, DType: spec.DType, MemoryFormat: spec.MemoryFormat, exact: true}
	return o.empty("EmptySpec", append([]int64{batch}, spec.Shape...))
}

// Zeros returns a tensor of zeros.
func Zeros(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.Zeros(shape...)
}

// Ones returns a tensor of ones.
func Ones(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.Ones(shape...)
}

// Full returns a tensor whose elements all equal value.
func Full(device cuda.Device, dtype DType, value float64, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.Full(value, shape...)
}

// Rand returns a tensor of numbers from the uniform distribution on [0, 1).
func Rand(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.Rand(shape...)
}

// Randn returns a tensor of numbers from the normal distribution with mean 0 and standard deviation
// 1.
func Randn(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return TensorOptions{Device: device, DType: dtype, exact: true}.Randn(shape...)
}

// Arange returns the int64 tensor 0, 1, ... n-1, on the CPU. [TensorOptions] makes it elsewhere.
func Arange(n int64) (*Tensor, error) { return TensorOptions{Device: cuda.CPU, DType: Int64}.Arange(n) }

// TensorOptions describes the tensors that its methods make. The functions of the same names are
// shorter and make a contiguous tensor without a scope. The zero value makes uint8 tensors on
// cuda.Default().
type TensorOptions struct {
	Device cuda.Device // 0 stands for cuda.Default(), which is the CPU on a machine without a GPU
	DType  DType       // the zero DType is Uint8
	// Scope owns the tensor. If it is nil, the caller does.
	Scope *Scope
	// MemoryFormat is the order of the elements in memory. ChannelsLast needs four dimensions.
	MemoryFormat MemoryFormat
	// Pinned makes a tensor on the CPU, whatever the value of Device, in pinned memory of
	// LibTorch's caching allocator. Copies between it and a GPU do not make the host wait
	// (NonBlocking). A tensor takes as much memory as its size, rounded up to a power of two.
	// cuda.PinnedAllocator reports the totals. The memory of a closed tensor is reused after the
	// copies from and to it. Pinned needs a GPU.
	Pinned bool

	exact bool // Device 0 is the first GPU, not cuda.Default()
}

// Empty returns a tensor with undefined values. Without a shape the tensor is a scalar.
func (o TensorOptions) Empty(shape ...int64) (*Tensor, error) { return o.empty("Empty", shape) }

// Zeros returns a tensor of zeros.
func (o TensorOptions) Zeros(shape ...int64) (*Tensor, error) {
	return o.filled("Zeros", shape, (*Tensor).Zero_)
}

// Ones returns a tensor of ones.
func (o TensorOptions) Ones(shape ...int64) (*Tensor, error) {
	return o.filled("Ones", shape, func(t *Tensor) *Tensor { return t.Fill_(1) })
}

// Full returns a tensor whose elements all equal value.
func (o TensorOptions) Full(value float64, shape ...int64) (*Tensor, error) {
	return o.filled("Full", shape, func(t *Tensor) *Tensor { return t.Fill_(value) })
}

// Rand returns a tensor of numbers from the uniform distribution on [0, 1).
func (o TensorOptions) Rand(shape ...int64) (*Tensor, error) {
	return o.filled("Rand", shape, func(t *Tensor) *Tensor { return t.Uniform_(0, 1) })
}

// Randn returns a tensor of numbers from the normal distribution with mean 0 and standard deviation
// 1.
func (o TensorOptions) Randn(shape ...int64) (*Tensor, error) {
	return o.filled("Randn", shape, func(t *Tensor) *Tensor { return t.Normal_(0, 1) })
}

// Arange returns the tensor 0, 1, ... n-1. n below 0 counts as 0. On a GPU the numbers are computed
// there, and the host does not wait.
func (o TensorOptions) Arange(n int64) (*Tensor, error) {
	n = max(n, 0)
	return o.filled("Arange", []int64{n}, func(t *Tensor) *Tensor {
		_, err := Call("arange.out", n, Keywords{"out": t})
		if err != nil {
			return failed(err)
		}
		return t
	})
}

// Linspace returns steps numbers at equal distances, from start to end.
func (o TensorOptions) Linspace(start, end float64, steps int64) (*Tensor, error) {
	return o.computed("Linspace", []int64{steps}, "linspace.out", start, end, steps)
}

// Eye returns the matrix [n n] with ones on its diagonal and zeros elsewhere.
func (o TensorOptions) Eye(n int64) (*Tensor, error) {
	return o.computed("Eye", []int64{n, n}, "eye.out", n)
}

// RandInt returns a tensor of random integers from low to high-1.
func (o TensorOptions) RandInt(low, high int64, shape ...int64) (*Tensor, error) {
	return o.filled("RandInt", shape, func(t *Tensor) *Tensor { return t.Random_(low, high, RandomOptions{}) })
}

// RandPerm returns the numbers 0, 1, ... n-1 in random order.
func (o TensorOptions) RandPerm(n int64) (*Tensor, error) {
	return o.computed("RandPerm", []int64{n}, "randperm.out", n)
}

// computed returns a new tensor into which the operator has written its result.
func (o TensorOptions) computed(op string, shape []int64, operator string, args ...any) (*Tensor, error) {
	return o.filled(op, shape, func(t *Tensor) *Tensor { return Call1(operator, append(args, Keywords{"out": t})...) })
}

func (o TensorOptions) empty(op string, shape []int64) (*Tensor, error) {
	err := capi.Check()
	if err == nil && o.Scope != nil && o.Scope.s == nil {
		err = invalid("the scope was not made by NewScope")
	}
	d := o.Device
	if d == 0 && !o.exact {
		d = cuda.Default()
	}
	if err == nil && !o.Pinned && (d < cuda.CPU || d >= 0 && int(d) >= cuda.DeviceCount()) {
		err = noDevice(d)
	}
	var c *capi.Tensor
	switch {
	case err != nil:
	case o.Pinned:
		c, err = capi.PinnedTensor(shape, int32(o.DType), int32(o.MemoryFormat))
	default:
		c, err = capi.EmptyTensor(shape, int32(o.DType), int32(d), int32(o.MemoryFormat))
	}
	if err != nil {
		err = opError(op, nil, err)
		return failed(err), err
	}
	t := provenance{scope: o.Scope}.tensor(c)
	return t, t.failure()
}

// filled returns a new tensor after fill has written it in place.
func (o TensorOptions) filled(op string, shape []int64, fill func(*Tensor) *Tensor) (*Tensor, error) {
	t, err := o.empty(op, shape)
	if err != nil {
		return t, err
	}
	if f := fill(t); f.failure() != nil {
		t.Close()
		return f, f.failure()
	}
	return t, nil
}

// PinMemory returns t if it is in pinned memory. Otherwise it returns a copy of the CPU tensor t in
// pinned memory of LibTorch's caching allocator (see TensorOptions.Pinned). It copies on the host
// and returns when the copy is done. It needs a GPU.
func (t *Tensor) PinMemory() *Tensor {
	if cuda.DeviceCount() == 0 && t.Err() == nil {
		return failed(opError("PinMemory", []*Tensor{t}, noDevice(0)))
	}
	return Call1("pin_memory", t)
}

func from(op string, data []byte, elements int, dtype DType, shape []int64) (*Tensor, error) {
	if len(shape) == 0 {
		shape = []int64{int64(elements)}
	}
	err := capi.Check()
	var c *capi.Tensor
	if err == nil {
		c, err = capi.TensorFromData(data, shape, int32(dtype))
	}
	return made(op, c, err)
}

func bytesOf[T any](data []T) []byte {
	var zero T
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(data))), len(data)*int(unsafe.Sizeof(zero)))
}

// Element is an element of a Go slice with the same memory layout as a tensor's element.
type Element interface {
	bool | uint8 | int8 | int16 | int32 | int64 | float32 | float64 | complex64 | complex128
}

func dtypeOf[T Element]() DType {
	var zero T
	switch any(zero).(type) {
	case bool:
		return Bool
	case uint8:
		return Uint8
	case int8:
		return Int8
	case int16:
		return Int16
	case int32:
		return Int32
	case int64:
		return Int64
	case float32:
		return Float32
	case float64:
		return Float64
	case complex64:
		return Complex64
	}
	return Complex128
}

// FromSlice returns a CPU tensor with a copy of data, of the dtype of its elements. The shape must
// have as many elements as data; without a shape the tensor has one dimension.
func FromSlice[T Element](data []T, shape ...int64) (*Tensor, error) {
	return from("FromSlice", bytesOf(data), len(data), dtypeOf[T](), shape)
}

// FromFloat32s returns a CPU tensor with a copy of data. The shape must have as many elements as
// data; without a shape the tensor has one dimension. Make a scalar with Full.
func FromFloat32s(data []float32, shape ...int64) (*Tensor, error) {
	return from("FromFloat32s", bytesOf(data), len(data), Float32, shape)
}

// FromInt64s is FromFloat32s for int64.
func FromInt64s(data []int64, shape ...int64) (*Tensor, error) {
	return from("FromInt64s", bytesOf(data), len(data), Int64, shape)
}

// FromBytes is FromFloat32s for uint8.
func FromBytes(data []byte, shape ...int64) (*Tensor, error) {
	return from("FromBytes", data, len(data), Uint8, shape)
}

// FromMemory returns a CPU tensor over memory without copying. The memory must be C memory, such as
// cuda.Pinned's, of exactly the size that dtype and shape need. It must stay valid until the tensor
// and everything that shares the tensor's storage have gone. Do not pass Go memory: the garbage
// collector does not know the tensor.
func FromMemory(memory []byte, dtype DType, shape ...int64) (*Tensor, error) {
	err := capi.Check()
	var c *capi.Tensor
	if err == nil {
		c, err = capi.TensorFromMemory(memory, shape, int32(dtype))
	}
	return made("FromMemory", c, err)
}
