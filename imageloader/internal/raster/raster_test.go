package raster

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// parsers maps file extensions to the parsers of all formats.
var parsers = map[string]func([]byte) (Image, error){".bmp": ParseBMP, ".gif": ParseGIF, ".tiff": ParseTIFF}

// testFiles returns the loader's test files of a format.
func testFiles(t testing.TB, extension string) (files [][]byte) {
	t.Helper()
	names, err := filepath.Glob("../../testdata/f*s/*" + extension)
	if err != nil || len(names) == 0 {
		t.Fatalf("no test files: %v, len(names) %v, want no error, len(names) at least 1", err, len(names))
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		files = append(files, data)
	}
	return files
}

// decode decodes over pixels of the given value.
func decode(image Image, before byte) ([]byte, error) {
	h := image.Header()
	rgb := bytes.Repeat([]byte{before}, 3*h.Width*h.Height)
	return rgb, image.Decode(rgb, nil)
}

// checkAny requires that any bytes are refused, or decode to the same pixels regardless of the
// memory's previous content.
func checkAny(t *testing.T, parse func([]byte) (Image, error), data []byte) {
	t.Helper()
	image, err := parse(data)
	if err != nil {
		return
	}
	h := image.Header()
	if h.Width < 1 || h.Width > MaxSide || h.Height < 1 || h.Height > MaxSide || h.Orientation < 1 ||
		h.Orientation > 8 {
		t.Fatalf("%+v", h)
	}
	if image.Check() != nil || h.Width*h.Height > 1<<18 {
		return
	}
	first, err := decode(image, 0)
	if err != nil {
		return
	}
	second, err := decode(image, 255)
	if err != nil || !bytes.Equal(first, second) {
		t.Fatalf("a second decoding: %v, or other pixels", err)
	}
}

func fuzz(f *testing.F, extension string) {
	for _, data := range testFiles(f, extension) {
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) { checkAny(t, parsers[extension], data) })
}

func FuzzBMP(f *testing.F) { fuzz(f, ".bmp") }

func FuzzGIF(f *testing.F) { fuzz(f, ".gif") }

func FuzzTIFF(f *testing.F) { fuzz(f, ".tiff") }

// FuzzFax decodes any bits with each compression.
func FuzzFax(f *testing.F) {
	f.Add([]byte{0x26, 0xa0, 0x01, 0xff, 0x00, 0x10, 0x01}, uint16(40), byte(4), byte(0))
	f.Add([]byte{0x00, 0x1b, 0x35, 0x00, 0x1c, 0xd5}, uint16(9), byte(3), byte(1))
	f.Fuzz(func(t *testing.T, data []byte, width uint16, kind, flags byte) {
		columns := 1 + int(width)
		fax := &fax{
			in: faxBits{data: data, reversed: flags&2 != 0}, kind: tiffHuffman + uint64(kind)%3, plane: flags&1 != 0,
			width: columns, tables: faxTablesOnce(), row: make([]byte, (columns+7)/8),
		}
		for range 8*len(data) + 1 { // each row takes a bit
			if err := fax.next(); err != nil {
				return
			}
			if last := fax.row[len(fax.row)-1]; columns%8 != 0 && last<<(columns%8) != 0 {
				t.Fatalf("the last byte of a row of %d columns = %08b, want zeros behind the row", columns,
					last)
			}
		}
		t.Fatalf("%d bytes of data give over %d rows, want at least one bit a row", len(data), 8*len(data))
	})
}

