package imageloader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"image"
	"image/png"
	"math"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// Masks gives each image a mask, for segmentation: a PNG of the image's size whose pixels are class
// numbers. An image and its mask are two members of the archive, whose names follow two patterns.
type Masks struct {
	// Image and Mask are the patterns: names in which one "*" stands for any text, slashes
	// included, and a ".*" at the end for any extension. A mask belongs to the image whose name has
	// the same text for the "*": "images/*.jpg" and "masks/*.png", or in WebDataset's groups
	// "*.jpg" and "*.seg.png". A name that matches both is a mask's. Images without a mask and
	// masks without an image are ignored and logged; a second mask of an image is a *PairError.
	// Shards may have the same names.
	Image, Mask string
	// DType is the dtype of the field "masks": tensor.Uint8 (also the zero value), or tensor.Int64,
	// which masks of 16 bits need.
	DType tensor.DType
	// Fill is the class of pixels that a step of Transform.Ops takes from outside of the mask, as
	// RandomRotation does; 0 as in torchvision, often 255 for pixels that a loss ignores.
	Fill int
}

// PairError is an image with two masks, or a mask with two images, by Options.Masks.
type PairError = index.PairError

// masked reports whether there are masks.
func (m *Masks) masked() bool { return *m != Masks{} }

// pairs returns the patterns; nil if there are no masks.
func (m *Masks) pairs() (*index.Pairs, error) {
	if !m.masked() {
		return nil, nil
	}
	image, err := index.ParsePattern(m.Image)
	if err != nil {
		return nil, fmt.Errorf("imageloader: Options.Masks.Image: %w", err)
	}
	mask, err := index.ParsePattern(m.Mask)
	if err != nil {
		return nil, fmt.Errorf("imageloader: Options.Masks.Mask: %w", err)
	}
	if image == mask {
		return nil, fmt.Errorf("imageloader: Options.Masks.Image and Mask are both %q", m.Image)
	}
	return &index.Pairs{Image: image, Mask: mask}, nil
}

// maxClass is the highest class number of a mask.
func (m *Masks) maxClass() int {
	if m.DType == tensor.Int64 {
		return math.MaxUint16
	}
	return math.MaxUint8
}

// checkMasks refuses wrong masks, and options that have no meaning with masks.
func (o *Options) checkMasks(plan *transform.Plan) error {
	m := &o.Masks
	if _, err := m.pairs(); err != nil || !m.masked() {
		return err
	}
	if err := plan.ForMasks(); err != nil {
		return fmt.Errorf("imageloader: Options.Masks: Options.Transform: %w", err)
	}
	without := func(option string) error {
		return fmt.Errorf("imageloader: Options.Masks excludes Options.%s: an image with a mask has no label", option)
	}
	switch {
	case m.DType != tensor.Uint8 && m.DType != tensor.Int64:
		return fmt.Errorf("imageloader: Options.Masks.DType is %v, not uint8 or int64", m.DType)
	case m.Fill < 0 || m.Fill > m.maxClass():
		return fmt.Errorf("imageloader: Options.Masks.Fill is %d, not in 0 to %d (DType is %v)", m.Fill, m.maxClass(), m.DType)
	case o.WebDataset:
		return fmt.Errorf("imageloader: Options.Masks excludes Options.WebDataset: an image with a mask has no label; "+
			"the groups' images and masks are given by Masks.Image %q and Masks.Mask %q", "*.jpg", "*.seg.png")
	case len(o.Classes) > 0:
		return without("Classes")
	case o.Balanced:
		return without("Balanced")
	}
	return nil
}

// maskDecoder makes the masks of samples, for one goroutine.
type maskDecoder struct {
	o       *Masks
	classes []uint16 // the result
	columns []int    // where its columns come from
	moving  []byte   // the result as pixels of three bytes, while Ops move them
}

// maskError is an error of a mask, with a code of the image library.
func maskError(code imagecapi.Code, format string, args ...any) error {
	return &imagecapi.Error{Code: code, Origin: "mask", Message: fmt.Sprintf(format, args...)}
}

// errMaskSize means that a mask has not the size of its image.
var errMaskSize = errors.New("the mask and its image have different sizes")

