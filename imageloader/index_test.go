package imageloader

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
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

// photos are members with contents like photographs' (hardly compressible, some matches), text and zeros, of sizes from 1 byte to 200 KB.
func photos(n int) []tarMember {
	rng := rand.New(rand.NewPCG(3, uint64(n)))
	var list []tarMember
	for i := range n {
		b := make([]byte, 20_000+rng.IntN(180_000))
		switch i % 8 {
		case 6:
			copy(b, strings.Repeat(fmt.Sprintf("text %d and on it goes ", i), len(b)/20))
		case 7:
			b = b[:rng.IntN(100)]
		default:
			for k := range b {
				b[k] = byte(rng.Uint32()) & byte(rng.Uint32()|0x3f)
			}
			for range 40 { // matches, near and far
				at, n := 300+rng.IntN(len(b)-600), 3+rng.IntN(250)
				copy(b[at:], b[max(0, at-1-rng.IntN(32000)):][:n])
			}
		}
		list = append(list, tarMember{name: fmt.Sprintf("train/class%d/%04d.png", i%3, i), data: fakeImage(string(b))})
		if i%5 == 0 {
			list = append(list, tarMember{name: fmt.Sprintf("notes/%d.txt", i), data: strings.Repeat("n", 1000+i)})
		}
	}
	return list
}

// gzipSplit makes a gzip file of several members, cut every so many bytes.
func gzipSplit(t testing.TB, data []byte, every, level int) []byte {
	t.Helper()
	var b bytes.Buffer
	for len(data) > 0 {
		n := min(every, len(data))
		w, err := gzip.NewWriterLevel(&b, level)
		if err != nil {
			t.Fatal(err)
		}
		w.Name, w.Comment = "a name", "a comment"
		if _, err := w.Write(data[:n]); err != nil {
			t.Fatal(err)
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		data = data[n:]
	}
	return b.Bytes()
}

// contentOf finds what the samples of a test's archive hold.
func contentOf(members []tarMember) map[string]string {
	m := map[string]string{}
	for _, x := range members {
		m[x.name] = x.data
	}
	return m
}

// readAll reads every sample of an index, in random order, by several goroutines.
func readAll(t *testing.T, path string, x *index, want map[string]string) {
	t.Helper()
	a, err := openArchive(t.Context(), path, opener{file: openFile})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	order := rand.Perm(len(x.entries))
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			r := newSampleReader(a, x)
			defer r.close()
			for _, i := range order[g*len(order)/4 : (g+1)*len(order)/4] {
				b := make([]byte, x.entries[i].size)
				if err := r.read(i, b); err != nil {
					t.Error(err)
				} else if string(b) != want[x.name(i)] {
					t.Errorf("%s has other bytes", x.name(i))
				}
			}
		})
	}
	all.Wait()
}

// TestRandomAccess: any sample of a gzip file of any make is read from a checkpoint, with the index that the scan left and with the same one from its file.
func TestRandomAccess(t *testing.T) {
	members := photos(60)
	want := contentOf(members)
	data := tarBytes(t, members...)
	for name, file := range map[string][]byte{
		"tar":                         data,
		"level 6":                     gzipSplit(t, data, len(data), 6),
		"level 1":                     gzipSplit(t, data, len(data), 1),
		"stored":                      gzipSplit(t, data, len(data), 0),
		"huffman only":                gzipSplit(t, data, len(data), gzip.HuffmanOnly),
		"gzip members cut anywhere":   gzipSplit(t, data, 77_777, 6),
		"gzip members smaller than a": gzipSplit(t, data, 9_999, 9),
	} {
		t.Run(name, func(t *testing.T) {
			path := writeFile(t, "a.tgz", file)
			o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000}
			for round := range 2 {
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if err != nil {
					t.Fatal(err)
				}
				x := l.index.Load()
				if len(x.entries) != 60 || !x.random() || x.held != nil {
					t.Fatalf("round %d: %d samples, random %v, work %v, held %v", round, len(x.entries), x.random(), x.work, x.held != nil)
				}
				if x.work > 2.5 {
					t.Errorf("%.2f bytes are inflated for one of samples", x.work)
				}
				if x.side == nil {
					t.Error("no index file")
				}
				readAll(t, path, x, want)
				if err := l.Close(); err != nil {
					t.Error(err)
				}
				o.Classes = []string{"class0", "class1", "class2"} // the second time, from the file
			}
			info, err := os.Stat(path + sidecarSuffix)
			if err != nil || info.Size() > int64(len(file))/20 && info.Size() > 20_000 {
				t.Errorf("the index has %d bytes, the archive %d; %v", info.Size(), len(file), err)
			}
		})
	}
}

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

