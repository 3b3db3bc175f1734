package raster

import (
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"io"
	"math"
)

// Tags of a TIFF's directory.
const (
	tiffWidth           = 256
	tiffHeight          = 257
	tiffBitsPerSample   = 258
	tiffCompression     = 259
	tiffPhotometric     = 262
	tiffFillOrder       = 266
	tiffStripOffsets    = 273
	tiffOrientation     = 274
	tiffSamplesPerPixel = 277
	tiffRowsPerStrip    = 278
	tiffStripByteCounts = 279
	tiffPlanar          = 284
	tiffT4Options       = 292
	tiffPredictor       = 317
	tiffColorMap        = 320
	tiffTileWidth       = 322
	tiffTileLength      = 323
	tiffTileOffsets     = 324
	tiffTileByteCounts  = 325
	tiffInkSet          = 332
	tiffExtraSamples    = 338
	tiffSampleFormat    = 339
	tiffJPEGTables      = 347
)

// Values of a TIFF's photometric interpretation.
const (
	tiffWhiteIsZero = 0
	tiffBlackIsZero = 1
	tiffRGB         = 2
	tiffPalette     = 3
	tiffCMYK        = 5
	tiffYCbCr       = 6
)

const (
	tiffMaxSamples = 16
	tiffMaxEntries = 65535 // in a directory, even of a BigTIFF
	// tiffMaxShared limits the total size of all JPEGs, as a multiple of the file's size. Strips
	// without counts may overlap.
	tiffMaxShared  = 64
	tiffAssociated = 1 // an extra sample is alpha, and the colours have been multiplied by it
)

// tiff is the first image of a TIFF or BigTIFF.
type tiff struct {
	data          []byte
	order         binary.ByteOrder
	big           bool // a BigTIFF
	width, height int
	photometric   uint64
	samples       int  // per pixel
	colours       int  // samples that are colours; the others are alpha or unknown
	associated    bool // the sample after the colours is alpha, and the colours have been multiplied by it
	depth         int  // bits per sample
	compression   uint64
	predictor     bool
	separate      bool // each sample has separate blocks
	reversed      bool // the lowest bit of a byte is the first
	twoDimensions bool // a row of fax group 3 may be coded relative to the row before it
	jpegTables    []byte
	orientation   int

	tiled           bool
	block           image.Point // columns and rows of a tile or strip; the last strip may have fewer rows
	across, down    int         // number of blocks in each direction
	offsets, counts tiffValues  // of blocks; some files have no counts

	known  int         // number of colours in table
	table  colourTable // for a single colour, by its value or its high byte
	scale  [256]byte   // for several colours of up to 8 bits each
	values []byte      // values of a row, pixel after pixel: the colours and associated alpha
}

// tiffValues are integers in the file.
type tiffValues struct {
	order       binary.ByteOrder
	data        []byte
	size, count int // size is the size of each value in bytes
}

func (v tiffValues) get(i int) uint64 {
	switch p := v.data[i*v.size:]; v.size {
	case 1:
		return uint64(p[0])
	case 2:
		return uint64(v.order.Uint16(p))
	case 4:
		return uint64(v.order.Uint32(p))
	default:
		return v.order.Uint64(p)
	}
}

// directory returns the entries of the first directory.
func (t *tiff) directory() ([]byte, error) {
	if len(t.data) < 16 {
		return nil, cutOff(t.data)
	}
	offset, size, entry := uint64(t.order.Uint32(t.data[4:])), uint64(2), uint64(12)
	if t.big {
		offset, size, entry = t.order.Uint64(t.data[8:]), 8, 20
	}
	if offset > uint64(len(t.data)) || uint64(len(t.data))-offset < size {
		return nil, cutOff(t.data)
	}
	from := t.data[offset:]
	count := uint64(t.order.Uint16(from))
	if t.big {
		count = t.order.Uint64(from)
	}
	if count > tiffMaxEntries {
		return nil, &DamageError{fmt.Errorf("TIFF: a directory of %d entries", count), int(offset)}
	}
	if count*entry > uint64(len(from))-size {
		return nil, cutOff(t.data)
	}
	return from[size : size+count*entry], nil
}

