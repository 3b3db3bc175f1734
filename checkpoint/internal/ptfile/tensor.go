package ptfile

import (
	"fmt"
	"math"
	"slices"

	"github.com/torchstream/torchstream/tensor"
)

const maxDims = 64 // LibTorch's limit

// elementType describes a dtype by its names in files.
type elementType struct {
	dtype   tensor.DType // LibTorch's number, which may be unknown to package tensor
	name    string       // PyTorch's name without the prefix
	size    int64        // bytes of one element
	storage string       // the typed storage class in package torch; "" if there is none
}

func elementTypes() []elementType {
	return []elementType{
		{tensor.Uint8, "uint8", 1, "ByteStorage"},
		{tensor.Int8, "int8", 1, "CharStorage"},
		{tensor.Int16, "int16", 2, "ShortStorage"},
		{tensor.Int32, "int32", 4, "IntStorage"},
		{tensor.Int64, "int64", 8, "LongStorage"},
		{tensor.Float16, "float16", 2, "HalfStorage"},
		{tensor.Float32, "float32", 4, "FloatStorage"},
		{tensor.Float64, "float64", 8, "DoubleStorage"},
		{8, "complex32", 4, ""},
		{9, "complex64", 8, "ComplexFloatStorage"},
		{10, "complex128", 16, "ComplexDoubleStorage"},
		{tensor.Bool, "bool", 1, "BoolStorage"},
		{12, "qint8", 1, "QInt8Storage"},
		{13, "quint8", 1, "QUInt8Storage"},
		{14, "qint32", 4, "QInt32Storage"},
		{tensor.BFloat16, "bfloat16", 2, "BFloat16Storage"},
		{23, "float8_e5m2", 1, ""},
		{24, "float8_e4m3fn", 1, ""},
		{25, "float8_e5m2fnuz", 1, ""},
		{26, "float8_e4m3fnuz", 1, ""},
		{27, "uint16", 2, ""},
		{28, "uint32", 4, ""},
		{29, "uint64", 8, ""},
		{44, "float8_e8m0fnu", 1, ""},
	}
}

// swapped returns the number of bytes to reverse between little-endian and big-endian files: half
// an element for complex numbers.
func (e elementType) swapped() int {
	if e.dtype >= 8 && e.dtype <= 10 {
		return int(e.size) / 2
	}
	return int(e.size)
}

// Tensor is a view of a storage. Its element i0, i1, ... is the storage's element Offset +
// i0*Strides[0] + i1*Strides[1] + ... All elements are inside the storage.
type Tensor struct {
	Shape, Strides []int64 // in elements
	Offset         int64   // in elements
	RequiresGrad   bool
	Parameter      bool // an nn.Parameter
	Storage        *Storage
	element        elementType
}

// Storage is the memory that one or more tensors share.
type Storage struct {
	Key      string // its member in the file is NAME/data/KEY
	Location string // the device it was saved from: "cpu", "cuda:0"
	Bytes    int64
	big      bool // the file is big-endian
	// readAt reads len(p) bytes at an offset within the storage.
	readAt func(p []byte, offset int64) error
}

// NewTensor describes a contiguous tensor with a separate storage, for Write. read fills its
// argument with the tensor's bytes, row-major and little-endian.
func NewTensor(dtype tensor.DType, shape []int64, read func([]byte) error) (*Tensor, error) {
	types := elementTypes()
	i := slices.IndexFunc(types, func(e elementType) bool { return e.dtype == dtype })
	if i < 0 {
		return nil, fmt.Errorf("dtype %v cannot be written to a PyTorch file", dtype)
	}
	t := &Tensor{Shape: slices.Clone(shape), Strides: Contiguous(shape), element: types[i]}
	if len(shape) > maxDims {
		return nil, fmt.Errorf("%d dimensions are more than LibTorch's %d", len(shape), maxDims)
	}
	n, ok := elements(shape)
	if !ok || n > math.MaxInt64/t.element.size {
		return nil, fmt.Errorf("shape %v is negative or too large", shape)
	}
	t.Storage = &Storage{Location: "cpu", Bytes: n * t.element.size, readAt: func(p []byte, offset int64) error {
		if offset == 0 && int64(len(p)) == n*t.element.size {
			return read(p)
		}
		return fmt.Errorf("a part of a tensor to write is read: %d bytes at %d", len(p), offset)
	}}
	return t, nil
}

