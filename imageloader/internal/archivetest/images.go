package archivetest

import (
	"bytes"
	"encoding/binary"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"testing"
)

// Gradient returns a picture of w x h pixels.
func Gradient(w, h int) *image.RGBA {
	m := image.NewRGBA(image.Rect(0, 0, w, h))
	for y := range h {
		for x := range w {
			m.SetRGBA(x, y, color.RGBA{uint8(255 * x / w), uint8(255 * y / h), 128, 255})
		}
	}
	return m
}

// JPEG encodes a picture as a JPEG file.
func JPEG(t testing.TB, m image.Image) string {
	t.Helper()
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 95}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// PNG encodes a picture as a PNG file.
func PNG(t testing.TB, m image.Image) string {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// withSegments inserts n bytes of application data before a JPEG's frame header.
func withSegments(data string, n int) string {
	var b bytes.Buffer
	b.WriteString(data[:2])
	for ; n > 0; n -= 60_000 {
		size := min(n, 60_000)
		b.Write([]byte{0xff, 0xe9})
		b.Write(binary.BigEndian.AppendUint16(nil, uint16(size+2)))
		b.Write(make([]byte, size))
	}
	b.WriteString(data[2:])
	return b.String()
}

// Turned inserts an EXIF orientation into a JPEG.
func Turned(data string, orientation byte) string {
	exif := "\xff\xe1\x00\x22Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00" +
		string(orientation) + "\x00\x00\x00\x00\x00\x00"
	return data[:2] + exif + data[2:]
}

// Mixed returns images whose headers differ in every property that an index records, and members
// that are not images. The header of "a/far behind.jpg" is further from the start of the file than
// an index searches.
func Mixed(t testing.TB) []Member {
	grey := image.NewGray(image.Rect(0, 0, 33, 21))
	return []Member{
		{Name: "a/plain.jpg", Data: JPEG(t, Gradient(70, 50))},
		{Name: "a/grey.jpg", Data: JPEG(t, grey)},
		{Name: "a/turned.jpg", Data: Turned(JPEG(t, Gradient(60, 41)), 6)},
		{Name: "a/behind.jpg", Data: withSegments(JPEG(t, Gradient(45, 40)), 100_000)},
		{Name: "a/far behind.jpg", Data: withSegments(JPEG(t, Gradient(46, 40)), 512<<10)},
		{Name: "b/a.png", Data: PNG(t, Gradient(90, 30))},
		{Name: "b/grey.png", Data: PNG(t, grey)},
		{Name: "b/text.jpg", Data: "this is no image"},
		{Name: "b/sequence.heic", Data: "\x00\x00\x00\x18ftypmsf1\x00\x00\x00\x00"},
		{Name: "b/empty.jpg", Data: ""},
		{Name: "b/README", Data: "this neither"},
		{Name: "b/link.jpg", Kind: '2', Link: "a.png"},
		{Name: "b/cut.jpg", Data: JPEG(t, Gradient(70, 50))[:100]},
	}
}