// tag returns up to limit values of a tag, which may be anywhere in the directory. It returns none
// if the tag is missing or its values are not integers.
func (t *tiff) tag(number uint16, limit int) (none tiffValues) {
	entries, err := t.directory()
	if err != nil {
		return none
	}
	head, entry := 8, 12 // bytes before the value, and including the value
	if t.big {
		head, entry = 12, 20
	}
	for len(entries) > 0 && t.order.Uint16(entries) != number {
		entries = entries[entry:]
	}
	if len(entries) == 0 {
		return none
	}
	// BYTE, SHORT, LONG, UNDEFINED, IFD, LONG8 and IFD8.
	size := map[uint16]uint64{1: 1, 3: 2, 4: 4, 7: 1, 13: 4, 16: 8, 18: 8}[t.order.Uint16(entries[2:])]
	count := uint64(t.order.Uint32(entries[4:]))
	if t.big {
		count = t.order.Uint64(entries[4:])
	}
	if size == 0 || count > math.MaxInt32 {
		return none
	}
	from := entries[head:entry]
	if size*count > uint64(len(from)) {
		offset := uint64(t.order.Uint32(from))
		if t.big {
			offset = t.order.Uint64(from)
		}
		if offset > uint64(len(t.data)) {
			return none
		}
		from = t.data[offset:]
	}
	count = min(count, uint64(limit))
	if size*count > uint64(len(from)) {
		return none
	}
	return tiffValues{t.order, from, int(size), int(count)}
}

func (t *tiff) first(number uint16, fallback uint64) uint64 {
	if v := t.tag(number, 1); v.count > 0 {
		return v.get(0)
	}
	return fallback
}

// ParseTIFF reads the first directory of a TIFF or BigTIFF.
func ParseTIFF(data []byte) (Image, error) {
	if len(data) < 8 {
		return nil, cutOff(data)
	}
	t := &tiff{data: data, order: binary.LittleEndian}
	if data[0] == 'M' {
		t.order = binary.BigEndian
	}
	t.big = t.order.Uint16(data[2:]) == 43
	if _, err := t.directory(); err != nil {
		return nil, err
	}
	width, height := t.first(tiffWidth, 0), t.first(tiffHeight, 0)
	t.width, t.height = int(min(width, math.MaxInt32)), int(min(height, math.MaxInt32))
	if err := checkSides(t.width, t.height); err != nil {
		return nil, err
	}
	t.photometric = t.first(tiffPhotometric, tiffWhiteIsZero) // the tag is required; Pillow uses this default
	t.compression = t.first(tiffCompression, tiffUncompressed)
	t.separate = t.first(tiffPlanar, 1) == 2
	t.reversed = t.first(tiffFillOrder, 1) == 2
	t.twoDimensions = t.first(tiffT4Options, 0)&1 != 0
	tables := t.tag(tiffJPEGTables, maxJPEGTables)
	t.jpegTables = tables.data[:tables.count*tables.size]
	t.orientation = int(t.first(tiffOrientation, 1))
	if t.orientation < 1 || t.orientation > 8 {
		t.orientation = 1
	}
	if err := t.readSamples(); err != nil {
		return nil, err
	}
	if err := t.checkFeatures(); err != nil {
		return nil, err
	}
	t.separate = t.separate && t.samples > 1
	return t, t.readColours()
}

// readSamples reads the number, the depth and the meaning of the samples.
func (t *tiff) readSamples() error {
	samples := t.first(tiffSamplesPerPixel, 1)
	if samples < 1 || samples > tiffMaxSamples {
		return unsupported("TIFF: %d samples a pixel", samples)
	}
	t.samples, t.depth = int(samples), 1
	depths := t.tag(tiffBitsPerSample, t.samples) // one value may hold for all samples
	for i := range depths.count {
		depth := depths.get(i)
		if i > 0 && depth != depths.get(0) {
			return unsupported("TIFF: samples of different depths")
		}
		t.depth = int(min(depth, 64))
	}
	if depths.count == 0 && t.has(tiffBitsPerSample) {
		return io.ErrUnexpectedEOF
	}
	formats := t.tag(tiffSampleFormat, t.samples)
	for i := range formats.count {
		switch formats.get(i) {
		case 1, 4: // integers, or undefined
		case 2:
			return unsupported("TIFF: signed samples")
		case 3:
			return unsupported("TIFF: floating-point samples")
		default:
			return unsupported("TIFF: samples of format %d", formats.get(i))
		}
	}
	switch t.depth {
	case 1, 2, 4, 8, 12, 16:
	default:
		return unsupported("TIFF: samples of %d bits", t.depth)
	}
	return nil
}

