package trace

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestFileNamesSelectTheFormat(t *testing.T) {
	if err := overlapping().WriteFile(filepath.Join(t.TempDir(), "timeline.pdf"),
		PictureOptions{}); err == nil || !strings.Contains(err.Error(), ".svg, .png or .json") {
		t.Error(err)
	}
	if err := overlapping().WriteFile(filepath.Join(t.TempDir(), "no", "timeline.svg"),
		PictureOptions{}); !errors.Is(err, os.ErrNotExist) {
		t.Error(err)
	}
}

// WriteFile replaces the output of an earlier run, but no other file.
func TestWriteFileReplacesOnlyItsOwnKind(t *testing.T) {
	for _, name := range []string{"a.svg", "a.png", "a.json"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), name)
			for range 2 {
				if err := overlapping().WriteFile(path, PictureOptions{}); err != nil {
					t.Error(err)
				}
			}
			const text = "{\"mine\": 1}"
			if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
				t.Fatal(err)
			}
			checked := Window{File: path}.Check()
			written := overlapping().WriteFile(path, PictureOptions{})
			for _, err := range []error{checked, written} {
				if err == nil || !strings.Contains(err.Error(), path) {
					t.Errorf("got %v, want an error that names the file", err)
				}
			}
			if now, err := os.ReadFile(path); err != nil || string(now) != text {
				t.Errorf("the file holds %q, %v, want %q, nil", now, err, text)
			}
		})
	}
}
