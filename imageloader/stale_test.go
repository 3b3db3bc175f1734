package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
	"github.com/torchstream/torchstream/imageloader/internal/order"
)

// indexed writes an archive and its index, and returns what an epoch has.
func indexed(t *testing.T, name string, data []byte, o Options) (path, want string) {
	t.Helper()
	path = archivetest.WriteFile(t, name, data)
	l, err := open(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	batches, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(path + indextest.Suffix); err != nil {
		t.Fatal(err)
	}
	return path, digest(batches)
}

// TestCutArchive: an archive that was cut after it was indexed is an error that names it, at Open
// or in the epoch, with the old time and with a new one; the samples of the index never come from
// what is left.
func TestCutArchive(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	classes := []string{"class0", "class1", "class2", "class3", "class4"}
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data), "a.tar.zst": archivetest.Zstd(t, data)} {
		for _, part := range []int{1, 4, 7} { // of 8
			for _, given := range [][]string{nil, classes} {
				archivetest.Within(t)
				archivetest.NoLeaks(t)
				o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000, BatchSize: 4}
				path, _ := indexed(t, name, packed, o)
				archivetest.Rewrite(t, path, packed[:len(packed)*part/8])
				o.Classes = given
				l, err := open(t.Context(), path, o, openFile, fakeCodec{})
				if err == nil {
					_, err = collect(t, l, 0, 2)
					l.Close()
				}
				var damage *ArchiveError
				if !errors.As(err, &damage) || damage.File != path {
					t.Errorf("%s cut to %d/8, classes %v: error %v", name, part, given, err)
				}
			}
		}
	}
}

// TestCutIndex: an index of any length that it should not have is made anew, as long as its magic
// shows that it is one.
func TestCutIndex(t *testing.T) {
	data := archivetest.Images(t, 30, nil)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		o := Options{Transform: Eval(4, 4), ShuffleBytes: 1000, BatchSize: 4}
		path, want := indexed(t, name, packed, o)
		index, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		for _, cut := range []int{0, 8, 31, 32, 33, 100, 300, len(index) / 2, len(index) - 1, len(index) + 1} {
			changed := append(bytes.Clone(index), 0)[:cut]
			if err := os.WriteFile(path+indextest.Suffix, changed, 0o644); err != nil {
				t.Fatal(err)
			}
			l, err := open(t.Context(), path, o, openFile, fakeCodec{})
			if err != nil {
				t.Fatal(err)
			}
			batches, err := collect(t, l, 0, 2)
			l.Close()
			if err != nil || digest(batches) != want {
				t.Errorf("%s, index of %d of %d bytes: error %v, or another epoch", name, cut, len(index), err)
			}
			if again, err := os.ReadFile(path + indextest.Suffix); err != nil || !bytes.Equal(again, index) {
				t.Errorf("%s, index of %d of %d bytes: it is not made anew (error %v)", name, cut, len(index), err)
			}
		}
	}
}

// TestOtherTar: a tar that has the size and the time of the one that was indexed, but other
// members, or the same in another order, is an error that names the sample.
func TestOtherTar(t *testing.T) {
	members := func(order ...int) []byte {
		var list []archivetest.Member
		for _, i := range order {
			list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i), Data: archivetest.Image(fmt.Sprint("content ", i))})
		}
		return archivetest.Tar(t, list...)
	}
	for what, c := range map[string]struct {
		data   []byte
		member string // "": none is another one
	}{
		"the same":         {members(0, 1, 2, 3), ""},
		"in another order": {members(0, 2, 1, 3), "a/1.png"},
		"another member":   {members(0, 1, 2, 4), "a/3.png"},
		"nothing":          {make([]byte, len(members(0, 1, 2, 3))), "a/0.png"},
	} {
		o := Options{Transform: Eval(4, 4), BatchSize: 1}
		path, _ := indexed(t, "a.tar", members(0, 1, 2, 3), o)
		archivetest.Rewrite(t, path, c.data)
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		_, err = collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if c.member == "" && err != nil || c.member != "" && (!errors.As(err, &damage) || damage.File != path || damage.Member != c.member || !errors.Is(err, index.ErrStale)) {
			t.Errorf("%s: error %v", what, err)
		}
	}
}

