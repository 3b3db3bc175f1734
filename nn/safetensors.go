package nn

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
	"unicode/utf8"

	"github.com/torchstream/torchstream/internal/blocksum"
	"github.com/torchstream/torchstream/internal/ptfile"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// A safetensors file consists of three parts: the header's length in 8 bytes, little-endian; the
// header; and the tensors' bytes, little-endian and row-major. The header is a JSON object that
// maps a tensor's name to {"dtype", "shape", "data_offsets": [begin, end]}, and "__metadata__" to
// an object of strings. The offsets cover the bytes without gap or overlap.

const (
	maxHeader   = 100_000_000 // the format's limit
	maxDims     = 64
	metadataKey = "__metadata__"
	jsonSpace   = " \t\r\n" // allowed around the header's object
)

// foreignTypes are the format's dtypes that package torch does not support, with LibTorch's numbers
// or -1, and the bits per element.
var foreignTypes = map[string]struct {
	dtype torch.DType
	bits  int64
}{
	"U16": {27, 16}, "U32": {28, 32}, "U64": {29, 64}, "F8_E5M2FNUZ": {25, 8}, "F8_E4M3FNUZ": {26, 8}, "F8_E8M0": {44, 8},
	"F4": {-1, 4}, "F6_E2M3": {-1, 6}, "F6_E3M2": {-1, 6},
}

var fileTypes = map[torch.DType]string{
	torch.Bool: "BOOL", torch.Uint8: "U8", torch.Int8: "I8", torch.Int16: "I16", torch.Int32: "I32", torch.Int64: "I64", torch.Float16: "F16", torch.BFloat16: "BF16",
	torch.Float32: "F32", torch.Float64: "F64", torch.Complex64: "C64", torch.Float8E5M2: "F8_E5M2", torch.Float8E4M3FN: "F8_E4M3",
}

func dtypeOf(name string) (torch.DType, bool) {
	for d, n := range fileTypes {
		if name == n {
			return d, true
		}
	}
	return 0, false
}

type entry struct {
	dtype      torch.DType
	shape      []int64
	begin, end int64          // bytes, from the start of the data
	unread     error          // why the tensor of a safetensors file cannot be read; or nil
	sums       []byte         // checksums in a safetensors file, or nil
	stored     *ptfile.Tensor // the tensor in a PyTorch file
	shard      *Checkpoint    // the file of a sharded checkpoint that has the tensor
}

// check returns the error that reading the tensor would return before any allocation.
func (e *entry) check() error {
	if e.stored != nil {
		return e.stored.Check()
	}
	return e.unread
}

// Checkpoint is an open safetensors file or PyTorch file. Several goroutines may call its methods
// at once.
type Checkpoint struct {
	path     string
	file     *os.File
	data     int64 // offset of the tensors' bytes in the file
	names    []string
	entries  map[string]entry
	unread   map[string]*ptfile.Opaque // unread values of a state_dict, by name
	metadata map[string]string
	pytorch  bool   // rather than safetensors
	root     any    // of a PyTorch file's values
	dict     string // the path of the dict that was chosen in a PyTorch file; "" for root
	shards   []*Checkpoint
	divided  *shardSet // the rank files of a PyTorch file

	mapping sync.Mutex
	mapped  *torch.Tensor // the file in memory, as uint8; guarded by mapping
}

