//go:build linux

package imageloader

import (
	"archive/tar"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"log/slog"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
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

// TestIndexIsReusedWhileItFits: the index is written once, read by the next loader with any
// options, and made again when it no longer fits.
func TestIndexIsReusedWhileItFits(t *testing.T) {
	members := archivetest.Photos(40)
	data := archivetest.Tar(t, members...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, len(data), gzip.BestSpeed))
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
			t.Fatalf("%d samples, error %v, want no error, 40 samples", len(names(got)), err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		return log.has("scanned"), log.has("opened index"), log.has("is not used"), l
	}
	expect := func(what string, o Options, scanned, opened, refused bool) {
		t.Helper()
		if s, i, r, _ := reads(o); s != scanned || i != opened || r != refused {
			t.Errorf("%s: scanned %v, opened index %v, refused it %v, want s = %v, i = %v, r = %v",
				what, s, i, r, scanned, opened, refused)
		}
	}
	classes := []string{"class2", "class1", "class0"}
	expect("no index", Options{NoIndex: true}, true, false, false)
	if _, err := os.Stat(path + indextest.Suffix); err == nil {
		t.Errorf("with NoIndex there is %s, want no index", path+indextest.Suffix)
	}
	expect("first pass of an epoch", Options{Classes: classes}, false, false, false)
	expect("second loader", Options{}, false, true, false)
	expect("classes given", Options{Classes: classes}, false, true, false)
	later := time.Now().Add(time.Hour)
	if err := os.Chtimes(path, later, later); err != nil {
		t.Fatal(err)
	}
	expect("another time, the same bytes", Options{}, false, true, false)

	changed := archivetest.GzipSplit(t, data, len(data), gzip.HuffmanOnly)
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
	expect("another version", Options{}, true, false, false) // without a warning
	other := filepath.Join(t.TempDir(), "x", "index")
	expect("a place that can't be written", Options{IndexFile: other}, true, false, false)
	if err := os.Mkdir(filepath.Dir(other), 0o755); err != nil {
		t.Fatal(err)
	}
	expect("a place of its own", Options{IndexFile: other}, true, false, false)
	expect("a place of its own, again", Options{IndexFile: other}, false, true, false)
	if left, _ := filepath.Glob(filepath.Join(filepath.Dir(path), "*.tmp")); len(left) > 0 {
		t.Errorf("temporary files are left: %v, want none", left)
	}
}

// TestStreamsDetectAnotherArchivesIndex: an index may be of another archive with the same size and
// time. A stream that is read in its own order detects this by its checksums. A plain tar, whose
// index has no checksums, is scanned again if its time differs.
func TestStreamsDetectAnotherArchivesIndex(t *testing.T) {
	members := archivetest.Photos(40)
	for i := range members { // too small for useful checkpoints
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
	store := func(data []byte) []byte { return archivetest.GzipSplit(t, data, len(data), 0) } // both get the same size
	for _, c := range []struct {
		name          string
		first, second []byte
		want          string // in the error; "": Open detects the change
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
		if c.want == "" && err != nil || c.want != "" &&
			(err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), changed.Name)) {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
}

// TestUnknownClassIsAnErrorByIndex: with an index too, an image of an unexpected class is an error.
func TestUnknownClassIsAnErrorByIndex(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(9)...)))
	for range 2 {
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.Close()
	}
	_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), Classes: []string{"class0", "class1"}},
		openFile, fakeCodec{})
	var unknown *UnknownClassError
	if !errors.As(err, &unknown) || unknown.Class != "class2" || unknown.Name != "train/class2/0002.png" {
		t.Errorf("error %v, want an error of type *UnknownClassError, unknown.Class = %q, unknown.Name "+
			"= %q", err, "class2", "train/class2/0002.png")
	}
}

// TestRestoreReportsNoProgress: Options.Progress is for Open. Restore may read the archive later,
// in another goroutine.
func TestRestoreReportsNoProgress(t *testing.T) {
	photo := string(archivetest.Photo(t, 1))
	data := archivetest.Tar(t, archivetest.Member{Name: "a/1.jpg", Data: photo}, archivetest.Member{Name: "a/2.jpg", Data: photo})
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))
	calls := 0
	with := func() *Loader {
		l, err := Open(path, Options{BatchSize: 1, Classes: []string{"a"}, NoIndex: true, Transform: Eval(36, 32),
			Progress: func(Progress) { calls++ }})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return l
	}
	var state State
	for b, err := range with().Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		state = b.State
		break
	}
	l := with()
	if l.index.Load() != nil {
		t.Fatal("Open has read the archive, want a loader without an index")
	}
	calls = 0
	if err := l.Restore(t.Context(), state); err != nil || l.index.Load() == nil {
		t.Fatalf("Restore: %v, read the archive: %v, want nil, true", err, l.index.Load() != nil)
	}
	if calls != 0 {
		t.Errorf("Restore called Options.Progress %d times, want 0", calls)
	}
}

