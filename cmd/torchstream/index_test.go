//go:build linux && cgo

package main

import (
	"bytes"
	"encoding/json"
	"image"
	"image/png"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/clitest"
)

func TestIndexIsWrittenNextToTheArchive(t *testing.T) {
	archive := clitest.WriteTar(t, map[string]string{"a/1.png": "\x89PNG\r\n\x1a\nx", "b/2.png": "\x89PNG\r\n\x1a\ny"})
	status, stdout, stderr := command(t, "index", archive)
	if status != 0 || !strings.Contains(stdout, archive+".tsidx") ||
		!strings.Contains(stdout, "2 samples of 2 classes") || !strings.Contains(stdout, "any order") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q and %q and %q",
			status, stdout, stderr, archive+".tsidx", "2 samples of 2 classes", "any order")
	}
	if _, err := os.Stat(archive + ".tsidx"); err != nil {
		t.Error(err)
	}
}

func TestIndexIsWrittenToTheOutput(t *testing.T) {
	archive := clitest.WriteTar(t, map[string]string{"a/1.png": "\x89PNG\r\n\x1a\nx", "b/2.png": "\x89PNG\r\n\x1a\ny"})
	status, stdout, stderr := command(t, "index", "-json", "-o", archive+".other", archive)
	var r indexResult
	if err := json.Unmarshal([]byte(stdout), &r); err != nil || status != 0 ||
		r.Index != archive+".other" || r.Samples != 2 || !r.Random || r.IndexBytes == 0 {
		t.Errorf("status %d, %q, %q, %v", status, stdout, stderr, err)
	}
}

// inspect -index accepts an index with WebDataset labels only with -webdataset. Without that option
// it fails and keeps the index.
func TestIndexOfWebDataset(t *testing.T) {
	web := clitest.WriteTar(t, map[string]string{"s/1.png": "\x89PNG\r\n\x1a\nx", "s/1.cls": "cat",
		"s/2.png": "\x89PNG\r\n\x1a\ny", "s/2.cls": "dog"})
	status, stdout, stderr := command(t, "index", "-webdataset", web)
	if status != 0 || !strings.Contains(stdout, "2 samples of 2 classes") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q",
			status, stdout, stderr, "2 samples of 2 classes")
	}
	made, err := os.ReadFile(web + ".tsidx")
	if err != nil {
		t.Fatal(err)
	}
	_, stdout, stderr = command(t, "inspect", "-index", "-webdataset", web)
	if now, err := os.ReadFile(web + ".tsidx"); err != nil || string(now) != string(made) ||
		!strings.Contains(stdout, "cat") || !strings.Contains(stdout, "dog") {
		t.Errorf("stdout %q, stderr %q, index %v, want %q and %q in stdout and the same index",
			stdout, stderr, err, "cat", "dog")
	}
	status, _, stderr = command(t, "inspect", "-index", web)
	if now, err := os.ReadFile(web + ".tsidx"); err != nil || string(now) != string(made) || status == 0 ||
		!strings.Contains(stderr, "the labels of -webdataset") {
		want := "the labels of -webdataset"
		t.Errorf("status %d, stderr %q, index %v, want a status over 0, %q and the same index",
			status, stderr, err, want)
	}
	if _, stdout, stderr = command(t, "inspect", "-webdataset", web); !strings.Contains(stdout,
		"2 in 2 classes, 2 bad") || !strings.Contains(stdout, "dog") {
		t.Errorf("%q, %q, want stdout with %q and %q", stdout, stderr, "2 in 2 classes, 2 bad", "dog")
	}
}

// Loaders with Options.Masks use the index that -masks makes.
func TestIndexOfMasks(t *testing.T) {
	png := "\x89PNG\r\n\x1a\n"
	archive := clitest.WriteTar(t, map[string]string{"i/1.png": png, "m/1.png": png, "i/2.png": png,
		"notes.txt": "text"})
	status, stdout, stderr := command(t, "index", "-masks", "i/*.png,m/*.png", archive)
	if status != 0 || !strings.Contains(stdout, "1 sample of 0 classes") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q",
			status, stdout, stderr, "1 sample of 0 classes")
	}
	made, err := os.ReadFile(archive + ".tsidx")
	if err != nil {
		t.Fatal(err)
	}
	l, err := imageloader.Open(archive, imageloader.Options{Masks: imageloader.Masks{Image: "i/*.*", Mask: "m/*.*"}})
	if err != nil {
		t.Fatal(err)
	}
	if l.Len() != 1 || l.Close() != nil {
		t.Errorf("%d samples", l.Len())
	}
	if now, err := os.ReadFile(archive + ".tsidx"); err != nil || string(now) != string(made) {
		t.Errorf("reading the index: %v, %d bytes, want no error and the %d bytes unchanged", err, len(now),
			len(made))
	}
	for says, pattern := range map[string]string{"with a comma": "i/*.png", "needs one": "i,m/*",
		"no image has a mask": "i/*,n/*"} {
		if status, _, stderr := command(t, "index", "-masks", pattern, archive); status == 0 ||
			!strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %q, want status not 0, stderr with %q", pattern, status, stderr, says)
		}
	}
}

