// Package clitest holds helpers for tests of this project's programs: it runs the program as a
// process, and writes small archives.
package clitest

import (
	"archive/tar"
	"bytes"
	"context"
	"image"
	"image/color"
	"image/png"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// patience ends a process that hangs.
const patience = 4 * time.Minute

const variable = "TORCHSTREAM_TEST_ARGS"

// Main runs the tests, or, in a process that [Process] starts, main with its arguments. It returns
// the exit status.
func Main(m *testing.M, main func()) int {
	if args := os.Getenv(variable); args != "" {
		os.Args = append(os.Args[:1], strings.Split(args, "\n")...)
		main()
	}
	return m.Run()
}

// Process returns a command that runs the program under test as a separate process, and the buffer
// of its standard error. The process is killed if it hangs.
func Process(t *testing.T, args ...string) (*exec.Cmd, *bytes.Buffer) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	t.Cleanup(cancel)
	command := exec.CommandContext(ctx, os.Args[0])
	command.Env = append(os.Environ(), variable+"="+strings.Join(args, "\n"), "XDG_CACHE_HOME="+t.TempDir())
	var stderr bytes.Buffer
	command.Stderr = &stderr
	return command, &stderr
}

// WriteTar writes a .tar with the files, in the order of their names, and returns its path.
func WriteTar(t *testing.T, files map[string]string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "test.tar")
	var data bytes.Buffer
	w := tar.NewWriter(&data)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := w.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o644}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(files[name])); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// FewPhotos writes a .tar with the given number of images of each class, and returns its path.
func FewPhotos(t *testing.T, counts map[string]int) string {
	t.Helper()
	files := map[string]string{}
	for class, count := range counts {
		for n := range count {
			img := image.NewGray(image.Rect(0, 0, 8, 8))
			for i := range 64 {
				img.SetGray(i%8, i/8, color.Gray{uint8(i * (n + len(class)))})
			}
			var file bytes.Buffer
			if err := png.Encode(&file, img); err != nil {
				t.Fatal(err)
			}
			files[class+"/"+string(rune('a'+n))+".png"] = file.String()
		}
	}
	return WriteTar(t, files)
}