// has reports whether the directory has a tag, even if the tag's values are outside of the data.
func (t *tiff) has(number uint16) bool {
	entries, err := t.directory()
	entry := 12
	if t.big {
		entry = 20
	}
	for ; err == nil && len(entries) > 0; entries = entries[entry:] {
		if t.order.Uint16(entries) == number {
			return true
		}
	}
	return false
}

var tiffColourModels = map[uint64]string{
	4: "a transparency mask", 8: "CIELAB", 9: "ICCLAB", 10: "ITULAB", 32803: "a colour filter array",
	32844: "LogL", 32845: "LogLuv", 34892: "linear raw samples",
}

// checkFeatures returns an error for unsupported features.
func (t *tiff) checkFeatures() error {
	switch t.photometric {
	case tiffWhiteIsZero, tiffBlackIsZero, tiffPalette:
		t.colours = 1
	case tiffRGB:
		t.colours = 3
	case tiffCMYK:
		t.colours = 4
		if t.first(tiffInkSet, 1) != 1 {
			return unsupported("TIFF: inks other than CMYK")
		}
	case tiffYCbCr:
		t.colours = 3
		if t.samples == 1 {
			t.colours = 1
		} else if t.compression != tiffJPEG {
			return unsupported("TIFF: YCbCr without JPEG compression")
		}
	default:
		if name := tiffColourModels[t.photometric]; name != "" {
			return unsupported("TIFF: %s", name)
		}
		return unsupported("TIFF: photometric interpretation %d", t.photometric)
	}
	if t.samples < t.colours {
		return fmt.Errorf("TIFF: %d samples a pixel for %d colours", t.samples, t.colours)
	}
	t.associated = t.samples > t.colours && t.colours != 4 && t.photometric != tiffPalette &&
		t.first(tiffExtraSamples, 0) == tiffAssociated
	if t.photometric == tiffPalette && t.depth > 8 {
		return unsupported("TIFF: a palette of %d-bit indices", t.depth)
	}
	return t.checkCompression()
}

// readColours makes the table for grey or a palette, or the scale for several colours.
func (t *tiff) readColours() error {
	levels := 1 << min(t.depth, 8)
	for value := range levels {
		t.scale[value] = byte(value * 255 / (levels - 1))
	}
	t.known = levels
	for value := range levels {
		grey := t.scale[value]
		if t.photometric == tiffWhiteIsZero {
			grey = 255 - grey
		}
		t.table[value] = [3]byte{grey, grey, grey}
	}
	if t.photometric != tiffPalette {
		return nil
	}
	palette := t.tag(tiffColorMap, 3<<t.depth)
	t.known = palette.count / 3
	if t.known == 0 {
		return errors.New("TIFF: no palette")
	}
	for i := range t.known {
		for c := range 3 { // first all reds, then all greens, then all blues
			t.table[i][c] = byte(palette.get(c*t.known+i) >> 8)
		}
	}
	return nil
}

func (t *tiff) Header() Header {
	h := Header{Width: t.width, Height: t.height, Components: t.samples, BitDepth: max(t.depth, 8),
		Orientation: t.orientation}
	switch {
	case t.photometric == tiffPalette, t.samples == 2:
		h.Components = 3
	case t.samples > 4:
		h.Components = t.colours
	}
	return h
}

// layOut computes the layout of the strips or tiles.
func (t *tiff) layOut() error {
	offsets, counts := uint16(tiffStripOffsets), uint16(tiffStripByteCounts)
	t.block = image.Pt(t.width, t.height)
	if width := t.first(tiffTileWidth, 0); width != 0 {
		height := t.first(tiffTileLength, 0)
		larger := width > uint64(t.width)+16 || height > uint64(t.height)+16
		switch {
		case width < 8 || height < 8:
			return errors.New("TIFF: tiles of less than 8 pixels a side")
		case larger && (width > 1024 || height > 1024):
			return errors.New("TIFF: tiles larger than the image")
		}
		t.tiled, t.block = true, image.Pt(int(width), int(height))
		offsets, counts = tiffTileOffsets, tiffTileByteCounts
		if !t.has(tiffTileOffsets) { // some writers use the tags of strips
			offsets, counts = tiffStripOffsets, tiffStripByteCounts
		}
	} else if rows := t.first(tiffRowsPerStrip, 0); rows > 0 && rows < uint64(t.height) {
		t.block.Y = int(rows)
	}
	t.across = (t.width + t.block.X - 1) / t.block.X
	t.down = (t.height + t.block.Y - 1) / t.block.Y
	blocks := t.across * t.down * t.planes()
	t.offsets, t.counts = t.tag(offsets, blocks), t.tag(counts, blocks)
	if t.offsets.count < blocks || t.counts.count != 0 && t.counts.count < blocks {
		return errors.New("TIFF: some strips or tiles are missing")
	}
	return nil
}

