package imageloader

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestIndexReplacesNoOtherFile: neither as Options.IndexFile nor beside the archive.
func TestIndexReplacesNoOtherFile(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	photos, err := os.ReadFile("../examples/data/photos-test.tgz")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "photos.tgz")
	if err := os.WriteFile(path, photos, 0o600); err != nil {
		t.Fatal(err)
	}
	o := Options{Transform: Eval(16, 16), IndexFile: path}
	_, opened := Open(path, o)
	_, made := MakeIndex(t.Context(), path, o, nil)
	_, inspected := InspectIndex(t.Context(), path, o, nil)
	for i, err := range []error{opened, made, inspected} {
		if err == nil || !strings.Contains(err.Error(), path) || !strings.Contains(err.Error(), "remove it") {
			t.Errorf("%d: %v", i, err)
		}
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != string(photos) {
		t.Fatalf("the archive is gone: %v", err)
	}

	// A file of the user's own where the index would be: it stays, and the index goes to the cache folder.
	beside := path + sidecarSuffix
	if err := os.WriteFile(beside, []byte("notes"), 0o600); err != nil {
		t.Fatal(err)
	}
	report, err := MakeIndex(t.Context(), path, Options{}, nil)
	if err != nil || report.File == beside {
		t.Errorf("%+v, %v", report, err)
	}
	if now, err := os.ReadFile(beside); err != nil || string(now) != "notes" {
		t.Errorf("the file beside the archive holds %q, %v", now, err)
	}
	// An index of the archive is replaced, and so is an empty file.
	for range 2 {
		o.IndexFile = filepath.Join(t.TempDir(), "index")
		if err := os.WriteFile(o.IndexFile, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		for range 2 {
			if _, err := MakeIndex(t.Context(), path, o, nil); err != nil {
				t.Error(err)
			}
		}
	}
}
