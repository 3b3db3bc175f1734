package archive_test

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"encoding/binary"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// recordedFile records the memory that each ReadAt fills.
type recordedFile struct {
	archive.File
	reads *[][]byte
}

func (f recordedFile) ReadAt(p []byte, at int64) (int, error) {
	*f.reads = append(*f.reads, p)
	return f.File.ReadAt(p, at)
}

// A large stored member of a local file is read into the caller's memory, and before its local
// header. Its position is guessed from the previous local header. A small one is read together with
// its local header.
func TestLargeStoredMembersAreReadWithoutACopy(t *testing.T) {
	for _, c := range []struct {
		size, extra  int
		first, later int // reads of the first and of later calls, without those of the directory
	}{
		{archive.MinUncopied - 1, 0, 1, 1}, {archive.MinUncopied - 1, 4096, 2, 2},
		{archive.MinUncopied, 0, 2, 2}, {archive.MinUncopied, 4096, 3, 2}, {3 * archive.MinUncopied, 0, 2, 2},
	} {
		content := archivetest.Image(strings.Repeat("0123456789", c.size))[:c.size]
		file := archivetest.WriteFile(t, "a.zip", localZip(t, "a/1.png", content, c.extra))
		var reads [][]byte
		a, err := archive.Open(t.Context(), file, archive.Config{OpenFile: func(path string) (archive.File, error) {
			f, err := archive.OpenFile(t.Context(), path, archive.Config{})
			return recordedFile{f, &reads}, err
		}})
		if err != nil {
			t.Fatal(err)
		}
		read := func(r *archive.Reader) (count int, direct bool) {
			reads = nil
			p := make([]byte, c.size)
			if err := r.ReadZipped(0, 0, p); err != nil || string(p) != content {
				t.Errorf("%d bytes, %d more in the header: got %.20q, error %v, want %.20q", c.size, c.extra, p, err, content)
			}
			return len(reads), slices.ContainsFunc(reads, func(b []byte) bool { return &b[0] == &p[0] })
		}
		r := archive.NewReader(a)
		read(r) // also reads the directory
		r.Close()
		r = archive.NewReader(a)
		for i, want := range []int{c.first, c.later} {
			got, direct := read(r)
			if want, uncopied := want, c.size >= archive.MinUncopied; got != want || direct != uncopied {
				t.Errorf("%d bytes, %d more in the header, call %d: got %d reads, into the caller's memory %t, want %d, %t",
					c.size, c.extra, i, got, direct, want, uncopied)
			}
		}
		r.Close()
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}

// Each read of a large stored member compares its bytes with the zip's checksum, and its local
// header with the directory.
func TestDamageOfLargeStoredMembersIsFound(t *testing.T) {
	content := archivetest.Image(strings.Repeat("0123456789", archive.MinUncopied))
	data := zipOf(t, []archivetest.Member{{Name: "a/1.png", Data: content}}, zip.Store)
	file := archivetest.WriteFile(t, "a.zip", data)
	r := archive.NewReader(open(t, file))
	defer r.Close()
	p := make([]byte, len(content))
	begin := bytes.Index(data, []byte(content))
	for _, c := range []struct {
		at    int
		value byte
		want  string
	}{
		{0, 0, "it has no local header"},
		{30, 'b', "has another name"},
		{29, 0xff, "overlaps the zip's central directory"}, // the high byte of the extra fields' size
		{begin + len(content) - 1, 0, "its bytes differ from their checksum"},
	} {
		if err := r.ReadZipped(0, 0, p); err != nil || string(p) != content {
			t.Fatalf("before the damage: got %.20q, error %v, want %.20q", p, err, content)
		}
		damaged := bytes.Clone(data)
		damaged[c.at] = c.value
		archivetest.Rewrite(t, file, damaged)
		err := r.ReadZipped(0, 0, p)
		if archive.MemberDamage(err) == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("byte %d is %#x: got error %v, want damage with %q", c.at, c.value, err, c.want)
		}
		archivetest.Rewrite(t, file, data)
	}
}