func TestWorkersLimitTheInflatersOfOpen(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 4, nil))
	for _, workers := range []int{0, 1, 2, 1000} {
		l, err := Open(path, Options{NoIndex: true, Workers: workers, Transform: Eval(36, 32)})
		if err != nil {
			t.Fatal(err)
		}
		want := min(cmp.Or(workers, 1000), runtime.GOMAXPROCS(0))
		if got := l.archiveConfig().Inflaters; got != want {
			t.Errorf("%d workers: got %d inflaters, want %d", workers, got, want)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOpenReportsProgress: Open reports the first member of an archive without an index, and later
// ones. With an index it reports nothing.
func TestOpenReportsProgress(t *testing.T) {
	file := archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(70)...))
	path := archivetest.WriteFile(t, "a.tgz", file)
	for _, indexed := range []bool{false, true} {
		var calls []Progress
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), Progress: func(p Progress) {
			calls = append(calls, p)
		}}, nil, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
		switch {
		case indexed && len(calls) > 0:
			t.Errorf("with an index: got the calls %+v, want none", calls)
		case !indexed && (len(calls) < 2 || calls[0].Members != 1 || calls[0].TotalBytes != int64(len(file))):
			t.Errorf("got the calls %+v, want the members 1 and 65, of %d bytes", calls, len(file))
		}
	}
}

// TestMadeIndexSparesTheScan: after MakeIndex, Open reads almost nothing of the archive.
func TestMadeIndexSparesTheScan(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(50)...)))
	last := Progress{}
	r, err := MakeIndex(t.Context(), path, Options{}, func(p Progress) { last = p })
	if err != nil || r.Samples != 50 || r.Classes != 3 || !r.Random || r.Checkpoints < 25 ||
		r.File != path+indextest.Suffix || last.Members == 0 {
		t.Fatalf("%+v, %+v, error %v", r, last, err)
	}
	var from []*countingSource
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1},
		func(path string) (archive.File, error) {
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
			t.Errorf("Open reads %d bytes, want at most %v", f.at, 256<<10)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := MakeIndex(ctx, path, Options{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want the error %v", err, context.Canceled)
	}
}

// countingSource records how far a file has been read.
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

// BenchmarkOpenIndex opens the archive of archiveVariable by its index.
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

// BenchmarkReadSample reads the samples of the archive of archiveVariable in random order. An op is
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

// indexed writes an archive and its index, and returns the digest of an epoch.
func indexed(t *testing.T, name string, data []byte, o Options) (path, want string) {
	t.Helper()
	path = archivetest.WriteFile(t, name, data)
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	batches, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + indextest.Suffix); err != nil {
		t.Fatal(err)
	}
	return path, digest(batches)
}

// TestCutArchiveIsAnError checks that Open or the epoch returns an error that names the archive, if
// the archive was cut after it was indexed and has kept its modification time.
func TestCutArchiveIsAnError(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	classes := []string{"class0", "class1", "class2", "class3", "class4"}
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"a.tar.zst": archivetest.Zstd(t, data)} {
		for _, part := range []int{1, 4, 7} { // eighths
			for _, given := range [][]string{nil, classes} {
				archivetest.Within(t)
				archivetest.NoLeaks(t)
				o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000, BatchSize: 4}
				path, _ := indexed(t, name, packed, o)
				archivetest.Rewrite(t, path, packed[:len(packed)*part/8])
				o.Classes = given
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if err == nil {
					_, err = collect(t, l, 0, 2)
					l.Close()
				}
				var damage *ArchiveError
				if !errors.As(err, &damage) || damage.File != path {
					t.Errorf("%s cut to %d/8, classes %v: error %v, want an error of type "+
						"*ArchiveError, damage.File = %v", name, part, given, err, path)
				}
			}
		}
	}
}

// TestCutIndexIsReplaced: a file with an index's magic but a wrong length is replaced by a new
// index.
func TestCutIndexIsReplaced(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000, BatchSize: 4}
		path, want := indexed(t, name, packed, o)
		index, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		for _, cut := range []int{0, 8, 31, 32, 33, 100, 300, len(index) / 2, len(index) - 1, len(index) + 1} {
			changed := append(bytes.Clone(index), 0)[:cut]
			if err := os.WriteFile(path+indextest.Suffix, changed, 0o644); err != nil {
				t.Fatal(err)
			}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			batches, err := collect(t, l, 0, 2)
			l.Close()
			if err != nil || digest(batches) != want {
				t.Errorf("%s, index of %d of %d bytes: error %v, or another epoch", name, cut, len(index), err)
			}
			if again, err := os.ReadFile(path + indextest.Suffix); err != nil || !bytes.Equal(again, index) {
				t.Errorf("%s, index of %d of %d bytes: not replaced (error %v)", name, cut, len(index), err)
			}
		}
	}
}