// planes returns the number of blocks at each position.
func (t *tiff) planes() int {
	if t.separate {
		return t.samples
	}
	return 1
}

// bytes returns the size of a number of pixels in a row of a block.
func (t *tiff) bytes(pixels int) int { return (pixels*t.samples/t.planes()*t.depth + 7) / 8 }

// visible returns the part of block (i, j) that is inside the image.
func (t *tiff) visible(i, j int) image.Rectangle {
	at := image.Pt(i*t.block.X, j*t.block.Y)
	return image.Rectangle{at, at.Add(t.block)}.Intersect(image.Rect(0, 0, t.width, t.height))
}

// source returns the bytes of a block, or as many as the file has.
func (t *tiff) source(plane, i, j int) []byte {
	k := (plane*t.down+j)*t.across + i
	left := t.data[min(t.offsets.get(k), uint64(len(t.data))):]
	if t.counts.count == 0 || t.counts.get(k) == 0 { // some programs write no counts, or zeros
		return left
	}
	return left[:min(t.counts.get(k), uint64(len(left)))]
}

// Check compares the sizes of the blocks with the sizes of their pixels.
func (t *tiff) Check() error {
	if err := t.layOut(); err != nil {
		return err
	}
	ratio := tiffMaxRatio[t.compression]
	jpegs := 0 // bytes of all JPEGs
	for plane := range t.planes() {
		for i := range t.across {
			for j := range t.down {
				packed := t.source(plane, i, j)
				part := t.visible(i, j)
				need := (part.Dy()-1)*t.bytes(t.block.X) + t.bytes(part.Dx())
				if t.fax() { // a blank row takes one bit
					ratio, need = 8, part.Dy()
				}
				if len(packed) == 0 || (len(packed)+1)*ratio < need {
					return errors.New("TIFF: too little image data")
				}
				// Decoding a block reads its whole JPEG. If blocks shared their bytes, the time
				// could grow with the square of the file's size.
				if jpegs += len(packed); t.compression == tiffJPEG && jpegs > tiffMaxShared*len(t.data) {
					return unsupported("TIFF: JPEGs that share their bytes")
				}
			}
		}
	}
	return nil
}

func (t *tiff) Decode(rgb []byte, jpeg JPEG) error {
	rows := make([][]byte, t.planes())
	for plane := range rows {
		rows[plane] = make([]byte, t.bytes(t.block.X))
	}
	for i := range t.across {
		for j := range t.down {
			var err error
			if t.compression == tiffJPEG {
				err = t.decodeJPEG(rgb, i, j, jpeg)
			} else {
				err = t.decodeBlock(rgb, rows, i, j)
			}
			if err != nil {
				return fmt.Errorf("TIFF: %w", err)
			}
		}
	}
	return nil
}

// decodeBlock decodes a block row by row. It reads the rows of all planes in parallel.
func (t *tiff) decodeBlock(rgb []byte, rows [][]byte, i, j int) error {
	readers := make([]io.Reader, len(rows))
	for plane := range readers {
		var err error
		if readers[plane], err = t.unpack(t.source(plane, i, j)); err != nil {
			return err
		}
	}
	part := t.visible(i, j)
	need := t.bytes(part.Dx())
	for y := range part.Dy() {
		for plane, row := range rows {
			n, err := readRow(readers[plane], row)
			switch {
			case err != nil:
				return err
			case n < need:
				return io.ErrUnexpectedEOF
			case t.predictor:
				t.sum(row)
			}
		}
		at := 3 * ((part.Min.Y+y)*t.width + part.Min.X)
		if err := t.convert(rgb[at:at+3*part.Dx()], rows); err != nil {
			return err
		}
	}
	if !t.deflated() {
		return nil
	}
	for _, reader := range readers { // the checksum is after the rest of the block
		left := int64(t.bytes(t.block.X)) * int64(t.block.Y)
		if _, err := io.Copy(io.Discard, io.LimitReader(reader, left)); err != nil {
			return err
		}
	}
	return nil
}

