// Package torch replaces package torch in checkpoints that a simulation saves. Its tensors are
// bytes in the host's memory. Operators that no simulated checkpoint needs fail.
package torch

import (
	"errors"
	"slices"

	"github.com/torchstream/torchstream/internal/simworld/cuda"
	"github.com/torchstream/torchstream/tensor"
)

// Types of package tensor.
type (
	DType        = tensor.DType
	MemoryFormat = tensor.MemoryFormat
	Spec         = tensor.Spec
)

// Contiguous is the format of every simulated tensor.
const Contiguous = tensor.Contiguous

// The dtypes.
const (
	Uint8        = tensor.Uint8
	Int8         = tensor.Int8
	Int16        = tensor.Int16
	Int32        = tensor.Int32
	Int64        = tensor.Int64
	Float16      = tensor.Float16
	Float32      = tensor.Float32
	Float64      = tensor.Float64
	Bool         = tensor.Bool
	BFloat16     = tensor.BFloat16
	Complex64    = tensor.Complex64
	Complex128   = tensor.Complex128
	Float8E5M2   = tensor.Float8E5M2
	Float8E4M3FN = tensor.Float8E4M3FN
)

// ErrClosed is the error of a closed tensor.
var ErrClosed = errors.New("the tensor is closed")

var errUnsupported = errors.New("not simulated")

// Named is a tensor with its name.
type Named struct {
	Name   string
	Tensor *Tensor
}

// Tensor is a tensor in memory, or the failure of an operator.
type Tensor struct {
	spec Spec
	data []byte
	err  error
}

// FromBytes returns a uint8 tensor that has these bytes.
func FromBytes(b []byte, shape ...int64) (*Tensor, error) {
	return &Tensor{spec: Spec{DType: Uint8, Shape: slices.Clone(shape)}, data: b}, nil
}

// Empty returns a tensor of zeros.
func Empty(_ cuda.Device, dtype DType, shape ...int64) (*Tensor, error) {
	spec := Spec{DType: dtype, Shape: slices.Clone(shape)}
	return &Tensor{spec: spec, data: make([]byte, spec.Bytes())}, nil
}

// Err returns the tensor's failure.
func (t *Tensor) Err() error { return t.err }

// Shape returns the shape, or nil for a failed tensor.
func (t *Tensor) Shape() []int64 { return slices.Clone(t.spec.Shape) }

// DType returns the dtype.
func (t *Tensor) DType() DType { return t.spec.DType }

// Device returns the CPU.
func (t *Tensor) Device() cuda.Device { return cuda.CPU }

// IsContiguous returns true.
func (t *Tensor) IsContiguous(MemoryFormat) bool { return true }

// Elements returns the number of elements.
func (t *Tensor) Elements() int64 { return t.spec.Elements() }

// Bytes returns the tensor's memory.
func (t *Tensor) Bytes() ([]byte, error) { return t.data, t.err }

// ReadBytes copies the tensor's bytes.
func (t *Tensor) ReadBytes(b []byte) error {
	if t.err == nil && len(b) != len(t.data) {
		return cuda.ErrInvalidArgument
	}
	copy(b, t.data)
	return t.err
}

// Close does nothing.
func (t *Tensor) Close() error { return nil }

// ---- operators that no simulated checkpoint needs

// Keywords are the named arguments of an operator.
type Keywords map[string]any

// AsStridedOptions are the options of AsStrided.
type AsStridedOptions struct{}

// CopyOptions are the options of CopyFrom.
type CopyOptions struct{}

func failed() *Tensor { return &Tensor{err: errUnsupported} }

// Call1 fails.
func Call1(string, ...any) *Tensor { return failed() }

// Narrow fails.
func (t *Tensor) Narrow(dim, start, length int64) *Tensor { return failed() }

// View fails.
func (t *Tensor) View(...int64) *Tensor { return failed() }

// AsStrided fails.
func (t *Tensor) AsStrided(shape, strides []int64, o AsStridedOptions) *Tensor { return failed() }

// Keep returns the tensor.
func (t *Tensor) Keep() *Tensor { return t }

// CopyFrom fails.
func (t *Tensor) CopyFrom(*Tensor, CopyOptions) error { return errUnsupported }

// Scope owns tensors.
type Scope struct{}

// NewScope returns a scope.
func NewScope(string) *Scope { return &Scope{} }

// Own returns the tensor.
func (s *Scope) Own(t *Tensor) *Tensor { return t }

// Close does nothing.
func (s *Scope) Close() error { return nil }
