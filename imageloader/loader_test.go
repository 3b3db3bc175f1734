package imageloader

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"image"
	"image/color"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// TestEpochsAreDeterministic: an epoch has the same bytes with any number of workers and slots,
// under each policy, with bad samples in the archive.
func TestEpochsAreDeterministic(t *testing.T) {
	data := archivetest.Images(t, 130, func(i int) bool { return i%17 == 3 })
	zipped := archivetest.Gzip(t, data)
	tar, tgz := archivetest.WriteFile(t, "a.tar", data), archivetest.WriteFile(t, "a.tgz", zipped)
	classes := []string{"class0", "class1", "class2", "class3", "class4"}
	for format, archive := range map[string]struct {
		path         string
		shuffleBytes int64
		held         bool
	}{
		"tar":           {tar, 0, false},
		"tgz in memory": {tgz, 0, true},
		// the file fits into the buffer, its inflated samples do not
		"tgz":               {tgz, int64(len(zipped)), false},
		"tgz, buffer ramps": {tgz, int64(len(zipped)) / 2, false},
	} {
		path := archive.path
		for _, policy := range []BadSamplePolicy{Fail, Skip, Substitute} {
			for _, shuffle := range []bool{false, true} {
				t.Run(fmt.Sprint(format, "/", policy, "/shuffle=", shuffle), func(t *testing.T) {
					archivetest.Within(t)
					o := Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle, ShuffleBuffer: 40,
						ShuffleBytes: archive.shuffleBytes, Seed: 7, BadSamples: policy}
					digests := map[string]bool{}
					others := map[string]bool{}
					for _, workers := range []int{1, 2, 5, 16} {
						for _, slots := range []int{1, 2, 8} {
							o.Workers = workers
							o.Classes = nil
							// without a scan, the first epoch of a .tar.gz reads it differently
							// from the second
							if workers == 5 && !(archive.held && shuffle) {
								o.Classes = classes
							}
							l := openFake(t, path, o)
							first, _ := collect(t, l, 1, slots)
							second, _ := collect(t, l, 2, slots)
							again, _ := collect(t, l, 1, slots)
							if policy != Fail && (l.index.Load().InMemory(0) != nil) != archive.held {
								t.Errorf("held in memory: %v", !archive.held)
							}
							digests[digest(first)], digests[digest(again)] = true, true
							others[digest(second)] = true
						}
					}
					if len(digests) != 1 || len(others) != 1 {
						t.Errorf("%d and %d different epochs, want 1 and 1", len(digests), len(others))
					}
					for d := range digests {
						if others[d] {
							t.Errorf("epochs 1 and 2 have the same digest %s, want two", d)
						}
					}
				})
			}
		}
	}
}

// TestShufflePermutesEachEpoch: every sample is delivered once. Another seed or another epoch gives
// another order. Without Shuffle the order is the archive's.
func TestShufflePermutesEachEpoch(t *testing.T) {
	const n = 300
	data := archivetest.Images(t, n, nil)
	for format, path := range map[string]string{"tar": archivetest.WriteFile(t, "a.tar", data),
		"tgz": archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))} {
		for _, buffer := range []int{1, 2, 50, 0} {
			orders := map[string]bool{}
			for _, seed := range []uint64{0, 1, 2} {
				for epoch := range 3 {
					l := openFake(t, path, Options{BatchSize: 7, Transform: Eval(4, 4), Shuffle: true,
						Seed: seed, ShuffleBuffer: buffer, ShuffleBytes: 100_000})
					got, err := collect(t, l, epoch, 2)
					if err != nil {
						t.Fatal(err)
					}
					order := names(got)
					orders[strings.Join(order, " ")] = true
					slices.SortFunc(order, func(a, b string) int { return strings.Compare(a[len(a)-8:], b[len(b)-8:]) })
					if len(slices.Compact(order)) != n {
						t.Fatalf("%s, buffer %d: not every sample once", format, buffer)
					}
				}
			}
			want := 9
			if buffer == 1 && format == "tgz" {
				want = 1
			}
			if len(orders) != want {
				t.Errorf("%s, buffer %d: %d different orders, want %d", format, buffer, len(orders), want)
			}
		}
		l := openFake(t, path, Options{Transform: Eval(4, 4)})
		got, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		for i, name := range names(got) {
			if !strings.HasSuffix(name, fmt.Sprintf("%04d.png", i)) {
				t.Fatalf("%s: sample %d is %s", format, i, name)
			}
		}
	}
}

// TestFittingArchiveIsHeldInMemory: an archive that fits into ShuffleBytes is kept in memory, in
// full or not at all, and gives the same batches.
func TestFittingArchiveIsHeldInMemory(t *testing.T) {
	data := archivetest.Images(t, 100, func(i int) bool { return i == 7 })
	content := int64(0)
	for i := range 100 {
		content += int64(len(archivetest.Image(fmt.Sprintf("image %d %s", i, strings.Repeat("x", i*37%900)))))
	}
	content += int64(len("BAD "))
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data))
	for _, classes := range [][]string{nil, {"class0", "class1", "class2", "class3", "class4"}} {
		for limit, held := range map[int64]bool{content: true, content - 1: false} {
			l := openFake(t, path, Options{Transform: Eval(4, 4), ShuffleBytes: limit, Classes: classes,
				BadSamples: Skip})
			digests := map[string]bool{}
			for range 3 {
				got, err := collect(t, l, 5, 2)
				if err != nil || len(names(got)) != 99 {
					t.Fatalf("%d samples, error %v, want no error, 99 samples",
						len(names(got)), err)
				}
				digests[digest(got)] = true
			}
			bytes := int64(0)
			for i := range l.Len() {
				bytes += int64(len(l.index.Load().InMemory(i)))
			}
			if bytes > 0 != held || held && bytes != content || len(digests) != 1 {
				t.Errorf("limit %d of %d bytes, classes %v: %d bytes kept in memory, %d different epochs",
					limit, content, classes, bytes, len(digests))
			}
		}
	}
}

// loads returns nil if another loader would use the index of a loader's archive.
func loads(l *Loader) error {
	a, err := archive.Open(context.Background(), l.path, l.archiveConfig())
	if err != nil {
		return err
	}
	defer a.Close()
	x, err := index.Load(a, l.indexConfig(l.format))
	if err == nil && x == nil {
		return errors.New("the index is not used")
	}
	if err == nil {
		err = x.Close()
	}
	return err
}

