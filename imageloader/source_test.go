package imageloader

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
)

// TestOpenSource: an archive in a program's own store gives the batches that a file gives, in order
// and at random, when some requests fail; its index is kept where the options say; nothing stays
// open.
func TestOpenSource(t *testing.T) {
	archivetest.NoLeaks(t)
	data := archivetest.Images(t, 150, nil)
	zipped := archivetest.Gzip(t, data)
	want := map[order.Kind]string{}
	for _, shuffle := range []bool{false, true} {
		l := openFake(t, archivetest.WriteFile(t, "a.tar", data), Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle})
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
					o := Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle, ShuffleBytes: 20_000, Classes: classes, IndexFile: index, OpenSource: s.OpenSource}
					l, err := open(t.Context(), "store://b/"+name, o, openFile, fakeCodec{})
					if err != nil {
						t.Fatalf("%s: %v", name, err)
					}
					got, err := collect(t, l, 1, 2)
					list := names(got)
					slices.Sort(list)
					if err != nil || len(slices.Compact(list)) != 150 || want[l.opened] != "" && digest(got) != want[l.opened] {
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
			t.Errorf("%s: %d readers and sources are open", name, s.Open)
		}
		s.Unlock()
	}
}

// TestSourceErrors: what is wrong with a store, or with an object, is an error that names it and
// keeps nobody waiting.
func TestSourceErrors(t *testing.T) {
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
		"replaced":       {url, func(s *sourcetest.Store) { s.Objects[url] = sourcetest.Object{Data: data, Version: "2"} }, nil, "has changed since it was opened"},
		"forbidden":      {url, func(s *sourcetest.Store) { s.Err = fs.ErrPermission }, fs.ErrPermission, url},
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
		if err == nil || c.want != nil && !errors.Is(err, c.want) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), c.url) {
			t.Errorf("%s: error %v", name, err)
		}
	}
	_, err := Open("s3://bucket/train.tgz", Options{})
	if !errors.Is(err, errors.ErrUnsupported) || !strings.Contains(err.Error(), "Options.OpenSource") || !strings.Contains(err.Error(), "imageloader/blob") {
		t.Errorf("no OpenSource: error %v", err)
	}
}
