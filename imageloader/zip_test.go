package imageloader

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// zipped returns a zip of the members of a tar.
func zipped(t testing.TB, data []byte, method uint16) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for r := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := r.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		to, err := w.CreateHeader(&zip.FileHeader{Name: h.Name, Method: method})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(to, r); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// writeNamed writes files into one new folder.
func writeNamed(t testing.TB, files map[string][]byte) (dir string) {
	t.Helper()
	dir = t.TempDir()
	for name, data := range files {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestZipGivesTheBatchesOfTheTar: a zip, its shards and a zip behind a URL give the pixels, labels
// and samples of a .tar with the same photographs, in every order, and write no index.
func TestZipGivesTheBatchesOfTheTar(t *testing.T) {
	data := photoTar(t, 60)
	dir := writeNamed(t, map[string][]byte{"a.tar": data, "stored.zip": zipped(t, data, zip.Store),
		"deflated.zip": zipped(t, data, zip.Deflate)})
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	for name, o := range map[string]Options{
		"in order": {},
		"shuffled": {Shuffle: true, Seed: 3},
		"rank":     {Shuffle: true, Rank: 1, World: 3},
		"balanced": {Shuffle: true, Balanced: true},
	} {
		o.BatchSize, o.Transform, o.NoIndex = 8, Train(32), true
		epoch := func(path string) string {
			l, err := Open(path, o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			batches, err := collect(t, l, 1, 2)
			if err != nil {
				t.Fatal(err)
			}
			if len(batches) == 0 {
				t.Fatalf("%s of %s has no batch", name, path)
			}
			return digest(batches)
		}
		want := epoch(filepath.Join(dir, "a.tar"))
		for _, path := range []string{filepath.Join(dir, "stored.zip"), filepath.Join(dir, "deflated.zip"),
			server.URL + "/deflated.zip"} {
			if got := epoch(path); got != want {
				t.Errorf("%s of %s: digest %s, want the tar's %s", name, path, got, want)
			}
		}
		o.NoIndex = false
		if got := epoch(filepath.Join(dir, "stored.zip")); got != want {
			t.Errorf("%s with an index allowed: digest %s, want the tar's %s", name, got, want)
		}
	}
	if found, _ := filepath.Glob(filepath.Join(dir, "*.zip?*")); len(found) > 0 {
		t.Errorf("got the files %v, want none", found)
	}
}

// TestZipShardsGiveTheEpochOfTarShards: the shards of an archive may be zips, or zips and tars.
func TestZipShardsGiveTheEpochOfTarShards(t *testing.T) {
	one, two := archivetest.Images(t, 20, nil), archivetest.Numbered(t, 1, 2, 3)
	dir := writeNamed(t, map[string][]byte{"a-0.tar": one, "a-1.tar": two, "b-0.tar": zipped(t, one,
		zip.Deflate), "b-1.tar": zipped(t, two, zip.Store),
		"c-0.tar": archivetest.Gzip(t, one), "c-1.tar": zipped(t, two, zip.Deflate),
		"d-0.tar": zipped(t, one, zip.Store), "d-1.tar": two})
	want := ""
	for _, which := range []string{"a", "b", "c", "d"} {
		for range 2 {
			l, err := open(t.Context(), filepath.Join(dir, which+"-{0..1}.tar"), Options{BatchSize: 4,
				Transform: Eval(4, 4), Shuffle: true}, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			batches, err := collect(t, l, 0, 2)
			if err != nil {
				t.Fatal(err)
			}
			if want == "" {
				want = digest(batches)
			}
			if got := digest(batches); got != want {
				t.Errorf("shards %s: %d samples with digest %s, want the tars' %s", which,
					len(names(batches)), got, want)
			}
			if err := l.Close(); err != nil {
				t.Fatal(err)
			}
		}
	}
}

// zipFixtures are the zips of testdata/make_zips.py whose members can be read.
var zipFixtures = []string{"python-stored", "python-deflated", "infozip", "infozip-descriptors",
	"infozip-zip64", "macos", "dos"}

// TestZipsOfAllMakersGiveTheSameEpoch: names in UTF-8, with and without their flag, and in CP437,
// data descriptors, zip64 and the metadata of macOS change nothing.
func TestZipsOfAllMakersGiveTheSameEpoch(t *testing.T) {
	var members []archivetest.Member
	for i := range 3 {
		for _, folder := range []string{"café", "owl"} {
			members = append(members, archivetest.Member{Name: fmt.Sprintf("%s/%d.png", folder, i),
				Data: archivetest.Image(strings.Repeat(fmt.Sprintf("%s %d ", folder, i), 1+400*(i%2)))})
		}
	}
	epoch := func(path string) (*Loader, string) {
		l := openFake(t, path, Options{BatchSize: 4, Transform: Eval(4, 4)})
		batches, err := collect(t, l, 0, 2)
		if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		return l, digest(batches)
	}
	_, want := epoch(archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...)))
	for _, name := range zipFixtures {
		l, got := epoch("testdata/zip/" + name + ".zip")
		if got != want || !slices.Equal(l.Classes(), []string{"café", "owl"}) {
			t.Errorf("%s: classes %q, digest %s, want the tar's classes café and owl, digest %s", name,
				l.Classes(), got, want)
		}
		r, err := inspect(t.Context(), "testdata/zip/"+name+".zip", Options{}, openFile, fakeCodec{})
		if err != nil || r.Format != "zip" || r.Samples != 6 || r.Ignored != 0 || len(r.Bad) != 0 {
			t.Errorf("Inspect of %s: got %+v, error %v, want 6 samples of a zip", name, r, err)
		}
	}
}

// TestMembersThatAreNotReadAreBadSamples: members that are encrypted or compressed by bzip2 are bad
// samples, and their errors say so.
func TestMembersThatAreNotReadAreBadSamples(t *testing.T) {
	for name, want := range map[string]string{"infozip-encrypted": "it is encrypted",
		"python-bzip2": "neither stored nor deflated"} {
		path := "testdata/zip/" + name + ".zip"
		r, err := inspect(t.Context(), path, Options{}, openFile, fakeCodec{})
		if err != nil || r.Samples != 6 || len(r.Bad) != 6 {
			t.Fatalf("Inspect of %s: got %+v, error %v, want 6 bad samples", name, r, err)
		}
		for _, bad := range r.Bad {
			if bad.Reason != Unsupported || !strings.Contains(bad.Error(), want) {
				t.Errorf("%s: got %v, want one that is unsupported with %q", name, bad, want)
			}
		}
		l := openFake(t, path, Options{BatchSize: 2, Transform: Eval(4, 4)})
		if _, err := collect(t, l, 0, 1); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("epoch of %s: error %v, want one with %q", name, err, want)
		}
	}
}

// rawMember is a member of a zip whose directory may lie.
type rawMember struct {
	name   string
	flags  uint16
	method uint16
	packed []byte
	size   uint32
	crc    uint32
	at     int // offset of another local header, or -1
	wide   bool
}

// rawZip returns a zip of the members.
func rawZip(members ...rawMember) []byte {
	le := binary.LittleEndian
	var body, directory []byte
	for _, m := range members {
		at := uint32(len(body))
		common := le.AppendUint16(le.AppendUint16(le.AppendUint16(nil, 20), m.flags), m.method)
		common = le.AppendUint32(le.AppendUint32(common, 0), m.crc)
		common = le.AppendUint32(le.AppendUint32(common, uint32(len(m.packed))), m.size)
		if m.at < 0 {
			body = append(append(body, "PK\x03\x04"...), common...)
			body = append(le.AppendUint32(body, uint32(len(m.name))), m.name...)
			body = append(body, m.packed...)
		} else {
			at = uint32(m.at)
		}
		var extra []byte
		if m.wide {
			extra = le.AppendUint64(le.AppendUint16(le.AppendUint16(nil, 1), 24), uint64(m.size))
			extra = le.AppendUint64(le.AppendUint64(extra, uint64(len(m.packed))), uint64(at))
			le.PutUint64(common[14:], 1<<64-1)
			at = 1<<32 - 1
		}
		directory = append(append(directory, "PK\x01\x02\x14\x00"...), common...)
		directory = le.AppendUint16(le.AppendUint16(directory, uint16(len(m.name))), uint16(len(extra)))
		directory = le.AppendUint32(append(directory, make([]byte, 10)...), at)
		directory = append(append(directory, m.name...), extra...)
	}
	end := le.AppendUint32([]byte("PK\x05\x06"), 0)
	end = le.AppendUint16(le.AppendUint16(end, uint16(len(members))), uint16(len(members)))
	end = le.AppendUint16(le.AppendUint32(le.AppendUint32(end, uint32(len(directory))), uint32(len(body))), 0)
	return append(append(body, directory...), end...)
}

// storedMember returns a stored member with an image.
func storedMember(name, content string) rawMember {
	data := archivetest.Image(content)
	return rawMember{name: name, packed: []byte(data), size: uint32(len(data)),
		crc: crc32.ChecksumIEEE([]byte(data)), at: -1}
}

// deflatedMember returns a deflated member with an image.
func deflatedMember(t testing.TB, name, content string) rawMember {
	t.Helper()
	m := storedMember(name, content)
	packed := archivetest.Gzip(t, m.packed)
	m.method, m.packed = 8, packed[10:len(packed)-8]
	return m
}

// damagedZip returns a zip with two good members, and the bad ones by name, with words of their
// errors.
func damagedZip(t testing.TB) (data []byte, bad map[string]string) {
	t.Helper()
	bad = map[string]string{}
	list := []rawMember{storedMember("a/good1.png", "one")}
	add := func(m rawMember, want string) {
		list, bad[m.name] = append(list, m), want
	}
	long := strings.Repeat("long ", 20_000)
	m := storedMember("a/sum.png", "x")
	m.crc++
	add(m, "damaged: its bytes differ from their checksum")
	m = deflatedMember(t, "b/sum.png", long)
	m.crc++
	add(m, "damaged: its bytes differ from their checksum")
	m = deflatedMember(t, "a/longer.png", long)
	m.size -= 100
	add(m, "damaged: its content has more than the")
	m = deflatedMember(t, "a/shorter.png", long)
	m.size += 100
	add(m, "damaged: its content ends before the")
	m = deflatedMember(t, "b/cut.png", long)
	m.packed = m.packed[:len(m.packed)-20]
	add(m, "damaged: its content ends before the")
	m = deflatedMember(t, "b/bits.png", "x")
	m.packed = []byte{0xff, 0xff, 0xff}
	add(m, "damaged: its deflated bytes are damaged")
	m = storedMember("b/sizes.png", "x")
	m.size += 5
	add(m, "damaged: it is stored, and the zip's directory declares")
	m = deflatedMember(t, "b/bomb.png", "x")
	m.size = 30 << 20
	add(m, "damaged: the zip's directory declares 31457280 bytes")
	m = storedMember("b/secret.png", "x")
	m.flags = 1
	add(m, "unsupported: it is encrypted")
	m = storedMember("b/lzma.png", "x")
	m.method = 14
	add(m, "unsupported: it is neither stored nor deflated")
	list = append(list, deflatedMember(t, "b/good2.png", long))
	m = deflatedMember(t, "b/wide.png", "x")
	m.wide = true
	return rawZip(append(list, m)...), bad
}

// TestDamagedMembersOfAZipAreBadSamples: an epoch that skips bad samples reads past a damaged
// member. Any other epoch fails with an error that names the member. Inspect also names the member,
// and Fix leaves it out.
func TestDamagedMembersOfAZipAreBadSamples(t *testing.T) {
	data, bad := damagedZip(t)
	path := archivetest.WriteFile(t, "a.zip", data)
	l := openFake(t, path, Options{BatchSize: 4, Transform: Eval(4, 4), BadSamples: Skip})
	batches, err := collect(t, l, 0, 2)
	if got, want := names(batches), []string{"a/good1.png", "b/good2.png", "b/wide.png"}; err != nil ||
		!slices.Equal(got, want) {
		t.Errorf("got the samples %q, error %v, want %q", got, err, want)
	}
	r, err := inspect(t.Context(), path, Options{}, openFile, fakeCodec{})
	if err != nil || len(r.Bad) != len(bad) {
		t.Fatalf("Inspect got %d bad samples, error %v, want %d", len(r.Bad), err, len(bad))
	}
	for _, e := range r.Bad {
		if want := bad[e.Name]; want == "" || !strings.Contains(e.Error(), want) {
			t.Errorf("Inspect got the error %v, want one of %q with %q", e, e.Name, want)
		}
	}
	for i := range l.Len() {
		name := l.index.Load().Sample(i).Name
		if bad[name] == "" {
			continue
		}
		alone := openFake(t, path, Options{BatchSize: 1, Transform: Eval(4, 4), BadSamples: Fail, Weights: only(i)})
		_, err := collect(t, alone, 0, 1)
		var e *SampleError
		if !errors.As(err, &e) || e.Name != name || e.Index != i || !strings.Contains(err.Error(), bad[name]) {
			t.Errorf("epoch with %q: error %v, want a bad sample with %q", name, err, bad[name])
		}
	}
}

// only returns weights with which sample i alone is drawn.
func only(i int) func(Sample) float64 {
	return func(s Sample) float64 {
		if s.Index == i {
			return 1
		}
		return 0
	}
}

// TestFixOfAZipLeavesDamagedMembersOut: the fixed archive has only the good members.
func TestFixOfAZipLeavesDamagedMembersOut(t *testing.T) {
	data := photoTar(t, 3)
	z := zipped(t, data, zip.Store)
	at := bytes.Index(z, []byte("JFIF"))
	z[at+2000] ^= 0xff // in the first photograph
	path, out := archivetest.WriteFile(t, "a.zip", z), filepath.Join(t.TempDir(), "out.tar")
	r, fixed, err := Fix(t.Context(), path, out, Options{}, FixOptions{DropClasses: true}, nil)
	if err != nil || len(r.Bad) != 1 || fixed.Members != 2 || fixed.LeftOut != 1 {
		t.Fatalf("got %+v, %+v, error %v, want 2 members and 1 left out", r, fixed, err)
	}
	l, err := Open(out, Options{BatchSize: 2, Transform: Eval(32, 32), NoIndex: true})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if l.Len() != 2 {
		t.Errorf("got %d samples, want 2", l.Len())
	}
}

// photoTar returns a tar of the first n photographs of the examples.
func photoTar(t testing.TB, n int) []byte {
	t.Helper()
	f, err := os.Open("../examples/data/photos-train.tgz")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var members []archivetest.Member
	for r := tar.NewReader(z); len(members) < n; {
		h, err := r.Next()
		if err != nil {
			t.Fatal(err)
		}
		data, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if bytes.HasPrefix(data, []byte("\xff\xd8")) {
			members = append(members, archivetest.Member{Name: h.Name, Data: string(data)})
		}
	}
	return archivetest.Tar(t, members...)
}

// TestZipOfManyMembersIsRead: over 65,535 members need zip64's end record.
func TestZipOfManyMembersIsRead(t *testing.T) {
	const n = 1<<16 + 3
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for i := range n {
		to, err := w.CreateHeader(&zip.FileHeader{Name: fmt.Sprintf("c%d/%d.png", i%2, i), Method: zip.Store})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(to, archivetest.Image(fmt.Sprint(i))); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	path := archivetest.WriteFile(t, "a.zip", b.Bytes())
	l := openFake(t, path, Options{BatchSize: 64, Transform: Eval(1, 1), Shuffle: true})
	for batch, err := range l.Epoch(t.Context(), 0) {
		if err != nil || batch.N != 64 || l.Len() != n {
			t.Errorf("got a batch of %d, %d samples, error %v, want 64, %d", batch.N, l.Len(), err, n)
		}
		break
	}
}

// TestZipErrorsNameTheFile: damage of the central directory is an error of the archive.
func TestZipErrorsNameTheFile(t *testing.T) {
	good := rawZip(storedMember("a/1.png", "one"), storedMember("a/2.png", "two"))
	overlap := storedMember("a/2.png", "one")
	overlap.name, overlap.at = "a/1.png", 0
	far := storedMember("a/2.png", "two")
	far.at = 1 << 30
	count := bytes.Clone(good)
	count[len(count)-12] = 9
	among := storedMember("a/3.png", "one")
	among.at = 10
	split := bytes.Clone(good)
	split[len(split)-18] = 1
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"two entries of one header": {rawZip(storedMember("a/1.png", "one"), overlap), "overlaps"},
		"offset after the end":      {rawZip(storedMember("a/1.png", "one"), far), "overlaps"},
		"overlap out of order": {rawZip(storedMember("a/1.png", "one"), storedMember("a/2.png", "two"), among),
			"the member at byte 0 has"},
		"cut off":     {good[:len(good)-40], "cut off"},
		"wrong count": {count, "it has 2 entries, and its end says 9"},
		"split":       {split, "a part of a split zip"},
		"empty":       {rawZip(), "no samples"},
	} {
		path := archivetest.WriteFile(t, "a.zip", c.data)
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err == nil || !strings.Contains(err.Error(), c.want) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want one with %q and the path", name, err, c.want)
		}
	}
	if _, err := MakeIndex(t.Context(), archivetest.WriteFile(t, "a.zip", good), Options{},
		nil); err == nil || !strings.Contains(err.Error(), "needs no index") {
		t.Errorf("MakeIndex: error %v, want one that says that a zip needs no index", err)
	}
}

