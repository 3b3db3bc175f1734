//go:build linux && cgo

package main

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// breeds writes a Parquet file of 12 images in two classes. The name of its column of labels is
// breed, and nothing else describes that column.
func breeds(t *testing.T) string {
	t.Helper()
	var rows []parquettest.Row
	for i := range 12 {
		rows = append(rows, parquettest.Row{Path: fmt.Sprintf("%d.png", i), Image: onePixel(t), Label: i % 2})
	}
	path := filepath.Join(t.TempDir(), "breeds.parquet")
	writeFile(t, path, string(parquettest.File(t, rows, parquettest.Layout{Label: "breed"})))
	return path
}

// TestInspectOfParquetWithoutImages: the classes have names, but the rows have only paths, as
// datasets writes the images of files.
func TestInspectOfParquetWithoutImages(t *testing.T) {
	var out strings.Builder
	r := inspection{File: "a.parquet", Format: imageloader.FormatParquet, Ignored: 2,
		Classes: []inspectedClass{{Name: "cat"}, {Name: "owl", Label: 1}}}
	if err := r.print(&out, 10, false, false); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0 in 2 classes", "ignored  2 rows without the bytes of an image", "no samples: " + noImages} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("got\n%s\nwant it to contain %q", out.String(), want)
		}
	}
}

// Every command that reads labels takes them from the column that -label-column names.
func TestCommandsTakeLabelColumnOfParquet(t *testing.T) {
	archive, out := breeds(t), filepath.Join(t.TempDir(), "out")
	trained := filepath.Join(out, "best.pt")
	train := "train -size 32 -batch 4 -epochs 1 -model mobilenet_v3_small -device cpu -archive " + archive
	for _, c := range []struct{ line, want string }{
		{train + " -o " + out, "12 images in 2 classes"},
		{train + " -val 0.3 -o " + t.TempDir() + "/val", " held-back image"},
		{train + " -test " + breeds(t) + " -o " + t.TempDir() + "/test", "of 12 held-back images"},
		{"preview -batch 4 -size 64 -archive " + archive + " -o " + t.TempDir() + "/sheet.png", ", 2 classes"},
		{"inspect " + archive, "12 in 2 classes"},
		{"index " + archive, "12 samples"},
		{"pack -archive " + archive + " -o " + t.TempDir() + "/shards", "12 samples in 2 classes"},
		{"bench loader -batch 4 -epochs 1 -archive " + archive, "12 samples of 2 classes"},
		{"evaluate -device cpu -json -archive " + archive + " -checkpoint " + trained, `"images":12`},
		{"embed -device cpu -archive " + archive + " -model " + trained + " -o " + t.TempDir() + "/v.npy", "12 "},
	} {
		name, rest, _ := strings.Cut(c.line, " ")
		if name == "bench" {
			name, rest = "bench loader", strings.TrimPrefix(rest, "loader ")
		}
		for _, column := range []struct {
			option, want string
			status       int
		}{
			{"", "no column with the name label", 1},
			{"-label-column colour", `no column of labels with the name "colour"`, 1},
			{"-label-column breed", c.want, 0},
		} {
			if name == "embed" && column.option == "" {
				continue // vectors need no labels
			}
			line := strings.Join([]string{name, column.option, rest}, " ")
			status, stdout, stderr := command(t, strings.Fields(line)...)
			if status != column.status || !strings.Contains(stdout+stderr, column.want) {
				t.Errorf("%s: got status %d, %s%s, want %d and %q", line, status, stdout, stderr, column.status, column.want)
			}
		}
	}
}

// inspect of a folder of Parquet files names the command for the files of the training set.
func TestInspectOfParquetFolderNamesTheCommand(t *testing.T) {
	folder := t.TempDir()
	rows := []parquettest.Row{{Path: "0.png", Image: onePixel(t), Label: 0}, {Path: "1.png", Image: onePixel(t), Label: 1}}
	if err := os.Mkdir(filepath.Join(folder, "data"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"test-00000-of-00001", "train-00000-of-00002", "train-00001-of-00002"} {
		writeFile(t, filepath.Join(folder, "data", name+".parquet"), string(parquettest.File(t, rows, parquettest.Layout{})))
	}
	pattern := filepath.Join(folder, "data", "train-*.parquet")
	status, stdout, _ := command(t, "inspect", folder)
	if want := "\n    torchstream inspect '" + pattern + "'\n"; status != 1 || !strings.Contains(stdout, want) {
		t.Errorf("got status %d, %s, want 1 and %q", status, stdout, want)
	}
	if status, stdout, stderr := command(t, "inspect", pattern); status != 0 || !strings.Contains(stdout, "4 in 2 classes") {
		t.Errorf("%s: got status %d, %s%s, want 0 and 4 in 2 classes", pattern, status, stdout, stderr)
	}
	if _, stdout, _ := command(t, "inspect", "-json", folder); !strings.Contains(stdout, `"instead":"`+pattern+`"`) {
		t.Errorf("-json: got %s, want the field instead with %s", stdout, pattern)
	}
}
