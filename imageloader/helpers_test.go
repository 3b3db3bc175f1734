package imageloader

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"image"
	"image/color"
	"image/jpeg"
	"image/png"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/imagecapi"
)

// tarMember is a member of a test's archive; kind 0 is a regular file.
type tarMember struct {
	name string
	data string
	kind byte
	link string
}

func tarBytes(t testing.TB, members ...tarMember) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, m := range members {
		h := &tar.Header{Name: m.name, Size: int64(len(m.data)), Mode: 0o644, Typeflag: tar.TypeReg, Linkname: m.link}
		if m.kind != 0 {
			h.Typeflag = m.kind
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(m.data)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func gzipBytes(t testing.TB, data []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func writeFile(t testing.TB, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// fakeImage is what the fakeCodec takes for an image of 40 x 30 pixels.
func fakeImage(content string) string { return "\x89PNG\r\n\x1a\n" + content }

// fakeArchive has n samples in 5 classes, of different sizes. isBad says which are damaged.
func fakeArchive(t testing.TB, n int, isBad func(i int) bool) []byte {
	t.Helper()
	members := []tarMember{{name: "train/", kind: tar.TypeDir}, {name: "README", data: "no image"}}
	for i := range n {
		content := fmt.Sprintf("image %d %s", i, strings.Repeat("x", i*37%900))
		if isBad != nil && isBad(i) {
			content = "BAD " + content
		}
		members = append(members, tarMember{name: fmt.Sprintf("train/class%d/%04d.png", i*7%5, i), data: fakeImage(content)})
	}
	return tarBytes(t, members...)
}

// fakeCodec decodes fakeImages to bytes that depend on everything that they should depend on, at varying speed.
type fakeCodec struct {
	open  *atomic.Int64 // decoders that are not closed
	block chan struct{} // if not nil, decode waits until it is closed
}

func (c fakeCodec) newDecoder(int64) (decoder, error) {
	if c.open != nil {
		c.open.Add(1)
	}
	return &fakeDecoder{c}, nil
}

func (fakeCodec) header(data []byte) (imagecapi.Info, error) { return fakeDecoder{}.header(data) }

type fakeDecoder struct{ c fakeCodec }

func (fakeDecoder) header([]byte) (imagecapi.Info, error) {
	return imagecapi.Info{Format: imagecapi.PNG, Width: 40, Height: 30, Components: 3, BitDepth: 8}, nil
}

func (d fakeDecoder) decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	if d.c.block != nil {
		<-d.c.block
	}
	for range rand.IntN(4) {
		runtime.Gosched()
	}
	if bytes.HasPrefix(data[8:], []byte("BAD")) {
		clear(dst) // what is left in a row after a failure must not matter
		return &imagecapi.Error{Code: imagecapi.CodeDecode, Origin: "fake", Message: "bad bytes"}
	}
	if bytes.HasPrefix(data[8:], []byte("BROKEN MACHINE")) {
		return &imagecapi.Error{Code: imagecapi.CodeInternal, Origin: "fake", Message: "broken"}
	}
	fakePixels(data, g, dst)
	return nil
}

func fakePixels(data []byte, g *imagecapi.Geometry, dst []byte) {
	h := fnv.New64a()
	h.Write(data)
	fmt.Fprintf(h, "%+v", *g)
	s := h.Sum64()
	for i := range dst {
		s = s*6364136223846793005 + 1442695040888963407
		dst[i] = byte(s >> 56)
	}
}

func (d fakeDecoder) close() {
	if d.c.open != nil {
		d.c.open.Add(-1)
	}
}

func openFake(t testing.TB, path string, o Options) *Loader {
	t.Helper()
	o.NoIndex = o.IndexFile == "" // a test's loaders don't find what those before have left
	l, err := open(context.Background(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// copied is a batch that outlives its turn of the loop.
type copied struct {
	images  []byte
	labels  []int64
	samples []Sample
}

func collect(t testing.TB, l *Loader, epoch, slots int) (batches []copied, err error) {
	t.Helper()
	for b, e := range l.epoch(t.Context(), epoch, slots) {
		if e != nil {
			err = e
			continue
		}
		if err != nil {
			t.Fatalf("a batch comes after the error %v", err)
		}
		if len(b.Labels) != b.N || len(b.Samples) != b.N || len(b.Images)%b.N != 0 {
			t.Fatalf("a batch of %d has %d labels, %d samples, %d bytes", b.N, len(b.Labels), len(b.Samples), len(b.Images))
		}
		batches = append(batches, copied{bytes.Clone(b.Images), append([]int64(nil), b.Labels...), append([]Sample(nil), b.Samples...)})
	}
	return batches, err
}

func digest(batches []copied) string {
	h := sha256.New()
	for _, b := range batches {
		binary.Write(h, binary.LittleEndian, int64(len(b.labels)))
		h.Write(b.images)
		binary.Write(h, binary.LittleEndian, b.labels)
		fmt.Fprint(h, b.samples)
	}
	return fmt.Sprintf("%x", h.Sum(nil))
}

func names(batches []copied) (list []string) {
	for _, b := range batches {
		for _, s := range b.samples {
			list = append(list, s.Name)
		}
	}
	return list
}

// within fails the test if it runs for longer than the 10 seconds that bad input may take.
func within(t *testing.T) {
	t.Helper()
	timer := time.AfterFunc(10*time.Second, func() {
		buf := make([]byte, 1<<20)
		panic(fmt.Sprintf("%s hangs:\n%s", t.Name(), buf[:runtime.Stack(buf, true)]))
	})
	t.Cleanup(func() { timer.Stop() })
}

// noLeaks checks at the end of the test that goroutines and open files are as many as at its start.
func noLeaks(t *testing.T) {
	t.Helper()
	goroutines, files := runtime.NumGoroutine(), openFiles(t)
	t.Cleanup(func() {
		for range 2000 { // a goroutine that has done its last thing needs a moment to be gone
			if runtime.NumGoroutine() <= goroutines {
				break
			}
			time.Sleep(time.Millisecond)
		}
		if n := runtime.NumGoroutine(); n > goroutines {
			buf := make([]byte, 1<<20)
			t.Errorf("%d goroutines are left, %d before:\n%s", n, goroutines, buf[:runtime.Stack(buf, true)])
		}
		if n := openFiles(t); n > files {
			t.Errorf("%d files are open, %d before", n, files)
		}
	})
}

func openFiles(t *testing.T) int {
	t.Helper()
	list, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Skip("no /proc: ", err)
	}
	return len(list)
}

// Real images.

func gradient(w, h int) *image.RGBA {
	m := image.NewRGBA(image.Rect(0, 0, w, h))
	for y := range h {
		for x := range w {
			m.SetRGBA(x, y, color.RGBA{uint8(255 * x / w), uint8(255 * y / h), 128, 255})
		}
	}
	return m
}

func jpegOf(t testing.TB, m image.Image) string {
	t.Helper()
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 95}); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func pngOf(t testing.TB, m image.Image) string {
	t.Helper()
	var b bytes.Buffer
	if err := png.Encode(&b, m); err != nil {
		t.Fatal(err)
	}
	return b.String()
}