// TestHostile: a few bytes that claim a large image are refused before memory for pixels is
// allocated.
func TestHostile(t *testing.T) {
	le := binary.LittleEndian
	bmpHeader := func(width, height uint32, bits uint16, compression uint32) []byte {
		b := le.AppendUint32(append([]byte("BM"), make([]byte, 8)...), 54)
		b = le.AppendUint32(le.AppendUint32(le.AppendUint32(b, 40), width), height)
		b = le.AppendUint32(le.AppendUint16(le.AppendUint16(b, 1), bits), compression)
		return append(b, make([]byte, 20)...)
	}
	tiffOf := func(entries ...[3]uint32) []byte { // tag, number of values, value
		b := append([]byte("II*\x00\x08\x00\x00\x00"), byte(len(entries)), 0)
		for _, e := range entries {
			b = le.AppendUint16(le.AppendUint16(b, uint16(e[0])), 4)
			b = le.AppendUint32(le.AppendUint32(b, e[1]), e[2])
		}
		return append(b, make([]byte, 64)...)
	}
	strip := [][3]uint32{{tiffStripOffsets, 1, 8}, {tiffStripByteCounts, 1, 60}}
	sides := func(width, height uint32, more ...[3]uint32) []byte {
		return tiffOf(append([][3]uint32{{tiffWidth, 1, width}, {tiffHeight, 1, height}}, more...)...)
	}
	for name, c := range map[string]struct {
		parse func([]byte) (Image, error)
		data  []byte
		want  string
	}{
		"BMP, no pixels":      {ParseBMP, bmpHeader(20000, 20000, 24, 0), "unexpected EOF"},
		"BMP, lowest height":  {ParseBMP, bmpHeader(1, 1<<31, 24, 0), "over the limit"},
		"BMP, negative width": {ParseBMP, bmpHeader(1<<32-5, 5, 24, 0), "impossible size"},
		"BMP, palette beyond": {ParseBMP, bmpHeader(1, 1, 8, 0), "unexpected EOF"},
		"BMP, runs beyond": {ParseBMP,
			append(le.AppendUint32([]byte("BM\x00\x00\x00\x00\x00\x00\x00\x00"), 1<<30),
				bmpHeader(9, 9, 8, 1)[14:]...), "unexpected EOF"},
		"GIF, far frame": {ParseGIF,
			[]byte("GIF89a\x01\x00\x01\x00\x00\x00\x00,\xff\xff\xff\xff\x00\x00\x00\x00\x00\x02\x00"),
			"without pixels"},
		"GIF, extensions only": {ParseGIF, []byte("GIF89a\x01\x00\x01\x00\x00\x00\x00!\xfe\xff"), "unexpected EOF"},
		"TIFF, no pixels":      {ParseTIFF, sides(20000, 20000, strip...), "too little image data"},
		"TIFF, fax": {ParseTIFF,
			sides(20000, 20000, append(strip, [3]uint32{tiffCompression, 1, 4})...), "too little image data"},
		"TIFF, JPEG": {ParseTIFF,
			sides(60000, 60000, append(strip, [3]uint32{tiffCompression, 1, 7},
				[3]uint32{tiffBitsPerSample, 1, 8})...), "too little image data"},
		"TIFF, shared JPEGs": {ParseTIFF,
			append(sides(800, 800, [3]uint32{tiffTileWidth, 1, 8}, [3]uint32{tiffTileLength, 1, 8},
				[3]uint32{tiffTileOffsets, 10000, 100}, [3]uint32{tiffCompression, 1, tiffJPEG},
				[3]uint32{tiffBitsPerSample, 1, 8}), make([]byte, 40000)...), "share their bytes"},
		"TIFF, side": {ParseTIFF, sides(1<<32-1, 1, strip...), "over the limit"},
		"TIFF, small tiles": {ParseTIFF,
			sides(1000000, 1000000, [3]uint32{tiffTileWidth, 1, 8}, [3]uint32{tiffTileLength, 1, 8},
				[3]uint32{tiffTileOffsets, 1, 8}), "are missing"},
		"TIFF, large tiles": {ParseTIFF,
			sides(9, 9, [3]uint32{tiffTileWidth, 1, 1 << 31}, [3]uint32{tiffTileLength, 1, 1 << 31},
				[3]uint32{tiffTileOffsets, 1, 8}), "larger than the image"},
		"TIFF, more tags than bytes": {ParseTIFF,
			append([]byte("II*\x00\x08\x00\x00\x00\xff\xff"), make([]byte, 99)...), "unexpected EOF"},
		"TIFF, values beyond": {ParseTIFF,
			sides(9, 9, [3]uint32{tiffBitsPerSample, 1 << 30, 1 << 31}), "unexpected EOF"},
		"TIFF, strips beyond": {ParseTIFF, sides(9, 9, [3]uint32{tiffStripOffsets, 1, 1<<32 - 1}),
			"too little image data"},
		"BigTIFF, 2^60 tags": {ParseTIFF,
			append([]byte("II+\x00\x08\x00\x00\x00\x10\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x10"), make([]byte,
				99)...), "entries"},
		"BigTIFF, directory beyond": {ParseTIFF,
			append([]byte("II+\x00\x08\x00\x00\x00"), bytes.Repeat([]byte{255}, 99)...), "unexpected EOF"},
	} {
		image, err := c.parse(c.data)
		if err == nil {
			err = image.Check()
		}
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, without %q", name, err, c.want)
		}
	}
}

// TestFaxDamageIsAnError: bad codes return an error that describes them.
func TestFaxDamageIsAnError(t *testing.T) {
	for name, c := range map[string]struct {
		kind uint64
		data []byte
		want error
	}{
		"a run behind the row's end":   {tiffHuffman, []byte{0x4e, 0xc0}, errFax},
		"no code":                      {tiffGroup4, []byte{0x00, 0x10, 0x01, 0x00}, errFax},
		"a change before the last one": {tiffGroup4, []byte{0b00100011, 0b11100001, 0b00000100, 0b00001000}, errFax},
	} {
		fax := &fax{in: faxBits{data: c.data}, kind: c.kind, width: 9, tables: faxTablesOnce(), row: make([]byte, 2)}
		var err error
		for err == nil {
			err = fax.next()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want the error %v", name, err, c.want)
		}
	}
}
