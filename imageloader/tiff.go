package imageloader

import (
	"bytes"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"image"
	"image/color"
	"io"
	"math"

	"golang.org/x/image/tiff"
	"golang.org/x/image/tiff/lzw"
)

// golang.org/x/image/tiff checks the header, but decodes into 33 to 49 bytes a pixel: strips whole,
// in buffers that grow by doubling, and images of up to 64 bits. Here rows go from the decompressor
// straight to RGB: 3 bytes a pixel and a row. The pixels are the library's.

const (
	tiffBitsPerSample   = 258
	tiffCompression     = 259
	tiffPhotometric     = 262
	tiffStripOffsets    = 273
	tiffRowsPerStrip    = 278
	tiffStripByteCounts = 279
	tiffPredictor       = 317
	tiffTileWidth       = 322
	tiffTileLength      = 323
	tiffTileOffsets     = 324
	tiffTileByteCounts  = 325
)

const (
	tiffUncompressed = 1
	tiffLZW          = 5
	tiffDeflate      = 8
	tiffPackBits     = 32773
	tiffDeflateOld   = 32946
)

// tiffImage is the first image of a TIFF.
type tiffImage struct {
	data            []byte
	order           binary.ByteOrder
	width, height   int
	samples, depth  int // a pixel, and bits of each
	compression     uint64
	predictor       bool
	tiled           bool
	block           image.Point // columns and rows of a tile or strip; the last strip may have fewer rows
	across, down    int         // blocks
	offsets, counts tiffValues  // of blocks
	colours         [][3]byte   // by the only sample's value, whose high byte counts if it has 16 bits
	at              int         // the byte of a 16-bit sample that counts
}

// tiffValues are whole numbers in the file.
type tiffValues struct {
	order       binary.ByteOrder
	data        []byte
	size, count int // size: bytes of each
}

func (v tiffValues) get(i int) uint64 {
	switch p := v.data[i*v.size:]; v.size {
	case 1:
		return uint64(p[0])
	case 2:
		return uint64(v.order.Uint16(p))
	default:
		return uint64(v.order.Uint32(p))
	}
}

// tag returns up to limit values of a tag of the first directory; none if the tag is missing, or
// has no whole numbers.
func (t *tiffImage) tag(number uint16, limit int) tiffValues {
	none := tiffValues{}
	directory := uint64(t.order.Uint32(t.data[4:]))
	if directory+2 > uint64(len(t.data)) {
		return none
	}
	entries := t.data[directory+2:]
	entries = entries[:min(len(entries), 12*int(t.order.Uint16(t.data[directory:])))]
	for len(entries) >= 12 && t.order.Uint16(entries) != number {
		entries = entries[12:]
	}
	if len(entries) < 12 {
		return none
	}
	size := map[uint16]int{1: 1, 3: 2, 4: 4}[t.order.Uint16(entries[2:])]
	count := uint64(t.order.Uint32(entries[4:]))
	from := entries[8:12]
	if uint64(size)*count > math.MaxInt32 {
		return none
	}
	if uint64(size)*count > 4 {
		offset := uint64(t.order.Uint32(from))
		if offset > uint64(len(t.data)) {
			return none
		}
		from = t.data[offset:]
	}
	count = min(count, uint64(limit))
	if size == 0 || uint64(size)*count > uint64(len(from)) {
		return none
	}
	return tiffValues{t.order, from, size, int(count)}
}

func (t *tiffImage) first(number uint16, fallback uint64) uint64 {
	if v := t.tag(number, 1); v.count > 0 {
		return v.get(0)
	}
	return fallback
}

// newTIFF reads the directory of a file in whose header the library has found c.
func newTIFF(data []byte, c image.Config) (*tiffImage, error) {
	t := &tiffImage{data: data, order: binary.LittleEndian, width: c.Width, height: c.Height, at: 1}
	if data[0] == 'M' {
		t.order, t.at = binary.BigEndian, 0
	}
	bits := t.tag(tiffBitsPerSample, 4)
	t.samples, t.depth = max(bits.count, 1), int(t.first(tiffBitsPerSample, 1))
	t.compression = t.first(tiffCompression, tiffUncompressed)
	t.predictor = t.first(tiffPredictor, 1) == 2
	if t.predictor && t.depth == 1 {
		return nil, tiff.UnsupportedError("horizontal predictor with 1 BitsPerSample")
	}
	if t.samples == 1 {
		t.colours = t.table(c)
	}
	if err := t.layOut(); err != nil {
		return nil, err
	}
	return t, nil
}

