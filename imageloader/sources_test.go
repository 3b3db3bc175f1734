package imageloader

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
	"github.com/torchstream/torchstream/internal/order"
)

// TestSourcesGiveTheSameEpoch: the same members give the same epoch from an archive of any kind,
// whole or in shards, by any form of path, with and without an index file.
func TestSourcesGiveTheSameEpoch(t *testing.T) {
	members := archivetest.Photos(24)
	for i := range members {
		members[i].Data = members[i].Data[:min(len(members[i].Data), 40_000)]
	}
	// in the order of a directory
	slices.SortFunc(members, func(a, b archivetest.Member) int { return strings.Compare(a.Name, b.Name) })
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
		"tar":  put("a.tar", whole),
		"tgz":  put("a.tgz", archivetest.Gzip(t, whole)),
		"zstd": put("a.tar.zst", archivetest.Zstd(t, whole)),
		"zstd frames": put("b.tar.zst",
			append(append([]byte("\x50\x2a\x4d\x18\x04\x00\x00\x00skip"),
				archivetest.Zstd(t, whole[:7_000])...), archivetest.Zstd(t, whole[7_000:])...)),
		"directory": archivetest.Extract(t, members),
		"range":     filepath.Join(dir, "s-{00..02}.tar"),
		"list": "{" + filepath.Join(dir, "s-00.tgz") + "," + filepath.Join(dir, "s-01.tgz") +
			"," + filepath.Join(dir, "s-02.tgz") + "}",
		"glob":           filepath.Join(dir, "z-*.tzst"),
		"mixed":          filepath.Join(dir, "mixed-{a,b,c}"),
		"with a folder":  "{" + archivetest.Extract(t, shards[0]) + "," + filepath.Join(dir, "mixed-{b,c}") + "}",
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
						t.Fatalf("%s: %v, want no error", name, err)
					}
					if n := l.Len(); n != 24 {
						t.Errorf("%s: %d samples, want 24", name, n)
					}
					got, err := collect(t, l, 3, 2)
					if err != nil {
						t.Errorf("%s: %v, want no error", name, err)
					}
					if !shuffle {
						d := digest(got)
						if want == "" {
							want = d
						}
						if d != want {
							t.Errorf("%s, round %d: an epoch of %d samples has digest %s, want %s",
								name, round, len(names(got)), d, want)
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
		r, err := inspect(t.Context(), path, Options{}, openFile, fakeCodec{})
		if err != nil || r.Samples != 24 || len(r.Classes) != 3 {
			t.Errorf("inspect %s: %+v, error %v, want no error, r.Samples = 24, len(r.Classes) = 3",
				name, r, err)
		}
	}
}

// TestHostile: the sizes that an archive declares or inflates to are bounded, and the error names
// the file and the member.
func TestHostile(t *testing.T) {
	archivetest.Within(t)
	bomb := func(t *testing.T) []byte {
		var b bytes.Buffer
		w, err := zstd.NewWriter(&b)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(archivetest.Tar(t,
			archivetest.Member{Name: "c/a.png", Data: archivetest.Image("x")})[:1024]); err != nil {
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
		"long path": {archivetest.Tar(t,
			archivetest.Member{Name: "c/a.png", Data: archivetest.Image("x")},
			archivetest.Member{Name: "c/" + strings.Repeat("long/", 1000) + "b.png",
				Data: archivetest.Image("y")}), "path has 5007 bytes"},
		"zip, long path": {zipped(t,
			archivetest.Tar(t, archivetest.Member{Name: "c/a.png", Data: archivetest.Image("x")},
				archivetest.Member{Name: "c/" + strings.Repeat("long/", 1000) + "b.png",
					Data: archivetest.Image("y")}), zip.Store), "path has 5007 bytes"},
	} {
		path := archivetest.WriteFile(t, "archive", c.data)
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
		var at *ArchiveError
		if !errors.As(err, &at) || at.File != path || at.Member == "" || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, want an error of type *ArchiveError, at.File = %v, at.Member not "+
				"\"\", an error with %q", name, err, path, c.want)
		}
	}
}

