package pack

import (
	"bytes"
	"fmt"
	"image"
	"image/jpeg"
	"runtime"
)

// encoderVersion identifies the encoder. Another version may produce other bytes.
func encoderVersion() string { return runtime.Version() }

// encodeJPEG encodes rows of RGB as a baseline JPEG, 4:2:0. If orientation is not 1, the JPEG gets
// an EXIF tag with it.
func encodeJPEG(rgb []byte, width, height, quality int, orientation int32) ([]byte, error) {
	m := image.NewRGBA(image.Rect(0, 0, width, height))
	for from, to := 0, 0; from < 3*width*height; from, to = from+3, to+4 {
		m.Pix[to], m.Pix[to+1], m.Pix[to+2], m.Pix[to+3] = rgb[from], rgb[from+1], rgb[from+2], 255
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: quality}); err != nil {
		return nil, fmt.Errorf("pack: %w", err)
	}
	if orientation <= 1 {
		return b.Bytes(), nil
	}
	return withOrientation(b.Bytes(), orientation), nil
}

// withOrientation inserts an EXIF segment that contains only the orientation.
func withOrientation(data []byte, orientation int32) []byte {
	segment := []byte("\xff\xe1\x00\x22Exif\x00\x00MM\x00*\x00\x00\x00\x08" + // TIFF, one directory
		"\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x00\x00\x00\x00\x00\x00\x00")
	segment[len(segment)-7] = byte(orientation)
	const start = 2 // length of the marker SOI
	return bytes.Join([][]byte{data[:start], segment, data[start:]}, nil)
}
