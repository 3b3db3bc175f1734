// Package raster decodes GIF, BMP and TIFF to rows of 8-bit RGB. Few training sets have these
// formats. The decoders are written in memory-safe Go, so hostile bytes can only make them fail.
//
// The pixels are the same as from Pillow's convert("RGB"): grey becomes three equal values, alpha
// is dropped, and CMYK is converted without a colour profile. Only the high byte of a value of more
// than 8 bits is kept.
//
// A decoder needs memory for a few rows, in addition to the caller's 3 bytes per pixel.
package raster

import (
	"encoding/binary"
	"fmt"
	"io"
)

// MaxSide is the maximum width and height of an image in pixels. The memory for a row depends only
// on the width.
const MaxSide = 1_000_000

// Header describes an image.
type Header struct {
	Width, Height int
	Components    int // 1 for grey, 3 for RGB or a palette, 4 for CMYK or with alpha
	BitDepth      int // bits of a component
	Orientation   int // EXIF orientation, 1 to 8
}

// Image is an image whose header has been read. It refers to the bytes of the file.
type Image interface {
	Header() Header
	// Check returns an error if the file is too short for its pixels. Otherwise a few bytes could
	// claim the memory of a large image.
	Check() error
	// Decode fills rgb with packed rows of 3 bytes per pixel. The caller must call Check first.
	Decode(rgb []byte, jpeg JPEG) error
}

// JPEG decodes the top left width x height pixels of a JPEG to rows of RGB. stride is the distance
// between the starts of two rows in bytes.
type JPEG func(data []byte, width, height int, dst []byte, stride int) error

// UnsupportedError names a feature that is not decoded.
type UnsupportedError string

func (e UnsupportedError) Error() string { return string(e) }

func unsupported(format string, values ...any) error {
	return UnsupportedError(fmt.Sprintf(format, values...))
}

// DamageError reports damage at a known offset in the file.
type DamageError struct {
	Err    error
	Offset int // bytes
}

func (e *DamageError) Error() string { return fmt.Sprintf("%v at byte %d", e.Err, e.Offset) }

// Unwrap returns the underlying error.
func (e *DamageError) Unwrap() error { return e.Err }

// cutOff returns the error for a file that ends early.
func cutOff(data []byte) error { return &DamageError{io.ErrUnexpectedEOF, len(data)} }

// checkSides returns an error for impossible sizes.
func checkSides(width, height int) error {
	if width < 1 || height < 1 {
		return fmt.Errorf("an impossible size of %d x %d pixels", width, height)
	}
	if width > MaxSide || height > MaxSide {
		return unsupported("an image of %d x %d is over the limit of %d pixels a side", width, height, MaxSide)
	}
	return nil
}

// colourTable has a colour for each index. Indexes that are not in the palette are black, as in
// Pillow.
type colourTable [256][3]byte

// littleEndian reads numbers at any offset of a file. After a read outside of the file, it keeps
// the error of the first such read.
type littleEndian struct {
	data []byte
	err  error
}

func (r *littleEndian) bytes(at, n int) []byte {
	if at < 0 || n < 0 || at > len(r.data) || n > len(r.data)-at {
		r.err = cutOff(r.data)
		return make([]byte, max(n, 0))
	}
	return r.data[at : at+n]
}

func (r *littleEndian) u16(at int) int { return int(binary.LittleEndian.Uint16(r.bytes(at, 2))) }

func (r *littleEndian) u32(at int) uint32 { return binary.LittleEndian.Uint32(r.bytes(at, 4)) }
