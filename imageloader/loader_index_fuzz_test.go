package imageloader

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// fuzzArchive writes an archive of small samples, enough for some checkpoints, and its index with
// entry points. They are the same in every run.
func fuzzArchive(f *testing.F, name string, pack func([]byte) []byte) (path string, index []byte) {
	f.Helper()
	members := archivetest.Repetitive()
	path = archivetest.WriteFile(f, name, pack(archivetest.Tar(f, members...)))
	day := time.Unix(1_700_000_000, 0)
	if err := os.Chtimes(path, day, day); err != nil {
		f.Fatal(err)
	}
	l, err := open(f.Context(), path, Options{}, openFile, fakeCodec{})
	if err != nil {
		f.Fatal(err)
	}
	for i := range 4 {
		l.index.Load().KeepEntryPoints(i, bytes.Repeat([]byte{byte(i)}, 20+i))
	}
	if err := l.Close(); err != nil {
		f.Fatal(err)
	}
	if index, err = os.ReadFile(path + indextest.Suffix); err != nil {
		f.Fatal(err)
	}
	return path, index
}

// FuzzLoaderIndex: whatever the index file, with right or wrong checksums, loaders open and epochs
// end.
func FuzzLoaderIndex(f *testing.F) {
	packed, packedIndex := fuzzArchive(f, "a.tgz",
		func(data []byte) []byte { return archivetest.GzipSplit(f, data, 1<<20, 1) })
	plain, plainIndex := fuzzArchive(f, "a.tar", func(data []byte) []byte { return data })
	for how := range byte(4) {
		f.Add([]byte{}, how)
		f.Add([]byte{0, 7, 0, 0, 100, 0, 0, 0}, how)
	}
	for part := range byte(11) {
		for edit := range byte(8) {
			f.Add([]byte{part, edit, 16 * edit, 0, 1 + 50*edit, part, 0, 0}, 1+part%3)
		}
	}
	// how selects the archive of the index, and whether the checksums are corrected.
	f.Fuzz(func(t *testing.T, edits []byte, how uint8) {
		side := filepath.Join(t.TempDir(), "index")
		path, index := packed, packedIndex
		if how&2 != 0 {
			path, index = plain, plainIndex
		}
		data := indextest.Edit(index, edits)
		if how&1 != 0 {
			indextest.Reseal(data)
		}
		if err := os.WriteFile(side, data, 0o644); err != nil {
			t.Fatal(err)
		}
		l, err := open(t.Context(), path, Options{Transform: Eval(4, 4), IndexFile: side, ShuffleBytes: 1,
			MaxSampleBytes: 1 << 20, Workers: 2, BadSamples: Skip}, openFile, fakeCodec{})
		other := len(data) > 0 && !bytes.HasPrefix(data, []byte(indextest.Magic)) // not an index, so not replaced
		if err != nil {
			if !errors.Is(err, ErrNoSamples) && !other {
				t.Fatal(err)
			}
			return
		}
		if other {
			t.Fatal("open with a file that is not an index: got no error, want one")
		}
		defer l.Close()
		if batches, err := collect(t, l, 0, 2); len(names(batches)) > l.Len() {
			t.Errorf("%d samples of %d, error %v", len(names(batches)), l.Len(), err)
		}
	})
}
