//go:build linux && cgo

package main

import (
	"bytes"
	"image"
	"image/color"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/clitest"
)

// TestPreview checks that pictures of one colour are in the right places, with text below them.
func TestPreview(t *testing.T) {
	colors := map[string]color.RGBA{"blue": {0, 0, 200, 255}, "green": {0, 200, 0, 255}, "red": {200, 0, 0, 255}}
	files := map[string]string{"green/broken.png": "\x89PNG\r\n\x1a\nno picture"}
	for class, c := range colors {
		m := image.NewRGBA(image.Rect(0, 0, 50, 40))
		for i := range m.Pix {
			m.Pix[i] = []byte{c.R, c.G, c.B, 255}[i%4]
		}
		var b bytes.Buffer
		if err := png.Encode(&b, m); err != nil {
			t.Fatal(err)
		}
		files[class+"/picture.png"] = b.String()
	}
	out := filepath.Join(t.TempDir(), "sheet.png")
	status, stdout, stderr := command(t, "preview", "-archive", clitest.WriteTar(t, files), "-o", out,
		"-batch", "2", "-batches", "2", "-columns", "2", "-size", "64")
	if status != 0 || !strings.Contains(stdout, "3 samples in 2 batches, 3 classes") ||
		!strings.Contains(stdout, "1 bad") {
		t.Fatalf("status %d, %q, %q, want status 0, stdout with %q and %q",
			status, stdout, stderr, "3 samples in 2 batches, 3 classes", "1 bad")
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sheet, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := sheet.Bounds(), image.Rect(0, 0, 2*(64+sheetGap)+sheetGap,
		2*(sheetHeading+64+2*sheetLine+sheetGap)); got != want {
		t.Fatalf("the sheet is %v, want %v", got, want)
	}
	at := func(batch, column, x, y int) color.RGBA {
		r, g, b, a := sheet.At(sheetGap+column*(64+sheetGap)+x, batch*sheet.Bounds().Dy()/2+sheetHeading+y).RGBA()
		return color.RGBA{uint8(r >> 8), uint8(g >> 8), uint8(b >> 8), uint8(a >> 8)}
	}
	seen := map[color.RGBA]int{}
	for _, place := range [][2]int{{0, 0}, {0, 1}, {1, 0}} {
		c := at(place[0], place[1], 0, 0)
		if at(place[0], place[1], 63, 63) != c || at(place[0], place[1], 64, 0) != sheetPaper {
			t.Errorf("picture %v is not 64 x 64 of one colour", place)
		}
		seen[c]++
		written := 0
		for x := range 64 {
			for y := range 2 * sheetLine {
				if at(place[0], place[1], x, 64+y) != sheetPaper {
					written++
				}
			}
		}
		if written < 50 {
			t.Errorf("there is no writing under picture %v, written %v, want at least 50", place, written)
		}
	}
	for class, c := range colors {
		if seen[c] != 1 {
			t.Errorf("%s is %d times on the sheet, want 1", class, seen[c])
		}
	}
	if c := at(1, 1, 30, 30); c != sheetPaper {
		t.Errorf("the fourth place of the sheet is %v, want the paper %v", c, sheetPaper)
	}
}

func TestPreviewErrors(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		args   []string
		status int
		says   string
	}{
		{nil, 2, "-archive"},
		{[]string{"-archive", photos, "-batch", "0"}, 2, "-batch"},
		{[]string{"-archive", photos, "-epoch", "0"}, 2, "-epoch are more than 0"},
		{[]string{"-archive", photos, "-transform", "blur"}, 2, `no transform "blur"`},
		{[]string{"-archive", photos, "-policy", "blur"}, 2, `no policy "blur"`},
		{[]string{"-archive", photos, "-batch", "100000"}, 1, "larger than a viewer opens"},
		{[]string{"-archive", photos, "-size", "2305843009213693952"}, 2,
			"-size 2305843009213693952: must be from 1 to 28672"},
		{[]string{"-archive", photos, "-size", "28672"}, 1, "larger than a viewer opens"},
		{[]string{"-archive", filepath.Join(dir, "missing.tar")}, 1, "missing.tar"},
		{[]string{"-archive", photos, "-o", filepath.Join(dir, "no", "folder.png")}, 1, "folder.png"},
	} {
		if status, _, stderr := command(t, append([]string{"preview"}, c.args...)...); status != c.status ||
			!strings.Contains(stderr, c.says) {
			t.Errorf("preview %q: status %d, stderr %q, want status %v, stderr with %q",
				c.args, status, stderr, c.status, c.says)
		}
	}
	if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) > 0 {
		t.Errorf("files are left: %v, want none", left)
	}
}

