// Package tensor describes tensors without holding any: element types, memory formats, the fields
// of a sample, and the work that turns a field into a network's input. It uses neither cgo nor
// LibTorch, so that a source of batches, such as imageloader, can be used without them.
//
// Package torch has the same types as aliases: torch.DType is tensor.DType.
package tensor

import (
	"cmp"
	"fmt"
	"slices"
)

// DType is the type of a tensor's elements. The values are the same as LibTorch's.
type DType int32

const (
	Uint8    DType = 0
	Int8     DType = 1
	Int16    DType = 2
	Int32    DType = 3
	Int64    DType = 4
	Float16  DType = 5
	Float32  DType = 6
	Float64  DType = 7
	Bool     DType = 11
	BFloat16 DType = 15

	Complex64    DType = 9  // two float32
	Complex128   DType = 10 // two float64
	Float8E5M2   DType = 23 // 5 bits of exponent and 2 of mantissa, with infinities
	Float8E4M3FN DType = 24 // 4 bits of exponent and 3 of mantissa, to 448, without infinities
)

// describe returns PyTorch's name of the type and the size of one element in bytes. The size is 0
// for a type that is not among the constants.
func (d DType) describe() (name string, size int) {
	switch d {
	case Uint8:
		return "uint8", 1
	case Int8:
		return "int8", 1
	case Int16:
		return "int16", 2
	case Int32:
		return "int32", 4
	case Int64:
		return "int64", 8
	case Float16:
		return "float16", 2
	case Float32:
		return "float32", 4
	case Float64:
		return "float64", 8
	case Bool:
		return "bool", 1
	case BFloat16:
		return "bfloat16", 2
	case Complex64:
		return "complex64", 8
	case Complex128:
		return "complex128", 16
	case Float8E5M2:
		return "float8_e5m2", 1
	case Float8E4M3FN:
		return "float8_e4m3fn", 1
	}
	return d.foreign(), 0
}

// foreign returns PyTorch's name of a type that is not among the constants, for errors about files.
func (d DType) foreign() string {
	switch d {
	case 8:
		return "complex32"
	case 25:
		return "float8_e5m2fnuz"
	case 26:
		return "float8_e4m3fnuz"
	case 27:
		return "uint16"
	case 28:
		return "uint32"
	case 29:
		return "uint64"
	case 44:
		return "float8_e8m0fnu"
	}
	return fmt.Sprintf("DType(%d)", int32(d))
}

// Known reports whether d is one of the types above.
func (d DType) Known() bool { return d.Size() != 0 }

// String returns PyTorch's name of the type without the prefix: "float32".
func (d DType) String() string {
	name, _ := d.describe()
	return name
}

// Size returns the size of one element in bytes, or 0 for an unknown type.
func (d DType) Size() int {
	_, size := d.describe()
	return size
}

// Dense reports whether a tensor's elements fill a range of memory without gaps or overlaps, in any
// order of dimensions.
func Dense(shape, strides []int64) bool {
	order := make([]int, 0, len(shape))
	for d, n := range shape {
		if n == 0 {
			return true
		}
		if n > 1 {
			order = append(order, d)
		}
	}
	slices.SortFunc(order, func(a, b int) int { return cmp.Compare(strides[a], strides[b]) })
	next := int64(1)
	for _, d := range order {
		if strides[d] != next {
			return false
		}
		next *= shape[d]
	}
	return true
}

// MemoryFormat is the order of a tensor's elements in memory. The zero value is Contiguous.
type MemoryFormat int32

const (
	Contiguous   MemoryFormat = 0 // the last dimension is the densest
	ChannelsLast MemoryFormat = 2 // a tensor of shape [N C H W], stored as N H W C
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

// Spec describes a tensor. For a field of a batch, DType and Shape describe one sample.
type Spec struct {
	Name  string // the field's name, for example "images"
	DType DType
	Shape []int64
	// MemoryFormat applies to the whole batch. ChannelsLast needs a Shape of three dimensions (C H
	// W).
	MemoryFormat MemoryFormat
}

// Elements returns the number of elements. An empty shape has one element.
func (s Spec) Elements() int64 {
	n := int64(1)
	for _, d := range s.Shape {
		n *= d
	}
	return n
}

// Bytes returns the size of the tensor in bytes.
func (s Spec) Bytes() int64 { return s.Elements() * int64(s.DType.Size()) }

// Finish describes the work on the device that turns a field of images into its output. The field
// is uint8 [H W C] for each sample, and the output [C H W] in the output's memory format.
//
// With Mean and Std, which have C values each (C is 1 to 4), the output is float32, float16 or
// bfloat16, and out[c] = (in[c]/255 - Mean[c]) / Std[c], computed in float32. Without them the
// output is uint8 and has the field's values.
type Finish struct {
	Mean, Std []float32
}
