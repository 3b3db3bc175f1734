package imageloader

import (
	"bytes"
	"encoding/binary"
	"errors"
	"image/png"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// heifFiles returns small HEIC and AVIF files by their names (testdata/make_heif.py). It skips the
// test where libheif is not installed.
func heifFiles(t testing.TB) map[string][]byte {
	t.Helper()
	files := heifFilesOf(t, "*")
	if len(files) == 0 {
		t.Skip("libheif is not installed")
	}
	return files
}

// heifFilesOf returns the .heic and .avif files that match a pattern, or none if libheif is not
// installed.
func heifFilesOf(t testing.TB, pattern string) map[string][]byte {
	t.Helper()
	files := map[string][]byte{}
	for _, extension := range []string{".heic", ".avif"} {
		names, err := filepath.Glob("testdata/heif/" + pattern + extension)
		if err != nil || len(names) == 0 {
			t.Fatalf("no test files: %v, len(names) %v, want no error, len(names) at least 1",
				err, len(names))
		}
		for _, name := range names {
			data, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := imagecapi.Header(data); errors.Is(err, imagecapi.CodeUnsupported) &&
				strings.Contains(err.Error(), "needs libheif") {
				return nil
			}
			files[filepath.Base(name)] = data
		}
	}
	return files
}

// wholeGeometry decodes an image at its own size.
func wholeGeometry(width, height int32) *imagecapi.Geometry {
	return &imagecapi.Geometry{CropWidth: width, CropHeight: height, ResizeWidth: width,
		ResizeHeight: height, WindowWidth: width, WindowHeight: height}
}

// TestHEIFIsNearPillow: except for rounding, HEIC has pillow_heif's pixels, and AVIF has Pillow's.
func TestHEIFIsNearPillow(t *testing.T) {
	d := realDecoder(t)
	for name, data := range heifFiles(t) {
		info, err := d.Header(data)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
			continue
		}
		file, err := os.ReadFile("testdata/heif/" + name + ".png")
		if err != nil {
			t.Fatal(err)
		}
		expected, err := png.DecodeConfig(bytes.NewReader(file))
		if err != nil {
			t.Fatal(err)
		}
		format := strings.ToUpper(strings.TrimPrefix(filepath.Ext(name), "."))
		number := map[string]int32{"HEIC": imagecapi.HEIC, "AVIF": imagecapi.AVIF}[format]
		if codec.Sniff(data[:16]) != format || info.Format != number || info.Orientation != 1 {
			t.Errorf("%s: %+v", name, info)
		}
		if int(info.Width) != expected.Width || int(info.Height) != expected.Height {
			t.Errorf("%s: %d x %d pixels, want %d x %d",
				name, info.Width, info.Height, expected.Width, expected.Height)
			continue
		}
		w, h := int(info.Width), int(info.Height)
		got, want := make([]byte, 3*w*h), make([]byte, 3*w*h)
		for dst, source := range map[*[]byte][]byte{&got: data, &want: file} {
			if err := d.Decode(source, wholeGeometry(info.Width, info.Height), *dst, 3*w); err != nil {
				t.Fatalf("%s: %v, want no error", name, err)
			}
		}
		sum, most := 0, 0
		for i := range got {
			difference := max(int(got[i]), int(want[i])) - min(int(got[i]), int(want[i]))
			sum, most = sum+difference, max(most, difference)
		}
		mean, limit, maximum := float64(sum)/float64(len(got)), 0.8, 3
		// libheif repeats their colour
		if slices.Contains([]string{"10-bit.avif", "bt709.avif", "limited.avif"}, name) {
			limit, maximum = 2, 12
		}
		if name == "saturated.avif" { // libheif before 1.19 clips its colours
			limit, maximum = 2.2, 36
		}
		t.Logf("%s: differs by %.2f, at most %d", name, mean, most)
		if mean > limit || most > maximum {
			t.Errorf("%s: differs by %.2f, at most %d, want %g and %d", name, mean, most, limit, maximum)
		}
		for orientation := range int32(9) {
			if err := checkPart(d, data, got, w, h, orientation); err != nil {
				t.Errorf("%s: orientation %d: %v, want no error", name, orientation, err)
			}
		}
	}
}

// TestHEIFIsBoundedByItsBitStream: the size limits use the pictures' size, not the properties of
// the file.
func TestHEIFIsBoundedByItsBitStream(t *testing.T) {
	for name, data := range heifFiles(t) {
		if !strings.HasPrefix(name, "flat") { // 400 x 300
			continue
		}
		d, err := sample.Library{}.NewDecoder(10_000)
		if err != nil {
			t.Fatal(err)
		}
		forged := slices.Clone(data)
		at := bytes.Index(forged, []byte("ispe")) + 8
		for _, side := range []uint32{0, 4} {
			binary.BigEndian.PutUint32(forged[at+int(side):], 40)
		}
		var pixels [3 * 40 * 40]byte
		for what, file := range map[string][]byte{"as it is": data, "forged": forged} {
			err := d.Decode(file, wholeGeometry(40, 40), pixels[:], 3*40)
			if !errors.Is(err, imagecapi.CodeUnsupported) || !strings.Contains(err.Error(), "is over the limit of") {
				t.Errorf("%s, %s: %v, want the error %v with %q",
					name, what, err, imagecapi.CodeUnsupported, "is over the limit of")
			}
		}
		d.Close()
	}
}

// TestDamagedHEIFIsTheFilesFault: every truncation and hundreds of mutations decode, or fail as the
// file's fault.
func TestDamagedHEIFIsTheFilesFault(t *testing.T) {
	d := realDecoder(t)
	rng := rand.New(rand.NewPCG(3, 4))
	var pixels [8 * 8 * 3]byte
	try := func(name string, data []byte) {
		info, err := d.Header(data)
		if err == nil && int64(info.Width)*int64(info.Height) <= 1<<20 {
			g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8,
				ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
			err = d.Decode(data, &g, pixels[:], 3*8)
		}
		if err != nil && !errors.Is(err, imagecapi.CodeDecode) && !errors.Is(err, imagecapi.CodeUnsupported) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	for name, data := range heifFiles(t) {
		for n := 0; n < len(data); n += 1 + n/32 {
			try(name, data[:n])
		}
		for range 100 {
			changed := slices.Clone(data)
			for range 1 + rng.IntN(4) {
				changed[rng.IntN(min(len(changed), 700))] = byte(rng.Uint32())
			}
			try(name, changed)
		}
	}
}
