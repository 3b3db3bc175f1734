package system

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"testing"
)

// TestInMemory: pages that were just written are in memory. Pages far beyond the file's end are
// not. The page cache has units of up to 2 MiB.
func TestInMemory(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("MapFile is for Linux only")
	}
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
