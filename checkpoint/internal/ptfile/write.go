package ptfile

import (
	"archive/zip"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/torchstream/torchstream/checkpoint/internal/blocksum"
)

// Write writes a file that torch.load(path, weights_only=True) can read. root may have the types
// that Open returns, except Name, and also int. Tensors are from NewTensor or from another file.
// Tensors that share a Storage share it in the file too. The file has checksums, which Open
// verifies and PyTorch ignores. Write holds one storage in memory at a time. comment is the zip
// archive's comment, which PyTorch does not read; it may be empty. Values that Open would refuse
// are an error, and nothing is written.
func Write(w io.Writer, root any, comment string) error { return write(w, root, comment, usual()) }

func write(w io.Writer, root any, comment string, limit limits) error {
	p := &pickler{numbers: map[*Storage]int{}}
	p.op(opProto, 2)
	if err := p.value(root, 0); err != nil {
		return err
	}
	p.op(opStop)
	if len(p.out) > maxPickle { // a file that Open refuses must not replace a readable one
		return fmt.Errorf("all values but the tensors' elements take %d bytes, over the limit of %d",
			len(p.out), maxPickle)
	}
	if _, err := unpickle(p.out, limit, p.storageOf); err != nil {
		return fmt.Errorf("the values cannot be read again: %w", err)
	}
	count := &countingWriter{w: w}
	archive := &archive{zip.NewWriter(count), count}
	largest := int64(0)
	for _, s := range p.storages {
		largest = max(largest, s.Bytes)
	}
	if err := archive.add("data.pkl", p.out); err != nil {
		return err
	}
	if err := archive.add("byteorder", []byte("little")); err != nil {
		return err
	}
	buf := make([]byte, largest)
	sums := binary.LittleEndian.AppendUint32(nil, crc32.ChecksumIEEE(p.out))
	for i, s := range p.storages {
		b := buf[:s.Bytes]
		if len(b) > 0 {
			if err := s.readAt(b, 0); err != nil {
				return err
			}
		}
		if err := archive.add(fmt.Sprintf("data/%d", i), b); err != nil {
			return err
		}
		sums = blocksum.Append(sums, b)
	}
	if err := archive.add(checksumsMember, sums); err != nil {
		return err
	}
	if err := archive.add("version", []byte("3\n")); err != nil {
		return err
	}
	if err := archive.zip.SetComment(comment); err != nil {
		return err
	}
	return archive.zip.Close()
}

// archive writes uncompressed members that start at multiples of 64 bytes, as torch.save does, so
// that PyTorch can map them.
type archive struct {
	zip   *zip.Writer
	count *countingWriter
}

// countingWriter counts the bytes written to it.
type countingWriter struct {
	w io.Writer
	n int64
}

func (c *countingWriter) Write(p []byte) (int, error) {
	n, err := c.w.Write(p)
	c.n += int64(n)
	return n, err
}

func (a *archive) add(name string, data []byte) error {
	const (
		alignment   = 64
		localHeader = 30     // bytes before the name
		zip64Field  = 1      // id of the 64-bit sizes
		padField    = 0x4246 // PyTorch's id: "FB"
		fieldHeader = 4
	)
	if err := a.zip.Flush(); err != nil {
		return err
	}
	size := uint64(len(data))
	h := &zip.FileHeader{Name: "archive/" + name, Method: zip.Store, CRC32: crc32.ChecksumIEEE(data),
		CompressedSize64: size, UncompressedSize64: size}
	if size >= math.MaxUint32 {
		h.Extra = binary.LittleEndian.AppendUint16(h.Extra, zip64Field)
		h.Extra = binary.LittleEndian.AppendUint16(h.Extra, 16)
		h.Extra = binary.LittleEndian.AppendUint64(h.Extra, size)
		h.Extra = binary.LittleEndian.AppendUint64(h.Extra, size)
	}
	end := a.count.n + localHeader + int64(len(h.Name)+len(h.Extra)) + fieldHeader
	pad := -end & (alignment - 1)
	h.Extra = binary.LittleEndian.AppendUint16(h.Extra, padField)
	h.Extra = binary.LittleEndian.AppendUint16(h.Extra, uint16(pad))
	for range pad {
		h.Extra = append(h.Extra, 'Z')
	}
	w, err := a.zip.CreateRaw(h)
	if err != nil {
		return err
	}
	h.Extra = nil // the directory at the end of the archive needs no extra field
	_, err = w.Write(data)
	return err
}

// pickler writes a pickle of protocol 2 without a memo. A value that occurs twice is written twice.
// Only storages are shared.
type pickler struct {
	out      []byte
	storages []*Storage
	types    []elementType    // of the storages: PyTorch reads a storage with a single dtype
	numbers  map[*Storage]int // of the members data/N
}

// storageOf returns the storage for a member data/N.
func (p *pickler) storageOf(key, _ string) (*Storage, error) {
	n, err := strconv.Atoi(key)
	if err != nil || n < 0 || n >= len(p.storages) {
		return nil, fmt.Errorf("there is no storage %q", key)
	}
	return p.storages[n], nil
}

func (p *pickler) op(b ...byte) { p.out = append(p.out, b...) }

