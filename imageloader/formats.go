package imageloader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/color"
	"image/gif"
	"io"

	"golang.org/x/image/bmp"
	"golang.org/x/image/tiff"

	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Formats that few training sets have are decoded in Go, as whole images, and only resized by the
// shim: their C libraries would bring more code, and more danger from hostile bytes, than speed
// (Debian's libtiff.a alone draws in five others).
//
// A worker takes 3 bytes a pixel for the RGB, which it uses again for the next image, and 1 byte a
// pixel for the frame of a GIF; frames of earlier images may still wait for the garbage collector.
// The maximum of ts_image_decoder is 8 bytes a pixel.

const maxSide = 1_000_000

type rareFormat struct {
	number int32
	config func(io.Reader) (image.Config, error)
	// decode fills rgb with rows without gaps.
	decode func(data []byte, c image.Config, rgb []byte) error
}

// rare returns the format of an image that is decoded in Go; nil for all other bytes.
func rare(data []byte) *rareFormat {
	switch index.Sniff(data) {
	case "GIF":
		return &rareFormat{index.GIF, gif.DecodeConfig, decodeGIF}
	case "BMP":
		return &rareFormat{index.BMP, bmp.DecodeConfig, decodeBMP}
	case "TIFF":
		return &rareFormat{index.TIFF, tiff.DecodeConfig, decodeTIFF}
	}
	return nil
}

// failed turns an error of a Go decoder into one of the image library's two kinds. A decoder that
// panics has met damage too: no file may end the program.
func (f *rareFormat) failed(err error) error {
	code := imagecapi.CodeDecode
	var unsupported tiff.UnsupportedError
	if errors.Is(err, bmp.ErrUnsupported) || errors.As(err, &unsupported) {
		code = imagecapi.CodeUnsupported
	}
	return &imagecapi.Error{Code: code, Origin: "image", Message: err.Error()}
}

func (f *rareFormat) protect(err *error) {
	if p := recover(); p != nil {
		*err = f.failed(fmt.Errorf("the decoder failed: %v", p))
	}
}

func (f *rareFormat) header(data []byte) (info imagecapi.Info, err error) {
	defer f.protect(&err)
	c, err := f.config(bytes.NewReader(data))
	if err != nil {
		return info, f.failed(err)
	}
	if c.Width < 1 || c.Height < 1 || c.Width > 1<<30 || c.Height > 1<<30 {
		return info, f.failed(fmt.Errorf("an impossible size of %d x %d pixels", c.Width, c.Height))
	}
	// The shim has the same limit: the memory that resizing takes depends on the sides, not on
	// their product alone.
	if c.Width > maxSide || c.Height > maxSide {
		return info, &imagecapi.Error{Code: imagecapi.CodeUnsupported, Origin: "image", Message: fmt.Sprintf("an image of %d x %d is over the limit of %d pixels a side", c.Width, c.Height, maxSide)}
	}
	info = imagecapi.Info{Format: f.number, Width: int32(c.Width), Height: int32(c.Height), Components: 3, BitDepth: 8, Orientation: 1}
	switch c.ColorModel {
	case color.GrayModel:
		info.Components = 1
	case color.Gray16Model:
		info.Components, info.BitDepth = 1, 16
	case color.NRGBA64Model, color.RGBA64Model:
		info.BitDepth = 16
	}
	if f.number == index.TIFF {
		// Go's decoder and libtiff disagree on which of a fax's two colours is black.
		if c := tiffShort(data, 259, 1); c >= 2 && c <= 4 {
			return info, f.failed(tiff.UnsupportedError("fax compression"))
		}
		if o := tiffShort(data, 274, 1); o >= 1 && o <= 8 {
			info.Orientation = int32(o)
		}
	}
	return info, nil
}

// pixels decodes to rows of RGB without gaps: grey is tripled, alpha dropped, 16 bits cut to 8.
// room has the memory for them.
func (f *rareFormat) pixels(data []byte, room func(bytes int) []byte) (rgb []byte, w, h int, err error) {
	defer f.protect(&err)
	c, err := f.config(bytes.NewReader(data))
	if err == nil {
		err = f.plausible(data, c)
	}
	if err == nil {
		rgb = room(3 * c.Width * c.Height)
		err = f.decode(data, c, rgb)
	}
	if err != nil {
		return nil, 0, 0, f.failed(err)
	}
	return rgb, c.Width, c.Height, nil
}

// plausible compares the size of the file with that of its pixels before memory is allocated for
// them: a file of a few bytes cannot ask for the memory of a large image. The pixels of a GIF take
// too few bits for that.
func (f *rareFormat) plausible(data []byte, c image.Config) error {
	switch f.number {
	case index.TIFF:
		t, err := newTIFF(data, c)
		if err != nil {
			return err
		}
		return t.plausible()
	case index.BMP:
		if offset, stride := bmpLayout(data, c); len(data) < offset+stride*c.Height {
			return io.ErrUnexpectedEOF
		}
	}
	return nil
}

