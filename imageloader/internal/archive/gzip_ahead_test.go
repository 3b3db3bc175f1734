package archive

import (
	"bytes"
	"compress/flate"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// inflated is what a gzipReader makes of a file.
type inflated struct {
	data   []byte
	points []Checkpoint
	err    error
	joined int // chunks
}

// aheadReader returns the reader of a gzip file. With tasks > 1, goroutines inflate chunks of the
// given size ahead. The reader has not started any of them yet.
func aheadReader(ctx context.Context, t testing.TB, file []byte, chunk int64, tasks int) (*gzipReader, *contextReader) {
	t.Helper()
	source := &contextReader{ctx: ctx, reader: bytes.NewReader(file), spent: new(time.Duration)}
	r, err := newGzipReader(source)
	if err != nil {
		t.Fatal(err)
	}
	r.inflateAhead(ctx, source, bytes.NewReader(file), int64(len(file)), chunk, tasks)
	return r, source
}

// inflate reads a gzip file. With tasks > 1, goroutines inflate chunks of the given size ahead.
func inflate(t testing.TB, file []byte, chunk int64, tasks int) (got inflated) {
	t.Helper()
	r, source := aheadReader(t.Context(), t, file, chunk, tasks)
	defer r.close()
	if err := r.mark(func(c Checkpoint) { got.points = append(got.points, c) }); err != nil {
		t.Fatal(err)
	}
	piece := make([]byte, 100_000)
	for got.err == nil {
		var n int
		n, got.err = r.Read(piece)
		got.data = append(got.data, piece[:n]...)
	}
	if r.ahead != nil {
		got.joined = r.ahead.pace.joins
	}
	if source.count != int64(len(file)) && got.err == io.EOF {
		t.Errorf("got %d bytes read, want %d", source.count, len(file))
	}
	return got
}

// compare fails if inflating ahead changes a byte, a checkpoint or the error. It returns the number
// of chunks that were joined.
func compare(t testing.TB, what string, file []byte, chunk int64) int {
	t.Helper()
	want := inflate(t, file, chunk, 1)
	got := inflate(t, file, chunk, 3)
	if !errors.Is(got.err, want.err) && got.err.Error() != want.err.Error() {
		t.Fatalf("%s: got the error %v, want %v", what, got.err, want.err)
	}
	if want.err != io.EOF { // how much comes before an error depends on the size of the steps
		n, points := min(len(got.data), len(want.data)), min(len(got.points), len(want.points))
		if !bytes.Equal(got.data[:n], want.data[:n]) {
			t.Fatalf("%s: got other bytes before the error %v", what, want.err)
		}
		if len(got.data) < len(want.data)-inflateRoom {
			t.Fatalf("%s: got %d bytes before the error %v, want %d less at most a step of %d", what, len(got.data),
				want.err, len(want.data), inflateRoom)
		}
		if !slices.EqualFunc(got.points[:points], want.points[:points], equalPoints) {
			t.Fatalf("%s: got other checkpoints before the error %v", what, want.err)
		}
		return got.joined
	}
	if !bytes.Equal(got.data, want.data) {
		t.Fatalf("%s: got %d bytes, want %d, or other ones", what, len(got.data), len(want.data))
	}
	if !slices.EqualFunc(got.points, want.points, equalPoints) {
		for i := range min(len(got.points), len(want.points)) {
			if g, w := got.points[i], want.points[i]; !equalPoints(g, w) {
				t.Fatalf("%s: checkpoint %d of %d: got bit %d, output %d, window of %d bytes, want %d, %d, %d of %d", what, i,
					len(got.points), g.Bit, g.Output, len(g.Window), w.Bit, w.Output, len(w.Window), len(want.points))
			}
		}
		t.Fatalf("%s: got %d checkpoints, want %d", what, len(got.points), len(want.points))
	}
	return got.joined
}

func equalPoints(a, b Checkpoint) bool {
	return a.Bit == b.Bit && a.Output == b.Output && bytes.Equal(a.Window, b.Window)
}

// kinds returns bytes of several kinds: like photographs, with headers that are alike; text; and
// noise.
func kinds(rng *rand.Rand, n int) map[string][]byte {
	photos := make([]byte, 0, n)
	header := make([]byte, 512)
	for i := range header {
		header[i] = byte(rng.IntN(256))
	}
	for len(photos) < n {
		photos = append(photos, header...)
		for range 3000 + rng.IntN(60_000) {
			photos = append(photos, byte(rng.IntN(250)&(rng.IntN(256)|63)))
		}
		photos = append(photos, make([]byte, 512-len(photos)%512)...)
	}
	text := make([]byte, 0, n)
	for len(text) < n {
		text = fmt.Appendf(text, "%d bottles of beer on wall %d;", rng.IntN(1000), rng.IntN(10))
	}
	noise := make([]byte, n)
	for i := range noise {
		noise[i] = byte(rng.IntN(256))
	}
	return map[string][]byte{"photographs": photos[:n], "text": text[:n], "noise": noise}
}

// TestInflatingAheadChangesNothing: the reader returns the same bytes and checkpoints, whatever the
// contents, the compressor's level and the members. It joins the chunks of photographs.
func TestInflatingAheadChangesNothing(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	cases := 0
	for name, all := range kinds(rng, 2<<20) {
		for _, level := range []int{1, 6, flate.HuffmanOnly, flate.NoCompression} {
			for _, every := range []int{len(all), 1_000_000, 65_280, 900} {
				data := all
				if every < 1000 {
					data = all[:1<<20]
				}
				what := fmt.Sprintf("%s, level %d, members of %d", name, level, every)
				file := archivetest.GzipSplit(t, data, every, level)
				for _, chunk := range []int64{128 << 10, 300_000} {
					if int64(len(file)) < 4*chunk {
						continue
					}
					cases++
					joined := compare(t, what, file, chunk)
					if name == "photographs" && joined < int(int64(len(file))/chunk)*3/4-1 {
						t.Errorf("%s: got %d of %d chunks joined, want three quarters", what, joined, int64(len(file))/chunk)
					}
				}
			}
		}
	}
	if cases < 60 {
		t.Errorf("got %d cases of large enough files, want 60 or more", cases)
	}
}

// TestChunkEndsAtAHeaderAcrossItsEnd: a chunk ends at the member whose header starts in the chunk
// and ends after it, and does not inflate that member.
func TestChunkEndsAtAHeaderAcrossItsEnd(t *testing.T) {
	data := kinds(rand.New(rand.NewPCG(11, 12)), 2<<20)["photographs"]
	first := archivetest.GzipSplit(t, data[:1<<20], 1<<20, 6)
	second := archivetest.GzipSplit(t, data, 2<<20, 6)
	const named = 200 // bytes of the second member's header after the first ten
	file := slices.Clone(first)
	file = append(file, second[:3]...)
	file = append(file, second[3]|8) // FNAME
	file = append(file, second[4:10]...)
	file = append(file, bytes.Repeat([]byte("n"), named-1)...)
	file = append(file, 0)
	file = append(file, second[10:]...)
	chunk := int64(len(first)+named) / 4 // the fourth chunk ends in the name
	if at := 4 * chunk; at <= int64(len(first)) || at >= int64(len(first)+10+named) {
		t.Fatalf("the chunk ends at %d, want a place in the header from %d on", at, len(first))
	}
	compare(t, "a header across the end", file, chunk)
	r, _ := aheadReader(t.Context(), t, file, chunk, 4)
	defer r.close()
	entered := false
	for c := r.ahead.head(); c != nil && !entered; c = r.ahead.head() {
		<-c.done
		if c.end == 4*chunk {
			entered = c.origin > c.end
			if inside := c.wr - c.base; !c.usable || inside > 300_000 {
				t.Errorf("got a chunk that ends at %d, usable: %v, after %d bytes of the member at %d; want a usable chunk "+
					"with few bytes of the member", c.end, c.usable, inside, c.origin)
			}
			break
		}
		r.ahead.pop(false) // frees the chunk's inflater
	}
	if !entered {
		t.Error("no chunk has entered the member whose header is across its end")
	}
}

// TestChunksAreJoinedAcrossChainsOfCopies: tar headers are copied from the header before, so that
// bytes of a chunk depend on the unknown window to its end.
func TestChunksAreJoinedAcrossChainsOfCopies(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	var data []byte
	header := []byte("a header that all small files have, with the same text again and again")
	for len(data) < 4<<20 {
		data = append(data, header...)
		for range 2000 + rng.IntN(9000) {
			data = append(data, byte(rng.IntN(200)))
		}
	}
	file := archivetest.GzipSplit(t, data, len(data), 6)
	if joined := compare(t, "small files", file, 256<<10); joined < 10 {
		t.Errorf("got %d chunks joined, want 10 or more of %d", joined, len(file)>>18)
	}
}

// mutated returns a copy of a file with damage: changed, removed, repeated or added bytes.
func mutated(rng *rand.Rand, file []byte) []byte {
	file = slices.Clone(file)
	for range 1 + rng.IntN(3) {
		at := 20 + rng.IntN(len(file)-20)
		n := min(1+rng.IntN(40), len(file)-at)
		switch rng.IntN(5) {
		case 0:
			file[at] ^= 1 << rng.IntN(8)
		case 1:
			for i := range n {
				file[at+i] = byte(rng.IntN(256))
			}
		case 2:
			file = slices.Delete(file, at, at+n)
		case 3:
			file = slices.Insert(file, at, file[at:at+n]...)
		default:
			if rng.IntN(4) == 0 {
				file = file[:at]
			}
			clear(file[min(at, len(file)):min(at+n, len(file))])
		}
	}
	return file
}

// TestDamageIsFoundWhenInflatingAhead: mutated files give the serial reader's bytes or error.
// -mutants=10000 tries as many.
func TestDamageIsFoundWhenInflatingAhead(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	var files [][]byte
	for _, data := range kinds(rng, 500_000) {
		for _, level := range []int{1, 6, flate.NoCompression} {
			for _, every := range []int{len(data), 150_000} {
				if file := archivetest.GzipSplit(t, data, every, level); len(file) > 4*70_000 {
					files = append(files, file)
				}
			}
		}
	}
	joined, damaged := 0, 0
	for i := range *mutants {
		file := mutated(rng, files[i%len(files)])
		if len(file) < 4*70_000 {
			continue
		}
		joined += compare(t, fmt.Sprintf("mutant %d", i), file, 70_000)
		damaged++
	}
	if joined < damaged || damaged < *mutants/2 {
		t.Errorf("got %d chunks joined in %d mutants, want more chunks, and at least %d mutants", joined, damaged,
			*mutants/2)
	}
}

var mutants = flag.Int("mutants", 200, "mutated files that TestDamageIsFoundWhenInflatingAhead tries")

// FuzzInflatingAhead compares the two ways to read a file.
func FuzzInflatingAhead(f *testing.F) {
	rng := rand.New(rand.NewPCG(9, 10))
	for _, data := range kinds(rng, 300_000) {
		f.Add(archivetest.GzipSplit(f, data, 100_000, 6))
		f.Add(archivetest.GzipSplit(f, data, len(data), flate.HuffmanOnly))
	}
	f.Fuzz(func(t *testing.T, file []byte) {
		if len(file) >= 4*40_000 && gzipHeader(file) > 0 {
			compare(t, "file", file, 40_000)
		}
	})
}

// TestEndedContextEndsInflatingAhead: after the context has ended, reads fail, and Close ends the
// goroutines.
func TestEndedContextEndsInflatingAhead(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	file := archivetest.GzipSplit(t, kinds(rng, 4<<20)["photographs"], 4<<20, 6)
	ctx, cancel := context.WithCancel(t.Context())
	r, _ := aheadReader(ctx, t, file, 256<<10, 4)
	if _, err := io.CopyN(io.Discard, r, 600_000); err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, r); !errors.Is(err, ErrStopped) {
		t.Errorf("got the error %v, want ErrStopped", err)
	}
	r.close()
	if n := len(r.ahead.queue); n > 0 {
		t.Errorf("got %d chunks after close, want none", n)
	}
}

// TestMemoryOfInflatingAheadIsBounded: the output of a chunk that shrinks much is limited.
func TestMemoryOfInflatingAheadIsBounded(t *testing.T) {
	data := make([]byte, 64<<20)
	for i := range data {
		data[i] = byte(i >> 7 * 37)
	}
	file := archivetest.GzipSplit(t, data, len(data), 1)
	chunk := int64(len(file) / 5)
	r, _ := aheadReader(t.Context(), t, file, chunk, 4)
	defer r.close()
	for c := r.ahead.head(); c != nil; c = r.ahead.head() {
		<-c.done
		if limit := windowBytes + gzipChunkRatio*int(chunk) + gzipChunkRoom; len(c.out) > limit {
			t.Errorf("got a chunk of %d bytes, want at most %d", len(c.out), limit)
		}
		r.ahead.pop(false)
	}
}
