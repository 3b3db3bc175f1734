//go:build linux

package imageloader

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/indextest"
	"github.com/torchstream/torchstream/internal/safefile"
)

// TestIndexReplacesNoOtherFile: a file that is not an index is kept, as Options.IndexFile and in
// the archive's folder.
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
			t.Errorf("%d: %v, want an error with %q and %q", i, err, path, "remove it")
		}
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != string(photos) {
		t.Fatalf("reading the archive: %v, %d bytes, want no error and the %d bytes unchanged", err, len(now),
			len(photos))
	}

	// A user's file at the index's path stays, and the index is written to the cache folder.
	beside := path + indextest.Suffix
	if err := os.WriteFile(beside, []byte("notes"), 0o600); err != nil {
		t.Fatal(err)
	}
	report, err := MakeIndex(t.Context(), path, Options{}, nil)
	if err != nil || report.File == beside {
		t.Errorf("%+v, %v, want no error, report.File not %v", report, err, beside)
	}
	if now, err := os.ReadFile(beside); err != nil || string(now) != "notes" {
		t.Errorf("the file beside the archive holds %q, %v, want no error, now = %q", now, err, "notes")
	}
	// An index of the archive and an empty file are replaced.
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

// TestPipesNeverBlock: a pipe instead of a file never blocks. A pipe as the archive or as IndexFile
// is an error. A pipe at the index's path in the archive's folder is left alone. A pipe in a
// directory is a bad sample.
func TestPipesNeverBlock(t *testing.T) {
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	photos, err := os.ReadFile("../examples/data/photos-test.tgz")
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path, pipe := filepath.Join(dir, "photos.tgz"), filepath.Join(dir, "pipe.tgz")
	if err := os.WriteFile(path, photos, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{pipe, path + indextest.Suffix} {
		if err := syscall.Mkfifo(p, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	o := Options{Transform: Eval(16, 16), BatchSize: 16}
	within := func(what string, f func() error) error {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- f() }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			t.Fatal(what + " blocks")
			return nil
		}
	}
	epoch := func(l *Loader) func() error {
		return func() error {
			for _, err := range l.Epoch(t.Context(), 0) {
				if err != nil {
					return err
				}
			}
			return nil
		}
	}
	for what, f := range map[string]func() error{
		"Open":         func() error { _, err := Open(pipe, o); return err },
		"Inspect":      func() error { _, err := Inspect(t.Context(), pipe, o, nil); return err },
		"InspectIndex": func() error { _, err := InspectIndex(t.Context(), pipe, o, nil); return err },
		"MakeIndex":    func() error { _, err := MakeIndex(t.Context(), pipe, o, nil); return err },
	} {
		if err := within(what, f); !errors.Is(err, safefile.ErrNotRegular) || !strings.Contains(err.Error(), pipe) {
			t.Errorf("%s: %v, want the error %v with %q", what, err, safefile.ErrNotRegular, pipe)
		}
	}
	given := o
	given.IndexFile = pipe
	if err := within("IndexFile", func() error { _, err := Open(path, given); return err }); err == nil ||
		!strings.Contains(err.Error(), pipe) {
		t.Error(err)
	}
	err = within("a pipe as the index", func() error {
		l, err := Open(path, o)
		if err != nil {
			return err
		}
		defer l.Close()
		return epoch(l)()
	})
	if err != nil {
		t.Error(err)
	}
	if info, err := os.Lstat(path + indextest.Suffix); err != nil || info.Mode()&os.ModeNamedPipe == 0 {
		t.Errorf("the pipe is gone: %v", err)
	}

	tree := filepath.Join(dir, "tree", "class")
	if err := os.MkdirAll(tree, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(filepath.Join(tree, "a.jpg"), 0o600); err != nil {
		t.Fatal(err)
	}
	var l *Loader
	if err := within("a directory",
		func() (err error) { l, err = Open(filepath.Dir(tree), o); return err }); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var bad *SampleError
	if err := within("a pipe in a directory", epoch(l)); !errors.As(err, &bad) || bad.Reason != NotRegular {
		t.Error(err)
	}
	if err := os.Remove(filepath.Join(tree, "a.jpg")); err != nil {
		t.Fatal(err)
	}
	// A sample becomes a pipe after the directory has been read.
	member := filepath.Join(tree, "b.jpg")
	if err := os.WriteFile(member, []byte("\xff\xd8\xff a JPEG"), 0o600); err != nil {
		t.Fatal(err)
	}
	if l, err = Open(filepath.Dir(tree), o); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Remove(member); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Mkfifo(member, 0o600); err != nil {
		t.Fatal(err)
	}
	err = within("a member of a directory", epoch(l))
	if !errors.Is(err, safefile.ErrNotRegular) {
		t.Error(err)
	}
}
