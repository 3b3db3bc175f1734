package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestSources: the same members give the same epoch from an archive of any kind, whole or in
// shards, named in any way, with and without an index file.
func TestSources(t *testing.T) {
	members := archivetest.Photos(24)
	for i := range members {
		members[i].Data = members[i].Data[:min(len(members[i].Data), 40_000)]
	}
	slices.SortFunc(members, func(a, b archivetest.Member) int { return strings.Compare(a.Name, b.Name) }) // as a directory has them
	whole := archivetest.Tar(t, members...)
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	third := len(members) / 3
	shards := [][]archivetest.Member{members[:third], members[third : 2*third], members[2*third:]}
	for i, s := range shards {
		put(fmt.Sprintf("s-%02d.tar", i), archivetest.Tar(t, s...))
		put(fmt.Sprintf("s-%02d.tgz", i), archivetest.Gzip(t, archivetest.Tar(t, s...)))
		put(fmt.Sprintf("z-%02d.tzst", i), archivetest.Zstd(t, archivetest.Tar(t, s...)))
	}
	put("mixed-a", archivetest.Tar(t, shards[0]...))
	put("mixed-b", archivetest.Gzip(t, archivetest.Tar(t, shards[1]...)))
	put("mixed-c", archivetest.Zstd(t, archivetest.Tar(t, shards[2]...)))
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	sources := map[string]string{
		"tar":            put("a.tar", whole),
		"tgz":            put("a.tgz", archivetest.Gzip(t, whole)),
		"zstd":           put("a.tar.zst", archivetest.Zstd(t, whole)),
		"zstd frames":    put("b.tar.zst", append(append([]byte("\x50\x2a\x4d\x18\x04\x00\x00\x00skip"), archivetest.Zstd(t, whole[:7_000])...), archivetest.Zstd(t, whole[7_000:])...)),
		"directory":      archivetest.Extract(t, members),
		"range":          filepath.Join(dir, "s-{00..02}.tar"),
		"list":           "{" + filepath.Join(dir, "s-00.tgz") + "," + filepath.Join(dir, "s-01.tgz") + "," + filepath.Join(dir, "s-02.tgz") + "}",
		"glob":           filepath.Join(dir, "z-*.tzst"),
		"mixed":          filepath.Join(dir, "mixed-{a,b,c}"),
		"url":            server.URL + "/a.tar",
		"url of tgz":     server.URL + "/a.tgz",
		"urls of shards": server.URL + "/s-{00..02}.tgz",
	}
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	for _, shuffleBytes := range []int64{1000, 0} {
		want := ""
		for name, path := range sources {
			for round := range 2 {
				for _, shuffle := range []bool{false, true} {
					o := Options{BatchSize: 8, Transform: Eval(4, 4), ShuffleBytes: shuffleBytes, Shuffle: shuffle}
					l, err := open(t.Context(), path, o, openFile, fakeCodec{})
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					if n := l.Len(); n != 24 {
						t.Errorf("%s: %d samples", name, n)
					}
					got, err := collect(t, l, 3, 2)
					if err != nil {
						t.Errorf("%s: %v", name, err)
					}
					if !shuffle {
						d := digest(got)
						if want == "" {
							want = d
						}
						if d != want {
							t.Errorf("%s, round %d: another epoch, of %d samples", name, round, len(names(got)))
						}
					}
					list := names(got)
					slices.Sort(list)
					if len(slices.Compact(list)) != 24 {
						t.Errorf("%s, round %d, shuffled: %d different samples", name, round, len(slices.Compact(list)))
					}
					if err := l.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
	for name, path := range sources {
		r, err := inspect(t.Context(), path, Options{}, nil, openFile, fakeCodec{})
		if err != nil || r.Samples != 24 || len(r.Classes) != 3 {
			t.Errorf("inspect %s: %+v, error %v", name, r, err)
		}
	}
}

// TestHostile: what an archive declares or inflates to is bounded, and the error names the file and
// the member.
func TestHostile(t *testing.T) {
	archivetest.Within(t)
	bomb := func(t *testing.T) []byte {
		var b bytes.Buffer
		w, err := zstd.NewWriter(&b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(archivetest.Tar(t, archivetest.Member{Name: "c/a.png", Data: archivetest.Image("x")})[:1024]); err != nil {
			t.Fatal(err)
		}
		zeros := make([]byte, 1<<20)
		for range 200 {
			if _, err := w.Write(zeros); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	for name, c := range map[string]struct {
		data []byte
		want string
	}{
		"zstd bomb": {bomb(t), "inflate to more than"},
		"long path": {archivetest.Tar(t, archivetest.Member{Name: "c/a.png", Data: archivetest.Image("x")}, archivetest.Member{Name: "c/" + strings.Repeat("long/", 1000) + "b.png", Data: archivetest.Image("y")}), "path has 5007 bytes"},
	} {
		path := archivetest.WriteFile(t, "archive", c.data)
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		var at *ArchiveError
		if !errors.As(err, &at) || at.File != path || at.Member == "" || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestWebDataset: groups by base name, labels from .cls and .json in any place of the group,
// numbers and names.
func TestWebDataset(t *testing.T) {
	image := func(name string) archivetest.Member {
		return archivetest.Member{Name: name, Data: archivetest.Image(name)}
	}
	file := func(name, data string) archivetest.Member { return archivetest.Member{Name: name, Data: data} }
	for name, c := range map[string]struct {
		members []archivetest.Member
		classes []string // given
		want    string   // classes and samples
	}{
		"numbers": {[]archivetest.Member{image("s/000.png"), file("s/000.cls", "3\n"), file("s/001.cls", "0"), image("s/001.png"), file("s/002.txt", "x"), image("s/002.seg.png"), file("s/002.cls", "1")},
			nil, "[0 1 2 3] s/000.png:3 s/001.png:0 s/002.seg.png:1"},
		"names": {[]archivetest.Member{image("a.jpg"), file("a.json", `{"label":"dog","x":1}`), image("b.jpg"), file("b.json", `{"class":"cat"}`), image("c.jpg"), file("c.json", `{"cls":7}`)},
			nil, "[7 cat dog] a.jpg:2 b.jpg:1 c.jpg:0"},
		"without a label":  {[]archivetest.Member{image("a.jpg"), image("b.jpg"), file("b.cls", "x"), image("c.jpg"), file("c.json", "[1]")}, nil, "[x] b.jpg:0"},
		"two images":       {[]archivetest.Member{image("a.jpg"), image("a.png"), file("a.cls", "1")}, nil, "[0 1] a.jpg:1"},
		"given":            {[]archivetest.Member{image("a.jpg"), file("a.cls", "x"), image("b.jpg"), file("b.cls", "y")}, []string{"y", "x"}, "[y x] a.jpg:1 b.jpg:0"},
		"given, not known": {[]archivetest.Member{image("a.jpg"), file("a.cls", "x"), image("b.jpg"), file("b.cls", "y")}, []string{"x"}, `error "b.jpg" is of class "y"`},
		"no labels":        {[]archivetest.Member{image("c/a.jpg"), image("c/b.jpg")}, nil, "error no samples"},
	} {
		data := archivetest.Tar(t, c.members...)
		for kind, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
			path := archivetest.WriteFile(t, kind, data)
			for round := range 2 { // scanned, and by the index
				l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true, Classes: c.classes}, openFile, fakeCodec{})
				if err != nil {
					if message, ok := strings.CutPrefix(c.want, "error "); !ok || !strings.Contains(err.Error(), message) {
						t.Errorf("%s, %s, round %d: error %v", name, kind, round, err)
					}
					continue
				}
				got, err := collect(t, l, 0, 1)
				text := fmt.Sprint(l.Classes())
				for _, b := range got {
					for _, s := range b.samples {
						text += fmt.Sprintf(" %s:%d", s.Name, s.Label)
					}
				}
				if err != nil || text != c.want {
					t.Errorf("%s, %s, round %d: %s, error %v", name, kind, round, text, err)
				}
				l.Close()
			}
		}
	}
}
