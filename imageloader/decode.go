package imageloader

import (
	"github.com/torchstream/torchstream/internal/capi"
)

// codec makes decoders. The real one is the shim's; tests that are about order and threads use their own.
type codec interface {
	newDecoder(maxPixels int64) (decoder, error)
	// header is a decoder's; it can be called by any goroutine.
	header(data []byte) (capi.ImageInfo, error)
}

// decoder turns compressed bytes into the pixels that a geometry asks for; used by one goroutine at a time. Errors with the codes capi.CodeDecode and
// capi.CodeUnsupported are the image's fault, others the machine's.
type decoder interface {
	header(data []byte) (capi.ImageInfo, error)
	decode(data []byte, g *capi.ImageGeometry, dst []byte, stride int) error
	close()
}

type shimCodec struct{}

func (shimCodec) newDecoder(maxPixels int64) (decoder, error) {
	if err := capi.Check(); err != nil {
		return nil, err
	}
	d, err := capi.NewImageDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	return shimDecoder{d}, nil
}

type shimDecoder struct{ d *capi.ImageDecoder }

func (shimCodec) header(data []byte) (capi.ImageInfo, error) { return shimDecoder{}.header(data) }

func (shimDecoder) header(data []byte) (capi.ImageInfo, error) {
	if f := rare(data); f != nil {
		return f.header(data)
	}
	return capi.ImageHeader(data)
}

func (s shimDecoder) decode(data []byte, g *capi.ImageGeometry, dst []byte, stride int) error {
	if f := rare(data); f != nil {
		pixels, width, height, err := f.pixels(data)
		if err != nil {
			return err
		}
		return capi.ResizeImage(s.d, pixels, width, height, 3*width, g, dst, stride)
	}
	return capi.DecodeImage(s.d, data, g, dst, stride)
}

func (s shimDecoder) close() { capi.FreeImageDecoder(s.d) }
