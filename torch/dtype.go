package torch

import (
	"fmt"

	"github.com/torchstream/torchstream/internal/capi"
)

// DType is the type of a tensor's elements. The numbers are LibTorch's.
type DType int32

const (
	Uint8    DType = capi.Uint8
	Int8     DType = capi.Int8
	Int16    DType = capi.Int16
	Int32    DType = capi.Int32
	Int64    DType = capi.Int64
	Float16  DType = capi.Float16
	Float32  DType = capi.Float32
	Float64  DType = capi.Float64
	Bool     DType = capi.Bool
	BFloat16 DType = capi.BFloat16

	noDType DType = -1 // a failed tensor's
)

var dtypes = [...]struct {
	name string
	size int
}{
	Uint8: {"uint8", 1}, Int8: {"int8", 1}, Int16: {"int16", 2}, Int32: {"int32", 4}, Int64: {"int64", 8}, Float16: {"float16", 2}, Float32: {"float32", 4},
	Float64: {"float64", 8}, Bool: {"bool", 1}, BFloat16: {"bfloat16", 2},
}

func (d DType) known() bool { return d >= 0 && int(d) < len(dtypes) && dtypes[d].size != 0 }

// String returns PyTorch's name of the type without the prefix: "float32".
func (d DType) String() string {
	if !d.known() {
		return fmt.Sprintf("DType(%d)", int32(d))
	}
	return dtypes[d].name
}

// Size returns the bytes of one element; 0 for a number that is no DType.
func (d DType) Size() int {
	if !d.known() {
		return 0
	}
	return dtypes[d].size
}

func (d DType) integral() bool {
	switch d {
	case Uint8, Int8, Int16, Int32, Int64, Bool:
		return true
	}
	return false
}

// MemoryFormat is the order of a tensor's elements in memory. The zero value is Contiguous.
type MemoryFormat int32

const (
	Contiguous   MemoryFormat = capi.Contiguous   // the last dimension is the densest
	ChannelsLast MemoryFormat = capi.ChannelsLast // a tensor of shape [N C H W] that lies in memory as N H W C
)

func (f MemoryFormat) String() string {
	switch f {
	case Contiguous:
		return "contiguous"
	case ChannelsLast:
		return "channels_last"
	}
	return fmt.Sprintf("MemoryFormat(%d)", int32(f))
}

// Spec describes a tensor; of a batch's field, one sample's.
type Spec struct {
	Name         string // of the field, for example "images"
	DType        DType
	Shape        []int64
	MemoryFormat MemoryFormat // of the whole batch: ChannelsLast needs a Shape of three dimensions, C H W
}

// Elements returns the number of elements, 1 for an empty shape.
func (s Spec) Elements() int64 {
	n := int64(1)
	for _, d := range s.Shape {
		n *= d
	}
	return n
}

// Bytes returns the size of the tensor.
func (s Spec) Bytes() int64 { return s.Elements() * int64(s.DType.Size()) }

// Reduction says what a loss over many elements becomes. The zero value is the mean.
type Reduction int32

const (
	ReduceMean Reduction = iota // the mean over the elements (of CrossEntropy with weights: the weighted mean)
	ReduceSum
	ReduceNone // one loss for each element
)

// libtorch is the number in at::Reduction: None 0, Mean 1, Sum 2.
func (r Reduction) libtorch() int64 {
	switch r {
	case ReduceMean:
		return 1
	case ReduceSum:
		return 2
	case ReduceNone:
		return 0
	}
	return int64(r) // LibTorch refuses it by number
}
