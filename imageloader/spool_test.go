package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// TestSpool: what is written can be read from anywhere, with a file, without, and when the file can't be made or written any more.
func TestSpool(t *testing.T) {
	noLeaks(t)
	rng := rand.New(rand.NewPCG(6, 6))
	dir := t.TempDir()
	for _, c := range []string{"memory", "file", "no file", "broken file"} {
		s := &spool{}
		tries := 0
		if c != "memory" {
			s.create = func() (*os.File, error) {
				tries++
				if c == "no file" {
					return nil, errChaos
				}
				return namelessFile(filepath.Join(dir, "x"))
			}
		}
		var want []byte
		for len(want) < 5*spoolBytes {
			b := make([]byte, rng.IntN(200_000))
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
			if rng.IntN(10) == 0 {
				b = b[:0]
			}
			want = append(want, b...)
			s.write(b)
			if c == "broken file" && len(want) > 3*spoolBytes && s.create != nil { // from now on nothing can be written, but read
				file, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", s.file.Fd()))
				if err != nil {
					t.Skip(err)
				}
				s.file.Close()
				s.file = file
			}
		}
		if s.size() != int64(len(want)) || (s.file != nil) != (strings.Contains(c, "file") && c != "no file") || tries > 1 {
			t.Errorf("%s: %d bytes of %d, file %v, %d tries", c, s.size(), len(want), s.file != nil, tries)
		}
		if c == "file" && (len(s.mem) > spoolBytes || cap(s.mem) > 2*spoolBytes) {
			t.Errorf("%d bytes are in memory", cap(s.mem))
		}
		for range 300 {
			at := rng.IntN(len(want) + 10)
			p := make([]byte, rng.IntN(2*spoolBytes))
			n, err := s.ReadAt(p, int64(at))
			at = min(at, len(want))
			if n != min(len(p), len(want)-at) || !bytes.Equal(p[:n], want[at:at+n]) || (n < len(p)) != (err == io.EOF) {
				t.Fatalf("%s: %d bytes at %d: %d, %v", c, len(p), at, n, err)
			}
		}
		var all bytes.Buffer
		if err := s.section(1).copyTo(&all); err != nil || !bytes.Equal(all.Bytes(), want) {
			t.Errorf("%s: error %v, or other bytes", c, err)
		}
		s.close()
		s.close()
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("%v are left, error %v", left, err)
	}
}

// TestItems: a section is read item by item; one that is cut, or has another checksum, is damaged.
func TestItems(t *testing.T) {
	var s spool
	for i := range 3*items + 5 {
		s.write([]byte{byte(i), byte(i >> 8), 7})
	}
	read := func(s stored) (n int, err error) {
		r := s.reader(3)
		for {
			b, err := r.next()
			if b == nil {
				return n, err
			}
			if !bytes.Equal(b, []byte{byte(n), byte(n >> 8), 7}) {
				t.Fatalf("item %d is %v", n, b)
			}
			n++
		}
	}
	good := s.section(3*items + 5)
	if n, err := read(good); n != 3*items+5 || err != nil {
		t.Errorf("%d items, error %v", n, err)
	}
	for what, change := range map[string]func(*stored){
		"checksum":   func(s *stored) { s.checked = true },
		"too long":   func(s *stored) { s.size++ },
		"not whole":  func(s *stored) { s.size-- },
		"impossible": func(s *stored) { s.at = strings.NewReader("") },
	} {
		bad := good
		change(&bad)
		if _, err := read(bad); !errors.Is(err, errIndexDamaged) {
			t.Errorf("%s: error %v", what, err)
		}
	}
}

// manyMembers is a tar of n members, made while it is read.
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
	copy(b[512:], fakeImage(fmt.Sprintf("%010d", i)))
	sum := 0
	for _, c := range b[:512] {
		sum += int(c)
	}
	copy(b[148:], fmt.Sprintf("%06o\x00 ", sum))
	return b
}

// TestIndexMemory: what an indexer has in memory does not depend on how many members there are.
func TestIndexMemory(t *testing.T) {
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
	a, err := openArchive(t.Context(), path, opener{openFile, nil})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	o, err := Options{}.withDefaults()
	if err != nil {
		t.Fatal(err)
	}
	l := &Loader{path: path, o: o, open: opener{openFile, nil}, codec: fakeCodec{}}
	x, err := l.collect(a, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer x.close()
	for name, s := range map[string]*spool{"entries": &x.entries, "names": &x.names, "heads": &x.heads} {
		if s.filed < spoolBytes || cap(s.mem) > 2*spoolBytes {
			t.Errorf("%s: %d bytes in a file, room for %d in memory", name, s.filed, cap(s.mem))
		}
	}
	if x.count != members || len(x.held) > 0 || len(x.dirList) != 10 {
		t.Errorf("%d members, %d contents, %d directories", x.count, len(x.held), len(x.dirList))
	}
	// And the index that is made of it is the one that the file gives.
	var made [2]*index
	if made[0], err = x.build(a, x.stored()); err != nil {
		t.Fatal(err)
	}
	s := l.writeIndex(a, x)
	if s == nil {
		t.Fatal("no index file")
	}
	if made[1], err = l.loadIndex(a); err != nil || made[1] == nil {
		t.Fatal(err)
	}
	defer made[1].close()
	if !slices.Equal(made[0].entries, made[1].entries) || made[0].names != made[1].names || made[0].work != made[1].work || len(made[1].entries) != members {
		t.Error("the index of the file is another one")
	}
	if list, err := os.ReadDir(filepath.Dir(path)); err != nil || len(list) != 2 {
		t.Errorf("%v, error %v", list, err)
	}
}

// TestLargeMember: in the middle of a member of any size, few checkpoints wait for the next one.
func TestLargeMember(t *testing.T) {
	read := int64(0)
	kept := 0
	k := newCheckpointer(func(checkpoint) { kept++ }, func() int64 { return read })
	for i := range int64(10_000) {
		k.note(checkpoint{output: i * inflateSpacing})
		if i == 3 {
			k.member(2*inflateSpacing + 5)
		}
		read = max(0, i*inflateSpacing-inflateRoom)
		if most := inflateRoom/inflateSpacing + 3; len(k.pending) > most {
			t.Fatalf("%d checkpoints wait, more than %d", len(k.pending), most)
		}
	}
	k.member(9_999*inflateSpacing - 1)
	k.finish()
	if kept != 3 {
		t.Errorf("%d checkpoints are kept, want the beginning's and two members'", kept)
	}
}
