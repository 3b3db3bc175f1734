package imageloader

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestPartsHaveWhatTheCropNeeds: for crops of all sizes and places, the room of a plan is for whole
// pieces of the file, those of the crop's segments alone, and the plan is the whole file's but for
// the place of the bytes.
func TestPartsHaveWhatTheCropNeeds(t *testing.T) {
	data := photo(t, 5)
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
		t.Fatal("no head")
	}
	head := slices.Concat(tables, frame)
	blob := make([]byte, 1<<16)
	whole := imagecapi.Geometry{CropWidth: info.Width, CropHeight: info.Height, ResizeWidth: 40, ResizeHeight: 30, WindowWidth: 40, WindowHeight: 30}
	n, proof, err := d.DecodeMakingEntryPoints(data, &whole, make([]byte, 40*30*3), 40*3, blob)
	if err != nil || n == 0 {
		t.Fatalf("no entry points: %v", err)
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
			if p.From%piece != 0 || size%piece != 0 && p.From+size != len(data) || p.Begin < p.At || p.End > p.At+p.Bytes || size < 1 {
				t.Fatalf("%+v: %+v of %d bytes", g, p, len(data))
			}
			least = min(least, size)
			other := alignedBytes(1 << 18)
			at, n, err := d.AppendPlan(data, &g, blob, &proof, other, &usedToo)
			if err != nil || n == 0 {
				t.Fatalf("%+v: %d bytes, %v", g, n, err)
			}
			// The segments' bytes of the other plan lie in the part, in their order.
			segments := other[at : at+n]
			if got := len(segments) - p.Begin; got < 1 {
				t.Fatalf("%+v: %d bytes of segments", g, got)
			}
			run := segments[p.Begin : p.Begin+min(64, len(segments)-p.Begin-32)]
			if !bytes.Contains(data[p.From:p.From+size], run) {
				t.Errorf("%+v: the part from %d to %d does not have the first segment", g, p.From, p.From+size)
			}
		}
	}
	if least > len(data)/4 {
		t.Errorf("the smallest part has %d of %d bytes", least, len(data))
	}
	var used atomic.Uint64
	if p, err := d.PlanPart(head, len(data)+1, scan, &whole, blob, piece, alignedBytes(1<<18), &used); err != nil || p.Bytes != 0 || used.Load() != 0 {
		t.Errorf("entry points of another file: %+v, %v", p, err)
	}
	if p, err := d.PlanPart(head, len(data), scan, &whole, blob, piece, alignedBytes(1<<10), &used); err != nil || p.Bytes != 0 || used.Load() != 0 {
		t.Errorf("without room: %+v, %v", p, err)
	}
	if p, err := d.PlanPart(head, len(data), scan, &whole, blob, 0, alignedBytes(1<<18), &used); err == nil || p.Bytes != 0 {
		t.Errorf("pieces of 0 bytes: %+v", p)
	}
}

// TestDigestsOfPieces: each piece has a digest of its own, also a short last one.
func TestDigestsOfPieces(t *testing.T) {
	data := photo(t, 6)
	digests := func(data []byte) []uint64 {
		d := make([]uint64, (len(data)+999)/1000)
		if err := imagecapi.DigestPieces(data, 1000, d); err != nil {
			t.Fatal(err)
		}
		return d
	}
	want := digests(data)
	if part := digests(data[2000:5000]); !slices.Equal(part, want[2:5]) {
		t.Error("the digests of a part are others")
	}
	for _, i := range []int{0, 1000, 4321, len(data) - 1} {
		data[i] ^= 1
		for k, d := range digests(data) {
			if (d != want[k]) != (k == i/1000) {
				t.Errorf("byte %d: digest %d", i, k)
			}
		}
		data[i] ^= 1
	}
	if err := imagecapi.DigestPieces(data, 1000, want[1:]); err == nil {
		t.Error("too few digests are accepted")
	}
}

// TestDigestsAreCountedOnce: if two goroutines keep the digests of a sample, those of one are kept
// and counted, and none once they are forgotten.
func TestDigestsAreCountedOnce(t *testing.T) {
	h := newHeads(1)
	first, second := &jpegHead{pieces: make([]uint64, 3)}, &jpegHead{pieces: make([]uint64, 3)}
	for _, head := range []*jpegHead{first, second} {
		if !h.reserve(3) {
			t.Fatal("no room")
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

// TestPartsOfATar: from the second pass with plans by entry points on, parts of the files are read,
// and a file that has changed is not planned: its bytes are not those that its digests are of. Here
// the first epoch finds no entry points, and the second one makes them.
func TestPartsOfATar(t *testing.T) {
	if d, err := (shimCodec{}).newDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	const photos = 20
	path := planArchive(t, "parts.tar", photos, 0)
	l, err := Open(path, Options{BatchSize: 4, Shuffle: true, Workers: 2, Transform: Train(32), BadSamples: Skip})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	plain, err := Open(path, Options{BatchSize: 4, Shuffle: true, Workers: 2, Transform: Train(32), BadSamples: Skip})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	c := &planned{capacity: 4 << 20, slots: 2}
	kept := func() (n int) {
		h := l.entryPoints(l.index.Load()).headsOf()
		for i := range h.heads {
			if head := h.heads[i].Load(); head != nil && head.pieces != nil {
				n++
			}
		}
		return n
	}
	const epochs = 4
	for epoch := range epochs {
		c.rows = 0
		got, err := c.epoch(t, l, epoch)
		if err != nil {
			t.Fatal(err)
		}
		want, err := collect(t, plain, epoch, 2)
		if err != nil {
			t.Fatal(err)
		}
		for i := range want {
			if !bytes.Equal(got[i].images, want[i].images) {
				t.Errorf("epoch %d: batch %d has other pixels", epoch, i)
			}
		}
		if epoch >= 2 && (c.rows != photos || kept() != photos) {
			t.Fatalf("epoch %d: %d rows have plans, %d heads are kept, want %d", epoch, c.rows, kept(), photos)
		}
	}
	// In place: the loader has the file open. The size and the time stay.
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	archive, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const changed = 5
	for i := range changed {
		content := photo(t, uint64(i))
		at := bytes.Index(archive, content)
		if at < 0 {
			t.Fatalf("photograph %d is not in the archive", i)
		}
		for b := at + len(content)/3; b < at+len(content); b += 50 {
			archive[b] ^= 0x55
		}
	}
	if err := os.WriteFile(path, archive, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	c.rows = 0
	_, err = c.epoch(t, l, epochs)
	for key := range c.seen {
		name := l.index.Load().Sample(key[1]).Name
		var i int
		if _, e := fmt.Sscanf(filepath.Base(name), "%d.jpg", &i); e == nil && key[0] == epochs && i < changed {
			t.Errorf("%s has a plan after it was changed", name)
		}
	}
	if c.rows > photos-changed || err == nil && kept() != photos-changed {
		t.Errorf("%d rows have plans, %d heads are kept: %v", c.rows, kept(), err)
	}
}
