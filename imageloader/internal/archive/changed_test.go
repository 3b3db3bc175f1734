package archive_test

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// Files that are removed after a walk are missing for whatever reads them next: no Reader returns
// old bytes.
func TestRemovedFilesAreMissing(t *testing.T) {
	members, files := smallArchives(t)
	for format, data := range files {
		if format == "zstd" {
			continue
		}
		file := archivetest.WriteFile(t, nameOf(format), data)
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		a := open(t, file)
		if err := os.Remove(file); err != nil {
			t.Fatal(err)
		}
		if _, err := found.randomOf(a); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s: got error %v, want fs.ErrNotExist", format, err)
		}
	}
	root := archivetest.Extract(t, members)
	a, whole := open(t, root), open(t, root)
	if err := os.Remove(filepath.Join(root, members[2].Name)); err != nil {
		t.Fatal(err)
	}
	m := archive.Member{Name: members[2].Name}
	if _, err := a.ReadForward(3, &m, make([]byte, 1)); !errors.Is(err, fs.ErrNotExist) ||
		!strings.Contains(err.Error(), m.Name) {
		t.Errorf("ReadForward of a removed file: got error %v, want fs.ErrNotExist and the file's name", err)
	}
	if err := os.RemoveAll(root); err != nil {
		t.Fatal(err)
	}
	count := 0
	var err error
	for _, err = range whole.Members() {
		count++
	}
	if count != 1 || !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), root) {
		t.Errorf("members of a removed directory: got %d results, error %v, want fs.ErrNotExist alone", count, err)
	}
}

// A file of a directory that is removed after the walk has listed it is an error of the walk.
func TestFileRemovedDuringTheWalkIsAnError(t *testing.T) {
	members, _ := smallArchives(t)
	root := archivetest.Extract(t, members)
	a := open(t, root)
	var err error
	for _, err = range a.Members() {
		if a.Position() == 1 && err == nil {
			if err := os.Remove(filepath.Join(root, members[1].Name)); err != nil {
				t.Fatal(err)
			}
		}
	}
	if !errors.Is(err, fs.ErrNotExist) || a.Position() != 1 || !strings.Contains(err.Error(), members[1].Name) {
		t.Errorf("got error %v after %d members, want fs.ErrNotExist after 1", err, a.Position())
	}
}

// A member that an index has at another place, or with another size, has changed.
func TestMembersAtOtherPlacesHaveChanged(t *testing.T) {
	_, files := smallArchives(t)
	for _, format := range []string{"stored zip", "deflated zip", "Parquet with Snappy"} {
		file := archivetest.WriteFile(t, nameOf(format), files[format])
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		for name, change := range map[string]func(m *archive.Member){
			"another size":   func(m *archive.Member) { m.Size += 5000 },
			"another offset": func(m *archive.Member) { m.Offset += 5000 },
		} {
			wrong := places{list: slices.Clone(found.list[1:2])}
			change(&wrong.list[0].Member)
			if _, err := wrong.randomOf(open(t, file)); !errors.Is(err, archive.ErrSourceChanged) {
				t.Errorf("a Reader of %s, %s: got error %v, want archive.ErrSourceChanged", format, name, err)
			}
			m := wrong.list[0].Member
			if _, err := open(t, file).ReadForward(2, &m, make([]byte, m.Size)); !errors.Is(err, archive.ErrSourceChanged) {
				t.Errorf("ReadForward in %s, %s: got error %v, want archive.ErrSourceChanged", format, name, err)
			}
		}
	}
}

