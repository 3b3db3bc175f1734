package index

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestEntryBlobsAreKept: a run finds the blobs of entry points that earlier runs have kept, even
// with other Options.Classes.
func TestEntryBlobsAreKept(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, archivetest.Photos(30)...)))
	c := testConfig()
	// all together more than a spool's memory
	blob := func(x *Index, i int) []byte { return bytes.Repeat([]byte(x.Name(i)+" entries "), 4000) }
	keep := func(from, to int, c Config) {
		t.Helper()
		x := open(t, path, c)
		var all sync.WaitGroup
		for i := from; i < to; i++ {
			all.Go(func() { x.KeepEntryPoints(i, blob(x, i)) })
		}
		all.Wait()
		for i := range to {
			if got := x.EntryPoints(i, nil); !bytes.Equal(got, blob(x, i)) {
				t.Errorf("sample %d of %d to %d: %d other bytes", i, from, to, len(got))
			}
		}
		if to < 30 && len(x.EntryPoints(to, nil)) > 0 {
			t.Errorf("sample %d has %d bytes", to, len(x.EntryPoints(to, nil)))
		}
		closeIndex(t, x)
		closeIndex(t, x)
	}
	keep(0, 10, c)
	keep(10, 20, c)
	keep(20, 20, c)
	c.Classes = []string{"class2", "class1", "class0"}
	keep(20, 30, c)
	if left, err := filepath.Glob(path + "*.tmp"); err != nil || len(left) > 0 {
		t.Errorf("%v are left, error %v, want no error, len(left) = 0", left, err)
	}
}

// TestIndexIsAsPrivateAsTheArchive: an index holds names and bytes of its archive, so it is as
// private as the archive.
func TestIndexIsAsPrivateAsTheArchive(t *testing.T) {
	for _, mode := range []os.FileMode{0o600, 0o640, 0o644, 0o666} {
		path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 6, nil)))
		if err := os.Chmod(path, mode); err != nil {
			t.Fatal(err)
		}
		x := open(t, path, testConfig())
		check := func(when string) {
			t.Helper()
			info, err := os.Stat(path + sidecarSuffix)
			if err != nil {
				t.Fatal(err)
			}
			if got, want := info.Mode(), mode&0o644; got != want {
				t.Errorf("%s: the index of an archive with mode %v has %v, want %v", when, mode, got, want)
			}
		}
		check("made")
		x.KeepEntryPoints(0, []byte("blob"))
		closeIndex(t, x)
		check("saved again")
	}
}

// TestImpossibleSizesAreRefused: impossible sizes of an index's sections for its archive are found
// before memory of these sizes is allocated.
func TestImpossibleSizesAreRefused(t *testing.T) {
	path := indexed(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 20, nil)))
	for what, c := range map[string]struct {
		kind uint32
		size uint64
		item uint64 // 0: the count stays
		want error
	}{
		"shards":               {sectionShards, 1 << 40, 0, errIndexStale},
		"directories":          {sectionDirs, 1 << 40, 0, errIndexDamaged},
		"many directories":     {sectionDirs, 1 << 40, 4, errIndexDamaged},
		"counts":               {sectionCounts, 1 << 40, 0, errIndexDamaged},
		"names":                {sectionNames, 1<<32 + 10, 1, errIndexDamaged},
		"names of few entries": {sectionNames, 20*archive.MaxNameBytes + 1, 1, errIndexDamaged},
		"entries":              {sectionMembers, archive.MaxMembers * memberBytes, memberBytes, errIndexDamaged},
		"headers":              {sectionHeaders, archive.MaxMembers * headerBytes, headerBytes, errIndexDamaged},
		"checkpoints":          {sectionCheckpoints, 1 << 40, checkpointBytes, errIndexDamaged},
		"unchanged":            {sectionWindows, 0, 0, nil},
	} {
		a := openArchive(t, path)
		s, err := openSidecar(path + sidecarSuffix)
		if err != nil {
			t.Fatal(err)
		}
		p := s.places[c.kind]
		if c.size > 0 {
			p.size = c.size
		}
		if c.item > 0 {
			p.count = c.size / c.item
		}
		s.places[c.kind] = p
		b, err := NewBuilder(path, testConfig())
		if err != nil {
			t.Fatal(err)
		}
		if _, err := s.load(a, b); !errors.Is(err, c.want) {
			t.Errorf("%s: error %v, want %v", what, err, c.want)
		}
		s.file.Close()
		a.Close()
	}
}

