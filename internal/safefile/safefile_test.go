//go:build linux

package safefile

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func fifo(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// within returns the error of f. It fails the test if f blocks for 30 seconds.
func within(t *testing.T, f func() error) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
		t.Fatal("the call has not returned after 30 s, want it not to block")
		return nil
	}
}

func TestOpenRefusesIrregularFiles(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{fifo(t), "/dev/null", dir} {
		err := within(t, func() error { _, err := Open(path); return err })
		if !errors.Is(err, ErrNotRegular) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	f, err := OpenTree(dir)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
	if err := within(t, func() error { _, err := OpenTree(fifo(t)); return err }); !errors.Is(err, ErrNotRegular) {
		t.Error(err)
	}
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, os.ErrNotExist) ||
		strings.Count(err.Error(), "none") != 1 {
		t.Error(err)
	}
	if data, err := ReadFile(write(t, "a", "text")); err != nil || string(data) != "text" {
		t.Errorf("%q, %v, want \"text\", nil", data, err)
	}
}

// zipHead returns the start of a zip archive whose first member has the given name.
func zipHead(name string) string {
	return "PK\x03\x04" + strings.Repeat("\x00",
		22) + string([]byte{byte(len(name)), byte(len(name) >> 8)}) + "\x00\x00" + name + "content"
}

func TestOutputReplacesOnlyItsOwnKind(t *testing.T) {
	png := "\x89PNG\r\n\x1a\n and so on"
	for _, c := range []struct {
		name, text string
		kind       Kind
		ok         bool
	}{
		{"empty", "", Raw, true},
		{"png", png, PNG, true},
		{"png", png, Safetensors, false},
		{"png", png, Raw, false},
		{"text", "text", PNG, false},
		{"gzip", "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03", Safetensors, false},
		{"tensors", "\x02\x00\x00\x00\x00\x00\x00\x00{}", Safetensors, true},
		{"short", "\x02\x00\x00\x00\x00\x00\x00\x00", Safetensors, false},
		{"pt", zipHead("net/data.pkl"), PyTorch, true},
		{"long pt", zipHead(strings.Repeat("n", 300) + "/data.pkl"), PyTorch, true},
		{"pt", zipHead("net/data.pkl"), Safetensors, false},
		{"document", zipHead("word/document.xml"), PyTorch, false},
		{"archive with two folders", zipHead("a/b/data.pkl"), PyTorch, false},
		{"archive without a folder", zipHead("/data.pkl"), PyTorch, false},
		{"archive with a long name", zipHead(strings.Repeat("n", 600) + "/data.pkl"), PyTorch, false},
		{"cut archive", "PK\x03\x04", PyTorch, false},
		{"tensors", "\x02\x00\x00\x00\x00\x00\x00\x00{}", PyTorch, false},
		{"svg", "<svg xmlns", Prefix("an SVG", "<svg"), true},
		{"html", "<html>", Prefix("an SVG", "<svg"), false},
	} {
		t.Run(c.name+" as "+c.kind.Name, func(t *testing.T) {
			path := write(t, c.name, c.text)
			for name, check := range map[string]func(string, Kind) error{"Check": Check, "CheckWrite": CheckWrite} {
				if err := check(path, c.kind); (err == nil) != c.ok || err != nil &&
					!strings.Contains(err.Error(), path) {
					t.Errorf("%s: %v", name, err)
				}
			}
			f, err := Create(path, c.kind)
			if err == nil {
				_ = f.Close()
			}
			data, readErr := os.ReadFile(path)
			if readErr != nil || (err == nil) != c.ok || c.ok && len(data) > 0 || !c.ok && string(data) != c.text {
				t.Errorf("Create: %v, and then the file has %q", err, data)
			}
		})
	}
}

func TestCheckRefusesIrregularFiles(t *testing.T) {
	for _, path := range []string{fifo(t), t.TempDir(), "/dev/null"} {
		if err := within(t, func() error { return Check(path, PNG) }); err == nil ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	for _, path := range []string{fifo(t), t.TempDir()} {
		if err := within(t, func() error { _, err := Create(path, PNG); return err }); err == nil ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", path, err)
		}
	}
	f, err := Create("/dev/null", PNG)
	if err != nil {
		t.Fatal(err)
	}
	f.Close()
}

