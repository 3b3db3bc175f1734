package imageloader

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// unpackedMembers reads an archive of any format that Fix writes.
func unpackedMembers(t *testing.T, path string) (list []archivetest.Member) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	var in io.Reader = bytes.NewReader(data)
	switch {
	case strings.HasSuffix(path, "gz"):
		in, err = gzip.NewReader(in)
	case strings.HasSuffix(path, ".zst"):
		in, err = zstd.NewReader(in)
	}
	if err != nil {
		t.Fatal(err)
	}
	for r := tar.NewReader(in); ; {
		h, err := r.Next()
		if err == io.EOF {
			return list
		}
		if err != nil {
			t.Fatal(err)
		}
		content, err := io.ReadAll(r)
		if err != nil {
			t.Fatal(err)
		}
		if h.Mode != 0o644 || h.ModTime.Unix() != 0 || h.Uname != "" {
			t.Errorf("%s: header %+v", h.Name, h)
		}
		list = append(list, archivetest.Member{Name: h.Name, Data: string(content)})
	}
}

// folderIsClean checks that a folder has only the named files.
func folderIsClean(t *testing.T, folder string, names ...string) {
	t.Helper()
	list, err := os.ReadDir(folder)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range list {
		if !slices.Contains(names, f.Name()) {
			t.Errorf("%s is left in the folder", f.Name())
		}
	}
}

