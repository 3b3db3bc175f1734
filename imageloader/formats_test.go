package imageloader

import (
	"bytes"
	"compress/zlib"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/raster"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// formatFiles returns small files of every format and feature that is not in cshim/test/data, with
// Pillow's results (testdata/make_formats.py): width, height, CRC-32 of the RGB bytes, orientation.
func formatFiles(t testing.TB) (files map[string][]byte, want map[string][4]any) {
	t.Helper()
	list, err := os.ReadFile("testdata/features/pixels.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(list, &want); err != nil {
		t.Fatal(err)
	}
	files = map[string][]byte{}
	for name := range want {
		if files[name], err = os.ReadFile(filepath.Join("testdata", name)); err != nil {
			t.Fatal(err)
		}
	}
	return files, want
}

func realDecoder(t testing.TB) sample.Decoder {
	t.Helper()
	d, err := sample.Library{}.NewDecoder(0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Close)
	return d
}

// TestFormatsEqualPillow: GIF, BMP, TIFF and WebP are decoded to the pixels of Pillow's
// convert("RGB"), also in parts.
func TestFormatsEqualPillow(t *testing.T) {
	files, want := formatFiles(t)
	d := realDecoder(t)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data := files[name]
		if f := codec.Sniff(data); f == "" || codec.Sniff(data[:16]) != f {
			t.Errorf("%s is recognised as %q", name, f)
		}
		info, err := d.Header(data)
		if err != nil {
			t.Errorf("%s: %v, want no error", name, err)
			continue
		}
		w, h := int(want[name][0].(float64)), int(want[name][1].(float64))
		if int(info.Width) != w || int(info.Height) != h || info.Orientation != int32(want[name][3].(float64)) {
			t.Errorf("%s: %+v, want %v", name, info, want[name])
			continue
		}
		whole := make([]byte, 3*w*h)
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: info.Width,
			ResizeHeight: info.Height, WindowWidth: info.Width, WindowHeight: info.Height}
		if err := d.Decode(data, &g, whole, 3*w); err != nil {
			t.Errorf("%s: %v, want no error", name, err)
			continue
		}
		if sum := fmt.Sprintf("%08x", crc32.ChecksumIEEE(whole)); sum != want[name][2] {
			t.Errorf("%s: other pixels than Pillow's: %s, want %v", name, sum, want[name][2])
		}
		// A part, upright or turned by an orientation, equals the same part of the whole image.
		for orientation := range int32(9) {
			if err := checkPart(d, data, whole, w, h, orientation); err != nil {
				t.Errorf("%s: orientation %d: %v, want no error", name, orientation, err)
			}
		}
	}
}

// TestRefusedFormatsAreNamed: the error of a file that is not decoded names the feature.
func TestRefusedFormatsAreNamed(t *testing.T) {
	list, err := os.ReadFile("testdata/features/refused.json")
	if err != nil {
		t.Fatal(err)
	}
	var refused map[string][2]string // words of the error; the file, deflated, in base 64
	if err := json.Unmarshal(list, &refused); err != nil {
		t.Fatal(err)
	}
	for name, file := range refused {
		packed, err := base64.StdEncoding.DecodeString(file[1])
		if err != nil {
			t.Fatal(err)
		}
		r, err := zlib.NewReader(bytes.NewReader(packed))
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := realDecoder(t).Header(data); !errors.Is(err, imagecapi.CodeUnsupported) ||
			!strings.Contains(err.Error(), file[0]) {
			t.Errorf("%s: error %v, without %q", name, err, file[0])
		}
	}
}