func TestCreateMakesNewFiles(t *testing.T) {
	dir := t.TempDir()
	link := filepath.Join(dir, "link")
	if err := os.Symlink("target", link); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"new", "link"} {
		f, err := Create(filepath.Join(dir, name), PNG)
		if err != nil {
			t.Fatal(err)
		}
		f.Close()
	}
	if _, err := os.Stat(filepath.Join(dir, "target")); err != nil {
		t.Error(err)
	}
}

// TestCreateDuringTheCheck checks that a file that replaces the checked one during Create keeps its
// content.
func TestCreateDuringTheCheck(t *testing.T) {
	for name, at := range map[string]func(dir string) (path string){
		"a file":   func(dir string) string { return filepath.Join(dir, "out") },
		"its link": func(dir string) string { return filepath.Join(dir, "link") },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			path, other := at(dir), filepath.Join(dir, "other")
			if err := os.Symlink("out", filepath.Join(dir, "link")); err != nil {
				t.Fatal(err)
			}
			for _, name := range []string{"out", "other"} {
				if err := os.WriteFile(filepath.Join(dir, name), []byte("the "+name), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			swap := Kind{"any file", func([]byte) bool { return os.Rename(other, filepath.Join(dir, "out")) == nil }}
			f, err := Create(path, swap)
			if err == nil {
				_ = f.Close()
			}
			data, readErr := os.ReadFile(filepath.Join(dir, "out"))
			if err == nil || !strings.Contains(err.Error(), path) || readErr != nil || string(data) != "the other" {
				t.Errorf("%v, and then the file has %q, %v", err, data, readErr)
			}
		})
	}
}

// TestCreateAfterTheCheck checks that a file that appears at an empty path during Create keeps its
// content.
func TestCreateAfterTheCheck(t *testing.T) {
	path := write(t, "new", "text")
	link := filepath.Join(filepath.Dir(path), "link")
	if err := os.Symlink("new", link); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{path, link} {
		f, err := create(p, nil, PNG)
		if err == nil {
			_ = f.Close()
		}
		data, readErr := os.ReadFile(path)
		if err == nil || !strings.Contains(err.Error(), p) || readErr != nil || string(data) != "text" {
			t.Errorf("%s: %v, and then the file has %q, %v", p, err, data, readErr)
		}
	}
}

// Files are opened in blocking mode, although open uses O_NONBLOCK.
func TestOpenFilesBlock(t *testing.T) {
	for name, open := range map[string]func(path string) (*os.File, error){
		"Open":     Open,
		"OpenTree": OpenTree,
		"Create":   func(path string) (*os.File, error) { return Create(path, Raw) },
	} {
		t.Run(name, func(t *testing.T) {
			f, err := open(write(t, "empty", ""))
			if err != nil {
				t.Fatal(err)
			}
			defer f.Close()
			flags, err := os.ReadFile(fmt.Sprintf("/proc/self/fdinfo/%d", descriptor(t, f)))
			if err != nil {
				t.Fatal(err)
			}
			_, after, _ := strings.Cut(string(flags), "flags:")
			bits, err := strconv.ParseInt(strings.Fields(after)[0], 8, 64)
			if err != nil || bits&syscall.O_NONBLOCK != 0 {
				t.Errorf("flags %o, %v, want no O_NONBLOCK, nil", bits, err)
			}
		})
	}
}

// descriptor returns f.Fd() without its side effects.
func descriptor(t *testing.T, f *os.File) (fd uintptr) {
	t.Helper()
	raw, err := f.SyscallConn()
	if err == nil {
		err = raw.Control(func(at uintptr) { fd = at })
	}
	if err != nil {
		t.Fatal(err)
	}
	return fd
}

