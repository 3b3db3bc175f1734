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
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// TestForgedStateOrder: a state that names an order which the loader's options don't have is refused; none of them makes an epoch fail in another way.
func TestForgedStateOrder(t *testing.T) {
	path := writeFile(t, "a.tar", fakeArchive(t, 20, nil))
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

// TestForgedIndexSizes: an index whose samples are larger than what its archive can inflate to, one by one or together, is not used.
func TestForgedIndexSizes(t *testing.T) {
	data := fakeArchive(t, 6, nil)
	for name, packed := range map[string][]byte{"a.tgz": gzipBytes(t, data), "a.tar.zst": zstdBytes(t, data), "a.tar": data} {
		for _, size := range []uint64{1 << 40, 1 << 62, math.MaxInt64, math.MaxInt64 / 6} {
			path := writeFile(t, name, packed)
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
			index = forge(t, index, sectionEntries, func(b []byte) {
				for ; len(b) > 0; b = b[entryBytes:] {
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

// TestIndexMode: an index holds names and bytes of its archive, so it is as private.
func TestIndexMode(t *testing.T) {
	for _, mode := range []os.FileMode{0o600, 0o640, 0o644, 0o666} {
		path := writeFile(t, "a.tgz", gzipBytes(t, fakeArchive(t, 6, nil)))
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		check := func(when string) {
			t.Helper()
			info, err := os.Stat(path + sidecarSuffix)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := info.Mode(), mode&0o644; got != want {
				t.Errorf("%s: the index of an archive with mode %v has %v, want %v", when, mode, got, want)
			}
		}
		check("made")
		l.index.Load().keepEntries(0, []byte("blob"))
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		check("saved again")
	}
}

// TestOrderOfEveryOpen: the loader that makes an index and those that find it put epochs into the same order, whatever else is in the archive: two ranks may be one
// of each.
func TestOrderOfEveryOpen(t *testing.T) {
	samples := fakeArchive(t, 40, nil)
	notes := strings.Repeat("notes", 12_000)
	large := tarBytes(t, tarMember{name: "notes/a.txt", data: notes}, tarMember{name: "notes/b.txt", data: notes})
	tooLarge := tarBytes(t, tarMember{name: "train/class0/large.png", data: fakeImage(strings.Repeat("large", 40_000))})
	for name, data := range map[string][]byte{
		"samples":            samples,
		"notes before":       append(large, samples...),
		"a sample too large": append(tooLarge, samples...),
	} {
		for file, packed := range map[string][]byte{"a.tgz": gzipBytes(t, data), "a.tar.zst": zstdBytes(t, data)} {
			path := writeFile(t, file, packed)
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
	noLeaks(t)
	gc := debug.SetGCPercent(-1) // which would close them
	defer debug.SetGCPercent(gc)
	data := gzipBytes(t, fakeArchive(t, 6, nil))
	tgz, indexed := writeFile(t, "a.tgz", data), writeFile(t, "a.tgz", data)
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

// TestURLSilent: a server that does not go on sending is asked again; one that never answers keeps nobody from stopping.
func TestURLSilent(t *testing.T) {
	data := fakeArchive(t, 30, nil)
	var stall atomic.Int32 // so many responses stop in the middle
	stall.Store(3)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var first int
		if _, err := fmt.Sscanf(r.Header.Get("Range"), "bytes=%d-", &first); err != nil || r.Header.Get("Range") == "bytes=0-0" || stall.Add(-1) < 0 {
			http.ServeContent(w, r, "", time.Unix(1e9, 0), strings.NewReader(string(data)))
			return
		}
		w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", first, len(data)-1, len(data)))
		w.Header().Set("Content-Length", fmt.Sprint(len(data)-first))
		w.Header().Set("Last-Modified", time.Unix(1e9, 0).UTC().Format(http.TimeFormat))
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(data[first : first+1000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	}))
	defer server.Close()
	file, err := openRemote(t.Context(), server.URL, byHTTP(server.Client()), sourceTimes{time.Microsecond, 50 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	got := make([]byte, len(data))
	if _, err := file.ReadAt(got, 0); err != nil || string(got) != string(data) {
		t.Errorf("at random: error %v, or other bytes", err)
	}
	stall.Store(3)
	for n := 0; n < len(got); {
		k, err := file.Read(got[n:])
		if err != nil {
			t.Fatal(err)
		}
		n += k
	}
	if string(got) != string(data) {
		t.Error("other bytes in order")
	}

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

// loads says whether the index of a loader's archive is one that the next loader takes.
func loads(l *Loader) error {
	a, err := openArchive(context.Background(), l.path, l.open)
	if err != nil {
		return err
	}
	defer a.Close()
	x, err := l.loadIndex(a)
	if err == nil && x == nil {
		return errors.New("the index is not used")
	}
	if err == nil {
		err = x.close()
	}
	return err
}

// TestImplausibleIndex: what an index says of its sections' sizes is compared with what its archive can have before anything of these sizes is allocated.
func TestImplausibleIndex(t *testing.T) {
	path, _ := indexed(t, "a.tgz", gzipBytes(t, fakeArchive(t, 20, nil)), Options{Transform: Eval(4, 4), ShuffleBytes: 1})
	l := &Loader{path: path, open: opener{file: openFile}}
	for what, c := range map[string]struct {
		kind uint32
		size uint64
		item uint64 // 0: the count stays
		want error
	}{
		"shards":                {sectionShards, 1 << 40, 0, errIndexStale},
		"directories":           {sectionDirs, 1 << 40, 0, errIndexDamaged},
		"many directories":      {sectionDirs, 1 << 40, 4, errIndexDamaged},
		"counts":                {sectionCounts, 1 << 40, 0, errIndexDamaged},
		"names":                 {sectionNames, 1<<32 + 10, 1, errIndexDamaged},
		"names of few entries":  {sectionNames, 20*maxNameBytes + 1, 1, errIndexDamaged},
		"entries":               {sectionEntries, maxMembers * entryBytes, entryBytes, errIndexDamaged},
		"headers":               {sectionHeads, maxMembers * headBytes, headBytes, errIndexDamaged},
		"checkpoints":           {sectionCheckpoints, 1 << 40, checkpointBytes, errIndexDamaged},
		"nothing is other here": {sectionWindows, 0, 0, nil},
	} {
		a, err := openArchive(t.Context(), path, l.open)
		if err != nil {
			t.Fatal(err)
		}
		s, err := openSidecar(path + sidecarSuffix)
		if err != nil {
			t.Fatal(err)
		}
		p := s.places[c.kind]
		if c.size > 0 {
			p.size = c.size
		}
		if c.item > 0 {
			p.count = c.size / c.item
		}
		s.places[c.kind] = p
		x, err := l.indexer()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.load(a, x); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", what, err, c.want)
		}
		s.file.Close()
		a.Close()
	}
}

// TestFlippedIndexClass: an index in which a bit is another one is damaged, and its entries name no unknown class.
func TestFlippedIndexClass(t *testing.T) {
	o := Options{Transform: Eval(4, 4), Classes: []string{"class0", "class1"}}
	var list []tarMember
	for i := range 9 {
		name := fmt.Sprintf("class%d/%d", i%3, i)
		if i%3 < 2 {
			name += ".png"
		}
		list = append(list, tarMember{name: name, data: fakeImage(name)[8*(i%3/2):]})
	}
	path, want := indexed(t, "a.tar", tarBytes(t, list...), o)
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	forged := forge(t, index, sectionEntries, func(b []byte) { b[2*entryBytes+31] |= entryImage }) // of class2
	table := sidecarHeader + int(binary.LittleEndian.Uint32(index[12:]))*sectionBytes
	index = append(index[:table], forged[table:]...) // with the checksums that were right
	if err := os.WriteFile(path+sidecarSuffix, index, 0o644); err != nil {
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

// TestLongLabels: labels of WebDataset samples stay in memory, so each of them, and all together, are bounded.
func TestLongLabels(t *testing.T) {
	for size, want := range map[int]string{maxNameBytes: "", maxNameBytes + 1: "a.cls: a label of 4097 bytes"} {
		path := writeFile(t, "a.tar", tarBytes(t, tarMember{name: "a.png", data: fakeImage("a")}, tarMember{name: "a.cls", data: strings.Repeat("l", size) + "\n"}))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true, NoIndex: true}, openFile, fakeCodec{})
		if err == nil {
			l.Close()
		}
		var at *ArchiveError
		if (err == nil) != (want == "") || err != nil && (!errors.As(err, &at) || at.File != path || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d bytes: error %v", size, err)
		}
	}
	x, err := newIndexer("a.tar", nil)
	if err != nil {
		t.Fatal(err)
	}
	x.dirBytes = mostDirBytes - 10
	if _, err := x.dir("label1"); err != nil {
		t.Error(err)
	}
	if _, err := x.dir("label2"); err == nil || !strings.Contains(err.Error(), "a.tar: more than 128 MB") {
		t.Errorf("error %v", err)
	}
	if _, err := x.dir("label1"); err != nil {
		t.Error(err)
	}
}