// TestChangedTarIsAnError: a tar with the size and the time of the indexed tar, but with other
// members or another order, is an error that names the sample.
func TestChangedTarIsAnError(t *testing.T) {
	members := func(order ...int) []byte {
		var list []archivetest.Member
		for _, i := range order {
			list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i),
				Data: archivetest.Image(fmt.Sprint("content ", i))})
		}
		return archivetest.Tar(t, list...)
	}
	for what, c := range map[string]struct {
		data   []byte
		member string // "": none has changed
	}{
		"the same":         {members(0, 1, 2, 3), ""},
		"in another order": {members(0, 2, 1, 3), "a/1.png"},
		"another member":   {members(0, 1, 2, 4), "a/3.png"},
		"nothing":          {make([]byte, len(members(0, 1, 2, 3))), "a/0.png"},
	} {
		o := Options{Transform: Eval(4, 4), BatchSize: 1}
		path, _ := indexed(t, "a.tar", members(0, 1, 2, 3), o)
		archivetest.Rewrite(t, path, c.data)
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if c.member == "" && err != nil || c.member != "" &&
			(!errors.As(err, &damage) || damage.File != path || damage.Member != c.member ||
				!errors.Is(err, index.ErrStale)) {
			t.Errorf("%s: error %v", what, err)
		}
	}
}

// TestForgedPlacesInATarAreAnError: if an index of a tar gives a sample the position of another
// sample of the same size, or a position within a sample, the error names the sample.
func TestForgedPlacesInATarAreAnError(t *testing.T) {
	var list []archivetest.Member
	for i := range 4 {
		list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i),
			Data: archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000))})
	}
	o := Options{Transform: Eval(4, 4), BatchSize: 1}
	for what, change := range map[string]func(second, third []byte){
		"another sample's place": func(second, third []byte) { copy(second[:8], third[:8]) },
		"a sample's middle":      func(second, _ []byte) { second[1] += 2 },
		"before the first":       func(second, _ []byte) { clear(second[:8]) },
		"another size":           func(second, third []byte) { copy(second[:8], third[:8]); second[8]-- },
	} {
		path, _ := indexed(t, "a.tar", archivetest.Tar(t, list...), o)
		index, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		index = indextest.Forge(t, index, indextest.Members,
			func(b []byte) { change(b[indextest.MemberBytes:], b[2*indextest.MemberBytes:]) })
		if err := os.WriteFile(path+indextest.Suffix, index, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if !errors.As(err, &damage) || damage.Member != "a/1.png" || len(batches) != 1 {
			t.Errorf("%s: %d batches, error %v, want an error of type *ArchiveError, damage.Member = "+
				"%q, len(batches) = 1", what, len(batches), err, "a/1.png")
		}
	}
}

// TestForgedIndexExchangesNoSamples: an index with right checksums can't exchange the names, the
// labels or the contents of samples, because the archive's own headers contain their names, sizes
// and positions.
func TestForgedIndexExchangesNoSamples(t *testing.T) {
	long := strings.Repeat("long ", 30)
	content := func(i int) string { return archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000)) }
	list := []archivetest.Member{{Name: "a/0.png", Data: content(0)}, {Name: "b/1.png", Data: content(1)},
		{Name: "a/2.png", Data: content(2)},
		{Name: "b/" + long + "3.png", Data: content(3)}, {Name: "a/" + long + "4.png", Data: content(4)}}
	data := archivetest.Tar(t, list...)
	member := func(b []byte, i int) []byte { return b[i*indextest.MemberBytes:][:indextest.MemberBytes] }
	exchange := func(b []byte, i, j int) {
		for _, at := range []int{0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27} { // position and checksum
			member(b, i)[at], member(b, j)[at] = member(b, j)[at], member(b, i)[at]
		}
	}
	for what, c := range map[string]struct {
		section uint32
		change  func(b []byte)
		want    string // the member in the error; "": the index is replaced
	}{
		"places": {indextest.Members, func(b []byte) { exchange(b, 0, 2) }, "a/0.png"},
		"places without checksums": {indextest.Members, func(b []byte) {
			exchange(b, 0, 2)
			member(b, 0)[31] &^= 2 | 4
		}, "a/0.png"},
		"places of long names": {indextest.Members, func(b []byte) { exchange(b, 3, 4) }, "b/" + long + "3.png"},
		"sizes": {indextest.Members, func(b []byte) {
			member(b, 1)[8]--
			if member(b, 1)[31]&2 != 0 {
				binary.LittleEndian.PutUint32(member(b, 1)[24:],
					crc32.ChecksumIEEE([]byte(content(1)[:len(content(1))-1])))
			}
		}, "b/1.png"},
		"names": {indextest.Names, func(b []byte) { copy(b, "a/2.png") }, "a/2.png"},
		"labels": {indextest.Members,
			func(b []byte) { member(b, 0)[20], member(b, 1)[20] = member(b, 1)[20], member(b, 0)[20] }, ""},
		"names and labels": {indextest.Directories, func(b []byte) { b[4], b[9] = 'b', 'a' }, ""},
	} {
		for _, kind := range []struct {
			name string
			data []byte
			held int64 // Options.ShuffleBytes; 1: hold nothing in memory
		}{
			{"a.tar", data, 0},
			{"a.tgz", archivetest.Gzip(t, data), 1},
			{"a.tgz", archivetest.Gzip(t, data), 0},
			{"a.tgz", archivetest.GzipSplit(t, data, 5000, 6), 1},
			{"a.tgz", archivetest.GzipSplit(t, data, 5000, 6), 0},
			{"a.tar.zst", archivetest.Zstd(t, data), 1},
			{"a.tar.zst", archivetest.Zstd(t, data), 0},
		} {
			t.Run(fmt.Sprintf("%s of %s of %d bytes, held %d", what, kind.name, len(kind.data), kind.held),
				func(t *testing.T) {
					o := Options{Transform: Eval(4, 4), BatchSize: 1, ShuffleBytes: kind.held}
					path, _ := indexed(t, kind.name, kind.data, o)
					o.IndexFile = path + indextest.Suffix
					forge(t, o.IndexFile, c.section, c.change)
					checkForged(t, path, o, c.want, list)
				})
		}
	}
}

