package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"
)

// oneByOne is a tar with a fake image for each number, all of one size.
func oneByOne(t *testing.T, numbers ...int) []byte {
	t.Helper()
	var list []tarMember
	for _, i := range numbers {
		list = append(list, tarMember{name: fmt.Sprintf("a/%d.png", i), data: fakeImage(strings.Repeat(fmt.Sprint(i), 2000))})
	}
	return tarBytes(t, list...)
}

// TestReplacedShard: a shard that was replaced after the archive was opened is an error each time that it is opened again, in any order and in that of the archive.
func TestReplacedShard(t *testing.T) {
	for _, url := range []bool{false, true} {
		s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{}}
		path := filepath.Join(t.TempDir(), "s{0,1}.tar")
		if url {
			path = "store://b/s{0,1}.tar"
		}
		put := func(i int, version string, data []byte) {
			t.Helper()
			name := strings.Replace(path, "{0,1}", fmt.Sprint(i), 1)
			if url {
				s.objects[name] = object{string(data), version}
			} else if err := os.WriteFile(name, data, 0o644); err != nil {
				t.Fatal(err)
			} else if at := time.Unix(1e9, int64(len(version))); os.Chtimes(name, at, at) != nil {
				t.Fatal("the time can't be set")
			}
		}
		put(0, "1", oneByOne(t, 0, 1))
		put(1, "1", oneByOne(t, 2, 3))
		a, err := openArchive(t.Context(), path, opener{openFile, s.openSource})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		put(1, "second", oneByOne(t, 3, 2))
		for try := range 3 {
			if _, err := a.acquire(1); !errors.Is(err, ErrSourceChanged) || !strings.Contains(err.Error(), "s1.tar") {
				t.Errorf("URL %v, try %d: error %v", url, try, err)
			}
		}
		for err == nil {
			_, err = a.next()
		}
		if !errors.Is(err, ErrSourceChanged) || a.names != 2 {
			t.Errorf("URL %v: error %v after %d members", url, err, a.names)
		}
	}
}

// TestOtherTarURL: a tar behind a URL that has the size and the time of the one that was indexed in another run, but its samples in another order, is an error that names
// the sample; and that is found out without a second request.
func TestOtherTarURL(t *testing.T) {
	const url = "store://b/a.tar"
	s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{url: {string(oneByOne(t, 0, 1, 2, 3)), "1"}}}
	o := Options{Transform: Eval(4, 4), BatchSize: 1, Workers: 1, IndexFile: filepath.Join(t.TempDir(), "index"), OpenSource: s.openSource}
	for _, c := range []struct {
		data    []byte
		version string
		samples int // before the error; 4: there is none
	}{{oneByOne(t, 0, 1, 2, 3), "1", 4}, {oneByOne(t, 0, 1, 2, 3), "2", 4}, {oneByOne(t, 0, 2, 1, 3), "3", 1}} {
		s.objects[url] = object{string(c.data), c.version}
		l, err := open(t.Context(), url, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if len(batches) != c.samples || (err == nil) != (c.samples == 4) || err != nil && (!errors.As(err, &damage) || damage.Member != "a/1.png" || !errors.Is(err, errStale)) {
			t.Errorf("version %s: %d samples, error %v", c.version, len(batches), err)
		}
		if c.samples < 4 {
			continue
		}
		a, err := openArchive(t.Context(), url, l.open)
		if err != nil {
			t.Fatal(err)
		}
		r, asked := newSampleReader(a, l.index.Load()), s.asked
		for i := range 4 {
			got := make([]byte, l.index.Load().entries[i].size)
			if err := r.read(i, got); err != nil || !slices.Equal(got, []byte(fakeImage(strings.Repeat(fmt.Sprint(i), 2000)))) {
				t.Errorf("sample %d: error %v, or other bytes", i, err)
			}
		}
		if s.asked != asked+4 {
			t.Errorf("%d requests for 4 samples", s.asked-asked)
		}
		r.close()
		a.Close()
	}
}

