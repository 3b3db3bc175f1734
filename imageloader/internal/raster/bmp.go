package raster

import (
	"errors"
	"fmt"
	"math/bits"
)

// Values of a BMP's compression.
const (
	bmpUncompressed   = 0
	bmpRLE8           = 1
	bmpRLE4           = 2
	bmpBitFields      = 3
	bmpJPEG           = 4
	bmpPNG            = 5
	bmpAlphaBitFields = 6
)

// bmpFileHeader is the size of the file header, which is before the header of the DIB.
const bmpFileHeader = 14

// bmp is a Windows bitmap, or one without its file header (a DIB).
type bmp struct {
	data          []byte
	width, height int
	bits          int // per pixel
	compression   uint32
	topDown       bool
	offset        int       // of the pixels
	masks         [3]uint32 // red, green, blue, for 16, 24 and 32 bits
	alpha         bool
	colours       colourTable
}

// ParseBMP reads the headers and the palette of a BMP or DIB.
func ParseBMP(data []byte) (Image, error) {
	b := &bmp{data: data}
	r := &littleEndian{data: data}
	at := 0
	if len(data) >= 2 && string(data[:2]) == "BM" {
		at = bmpFileHeader
		b.offset = int(r.u32(10))
	}
	size := int(r.u32(at))
	colours, entry := 0, 4
	switch size {
	case 12: // BITMAPCOREHEADER
		b.width, b.height, b.bits, entry = r.u16(at+4), r.u16(at+6), r.u16(at+10), 3
	case 40, 52, 56, 64, 108, 124: // BITMAPINFOHEADER, its versions 2 to 5, and version 2 of OS/2
		b.width, b.height = int(int32(r.u32(at+4))), int(int32(r.u32(at+8)))
		b.bits, b.compression = r.u16(at+14), r.u32(at+16)
		colours = int(min(r.u32(at+32), 256))
		if b.height < 0 {
			b.topDown, b.height = true, -b.height
		}
	default:
		if r.err == nil {
			return nil, unsupported("BMP: a header of %d bytes", size)
		}
	}
	if r.err != nil {
		return nil, r.err
	}
	if err := b.check(size); err != nil {
		return nil, err
	}
	if err := checkSides(b.width, b.height); err != nil {
		return nil, err
	}
	after := at + size
	if b.bits > 8 {
		after = b.readMasks(r, at, size)
	} else {
		if colours == 0 {
			colours = 1 << b.bits
		}
		if b.offset == after { // the palette is there, and the pixels follow it
			b.offset = 0
		}
		for i := range colours {
			c := r.bytes(after+i*entry, 3)
			b.colours[i] = [3]byte{c[2], c[1], c[0]}
		}
		after += colours * entry
	}
	if b.offset == 0 {
		b.offset = after
	}
	if r.err != nil {
		return nil, r.err
	}
	for _, mask := range b.masks {
		if shifted := mask >> bits.TrailingZeros32(mask); shifted&(shifted+1) != 0 {
			return nil, unsupported("BMP: a bit field %#x with gaps", mask)
		}
	}
	return b, nil
}

// check returns an error for unsupported features.
func (b *bmp) check(headerSize int) error {
	allowed := map[uint32][]int{
		bmpUncompressed: {1, 2, 4, 8, 16, 24, 32}, bmpRLE8: {8}, bmpRLE4: {4},
		bmpBitFields: {16, 24, 32}, bmpAlphaBitFields: {16, 32},
	}[b.compression]
	switch {
	case headerSize == 64 && b.compression == bmpBitFields:
		return unsupported("BMP: Huffman compression of OS/2")
	case headerSize == 64 && b.compression == bmpJPEG:
		return unsupported("BMP: 24-bit run-length encoding of OS/2")
	case b.compression == bmpJPEG || b.compression == bmpPNG:
		return unsupported("BMP: a JPEG or PNG inside")
	case allowed == nil:
		return unsupported("BMP: compression %d", b.compression)
	}
	for _, bits := range allowed {
		if bits == b.bits {
			return nil
		}
	}
	return unsupported("BMP: %d bits a pixel with compression %d", b.bits, b.compression)
}

// readMasks finds out which bits of a pixel are red, green and blue. It returns the end of the
// headers.
func (b *bmp) readMasks(r *littleEndian, at, size int) (end int) {
	b.masks = [3]uint32{0xff0000, 0xff00, 0xff}
	if b.bits == 16 {
		b.masks = [3]uint32{0x7c00, 0x3e0, 0x1f}
	}
	end = at + size
	if b.compression == bmpUncompressed {
		return end
	}
	if size == 40 { // the masks are after the header
		end += 12
		if b.compression == bmpAlphaBitFields {
			end += 4
		}
	}
	var masks [3]uint32
	for i := range masks {
		masks[i] = r.u32(at + 40 + 4*i)
	}
	b.alpha = (size >= 56 || end == at+56) && r.u32(at+52) != 0
	if masks != [3]uint32{} { // Pillow ignores empty masks
		b.masks = masks
	}
	return end
}

