package checkpoint

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/checkpoint/internal/ptfile"
	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// StoredTensor is a tensor in an open file. It can be read until the File is closed.
type StoredTensor struct {
	from  *File
	entry entry
	name  string // the tensor's name in the file; "" for the file's root value
}

// Spec returns the tensor's name, dtype and shape. For a tensor of a [File.Value] the name is the
// path of its keys, joined by dots.
func (s *StoredTensor) Spec() torch.Spec {
	return torch.Spec{Name: s.name, DType: s.entry.dtype, Shape: slices.Clone(s.entry.shape)}
}

// TiedTo reports whether two tensors of a PyTorch file have the same elements in memory, as tied
// weights have.
func (s *StoredTensor) TiedTo(other *StoredTensor) bool {
	a, b := s.entry.stored, other.entry.stored
	return a != nil && b != nil && a.Storage == b.Storage && a.DType() == b.DType() && a.Offset == b.Offset &&
		slices.Equal(a.Shape, b.Shape) && slices.Equal(a.Strides, b.Strides)
}

// Read returns the tensor, on the CPU. It belongs to the caller.
func (s *StoredTensor) Read() (*torch.Tensor, error) {
	t, err := s.from.read(s.entry)
	if err != nil {
		return nil, s.failed(err)
	}
	return t, nil
}

// ReadInto reads the tensor into t, a contiguous tensor on the CPU with the same dtype and shape.
// If it fails, the values of t are undefined.
func (s *StoredTensor) ReadInto(t *torch.Tensor) error {
	err := t.Err()
	switch {
	case err != nil:
	case t.Device() != cuda.CPU || t.DType() != s.entry.dtype || !slices.Equal(t.Shape(), s.entry.shape):
		err = fmt.Errorf("%v%v on %v, want %v%v on the CPU: %w", t.DType(), t.Shape(), t.Device(), s.entry.dtype, s.entry.shape,
			cuda.ErrInvalidArgument)
	case !t.IsContiguous(torch.Contiguous):
		err = fmt.Errorf("a tensor that is not contiguous: %w", cuda.ErrInvalidArgument)
	default:
		err = s.from.readInto(t, s.entry)
	}
	if err != nil {
		return s.failed(err)
	}
	return nil
}

// ReadPart returns n elements of the tensor, on the CPU, as a row. The elements are numbered in the
// memory order of a dense tensor with these strides; first is the number of the row's first
// element. If the file has this order, ReadPart reads and allocates only these elements. Otherwise
// it reads the whole tensor. In a file, tensors have contiguous strides, except for tensors that
// ranks have written. The row belongs to the caller.
func (s *StoredTensor) ReadPart(strides []int64, first, n int64) (*torch.Tensor, error) {
	t, err := s.from.readPart(s.entry, strides, first, n)
	if err != nil {
		return nil, s.failed(err)
	}
	return t, nil
}

// failed adds the names of the file and the tensor to a read error.
func (s *StoredTensor) failed(err error) error {
	if s.name == "" {
		return fmt.Errorf("checkpoint: %s: %w", s.from.path, err)
	}
	return fmt.Errorf("checkpoint: %s: tensor %s: %w", s.from.path, s.name, err)
}

// Read returns the file's tensor with this name, on the CPU. The tensor belongs to the caller.
func (f *File) Read(name string) (*torch.Tensor, error) {
	s, err := f.Tensor(name)
	if err != nil {
		return nil, err
	}
	return s.Read()
}

// Map returns the file's tensor with this name, on the CPU, without reading it. The tensor's memory
// is the mapped file: the system reads a page on first use. Writing to the tensor does not change
// the file. The tensor belongs to the caller, and may outlive the File. Do not shorten the file
// while the tensor lives: the system kills a process that reads a missing page. (The functions that
// save checkpoints replace files and never modify one.)
//
// Unlike Read, Map does not verify the checksums of files that this package wrote.
//
// Only a safetensors file can be mapped. Map falls back to Read for bool tensors, whose bytes must
// be checked, and for tensors whose bytes are not aligned in the file.
func (f *File) Map(name string) (*torch.Tensor, error) {
	e, err := f.find(name)
	switch {
	case err != nil:
		return nil, err
	case e.shard != nil:
		return e.shard.Map(name)
	case f.pytorch != nil:
		return nil, fmt.Errorf("checkpoint: %s: a PyTorch file cannot be mapped: Read the tensor", f.path)
	}
	begin := f.data + e.begin
	if e.unread != nil || e.dtype == torch.Bool || e.begin == e.end || begin%int64(e.dtype.Size()) != 0 {
		return f.Read(name)
	}
	file, err := f.mapped.of(f.file)
	if err != nil {
		return nil, fmt.Errorf("checkpoint: %s: %w", f.path, err)
	}
	bytes := file.Narrow(0, begin, e.end-e.begin)
	defer bytes.Close()
	flat := torch.Call1("view.dtype", bytes, e.dtype)
	defer flat.Close()
	shaped := flat.View(e.shape...)
	defer shaped.Close()
	t := shaped.Keep() // not closed by a scope, unlike an operator's result
	if err := t.Err(); err != nil {
		return nil, fmt.Errorf("checkpoint: %s: tensor %s: %w", f.path, name, err)
	}
	return t, nil
}

