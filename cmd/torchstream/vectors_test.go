//go:build linux && cgo

package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader"
)

// A batch with a name of two lines adds neither rows nor names to the files.
func TestNameWithLineBreakAddsNothing(t *testing.T) {
	folder := t.TempDir()
	f, err := openVectors(filepath.Join(folder, "v.npy"), filepath.Join(folder, "v.txt"), nil, nil,
		map[string]string{"a": "b"})
	if err != nil {
		t.Fatal(err)
	}
	defer f.close()
	err = f.append(make([]byte, 16), []imageloader.Sample{{Name: "a.jpg"}, {Name: "b\nc.jpg"}})
	if err == nil || !strings.Contains(err.Error(), "more than one line") {
		t.Errorf("got %v, want an error about the name of two lines", err)
	}
	if err := f.append(make([]byte, 8), []imageloader.Sample{{Name: "d.jpg"}}); err != nil {
		t.Fatal(err)
	}
	if err := f.finish(); err != nil {
		t.Fatal(err)
	}
	vectors, err := os.ReadFile(f.out)
	if err != nil || len(vectors) != npyHead+8 {
		t.Errorf("got %d bytes of vectors, %v, want the header's %d and 8 of a row", len(vectors), err, npyHead)
	}
	if names, err := os.ReadFile(f.names); err != nil || string(names) != "d.jpg\n" {
		t.Errorf("got the names %q, %v, want \"d.jpg\\n\"", names, err)
	}
}

// A complete journal without its files is an error and remains.
func TestMissingCompleteFileIsAnError(t *testing.T) {
	folder := t.TempDir()
	f := &vectorFile{out: filepath.Join(folder, "v.npy"), names: filepath.Join(folder, "v.txt")}
	writeFile(t, f.journalPath(), "{}")
	writeFile(t, f.names+part, "a.jpg\n")
	if err := f.rename(); err == nil || !strings.Contains(err.Error(), "v.npy is missing") {
		t.Errorf("got %v, want an error about v.npy", err)
	}
	if !fileExists(f.journalPath()) {
		t.Error("the journal is removed, want it to remain")
	}
}