// OpenCheckpoint opens a safetensors file and checks its whole header: sizes, names, offsets. The
// file is untrusted: no content makes OpenCheckpoint crash, or allocate more than a multiple of the
// header's size. Reading a tensor is an error if package torch does not support its dtype.
//
// It also opens files written by torch.save, with the same guarantee. It recognizes them by their
// first bytes, not by name. It executes nothing: it reads only tensors and plain values, and
// requesting another value returns an *[UnreadError]. The Checkpoint's tensors come from the
// state_dict, the first of these: the dict under the key "state_dict", "model_state_dict" or
// "model"; the file's dict itself; the dict under "net", "network", "module", "model_state",
// "params" or "weights"; or the only other dict with tensors. Averages, such as "state_dict_ema",
// are chosen only if there is nothing else: see [LoadOptions.Dict]. Value returns the rest of the
// file.
//
// A path that ends in ".safetensors.index.json" or ".bin.index.json" is the index of a sharded
// checkpoint. The index's safetensors or PyTorch files are in the same folder.
func OpenCheckpoint(path string) (*Checkpoint, error) {
	file, err := safefile.Open(path)
	if err != nil {
		return nil, fmt.Errorf("nn: open checkpoint: %w", err)
	}
	c := &Checkpoint{path: path, file: file}
	if err := c.readHeader(); err != nil {
		c.Close()
		return nil, fmt.Errorf("nn: %s: %w", path, brief(err))
	}
	return c, nil
}

// maxErrorText is the maximum length of an error's text, which may quote an untrusted file.
const maxErrorText = 2048

// brief returns err. If the text is too long, it returns an error with the start and the end of the
// text.
func brief(err error) error {
	text := err.Error()
	if len(text) <= maxErrorText {
		return err
	}
	half := maxErrorText / 2
	return errors.New(strings.ToValidUTF8(text[:half], "") + " ... " + strings.ToValidUTF8(text[len(text)-half:], ""))
}

// Path returns the path passed to OpenCheckpoint.
func (c *Checkpoint) Path() string { return c.path }

// Close closes the file. Tensors that were read or mapped stay valid.
func (c *Checkpoint) Close() error {
	err := c.file.Close()
	for _, s := range c.shards {
		err = errors.Join(err, s.Close())
	}
	if c.divided != nil {
		err = errors.Join(err, c.divided.close())
	}
	c.mapping.Lock()
	defer c.mapping.Unlock()
	c.mapped.Close()
	c.mapped = nil
	return err
}

// Metadata returns a copy of the strings in the header of a safetensors file, or under "metadata"
// in a PyTorch file.
func (c *Checkpoint) Metadata() map[string]string {
	m := make(map[string]string, len(c.metadata))
	for k, v := range c.metadata {
		m[k] = v
	}
	return m
}

// Tensors describes the tensors: in the order of their bytes in a safetensors file, and in the
// order of the state_dict in a PyTorch file. If package torch does not support a tensor's dtype,
// the tensor cannot be read and its DType is not Known.
func (c *Checkpoint) Tensors() []torch.Spec {
	specs := make([]torch.Spec, len(c.names))
	for i, n := range c.names {
		specs[i] = torch.Spec{Name: n, DType: c.entries[n].dtype, Shape: slices.Clone(c.entries[n].shape)}
	}
	return specs
}

func (c *Checkpoint) readHeader() error {
	info, err := c.file.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return errors.New("not a regular file")
	}
	if shardSuffixOf(c.path) != "" {
		return c.readIndex()
	}
	head := make([]byte, 512)
	n, err := c.file.ReadAt(head, 0)
	if err != nil && err != io.EOF {
		return err
	}
	if ptfile.IsZip(head[:n]) || ptfile.IsLegacy(head[:n]) {
		return c.readPyTorch(info.Size())
	}
	return c.readSafetensors(head[:n], info.Size())
}

// readSafetensors fills the checkpoint from a safetensors file that starts with head.
func (c *Checkpoint) readSafetensors(head []byte, size int64) error {
	if start := bytes.TrimLeft(head[min(8, len(head)):], jsonSpace); len(start) == 0 || start[0] != '{' {
		if what := describeForeign(head); what != "" {
			return fmt.Errorf("not a safetensors file, nor .pt or .pth, but %s", what)
		}
	}
	if len(head) < 8 {
		return fmt.Errorf("not a safetensors file, nor .pt or .pth: %d bytes long: copy or save it again, or name another file", size)
	}
	n := binary.LittleEndian.Uint64(head)
	if n > maxHeader || int64(n) > size-8 {
		return fmt.Errorf("not a safetensors file, nor .pt or .pth, or cut short: the header should have %d bytes and the file has %d: "+
			"copy or save it again, or name another file", n, size)
	}
	header := make([]byte, n)
	if _, err := c.file.ReadAt(header, 8); err != nil {
		return fmt.Errorf("header: %w", err)
	}
	c.data = 8 + int64(n)
	return c.parse(header, size-c.data)
}

