package imageloader

import (
	"bytes"
	"compress/lzw"
	"compress/zlib"
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"image"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/mask"
	"github.com/torchstream/torchstream/internal/imagecapi"
	"github.com/torchstream/torchstream/tensor"
)

// largeSide is the side, in pixels, of the images whose decoding is measured.
const largeSide = 4096

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

func deflatedZeros(t testing.TB, n int64) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zlib.NewWriter(&b)
	if _, err := io.CopyN(w, zeros{}, n); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// largeImages returns images of largeSide x largeSide pixels in every format, in the forms that
// take the most memory.
func largeImages(t testing.TB) map[string][]byte {
	t.Helper()
	const n = largeSide
	files := map[string][]byte{}

	rgba16 := madeTIFF{binary.LittleEndian, n, n, 2, 4, 16, 2, tiffDeflate, false, image.Point{}, n}
	zero := func(_, rows, stride int) []byte { return make([]byte, rows*stride) }
	files["TIFF, 16-bit RGBA in one strip"] = rgba16.build(t, zero)
	tiled := rgba16
	tiled.tile, tiled.predictor = image.Pt(n, n), true
	files["TIFF, 16-bit RGBA in one tile"] = tiled.build(t, zero)
	packed := rgba16
	packed.compression = tiffPackBits
	files["TIFF, 16-bit RGBA, PackBits"] = packed.build(t, zero)

	// A blank row of group 4 is one bit.
	fax := madeTIFF{binary.LittleEndian, n, n, 0, 1, 1, 0, 4, false, image.Point{}, n}
	files["TIFF, group 4"] = fax.build(t, func(_, _, _ int) []byte { return bytes.Repeat([]byte{0xff}, n/8) })

	gif := append([]byte("GIF89a"), 0, n>>8, 0, n>>8, 0x80, 0, 0, 0, 0, 0, 255, 255, 255)
	gif = append(gif, 0x2c, 0, 0, 0, 0, 0, n>>8, 0, n>>8, 0, 2)
	var pixels bytes.Buffer
	w := lzw.NewWriter(&pixels, lzw.LSB, 2)
	if _, err := io.CopyN(w, zeros{}, n*n); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for pixels.Len() > 0 {
		block := pixels.Next(255)
		gif = append(append(gif, byte(len(block))), block...)
	}
	files["GIF"] = append(gif, 0, 0x3b)

	for _, bits := range []int{8, 24, 32} {
		colours := 0
		if bits == 8 {
			colours = 256
		}
		le := binary.LittleEndian
		bmp := le.AppendUint32([]byte("BM"), 0)
		bmp = le.AppendUint32(le.AppendUint32(bmp, 0), uint32(54+4*colours))
		bmp = le.AppendUint32(le.AppendUint32(le.AppendUint32(bmp, 40), n), n)
		bmp = le.AppendUint16(le.AppendUint16(bmp, 1), uint16(bits))
		files[fmt.Sprintf("BMP, %d bits", bits)] = append(bmp, make([]byte, 24+4*colours+n*n*bits/8)...)
	}

	le := binary.LittleEndian
	rle := le.AppendUint32(le.AppendUint32(le.AppendUint32([]byte("BM"), 0), 0), 54+4)
	rle = le.AppendUint32(le.AppendUint32(le.AppendUint32(rle, 40), n), n)
	rle = le.AppendUint32(le.AppendUint32(le.AppendUint32(rle, 8<<16|1), 1), 0)
	rle = append(le.AppendUint32(rle, 0), 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0)
	files["BMP, run-length encoded"] = append(rle, 1, 2, 3, 0, 0, 1)

	png := []byte("\x89PNG\r\n\x1a\n")
	chunk := func(kind string, data []byte) {
		png = binary.BigEndian.AppendUint32(png, uint32(len(data)))
		begin := len(png)
		png = append(append(png, kind...), data...)
		png = binary.BigEndian.AppendUint32(png, crc32.ChecksumIEEE(png[begin:]))
	}
	header := binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(nil, n), n)
	chunk("IHDR", append(header, 16, 6, 0, 0, 1)) // 16-bit RGBA, interlaced
	// of the seven passes; each row starts with a byte for its filter
	rows := int64(n/8 + n/8 + n/8 + n/4 + n/4 + n/2 + n/2)
	chunk("IDAT", deflatedZeros(t, 8*n*n+rows))
	chunk("IEND", nil)
	files["PNG, interlaced 16-bit RGBA"] = png

	// Progressive, with four components without subsampling. All coefficients are 0, and take one
	// bit each in the only scan, the DC scan.
	jpeg := []byte{0xff, 0xd8, 0xff, 0xdb, 0, 67, 0}
	jpeg = append(jpeg, bytes.Repeat([]byte{1}, 64)...)
	jpeg = append(jpeg, 0xff, 0xc2, 0, 20, 8, n>>8, 0, n>>8, 0, 4, 1, 0x11, 0, 2, 0x11, 0, 3, 0x11, 0, 4, 0x11, 0)
	jpeg = append(jpeg, 0xff, 0xc4, 0, 20, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
	jpeg = append(jpeg, 0xff, 0xda, 0, 14, 4, 1, 0, 2, 0, 3, 0, 4, 0, 0, 0, 0)
	jpeg = append(jpeg, make([]byte, 4*n/8*n/8/8)...)
	files["JPEG, progressive CMYK"] = append(jpeg, 0xff, 0xd9)

	// Lossless, with codes of one symbol, so that the pixels take no bits.
	var bits, have uint64
	var stream []byte
	put := func(value uint64, count uint64) {
		bits, have = bits|value<<have, have+count
		for ; have >= 8; have -= 8 {
			stream, bits = append(stream, byte(bits)), bits>>8
		}
	}
	put(0x2f, 8)
	put(n-1, 14)
	put(n-1, 14)
	put(0, 4) // no alpha, version 0
	put(0, 3) // no transform, no colour cache, one set of codes
	for range 5 {
		put(1, 1) // a simple code
		put(0, 3) // of one symbol, 0
	}
	put(0, 7)
	for len(stream)%2 != 0 || len(stream) < 16 {
		stream = append(stream, 0)
	}
	riff := binary.LittleEndian.AppendUint32([]byte("RIFF"), uint32(12+len(stream)))
	riff = binary.LittleEndian.AppendUint32(append(riff, "WEBPVP8L"...), uint32(len(stream)))
	files["WebP, lossless"] = append(riff, stream...)
	return files
}

