package torch

import (
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/tensor"
)

// DType is the type of a tensor's elements: see package tensor, which has the same types without
// LibTorch.
type DType = tensor.DType

const (
	Uint8    = tensor.Uint8
	Int8     = tensor.Int8
	Int16    = tensor.Int16
	Int32    = tensor.Int32
	Int64    = tensor.Int64
	Float16  = tensor.Float16
	Float32  = tensor.Float32
	Float64  = tensor.Float64
	Bool     = tensor.Bool
	BFloat16 = tensor.BFloat16

	Complex64    = tensor.Complex64
	Complex128   = tensor.Complex128
	Float8E5M2   = tensor.Float8E5M2
	Float8E4M3FN = tensor.Float8E4M3FN

	noDType DType = -1 // dtype of a failed tensor
)

func integral(d DType) bool {
	switch d {
	case Uint8, Int8, Int16, Int32, Int64, Bool:
		return true
	}
	return false
}

func isComplex(d DType) bool { return d == Complex64 || d == Complex128 }

func isFloat(d DType) bool {
	switch d {
	case Float16, BFloat16, Float32, Float64, Float8E5M2, Float8E4M3FN:
		return true
	}
	return false
}

// MemoryFormat is the order of a tensor's elements in memory. The zero value is Contiguous.
type MemoryFormat = tensor.MemoryFormat

const (
	Contiguous   = tensor.Contiguous   // the last dimension varies fastest
	ChannelsLast = tensor.ChannelsLast // a tensor of shape [N C H W] with the memory order N H W C
)

// Spec describes a tensor. For a field of a batch, it describes one sample.
type Spec = tensor.Spec

// Named is a tensor with its name, such as the name of a parameter in a model.
type Named struct {
	Name   string
	Tensor *Tensor
}

// The numbers in package tensor equal the C header's. A difference fails to compile.
const (
	_ = -(uint(tensor.Uint8) ^ capi.Uint8)
	_ = -(uint(tensor.Int8) ^ capi.Int8)
	_ = -(uint(tensor.Int16) ^ capi.Int16)
	_ = -(uint(tensor.Int32) ^ capi.Int32)
	_ = -(uint(tensor.Int64) ^ capi.Int64)
	_ = -(uint(tensor.Float16) ^ capi.Float16)
	_ = -(uint(tensor.Float32) ^ capi.Float32)
	_ = -(uint(tensor.Float64) ^ capi.Float64)
	_ = -(uint(tensor.Bool) ^ capi.Bool)
	_ = -(uint(tensor.BFloat16) ^ capi.BFloat16)
	_ = -(uint(tensor.Complex64) ^ capi.Complex64)
	_ = -(uint(tensor.Complex128) ^ capi.Complex128)
	_ = -(uint(tensor.Float8E5M2) ^ capi.Float8E5M2)
	_ = -(uint(tensor.Float8E4M3FN) ^ capi.Float8E4M3FN)
	_ = -(uint(tensor.Contiguous) ^ capi.Contiguous)
	_ = -(uint(tensor.ChannelsLast) ^ capi.ChannelsLast)
)

// Reduction selects how a loss combines its elements. The zero value is the mean.
type Reduction int32

const (
	// ReduceMean is the mean of the elements; for CrossEntropy with weights, the weighted mean.
	ReduceMean Reduction = iota
	ReduceSum
	ReduceNone // one loss per element
)

// libtorch returns the number in at::Reduction: None 0, Mean 1, Sum 2.
func (r Reduction) libtorch() int64 {
	switch r {
	case ReduceMean:
		return 1
	case ReduceSum:
		return 2
	case ReduceNone:
		return 0
	}
	return int64(r) // LibTorch refuses the number
}
