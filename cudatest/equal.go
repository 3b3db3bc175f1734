package cudatest

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/torch"
)

// Tolerance bounds the difference of an element: |got - want| <= Absolute + Relative*|want|. If
// both are 0, the bounds of PyTorch's torch.testing.assert_close for the elements' type apply:
//
//	          Relative  Absolute
//	float16   1e-3      1e-5
//	bfloat16  1.6e-2    1e-5
//	float32   1.3e-6    1e-5
//	float64   1e-7      1e-7
//	others    0         0
type Tolerance struct {
	Relative, Absolute float64
	// Exact allows no difference for any type. It excludes Relative and Absolute. Zeros of both
	// signs are equal.
	Exact bool
	// EqualNaN makes two NaNs equal. Otherwise a NaN differs from everything.
	EqualNaN bool
}

// bounds returns the relative and the absolute bound for elements of the type.
func (o Tolerance) bounds(d torch.DType) (relative, absolute float64) {
	if o.Exact || o.Relative != 0 || o.Absolute != 0 {
		return o.Relative, o.Absolute
	}
	switch d {
	case torch.Float16:
		return 1e-3, 1e-5
	case torch.BFloat16:
		return 1.6e-2, 1e-5
	case torch.Float32:
		return 1.3e-6, 1e-5
	case torch.Float64:
		return 1e-7, 1e-7
	}
	return 0, 0
}

func (o Tolerance) check() error {
	for _, bound := range []float64{o.Relative, o.Absolute} {
		if !(bound >= 0) || math.IsInf(bound, 1) {
			return fmt.Errorf("the bounds of a Tolerance are 0 or more, and finite: %v", bound)
		}
	}
	if o.Exact && (o.Relative != 0 || o.Absolute != 0) {
		return fmt.Errorf("Tolerance.Exact excludes Relative and Absolute")
	}
	return nil
}

// Equal fails the test, without ending it, if the tensors differ in dtype or shape, or if an
// element's difference exceeds the tolerance. The message has the number of such elements, and the
// worst one. The tensors may be on different devices. Equal reads them as [torch.Tensor.Float64s]
// does: it waits for the current streams, so order work of other streams before it. Equal reports
// whether the tensors are equal.
func Equal(t testing.TB, got, want *torch.Tensor, o Tolerance) bool {
	t.Helper()
	if err := difference(got, want, o); err != nil {
		t.Errorf("cudatest.Equal: %v", err)
		return false
	}
	return true
}

func difference(got, want *torch.Tensor, o Tolerance) error {
	if err := o.check(); err != nil {
		return err
	}
	if err := got.Err(); err != nil {
		return fmt.Errorf("got: %w", err)
	}
	if err := want.Err(); err != nil {
		return fmt.Errorf("want: %w", err)
	}
	if got.DType() != want.DType() {
		return fmt.Errorf("got dtype %v, want %v", got.DType(), want.DType())
	}
	if !slices.Equal(got.Shape(), want.Shape()) {
		return fmt.Errorf("got shape %v, want %v", got.Shape(), want.Shape())
	}
	switch want.DType() {
	case torch.Int64:
		return differ(got, want, o, (*torch.Tensor).Int64s, func(a, b int64) float64 {
			// The distance of two int64 fits a uint64.
			return float64(uint64(max(a, b)) - uint64(min(a, b)))
		})
	default:
		return differ(got, want, o, (*torch.Tensor).Float64s, func(a, b float64) float64 {
			switch {
			case a == b:
				return 0
			case o.EqualNaN && math.IsNaN(a) && math.IsNaN(b):
				return 0
			case math.IsNaN(a) || math.IsNaN(b) || math.IsInf(a, 0) || math.IsInf(b, 0):
				return math.Inf(1)
			}
			return math.Abs(a - b)
		})
	}
}

// differ reads both tensors and compares them by the distance of two elements.
func differ[T int64 | float64](got, want *torch.Tensor, o Tolerance, read func(*torch.Tensor) ([]T, error),
	distance func(a, b T) float64) error {
	a, err := read(got)
	if err != nil {
		return fmt.Errorf("reading got: %w", err)
	}
	b, err := read(want)
	if err != nil {
		return fmt.Errorf("reading want: %w", err)
	}
	relative, absolute := o.bounds(want.DType())
	count, worst, excess := 0, -1, 0.0
	for i := range b {
		d := distance(a[i], b[i])
		if d == 0 {
			continue
		}
		allowed := absolute
		if d < math.Inf(1) {
			allowed += relative * math.Abs(float64(b[i]))
		}
		if d <= allowed {
			continue
		}
		// Among elements with an infinite difference, the first is named.
		if count++; worst < 0 || d-allowed > excess {
			worst, excess = i, d-allowed
		}
	}
	if count == 0 {
		return nil
	}
	d := distance(a[worst], b[worst])
	return fmt.Errorf("%d of %d elements differ by more than %g + %g*|want|; worst is element %v: got "+
		"%v, want %v, difference %g (relative %.3g)",
		count, len(b), absolute, relative, position(worst, want.Shape()), a[worst], b[worst], d,
		d/math.Abs(float64(b[worst])))
}

// position returns the index of the i-th element of a tensor of this shape, in row-major order.
func position(i int, shape []int64) []int64 {
	at := make([]int64, len(shape))
	for k := len(shape) - 1; k >= 0; k-- {
		at[k] = int64(i) % shape[k]
		i /= int(shape[k])
	}
	return at
}