// parse checks the header against the size of the data.
func (c *Checkpoint) parse(header []byte, size int64) error {
	if !utf8.Valid(header) {
		return errors.New("header: not UTF-8")
	}
	if start := bytes.TrimLeft(header, jsonSpace); len(start) == 0 || start[0] != '{' {
		return errors.New("header: does not start with {, so this is not a safetensors file, nor .pt or .pth: name another file")
	}
	c.entries, c.names = map[string]entry{}, nil
	d := json.NewDecoder(bytes.NewReader(header))
	d.UseNumber()
	err := object(d, func(key string) error {
		if key == metadataKey {
			return c.parseMetadata(d)
		}
		e, err := parseEntry(d)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", key, err)
		}
		c.entries[key] = e
		c.names = append(c.names, key)
		return nil
	})
	if err != nil {
		return fmt.Errorf("header: %w", err)
	}
	if rest := bytes.Trim(header[d.InputOffset():], jsonSpace); len(rest) > 0 {
		return errors.New("header: text after the object")
	}
	sort.SliceStable(c.names, func(i, j int) bool {
		a, b := c.entries[c.names[i]], c.entries[c.names[j]]
		return a.begin < b.begin || a.begin == b.begin && a.end < b.end
	})
	at := int64(0)
	for _, name := range c.names {
		e := c.entries[name]
		if e.begin != at {
			return fmt.Errorf("tensor %q: its bytes start at %d and those before it end at %d", name, e.begin, at)
		}
		at = e.end
	}
	if err := c.takeChecksums(header); err != nil {
		return err
	}
	if at != size {
		return fmt.Errorf("cut short, or too long: the tensors need %d bytes and the file has %d for them: copy or save it again", at, size)
	}
	return nil
}

// parseMetadata reads an object of strings, or null for none.
func (c *Checkpoint) parseMetadata(d *json.Decoder) error {
	c.metadata = map[string]string{}
	t, err := d.Token()
	switch {
	case err != nil:
		return err
	case t == nil:
		return nil
	case t != json.Delim('{'):
		return fmt.Errorf("%s: %v where { should be", metadataKey, t)
	}
	return members(d, func(key string) error {
		v, err := d.Token()
		s, ok := v.(string)
		if err == nil && !ok {
			err = fmt.Errorf("%s %q is not a string", metadataKey, key)
		}
		c.metadata[key] = s
		return err
	})
}

// object reads a JSON object and rejects duplicate names. value reads each value.
func object(d *json.Decoder, value func(key string) error) error {
	if err := delim(d, '{'); err != nil {
		return err
	}
	return members(d, value)
}

// members reads an object after its {.
func members(d *json.Decoder, value func(key string) error) error {
	seen := map[string]bool{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return err
		}
		key, ok := t.(string)
		if !ok {
			return fmt.Errorf("%v where a name should be", t)
		}
		if seen[key] {
			return fmt.Errorf("%q comes twice", key)
		}
		seen[key] = true
		if err := value(key); err != nil {
			return err
		}
	}
	return delim(d, '}')
}

func delim(d *json.Decoder, want json.Delim) error {
	t, err := d.Token()
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	if err == nil && t != want {
		err = fmt.Errorf("%v where %v should be", t, want)
	}
	return err
}

func parseEntry(d *json.Decoder) (entry, error) {
	var e entry
	var offsets []int64
	var dtype string
	var hasType, hasShape, hasOffsets bool
	err := object(d, func(key string) (err error) {
		switch key {
		case "dtype":
			name, err := d.Token()
			if err != nil {
				return err
			}
			if dtype, hasType = name.(string); !hasType {
				return fmt.Errorf("dtype %v is no text", name)
			}
		case "shape":
			e.shape, err = integers(d)
			hasShape = true
		case "data_offsets":
			offsets, err = integers(d)
			hasOffsets = true
		default:
			var other json.RawMessage
			err = d.Decode(&other)
		}
		return err
	})
	if err != nil {
		return e, err
	}
	if !hasType || !hasShape || !hasOffsets || len(offsets) != 2 {
		return e, errors.New("needs dtype, shape and two data_offsets")
	}
	e.begin, e.end = offsets[0], offsets[1]
	return e, e.setType(dtype)
}