// TestIndexOfAnotherProcessIsNotMistaken: an index that another process writes over a newly written
// index is not mistaken for it.
func TestIndexOfAnotherProcessIsNotMistaken(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Numbered(t, 0, 1, 2, 3))
	a := openArchive(t, path)
	defer a.Close()
	b, err := scan(a, testConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	s := b.writeFile(a)
	if s == nil {
		t.Fatal("writeFile() = nil, want an index file")
	}
	defer s.close()
	other := indexed(t, "a.tar", archivetest.Numbered(t, 7, 6, 5, 4))
	if err := os.Rename(other+sidecarSuffix, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	sections, err := s.large()
	if err != nil {
		t.Fatal(err)
	}
	got, err := b.index(a, []string{archive.Tar}, sections)
	if err != nil || got.Name(0) != "a/0.png" || got.Name(3) != "a/3.png" {
		t.Errorf("error %v, or the names of another index", err)
	}
}

// TestUnwritableFolderPutsEntryPointsInCache: if the folder next to an archive can't be written,
// new entry points are saved in the cache folder. If that can't be written either, they are dropped
// without an error.
func TestUnwritableFolderPutsEntryPointsInCache(t *testing.T) {
	for _, cache := range []bool{true, false} {
		dir := t.TempDir()
		t.Setenv("XDG_CACHE_HOME", dir)
		if !cache {
			t.Setenv("XDG_CACHE_HOME", filepath.Join(archivetest.WriteFile(t, "file", nil), "no folder"))
		}
		// The index's name has the maximum length. A temporary file in the same folder has a longer
		// name and can't be created.
		path := archivetest.WriteFile(t, strings.Repeat("a", 248), archivetest.Numbered(t, 0, 1, 2, 3))
		log := &logged{}
		c := testConfig()
		c.File, c.Logger = filepath.Join(dir, "index"), slog.New(slog.NewTextHandler(log, nil))
		x := open(t, path, c)
		closeIndex(t, x)
		if err := os.Rename(c.File, path+sidecarSuffix); err != nil {
			t.Fatal(err)
		}
		c.File = ""
		blob := bytes.Repeat([]byte("entries "), 200_000)
		for round := range 2 {
			x = open(t, path, c)
			if got, want := len(x.EntryPoints(1, nil)) > 0, cache && round > 0; got != want {
				t.Errorf("cache folder %v, round %d: entry points %v, want %v", cache, round, got, want)
			}
			kept := []bool{x.KeepEntryPoints(round, blob), x.KeepEntryPoints(round, nil),
				x.KeepEntryPoints(2, make([]byte, maxBlobBytes))}
			if want := []bool{true, true, false}; !slices.Equal(kept, want) {
				t.Errorf("KeepEntryPoints of a small blob, of none and of one over the limit = %v, want %v",
					kept, want)
			}
			if filed := x.side.blobs.spool.filed > 0; filed != cache {
				t.Errorf("cache folder %v: entry points wait in a file: %v", cache, filed)
			}
			x.KeepEntryPoints(1, blob)
			if err := x.Close(); err != nil {
				t.Errorf("cache folder %v, round %d: %v, want no error", cache, round, err)
			}
		}
		if log.has("can't be kept") == cache {
			t.Errorf("cache folder %v: %s", cache, log.text.String())
		}
	}
}

// TestEntryPointsWithoutAnIndexFileWaitInAFile: with NoFile, entry points are in an unnamed file in
// the cache folder. If there is none, they are in memory, up to a limit.
func TestEntryPointsWithoutAnIndexFileWaitInAFile(t *testing.T) {
	for _, cache := range []bool{true, false} {
		t.Run(fmt.Sprintf("cache folder %v", cache), func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv("XDG_CACHE_HOME", dir)
			if !cache {
				t.Setenv("XDG_CACHE_HOME", filepath.Join(archivetest.WriteFile(t, "file", nil), "no folder"))
			}
			c := testConfig()
			c.NoFile = true
			x := open(t, archivetest.WriteFile(t, "a.tar", archivetest.Numbered(t, 0, 1, 2, 3)), c)
			defer closeIndex(t, x)
			blob := bytes.Repeat([]byte("entries "), spoolBytes/8)
			for i := range 2 {
				if !x.KeepEntryPoints(i, blob) {
					t.Fatalf("KeepEntryPoints of sample %d = false, want true", i)
				}
			}
			if got := x.EntryPoints(1, nil); !bytes.Equal(got, blob) {
				t.Errorf("got a blob of %d bytes, want the %d that were kept", len(got), len(blob))
			}
			want := 2 * len(blob)
			if cache {
				want = 0
			}
			if got := len(x.blobs.spool.mem); got != want {
				t.Errorf("got %d bytes in memory, want %d", got, want)
			}
			if found, _ := filepath.Glob(filepath.Join(dir, "torchstream", "index", "*")); len(found) > 0 {
				t.Errorf("got the files %v, want none", found)
			}
			if cache {
				return
			}
			x.blobs.spool.mem = make([]byte, maxBlobMemory-len(blob)+1)
			if x.KeepEntryPoints(2, blob) {
				t.Errorf("KeepEntryPoints over %d bytes of memory = true, want false", maxBlobMemory)
			}
		})
	}
}

