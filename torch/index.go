package torch

import (
	"math"

	"github.com/torchstream/torchstream/internal/capi"
)

// Position stands for dimensions in [Tensor.Index].
type Position uint8

const (
	All      Position = iota // a whole dimension; Python's :
	Ellipsis                 // all dimensions that no other index takes; Python's ...
	NewAxis                  // a new dimension of size 1; Python's None
)

// Interval selects the elements of a dimension between two positions in [Tensor.Index]. It is made
// by Range, From and Until. Negative positions count from the end. Positions beyond the ends are
// clamped to the ends.
type Interval struct{ start, stop, step int64 }

// Range selects the elements from start to before stop; Python's start:stop.
func Range(start, stop int64) Interval { return Interval{start, stop, 1} }

// From selects the elements from start on; Python's start:.
func From(start int64) Interval { return Interval{start, math.MaxInt64, 1} }

// Until selects the elements before stop; Python's :stop.
func Until(stop int64) Interval { return Interval{0, stop, 1} }

// Step selects every n-th of the interval's elements, starting with the first. n must be positive.
func (i Interval) Step(n int64) Interval {
	i.step = n
	return i
}

// At returns the element, row or matrix at the positions of the first dimensions, as a view without
// these dimensions: x.At(i, j) is Python's x[i, j]. Negative positions count from the end.
func (t *Tensor) At(positions ...int64) *Tensor {
	at := make([]any, len(positions))
	for i, p := range positions {
		at[i] = p
	}
	return t.index("At", at)
}

// Index returns the elements that the indices select, with the meaning of PyTorch's t[...]. Each
// index takes the next dimension of t:
//
//	Go                           Python            takes
//	3 (any integer type)         3                 the dimension, which the result lacks
//	torch.Range(1, 5)            1:5               the dimension
//	torch.From(1), Until(-1)     1:, :-1           the dimension
//	torch.Range(0, 9).Step(2)    0:9:2             the dimension
//	torch.All                    :                 the dimension
//	torch.Ellipsis               ...               the dimensions that the others leave
//	torch.NewAxis                None              no dimension
//	a *Tensor of integers        a tensor          the dimension
//	a *Tensor of bool            a tensor          as many dimensions as it has
//	[]int, []int64, []bool       a list            the dimension
//
//	x.Index(0, torch.Range(1, 5))                // x[0, 1:5]
//	x.Index(torch.Ellipsis, 0)                   // x[..., 0]
//	x.Index(x.GtScalar(0))                       // x[x > 0]
//	x.Index(torch.All, []int{2, 0}, torch.NewAxis)
//
// Without tensors and lists the result is a view: x.Index(0).Fill_(1) changes x. With them it is a
// copy. Tensors of integers are broadcast together. Their dimensions come first in the result if
// other indices are between them, and otherwise replace the indexed dimensions. A mask selects the
// elements where it is true. The size of the result depends on the mask, so Index waits for the
// mask to be computed, on a GPU too. It also waits for a tensor of one integer without dimensions,
// and reads its value.
func (t *Tensor) Index(indices ...any) *Tensor { return t.index("Index", indices) }

// SetIndex_ works in place: it writes value to the elements that the indices of [Tensor.Index]
// select. value is a *Tensor whose shape broadcasts to the shape of these elements, or a number
// (int, int64, float64, bool, complex128). It is Python's t[...] = value:
//
//	x.SetIndex_(0, torch.All, torch.From(1)) // x[:, 1:] = 0
//	x.SetIndex_(1, mask)                     // x[mask] = 1
//
// If indices name an element more than once, the element gets one of the values.
func (t *Tensor) SetIndex_(value any, indices ...any) *Tensor {
	const op = "SetIndex_"
	s := selection{op: op, x: t}
	defer s.close()
	err := s.apply(indices)
	if err == nil {
		err = s.set(value)
	}
	if err != nil {
		return s.fail(err)
	}
	return t
}

