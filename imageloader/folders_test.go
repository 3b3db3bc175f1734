package imageloader

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// layouts returns the paths of archives of all kinds with the same members.
func layouts(t *testing.T, members ...archivetest.Member) map[string]string {
	t.Helper()
	data := archivetest.Tar(t, members...)
	return map[string]string{
		"tar":    archivetest.WriteFile(t, "a.tar", data),
		"tgz":    archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, data)),
		"folder": archivetest.Extract(t, members),
	}
}

// labelledNames loads an epoch, and returns each sample's name with its class, sorted.
func labelledNames(t *testing.T, path string, o Options) (list []string, l *Loader, log string) {
	t.Helper()
	var lines bytes.Buffer
	o.Transform, o.Logger = Eval(4, 4), slog.New(slog.NewTextHandler(&lines, nil))
	l = openFake(t, path, o)
	batches, err := collect(t, l, 0, 2)
	if err != nil {
		t.Fatalf("%s: %v, want no error", path, err)
	}
	for _, b := range batches {
		for i, s := range b.samples {
			list = append(list, s.Name+" "+l.Classes()[b.labels[i]])
		}
	}
	slices.Sort(list)
	return list, l, lines.String()
}

// TestLinkedFoldersAreClasses: a class folder, an image and an archive's path may be symbolic
// links. They are followed, and the classes are ImageFolder's.
func TestLinkedFoldersAreClasses(t *testing.T) {
	image := archivetest.Image("x")
	store := archivetest.Extract(t,
		[]archivetest.Member{{Name: "cats/1.png", Data: image}, {Name: "md5/ab/cdef", Data: image},
			{Name: "1.JPG", Data: image}})
	link := func(name, to string) archivetest.Member {
		return archivetest.Member{Name: name, Kind: tar.TypeSymlink, Link: filepath.Join(store, to)}
	}
	root := archivetest.Extract(t, []archivetest.Member{
		{Name: "bird/1.png", Data: image}, link("bird/2.png", "md5/ab/cdef"), link("cat", "cats"),
		link("dog", "cats"), link("eel/1.jpg", "1.JPG"),
	})
	alias := filepath.Join(t.TempDir(), "alias")
	if err := os.Symlink(root, alias); err != nil {
		t.Fatal(err)
	}
	want := []string{"bird/1.png bird", "bird/2.png bird", "cat/1.png cat", "dog/1.png dog", "eel/1.jpg eel"}
	for _, path := range []string{root, alias} {
		got, l, log := labelledNames(t, path, Options{})
		if !slices.Equal(got, want) || l.Stats().Ignored != 0 || strings.Contains(log, "WARN") {
			t.Errorf("samples %q, %d ignored, want %q and 0; log:\n%s", got, l.Stats().Ignored, want, log)
		}
	}
}

// TestBrokenLinksAreNamed: a broken link with an image's name is a bad sample with this reason. The
// log names other broken links, and links to a folder that contains the link itself.
func TestBrokenLinksAreNamed(t *testing.T) {
	image := archivetest.Image("x")
	link := func(name, to string) archivetest.Member {
		return archivetest.Member{Name: name, Kind: tar.TypeSymlink, Link: to}
	}
	root := archivetest.Extract(t, []archivetest.Member{
		{Name: "a/1.png", Data: image}, link("a/2.png", "nowhere"), link("a/up", ".."),
		link("b", "../nowhere"), {Name: "c/1.png", Data: image},
	})
	got, l, log := labelledNames(t, root, Options{BadSamples: Skip})
	if want := []string{"a/1.png a", "c/1.png c"}; !slices.Equal(got, want) ||
		l.Stats().BadBy[NotRegular] != 1 || l.Stats().Ignored != 2 {
		t.Errorf("samples %q, %+v, want %q, 1 bad and 2 ignored", got, l.Stats(), want)
	}
	for _, want := range []string{"a symbolic link that leads nowhere", "first=[b]", "first=[a/up]"} {
		if strings.Count(log, want) != 1 {
			t.Errorf("the log has %q %d times, want 1:\n%s", want, strings.Count(log, want), log)
		}
	}
	_, err := collect(t, openFake(t, root, Options{Transform: Eval(4, 4)}), 0, 2)
	var bad *SampleError
	if !errors.As(err, &bad) || bad.Name != "a/2.png" || bad.Index != 1 {
		t.Errorf("with Fail: error %v, want one of sample 1, a/2.png", err)
	}
}