// TestClassesAreSortedDirectories: classes are sorted, directories without images are not classes,
// and members that are not samples are ignored.
func TestClassesAreSortedDirectories(t *testing.T) {
	image := archivetest.Image("x")
	members := []archivetest.Member{
		{Name: "./", Kind: tar.TypeDir},
		{Name: "./zebra/1.png", Data: image},
		{Name: "./README", Data: "about"},
		{Name: "./._zebra", Data: "\x00\x05\x16\x07"},
		{Name: "./docs/LICENSE", Data: "text"},
		{Name: "./orphan.png", Data: image},
		{Name: "train/ant/1", Data: image}, // an image by its first bytes
		{Name: "/abs/Bee/1.png", Data: image},
		{Name: "../up/bee/1.png", Data: image},
		{Name: "../dots.png", Data: image},
		{Name: "a/../ant/2.png", Data: image},
		// PAX or GNU long name
		{Name: strings.Repeat("long/", 60) + "ant/" + strings.Repeat("n", 120) + ".png", Data: image},
		{Name: "dir/çedilla/1.png", Data: image},
		{Name: "sym", Kind: tar.TypeSymlink, Link: "ant/1"},
	}
	data := archivetest.Tar(t, members...)
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		l := openFake(t, archivetest.WriteFile(t, name, data), Options{Transform: Eval(4, 4)})
		if want := []string{"Bee", "ant", "bee", "zebra", "çedilla"}; !slices.Equal(l.Classes(), want) {
			t.Errorf("%s: classes %q, want %q", name, l.Classes(), want)
		}
		got, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		if want := []int64{3, 1, 0, 2, 1, 1, 4}; !slices.Equal(got[0].labels, want) {
			t.Errorf("%s: labels %v, want %v", name, got[0].labels, want)
		}
		if l.Len() != 7 || l.Stats().Ignored != 6 {
			t.Errorf("%s: Len %d, %d ignored, want l.Len() = 7, l.Stats().Ignored = 6",
				name, l.Len(), l.Stats().Ignored)
		}
	}
}

// TestGivenClassesOrderTheLabels: labels follow the given order. Len is unknown until a .tar.gz has
// been read. If an image has another class, the error names the image.
func TestGivenClassesOrderTheLabels(t *testing.T) {
	image := archivetest.Image("x")
	members := []archivetest.Member{{Name: "b/1.png", Data: image}, {Name: "a/1.png", Data: image},
		{Name: "notes/README", Data: "text"}, {Name: "c/1.png", Data: image}}
	for _, format := range []string{"tar", "tgz"} {
		write := func(m []archivetest.Member) string {
			data := archivetest.Tar(t, m...)
			if format == "tgz" {
				data = archivetest.Gzip(t, data)
			}
			return archivetest.WriteFile(t, "a."+format, data)
		}
		l := openFake(t, write(members), Options{Transform: Eval(4, 4), Classes: []string{"c", "b", "a"},
			Shuffle: true})
		if want := map[string]int{"tar": 3, "tgz": -1}[format]; l.Len() != want {
			t.Errorf("%s: Len is %d at first, want %d", format, l.Len(), want)
		}
		got, err := collect(t, l, 0, 2)
		if err != nil || l.Len() != 3 {
			t.Errorf("%s: Len is %d after an epoch, error %v, want no error, l.Len() = 3",
				format, l.Len(), err)
		}
		for i, s := range got[0].samples {
			if want := map[string]int64{"c/1.png": 0, "b/1.png": 1, "a/1.png": 2}[s.Name]; got[0].labels[i] != want {
				t.Errorf("%s: %s has label %d, want %d", format, s.Name, got[0].labels[i], want)
			}
		}

		l, err = open(t.Context(), write(members),
			Options{Transform: Eval(4, 4), Classes: []string{"b", "a"}, BadSamples: Skip}, openFile, fakeCodec{})
		if err == nil {
			var got []copied
			if got, err = collect(t, l, 0, 2); len(names(got)) != 2 {
				t.Errorf("%s: %d samples before the unknown class, want 2 samples",
					format, len(names(got)))
			}
		}
		var unknown *UnknownClassError
		if !errors.As(err, &unknown) || unknown.Name != "c/1.png" || unknown.Class != "c" ||
			!strings.Contains(err.Error(), "b, a") {
			t.Errorf("%s: error %v, want an error of type *UnknownClassError, unknown.Name = %q, "+
				"unknown.Class = %q, an error with %q", format, err, "c/1.png", "c", "b, a")
		}
	}
	bear := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "Ba\u0308r/1.png", Data: image}))
	_, err := open(t.Context(), bear, Options{Transform: Eval(4, 4), Classes: []string{"B\u00e4r"}},
		openFile, fakeCodec{})
	if want := `"Ba\u0308r" and "B\u00e4r" differ only in their Unicode normal form (NFD, NFC)`; err == nil ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("error %v, want it with %s", err, want)
	}
	if _, err := Open(archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)),
		Options{Classes: []string{"a", "b", "a"}}); err == nil {
		t.Error("Open with a class given twice: got no error, want one")
	}
}

// shortReads reads at most a few bytes at a time.
type shortReads struct {
	archive.File
	reader io.Reader
}

func (s *shortReads) Read(p []byte) (int, error) { return s.reader.Read(p) }

func TestShortReadsAreCompleted(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		for kind, wrap := range map[string]func(io.Reader) io.Reader{"one byte": iotest.OneByteReader,
			"half": iotest.HalfReader, "data and EOF": iotest.DataErrReader} {
			if kind == "data and EOF" && name == "a.tar" {
				continue // it reads ahead, so it can't seek
			}
			path := archivetest.WriteFile(t, name, data)
			l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1},
				func(path string) (archive.File, error) {
					f, err := os.Open(path)
					return &shortReads{f, wrap(f)}, err
				}, fakeCodec{})
			if err != nil {
				t.Fatal(kind, err)
			}
			got, err := collect(t, l, 0, 2)
			if err != nil || len(names(got)) != 30 {
				t.Errorf("%s, %s: %d samples, error %v, want no error, 30 samples",
					name, kind, len(names(got)), err)
			}
		}
	}
}