// Loaders with Options.Boxes use the index that -boxes makes.
func TestIndexOfBoxes(t *testing.T) {
	archive := clitest.WriteTar(t, map[string]string{"i/1.png": "\x89PNG\r\n\x1a\n", "l/1.txt": "0 .5 .5 .1 .1",
		"notes.txt": "text"})
	status, stdout, stderr := command(t, "index", "-boxes", "i/*.png,l/*.txt", archive)
	if status != 0 || !strings.Contains(stdout, "1 sample of 0 classes") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q", status, stdout, stderr, "1 sample of 0 classes")
	}
	made, err := os.ReadFile(archive + ".tsidx")
	if err != nil {
		t.Fatal(err)
	}
	l, err := imageloader.Open(archive, imageloader.Options{Boxes: imageloader.Boxes{Image: "i/*.*", File: "l/*.*"}})
	if err != nil {
		t.Fatal(err)
	}
	if l.Len() != 1 || l.Close() != nil {
		t.Errorf("%d samples, want 1", l.Len())
	}
	if now, err := os.ReadFile(archive + ".tsidx"); err != nil || string(now) != string(made) {
		t.Errorf("reading the index: %v, %d bytes, want no error and the %d bytes unchanged", err, len(now), len(made))
	}
	coco := filepath.Join(t.TempDir(), "coco.json")
	if err := os.WriteFile(coco, []byte(`{"images": [{"id": 1, "file_name": "1.png"}], "annotations": []}`), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, stdout, stderr := command(t, "index", "-boxes", coco, archive); status != 0 ||
		!strings.Contains(stdout, "1 sample of 0 classes") {
		t.Errorf("one file: status %d, %q, %q, want status 0, stdout with %q", status, stdout, stderr, "1 sample")
	}
	for says, pattern := range map[string]string{"with a comma": "i/*.png", "needs one": "i,l/*",
		"no image has a file of boxes": "i/*,n/*", "none.json": "none.json"} {
		if status, _, stderr := command(t, "index", "-boxes", pattern, archive); status == 0 ||
			!strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %q, want status not 0, stderr with %q", pattern, status, stderr, says)
		}
	}
}

func TestIndexErrors(t *testing.T) {
	for says, path := range map[string]string{
		"no such file":   filepath.Join(t.TempDir(), "none.tar"),
		"needs no index": t.TempDir(),
	} {
		t.Run(says, func(t *testing.T) {
			if status, _, stderr := command(t, "index", path); status != 1 || !strings.Contains(stderr, says) {
				t.Errorf("status %d, %q, want status 1, stderr with %q", status, stderr, says)
			}
		})
	}
}

// TestOutputsReplaceOnlyTheirOwnKind names the archive itself, or another kind of file, as an
// output. The file must survive.
func TestOutputsReplaceOnlyTheirOwnKind(t *testing.T) {
	photo, err := os.ReadFile(photos)
	if err != nil {
		t.Fatal(err)
	}
	archive := filepath.Join(t.TempDir(), "photos.tgz")
	if err := os.WriteFile(archive, photo, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{
		{"index", "-o", archive, archive},
		{"preview", "-archive", archive, "-size", "16", "-o", archive},
		{"bench", "loader", "-archive", archive, "-contract", "eval", "-size", "16", "-images", "2",
			"-no-index", "-outputs", archive},
	} {
		status, stdout, stderr := command(t, args...)
		if status != 1 || !strings.Contains(stderr, archive+" is a file of another kind") || stdout != "" {
			t.Errorf("%q: status %d, %q, %q, want status 1, stderr with %q, stdout \"\"",
				args, status, stdout, stderr, archive+" is a file of another kind")
		}
		if now, err := os.ReadFile(archive); err != nil || string(now) != string(photo) {
			t.Fatalf("%q: reading the archive: %v, %d bytes, want no error and the %d bytes unchanged",
				args, err, len(now), len(photo))
		}
	}
	// The output of an earlier run and an empty file are replaced.
	other := filepath.Join(t.TempDir(), "output")
	for _, args := range [][]string{
		{"index", "-o", other, archive},
		{"preview", "-archive", archive, "-size", "16", "-o", other},
	} {
		if err := os.WriteFile(other, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if status, _, stderr := command(t, args...); status != 0 {
				t.Errorf("%q: status %d, %q, want 0", args, status, stderr)
			}
		}
	}
}

// TestIndexOfList checks that the index has no labels and that inspect takes them from the list.
func TestIndexOfList(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"1.png": "\x89PNG\r\n\x1a\nx", "2.png": "\x89PNG\r\n\x1a\ny"})
	list := filepath.Join(t.TempDir(), "labels.csv")
	if err := os.WriteFile(list, []byte("path,label\n1.png,cat\n2.png,dog\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, stdout, stderr := command(t, "index", "-list", list, path); status != 0 ||
		!strings.Contains(stdout, "2 samples of 2 classes") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q",
			status, stdout, stderr, "2 samples of 2 classes")
	}
	if _, stdout, stderr := command(t, "inspect", "-index", "-list", list, path); !strings.Contains(stdout,
		"2 in 2 classes") || !strings.Contains(stdout, "dog") {
		t.Errorf("%q, %q, want stdout with %q and %q", stdout, stderr, "2 in 2 classes", "dog")
	}
	if _, stdout, stderr := command(t, "inspect", "-list", list, path); !strings.Contains(stdout,
		"2 in 2 classes, 2 bad") || !strings.Contains(stdout, "dog") {
		t.Errorf("%q, %q, want stdout with %q and %q", stdout, stderr, "2 in 2 classes, 2 bad", "dog")
	}
	good := clitest.WriteTar(t, map[string]string{"1.png": onePixel(t), "a/2.png": onePixel(t), "a/3.png": onePixel(t)})
	if err := os.WriteFile(list, []byte("1.png,cat\na/2.png,dog\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if status, stdout, stderr := command(t, "preview", "-archive", good, "-list", list, "-size", "16", "-o",
		list+".png"); status != 0 || !strings.Contains(stdout, "2 samples in 1 batch, 2 classes") {
		t.Errorf("status %d, %q, %q, want status 0, stdout with %q",
			status, stdout, stderr, "2 samples in 1 batch, 2 classes")
	}
	if status, _, stderr := command(t, "inspect", "-fix", list+".tar", "-list", list, path); status != 2 ||
		!strings.Contains(stderr, "-fix takes no -list") {
		t.Errorf("status %d, %q, want status 2, stderr with %q", status, stderr, "-fix takes no -list")
	}
}