func (p *pickler) value(v any, depth int) error {
	if depth > maxDepth {
		return fmt.Errorf("containers are nested more than %d deep, or one contains itself", maxDepth)
	}
	switch v := v.(type) {
	case nil:
		p.op(opNone)
	case bool:
		if v {
			p.op(opNewTrue)
		} else {
			p.op(opNewFalse)
		}
	case int:
		p.integer(int64(v))
	case int64:
		p.integer(v)
	case float64:
		p.op(opBinFloat)
		p.out = binary.BigEndian.AppendUint64(p.out, math.Float64bits(v))
	case string:
		return p.text(v)
	case []byte:
		return p.bytes(v)
	case *List:
		p.op(opEmptyList)
		return p.items(opAppends, v.Items, depth)
	case *Tuple:
		p.op(opMark)
		for _, item := range v.Items {
			if err := p.value(item, depth+1); err != nil {
				return err
			}
		}
		p.op(opTuple)
	case *Dict:
		return p.dict(v, depth)
	case *Tensor:
		return p.tensor(v)
	default:
		return fmt.Errorf("%s (%T) cannot be written to a PyTorch file", describe(v), v)
	}
	return nil
}

// batchItems is the maximum number of items of a container that the reader has on its stack at
// once. It is even, because the keys and values of a dict alternate. Python's pickler also writes
// dicts in batches of 1,000 keys.
const batchItems = 2000

// items writes the items of the container that precedes them.
func (p *pickler) items(op byte, items []any, depth int) error {
	for batch := range slices.Chunk(items, batchItems) {
		p.op(opMark)
		for _, item := range batch {
			if err := p.value(item, depth+1); err != nil {
				return err
			}
		}
		p.op(op)
	}
	return nil
}

func (p *pickler) dict(d *Dict, depth int) error {
	if d.Ordered {
		p.emptyOrderedDict()
	} else {
		p.op(opEmptyDict)
	}
	items := make([]any, 0, 2*d.Len())
	for k, v := range d.All() {
		items = append(items, k, v)
	}
	return p.items(opSetItems, items, depth)
}

func (p *pickler) emptyOrderedDict() {
	p.global("collections", "OrderedDict")
	p.op(opEmptyTuple, opReduce)
}

func (p *pickler) integer(n int64) {
	if n == int64(int32(n)) {
		p.op(opBinInt)
		p.out = binary.LittleEndian.AppendUint32(p.out, uint32(n))
		return
	}
	p.op(opLong1, 8)
	p.out = binary.LittleEndian.AppendUint64(p.out, uint64(n))
}

func (p *pickler) text(s string) error {
	if !utf8.ValidString(s) {
		return fmt.Errorf("%q is not UTF-8", s)
	}
	if len(s) > maxPickle {
		return errors.New("a string is too long")
	}
	p.op(opBinUnicode)
	p.out = binary.LittleEndian.AppendUint32(p.out, uint32(len(s)))
	p.out = append(p.out, s...)
	return nil
}

// bytes writes a call that converts text to bytes, since protocol 2 has no bytes.
func (p *pickler) bytes(b []byte) error {
	runes := make([]rune, len(b))
	for i, c := range b {
		runes[i] = rune(c)
	}
	p.global("_codecs", "encode")
	if err := p.text(string(runes)); err != nil {
		return err
	}
	if err := p.text("latin1"); err != nil {
		return err
	}
	p.op(opTuple2, opReduce)
	return nil
}

func (p *pickler) global(module, name string) {
	p.op(opGlobal)
	p.out = append(p.out, module+"\n"+name+"\n"...)
}

// tensor writes a call of _rebuild_tensor_v2. For a dtype without a storage class it writes a call
// of _rebuild_tensor_v3 with bytes and the dtype. For a parameter it wraps the call in
// _rebuild_parameter.
func (p *pickler) tensor(t *Tensor) error {
	if t.Storage.big && t.element.size > 1 {
		return fmt.Errorf("a tensor of dtype %s of a big-endian file cannot be written to a PyTorch file",
			t.element.name)
	}
	number, ok := p.numbers[t.Storage]
	if !ok {
		number = len(p.storages)
		p.numbers[t.Storage] = number
		p.storages = append(p.storages, t.Storage)
		p.types = append(p.types, t.element)
	}
	if of := p.types[number]; of.dtype != t.element.dtype {
		return fmt.Errorf("tensors of dtypes %s and %s that share memory cannot be written to a PyTorch file", of.name, t.element.name)
	}
	if t.Parameter {
		p.global("torch._utils", "_rebuild_parameter")
		p.op(opMark)
	}
	typed := t.element.storage != ""
	rebuild, module, storage, size := fnTensorTyped, "torch.storage", untypedStorage, int64(1)
	if typed {
		rebuild, module, storage, size = fnTensor, "torch", t.element.storage, t.element.size
	}
	p.global("torch._utils", strings.TrimPrefix(rebuild, "torch._utils."))
	p.op(opMark, opMark)
	if err := p.text("storage"); err != nil {
		return err
	}
	p.global(module, storage)
	for _, s := range []string{fmt.Sprint(number), "cpu"} {
		if err := p.text(s); err != nil {
			return err
		}
	}
	p.integer(t.Storage.Bytes / size)
	p.op(opTuple, opBinPersID)
	p.integer(t.Offset)
	for _, sizes := range [][]int64{t.Shape, t.Strides} {
		p.op(opMark)
		for _, n := range sizes {
			p.integer(n)
		}
		p.op(opTuple)
	}
	grad := byte(opNewFalse)
	if t.RequiresGrad {
		grad = opNewTrue
	}
	p.op(grad)
	p.emptyOrderedDict() // hooks
	if !typed {
		p.global("torch", t.element.name)
	}
	p.op(opTuple, opReduce)
	if t.Parameter {
		p.op(grad)
		p.emptyOrderedDict()
		p.op(opTuple, opReduce)
	}
	return nil
}