func (t *Tensor) index(op string, indices []any) *Tensor {
	s := selection{op: op, x: t}
	defer s.close()
	err := s.apply(indices)
	if err != nil {
		return s.fail(err)
	}
	var result *Tensor
	switch {
	case s.tensors != nil:
		result = s.x.IndexTensors(s.positions())
	case s.x == t:
		result = t.Alias()
	default:
		s.made = s.made[:len(s.made)-1] // the last one is s.x, the result
		return s.x
	}
	if err := result.Err(); err != nil {
		return s.fail(err)
	}
	return result
}

// selection is a running index operation. x is t after the indices so far, except tensors. All
// tensors are applied to x together, after the other indices.
type selection struct {
	op      string
	x       *Tensor
	tensors map[int64]*Tensor // by dimension of x
	made    []*Tensor         // intermediate results
}

// fail returns a failed tensor. An error of an operand or of LibTorch names its operator already.
func (s *selection) fail(err error) *Tensor {
	return failed(opErrorOnce(s.op, []*Tensor{s.x}, err))
}

// close frees the intermediate results. Otherwise nothing would free the results without a scope.
func (s *selection) close() {
	for _, t := range s.made {
		t.Close()
	}
}

// own records an intermediate result.
func (s *selection) own(t *Tensor) *Tensor {
	s.made = append(s.made, t)
	return t
}

func (s *selection) apply(indices []any) error {
	shape := s.x.Shape()
	if shape == nil {
		if err := s.x.Err(); err != nil {
			return err
		}
		_, err := s.x.acquire()
		return err
	}
	given := make([]any, len(indices))
	takes, ellipsis := 0, false
	for i, v := range indices {
		var n int
		var err error
		if given[i], n, err = s.normal(i, v); err != nil {
			return err
		}
		if v == Ellipsis {
			if ellipsis {
				return invalid("index %d is a second Ellipsis", i)
			}
			ellipsis = true
		}
		takes += n
	}
	if takes > len(shape) {
		return invalid("the indices take %d dimensions, and the tensor has %d", takes, len(shape))
	}
	dim := int64(0)
	for _, v := range given {
		switch v := v.(type) {
		case int64:
			s.x = s.own(s.x.Select(dim, v))
		case Interval:
			if v.step < 1 {
				return invalid("Step(%d): a step must be positive", v.step)
			}
			s.x = s.own(s.x.Slice(dim, v.start, v.stop, v.step))
			dim++
		case Position:
			switch v {
			case All:
				dim++
			case Ellipsis:
				dim += int64(len(shape) - takes)
			case NewAxis:
				s.x = s.own(s.x.Unsqueeze(dim))
				dim++
			}
		case *Tensor:
			dim += s.record(dim, v)
		}
		if err := s.x.Err(); err != nil {
			return err
		}
	}
	return nil
}

// normal returns an index as an int64, Interval, Position or *Tensor of integers or bool, and the
// number of dimensions that it takes.
func (s *selection) normal(i int, v any) (index any, takes int, err error) {
	switch v := v.(type) {
	case Interval:
		return v, 1, nil
	case Position:
		if v > NewAxis {
			break
		}
		if v == All {
			return v, 1, nil
		}
		return v, 0, nil
	case *Tensor:
		return s.tensor(i, v)
	case []int64:
		return s.list(FromInt64s(v))
	case []int:
		wide := make([]int64, len(v))
		for j, x := range v {
			wide[j] = int64(x)
		}
		return s.list(FromInt64s(wide))
	case []bool:
		return s.list(FromSlice(v))
	}
	if n, ok := anyInteger(v); ok {
		return n, 1, nil
	}
	return nil, 0, invalid("index %d is %s: want an integer, an Interval, All, Ellipsis, NewAxis, a "+
		"*Tensor, []int, []int64 or []bool", i, typeName(v))
}

func (s *selection) list(t *Tensor, err error) (any, int, error) {
	if err != nil {
		return nil, 0, err
	}
	return s.own(t), 1, nil
}