// TestReadErrorNamesItsPlace: an error of the file system is wrapped with its place in the archive.
func TestReadErrorNamesItsPlace(t *testing.T) {
	archivetest.Within(t)
	data := archivetest.Images(t, 200, nil)
	broken := errors.New("input/output error")
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		path := archivetest.WriteFile(t, name, data)
		var failing atomic.Bool
		l, err := open(t.Context(), path, Options{BatchSize: 8, Transform: Eval(4, 4), ShuffleBytes: 1},
			func(path string) (archive.File, error) {
				f, err := os.Open(path)
				return &failingSource{f, &failing, int64(len(data)) / 2, broken}, err
			}, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		failing.Store(true)
		got, err := collect(t, l, 0, 2)
		var a *ArchiveError
		if !errors.Is(err, broken) || !errors.As(err, &a) || a.Member == "" || a.Position == 0 {
			t.Errorf("%s: error %v, want the error %v of type *ArchiveError, a.Member not \"\", "+
				"a.Position not 0", name, err, broken)
		}
		if n := len(names(got)); n < 50 || n >= 200 {
			t.Errorf("%s: %d samples before the error, want n at least 50, n below 200", name, n)
		}
	}
}

type failingSource struct {
	*os.File
	failing *atomic.Bool
	after   int64
	err     error
}

func (s *failingSource) Read(p []byte) (int, error) {
	at, _ := s.Seek(0, io.SeekCurrent)
	if s.failing.Load() {
		if at >= s.after {
			return 0, s.err
		}
		p = p[:min(int64(len(p)), s.after-at)]
	}
	return s.File.Read(p)
}

func (s *failingSource) ReadAt(p []byte, at int64) (int, error) {
	if s.failing.Load() && at+int64(len(p)) > s.after {
		return 0, s.err
	}
	return s.File.ReadAt(p, at)
}

// TestBadArchivesNameTheirDamage: the error of a damaged archive names the file and the place. The
// samples before the damage are delivered.
func TestBadArchivesNameTheirDamage(t *testing.T) {
	whole := archivetest.Images(t, 60, nil)
	tgz := archivetest.Gzip(t, whole)
	incompressible := make([]byte, 4000)
	var big []archivetest.Member
	for i := range 60 {
		for i := range incompressible {
			incompressible[i] = byte(rand.Uint32())
		}
		big = append(big, archivetest.Member{Name: fmt.Sprintf("c/%02d.png", i),
			Data: archivetest.Image(fmt.Sprint(i)) + string(incompressible)})
	}
	bigTgz := archivetest.Gzip(t, archivetest.Tar(t, big...))
	headerAt := func(data []byte, name string) int { return bytes.Index(data, []byte(name)) }
	edit := func(data []byte, at int, b byte) []byte {
		data = bytes.Clone(data)
		data[at] ^= b
		return data
	}
	hugeHeader := func() []byte { // a member of 1 TB, with a right checksum
		var b bytes.Buffer
		w := tar.NewWriter(&b)
		if err := w.WriteHeader(&tar.Header{Name: "c/huge.png", Size: 1 << 40, Typeflag: tar.TypeReg,
			Format: tar.FormatGNU}); err != nil {
			t.Fatal(err)
		}
		b.WriteString(archivetest.Image("x"))
		return b.Bytes()
	}()
	dir := t.TempDir()
	for name, c := range map[string]struct {
		data     []byte
		path     string
		want     string   // in the error
		is       error    // in the error's chain
		classes  []string // also tried with these, without a scan
		readable int      // minimum number of samples before the error
		scanOnly bool
	}{
		"missing file":    {path: filepath.Join(dir, "none.tgz"), is: os.ErrNotExist, want: "none.tgz"},
		"empty directory": {path: dir, is: ErrNoSamples, want: "no files"},
		"empty file":      {data: []byte{}, want: "empty"},
		"not an archive": {data: []byte(strings.Repeat("hello ", 500)),
			want: `it is no archive (it begins with "hello hello hello he")`},
		"short text": {data: []byte("hello"), want: `it is no archive (it begins with "hello")`},
		"zip":        {data: []byte("PK\x03\x04 and so on"), want: "zip"},
		"zstd":       {data: []byte("\x28\xb5\x2f\xfd and so on"), want: "zstd"},
		"an image":   {data: []byte(archivetest.Image("x")), want: "PNG"},
		"gzip of text": {data: archivetest.Gzip(t, []byte(strings.Repeat("hello ", 500))),
			want: "not a tar archive", classes: []string{"c"}},
		"gzip of nothing":     {data: archivetest.Gzip(t, nil), is: ErrNoSamples, classes: []string{"c"}},
		"gzip header cut off": {data: tgz[:5], want: "cut off", is: io.ErrUnexpectedEOF},
		"empty archive": {data: archivetest.Tar(t), is: ErrNoSamples, want: "no files",
			classes: []string{"c"}},
		"empty tgz": {data: archivetest.Gzip(t, archivetest.Tar(t)), is: ErrNoSamples,
			want: "no files", classes: []string{"c"}},
		"only text": {data: archivetest.Tar(t,
			archivetest.Member{Name: "a/README", Data: "x"}), is: ErrNoSamples, want: "none of its 1 member is"},
		"archives in it": {data: archivetest.Tar(t,
			archivetest.Member{Name: "n01440764.tar", Data: "x"},
			archivetest.Member{Name: "a/n01443537.tgz", Data: "x"}), is: ErrNoSamples,
			want: `2 archives in the archive (unpack each into a folder with its name), the first is "n01440764.tar"`},
		"tar of tars": {data: archivetest.Tar(t,
			archivetest.Member{Name: "n01440764.tar", Data: "x"}), is: ErrNoSamples,
			want: `"n01440764.tar" is an archive inside of it: unpack each into a folder`},
		"zips in a folder": {path: archivetest.Extract(t,
			[]archivetest.Member{{Name: "data/train.zip", Data: "x"}}), is: ErrNoSamples,
			want: `"data/train.zip" is an archive inside of it: unpack each into a folder`},
		"backslashes": {data: archivetest.Tar(t,
			archivetest.Member{Name: `ds\cat\0.png`, Data: archivetest.Image("")}), is: ErrNoSamples,
			want: `the path "ds\\cat\\0.png" has backslashes`},
		"labels of WebDataset": {data: archivetest.Tar(t,
			archivetest.Member{Name: "0.png", Data: archivetest.Image("")},
			archivetest.Member{Name: "0.cls", Data: "1"}), is: ErrNoSamples,
			want: `"0.cls" seems to be a label of WebDataset: set Options.WebDataset`},
		"only at the root": {data: archivetest.Tar(t,
			archivetest.Member{Name: "x.png", Data: archivetest.Image("")}), is: ErrNoSamples,
			want: "1 image lies outside of any directory; a sample's class is the name of the directory " +
				"that it is in, unless Options.WebDataset or Options.List"},
		"truncated tar": {data: whole[:len(whole)/2+100], want: "fetch it again", is: io.ErrUnexpectedEOF},
		"truncated gzip": {data: bigTgz[:len(bigTgz)/2], want: "cut off", is: io.ErrUnexpectedEOF,
			classes: []string{"c"}, readable: 20},
		"truncated gzip trailer": {data: bigTgz[:len(bigTgz)-4], want: "cut off", is: io.ErrUnexpectedEOF,
			classes: []string{"c"}, readable: 60},
		"gzip checksum": {data: edit(bigTgz, len(bigTgz)-6, 0x40), want: "checksum",
			classes: []string{"c"}, readable: 60},
		"gzip flipped byte": {data: edit(bigTgz, len(bigTgz)/2, 0x40), want: "", classes: []string{"c"}},
		"corrupt tar header": {data: edit(whole, headerAt(whole, "train/class3/0024.png")+30, 1),
			want: "0023.png", is: tar.ErrHeader},
		"corrupt header in tgz": {data: archivetest.Gzip(t,
			edit(whole, headerAt(whole, "train/class3/0024.png")+30, 1)), want: "0023.png", is: tar.ErrHeader,
			classes: []string{"class0", "class1", "class2", "class3", "class4"}, readable: 24},
		"junk after the end": {data: append(bytes.Clone(whole), bytes.Repeat([]byte("junk"), 400)...),
			is: tar.ErrHeader, want: "0059.png"},
		"declares a terabyte": {data: hugeHeader, want: "huge.png", is: io.ErrUnexpectedEOF},
		"terabyte in tgz": {data: archivetest.Gzip(t, hugeHeader), want: "huge.png",
			is: io.ErrUnexpectedEOF, classes: []string{"c"}},
	} {
		t.Run(name, func(t *testing.T) {
			archivetest.Within(t)
			archivetest.NoLeaks(t)
			path := c.path
			if path == "" {
				path = archivetest.WriteFile(t, "archive", c.data)
			}
			check := func(err error) {
				t.Helper()
				if err == nil || !strings.Contains(err.Error(), c.want) ||
					!strings.Contains(err.Error(), filepath.Base(path)) || c.is != nil && !errors.Is(err, c.is) {
					t.Errorf("error %v, want %q in it, and %v", err, c.want, c.is)
				}
			}
			o := Options{BatchSize: 4, Transform: Eval(4, 4), BadSamples: Skip}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			check(err)
			if _, err := inspect(t.Context(), path, Options{}, openFile, fakeCodec{}); c.is != ErrNoSamples {
				check(err)
			}
			if l != nil {
				t.Errorf("Open = %p and the error %v, want a nil loader", l, err)
			}
			if c.classes == nil {
				return
			}
			for _, shuffle := range []bool{false, true} {
				o.Classes, o.Shuffle = c.classes, shuffle
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if err != nil {
					check(err)
					continue
				}
				got, err := collect(t, l, 0, 2)
				check(err)
				if n := len(names(got)); n < c.readable {
					t.Errorf("%d samples before the error, want %d", n, c.readable)
				}
				content := map[string]bool{}
				for _, name := range names(got) {
					if content[name] {
						t.Errorf("%s comes twice", name)
					}
					content[name] = true
				}
			}
		})
	}
}