// TestIndexOfAnother: an index that another process has put in the place of the one that was just written is not taken for it.
func TestIndexOfAnother(t *testing.T) {
	path := writeFile(t, "a.tar", oneByOne(t, 0, 1, 2, 3))
	l := openFake(t, path, Options{Transform: Eval(4, 4)})
	l.o.NoIndex = false
	a, err := openArchive(t.Context(), path, l.open)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	x, err := l.collect(a, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer x.close()
	s := l.writeIndex(a, x)
	if s == nil {
		t.Fatal("no index")
	}
	defer s.close()
	other, _ := indexed(t, "a.tar", oneByOne(t, 7, 6, 5, 4), Options{Transform: Eval(4, 4)})
	if err := os.Rename(other+sidecarSuffix, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	sections, err := s.large()
	if err != nil {
		t.Fatal(err)
	}
	got, err := x.build(a, sections)
	if err != nil || got.name(0) != "a/0.png" || got.name(3) != "a/3.png" {
		t.Errorf("error %v, or the names of another index", err)
	}
}

// TestIndexInAFolderOfOthers: entry points for an index beside an archive, in a folder that can't be written, go into the cache folder, and if there is none nowhere; a good
// run has no error for that.
func TestIndexInAFolderOfOthers(t *testing.T) {
	for _, cache := range []bool{true, false} {
		dir := t.TempDir()
		t.Setenv("XDG_CACHE_HOME", dir)
		if !cache {
			t.Setenv("XDG_CACHE_HOME", filepath.Join(writeFile(t, "file", nil), "no folder"))
		}
		// No file beside it can have a longer name than its index, as a temporary one has.
		path := writeFile(t, strings.Repeat("a", 248), oneByOne(t, 0, 1, 2, 3))
		log := &logged{}
		o := Options{Transform: Eval(4, 4), IndexFile: filepath.Join(dir, "index"), Logger: slog.New(slog.NewTextHandler(log, nil))}
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := os.Rename(o.IndexFile, path+sidecarSuffix); err != nil {
			t.Fatal(err)
		}
		o.IndexFile = ""
		blob := bytes.Repeat([]byte("entries "), 200_000)
		for round := range 2 {
			if l, err = open(t.Context(), path, o, openFile, fakeCodec{}); err != nil {
				t.Fatal(err)
			}
			x := l.index.Load()
			if got, want := len(x.entriesOf(1, nil)) > 0, cache && round > 0; got != want {
				t.Errorf("cache folder %v, round %d: entry points %v", cache, round, got)
			}
			x.keepEntries(round, blob)
			if filed := x.side.blobs.filed > 0; filed != cache {
				t.Errorf("cache folder %v: entry points wait in a file: %v", cache, filed)
			}
			x.keepEntries(1, blob)
			if err := l.Close(); err != nil {
				t.Errorf("cache folder %v, round %d: %v", cache, round, err)
			}
		}
		if log.has("can't be kept") == cache {
			t.Errorf("cache folder %v: %s", cache, log.text.String())
		}
	}
}

// TestIndexOfSomebodyInTheCache: what has come to lie in the cache folder since is not written over.
func TestIndexOfSomebodyInTheCache(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	path := writeFile(t, strings.Repeat("a", 248), oneByOne(t, 0, 1, 2, 3))
	o := Options{Transform: Eval(4, 4), IndexFile: filepath.Join(dir, "index")}
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := os.Rename(o.IndexFile, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	o.IndexFile = ""
	if l, err = open(t.Context(), path, o, openFile, fakeCodec{}); err != nil {
		t.Fatal(err)
	}
	x := l.index.Load()
	if len(x.side.elsewhere) != 1 {
		t.Fatalf("%d other places", len(x.side.elsewhere))
	}
	cached := x.side.elsewhere[0].path
	if err := os.MkdirAll(filepath.Dir(cached), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cached, []byte("somebody's"), 0o644); err != nil {
		t.Fatal(err)
	}
	x.keepEntries(1, []byte("entries"))
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(cached); err != nil || string(got) != "somebody's" {
		t.Errorf("%v, %q", err, got)
	}
}

// TestIndexReplacedSince: entry points are not saved over an index that was written since, which may be of another archive.
func TestIndexReplacedSince(t *testing.T) {
	path, _ := indexed(t, "a.tar", oneByOne(t, 0, 1, 2, 3), Options{Transform: Eval(4, 4)})
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.index.Load().keepEntries(0, []byte("entries"))
	other, _ := indexed(t, "a.tar", oneByOne(t, 7, 6, 5, 4), Options{Transform: Eval(4, 4)})
	want, err := os.ReadFile(other + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other+sidecarSuffix, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	if got, err := os.ReadFile(path + sidecarSuffix); err != nil || !bytes.Equal(got, want) {
		t.Errorf("it was saved over; error %v", err)
	}
}

// TestIndexLeftovers: what a killed process has left of an index is removed by the next one that writes it; what is being written is not.
func TestIndexLeftovers(t *testing.T) {
	path := writeFile(t, "a.tar", oneByOne(t, 0, 1))
	long := time.Now().Add(-2 * leftAfter)
	for name, old := range map[string]bool{".tsidx.1.tmp": true, ".tsidx.2.tmp": false, ".1.tmp": true, ".tsidx.bak": true, "+1.tsidx.3.tmp": true} {
		if err := os.WriteFile(path+name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if old {
			if err := os.Chtimes(path+name, long, long); err != nil {
				t.Fatal(err)
			}
		}
	}
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	list, err := filepath.Glob(path + "*")
	for i := range list {
		list[i] = strings.TrimPrefix(list[i], path)
	}
	if want := []string{"", "+1.tsidx.3.tmp", ".1.tmp", ".tsidx", ".tsidx.2.tmp", ".tsidx.bak"}; err != nil || !slices.Equal(list, want) {
		t.Errorf("%q are there, want %q; error %v", list, want, err)
	}
}

// TestCloseTwiceAtOnce: Close may be called by several goroutines, also of a loader whose index lies in no file.
func TestCloseTwiceAtOnce(t *testing.T) {
	for _, noIndex := range []bool{false, true} {
		path := writeFile(t, "a.tgz", gzipBytes(t, fakeArchive(t, 30, nil)))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1, NoIndex: noIndex}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.index.Load().keepEntries(0, []byte("entries"))
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
}

// TestLeftByPanic: a batch that its loop is left with is nobody else's, however the loop is left; a closed loader has no memory for epochs.
func TestLeftByPanic(t *testing.T) {
	l := openFake(t, writeFile(t, "a.tar", fakeArchive(t, 40, nil)), Options{Transform: Eval(4, 4), BatchSize: 4})
	var left []byte
	func() {
		defer func() { _ = recover() }()
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			left = b.Images
			panic("in the loop")
		}
	}()
	clear(left)
	for b, err := range l.Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		if &b.Images[0] == &left[0] {
			t.Fatal("the memory of the batch is used again")
		}
	}
	if len(left) == 0 || slices.ContainsFunc(left, func(v byte) bool { return v != 0 }) {
		t.Error("the batch was written to")
	}
	if len(l.spare.slots) != hostSlots {
		t.Errorf("%d slots are kept", len(l.spare.slots))
	}
	for range l.Epoch(t.Context(), 0) {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.spare.slots) > 0 {
		t.Errorf("%d slots are kept after Close", len(l.spare.slots))
	}
}

// trickle sends a byte now and then, without an end.
type trickle struct{ ctx context.Context }

func (trickle) Info() SourceInfo { return SourceInfo{Size: 1 << 20} }
func (trickle) Close() error     { return nil }
func (trickle) ReadRange(ctx context.Context, _, _ int64) (io.ReadCloser, error) {
	return io.NopCloser(trickle{ctx}), nil
}

func (r trickle) Read([]byte) (int, error) {
	select {
	case <-r.ctx.Done():
		return 0, r.ctx.Err()
	case <-time.After(time.Millisecond):
		return 1, nil
	}
}

// TestSourceTrickles: a store that sends a few bytes a second has stopped.
func TestSourceTrickles(t *testing.T) {
	within(t)
	f, err := openRemote(t.Context(), "store://x", func(context.Context, string) (Source, error) { return trickle{}, nil }, sourceTimes{time.Microsecond, 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.ReadAt(make([]byte, 1<<20), 0); err == nil || !strings.Contains(err.Error(), "less than 32768 bytes have come in 20ms") {
		t.Errorf("error %v", err)
	}
}
