package codec

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/raster"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// rareFormat is a format that few training sets have. Package raster decodes a whole image of such
// a format, and the C library only resizes it. C libraries for these formats would be faster, but
// would add much code and risks from hostile bytes. (Debian's libtiff.a alone needs five other
// libraries.)
//
// Decoding such a format takes 3 bytes of memory for each pixel, which the next image reuses. For
// comparison, ts_image_decoder takes up to 8 bytes.

type rareFormat struct {
	number int32
	parse  func(data []byte) (raster.Image, error)
}

// rare returns the format of an image that is decoded in Go, or nil for other data.
func rare(data []byte) *rareFormat {
	switch Sniff(data) {
	case "GIF":
		return &rareFormat{GIF, raster.ParseGIF}
	case "BMP":
		return &rareFormat{BMP, raster.ParseBMP}
	case "TIFF":
		return &rareFormat{TIFF, raster.ParseTIFF}
	}
	return nil
}

// failed converts an error of package raster to one of the image library's two kinds. A panic of a
// decoder also counts as damage, because no file may crash the program.
func (f *rareFormat) failed(err error) error {
	var fromLibrary *imagecapi.Error // from a JPEG inside a TIFF
	if errors.As(err, &fromLibrary) {
		if fromLibrary.Code != imagecapi.CodeDecode {
			return err
		}
		// The error's offset is within the JPEG.
		inside := *fromLibrary
		inside.Message, inside.Offset = "TIFF: in an embedded JPEG: "+inside.Message, -1
		return &inside
	}
	failure := &imagecapi.Error{Code: imagecapi.CodeDecode, Origin: "image", Message: err.Error(), Offset: -1}
	var unsupported raster.UnsupportedError
	if errors.As(err, &unsupported) {
		failure.Code = imagecapi.CodeUnsupported
	}
	var damage *raster.DamageError
	if errors.As(err, &damage) {
		failure.Offset = int64(damage.Offset)
	}
	return failure
}

func (f *rareFormat) protect(err *error) {
	if p := recover(); p != nil {
		*err = f.failed(fmt.Errorf("the decoder failed: %v", p))
	}
}

func (f *rareFormat) header(data []byte) (info imagecapi.Info, err error) {
	defer f.protect(&err)
	image, err := f.parse(data)
	if err != nil {
		return info, f.failed(err)
	}
	h := image.Header()
	return imagecapi.Info{
		Format: f.number, Width: int32(h.Width), Height: int32(h.Height), Components: int32(h.Components),
		BitDepth:    int32(h.BitDepth),
		Orientation: int32(h.Orientation),
	}, nil
}

// pixels decodes the image to packed rows of RGB. room returns the memory for them.
func (f *rareFormat) pixels(data []byte, room func(bytes int) []byte, jpeg raster.JPEG) (rgb []byte, w,
	h int, err error) {
	defer f.protect(&err)
	image, err := f.parse(data)
	if err == nil {
		err = image.Check()
	}
	if err == nil {
		header := image.Header()
		w, h = header.Width, header.Height
		rgb = room(3 * w * h)
		err = image.Decode(rgb, jpeg)
	}
	if err != nil {
		return nil, 0, 0, f.failed(err)
	}
	return rgb, w, h, nil
}
