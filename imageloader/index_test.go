package imageloader

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// logged collects log lines.
type logged struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (l *logged) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *logged) has(s string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return strings.Contains(l.text.String(), s)
}

// TestIndexReuse: the index is written once, read by the next loader in whatever way that is
// opened, and made anew when it does not fit any more.
func TestIndexReuse(t *testing.T) {
	members := archivetest.Photos(40)
	data := archivetest.Tar(t, members...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, len(data), 6))
	reads := func(o Options) (scanned, opened, refused bool, l *Loader) {
		t.Helper()
		log := &logged{}
		o.Transform, o.ShuffleBytes, o.Logger = Eval(4, 4), 1000, slog.New(slog.NewTextHandler(log, nil))
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		got, err := collect(t, l, 0, 2)
		if err != nil || len(names(got)) != 40 {
			t.Fatalf("%d samples, error %v", len(names(got)), err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		return log.has("scanned"), log.has("opened index"), log.has("is not used"), l
	}
	expect := func(what string, o Options, scanned, opened, refused bool) {
		t.Helper()
		if s, i, r, _ := reads(o); s != scanned || i != opened || r != refused {
			t.Errorf("%s: scanned %v, opened index %v, refused it %v", what, s, i, r)
		}
	}
	classes := []string{"class2", "class1", "class0"}
	expect("no index", Options{NoIndex: true}, true, false, false)
	if _, err := os.Stat(path + indextest.Suffix); err == nil {
		t.Error("NoIndex, and one is written")
	}
	expect("first pass of an epoch", Options{Classes: classes}, false, false, false)
	expect("second loader", Options{}, false, true, false)
	expect("classes given", Options{Classes: classes}, false, true, false)
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(path, later, later); err != nil {
		t.Fatal(err)
	}
	expect("another time, the same bytes", Options{}, false, true, false)

	changed := archivetest.GzipSplit(t, data, len(data), 5)
	if err := os.WriteFile(path, changed, 0o644); err != nil {
		t.Fatal(err)
	}
	expect("another archive", Options{}, true, false, true)
	expect("and then", Options{}, false, true, false)
	index, err := os.ReadFile(path + indextest.Suffix)
	if err != nil {
		t.Fatal(err)
	}
	index[8]++
	if err := os.WriteFile(path+indextest.Suffix, index, 0o644); err != nil {
		t.Fatal(err)
	}
	expect("another version", Options{}, true, false, false) // which is nothing to warn of
	other := filepath.Join(t.TempDir(), "x", "index")
	expect("a place that can't be written", Options{IndexFile: other}, true, false, false)
	if err := os.Mkdir(filepath.Dir(other), 0o755); err != nil {
		t.Fatal(err)
	}
	expect("a place of its own", Options{IndexFile: other}, true, false, false)
	expect("a place of its own, again", Options{IndexFile: other}, false, true, false)
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*.tmp")); len(left) > 0 {
		t.Errorf("temporary files are left: %v", left)
	}
}

// TestIndexOfStreams: where a stream is read in its own order, by an index of another archive of
// the same size and time, the checksums tell; and a plain tar, which has none in its index, is
// scanned again when its time differs.
func TestIndexOfStreams(t *testing.T) {
	members := archivetest.Photos(40)
	for i := range members { // no checkpoints that help
		members[i].Data = members[i].Data[:min(len(members[i].Data), 300)]
	}
	middle := len(members) / 2
	for members[middle].Name[0] != 't' {
		middle++
	}
	padding := archivetest.Member{Name: "z/pad.txt", Data: strings.Repeat("p", 3*64<<10)}
	all := append(append([]archivetest.Member{padding}, members...), padding)
	first := archivetest.Tar(t, all...)
	changed := all[middle+1]
	all[middle+1].Data = archivetest.Image(strings.Repeat("!", len(changed.Data)-8))
	second := archivetest.Tar(t, all...)
	store := func(data []byte) []byte { return archivetest.GzipSplit(t, data, len(data), 0) } // of equal sizes
	for _, c := range []struct {
		name          string
		first, second []byte
		want          string // in the error; "": it is seen at Open
	}{{"a.tgz", store(first), store(second), "differ from the checksum"}, {"a.tar", first, second, ""}} {
		path := archivetest.WriteFile(t, c.name, c.first)
		before, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		o := Options{Transform: Eval(4, 4), ShuffleBytes: 1, BadSamples: Skip, NoIndex: false}
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
		if err := os.WriteFile(path, c.second, 0o644); err != nil {
			t.Fatal(err)
		}
		at := before.ModTime()
		if c.want == "" {
			at = at.Add(time.Hour)
		}
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		if l, err = open(t.Context(), path, o, openFile, fakeCodec{}); err != nil {
			t.Fatal(err)
		}
		_, err = collect(t, l, 0, 1)
		l.Close()
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), changed.Name)) {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
}

