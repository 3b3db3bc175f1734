// Package mask decodes masks: greyscale or palette PNGs whose values are the classes of an image's
// pixels. It transforms a mask with the geometry of its image.
package mask

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/png"
	"math"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// MaxClass returns the highest class number that a mask of dtype d can have. d is tensor.Uint8 or
// tensor.Int64.
func MaxClass(d tensor.DType) int {
	if d == tensor.Int64 {
		return math.MaxUint16
	}
	return math.MaxUint8
}

// Decoder decodes the masks of samples. It is not safe for concurrent use.
type Decoder struct {
	DType   tensor.DType // of the results: tensor.Uint8, or tensor.Int64, which 16-bit masks need
	Fill    int          // class of the pixels outside of the mask
	classes []uint16     // the result
	columns []int        // the source column of each result column
	moving  []byte       // the result as 3-byte pixels, while the augmenter moves them
}

// newError returns an error of a mask, with one of the image library's codes.
func newError(code imagecapi.Code, format string, args ...any) error {
	return &imagecapi.Error{Code: code, Origin: "mask", Message: fmt.Sprintf(format, args...)}
}

// ErrSize means that a mask and its image differ in size.
var ErrSize = errors.New("the mask and its image have different sizes")

// Decode decodes the mask of an image of the given size, in the geometry's orientation, and crops
// and resizes it by the geometry. If the augmenter is not nil, it moves the mask's pixels in the
// same way as the image's. dst must have the size of the geometry's window.
func (m *Decoder) Decode(data []byte, width, height int, g *imagecapi.Geometry, a *transform.Augmenter,
	dst []byte) error {
	levels, err := m.levels(data, width, height)
	if err != nil {
		return err
	}
	m.sample(levels, g)
	if a != nil && a.Moves() {
		if err := m.move(a); err != nil {
			return err
		}
	}
	if m.DType == tensor.Int64 {
		for i, class := range m.classes {
			binary.LittleEndian.PutUint64(dst[8*i:], uint64(class))
		}
		return nil
	}
	for i, class := range m.classes {
		dst[i] = byte(class)
	}
	return nil
}

// sample fills classes with the mask's pixels that are nearest to the result's pixels.
func (m *Decoder) sample(l levels, g *imagecapi.Geometry) {
	m.classes, m.columns = m.classes[:0], m.columns[:0]
	for x := range g.WindowWidth {
		if g.Flip {
			x = g.WindowWidth - 1 - x
		}
		m.columns = append(m.columns, int(g.CropX)+nearest(int(g.WindowX+x), int(g.CropWidth), int(g.ResizeWidth)))
	}
	for y := range g.WindowHeight {
		row := l.pixels[(int(g.CropY)+nearest(int(g.WindowY+y), int(g.CropHeight), int(g.ResizeHeight)))*l.stride:]
		for _, x := range m.columns {
			m.classes = append(m.classes, l.class(row[x*l.step:]))
		}
	}
}

// nearest returns the source of output pixel i if a side is resized from in to out pixels. It
// computes LibTorch's mode "nearest", which torchvision uses for masks, with the same float32
// arithmetic.
func nearest(i, in, out int) int {
	switch {
	case in == out:
		return i
	case out == 2*in:
		return i / 2
	}
	return min(int(float32(i)*(float32(in)/float32(out))), in-1)
}

// move moves the pixels of classes with the augmenter.
func (m *Decoder) move(a *transform.Augmenter) error {
	m.moving = m.moving[:0]
	for _, class := range m.classes {
		m.moving = append(m.moving, byte(class), byte(class>>8), 0)
	}
	if err := a.ApplyMoves(m.moving, transform.Color{byte(m.Fill), byte(m.Fill >> 8)}); err != nil {
		return err
	}
	for i := range m.classes {
		m.classes[i] = uint16(m.moving[3*i]) | uint16(m.moving[3*i+1])<<8
	}
	return nil
}

// levels are the pixels of a mask.
type levels struct {
	pixels       []byte
	stride, step int   // bytes between rows, and between pixels
	wide         bool  // two bytes per pixel, the high byte first
	unit         uint8 // value of class 1, for one byte per pixel
}

func (l *levels) class(pixel []byte) uint16 {
	if l.wide {
		return binary.BigEndian.Uint16(pixel)
	}
	return uint16(pixel[0] / l.unit)
}

// PNG colour types without colours.
const (
	pngGrey    = 0
	pngPalette = 3
)

// maxInflation is the maximum expansion of deflate: output bytes per input byte.
const maxInflation = 1032

// levels decodes a greyscale or palette PNG to its values. Before it allocates memory for the
// pixels, it compares their number with the number of the image's pixels and with the size of the
// file.
//
// Go's decoder is memory-safe and rejects any damage.
func (m *Decoder) levels(data []byte, width, height int) (l levels, err error) {
	defer func() {
		if p := recover(); p != nil { // no file may crash the program
			err = newError(imagecapi.CodeDecode, "the decoder failed: %v", p)
		}
	}()
	if codec.Sniff(data) != "PNG" {
		return l, newError(imagecapi.CodeUnsupported,
			"it is no PNG: a mask has to be one, of grey levels or of a palette")
	}
	const header = 8 + 8 + 13 // the signature, and the first chunk without its checksum
	if len(data) < header {
		return l, newError(imagecapi.CodeDecode, "the header is cut off")
	}
	w, h := int64(binary.BigEndian.Uint32(data[16:])), int64(binary.BigEndian.Uint32(data[20:]))
	depth, color := data[24], data[25]
	switch {
	case color != pngGrey && color != pngPalette:
		return l, newError(imagecapi.CodeUnsupported, "its pixels are colours (PNG's colour type %d): a "+
			"mask needs grey levels or a palette, whose numbers are the classes", color)
	case w != int64(width) || h != int64(height):
		return l, fmt.Errorf("%w: %d x %d pixels, and %d x %d", ErrSize, w, h, width, height)
	case depth == 16 && MaxClass(m.DType) < math.MaxUint16:
		return l, newError(imagecapi.CodeUnsupported,
			"it has 16 bits a pixel, and Options.Masks.DType is %v: set tensor.Int64", m.DType)
	case h*(w*int64(depth)/8) > maxInflation*int64(len(data)):
		return l, newError(imagecapi.CodeDecode, "%d bytes are too few for %d x %d pixels", len(data), w, h)
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	var unsupported png.UnsupportedError
	switch {
	case errors.As(err, &unsupported):
		return l, newError(imagecapi.CodeUnsupported, "%v", err)
	case err != nil:
		return l, newError(imagecapi.CodeDecode, "%v", err)
	}
	unit := uint8(1)
	if color == pngGrey && depth < 8 { // Go scales levels to the range 0 to 255
		unit = 255 / (1<<depth - 1)
	}
	switch p := decoded.(type) {
	case *image.Paletted:
		return levels{p.Pix, p.Stride, 1, false, 1}, nil
	case *image.Gray:
		return levels{p.Pix, p.Stride, 1, false, unit}, nil
	case *image.Gray16:
		return levels{p.Pix, p.Stride, 2, true, 1}, nil
	case *image.NRGBA: // grey levels, one of which is transparent
		return levels{p.Pix, p.Stride, 4, false, unit}, nil
	case *image.NRGBA64:
		return levels{p.Pix, p.Stride, 8, true, 1}, nil
	}
	return l, newError(imagecapi.CodeUnsupported, "its pixels are %T", decoded)
}
