package checkpoint

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sort"
	"unicode/utf8"

	"github.com/torchstream/torchstream/checkpoint/internal/blocksum"
	"github.com/torchstream/torchstream/internal/safefile"
	"github.com/torchstream/torchstream/torch"
)

// saveSafetensors writes a safetensors file with the mode of the file at modeOf, if that exists.
func saveSafetensors(path, modeOf string, tensors []torch.Named, metadata map[string]string) error {
	if err := writeChecked(path, modeOf, tensors, metadata); err != nil {
		return fmt.Errorf("checkpoint: save %s: %w", path, err)
	}
	return nil
}

// writeChecked writes a safetensors file. The header has room for checksums, which writeChecked
// fills in after all tensors are written.
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
func encode(w io.Writer, tensors []torch.Named, metadata map[string]string, ofRank bool) (text, sums []byte,
	err error) {
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
func fileHeader(sorted []torch.Named, metadata map[string]string, ofRank bool) (header map[string]any,
	largest int64, err error) {
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
			return nil, 0, fmt.Errorf(
				"tensor %s: safetensors has no dtype %v: save to a path that ends in .pt, or convert the tensor", n.Name, dtype)
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
