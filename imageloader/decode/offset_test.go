package decode_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
)

// damage decodes an image and returns its fault, or nil if it is decoded. It checks the invariants
// of every fault's offset.
func damage(t *testing.T, what string, d *decode.Decoder, data []byte) *decode.Error {
	t.Helper()
	pixels := make([]byte, d.Bytes())
	err := d.Decode(t.Context(), pixels, data)
	if err == nil {
		return nil
	}
	var e *decode.Error
	if !errors.As(err, &e) {
		t.Fatalf("%s: %v, want an error of type *decode.Error", what, err)
	}
	if e.Offset < -1 || e.Offset > int64(len(data)) || e.Kind != decode.ErrDamaged && e.Offset != -1 {
		t.Errorf("%s: offset %d of %d bytes: %v", what, e.Offset, len(data), e)
	}
	if e.Offset >= 0 && !strings.HasSuffix(e.Error(), fmt.Sprintf(" at byte %d", e.Offset)) {
		t.Errorf("%s: the text does not end with byte %d: %v", what, e.Offset, e)
	}
	// A GPU leaves an image that it cannot decode to DecodeRows.
	var rows *decode.Error
	if err := d.DecodeRows(t.Context(), pixels, []int{0}, [][]byte{data}); !errors.As(err, &rows) ||
		rows.Error() != e.Error() || rows.Offset != e.Offset {
		t.Errorf("%s: DecodeRows has the error %v at %d, want %v at %d", what, err, rows.Offset, e, e.Offset)
	}
	return e
}

// policies has a decoder for each policy.
func policies(t *testing.T) map[decode.DamagePolicy]*decode.Decoder {
	list := map[decode.DamagePolicy]*decode.Decoder{}
	for _, p := range []decode.DamagePolicy{decode.Warned, decode.Partial, decode.Refuse} {
		list[p] = newDecoder(t, decode.Options{Damaged: p, Transform: transform.Eval(32, 32)})
	}
	return list
}

// TestCutImageErrorHasOffset: an image of any format that is cut at a power of two has an offset
// within the remaining bytes. For a JPEG or PNG it is their end.
func TestCutImageErrorHasOffset(t *testing.T) {
	names, images := corpus(t)
	told := map[string]int{}
	for policy, d := range policies(t) {
		for i, data := range images {
			for cut := 1; cut < len(data); cut *= 2 {
				what := fmt.Sprintf("%v, %s, %d bytes", policy, names[i], cut)
				e := damage(t, what, d, data[:cut])
				if e == nil || e.Kind != decode.ErrDamaged {
					continue
				}
				format := filepath.Ext(names[i])
				if e.Offset >= 0 {
					told[format]++
				}
				switch format {
				case ".jpg", ".png":
					// libjpeg may first refuse bytes before the cut.
					if e.Offset < 0 || policy == decode.Refuse && e.Offset != int64(cut) &&
						strings.Contains(e.Error(), "truncated") {
						t.Errorf("%s: offset %d: %v", what, e.Offset, e)
					}
				case ".gif", ".bmp":
					if e.Offset < 0 {
						t.Errorf("%s: no offset: %v, want at least 0", what, e)
					}
				}
			}
		}
	}
	for _, format := range []string{".jpg", ".png", ".webp", ".gif", ".bmp", ".tiff"} {
		if told[format] < 10 {
			t.Errorf("%d offsets of %s, want at least 10", told[format], format)
		}
	}
}

// segment returns the offset of a JPEG's first segment with this marker.
func segment(t *testing.T, jpeg []byte, marker byte) int {
	t.Helper()
	for at := 2; at+4 < len(jpeg); at += 2 + int(binary.BigEndian.Uint16(jpeg[at+2:])) {
		if jpeg[at+1] == marker {
			return at
		}
	}
	t.Fatalf("no segment %#x", marker)
	return 0
}

