package imageloader

import (
	"bytes"
	"image"
	"image/color"
	"image/jpeg"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

type mapStore struct {
	mu    sync.Mutex
	blobs map[int][]byte
	full  bool
}

func (m *mapStore) EntryPoints(i int, buffer []byte) []byte {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append(buffer[:0], m.blobs[i]...)
}

func (m *mapStore) KeepEntryPoints(i int, blob []byte) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.full {
		return false
	}
	m.blobs[i] = bytes.Clone(blob)
	return true
}

// photo returns a baseline JPEG (4:2:0) that is large enough for entry points.
func photo(t testing.TB, seed uint64) []byte {
	t.Helper()
	r := rand.New(rand.NewPCG(seed, 1))
	m := image.NewRGBA(image.Rect(0, 0, 320, 240))
	for y := range 240 {
		for x := range 320 {
			m.SetRGBA(x, y, color.RGBA{uint8(x + r.IntN(60)), uint8(y + r.IntN(60)), uint8(x*y/64 + r.IntN(60)), 255})
		}
	}
	var b bytes.Buffer
	if err := jpeg.Encode(&b, m, &jpeg.Options{Quality: 90}); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestEntryPointsChangeNoPixel: the first epoch makes entry points, the next epoch decodes with
// them, and a later process compares them before it uses them. Neither stale nor forged entry
// points change a pixel.
func TestEntryPointsChangeNoPixel(t *testing.T) {
	d, err := shimCodec{}.newDecoder(0)
	if err != nil {
		t.Skip(err)
	}
	defer d.Close()
	shim := d.(*codec.Decoder)
	photos := [][]byte{photo(t, 1), photo(t, 2), photo(t, 3)}
	g := imagecapi.Geometry{CropX: 100, CropY: 90, CropWidth: 150, CropHeight: 100, ResizeWidth: 64, ResizeHeight: 64, WindowWidth: 64, WindowHeight: 64, Flip: true}
	want := make([][]byte, len(photos))
	for i, p := range photos {
		want[i] = make([]byte, 64*64*3)
		if err := d.Decode(p, &g, want[i], 64*3); err != nil {
			t.Fatal(err)
		}
	}
	stats := func() imagecapi.Stats {
		s, err := shim.Stats()
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	epoch := func(what string, points *entryPoints, photos [][]byte, want [][]byte) imagecapi.Stats {
		before := stats()
		b := workerEntryPoints{points: points, d: shim}
		for i, p := range photos {
			got := make([]byte, 64*64*3)
			if err := b.decode(i, p, &g, got, 64*3); err != nil {
				t.Fatalf("%s: %v", what, err)
			}
			if !bytes.Equal(got, want[i]) {
				t.Errorf("%s: sample %d has other pixels", what, i)
			}
		}
		s := stats()
		return imagecapi.Stats{EntriesUsed: s.EntriesUsed - before.EntriesUsed, EntriesVerified: s.EntriesVerified - before.EntriesVerified,
			EntriesRefused: s.EntriesRefused - before.EntriesRefused, EntriesMade: s.EntriesMade - before.EntriesMade}
	}
	expect := func(what string, got, want imagecapi.Stats) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}

	store := &mapStore{blobs: map[int][]byte{}}
	points := newEntryPoints(store, 3, false)
	expect("first epoch", epoch("first epoch", points, photos, want), imagecapi.Stats{EntriesMade: 3})
	expect("second epoch", epoch("second epoch", points, photos, want), imagecapi.Stats{EntriesUsed: 3})
	for i, p := range photos {
		if n := len(store.blobs[i]); n == 0 || n > len(p)*15/1000 {
			t.Errorf("the blob of %d bytes has %d", len(p), n)
		}
	}

	later := newEntryPoints(store, 3, false)
	expect("another process", epoch("another process", later, photos, want), imagecapi.Stats{EntriesVerified: 3})
	expect("its second epoch", epoch("its second epoch", later, photos, want), imagecapi.Stats{EntriesUsed: 3})
	expect("trusted", epoch("trusted", newEntryPoints(store, 3, true), photos, want), imagecapi.Stats{EntriesUsed: 3})

	// The archive has changed under the index: samples 0 and 1 are exchanged.
	swapped := slices.Clone(photos)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	swappedWant := slices.Clone(want)
	swappedWant[0], swappedWant[1] = swappedWant[1], swappedWant[0]
	expect("stale", epoch("stale", points, swapped, swappedWant), imagecapi.Stats{EntriesUsed: 1, EntriesRefused: 2})

	// The blobs have changed under their proofs, or come from elsewhere.
	forged := &mapStore{blobs: maps.Clone(store.blobs)}
	forged.blobs[0] = forged.blobs[1]
	forged.blobs[1] = append(bytes.Clone(forged.blobs[1][:64]), make([]byte, 64)...)
	forged.blobs[2] = []byte("TSE1")
	changed := newEntryPoints(forged, 3, false)
	for i := range points.proofs {
		changed.proofs[i].Store(points.proofs[i].Load())
	}
	expect("forged", epoch("forged", changed, photos, want), imagecapi.Stats{EntriesRefused: 3})
	unproven := newEntryPoints(forged, 3, false)
	expect("forged, unproven", epoch("forged, unproven", unproven, photos, want), imagecapi.Stats{EntriesRefused: 3})

	// Wrong blobs are replaced, once.
	expect("replaced", epoch("replaced", unproven, photos, want), imagecapi.Stats{EntriesMade: 3})
	expect("replacements are used", epoch("replacements are used", unproven, photos, want), imagecapi.Stats{EntriesUsed: 3})
	for i := range photos {
		if !bytes.Equal(forged.blobs[i], store.blobs[i]) {
			t.Errorf("the blob of sample %d was not replaced", i)
		}
	}
}

// countingCodec is the real codec with the sum of its decoders' counts.
type countingCodec struct {
	mu  *sync.Mutex
	sum *imagecapi.Stats
}

type countingDecoder struct {
	*codec.Decoder
	c countingCodec
}

func (countingCodec) Header(data []byte) (imagecapi.Info, error) { return shimCodec{}.Header(data) }

func (c countingCodec) newDecoder(maxPixels int64) (decoder, error) {
	d, err := shimCodec{}.newDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	return countingDecoder{d.(*codec.Decoder), c}, nil
}

func (d countingDecoder) Close() {
	d.c.mu.Lock()
	defer d.c.mu.Unlock()
	if s, err := d.Stats(); err == nil {
		d.c.sum.EntriesMade += s.EntriesMade
		d.c.sum.EntriesUsed += s.EntriesUsed
		d.c.sum.EntriesVerified += s.EntriesVerified
		d.c.sum.EntriesRefused += s.EntriesRefused
	}
	d.Decoder.Close()
}

// TestEntryPointsChangeNoBatch: the first epoch makes entry points, and the second uses them. The
// next loader finds them in the sidecar, and compares them before it uses them. The batches are
// those of a loader without entry points.
func TestEntryPointsChangeNoBatch(t *testing.T) {
	var members []archivetest.Member
	for i := range 24 {
		members = append(members, archivetest.Member{Name: "train/" + string(rune('a'+i%3)) + "/" + string(rune('a'+i)) + ".jpg", Data: string(photo(t, uint64(i)))})
	}
	members = append(members, archivetest.Member{Name: "train/a/z.png", Data: archivetest.PNG(t, archivetest.Gradient(50, 40))})
	for _, c := range []struct {
		name string
		data []byte
	}{{"t.tar", archivetest.Tar(t, members...)}, {"t.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...))}} {
		t.Run(c.name, func(t *testing.T) {
			path := archivetest.WriteFile(t, c.name, c.data)
			var done imagecapi.Stats
			codec := countingCodec{new(sync.Mutex), &done}
			run := func(o Options) *Loader {
				o.BatchSize, o.Transform, o.Shuffle, o.Workers = 8, Train(64), true, 3
				l, err := open(t.Context(), path, o, openFile, codec)
				if err != nil {
					t.Fatal(err)
				}
				return l
			}
			epoch := func(l *Loader, e int) (string, imagecapi.Stats) {
				done = imagecapi.Stats{}
				batches, err := collect(t, l, e, 2)
				if err != nil {
					t.Fatal(err)
				}
				return digest(batches), done
			}
			end := func(l *Loader) {
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}

			var want []string
			plain := run(Options{NoIndex: true})
			for e := range 4 {
				d, s := epoch(plain, e)
				if s != (imagecapi.Stats{}) {
					t.Errorf("without an index: %+v", s)
				}
				want = append(want, d)
			}
			end(plain)

			expect := func(what string, l *Loader, e int, wantStats imagecapi.Stats) {
				t.Helper()
				if got, s := epoch(l, e); got != want[e] || s != wantStats {
					t.Errorf("%s: %+v, want %+v; batches equal: %t", what, s, wantStats, got == want[e])
				}
			}
			side := path + ".index"
			l := run(Options{IndexFile: side, NoEntryPoints: true})
			expect("not wanted", l, 0, imagecapi.Stats{})
			end(l)
			l = run(Options{IndexFile: side})
			expect("first epoch", l, 0, imagecapi.Stats{EntriesMade: 24})
			expect("second epoch", l, 1, imagecapi.Stats{EntriesUsed: 24})
			end(l)
			l = run(Options{IndexFile: side})
			expect("another loader", l, 2, imagecapi.Stats{EntriesVerified: 24})
			expect("its second epoch", l, 3, imagecapi.Stats{EntriesUsed: 24})
			end(l)
			l = run(Options{IndexFile: side, TrustIndex: true})
			expect("a loader that trusts", l, 0, imagecapi.Stats{EntriesUsed: 24})
			end(l)
		})
	}
}