// TestIndexReuse: the index is written once, read by the next loader in whatever way that is opened, and made anew when it does not fit any more.
func TestIndexReuse(t *testing.T) {
	members := photos(40)
	data := tarBytes(t, members...)
	path := writeFile(t, "a.tgz", gzipSplit(t, data, len(data), 6))
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
	if _, err := os.Stat(path + sidecarSuffix); err == nil {
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

	changed := gzipSplit(t, data, len(data), 5)
	if err := os.WriteFile(path, changed, 0o644); err != nil {
		t.Fatal(err)
	}
	expect("another archive", Options{}, true, false, true)
	expect("and then", Options{}, false, true, false)
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	index[8]++
	if err := os.WriteFile(path+sidecarSuffix, index, 0o644); err != nil {
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

// TestIndexOfStreams: where a stream is read in its own order, by an index of another archive of the same size and time, the checksums tell; and a plain tar, which has
// none in its index, is scanned again when its time differs.
func TestIndexOfStreams(t *testing.T) {
	members := photos(40)
	for i := range members { // no checkpoints that help
		members[i].data = members[i].data[:min(len(members[i].data), 300)]
	}
	middle := len(members) / 2
	for members[middle].name[0] != 't' {
		middle++
	}
	padding := tarMember{name: "z/pad.txt", data: strings.Repeat("p", 3*edgeBytes)}
	all := append(append([]tarMember{padding}, members...), padding)
	first := tarBytes(t, all...)
	changed := all[middle+1]
	all[middle+1].data = fakeImage(strings.Repeat("!", len(changed.data)-8))
	second := tarBytes(t, all...)
	store := func(data []byte) []byte { return gzipSplit(t, data, len(data), 0) } // of equal sizes
	for _, c := range []struct {
		name          string
		first, second []byte
		want          string // in the error; "": it is seen at Open
	}{{"a.tgz", store(first), store(second), "differ from the checksum"}, {"a.tar", first, second, ""}} {
		path := writeFile(t, c.name, c.first)
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
		if c.want == "" && err != nil || c.want != "" && (err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), changed.name)) {
			t.Errorf("%s: error %v", c.name, err)
		}
	}
}

// TestIndexUnknownClass: an image of a class that is not expected is an error also when the index knows the archive.
func TestIndexUnknownClass(t *testing.T) {
	path := writeFile(t, "a.tgz", gzipBytes(t, tarBytes(t, photos(9)...)))
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

// forge writes a copy of a sidecar with one section changed and all checksums right.
func forge(t testing.TB, index []byte, kind uint32, change func([]byte)) []byte {
	t.Helper()
	index = bytes.Clone(index)
	le := binary.LittleEndian
	n := le.Uint32(index[12:])
	table := index[sidecarHeader : sidecarHeader+n*sectionBytes]
	found := false
	for at := 0; at < len(table); at += sectionBytes {
		if le.Uint32(table[at:]) == kind {
			found = true
			b := index[le.Uint64(table[at+8:]):][:le.Uint64(table[at+16:])]
			change(b)
			le.PutUint32(table[at+4:], crc32.ChecksumIEEE(b))
		}
	}
	if !found {
		t.Fatalf("no section %d", kind)
	}
	le.PutUint32(index[24:], crc32.ChecksumIEEE(table))
	le.PutUint32(index[28:], crc32.ChecksumIEEE(index[:28]))
	return index
}

// TestForgedIndex: an index whose checksums are right but that does not belong to the archive never gives other bytes: the samples are right, or it is refused,
// or the epoch ends with an error that names the sample.
func TestForgedIndex(t *testing.T) {
	members := photos(9)
	want := contentOf(members)
	path := writeFile(t, "a.tgz", gzipBytes(t, tarBytes(t, members...)))
	side := filepath.Join(t.TempDir(), "index")
	o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000, IndexFile: side, BatchSize: 1}
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	index, err := os.ReadFile(side)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	failed, right := 0, 0
	for round := range 70 {
		kind := []uint32{sectionEntries, sectionCheckpoints, sectionWindows, sectionNames, sectionDirs, sectionShards, sectionHeads}[round%7]
		forged := forge(t, index, kind, func(b []byte) {
			for range 1 + rng.IntN(3) {
				b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
			}
		})
		if err := os.WriteFile(side, forged, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		x := l.index.Load()
		a, err := openArchive(t.Context(), path, opener{file: openFile})
		if err != nil {
			t.Fatal(err)
		}
		r := newSampleReader(a, x)
		for i := range x.entries {
			e := &x.entries[i]
			if e.kind != kindFile || e.size > 1<<20 || !x.random() {
				continue
			}
			b := make([]byte, e.size)
			if err := r.read(i, b); err != nil {
				var at *ArchiveError
				if failed++; !errors.As(err, &at) || at.Member != x.name(i) {
					t.Errorf("error %v", err)
				}
				continue
			}
			right++
			known := want[x.name(i)]
			if kind != sectionNames && kind != sectionEntries && string(b) != known {
				t.Errorf("section %d: %s has other bytes", kind, x.name(i))
			}
			if e.flags&entrySummed != 0 && crc32.ChecksumIEEE(b) != e.crc {
				t.Errorf("section %d: %s has another checksum", kind, x.name(i))
			}
		}
		r.close()
		a.Close()
		l.Close()
	}
	if failed == 0 || right == 0 {
		t.Errorf("%d reads failed, %d were right", failed, right)
	}
}

// TestEntryBlobs: what is kept for a sample is there in the next run, whatever classes that has, and with it what was there before.
func TestEntryBlobs(t *testing.T) {
	path := writeFile(t, "a.tgz", gzipBytes(t, tarBytes(t, photos(30)...)))
	o := Options{Transform: Eval(4, 4)}
	blob := func(x *index, i int) []byte { return bytes.Repeat([]byte(x.name(i)+" entries "), 4000) } // more than a spool has in memory, all together
	keep := func(from, to int, o Options) {
		t.Helper()
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		x := l.index.Load()
		var all sync.WaitGroup
		for i := from; i < to; i++ {
			all.Go(func() { x.keepEntries(i, blob(x, i)) })
		}
		all.Wait()
		for i := range to {
			if got := x.entriesOf(i, nil); !bytes.Equal(got, blob(x, i)) {
				t.Errorf("sample %d of %d to %d: %d other bytes", i, from, to, len(got))
			}
		}
		if to < 30 && len(x.entriesOf(to, nil)) > 0 {
			t.Errorf("sample %d has %d bytes", to, len(x.entriesOf(to, nil)))
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	keep(0, 10, o)
	keep(10, 20, o)
	keep(20, 20, o)
	o.Classes = []string{"class2", "class1", "class0"}
	keep(20, 30, o)
	if left, err := filepath.Glob(path + "*.tmp"); err != nil || len(left) > 0 {
		t.Errorf("%v are left, error %v", left, err)
	}
}

func TestWindows(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for round := range 500 {
		window := make([]byte, windowBytes)
		for i := range window {
			window[i] = byte(rng.Uint32())
		}
		used := make([]uint64, windowBytes/64)
		for range rng.IntN(60) {
			from := rng.IntN(windowBytes)
			for i := from; i < min(windowBytes, from+rng.IntN(300)); i++ {
				used[i/64] |= 1 << (i % 64)
			}
		}
		switch round {
		case 0:
			clear(used)
		case 1:
			for i := range used {
				used[i] = ^uint64(0)
			}
		case 2:
			clear(used)
			used[0], used[len(used)-1] = 1, 1<<63
		}
		packed := packWindow(window, used)
		got := bytes.Repeat([]byte{9}, windowBytes)
		if err := unpackWindow(packed, got); err != nil {
			t.Fatal(err)
		}
		for i := range window {
			if used[i/64]>>(i%64)&1 == 1 && got[i] != window[i] {
				t.Fatalf("round %d: byte %d is lost", round, i)
			}
		}
		if len(packed) > 0 { // whatever it is, no panic and nothing outside
			packed = packed[:rng.IntN(len(packed))]
			for range 3 {
				if len(packed) > 0 {
					packed[rng.IntN(len(packed))] ^= byte(1 << rng.IntN(8))
				}
			}
			_ = unpackWindow(packed, got) // an error or not
		}
	}
}

// TestGzip: gzip files in every form, in reads of every size.
func TestGzip(t *testing.T) {
	rng := rand.New(rand.NewPCG(8, 8))
	data := make([]byte, 700_000)
	for i := range data {
		data[i] = byte(rng.IntN(1 + i%200))
	}
	for _, every := range []int{1, 1000, 65_280, len(data)} {
		part := data
		if every == 1 {
			part = data[:300]
		}
		file := gzipSplit(t, part, every, 6)
		for _, chunk := range []int{1, 13, 4096, 1 << 20} {
			r, err := newGzipReader(&chunked{bytes.NewReader(file), chunk})
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(r)
			r.close()
			if err != nil || !bytes.Equal(got, part) {
				t.Fatalf("members of %d bytes, read by %d: %d bytes, error %v", every, chunk, len(got), err)
			}
		}
	}
	good := gzipSplit(t, data, len(data), 6)
	for name, c := range map[string]struct {
		change func([]byte) []byte
		want   error
	}{
		"length":          {func(b []byte) []byte { b[len(b)-1] ^= 1; return b }, gzip.ErrChecksum},
		"checksum":        {func(b []byte) []byte { b[len(b)-5] ^= 1; return b }, gzip.ErrChecksum},
		"junk after":      {func(b []byte) []byte { return append(b, "some junk that follows"...) }, gzip.ErrHeader},
		"cut off trailer": {func(b []byte) []byte { return b[:len(b)-1] }, io.ErrUnexpectedEOF},
		"cut off":         {func(b []byte) []byte { return b[:len(b)/2] }, io.ErrUnexpectedEOF},
		"cut off at 9":    {func(b []byte) []byte { return b[:9] }, io.ErrUnexpectedEOF},
	} {
		r, err := newGzipReader(bytes.NewReader(c.change(bytes.Clone(good))))
		if err == nil {
			_, err = io.ReadAll(r)
			r.close()
		}
		if !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", name, err, c.want)
		}
	}
}

type chunked struct {
	r io.Reader
	n int
}

func (c *chunked) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), c.n)]) }