// table has a colour for each value of the only sample.
func (t *tiffImage) table(c image.Config) (table [][3]byte) {
	if palette, ok := c.ColorModel.(color.Palette); ok {
		t.at = 1 // the library takes the low byte as the index, read as big endian
		return colourTable(palette)
	}
	whiteIsZero := t.first(tiffPhotometric, 0) == 0
	for value := range 256 {
		grey := byte(value)
		if t.depth == 1 && value == 1 {
			grey = 255
		}
		if whiteIsZero {
			grey = 255 - grey
		}
		table = append(table, [3]byte{grey, grey, grey})
	}
	return table
}

// layOut finds the strips or tiles.
func (t *tiffImage) layOut() error {
	offsets, counts := uint16(tiffStripOffsets), uint16(tiffStripByteCounts)
	t.block = image.Pt(t.width, t.height)
	if width := t.first(tiffTileWidth, 0); width != 0 {
		height := t.first(tiffTileLength, 0)
		larger := width > uint64(t.width)+16 || height > uint64(t.height)+16
		switch {
		case width < 8 || height < 8:
			return tiff.FormatError("tile size is too small")
		case larger && (width > 1024 || height > 1024):
			return tiff.FormatError("tile size exceeds image size")
		}
		t.tiled, t.block = true, image.Pt(int(width), int(height))
		offsets, counts = tiffTileOffsets, tiffTileByteCounts
	} else if rows := t.first(tiffRowsPerStrip, 0); rows > 0 && rows < uint64(t.height) {
		t.block.Y = int(rows)
	}
	t.across = (t.width + t.block.X - 1) / t.block.X
	t.down = (t.height + t.block.Y - 1) / t.block.Y
	blocks := t.across * t.down
	t.offsets, t.counts = t.tag(offsets, blocks), t.tag(counts, blocks)
	if t.offsets.count < blocks || t.counts.count < blocks {
		return tiff.FormatError("inconsistent header")
	}
	return nil
}

// bytes returns the size of a number of pixels of a row.
func (t *tiffImage) bytes(pixels int) int { return (pixels*t.samples*t.depth + 7) / 8 }

// visible is the part of block (i, j) that lies in the image.
func (t *tiffImage) visible(i, j int) image.Rectangle {
	at := image.Pt(i*t.block.X, j*t.block.Y)
	return image.Rectangle{at, at.Add(t.block)}.Intersect(image.Rect(0, 0, t.width, t.height))
}

// source returns the bytes that the file has of a block.
func (t *tiffImage) source(i, j int) ([]byte, error) {
	k := j*t.across + i
	offset, count := t.offsets.get(k), t.counts.get(k)
	if t.compression <= tiffUncompressed {
		switch {
		case offset > uint64(len(t.data)) || count > uint64(len(t.data))-offset:
			return nil, io.ErrUnexpectedEOF
		case count > uint64(t.block.X)*uint64(t.block.Y)*8:
			return nil, tiff.FormatError("block data size too large")
		}
	}
	offset = min(offset, uint64(len(t.data)))
	return t.data[offset : offset+min(count, uint64(len(t.data))-offset)], nil
}

// plausible compares the size of the blocks with that of their pixels before memory is allocated
// for them: a few bytes cannot ask for the memory of a large image.
func (t *tiffImage) plausible() error {
	// The maximum of bytes that one byte can become.
	ratio := map[uint64]int{tiffDeflate: 1032, tiffDeflateOld: 1032, tiffPackBits: 64, tiffLZW: 4096 * 8 / 9, tiffUncompressed: 1, 0: 1}[t.compression]
	if ratio == 0 {
		return tiff.UnsupportedError(fmt.Sprintf("compression value %d", t.compression))
	}
	for i := range t.across {
		for j := range t.down {
			packed, err := t.source(i, j)
			if err != nil {
				return err
			}
			part := t.visible(i, j)
			if (len(packed)+1)*ratio < (part.Dy()-1)*t.bytes(t.block.X)+t.bytes(part.Dx()) {
				return tiff.FormatError("too little image data")
			}
		}
	}
	return nil
}

// decode fills rgb with rows of RGB without gaps.
func (t *tiffImage) decode(rgb []byte) error {
	row := make([]byte, t.bytes(t.block.X))
	for i := range t.across {
		for j := range t.down {
			if err := t.decodeBlock(rgb, row, i, j); err != nil {
				return err
			}
		}
	}
	return nil
}