// setType sets the dtype, and checks the shape against the offsets.
func (e *entry) setType(name string) error {
	known := false
	bits := int64(0)
	if e.dtype, known = dtypeOf(name); known {
		bits = 8 * int64(e.dtype.Size())
	} else {
		e.unread = fmt.Errorf("dtype %s is not handled", shortKey(name))
		foreign, ok := foreignTypes[name]
		if e.dtype, bits = foreign.dtype, foreign.bits; !ok { // a later version of the format
			e.dtype = -1
			return e.checkOffsets()
		}
	}
	if len(e.shape) > maxDims {
		e.unread = fmt.Errorf("%d dimensions are more than LibTorch's %d", len(e.shape), maxDims)
	}
	shape := e.shape[:min(len(e.shape), maxDims+1)]
	for _, s := range e.shape {
		if s != 0 && bits > math.MaxInt64/s {
			return fmt.Errorf("shape %v is too large", shape)
		}
		bits *= s
	}
	if bits%8 != 0 {
		return fmt.Errorf("shape %v of dtype %s has %d bits, which fill no bytes", shape, name, bits)
	}
	if e.end-e.begin != bits/8 {
		return fmt.Errorf("offsets [%d %d] are %d bytes, %s%v needs %d", e.begin, e.end, e.end-e.begin, name, shape, bits/8)
	}
	return nil
}

// checkOffsets checks the offsets of a tensor of unknown size.
func (e *entry) checkOffsets() error {
	if e.end < e.begin {
		return fmt.Errorf("offsets [%d %d] are exchanged", e.begin, e.end)
	}
	return nil
}

// integers reads an array of non-negative integers.
func integers(d *json.Decoder) ([]int64, error) {
	if err := delim(d, '['); err != nil {
		return nil, err
	}
	values := []int64{}
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		n, ok := t.(json.Number)
		v, err := n.Int64()
		if !ok || err != nil || v < 0 {
			return nil, fmt.Errorf("%v where a non-negative integer should be", t)
		}
		values = append(values, v)
	}
	return values, delim(d, ']')
}

// SaveTensors writes the given tensors to a safetensors file or, if path ends in .pt or .pth, to a
// PyTorch file, with the guarantees of [Save].
func SaveTensors(path string, tensors []torch.Named, metadata map[string]string) error {
	if IsPyTorchPath(path) {
		return SavePyTorch(path, pytorchState(tensors, metadata))
	}
	return saveSafetensors(path, path, tensors, metadata)
}

// saveSafetensors writes a safetensors file with the mode of the file at modeOf, if that exists.
func saveSafetensors(path, modeOf string, tensors []torch.Named, metadata map[string]string) error {
	if err := writeChecked(path, modeOf, tensors, metadata); err != nil {
		return fmt.Errorf("nn: save %s: %w", path, err)
	}
	return nil
}

// writeChecked writes a safetensors file. The header has checksums, which it fills in after all
// tensors are written.
func writeChecked(path, modeOf string, tensors []torch.Named, metadata map[string]string) (err error) {
	f, err := newUnfinished(path, modeOf, safefile.Safetensors)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.abandon()
		}
	}()
	var header, sums []byte
	content := func(w io.Writer) (err error) {
		header, sums, err = encode(w, tensors, metadata, false)
		return err
	}
	err = f.write(content, func(w io.WriterAt) error {
		seal(header, sums)
		_, err := w.WriteAt(header, 8)
		return err
	})
	if err != nil {
		return err
	}
	return f.finish()
}

