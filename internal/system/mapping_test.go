//go:build linux

package system

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"syscall"
	"testing"
)

func TestPagesAreSeenByOwnersAndWriters(t *testing.T) {
	for _, c := range []struct {
		user, owner int
		mayWrite    bool
		want        bool
	}{
		{1000, 1000, true, true},
		{1000, 1000, false, true}, // the owner of a file of mode 0444
		{1000, 0, true, true},     // mode 0666, or a group that may write
		{1000, 0, false, false},   // the usual data set: root's, mode 0644
		{0, 1000, false, false},   // root without the capability, as on NFS with root_squash
	} {
		got := seesPages(c.user, c.owner, func() bool { return c.mayWrite })
		if got != c.want {
			t.Errorf("user %d, owner %d, may write: %v: seesPages = %v, want %v", c.user, c.owner, c.mayWrite, got, c.want)
		}
	}
}

// asNobody calls f with another effective user than root, if the process is root. It skips the test
// where the process may not change its user.
func asNobody(t *testing.T, f func()) {
	t.Helper()
	var refused error
	done := make(chan struct{})
	go func() {
		defer close(done)
		if os.Geteuid() == 0 {
			runtime.LockOSThread() // without an unlock: the thread ends with the goroutine
			const keep, nobody = ^uintptr(0), 65534
			if _, _, errno := syscall.RawSyscall(syscall.SYS_SETRESUID, keep, nobody, keep); errno != 0 {
				refused = errno
				return
			}
		}
		f()
	}()
	<-done
	if refused != nil {
		t.Skipf("setresuid: %v", refused)
	}
}

// TestMapFileRefusesFilesOfOthers: mincore says of pages of such a file that all are in memory.
func TestMapFileRefusesFilesOfOthers(t *testing.T) {
	dir := t.TempDir()
	for _, c := range []struct {
		mode fs.FileMode
		want error
	}{{0o644, fs.ErrPermission}, {0o666, nil}} {
		path := filepath.Join(dir, c.mode.String())
		if os.Geteuid() != 0 { // a file of root
			if path = "/bin/sh"; c.want == nil {
				continue
			}
		} else if err := errors.Join(os.WriteFile(path, make([]byte, 100_000), c.mode), os.Chmod(path, c.mode)); err != nil {
			t.Fatal(err)
		}
		file, err := os.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer file.Close()
		asNobody(t, func() {
			p, err := MapFile(file.Fd(), 8192)
			if !errors.Is(err, c.want) {
				t.Errorf("MapFile of a file of root with mode %v, by another user: %v, want %v", c.mode, err, c.want)
			}
			if err == nil {
				err = UnmapFile(p)
			}
			if err != nil && c.want == nil {
				t.Error(err)
			}
		})
	}
}

// TestInMemory: pages that were just written are in memory. Pages far beyond the file's end are
// not. The page cache has units of up to 2 MiB.
func TestInMemory(t *testing.T) {
	page := os.Getpagesize()
	data := bytes.Repeat([]byte{1, 2, 3, 4}, 2000*page/4)
	path := filepath.Join(t.TempDir(), "a")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	p, err := MapFile(f.Fd(), len(data))
	if err != nil || !bytes.Equal(p, data) {
		t.Fatalf("MapFile: error %v, same bytes: %v, want nil, true", err, bytes.Equal(p, data))
	}
	defer func() {
		if err := UnmapFile(p); err != nil {
			t.Errorf("UnmapFile: %v, want nil", err)
		}
	}()
	const kept = 70
	if err := os.Truncate(path, int64(kept*page)); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		from, to int // in bytes
		want     bool
	}{
		{0, 0, true}, {0, 1, true}, {1, kept * page, true}, {65 * page, 66*page + 1, true}, {5, 2000 * page, false},
		{1500*page + 1, 1501 * page, false}, {1999 * page, 2000 * page, false},
	} {
		if got := InMemory(p[c.from:c.to]); got != c.want {
			t.Errorf("InMemory of bytes %d to %d of a file of %d = %v, want %v", c.from, c.to, kept*page, got, c.want)
		}
	}
}

// TestReadPagesReadsAMapping: all pages are in memory afterwards, and pages that a file has lost
// are an error.
func TestReadPagesReadsAMapping(t *testing.T) {
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 1<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	file, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	p, err := MapFile(file.Fd(), 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer UnmapFile(p)
	if err := errors.Join(ReadPages(nil), ReadPages(p)); err != nil || !InMemory(p) {
		t.Errorf("ReadPages = %v, and all pages are in memory: %v, want nil and true", err, InMemory(p))
	}
	if err := os.Truncate(path, 4096); err != nil {
		t.Fatal(err)
	}
	if err := ReadPages(p); err != nil && !errors.Is(err, syscall.EFAULT) {
		t.Errorf("ReadPages of a cut file = %v, want EFAULT", err)
	}
}
