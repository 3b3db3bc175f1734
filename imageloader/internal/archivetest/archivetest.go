// Package archivetest makes archives for tests. It imports no package of the loader, so white-box
// tests of every package can use it.
package archivetest

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"
)

// Member is a member of a test archive.
type Member struct {
	Name string
	Data string
	Kind byte // tar's type flag; 0 for a regular file
	Link string
}

// Tar returns a tar archive of the members.
func Tar(t testing.TB, members ...Member) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		h := &tar.Header{Name: m.Name, Size: int64(len(m.Data)), Mode: 0o644, Typeflag: tar.TypeReg, Linkname: m.Link}
		if m.Kind != 0 {
			h.Typeflag = m.Kind
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.Data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// Gzip compresses data into one gzip member at the fastest level. Under the race detector the
// default level takes eight times as long for data like photographs.
func Gzip(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := gzip.NewWriterLevel(&b, gzip.BestSpeed)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// GzipSplit compresses data into several gzip members, each with the given number of bytes of data.
func GzipSplit(t testing.TB, data []byte, every, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	for len(data) > 0 {
		n := min(every, len(data))
		w, err := gzip.NewWriterLevel(&b, level)
		if err != nil {
			t.Fatal(err)
		}
		w.Name, w.Comment = "a name", "a comment"
		if _, err := w.Write(data[:n]); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		data = data[n:]
	}
	return b.Bytes()
}

// Zstd compresses data into one frame.
func Zstd(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

// WriteFile writes a file into a new folder and returns its path.
func WriteFile(t testing.TB, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// Rewrite overwrites a file and restores its modification time.
func Rewrite(t testing.TB, path string, data []byte) {
	t.Helper()
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
}

// Extract writes members, including directories and symbolic links, to a new directory and returns
// its path.
func Extract(t testing.TB, members []Member) string {
	t.Helper()
	root := t.TempDir()
	for _, m := range members {
		path := filepath.Join(root, m.Name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		var err error
		switch m.Kind {
		case tar.TypeDir:
			err = os.MkdirAll(path, 0o755)
		case tar.TypeSymlink:
			err = os.Symlink(m.Link, path)
		default:
			err = os.WriteFile(path, []byte(m.Data), 0o644)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// Image returns the contents of a member that starts like a PNG. Fake codecs accept it as an image.
func Image(content string) string { return "\x89PNG\r\n\x1a\n" + content }

// Images returns a tar archive of n samples in 5 classes, of different sizes. isBad selects the
// damaged samples. If it is nil, none is damaged.
func Images(t testing.TB, n int, isBad func(i int) bool) []byte {
	t.Helper()
	members := []Member{{Name: "train/", Kind: tar.TypeDir}, {Name: "README", Data: "no image"}}
	for i := range n {
		content := fmt.Sprintf("image %d %s", i, strings.Repeat("x", i*37%900))
		if isBad != nil && isBad(i) {
			content = "BAD " + content
		}
		members = append(members, Member{Name: fmt.Sprintf("train/class%d/%04d.png", i*7%5, i), Data: Image(content)})
	}
	return Tar(t, members...)
}

// Numbered returns a tar archive with a fake image for each number, all of the same size.
func Numbered(t testing.TB, numbers ...int) []byte {
	t.Helper()
	var list []Member
	for _, i := range numbers {
		list = append(list, Member{Name: fmt.Sprintf("a/%d.png", i), Data: Image(strings.Repeat(fmt.Sprint(i), 2000))})
	}
	return Tar(t, list...)
}

// Photos returns n samples in 3 classes and some other members. Their contents, from 1 byte to 200
// KB, are text, zeros, or bytes that resemble a photograph (hardly compressible, with some
// matches).
func Photos(n int) []Member {
	rng := rand.New(rand.NewPCG(3, uint64(n)))
	var list []Member
	for i := range n {
		b := make([]byte, 20_000+rng.IntN(180_000))
		switch i % 8 {
		case 6:
			copy(b, strings.Repeat(fmt.Sprintf("text %d and on it goes ", i), len(b)/20))
		case 7:
			b = b[:rng.IntN(100)]
		default:
			for k := range b {
				b[k] = byte(rng.Uint32()) & byte(rng.Uint32()|0x3f)
			}
			for range 40 { // matches, near and far
				at, n := 300+rng.IntN(len(b)-600), 3+rng.IntN(250)
				copy(b[at:], b[max(0, at-1-rng.IntN(32000)):][:n])
			}
		}
		list = append(list, Member{Name: fmt.Sprintf("train/class%d/%04d.png", i%3, i), Data: Image(string(b))})
		if i%5 == 0 {
			list = append(list, Member{Name: fmt.Sprintf("notes/%d.txt", i), Data: strings.Repeat("n", 1000+i)})
		}
	}
	return list
}

// Contents returns the contents of members by name.
func Contents(members []Member) map[string]string {
	m := map[string]string{}
	for _, x := range members {
		m[x.Name] = x.Data
	}
	return m
}

// Chunked reads at most N bytes in one call.
type Chunked struct {
	Reader io.Reader
	N      int
}

func (c *Chunked) Read(p []byte) (int, error) { return c.Reader.Read(p[:min(len(p), c.N)]) }

// Repetitive returns samples that compress well but span several checkpoints, so that their
// archives are small. The samples are the same in every run, for fuzzers.
func Repetitive() (list []Member) {
	for i := range 6 {
		data := bytes.Repeat([]byte{byte(i), 1, 2, byte(i * i)}, 2000+i*3000)
		list = append(list, Member{Name: "c/" + string(rune('a'+i)) + ".png", Data: Image(string(data))})
	}
	return list
}

// Difference returns the first difference of got from want, for a failure message.
func Difference(got, want []byte) string {
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			return fmt.Sprintf("byte %d of %d is %d, not %d", i, len(got), got[i], want[i])
		}
	}
	return fmt.Sprintf("%d bytes, not %d", len(got), len(want))
}