// upright rotates rows of RGB according to the definition of EXIF's orientations.
func upright(pixels []byte, w, h int, orientation int32) (out []byte, ow, oh int) {
	ow, oh = w, h
	if orientation >= 5 {
		ow, oh = h, w
	}
	for y := range oh {
		for x := range ow {
			var sx, sy int
			switch orientation {
			case 2:
				sx, sy = w-1-x, y
			case 3:
				sx, sy = w-1-x, h-1-y
			case 4:
				sx, sy = x, h-1-y
			case 5:
				sx, sy = y, x
			case 6:
				sx, sy = y, h-1-x
			case 7:
				sx, sy = w-1-y, h-1-x
			case 8:
				sx, sy = w-1-y, x
			default:
				sx, sy = x, y
			}
			out = append(out, pixels[3*(sy*w+sx):][:3]...)
		}
	}
	return out, ow, oh
}

func checkPart(d sample.Decoder, data, whole []byte, w, h int, orientation int32) error {
	turned, ow, oh := upright(whole, w, h, orientation)
	g := imagecapi.Geometry{CropX: int32(ow / 5), CropY: int32(oh / 4), CropWidth: int32(ow / 2),
		CropHeight: int32(oh / 3), ResizeWidth: 9, ResizeHeight: 11, WindowX: 1, WindowY: 2, WindowWidth: 7,
		WindowHeight: 8, Flip: orientation%2 == 1}
	want, got := make([]byte, 3*7*8), make([]byte, 3*7*8)
	c, err := imagecapi.NewDecoder(0)
	if err != nil {
		return err
	}
	defer imagecapi.FreeDecoder(c)
	if err := imagecapi.Resize(c, turned, ow, oh, 3*ow, &g, want, 3*7); err != nil {
		return err
	}
	g.Orientation = orientation
	if err := d.Decode(data, &g, got, 3*7); err != nil {
		return err
	}
	if !slices.Equal(got, want) {
		return errors.New("a part differs from that part of the whole image")
	}
	return nil
}

