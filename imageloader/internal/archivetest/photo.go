package archivetest

import (
	"bytes"
	"encoding/binary"
	"hash/crc32"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"math/rand/v2"
	"testing"
)

// Photo returns a baseline JPEG (4:2:0) that is large enough for entry points.
func Photo(t testing.TB, seed uint64) []byte {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	m := image.NewRGBA(image.Rect(0, 0, 320, 240))
	for y := range 240 {
		for x := range 320 {
			m.SetRGBA(x, y, color.RGBA{uint8(x + r.IntN(60)), uint8(y + r.IntN(60)), uint8(x*y/64 + r.IntN(60)), 255})
		}
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 90}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// MaskClass returns the class of a pixel in the mask that make_masks.py draws.
func MaskClass(x, y, classes int) int { return (x*7 + y*13 + x*y%11) % classes }

// MaskPNG returns the mask of MaskClass as a PNG.
func MaskPNG(t testing.TB, width, height, classes int) []byte {
	t.Helper()
	picture := image.NewGray16(image.Rect(0, 0, width, height))
	var b bytes.Buffer
	for y := range height {
		for x := range width {
			picture.SetGray16(x, y, color.Gray16{Y: uint16(MaskClass(x, y, classes))})
		}
	}
	var encode image.Image = picture
	if classes <= 256 {
		grey := image.NewGray(picture.Rect)
		for i := range grey.Pix {
			grey.Pix[i] = picture.Pix[2*i+1]
		}
		encode = grey
	}
	if err := png.Encode(&b, encode); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// PNGBomb returns a PNG without pixels whose header claims the given size.
func PNGBomb(t *testing.T, width, height uint32) []byte {
	t.Helper()
	data := MaskPNG(t, 1, 1, 2)
	binary.BigEndian.PutUint32(data[16:], width)
	binary.BigEndian.PutUint32(data[20:], height)
	binary.BigEndian.PutUint32(data[29:], crc32.ChecksumIEEE(data[12:29]))
	return data
}