// TestForgedTar: an index of a tar that has a sample where another one of its size lies, or in the
// middle of one, is an error that names the sample.
func TestForgedTar(t *testing.T) {
	var list []archivetest.Member
	for i := range 4 {
		list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.png", i), Data: archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000))})
	}
	o := Options{Transform: Eval(4, 4), BatchSize: 1}
	for what, change := range map[string]func(second, third []byte){
		"another sample's place": func(second, third []byte) { copy(second[:8], third[:8]) },
		"a sample's middle":      func(second, _ []byte) { second[1] += 2 },
		"before the first":       func(second, _ []byte) { clear(second[:8]) },
		"another size":           func(second, third []byte) { copy(second[:8], third[:8]); second[8]-- },
	} {
		path, _ := indexed(t, "a.tar", archivetest.Tar(t, list...), o)
		index, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		index = indextest.Forge(t, index, indextest.Members, func(b []byte) { change(b[indextest.MemberBytes:], b[2*indextest.MemberBytes:]) })
		if err := os.WriteFile(path+indextest.Suffix, index, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if !errors.As(err, &damage) || damage.Member != "a/1.png" || len(batches) != 1 {
			t.Errorf("%s: %d batches, error %v", what, len(batches), err)
		}
	}
}

// openSources counts the sources that are open.
type openSources struct {
	mu        sync.Mutex
	now, most int
}

type openSource struct {
	archive.File
	of *openSources
}

func (s *openSource) Close() error {
	s.of.mu.Lock()
	s.of.now--
	s.of.mu.Unlock()
	return s.File.Close()
}

func (o *openSources) open(path string) (archive.File, error) {
	f, err := openFile(path)
	if err != nil {
		return nil, err
	}
	o.mu.Lock()
	defer o.mu.Unlock()
	o.now++
	o.most = max(o.most, o.now)
	return &openSource{f, o}, nil
}

// TestShardFiles: an archive of many shards has few of them open at a time, in the first pass and
// in any order, and none in the end.
func TestShardFiles(t *testing.T) {
	const shards = 300
	dir := t.TempDir()
	var want []string
	for i := range shards {
		var list []archivetest.Member
		for k := range 3 {
			name := fmt.Sprintf("c%d/%d-%d.png", k, i, k)
			list, want = append(list, archivetest.Member{Name: name, Data: archivetest.Image(name + strings.Repeat("!", 2000))}), append(want, name)
		}
		data := archivetest.Tar(t, list...)
		if i%2 == 1 {
			data = archivetest.Gzip(t, data)
		}
		if err := os.WriteFile(filepath.Join(dir, fmt.Sprintf("s-%03d.tar", i)), data, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	archivetest.NoLeaks(t)
	for _, what := range []string{"first pass", "by index"} {
		files := &openSources{}
		l, err := open(t.Context(), filepath.Join(dir, "s-{000..299}.tar"), Options{Transform: Eval(4, 4), Shuffle: true, ShuffleBytes: 1, Workers: 2}, files.open, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if what == "by index" && l.opened != order.Permuted {
			t.Errorf("the order is %s", l.opened)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		if got := names(batches); err != nil || len(got) != len(want) {
			t.Errorf("%s: %d samples, error %v", what, len(got), err)
		}
		// 32 shards that are not read at the moment, those that are, and two in passing.
		if most := 32 + readers + 2; files.most > most || files.now != 0 {
			t.Errorf("%s: %d files were open at a time (of %d that may be), %d still are", what, files.most, most, files.now)
		}
	}
}

// TestRestoreClosed: a closed loader does not read an archive for a state.
func TestRestoreClosed(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 20, nil)))
	o := Options{Transform: Eval(4, 4), BatchSize: 4}
	l := openFake(t, path, o)
	_, after := states(t, l, 0, 2)
	o.Classes = l.Classes()
	l = openFake(t, path, o) // it has no index
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := l.Restore(t.Context(), after[0]); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v", err)
	}
	if err := l.Restore(t.Context()); !errors.Is(err, ErrClosed) {
		t.Errorf("error %v", err)
	}
	if l.index.Load() != nil {
		t.Error("it has read the archive")
	}
}
