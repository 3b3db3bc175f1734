package index

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/digest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// readAll reads every sample of an index, in random order, with several goroutines.
func readAll(t *testing.T, path string, x *Index, want map[string]string) {
	t.Helper()
	a := openArchive(t, path)
	defer a.Close()
	order := rand.Perm(len(x.samples))
	var all sync.WaitGroup
	for g := range 4 {
		all.Go(func() {
			r := NewReader(x, a)
			defer r.Close()
			for _, i := range order[g*len(order)/4 : (g+1)*len(order)/4] {
				b := make([]byte, x.samples[i].size)
				if err := r.Read(i, b); err != nil {
					t.Error(err)
				} else if string(b) != want[x.Name(i)] {
					t.Errorf("%s has other bytes", x.Name(i))
				}
			}
		})
	}
	all.Wait()
}

// TestSamplesAreReadAtRandom: any sample of a gzip file of any kind is read from a checkpoint, with
// the index from the scan and with the index from its file.
func TestSamplesAreReadAtRandom(t *testing.T) {
	members := archivetest.Photos(60)
	want := archivetest.Contents(members)
	data := archivetest.Tar(t, members...)
	for name, file := range map[string][]byte{
		"tar":                         data,
		"level 6":                     archivetest.GzipSplit(t, data, len(data), 6),
		"level 1":                     archivetest.GzipSplit(t, data, len(data), 1),
		"stored":                      archivetest.GzipSplit(t, data, len(data), 0),
		"huffman only":                archivetest.GzipSplit(t, data, len(data), gzip.HuffmanOnly),
		"gzip members cut anywhere":   archivetest.GzipSplit(t, data, 77_777, 6),
		"gzip members smaller than a": archivetest.GzipSplit(t, data, 9_999, 9),
	} {
		t.Run(name, func(t *testing.T) {
			path := archivetest.WriteFile(t, "a.tgz", file)
			c := testConfig()
			c.HoldBytes = 1000
			for round := range 2 {
				x := open(t, path, c)
				if len(x.samples) != 60 || !x.Random() || x.memory.held != nil {
					t.Fatalf("round %d: %d samples, random %v, work %v, held %v, want len(x.samples) = "+
						"60, x.Random() = true, x.memory.held = nil",
						round, len(x.samples), x.Random(), x.work, x.memory.held != nil)
				}
				if x.work > 2.5 {
					t.Errorf("%.2f bytes are inflated for one of samples, want at most 2.5", x.work)
				}
				if x.side == nil {
					t.Errorf("round %d: got no index file, want one", round)
				}
				readAll(t, path, x, want)
				closeIndex(t, x)
				c.Classes = []string{"class0", "class1", "class2"} // the second time, from the file
			}
			info, err := os.Stat(path + sidecarSuffix)
			if err != nil || info.Size() > int64(len(file))/20 && info.Size() > 20_000 {
				t.Errorf("the index has %d bytes, the archive %d; %v", info.Size(), len(file), err)
			}
		})
	}
}

// TestForgedIndexNeverReturnsWrongBytes: an index with right checksums that does not belong to the
// archive never returns wrong bytes. The samples are right, or the index is refused, or reading
// ends with an error that names the sample.
func TestForgedIndexNeverReturnsWrongBytes(t *testing.T) {
	members := archivetest.Photos(9)
	want := archivetest.Contents(members)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
	side := filepath.Join(t.TempDir(), "index")
	c := testConfig()
	c.HoldBytes, c.File = 1000, side
	x := open(t, path, c)
	closeIndex(t, x)
	index, err := os.ReadFile(side)
	if err != nil {
		t.Fatal(err)
	}
	rng := rand.New(rand.NewPCG(1, 2))
	failed, right := 0, 0
	for round := range 70 {
		kind := []uint32{sectionMembers, sectionCheckpoints, sectionWindows, sectionNames, sectionDirs,
			sectionShards, sectionHeaders}[round%7]
		forged := indextest.Forge(t, index, kind, func(b []byte) {
			for range 1 + rng.IntN(3) {
				b[rng.IntN(len(b))] ^= 1 << rng.IntN(8)
			}
		})
		if err := os.WriteFile(side, forged, 0o644); err != nil {
			t.Fatal(err)
		}
		x := open(t, path, c)
		a := openArchive(t, path)
		r := NewReader(x, a)
		for i := range x.samples {
			e := &x.samples[i]
			if e.kind != archive.Regular || e.size > 1<<20 || !x.Random() {
				continue
			}
			b := make([]byte, e.size)
			if err := r.Read(i, b); err != nil {
				var at *archive.Error
				if failed++; !errors.As(err, &at) || at.Member != x.Name(i) {
					t.Errorf("error %v", err)
				}
				continue
			}
			right++
			known := want[x.Name(i)]
			if kind != sectionNames && kind != sectionMembers && string(b) != known {
				t.Errorf("section %d: %s has other bytes", kind, x.Name(i))
			}
			if e.flags&recordSummed != 0 && crc32.ChecksumIEEE(b) != e.crc {
				t.Errorf("section %d: %s has another checksum", kind, x.Name(i))
			}
		}
		r.Close()
		a.Close()
		closeIndex(t, x)
	}
	if failed == 0 || right == 0 {
		t.Errorf("%d reads failed, %d were right, want failed not 0, right not 0", failed, right)
	}
}

