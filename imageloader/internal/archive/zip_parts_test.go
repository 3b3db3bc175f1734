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

// The local header of a stored member determines where its parts are read. A member that is
// deflated now, or that has become shorter, is reported as changed.
func TestPartsOfStoredMembersAreRead(t *testing.T) {
	content := archivetest.Image(strings.Repeat("0123456789", 500))
	for _, extra := range []int{0, 4096} {
		file := archivetest.WriteFile(t, "a.zip", localZip(t, "a/1.png", content, extra))
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		r := archive.NewReader(open(t, file))
		defer r.Close()
		at := found.list[0].Offset
		for _, part := range [][2]int{{0, 1}, {0, len(content)}, {100, 1000}, {len(content) - 1, 1}, {len(content), 0}} {
			p := make([]byte, part[1])
			if err := r.ReadStored(0, at, int64(part[0]), p); err != nil || string(p) != content[part[0]:][:part[1]] {
				t.Errorf("%d bytes from %d: got %.20q, error %v, want %.20q", part[1], part[0], p, err,
					content[part[0]:][:part[1]])
			}
		}
		for name, c := range map[string]struct{ at, from int64 }{"a part over the end": {at, int64(len(content))},
			"another member": {at + 1, 0}} {
			if err := r.ReadStored(0, c.at, c.from, make([]byte, 1)); !errors.Is(err, archive.ErrSourceChanged) {
				t.Errorf("%s: got error %v, want archive.ErrSourceChanged", name, err)
			}
		}
	}
	deflated := archivetest.WriteFile(t, "a.zip", zipOf(t, []archivetest.Member{{Name: "a/1.png", Data: content}}, zip.Deflate))
	r := archive.NewReader(open(t, deflated))
	defer r.Close()
	if err := r.ReadStored(0, 0, 0, make([]byte, 1)); !errors.Is(err, archive.ErrSourceChanged) {
		t.Errorf("a deflated member: got error %v, want archive.ErrSourceChanged", err)
	}
}

// ReadStored returns the error of a read that fails. A local header with the name of another member
// is damage.
func TestReadStoredReportsItsFaults(t *testing.T) {
	errDisk := errors.New("the disk has failed")
	content := archivetest.Image("content")
	data := zipOf(t, []archivetest.Member{{Name: "a/1.png", Data: content}}, zip.Store)
	file := archivetest.WriteFile(t, "a.zip", data)
	read := func(c archive.Config) error {
		a, err := archive.Open(t.Context(), file, c)
		if err != nil {
			return err
		}
		defer a.Close()
		r := archive.NewReader(a)
		defer r.Close()
		return r.ReadStored(0, 0, 2, make([]byte, 4))
	}
	for reads := 0; ; reads++ {
		left := reads
		err := read(archive.Config{OpenFile: func(path string) (archive.File, error) {
			f, err := archive.OpenFile(t.Context(), path, archive.Config{})
			return brokenFile{f, 64, &left, errDisk}, err
		}})
		if left >= 0 {
			if err != nil {
				t.Errorf("got error %v, want none", err)
			}
			break
		}
		if !errors.Is(err, errDisk) {
			t.Errorf("after %d reads: got error %v, want %v", reads, err, errDisk)
		}
	}
	data[30]++ // the name in the local header
	archivetest.Rewrite(t, file, data)
	if err := read(archive.Config{}); archive.MemberDamage(err) == nil {
		t.Errorf("a local header of another name: got error %v, want damage", err)
	}
}

// recordedFile records the memory that each ReadAt fills.
type recordedFile struct {
	archive.File
	reads *[][]byte
}

func (f recordedFile) ReadAt(p []byte, at int64) (int, error) {
	*f.reads = append(*f.reads, p)
	return f.File.ReadAt(p, at)
}

// A large stored member of a local file is read into the caller's memory. A small one is read
// together with its local header.
func TestLargeStoredMembersAreReadWithoutACopy(t *testing.T) {
	for _, c := range []struct{ size, extra, reads int }{
		{archive.MinUncopied - 1, 0, 1}, {archive.MinUncopied - 1, 4096, 2},
		{archive.MinUncopied, 0, 2}, {archive.MinUncopied, 4096, 2}, {3 * archive.MinUncopied, 0, 2},
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
		r := archive.NewReader(a)
		p := make([]byte, c.size)
		for range 2 { // the first call also reads the directory
			reads = nil
			if err := r.ReadZipped(0, 0, p); err != nil || string(p) != content {
				t.Errorf("%d bytes, %d more in the header: got %.20q, error %v, want %.20q", c.size, c.extra, p, err, content)
			}
		}
		inPlace := len(reads) > 0 && &reads[len(reads)-1][0] == &p[0]
		if want := c.size >= archive.MinUncopied; len(reads) != c.reads || inPlace != want {
			t.Errorf("%d bytes, %d more in the header: got %d reads, in place %t, want %d, %t", c.size, c.extra, len(reads),
				inPlace, c.reads, want)
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

// Deflated returns where the compressed bytes of the last member are. It returns nothing for a
// stored member, and after an error.
func TestDeflatedBytesInflateToTheMember(t *testing.T) {
	members, files := smallArchives(t)
	for format, deflated := range map[string]bool{"stored zip": false, "deflated zip": true} {
		file := archivetest.WriteFile(t, "a.zip", files[format])
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		r := archive.NewReader(open(t, file))
		defer r.Close()
		for i, m := range found.list {
			if err := r.ReadZipped(0, m.Offset, make([]byte, m.Size)); err != nil {
				t.Fatal(err)
			}
			begin, end := r.Deflated()
			if !deflated {
				if begin != end {
					t.Errorf("%s: got the bytes %d to %d of a stored member, want none", format, begin, end)
				}
				continue
			}
			got, err := io.ReadAll(flate.NewReader(bytes.NewReader(files[format][begin:end])))
			if err != nil || string(got) != members[i].Data {
				t.Errorf("%s: bytes %d to %d inflate to %q, error %v, want %q", format, begin, end, got, err, members[i].Data)
			}
			if err := r.ReadZipped(0, m.Offset, make([]byte, m.Size+1)); err == nil {
				t.Errorf("%s: got no error for another size, want one", format)
			}
			if begin, end := r.Deflated(); begin != end {
				t.Errorf("%s: got the bytes %d to %d after an error, want none", format, begin, end)
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