func (f *File) read(e entry) (*torch.Tensor, error) {
	if e.shard != nil {
		f = e.shard
	}
	if err := e.check(); err != nil { // before it allocates
		return nil, err
	}
	t, err := torch.Empty(cuda.CPU, e.dtype, e.shape...)
	if err == nil {
		err = f.readInto(t, e)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// readInto reads a tensor into one of its dtype and shape.
func (f *File) readInto(t *torch.Tensor, e entry) error {
	if e.shard != nil {
		f = e.shard
	}
	if err := e.check(); err != nil {
		return err
	}
	if t.Elements() == 0 {
		return nil
	}
	b, err := t.Bytes()
	if err != nil {
		return err
	}
	if e.stored != nil {
		if err := e.stored.ReadBytes(b); err != nil {
			return err
		}
		return checkBools(b, e.dtype)
	}
	return f.readBytes(b, e, 0)
}

// readBytes reads elements in file order, which is the order of a dense tensor.
func (f *File) readBytes(b []byte, e entry, first int64) error {
	if e.shard != nil {
		f = e.shard
	}
	if e.unread != nil {
		return e.unread
	}
	if e.stored != nil {
		if err := e.stored.ReadElements(b, first); err != nil {
			return err
		}
	} else if err := f.readPlain(b, e, first*int64(e.dtype.Size())); err != nil {
		return err
	}
	return checkBools(b, e.dtype)
}

// readPlain reads bytes at an offset of a tensor in a safetensors file, and verifies the checksums
// if the file has any.
func (f *File) readPlain(b []byte, e entry, offset int64) error {
	if e.sums != nil {
		return f.readChecked(b, e, offset, e.sums)
	}
	return f.readFull(b, f.data+e.begin+offset)
}

// checkBools returns an error if dtype is Bool and a byte is neither 0 nor 1.
func checkBools(b []byte, dtype torch.DType) error {
	if dtype != torch.Bool {
		return nil
	}
	for i, v := range b {
		if v > 1 {
			return fmt.Errorf("element %d is the byte %d: a BOOL is 0 or 1", i, v)
		}
	}
	return nil
}

func (f *File) readPart(e entry, strides []int64, first, n int64) (*torch.Tensor, error) {
	if e.shard != nil {
		f = e.shard
	}
	if err := e.check(); err != nil { // before it allocates
		return nil, err
	}
	total := torch.Spec{DType: e.dtype, Shape: e.shape}.Elements()
	if len(strides) != len(e.shape) || !tensor.Dense(e.shape, strides) || first < 0 || n < 0 || first > total-n {
		return nil, fmt.Errorf("%d elements from %d of the shape %v in the order of the strides %v: %w", n,
			first, e.shape, strides, cuda.ErrInvalidArgument)
	}
	t, err := torch.Empty(cuda.CPU, e.dtype, n)
	if err != nil || n == 0 {
		return t, err
	}
	if e.ordered(strides) {
		err = f.fillPart(t, e, first)
	} else {
		err = f.cut(t, e, strides, first)
	}
	if err != nil {
		t.Close()
		return nil, err
	}
	return t, nil
}

// ordered reports whether the order of the elements in the file matches the strides, which are
// dense.
func (e *entry) ordered(strides []int64) bool {
	own := ptfile.Contiguous(e.shape)
	if e.stored != nil {
		own = e.stored.Strides
	}
	for d, n := range e.shape {
		if n > 1 && own[d] != strides[d] {
			return false
		}
	}
	return true
}

// fillPart reads elements that are contiguous in the file.
func (f *File) fillPart(t *torch.Tensor, e entry, first int64) error {
	b, err := t.Bytes()
	if err != nil {
		return err
	}
	return f.readBytes(b, e, first)
}

// cut reads the whole tensor, and copies the elements for t.
func (f *File) cut(t *torch.Tensor, e entry, strides []int64, first int64) error {
	read, err := f.read(e)
	if err != nil {
		return err
	}
	scope := torch.NewScope("checkpoint.ReadPart")
	defer scope.Close()
	whole := scope.Own(read)
	row, err := torch.Empty(cuda.CPU, e.dtype, whole.Elements())
	if err != nil {
		return err
	}
	row = scope.Own(row)
	if err := row.AsStrided(e.shape, strides, torch.AsStridedOptions{}).CopyFrom(whole,
		torch.CopyOptions{}); err != nil {
		return err
	}
	return t.CopyFrom(row.Narrow(0, first, t.Elements()), torch.CopyOptions{})
}
