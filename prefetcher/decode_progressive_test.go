//go:build linux

package prefetcher

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
)

// progressiveArchive writes an archive of n progressive JPEGs with different quantisers. It also
// has one without its last scan, one with damage in a scan, and one that is cut off.
func progressiveArchive(t *testing.T, n int, name string) string {
	t.Helper()
	file, err := os.ReadFile("../cshim/test/data/progressive.jpg")
	if err != nil {
		t.Fatal(err)
	}
	quantisers := bytes.Index(file, []byte{0xFF, 0xDB, 0, 67, 0}) + 5
	scan := bytes.LastIndex(file, []byte{0xFF, 0xDA})
	if quantisers < 5 || scan < 0 {
		t.Fatalf("progressive.jpg: quantisers at %d, last scan at %d, want a DQT of 67 bytes and a scan",
			quantisers, scan)
	}
	path := filepath.Join(t.TempDir(), name)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	add := func(name string, data []byte) {
		if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	rng := rand.New(rand.NewPCG(7, 8))
	for i := range n {
		for k := range 64 {
			file[quantisers+k] = byte(1 + rng.IntN(40))
		}
		add(fmt.Sprintf("set/%c/%03d.jpg", 'a'+i%3, i), file)
	}
	add("set/a/short.jpg", append(bytes.Clone(file[:scan]), 0xFF, 0xD9))
	damaged := bytes.Clone(file)
	for i := scan + 40; i < len(damaged)-2; i += 7 {
		damaged[i] = 0x55
	}
	add("set/b/damaged.jpg", damaged)
	add("set/c/cut.jpg", file[:scan+50])
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if filepath.Ext(name) == ".tgz" {
		var packed bytes.Buffer
		z := gzip.NewWriter(&packed)
		_, err := z.Write(b.Bytes())
		if err := errors.Join(err, z.Close()); err != nil {
			t.Fatal(err)
		}
		b = packed
	}
	if err := os.WriteFile(path, b.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

// TestCPUDecodePlansProgressive: if the loader has memory for baseline copies, the device decodes
// progressive JPEGs from the first epoch on, with the host's batches. The same images are bad with
// and without that memory.
func TestCPUDecodePlansProgressive(t *testing.T) { decodePlansProgressive(t, onCPU) }

func TestGPUDecodePlansProgressive(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodePlansProgressive(t, onGPU)
}

func decodePlansProgressive(t *testing.T, decoder decoderFeed) {
	const photos = 40
	augmented := imageloader.Train(48)
	augmented.Ops = deviceOps
	skip := imageloader.Options{Transform: imageloader.Train(48), BadSamples: imageloader.Skip}
	withOps, refuse, trust, partial, no, none, few := skip, skip, skip, skip, skip, skip, skip
	withOps.Transform = augmented
	refuse.Damaged = imageloader.Refuse
	trust.TrustIndex = true
	partial.Damaged = imageloader.Partial
	no.NoEntryPoints = true
	none.MaxTranscodedBytes = 1
	few.MaxTranscodedBytes = 60 << 10
	for _, test := range []struct {
		name     string
		archive  string
		o        imageloader.Options
		min, max int64 // images that the device decodes in an epoch
	}{
		{"tar", "a.tar", skip, photos, photos}, {"tgz", "a.tgz", skip, photos, photos},
		{"operations", "a.tar", withOps, photos, photos},
		{"refused damage", "a.tar", refuse, photos, photos},
		{"trusted index", "a.tar", trust, photos, photos}, {"partial images", "a.tar", partial, photos, photos},
		{"no entry points", "a.tar", no, 0, 0}, {"no room", "a.tar", none, 0, 0}, {"little room", "a.tar", few, 3, 6},
	} {
		t.Run(test.name, func(t *testing.T) {
			path := progressiveArchive(t, photos, test.archive)
			plain, l := newLoader(t, path, test.o), newLoader(t, path, test.o)
			host, device := newFeed(t, plain, Options{Device: cuda.CPU}), decoder(t, l)
			before := device.Stats().Decoded
			if test.archive == "a.tgz" { // the index is made, and the archive read in its order
				sameEpochs(t, host, device, 0, 0)
				before = device.Stats().Decoded
			}
			for epoch := 1; epoch <= 3; epoch++ {
				sameEpochs(t, host, device, epoch, epoch)
				st := device.Stats()
				if n := st.Decoded - before; n < test.min || n > test.max || st.DecodedAgain != 0 {
					t.Errorf("epoch %d: the device has decoded %d images, want %d to %d; %d again",
						epoch, n, test.min, test.max, st.DecodedAgain)
				}
				before = st.Decoded
			}
			want, got := plain.Stats(), l.Stats()
			if got.Bad != want.Bad || got.Warned != want.Warned || got.Samples != want.Samples ||
				want.Bad+want.Warned == 0 {
				t.Errorf("%d samples, %d bad, %d with a warning, want %d, %d, %d",
					got.Samples, got.Bad, got.Warned, want.Samples, want.Bad, want.Warned)
			}
			closeFeed(t, host)
			closeFeed(t, device)
		})
	}
}