func (b *bmp) Header() Header {
	h := Header{Width: b.width, Height: b.height, Components: 3, BitDepth: 8, Orientation: 1}
	if b.alpha {
		h.Components = 4
	}
	return h
}

// rowBytes returns the size of a row without its padding.
func (b *bmp) rowBytes() int { return (b.width*b.bits + 7) / 8 }

// stride returns the distance between the starts of two rows, in bytes.
func (b *bmp) stride() int { return (b.width*b.bits + 31) / 32 * 4 }

func (b *bmp) runs() bool { return b.compression == bmpRLE8 || b.compression == bmpRLE4 }

// Check accepts every run-length encoded image, because it may end at any pixel.
func (b *bmp) Check() error {
	need := b.offset + b.stride()*(b.height-1) + b.rowBytes()
	if b.offset > len(b.data) || !b.runs() && need > len(b.data) {
		return cutOff(b.data)
	}
	return nil
}

// row returns the part of rgb for row y in the file.
func (b *bmp) row(rgb []byte, y int) []byte {
	if !b.topDown {
		y = b.height - 1 - y
	}
	return rgb[3*y*b.width:][:3*b.width]
}

func (b *bmp) Decode(rgb []byte, _ JPEG) error {
	if b.runs() {
		return b.decodeRuns(rgb)
	}
	var convert func(to, from []byte)
	switch {
	case b.bits <= 8:
		convert = b.indices
	case b.bits >= 24 && b.masks == [3]uint32{0xff0000, 0xff00, 0xff}:
		convert = b.bgr
	default:
		convert = b.fields
	}
	for y := range b.height {
		convert(b.row(rgb, y), b.data[b.offset+y*b.stride():][:b.rowBytes()])
	}
	return nil
}

func (b *bmp) indices(to, from []byte) {
	mask := byte(1<<b.bits - 1)
	for x := range b.width {
		bit := x * b.bits
		index := from[bit/8] >> (8 - b.bits - bit%8) & mask
		copy(to[3*x:3*x+3], b.colours[index][:])
	}
}

func (b *bmp) bgr(to, from []byte) {
	size := b.bits / 8
	for x := range b.width {
		p := from[x*size:]
		to[3*x], to[3*x+1], to[3*x+2] = p[2], p[1], p[0]
	}
}

// fields scales colour fields of any number of bits to 8 bits. It rounds down like Pillow.
func (b *bmp) fields(to, from []byte) {
	var shift [3]int
	var limit [3]uint64
	for i, mask := range b.masks {
		shift[i] = bits.TrailingZeros32(mask)
		limit[i] = max(uint64(mask)>>shift[i], 1)
	}
	size := b.bits / 8
	for x := range b.width {
		var pixel uint32
		for i := range size {
			pixel |= uint32(from[x*size+i]) << (8 * i)
		}
		for i, mask := range b.masks {
			to[3*x+i] = byte(uint64(pixel&mask) >> shift[i] * 255 / limit[i])
		}
	}
}

// decodeRuns decodes RLE8 and RLE4. Pixels that the file skips get the palette's first colour.
func (b *bmp) decodeRuns(rgb []byte) error {
	for at := 0; at < len(rgb); at += 3 {
		copy(rgb[at:at+3], b.colours[0][:])
	}
	in := b.data[b.offset:]
	damaged := func(err error) error { return &DamageError{err, len(b.data) - len(in)} }
	for x, y := 0, 0; y < b.height; {
		if len(in) < 2 {
			return cutOff(b.data)
		}
		count, value := int(in[0]), int(in[1])
		in = in[2:]
		switch {
		case count > 0: // a run
			x += b.put(rgb, x, y, count, func(int) byte { return byte(value) })
		case value == 0: // the end of the row
			x, y = 0, y+1
		case value == 1: // the end of the image
			return nil
		case value == 2: // a jump
			if len(in) < 2 {
				return cutOff(b.data)
			}
			x, y = x+int(in[0]), y+int(in[1])
			if x > b.width {
				return damaged(fmt.Errorf("BMP: a jump to column %d of %d", x, b.width))
			}
			in = in[2:]
		default: // literal pixels, padded to an even number of bytes
			size := (value*b.bits + 7) / 8
			if size > len(in) {
				return cutOff(b.data)
			}
			if x+value > b.width {
				return damaged(errors.New("BMP: more pixels than the row has"))
			}
			literal := in[:size]
			x += b.put(rgb, x, y, value, func(i int) byte { return literal[i*b.bits/8] })
			in = in[min(size+size%2, len(in)):]
		}
	}
	return nil
}

// put writes up to count pixels starting at (x, y), but not past the end of the row, and returns
// their number. octet returns the byte that contains pixel i.
func (b *bmp) put(rgb []byte, x, y, count int, octet func(i int) byte) int {
	count = min(count, b.width-x)
	to := b.row(rgb, y)[3*x:]
	for i := range count {
		index := octet(i)
		if b.bits == 4 {
			index = index >> (4 - 4*(i%2)) & 15
		}
		copy(to[3*i:3*i+3], b.colours[index][:])
	}
	return count
}
