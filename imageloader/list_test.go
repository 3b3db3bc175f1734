//go:build linux

package imageloader

import (
	"archive/zip"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// writeList writes a list into a new folder.
func writeList(t *testing.T, text string) string {
	t.Helper()
	return archivetest.WriteFile(t, "labels.csv", []byte(text))
}

// labelled returns the names and labels of an epoch's samples.
func labelled(batches []copied) (list []string) {
	for _, b := range batches {
		for i, s := range b.samples {
			list = append(list, fmt.Sprintf("%s=%d", s.Name, b.labels[i]))
		}
	}
	return list
}

// listedMembers returns images in and outside of directories, and other members.
func listedMembers() []archivetest.Member {
	member := func(name string) archivetest.Member {
		return archivetest.Member{Name: name, Data: archivetest.Image(name)}
	}
	return []archivetest.Member{
		member("1.png"), member("a/2.png"), {Name: "a/notes.txt", Data: "no image"}, member("a/b/3.png"),
		member("c/4.png"), member("d/5.png"),
	}
}

// TestListLabelsAnySource: for each kind of source, samples and labels are the list's, by a scan
// and by the index file that the scan writes.
func TestListLabelsAnySource(t *testing.T) {
	members := listedMembers()
	data := archivetest.Tar(t, members...)
	dir := t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	put("s-0.tgz", archivetest.Gzip(t, archivetest.Tar(t, members[:3]...)))
	put("s-1.tgz", archivetest.Gzip(t, archivetest.Tar(t, members[3:]...)))
	text := "label,path\ndog,d/5.png\ncat,1.png\ndog,./a/b/3.png\ndog,a/2.png\n"
	list := put("labels.csv", []byte(text))
	put("labels.tsv", []byte(strings.ReplaceAll(text, ",", "\t")))
	server := httptest.NewServer(http.FileServer(http.Dir(dir)))
	defer server.Close()
	t.Setenv("XDG_CACHE_HOME", t.TempDir())
	want := []string{"1.png=0", "a/2.png=1", "a/b/3.png=1", "d/5.png=1"}
	for name, c := range map[string]struct{ path, list string }{
		"tar":    {put("a.tar", data), list},
		"tgz":    {put("a.tgz", archivetest.Gzip(t, data)), filepath.Join(dir, "labels.tsv")},
		"zstd":   {put("a.tar.zst", archivetest.Zstd(t, data)), list},
		"folder": {archivetest.Extract(t, members), list},
		"shards": {filepath.Join(dir, "s-{0,1}.tgz"), list},
		"URL":    {server.URL + "/a.tgz", server.URL + "/labels.csv"},
	} {
		for _, held := range []int64{1, 0} {
			for round := range 2 {
				for _, classes := range [][]string{nil, {"cat", "dog"}} {
					o := Options{Transform: Eval(4, 4), BatchSize: 3, List: c.list, ShuffleBytes: held,
						Classes: classes}
					l, err := open(t.Context(), c.path, o, openFile, fakeCodec{})
					if err != nil {
						t.Fatalf("%s: %v, want no error", name, err)
					}
					batches, err := collect(t, l, 0, 2)
					if got := labelled(batches); err != nil || !slices.Equal(got, want) ||
						!slices.Equal(l.Classes(), []string{"cat", "dog"}) || l.Stats().Ignored != 2 {
						t.Errorf("%s, held %d, round %d: %v of %v, %d ignored, error %v", name, held, round,
							got, l.Classes(), l.Stats().Ignored, err)
					}
					if err := l.Close(); err != nil {
						t.Error(err)
					}
				}
			}
		}
	}
}

// TestListOfJSONIsAnError: metadata.jsonl of Hugging Face is not a list, and the error says so.
func TestListOfJSONIsAnError(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, listedMembers()...))
	list := archivetest.WriteFile(t, "metadata.jsonl", []byte(`{"file_name": "1.png", "label": 3}`))
	_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), List: list}, openFile, fakeCodec{})
	if err == nil || !strings.Contains(err.Error(), "metadata.jsonl: a list is a CSV or TSV file, not JSON") {
		t.Errorf("error %v, want one that asks for a CSV or TSV file", err)
	}
}