func decodeTIFF(data []byte, c image.Config, rgb []byte) error {
	t, err := newTIFF(data, c)
	if err != nil {
		return err
	}
	return t.decode(rgb)
}

// bmpLayout is where the rows of a BMP begin, and how far apart they are.
func bmpLayout(data []byte, c image.Config) (offset, stride int) {
	bits := int(binary.LittleEndian.Uint16(data[28:]))
	return int(binary.LittleEndian.Uint32(data[10:])), (c.Width*bits + 31) / 32 * 4
}

// decodeBMP decodes a file in whose header the library has found c. (The library itself decodes to
// RGBA.) The file is not compressed, and long enough.
func decodeBMP(data []byte, c image.Config, rgb []byte) error {
	offset, stride := bmpLayout(data, c)
	bits := int(binary.LittleEndian.Uint16(data[28:]))
	palette, _ := c.ColorModel.(color.Palette)
	topDown := int32(binary.LittleEndian.Uint32(data[22:])) < 0
	for y := range c.Height {
		from := data[offset+y*stride:][:stride]
		to := rgb[3*y*c.Width:][:3*c.Width]
		if !topDown {
			to = rgb[3*(c.Height-1-y)*c.Width:][:3*c.Width]
		}
		for x := range c.Width {
			if bits >= 24 {
				p := from[x*bits/8:]
				to[3*x], to[3*x+1], to[3*x+2] = p[2], p[1], p[0]
				continue
			}
			index := int(from[x*bits/8]>>(8-bits-x*bits%8)) & (1<<bits - 1)
			if index >= len(palette) {
				return errors.New("bmp: invalid palette index")
			}
			p := palette[index].(color.RGBA)
			to[3*x], to[3*x+1], to[3*x+2] = p.R, p.G, p.B
		}
	}
	return nil
}

// decodeGIF decodes the first frame. Pixels outside of the frame are black.
func decodeGIF(data []byte, c image.Config, rgb []byte) error {
	decoded, err := gif.Decode(bytes.NewReader(withoutTransparency(data)))
	if err != nil {
		return err
	}
	m, ok := decoded.(*image.Paletted)
	if !ok {
		return fmt.Errorf("gif: the decoder makes %T", decoded)
	}
	clear(rgb)
	colours := colourTable(m.Palette)
	b := m.Bounds().Intersect(image.Rect(0, 0, c.Width, c.Height))
	for y := b.Min.Y; y < b.Max.Y; y++ {
		to := rgb[3*(y*c.Width+b.Min.X):]
		for i, index := range m.Pix[m.PixOffset(b.Min.X, y):][:b.Dx()] {
			if int(index) < len(colours) {
				copy(to[3*i:3*i+3], colours[index][:])
			}
		}
	}
	return nil
}

// colourTable is a palette without alpha.
func colourTable(palette color.Palette) (table [][3]byte) {
	for _, entry := range palette {
		n := color.NRGBAModel.Convert(entry).(color.NRGBA)
		table = append(table, [3]byte{n.R, n.G, n.B})
	}
	return table
}

// withoutTransparency returns the GIF with the transparent colour of its first frame made opaque:
// Go's decoder forgets the colour, and Pillow and torchvision show it.
func withoutTransparency(data []byte) []byte {
	if len(data) < 13 {
		return data
	}
	at := 13
	if flags := data[10]; flags&0x80 != 0 {
		at += 3 << (1 + flags&7)
	}
	for at+4 <= len(data) && data[at] == 0x21 { // an extension
		if data[at+1] == 0xf9 && data[at+2] == 4 && data[at+3]&1 != 0 {
			data = bytes.Clone(data)
			data[at+3] &^= 1
			return data
		}
		at += 2
		for at < len(data) && data[at] != 0 {
			at += 1 + int(data[at])
		}
		at++
	}
	return data
}

// tiffShort returns the value of a tag of the first directory that is one 16-bit number; fallback
// if the tag is not there.
func tiffShort(data []byte, tag, fallback uint16) uint16 {
	var order binary.ByteOrder = binary.LittleEndian
	if data[0] == 'M' {
		order = binary.BigEndian
	}
	if len(data) < 8 {
		return fallback
	}
	directory := int64(order.Uint32(data[4:]))
	if directory+2 > int64(len(data)) {
		return fallback
	}
	entries := data[directory+2:]
	for range order.Uint16(data[directory:]) {
		if len(entries) < 12 {
			return fallback
		}
		if order.Uint16(entries) == tag && order.Uint16(entries[2:]) == 3 && order.Uint32(entries[4:]) == 1 {
			return order.Uint16(entries[8:])
		}
		entries = entries[12:]
	}
	return fallback
}