// TestZipDirectoryMayBeInAnyOrder: the entries of a central directory need not be in the order of
// the members in the file.
func TestZipDirectoryMayBeInAnyOrder(t *testing.T) {
	data := rawZip(storedMember("a/1.png", "one"), storedMember("b/2.png", "two"), storedMember("a/3.png", "three"))
	begin, end := bytes.Index(data, []byte("PK\x01\x02")), bytes.Index(data, []byte("PK\x05\x06"))
	entries := slices.Collect(slices.Chunk(bytes.Clone(data[begin:end]), (end-begin)/3))
	for _, order := range [][]int{{0, 1, 2}, {0, 2, 1}, {1, 0, 2}, {1, 2, 0}, {2, 0, 1}, {2, 1, 0}} {
		var directory []byte
		for _, i := range order {
			directory = append(directory, entries[i]...)
		}
		path := archivetest.WriteFile(t, "a.zip", slices.Replace(bytes.Clone(data), begin, end, directory...))
		batches, err := collect(t, openFake(t, path, Options{BatchSize: 3, Transform: Eval(4, 4)}), 0, 1)
		want := make([]string, 3)
		for i := range want {
			want[i] = []string{"a/1.png", "b/2.png", "a/3.png"}[order[i]]
		}
		if got := names(batches); err != nil || !slices.Equal(got, want) {
			t.Errorf("order %v: got samples %q, error %v, want %q", order, got, err, want)
		}
	}
}

