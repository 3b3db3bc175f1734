package imageloader

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestForgedStateOrder: a state that names an order which the loader's options don't have is
// refused; none of them makes an epoch fail in another way.
func TestForgedStateOrder(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 20, nil))
	for name, o := range map[string]Options{
		"in order": {},
		"shuffled": {Shuffle: true},
		"weighted": {Weights: func(Sample) float64 { return 1 }, Draws: 50},
		"balanced": {Balanced: true},
	} {
		o.BatchSize, o.Transform = 4, Eval(4, 4)
		_, after := states(t, openFake(t, path, o), 0, 2)
		data, err := json.Marshal(after[1])
		if err != nil {
			t.Fatal(err)
		}
		accepted := 0
		for _, kind := range []order.Kind{order.Archive, order.Permuted, order.Buffered, order.Drawn} {
			was := fmt.Sprintf("%q:%q", "order", after[1].run.order)
			var forged State
			if err := json.Unmarshal([]byte(strings.Replace(string(data), was, fmt.Sprintf("%q:%q", "order", kind), 1)), &forged); err != nil {
				t.Fatal(err)
			}
			// Only with it would a forger pass for a shuffle buffer.
			if kind == order.Buffered {
				forged.run.options["ShuffleBuffer"], forged.run.options["ShuffleBytes"] = "4096", fmt.Sprint(256<<20)
			}
			l := openFake(t, path, o)
			if err := l.Restore(t.Context(), forged); err != nil {
				if !strings.Contains(err.Error(), "order") {
					t.Errorf("%s as %s: error %v", name, kind, err)
				}
				continue
			}
			accepted++
			if _, err := collect(t, l, 0, 2); err != nil {
				t.Errorf("%s as %s: %v", name, kind, err)
			}
		}
		want := 1
		if o.Shuffle {
			want = 2 // a permutation and a shuffle buffer are both possible
		}
		if accepted != want {
			t.Errorf("%s: %d orders are accepted, want %d", name, accepted, want)
		}
	}
}

