package archive_test

import (
	"bytes"
	"errors"
	"hash/crc32"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// sources returns the paths of archives of the same members, in every format and in shards, by
// format.
func sources(t *testing.T, members []archivetest.Member) map[string]string {
	t.Helper()
	// In the order of a directory.
	slices.SortFunc(members, func(a, b archivetest.Member) int { return strings.Compare(a.Name, b.Name) })
	data, half := archivetest.Tar(t, members...), len(members)/2
	dir := t.TempDir()
	for name, data := range map[string][]byte{
		"a.tar":   data,
		"a.tgz":   archivetest.GzipSplit(t, data, 100_000, 6),
		"a.zst":   archivetest.Zstd(t, data),
		"s-0.tgz": archivetest.Gzip(t, archivetest.Tar(t, members[:half]...)),
		"s-1.tar": archivetest.Tar(t, members[half:]...),
	} {
		if err := os.WriteFile(filepath.Join(dir, name), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return map[string]string{
		archive.Tar:     filepath.Join(dir, "a.tar"),
		archive.TarGzip: filepath.Join(dir, "a.tgz"),
		archive.TarZstd: filepath.Join(dir, "a.zst"),
		archive.Tree:    archivetest.Extract(t, members),
		"shards":        filepath.Join(dir, "s-{0.tgz,1.tar}"),
	}
}

func open(t *testing.T, path string) *archive.Archive {
	t.Helper()
	a, err := archive.Open(t.Context(), path, archive.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := a.Close(); err != nil {
			t.Error(err)
		}
	})
	return a
}

// TestWalkFindsEveryMember: a walk finds every member of an archive of any kind. The test reads the
// first bytes of each. It then reads the content of some members, the checksum of others, and skips
// the rest.
func TestWalkFindsEveryMember(t *testing.T) {
	members := archivetest.Photos(12)
	for kind, path := range sources(t, members) {
		t.Run(kind, func(t *testing.T) {
			a := open(t, path)
			i := 0
			for m, err := range a.Members() {
				if err != nil {
					t.Fatal(err)
				}
				want := members[i]
				if m.Name != want.Name || m.Size != int64(len(want.Data)) || m.Kind != archive.Regular {
					t.Fatalf("member %d is %+v, want %s of %d bytes", i, m, want.Name, len(want.Data))
				}
				magic, err := a.Magic()
				if err != nil || string(magic) != want.Data[:min(16, len(want.Data))] {
					t.Errorf("%s begins with %q, error %v", m.Name, magic, err)
				}
				if i%2 == 0 {
					if first, err := a.Peek(5000); err != nil ||
						string(first) != want.Data[:min(5000, len(want.Data))] {
						t.Errorf("%s: error %v, or another beginning", m.Name, err)
					}
				}
				switch i % 3 {
				case 0:
					b := make([]byte, m.Size)
					if err := a.Content(b); err != nil || string(b) != want.Data {
						t.Errorf("%s: error %v, %s; want the member's bytes", m.Name, err,
							archivetest.Difference(b, []byte(want.Data)))
					}
				case 1:
					if crc, err := a.Checksum(); err != nil || crc != crc32.ChecksumIEEE([]byte(want.Data)) {
						t.Errorf("%s: error %v, or another checksum", m.Name, err)
					}
				}
				i++
			}
			if i != len(members) || a.Position() != i {
				t.Errorf("%d members, position %d, want %d", i, a.Position(), len(members))
			}
			if p := a.Progress(); p.Members != i || kind != archive.Tree && p.Bytes != p.TotalBytes {
				t.Errorf("progress at the end: %+v", p)
			}
		})
	}
}

// TestMembersAreReadAgainInAnyOrder: members are read again at the places that a walk has found, in
// their order and in any other order. In a gzip shard each is read from the last checkpoint before
// it.
func TestMembersAreReadAgainInAnyOrder(t *testing.T) {
	members := archivetest.Photos(12)
	for kind, path := range sources(t, members) {
		if kind == archive.Tree {
			continue
		}
		t.Run(kind, func(t *testing.T) {
			a := open(t, path)
			marks := make([][]archive.Mark, len(a.Shards()))
			var windows bytes.Buffer
			err := a.Checkpoints(func(shard int, c archive.Checkpoint) {
				mark := archive.Mark{Bit: c.Bit, Output: c.Output, At: int64(windows.Len()), Size: int32(len(c.Window))}
				marks[shard] = append(marks[shard], mark)
				windows.Write(c.Window)
			})
			if err != nil {
				t.Fatal(err)
			}
			var found []archive.Member
			for m, err := range a.Members() {
				if err != nil {
					t.Fatal(err)
				}
				a.WantCheckpoint(&m)
				found = append(found, m)
			}
			again, err := a.Reopen()
			if err != nil {
				t.Fatal(err)
			}
			defer again.Close()
			for i := 1; i < len(found); i += 2 { // skips the other members
				b := make([]byte, found[i].Size)
				if _, err := again.ReadForward(i+1, &found[i], b); err != nil || string(b) != members[i].Data {
					t.Errorf("%s forward: error %v, or other bytes", found[i].Name, err)
				}
			}
			if err := again.ReadToEnd(); err != nil {
				t.Error(err)
			}
			r := archive.NewReader(again)
			defer r.Close()
			for i := len(found) - 1; i >= 0; i-- {
				m := found[i]
				b := make([]byte, m.Size)
				switch a.Shards()[m.Shard].Format {
				case archive.Tar:
					_, err = r.ReadAt(m.Shard, b, m.Offset)
				case archive.TarGzip:
					k := len(marks[m.Shard])
					for marks[m.Shard][k-1].Output > m.Offset {
						k--
					}
					from := &marks[m.Shard][k-1]
					err = r.Inflate(m.Shard, bytes.NewReader(windows.Bytes()), from, m.Offset,
						a.Shards()[m.Shard].Info.Size(), nil, b)
				default:
					continue
				}
				if err != nil || string(b) != members[i].Data {
					t.Errorf("%s at random: error %v, or other bytes", m.Name, err)
				}
			}
		})
	}
}

// TestCutMemberIsNamed: if an archive is cut off in the middle of a member, the walk ends with an
// error that names the file and the member.
func TestCutMemberIsNamed(t *testing.T) {
	data := archivetest.Numbered(t, 0, 1, 2)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data[:4000]))
	a := open(t, path)
	var err error
	for m, e := range a.Members() {
		if err = e; err == nil {
			_, err = a.Checksum()
		}
		if err != nil && e == nil && m.Name != "a/1.png" {
			t.Errorf("%s fails: %v", m.Name, err)
		}
	}
	var damage *archive.Error
	if !errors.As(err, &damage) || damage.File != path || damage.Member != "a/1.png" ||
		damage.Position != 2 || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("error %v, want an error of type *archive.Error, damage.File = %v, damage.Member = %q, "+
			"damage.Position = 2, the error %v", err, path, "a/1.png", io.ErrUnexpectedEOF)
	}
}
