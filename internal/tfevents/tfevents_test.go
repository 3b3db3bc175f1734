package tfevents

import (
	"bytes"
	"errors"
	"math"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// The bytes equal the output of TensorBoard's own writer.
func TestBytesEqualTensorBoards(t *testing.T) {
	want, err := os.ReadFile("testdata/events.bin")
	if err != nil {
		t.Fatal(err)
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "events"))
	if err != nil {
		t.Fatal(err)
	}
	w := &Writer{f, func() time.Time { return time.UnixMilli(1700000000250) }}
	if err := w.begin(200); err != nil {
		t.Fatal(err)
	}
	if err := w.Write(1, Scalar{"loss/train", 2.5}, Scalar{"lr", 1e-3}); err != nil {
		t.Fatal(err)
	}
	if err := w.Write(300, Scalar{"loss/train", math.NaN()}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	got, err := os.ReadFile(f.Name())
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("%v\n%x\nwant\n%x", err, got, want)
	}
}

// Each call creates a new file in the folder. It starts with the version and the session start.
func TestCreate(t *testing.T) {
	dir := t.TempDir()
	for range 2 {
		w, err := Create(dir, 1)
		if err != nil {
			t.Fatal(err)
		}
		if err := w.Write(1, Scalar{"a", 1}); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
	}
	files, err := os.ReadDir(dir)
	if err != nil || len(files) != 2 {
		t.Fatalf("%v, %v, want length 2, nil", files, err)
	}
	for _, f := range files {
		text, err := os.ReadFile(filepath.Join(dir, f.Name()))
		if err != nil || !strings.HasPrefix(f.Name(), "events.out.tfevents.") ||
			!bytes.Contains(text, []byte("brain.Event:2")) || !bytes.Contains(text, []byte("\x10\x01:\x02\x08\x01")) {
			t.Errorf("%s: %q, %v", f.Name(), text, err)
		}
	}
	if _, err := Create(filepath.Join(dir, "none"), 1); err == nil {
		t.Error("Create in a missing folder: got no error, want one")
	}
}

// A full disk is an error of the call that could not write, and of Create.
func TestFullDiskIsAnError(t *testing.T) {
	full := func() *Writer {
		f, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
		if err != nil {
			t.Skip("no /dev/full: ", err)
		}
		t.Cleanup(func() { f.Close() }) // may be closed already
		return &Writer{f, time.Now}
	}
	w := full()
	for name, err := range map[string]error{"Write": w.Write(1, Scalar{"a", 1}), "begin": w.begin(1)} {
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("%s: got error %v, want ENOSPC", name, err)
		}
	}
	w = full()
	if got, err := start(w.file, 1); got != nil || !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("start: got %v, error %v, want no writer and ENOSPC", got, err)
	}
	if err := w.file.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("after start has failed, Close of its file: got error %v, want os.ErrClosed", err)
	}
}

// If the file cannot be synced, Close says so and still closes it. A pipe cannot be synced.
func TestCloseReportsAFailedSync(t *testing.T) {
	r, f, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	w := &Writer{f, time.Now}
	if err := w.Close(); !errors.Is(err, syscall.EINVAL) {
		t.Errorf("Close: got error %v, want EINVAL", err)
	}
	if err := f.Close(); !errors.Is(err, os.ErrClosed) {
		t.Errorf("the file after Close: got error %v from its Close, want os.ErrClosed", err)
	}
}
