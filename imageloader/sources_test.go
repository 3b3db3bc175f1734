package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/klauspost/compress/zstd"
)

func zstdBytes(t testing.TB, data []byte) []byte {
	t.Helper()
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(data, nil)
}

// extract writes a test's members into a directory.
func extract(t testing.TB, members []tarMember) string {
	t.Helper()
	root := t.TempDir()
	for _, m := range members {
		path := filepath.Join(root, m.name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(m.data), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

// TestSources: the same members give the same epoch from an archive of any kind, whole or in shards, named in any way, with and without an index file.
func TestSources(t *testing.T) {
	members := photos(24)
	for i := range members {
		members[i].data = members[i].data[:min(len(members[i].data), 40_000)]
	}
	slices.SortFunc(members, func(a, b tarMember) int { return strings.Compare(a.name, b.name) }) // as a directory has them
	whole := tarBytes(t, members...)
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
	shards := [][]tarMember{members[:third], members[third : 2*third], members[2*third:]}
	for i, s := range shards {
		put(fmt.Sprintf("s-%02d.tar", i), tarBytes(t, s...))
		put(fmt.Sprintf("s-%02d.tgz", i), gzipBytes(t, tarBytes(t, s...)))
		put(fmt.Sprintf("z-%02d.tzst", i), zstdBytes(t, tarBytes(t, s...)))
	}
	put("mixed-a", tarBytes(t, shards[0]...))
	put("mixed-b", gzipBytes(t, tarBytes(t, shards[1]...)))
	put("mixed-c", zstdBytes(t, tarBytes(t, shards[2]...)))
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	sources := map[string]string{
		"tar":            put("a.tar", whole),
		"tgz":            put("a.tgz", gzipBytes(t, whole)),
		"zstd":           put("a.tar.zst", zstdBytes(t, whole)),
		"zstd frames":    put("b.tar.zst", append(append([]byte("\x50\x2a\x4d\x18\x04\x00\x00\x00skip"), zstdBytes(t, whole[:7_000])...), zstdBytes(t, whole[7_000:])...)),
		"directory":      extract(t, members),
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

func TestShardPaths(t *testing.T) {
	dir := t.TempDir()
	for _, name := range []string{"a1.tar", "a2.tar", "a3.tar", "a3.tar.tsidx", "a3.tar.tsidx.123.tmp", "a1.tar+2.tsidx.45.tmp", "odd{1..2}.tar"} {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for pattern, want := range map[string]string{
		"x.tar":             "x.tar",
		"{008..011}.tar":    "008.tar 009.tar 010.tar 011.tar",
		"{8..11}":           "8 9 10 11",
		"{a,b}{1..2}":       "a1 a2 b1 b2",
		"{x{1..2},y}.tar":   "x1.tar x2.tar y.tar",
		"a*.tar":            "a1.tar a2.tar a3.tar",
		"a*":                "a1.tar a2.tar a3.tar",
		"a[23].tar":         "a2.tar a3.tar",
		"odd{1..2}.tar":     "odd{1..2}.tar",
		"{3..1}":            "error",
		"{1..99999999}":     "error",
		"{a..b}":            "error",
		"{a":                "error",
		"none*":             "error",
		"{0..999}{0..999}x": "error",
	} {
		paths, err := shardPaths(filepath.Join(dir, pattern))
		for i := range paths {
			paths[i] = strings.TrimPrefix(paths[i], dir+"/")
		}
		got := strings.Join(paths, " ")
		if err != nil {
			got = "error"
		}
		if got != want {
			t.Errorf("%s: %s, error %v; want %s", pattern, got, err, want)
		}
	}
}

// flaky is a server that fails, breaks off and lies.
type flaky struct {
	data  []byte
	etag  string
	every int // one of so many responses to requests for the same end is whole
	n     atomic.Int64
	mode  string

	mu   sync.Mutex
	ends map[string]int
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	n := f.n.Add(1)
	_, end, _ := strings.Cut(r.Header.Get("Range"), "-")
	f.mu.Lock()
	if f.ends == nil {
		f.ends = map[string]int{}
	}
	f.ends[end]++
	asked := f.ends[end]
	f.mu.Unlock()
	w.Header().Set("ETag", f.etag)
	switch {
	case f.mode == "no ranges":
		w.Write(f.data)
		return
	case f.mode == "gone":
		http.Error(w, "no", http.StatusNotFound)
		return
	case f.mode == "changes" && n > 3:
		w.Header().Set("ETag", `"other"`)
	case f.mode == "down":
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	case asked%f.every == 1:
		http.Error(w, "busy", http.StatusServiceUnavailable)
		return
	case asked%f.every != 0:
		w = &breaking{w, 1000 + rand.IntN(90_000)}
	}
	http.ServeContent(w, r, "", time.Unix(1e9, 0), bytes.NewReader(f.data))
}

// breaking ends a response after left bytes.
type breaking struct {
	http.ResponseWriter
	left int
}

func (b *breaking) Write(p []byte) (int, error) {
	n, err := b.ResponseWriter.Write(p[:min(len(p), b.left)])
	if b.left -= n; b.left == 0 {
		panic(http.ErrAbortHandler)
	}
	return n, err
}

func byHTTP(client *http.Client) func(context.Context, string) (Source, error) {
	return func(ctx context.Context, url string) (Source, error) { return OpenHTTP(ctx, url, client) }
}

// TestURL: responses that fail or break off are asked for again; a file that changes, or a server that can't give ranges, is an error that names the URL.
func TestURL(t *testing.T) {
	data := make([]byte, 500_000)
	for i := range data {
		data[i] = byte(rand.Uint32())
	}
	for mode, want := range map[string]string{"": "", "no ranges": "range requests", "gone": "404", "changes": "has changed", "down": "503"} {
		f := &flaky{data: data, etag: `"one"`, every: 3, mode: mode}
		server := httptest.NewServer(f)
		read := func() error {
			file, err := openRemote(t.Context(), server.URL+"/x", byHTTP(server.Client()), sourceTimes{time.Microsecond, time.Minute})
			if err != nil {
				return err
			}
			defer file.Close()
			got, err := io.ReadAll(file)
			if err != nil {
				return err
			}
			if !bytes.Equal(got, data) {
				t.Error("other bytes in order")
			}
			part := make([]byte, 200_000)
			if _, err := file.ReadAt(part, 123_456); err != nil {
				return err
			}
			if !bytes.Equal(part, data[123_456:][:len(part)]) {
				t.Error("other bytes at random")
			}
			for _, to := range []int64{400_000, 10, 300, 499_999} {
				if _, err := file.Seek(to, io.SeekStart); err != nil {
					return err
				}
				if _, err := io.ReadFull(file, part[:1]); err != nil || part[0] != data[to] {
					t.Errorf("at %d: %v", to, err)
				}
			}
			if n, err := file.ReadAt(part, int64(len(data))-5); n != 5 || err != io.EOF {
				t.Errorf("at the end: %d, %v", n, err)
			}
			return nil
		}
		err := read()
		server.Close()
		if (err == nil) != (want == "") || err != nil && (!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), server.URL)) {
			t.Errorf("%q: error %v", mode, err)
		}
		if mode == "gone" && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%q: error %v", mode, err)
		}
	}
}

// TestHostile: what an archive declares or inflates to is bounded, and the error names the file and the member.
func TestHostile(t *testing.T) {
	within(t)
	bomb := func(t *testing.T) []byte {
		var b bytes.Buffer
		w, err := zstd.NewWriter(&b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(tarBytes(t, tarMember{name: "c/a.png", data: fakeImage("x")})[:1024]); err != nil {
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
		"long path": {tarBytes(t, tarMember{name: "c/a.png", data: fakeImage("x")}, tarMember{name: "c/" + strings.Repeat("long/", 1000) + "b.png", data: fakeImage("y")}), "path has 5007 bytes"},
	} {
		path := writeFile(t, "archive", c.data)
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		var at *ArchiveError
		if !errors.As(err, &at) || at.File != path || at.Member == "" || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

// TestWebDataset: groups by base name, labels from .cls and .json in any place of the group, numbers and names.
func TestWebDataset(t *testing.T) {
	image := func(name string) tarMember { return tarMember{name: name, data: fakeImage(name)} }
	file := func(name, data string) tarMember { return tarMember{name: name, data: data} }
	for name, c := range map[string]struct {
		members []tarMember
		classes []string // given
		want    string   // classes and samples
	}{
		"numbers": {[]tarMember{image("s/000.png"), file("s/000.cls", "3\n"), file("s/001.cls", "0"), image("s/001.png"), file("s/002.txt", "x"), image("s/002.seg.png"), file("s/002.cls", "1")},
			nil, "[0 1 2 3] s/000.png:3 s/001.png:0 s/002.seg.png:1"},
		"names": {[]tarMember{image("a.jpg"), file("a.json", `{"label":"dog","x":1}`), image("b.jpg"), file("b.json", `{"class":"cat"}`), image("c.jpg"), file("c.json", `{"cls":7}`)},
			nil, "[7 cat dog] a.jpg:2 b.jpg:1 c.jpg:0"},
		"without a label":  {[]tarMember{image("a.jpg"), image("b.jpg"), file("b.cls", "x"), image("c.jpg"), file("c.json", "[1]")}, nil, "[x] b.jpg:0"},
		"two images":       {[]tarMember{image("a.jpg"), image("a.png"), file("a.cls", "1")}, nil, "[0 1] a.jpg:1"},
		"given":            {[]tarMember{image("a.jpg"), file("a.cls", "x"), image("b.jpg"), file("b.cls", "y")}, []string{"y", "x"}, "[y x] a.jpg:1 b.jpg:0"},
		"given, not known": {[]tarMember{image("a.jpg"), file("a.cls", "x"), image("b.jpg"), file("b.cls", "y")}, []string{"x"}, `error "b.jpg" is of class "y"`},
		"no labels":        {[]tarMember{image("c/a.jpg"), image("c/b.jpg")}, nil, "error no samples"},
	} {
		data := tarBytes(t, c.members...)
		for kind, data := range map[string][]byte{"a.tar": data, "a.tgz": gzipBytes(t, data)} {
			path := writeFile(t, kind, data)
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