// TestUnusualArchivesAreRead: archives of unusual form, but without damage, are read.
func TestUnusualArchivesAreRead(t *testing.T) {
	whole := archivetest.Images(t, 40, nil)
	half := len(whole) / 2
	second := archivetest.Tar(t,
		archivetest.Member{Name: "train/class9/x.png", Data: archivetest.Image("second archive")})
	end := len(bytes.TrimRight(whole, "\x00")) // the end of the last content
	end += (512 - end%512) % 512
	var incremental []byte // as GNU tar writes it with -g and -V: directories list their members
	for _, kind := range []byte("VNDAEIX") {
		metadata := archivetest.Tar(t,
			archivetest.Member{Name: "train/class1/of the archive.png", Data: "Ya.png\x00Nb.png\x00\x00", Kind: kind})
		incremental = append(incremental, metadata[:1024]...)
	}
	incremental = append(append(incremental, second[:len(second)-1024]...), whole...)
	for name, c := range map[string]struct {
		data []byte
		want int
	}{
		"gzip of two members": {append(archivetest.Gzip(t, whole[:half]),
			archivetest.Gzip(t, whole[half:])...), 40},
		"two archives":            {append(bytes.Clone(whole), second...), 41},
		"two gzipped archives":    {append(archivetest.Gzip(t, whole), archivetest.Gzip(t, second)...), 41},
		"padded to 10240":         {append(bytes.Clone(whole), make([]byte, 10240)...), 40},
		"padded, gzip":            {archivetest.Gzip(t, append(bytes.Clone(whole), make([]byte, 10240)...)), 40},
		"without an end marker":   {whole[:end], 40},
		"odd zeros after the end": {append(bytes.Clone(whole), make([]byte, 100)...), 40},
		"zeros after gzip":        {append(archivetest.Gzip(t, whole), make([]byte, 300_000)...), 40},
		"incremental":             {incremental, 41},
		"incremental, gzip":       {archivetest.Gzip(t, incremental), 41},
	} {
		t.Run(name, func(t *testing.T) {
			archivetest.Within(t)
			path := archivetest.WriteFile(t, "a", c.data)
			server := httptest.NewServer(http.FileServer(http.Dir(filepath.Dir(path))))
			defer server.Close()
			file := path + ".tsidx"
			// the last loader finds an index
			for _, path := range []string{path, server.URL + "/a", server.URL + "/a"} {
				for _, classes := range [][]string{nil, {"class0", "class1", "class2", "class3", "class4", "class9"}} {
					l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4), Classes: classes,
						Shuffle: classes == nil, IndexFile: file})
					for range 2 {
						got, err := collect(t, l, 0, 2)
						if err != nil || len(names(got)) != c.want {
							t.Errorf("%s: %d samples, error %v, want no error, %v samples",
								path, len(names(got)), err, c.want)
						}
					}
				}
			}
		})
	}
}

