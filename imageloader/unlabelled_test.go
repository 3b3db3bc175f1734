package imageloader

import (
	"archive/zip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// TestUnlabelledLoadsEveryImage: images in and outside of directories are samples. Hidden
// directories and other files are not.
func TestUnlabelledLoadsEveryImage(t *testing.T) {
	photo := string(archivetest.Photo(t, 1))
	members := []archivetest.Member{{Name: "a.jpg", Data: photo}, {Name: "note.txt", Data: "x"},
		{Name: "b/.trash/c.jpg", Data: photo}, {Name: "b/d.jpg", Data: photo}, {Name: "e", Data: photo}}
	want := []string{"a.jpg", "b/d.jpg", "e"}
	data := archivetest.Tar(t, members...)
	files := writeNamed(t, map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"a.zip": zipped(t, data, zip.Store)})
	for _, archive := range []string{files + "/a.tar", files + "/a.tgz", files + "/a.zip", archivetest.Extract(t, members)} {
		for _, noIndex := range []bool{true, false, false} { // the last pass reads the index
			o := Options{Unlabelled: true, NoIndex: noIndex, Transform: Eval(36, 32), Shuffle: true}
			l, err := Open(archive, o)
			if err != nil {
				t.Fatalf("%s: %v, want no error", archive, err)
			}
			batches, err := collect(t, l, 0, 1)
			if err != nil {
				t.Fatalf("%s: %v, want no error", archive, err)
			}
			got := slices.Sorted(slices.Values(names(batches)))
			if !slices.Equal(got, want) || !slices.Equal(batches[0].labels, []int64{0, 0, 0}) {
				t.Errorf("%s: samples %q with labels %v, want %q with 0", archive, got, batches[0].labels, want)
			}
			s := l.Stats()
			if l.Classes() != nil || l.ClassCounts() != nil || l.ListReport() != nil || s.Orphans != 0 {
				t.Errorf("%s: classes %v, counts %v, list %v, %d orphans, want none", archive, l.Classes(), l.ClassCounts(),
					l.ListReport(), s.Orphans)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
	l, err := Open(files+"/a.tar", Options{Unlabelled: true, Part: Part{Folder: "b"}})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Len() != 1 {
		t.Errorf("Part: %d samples, want 1", l.Len())
	}
}

// A Parquet file needs no column of labels, and null is no reason to leave a row out.
func TestUnlabelledParquetNeedsNoLabels(t *testing.T) {
	photo := string(archivetest.Photo(t, 1))
	rows := []parquettest.Row{{Path: "a.jpg", Image: photo, Label: -1}, {Path: "b.jpg", Image: photo, Label: 1}}
	data := parquettest.File(t, rows, parquettest.Layout{Label: "colour"})
	l, err := Open(archivetest.WriteFile(t, "a.parquet", data), Options{Unlabelled: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Len() != 2 || l.Format() != "parquet" {
		t.Errorf("%d samples of a %s, want 2 of a parquet", l.Len(), l.Format())
	}
}

// TestUnlabelledLoadsRowsWithHiddenPaths: paths in rows are not directories of the archive.
func TestUnlabelledLoadsRowsWithHiddenPaths(t *testing.T) {
	photo := string(archivetest.Photo(t, 1))
	want := []string{".a/b.jpg", "c.jpg", "home/u/.cache/d.jpg"}
	rows := []parquettest.Row{{Path: "/home/u/.cache/d.jpg", Image: photo}, {Path: "c.jpg", Image: photo},
		{Path: ".a/b.jpg", Image: photo}}
	file := archivetest.WriteFile(t, "a.parquet", parquettest.File(t, rows, parquettest.Layout{}))
	for _, pass := range []string{"that makes the index", "that reads the index"} {
		l, err := Open(file, Options{Unlabelled: true, Transform: Eval(36, 32)})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 1)
		if err != nil {
			t.Fatal(err)
		}
		if got := slices.Sorted(slices.Values(names(batches))); !slices.Equal(got, want) {
			t.Errorf("pass %s: samples %q, want %q", pass, got, want)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestUnlabelledContradictions(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "a.txt"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		o    Options
		want string
	}{
		{Options{List: "a.csv"}, "excludes Options.List"},
		{Options{WebDataset: true}, "excludes Options.WebDataset"},
		{Options{Classes: []string{"a"}}, "excludes Options.Classes"},
		{Options{Columns: Columns{Labels: []string{"a"}}}, "excludes Options.Columns.Labels"},
		{Options{Balanced: true}, "excludes Options.Balanced"},
		{Options{Masks: Masks{Image: "*.jpg", Mask: "*.png"}}, "excludes Options.Masks"},
		{Options{Boxes: Boxes{Image: "*.jpg", File: "*.txt"}}, "excludes Options.Boxes"},
		{Options{}, "none of its 1 member is an image"},
	} {
		c.o.Unlabelled = true
		if l, err := Open(folder, c.o); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%+v: got %v, %v, want an error with %q", c.o, l, err, c.want)
		}
	}
}