// TestListInAnotherNormalFormIsNamed: a list from macOS has accents as separate characters in its
// paths. Its paths do not match those of an archive from another system, and the error says why.
func TestListInAnotherNormalFormIsNamed(t *testing.T) {
	const nfc, nfd = "B\u00e4r/1.png", "Ba\u0308r/1.png"
	image := archivetest.Image("x")
	path := archivetest.WriteFile(t, "a.tar",
		archivetest.Tar(t, archivetest.Member{Name: "a.png", Data: image}, archivetest.Member{Name: nfd, Data: image}))
	for _, index := range []bool{false, true} { // whether there is an index
		_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), List: writeList(t, nfc+",bear\n")},
			openFile, fakeCodec{})
		if want := `"B\u00e4r/1.png" and "Ba\u0308r/1.png" differ only in their Unicode normal form (NFC, NFD)`; err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("index %v: error %v, want it with %s", index, err, want)
		}
		if _, err := MakeIndex(t.Context(), path,
			Options{Transform: Eval(4, 4), List: writeList(t, nfd+",bear\n")}, nil); err != nil {
			t.Error(err)
		}
	}
}

// TestListErrorsNameTheLine: a row that does not fit the archive is an error with file and line,
// with and without an index. The index stays unchanged.
func TestListErrorsNameTheLine(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, listedMembers()...))
	pipe := filepath.Join(t.TempDir(), "list.csv")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	good := writeList(t, "1.png,cat\na/2.png,dog\n")
	o := Options{Transform: Eval(4, 4), List: good}
	for _, index := range []bool{false, true} { // whether there is an index
		for text, want := range map[string]string{
			"b/2.png,dog\n6.png,dog\n": `labels.csv:1: "b/2.png" is no member of ` + path +
				` (2 lines in all name none): names in column 1, labels in column 2; if the first line has the names of ` +
				`the columns, choose columns by them (Options.ListFormat.NameColumn); an image there that the list ` +
				`does not name is "1.png"`,
			"photo,breed\n1,cat\n2,dog\n3,dog\n": `labels.csv:1: "photo" is no member of ` + path + `: names in column 1`,
			"a/2,cat\na/2.png,dog\n":             `labels.csv:2: "a/2.png" is the image "a/2" of line 1, with another label or group`,
			"1.png,cat\na/2.png,cow\n":           `labels.csv:2: "a/2.png" is of class "cow"`,
			"1.png,cat\n1.png,dog\n":             `labels.csv:2: "1.png" is in line 1 already, with the label "cat", and here with "dog"`,
		} {
			bad := o
			bad.List = writeList(t, text)
			if strings.Contains(want, "class") {
				bad.Classes = []string{"cat", "dog"}
			}
			_, err := open(t.Context(), path, bad, openFile, fakeCodec{})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%q, index %v: error %v, want %s", text, index, err, want)
			}
			var line *ListError
			var class *UnknownClassError
			if !errors.As(err, &line) && !errors.As(err, &class) {
				t.Errorf("%q: %T", text, err)
			}
			if index {
				r, err := MakeIndex(t.Context(), path, o, nil)
				if err != nil || r.Samples != 2 || r.Classes != 2 {
					t.Errorf("%+v, error %v, want no error, r.Samples = 2, r.Classes = 2", r, err)
				}
			}
		}
		for file, want := range map[string]string{pipe: "not a regular file",
			filepath.Join(t.TempDir(), "none.csv"): "no such file", t.TempDir(): "not a regular file"} {
			bad := o
			bad.List = file
			if _, err := open(t.Context(), path, bad, openFile, fakeCodec{}); err == nil ||
				!strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), file) {
				t.Errorf("error %v, want %s", err, want)
			}
		}
		if l, err := open(t.Context(), path, o, openFile, fakeCodec{}); err != nil {
			t.Error(err)
		} else if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []Options{{List: good, WebDataset: true},
		{List: good, Masks: Masks{Image: "*.jpg", Mask: "*.png"}}} {
		if _, err := Open(path, bad); err == nil || !strings.Contains(err.Error(), "exclude") {
			t.Errorf("error %v, want an error with %q", err, "exclude")
		}
	}
}