// TestForgedIndexSizes: an index whose samples are larger than what its archive can inflate to, one
// by one or together, is not used.
func TestForgedIndexSizes(t *testing.T) {
	data := archivetest.Images(t, 6, nil)
	for name, packed := range map[string][]byte{"a.tgz": archivetest.Gzip(t, data), "a.tar.zst": archivetest.Zstd(t, data), "a.tar": data} {
		for _, size := range []uint64{1 << 40, 1 << 62, math.MaxInt64, math.MaxInt64 / 6} {
			path := archivetest.WriteFile(t, name, packed)
			side := filepath.Join(t.TempDir(), "index")
			o := Options{Transform: Eval(4, 4), IndexFile: side, BatchSize: 2}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
			index, err := os.ReadFile(side)
			if err != nil {
				t.Fatal(err)
			}
			index = indextest.Forge(t, index, indextest.Members, func(b []byte) {
				for ; len(b) > 0; b = b[indextest.MemberBytes:] {
					binary.LittleEndian.PutUint64(b, 0)
					binary.LittleEndian.PutUint64(b[8:], size)
				}
			})
			if err := os.WriteFile(side, index, 0o644); err != nil {
				t.Fatal(err)
			}
			if l, err = open(t.Context(), path, o, openFile, fakeCodec{}); err != nil {
				t.Fatalf("%s with samples of %d bytes: %v", name, size, err)
			}
			if _, err := collect(t, l, 0, 2); err != nil {
				t.Errorf("%s with samples of %d bytes: %v", name, size, err)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestSides: an image of one row with millions of pixels is refused before it is decoded.
func TestSides(t *testing.T) {
	header := func(width uint32) []byte {
		b := append([]byte("BM"), make([]byte, 60)...)
		le := binary.LittleEndian
		le.PutUint32(b[10:], 54+8)
		le.PutUint32(b[14:], 40)
		le.PutUint32(b[18:], width)
		le.PutUint32(b[22:], 1)
		le.PutUint16(b[26:], 1)
		le.PutUint16(b[28:], 1)
		le.PutUint32(b[46:], 2)
		return b
	}
	if _, err := (shimDecoder{}).header(header(maxSide)); err != nil {
		t.Error(err)
	}
	if _, err := (shimDecoder{}).header(header(maxSide + 1)); !errors.Is(err, imagecapi.CodeUnsupported) || !strings.Contains(err.Error(), "a side") {
		t.Errorf("error %v", err)
	}
}

// TestOrderOfEveryOpen: the loader that makes an index and those that find it put epochs into the
// same order, whatever else is in the archive: two ranks may be one of each.
func TestOrderOfEveryOpen(t *testing.T) {
	samples := archivetest.Images(t, 40, nil)
	notes := strings.Repeat("notes", 12_000)
	large := archivetest.Tar(t, archivetest.Member{Name: "notes/a.txt", Data: notes}, archivetest.Member{Name: "notes/b.txt", Data: notes})
	tooLarge := archivetest.Tar(t, archivetest.Member{Name: "train/class0/large.png", Data: archivetest.Image(strings.Repeat("large", 40_000))})
	for name, data := range map[string][]byte{
		"samples":            samples,
		"notes before":       append(large, samples...),
		"a sample too large": append(tooLarge, samples...),
	} {
		for file, packed := range map[string][]byte{"a.tgz": archivetest.Gzip(t, data), "a.tar.zst": archivetest.Zstd(t, data)} {
			path := archivetest.WriteFile(t, file, packed)
			o := Options{Transform: Eval(4, 4), BatchSize: 8, Shuffle: true, Seed: 3, BadSamples: Skip, ShuffleBytes: 100_000, MaxSampleBytes: 100_000, World: 2}
			var first *Loader
			var want string
			for i := range 3 {
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if err != nil {
					t.Fatal(err)
				}
				defer l.Close()
				batches, err := collect(t, l, 0, 2)
				if err != nil {
					t.Fatal(err)
				}
				if i == 0 {
					first, want = l, digest(batches)
				} else if l.opened != first.opened || digest(batches) != want {
					t.Errorf("%s, %s: the order is %s, of the loader that made the index %s", name, file, l.opened, first.opened)
				}
			}
		}
	}
}

// TestOpenFails: whatever Open fails at, it leaves no file open.
func TestOpenFails(t *testing.T) {
	archivetest.NoLeaks(t)
	gc := debug.SetGCPercent(-1) // which would close them
	defer debug.SetGCPercent(gc)
	data := archivetest.Gzip(t, archivetest.Images(t, 6, nil))
	tgz, indexed := archivetest.WriteFile(t, "a.tgz", data), archivetest.WriteFile(t, "a.tgz", data)
	l, err := open(t.Context(), indexed, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		path string
		o    Options
	}{
		"a shard is missing": {filepath.Dir(tgz) + "/{a,none}.tgz", Options{}},
		"bad weights":        {tgz, Options{Weights: func(Sample) float64 { return -1 }}},
		"no random access":   {tgz, Options{Balanced: true, ShuffleBytes: 1, NoIndex: true}},
		"another class":      {tgz, Options{Classes: []string{"one"}, World: 2}},
		"the same, by index": {indexed, Options{Classes: []string{"one"}}},
	} {
		c.o.Transform = Eval(4, 4)
		for range 3 {
			if _, err := open(t.Context(), c.path, c.o, openFile, fakeCodec{}); err == nil {
				t.Errorf("%s: no error", name)
			}
		}
	}
}

// TestFlippedIndexClass: an index in which a bit is another one is damaged, and its entries name no
// unknown class.
func TestFlippedIndexClass(t *testing.T) {
	o := Options{Transform: Eval(4, 4), Classes: []string{"class0", "class1"}}
	var list []archivetest.Member
	for i := range 9 {
		name := fmt.Sprintf("class%d/%d", i%3, i)
		if i%3 < 2 {
			name += ".png"
		}
		list = append(list, archivetest.Member{Name: name, Data: archivetest.Image(name)[8*(i%3/2):]})
	}
	path, want := indexed(t, "a.tar", archivetest.Tar(t, list...), o)
	index, err := os.ReadFile(path + indextest.Suffix)
	if err != nil {
		t.Fatal(err)
	}
	forged := indextest.Forge(t, index, indextest.Members, func(b []byte) { b[2*indextest.MemberBytes+31] |= indextest.FlagsOfImage }) // of class2
	table := indextest.FileHeader + int(binary.LittleEndian.Uint32(index[12:]))*indextest.TableItem
	index = append(index[:table], forged[table:]...) // with the checksums that were right
	if err := os.WriteFile(path+indextest.Suffix, index, 0o644); err != nil {
		t.Fatal(err)
	}
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if batches, err := collect(t, l, 0, 2); err != nil || digest(batches) != want {
		t.Errorf("error %v, or another epoch", err)
	}
}

// TestLongLabels: labels of WebDataset samples stay in memory, so each of them is bounded.
func TestLongLabels(t *testing.T) {
	for size, want := range map[int]string{archive.MaxNameBytes: "", archive.MaxNameBytes + 1: "a.cls: a label of 4097 bytes"} {
		path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, archivetest.Member{Name: "a.png", Data: archivetest.Image("a")}, archivetest.Member{Name: "a.cls", Data: strings.Repeat("l", size) + "\n"}))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true, NoIndex: true}, openFile, fakeCodec{})
		if err == nil {
			l.Close()
		}
		var at *ArchiveError
		if (err == nil) != (want == "") || err != nil && (!errors.As(err, &at) || at.File != path || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d bytes: error %v", size, err)
		}
	}
}

// TestOpenStops: a server that never answers keeps OpenContext no longer than its context.
func TestOpenStops(t *testing.T) {
	asked := make(chan struct{}, 10)
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		asked <- struct{}{}
		<-r.Context().Done()
	}))
	defer silent.Close()
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("enough")
	go func() {
		<-asked
		cancel(stop)
	}()
	if _, err := OpenContext(ctx, silent.URL+"/a.tar", Options{}); !errors.Is(err, stop) {
		t.Errorf("error %v", err)
	}
}
