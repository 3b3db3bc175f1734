//go:build linux

package prefetcher

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"image"
	"image/jpeg"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// TestCPUDecodeSearches: the device decodes images with unknown entry points. It gives the host's
// batches, and writes the index that the host would write.
func TestCPUDecodeSearches(t *testing.T) { decodeSearches(t, onCPU) }

func TestGPUDecodeSearches(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeSearches(t, onGPU)
}

func decodeSearches(t *testing.T, decoder decoderFeed) {
	const photos = 80
	path := decodeArchive(t, photos)
	augmented := imageloader.Train(64)
	augmented.Ops = deviceOps
	for _, test := range []struct {
		name  string
		o     imageloader.Options
		first int64 // the minimum number of images that the device decodes in the first pass
		later int64 // the minimum number in a pass that uses kept entry points
		kept  bool
	}{
		{"skip", imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip}, 60, 60, true},
		{"substitute", imageloader.Options{Transform: imageloader.Eval(90, 72),
			BadSamples: imageloader.Substitute}, 60, 60, true},
		{"operations", imageloader.Options{Transform: augmented, BadSamples: imageloader.Skip}, 60, 60, true},
		{"trusted index", imageloader.Options{Transform: imageloader.Train(64),
			BadSamples: imageloader.Skip, TrustIndex: true}, 60, 60, true},
		{"no entry points", imageloader.Options{Transform: imageloader.Train(64),
			BadSamples: imageloader.Skip, NoEntryPoints: true}, 60, 60, false},
		{"no index", imageloader.Options{Transform: imageloader.Train(64), BadSamples: imageloader.Skip,
			NoIndex: true}, 60, 60, true},
		{"refused damage", imageloader.Options{Transform: imageloader.Train(64),
			BadSamples: imageloader.Skip, Damaged: imageloader.Refuse}, 0, 60, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			if testing.Short() && test.name != "skip" && test.name != "no index" {
				t.Skip("its goroutines are those of the other rows")
			}
			var sides []string
			var made []int64
			for _, feed := range []decoderFeed{nil, decoder} {
				l, side := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), test.o)
				host, _ := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), test.o)
				want := newFeed(t, host, Options{Device: cuda.CPU})
				got := newFeed(t, l, Options{Device: cuda.CPU})
				if feed != nil {
					closeFeed(t, got)
					got = feed(t, l)
				}
				sameEpochs(t, want, got, 0, 0)
				first := got.Stats()
				sameEpochs(t, want, got, 1, 1)
				if st := got.Stats(); feed != nil &&
					(first.Decoded < test.first || test.first == 0 && first.Decoded > 0 ||
						st.Decoded-first.Decoded < test.later || st.DecodedAgain != 0) {
					t.Errorf("the device has decoded %d, then %d images, %d of them again", first.Decoded,
						st.Decoded-first.Decoded, st.DecodedAgain)
				}
				made = append(made, l.Stats().EntriesMade)
				closeFeed(t, want)
				closeFeed(t, got)
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
				sides = append(sides, side)
			}
			if !test.kept {
				if made[0]+made[1] != 0 {
					t.Errorf("entry points of %d and %d images are made, want 0 and 0", made[0], made[1])
				}
				return
			}
			if made[0] < 60 || made[1] != made[0] {
				t.Errorf("the host makes the entry points of %d images, the device of %d", made[0], made[1])
			}
			if test.o.NoIndex {
				return
			}
			sameFiles(t, sides[0], sides[1])
			// A later process reads the entry points that the device found, and the device compares
			// them. An epoch that is left early has decoded an unpredictable number of images, so
			// only the two whole epochs count.
			l, _ := indexedLoader(t, path, sides[1], test.o)
			host, _ := indexedLoader(t, path, sides[0], test.o)
			want, got := newFeed(t, host, Options{Device: cuda.CPU}), decoder(t, l)
			sameEpochs(t, want, got, 2, 3)
			if st, made := got.Stats(), l.Stats().EntriesMade; test.first > 0 &&
				(st.Decoded < 2*test.later || st.DecodedAgain != 0) || made != 0 {
				t.Errorf("a later process makes the entry points of %d images, and its device decodes %d "+
					"and %d again; %v", made, st.Decoded, st.DecodedAgain, st)
			}
			closeFeed(t, want)
			closeFeed(t, got)
		})
	}
}

// crampedSource has memory for the entry points of few images.
type crampedSource struct{ *imageloader.Loader }

func (s crampedSource) Planner() decodeplan.Planner { return crampedPlanner{s.Loader.Planner()} }

// crampedPlanner is the planner of a crampedSource.
type crampedPlanner struct{ decodeplan.Planner }

func (crampedPlanner) EntryBytes() int { return 16 << 10 }

// TestCPUDecodeRetriesEntryPointsWithoutRoom: entry points that had no room are found again in
// later epochs, until all are kept.
func TestCPUDecodeRetriesEntryPointsWithoutRoom(t *testing.T) {
	path := decodeArchive(t, 60)
	o := imageloader.Options{Transform: imageloader.Train(48), BadSamples: imageloader.Skip}
	plain, l := newLoader(t, path, o), newLoader(t, path, o)
	host, device := newFeed(t, plain, Options{Device: cuda.CPU}), onCPU(t, crampedSource{l})
	var made []int64
	for epoch := range 6 {
		sameEpochs(t, host, device, epoch, epoch)
		made = append(made, l.Stats().EntriesMade)
	}
	if all := plain.Stats().EntriesMade; made[0] == 0 || made[0] >= made[1] || made[5] != all ||
		device.Stats().DecodedAgain != 0 {
		t.Errorf("entry points after each epoch: %v of %d", made, all)
	}
	closeFeed(t, host)
	closeFeed(t, device)
}

