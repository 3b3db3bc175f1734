package nn

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/torch"
)

// errChanged reports numbers that the other dtype cannot represent.
var errChanged = errors.New("the conversion would change numbers")

// convertible reports whether loading may convert a tensor from a file's dtype to the module's.
// PyTorch's load_state_dict converts every dtype to every other one, and does not report losses.
//
// Floating-point numbers are rounded to any floating-point dtype, as in PyTorch. Conversion to an
// integer dtype requires that the dtype can represent every number: withDType checks the values.
// The other pairs are refused. In particular, if the file has integers where the module has
// floating-point numbers, the file is from a quantized model. The integers mean nothing without
// that model's scales.
func convertible(file, module torch.DType) bool {
	switch {
	case file == module:
		return true
	case floating(module) || float8(module):
		return floating(file) || float8(file)
	case integer(module):
		return integer(file) || floating(file)
	}
	return complexDType(file) && complexDType(module)
}

func float8(d torch.DType) bool { return d == torch.Float8E5M2 || d == torch.Float8E4M3FN }

func complexDType(d torch.DType) bool { return d == torch.Complex64 || d == torch.Complex128 }

func integer(d torch.DType) bool {
	switch d {
	case torch.Uint8, torch.Int8, torch.Int16, torch.Int32, torch.Int64:
		return true
	}
	return false
}

// withDType converts t to a convertible dtype. The result belongs to the scope of t.
func withDType(t *torch.Tensor, dtype torch.DType) (*torch.Tensor, error) {
	from := t.DType()
	if from == dtype {
		return t, nil
	}
	converted := t.NoGrad().ToDType(dtype)
	if err := converted.Err(); err != nil {
		return nil, err
	}
	if !integer(dtype) {
		return converted, nil
	}
	same, err := converted.ToDType(from).Equal(t)
	if err == nil && !same {
		err = fmt.Errorf("%w: not all of its %v are %v: convert them before, or leave the tensor out "+
			"with LoadOptions.Rename", errChanged, from, dtype)
	}
	return converted, err
}
