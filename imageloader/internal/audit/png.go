package audit

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image"
	"image/color"
	"image/png"
	"slices"
)

// RGB is an image of RGB rows, as the decoders return it.
type RGB struct {
	Pix           []byte
	Width, Height int
}

func (RGB) ColorModel() color.Model   { return color.RGBAModel }
func (m RGB) Bounds() image.Rectangle { return image.Rect(0, 0, m.Width, m.Height) }
func (RGB) Opaque() bool              { return true } // makes the encoder omit the alpha channel

func (m RGB) At(x, y int) color.Color {
	p := m.Pix[3*(y*m.Width+x):]
	return color.RGBA{p[0], p[1], p[2], 0xff}
}

// PNG encodes the image. It adds an EXIF orientation, unless that is 0 or 1.
func (m RGB) PNG(orientation int32) ([]byte, error) {
	var b bytes.Buffer
	if err := png.Encode(&b, m); err != nil {
		return nil, err
	}
	if orientation <= 1 {
		return b.Bytes(), nil
	}
	const behindHeader = 8 + 12 + 13 // the signature, and the first chunk
	chunk := []byte("\x00\x00\x00\x1aeXIfMM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00" +
		string(rune(orientation)) + "\x00\x00\x00\x00\x00\x00")
	chunk = binary.BigEndian.AppendUint32(chunk, crc32.ChecksumIEEE(chunk[4:]))
	return slices.Insert(b.Bytes(), behindHeader, chunk...), nil
}