// TestWebDatasetLabelsAreRead: members with the same base name form a group. Its label, a number or
// a name, comes from a .cls or .json anywhere in the group.
func TestWebDatasetLabelsAreRead(t *testing.T) {
	image := func(name string) archivetest.Member {
		return archivetest.Member{Name: name, Data: archivetest.Image(name)}
	}
	file := func(name, data string) archivetest.Member { return archivetest.Member{Name: name, Data: data} }
	numbered := func(odd ...string) (list []archivetest.Member) { // labels 0, 1, 2 and the given ones
		for i := range 3 {
			list = append(list, image(fmt.Sprintf("%d.png", i)), file(fmt.Sprintf("%d.cls", i), fmt.Sprint(i)))
		}
		for i, label := range odd {
			list = append(list, image(fmt.Sprintf("odd%d.png", i)), file(fmt.Sprintf("odd%d.cls", i), label))
		}
		return list
	}
	for name, c := range map[string]struct {
		members []archivetest.Member
		classes []string // given
		want    string   // classes and samples
	}{
		"numbers": {[]archivetest.Member{image("s/000.png"), file("s/000.cls", "3\n"),
			file("s/001.cls", "0"), image("s/001.png"), file("s/002.txt", "x"), image("s/002.seg.png"),
			file("s/002.cls", "1")},
			nil, "[0 1 2 3] s/000.png:3 s/001.png:0 s/002.seg.png:1"},
		"names": {[]archivetest.Member{image("a.jpg"), file("a.json", `{"label":"dog","x":1}`),
			image("b.jpg"), file("b.json", `{"class":"cat"}`), image("c.jpg"), file("c.json", `{"cls":7}`)},
			nil, "[7 cat dog] a.jpg:2 b.jpg:1 c.jpg:0"},
		"without a label": {[]archivetest.Member{image("a.jpg"), image("b.jpg"), file("b.cls", "x"),
			image("c.jpg"), file("c.json", "[1]")}, nil, "[x] b.jpg:0"},
		"two images": {[]archivetest.Member{image("a.jpg"), image("a.png"), file("a.cls", "1")}, nil,
			"[0 1] a.jpg:1"},
		"given": {[]archivetest.Member{image("a.jpg"), file("a.cls", "x"), image("b.jpg"),
			file("b.cls", "y")}, []string{"y", "x"}, "[y x] a.jpg:1 b.jpg:0"},
		"given, not known": {[]archivetest.Member{image("a.jpg"), file("a.cls", "x"), image("b.jpg"),
			file("b.cls", "y")}, []string{"x"}, `error "b.jpg" is of class "y"`},
		"no labels": {[]archivetest.Member{image("c/a.jpg"), image("c/b.jpg")}, nil,
			"error no samples in %s: 2 images have no label; the first is \"c/a.jpg\": no .cls or .json " +
				"member with its key is next to it in the shard"},
		"leading zeros": {numbered("007", "00010"), nil,
			"[0 1 2 3 4 5 6 7 8 9 10] 0.png:0 1.png:1 2.png:2 odd0.png:7 odd1.png:10"},
		"negative": {numbered("-1"), nil, `error %s: "odd0.png" has the label "-1": all labels are numbers`},
		"signed":   {numbered("+1"), nil, `error %s: "odd0.png" has the label "+1": all labels are numbers`},
		"fraction": {numbered("3.0"), nil, `error %s: "odd0.png" has the label "3.0": all labels are numbers`},
		"exponent": {numbered("1e3"), nil, `error %s: "odd0.png" has the label "1e3": all labels are numbers`},
		"far too large": {numbered("99999999999"), nil,
			`error %s: "odd0.png" has the label "99999999999": all labels are numbers`},
		"too large":     {numbered("1048576"), nil, "error whole number from 0 to 1048575"},
		"two odd":       {numbered("5.5", "-1"), nil, `error %s: "odd0.png" has the label "5.5"`},
		"a name":        {numbered("-1", "x"), nil, "[-1 0 1 2 x] 0.png:1 1.png:2 2.png:3 odd0.png:0 odd1.png:4"},
		"like a number": {numbered("2021-01-05"), nil, "[0 1 2 2021-01-05] 0.png:0 1.png:1 2.png:2 odd0.png:3"},
		"odd, but given": {numbered("-1"), []string{"-1", "0", "1", "2"},
			"[-1 0 1 2] 0.png:1 1.png:2 2.png:3 odd0.png:0"},
	} {
		data := archivetest.Tar(t, c.members...)
		for kind, data := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
			path := archivetest.WriteFile(t, kind, data)
			for round := range 2 { // by a scan, and by the index
				l, err := open(t.Context(), path,
					Options{Transform: Eval(4, 4), WebDataset: true, Classes: c.classes}, openFile, fakeCodec{})
				if err != nil {
					message, ok := strings.CutPrefix(c.want, "error ")
					if !ok || !strings.Contains(err.Error(), strings.ReplaceAll(message, "%s", path)) {
						t.Errorf("%s, %s, round %d: error %v", name, kind, round, err)
					}
					if _, made := MakeIndex(t.Context(), path, Options{WebDataset: true},
						nil); c.classes == nil && (made == nil || made.Error() != err.Error()) {
						t.Errorf("%s, %s, round %d: MakeIndex's error is %v, want %v",
							name, kind, round, made, err)
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
					t.Errorf("%s, %s, round %d: %s, error %v, want no error, text = %v",
						name, kind, round, text, err, c.want)
				}
				l.Close()
			}
		}
	}
}