// TestFormatsAreLoaded: the loader delivers members of every format. Truncated members are bad
// samples, not errors of the machine.
func TestFormatsAreLoaded(t *testing.T) {
	files, _ := formatFiles(t)
	var members []archivetest.Member
	for _, name := range slices.Sorted(maps.Keys(files)) {
		cut := files[name][:len(files[name])/4]
		members = append(members, archivetest.Member{Name: "c/" + name, Data: string(files[name])},
			archivetest.Member{Name: "c/cut-" + name, Data: string(cut)})
	}
	l, err := Open(archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)),
		Options{BadSamples: Skip, Transform: Eval(16, 16)})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	batches, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	if got := names(batches); len(got) != len(files) {
		t.Errorf("%d samples of %d files: %v", len(got), len(files), got)
	}
	if s := l.Stats(); s.BadBy[Damaged] != int64(len(files)) {
		t.Errorf("%+v, want %v", s.BadBy, int64(len(files)))
	}
	r, err := Inspect(t.Context(), l.path, Options{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	for _, format := range []string{"GIF", "BMP", "TIFF", "WebP", "TIFF grey"} {
		if r.Formats[format] == 0 {
			t.Errorf("Inspect found no %s: %v, want not 0", format, r.Formats)
		}
	}
}

// TestGeometryIsDrawnUpright: with ApplyEXIFOrientation the geometry is drawn in the upright frame.
func TestGeometryIsDrawnUpright(t *testing.T) {
	data, err := os.ReadFile("testdata/formats/orientation-6.tiff")
	if err != nil {
		t.Fatal(err)
	}
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/a.tiff", Data: string(data)}))
	load := func(o Transform) []byte {
		l, err := Open(path, Options{Transform: o})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		b, err := collect(t, l, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		return b[0].images
	}
	stored := load(Transform{Size: 23, Resize: 23})
	turned := load(Transform{Size: 23, Resize: 23, ApplyEXIFOrientation: true})
	want, _, _ := upright(stored, 23, 23, 6) // the middle of 37 x 23, rotated and not resized
	if !slices.Equal(turned, want) {
		t.Errorf("the image with EXIF orientation 6: %s; want it upright",
			archivetest.Difference(turned, want))
	}
}

// TestDamagedFormatsAreTheFilesFault: every truncation and thousands of mutations of every file
// decode, or fail with an error that blames the file. Nothing panics.
func TestDamagedFormatsAreTheFilesFault(t *testing.T) {
	files, _ := formatFiles(t)
	d := realDecoder(t)
	pixels := make([]byte, 3*8*8)
	try := func(name string, data []byte) {
		info, err := d.Header(data)
		if err == nil && int64(info.Width)*int64(info.Height) <= 1<<20 {
			g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 8,
				ResizeHeight: 8, WindowWidth: 8, WindowHeight: 8}
			err = d.Decode(data, &g, pixels, 3*8)
		}
		if err != nil && !errors.Is(err, imagecapi.CodeDecode) && !errors.Is(err, imagecapi.CodeUnsupported) {
			t.Fatalf("%s: %v", name, err)
		}
	}
	rounds := 300
	if underRace {
		rounds = 30 // a single goroutine has no race, and the detector makes it slow
	}
	rng := rand.New(rand.NewPCG(1, 2))
	for _, name := range slices.Sorted(maps.Keys(files)) {
		data := files[name]
		for n := 0; n < len(data); n += 1 + n/64 {
			try(name, data[:n])
		}
		for range rounds {
			changed := slices.Clone(data)
			for range 1 + rng.IntN(4) {
				at := rng.IntN(len(changed))
				if rng.IntN(2) == 0 {
					at = rng.IntN(min(len(changed), 64))
				}
				changed[at] = byte(rng.Uint32())
			}
			try(name, changed)
		}
	}
}

// FuzzRareFormats is TestDamagedFormatsAreTheFilesFault for any bytes. An image that decodes must
// also decode in parts and turned.
func FuzzRareFormats(f *testing.F) {
	files, _ := formatFiles(f)
	for _, data := range files {
		f.Add(data)
	}
	d := realDecoder(f)
	f.Fuzz(func(t *testing.T, data []byte) {
		info, err := d.Header(data)
		if err != nil || int64(info.Width)*int64(info.Height) > 1<<18 {
			return
		}
		w, h := int(info.Width), int(info.Height)
		pixels := make([]byte, 3*w*h)
		g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: info.Width,
			ResizeHeight: info.Height, WindowWidth: info.Width, WindowHeight: info.Height}
		if err := d.Decode(data, &g, pixels, 3*w); err != nil {
			if !errors.Is(err, imagecapi.CodeDecode) && !errors.Is(err, imagecapi.CodeUnsupported) &&
				!errors.Is(err, imagecapi.CodeInvalidArgument) {
				t.Fatal(err)
			}
			return
		}
		if w >= 8 && h >= 8 {
			orientation := int32(crc32.ChecksumIEEE(data) % 9)
			if err := checkPart(d, data, pixels, w, h, orientation); err != nil {
				t.Fatalf("orientation %d: %v, want no error", orientation, err)
			}
		}
	})
}

// TestLongSidesAreRefused: an image of one row with millions of pixels is refused before it is
// decoded.
func TestLongSidesAreRefused(t *testing.T) {
	header := func(width uint32) []byte {
		b := append([]byte("BM"), make([]byte, 60)...)
		le := binary.LittleEndian
		le.PutUint32(b[10:], 54+8)
		le.PutUint32(b[14:], 40)
		le.PutUint32(b[18:], width)
		le.PutUint32(b[22:], 1)
		le.PutUint16(b[26:], 1)
		le.PutUint16(b[28:], 1)
		le.PutUint32(b[46:], 2)
		return b
	}
	if _, err := codec.Header(header(raster.MaxSide)); err != nil {
		t.Error(err)
	}
	if _, err := codec.Header(header(raster.MaxSide + 1)); !errors.Is(err, imagecapi.CodeUnsupported) ||
		!strings.Contains(err.Error(), "a side") {
		t.Errorf("error %v, want the error %v with %q", err, imagecapi.CodeUnsupported, "a side")
	}
}