// TestCheckpointChoice: of the checkpoints noted, in any mixture with the members they are for, the last before each member is kept.
func TestCheckpointChoice(t *testing.T) {
	rng := rand.New(rand.NewPCG(2, 2))
	for range 300 {
		var stops, starts []int64
		at := int64(0)
		for range 30 {
			stops = append(stops, at)
			at += 1 + rng.Int64N(100)
		}
		for range 25 {
			starts = append(starts, rng.Int64N(at+50))
		}
		slices.Sort(starts)
		i, j := 0, 0
		var kept []checkpoint
		k := newCheckpointer(func(c checkpoint) { kept = append(kept, c) }, func() int64 { // up to where the tar is read
			if j < len(starts) {
				return starts[j] - int64(rng.IntN(20))
			}
			return at
		})
		k.note(checkpoint{output: stops[0]})
		for i = 1; i < len(stops) || j < len(starts); {
			// A checkpoint comes at the latest when a member beyond it does, and may come long before.
			if i < len(stops) && (j == len(starts) || stops[i] <= starts[j]-60 || rng.IntN(2) == 0) {
				k.note(checkpoint{output: stops[i]})
				i++
			} else {
				k.member(starts[j])
				j++
			}
		}
		k.finish()
		want := map[int64]bool{0: true}
		for _, s := range starts {
			best := int64(0)
			for _, c := range stops {
				if c <= s {
					best = c
				}
			}
			want[best] = true
		}
		var got []int64
		for _, c := range kept {
			if !want[c.output] {
				t.Fatalf("stops %v, starts %v: %d is kept", stops, starts, c.output)
			}
			delete(want, c.output)
			got = append(got, c.output)
		}
		if len(want) > 0 || !slices.IsSorted(got) {
			t.Fatalf("stops %v, starts %v: kept %v", stops, starts, got)
		}
	}
}