// TestIndexUnknownClass: an image of a class that is not expected is an error also when the index
// knows the archive.
func TestIndexUnknownClass(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(9)...)))
	for range 2 {
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), Classes: []string{"class0", "class1"}}, openFile, fakeCodec{})
	var unknown *UnknownClassError
	if !errors.As(err, &unknown) || unknown.Class != "class2" || unknown.Name != "train/class2/0002.png" {
		t.Errorf("error %v", err)
	}
}

// TestMakeIndex writes an index ahead of time, and Open then reads next to nothing.
func TestMakeIndex(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(50)...)))
	last := Progress{}
	r, err := MakeIndex(t.Context(), path, Options{}, func(p Progress) { last = p })
	if err != nil || r.Samples != 50 || r.Classes != 3 || !r.Random || r.Checkpoints < 25 || r.File != path+indextest.Suffix || last.Members == 0 {
		t.Fatalf("%+v, %+v, error %v", r, last, err)
	}
	var from []*countingSource
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1}, func(path string) (archive.File, error) {
		f, err := openFile(path)
		from = append(from, &countingSource{File: f})
		return from[len(from)-1], err
	}, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, f := range from {
		if f.at > 256<<10 {
			t.Errorf("Open reads %d bytes", f.at)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := MakeIndex(ctx, path, Options{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// countingSource knows how far a file has been read.
type countingSource struct {
	archive.File
	at int64
}

func (s *countingSource) Read(p []byte) (int, error) {
	n, err := s.File.Read(p)
	s.at += int64(n)
	return n, err
}

func (s *countingSource) Seek(offset int64, whence int) (int64, error) {
	at, err := s.File.Seek(offset, whence)
	if err == nil {
		s.at = at
	}
	return at, err
}

// BenchmarkOpenIndex opens the archive of the variable by its index.
func BenchmarkOpenIndex(b *testing.B) {
	path := os.Getenv(archiveVariable)
	if path == "" {
		b.Skip("no archive in ", archiveVariable)
	}
	before := cpu(b)
	for range b.N {
		l, err := Open(path, Options{ShuffleBytes: 1})
		if err != nil {
			b.Fatal(err)
		}
		if err := l.Close(); err != nil {
			b.Fatal(err)
		}
	}
	b.ReportMetric((cpu(b)-before)/float64(b.N), "cpu-µs/op")
}

// BenchmarkReadSample reads the samples of the archive of the variable in random order; an op is
// one sample.
func BenchmarkReadSample(b *testing.B) {
	path := os.Getenv(archiveVariable)
	if path == "" {
		b.Skip("no archive in ", archiveVariable)
	}
	l, err := Open(path, Options{ShuffleBytes: 1})
	if err != nil {
		b.Fatal(err)
	}
	defer l.Close()
	x := l.index.Load()
	a, err := archive.Open(b.Context(), path, l.archiveConfig())
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	r := index.NewReader(x, a)
	defer r.Close()
	order := rand.Perm(x.Len())
	buffer := make([]byte, 0)
	bytes := int64(0)
	before := cpu(b)
	b.ReportAllocs()
	b.ResetTimer()
	for n := range b.N {
		i := order[n%len(order)]
		size := int(x.Size(i))
		buffer = slices.Grow(buffer[:0], size)[:size]
		if err := r.Read(i, buffer); err != nil {
			b.Fatal(err)
		}
		bytes += int64(size)
	}
	b.SetBytes(bytes / int64(b.N))
	b.ReportMetric((cpu(b)-before)/float64(b.N), "cpu-µs/op")
}
