package imageloader

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// oneByOne is a tar with a fake image for each number, all of one size.
func oneByOne(t *testing.T, numbers ...int) []byte {
	t.Helper()
	var list []tarMember
	for _, i := range numbers {
		list = append(list, tarMember{name: fmt.Sprintf("a/%d.png", i), data: fakeImage(strings.Repeat(fmt.Sprint(i), 2000))})
	}
	return tarBytes(t, list...)
}

// TestReplacedShard: a shard that was replaced after the archive was opened is an error each time that it is opened again, in any order and in that of the archive.
func TestReplacedShard(t *testing.T) {
	for _, url := range []bool{false, true} {
		s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{}}
		path := filepath.Join(t.TempDir(), "s{0,1}.tar")
		if url {
			path = "store://b/s{0,1}.tar"
		}
		put := func(i int, version string, data []byte) {
			t.Helper()
			name := strings.Replace(path, "{0,1}", fmt.Sprint(i), 1)
			if url {
				s.objects[name] = object{string(data), version}
			} else if err := os.WriteFile(name, data, 0o644); err != nil {
				t.Fatal(err)
			} else if at := time.Unix(1e9, int64(len(version))); os.Chtimes(name, at, at) != nil {
				t.Fatal("the time can't be set")
			}
		}
		put(0, "1", oneByOne(t, 0, 1))
		put(1, "1", oneByOne(t, 2, 3))
		a, err := openArchive(t.Context(), path, opener{openFile, s.openSource})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		put(1, "second", oneByOne(t, 3, 2))
		for try := range 3 {
			if _, err := a.acquire(1); !errors.Is(err, ErrSourceChanged) || !strings.Contains(err.Error(), "s1.tar") {
				t.Errorf("URL %v, try %d: error %v", url, try, err)
			}
		}
		for err == nil {
			_, err = a.next()
		}
		if !errors.Is(err, ErrSourceChanged) || a.names != 2 {
			t.Errorf("URL %v: error %v after %d members", url, err, a.names)
		}
	}
}

// TestOtherTarURL: a tar behind a URL that has the size and the time of the one that was indexed in another run, but its samples in another order, is an error that names
// the sample; and that is found out without a second request.
func TestOtherTarURL(t *testing.T) {
	const url = "store://b/a.tar"
	s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{url: {string(oneByOne(t, 0, 1, 2, 3)), "1"}}}
	o := Options{Transform: Eval(4, 4), BatchSize: 1, Workers: 1, IndexFile: filepath.Join(t.TempDir(), "index"), OpenSource: s.openSource}
	for _, c := range []struct {
		data    []byte
		version string
		samples int // before the error; 4: there is none
	}{{oneByOne(t, 0, 1, 2, 3), "1", 4}, {oneByOne(t, 0, 1, 2, 3), "2", 4}, {oneByOne(t, 0, 2, 1, 3), "3", 1}} {
		s.objects[url] = object{string(c.data), c.version}
		l, err := open(t.Context(), url, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if len(batches) != c.samples || (err == nil) != (c.samples == 4) || err != nil && (!errors.As(err, &damage) || damage.Member != "a/1.png" || !errors.Is(err, errStale)) {
			t.Errorf("version %s: %d samples, error %v", c.version, len(batches), err)
		}
		if c.samples < 4 {
			continue
		}
		a, err := openArchive(t.Context(), url, l.open)
		if err != nil {
			t.Fatal(err)
		}
		r, asked := newSampleReader(a, l.index.Load()), s.asked
		for i := range 4 {
			got := make([]byte, l.index.Load().entries[i].size)
			if err := r.read(i, got); err != nil || !slices.Equal(got, []byte(fakeImage(strings.Repeat(fmt.Sprint(i), 2000)))) {
				t.Errorf("sample %d: error %v, or other bytes", i, err)
			}
		}
		if s.asked != asked+4 {
			t.Errorf("%d requests for 4 samples", s.asked-asked)
		}
		r.close()
		a.Close()
	}
}

// TestIndexOfAnother: an index that another process has put in the place of the one that was just written is not taken for it.
func TestIndexOfAnother(t *testing.T) {
	path := writeFile(t, "a.tar", oneByOne(t, 0, 1, 2, 3))
	l := openFake(t, path, Options{Transform: Eval(4, 4)})
	l.o.NoIndex = false
	a, err := openArchive(t.Context(), path, l.open)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	x, err := l.collect(a, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer x.close()
	s := l.writeIndex(a, x)
	if s == nil {
		t.Fatal("no index")
	}
	defer s.close()
	other, _ := indexed(t, "a.tar", oneByOne(t, 7, 6, 5, 4), Options{Transform: Eval(4, 4)})
	if err := os.Rename(other+sidecarSuffix, path+sidecarSuffix); err != nil {
		t.Fatal(err)
	}
	sections, err := s.large()
	if err != nil {
		t.Fatal(err)
	}
	got, err := x.build(a, sections)
	if err != nil || got.name(0) != "a/0.png" || got.name(3) != "a/3.png" {
		t.Errorf("error %v, or the names of another index", err)
	}
}
