//go:build linux && cgo

package main

import (
	"encoding/json"
	"errors"
	"image"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/library"
)

func TestDoctor(t *testing.T) {
	if status, _, stderr := command(t, "doctor", "now"); status != 2 ||
		!strings.Contains(stderr, "doctor takes options only, and no argument: now") {
		t.Errorf("status %d, %s, want status 2, stderr with %q",
			status, stderr, "doctor takes options only, and no argument: now")
	}
	status, stdout, _ := command(t, "doctor", "-json")
	var report struct {
		Findings []finding
		Missing  int
	}
	if err := json.Unmarshal([]byte(stdout), &report); err != nil {
		t.Fatalf("%v in %q, want no error", err, stdout)
	}
	if status != 0 || report.Missing != 0 {
		t.Errorf("status %d, %d missing, on the machine that built this: %s, want status 0, "+
			"report.Missing = 0", status, report.Missing, stdout)
	}
	rows := map[string]finding{}
	for _, f := range report.Findings {
		rows[f.What] = f
	}
	for _, what := range []string{"shim", "LibTorch", "compute on cpu", "JPEG", "PNG"} {
		if rows[what].State != "ok" {
			t.Errorf("%s: %+v, want %q", what, rows[what], "ok")
		}
	}
	if cuda.DeviceCount() == 0 && rows["GPU"].State == "ok" {
		t.Errorf("there is no GPU, but the doctor says %+v", rows["GPU"])
	}
	if cuda.DeviceCount() > 0 && rows["compute on cuda:0"].State != "ok" {
		t.Errorf("there is a GPU, but the doctor says %+v", rows["compute on cuda:0"])
	}
	if _, stdout, _ := command(t, "doctor"); !strings.Contains(stdout, "All that is needed is here") {
		t.Errorf("doctor printed\n%s\nwant it with %q", stdout, "All that is needed is here")
	}
}

func TestDoctorFindsBrokenCodec(t *testing.T) {
	f := codec("JPEG", "test", func(w io.Writer, i image.Image) error {
		_, err := w.Write([]byte("\xff\xd8\xff no picture"))
		return err
	})
	if f.State != "missing" || f.ToDo == "" {
		t.Errorf("a codec that cannot decode is %+v, want f.State = %q, f.ToDo not \"\"", f, "missing")
	}
}

// If the shim and the image library are missing for the same reason, the doctor prints it once.
func TestDoctorPrintsAReasonOnce(t *testing.T) {
	missing := errors.New("there is no libtorchstream_image.so in any of\n  /a\n  /b\nrun `make`")
	report := []finding{shimNotLoaded(missing, missing), notLoaded("image library", missing)}
	var out strings.Builder
	if n, err := printFindings(&out, report, false); n != 2 || err != nil {
		t.Errorf("got %d missing, %v, want 2 and no error", n, err)
	}
	const want = "missing  shim           not loaded: it needs the image library, which is missing\n" +
		"missing  image library  there is no libtorchstream_image.so in any of\n" +
		"                           /a\n                           /b\n" +
		"                        -> run `make`\n\nMissing: 2.\n"
	if out.String() != want {
		t.Errorf("got\n%s\nwant\n%s", &out, want)
	}
	if f := shimNotLoaded(missing, nil); f.ToDo != "run `make`" {
		t.Errorf("got %+v, want the reason why the shim is not loaded", f)
	}
}

// The doctor names the missing library on one line and the library's advice on another.
func TestDoctorSaysWhatToDoAboutALibrary(t *testing.T) {
	f := notLoaded("shim", errors.New("there is no x.so in any of\n  /a (the clone)\n  /b (the cache)\nrun `make`"))
	if want := (finding{"missing", "shim", "there is no x.so in any of\n/a (the clone)\n/b (the cache)",
		"run `make`"}); f != want {
		t.Errorf("%+v, want %v", f, want)
	}
	if f := notLoaded("shim", errors.New("it is old: run `make`")); f.Found != "it is old: run `make`" || f.ToDo != "" {
		t.Errorf("%+v, want f.Found = %q, f.ToDo = \"\"", f, "it is old: run `make`")
	}
}

// The doctor says which LibTorch is in use if LIBTORCH names another one. LIBTORCH may name
// LibTorch's folder, the parent of a folder torch, or a link.
func TestDoctorNamesAnIgnoredLibTorch(t *testing.T) {
	used := library.Mapped()["libtorch_cpu.so"]
	torch := filepath.Dir(filepath.Dir(used))
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(torch, link); err != nil {
		t.Fatal(err)
	}
	for given, ignored := range map[string]bool{"": false, torch: false,
		filepath.Dir(torch): filepath.Base(torch) != "torch", link: false, t.TempDir(): true, "/nowhere": true} {
		t.Setenv("LIBTORCH", given)
		status, stdout, _ := command(t, "doctor", "-json")
		var report struct{ Findings []finding }
		if err := json.Unmarshal([]byte(stdout), &report); status != 0 || err != nil {
			t.Fatalf("status %d, %v in %q, want status 0, no error", status, err, stdout)
		}
		at := slices.IndexFunc(report.Findings, func(f finding) bool { return f.What == "LIBTORCH" })
		if (at >= 0) != ignored {
			t.Errorf("LIBTORCH=%s: %s", given, stdout)
		} else if ignored && (report.Findings[at].Found != used+" is used instead of "+given ||
			report.Findings[at].ToDo == "") {
			t.Errorf("LIBTORCH=%s: %+v", given, report.Findings[at])
		}
	}
}
