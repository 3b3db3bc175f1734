package imageloader

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"os"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/audit"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// openFile opens a file for a loader.
func openFile(path string) (archive.File, error) { return os.Open(path) }

// fakeCodec decodes archivetest.Images to bytes that depend on the image and the geometry, at
// varying speed.
type fakeCodec struct {
	open  *atomic.Int64 // decoders that are not closed
	begun *atomic.Int64 // decodes
	block chan struct{} // if not nil, decode waits until it is closed
}

func (c fakeCodec) NewDecoder(int64) (sample.Decoder, error) {
	if c.open != nil {
		c.open.Add(1)
	}
	return &fakeDecoder{c}, nil
}

func (fakeCodec) Header(data []byte) (imagecapi.Info, error) { return fakeDecoder{}.Header(data) }

type fakeDecoder struct{ c fakeCodec }

func (fakeDecoder) Header([]byte) (imagecapi.Info, error) {
	return imagecapi.Info{Format: imagecapi.PNG, Width: 40, Height: 30, Components: 3, BitDepth: 8}, nil
}

func (d fakeDecoder) Decode(data []byte, g *imagecapi.Geometry, dst []byte, stride int) error {
	if d.c.begun != nil {
		d.c.begun.Add(1)
	}
	if d.c.block != nil {
		<-d.c.block
	}
	for range rand.IntN(4) {
		runtime.Gosched()
	}
	if bytes.HasPrefix(data[8:], []byte("BAD")) {
		clear(dst) // the content of a row after a failure is undefined
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
	// The digests in testdata/states.json were made when Orientation was the last field of a
	// geometry.
	fmt.Fprint(h, strings.Replace(fmt.Sprintf("%+v", *g), " Interpolation:0 DCTScaling:false}", "}", 1))
	s := h.Sum64()
	for i := range dst {
		s = s*6364136223846793005 + 1442695040888963407
		dst[i] = byte(s >> 56)
	}
}

func (d fakeDecoder) Close() {
	if d.c.open != nil {
		d.c.open.Add(-1)
	}
}

func openFake(t testing.TB, path string, o Options) *Loader {
	t.Helper()
	o.NoIndex = o.IndexFile == "" // a loader must not find the index of an earlier loader
	l, err := open(context.Background(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// inspect is Inspect with the test's own files and codec.
func inspect(ctx context.Context, path string, o Options, file func(string) (archive.File, error),
	c sample.Codecs) (*Report, error) {
	l, err := inspectedBy(path, o, file, c)
	if err != nil {
		return nil, err
	}
	return l.inspect(ctx, nil, audit.NewNames(), nil)
}

// copied is a copy of a batch that outlives its iteration.
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
			t.Fatalf("a batch comes after the error %v, want no error", err)
		}
		if len(b.Labels) != b.N || len(b.Samples) != b.N || len(b.Images)%b.N != 0 {
			t.Fatalf("a batch of %d has %d labels, %d samples, %d bytes", b.N, len(b.Labels),
				len(b.Samples), len(b.Images))
		}
		batches = append(batches, copied{bytes.Clone(b.Images), append([]int64(nil), b.Labels...),
			append([]Sample(nil), b.Samples...)})
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