// decode decodes the mask of an image of the given size, as the geometry sees it. It takes the part
// that the geometry takes, and has the augmenter, if it is not nil, move the pixels as it has moved
// the image's. dst has the size of the geometry's window.
func (m *maskDecoder) decode(data []byte, width, height int, g *imagecapi.Geometry, a *transform.Augmenter, dst []byte) error {
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
	if m.o.DType == tensor.Int64 {
		for i, class := range m.classes {
			putLabel(dst[8*i:], int(class))
		}
		return nil
	}
	for i, class := range m.classes {
		dst[i] = byte(class)
	}
	return nil
}

// sample fills classes with the nearest pixels of a mask.
func (m *maskDecoder) sample(l levels, g *imagecapi.Geometry) {
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

// nearest is where output i of a side comes from that is resized from in to out pixels: that of
// LibTorch's "nearest", which torchvision resizes masks with, in its float32 arithmetic.
func nearest(i, in, out int) int {
	switch {
	case in == out:
		return i
	case out == 2*in:
		return i / 2
	}
	return min(int(float32(i)*(float32(in)/float32(out))), in-1)
}

// move has the augmenter move the pixels of classes.
func (m *maskDecoder) move(a *transform.Augmenter) error {
	m.moving = m.moving[:0]
	for _, class := range m.classes {
		m.moving = append(m.moving, byte(class), byte(class>>8), 0)
	}
	if err := a.ApplyMoves(m.moving, transform.Color{byte(m.o.Fill), byte(m.o.Fill >> 8)}); err != nil {
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
	stride, step int   // bytes from row to row, and from pixel to pixel
	wide         bool  // of two bytes, the high one first
	unit         uint8 // of one byte: how much a class counts
}

func (l *levels) class(pixel []byte) uint16 {
	if l.wide {
		return binary.BigEndian.Uint16(pixel)
	}
	return uint16(pixel[0] / l.unit)
}

// PNG's colour types without colours.
const (
	pngGrey    = 0
	pngPalette = 3
)

// maxInflation is the maximum number of bytes that deflate makes of one byte.
const maxInflation = 1032

// levels decodes a PNG of grey levels or of a palette to its numbers. It allocates no memory for
// pixels before it has compared their number with the image's, and with the size of the file.
//
// Go's decoder is memory-safe, and refuses damage of every kind.
func (m *maskDecoder) levels(data []byte, width, height int) (l levels, err error) {
	defer func() {
		if p := recover(); p != nil { // no file may end the program
			err = maskError(imagecapi.CodeDecode, "the decoder failed: %v", p)
		}
	}()
	if codec.Sniff(data) != "PNG" {
		return l, maskError(imagecapi.CodeUnsupported, "it is no PNG: a mask has to be one, of grey levels or of a palette")
	}
	const header = 8 + 8 + 13 // the signature, and the first chunk without its checksum
	if len(data) < header {
		return l, maskError(imagecapi.CodeDecode, "the header is cut off")
	}
	w, h := int64(binary.BigEndian.Uint32(data[16:])), int64(binary.BigEndian.Uint32(data[20:]))
	depth, color := data[24], data[25]
	switch {
	case color != pngGrey && color != pngPalette:
		return l, maskError(imagecapi.CodeUnsupported, "its pixels are colours (PNG's colour type %d): a mask needs grey levels or a palette, whose numbers are the classes", color)
	case w != int64(width) || h != int64(height):
		return l, fmt.Errorf("%w: %d x %d pixels, and %d x %d", errMaskSize, w, h, width, height)
	case depth == 16 && m.o.maxClass() < math.MaxUint16:
		return l, maskError(imagecapi.CodeUnsupported, "it has 16 bits a pixel, and Options.Masks.DType is %v: set tensor.Int64", m.o.DType)
	case h*(w*int64(depth)/8) > maxInflation*int64(len(data)):
		return l, maskError(imagecapi.CodeDecode, "%d bytes are too few for %d x %d pixels", len(data), w, h)
	}
	decoded, err := png.Decode(bytes.NewReader(data))
	var unsupported png.UnsupportedError
	switch {
	case errors.As(err, &unsupported):
		return l, maskError(imagecapi.CodeUnsupported, "%v", err)
	case err != nil:
		return l, maskError(imagecapi.CodeDecode, "%v", err)
	}
	unit := uint8(1)
	if color == pngGrey && depth < 8 { // Go stretches levels to 0 to 255
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
	return l, maskError(imagecapi.CodeUnsupported, "its pixels are %T", decoded)
}