// NewView describes a tensor with the given strides, whose elements fill a storage without gaps.
// readAt reads len(p) bytes at an offset within the storage.
func NewView(dtype tensor.DType, shape, strides []int64, readAt func(p []byte, offset int64) error) (*Tensor, error) {
	t, err := NewTensor(dtype, shape, nil)
	if err != nil {
		return nil, err
	}
	t.Strides = slices.Clone(strides)
	t.Storage.readAt = readAt
	if err := t.validate(t.Storage.Bytes / t.element.size); err != nil {
		return nil, err
	}
	if !tensor.Dense(t.Shape, t.Strides) {
		return nil, fmt.Errorf("shape %v with strides %v leaves gaps in memory, or repeats elements", shape, strides)
	}
	return t, nil
}

// DType returns the tensor's dtype. It may be unknown to package tensor: see Check.
func (t *Tensor) DType() tensor.DType { return t.element.dtype }

// Bytes returns the size of the tensor's elements in bytes, the length of ReadBytes's buffer.
func (t *Tensor) Bytes() int64 {
	n, _ := elements(t.Shape) // the unpickler and NewTensor have checked the product
	return n * t.element.size
}

// CheckType returns an error that names the dtype if package tensor does not know it.
func (t *Tensor) CheckType() error {
	if !t.element.dtype.Known() {
		return fmt.Errorf("dtype %s is not handled", t.element.name)
	}
	return nil
}

// Check returns the error that ReadBytes would return before reading. A caller can thus check a
// tensor before it allocates memory. It is an error if the dtype is unknown, or if the tensor has
// more bytes than its storage. Expand and as_strided make such tensors, and the file's size does
// not limit their sizes.
func (t *Tensor) Check() error {
	if err := t.CheckType(); err != nil {
		return err
	}
	if t.Bytes() > t.Storage.Bytes {
		return fmt.Errorf("shape %v with strides %v repeats elements: it has %d bytes and its storage "+
			"%d: save tensor.contiguous() instead",
			t.Shape, t.Strides, t.Bytes(), t.Storage.Bytes)
	}
	return nil
}

// ReadBytes reads the tensor's elements into dst, row-major and little-endian. The length of dst
// must be Bytes(). For a tensor that is not contiguous, ReadBytes allocates memory for the
// storage's range from the first to the last element.
func (t *Tensor) ReadBytes(dst []byte) error {
	if err := t.Check(); err != nil {
		return err
	}
	if int64(len(dst)) != t.Bytes() {
		return fmt.Errorf("a buffer of %d bytes for a tensor of %d", len(dst), t.Bytes())
	}
	if len(dst) == 0 {
		return nil
	}
	size := t.element.size
	src := dst
	dense := t.isContiguous()
	if !dense {
		last, _ := t.last()
		src = make([]byte, (last-t.Offset+1)*size)
	}
	if err := t.Storage.readAt(src, t.Offset*size); err != nil {
		return err
	}
	if !dense {
		gather(dst, src, t.Shape, t.Strides, size)
	}
	t.reorder(dst)
	return nil
}

// ReadElements reads elements into dst in memory order, starting with element number first. It
// allocates nothing. The tensor must be dense and contain all of these elements.
func (t *Tensor) ReadElements(dst []byte, first int64) error {
	if err := t.Check(); err != nil {
		return err
	}
	size := t.element.size
	if n, _ := elements(t.Shape); !tensor.Dense(t.Shape, t.Strides) || first < 0 ||
		int64(len(dst))%size != 0 || int64(len(dst))/size > n-first {
		return fmt.Errorf("%d bytes from element %d of a tensor of shape %v and strides %v", len(dst),
			first, t.Shape, t.Strides)
	}
	if len(dst) == 0 {
		return nil
	}
	if err := t.Storage.readAt(dst, (t.Offset+first)*size); err != nil {
		return err
	}
	t.reorder(dst)
	return nil
}

