package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"sort"
	"unicode/utf8"

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
	"U16": {27, 16}, "U32": {28, 32}, "U64": {29, 64}, "F8_E5M2FNUZ": {25, 8}, "F8_E4M3FNUZ": {26, 8},
	"F8_E8M0": {44, 8},
	"F4":      {-1, 4}, "F6_E2M3": {-1, 6}, "F6_E3M2": {-1, 6},
}

var fileTypes = map[torch.DType]string{
	torch.Bool: "BOOL", torch.Uint8: "U8", torch.Int8: "I8", torch.Int16: "I16", torch.Int32: "I32",
	torch.Int64: "I64", torch.Float16: "F16", torch.BFloat16: "BF16",
	torch.Float32: "F32", torch.Float64: "F64", torch.Complex64: "C64", torch.Float8E5M2: "F8_E5M2",
	torch.Float8E4M3FN: "F8_E4M3",
}

func dtypeOf(name string) (torch.DType, bool) {
	for d, n := range fileTypes {
		if name == n {
			return d, true
		}
	}
	return 0, false
}

// readSafetensors fills the checkpoint from a safetensors file that starts with head.
func (f *File) readSafetensors(head []byte, size int64) error {
	if start := bytes.TrimLeft(head[min(8, len(head)):], jsonSpace); len(start) == 0 || start[0] != '{' {
		if what := describeForeign(head); what != "" {
			return fmt.Errorf("not a safetensors file, nor .pt or .pth, but %s", what)
		}
	}
	if len(head) < 8 {
		return fmt.Errorf("not a safetensors file, nor .pt or .pth: %d bytes long: copy or save it "+
			"again, or name another file", size)
	}
	n := binary.LittleEndian.Uint64(head)
	if n > maxHeader || int64(n) > size-8 {
		return fmt.Errorf("not a safetensors file, nor .pt or .pth, or cut short: the header should have "+
			"%d bytes and the file has %d: "+
			"copy or save it again, or name another file", n, size)
	}
	header := make([]byte, n)
	if _, err := f.file.ReadAt(header, 8); err != nil {
		return fmt.Errorf("header: %w", err)
	}
	f.data = 8 + int64(n)
	return f.parse(header, size-f.data)
}

// parse checks the header against the size of the data.
func (f *File) parse(header []byte, size int64) error {
	if !utf8.Valid(header) {
		return errors.New("header: not UTF-8")
	}
	if start := bytes.TrimLeft(header, jsonSpace); len(start) == 0 || start[0] != '{' {
		return errors.New("header: does not start with {, so this is not a safetensors file, nor .pt or " +
			".pth: name another file")
	}
	f.tensors.entries, f.tensors.names = map[string]entry{}, nil
	d := json.NewDecoder(bytes.NewReader(header))
	d.UseNumber()
	err := object(d, func(key string) error {
		if key == metadataKey {
			return f.parseMetadata(d)
		}
		e, err := parseEntry(d)
		if err != nil {
			return fmt.Errorf("tensor %q: %w", key, err)
		}
		f.tensors.entries[key] = e
		f.tensors.names = append(f.tensors.names, key)
		return nil
	})
	if err != nil {
		return fmt.Errorf("header: %w", err)
	}
	if rest := bytes.Trim(header[d.InputOffset():], jsonSpace); len(rest) > 0 {
		return errors.New("header: text after the object")
	}
	sort.SliceStable(f.tensors.names, func(i, j int) bool {
		a, b := f.tensors.entries[f.tensors.names[i]], f.tensors.entries[f.tensors.names[j]]
		return a.begin < b.begin || a.begin == b.begin && a.end < b.end
	})
	at := int64(0)
	for _, name := range f.tensors.names {
		e := f.tensors.entries[name]
		if e.begin != at {
			return fmt.Errorf("tensor %q: its bytes start at %d and those before it end at %d", name, e.begin, at)
		}
		at = e.end
	}
	if err := f.takeChecksums(header); err != nil {
		return err
	}
	if at != size {
		return fmt.Errorf("cut short, or too long: the tensors need %d bytes and the file has %d for "+
			"them: copy or save it again", at, size)
	}
	return nil
}

// parseMetadata reads an object of strings, or null for none.
func (f *File) parseMetadata(d *json.Decoder) error {
	f.metadata = map[string]string{}
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
		f.metadata[key] = s
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
		return fmt.Errorf("offsets [%d %d] are %d bytes, %s%v needs %d", e.begin, e.end, e.end-e.begin,
			name, shape, bits/8)
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
