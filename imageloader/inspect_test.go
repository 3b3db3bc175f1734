package imageloader

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
)

// TestInspectIndex: the report from an index equals the report from decoding, except for headers
// that are far from the start of a file. The index is made by MakeIndex, by the first epoch or by
// InspectIndex.
func TestInspectIndex(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Mixed(t)...)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data),
		"a.tar.zst": archivetest.Zstd(t, data)} {
		for _, made := range []string{"ahead", "by an epoch", "when asked"} {
			path := archivetest.WriteFile(t, name, packed)
			switch made {
			case "ahead":
				if _, err := MakeIndex(t.Context(), path, Options{}, nil); err != nil {
					t.Fatal(err)
				}
			case "by an epoch":
				l, err := Open(path, Options{Transform: Eval(8, 8), BadSamples: Skip, Classes: []string{"a", "b"}})
				if err != nil {
					t.Fatal(err)
				}
				if _, err := collect(t, l, 0, 2); err != nil {
					t.Fatal(err)
				}
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
			want, err := Inspect(t.Context(), path, Options{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := InspectIndex(t.Context(), path, Options{}, nil)
			if err != nil {
				t.Fatal(err)
			}
			formats := maps.Clone(want.Formats)
			if known := got.Formats["unknown"] == 0; !known {
				formats["JPEG"]--
				formats["unknown"] = 1
				want.Width.Median, want.Height.Median = got.Width.Median, got.Height.Median
			} else if name == "a.tar" || made != "by an epoch" { // an epoch sees the whole image
				t.Errorf("%s, made %s: the header far behind the start is found, want name not %q, made "+
					"= %q", name, made, "a.tar", "by an epoch")
			}
			bad := func(r *Report) (list []string) {
				for _, e := range r.Bad {
					list = append(list, fmt.Sprint(e.Name, e.Index))
				}
				return list
			}
			if !maps.Equal(got.Formats, formats) || got.Width != want.Width || got.Height != want.Height ||
				got.Bytes != want.Bytes || !reflect.DeepEqual(got.Classes, want.Classes) ||
				got.Format != want.Format || got.Samples != want.Samples ||
				!slices.Equal(bad(got), bad(want)) || !maps.Equal(got.BadBy, want.BadBy) {
				t.Errorf("%s, made %s:\n%+v, bad %v\nwant %+v, bad %v", name, made, got, bad(got), want, bad(want))
			}
		}
	}
	if _, err := InspectIndex(t.Context(), t.TempDir(), Options{}, nil); err == nil {
		t.Error("InspectIndex of a directory: got no error, want one")
	}
}

// The size of a directory is the size of its files, and the size of several shards their sum.
func TestInspectFileBytes(t *testing.T) {
	list := []archivetest.Member{{Name: "a/1.jpg", Data: strings.Repeat("x", 1000)},
		{Name: "b/2.jpg", Data: strings.Repeat("y", 234)}, {Name: "notes.txt", Data: "12345"}}
	root := archivetest.Extract(t, list)
	if err := os.Symlink("nowhere", filepath.Join(root, "a", "broken.jpg")); err != nil {
		t.Fatal(err)
	}
	if r, err := Inspect(t.Context(), root, Options{}, nil); err != nil || r.FileBytes != 1239 {
		t.Errorf("%+v, %v, want no error, r.FileBytes = 1239", r, err)
	}
	folder := t.TempDir()
	shard := archivetest.Tar(t, list...)
	for _, name := range []string{"1.tar", "2.tar"} {
		if err := os.WriteFile(filepath.Join(folder, name), shard, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if r, err := Inspect(t.Context(), filepath.Join(folder, "*.tar"), Options{}, nil); err != nil ||
		r.FileBytes != 2*int64(len(shard)) {
		t.Errorf("%+v, %v, want no error, r.FileBytes = %v", r, err, 2*int64(len(shard)))
	}
}
