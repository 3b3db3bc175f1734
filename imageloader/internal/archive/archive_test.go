package archive_test

import (
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestReplacedShardIsAnError: if a shard is replaced after the archive was opened, a walk and a
// Reader fail to open it again, every time.
func TestReplacedShardIsAnError(t *testing.T) {
	for _, url := range []bool{false, true} {
		s := sourcetest.New(1, map[string]sourcetest.Object{})
		path := filepath.Join(t.TempDir(), "s{0,1}.tar")
		if url {
			path = "store://b/s{0,1}.tar"
		}
		put := func(i int, version string, data []byte) {
			t.Helper()
			name, at := strings.Replace(path, "{0,1}", fmt.Sprint(i), 1), time.Unix(1e9, int64(len(version)))
			if url {
				s.Objects[name] = sourcetest.Object{Data: string(data), Version: version}
			} else if err := os.WriteFile(name, data, 0o644); err != nil {
				t.Fatal(err)
			} else if err := os.Chtimes(name, at, at); err != nil {
				t.Fatal(err)
			}
		}
		put(0, "1", archivetest.Numbered(t, 0, 1))
		put(1, "1", archivetest.Numbered(t, 2, 3))
		a, err := archive.Open(t.Context(), path, archive.Config{OpenSource: s.OpenSource})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		put(1, "second", archivetest.Numbered(t, 3, 2))
		r := archive.NewReader(a)
		defer r.Close()
		for try := range 3 {
			if _, err := r.ReadAt(1, make([]byte, 1), 0); !errors.Is(err, archive.ErrSourceChanged) ||
				!strings.Contains(err.Error(), "s1.tar") {
				t.Errorf("URL %v, try %d: error %v, want the error %v with %q",
					url, try, err, archive.ErrSourceChanged, "s1.tar")
			}
		}
		for _, err = range a.Members() {
		}
		if !errors.Is(err, archive.ErrSourceChanged) || a.Position() != 2 {
			t.Errorf("URL %v: error %v after %d members, want the error %v, a.Position() = 2",
				url, err, a.Position(), archive.ErrSourceChanged)
		}
	}
}

// TestReplacedShardWithAnEarlierTimeIsAnError: a shard is replaced by one of the same size, and the
// new one's time is before another shard's, so the size and the time of all shards stay.
func TestReplacedShardWithAnEarlierTimeIsAnError(t *testing.T) {
	folder := t.TempDir()
	put := func(i int, at int64, data []byte) {
		t.Helper()
		name := filepath.Join(folder, fmt.Sprintf("s%d.tar", i))
		if err := os.WriteFile(name, data, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(name, time.Unix(at, 0), time.Unix(at, 0)); err != nil {
			t.Fatal(err)
		}
	}
	put(0, 1e9, archivetest.Numbered(t, 0, 1))
	put(1, 3e9, archivetest.Numbered(t, 2, 3))
	a, err := archive.Open(t.Context(), filepath.Join(folder, "s{0,1}.tar"), archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for _, replaced := range []bool{false, true} {
		if replaced {
			put(0, 2e9, archivetest.Numbered(t, 4, 5))
		}
		b, err := a.Reopen()
		if err != nil {
			t.Fatal(err)
		}
		defer b.Close()
		if size := b.Info().Size(); size != a.Info().Size() || !b.Info().ModTime().Equal(a.Info().ModTime()) {
			t.Fatalf("the shards have %d bytes, want %d, and the latest time %v", size, a.Info().Size(), b.Info().ModTime())
		}
		err = b.Changed(a.Info())
		if errors.Is(err, archive.ErrSourceChanged) != replaced || replaced && !strings.Contains(err.Error(), "s0.tar") {
			t.Errorf("replaced %v: got the error %v, want archive.ErrSourceChanged with s0.tar if it is", replaced, err)
		}
	}
}

// TestMissingLibraryIsNoDamage: without the image library, the error does not call a .tgz damaged.
func TestMissingLibraryIsNoDamage(t *testing.T) {
	const child = "ARCHIVE_TEST_WITHOUT_LIBRARY"
	// an open library stays open, so the test needs a process without one
	if os.Getenv(child) == "" {
		test := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
		test.Env = append(os.Environ(), child+"=1", "TORCHSTREAM_LIBRARY="+t.TempDir())
		if out, err := test.CombinedOutput(); err != nil {
			t.Errorf("%v\n%s\nwant no error", err, out)
		}
		return
	}
	path := filepath.Join(t.TempDir(), "a.tgz")
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	if _, err := z.Write(archivetest.Numbered(t, 0, 1)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(z.Close(), os.WriteFile(path, packed.Bytes(), 0o644)); err != nil {
		t.Fatal(err)
	}
	_, err := archive.Open(t.Context(), path, archive.Config{})
	var damage *archive.Error
	if !errors.Is(err, imagecapi.CodeNoLibrary) || errors.As(err, &damage) || strings.Contains(err.Error(), "gzip") {
		t.Errorf("error %v", err)
	}
}
