package torch

import "github.com/torchstream/torchstream/internal/capi"

// CAPI calls fn with the tensors in the form in which this module's other packages pass them to the
// C++ side. They stay open until fn returns. The error is the first one that a tensor carries, or
// fn's with op and the tensors' dtypes and shapes.
func CAPI(op string, tensors []*Tensor, fn func([]*capi.Tensor) error) error {
	return with(op, tensors, fn)
}
