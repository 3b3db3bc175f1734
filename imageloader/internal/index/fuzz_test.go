package index

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// fuzzArchive writes an archive and its index, which has entry points. Both are the same in every
// run.
func fuzzArchive(f *testing.F, name string, c Config, pack func([]byte) []byte) (path string, index []byte) {
	f.Helper()
	path = archivetest.WriteFile(f, name, pack(archivetest.Tar(f, archivetest.Repetitive()...)))
	day := time.Unix(1_700_000_000, 0)
	if err := os.Chtimes(path, day, day); err != nil {
		f.Fatal(err)
	}
	x := open(f, path, c)
	for i := range 4 {
		x.KeepEntryPoints(i, bytes.Repeat([]byte{byte(i)}, 20+i))
	}
	a := openArchive(f, path)
	defer a.Close()
	r := NewReader(x, a)
	defer r.Close()
	for i := range x.Len() { // makes checksums of contents
		if err := r.Read(i, make([]byte, x.Size(i))); err != nil {
			f.Fatal(err)
		}
	}
	closeIndex(f, x)
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		f.Fatal(err)
	}
	return path, index
}

// FuzzIndex: with any index file, with right or wrong checksums, archives open, and reading a
// sample returns its bytes or an error.
func FuzzIndex(f *testing.F) {
	packed, packedIndex := fuzzArchive(f, "a.tgz", testConfig(),
		func(data []byte) []byte { return archivetest.GzipSplit(f, data, 1<<20, 1) })
	plain, plainIndex := fuzzArchive(f, "a.tar", testConfig(), func(data []byte) []byte { return data })
	listed := testConfig()
	var err error
	if listed.List, err = ReadList("l.csv",
		strings.NewReader("c/a.png,x\nc/c.png,y\nc/d.png,x\nc/f.png,z"), ListFormat{}, false); err != nil {
		f.Fatal(err)
	}
	listedPath, listedIndex := fuzzArchive(f, "b.tar", listed, func(data []byte) []byte { return data })
	want := archivetest.Contents(archivetest.Repetitive())
	for how := range byte(8) {
		f.Add([]byte{}, how)
		f.Add([]byte{0, 7, 0, 0, 100, 0, 0, 0}, how)
	}
	for part := range byte(11) {
		for edit := range byte(8) {
			f.Add([]byte{part, edit, 16 * edit, 0, 1 + 50*edit, part, 0, 0}, 1+part%3)
		}
	}
	// how selects the archive and the kind of its index, and whether the checksums are corrected.
	f.Fuzz(func(t *testing.T, edits []byte, how uint8) {
		path, index := packed, packedIndex
		c := testConfig()
		switch {
		case how&4 != 0:
			path, index, c = listedPath, listedIndex, listed
		case how&2 != 0:
			path, index = plain, plainIndex
		}
		data := indextest.Edit(index, edits)
		if how&1 != 0 {
			indextest.Reseal(data)
		}
		c.File, c.HoldBytes, c.MaxSampleBytes = filepath.Join(t.TempDir(), "index"), 1, 1<<20
		if err := os.WriteFile(c.File, data, 0o644); err != nil {
			t.Fatal(err)
		}
		x, err := tryOpen(t, path, c)
		if err != nil {
			var missing *ListError // a forged index lacks members
			if !errors.Is(err, ErrNoSamples) && !errors.As(err, &missing) {
				t.Fatal(err)
			}
			return
		}
		defer closeIndex(t, x)
		a := openArchive(t, path)
		defer a.Close()
		r := NewReader(x, a)
		defer r.Close()
		for i := range x.samples {
			_ = x.EntryPoints(i, nil) // any bytes, which the decoder checks
			m := &x.samples[i]
			if m.kind != archive.Regular || m.size > 1<<20 || m.size == 0 || x.work == 0 {
				continue
			}
			if p, ok := x.Packed(i); ok {
				if p.Skip < 0 || p.Lead < archive.BlockBytes || p.Window < 0 ||
					p.Window > archive.MaxWindowBytes || int64(p.Input) > x.info.Size() {
					t.Fatalf("%s: %+v", x.Name(i), p)
				}
				_ = r.ReadPacked(&p, make([]byte, p.Window), make([]byte, p.Input)) // any bytes
			}
			b := make([]byte, m.size)
			// Only a checksum detects a change of a window from which a .tar.gz is inflated.
			if r.Read(i, b) != nil || path == packed && m.flags&recordSummed == 0 {
				continue
			}
			if want[x.Name(i)] != string(b) {
				t.Errorf("%s has other bytes", x.Name(i))
			}
		}
	})
}

// FuzzLists: with any index file of label lists, the samples' labels are existing classes.
func FuzzLists(f *testing.F) {
	var members []archivetest.Member
	for i, labels := range []string{"a b", "", "c a", "b", "10 a"} {
		members = append(members,
			archivetest.Member{Name: fmt.Sprintf("%d.png", i), Data: archivetest.Image(strings.Repeat(labels, 900))},
			archivetest.Member{Name: fmt.Sprintf("%d.cls", i), Data: labels})
	}
	path := archivetest.WriteFile(f, "a.tgz", archivetest.GzipSplit(f, archivetest.Tar(f, members...), 1<<20, 1))
	config := testConfig()
	config.WebDataset, config.MultiLabel = true, true
	closeIndex(f, open(f, path, config))
	index, err := os.ReadFile(path + sidecarSuffix)
	if err != nil {
		f.Fatal(err)
	}
	for part := range byte(11) {
		for edit := range byte(8) {
			f.Add([]byte{part, edit, 16 * edit, 0, 1 + 50*edit, part, 0, 0}, edit%2 == 0)
		}
	}
	f.Fuzz(func(t *testing.T, edits []byte, given bool) {
		changed := indextest.Edit(index, edits)
		indextest.Reseal(changed)
		c := config
		c.File, c.HoldBytes = filepath.Join(t.TempDir(), "index"), 1
		if given {
			c.Classes = []string{"b", "a", "c", "10"}
		}
		if err := os.WriteFile(c.File, changed, 0o644); err != nil {
			t.Fatal(err)
		}
		x, err := tryOpen(t, path, c)
		if err != nil {
			if !errors.Is(err, ErrNoSamples) && !wrongLabel(err) {
				t.Fatal(err)
			}
			return
		}
		defer closeIndex(t, x)
		for i := range x.Len() {
			for _, label := range x.Labels(i) {
				if label < 0 || int(label) >= len(x.Classes()) || x.Label(i) != 0 {
					t.Errorf("sample %d has the label %d of %d classes", i, label, len(x.Classes()))
				}
			}
		}
	})
}
