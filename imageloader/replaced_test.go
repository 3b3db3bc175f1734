package imageloader

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sourcetest"
)

// TestOtherTarURL: a tar behind a URL that has the size and the time of the one that was indexed in
// another run, but its samples in another order, is an error that names the sample; and that is
// found out without a second request.
func TestOtherTarURL(t *testing.T) {
	const url = "store://b/a.tar"
	s := sourcetest.New(1, map[string]sourcetest.Object{url: {Data: string(archivetest.Numbered(t, 0, 1, 2, 3)), Version: "1"}})
	o := Options{Transform: Eval(4, 4), BatchSize: 1, Workers: 1, IndexFile: filepath.Join(t.TempDir(), "index"), OpenSource: s.OpenSource}
	for _, c := range []struct {
		data    []byte
		version string
		samples int // before the error; 4: there is none
	}{{archivetest.Numbered(t, 0, 1, 2, 3), "1", 4}, {archivetest.Numbered(t, 0, 1, 2, 3), "2", 4}, {archivetest.Numbered(t, 0, 2, 1, 3), "3", 1}} {
		s.Objects[url] = sourcetest.Object{Data: string(c.data), Version: c.version}
		l, err := open(t.Context(), url, o, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		batches, err := collect(t, l, 0, 2)
		l.Close()
		var damage *ArchiveError
		if len(batches) != c.samples || (err == nil) != (c.samples == 4) || err != nil && (!errors.As(err, &damage) || damage.Member != "a/1.png" || !errors.Is(err, index.ErrStale)) {
			t.Errorf("version %s: %d samples, error %v", c.version, len(batches), err)
		}
		if c.samples < 4 {
			continue
		}
		a, err := archive.Open(t.Context(), url, l.archiveConfig())
		if err != nil {
			t.Fatal(err)
		}
		r, asked := index.NewReader(l.index.Load(), a), s.Asked
		for i := range 4 {
			got := make([]byte, l.index.Load().Size(i))
			if err := r.Read(i, got); err != nil || !slices.Equal(got, []byte(archivetest.Image(strings.Repeat(fmt.Sprint(i), 2000)))) {
				t.Errorf("sample %d: error %v, or other bytes", i, err)
			}
		}
		if s.Asked != asked+4 {
			t.Errorf("%d requests for 4 samples", s.Asked-asked)
		}
		r.Close()
		a.Close()
	}
}

// TestCloseTwiceAtOnce: Close may be called by several goroutines, also of a loader whose index
// lies in no file.
func TestCloseTwiceAtOnce(t *testing.T) {
	for _, noIndex := range []bool{false, true} {
		path := archivetest.WriteFile(t, "a.tgz", archivetest.Gzip(t, archivetest.Images(t, 30, nil)))
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), ShuffleBytes: 1, NoIndex: noIndex}, openFile, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		l.index.Load().KeepEntryPoints(0, []byte("entries"))
		var all sync.WaitGroup
		for range 4 {
			all.Go(func() {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
	}
}

// TestLeftByPanic: a batch that its loop is left with is nobody else's, however the loop is left; a
// closed loader has no memory for epochs.
func TestLeftByPanic(t *testing.T) {
	l := openFake(t, archivetest.WriteFile(t, "a.tar", archivetest.Images(t, 40, nil)), Options{Transform: Eval(4, 4), BatchSize: 4})
	var left []byte
	func() {
		defer func() { _ = recover() }()
		for b, err := range l.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			left = b.Images
			panic("in the loop")
		}
	}()
	clear(left)
	for b, err := range l.Epoch(t.Context(), 1) {
		if err != nil {
			t.Fatal(err)
		}
		if &b.Images[0] == &left[0] {
			t.Fatal("the memory of the batch is used again")
		}
	}
	if len(left) == 0 || slices.ContainsFunc(left, func(v byte) bool { return v != 0 }) {
		t.Error("the batch was written to")
	}
	if len(l.spare.slots) != hostSlots {
		t.Errorf("%d slots are kept", len(l.spare.slots))
	}
	for range l.Epoch(t.Context(), 0) {
		if err := l.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if len(l.spare.slots) > 0 {
		t.Errorf("%d slots are kept after Close", len(l.spare.slots))
	}
}