// TestIndexServesAnyList: the index of a list has no labels, so it serves another list without
// being rewritten. An index of directories is not used for a list.
func TestIndexServesAnyList(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, listedMembers()...)))
	run := func(list string) []string {
		t.Helper()
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), List: list}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		if err := errors.Join(err, l.Close()); err != nil {
			t.Fatal(err)
		}
		return labelled(batches)
	}
	index := func() string {
		t.Helper()
		data, err := os.ReadFile(path + indextest.Suffix)
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	first, second := writeList(t, "1.png,0\na/2.png,3\n"), writeList(t, "d/5.png,1\n1.png,2\n")
	for range 2 {
		if got := run(first); !slices.Equal(got, []string{"1.png=0", "a/2.png=3"}) {
			t.Errorf("%v, want %+v", got, []string{"1.png=0", "a/2.png=3"})
		}
		before := index()
		if got := run(second); !slices.Equal(got, []string{"1.png=2", "d/5.png=1"}) || index() != before {
			t.Errorf("%v, or another index", got)
		}
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{}) // replaces the index
		if err != nil || l.Len() != 4 || index() == before {
			t.Errorf("%d samples of directories, want 4, or the index of a list: %v", l.Len(), err)
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := InspectIndex(t.Context(), path, Options{List: first}, nil); !errors.Is(err, ErrOtherLabels) ||
		!strings.Contains(err.Error(), "the labels of directories") {
		t.Errorf("an index of directories is inspected: error %v, want ErrOtherLabels with %q", err,
			"the labels of directories")
	}
	run(first)
	r, err := InspectIndex(t.Context(), path, Options{List: first}, nil)
	if err != nil || r.Samples != 2 || r.Classes[3].Samples != 1 {
		t.Errorf("%+v, error %v, want no error, r.Samples = 2, r.Classes[3].Samples = 1", r, err)
	}
}

// TestStateNamesAnotherList: a state fits a list with the same samples and labels at any path, and
// no other list.
func TestStateNamesAnotherList(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, listedMembers()...))
	o := Options{Transform: Eval(4, 4), BatchSize: 1, List: writeList(t, "1.png,0\na/2.png,3\nc/4.png,1\n")}
	l := openFake(t, path, o)
	_, after := states(t, l, 0, 2)
	data, err := json.Marshal(after[0])
	if err != nil {
		t.Fatal(err)
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		t.Fatal(err)
	}
	for text, fits := range map[string]bool{
		"c/4.png,1\n1.png,0\na/2.png,3\n":            true,
		"1.png,3\na/2.png,0\nc/4.png,1\n":            false,
		"1.png,0\na/2.png,3\n":                       false,
		"1.png,0\na/2.png,3\nc/4.png,1\nd/5.png,1\n": false,
	} {
		other := o
		other.List = writeList(t, text)
		if err := openFake(t, path, other).Restore(t.Context(), s); (err == nil) != fits {
			t.Errorf("%q: error %v", text, err)
		}
	}
}

// TestInspectFollowsTheList: a report has the samples and classes of the list.
func TestInspectFollowsTheList(t *testing.T) {
	members := append(listedMembers(), archivetest.Member{Name: "bad", Data: archivetest.Image("BAD")})
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...)))
	o := Options{List: writeList(t, "d/5.png,2\nbad,0\n1.png,0\na/notes.txt,2\n")}
	r, err := inspect(t.Context(), path, o, openFile, fakeCodec{})
	if err != nil || r.Samples != 4 || len(r.Classes) != 3 || r.Classes[0].Samples != 2 ||
		r.Classes[2].Bad != 1 || r.Ignored != 3 || r.Orphans != 3 ||
		len(r.Bad) != 2 || r.Bad[0].Name != "a/notes.txt" || r.Bad[0].Index != 1 ||
		r.Bad[1].Name != "bad" || r.Bad[1].Index != 3 {
		t.Errorf("%+v, error %v", r, err)
	}
	for text, want := range map[string]string{"6.png,0\n7.png,0\n": "labels.csv:1: \"6.png\" is no member",
		"1.png,-1\n": "labels.csv:1: \"1.png\" has the label"} {
		o.List = writeList(t, text)
		if _, err := inspect(t.Context(), path, o, openFile, fakeCodec{}); err == nil ||
			!strings.Contains(err.Error(), want) {
			t.Errorf("error %v, want %s", err, want)
		}
	}
	if _, _, err := Fix(t.Context(), path, filepath.Join(t.TempDir(), "out.tar"), o, FixOptions{},
		nil); err == nil || !strings.Contains(err.Error(), "takes no Options.List") {
		t.Errorf("error %v, want an error with %q", err, "takes no Options.List")
	}
}

