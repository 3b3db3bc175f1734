package torch

import (
	"unsafe"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/capi"
)

// made gives the result of a constructor to the caller: no scope owns it.
func made(op string, c *capi.Tensor, err error) (*Tensor, error) {
	if err != nil {
		err = opError(op, nil, err)
		return failed(err), err
	}
	return provenance{}.tensor(c), nil
}

func empty(op string, device cuda.Device, dtype DType, f MemoryFormat, shape []int64) (*Tensor, error) {
	err := capi.Check()
	if err == nil && (device < cuda.CPU || device >= 0 && int(device) >= cuda.DeviceCount()) {
		err = noDevice(device)
	}
	var c *capi.Tensor
	if err == nil {
		c, err = capi.EmptyTensor(shape, int32(dtype), int32(device), int32(f))
	}
	return made(op, c, err)
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
	return empty("Empty", device, dtype, Contiguous, shape)
}

// EmptySpec returns an undefined tensor for a batch of the spec's samples: shape [batch,
// spec.Shape...], in the spec's memory format.
func EmptySpec(device cuda.Device, spec Spec, batch int64) (*Tensor, error) {
	return empty("EmptySpec", device, spec.DType, spec.MemoryFormat, append([]int64{batch}, spec.Shape...))
}

// filled returns a new tensor after fill has written it in place.
func filled(op string, device cuda.Device, dtype DType, shape []int64, fill func(*Tensor) *Tensor) (*Tensor, error) {
	t, err := empty(op, device, dtype, Contiguous, shape)
	if err != nil {
		return t, err
	}
	if f := fill(t); f.failure() != nil {
		t.Close()
		return f, f.failure()
	}
	return t, nil
}

// Zeros returns a tensor of zeros.
func Zeros(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return filled("Zeros", device, dtype, shape, (*Tensor).Zero_)
}

// Ones returns a tensor of ones.
func Ones(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return filled("Ones", device, dtype, shape, func(t *Tensor) *Tensor { return t.Fill_(1) })
}

// Full returns a tensor whose elements all equal value.
func Full(device cuda.Device, dtype DType, value float64, shape ...int64) (*Tensor, error) {
	return filled("Full", device, dtype, shape, func(t *Tensor) *Tensor { return t.Fill_(value) })
}

// Rand returns a tensor of numbers from the uniform distribution on [0, 1).
func Rand(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return filled("Rand", device, dtype, shape, func(t *Tensor) *Tensor { return t.Uniform_(0, 1) })
}

// Randn returns a tensor of numbers from the normal distribution with mean 0 and standard deviation
// 1.
func Randn(device cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	return filled("Randn", device, dtype, shape, func(t *Tensor) *Tensor { return t.Normal_(0, 1) })
}

// Arange returns the int64 tensor 0, 1, ... n-1, on the CPU.
func Arange(n int64) (*Tensor, error) {
	values := make([]int64, max(n, 0))
	for i := range values {
		values[i] = int64(i)
	}
	return FromInt64s(values)
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
// cuda.Pinned's, of exactly the bytes that dtype and shape need. It must stay valid as long as the
// tensor and everything that shares the tensor's storage. Do not pass Go memory: the garbage
// collector does not know the tensor.
func FromMemory(memory []byte, dtype DType, shape ...int64) (*Tensor, error) {
	err := capi.Check()
	var c *capi.Tensor
	if err == nil {
		c, err = capi.TensorFromMemory(memory, shape, int32(dtype))
	}
	return made("FromMemory", c, err)
}
