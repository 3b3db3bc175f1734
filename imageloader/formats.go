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

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// The formats that few training sets have are decoded by Go's own libraries, whole, and only resized by the shim: their C libraries bring more code and more damage from hostile
// bytes than speed (Debian's libtiff.a alone draws in five others).

// Numbers in ImageInfo.Format beside the shim's.
const (
	imageGIF = 100 + iota
	imageBMP
	imageTIFF
)

const mostSide = 1_000_000

type rareFormat struct {
	number int32
	config func(io.Reader) (image.Config, error)
	decode func(io.Reader) (image.Image, error)
}

// rare is the format of an image that the shim does not decode; nil if it does, or nobody.
func rare(data []byte) *rareFormat {
	switch sniff(data) {
	case "GIF":
		return &rareFormat{imageGIF, gif.DecodeConfig, gif.Decode}
	case "BMP":
		return &rareFormat{imageBMP, bmp.DecodeConfig, bmp.Decode}
	case "TIFF":
		return &rareFormat{imageTIFF, tiff.DecodeConfig, tiff.Decode}
	}
	return nil
}

// sniffRare is sniff for these formats.
func sniffRare(b []byte) string {
	switch {
	case len(b) >= 6 && (string(b[:6]) == "GIF87a" || string(b[:6]) == "GIF89a"):
		return "GIF"
	case len(b) >= 16 && string(b[:2]) == "BM" && string(b[6:10]) == "\x00\x00\x00\x00" && b[15] == 0 && b[14] >= 12 && b[14] <= 124: // the size of the second header
		return "BMP"
	case len(b) >= 4 && (string(b[:4]) == "II*\x00" || string(b[:4]) == "MM\x00*"):
		return "TIFF"
	}
	return ""
}

// failed turns an error of a Go decoder into one of the two kinds that the shim has. A decoder that panics has met damage too: nothing that a file holds may end the program.
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
	if c.Width > mostSide || c.Height > mostSide { // as the shim: what resizing takes follows from the sides, not from their product alone
		return info, &imagecapi.Error{Code: imagecapi.CodeUnsupported, Origin: "image", Message: fmt.Sprintf("an image of %d x %d is over the limit of %d pixels a side", c.Width, c.Height, mostSide)}
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
	if f.number == imageTIFF {
		// Go's decoder and libtiff do not agree on which of a fax's two colours is black.
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
func (f *rareFormat) pixels(data []byte) (rgb []byte, w, h int, err error) {
	defer f.protect(&err)
	c, err := f.config(bytes.NewReader(data))
	if err != nil {
		return nil, 0, 0, f.failed(err)
	}
	if f.number == imageGIF {
		data = withoutTransparency(data)
	}
	m, err := f.decode(bytes.NewReader(data))
	if err != nil {
		return nil, 0, 0, f.failed(err)
	}
	w, h = c.Width, c.Height
	b := m.Bounds().Intersect(image.Rect(0, 0, w, h))
	rgb = make([]byte, 3*w*h) // what the first frame of a GIF leaves out is black
	for y := b.Min.Y; y < b.Max.Y; y++ {
		copyRow(rgb[3*(y*w+b.Min.X):3*(y*w+b.Max.X)], m, b.Min.X, y)
	}
	return rgb, w, h, nil
}

// copyRow fills to with the pixels of m from (x, y) on.
func copyRow(to []byte, m image.Image, x, y int) {
	pick := func(pix []byte, size, r, g, b int) {
		for i := 0; i < len(to); i += 3 {
			to[i], to[i+1], to[i+2] = pix[r], pix[g], pix[b]
			if i+3 < len(to) {
				pix = pix[size:]
			}
		}
	}
	switch m := m.(type) {
	case *image.Paletted:
		for i, index := range m.Pix[m.PixOffset(x, y):][:len(to)/3] {
			c := color.NRGBA{}
			if int(index) < len(m.Palette) {
				c = color.NRGBAModel.Convert(m.Palette[index]).(color.NRGBA)
			}
			to[3*i], to[3*i+1], to[3*i+2] = c.R, c.G, c.B
		}
	case *image.RGBA:
		pick(m.Pix[m.PixOffset(x, y):], 4, 0, 1, 2)
	case *image.NRGBA:
		pick(m.Pix[m.PixOffset(x, y):], 4, 0, 1, 2)
	case *image.RGBA64:
		pick(m.Pix[m.PixOffset(x, y):], 8, 0, 2, 4)
	case *image.NRGBA64:
		pick(m.Pix[m.PixOffset(x, y):], 8, 0, 2, 4)
	case *image.Gray:
		pick(m.Pix[m.PixOffset(x, y):], 1, 0, 0, 0)
	case *image.Gray16:
		pick(m.Pix[m.PixOffset(x, y):], 2, 0, 0, 0)
	default:
		for i := 0; i < len(to); i += 3 {
			c := color.NRGBAModel.Convert(m.At(x+i/3, y)).(color.NRGBA)
			to[i], to[i+1], to[i+2] = c.R, c.G, c.B
		}
	}
}

// withoutTransparency is a GIF whose first frame has no transparent colour: Go's decoder forgets which colour that is, and Pillow and torchvision show it.
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

// tiffShort is a tag of the first directory whose value is one 16-bit number; fallback if it is not there.
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