// peakBytes returns the peak of the process's resident memory.
func peakBytes(t testing.TB) int64 {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, line, _ := strings.Cut(string(status), "VmHWM:")
	kilobytes, err := strconv.ParseInt(strings.Fields(line)[0], 10, 64)
	if err != nil {
		t.Fatal(err)
	}
	return kilobytes << 10
}

const memoryVariable = "TORCHSTREAM_TEST_MEMORY"

// TestDecodingMemory: no format needs more than 8 bytes for each pixel, and a file that contains
// only an image's header needs almost nothing. Each file is measured in a separate process.
func TestDecodingMemory(t *testing.T) {
	if underRace {
		t.Skip("the race detector needs memory of its own")
	}
	if file := os.Getenv(memoryVariable); file != "" {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		d := realDecoder(t)
		var pixels [8 * 8 * 3]byte
		before := peakBytes(t)
		for range 2 { // memory kept from one image counts during the next image
			info, err := d.Header(data)
			if err == nil {
				g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8,
					ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
				if strings.HasPrefix(filepath.Base(file), "mask") {
					m := mask.Decoder{DType: tensor.Int64}
					err = m.Decode(data, int(info.Width), int(info.Height), &g, nil, make([]byte, 8*8*8))
				} else {
					err = d.Decode(data, &g, pixels[:], 8*3)
				}
			}
			fmt.Println("result", err)
		}
		fmt.Println("bytes", peakBytes(t)-before)
		return
	}
	measure := func(name string, data []byte, good bool, limit int64) {
		file, err := os.CreateTemp(t.TempDir(), strings.Fields(name)[0])
		if err != nil {
			t.Fatal(err)
		}
		if _, err := file.Write(data); err != nil {
			t.Fatal(err)
		}
		if err := file.Close(); err != nil {
			t.Fatal(err)
		}
		child := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^TestDecodingMemory$", "-test.count=1")
		child.Env = append(os.Environ(), memoryVariable+"="+file.Name())
		out, err := child.CombinedOutput()
		_, after, found := strings.Cut(string(out), "bytes ")
		if err != nil || !found {
			t.Fatalf("%s: %v, %s, want no error, found = true", name, err, out)
		}
		taken, err := strconv.ParseInt(strings.Fields(after)[0], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("%s, %d bytes: %.1f bytes a pixel", name, len(data), float64(taken)/largeSide/largeSide)
		if decoded := strings.Count(string(out), "result <nil>") == 2; decoded != good || taken > limit {
			t.Errorf("%s: %d bytes for %d pixels, over %d; decoded: %v, %s, want decoded = %v, taken at "+
				"most %v", name, taken, largeSide*largeSide, limit, decoded, out, good, limit)
		}
	}
	const pixel, slack = int64(largeSide) * largeSide, 16 << 20
	for name, data := range largeImages(t) {
		measure(name, data, true, 8*pixel+slack)
		switch {
		case strings.HasPrefix(name, "TIFF"), strings.HasSuffix(name, " bits"):
			measure(name+", forged", forged(t, data), false, slack)
		}
	}
	for _, classes := range []int{256, 60000} {
		mask := archivetest.MaskPNG(t, largeSide, largeSide, classes)
		measure(fmt.Sprintf("mask of %d classes", classes), mask, true, 8*pixel+slack)
	}
	// MaxPixels counts a pixel of HEIC twice, and one of AVIF four times.
	for name, data := range heifFilesOf(t, "large/*") {
		bytesPerPixel := map[string]int64{".heic": 16, ".avif": 32}[filepath.Ext(name)]
		measure(name, data, true, bytesPerPixel*pixel+slack)
	}
}

// forged returns the header of an image with almost none of its content.
func forged(t testing.TB, data []byte) []byte {
	t.Helper()
	if data[0] == 'B' {
		return data[:2048]
	}
	m := madeTIFF{binary.LittleEndian, largeSide, largeSide, 2, 4, 16, 2,
		int(binary.LittleEndian.Uint16(tiffEntry(data, 259))), false, image.Point{}, largeSide}
	return m.build(t, func(_, _, stride int) []byte { return make([]byte, 64*stride/largeSide) })
}

func tiffEntry(data []byte, number uint16) []byte {
	at := binary.LittleEndian.Uint32(data[4:]) + 2
	for binary.LittleEndian.Uint16(data[at:]) != number {
		at += 12
	}
	return data[at+8:]
}