// preview draws the images in the folder that train would choose. It prints the labels of mixed
// images and of images with several labels.
func TestPreviewDrawsWhatTrainTrains(t *testing.T) {
	out := filepath.Join(t.TempDir(), "sheet.png")
	archive := clitest.WriteTar(t, map[string]string{"train/cat/1.png": onePixel(t), "train/dog/2.png": onePixel(t),
		"test/cat/3.png": onePixel(t), "list.csv": "id,cat,dog\n1,1,1\n2,0,0\n"})
	for says, args := range map[string][]string{
		"training on train, evaluating on test\n" + out + ": 2 samples in": {"-mixup", "0.5"},
		": 2 samples in 1 batch, 2 classes":                                {"-list", "list.csv", "-multi-label"},
		"1 image without a row in":                                         {"-list", "list.csv", "-multi-label", "-cutmix", "1"},
	} {
		status, stdout, stderr := command(t, append([]string{"preview", "-archive", archive, "-o", out, "-size", "32"}, args...)...)
		if status != 0 || !strings.Contains(stdout, says) {
			t.Errorf("%q: got status %d, %s%s, want %q", args, status, stdout, stderr, says)
		}
	}
	classes := []string{"cat", "dog", "hen"}
	b := &imageloader.Batch{Labels: []int64{0, 1, 2}, Soft: []float32{0.75, 0, 0.25, 0, 0, 0, 1, 0, 1}}
	for i, want := range []string{"75% cat, 25% hen", "no label", "0 cat, 2 hen"} {
		if got := labelText(b, i, classes); got != want {
			t.Errorf("sample %d: got %q, want %q", i, got, want)
		}
	}
	b.Soft = nil
	if got := labelText(b, 2, classes); got != "2 hen" {
		t.Errorf("got %q, want %q", got, "2 hen")
	}
}

// -boxes draws the edges of each box in the colour of its label, inside of the picture.
func TestPreviewDrawsBoxes(t *testing.T) {
	var black bytes.Buffer
	if err := png.Encode(&black, image.NewGray(image.Rect(0, 0, 64, 64))); err != nil {
		t.Fatal(err)
	}
	archive := clitest.WriteTar(t, map[string]string{"i/1.png": black.String(), "i/2.png": black.String(),
		"l/1.txt": "0 0.5 0.5 0.5 0.25\n3 0.9375 0.9375 0.125 0.125\n", "l/2.txt": ""})
	out := filepath.Join(t.TempDir(), "sheet.png")
	status, stdout, stderr := command(t, "preview", "-archive", archive, "-boxes", "i/*.png,l/*.txt", "-o", out,
		"-transform", "eval", "-size", "64", "-columns", "2", "-val", "0")
	if status != 0 || !strings.HasSuffix(stdout, ": 2 samples in 1 batch\n") {
		t.Fatalf("status %d, %s%s, want 0 and 2 samples in 1 batch", status, stdout, stderr)
	}
	f, err := os.Open(out)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sheet, err := png.Decode(f)
	if err != nil {
		t.Fatal(err)
	}
	yellow, green, none := color.RGBA{255, 255, 0, 255}, color.RGBA{0, 255, 0, 255}, color.RGBA{0, 0, 0, 255}
	counts := map[int]int{} // pictures by their number of coloured pixels
	for column := range 2 {
		at := func(x, y int) color.Color {
			return color.RGBAModel.Convert(sheet.At(sheetGap+column*(64+sheetGap)+x, sheetHeading+y))
		}
		coloured := 0
		for y := range 64 {
			for x := range 64 {
				if at(x, y) != none {
					coloured++
				}
			}
		}
		if counts[coloured]++; coloured == 0 {
			continue
		}
		// The image is resized to 73 pixels, and cropped from pixel 4 on: the box is from (14.25,
		// 23.375) to (50.75, 41.625).
		const left, top, right, bottom = 14, 23, 50, 41
		for _, p := range []image.Point{{left, top}, {right, top}, {left, bottom}, {right, bottom}, {left + 1, bottom - 5}} {
			if got := at(p.X, p.Y); got != yellow {
				t.Errorf("%v on the first box is %v, want %v", p, got, yellow)
			}
		}
		for _, p := range []image.Point{{left - 1, top}, {right + 1, bottom}, {right - 4, bottom - 4}} {
			if got := at(p.X, p.Y); got != none {
				t.Errorf("%v is %v, want no box there", p, got)
			}
		}
		if got := at(63, 61); got != green {
			t.Errorf("the edge of the second box is %v, want %v", got, green)
		}
	}
	if len(counts) != 2 || counts[0] != 1 {
		t.Errorf("got pictures with %v coloured pixels, want one without", counts)
	}
	for says, boxes := range map[string]string{"with a comma": "i/*.png", "no image has a file of boxes by -boxes": "i/*,n/*"} {
		if status, _, stderr := command(t, "preview", "-archive", archive, "-o", out, "-boxes", boxes); status == 0 ||
			!strings.Contains(stderr, says) {
			t.Errorf("-boxes %s: got status %d, %s, want an error with %q", boxes, status, stderr, says)
		}
	}
}
