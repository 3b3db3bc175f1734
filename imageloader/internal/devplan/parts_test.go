package devplan

import (
	"bytes"
	"encoding/binary"
	"errors"
	"hash/maphash"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/digest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestPartsHaveWhatTheCropNeeds: for crops of all sizes and positions, a plan's room holds whole
// pieces of the file, and only those with the crop's segments. The plan equals the whole file's
// plan except for the position of the bytes.
func TestPartsHaveWhatTheCropNeeds(t *testing.T) {
	data := archivetest.Photo(t, 5)
	d, err := codec.New(1 << 24)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	info, err := d.Header(data)
	if err != nil {
		t.Fatal(err)
	}
	tables, frame, scan, ok := splitHead(data)
	if !ok {
		t.Fatal("splitHead(a photograph) = false, want true")
	}
	head := slices.Concat(tables, frame)
	blob := make([]byte, 1<<16)
	whole := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 40,
		ResizeHeight: 30, WindowWidth: 40, WindowHeight: 30}
	n, proof, err := d.DecodeMakingEntryPoints(data, &whole, make([]byte, 40*30*3), 40*3, blob)
	if err != nil || n == 0 {
		t.Fatalf("no entry points: %v, n %v, want no error, n not 0", err, n)
	}
	blob = blob[:n]
	const piece = 512
	least := len(data)
	for top := int32(0); top < info.Height; top += 37 {
		for height := int32(8); top+height <= info.Height; height += 61 {
			g := whole
			g.CropY, g.CropHeight = top, height
			memory := alignedBytes(1 << 18)
			var used, usedToo atomic.Uint64
			p, err := d.PlanPart(head, len(data), scan, &g, blob, piece, memory, &used)
			if err != nil || p.Bytes == 0 || p.At != 0 || int(used.Load()) != p.Bytes {
				t.Fatalf("%+v: %+v, %v", g, p, err)
			}
			size := p.End - p.Begin
			if p.From%piece != 0 || size%piece != 0 && p.From+size != len(data) || p.Begin < p.At ||
				p.End > p.At+p.Bytes || size < 1 {
				t.Fatalf("%+v: %+v of %d bytes", g, p, len(data))
			}
			least = min(least, size)
			other := alignedBytes(1 << 18)
			at, n, err := d.AppendPlan(data, &g, blob, &proof, other, &usedToo)
			if err != nil || n == 0 {
				t.Fatalf("%+v: %d bytes, %v, want no error, n not 0", g, n, err)
			}
			// The part contains the segments' bytes of the other plan, in order.
			segments := other[at : at+n]
			if got := len(segments) - p.Begin; got < 1 {
				t.Fatalf("%+v: %d bytes of segments, want at least 1", g, got)
			}
			run := segments[p.Begin : p.Begin+min(64, len(segments)-p.Begin-32)]
			if !bytes.Contains(data[p.From:p.From+size], run) {
				t.Errorf("%+v: the part from %d to %d does not have the first segment", g, p.From, p.From+size)
			}
		}
	}
	if least > len(data)/4 {
		t.Errorf("the smallest part has %d of %d bytes, want at most %v", least, len(data), len(data)/4)
	}
	var used atomic.Uint64
	if p, err := d.PlanPart(head, len(data)+1, scan, &whole, blob, piece, alignedBytes(1<<18),
		&used); err != nil || p.Bytes != 0 || used.Load() != 0 {
		t.Errorf("entry points of another file: %+v, %v, want no error, p.Bytes = 0, used.Load() = 0",
			p, err)
	}
	if p, err := d.PlanPart(head, len(data), scan, &whole, blob, piece, alignedBytes(1<<10),
		&used); err != nil || p.Bytes != 0 || used.Load() != 0 {
		t.Errorf("without room: %+v, %v, want no error, p.Bytes = 0, used.Load() = 0", p, err)
	}
	if p, err := d.PlanPart(head, len(data), scan, &whole, blob, 0, alignedBytes(1<<18),
		&used); err == nil || p.Bytes != 0 {
		t.Errorf("pieces of 0 bytes: %+v, err %v, want an error, p.Bytes = 0", p, err)
	}
}

// TestDigestsAreCountedOnce: if two goroutines keep the digests of a sample, one set is kept and
// counted. After forget none is counted.
func TestDigestsAreCountedOnce(t *testing.T) {
	h := newHeads(1)
	first, second := &Head{pieces: make([]uint64, 3)}, &Head{pieces: make([]uint64, 3)}
	for _, head := range []*Head{first, second} {
		if !h.reserve(3) {
			t.Fatal("reserve(3) = false, want true")
		}
		h.replace(0, nil, head, []byte("entries"))
	}
	if h.heads[0].Load() != first || h.pieces != 3 {
		t.Errorf("%d digests are counted", h.pieces)
	}
	h.forget(0, second)
	h.forget(0, first)
	if h.heads[0].Load() != nil || h.pieces != 0 {
		t.Errorf("%d digests are counted after they were forgotten", h.pieces)
	}
}

// shortPart is a decoder whose plans need the last 3 bytes of a file, and the reader of that file,
// whose memory devices read.
type shortPart struct {
	planDecoder
	file []byte
}

func (s *shortPart) PlanPart(_ []byte, _, _ int, _ *imagecapi.Geometry, _ []byte, piece int, _ []byte,
	used *atomic.Uint64) (imagecapi.Part, error) {
	used.Store(64)
	return imagecapi.Part{Bytes: 64, Begin: 32, End: 35, From: piece}, nil
}

func (s *shortPart) ReadPart(int, *index.ContentPart) error { return errors.New("not called") }

func (s *shortPart) DevicePart(_ int, p *index.ContentPart, _ func([]byte) (func() error, error)) []byte {
	return s.file[p.From:]
}

// blobStore has the same blob for all samples.
type blobStore struct{ blob []byte }

func (s blobStore) EntryPoints(int, []byte) []byte   { return s.blob }
func (s blobStore) KeepEntryPoints(int, []byte) bool { return false }

// TestShortPartHasRoomForItsDigest: the last piece of a file may have fewer bytes than its digest.
func TestShortPartHasRoomForItsDigest(t *testing.T) {
	s := &shortPart{file: make([]byte, digest.Piece+3)}
	store := blobStore{[]byte("blob")}
	points := NewEntryPoints(store, 1, true)
	p := &Planner{Entries: &Decoder{points: points}, d: s}
	h := points.headsOf()
	head := &Head{entries: maphash.Bytes(h.seed, store.blob), pieces: []uint64{1, 0x0807060504030201}}
	plans := &decodeplan.Plans{Memory: alignedBytes(64), Rows: make([]decodeplan.Row, 1)}
	to, err := NewStaging(plans, 1)
	if err != nil {
		t.Fatal(err)
	}
	placed, ok := p.PlanPart(head, &Image{Size: digest.Piece + 3}, s, to)
	if !ok || placed.File.From != &s.file[digest.Piece] || !placed.Redo.Read {
		t.Fatalf("PlanPart = %+v, %v, want a row with the last piece, and true", placed, ok)
	}
	if got, want := binary.NativeEndian.Uint64(plans.Memory[32:]), head.pieces[1]; got != want {
		t.Errorf("the room starts with %#x, want the digest %#x", got, want)
	}
}
