package archive_test

import (
	"archive/zip"
	"bytes"
	"compress/flate"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"path"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/internal/parquettest"
)

// smallArchives returns archives of the same members by the name of their format.
func smallArchives(t *testing.T) (members []archivetest.Member, files map[string][]byte) {
	t.Helper()
	for i := range 4 {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("c%d/%d.png", i/2, i),
			Data: archivetest.Image(strings.Repeat(fmt.Sprint(i, " "), 10+50*i))})
	}
	var rows []parquettest.Row
	for i, m := range members {
		rows = append(rows, parquettest.Row{Path: m.Name, Image: m.Data, Label: i / 2})
	}
	layout := parquettest.Layout{Classes: []string{"c0", "c1"}, Group: 2}
	compressed := layout
	compressed.Snappy = true
	tar := archivetest.Tar(t, members...)
	return members, map[string][]byte{
		"tar":                 tar,
		"gzip":                archivetest.Gzip(t, tar),
		"gzip in members":     gzipMembers(t, tar, 700),
		"zstd":                archivetest.Zstd(t, tar),
		"stored zip":          zipOf(t, members, zip.Store),
		"deflated zip":        zipOf(t, members, zip.Deflate),
		"Parquet":             parquettest.File(t, rows, layout),
		"Parquet with Snappy": parquettest.File(t, rows, compressed),
	}
}

