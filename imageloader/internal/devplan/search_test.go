package devplan

import (
	"bytes"
	"encoding/binary"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// foundIn returns the entry points that a device would find in a file for a search. It derives them
// from a blob with the same spacing; cshim/src/image/entries.h describes the format.
func foundIn(t *testing.T, d *imagecapi.Decoder, data []byte, s *imagecapi.Search) []byte {
	t.Helper()
	blob := make([]byte, len(data))
	n, _, err := imagecapi.MakeEntries(d, data, int(s.Spacing), blob)
	if err != nil || n == 0 || n > len(blob) {
		t.Fatal(n, err)
	}
	le := binary.LittleEndian
	origin, slope := int32(le.Uint32(blob[36:])), uint64(le.Uint32(blob[40:]))
	bit := 64 * 8
	field := func(width byte) uint32 {
		value := uint32(0)
		for k := range int(width) {
			value |= uint32(blob[(bit+k)/8]>>((bit+k)%8)&1) << k
		}
		bit += int(width)
		return value
	}
	var found []byte
	for i := range uint64(s.Entries) {
		found = le.AppendUint32(found, uint32(origin)+uint32(i*slope>>8)+field(blob[50]))
		for c := range 3 {
			found = le.AppendUint16(found, le.Uint16(blob[44+2*c:])+uint16(field(blob[51+c])))
		}
	}
	return found
}

// TestFoundEntryPointsAreKept: entry points found by a consumer are stored like the decoder's,
// unless different ones are stored already or they are impossible.
func TestFoundEntryPointsAreKept(t *testing.T) {
	d, err := imagecapi.NewDecoder(0)
	if err != nil {
		t.Skip(err)
	}
	defer imagecapi.FreeDecoder(d)
	data := archivetest.Photo(t, 1)
	g := imagecapi.Geometry{CropWidth: 320, CropHeight: 240, ResizeWidth: 32, ResizeHeight: 32,
		WindowWidth: 32, WindowHeight: 32}
	var s Search
	if _, n, err := imagecapi.PlanScan(d, data, &g, nil, nil, &s.Search); err != nil || n == 0 || s.Wanted == 0 {
		t.Fatalf("a plan of %d bytes, %v: %+v, want no error, n not 0, s.Wanted not 0", n, err, s.Search)
	}
	found := foundIn(t, d, data, &s.Search)
	want := make([]byte, len(data))
	n, proof, err := imagecapi.MakeEntries(d, data, 0, want)
	if err != nil || n == 0 {
		t.Fatal(n, err)
	}
	want = want[:n]
	store := &mapStore{blobs: map[int][]byte{2: want, 3: []byte("another")}}
	p := NewEntryPoints(store, 5, false)
	for _, test := range []struct {
		what         string
		i            int
		found        []byte
		made, others bool
		blob         []byte
		proof        uint64
	}{
		{"none before", 0, found, true, false, want, proof},
		{"found again", 0, found, false, false, want, proof},
		{"of an earlier process", 2, found, false, false, want, proof},
		{"others before", 3, found, false, true, []byte("another"), 0},
		{"impossible", 4, make([]byte, len(found)), false, false, nil, 0},
		{"of another size", 4, found[1:], false, false, nil, 0},
	} {
		made, others := p.KeepFound(test.i, &s, test.found)
		if made != test.made || others != test.others || !bytes.Equal(store.blobs[test.i], test.blob) ||
			p.proofs[test.i].Load() != test.proof {
			t.Errorf("%s: made %v, others %v, a blob of %d bytes, proof %v", test.what, made, others,
				len(store.blobs[test.i]), p.proofs[test.i].Load() != 0)
		}
	}
}

// TestImageWithoutRoomInIndexIsSearchedAgain: without room in the index an image has no proof. A
// device then searches it again, and the workers need not decode it.
func TestImageWithoutRoomInIndexIsSearchedAgain(t *testing.T) {
	d, err := imagecapi.NewDecoder(0)
	if err != nil {
		t.Skip(err)
	}
	defer imagecapi.FreeDecoder(d)
	data := archivetest.Photo(t, 1)
	g := imagecapi.Geometry{CropWidth: 320, CropHeight: 240, ResizeWidth: 32, ResizeHeight: 32,
		WindowWidth: 32, WindowHeight: 32}
	var s Search
	if _, n, err := imagecapi.PlanScan(d, data, &g, nil, nil, &s.Search); err != nil || n == 0 || s.Wanted == 0 {
		t.Fatalf("a plan of %d bytes, %v: %+v, want no error, n not 0, s.Wanted not 0", n, err, s.Search)
	}
	store := &mapStore{blobs: map[int][]byte{}, full: true}
	p := NewEntryPoints(store, 1, false)
	found := foundIn(t, d, data, &s.Search)
	worker, err := codec.New(1 << 24)
	if err != nil {
		t.Fatal(err)
	}
	defer worker.Close()
	w, dst := NewDecoder(p, worker), make([]byte, 32*32*3)
	for _, full := range []bool{true, false} {
		store.full = full
		made, others := p.KeepFound(0, &s, found)
		if made == full || others || w.Plannable(0) == full {
			t.Errorf("no room %v: found ones are made %v, others %v, plannable %v", full, made, others, w.Plannable(0))
		}
		p.proofs[0].Store(0)
		delete(store.blobs, 0)
		if err := w.Decode(0, data, &g, dst, 32*3); err != nil || w.Plannable(0) == full {
			t.Errorf("no room %v: decoding makes them: %v, plannable %v", full, err, w.Plannable(0))
		}
	}
}

// Images that the device returned are not searched again.
func TestRefusedImagesAreNotSearchedAgain(t *testing.T) {
	s, none := &Searches{refused: newSampleBits(200)}, (*Searches)(nil)
	s.Refuse(64)
	s.Refuse(199)
	for i := range 200 {
		if got, want := s.Allowed(i), i != 64 && i != 199; got != want || none.Allowed(i) {
			t.Errorf("sample %d may be searched: %v", i, got)
		}
	}
}