func (s *selection) tensor(i int, t *Tensor) (any, int, error) {
	c, err := t.acquire()
	if err != nil {
		return nil, 0, err
	}
	info, err := capi.DescribeTensor(c)
	t.h.release()
	if err != nil {
		return nil, 0, err
	}
	switch d := DType(info.DType); {
	case d == Bool:
		return t, int(info.Dims), nil
	case d == Uint8: // a mask in PyTorch, which warns
		return nil, 0, invalid("index %d is uint8: convert a mask with ToDType(Bool), integers with ToDType(Int64)", i)
	case !integral(d):
		return nil, 0, invalid("index %d is %v: a tensor of indices has integers or bool", i, d)
	case info.Dims == 0:
		n, err := t.Int64()
		return n, 1, err
	}
	return t, 1, nil
}

// record records a tensor that indexes x from the dimension on, and returns the number of
// dimensions that it takes.
func (s *selection) record(dim int64, t *Tensor) int64 {
	if s.tensors == nil {
		s.tensors = map[int64]*Tensor{}
	}
	takes := int64(1)
	if t.DType() == Bool {
		shape := t.Shape()
		if takes = int64(len(shape)); takes == 0 { // it selects all or nothing of a new dimension
			s.x, t, takes = s.own(s.x.Unsqueeze(dim)), s.own(t.Unsqueeze(0)), 1
		}
	}
	s.tensors[dim] = t
	return takes
}

// positions returns the list of indices of LibTorch's index operators. A mask of several dimensions
// is listed once.
func (s *selection) positions() []*Tensor {
	var list []*Tensor
	for dim, found := int64(0), 0; found < len(s.tensors); dim++ {
		t := s.tensors[dim]
		list = append(list, t)
		if t != nil {
			found++
			if t.DType() == Bool {
				dim += int64(len(t.Shape())) - 1
			}
		}
	}
	return list
}

// set writes the value to the selected elements.
func (s *selection) set(value any) error {
	v, ok := value.(*Tensor)
	if !ok {
		number, err := scalarTensor(value, s.x.DType())
		if err != nil {
			return err
		}
		v = s.own(number)
	}
	if s.tensors != nil {
		return s.x.IndexPut_(s.positions(), s.trimmed(v), IndexPutOptions{}).Err()
	}
	return s.x.Copy_(s.trimmed(v)).Err()
}

// trimmed returns v without leading dimensions of size 1, because v may have more of them than t
// has dimensions.
func (s *selection) trimmed(v *Tensor) *Tensor {
	shape := v.Shape()
	n := 0
	for n < len(shape) && shape[n] == 1 {
		n++
	}
	if n == 0 {
		return v
	}
	return s.own(v.View(shape[n:]...))
}

// anyInteger returns the value of any integer type except uintptr.
func anyInteger(v any) (int64, bool) {
	switch v := v.(type) {
	case int8:
		return int64(v), true
	case int16:
		return int64(v), true
	case uint8:
		return int64(v), true
	case uint16:
		return int64(v), true
	case uint32:
		return int64(v), true
	case uint:
		return int64(v), v <= math.MaxInt64
	case uint64:
		return int64(v), v <= math.MaxInt64
	}
	return integer(v)
}

// scalarTensor returns a CPU tensor without dimensions. An integer for a floating-point dtype, and
// so on, is converted.
func scalarTensor(value any, dtype DType) (*Tensor, error) {
	switch v := value.(type) {
	case float32:
		value = float64(v)
	case float64, bool, complex128:
	case complex64:
		value = complex128(v)
	default:
		n, ok := anyInteger(value)
		if !ok {
			return nil, invalid("the value is %s: want a *Tensor or a number", typeName(value))
		}
		value = n
	}
	out, err := Call("full", []int64{}, value, Keywords{"dtype": dtype})
	if err != nil {
		return nil, err
	}
	return out[0], nil
}
