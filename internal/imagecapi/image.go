//go:build linux

package imagecapi

/*
#include "torchstream_image.h"
#cgo noescape ts_image_get_info
#cgo nocallback ts_image_get_info
#cgo noescape ts_image_decoder_new
#cgo nocallback ts_image_decoder_new
#cgo noescape ts_image_decoder_set_damage
#cgo nocallback ts_image_decoder_set_damage
#cgo noescape ts_image_decoder_tolerated
#cgo nocallback ts_image_decoder_tolerated
#cgo noescape ts_image_decode
#cgo nocallback ts_image_decode
#cgo noescape ts_image_resize
#cgo nocallback ts_image_resize
#cgo noescape ts_image_encode_jpeg
#cgo nocallback ts_image_encode_jpeg
*/
import "C"

import (
	"math"
	"unsafe"
)

const (
	JPEG = C.TS_IMAGE_FORMAT_JPEG
	PNG  = C.TS_IMAGE_FORMAT_PNG
	WebP = C.TS_IMAGE_FORMAT_WEBP
	AVIF = C.TS_IMAGE_FORMAT_AVIF
	HEIC = C.TS_IMAGE_FORMAT_HEIC
)

type Info struct {
	Format, Width, Height, Components, BitDepth int32
	Progressive                                 bool
	Orientation                                 int32 // EXIF's, 1 to 8
}

func Header(data []byte) (Info, error) {
	if err := Check(); err != nil {
		return Info{}, err
	}
	i := C.ts_image_info{size: C.sizeof_ts_image_info}
	if err := failure(C.ts_image_get_info((*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &i)); err != nil {
		return Info{}, err
	}
	return Info{int32(i.format), int32(i.width), int32(i.height), int32(i.components), int32(i.bit_depth),
		bool(i.progressive), int32(i.orientation)}, nil
}

// Decoder is a ts_image_decoder. One goroutine at a time may use it.
type Decoder = C.ts_image_decoder

func NewDecoder(maxPixels int64) (d *Decoder, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = failure(C.ts_image_decoder_new(C.int64_t(maxPixels), &d))
	return d, err
}

// The treatment of damaged images by a decoder: TS_IMAGE_DAMAGE_.
const (
	DamageRefuse  = C.TS_IMAGE_DAMAGE_REFUSE
	DamageWarn    = C.TS_IMAGE_DAMAGE_WARN
	DamagePartial = C.TS_IMAGE_DAMAGE_PARTIAL
)

func SetDamage(d *Decoder, damage int32) error {
	return failure(C.ts_image_decoder_set_damage(d, C.int32_t(damage)))
}

// Tolerated returns the damage found in the last decoded image, or "".
func Tolerated(d *Decoder) string {
	if s := C.ts_image_decoder_tolerated(d); *s != 0 {
		return C.GoString(s)
	}
	return ""
}

func FreeDecoder(d *Decoder) { C.ts_image_decoder_free(d) }

// Geometry has the fields of ts_image_geometry.
type Geometry struct {
	CropX, CropY, CropWidth, CropHeight         int32
	ResizeWidth, ResizeHeight                   int32
	WindowX, WindowY, WindowWidth, WindowHeight int32
	Flip                                        bool
	// 0, or EXIF's 1 to 8; then the other fields describe the upright image
	Orientation   int32
	Interpolation int32 // TS_INTERPOLATION_
	DCTScaling    bool
}

func geometry(g *Geometry) C.ts_image_geometry {
	return C.ts_image_geometry{
		size:   C.sizeof_ts_image_geometry,
		crop_x: C.int32_t(g.CropX), crop_y: C.int32_t(g.CropY), crop_width: C.int32_t(g.CropWidth),
		crop_height:  C.int32_t(g.CropHeight),
		resize_width: C.int32_t(g.ResizeWidth), resize_height: C.int32_t(g.ResizeHeight),
		window_x: C.int32_t(g.WindowX), window_y: C.int32_t(g.WindowY),
		window_width: C.int32_t(g.WindowWidth), window_height: C.int32_t(g.WindowHeight),
		orientation: C.int32_t(g.Orientation), flip: C.bool(g.Flip),
		interpolation: C.int32_t(g.Interpolation), dct_scaling: C.bool(g.DCTScaling),
	}
}

// Decode writes WindowHeight rows of WindowWidth RGB pixels to dst, stride bytes apart. It checks
// that dst holds them, because C does not know the length of dst.
func Decode(d *Decoder, data []byte, g *Geometry, dst []byte, stride int) error {
	if err := room(int(g.WindowWidth), int(g.WindowHeight), len(dst), stride); err != nil {
		return err
	}
	c := geometry(g)
	return failure(C.ts_image_decode(d, (*C.uint8_t)(unsafe.SliceData(data)), C.size_t(len(data)), &c,
		(*C.uint8_t)(unsafe.SliceData(dst)), C.size_t(stride)))
}

// EncodeJPEG encodes height rows of width RGB pixels, stride bytes apart, as a baseline JPEG in
// buffer, with 4:2:0 chroma. n is its size in bytes, less than len(buffer), or 0 if it did not fit.
func EncodeJPEG(d *Decoder, pixels []byte, width, height, stride, quality int, buffer []byte) (n int,
	err error) {
	if err := room(width, height, len(pixels), stride); err != nil {
		return 0, err
	}
	var written C.size_t
	err = failure(C.ts_image_encode_jpeg(d, (*C.uint8_t)(unsafe.SliceData(pixels)), C.int32_t(width), C.int32_t(height),
		C.size_t(stride), C.int32_t(quality), (*C.uint8_t)(unsafe.SliceData(buffer)), C.size_t(len(buffer)), &written))
	return int(written), err
}

// Resize is Decode for an image that is already decoded: height rows of width RGB pixels, srcStride
// bytes apart.
func Resize(d *Decoder, src []byte, width, height, srcStride int, g *Geometry, dst []byte, dstStride int) error {
	if err := room(width, height, len(src), srcStride); err != nil {
		return err
	}
	if err := room(int(g.WindowWidth), int(g.WindowHeight), len(dst), dstStride); err != nil {
		return err
	}
	c := geometry(g)
	return failure(C.ts_image_resize(d, (*C.uint8_t)(unsafe.SliceData(src)), C.int32_t(width),
		C.int32_t(height), C.size_t(srcStride), &c,
		(*C.uint8_t)(unsafe.SliceData(dst)), C.size_t(dstStride)))
}

func room(width, height, have, stride int) error {
	row := 3 * width
	if width < 1 || height < 1 || width > math.MaxInt32 || height > math.MaxInt32 || stride < row ||
		have < row || height > 1 && stride > (have-row)/(height-1) {
		return NewFailure(CodeInvalidArgument, "the pixel buffer is too small for its width, height and stride")
	}
	return nil
}