// TestLostShardFailsOnlyItsSamples: if a shard can't be opened again, reading a sample in it
// returns an error that names the shard. Other samples are still read.
func TestLostShardFailsOnlyItsSamples(t *testing.T) {
	dir := t.TempDir()
	for i := range 2 {
		name := fmt.Sprintf("c/%d.png", i)
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("s%d.tar", i)),
			archivetest.Tar(t, archivetest.Member{Name: name, Data: archivetest.Image(name)}), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	path := filepath.Join(dir, "s{0,1}.tar")
	x := open(t, path, testConfig())
	defer closeIndex(t, x)
	fail := false
	a, err := archive.Open(t.Context(), path, archive.Config{OpenFile: func(path string) (archive.File, error) {
		if fail && strings.HasSuffix(path, "s1.tar") {
			return nil, errChaos
		}
		return os.Open(path)
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	fail = true
	r := NewReader(x, a)
	defer r.Close()
	for i := range 6 {
		n := i % 2
		got := make([]byte, x.Size(n))
		err := r.Read(n, got)
		var damage *archive.Error
		if n == 0 && (err != nil || string(got) != archivetest.Image("c/0.png")) || n == 1 &&
			(!errors.Is(err, errChaos) || !errors.As(err, &damage) || damage.File != a.Shards()[1].Path) {
			t.Errorf("sample %d: %q, error %v", n, got, err)
		}
	}
}

// readerOf opens an index that keeps no samples in memory, and a reader of it, until the test ends.
func readerOf(t *testing.T, path string) (*Index, *Reader) {
	t.Helper()
	config := testConfig()
	config.HoldBytes = 1
	x := open(t, path, config)
	t.Cleanup(func() { closeIndex(t, x) })
	a := openArchive(t, path)
	t.Cleanup(func() { a.Close() })
	r := NewReader(x, a)
	t.Cleanup(func() { r.Close() })
	return x, r
}

// offsetsFile records the offsets that ReadAt reads.
type offsetsFile struct {
	archive.File
	offsets *[]int64
}

func (f offsetsFile) ReadAt(p []byte, at int64) (int, error) {
	*f.offsets = append(*f.offsets, at)
	return f.File.ReadAt(p, at)
}

// TestTarContentIsReadBeforeItsHeader: the page of a header nearly always also has content, so a
// disk reads once for both.
func TestTarContentIsReadBeforeItsHeader(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, archivetest.Photos(3)...))
	x, _ := readerOf(t, path)
	var offsets []int64
	a, err := archive.Open(t.Context(), path, archive.Config{OpenFile: func(path string) (archive.File, error) {
		f, err := archive.OpenFile(t.Context(), path, archive.Config{})
		return offsetsFile{f, &offsets}, err
	}})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := NewReader(x, a)
	defer r.Close()
	for i := range x.samples {
		m := &x.samples[i]
		offsets = nil
		err := r.Read(i, make([]byte, m.size))
		if want := []int64{m.offset, m.offset - archive.BlockBytes}; err != nil || !slices.Equal(offsets, want) {
			t.Errorf("%s: read at %v, error %v, want reads at %v", x.Name(i), offsets, err, want)
		}
	}
}

// TestPackedSaysWhereASampleIs: the headers before each sample are the archive's, and its
// compressed bytes start at its checkpoint.
func TestPackedSaysWhereASampleIs(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Photos(30)...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, len(data), 6))
	file, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	x, r := readerOf(t, path)
	for i := range x.samples {
		m := &x.samples[i]
		if r.Inflated(i).End != 0 {
			t.Errorf("%s has headers before it is read", x.Name(i))
		}
		if err := r.Read(i, make([]byte, m.size)); err != nil {
			t.Fatal(err)
		}
		p, ok := x.Packed(i)
		inflated, whole := r.Inflated(i), p.Input
		if !ok || inflated.Lead != crc32.ChecksumIEEE(data[m.offset-int64(p.Lead):m.offset]) {
			t.Fatalf("%s: %+v, %+v, %v", x.Name(i), p, inflated, ok)
		}
		p.Within(inflated)
		if p.Input > whole || i+5 < len(x.samples) && p.Input == whole {
			t.Errorf("%s: %d bytes of %d end with the sample", x.Name(i), p.Input, whole)
		}
		window, input := make([]byte, p.Window), make([]byte, p.Input)
		if err := r.ReadPacked(&p, window, input); err != nil || !strings.Contains(string(file), string(input)) {
			t.Errorf("%s: %v, the compressed bytes are not in the file, want them there", x.Name(i), err)
		}
		if mark, _ := x.shards[0].enter(m.offset-int64(p.Lead),
			m.offset); mark.Output+int64(p.Skip+p.Lead) != m.offset {
			t.Errorf("%s: %+v does not lead to byte %d", x.Name(i), p, m.offset)
		}
	}
	plain := archivetest.WriteFile(t, "a.tar", data)
	y, other := readerOf(t, plain)
	if err := other.Read(0, make([]byte, y.samples[0].size)); err != nil {
		t.Fatal(err)
	}
	if _, ok := y.Packed(0); ok || other.Inflated(0).End != 0 {
		t.Errorf("a sample of a .tar: Packed = %v, Inflated ends at %d, want false, 0", ok,
			other.Inflated(0).End)
	}
}