// TestWebDatasetWarnings: the log counts the images that are ignored, with the reason.
func TestWebDatasetWarnings(t *testing.T) {
	image := func(name string) archivetest.Member {
		return archivetest.Member{Name: name, Data: archivetest.Image(name)}
	}
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, image("a.png"), archivetest.Member{Name: "a.cls", Data: "0"},
			image("a.mask.png"), image("a.depth.png"), image("b.png"),
			archivetest.Member{Name: "b.txt", Data: "no image"}))
	var text strings.Builder
	l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), WebDataset: true, NoIndex: true,
		Logger: slog.New(slog.NewTextHandler(&text, nil))}, openFile, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	for _, want := range []string{
		`msg="images beside the sample of their group are ignored" archive=` + path + ` images=2 first=a.mask.png`,
		`msg="images without a label are ignored" archive=` + path + ` images=1`,
		`msg="image without a label is ignored" archive=` + path +
			` name=b.png reason="no .cls or .json member with its key is next to it in the shard"`,
	} {
		if !strings.Contains(text.String(), want) {
			t.Errorf("got\n%s\nwant it to contain %s", &text, want)
		}
	}
	if strings.Contains(text.String(), "directory") || l.Len() != 1 {
		t.Errorf("%d samples, log\n%s", l.Len(), &text)
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

// TestFewShardsAreOpenAtATime: an archive of many shards has few of them open at a time, in the
// first pass and in any order. Close leaves none open.
func TestFewShardsAreOpenAtATime(t *testing.T) {
	const shards = 300
	dir := t.TempDir()
	var want []string
	for i := range shards {
		var list []archivetest.Member
		for k := range 3 {
			name := fmt.Sprintf("c%d/%d-%d.png", k, i, k)
			list, want = append(list,
				archivetest.Member{Name: name, Data: archivetest.Image(name + strings.Repeat("!", 2000))}),
				append(want, name)
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
		l, err := open(t.Context(), filepath.Join(dir, "s-{000..299}.tar"),
			Options{Transform: Eval(4, 4), Shuffle: true, ShuffleBytes: 1, Workers: 2}, files.open, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		if what == "by index" && l.opened != order.Permuted {
			t.Errorf("the order is %s", l.opened)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		if got := names(batches); err != nil || len(got) != len(want) {
			t.Errorf("%s: %d samples, error %v, want no error, len(got) = %v",
				what, len(got), err, len(want))
		}
		// 32 idle shards, four that are read, and two that are being opened or closed.
		if most := 32 + 4 + 2; files.most > most || files.now != 0 {
			t.Errorf("%s: %d files were open at a time (of %d that may be), %d still are, want "+
				"files.most at most %v, files.now = 0", what, files.most, most, files.now, most)
		}
	}
}

// TestOpenSourceGivesTheSameBatches: an archive in a program's own store gives the batches of a
// file, in order and at random, even if some requests fail. Its index is kept in Options.IndexFile.
// Nothing stays open.
func TestOpenSourceGivesTheSameBatches(t *testing.T) {
	archivetest.NoLeaks(t)
	data := archivetest.Images(t, 150, nil)
	zipped := archivetest.Gzip(t, data)
	want := map[order.Kind]string{}
	for _, shuffle := range []bool{false, true} {
		l := openFake(t, archivetest.WriteFile(t, "a.tar", data),
			Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle})
		got, err := collect(t, l, 1, 2)
		if err != nil {
			t.Fatal(err)
		}
		want[l.opened] = digest(got)
	}
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": zipped, "a.tar.zst": archivetest.Zstd(t, data)} {
		s := sourcetest.New(1, map[string]sourcetest.Object{"store://b/" + name: {Data: string(data), Version: "1"}})
		s.Bad = 0.04
		for _, classes := range [][]string{nil, {"class0", "class1", "class2", "class3", "class4"}} {
			index := filepath.Join(t.TempDir(), "index")
			for round := range 2 {
				for _, shuffle := range []bool{false, true} {
					o := Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle, ShuffleBytes: 20_000,
						Classes: classes, IndexFile: index, OpenSource: s.OpenSource}
					l, err := open(t.Context(), "store://b/"+name, o, openFile, fakeCodec{})
					if err != nil {
						t.Fatalf("%s: %v, want no error", name, err)
					}
					got, err := collect(t, l, 1, 2)
					list := names(got)
					slices.Sort(list)
					if err != nil || len(slices.Compact(list)) != 150 || want[l.opened] != "" &&
						digest(got) != want[l.opened] {
						t.Errorf("%s, round %d, order %v: other batches; error %v", name, round, l.opened, err)
					}
					if round > 0 && shuffle && name == "a.tar" && l.opened != order.Permuted {
						t.Errorf("%s, round %d: order %v", name, round, l.opened)
					}
					if err := l.Close(); err != nil {
						t.Error(err)
					}
				}
			}
			if info, err := os.Stat(index); err != nil || info.Size() == 0 {
				t.Errorf("%s: index: %v", name, err)
			}
		}
		s.Lock()
		if s.Open != 0 {
			t.Errorf("%s: %d readers and sources are open, want 0", name, s.Open)
		}
		s.Unlock()
	}
}

// TestSourceErrorsNameTheObject: a fault of a store or of an object is an immediate error that
// names the object.
func TestSourceErrorsNameTheObject(t *testing.T) {
	archivetest.Within(t)
	archivetest.NoLeaks(t)
	const url = "store://b/a.tgz"
	data := string(archivetest.Gzip(t, archivetest.Images(t, 20, nil)))
	for name, c := range map[string]struct {
		url  string
		do   func(*sourcetest.Store) // after Open
		want error
		says string
	}{
		"no such object": {"store://b/none.tgz", nil, fs.ErrNotExist, "store://b/none.tgz"},
		"replaced": {url, func(s *sourcetest.Store) {
			s.Objects[url] = sourcetest.Object{Data: data,
				Version: "2"}
		}, nil, "has changed since it was opened"},
		"forbidden": {url, func(s *sourcetest.Store) { s.Err = fs.ErrPermission }, fs.ErrPermission, url},
	} {
		s := sourcetest.New(1, map[string]sourcetest.Object{url: {Data: data, Version: "1"}})
		o := Options{BatchSize: 4, Transform: Eval(4, 4), NoIndex: true, ShuffleBytes: 1, OpenSource: s.OpenSource}
		l, err := open(t.Context(), c.url, o, openFile, fakeCodec{})
		if err == nil {
			s.Lock()
			c.do(s)
			s.Unlock()
			_, err = collect(t, l, 0, 2)
			l.Close()
		}
		if err == nil || c.want != nil && !errors.Is(err, c.want) ||
			!strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), c.url) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	_, err := Open("s3://bucket/train.tgz", Options{})
	if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "Options.OpenSource") ||
		!strings.Contains(err.Error(), "imageloader/blob") {
		t.Errorf("no OpenSource: error %v, want the error %v with %q and %q",
			err, errors.ErrUnsupported, "Options.OpenSource", "imageloader/blob")
	}
}
