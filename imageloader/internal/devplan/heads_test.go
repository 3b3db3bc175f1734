package devplan

import (
	"bytes"
	"hash/crc32"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// segment returns a JPEG segment.
func segment(marker byte, content []byte) []byte {
	n := len(content) + 2
	return append([]byte{0xFF, marker, byte(n >> 8), byte(n)}, content...)
}

// TestSplitHeadKeepsWhatDecodingNeeds: a head gives the same plan as its file, even if the file has
// segments that do not affect decoding.
func TestSplitHeadKeepsWhatDecodingNeeds(t *testing.T) {
	plain := archivetest.Photo(t, 3)
	exif := slices.Concat(plain[:2], segment(0xE1, bytes.Repeat([]byte("Exif\x00\x00"), 5000)),
		segment(markerComment, []byte("no comment")),
		segment(0xE2, make([]byte, 60000)), plain[2:])
	for name, data := range map[string][]byte{"plain": plain, "with other segments": exif} {
		t.Run(name, func(t *testing.T) {
			tables, frame, scan, ok := splitHead(data)
			head := slices.Concat(tables, frame)
			if !ok || len(head) > 1000 || !bytes.Equal(data[scan-len(frame)+19:scan], frame[19:]) {
				t.Fatalf("%v, %d bytes, scan at %d", ok, len(head), scan)
			}
			d, err := codec.New(1 << 24)
			if err != nil {
				t.Fatal(err)
			}
			defer d.Close()
			info, err := d.Header(head)
			whole, err2 := d.Header(data)
			if err != nil || err2 != nil || info.Width != whole.Width || info.Height != whole.Height {
				t.Fatalf("%+v, %+v: %v, %v", info, whole, err, err2)
			}
			g := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 40,
				ResizeHeight: 30, WindowWidth: 40, WindowHeight: 30}
			blob := make([]byte, 1<<16)
			n, _, err := d.DecodeMakingEntryPoints(data, &g, make([]byte, 40*30*3), 40*3, blob)
			if err != nil || n == 0 {
				t.Fatalf("no entry points: %v, n %v, want no error, n not 0", err, n)
			}
			plan := alignedBytes(1 << 20)
			p, err := d.PlanHead(head, len(data), scan, &g, blob[:n], nil, plan)
			if err != nil || p == 0 || p > len(plan) {
				t.Fatalf("a plan of %d bytes: %v, want no error, p not 0, p at most %v", p, err, len(plan))
			}
			if p, err := d.PlanHead(head, len(data)+1, scan, &g, blob[:n], nil, plan); err != nil || p != 0 {
				t.Errorf("entry points of another file plan %d bytes: %v, want no error, p = 0", p, err)
			}
		})
	}
}

func TestSplitHeadRefusesUnusualFiles(t *testing.T) {
	plain := archivetest.Photo(t, 3)
	for name, data := range map[string][]byte{
		"nothing":               nil,
		"no image":              []byte("\x89PNG"),
		"cut off":               plain[:300],
		"an unknown segment":    slices.Concat(plain[:2], segment(0xF3, []byte{1}), plain[2:]),
		"a progressive frame":   slices.Concat(plain[:2], segment(0xC2, make([]byte, 15)), plain[2:]),
		"a thumbnail":           slices.Concat(plain[:2], segment(markerJFIF, make([]byte, 3000)), plain[2:]),
		"many tables":           slices.Concat(plain[:2], segment(markerQuantisers, make([]byte, 5000)), plain[2:]),
		"a length of 0":         slices.Concat(plain[:2], []byte{0xFF, markerComment, 0, 0}, plain[2:]),
		"two frames":            slices.Concat(plain[:2], segment(markerFrame, make([]byte, 15)), plain[2:]),
		"a scan without frame":  slices.Concat(plain[:2], segment(markerScan, make([]byte, 10))),
		"bytes between markers": slices.Concat(plain[:2], []byte{0}, plain[2:]),
	} {
		if _, _, _, ok := splitHead(data); ok {
			t.Errorf("%s: it has a head", name)
		}
	}
}

// TestHeadsAreKeptForTheirEntryPoints: heads share tables, their checksum continues the checksum of
// the tar headers, and other entry points replace them.
func TestHeadsAreKeptForTheirEntryPoints(t *testing.T) {
	h := newHeads(3)
	lead := []byte("header")
	for i := range 3 {
		data := archivetest.Photo(t, uint64(i))
		h.keep(i, data, &imagecapi.Info{Width: int32(i)},
			index.Inflated{Lead: crc32.ChecksumIEEE(lead), End: int64(i)}, []byte("entries"))
		got := h.heads[i].Load()
		if got == nil || got.checksum != crc32.ChecksumIEEE(slices.Concat(lead, data)) ||
			got.Info.Width != int32(i) || got.from.End != int64(i) {
			t.Fatalf("%d: %+v", i, got)
		}
	}
	if len(h.tables) == 0 || h.used > 3*1000 {
		t.Errorf("%d tables, %d bytes, want len(h.tables) at least 1, h.used at most %v",
			len(h.tables), h.used, 3*1000)
	}
	first := h.heads[0].Load()
	h.keep(0, archivetest.Photo(t, 0), &imagecapi.Info{}, index.Inflated{}, []byte("entries"))
	if got := h.heads[0].Load(); got != first {
		t.Errorf("after keep with the same entry points the head is %p, want the first, %p", got, first)
	}
	h.refuse(2)
	h.keep(2, archivetest.Photo(t, 2), &imagecapi.Info{}, index.Inflated{End: 7}, []byte("entries"))
	if got := h.heads[2].Load(); got.from.End != 0 || got.scan == 0 {
		t.Errorf("a refused head is %+v, want got.from.End = 0, got.scan not 0", got)
	}
	h.keep(0, archivetest.Photo(t, 0), &imagecapi.Info{}, index.Inflated{}, []byte("others"))
	if h.heads[0].Load() == first {
		t.Error("after keep with other entry points the first head is still there, want a new one")
	}
}

// FuzzSplitHead: for any file, the head is within its maximum size and ends where the scan starts.
// Planning from it does not fault.
func FuzzSplitHead(f *testing.F) {
	f.Add([]byte{0xFF, markerImage})
	f.Add(slices.Concat([]byte{0xFF, markerImage}, segment(markerFrame, make([]byte, 15)),
		segment(markerScan, make([]byte, 10))))
	f.Fuzz(func(t *testing.T, data []byte) {
		tables, frame, scan, ok := splitHead(data)
		if !ok {
			return
		}
		if scan > len(data) || len(tables)+len(frame) > maxKept+100 {
			t.Fatalf("a head of %d bytes, a scan at %d of %d, want scan at most %v, len(tables) + "+
				"len(frame) at most %v", len(tables)+len(frame), scan, len(data), len(data), maxKept+100)
		}
		d, err := codec.New(1 << 24)
		if err != nil {
			t.Fatal(err)
		}
		defer d.Close()
		g := imagecapi.Geometry{CropWidth: 1, CropHeight: 1, ResizeWidth: 4, ResizeHeight: 4,
			WindowWidth: 4, WindowHeight: 4}
		_, _ = d.PlanHead(slices.Concat(tables, frame), len(data), scan, &g, data, nil, alignedBytes(1<<16))
	})
}