// readRow reads until p is full or the input ends. The end of the input is not an error.
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

// sum reverses the horizontal predictor, which stores each sample as the difference from the
// previous pixel's sample.
func (t *tiff) sum(row []byte) {
	samples := t.samples / t.planes()
	if t.depth == 8 {
		for i := samples; i < len(row); i++ {
			row[i] += row[i-samples]
		}
		return
	}
	for i := 2 * samples; i+2 <= len(row); i += 2 {
		t.order.PutUint16(row[i:], t.order.Uint16(row[i:])+t.order.Uint16(row[i-2*samples:]))
	}
}

// convert writes the first pixels of a row to the slice to.
func (t *tiff) convert(to []byte, rows [][]byte) error {
	pixels := len(to) / 3
	values, size := rows[0], t.samples // pixel after pixel; size is the number of values per pixel
	if t.depth != 8 || t.separate {
		size = t.colours
		if t.associated {
			size++
		}
		if len(t.values) < pixels*size {
			t.values = make([]byte, pixels*size)
		}
		values = t.values
		for sample := range size {
			if t.separate {
				t.extract(values[sample:], size, rows[sample], 0, 1, pixels)
			} else {
				t.extract(values[sample:], size, rows[0], sample, t.samples, pixels)
			}
		}
	}
	switch {
	case t.associated:
		t.divide(to, values, size)
	case t.colours == 1:
		for x := range pixels {
			value := values[x*size]
			if int(value) >= t.known {
				return fmt.Errorf("colour %d of a palette of %d", value, t.known)
			}
			copy(to[3*x:3*x+3], t.table[value][:])
		}
	case t.colours == 3 && size == 3:
		copy(to, values)
	case t.colours == 3:
		for x := range pixels {
			v := values[x*size:]
			to[3*x], to[3*x+1], to[3*x+2] = v[0], v[1], v[2]
		}
	default:
		convertCMYK(to, values, size)
	}
	return nil
}

// extract copies one sample of each pixel of a row. first is the sample's index in the pixel. The
// slice to gets a value in every step-th byte. For a 16-bit sample it writes the high byte. A
// sample of less than 8 bits is written unchanged if a table maps it, and is scaled otherwise.
func (t *tiff) extract(to []byte, step int, row []byte, first, samples, pixels int) {
	high := 0 // position of the high byte in 16 bits
	if t.order == binary.ByteOrder(binary.LittleEndian) {
		high = 1
	}
	scaled := t.colours > 1 || t.associated
	for x := range pixels {
		var value byte
		switch bit := (x*samples + first) * t.depth; {
		case t.depth == 16:
			value = row[bit/8+high]
		case t.depth == 8:
			value = row[bit/8]
		case t.depth == 12:
			if value = row[bit/8]; bit%8 == 4 {
				value = value<<4 | row[bit/8+1]>>4
			}
		default:
			value = row[bit/8] >> (8 - t.depth - bit%8) & (1<<t.depth - 1)
			if scaled {
				value = t.scale[value]
			}
		}
		to[x*step] = value
	}
}

// divide reverses the multiplication of grey or RGB by alpha, as Pillow does.
func (t *tiff) divide(to, values []byte, size int) {
	for x := range len(to) / 3 {
		v := values[x*size:]
		alpha := int(v[t.colours])
		for c := range 3 {
			value := int(v[min(c, t.colours-1)])
			switch alpha {
			case 0:
				value = 0
			case 255:
			default:
				value = min(value*255/alpha, 255)
			}
			if t.photometric == tiffWhiteIsZero {
				value = 255 - value
			}
			to[3*x+c] = byte(value)
		}
	}
}

// convertCMYK converts like Pillow, without a colour profile.
func convertCMYK(to, values []byte, size int) {
	for x := range len(to) / 3 {
		v := values[x*size:]
		white := 255 - int(v[3])
		for c := range 3 {
			product := int(v[c])*white + 128
			to[3*x+c] = byte(max(white-(product>>8+product)>>8, 0))
		}
	}
}