// encode writes a safetensors file. A rank's file stores its checksums as a tensor; the header of
// any other file has room for them. encode returns the header and the checksums.
func encode(w io.Writer, tensors []torch.Named, metadata map[string]string, ofRank bool) (text, sums []byte, err error) {
	// The tensors are sorted by decreasing element size, so that every tensor is aligned, and then
	// by name, so that the same state gives the same file.
	sorted := slices.Clone(tensors)
	size := func(n torch.Named) int { return n.Tensor.DType().Size() }
	sort.SliceStable(sorted, func(i, j int) bool {
		a, b := size(sorted[i]), size(sorted[j])
		return a > b || a == b && sorted[i].Name < sorted[j].Name
	})
	header, largest, err := fileHeader(sorted, metadata, ofRank)
	if err != nil {
		return nil, nil, err
	}
	if text, err = json.Marshal(header); err != nil {
		return nil, nil, err
	}
	text = append(text, bytes.Repeat([]byte{' '}, -len(text)&7)...) // align the data to 8 bytes
	if len(text) > maxHeader {
		return nil, nil, fmt.Errorf("a header of %d bytes is over the format's limit of %d", len(text), maxHeader)
	}
	if err := binary.Write(w, binary.LittleEndian, uint64(len(text))); err != nil {
		return nil, nil, err
	}
	if _, err := w.Write(text); err != nil {
		return nil, nil, err
	}
	buf := make([]byte, largest)
	for _, n := range sorted {
		b := buf[:torch.Spec{DType: n.Tensor.DType(), Shape: n.Tensor.Shape()}.Bytes()]
		if err := n.Tensor.ReadBytes(b); err != nil {
			return nil, nil, fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		if _, err := w.Write(b); err != nil {
			return nil, nil, fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		sums = blocksum.Append(sums, b)
	}
	if ofRank {
		_, err = w.Write(sums)
	}
	return text, sums, err
}

// fileHeader returns the header of a file with the tensors in this order, and the size of the
// largest tensor.
func fileHeader(sorted []torch.Named, metadata map[string]string, ofRank bool) (header map[string]any, largest int64, err error) {
	header = map[string]any{}
	for k, v := range metadata {
		if !utf8.ValidString(k) || !utf8.ValidString(v) {
			return nil, 0, fmt.Errorf("metadata %q is not UTF-8", k)
		}
	}
	describe := func(dtype string, shape []int64, begin, bytes int64) any {
		return map[string]any{"dtype": dtype, "shape": shape, "data_offsets": [2]int64{begin, begin + bytes}}
	}
	at, sums := int64(0), int64(0)
	for _, n := range sorted {
		if err := n.Tensor.Err(); err != nil {
			return nil, 0, fmt.Errorf("tensor %s: %w", n.Name, err)
		}
		shape, dtype := n.Tensor.Shape(), n.Tensor.DType()
		if shape == nil {
			return nil, 0, fmt.Errorf("tensor %s: %w", n.Name, torch.ErrClosed)
		}
		reserved := n.Name == metadataKey || ofRank && n.Name == checksumsName
		if _, twice := header[n.Name]; twice || reserved || !utf8.ValidString(n.Name) {
			return nil, 0, fmt.Errorf("tensor %q: a name that comes twice, is not UTF-8 or is reserved", n.Name)
		}
		name, known := fileTypes[dtype]
		if !known {
			return nil, 0, fmt.Errorf("tensor %s: safetensors has no dtype %v: save to a path that ends in .pt, or convert the tensor", n.Name, dtype)
		}
		bytes := torch.Spec{DType: dtype, Shape: shape}.Bytes()
		header[n.Name] = describe(name, shape, at, bytes)
		at, largest, sums = at+bytes, max(largest, bytes), sums+blocksum.Size(bytes)
	}
	if ofRank {
		header[checksumsName] = describe(fileTypes[torch.Uint8], []int64{sums}, at, sums)
	} else if metadata, err = withChecksums(metadata, sums); err != nil {
		return nil, 0, err
	}
	header[metadataKey] = metadata
	return header, largest, nil
}