// TestLongExtendedHeadersAreFound: a sample is found after extended headers of any size, from an
// index and from memory.
func TestLongExtendedHeadersAreFound(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for i, size := range []int{0, 3000, 20_000, 200_000} {
		content := archivetest.Image(strings.Repeat(fmt.Sprint(i), 50_000))
		h := &tar.Header{Name: fmt.Sprintf("ä/%d.png", i), Size: int64(len(content)), Mode: 0o644,
			PAXRecords: map[string]string{}}
		if size > 0 {
			h.PAXRecords["VENDOR.note"] = strings.Repeat("n", size)
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write([]byte(content)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	for name, data := range map[string][]byte{"a.tar": b.Bytes(),
		"a.tgz": archivetest.GzipSplit(t, b.Bytes(), 60_000, 1), "a.tar.zst": archivetest.Zstd(t, b.Bytes())} {
		for _, held := range []int64{1, 0} {
			o := Options{Transform: Eval(4, 4), BatchSize: 1, ShuffleBytes: held}
			path, want := indexed(t, name, data, o)
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			batches, err := collect(t, l, 0, 2)
			if err != nil || len(batches) != 4 || digest(batches) != want {
				t.Errorf("%s, held %d: %d batches, error %v, want no error, len(batches) = 4, "+
					"digest %v", name, held, len(batches), err, want)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestExchangedContentsAreAnError: after an epoch has read a tar, contents are exchanged under the
// same names, sizes and times. A later process returns an error that names the sample. The exchange
// is not detected for samples that no epoch has read, nor without an index.
func TestExchangedContentsAreAnError(t *testing.T) {
	content := func(i int) string { return archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000)) }
	tarOf := func(numbers ...int) []byte {
		var list []archivetest.Member
		for i, n := range numbers {
			list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i), Data: content(n)})
		}
		return archivetest.Tar(t, list...)
	}
	before, after := tarOf(0, 1, 2, 3), tarOf(0, 2, 1, 3)
	for name, noEntryPoints := range map[string]bool{"a.tar": false, "b.tar": true} {
		o := Options{Transform: Eval(4, 4), BatchSize: 1, NoEntryPoints: noEntryPoints}
		path, want := indexed(t, name, before, o)
		read := func(o Options) (batches []copied, err error) {
			t.Helper()
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			batches, err = collect(t, l, 0, 2)
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			return batches, err
		}
		for range 2 { // the second epoch has nothing to add to the index
			if batches, err := read(o); err != nil || digest(batches) != want {
				t.Errorf("the same archive: %v, want no error, digest %v", err, want)
			}
		}
		archivetest.Rewrite(t, path, after)
		var damage *ArchiveError
		batches, err := read(o)
		if !errors.As(err, &damage) || damage.Member != "a/1.png" || len(batches) != 1 ||
			!strings.Contains(err.Error(), "torchstream index") {
			t.Errorf("%d batches, error %v, want an error of type *ArchiveError, damage.Member = %q, "+
				"len(batches) = 1, an error with %q", len(batches), err, "a/1.png", "torchstream index")
		}
		without := o
		without.NoIndex = true
		if batches, err := read(without); err != nil || len(batches) != 4 {
			t.Errorf("without an index: %d batches, error %v, want no error, len(batches) = 4",
				len(batches), err)
		}
		if _, err := MakeIndex(t.Context(), path, o, nil); err != nil { // the error's advice
			t.Fatal(err)
		}
		archivetest.Rewrite(t, path, before) // before an epoch
		for range 2 {
			if batches, err := read(o); err != nil || digest(batches) != want {
				t.Errorf("an index that no epoch has used: %d batches, error %v, want no error, "+
					"digest %v", len(batches), err, want)
			}
		}
		forge(t, path+indextest.Suffix, indextest.Sums, func(b []byte) { b[8]++ })
		if _, err := read(o); !errors.As(err, &damage) || damage.Member != "a/2.png" {
			t.Errorf("a forged checksum: error %v, want an error of type *ArchiveError, damage.Member = %q",
				err, "a/2.png")
		}
		forge(t, path+indextest.Suffix, indextest.Sums, func(b []byte) { clear(b) })
		if batches, err := read(o); err != nil || digest(batches) != want {
			t.Errorf("no checksums: %v, want no error, digest %v", err, want)
		}
		index, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		index[len(index)-1] ^= 1 // in the last section, the checksums
		if err := os.WriteFile(path+indextest.Suffix, index, 0o644); err != nil {
			t.Fatal(err)
		}
		if batches, err := read(o); err != nil || digest(batches) != want {
			t.Errorf("a damaged section: %v, want no error, digest %v", err, want)
		}
	}
}

// forge changes a section of an index file, with right checksums.
func forge(t *testing.T, path string, section uint32, change func(b []byte)) {
	t.Helper()
	index, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, indextest.Forge(t, index, section, change), 0o644); err != nil {
		t.Fatal(err)
	}
}

// checkForged checks that an epoch ends with an error that names the member want. If want is empty,
// it checks that the loader replaces the index and reads the samples.
func checkForged(t *testing.T, path string, o Options, want string, list []archivetest.Member) {
	t.Helper()
	var batches []copied
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err == nil { // a stream that is held in memory has been read by Open
		defer l.Close()
		batches, err = collect(t, l, 0, 2)
	}
	var damage *ArchiveError
	if want != "" {
		if !errors.As(err, &damage) || damage.Member != want {
			t.Errorf("%d batches, error %v, want an error of type *ArchiveError, damage.Member = %v",
				len(batches), err, want)
		}
		return
	}
	if err != nil || len(batches) != len(list) ||
		batches[0].samples[0] != (Sample{Name: "a/0.png", Index: 0, Label: 0}) ||
		batches[1].samples[0] != (Sample{Name: "b/1.png", Index: 1, Label: 1}) {
		t.Errorf("%d batches, error %v", len(batches), err)
	}
}

// TestChangedTarBehindURLIsAnError: a tar at a URL has the size and the time of the tar that
// another run has indexed, but another order of samples. The error names the sample. Detecting the
// change needs no second request.
func TestChangedTarBehindURLIsAnError(t *testing.T) {
	const url = "store://b/a.tar"
	s := sourcetest.New(1, map[string]sourcetest.Object{url: {Data: string(archivetest.Numbered(t, 0, 1, 2,
		3)), Version: "1"}})
	o := Options{Transform: Eval(4, 4), BatchSize: 1, Workers: 1,
		IndexFile: filepath.Join(t.TempDir(), "index"), OpenSource: s.OpenSource}
	for _, c := range []struct {
		data    []byte
		version string
		samples int // before the error; 4: no error
	}{{archivetest.Numbered(t, 0, 1, 2, 3), "1", 4}, {archivetest.Numbered(t, 0, 1, 2, 3), "2", 4},
		{archivetest.Numbered(t, 0, 2, 1, 3), "3", 1}} {
		s.Objects[url] = sourcetest.Object{Data: string(c.data), Version: c.version}
		l, err := open(t.Context(), url, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if len(batches) != c.samples || (err == nil) != (c.samples == 4) || err != nil &&
			(!errors.As(err, &damage) || damage.Member != "a/1.png" || !errors.Is(err, index.ErrStale)) {
			t.Errorf("version %s: %d samples, error %v", c.version, len(batches), err)
		}
		if c.samples < 4 {
			continue
		}
		a, err := archive.Open(t.Context(), url, l.archiveConfig())
		if err != nil {
			t.Fatal(err)
		}
		r, asked := index.NewReader(l.index.Load(), a), s.Asked
		for i := range 4 {
			got := make([]byte, l.index.Load().Size(i))
			if err := r.Read(i, got); err != nil ||
				!slices.Equal(got, []byte(archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000)))) {
				t.Errorf("sample %d: error %v, or other bytes", i, err)
			}
		}
		if s.Asked != asked+4 {
			t.Errorf("%d requests for 4 samples, want 4", s.Asked-asked)
		}
		r.Close()
		a.Close()
	}
}

