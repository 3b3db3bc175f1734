package pack

import (
	"bytes"
	"fmt"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// encoder encodes JPEGs. It belongs to one goroutine.
type encoder struct{ d *imagecapi.Decoder }

func newEncoder() (encoder, error) {
	d, err := imagecapi.NewDecoder(maxPixels)
	return encoder{d}, err
}

func (e encoder) close() { imagecapi.FreeDecoder(e.d) }

// encode encodes rows of RGB as a baseline JPEG, 4:2:0. If orientation is not 1, the JPEG gets
// an EXIF tag with it.
func (e encoder) encode(rgb []byte, width, height, quality int, orientation int32) ([]byte, error) {
	const overhead = 4096 // more than a file's headers
	for room := len(rgb)/4 + overhead; ; room *= 4 {
		file := make([]byte, room)
		n, err := imagecapi.EncodeJPEG(e.d, rgb, width, height, 3*width, quality, file)
		switch {
		case err != nil:
			return nil, fmt.Errorf("pack: encoding: %w", err)
		case n > 0 && orientation > 1:
			return withOrientation(file[:n], orientation), nil
		case n > 0:
			return file[:n], nil
		}
	}
}

// withOrientation inserts an EXIF segment that contains only the orientation.
func withOrientation(data []byte, orientation int32) []byte {
	segment := []byte("\xff\xe1\x00\x22Exif\x00\x00MM\x00*\x00\x00\x00\x08" + // TIFF, one directory
		"\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00")
	segment[len(segment)-7] = byte(orientation)
	const start = 2 // length of the marker SOI
	return bytes.Join([][]byte{data[:start], segment, data[start:]}, nil)
}
