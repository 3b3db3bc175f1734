package imageloader

import (
	"archive/tar"
	"errors"
	"io"
	"strings"
	"testing"
)

// TestGoTorchDefects: what was wrong with the archives' side of the loader that this one comes after, by name.
func TestGoTorchDefects(t *testing.T) {
	image := func(name string) tarMember { return tarMember{name: name, data: fakeImage(name)} }
	load := func(t *testing.T, name string, data []byte, o Options) (*Loader, []copied, error) {
		t.Helper()
		o.Transform = Eval(4, 4)
		o.NoIndex = true
		l, err := open(t.Context(), writeFile(t, name, data), o, openFile, fakeCodec{})
		if err != nil {
			return nil, nil, err
		}
		t.Cleanup(func() { l.Close() })
		got, err := collect(t, l, 0, 2)
		return l, got, err
	}
	t.Run("a class that is not in the vocabulary becomes label 0", func(t *testing.T) {
		data := gzipBytes(t, tarBytes(t, image("a/1.png"), image("new/2.png")))
		_, got, err := load(t, "a.tgz", data, Options{BatchSize: 1, Classes: []string{"b", "a"}})
		var unknown *UnknownClassError
		if !errors.As(err, &unknown) || unknown.Class != "new" || len(got) != 1 || got[0].labels[0] != 1 {
			t.Errorf("%d batches, error %v", len(got), err)
		}
	})
	t.Run("ids are in order of first appearance", func(t *testing.T) {
		one, _, err1 := load(t, "a.tgz", gzipBytes(t, tarBytes(t, image("b/1.png"), image("a/1.png"))), Options{})
		two, _, err2 := load(t, "b.tgz", gzipBytes(t, tarBytes(t, image("a/1.png"), image("b/1.png"))), Options{})
		if err1 != nil || err2 != nil || strings.Join(one.Classes(), " ") != "a b" || strings.Join(two.Classes(), " ") != "a b" {
			t.Errorf("%v, %v", err1, err2)
		}
	})
	t.Run("any junk file makes a class, and a file at the root class dot", func(t *testing.T) {
		junk := []tarMember{{name: "README", data: "x"}, {name: "docs/README", data: "x"}, {name: ".DS_Store", data: "x"}, image("root.png"), image("a/1.png")}
		l, got, err := load(t, "a.tar", tarBytes(t, junk...), Options{})
		if err != nil || strings.Join(l.Classes(), " ") != "a" || len(names(got)) != 1 {
			t.Errorf("classes %v, samples %v, error %v", l.Classes(), names(got), err)
		}
	})
	t.Run("a buffer of 0 panics", func(t *testing.T) {
		_, got, err := load(t, "a.tgz", gzipBytes(t, tarBytes(t, image("a/1.png"), image("a/2.png"))), Options{Shuffle: true, ShuffleBuffer: 0, ShuffleBytes: 1})
		if err != nil || len(names(got)) != 2 {
			t.Errorf("error %v", err)
		}
	})
	t.Run("a read error hangs, and drops the good batches before it", func(t *testing.T) {
		within(t)
		var members []tarMember
		for i := range 53 {
			members = append(members, tarMember{name: "a/" + string(rune('A'+i)) + ".png", data: fakeImage(strings.Repeat(string(rune('A'+i)), 700))})
		}
		for _, at := range []int{0, 5, 30, 52} {
			cut := tarBytes(t, members...)[:at*1536+600]
			_, got, err := load(t, "a.tgz", gzipBytes(t, cut), Options{BatchSize: 8, Classes: []string{"a"}})
			if !errors.Is(err, io.ErrUnexpectedEOF) || len(names(got)) != at {
				t.Errorf("cut off in member %d: %d samples, error %v", at, len(names(got)), err)
			}
		}
	})
	t.Run("an undecodable image ends the process", func(t *testing.T) {
		_, got, err := load(t, "a.tgz", gzipBytes(t, tarBytes(t, image("a/1.png"), tarMember{name: "a/2.png", data: fakeImage("BAD")})), Options{BatchSize: 1})
		var bad *SampleError
		if !errors.As(err, &bad) || bad.Name != "a/2.png" || len(got) != 1 {
			t.Errorf("%d batches, error %v", len(got), err)
		}
	})
	t.Run("the tar file is never closed, an abandoned loader never freed", func(t *testing.T) {
		noLeaks(t)
		l, err := open(t.Context(), writeFile(t, "a.tgz", gzipBytes(t, fakeArchive(t, 60, nil))), Options{BatchSize: 2, Transform: Eval(4, 4)}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Error(err)
			}
			break
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	t.Run("plain tar and zstd are rejected", func(t *testing.T) {
		data := tarBytes(t, image("a/1.png"))
		for name, data := range map[string][]byte{"a.tar": data, "a.tgz": data, "a.zip": zstdBytes(t, data)} {
			if _, got, err := load(t, name, data, Options{}); err != nil || len(names(got)) != 1 {
				t.Errorf("%s: error %v", name, err)
			}
		}
	})
	t.Run("archives of bsdtar are unreadable", func(t *testing.T) {
		var b strings.Builder
		w := tar.NewWriter(&b)
		for _, h := range []*tar.Header{
			{Name: "a/._1.png", Size: 4, Format: tar.FormatPAX, PAXRecords: map[string]string{"LIBARCHIVE.xattr.com.apple.x": "eA", "SCHILY.xattr.x": "y"}},
			{Name: "a/1.png", Size: int64(len(fakeImage(""))), Format: tar.FormatPAX, PAXRecords: map[string]string{"LIBARCHIVE.creationtime": "1"}},
		} {
			h.Typeflag = tar.TypeReg
			if err := w.WriteHeader(h); err != nil {
				t.Fatal(err)
			}
			if _, err := io.WriteString(w, map[bool]string{true: "\x00\x05\x16\x07", false: fakeImage("")}[h.Size == 4]); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		l, got, err := load(t, "a.tgz", gzipBytes(t, []byte(b.String())), Options{BadSamples: Skip})
		if err != nil || len(names(got)) != 1 || l.Stats().Bad != 1 {
			t.Errorf("%v, error %v", names(got), err)
		}
	})
}