// TestMakeIndex writes an index ahead of time, and Open then reads next to nothing.
func TestMakeIndex(t *testing.T) {
	path := writeFile(t, "a.tgz", gzipBytes(t, tarBytes(t, photos(50)...)))
	last := Progress{}
	r, err := MakeIndex(t.Context(), path, Options{}, func(p Progress) { last = p })
	if err != nil || r.Samples != 50 || r.Classes != 3 || !r.Random || r.Checkpoints < 25 || r.File != path+sidecarSuffix || last.Members == 0 {
		t.Fatalf("%+v, %+v, error %v", r, last, err)
	}
	var from []*countingSource
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1}, func(path string) (source, error) {
		f, err := openFile(path)
		from = append(from, &countingSource{source: f})
		return from[len(from)-1], err
	}, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, f := range from {
		if f.at > gzipReadBytes {
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
	source
	at int64
}

func (s *countingSource) Read(p []byte) (int, error) {
	n, err := s.source.Read(p)
	s.at += int64(n)
	return n, err
}

func (s *countingSource) Seek(offset int64, whence int) (int64, error) {
	at, err := s.source.Seek(offset, whence)
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

// BenchmarkReadSample reads the samples of the archive of the variable in random order; an op is one sample.
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
	a, err := openArchive(b.Context(), path, opener{file: openFile})
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	r := newSampleReader(a, x)
	defer r.close()
	order := rand.Perm(len(x.entries))
	buffer := make([]byte, 0)
	bytes := int64(0)
	before := cpu(b)
	b.ReportAllocs()
	b.ResetTimer()
	for n := range b.N {
		i := order[n%len(order)]
		size := int(x.entries[i].size)
		buffer = slices.Grow(buffer[:0], size)[:size]
		if err := r.read(i, buffer); err != nil {
			b.Fatal(err)
		}
		bytes += int64(size)
	}
	b.SetBytes(bytes / int64(b.N))
	b.ReportMetric((cpu(b)-before)/float64(b.N), "cpu-µs/op")
}