// TestStoredMembersOfAZipTakeNoTimeToInflate: their whole time is Stats.Read, so that advice about
// inflating is given only for deflated members.
func TestStoredMembersOfAZipTakeNoTimeToInflate(t *testing.T) {
	for method, inflated := range map[uint16]bool{zip.Store: false, zip.Deflate: true} {
		path := archivetest.WriteFile(t, "a.zip", zipped(t, archivetest.Images(t, 40, nil), method))
		l := openFake(t, path, Options{BatchSize: 8, Transform: Eval(4, 4), Shuffle: true})
		if _, err := collect(t, l, 0, 1); err != nil {
			t.Fatal(err)
		}
		if s := l.Stats(); s.Read == 0 || s.Inflate > 0 != inflated {
			t.Errorf("method %d: got %v for reading and %v for inflating, want over 0, and over 0 = %v", method, s.Read,
				s.Inflate, inflated)
		}
	}
}

// zipOfEmpty writes a zip of n members without content, with names as in ImageNet.
func zipOfEmpty(t testing.TB, n int) (path string) {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for i := range n {
		name := fmt.Sprintf("train/n%08d/n%08d_%d.JPEG", i/1000, i/1000, i)
		if _, err := w.CreateHeader(&zip.FileHeader{Name: name}); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return archivetest.WriteFile(t, "a.zip", b.Bytes())
}

// TestOpenReadsTheDirectoryOfAZipOnce: Open reads the central directory once, and no member.
func TestOpenReadsTheDirectoryOfAZipOnce(t *testing.T) {
	const n = 20_000
	path := zipOfEmpty(t, n)
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	directory := int64(binary.LittleEndian.Uint32(data[len(data)-10:]))
	const rest = 128 << 10 // the first and the last bytes of the file
	var read atomic.Int64
	l, err := open(t.Context(), path, Options{BatchSize: 8, Transform: Eval(4, 4), Shuffle: true, BadSamples: Skip},
		func(path string) (archive.File, error) {
			f, err := os.Open(path)
			return countingFile{f, &read, new(atomic.Int64)}, err
		}, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := read.Load(); got < directory || got > directory+rest {
		t.Errorf("Open reads %d bytes, want %d of the directory and at most %d more", got, directory, rest)
	}
	if l.Len() != n {
		t.Errorf("got %d samples, want %d", l.Len(), n)
	}
}

// FuzzZip: whatever the bytes of a zip, epochs and Inspect end, and two epochs deliver the same
// samples and the same error.
func FuzzZip(f *testing.F) {
	for _, name := range zipFixtures {
		data, err := os.ReadFile("testdata/zip/" + name + ".zip")
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data, false)
	}
	damaged, _ := damagedZip(f)
	f.Add(damaged, true)
	f.Fuzz(func(t *testing.T, data []byte, web bool) {
		o := Options{BatchSize: 4, Transform: Eval(2, 2), BadSamples: Skip, Shuffle: true, Workers: 2,
			MaxSampleBytes: 1 << 16, NoIndex: true, WebDataset: web}
		file := func(string) (archive.File, error) { return memoryFile{bytes.NewReader(data)}, nil }
		r, errI := inspect(t.Context(), "memory", Options{MaxSampleBytes: 1 << 16, WebDataset: web}, file, fakeCodec{})
		l, err := open(t.Context(), "memory", o, file, fakeCodec{})
		if err != nil {
			return
		}
		defer l.Close()
		first, err1 := collect(t, l, 0, 2)
		second, err2 := collect(t, l, 0, 2)
		if digest(first) != digest(second) || (err1 == nil) != (err2 == nil) {
			t.Errorf("%d samples, error %v, then %d samples, error %v", len(names(first)), err1,
				len(names(second)), err2)
		}
		if err1 == nil && errI == nil && r.Format == "zip" && r.Samples-len(r.Bad) != len(names(first)) {
			t.Errorf("an epoch has %d samples, want %d as Inspect", len(names(first)), r.Samples-len(r.Bad))
		}
	})
}