// TestFixKeepsTheGoodMembers: the fixed archive has the good members with their names, bytes, order
// and labels, is the same every time, and no sample of it is bad.
func TestFixKeepsTheGoodMembers(t *testing.T) {
	list := oddities(t)
	long := "c/" + strings.Repeat("ü long ", 40) + ".jpg"
	list = append(list, archivetest.Member{Name: long, Data: list[0].Data},
		archivetest.Member{Name: "README", Data: "outside"})
	refused := []string{"c/cut.jpg", "c/header.jpg", "c/text.jpg", "b/link.jpg", "b/empty.jpg"}
	list = append(list, archivetest.Member{Name: "b/good.jpg", Data: list[0].Data})
	var want []archivetest.Member
	for _, m := range list {
		if !slices.Contains(refused, m.Name) {
			want = append(want, m)
		}
	}
	data := archivetest.Tar(t, list...)
	for from, in := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"a.tar.zst": archivetest.Zstd(t, data)} {
		path := archivetest.WriteFile(t, from, in)
		for _, name := range []string{"out.tar", "out.tgz", "out.tar.gz", "out.tar.zst"} {
			out := filepath.Join(t.TempDir(), name)
			report, fixed, err := Fix(t.Context(), path, out, Options{}, FixOptions{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := unpackedMembers(t, out); !slices.Equal(got, want) {
				t.Fatalf("%s to %s: %d members, want %d (%+v)", from, name, len(got), len(want), fixed)
			}
			info, err := os.Stat(out)
			if err != nil {
				t.Fatal(err)
			}
			if fixed.Members != len(want) || fixed.LeftOut != len(refused) || fixed.Rewritten != 0 ||
				fixed.Bytes != info.Size() || fixed.File != out ||
				len(report.Bad) != len(refused) {
				t.Errorf("%+v", fixed)
			}
			folderIsClean(t, filepath.Dir(out), name)
			once, err := os.ReadFile(out)
			if err != nil {
				t.Fatal(err)
			}
			if err := os.Truncate(out, 0); err != nil { // an empty file is replaced
				t.Fatal(err)
			}
			if _, _, err := Fix(t.Context(), path, out, Options{}, FixOptions{}, nil); err != nil {
				t.Fatal(err)
			}
			if twice, err := os.ReadFile(out); err != nil || !bytes.Equal(once, twice) {
				t.Errorf("%s to %s: other bytes the second time (%v)", from, name, err)
			}
			if name != "out.tgz" {
				continue
			}
			again, err := Inspect(t.Context(), out, Options{}, nil)
			if err != nil || len(again.Bad) > 0 || again.Samples != report.Samples-len(refused) ||
				len(again.Classes) != len(report.Classes) {
				t.Errorf("the fixed archive: %+v, %v", again, err)
			}
		}
	}
}

// TestFixReadsFolders: a directory is fixed as an archive is, in the order of its paths.
func TestFixReadsFolders(t *testing.T) {
	jpeg := archivetest.JPEG(t, archivetest.Gradient(40, 40))
	root := archivetest.Extract(t,
		[]archivetest.Member{{Name: "b/1.jpg", Data: jpeg}, {Name: "a/2.jpg", Data: jpeg},
			{Name: "a/1.jpg", Data: jpeg[:90]}})
	out := filepath.Join(t.TempDir(), "out.tgz")
	if _, _, err := Fix(t.Context(), root, out, Options{}, FixOptions{}, nil); err != nil {
		t.Fatal(err)
	}
	if got := unpackedMembers(t, out); len(got) != 2 || got[0].Name != "a/2.jpg" || got[1].Name != "b/1.jpg" {
		t.Errorf("%v, want len(got) = 2, got[0].Name = %q, got[1].Name = %q", got, "a/2.jpg", "b/1.jpg")
	}
	for _, inside := range []string{filepath.Join(root, "out.tgz"), filepath.Join(root, "a", "out.tgz")} {
		if _, _, err := Fix(t.Context(), root, inside, Options{}, FixOptions{}, nil); err == nil ||
			!strings.Contains(err.Error(), "lies inside of") {
			t.Errorf("error %v, want an error with %q", err, "lies inside of")
		}
	}
}

// TestFixRewritesWhatOnlyPartialDecodes: an image that only Partial decodes is replaced by a PNG
// with its pixels and its EXIF orientation. An image that Warned decodes keeps its bytes.
func TestFixRewritesWhatOnlyPartialDecodes(t *testing.T) {
	list := damagedMembers(t)
	cut := list[3]
	turned := cut
	turned.Name = "c/turned.jpg"
	exif := "\xff\xe1\x00\x22Exif\x00\x00MM\x00*\x00\x00\x00\x08\x00\x01\x01\x12\x00\x03\x00\x00\x00\x01\x00\x06\x00\x00\x00\x00\x00\x00"
	turned.Data = cut.Data[:2] + exif + cut.Data[2:]
	list = append(list, turned)
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, list...))
	out := filepath.Join(t.TempDir(), "out.tar")
	_, fixed, err := Fix(t.Context(), path, out, Options{Damaged: Partial}, FixOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if fixed.Members != 6 || fixed.LeftOut != 1 || fixed.Rewritten != 2 {
		t.Errorf("%+v, want fixed.Members = 6, fixed.LeftOut = 1, fixed.Rewritten = 2", fixed)
	}
	before := archivetest.Contents(list)
	for _, m := range unpackedMembers(t, out) {
		if m.Name != "c/cut.jpg" && m.Name != "c/turned.jpg" {
			if m.Data != before[m.Name] {
				t.Errorf("%s: %s; want the bytes of the archive before", m.Name,
					archivetest.Difference([]byte(m.Data), []byte(before[m.Name])))
			}
			continue
		}
		want, err := decodedWhole(t, []byte(before[m.Name]), Partial)
		if err != nil {
			t.Fatal(err)
		}
		got, err := decodedWhole(t, []byte(m.Data), Refuse)
		if err != nil || !bytes.Equal(got, want) || !strings.HasPrefix(m.Data, "\x89PNG") {
			t.Errorf("%s has other pixels: %v", m.Name, err)
		}
		info, err := sample.Library{}.Header([]byte(m.Data))
		if wantOrientation := map[string]int32{"c/cut.jpg": 1, "c/turned.jpg": 6}[m.Name]; err != nil ||
			info.Orientation != wantOrientation {
			t.Errorf("%s: orientation %d, %v, want no error, info.Orientation = %v",
				m.Name, info.Orientation, err, wantOrientation)
		}
	}
}