// Inflating from a checkpoint is an error if the index has only a part of the window, or if a later
// gzip member has no header.
func TestDamagedCheckpointsAreErrors(t *testing.T) {
	_, files := smallArchives(t)
	file := archivetest.WriteFile(t, "a.tgz", files["gzip in members"])
	_, found, err := walk(t.Context(), file, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	last := found.list[len(found.list)-1]
	last.from.Size += 10
	cut := places{list: []place{last}, windows: found.windows}
	if _, err := cut.randomOf(open(t, file)); err == nil || !strings.Contains(err.Error(), "reading the index") {
		t.Errorf("a window that is cut off: got error %v, want one about the index", err)
	}
	data := bytes.Clone(files["gzip in members"])
	at := bytes.LastIndex(data, []byte{0x1f, 0x8b, 8})
	data[at+1]++
	archivetest.Rewrite(t, file, data)
	a := open(t, file)
	r := archive.NewReader(a)
	defer r.Close()
	if err := r.Inflate(0, bytes.NewReader(found.windows), &found.list[0].from, 0, a.Info().Size(), nil,
		make([]byte, len(files["tar"]))); !errors.Is(err, gzip.ErrHeader) {
		t.Errorf("a gzip member without its signature: got error %v, want gzip.ErrHeader", err)
	}
}

// ReadForward and ReadToEnd read the rest of a shard, and compare its checksum, before they move to
// the next shard or return at the end. They do so even if only the shard's first member was wanted.
func TestSkippedShardsAreVerified(t *testing.T) {
	dir := t.TempDir()
	for i := range 2 {
		data := archivetest.Gzip(t, archivetest.Numbered(t, 2*i, 2*i+1))
		data[len(data)-8]++ // the checksum
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("s%d.tgz", i)), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	first := archive.Member{Name: "a/0.png", Offset: archive.BlockBytes}
	second := archive.Member{Name: "a/2.png", Offset: archive.BlockBytes, Shard: 1}
	for name, c := range map[string]struct {
		path, shard string
		read        func(a *archive.Archive) error
	}{
		"the next shard's member": {"s{0,1}.tgz", "s0.tgz", func(a *archive.Archive) error {
			_, err := a.ReadForward(3, &second, make([]byte, 1))
			return err
		}},
		"the end, with a shard to go": {"s{0,1}.tgz", "s0.tgz", func(a *archive.Archive) error { return a.ReadToEnd() }},
		"the end of the last shard":   {"s1.tgz", "s1.tgz", func(a *archive.Archive) error { return a.ReadToEnd() }},
	} {
		a := open(t, filepath.Join(dir, c.path))
		if _, err := a.ReadForward(1, &first, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if err := c.read(a); !errors.Is(err, gzip.ErrChecksum) || !strings.Contains(err.Error(), c.shard) {
			t.Errorf("%s: got error %v, want gzip.ErrChecksum of %s", name, err, c.shard)
		}
	}
}

// ReadForward skips a member of any size, and returns the headers of the next one.
func TestReadForwardSkipsLargeMembers(t *testing.T) {
	large := archivetest.Member{Name: "a/large.png", Data: strings.Repeat("large ", 200_000)}
	small := archivetest.Member{Name: "a/small.png", Data: "small"}
	a := open(t, archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, large, small))))
	at := int64(archive.BlockBytes + len(large.Data) + archive.BlockBytes)
	at += -at & (archive.BlockBytes - 1)
	content := make([]byte, len(small.Data))
	heads, err := a.ReadForward(2, &archive.Member{Name: small.Name, Offset: at}, content)
	if err != nil || string(content) != small.Data || !archive.Heads(heads, small.Name, int64(len(content))) {
		t.Errorf("got %q behind %d bytes of headers, error %v, want %q behind its header", content, len(heads), err,
			small.Data)
	}
}

// Pieces passes on the error of its argument, and reads nothing more.
func TestPiecesReturnsTheErrorOfItsArgument(t *testing.T) {
	a := open(t, archivetest.WriteFile(t, "a.tar", archivetest.Tar(t,
		archivetest.Member{Name: "a", Data: strings.Repeat("x", 1<<20)}, archivetest.Member{Name: "b", Data: "x"})))
	full := errors.New("no space")
	for m, err := range a.Members() {
		if err != nil {
			t.Fatal(err)
		}
		if m.Name == "b" {
			if _, err := a.Peek(1); err != nil {
				t.Fatal(err)
			}
		}
		calls := 0
		err := a.Pieces(func([]byte) error {
			if calls++; m.Name == "a" && calls == 1 {
				return nil
			}
			return full
		})
		if want := map[string]int{"a": 2, "b": 1}[m.Name]; err != full || calls != want {
			t.Errorf("%s: got error %v after %d calls, want %v after %d", m.Name, err, calls, full, want)
		}
	}
}

// Members of a tar that are not regular files are of other kinds.
func TestDevicesOfATarAreOther(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Member{Name: "a/null", Kind: tar.TypeChar},
		archivetest.Member{Name: "a/pipe", Kind: tar.TypeFifo})
	got, _ := walked(t, archivetest.WriteFile(t, "a.tar", data))
	want := []string{fmt.Sprintf("a/null %d", archive.Other), fmt.Sprintf("a/pipe %d", archive.Other)}
	if !slices.Equal(got, want) {
		t.Errorf("got members %q, want %q", got, want)
	}
}