// TestIndexesInTheCacheFolderAreMerged: processes that use one archive, whose folder they can't
// write, at the same time save into one index in the cache folder.
func TestIndexesInTheCacheFolderAreMerged(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	path := archivetest.WriteFile(t, strings.Repeat("a", 248), archivetest.Numbered(t, 0, 1, 2, 3))
	c := testConfig()
	c.File = filepath.Join(dir, "index")
	closeIndex(t, open(t, path, c))
	if err := os.Rename(c.File, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	c.File = ""
	var all [4]*Index
	for i := range all {
		all[i] = open(t, path, c)
		kept := all[i].KeepEntryPoints(i, []byte(fmt.Sprint("entries of ", i)))
		if same := all[i].side.sums.same(all[i].number(i), []byte{byte(i)}); !kept || !same {
			t.Fatalf("process %d: KeepEntryPoints = %v, a first checksum is the same %v, want true, true", i,
				kept, same)
		}
	}
	var closing sync.WaitGroup
	for _, x := range all {
		closing.Go(func() { closeIndex(t, x) })
	}
	closing.Wait()
	x := open(t, path, c)
	defer closeIndex(t, x)
	for i := range all {
		if got := string(x.EntryPoints(i, nil)); got != fmt.Sprint("entries of ", i) ||
			x.side.sums.known[x.number(i)].Load() == 0 {
			t.Errorf("sample %d: %q", i, got)
		}
	}
}

// TestFileInTheCacheFolderIsNotOverwritten: a file that another process has meanwhile written into
// the cache folder is not overwritten.
func TestFileInTheCacheFolderIsNotOverwritten(t *testing.T) {
	dir := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", dir)
	path := archivetest.WriteFile(t, strings.Repeat("a", 248), archivetest.Numbered(t, 0, 1, 2, 3))
	c := testConfig()
	c.File = filepath.Join(dir, "index")
	x := open(t, path, c)
	closeIndex(t, x)
	if err := os.Rename(c.File, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	c.File = ""
	x = open(t, path, c)
	if len(x.side.saving.elsewhere) != 1 {
		t.Fatalf("%d other places, want 1", len(x.side.saving.elsewhere))
	}
	cached := x.side.saving.elsewhere[0].path
	if err := os.MkdirAll(filepath.Dir(cached), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(cached, []byte("somebody's"), 0o644); err != nil {
		t.Fatal(err)
	}
	x.KeepEntryPoints(1, []byte("entries"))
	closeIndex(t, x)
	if got, err := os.ReadFile(cached); err != nil || string(got) != "somebody's" {
		t.Errorf("%v, %q, want no error, got = %q", err, got, "somebody's")
	}
}

// TestReplacedIndexIsNotOverwritten: entry points are not saved over an index that another process
// has meanwhile written, which may belong to another archive.
func TestReplacedIndexIsNotOverwritten(t *testing.T) {
	path := indexed(t, "a.tar", archivetest.Numbered(t, 0, 1, 2, 3))
	x := open(t, path, testConfig())
	x.KeepEntryPoints(0, []byte("entries"))
	other := indexed(t, "a.tar", archivetest.Numbered(t, 7, 6, 5, 4))
	want, err := os.ReadFile(other + sidecarSuffix)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other+sidecarSuffix, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	closeIndex(t, x)
	if got, err := os.ReadFile(path + sidecarSuffix); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the other index was overwritten; error %v", err)
	}
}

// TestLeftoversAreRemoved: writing an index removes the temporary files of killed processes, but
// not a file that is still being written.
func TestLeftoversAreRemoved(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Numbered(t, 0, 1))
	long := time.Now().Add(-2 * leftAfter)
	for name, old := range map[string]bool{".tsidx.1.tmp": true, ".tsidx.2.tmp": false, ".1.tmp": true,
		".tsidx.bak": true, "+1.tsidx.3.tmp": true} {
		if err := os.WriteFile(path+name, nil, 0o644); err != nil {
			t.Fatal(err)
		}
		if old {
			if err := os.Chtimes(path+name, long, long); err != nil {
				t.Fatal(err)
			}
		}
	}
	x := open(t, path, testConfig())
	closeIndex(t, x)
	list, err := filepath.Glob(path + "*")
	for i := range list {
		list[i] = strings.TrimPrefix(list[i], path)
	}
	if want := []string{"", "+1.tsidx.3.tmp", ".1.tmp", ".tsidx", ".tsidx.2.tmp",
		".tsidx.bak"}; err != nil || !slices.Equal(list, want) {
		t.Errorf("%q are there, want %q; error %v", list, want, err)
	}
}

// TestIndexesAreNotShards: indexes and their temporary files are not shards.
func TestIndexesAreNotShards(t *testing.T) {
	for name, want := range map[string]bool{
		"a.tar": false, "a.tar.tsidx": true, "a.tar.tsidx.123.tmp": true, "a1.tar+2.tsidx.45.tmp": true,
		"a.tsidx.tar": false, "a.tmp": false,
	} {
		if got := IsFile(filepath.Join("folder.tsidx.x", name)); got != want {
			t.Errorf("%s: %v, want %v", name, got, want)
		}
	}
}

// A blob replaces an earlier run's blob that was refused.
func TestBlobsOfAnEarlierRunAreReplaced(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Numbered(t, 0, 1, 2))
	for _, blobs := range [][2]string{{"refused", "good"}, {"a longer one", ""}} {
		x := open(t, path, testConfig())
		for i, blob := range blobs {
			x.KeepEntryPoints(i, []byte(blob))
		}
		closeIndex(t, x)
	}
	x := open(t, path, testConfig())
	defer closeIndex(t, x)
	if first, second := x.EntryPoints(0, nil), x.EntryPoints(1, nil); string(first) != "a longer one" ||
		string(second) != "good" {
		t.Errorf("blobs %q and %q, want first = %q, second = %q", first, second, "a longer one", "good")
	}

	// Another process, which has the earlier blob open, saves later.
	here, other := open(t, path, testConfig()), open(t, path, testConfig())
	here.KeepEntryPoints(0, []byte("right"))
	other.KeepEntryPoints(2, []byte("the other's"))
	closeIndex(t, here)
	closeIndex(t, other)
	again := open(t, path, testConfig())
	defer closeIndex(t, again)
	if first, third := again.EntryPoints(0, nil), again.EntryPoints(2, nil); string(first) != "right" ||
		string(third) != "the other's" {
		t.Errorf("blobs %q and %q, want first = %q, third = %q", first, third, "right", "the other's")
	}
}