// TestSparseMemberIsABadSample: a sparse member is a bad sample, and its hole of 2^62 bytes is not
// read.
func TestSparseMemberIsABadSample(t *testing.T) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	if err := w.WriteHeader(&tar.Header{Name: "c/hole.png", Mode: 0o644, Format: tar.FormatGNU}); err != nil {
		t.Fatal(err)
	}
	hole := b.Bytes()
	hole[156] = tar.TypeGNUSparse
	good := archivetest.Tar(t, archivetest.Member{Name: "c/good.png", Data: archivetest.Image("1")})
	archive := func(size uint64) []byte {
		hole[483] = 0x80 // the real size, in base 256
		binary.BigEndian.PutUint64(hole[487:], size)
		copy(hole[148:156], "        ")
		sum := 0
		for _, c := range hole {
			sum += int(c)
		}
		copy(hole[148:], fmt.Sprintf("%06o\x00 ", sum))
		return append(slices.Clone(hole), good...)
	}
	data, most := archive(1<<62), archive(math.MaxInt64)
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"most.tar": most, "most.tgz": archivetest.Gzip(t, most)} {
		path := archivetest.WriteFile(t, name, data)
		done := make(chan error, 1)
		go func() {
			l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), BadSamples: Skip}, openFile, fakeCodec{})
			if err == nil {
				_, err = collect(t, l, 0, 2)
			}
			if err == nil {
				err = loads(l)
			}
			if err == nil && (l.Stats().BadBy[Sparse] != 1 || l.Stats().Samples != 1) {
				err = fmt.Errorf("%+v", l.Stats())
			}
			done <- err
		}()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("%s: %v, want no error", name, err)
			}
		case <-time.After(2 * time.Minute):
			t.Fatalf("%s: not done after two minutes", name)
		}
	}
}

// TestReplacedArchiveIsAnError: an archive that has been replaced since its scan is an error.
func TestReplacedArchiveIsAnError(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, nil))
	l := openFake(t, path, Options{Transform: Eval(4, 4)})
	if err := os.WriteFile(path, archivetest.Images(t, 12, nil), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := collect(t, l, 0, 2); err == nil || !strings.Contains(err.Error(), "has changed") {
		t.Errorf("error %v, want an error with %q", err, "has changed")
	}
}

// TestChecksumEveryEpoch: every epoch verifies the checksum of a .tar.gz again.
func TestChecksumEveryEpoch(t *testing.T) {
	data := archivetest.Gzip(t, archivetest.Images(t, 50, nil))
	path := archivetest.WriteFile(t, "a.tgz", data)
	l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4), ShuffleBytes: 1})
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	data[len(data)-6] ^= 1
	if err := os.WriteFile(path, data, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, info.ModTime(), info.ModTime()); err != nil {
		t.Fatal(err)
	}
	got, err := collect(t, l, 0, 2)
	if len(names(got)) != 50 || err == nil || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("%d samples, error %v, want 50 samples, an error with %q",
			len(names(got)), err, "checksum")
	}
}

// TestSamplesMayExceedTheBudget: an epoch may have more bytes than the budget for samples in
// flight, and even single samples may be larger.
func TestSamplesMayExceedTheBudget(t *testing.T) {
	archivetest.Within(t)
	archivetest.NoLeaks(t)
	var members []archivetest.Member
	for i, size := range []int{300_000, 200_000, 640_001, 10_000, 300_000, 50_000} {
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("c/%d.png", i), Data: archivetest.Image(strings.Repeat("x", size))})
	}
	members = append(members, archivetest.Member{Name: "c/bad", Data: strings.Repeat("x", 400_000)},
		archivetest.Member{Name: "c/last.png", Data: archivetest.Image(strings.Repeat("y", 400_000))})
	data := archivetest.Tar(t, members...)
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		for _, shuffle := range []bool{false, true} {
			l, err := open(t.Context(), archivetest.WriteFile(t, name, data),
				Options{BatchSize: 3, Transform: Eval(4, 4), Shuffle: shuffle, ShuffleBytes: 800_000, BadSamples: Skip},
				openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			l.queueBytes = 640_000
			got, err := collect(t, l, 0, 2)
			if err := l.Close(); err != nil {
				t.Error(err)
			}
			if err != nil || len(names(got)) != 7 {
				t.Errorf("%s: %d samples, error %v, want no error, 7 samples",
					name, len(names(got)), err)
			}
		}
	}
}

// TestTooNarrowImageIsUnsupported: a very narrow image is refused, because resizing its shorter
// side would make the longer side enormous.
func TestTooNarrowImageIsUnsupported(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/a.png",
			Data: archivetest.PNG(t, archivetest.Gradient(1, 5000))}))
	l, err := Open(path, Options{Transform: Eval(256, 224)})
	if err != nil {
		t.Fatal(err)
	}
	var e *SampleError
	if _, err := collect(t, l, 0, 2); !errors.As(err, &e) || e.Reason != Unsupported ||
		!strings.Contains(err.Error(), "too narrow") {
		t.Errorf("error %v, want an error of type *SampleError, e.Reason = %v, an error with %q",
			err, Unsupported, "too narrow")
	}
}

func TestDropLastOfTooFew(t *testing.T) {
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, nil)),
		Options{BatchSize: 16, DropLast: true, Transform: Eval(4, 4)})
	if _, err := collect(t, l, 0, 2); !errors.Is(err, ErrNoSamples) {
		t.Errorf("error %v, want the error %v", err, ErrNoSamples)
	}
	l = openFake(t, archivetest.WriteFile(t, "b.tar",
		archivetest.Images(t, 10, func(int) bool { return true })), Options{Transform: Eval(4, 4), BadSamples: Skip})
	if _, err := collect(t, l, 0, 2); !errors.Is(err, ErrNoSamples) || !errors.As(err, new(*SampleError)) {
		t.Errorf("error %v, want the error %v of type *SampleError", err, ErrNoSamples)
	}
}

// TestTooManyPixelsAreRefusedByTheHeader: the header alone decides, and the loader and Inspect
// agree.
func TestTooManyPixelsAreRefusedByTheHeader(t *testing.T) {
	huge := []byte(archivetest.PNG(t, archivetest.Gradient(8, 8)))
	binary.BigEndian.PutUint32(huge[16:], 20_000) // IHDR's width and height
	binary.BigEndian.PutUint32(huge[20:], 20_000)
	binary.BigEndian.PutUint32(huge[29:], crc32.ChecksumIEEE(huge[12:29]))
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "c/huge.png", Data: string(huge)}))
	l, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	var e *SampleError
	if _, err := collect(t, l, 0, 2); !errors.As(err, &e) || e.Reason != TooLarge {
		t.Errorf("the loader: %v, want an error of type *SampleError, e.Reason = %v", err, TooLarge)
	}
	r, err := Inspect(t.Context(), path, Options{}, nil)
	if err != nil || len(r.Bad) != 1 || r.Bad[0].Reason != TooLarge {
		t.Errorf("Inspect: %+v, error %v, want no error, len(r.Bad) = 1, r.Bad[0].Reason = %v",
			r, err, TooLarge)
	}
}