// TestListInTheArchive: a list that is a member labels the other members, for each kind of archive.
func TestListInTheArchive(t *testing.T) {
	members := append([]archivetest.Member{{Name: "set/train.csv", Data: "image_id;breed\n1;dog\n2;cat\n7;cat\n"}},
		archivetest.Member{Name: "set/images/1.png", Data: archivetest.Image("1")},
		archivetest.Member{Name: "set/images/2.png", Data: archivetest.Image("2")},
		archivetest.Member{Name: "set/images/3.png", Data: archivetest.Image("3")},
		archivetest.Member{Name: "set/old/labels.csv", Data: "1,x\n"}, archivetest.Member{Name: "labels.csv", Data: "2,y\n"},
		archivetest.Member{Name: "a/twice.csv", Data: "1,x\n"}, archivetest.Member{Name: "b/twice.csv", Data: "1,x\n"})
	data, dir := archivetest.Tar(t, members...), t.TempDir()
	put := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			t.Fatal(err)
		}
		return path
	}
	for _, path := range []string{put("a.tar", data), put("a.tgz", archivetest.Gzip(t, data)),
		put("a.tar.zst", archivetest.Zstd(t, data)), put("a.zip", zipped(t, data, zip.Deflate)), archivetest.Extract(t, members)} {
		for list, want := range map[string]string{"train.csv": "set/images/1.png=1 set/images/2.png=0",
			"./set/train.csv": "set/images/1.png=1 set/images/2.png=0", "labels.csv": "set/images/2.png=0"} {
			l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), List: list}, openFile, fakeCodec{})
			if err != nil {
				t.Errorf("%s, %s: %v, want no error", path, list, err)
				continue
			}
			batches, err := collect(t, l, 0, 2)
			if got := strings.Join(labelled(batches), " "); err != nil || got != want {
				t.Errorf("%s, %s: got %s, error %v, want %s", path, list, got, err, want)
			}
			r := l.ListReport()
			if r == nil || !strings.HasPrefix(r.File, path+":") || list == "train.csv" &&
				(r.WithoutImage != 1 || r.FirstWithoutLine != 4 || r.Unlisted != 1 || r.FirstUnlisted != "set/images/3.png") {
				t.Errorf("%s, %s: got the report %+v", path, list, r)
			}
			if err := l.Close(); err != nil {
				t.Error(err)
			}
		}
		for list, want := range map[string]string{
			"test.csv":  "no such file or directory, nor is it in " + path + ", which has",
			"twice.csv": "twice.csv may be a/twice.csv or b/twice.csv in " + path + ": give the whole name",
		} {
			_, err := open(t.Context(), path, Options{Transform: Eval(4, 4), List: list}, openFile, fakeCodec{})
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("%s, %s: got the error %v, want %s", path, list, err, want)
			}
		}
	}
}

// TestListOfSeveralLabels: one-hot columns and columns of names make soft labels, with and without
// an index, and a report counts an image in each of its classes.
func TestListOfSeveralLabels(t *testing.T) {
	path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Tar(t, listedMembers()...)))
	for text, want := range map[string]string{
		"id,x,z,y\n1,1,0,1\n2,0,0,0\n4,0,1,1\n":      "[x y z] [x y  y z]",
		"id,labels\n1,y x\n2,\n4,z y\n":              "[x y z] [x y  y z]",
		"name;labels\n1;\"x;y\"\n2;\n4;\"z;y\"\n":    "[x y z] [x y  y z]",
		"id,labels\n1,0|2\n2,\n4,1\n":                "[0 1 2] [0 2  1]",
		"1.png,wild cat|dog\na/2.png,\nc/4.png,dog ": "[dog wild cat] [dog wild cat  dog]",
	} {
		for range 2 {
			o := Options{BatchSize: 2, Transform: Transform{Size: 6, Resize: 8}, List: writeList(t, text), MultiLabel: true}
			l := openFake(t, path, o)
			if got := fmt.Sprintf("%v %v", l.Classes(), hotLabels(t, l)); got != want {
				t.Errorf("%q: got %s, want %s", text, got, want)
			}
			r, err := InspectIndex(t.Context(), path, o, nil)
			if err != nil || r.Samples != 3 {
				t.Fatalf("%q: got %+v, error %v, want 3 samples", text, r, err)
			}
			if strings.HasPrefix(text, "id,x") && (r.Classes[1].Samples != 2 || r.Classes[0].Samples != 1) {
				t.Errorf("%q: got the classes %+v, want 1 of x and 2 of y", text, r.Classes)
			}
			if r, err = inspect(t.Context(), path, o, openFile, fakeCodec{}); err != nil || r.Samples != 3 ||
				strings.HasPrefix(text, "id,x") && r.Classes[1].Samples != 2 {
				t.Errorf("%q: got %+v, error %v, want 3 samples", text, r, err)
			}
		}
	}
	o := Options{Transform: Eval(4, 4), MultiLabel: true, List: writeList(t, "1.png,x y\na/2.png,z\n"), Classes: []string{"x", "z"}}
	if _, err := open(t.Context(), path, o, openFile, fakeCodec{}); err == nil ||
		!strings.Contains(err.Error(), `labels.csv:1: "1.png" is of class "y"`) {
		t.Errorf("got the error %v, want one about the class y in line 1", err)
	}
}
