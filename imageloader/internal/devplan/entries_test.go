package devplan

import (
	"bytes"
	"maps"
	"slices"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
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

// TestEntryPointsChangeNoPixel: the first epoch makes entry points, and the next epoch decodes with
// them. A later process compares them before using them. Neither stale nor forged entry points
// change a pixel.
func TestEntryPointsChangeNoPixel(t *testing.T) {
	d, err := sample.Library{}.NewDecoder(0)
	if err != nil {
		t.Skip(err)
	}
	defer d.Close()
	shim := d.(*codec.Decoder)
	photos := [][]byte{archivetest.Photo(t, 1), archivetest.Photo(t, 2), archivetest.Photo(t, 3)}
	g := imagecapi.Geometry{CropX: 100, CropY: 90, CropWidth: 150, CropHeight: 100, ResizeWidth: 64,
		ResizeHeight: 64, WindowWidth: 64, WindowHeight: 64, Flip: true}
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
	epoch := func(what string, points *EntryPoints, photos [][]byte, want [][]byte) imagecapi.Stats {
		before := stats()
		b := Decoder{points: points, d: shim}
		for i, p := range photos {
			got := make([]byte, 64*64*3)
			if err := b.Decode(i, p, &g, got, 64*3); err != nil {
				t.Fatalf("%s: %v, want no error", what, err)
			}
			if !bytes.Equal(got, want[i]) {
				t.Errorf("%s: sample %d has other pixels", what, i)
			}
		}
		s := stats()
		return imagecapi.Stats{EntriesUsed: s.EntriesUsed - before.EntriesUsed,
			EntriesVerified: s.EntriesVerified - before.EntriesVerified,
			EntriesRefused:  s.EntriesRefused - before.EntriesRefused, EntriesMade: s.EntriesMade - before.EntriesMade}
	}
	expect := func(what string, got, want imagecapi.Stats) {
		t.Helper()
		if got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}

	store := &mapStore{blobs: map[int][]byte{}}
	points := NewEntryPoints(store, 3, false)
	expect("first epoch", epoch("first epoch", points, photos, want), imagecapi.Stats{EntriesMade: 3})
	expect("second epoch", epoch("second epoch", points, photos, want), imagecapi.Stats{EntriesUsed: 3})
	for i, p := range photos {
		if n := len(store.blobs[i]); n == 0 || n > len(p)*15/1000 {
			t.Errorf("the blob of %d bytes has %d, want n not 0, n at most %v",
				len(p), n, len(p)*15/1000)
		}
	}

	later := NewEntryPoints(store, 3, false)
	expect("another process", epoch("another process", later, photos, want), imagecapi.Stats{EntriesVerified: 3})
	expect("its second epoch", epoch("its second epoch", later, photos, want), imagecapi.Stats{EntriesUsed: 3})
	expect("trusted", epoch("trusted", NewEntryPoints(store, 3, true), photos, want), imagecapi.Stats{EntriesUsed: 3})

	// The archive has changed under the index: samples 0 and 1 are exchanged.
	swapped := slices.Clone(photos)
	swapped[0], swapped[1] = swapped[1], swapped[0]
	swappedWant := slices.Clone(want)
	swappedWant[0], swappedWant[1] = swappedWant[1], swappedWant[0]
	expect("stale", epoch("stale", points, swapped, swappedWant), imagecapi.Stats{EntriesUsed: 1, EntriesRefused: 2})

	// The blobs do not match their proofs, or are from elsewhere.
	forged := &mapStore{blobs: maps.Clone(store.blobs)}
	forged.blobs[0] = forged.blobs[1]
	forged.blobs[1] = append(bytes.Clone(forged.blobs[1][:64]), make([]byte, 64)...)
	forged.blobs[2] = []byte("TSE1")
	changed := NewEntryPoints(forged, 3, false)
	for i := range points.proofs {
		changed.proofs[i].Store(points.proofs[i].Load())
	}
	expect("forged", epoch("forged", changed, photos, want), imagecapi.Stats{EntriesRefused: 3})
	unproven := NewEntryPoints(forged, 3, false)
	expect("forged, unproven", epoch("forged, unproven", unproven, photos, want), imagecapi.Stats{EntriesRefused: 3})

	// Wrong blobs are replaced, once.
	expect("replaced", epoch("replaced", unproven, photos, want), imagecapi.Stats{EntriesMade: 3})
	expect("replacements are used", epoch("replacements are used", unproven, photos, want),
		imagecapi.Stats{EntriesUsed: 3})
	for i := range photos {
		if !bytes.Equal(forged.blobs[i], store.blobs[i]) {
			t.Errorf("the blob of sample %d was not replaced", i)
		}
	}
}