// TestDropLastAllBad: all samples of a short last batch may be bad if DropLast leaves the batch
// out.
func TestDropLastAllBad(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, func(i int) bool { return i >= 8 }))
	for dropLast, want := range map[bool]bool{true: false, false: true} {
		l := openFake(t, path, Options{BatchSize: 8, DropLast: dropLast, Transform: Eval(4, 4), BadSamples: Substitute})
		if got, err := collect(t, l, 0, 2); (err != nil) != want || len(names(got)) != 8 {
			t.Errorf("DropLast %t: %d samples, error %v", dropLast, len(names(got)), err)
		}
		if s := l.Stats(); s.Bad != 2 {
			t.Errorf("DropLast %t: %d bad samples, want 2", dropLast, s.Bad)
		}
	}
}

func TestInvalidOptionsAreNamed(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 10, nil))
	for name, o := range map[string]Options{
		"BatchSize":      {BatchSize: -1},
		"Workers":        {Workers: -1},
		"ShuffleBuffer":  {ShuffleBuffer: -1},
		"ShuffleBytes":   {ShuffleBytes: -1},
		"MaxSampleBytes": {MaxSampleBytes: 1 << 40},
		"MaxPixels":      {MaxPixels: -5},
		"BadSamples":     {BadSamples: 7},
		"Size":           {Transform: Transform{Size: -1}},
		"Resize":         {Transform: Eval(100, 224)},
		"Scale":          {Transform: Transform{Scale: [2]float64{0.5, 1.5}}},
		"Ratio":          {Transform: Transform{Ratio: [2]float64{2, 1}}},
		"FlipP":          {Transform: Transform{FlipP: 1.5}},
		"Std":            {Transform: Transform{Std: [3]float32{1, 0, 1}}},
		"DType":          {Transform: Transform{DType: 99}},
		"exclude":        {Transform: Transform{RandomResizedCrop: true, Resize: 256}},
	} {
		if _, err := Open(path, o); err == nil || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	l := openFake(t, path, Options{})
	if l.BatchSize() != 32 || l.o.Transform.Size != 224 || l.o.Transform.Resize != 256 {
		t.Errorf("defaults: %+v", l.o)
	}
}

// TestBadSamplesAreCountedAndLogged: bad samples are counted by reason, named once and logged every
// time.
func TestBadSamplesAreCountedAndLogged(t *testing.T) {
	members := []archivetest.Member{
		{Name: "c/good.png", Data: archivetest.Image("1")},
		{Name: "c/bad.png", Data: archivetest.Image("BAD")},
		{Name: "c/README", Data: "text"},
		{Name: "c/.DS_Store", Data: "\x00\x00\x00\x01Bud1"},
		{Name: "c/._good.png", Data: "\x00\x05\x16\x07 resource fork"},
		{Name: "c/text.png", Data: "text"},
		{Name: "c/fork.png", Data: "\x00\x05\x16\x07 resource fork"},
		{Name: "c/pointer.heic", Data: "version https://git-lfs.github.com/spec/v1\n"},
		{Name: "c/empty.png"},
		{Name: "c/hard.png", Kind: tar.TypeLink, Link: "c/good.png"},
		{Name: "c/soft.png", Kind: tar.TypeSymlink, Link: "good.png"},
		{Name: "c/large.png", Data: archivetest.Image(strings.Repeat("x", 2000))},
	}
	data := archivetest.Tar(t, members...)
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		var log bytes.Buffer
		l := openFake(t, archivetest.WriteFile(t, name, data),
			Options{Transform: Eval(4, 4), BadSamples: Skip, MaxSampleBytes: 1000,
				Logger: slog.New(slog.NewTextHandler(&log, nil))})
		for epoch := range 2 {
			got, err := collect(t, l, epoch, 1)
			if err != nil || !slices.Equal(names(got), []string{"c/good.png"}) {
				t.Fatalf("%q, error %v", names(got), err)
			}
		}
		s := l.Stats()
		want := map[Reason]int64{Damaged: 2, NotImage: 6, Empty: 2, NotRegular: 4, TooLarge: 2}
		if fmt.Sprint(s.BadBy) != fmt.Sprint(want) || s.Bad != 16 || len(s.BadNamed) != 8 ||
			s.Samples != 2 || s.Batches != 2 || s.Queue != 0 || s.Ignored != 3 {
			t.Errorf("%s: %+v, want %v and 3 ignored", name, s, want)
		}
		if !strings.Contains(log.String(), "COPYFILE_DISABLE") ||
			!strings.Contains(log.String(), "git lfs pull") || strings.Count(log.String(), "bad sample") != 16 {
			t.Errorf("log:\n%s", &log)
		}
	}
}

// TestCancelEndsTheEpochSoon: an epoch ends when its context ends, at any time. From then on it
// decodes only a few more images, and it releases everything.
func TestCancelEndsTheEpochSoon(t *testing.T) {
	archivetest.NoLeaks(t)
	data := archivetest.Images(t, 400, func(i int) bool { return i%11 == 0 })
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		path := archivetest.WriteFile(t, name, data)
		for round := range 100 {
			var decoders, begun atomic.Int64
			o := Options{BatchSize: 1 + round%20, Transform: Train(4), Workers: 1 + round%5,
				BadSamples: BadSamplePolicy(1 + round%2), Shuffle: round%3 != 0, ShuffleBuffer: 64}
			if round%3 == 0 { // not held in memory
				o.ShuffleBytes = 20_000
			}
			if round%2 == 0 {
				o.Classes = []string{"class0", "class1", "class2", "class3", "class4"}
			}
			if o.BadSamples == Substitute {
				o.BatchSize += 20 // so that not all of them are bad
			}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{open: &decoders, begun: &begun})
			if err != nil {
				t.Fatal(err)
			}
			cause := errors.New("enough")
			ctx, cancel := context.WithCancelCause(t.Context())
			const never = -1
			var cancelled atomic.Int64 // number of decodes at that time
			cancelled.Store(never)
			stop := func() {
				if round%4 == 3 {
					go l.Close()
					cause = ErrClosed
				} else {
					cancel(cause)
				}
				cancelled.Store(begun.Load())
			}
			var calls atomic.Int64
			at := rand.Int64N(3 * 400 / int64(o.BatchSize))
			tick := func() bool { return calls.Add(1)-1 == at }
			leave := round%5 == 4 // whether the consumer blocks at that call
			free := make(chan struct{}, 2)
			free <- struct{}{}
			free <- struct{}{}
			err = l.Fill(ctx, round, func(ctx context.Context) ([][]byte, error) {
				if tick() {
					stop()
				}
				select {
				case <-free:
					return [][]byte{make([]byte, o.BatchSize*48), make([]byte, o.BatchSize*8)}, nil
				case <-ctx.Done():
					return nil, context.Cause(ctx)
				}
			}, func(n int, info any) error {
				if tick() {
					stop()
				}
				if leave && calls.Load() > at { // never returns the slot
					return nil
				}
				free <- struct{}{}
				return nil
			})
			if c := cancelled.Load(); c != never {
				// Close takes effect some time after the call: a worker may be about to decode.
				if n := begun.Load() - c; round%4 != 3 && n > int64(o.Workers+o.BatchSize) {
					t.Errorf("round %d: %d samples are decoded after the end of the context", round, n)
				}
				if err != nil && !errors.Is(err, cause) {
					t.Errorf("round %d: error %v", round, err)
				}
			} else if err != nil {
				t.Errorf("round %d: error %v, want no error", round, err)
			}
			if n := decoders.Load(); n != 0 {
				t.Errorf("round %d: %d decoders are left, want 0", round, n)
			}
			cancel(nil)
			l.Close()
		}
	}
}