// reorder converts elements from a big-endian file to little-endian.
func (t *Tensor) reorder(b []byte) {
	if unit := t.element.swapped(); t.Storage.big && unit > 1 {
		for i := 0; i < len(b); i += unit {
			slices.Reverse(b[i : i+unit])
		}
	}
}

// isContiguous reports whether the elements are in the storage in row-major order without gaps.
func (t *Tensor) isContiguous() bool {
	next := int64(1)
	for i := len(t.Shape) - 1; i >= 0; i-- {
		if t.Shape[i] != 1 && t.Strides[i] != next {
			return false
		}
		next *= t.Shape[i]
	}
	return true
}

// last returns the position of the tensor's last element in its storage, or false if the position
// overflows. The tensor must not be empty.
func (t *Tensor) last() (int64, bool) {
	last := t.Offset
	for i, n := range t.Shape {
		if stride := t.Strides[i]; n > 1 && stride > 0 {
			if stride > (math.MaxInt64-last)/(n-1) {
				return 0, false
			}
			last += (n - 1) * stride
		}
	}
	return last, true
}

// validate checks that sizes, strides and offset stay within a storage with the given number of
// elements.
func (t *Tensor) validate(available int64) error {
	if len(t.Shape) != len(t.Strides) {
		return fmt.Errorf("a tensor has %d sizes and %d strides", len(t.Shape), len(t.Strides))
	}
	if len(t.Shape) > maxDims {
		return fmt.Errorf("%d dimensions are more than LibTorch's %d", len(t.Shape), maxDims)
	}
	for i, n := range t.Shape {
		if n < 0 || t.Strides[i] < 0 {
			return fmt.Errorf("shape %v with strides %v: neither may be negative", t.Shape, t.Strides)
		}
	}
	if t.Offset < 0 {
		return fmt.Errorf("a tensor starts at element %d of its storage", t.Offset)
	}
	n, ok := elements(t.Shape)
	if !ok || n > math.MaxInt64/t.element.size {
		return fmt.Errorf("shape %v is too large", t.Shape)
	}
	if n == 0 {
		return nil
	}
	if last, ok := t.last(); !ok || last >= available {
		return fmt.Errorf("shape %v with strides %v from element %d reaches past its storage of %d "+
			"elements", t.Shape, t.Strides,
			t.Offset, available)
	}
	return nil
}

// elements returns the number of elements of a shape, or false if a size is negative or the product
// overflows.
func elements(shape []int64) (int64, bool) {
	if slices.Contains(shape, 0) {
		return 0, slices.Min(shape) == 0
	}
	n := int64(1)
	for _, size := range shape {
		if size < 0 || n > math.MaxInt64/size {
			return 0, false
		}
		n *= size
	}
	return n, true
}

// Contiguous returns PyTorch's strides for a contiguous tensor, where a size of 0 counts as 1.
func Contiguous(shape []int64) []int64 {
	strides := make([]int64, len(shape))
	next := int64(1)
	for i := len(shape) - 1; i >= 0; i-- {
		strides[i] = next
		next *= max(shape[i], 1)
	}
	return strides
}

// gather copies a tensor's elements from src, which starts at the tensor's first element, to dst in
// row-major order.
func gather(dst, src []byte, shape, strides []int64, size int64) {
	rows := shape[:len(shape)-1]
	length, step := shape[len(rows)]*size, strides[len(rows)]*size
	at := make([]int64, len(rows)) // index of the row
	start := int64(0)              // position of the row in src
	for len(dst) > 0 {
		if step == size {
			copy(dst[:length], src[start:])
		} else {
			from := start
			for to := int64(0); to < length; to += size {
				copy(dst[to:to+size], src[from:from+size])
				from += step
			}
		}
		dst = dst[length:]
		for d := len(rows) - 1; d >= 0; d-- {
			at[d]++
			start += strides[d] * size
			if at[d] < rows[d] {
				break
			}
			start -= at[d] * strides[d] * size
			at[d] = 0
		}
	}
}