// The index of a command with -list does not stop later commands without it, and vice versa: the
// index is made again. inspect -index, which only reads, says what to do.
func TestIndexOfOtherLabelsIsMadeAgain(t *testing.T) {
	path := clitest.WriteTar(t, map[string]string{"a/1.png": onePixel(t), "b/2.png": onePixel(t)})
	list := filepath.Join(t.TempDir(), "labels.csv")
	writeFile(t, list, "a/1.png,cat\nb/2.png,cat\n")
	out := filepath.Join(t.TempDir(), "sheet.png")
	for _, c := range []struct {
		labels []string
		says   string
	}{
		{[]string{"-list", list}, "2 samples in 1 batch, 1 class"},
		{nil, "2 samples in 1 batch, 2 classes"},
		{[]string{"-list", list}, "2 samples in 1 batch, 1 class"},
	} {
		args := append([]string{"preview", "-archive", path, "-size", "16", "-o", out}, c.labels...)
		status, stdout, stderr := command(t, args...)
		if status != 0 || !strings.Contains(stdout, c.says) {
			t.Errorf("%q: status %d, %s%s, want 0 and %q", args, status, stdout, stderr, c.says)
		}
	}
	for _, want := range []string{"the index is one of -list or -boxes, without labels", "torchstream index replaces the index"} {
		if status, _, stderr := command(t, "inspect", "-index", path); status != 1 || !strings.Contains(stderr, want) {
			t.Errorf("inspect -index: status %d, %s, want 1 and %q", status, stderr, want)
		}
	}
	if status, _, stderr := command(t, "index", path); status != 0 {
		t.Fatalf("index: status %d, %s, want 0", status, stderr)
	}
	if status, stdout, stderr := command(t, "inspect", "-index", path); status != 0 ||
		!strings.Contains(stdout, "2 in 2 classes") {
		t.Errorf("inspect -index: status %d, %s%s, want 0 and %q", status, stdout, stderr, "2 in 2 classes")
	}
}

func onePixel(t *testing.T) string {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, image.NewGray(image.Rect(0, 0, 1, 1))); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestInspectNamesImagesWithoutLabels covers text and JSON output, from decoded images and from the
// index.
func TestInspectNamesImagesWithoutLabels(t *testing.T) {
	web := clitest.WriteTar(t, map[string]string{"s/1.png": "\x89PNG\r\n\x1a\nx", "s/1.cls": "cat",
		"s/2.png": "\x89PNG\r\n\x1a\ny", "s/2.json": "{}"})
	for _, args := range [][]string{{"inspect", "-webdataset", web}, {"inspect", "-webdataset", "-index", web}} {
		_, stdout, _ := command(t, args...)
		if !strings.Contains(stdout,
			"images without a label: 1\ns/2.png  its .json has none of the fields label, cls and class\n") {
			t.Errorf("%q: %s, want s/2.png with its reason", args, stdout)
		}
		_, stdout, stderr := command(t, append([]string{"inspect", "-json"}, args[1:]...)...)
		var r inspection
		want := orphanImage{"s/2.png", "its .json has none of the fields label, cls and class"}
		if err := json.Unmarshal([]byte(stdout), &r); err != nil || r.Orphans != 1 ||
			len(r.OrphansNamed) != 1 || r.OrphansNamed[0] != want {
			t.Errorf("%q: %d, %q, error %v, %s, want %q", args, r.Orphans, r.OrphansNamed, err, stderr, want)
		}
	}
}