// TestLeavingTheLoopReleasesEverything: leaving the loop over Epoch early, by break, Close or the
// context, releases everything. Except after Close, the loader can be used again.
func TestLeavingTheLoopReleasesEverything(t *testing.T) {
	archivetest.NoLeaks(t)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 200, nil)))
	for round := range 60 {
		l := openFake(t, path, Options{BatchSize: 4, Transform: Train(4), Shuffle: true,
			ShuffleBytes: int64(round%2) * 20_000, Workers: 3})
		ctx, cancel := context.WithCancel(t.Context())
		n := 0
		var last error
		for _, err := range l.Epoch(ctx, 0) {
			last = err
			if n++; n-1 < round%20 || err != nil {
				continue
			}
			switch round % 3 {
			case 0:
			case 1:
				cancel()
				continue
			case 2:
				l.Close()
				continue
			}
			break
		}
		cancel()
		switch {
		case round%3 == 1 && !errors.Is(last, context.Canceled), round%3 == 2 &&
			!errors.Is(last, ErrClosed), round%3 == 0 && last != nil:
			t.Errorf("round %d: error %v", round, last)
		}
		_, err := collect(t, l, 1, 2)
		if closed := round%3 == 2; closed != errors.Is(err, ErrClosed) || !closed && err != nil {
			t.Errorf("round %d: error %v of the next epoch", round, err)
		}
		if l.Stats().Queue != 0 {
			t.Errorf("round %d: Queue is %d, want 0", round, l.Stats().Queue)
		}
		l.Close()
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := OpenContext(ctx, path, Options{}); !errors.Is(err, context.Canceled) {
		t.Errorf("Open with an ended context: %v, want the error %v", err, context.Canceled)
	}
	if _, err := Inspect(ctx, path, Options{}, nil); !errors.Is(err, context.Canceled) {
		t.Errorf("Inspect with an ended context: %v, want the error %v", err, context.Canceled)
	}
}

// TestConcurrentEpochsAreIndependent: epochs don't disturb each other.
func TestConcurrentEpochsAreIndependent(t *testing.T) {
	archivetest.Within(t)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 100, nil)))
	l := openFake(t, path, Options{BatchSize: 4, Transform: Train(4), Shuffle: true,
		Classes: []string{"class0", "class1", "class2", "class3", "class4"}})
	got := make(chan string)
	for range 4 {
		go func() {
			b, err := collect(t, l, 5, 2)
			if err != nil {
				t.Error(err)
			}
			got <- digest(b)
		}()
	}
	want := <-got
	for range 3 {
		if d := <-got; d != want {
			t.Errorf("digest of a concurrent epoch = %s, want the others', %s", d, want)
		}
	}
}