// TestFixDropsWholeGroups: a bad image is removed with its whole group, and the other images keep
// their labels.
func TestFixDropsWholeGroups(t *testing.T) {
	jpeg := archivetest.JPEG(t, archivetest.Gradient(40, 40))
	member := func(name, data string) archivetest.Member { return archivetest.Member{Name: name, Data: data} }
	list := []archivetest.Member{
		member("1.cls", "3"), member("1.jpg", jpeg),
		member("2.cls", "5"), member("2.jpg", jpeg[:80]), member("2.mask.jpg", jpeg),
		member("3.jpg", jpeg), member("3.json", `{"label": 5}`),
		member("4.jpg", jpeg[:80]), // has no label: it is ignored
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, list...))
	out := filepath.Join(t.TempDir(), "out.tar")
	_, fixed, err := Fix(t.Context(), path, out, Options{WebDataset: true}, FixOptions{}, nil)
	if err != nil {
		t.Fatal(err)
	}
	want := slices.Delete(slices.Clone(list), 2, 5)
	if got := unpackedMembers(t, out); !slices.Equal(got, want) || fixed.LeftOut != 3 {
		t.Errorf("%v, %+v, want got = %v, fixed.LeftOut = 3", got, fixed, want)
	}
}

// TestFixRefusesUnsafeOutputs covers the cases in which nothing is written.
func TestFixRefusesUnsafeOutputs(t *testing.T) {
	jpeg := archivetest.JPEG(t, archivetest.Gradient(40, 40))
	good := archivetest.Tar(t, archivetest.Member{Name: "a/1.jpg", Data: jpeg},
		archivetest.Member{Name: "b/1.jpg", Data: jpeg[:90]}, archivetest.Member{Name: "c/1.jpg", Data: jpeg})
	path := archivetest.WriteFile(t, "a.tar", good)
	folder := t.TempDir()
	other := filepath.Join(folder, "notes.tgz")
	link := filepath.Join(folder, "link.tar")
	earlier := filepath.Join(folder, "earlier.tar")
	if err := errors.Join(os.WriteFile(other, []byte("notes"), 0o644), os.Symlink(path, link),
		os.WriteFile(earlier, good, 0o644)); err != nil {
		t.Fatal(err)
	}
	directory := filepath.Join(t.TempDir(), "directory.tar")
	if err := os.Mkdir(directory, 0o777); err != nil {
		t.Fatal(err)
	}
	cut := archivetest.WriteFile(t, "cut.tgz", archivetest.Gzip(t, good)[:300])
	bad := archivetest.WriteFile(t, "bad.tar", archivetest.Tar(t, archivetest.Member{Name: "a/1.jpg", Data: jpeg[:90]}))
	drop := FixOptions{DropClasses: true}
	for what, c := range map[string]struct {
		in, out string
		f       FixOptions
		want    string
	}{
		"the input":           {path, path, drop, "is the archive that is read"},
		"a link to the input": {path, link, drop, "is the archive that is read"},
		"a file of another kind": {path, other, drop,
			"notes.tgz exists, and a fixed archive replaces no file: give another name"},
		"another archive":  {path, earlier, drop, "earlier.tar exists, and a fixed archive replaces no file"},
		"a directory":      {path, directory, drop, "directory.tar is a directory"},
		"another format":   {path, filepath.Join(folder, "out.zip"), drop, "ends in .tar"},
		"a URL":            {path, "http://localhost/out.tar", drop, "local file"},
		"a missing folder": {path, filepath.Join(folder, "none", "out.tar"), drop, "no such file"},
		"a class that would end": {path, filepath.Join(folder, "out.tar"), FixOptions{},
			`all samples of 1 classes are bad ("b" is the first)`},
		"an archive that is cut":    {cut, filepath.Join(folder, "out.tar"), drop, "cut off"},
		"an archive without images": {bad, filepath.Join(folder, "out.tar"), drop, "no samples"},
	} {
		_, fixed, err := Fix(t.Context(), c.in, c.out, Options{}, c.f, nil)
		if err == nil || fixed != nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: error %v, fixed %v, want fixed = nil, an error with %q", what, err, fixed, c.want)
		}
	}
	folderIsClean(t, folder, "notes.tgz", "link.tar", "earlier.tar")
	for _, file := range []string{path, earlier} {
		if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, good) {
			t.Errorf("%s was changed", file)
		}
	}
	out := filepath.Join(folder, "out.tar")
	if _, fixed, err := Fix(t.Context(), path, out, Options{}, drop, nil); err != nil ||
		!slices.Equal(fixed.Dropped, []string{"b"}) {
		t.Errorf("%+v, %v, want no error, fixed.Dropped = %+v", fixed, err, []string{"b"})
	}
}