// testImage returns a file of the image library's tests.
func testImage(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile("../../cshim/test/data/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestFlippedMarkerErrorHasOffset: an invalid marker is found at its own offset.
func TestFlippedMarkerErrorHasOffset(t *testing.T) {
	jpeg := photo(t)
	strict := policies(t)[decode.Refuse]
	for _, marker := range []byte{0xdb, 0xc4, 0xda} {
		at := segment(t, jpeg, marker)
		broken := slices.Clone(jpeg)
		broken[at] = 0
		if e := damage(t, fmt.Sprintf("marker %#x", marker), strict, broken); e == nil || e.Offset != int64(at) {
			t.Errorf("marker %#x at byte %d: %v, want e not nil, e.Offset = %v", marker, at, e, int64(at))
		}
	}
	restart := testImage(t, "restart.jpg")
	at := segment(t, restart, 0xda)
	at += bytes.Index(restart[at:], []byte{0xff, 0xd1})
	restart[at+1] = 0xd5
	if e := damage(t, "restart marker", strict, restart); e == nil || e.Offset != int64(at) {
		t.Errorf("restart marker at byte %d: %v, want e not nil, e.Offset = %v", at, e, int64(at))
	}
}

// TestGarbageErrorHasOffset: garbage after a header has an offset within the garbage.
func TestGarbageErrorHasOffset(t *testing.T) {
	decoders := policies(t)
	rng := rand.New(rand.NewPCG(1, 2))
	within := func(what string, policy decode.DamagePolicy, data []byte, from int) {
		t.Helper()
		if e := damage(t, what, decoders[policy], data); e == nil || e.Kind != decode.ErrDamaged ||
			e.Offset < int64(from) {
			t.Errorf("%s, %v: %v, want an offset from %d on", what, policy, e, from)
		}
	}
	for _, name := range []string{"420.jpg", "progressive.jpg", "restart.jpg"} {
		jpeg := testImage(t, name)
		scan := segment(t, jpeg, 0xda)
		scan += 2 + int(binary.BigEndian.Uint16(jpeg[scan+2:]))
		// libjpeg-turbo accepts most bits as codes, but these are too few for the image.
		jpeg = jpeg[:scan]
		for range 400 {
			jpeg = append(jpeg, byte(rng.Uint32N(255))) // no marker
		}
		jpeg = append(jpeg, 0xff, 0xd9)
		within(name, decode.Refuse, jpeg, scan)
	}

	// libpng reads a copy without the text. The checksums of the garbage are right.
	chunk := func(kind string, content []byte) []byte {
		b := append(binary.BigEndian.AppendUint32(nil, uint32(len(content))), kind...)
		b = append(b, content...)
		return binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b[4:]))
	}
	header := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, 64), 64)
	header = append(header, 8, 2, 0, 0, 0)
	png := append([]byte("\x89PNG\r\n\x1a\n"), chunk("IHDR", header)...)
	png = append(png, chunk("tEXt", bytes.Repeat([]byte("text\x00"), 2000))...)
	at := len(png)
	garbage := make([]byte, 600)
	for i := range garbage {
		garbage[i] = byte(rng.Uint32())
	}
	png = append(png, chunk("IDAT", garbage)...)
	end := int64(len(png))
	png = append(png, chunk("IEND", nil)...)
	for _, policy := range []decode.DamagePolicy{decode.Refuse, decode.Warned} {
		within("PNG", policy, png, at)
		if e := damage(t, "PNG", decoders[policy], png); e != nil && e.Offset > end {
			t.Errorf("PNG, %v: offset %d is behind the image data, which end at %d", policy, e.Offset, end)
		}
	}
	png[at+20] ^= 1
	if e := damage(t, "PNG, checksum", decoders[decode.Refuse], png); e == nil || e.Offset != int64(at) {
		t.Errorf("a wrong checksum of the chunk at byte %d: %v, want e not nil, e.Offset = %v",
			at, e, int64(at))
	}

	gif := append([]byte("GIF89a"), 8, 0, 8, 0, 0, 0, 0, ',', 0, 0, 0, 0, 8, 0, 8, 0, 0, 2)
	from := len(gif)
	gif = append(append(gif, 200), bytes.Repeat([]byte{0xff}, 200)...)
	within("GIF", decode.Warned, gif, from)
}