// decodeBlock fills in a block, row by row.
func (t *tiffImage) decodeBlock(rgb, row []byte, i, j int) error {
	packed, err := t.source(i, j)
	if err != nil {
		return err
	}
	r, err := t.unpack(packed)
	if err != nil {
		return err
	}
	part := t.visible(i, j)
	need, rows := t.bytes(part.Dx()), part.Dy()
	if t.samples == 4 && t.depth == 8 { // the library wants all of a tile's row
		need = len(row)
	}
	if t.predictor { // sums need all of a block
		need = len(row)
		if t.tiled {
			rows = t.block.Y
		}
	}
	limit := int64(t.block.X) * int64(t.block.Y) * 8 // the maximum that the library reads
	for y := range rows {
		n, err := readRow(r, row)
		if err != nil {
			return err
		}
		if n < need {
			return tiff.FormatError("not enough pixel data")
		}
		limit -= int64(n)
		if t.predictor {
			t.sum(row)
		}
		if y < part.Dy() {
			at := 3 * ((part.Min.Y+y)*t.width + part.Min.X)
			if err := t.convert(rgb[at:at+3*part.Dx()], row); err != nil {
				return err
			}
		}
	}
	// The rest has a checksum, and may be damaged.
	if t.compression == tiffPackBits {
		limit++
	}
	n, err := io.Copy(io.Discard, io.LimitReader(r, limit))
	if err == nil && n == limit && t.compression == tiffPackBits {
		err = tiff.FormatError("PackBits: decompressed data too large")
	}
	return err
}

func (t *tiffImage) unpack(packed []byte) (io.Reader, error) {
	switch t.compression {
	case tiffDeflate, tiffDeflateOld:
		return zlib.NewReader(bytes.NewReader(packed))
	case tiffLZW:
		return lzw.NewReader(bytes.NewReader(packed), lzw.MSB, 8), nil
	case tiffPackBits:
		return &packBits{in: packed}, nil
	}
	return bytes.NewReader(packed), nil
}

// readRow reads until p is full or the input ends, which is no error.
func readRow(r io.Reader, p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		var read int
		read, err = r.Read(p[n:])
		n += read
	}
	if err == io.EOF {
		err = nil
	}
	return n, err
}

// sum undoes the horizontal predictor, which stores a sample as the difference to that of the pixel
// before.
func (t *tiffImage) sum(row []byte) {
	if t.depth == 8 {
		for i := t.samples; i < len(row); i++ {
			row[i] += row[i-t.samples]
		}
		return
	}
	for i := 2 * t.samples; i+2 <= len(row); i += 2 {
		t.order.PutUint16(row[i:], t.order.Uint16(row[i:])+t.order.Uint16(row[i-2*t.samples:]))
	}
}

// convert fills to with the first pixels of a row: grey is tripled, alpha dropped, 16 bits cut to
// 8.
func (t *tiffImage) convert(to, row []byte) error {
	size := t.depth / 8 // bytes a sample
	at := 0
	if size == 2 {
		at = t.at
	}
	if t.samples > 1 {
		for i := 0; i < len(to); i += 3 {
			to[i], to[i+1], to[i+2] = row[at], row[at+size], row[at+2*size]
			at += t.samples * size
		}
		return nil
	}
	for i := 0; i < len(to); i += 3 {
		var value byte
		if t.depth == 1 {
			value = row[i/24] >> (7 - i/3%8) & 1
		} else {
			value = row[at]
			at += size
		}
		if int(value) >= len(t.colours) {
			return tiff.FormatError("invalid color index")
		}
		copy(to[i:i+3], t.colours[value][:])
	}
	return nil
}

// packBits unpacks PackBits (TIFF 6.0, section 9): a length and literals, or a length and a byte to
// repeat.
type packBits struct {
	in, ready []byte
	run       [128]byte
}

func (p *packBits) Read(to []byte) (int, error) {
	for len(p.ready) == 0 {
		if len(p.in) == 0 {
			return 0, io.EOF
		}
		code := int(int8(p.in[0]))
		p.in = p.in[1:]
		switch {
		case code >= len(p.in), code < 0 && code != -128 && len(p.in) == 0:
			return 0, io.ErrUnexpectedEOF
		case code >= 0:
			p.ready, p.in = p.in[:code+1], p.in[code+1:]
		case code != -128:
			p.ready = p.run[:1-code]
			for i := range p.ready {
				p.ready[i] = p.in[0]
			}
			p.in = p.in[1:]
		}
	}
	n := copy(to, p.ready)
	p.ready = p.ready[n:]
	return n, nil
}