// TestOtherFilesAreIgnored: files that do not claim to be images are counted and do not end an
// epoch, in archives of each kind. This holds in the run that makes the index, and in the next one,
// which finds it.
func TestOtherFilesAreIgnored(t *testing.T) {
	image := archivetest.Image("x")
	members := []archivetest.Member{{Name: "a/1.png", Data: image}, {Name: "b/1.png", Data: image},
		{Name: "b/2", Data: image}}
	others := []string{"a/.DS_Store", "a/Thumbs.db", "a/desktop.ini", "a/1.xml", "a/1.json", "a/1.txt",
		"a/README", "b/._1.png", "b/1.npy", "b/empty", "labels.csv", "__MACOSX/a/._1.png"}
	for _, name := range others {
		members = append(members, archivetest.Member{Name: name, Data: strings.Repeat("\x00\x05\x16\x07", len(name)%3)})
	}
	for kind, path := range layouts(t, members...) {
		for round := range 2 {
			got, l, log := labelledNames(t, path, Options{}) // BadSamples: Fail
			want := []string{"a/1.png a", "b/1.png b", "b/2 b"}
			if s := l.Stats(); !slices.Equal(got, want) || l.Len() != 3 || s.Ignored != len(others) || s.Bad != 0 {
				t.Errorf("%s, round %d: samples %q, Len %d, %d ignored, %d bad, want %q, 3, %d, 0", kind,
					round, got, l.Len(), s.Ignored, s.Bad, want, len(others))
			}
			if strings.Contains(log, "WARN") {
				t.Errorf("%s, round %d: warnings:\n%s\nwant it without %q", kind, round, log, "WARN")
			}
		}
		r, err := inspect(t.Context(), path, Options{}, openFile, fakeCodec{})
		if err != nil || r.Samples != 3 || r.Ignored != len(others) || len(r.Bad) != 0 || len(r.LeftOut) != 0 {
			t.Errorf("%s: report %+v, error %v, want 3 samples and %d ignored", kind, r, err, len(others))
		}
	}
}

// TestUnreadableClassKeepsItsLabel: if all images of a class are in formats without a decoder, or
// are pointers of Git LFS, it is still a class, and its images are bad samples with names.
func TestUnreadableClassKeepsItsLabel(t *testing.T) {
	contents := map[string]string{
		"avifs": "\x00\x00\x00\x20ftypavis\x00\x00\x00\x00",
		"heics": "\x00\x00\x00\x18ftyphevc\x00\x00\x00\x00", "hif": "\x00\x00\x00\x18ftypmsf1\x00\x00\x00\x00",
		"jxl": "\x00\x00\x00\x0cJXL \r\n\x87\n", "jp2": "\x00\x00\x00\x0cjP  \r\n\x87\n",
		"": "\x00\x00\x00\x0cJXL \r\n\x87\n",
	}
	for _, ext := range []string{"heic", "heif", "avif", "jfif", "jp2", "jxl", "HEIC", "ppm", "avifs",
		"heics", "hif", ""} {
		content, reason := contents[ext], Unsupported
		if content == "" {
			reason, content = NotImage, "version https://git-lfs.github.com/spec/v1\n"
		}
		name := strings.TrimSuffix("a/1."+ext, ".")
		for kind, path := range layouts(t, archivetest.Member{Name: name, Data: content},
			archivetest.Member{Name: "b/1.png", Data: archivetest.Image("x")}) {
			for round := range 2 {
				got, l, log := labelledNames(t, path, Options{BadSamples: Skip})
				if !slices.Equal(got, []string{"b/1.png b"}) ||
					!slices.Equal(l.Classes(), []string{"a", "b"}) || l.Stats().BadBy[reason] != 1 ||
					!strings.Contains(log, "name="+name) {
					t.Errorf("%s, %s, round %d: samples %q of classes %q, bad %v, want b/1.png of a and "+
						"b, 1 %s; log:\n%s", ext, kind, round, got, l.Classes(), l.Stats().BadBy, reason, log)
				}
			}
		}
	}
}