// Packed returns where the bytes of the last member are. It returns nothing after an error.
func TestPackedBytesHaveTheMember(t *testing.T) {
	long := archivetest.Image(strings.Repeat("0123456789", archive.MinUncopied))
	members := []archivetest.Member{{Name: "a/1.png", Data: archivetest.Image("short")}, {Name: "a/2.png", Data: long}}
	deflated, stored := zipOf(t, members, zip.Deflate), zipOf(t, members, zip.Store)
	shifted := localZip(t, "a/1.png", long, 4096)
	for name, c := range map[string]struct {
		data     []byte
		contents []string
		deflated bool
	}{
		"deflated":             {deflated, []string{members[0].Data, long}, true},
		"stored":               {stored, []string{members[0].Data, long}, false},
		"with a longer header": {shifted, []string{long}, false},
	} {
		file := archivetest.WriteFile(t, "a.zip", c.data)
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil || len(found.list) != len(c.contents) {
			t.Fatalf("%s: got %d members, error %v, want %d", name, len(found.list), err, len(c.contents))
		}
		r := archive.NewReader(open(t, file))
		defer r.Close()
		for i, m := range found.list {
			if err := r.ReadZipped(0, m.Offset, make([]byte, m.Size)); err != nil {
				t.Fatal(err)
			}
			begin, end := r.Packed()
			got := c.data[begin:end]
			if c.deflated {
				if got, err = io.ReadAll(flate.NewReader(bytes.NewReader(got))); err != nil {
					t.Errorf("%s, member %d: got error %v, want none", name, i, err)
				}
			}
			if string(got) != c.contents[i] {
				t.Errorf("%s, member %d: got bytes %d to %d with %.20q, want %.20q", name, i, begin, end, got, c.contents[i])
			}
			if err := r.ReadZipped(0, m.Offset, make([]byte, m.Size+1)); !errors.Is(err, archive.ErrSourceChanged) {
				t.Errorf("%s, member %d: got error %v for another size, want archive.ErrSourceChanged", name, i, err)
			}
			if begin, end := r.Packed(); begin != 0 || end != 0 {
				t.Errorf("%s, member %d: got bytes %d to %d after an error, want none", name, i, begin, end)
			}
		}
	}
}

// ReadZipped returns the error of a read that fails.
func TestReadZippedReportsItsFaults(t *testing.T) {
	errDisk := errors.New("the disk has failed")
	for _, size := range []int{100, archive.MinUncopied} {
		content := archivetest.Image(strings.Repeat("x", size))[:size]
		file := archivetest.WriteFile(t, "a.zip", localZip(t, "a/1.png", content, 4096))
		for reads := 0; ; reads++ {
			left := reads
			a, err := archive.Open(t.Context(), file, archive.Config{OpenFile: func(path string) (archive.File, error) {
				f, err := archive.OpenFile(t.Context(), path, archive.Config{})
				return brokenFile{f, 64, &left, errDisk}, err
			}})
			if err == nil {
				r := archive.NewReader(a)
				err = r.ReadZipped(0, 0, make([]byte, size))
				r.Close()
				_ = a.Close() // only read
			}
			if left >= 0 {
				if err != nil {
					t.Errorf("%d bytes: got error %v, want none", size, err)
				}
				break
			}
			if !errors.Is(err, errDisk) {
				t.Errorf("%d bytes, after %d reads: got error %v, want %v", size, reads, err, errDisk)
			}
		}
	}
}

// The entries of a directory may be in any order. Members that overlap are an error in every order.
func TestDirectoryMayBeInAnyOrder(t *testing.T) {
	var members []archivetest.Member
	for _, name := range []string{"a/1.png", "a/2.png", "a/3.png"} {
		members = append(members, archivetest.Member{Name: name, Data: archivetest.Image(strings.Repeat(name, 20))})
	}
	data := zipOf(t, members, zip.Store)
	directory := bytes.Index(data, []byte("PK\x01\x02"))
	entry := (len(data) - 22 - directory) / 3 // the names have equally many bytes
	for _, order := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}} {
		changed := bytes.Clone(data)
		var want []string
		for to, from := range order {
			copy(changed[directory+to*entry:][:entry], data[directory+from*entry:])
			want = append(want, members[from].Data)
		}
		file := archivetest.WriteFile(t, "a.zip", changed)
		got, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("order %v, a walk: got %.60q, error %v, want %.60q", order, got, err, want)
			continue
		}
		if got, err = found.randomOf(open(t, file)); err != nil || !slices.Equal(got, want) {
			t.Errorf("order %v, a Reader: got %.60q, error %v, want %.60q", order, got, err, want)
		}
		// The second entry starts one byte after the first one.
		copy(changed[directory+entry+42:][:4], binary.LittleEndian.AppendUint32(nil,
			binary.LittleEndian.Uint32(changed[directory+42:])+1))
		archivetest.Rewrite(t, file, changed)
		if got, _, err := walk(t.Context(), file, archive.Config{}); err == nil || !strings.Contains(err.Error(), "overlaps") {
			t.Errorf("order %v with overlapping members: got %.60q, error %v, want an error that says so", order, got, err)
		}
	}
}
