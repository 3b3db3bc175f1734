package parquet

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"slices"
)

// The kinds of pages.
const (
	pageData   = 0
	pageIndex  = 1
	pageDict   = 2
	pageDataV2 = 3
)

// pageHeader is the header that precedes a page.
type pageHeader struct {
	kind         int32
	size, packed int32 // number of bytes of the page, decompressed and in the file
	crc          uint32
	summed       bool // there is a crc of the bytes in the file
	values       int32
	encoding     int32
	levels       [2]int32 // encodings of definition and repetition levels, in a page of version 1
	levelBytes   [2]int32 // sizes of definition and repetition levels, in a page of version 2
	plain        bool     // this page of version 2 is not compressed
	length       int      // length of this header
}

// maxPageHeader is the maximum size of a header. A header may contain the smallest and the largest
// value of its page.
const maxPageHeader = 64 << 20

// readPageHeader reads a header at the start of data. It returns errShort if data is too short.
func readPageHeader(data []byte) (h pageHeader, err error) {
	t := &thrift{data: data}
	t.fields(func(id int16, kind byte) bool {
		switch {
		case id == 1:
			h.kind = t.int32(kind)
		case id == 2:
			h.size = t.int32(kind)
		case id == 3:
			h.packed = t.int32(kind)
		case id == 4:
			h.crc, h.summed = uint32(t.int32(kind)), true
		case (id == 5 || id == 7) && kind == thriftStruct:
			h.readVersion1(t)
		case id == 8 && kind == thriftStruct:
			h.readVersion2(t)
		default:
			return false
		}
		return true
	})
	h.length = t.at
	if t.err == nil && (h.size < 0 || h.packed < 0 || h.values < 0 || h.levelBytes[0] < 0 || h.levelBytes[1] < 0) {
		return h, errThrift
	}
	return h, t.err
}

// readVersion1 reads the fields of a data page of version 1 or of a dictionary page.
func (h *pageHeader) readVersion1(t *thrift) {
	t.fields(func(id int16, kind byte) bool {
		switch {
		case id == 1:
			h.values = t.int32(kind)
		case id == 2:
			h.encoding = t.int32(kind)
		case id == 3 && kind == thriftI32:
			h.levels[0] = t.int32(kind)
		case id == 4 && kind == thriftI32:
			h.levels[1] = t.int32(kind)
		default:
			return false
		}
		return true
	})
}

func (h *pageHeader) readVersion2(t *thrift) {
	t.fields(func(id int16, kind byte) bool {
		switch id {
		case 1:
			h.values = t.int32(kind)
		case 4:
			h.encoding = t.int32(kind)
		case 5:
			h.levelBytes[0] = t.int32(kind)
		case 6:
			h.levelBytes[1] = t.int32(kind)
		case 7:
			h.plain = kind == thriftFalse
			return false
		default:
			return false
		}
		return true
	})
}

// pages reads the pages of a column chunk, in order.
type pages struct {
	file   io.ReaderAt
	chunk  *chunk
	at     int64  // offset of the next header
	ahead  int    // number of bytes to read for a header
	buffer []byte // the bytes of the file that start at offset from
	from   int64
}

func newPages(file io.ReaderAt, c *chunk, ahead int) *pages {
	return &pages{file: file, chunk: c, at: c.start, ahead: ahead}
}

// next reads the next header, and returns the offset of the page after it. It returns io.EOF after
// the last page.
func (p *pages) next() (h pageHeader, at int64, err error) {
	if p.at >= p.chunk.end {
		return h, 0, io.EOF
	}
	for n := int64(p.ahead); ; n *= 16 {
		n = min(n, p.chunk.end-p.at)
		data, err := p.read(p.at, int(n))
		if err != nil {
			return h, 0, err
		}
		h, err = readPageHeader(data)
		if errors.Is(err, errShort) && n < min(maxPageHeader, p.chunk.end-p.at) {
			continue
		}
		if err != nil {
			return h, 0, fmt.Errorf("the header of its page at byte %d: %w", p.at, err)
		}
		break
	}
	at = p.at + int64(h.length)
	if int64(h.packed) > p.chunk.end-at {
		return h, 0, fmt.Errorf("its page at byte %d has %d bytes, and ends after the column: %w", p.at, h.packed,
			io.ErrUnexpectedEOF)
	}
	p.at = at + int64(h.packed)
	return h, at, nil
}

// read returns n bytes at an offset. They are valid until the next call.
func (p *pages) read(at int64, n int) ([]byte, error) {
	if at >= p.from && at+int64(n) <= p.from+int64(len(p.buffer)) {
		return p.buffer[at-p.from:][:n], nil
	}
	p.buffer, p.from = slices.Grow(p.buffer[:0], n)[:n], at
	got, err := p.file.ReadAt(p.buffer, at)
	if got < n {
		p.buffer = p.buffer[:0]
		return nil, err
	}
	return p.buffer, nil
}

// content reads a page, compares it with its checksum, and decompresses it. It omits the levels of
// a page of version 2. It uses the memory of room if the page fits.
func (h *pageHeader) content(p *pages, at int64, room []byte) ([]byte, error) {
	packed, err := p.read(at, int(h.packed))
	if err != nil {
		return nil, err
	}
	if h.summed && crc32.ChecksumIEEE(packed) != h.crc {
		return nil, fmt.Errorf("its page at byte %d differs from its checksum", at)
	}
	levels := int64(0)
	if h.kind == pageDataV2 {
		levels = int64(h.levelBytes[0]) + int64(h.levelBytes[1])
	}
	if levels > int64(min(h.size, h.packed)) {
		return nil, errPageSize
	}
	codec := p.chunk.codec
	if h.plain {
		codec = codecNone
	}
	data, err := decompress(codec, packed[levels:], int(int64(h.size)-levels), room)
	if err == nil && codec == codecNone {
		data = append(room[:0], data...) // the next read changes the buffer
	}
	return data, err
}

// stored reports whether the page's values are uncompressed in the file.
func (h *pageHeader) stored(c *chunk) bool {
	return c.codec == codecNone || h.kind == pageDataV2 && h.plain
}

// body has the bytes of a page. They are in data, or still in the file.
type body struct {
	data []byte
	// If data is nil, the page is in the file, at base, and has size bytes.
	pages *pages
	base  int64
	size  int
	word  [4]byte
}

// len returns the number of bytes.
func (b *body) len() int {
	if b.data != nil {
		return len(b.data)
	}
	return b.size
}

// bytes returns n bytes at an offset in the page. They are valid until the next page is read.
func (b *body) bytes(at, n int) ([]byte, error) {
	if at < 0 || n < 0 || n > b.len()-at {
		return nil, errValues
	}
	if b.data != nil {
		return b.data[at : at+n], nil
	}
	p := make([]byte, n)
	return p, b.read(p, at)
}

// read fills p from the file, at an offset in the page.
func (b *body) read(p []byte, at int) error {
	got, err := b.pages.file.ReadAt(p, b.base+int64(at))
	if got < len(p) {
		return err
	}
	return nil
}

// uint32 returns the number at an offset in the page.
func (b *body) uint32(at int) (int, error) {
	if at < 0 || b.len()-at < len(b.word) {
		return 0, errValues
	}
	p := b.word[:]
	if b.data != nil {
		p = b.data[at:]
	} else if err := b.read(p, at); err != nil {
		return 0, err
	}
	n := binary.LittleEndian.Uint32(p)
	if n > uint32(maxPageBytes) {
		return 0, errValues
	}
	return int(n), nil
}