// TestIndexOfURLHasNoSecret: an index names the URL of its archive without user, password and
// query. It is therefore also used with another query, for example with another signature.
func TestIndexOfURLHasNoSecret(t *testing.T) {
	data := string(archivetest.Gzip(t, archivetest.Numbered(t, 0, 1, 2, 3)))
	file := filepath.Join(t.TempDir(), "index")
	for i, url := range []string{"store://name:SECRET@b/a.tgz?sig=SECRET/1",
		"store://name:SECRET@b/a.tgz?sig=SECRET/22", "store://b/other.tgz"} {
		s := sourcetest.New(1, map[string]sourcetest.Object{url: {Data: data, Version: "1"}})
		var log bytes.Buffer
		o := Options{Transform: Eval(4, 4), BatchSize: 1, IndexFile: file, OpenSource: s.OpenSource,
			Logger: slog.New(slog.NewTextHandler(&log, nil))}
		l, err := open(t.Context(), url, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = collect(t, l, 0, 4)
		l.Close()
		if err != nil {
			t.Fatal(err)
		}
		if opened := strings.Contains(log.String(), "opened index"); opened != (i == 1) ||
			strings.Contains(log.String(), "SECRET") {
			t.Errorf("%s: opened the index: %t\n%s", url, opened, &log)
		}
		index, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(index, []byte("SECRET")) || i < 2 && !bytes.Contains(index, []byte("a.tgz")) {
			t.Errorf("the index of %s has its secret, or another name: %q", url, index)
		}
	}
}

// readCounter counts the bytes of random reads.
type readCounter struct {
	archive.File
	bytes *int
}

func (r readCounter) ReadAt(p []byte, at int64) (int, error) {
	*r.bytes += len(p)
	return r.File.ReadAt(p, at)
}

// TestTooLargeImageByIndexIsNotRead: if the header in the index says that an image has too many
// pixels, the image is the same bad sample as without an index, and its file is not read.
func TestTooLargeImageByIndexIsNotRead(t *testing.T) {
	var members []archivetest.Member
	for i := range 6 {
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("a/%d.jpg", i), Data: string(archivetest.Photo(t, uint64(i)))})
	}
	members = append(members,
		archivetest.Member{Name: "a/small.png", Data: archivetest.PNG(t, archivetest.Gradient(20, 20))})
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	o := Options{Transform: Train(8), BadSamples: Skip, MaxPixels: 10_000, NoIndex: true}
	var bad [2]string
	var bytes int
	for i := range bad {
		l, err := open(t.Context(), path, o, func(path string) (archive.File, error) {
			f, err := openFile(path)
			return readCounter{f, &bytes}, err
		}, sample.Library{})
		if err != nil {
			t.Fatal(err)
		}
		o.Workers = 1
		bytes = 0
		batches, err := collect(t, l, 0, 2)
		if err != nil || !slices.Equal(names(batches), []string{"a/small.png"}) {
			t.Errorf("%v, error %v", names(batches), err)
		}
		for _, e := range l.Stats().BadNamed {
			bad[i] += e.Error() + "\n"
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		o.NoIndex = false
		if i == 0 {
			if _, err := MakeIndex(t.Context(), path, Options{}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if bad[0] != bad[1] || bad[0] == "" {
		t.Errorf("without an index:\n%swith it:\n%s\nwant bad[0] = %v, bad[0] not \"\"",
			bad[0], bad[1], bad[1])
	}
	if bytes > 3000 {
		t.Errorf("%d bytes are read, want at most 3000", bytes)
	}
}

// pixelsOf returns the rows of batches by sample.
func pixelsOf(batches []copied) map[string]string {
	m := map[string]string{}
	for _, b := range batches {
		row := len(b.images) / len(b.samples)
		for i, s := range b.samples {
			m[s.Name] = string(b.images[i*row : (i+1)*row])
		}
	}
	return m
}

// TestForgedHeadersChangeNoPixel: a forged image header in an index changes no pixel, unless the
// sample is refused by name as too large.
func TestForgedHeadersChangeNoPixel(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Mixed(t)...)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		path := archivetest.WriteFile(t, name, packed)
		side := filepath.Join(t.TempDir(), "index")
		o := Options{Transform: Train(8), BadSamples: Skip, IndexFile: side, ShuffleBytes: 1, BatchSize: 3}
		run := func() (map[string]string, Stats) {
			l, err := Open(path, o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			batches, err := collect(t, l, 1, 2)
			if err != nil && !errors.Is(err, ErrNoSamples) {
				t.Fatal(err)
			}
			return pixelsOf(batches), l.Stats()
		}
		want, before := run()
		index, err := os.ReadFile(side)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(4, 4))
		for round := range 30 {
			forged := indextest.Forge(t, index, indextest.Headers, func(b []byte) {
				for k := range b {
					switch {
					case round == 0:
						b[k] = 0
					case round == 1:
						b[k] = 0xff
					case rng.IntN(3) == 0:
						b[k] = byte(rng.Uint32())
					}
				}
				if round > 20 { // wrong, but within the limits
					for ; len(b) > 0; b = b[indextest.HeaderBytes:] {
						binary.LittleEndian.PutUint32(b, 1+rng.Uint32N(100))
						binary.LittleEndian.PutUint32(b[4:], 1+rng.Uint32N(100))
						b[8] = byte(1 + rng.IntN(6))
					}
				}
			})
			if err := os.WriteFile(side, forged, 0o644); err != nil {
				t.Fatal(err)
			}
			got, stats := run()
			missing := 0
			for name, pixels := range want {
				if got[name] == "" {
					missing++
				} else if got[name] != pixels {
					t.Errorf("round %d: %s has other pixels, want the source's", round, name)
				}
			}
			if more := stats.BadBy[TooLarge] - before.BadBy[TooLarge]; int(more) != missing || round > 20 &&
				missing > 0 {
				t.Errorf("round %d: %d samples are missing, %d are refused as too large", round, missing, more)
			}
		}
	}
}

// countedSource counts the bytes of random reads.
type countedSource struct {
	archive.File
	bytes *atomic.Int64
}

func (s countedSource) ReadAt(p []byte, at int64) (int, error) {
	s.bytes.Add(int64(len(p)))
	return s.File.ReadAt(p, at)
}

// TestSegmentsReadTheFileOnce reads a stream of small samples that is held in memory, and that has
// many samples between two checkpoints. An epoch in any order reads the file about once. Its
// batches equal the batches of an epoch that reads the file from start to end. An error names the
// damaged sample, and the other samples are unaffected.
func TestSegmentsReadTheFileOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	var members []archivetest.Member
	for i := range 3000 {
		b := make([]byte, 200+rng.IntN(2500))
		for k := range b {
			b[k] = byte(rng.Uint32())
		}
		m := archivetest.Member{Name: fmt.Sprintf("train/class%d/%04d.png", i%3, i), Data: archivetest.Image(string(b))}
		switch i % 50 {
		case 7:
			m.Data = ""
		case 9:
			m = archivetest.Member{Name: fmt.Sprintf("notes/%d.txt", i), Data: strings.Repeat("n", rng.IntN(3000))}
		case 11:
			m.Kind, m.Link, m.Data = '2', "x", ""
		case 13:
			m.Data = archivetest.Image(strings.Repeat("large", 5000))
		}
		members = append(members, m)
	}
	data := archivetest.Tar(t, members...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, 500_000, gzip.BestSpeed))
	var read atomic.Int64
	file := func(path string) (archive.File, error) {
		f, err := openFile(path)
		return countedSource{f, &read}, err
	}
	o := Options{Transform: Eval(4, 4), Shuffle: true, BadSamples: Skip, MaxSampleBytes: 10_000, Workers: 3,
		NoIndex: true}
	var want []string
	for round := range 3 { // from start to end, index made, index found
		read.Store(0)
		l, err := open(t.Context(), path, o, file, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		x := l.index.Load()
		for epoch := range 2 {
			batches, err := collect(t, l, epoch, 2)
			if err != nil {
				t.Fatal(err)
			}
			if round == 0 {
				want = append(want, digest(batches))
			} else if digest(batches) != want[epoch] {
				t.Errorf("round %d, epoch %d has other batches", round, epoch)
			}
		}
		if round == 2 {
			if !x.Random() || x.Work() < 10 { // random access must depend on the samples held in memory
				t.Fatalf("random access %v, work %v", x.Random(), x.Work())
			}
			if size := l.info.Size(); read.Load() > 3*size {
				t.Errorf("%d bytes are read of a file of %d, want at most %v",
					read.Load(), size, 3*size)
			}
			for i := range x.Len() {
				if x.Size(i) > o.MaxSampleBytes && x.InMemory(i) != nil {
					t.Errorf("%s is held in memory", x.Name(i))
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		o.NoIndex = false
	}

	// Another archive under the same index. Its data is stored, so that a change of one byte
	// changes one byte of a sample.
	store := archivetest.GzipSplit(t, data, len(data), 0)
	path = archivetest.WriteFile(t, "b.tgz", store)
	l, err := open(t.Context(), path, o, file, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	victim := slices.IndexFunc(members,
		func(m archivetest.Member) bool { return strings.HasSuffix(m.Name, "/1500.png") })
	at := bytes.Index(store, []byte(members[victim].Data[20:60]))
	changed := bytes.Clone(store)
	changed[at] ^= 1
	archivetest.Rewrite(t, path, changed)
	if l, err = open(t.Context(), path, o, file, fakeCodec{}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x := l.index.Load()
	a, err := archive.Open(t.Context(), path, l.archiveConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := index.NewReader(x, a)
	defer r.Close()
	contents := archivetest.Contents(members)
	for _, i := range rand.Perm(x.Len()) {
		if s := x.Sample(i); s.Kind != archive.Regular || s.Size == 0 {
			continue
		}
		b := make([]byte, x.Size(i))
		err := r.Read(i, b)
		if name := x.Name(i); name == members[victim].Name && !errors.Is(err, index.ErrStale) ||
			name != members[victim].Name && (err != nil || string(b) != contents[name]) {
			t.Errorf("%s: error %v, or other bytes", name, err)
		}
	}
}

// TestForgedSizesAreRefused: an index is not used if one of its samples, or all together, are
// larger than the archive can inflate to.
func TestForgedSizesAreRefused(t *testing.T) {
	data := archivetest.Images(t, 6, nil)
	for name, packed := range map[string][]byte{"a.tgz": archivetest.Gzip(t, data),
		"a.tar.zst": archivetest.Zstd(t, data), "a.tar": data} {
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
				t.Fatalf("%s with samples of %d bytes: %v, want no error", name, size, err)
			}
			if _, err := collect(t, l, 0, 2); err != nil {
				t.Errorf("%s with samples of %d bytes: %v, want no error", name, size, err)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
	}
}

// TestFlippedBitDamagesTheIndex: an index with a flipped bit is replaced as damaged. The bit turns
// a file into an image of an unexpected class, but Open does not report that class.
func TestFlippedBitDamagesTheIndex(t *testing.T) {
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
	// The change is in the flags of class2.
	forged := indextest.Forge(t, index, indextest.Members,
		func(b []byte) { b[2*indextest.MemberBytes+31] |= indextest.FlagsOfImage })
	table := indextest.FileHeader + int(binary.LittleEndian.Uint32(index[12:]))*indextest.TableItem
	index = append(index[:table], forged[table:]...) // with the checksums of the original
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

// TestEveryOpenHasTheSameOrder: the loader that makes an index and the loaders that find it have
// the same order of epochs, with any other members in the archive. Of two ranks, one may make the
// index and the other find it.
func TestEveryOpenHasTheSameOrder(t *testing.T) {
	samples := archivetest.Images(t, 40, nil)
	notes := strings.Repeat("notes", 12_000)
	large := archivetest.Tar(t, archivetest.Member{Name: "notes/a.txt", Data: notes},
		archivetest.Member{Name: "notes/b.txt", Data: notes})
	tooLarge := archivetest.Tar(t,
		archivetest.Member{Name: "train/class0/large.png", Data: archivetest.Image(strings.Repeat("large", 40_000))})
	for name, data := range map[string][]byte{
		"samples":            samples,
		"notes before":       append(large, samples...),
		"a sample too large": append(tooLarge, samples...),
	} {
		for file, packed := range map[string][]byte{"a.tgz": archivetest.Gzip(t, data),
			"a.tar.zst": archivetest.Zstd(t, data)} {
			path := archivetest.WriteFile(t, file, packed)
			o := Options{Transform: Eval(4, 4), BatchSize: 8, Shuffle: true, Seed: 3, BadSamples: Skip,
				ShuffleBytes: 100_000, MaxSampleBytes: 100_000, World: 2}
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
					t.Errorf("%s, %s: the order is %s, of the loader that made the index %s, want "+
						"l.opened = %v, digest %v",
						name, file, l.opened, first.opened, first.opened, want)
				}
			}
		}
	}
}

// onLog is a Logger that calls a function for each message.
type onLog func(message string)

func (onLog) Enabled(context.Context, slog.Level) bool { return true }

func (f onLog) Handle(_ context.Context, r slog.Record) error {
	f(r.Message)
	return nil
}

func (f onLog) WithAttrs([]slog.Attr) slog.Handler { return f }

func (f onLog) WithGroup(string) slog.Handler { return f }

// TestOpenWaitsForTheIndexOfAnother: if several loaders open an archive without an index at the
// same time, one reads it, over the network too. The other loaders stop waiting when their contexts
// end.
func TestOpenWaitsForTheIndexOfAnother(t *testing.T) {
	data := archivetest.Gzip(t, archivetest.Images(t, 40, nil))
	s := sourcetest.New(1, map[string]sourcetest.Object{"store://b/a.tgz": {Data: string(data), Version: "1"}})
	for _, path := range []string{archivetest.WriteFile(t, "a.tgz", data), "store://b/a.tgz"} {
		t.Run(path, func(t *testing.T) {
			const scanning, waiting = "scanning archive", "waiting for the index that another process makes"
			file := filepath.Join(t.TempDir(), "index")
			open := func(ctx context.Context, log onLog) error {
				l, err := open(ctx, path,
					Options{Transform: Eval(4, 4), IndexFile: file, OpenSource: s.OpenSource,
						Logger: slog.New(log)}, openFile, fakeCodec{})
				if err == nil {
					err = l.Close()
				}
				return err
			}
			reached, gate := make(chan bool), make(chan bool)
			first := make(chan error, 1)
			go func() {
				first <- open(t.Context(), func(message string) {
					if message == scanning {
						close(reached)
						<-gate
					}
				})
			}()
			select {
			case <-reached:
			case err := <-first:
				t.Fatalf("it does not read the archive: %v", err)
			}
			cause := errors.New("enough")
			ctx, cancel := context.WithCancelCause(t.Context())
			err := open(ctx, func(message string) {
				if message == waiting {
					cancel(cause)
				}
			})
			if !errors.Is(err, cause) {
				t.Errorf("a wait that was cancelled: %v, want the error %v", err, cause)
			}
			var messages []string
			err = open(t.Context(), func(message string) {
				if messages = append(messages, message); message == waiting {
					close(gate)
				}
			})
			if err != nil || slices.Contains(messages, scanning) || !slices.Contains(messages, waiting) {
				t.Errorf("%v, %q", err, messages)
			}
			if err := <-first; err != nil {
				t.Error(err)
			}
			if files, err := os.ReadDir(filepath.Dir(file)); err != nil || len(files) != 1 {
				t.Errorf("%v, %v, want no error, len(files) = 1", files, err)
			}
		})
	}
}

// TestInflatingAheadChangesNoBatch: an archive whose chunks several goroutines inflate gives the
// same index, and in its first pass the same batches.
func TestInflatingAheadChangesNoBatch(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(160)...)))
	if info, err := os.Stat(path); err != nil || info.Size() < 10<<20 {
		t.Fatalf("got an archive of %v, error %v, want 10 MB, which are five chunks", info.Size(), err)
	}
	var indexes [][]byte
	var batches []string
	for _, processors := range []int{1, 8} {
		defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(processors))
		file := filepath.Join(t.TempDir(), "a.tsidx")
		if _, err := MakeIndex(t.Context(), path, Options{IndexFile: file}, nil); err != nil {
			t.Fatal(err)
		}
		made, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		indexes = append(indexes, made)
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), Workers: processors, NoIndex: true,
			Classes: []string{"class0", "class1", "class2"}, BadSamples: Skip}, nil, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		all := ""
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			all += fmt.Sprintf("%v %v %x\n", b.Samples, b.Labels, b.Images)
		}
		batches = append(batches, all)
	}
	if !bytes.Equal(indexes[0], indexes[1]) {
		t.Errorf("got an index of %d bytes with eight processors, want the %d bytes with one", len(indexes[1]), len(indexes[0]))
	}
	if batches[0] != batches[1] {
		t.Error("got other batches with eight workers than with one, want the same")
	}
}
