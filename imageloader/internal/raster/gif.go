package raster

import (
	"bytes"
	"compress/lzw"
	"errors"
	"fmt"
	"image"
	"io"
)

// gif is the first frame of a GIF.
type gif struct {
	width, height int             // of the canvas, which is enlarged to contain the frame, as in Pillow
	frame         image.Rectangle // position on the canvas
	interlaced    bool
	background    byte // the index for pixels outside of the frame
	colours       colourTable
	size          int    // size of the file
	codeBits      int    // initial code size of the LZW data
	blocks        []byte // the rest of the file, starting with the frame's data
}

// ParseGIF reads a GIF up to the pixels of its first frame.
func ParseGIF(data []byte) (Image, error) {
	r := &littleEndian{data: data}
	g := &gif{width: r.u16(6), height: r.u16(8), size: len(data)}
	flags := r.bytes(10, 1)[0]
	at := 13
	if flags&0x80 != 0 {
		at = g.readPalette(r, at, flags)
	} else {
		for i := range g.colours { // without a palette, indices are grey levels
			g.colours[i] = [3]byte{byte(i), byte(i), byte(i)}
		}
	}
	for r.err == nil {
		kind := r.bytes(at, 1)[0]
		at++
		switch kind {
		case ',':
			return g.readFrame(r, at)
		case '!':
			// Outside of the frame, Pillow shows the transparent colour.
			if control := r.bytes(at, 1)[0] == 0xf9; control && r.bytes(at+1, 1)[0] >= 4 && r.bytes(at+2, 1)[0]&1 != 0 {
				g.background = r.bytes(at+5, 1)[0]
			}
			at++
			for r.err == nil && r.bytes(at, 1)[0] != 0 {
				at += 1 + int(r.bytes(at, 1)[0])
			}
			at++
		case ';':
			return nil, &DamageError{errors.New("GIF: no image"), at}
		}
	}
	return nil, r.err
}

// readPalette reads a palette. at is the offset of its start, and end that of its end.
func (g *gif) readPalette(r *littleEndian, at int, flags byte) (end int) {
	g.colours = colourTable{}
	for i := range 2 << (flags & 7) {
		copy(g.colours[i][:], r.bytes(at+3*i, 3))
	}
	return at + 6<<(flags&7)
}

// readFrame reads a frame's descriptor.
func (g *gif) readFrame(r *littleEndian, at int) (Image, error) {
	corner := image.Pt(r.u16(at), r.u16(at+2))
	g.frame = image.Rectangle{corner, corner.Add(image.Pt(r.u16(at+4), r.u16(at+6)))}
	g.width, g.height = max(g.width, g.frame.Max.X), max(g.height, g.frame.Max.Y)
	flags := r.bytes(at+8, 1)[0]
	at += 9
	g.interlaced = flags&0x40 != 0
	if flags&0x80 != 0 {
		at = g.readPalette(r, at, flags)
	}
	g.codeBits = int(r.bytes(at, 1)[0])
	switch {
	case r.err != nil:
		return nil, r.err
	case g.frame.Empty():
		return nil, &DamageError{errors.New("GIF: a frame without pixels"), at}
	case g.codeBits < 2 || g.codeBits > 8:
		return nil, &DamageError{fmt.Errorf("GIF: pixels of %d bits", g.codeBits), at}
	}
	g.blocks = r.data[at+1:]
	return g, checkSides(g.width, g.height)
}

func (g *gif) Header() Header {
	return Header{Width: g.width, Height: g.height, Components: 3, BitDepth: 8, Orientation: 1}
}

// Check accepts every image, because the compressed pixels may take almost no bits.
func (g *gif) Check() error { return nil }

func (g *gif) Decode(rgb []byte, _ JPEG) error {
	if g.frame != image.Rect(0, 0, g.width, g.height) {
		for at := 0; at < len(rgb); at += 3 {
			copy(rgb[at:at+3], g.colours[g.background][:])
		}
	}
	blocks := gifBlocks{left: g.blocks}
	pixels := lzw.NewReader(&blocks, lzw.LSB, g.codeBits)
	defer pixels.Close() // frees memory, and can't fail
	row := make([]byte, g.frame.Dx())
	passes := [][2]int{{0, 1}} // the first row of each pass, and the distance between its rows
	if g.interlaced {
		passes = [][2]int{{0, 8}, {4, 8}, {2, 4}, {1, 2}}
	}
	for _, pass := range passes {
		for y := pass[0]; y < g.frame.Dy(); y += pass[1] {
			if _, err := io.ReadFull(pixels, row); err != nil {
				if err == io.EOF {
					err = io.ErrUnexpectedEOF
				}
				return &DamageError{fmt.Errorf("GIF: %w in row %d", err, y),
					g.size - len(blocks.left) - blocks.block.Len()}
			}
			to := rgb[3*((g.frame.Min.Y+y)*g.width+g.frame.Min.X):]
			for x, index := range row {
				copy(to[3*x:3*x+3], g.colours[index][:])
			}
		}
	}
	return nil
}

// gifBlocks reads data that is stored in blocks of up to 255 bytes. A byte with the block's size
// precedes each block.
type gifBlocks struct {
	block bytes.Reader
	left  []byte
}

func (b *gifBlocks) next() error {
	for b.block.Len() == 0 {
		if len(b.left) == 0 {
			return io.ErrUnexpectedEOF
		}
		size := int(b.left[0])
		if size == 0 {
			return io.EOF
		}
		end := min(1+size, len(b.left))
		b.block.Reset(b.left[1:end])
		b.left = b.left[end:]
	}
	return nil
}

func (b *gifBlocks) Read(p []byte) (int, error) {
	if err := b.next(); err != nil {
		return 0, err
	}
	return b.block.Read(p)
}

func (b *gifBlocks) ReadByte() (byte, error) {
	if err := b.next(); err != nil {
		return 0, err
	}
	return b.block.ReadByte()
}