// TestRealImagesKeepTheirLabels: the real decoder loads several kinds of JPEG and PNG. Damaged
// images are counted, and all others keep their labels.
func TestRealImagesKeepTheirLabels(t *testing.T) {
	archivetest.Within(t)
	photo := archivetest.Gradient(90, 70)
	jpeg := archivetest.JPEG(t, photo)
	grey := image.NewGray(photo.Rect)
	deep := image.NewRGBA64(photo.Rect)
	palette := image.NewPaletted(photo.Rect, []color.Color{color.Black, color.White, color.RGBA{200, 10, 10, 255}})
	alpha := image.NewNRGBA(photo.Rect)
	for y := range 70 {
		for x := range 90 {
			c := photo.RGBAAt(x, y)
			grey.SetGray(x, y, color.Gray{c.R})
			deep.Set(x, y, c)
			palette.SetColorIndex(x, y, uint8((x+y)%3))
			alpha.SetNRGBA(x, y, color.NRGBA{c.R, c.G, c.B, uint8(x)})
		}
	}
	cmyk, err := os.ReadFile("testdata/cmyk.jpg")
	if err != nil {
		t.Fatal(err)
	}
	members := []archivetest.Member{
		{Name: "jpeg/a.jpg", Data: jpeg},
		{Name: "grey/a.jpg", Data: archivetest.JPEG(t, grey)},
		{Name: "cmyk/a.jpg", Data: string(cmyk)},
		{Name: "png/a.png", Data: archivetest.PNG(t, photo)},
		{Name: "deep/a.png", Data: archivetest.PNG(t, deep)},
		{Name: "palette/a.png", Data: archivetest.PNG(t, palette)},
		{Name: "alpha/a.png", Data: archivetest.PNG(t, alpha)},
		{Name: "greypng/a.png", Data: archivetest.PNG(t, grey)},
		{Name: "jpeg/named.png", Data: jpeg}, // the bytes decide the format
		{Name: "jpeg/cut.jpg", Data: jpeg[:len(jpeg)/2]},
		{Name: "jpeg/header.jpg", Data: jpeg[:20]},
		{Name: "png/cut.png", Data: archivetest.PNG(t, photo)[:200]},
		{Name: "png/sum.png", Data: func() string {
			b := []byte(archivetest.PNG(t,
				photo))
			b[len(b)-20] ^= 1
			return string(b)
		}()},
		{Name: "png/readme.png", Data: "this is text"},
		{Name: "png/zero.png"},
		{Name: "jpeg/one.jpg", Data: archivetest.JPEG(t, archivetest.Gradient(1, 1))},
		{Name: "jpeg/tall.png", Data: archivetest.PNG(t, archivetest.Gradient(1, 1500))},
	}
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
	for _, transform := range []Transform{Train(32), Eval(36, 32)} {
		l, err := Open(path, Options{Transform: transform, BadSamples: Skip})
		if err != nil {
			t.Fatal(err)
		}
		got, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatal(err)
		}
		s := l.Stats()
		if want := map[Reason]int64{Damaged: 4, NotImage: 1,
			Empty: 1}; fmt.Sprint(s.BadBy) != fmt.Sprint(want) || s.Samples != 11 {
			for _, e := range s.BadNamed {
				t.Log(e)
			}
			t.Errorf("%d good, bad: %v, want fmt.Sprint(s.BadBy) = %v, s.Samples = 11",
				s.Samples, s.BadBy, fmt.Sprint(want))
		}
		for i, sample := range got[0].samples {
			class, _, _ := strings.Cut(sample.Name, "/")
			if l.Classes()[got[0].labels[i]] != class {
				t.Errorf("%s has the label of %s", sample.Name, l.Classes()[got[0].labels[i]])
			}
			row := got[0].images[i*32*32*3 : (i+1)*32*32*3]
			if !transform.RandomResizedCrop && class != "palette" && class != "cmyk" &&
				sample.Name[len(sample.Name)-5] == 'a' {
				// Red grows from left to right, green from top to bottom, and blue is 128. Grey
				// grows from left to right.
				left, right, top, bottom := row[(16*32+2)*3], row[(16*32+29)*3], row[(2*32+16)*3+1], row[(29*32+16)*3+1]
				grey := strings.HasPrefix(class, "grey")
				if left > 70 || right < 180 || !grey && (top > 60 || bottom < 190) {
					t.Errorf("%s: left %d, right %d, top %d, bottom %d", sample.Name, left, right, top, bottom)
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}

	var last Progress
	r, err := Inspect(t.Context(), path, Options{}, func(p Progress) { last = p })
	if err != nil {
		t.Fatal(err)
	}
	if r.Samples != 17 || len(r.Bad) != 6 || r.Width.Max != 90 || r.Height.Max != 1500 ||
		len(r.Classes) != 8 || last.Members != 17 || last.Bytes != last.TotalBytes {
		t.Errorf("%+v, %+v", r, last)
	}
	if r.Formats["JPEG CMYK"] != 1 || r.Formats["JPEG grey"] != 1 || r.Formats["JPEG"] != 3 ||
		r.Formats["PNG 16-bit"] != 1 || r.Formats["PNG with alpha"] != 1 {
		t.Errorf("%v", r.Formats)
	}
}

// TestLeavingTheLoopFreesDecoders: the image library's decoders are freed too, at any batch where
// the loop ends.
func TestLeavingTheLoopFreesDecoders(t *testing.T) {
	archivetest.NoLeaks(t)
	var members []archivetest.Member
	for i := range 40 {
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("c/%d.jpg", i),
				Data: archivetest.JPEG(t, archivetest.Gradient(200+i, 150))})
	}
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
	for round := range 20 {
		l, err := Open(path, Options{BatchSize: 4, Transform: Train(64), Shuffle: true,
			ShuffleBytes: int64(round % 2), Workers: 3})
		if err != nil {
			t.Fatal(err)
		}
		n := 0
		for _, err := range l.Epoch(t.Context(), round) {
			if err != nil {
				t.Fatal(err)
			}
			if n++; n > round%11 {
				break
			}
		}
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestFailedOpenLeavesNoFileOpen: when Open fails, it leaves no file open.
func TestFailedOpenLeavesNoFileOpen(t *testing.T) {
	archivetest.NoLeaks(t)
	gc := debug.SetGCPercent(-1) // the collector would close files
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
				t.Errorf("%s: got no error, want one", name)
			}
		}
	}
}

// TestLongLabelsAreRefused: labels of WebDataset samples stay in memory, so their size is bounded.
func TestLongLabelsAreRefused(t *testing.T) {
	for size, want := range map[int]string{archive.MaxNameBytes: "",
		archive.MaxNameBytes + 1: "\"a.cls\": a label of 4097 bytes"} {
		path := archivetest.WriteFile(t, "a.tar",
			archivetest.Tar(t, archivetest.Member{Name: "a.png", Data: archivetest.Image("a")},
				archivetest.Member{Name: "a.cls", Data: strings.Repeat("l", size) + "\n"}))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true, NoIndex: true},
			openFile, fakeCodec{})
		if err == nil {
			l.Close()
		}
		var at *ArchiveError
		if (err == nil) != (want == "") || err != nil &&
			(!errors.As(err, &at) || at.File != path || !strings.Contains(err.Error(), want)) {
			t.Errorf("%d bytes: error %v", size, err)
		}
	}
}

// TestContextEndsOpenOfSilentServer: with a server that never answers, OpenContext returns when
// its context ends.
func TestContextEndsOpenOfSilentServer(t *testing.T) {
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
		t.Errorf("error %v, want the error %v", err, stop)
	}
}

// TestConcurrentCloseIsAllowed: several goroutines may close a loader at the same time, even if its
// index is in no file.
func TestConcurrentCloseIsAllowed(t *testing.T) {
	for _, noIndex := range []bool{false, true} {
		path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 30, nil)))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1, NoIndex: noIndex},
			openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.index.Load().KeepEntryPoints(0, []byte("entries"))
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

// TestAbandonedBatchIsNotReused: the memory of the current batch is not reused after its loop
// has ended early, even by a panic. A closed loader holds no memory for epochs.
func TestAbandonedBatchIsNotReused(t *testing.T) {
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, nil)),
		Options{Transform: Eval(4, 4), BatchSize: 4})
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
			t.Fatal("a later epoch reuses the memory of the abandoned batch, want other memory")
		}
	}
	if zeros := bytes.Count(left, []byte{0}); len(left) == 0 || zeros != len(left) {
		t.Errorf("%d of %d bytes of the abandoned batch were written to, want 0", len(left)-zeros, len(left))
	}
	if len(l.spare.slots) != hostSlots {
		t.Errorf("%d slots are kept, want %v", len(l.spare.slots), hostSlots)
	}
	for range l.Epoch(t.Context(), 0) {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.spare.slots) > 0 {
		t.Errorf("%d slots are kept after Close, want 0", len(l.spare.slots))
	}
}