// TestPackedOfAZipIsTheMembersStream: after a sample has been read, its Packed is the whole deflate
// stream of its member, for makers with and without data descriptors. Stored members have none, and
// can be read in parts.
func TestPackedOfAZipIsTheMembersStream(t *testing.T) {
	photos := slices.DeleteFunc(archivetest.Photos(12),
		func(m archivetest.Member) bool { return strings.HasSuffix(m.Name, ".txt") })
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for i, m := range photos {
		data := []byte(m.Data)
		h := &zip.FileHeader{Name: m.Name, Method: zip.Deflate, Extra: bytes.Repeat([]byte{7, 7, 1, 0, 0}, i)}
		var to io.Writer
		var err error
		if i%3 == 0 {
			h.Method, h.CRC32 = zip.Store, crc32.ChecksumIEEE(data)
			h.CompressedSize64, h.UncompressedSize64 = uint64(len(data)), uint64(len(data))
			to, err = w.CreateRaw(h) // no data descriptor
		} else {
			to, err = w.CreateHeader(h)
		}
		if err == nil {
			_, err = to.Write(data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := archivetest.WriteFile(t, "a.zip", b.Bytes())
	x, r := readerOf(t, path)
	again := openArchive(t, path) // as in a later epoch
	defer again.Close()
	later := NewReader(x, again)
	defer later.Close()
	if x.Len() != len(photos) {
		t.Fatalf("%d samples, want %d", x.Len(), len(photos))
	}
	for i, m := range photos {
		got := make([]byte, len(m.Data))
		if err := r.Read(i, got); err != nil || string(got) != m.Data {
			t.Fatalf("Read of %s: error %v, the same bytes: %t, want true", m.Name, err, string(got) == m.Data)
		}
		p, ok := x.Packed(i)
		bound := p.Input
		p.Within(r.Inflated(i))
		if i%3 == 0 {
			part := make([]byte, len(m.Data)/2)
			err := later.ReadPart(i, &ContentPart{Bytes: part, From: len(m.Data) / 3, Whole: r.Inflated(i),
				Key: digest.NewKey(), Sums: make([]uint64, digest.Count(len(part)))})
			if ok || !x.Parts(i) || err != nil || !strings.HasPrefix(m.Data[len(m.Data)/3:], string(part)) {
				t.Errorf("stored %s: Packed %t, Parts %t, a part has error %v and the right bytes: %t, want "+
					"false, true, nil, true", m.Name, ok, x.Parts(i), err,
					strings.HasPrefix(m.Data[len(m.Data)/3:], string(part)))
			}
			continue
		}
		input := make([]byte, p.Input)
		err := r.ReadPacked(&p, nil, input)
		stream := bytes.NewReader(input)
		content, inflateErr := io.ReadAll(flate.NewReader(stream))
		if !ok || x.Parts(i) || p.Lead+p.Skip+p.SkipBits+p.Window != 0 || p.Input > bound || err != nil ||
			inflateErr != nil || string(content) != m.Data || stream.Len() != 0 {
			t.Errorf("deflated %s: Packed %+v, %t, at most %d bytes, Parts %t, errors %v and %v, %d bytes of "+
				"content, %d bytes left, want a stream of the %d bytes with no header, window or rest", m.Name,
				p, ok, bound, x.Parts(i), err, inflateErr, len(content), stream.Len(), len(m.Data))
		}
	}
}

// TestInflatedEndsWithItsGzipMember: a sample that spans several gzip members has no end, because a
// deflate stream ends inside of it.
func TestInflatedEndsWithItsGzipMember(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Photos(10)...)
	for name, test := range map[string]struct {
		bytes int // of a gzip member
		ends  bool
	}{"one": {len(data), true}, "several": {1000, false}} {
		t.Run(name, func(t *testing.T) {
			path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, test.bytes, 6))
			x, r := readerOf(t, path)
			for i := range x.samples {
				if err := r.Read(i, make([]byte, x.samples[i].size)); err != nil {
					t.Fatal(err)
				}
				if end := r.Inflated(i).End; (end > 0) != test.ends {
					t.Errorf("%s of %d bytes ends at %d", x.Name(i), x.samples[i].size, end)
				}
			}
		})
	}
}