// TestReplaceIsAtomic checks that the file is either complete or absent, and that Replace replaces
// only a file of its kind.
func TestReplaceIsAtomic(t *testing.T) {
	kind := Prefix("a greeting", "hello")
	fill := func(text string) func(*os.File) error {
		return func(f *os.File) error { _, err := f.WriteString(text); return err }
	}
	path := write(t, "file", "hello, old")
	failed := errors.New("failed")
	if _, err := Replace(path, kind, 0o640,
		func(f *os.File) error { return errors.Join(fill("hello, ha")(f), failed) }); !errors.Is(err, failed) {
		t.Errorf("error %v, want %v", err, failed)
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != "hello, old" {
		t.Errorf("%q, %v, want \"hello, old\", nil", now, err)
	}
	f, err := Replace(path, kind, 0o640, fill("hello, new"))
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err := errors.Join(err, f.Close()); err != nil || info.Mode() != 0o640 || info.Size() != 10 {
		t.Errorf("got %v, %v, want 10 bytes with the mode 0640", info, err)
	}
	if now, err := os.ReadFile(path); err != nil || string(now) != "hello, new" {
		t.Errorf("%q, %v, want \"hello, new\", nil", now, err)
	}
	// A file of another kind that appears during write is kept.
	_, err = Replace(path, kind, 0o640, func(f *os.File) error {
		return errors.Join(fill("hello")(f), os.WriteFile(path, []byte("notes"), 0o600))
	})
	if now, e := os.ReadFile(path); e != nil || string(now) != "notes" || err == nil ||
		!strings.Contains(err.Error(), path) {
		t.Errorf("the file holds %q, %v, the error is %v, want \"notes\", nil, an error with %q",
			now, e, err, path)
	}
	if _, err := Replace(path, kind, 0o640, fill("hello")); err == nil {
		t.Error("Replace of a file of another kind: got no error, want one")
	}
	if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
		t.Errorf("%v is left, %v, want length 1, nil", list, err)
	}
}

// Replace that fails in any step returns the reason, keeps the file, and leaves no temporary file.
func TestReplaceThatFailsKeepsTheFile(t *testing.T) {
	kind := Prefix("a greeting", "hello")
	for name, c := range map[string]struct {
		write func(*os.File) error
		want  error
	}{
		"the file is closed by write": {func(f *os.File) error { return f.Close() }, os.ErrClosed},
		"the temporary file vanishes": {func(f *os.File) error { return os.Remove(f.Name()) }, os.ErrNotExist},
		"write's error":               {func(*os.File) error { return syscall.ENOSPC }, syscall.ENOSPC},
	} {
		path := write(t, "file", "hello, old")
		f, err := Replace(path, kind, 0o640, c.write)
		if f != nil || !errors.Is(err, c.want) {
			t.Errorf("%s: got %v, error %v, want no file and %v", name, f, err, c.want)
		}
		if now, err := os.ReadFile(path); err != nil || string(now) != "hello, old" {
			t.Errorf("%s: the file has %q, %v, want \"hello, old\"", name, now, err)
		}
		if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 1 {
			t.Errorf("%s: the folder has %v, %v, want only the file", name, list, err)
		}
	}
	missing := filepath.Join(t.TempDir(), "none", "file")
	if _, err := Replace(missing, kind, 0o640, func(*os.File) error {
		t.Error("write is called although the folder is missing")
		return nil
	}); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("in a missing folder: got error %v, want ErrNotExist", err)
	}
}

// The error for a file that is not a regular one names its kind.
func TestErrorsSayTheKindOfAFile(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "socket")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for path, want := range map[string]string{socket: "a socket", fifo(t): "a pipe", t.TempDir(): "a directory",
		"/dev/null": "a device"} {
		if _, err := ReadFile(path); !errors.Is(err, ErrNotRegular) || !strings.HasSuffix(err.Error(), "but "+want) {
			t.Errorf("ReadFile(%s): got error %v, want ErrNotRegular and %q", path, err, want)
		}
		if err := Check(path, PNG); err == nil || !strings.Contains(err.Error(), " is "+want+", and only a PNG") {
			t.Errorf("Check(%s): got error %v, want one that says %q", path, err, want)
		}
	}
	// A path that cannot be looked up is no path without a file.
	below := filepath.Join(write(t, "file", "text"), "below")
	if err := Check(below, PNG); !errors.Is(err, syscall.ENOTDIR) {
		t.Errorf("Check(%s): got error %v, want ENOTDIR", below, err)
	}
}

// TestCheckOfAFileThatIsRemoved: a file may be removed between the two calls of Check that look at
// it.
func TestCheckOfAFileThatIsRemoved(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.png")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
			}
			if err := os.WriteFile(path, []byte("\x89PNG\r\n\x1a\n"), 0o666); err != nil {
				t.Error(err)
				return
			}
			if err := os.Remove(path); err != nil {
				t.Error(err)
				return
			}
		}
	}()
	defer func() { close(stop); <-stopped }()
	for i := range 20_000 {
		if err := Check(path, PNG); err != nil {
			t.Fatalf("call %d: got %v, want nil: the file is a PNG, or there is none", i, err)
		}
	}
}
