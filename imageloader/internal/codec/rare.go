package codec

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/raster"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// Package raster decodes formats that few training sets have. It decodes whole images, and the shim
// only resizes them. The formats' C libraries would add more code, and more danger from hostile
// bytes, than speed. (Debian's libtiff.a alone pulls in five others.)
//
// A decoder uses 3 bytes a pixel for the RGB, and reuses this memory for the next image. The
// maximum of ts_image_decoder is 8 bytes a pixel.

type rareFormat struct {
	number int32
	parse  func(data []byte) (raster.Image, error)
}

// rare returns the format of an image that is decoded in Go, and nil for all other bytes.
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

// failed turns an error of package raster into one of the image library's two kinds. A panic of a
// decoder counts as damage too, because no file may crash the program.
func (f *rareFormat) failed(err error) error {
	var fromLibrary *imagecapi.Error // of a JPEG inside a TIFF
	if errors.As(err, &fromLibrary) {
		if fromLibrary.Code != imagecapi.CodeDecode {
			return err
		}
		// The error's offset is within the JPEG.
		inside := *fromLibrary
		inside.Message, inside.Offset = "TIFF: of a JPEG inside: "+inside.Message, -1
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
		Format: f.number, Width: int32(h.Width), Height: int32(h.Height), Components: int32(h.Components), BitDepth: int32(h.BitDepth),
		Orientation: int32(h.Orientation),
	}, nil
}

// pixels decodes to rows of RGB without gaps. room has the memory for them.
func (f *rareFormat) pixels(data []byte, room func(bytes int) []byte, jpeg raster.JPEG) (rgb []byte, w, h int, err error) {
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
