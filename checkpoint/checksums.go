package checkpoint

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/torchstream/torchstream/checkpoint/internal/blocksum"
	"github.com/torchstream/torchstream/torch"
)

// A rank's file stores the CRC-32s of its tensors' bytes in its last tensor. Rank 0's PyTorch file
// stores one CRC-32 for each rank's file, over that file's header and last tensor. Every other
// safetensors file that this package writes has its checksums in the metadata. Other readers of the
// format ignore them there.

const (
	// checksumsName names the tensor: 4 bytes for each block, little-endian, in the file's order.
	checksumsName = "checksums"
	// checksumsKey is the metadata key of the checksums in any other safetensors file. The value is
	// hexadecimal: first the header's checksum, computed with zeros instead of the digits, then the
	// checksums of the tensors' blocks in file order.
	checksumsKey = "torchstream.crc32"
	// addedKey is a metadata key. Its value names another key that Save added, or is "none". Every
	// file with checksumsKey also has addedKey. If damage changes the name of one of these keys,
	// the other key is left.
	addedKey    = "torchstream.added"
	addedNone   = "none"
	formatKey   = "format" // transformers before 5 refuses a file whose metadata lacks this key
	formatValue = "pt"
	sumDigits   = 8
)

// checksums holds the checksums of one file.
type checksums struct {
	sums []byte
	at   map[string]int64 // index of each tensor's first checksum
	seal uint32           // CRC-32 of the file's header and of sums
}

// readChecksums reads the checksums of a rank's file.
func (f *File) readChecksums() (*checksums, error) {
	s := &checksums{at: map[string]int64{}}
	size := int64(0)
	for _, name := range f.tensors.names {
		if name != checksumsName {
			s.at[name] = size
			size += blocksum.Size(f.tensors.entries[name].end - f.tensors.entries[name].begin)
		}
	}
	e, ok := f.tensors.entries[checksumsName]
	if !ok || e.dtype != torch.Uint8 || !slices.Equal(e.shape, []int64{size}) {
		return nil, fmt.Errorf("it has no %d bytes of checksums: it was cut, or another version of this "+
			"library wrote it", size)
	}
	header := make([]byte, f.data)
	s.sums = make([]byte, size)
	if err := errors.Join(f.readFull(header, 0), f.readFull(s.sums, f.data+e.begin)); err != nil {
		return nil, err
	}
	s.seal = crc32.Update(crc32.ChecksumIEEE(header), crc32.IEEETable, s.sums)
	return s, nil
}

// readFull reads bytes at an offset of the file.
func (f *File) readFull(b []byte, offset int64) error {
	n, err := f.file.ReadAt(b, offset)
	if n == len(b) {
		return nil
	}
	if err == io.EOF {
		err = io.ErrUnexpectedEOF
	}
	return err
}

// read reads bytes of a tensor from an offset, and verifies the checksums of the blocks that
// contain them.
func (s *checksums) read(c *File, b []byte, name string, e entry, offset int64) error {
	return c.readChecked(b, e, offset, s.sums[s.at[name]:])
}

// readChecked reads bytes of a tensor from an offset, and verifies their checksums.
func (f *File) readChecked(b []byte, e entry, offset int64, sums []byte) error {
	return blocksum.Read(b, offset, e.end-e.begin, sums,
		func(p []byte, at int64) error { return f.readFull(p, f.data+e.begin+at) })
}

// withChecksums returns the metadata with room for the checksums of tensors of the given size in
// bytes. seal fills in the checksums.
func withChecksums(metadata map[string]string, size int64) (map[string]string, error) {
	m := maps.Clone(metadata)
	if m == nil {
		m = map[string]string{}
	}
	for _, key := range []string{checksumsKey, addedKey} {
		if _, ok := m[key]; ok {
			return nil, fmt.Errorf("metadata %q: a key that is reserved", key)
		}
	}
	m[addedKey] = addedNone
	if _, ok := m[formatKey]; !ok {
		m[formatKey], m[addedKey] = formatValue, formatKey
	}
	m[checksumsKey] = strings.Repeat("0", sumDigits+2*int(size))
	return m, nil
}

// sumsAt returns the offset of the checksum digits in a header, or -1.
func sumsAt(header []byte) int {
	begin := []byte(`"` + checksumsKey + `":"`) // JSON escapes quotes within strings, so no string contains this text
	if i := bytes.Index(header, begin); i >= 0 {
		return i + len(begin)
	}
	return -1
}

// seal writes the checksums into their room in the header, including the header's checksum.
func seal(header, sums []byte) {
	at := sumsAt(header)
	hex.Encode(header[at+sumDigits:], sums)
	copy(header[at:], fmt.Sprintf("%08x", crc32.ChecksumIEEE(header)))
}

// takeChecksums verifies the header if its metadata has checksums, and gives each tensor its
// checksums.
func (f *File) takeChecksums(header []byte) error {
	text, ok := f.metadata[checksumsKey]
	if _, added := f.metadata[addedKey]; !ok && !added {
		return nil
	}
	if f.metadata[addedKey] == formatKey {
		delete(f.metadata, formatKey)
	}
	delete(f.metadata, addedKey)
	delete(f.metadata, checksumsKey)
	size := int64(0)
	for _, name := range f.tensors.names {
		size += blocksum.Size(f.tensors.entries[name].end - f.tensors.entries[name].begin)
	}
	sums, err := hex.DecodeString(text)
	at := sumsAt(header)
	if err == nil && at >= 0 && int64(len(sums)) == sumDigits/2+size {
		zeroed := slices.Clone(header)
		copy(zeroed[at:], strings.Repeat("0", sumDigits))
		ok = ok && text[:sumDigits] == fmt.Sprintf("%08x", crc32.ChecksumIEEE(zeroed))
	} else {
		ok = false
	}
	if !ok {
		return fmt.Errorf("its names, shapes or checksums are not those that were written: copy the file "+
			"again, or go on from an older checkpoint; "+
			"a program that saves a file with the metadata of this one must leave out %q", checksumsKey)
	}
	sums = sums[sumDigits/2:]
	for _, name := range f.tensors.names {
		e := f.tensors.entries[name]
		n := blocksum.Size(e.end - e.begin)
		e.sums, sums = sums[:n:n], sums[n:]
		f.tensors.entries[name] = e
	}
	return nil
}