// A pipe cannot be an archive, because each epoch reads the archive again.
func TestPipeIsNoArchive(t *testing.T) {
	_, err := archive.Open(t.Context(), "/dev/null", archive.Config{})
	if err == nil || !strings.Contains(err.Error(), "every epoch reads the archive again") {
		t.Errorf("got error %v, want one that says why", err)
	}
	if _, err := archive.Open(t.Context(), "a{", archive.Config{}); err == nil || !strings.Contains(err.Error(), "has no }") {
		t.Errorf("a pattern without its end: got error %v, want one about the brace", err)
	}
}

// The limit for a member's path also applies to a path in a row.
func TestLongPathOfARowIsAnError(t *testing.T) {
	long := parquettest.Row{Path: "a/" + strings.Repeat("x", archive.MaxNameBytes), Image: archivetest.Image("x")}
	data := parquettest.File(t, []parquettest.Row{long}, parquettest.Layout{})
	_, err := walkFile(t, data)
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("a row's path has %d bytes, over the limit", len(long.Path))) {
		t.Errorf("got error %.300v, want one about the path", err)
	}
}

// unixZip returns a zip as Unix programs write it. It has a symbolic link, a device, and a member
// whose extra field has the name in UTF-8.
func unixZip(t *testing.T) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	add := func(h *zip.FileHeader, mode fs.FileMode) {
		h.SetMode(mode)
		to, err := w.CreateHeader(h)
		if err == nil {
			_, err = to.Write([]byte("x"))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	add(&zip.FileHeader{Name: "a/regular"}, 0o644)
	add(&zip.FileHeader{Name: "a/link"}, fs.ModeSymlink|0o777)
	add(&zip.FileHeader{Name: "a/null"}, fs.ModeDevice|fs.ModeCharDevice|0o666)
	const raw, unicode = "a/caf?", "a/café"
	extra := binary.LittleEndian.AppendUint16(nil, 0x7075)
	extra = binary.LittleEndian.AppendUint16(extra, uint16(5+len(unicode)))
	extra = binary.LittleEndian.AppendUint32(append(extra, 1), crc32.ChecksumIEEE([]byte(raw)))
	add(&zip.FileHeader{Name: raw, Extra: append(extra, unicode...)}, 0o644)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestZipOfUnixHasItsKindsAndNames(t *testing.T) {
	got, _ := walked(t, archivetest.WriteFile(t, "a.zip", unixZip(t)))
	want := []string{"a/regular 0", fmt.Sprintf("a/link %d", archive.Symlink), fmt.Sprintf("a/null %d", archive.Other),
		"a/café 0"}
	if !slices.Equal(got, want) {
		t.Errorf("got members %q, want %q", got, want)
	}
}

// A walk of a tar or a zip gives the names of path.Clean. They stay valid when the walk has ended.
func TestNamesOfMembersAreClean(t *testing.T) {
	odd := []string{"a/b", "a//b", "a/./b", "./a", "a/.", "a/../b", "a/..", "..", "../a", "/a", "//a", ".a", "a/.b", "a.",
		"a/b..", "..a/b", "...", "/.."}
	var members []archivetest.Member
	var want []string
	for i := range 1000 { // over several allocations of names
		name := odd[i%len(odd)]
		if i >= len(odd) {
			name = fmt.Sprintf("folder-%04d/./%s", i, name)
		}
		members = append(members, archivetest.Member{Name: name, Data: "x"})
		want = append(want, path.Clean(name)+" 0")
	}
	for format, data := range map[string][]byte{"tar": archivetest.Tar(t, members...),
		"zip": zipOf(t, members, zip.Store)} {
		if got, _ := walked(t, archivetest.WriteFile(t, "a."+format, data)); !slices.Equal(got, want) {
			t.Errorf("%s: got members %.2000q, want %.2000q", format, got, want)
		}
	}
}

// zip64 returns a zip that ends like a zip of over 65,535 members, and the offsets of its end
// record and its locator.
func zip64(t *testing.T) (data []byte, end, locator int) {
	t.Helper()
	le := binary.LittleEndian
	data = zipOf(t, []archivetest.Member{{Name: "a/1.png", Data: "one"}, {Name: "a/2.png", Data: "two"}}, zip.Store)
	last := len(data) - 22
	count, size, at := le.Uint16(data[last+10:]), le.Uint32(data[last+12:]), le.Uint32(data[last+16:])
	tail := bytes.Clone(data[last:])
	copy(tail[8:], bytes.Repeat([]byte{0xff}, 12))
	record := append([]byte("PK\x06\x06"), make([]byte, 52)...)
	le.PutUint64(record[4:], 44)
	le.PutUint64(record[24:], uint64(count))
	le.PutUint64(record[32:], uint64(count))
	le.PutUint64(record[40:], uint64(size))
	le.PutUint64(record[48:], uint64(at))
	data, end = append(data[:last], record...), last
	locator = len(data)
	data = le.AppendUint32(append(data, "PK\x06\x07"...), 0)
	data = le.AppendUint32(le.AppendUint64(data, uint64(end)), 1)
	return append(data, tail...), end, locator
}

// The numbers in the end record of a zip64 are checked before they are used.
func TestDamagedEndOfAZip64IsAnError(t *testing.T) {
	data, end, locator := zip64(t)
	if members, err := walkFile(t, data); members != 2 || err != nil {
		t.Fatalf("got %d members, error %v, want 2", members, err)
	}
	put := func(at int, n uint64) func([]byte) {
		return func(b []byte) { binary.LittleEndian.PutUint64(b[at:], n) }
	}
	for name, c := range map[string]struct {
		change func([]byte)
		want   string
	}{
		"the record is behind its locator":  {put(locator+8, uint64(locator)), "the file is cut off"},
		"the record is before the file":     {put(locator+8, 1<<63), "the file is cut off"},
		"the record is elsewhere":           {put(locator+8, uint64(end-10)), "the file is cut off"},
		"a part of a split zip":             {func(b []byte) { b[end+16] = 1 }, "a part of a split zip"},
		"the directory is before the file":  {put(end+48, 1<<63), "the file is cut off"},
		"the directory has a negative size": {put(end+40, 1<<63), "the file is cut off"},
		"the directory reaches the record":  {put(end+48, uint64(end)), "the file is cut off"},
		"there are more entries":            {put(end+32, 3), "it has 2 entries, and its end says 3"},
		"there are 65,536 entries more":     {put(end+32, 1<<16+2), "it has 2 entries, and its end says 65538"},
	} {
		changed := bytes.Clone(data)
		c.change(changed)
		if members, err := walkFile(t, changed); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %d members, error %v, want %q", name, members, err, c.want)
		}
	}
}

// An entry whose size needs zip64's extra field is damaged without it.
func TestEntryWithoutItsLongSizeIsAnError(t *testing.T) {
	data := zipOf(t, []archivetest.Member{{Name: "a/1.png", Data: "one"}}, zip.Store)
	at := bytes.Index(data, []byte("PK\x01\x02"))
	copy(data[at+24:], "\xff\xff\xff\xff")
	if members, err := walkFile(t, data); err == nil || !strings.Contains(err.Error(), "entry 1 has wrong sizes") {
		t.Errorf("got %d members, error %v, want one about the sizes of entry 1", members, err)
	}
}

// localZip returns a zip with one stored member whose local header has an extra field of n bytes
// that the directory does not have, as some programs write for the alignment of contents.
func localZip(t *testing.T, name, content string, n int) []byte {
	t.Helper()
	data := zipOf(t, []archivetest.Member{{Name: name, Data: content}}, zip.Store)
	le := binary.LittleEndian
	directory := bytes.Index(data, []byte("PK\x01\x02"))
	begin := bytes.Index(data, []byte(content))
	le.PutUint16(data[28:], le.Uint16(data[28:])+uint16(n))
	data = slices.Insert(data, begin, make([]byte, n)...)
	le.PutUint32(data[len(data)-6:], uint32(directory+n)) // of the end record
	return data
}

// A local header may be longer than the directory says.
func TestLongLocalHeaderIsRead(t *testing.T) {
	content := archivetest.Image(strings.Repeat("aligned ", 100))
	for _, n := range []int{0, 4, 100, 4096} {
		file := archivetest.WriteFile(t, "a.zip", localZip(t, "a/1.png", content, n))
		got, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil || !slices.Equal(got, []string{content}) {
			t.Errorf("%d bytes more, a walk: got %q, error %v, want %q", n, got, err, content)
			continue
		}
		got, err = found.randomOf(open(t, file))
		if err != nil || !slices.Equal(got, []string{content}) {
			t.Errorf("%d bytes more, a Reader: got %q, error %v, want %q", n, got, err, content)
		}
	}
}