// TestInterruptedFixLeavesNothing: if the context ends while the archive is written, nothing is
// left behind, and an archive that another program creates meanwhile stays.
func TestInterruptedFixLeavesNothing(t *testing.T) {
	jpeg := archivetest.JPEG(t, archivetest.Gradient(400, 400))
	var list []archivetest.Member
	for i := range 200 {
		list = append(list, archivetest.Member{Name: fmt.Sprintf("a/%d.jpg", i), Data: jpeg})
	}
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, list...))
	folder := t.TempDir()
	out := filepath.Join(folder, "out.tar")
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	written, then := false, cancel
	progress := func(Progress) {
		if list, err := filepath.Glob(out + ".*.tmp"); err == nil && len(list) > 0 { // the second pass
			written = true
			then()
		}
	}
	if _, _, err := Fix(ctx, path, out, Options{}, FixOptions{}, progress); !errors.Is(err,
		context.Canceled) || !written {
		t.Errorf("error %v, writing begun: %v, want the error %v, written = true",
			err, written, context.Canceled)
	}
	folderIsClean(t, folder)
	before := archivetest.Tar(t, list[:1]...)
	then = func() {
		if err := os.WriteFile(out, before, 0o644); err != nil {
			t.Error(err)
		}
	}
	if _, _, err := Fix(t.Context(), path, out, Options{}, FixOptions{}, progress); err == nil ||
		!strings.Contains(err.Error(), "out.tar is a file of another kind, and only an empty file is replaced") {
		t.Errorf("error %v", err)
	}
	folderIsClean(t, folder, "out.tar")
	if now, err := os.ReadFile(out); err != nil || !bytes.Equal(now, before) {
		t.Errorf("the file at -out: %v, %s; want it unchanged", err, archivetest.Difference(now, before))
	}
}

// TestFixRefusesAChangedFolder: if a directory's files change between the passes, Fix does not use
// the positions of the first pass.
func TestFixRefusesAChangedFolder(t *testing.T) {
	jpeg := archivetest.JPEG(t, archivetest.Gradient(40, 40))
	root := archivetest.Extract(t,
		[]archivetest.Member{{Name: "a/2.jpg", Data: jpeg}, {Name: "a/3.jpg", Data: jpeg[:90]},
			{Name: "a/4.jpg", Data: jpeg}})
	folder := t.TempDir()
	added := false
	progress := func(p Progress) {
		if p.Members < 3 || added { // the last call of the first pass
			return
		}
		added = true
		if err := os.WriteFile(filepath.Join(root, "a", "1.jpg"), []byte(jpeg), fs.FileMode(0o644)); err != nil {
			t.Error(err)
		}
	}
	_, _, err := Fix(t.Context(), root, filepath.Join(folder, "out.tar"), Options{}, FixOptions{}, progress)
	if !errors.Is(err, ErrSourceChanged) || !added {
		t.Errorf("error %v, want the error %v, added = true", err, ErrSourceChanged)
	}
	folderIsClean(t, folder)
}