func zipOf(t *testing.T, members []archivetest.Member, method uint16) []byte {
	t.Helper()
	var b bytes.Buffer
	w := zip.NewWriter(&b)
	for _, m := range members {
		to, err := w.CreateHeader(&zip.FileHeader{Name: m.Name, Method: method})
		if err == nil {
			_, err = io.WriteString(to, m.Data)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// gzipMembers compresses data into several gzip members. Each member's header has another set of
// the optional fields of RFC 1952.
func gzipMembers(t *testing.T, data []byte, every int) (file []byte) {
	t.Helper()
	for flags := byte(0); len(data) > 0; flags = (flags + 2) % 32 {
		part := data[:min(every, len(data))]
		data = data[len(part):]
		header := []byte{0x1f, 0x8b, 8, flags, 0, 0, 0, 0, 0, 255}
		for _, field := range []struct {
			flag byte
			text string
		}{{4, "\x05\x00extra"}, {8, "name\x00"}, {16, "comment\x00"}} {
			if flags&field.flag != 0 {
				header = append(header, field.text...)
			}
		}
		if flags&2 != 0 {
			header = binary.LittleEndian.AppendUint16(header, uint16(crc32.ChecksumIEEE(header)))
		}
		var packed bytes.Buffer
		w, err := flate.NewWriter(&packed, flate.BestCompression)
		if err == nil {
			_, err = w.Write(part)
		}
		if err := errors.Join(err, w.Close()); err != nil {
			t.Fatal(err)
		}
		file = append(append(file, header...), packed.Bytes()...)
		file = binary.LittleEndian.AppendUint32(file, crc32.ChecksumIEEE(part))
		file = binary.LittleEndian.AppendUint32(file, uint32(len(part)))
	}
	return file
}

// place is where a walk has found a member.
type place struct {
	archive.Member
	from archive.Mark // in a gzip file
}

// places has the members of an archive, and the windows of its marks.
type places struct {
	list    []place
	windows []byte
}

// walk reads all members, and returns where they are.
func walk(ctx context.Context, file string, c archive.Config) (contents []string, p places, err error) {
	a, err := archive.Open(ctx, file, c)
	if err != nil {
		return nil, p, err
	}
	defer a.Close()
	var marks []archive.Mark
	if err := a.Checkpoints(func(_ int, c archive.Checkpoint) {
		marks = append(marks, archive.Mark{Bit: c.Bit, Output: c.Output, At: int64(len(p.windows)), Size: int32(len(c.Window))})
		p.windows = append(p.windows, c.Window...)
	}); err != nil {
		return nil, p, err
	}
	for m, err := range a.Members() {
		if err != nil {
			return contents, p, err
		}
		b := make([]byte, m.Size)
		if err := a.Content(b); err != nil {
			return contents, p, err
		}
		a.WantCheckpoint(&m)
		contents, p.list = append(contents, string(b)), append(p.list, place{Member: m})
	}
	for i := range p.list {
		m := &p.list[i]
		for _, mark := range marks {
			if a.InParquet() && mark.Output <= m.Offset {
				m.Page, m.from = mark.Bit>>3, mark
			} else if mark.Output <= m.Offset {
				m.from = mark
			}
		}
		if m.Page > 0 && !m.Stored {
			m.Offset -= m.from.Output
		}
	}
	return contents, p, nil
}

// forward reads the contents of every second member, skips the others, and reads to the end of the
// archive.
func (p places) forward(ctx context.Context, file string, c archive.Config) (contents []string, err error) {
	a, err := archive.Open(ctx, file, c)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	for i := 1; i < len(p.list); i += 2 {
		b := make([]byte, p.list[i].Size)
		if _, err := a.ReadForward(i+1, &p.list[i].Member, b); err != nil {
			return contents, err
		}
		contents = append(contents, string(b))
	}
	return contents, a.ReadToEnd()
}

// random reads the members from the last to the first. A Reader cannot read members
// of a zstd archive at random, so these have no content.
func (p places) random(ctx context.Context, file string, c archive.Config) (contents []string, err error) {
	a, err := archive.Open(ctx, file, c)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	return p.randomOf(a)
}

// randomOf implements random for an open archive.
func (p places) randomOf(a *archive.Archive) (contents []string, err error) {
	r := archive.NewReader(a)
	defer r.Close()
	format, size := formatOf(a.Path()), a.Info().Size()
	for _, m := range slices.Backward(p.list) {
		b := make([]byte, m.Size)
		switch format {
		case "zip":
			err = r.ReadZipped(0, m.Offset, b)
		case "parquet":
			err = r.ReadRow(0, m.Page, m.Offset, b)
		case "tgz":
			err = r.Inflate(0, bytes.NewReader(p.windows), &m.from, m.Offset, size, nil, b)
		case "tar":
			_, err = r.ReadAt(0, b, m.Offset)
		}
		if err != nil {
			return contents, err
		}
		contents = append(contents, string(b))
	}
	slices.Reverse(contents)
	return contents, nil
}

func formatOf(file string) string { return strings.TrimPrefix(path.Ext(file), ".") }

// nameOf returns a file name with the usual ending of a format.
func nameOf(format string) string {
	switch {
	case strings.HasPrefix(format, "gzip"):
		return "a.tgz"
	case strings.HasSuffix(format, "zip"):
		return "a.zip"
	case strings.HasPrefix(format, "Parquet"):
		return "a.parquet"
	case format == "zstd":
		return "a.zst"
	}
	return "a.tar"
}

// brokenFile is a file that gives at most step bytes a Read. After the given number of reads, each
// read fails.
type brokenFile struct {
	archive.File
	step int
	left *int
	err  error
}

func (f brokenFile) fails() bool {
	*f.left--
	return *f.left < 0
}

func (f brokenFile) Read(p []byte) (int, error) {
	if f.fails() {
		return 0, f.err
	}
	return f.File.Read(p[:min(len(p), f.step)])
}

func (f brokenFile) ReadAt(p []byte, at int64) (int, error) {
	if f.fails() {
		return 0, f.err
	}
	return f.File.ReadAt(p, at)
}

// If a read fails, anywhere in the archive, whatever needed the read returns its error. A failed
// read is never taken for damage or for the end of the archive.
func TestEveryFailedReadIsReported(t *testing.T) {
	errDisk := errors.New("the disk has failed")
	members, files := smallArchives(t)
	var want []string
	for _, m := range members {
		want = append(want, m.Data)
	}
	for format, data := range files {
		file := archivetest.WriteFile(t, nameOf(format), data)
		got, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s: got contents %q, error %v, want %q", format, got, err, want)
			continue
		}
		for name, c := range map[string]struct {
			read func(c archive.Config) ([]string, error)
			want []string
		}{
			"a walk": {func(c archive.Config) ([]string, error) {
				got, _, err := walk(t.Context(), file, c)
				return got, err
			}, want},
			"reading forward": {func(c archive.Config) ([]string, error) { return found.forward(t.Context(), file, c) },
				[]string{want[1], want[3]}},
			"reading in any order": {func(c archive.Config) ([]string, error) { return found.random(t.Context(), file, c) },
				want},
		} {
			if name == "reading in any order" && format == "zstd" {
				continue
			}
			for reads := 0; ; reads++ {
				left := reads
				got, err := c.read(archive.Config{OpenFile: func(path string) (archive.File, error) {
					f, err := archive.OpenFile(t.Context(), path, archive.Config{})
					return brokenFile{f, 64, &left, errDisk}, err
				}})
				if left >= 0 { // no read has failed
					if err != nil || !slices.Equal(got, c.want) {
						t.Errorf("%s of %s: got contents %q, error %v, want %q", name, format, got, err, c.want)
					}
					break
				}
				if !errors.Is(err, errDisk) || archive.MemberDamage(err) != nil {
					t.Errorf("%s of %s, after %d reads: got error %v, want %v", name, format, reads, err, errDisk)
				}
			}
		}
	}
}

// shortFile is a file that has become shorter since Stat.
type shortFile struct {
	archive.File
	size int64
}

func (f shortFile) Read(p []byte) (int, error) {
	at, err := f.Seek(0, io.SeekCurrent)
	if err != nil {
		return 0, err
	}
	if at >= f.size {
		return 0, io.EOF
	}
	return f.File.Read(p[:min(int64(len(p)), f.size-at)])
}

func (f shortFile) ReadAt(p []byte, at int64) (int, error) {
	n := max(0, min(int64(len(p)), f.size-at))
	n2, err := f.File.ReadAt(p[:n], at)
	if err == nil && n2 < len(p) {
		err = io.EOF
	}
	return n2, err
}

// If a file ends early, reading the member that is cut off is an error, however it is read. No
// member gets other bytes.
func TestFileThatEndsEarlyGivesNoWrongBytes(t *testing.T) {
	_, files := smallArchives(t)
	for format, data := range files {
		file := archivetest.WriteFile(t, nameOf(format), data)
		want, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		for size := int64(1); size < int64(len(data)); size += 1 + size/40 {
			c := archive.Config{OpenFile: func(path string) (archive.File, error) {
				f, err := archive.OpenFile(t.Context(), path, archive.Config{})
				return shortFile{f, size}, err
			}}
			got, _, err := walk(t.Context(), file, c)
			checkShort(t, fmt.Sprintf("a walk of %s with %d bytes", format, size), got, want, err)
			got, err = found.forward(t.Context(), file, c)
			checkShort(t, fmt.Sprintf("reading forward in %s with %d bytes", format, size), got,
				[]string{want[1], want[3]}, err)
			if format != "zstd" {
				got, err = found.random(t.Context(), file, c)
				slices.Reverse(got)
				reversed := slices.Clone(want)
				slices.Reverse(reversed)
				checkShort(t, fmt.Sprintf("reading %s with %d bytes in any order", format, size), got, reversed, err)
			}
		}
	}
}

// checkShort checks that got is a prefix of the wanted contents, or all of them if there is no
// error.
func checkShort(t *testing.T, name string, got, want []string, err error) {
	t.Helper()
	if len(got) > len(want) || !slices.Equal(got, want[:len(got)]) || err == nil && len(got) != len(want) {
		t.Errorf("%s: got contents %q, error %v, want the first of %q", name, got, err, want)
	}
	if err == io.EOF && !strings.HasPrefix(name, "reading tar") { // Reader.ReadAt is an io.ReaderAt
		t.Errorf("%s: got io.EOF, want an error that says more", name)
	}
}

// A damaged zip gives no wrong bytes either. A walk and a Reader find the same damage, whether one
// member or the whole zip is damaged.
func TestDamagedZipIsDamagedForEveryReader(t *testing.T) {
	members := []archivetest.Member{{Name: "a/1.png", Data: archivetest.Image("one")},
		{Name: "a/2.png", Data: archivetest.Image(strings.Repeat("two ", 20))}}
	large := []archivetest.Member{members[0], // a Reader has no copy of the other
		{Name: "a/2.png", Data: archivetest.Image(strings.Repeat("two ", archive.MinUncopied/4))}}
	const structures = 300 // bytes at either end of a zip, without most of the large member's content
	step := 1
	if testing.Short() {
		step = 7
	}
	for format, data := range map[string][]byte{"a stored zip": zipOf(t, members, zip.Store),
		"a deflated zip": zipOf(t, members, zip.Deflate), "a stored zip of a large member": zipOf(t, large, zip.Store)} {
		file := archivetest.WriteFile(t, "a.zip", data)
		want, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		for at := 4; at < len(data); at += step { // with other first four bytes the file would not be a zip
			if at > structures && at < len(data)-structures {
				at = min(at+500, len(data)-structures)
			}
			for _, bits := range []byte{1, 0xff} {
				changed := bytes.Clone(data)
				changed[at] ^= bits
				archivetest.Rewrite(t, file, changed)
				what := fmt.Sprintf("%s with byte %d changed from %#x to %#x", format, at, data[at], changed[at])
				byWalk, whole := zipByWalk(t, file)
				byReader := zipByReader(t, file, found.list)
				for i, m := range found.list {
					one, other := byWalk[m.Offset], byReader[i]
					switch {
					case whole != nil:
						if other.err == nil {
							t.Errorf("%s: a walk ends with %v, and a Reader reads member %d", what, whole, i)
						}
					case one.size != m.Size: // the directory has another member, or none to read
						continue
					case one.err == nil != (other.err == nil),
						(archive.MemberDamage(one.err) == nil) != (archive.MemberDamage(other.err) == nil):
						t.Errorf("%s: a walk reads member %d with error %v, and a Reader with %v", what, i, one.err,
							other.err)
					}
					for _, r := range []zipResult{one, other} {
						if r.err == nil && r.size == m.Size && r.content != want[i] {
							t.Errorf("%s: got %q for member %d, want %q or an error", what, r.content, i, want[i])
						}
					}
				}
			}
		}
	}
}

// zipResult is the result of reading a member of a zip.
type zipResult struct {
	size    int64
	content string
	err     error
}

// zipByWalk returns the results of a walk by the members' offsets, or an error of the whole zip.
func zipByWalk(t *testing.T, file string) (results map[int64]zipResult, whole error) {
	t.Helper()
	a, err := archive.Open(t.Context(), file, archive.Config{})
	if err != nil {
		return nil, err
	}
	defer a.Close()
	results = map[int64]zipResult{}
	for m, err := range a.Members() {
		if err != nil {
			return nil, err
		}
		if m.Kind == archive.Regular {
			b := make([]byte, min(m.Size, 1<<20))
			err := a.Content(b)
			results[m.Offset] = zipResult{m.Size, string(b), err}
		}
	}
	return results, nil
}

// zipByReader returns the results of a Reader.
func zipByReader(t *testing.T, file string, list []place) []zipResult {
	t.Helper()
	results := make([]zipResult, len(list))
	a, err := archive.Open(t.Context(), file, archive.Config{})
	if err != nil {
		for i := range results {
			results[i].err = err
		}
		return results
	}
	defer a.Close()
	r := archive.NewReader(a)
	defer r.Close()
	for i, m := range list {
		b := make([]byte, m.Size)
		err := r.ReadZipped(0, m.Offset, b)
		results[i] = zipResult{m.Size, string(b), err}
	}
	return results
}

// Once its context has ended, an archive of any format reads nothing more.
func TestReadsStopWithTheContext(t *testing.T) {
	members, files := smallArchives(t)
	paths := map[string]string{"a directory": archivetest.Extract(t, members)}
	for format, data := range files {
		paths[format] = archivetest.WriteFile(t, nameOf(format), data)
	}
	for format, file := range paths {
		_, found, err := walk(t.Context(), file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		for after := range len(members) {
			ctx, cancel := context.WithCancel(t.Context())
			a, err := archive.Open(ctx, file, archive.Config{})
			if err != nil {
				t.Fatal(err)
			}
			count := 0
			for _, err = range a.Members() {
				if count++; count > after {
					cancel()
				}
			}
			if !errors.Is(err, archive.ErrStopped) || a.Position() != after+1 {
				t.Errorf("%s: got %d members, error %v, want archive.ErrStopped after %d", format, a.Position(), err,
					after+1)
			}
			if err := a.Close(); err != nil {
				t.Error(err)
			}
			cancel()
		}
		ctx, cancel := context.WithCancel(t.Context())
		a, err := archive.Open(ctx, file, archive.Config{})
		if err != nil {
			t.Fatal(err)
		}
		cancel()
		m := &found.list[0].Member
		if _, err := a.ReadForward(1, m, make([]byte, m.Size)); !errors.Is(err, archive.ErrStopped) {
			t.Errorf("%s: ReadForward got error %v, want archive.ErrStopped", format, err)
		}
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	}
}
