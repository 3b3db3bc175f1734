package index

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestSpoolIsReadAnywhere: a spool can be read anywhere, with a file, without a file, and if the
// file can't be made or can no longer be written.
func TestSpoolIsReadAnywhere(t *testing.T) {
	archivetest.NoLeaks(t)
	rng := rand.New(rand.NewPCG(6, 6))
	dir := t.TempDir()
	for _, c := range []string{"memory", "file", "no file", "broken file"} {
		s := &spool{}
		tries := 0
		if c != "memory" {
			s.create = func() (*os.File, error) {
				tries++
				if c == "no file" {
					return nil, errChaos
				}
				return namelessFile(filepath.Join(dir, "x"))
			}
		}
		var want []byte
		for len(want) < 5*spoolBytes {
			b := make([]byte, rng.IntN(200_000))
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			if rng.IntN(10) == 0 {
				b = b[:0]
			}
			want = append(want, b...)
			s.write(b)
			// from now on the file can only be read
			if c == "broken file" && len(want) > 3*spoolBytes && s.create != nil {
				file, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", s.file.Fd()))
				if err != nil {
					t.Skip(err)
				}
				s.file.Close()
				s.file = file
			}
		}
		if s.size() != int64(len(want)) ||
			(s.file != nil) != (strings.Contains(c, "file") && c != "no file") || tries > 1 {
			t.Errorf("%s: %d bytes of %d, file %v, %d tries", c, s.size(), len(want), s.file != nil, tries)
		}
		if c == "file" && (len(s.mem) > spoolBytes || cap(s.mem) > 2*spoolBytes) {
			t.Errorf("%d bytes are in memory", cap(s.mem))
		}
		for range 300 {
			at := rng.IntN(len(want) + 10)
			p := make([]byte, rng.IntN(2*spoolBytes))
			n, err := s.ReadAt(p, int64(at))
			at = min(at, len(want))
			if n != min(len(p), len(want)-at) || !bytes.Equal(p[:n], want[at:at+n]) || (n < len(p)) != (err == io.EOF) {
				t.Fatalf("%s: %d bytes at %d: %d, %v", c, len(p), at, n, err)
			}
		}
		var all bytes.Buffer
		if err := s.section(1).copyTo(&all); err != nil || !bytes.Equal(all.Bytes(), want) {
			t.Errorf("%s: error %v, or other bytes", c, err)
		}
		s.close()
		s.close()
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v are left, error %v, want no error, len(left) = 0", left, err)
	}
}
