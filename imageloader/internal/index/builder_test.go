package index

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// manyMembers is a tar of n members, which Read makes.
type manyMembers struct {
	n, at int
	rest  []byte
}

func (m *manyMembers) Read(p []byte) (int, error) {
	if len(m.rest) == 0 {
		if m.at == m.n {
			return 0, io.EOF
		}
		m.at++
		m.rest = manyMember(m.at)
	}
	n := copy(p, m.rest)
	m.rest = m.rest[n:]
	return n, nil
}

func manyMember(i int) []byte {
	b := make([]byte, 1024)
	copy(b, fmt.Sprintf("train/class%d/with a long name, as they are %09d.png", i%10, i))
	copy(b[100:], "0000644\x000000000\x000000000\x0000000000022\x0000000000000\x00        0")
	copy(b[257:], "ustar\x0000")
	copy(b[512:], archivetest.Image(fmt.Sprintf("%010d", i)))
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// TestBuilderMemoryIsBounded: the memory of a Builder does not depend on the number of members.
func TestBuilderMemoryIsBounded(t *testing.T) {
	const members = 120_000
	path := filepath.Join(t.TempDir(), "a.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(f, &manyMembers{n: members}); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	a := openArchive(t, path)
	defer a.Close()
	c := testConfig()
	c.HoldBytes = 0
	b, err := scan(a, c)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for name, s := range map[string]*spool{"members": &b.records.members, "names": &b.records.names,
		"headers": &b.records.headers} {
		if s.filed < spoolBytes || cap(s.mem) > 2*spoolBytes {
			t.Errorf("%s: %d bytes in a file, room for %d in memory, want s.filed at least %v, "+
				"cap(s.mem) at most %v", name, s.filed, cap(s.mem), spoolBytes, 2*spoolBytes)
		}
	}
	if b.records.count != members || len(b.held.contents) > 0 || len(b.dirs.names) != 10 {
		t.Errorf("%d members, %d contents, %d directories, want b.records.count = %v, "+
			"len(b.held.contents) = 0, len(b.dirs.names) = 10",
			b.records.count, len(b.held.contents), len(b.dirs.names), members)
	}
	// The index from the spools equals the index from the file.
	var made [2]*Index
	if made[0], err = b.index(a, []string{archive.Tar}, b.records.sections()); err != nil {
		t.Fatal(err)
	}
	s := b.writeFile(a)
	if s == nil {
		t.Fatal("writeFile() = nil, want an index file")
	}
	if made[1], err = Load(a, c); err != nil || made[1] == nil {
		t.Fatal(err)
	}
	defer made[1].Close()
	if !slices.Equal(made[0].samples, made[1].samples) || made[0].names != made[1].names ||
		made[0].work != made[1].work || len(made[1].samples) != members {
		t.Errorf("the index from the file: %d samples, %d bytes of names, work %v, want %d, %d, %v "+
			"and equal samples",
			len(made[1].samples), len(made[1].names), made[1].work, members, len(made[0].names), made[0].work)
	}
	if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 2 {
		t.Errorf("%v, error %v, want no error, len(list) = 2", list, err)
	}
}

// Loading an index allocates the samples together, not one by one.
func TestLoadAllocatesNothingForASample(t *testing.T) {
	const members = 10_000
	path := filepath.Join(t.TempDir(), "a.tar")
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = io.Copy(f, &manyMembers{n: members})
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
	a := openArchive(t, path)
	defer a.Close()
	c := testConfig()
	c.HoldBytes = 0
	b, err := scan(a, c)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	if s := b.writeFile(a); s == nil {
		t.Fatal("no index file")
	}
	allocations := testing.AllocsPerRun(1, func() {
		x, err := Load(a, c)
		if err != nil || x == nil || x.Len() != members {
			t.Fatalf("got %v, %v; want an index of %d samples", x, err, members)
		}
		x.Close()
	})
	if allocations > members/10 {
		t.Errorf("got %.0f allocations for %d samples, want at most %d", allocations, members, members/10)
	}
}

// TestLabelMemoryIsBounded: the names of directories, or the labels of WebDataset, stay in memory,
// so their total size is bounded.
func TestLabelMemoryIsBounded(t *testing.T) {
	b, err := NewBuilder("a.tar", testConfig())
	if err != nil {
		t.Fatal(err)
	}
	b.dirs.bytes = maxDirBytes - 10
	if _, err := b.dirs.number("label1"); err != nil {
		t.Error(err)
	}
	if _, err := b.dirs.number("label2"); err == nil || !strings.Contains(err.Error(), "a.tar: more than 128 MB") {
		t.Errorf("error %v, want an error with %q", err, "a.tar: more than 128 MB")
	}
	if _, err := b.dirs.number("label1"); err != nil {
		t.Error(err)
	}
}