// TestHiddenFoldersAreNoClasses: images in a hidden folder, at any depth, change no label and cause
// no unknown class. A warning names the folder, in the run that makes the index and in the next
// one.
func TestHiddenFoldersAreNoClasses(t *testing.T) {
	image := archivetest.Image("x")
	members := []archivetest.Member{
		{Name: "train/.ipynb_checkpoints/1-checkpoint.png", Data: image},
		{Name: ".Trash-1000/files/cat/1.png", Data: image},
		{Name: "train/.git/config", Data: "text"}, {Name: "train/a/1.png", Data: image},
		{Name: "train/b/.2.png", Data: image}, {Name: "train/b/.cache/3.png", Data: image},
	}
	for kind, path := range layouts(t, members...) {
		for round := range 4 {
			o := Options{}
			if round >= 2 {
				o.Classes = []string{"a", "b"}
			}
			got, l, log := labelledNames(t, path, o)
			if want := []string{"train/a/1.png a", "train/b/.2.png b"}; !slices.Equal(got, want) ||
				!slices.Equal(l.Classes(), []string{"a", "b"}) || l.Stats().Ignored != 4 {
				t.Errorf("%s, round %d: samples %q of classes %q, %d ignored, want %q and 4", kind, round,
					got, l.Classes(), l.Stats().Ignored, want)
			}
			warning := 0
			for line := range strings.Lines(log) {
				if strings.Contains(line, "WARN") && strings.Contains(line, "hidden folders") &&
					strings.Contains(line, ".ipynb_checkpoints") && strings.Contains(line, ".Trash-1000") &&
					strings.Contains(line, "count=3") {
					warning++
				}
			}
			if warning != 1 || strings.Count(log, "WARN") != 1 {
				t.Errorf("%s, round %d: %d warnings of hidden folders, want 1:\n%s", kind, round, warning, log)
			}
		}
		if kind == "folder" {
			_, err := open(t.Context(), filepath.Join(path, ".Trash-1000", ".."),
				Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
			if err != nil {
				t.Errorf("a path through a hidden folder: %v, want no error", err)
			}
			l := openFake(t, filepath.Join(path, ".Trash-1000"), Options{Transform: Eval(4, 4)})
			if !slices.Equal(l.Classes(), []string{"cat"}) {
				t.Errorf("a hidden folder given as the archive has classes %q, want cat", l.Classes())
			}
		}
	}
	path := archivetest.WriteFile(t, "hidden.tar", archivetest.Tar(t, members[:2]...))
	_, err := open(t.Context(), path, Options{Transform: Eval(4, 4)}, openFile, fakeCodec{})
	if want := `2 hidden folders, the first is ".ipynb_checkpoints"`; !errors.Is(err, ErrNoSamples) ||
		!strings.Contains(err.Error(), want) {
		t.Errorf("an archive of hidden folders: error %v, want the error %v with %q",
			err, ErrNoSamples, want)
	}
}

// TestFoldersWithoutAnImageAreNamed: a warning and the report of an inspection name a folder
// without an image that may have been meant as a class. They do so in the run that makes the index
// and in the next one. They do not name a folder whose subfolders are classes.
func TestFoldersWithoutAnImageAreNamed(t *testing.T) {
	image := archivetest.Image("x")
	members := []archivetest.Member{
		{Name: "ds/", Kind: tar.TypeDir}, {Name: "ds/README", Data: "text"},
		{Name: "ds/train/", Kind: tar.TypeDir}, {Name: "ds/train/none/", Kind: tar.TypeDir},
		{Name: "ds/train/raw/1.xyz", Data: "pixels"}, {Name: "ds/train/zebra/1.png", Data: image},
		{Name: "ds/test/zebra/", Kind: tar.TypeDir},
	}
	for kind, path := range layouts(t, members...) {
		for round := range 2 {
			got, _, log := labelledNames(t, path, Options{})
			if !slices.Equal(got, []string{"ds/train/zebra/1.png zebra"}) ||
				strings.Count(log, "WARN") != 1 || !strings.Contains(log, "count=2") ||
				!strings.Contains(log, "none") || !strings.Contains(log, "raw") {
				t.Errorf("%s, round %d: samples %q, want one, and a warning of none and raw:\n%s", kind,
					round, got, log)
			}
		}
		reports := map[string]func() (*Report, error){
			"images": func() (*Report, error) { return inspect(t.Context(), path, Options{}, openFile, fakeCodec{}) },
		}
		if kind != "folder" {
			reports["index"] = func() (*Report, error) { return InspectIndex(t.Context(), path, Options{}, nil) }
		}
		for by, report := range reports {
			r, err := report()
			if err != nil || len(r.LeftOut) != 1 || r.LeftOut[0].Count != 2 ||
				!slices.Equal(slices.Sorted(slices.Values(r.LeftOut[0].First)), []string{"none", "raw"}) {
				t.Errorf("%s, by %s: error %v, left out %+v, want none and raw", kind, by, err, r)
			}
		}
	}
}

// TestLinksInATarAreNamed: a tar's links without an image's name may stand for classes. A warning
// names them.
func TestLinksInATarAreNamed(t *testing.T) {
	image := archivetest.Image("x")
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, archivetest.Member{Name: "dog/1.png", Data: image},
		archivetest.Member{Name: "cat", Kind: tar.TypeSymlink, Link: "../cats"},
		archivetest.Member{Name: "dog/2", Kind: tar.TypeLink, Link: "dog/1.png"},
		archivetest.Member{Name: "dog/3.png", Kind: tar.TypeLink, Link: "dog/1.png"}))
	for round := range 2 {
		got, l, log := labelledNames(t, path, Options{BadSamples: Skip})
		if !slices.Equal(got, []string{"dog/1.png dog"}) || l.Stats().Ignored != 2 || l.Stats().BadBy[NotRegular] != 1 {
			t.Errorf("round %d: samples %q, %d ignored, %v", round, got, l.Stats().Ignored, l.Stats().BadBy)
		}
		for _, want := range []string{"first=[cat]", "first=[dog/2]"} {
			if strings.Count(log, want) != 1 {
				t.Errorf("round %d: the log has %q %d times, want 1:\n%s", round, want,
					strings.Count(log, want), fmt.Sprint(log))
			}
		}
	}
}