// indexedLoader opens a loader with the index at side.
func indexedLoader(t *testing.T, path, side string, o imageloader.Options) (*imageloader.Loader, string) {
	t.Helper()
	if !o.NoIndex {
		o.IndexFile = side
	}
	o.BatchSize, o.Shuffle, o.Workers = 16, true, 4
	l, err := imageloader.Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l, side
}

// TestCPUDecodeSearchesDamage: the bad images, and the images with a warning, do not depend on
// which side searches for entry points.
func TestCPUDecodeSearchesDamage(t *testing.T) { decodeSearchesDamage(t, onCPU) }

func TestGPUDecodeSearchesDamage(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	decodeSearchesDamage(t, onGPU)
}

func decodeSearchesDamage(t *testing.T, decoder decoderFeed) {
	path := damagedArchive(t, 300)
	for _, damaged := range []imageloader.DamagePolicy{imageloader.Warned, imageloader.Partial, imageloader.Refuse} {
		for _, policy := range []imageloader.BadSamplePolicy{imageloader.Skip, imageloader.Substitute} {
			t.Run(fmt.Sprintf("%v, %v", damaged, policy), func(t *testing.T) {
				if testing.Short() && (damaged != imageloader.Warned || policy != imageloader.Skip) {
					t.Skip("its goroutines are those of the other rows")
				}
				o := imageloader.Options{Transform: imageloader.Train(32), BadSamples: policy, Damaged: damaged}
				plain, plainSide := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), o)
				l, side := indexedLoader(t, path, filepath.Join(t.TempDir(), "index"), o)
				host, device := newFeed(t, plain, Options{Device: cuda.CPU}), decoder(t, l)
				for epoch := range 3 {
					sameEpochs(t, host, device, epoch, epoch)
				}
				want, got, st := plain.Stats(), l.Stats(), device.Stats()
				if got.Bad != want.Bad || got.Warned != want.Warned || got.Samples != want.Samples || want.Bad < 40 {
					t.Errorf("%d bad samples of %d, %d warnings, want %d of %d, %d", got.Bad, got.Samples,
						got.Warned, want.Bad, want.Samples, want.Warned)
				}
				// An image that the device has handed back is not given to it again.
				if damaged != imageloader.Refuse &&
					(st.DecodedAgain < 20 || st.DecodedAgain > 200 || st.Decoded < 3*st.DecodedAgain) {
					t.Errorf("%+v", st)
				}
				closeFeed(t, host)
				closeFeed(t, device)
				// The device finds no entry points in an image whose scan is damaged according to
				// the host.
				if err := errors.Join(plain.Close(), l.Close()); err != nil {
					t.Fatal(err)
				}
				sameFiles(t, plainSide, side)
			})
		}
	}
}

// sameFiles fails the test if two files have different bytes.
func sameFiles(t *testing.T, a, b string) {
	t.Helper()
	first, err := os.ReadFile(a)
	if err != nil {
		t.Fatal(err)
	}
	second, err := os.ReadFile(b)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(first, second) {
		t.Errorf("%s has %d bytes, %s %d others", a, len(first), b, len(second))
	}
}

// damagedArchive returns an archive of photographs. Most have some changed bytes: in their headers,
// in their scan, or after it. Some have bytes or restart markers removed.
func damagedArchive(t *testing.T, photos int) string {
	t.Helper()
	rng := rand.New(rand.NewPCG(11, 12))
	var file bytes.Buffer
	w := tar.NewWriter(&file)
	for i := range photos {
		m := image.NewRGBA(image.Rect(0, 0, 120+rng.IntN(100), 90+rng.IntN(80)))
		for p := range m.Pix {
			m.Pix[p] = byte(p/4*(i+3)/7 + rng.IntN(40))
		}
		var b bytes.Buffer
		if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 60 + i%40}); err != nil {
			t.Fatal(err)
		}
		data := b.Bytes()
		scan := bytes.Index(data, []byte{0xFF, 0xDA})
		for range i % 4 {
			switch at := scan + rng.IntN(len(data)-scan); rng.IntN(6) {
			case 0:
				data[rng.IntN(scan)] = byte(rng.Uint32())
			case 1:
				data[len(data)-1-rng.IntN(4)] = byte(rng.Uint32())
			case 2:
				data = slices.Delete(data, at, min(len(data), at+rng.IntN(100)))
			case 3: // a marker
				data = slices.Insert(data, at, 0xFF, 0xD0+byte(rng.IntN(16)))
			default:
				data[at] = byte(rng.Uint32())
			}
		}
		h := tar.Header{Name: fmt.Sprintf("set/%c/%03d.jpg", 'a'+i%4, i), Mode: 0o644,
			Size: int64(len(data)), Typeflag: tar.TypeReg}
		if err := w.WriteHeader(&h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(data); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "damaged.tar")
	if err := os.WriteFile(path, file.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}
