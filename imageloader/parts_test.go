package imageloader

import (
	"archive/zip"
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
)

// TestPartsOfAnArchive: of a .tar, or a zip of stored members, the first pass that plans with entry
// points reads whole files, and later passes read only parts of them. A file that has changed is
// not planned, because its bytes do not match its digests. Here the first epoch finds no entry
// points, and the second one makes them.
func TestPartsOfAnArchive(t *testing.T) {
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	const photos = 20
	tar := planArchive(t, "parts.tar", photos, 0)
	data, err := os.ReadFile(tar)
	if err != nil {
		t.Fatal(err)
	}
	dir := writeNamed(t, map[string][]byte{"stored.zip": zipped(t, data, zip.Store)})
	for _, path := range []string{tar, filepath.Join(dir, "stored.zip")} {
		// Of a copy, because planParts writes to the archive.
		content, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		copied := archivetest.WriteFile(t, filepath.Base(path), content)
		t.Run(filepath.Ext(path), func(t *testing.T) { planParts(t, path, photos, false) })
		t.Run(filepath.Ext(path)+", no index", func(t *testing.T) { planParts(t, copied, photos, true) })
	}
}

// planParts tests the plans of an archive of photographs.
func planParts(t *testing.T, path string, photos int, noIndex bool) {
	var read, reads atomic.Int64 // bytes read from the archive, and calls of ReadAt
	counting := func(path string) (archive.File, error) {
		f, err := os.Open(path)
		return countingFile{f, &read, &reads}, err
	}
	l, err := open(t.Context(), path, Options{BatchSize: 4, Shuffle: true, Workers: 2, Transform: Train(32),
		BadSamples: Skip, NoIndex: noIndex}, counting, sample.Library{})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	plain, err := Open(path, Options{BatchSize: 4, Shuffle: true, Workers: 2, Transform: Train(32), BadSamples: Skip})
	if err != nil {
		t.Fatal(err)
	}
	defer plain.Close()
	c := &planned{capacity: 4 << 20, slots: 2}
	var files int64 // total size of all images
	for i := range photos {
		files += l.index.Load().Size(i)
	}
	const epochs = 4
	for epoch := range epochs {
		c.rows = 0
		got, err := c.epoch(t, l, epoch)
		if err != nil {
			t.Fatal(err)
		}
		want, err := collect(t, plain, epoch, 2)
		if err != nil {
			t.Fatal(err)
		}
		for i := range want {
			if !bytes.Equal(got[i].images, want[i].images) {
				t.Errorf("epoch %d: batch %d has other pixels", epoch, i)
			}
		}
		if epoch >= 2 && c.rows != photos {
			t.Fatalf("epoch %d: %d rows have plans, want %d", epoch, c.rows, photos)
		}
	}
	c.rows, c.plansOnly = 0, true
	read.Store(0)
	reads.Store(0)
	if _, err := c.epoch(t, l, epochs); err != nil {
		t.Fatal(err)
	}
	if c.rows != photos || read.Load() >= files*9/10 {
		t.Errorf("%d rows have plans, want %d; planning reads %d bytes of files of %d", c.rows, photos,
			read.Load(), files)
	}
	if got := reads.Load(); got > int64(photos*3/2) { // opening the archive takes a few
		t.Errorf("planning reads %d times, want one read for each of %d parts", got, photos)
	}
	c.plansOnly = false
	// The file is overwritten in place, because the loader has it open. Size and time stay the
	// same.
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	const changed = 5
	for i := range changed {
		file := archivetest.Photo(t, uint64(i))
		at := bytes.Index(content, file)
		if at < 0 {
			t.Fatalf("photograph %d is not in the archive, at %v, want at least 0", i, at)
		}
		for b := at + len(file)/3; b < at+len(file); b += 50 {
			content[b] ^= 0x55
		}
	}
	if err := os.WriteFile(path, content, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(path, before.ModTime(), before.ModTime()); err != nil {
		t.Fatal(err)
	}
	c.rows = 0
	_, err = c.epoch(t, l, epochs+1)
	for key := range c.seen {
		name := l.index.Load().Sample(key[1]).Name
		var i int
		if _, e := fmt.Sscanf(filepath.Base(name), "%d.jpg", &i); e == nil && key[0] == epochs+1 && i < changed {
			t.Errorf("%s has a plan after it was changed", name)
		}
	}
	if c.rows > photos-changed {
		t.Errorf("%d rows have plans, want at most %d: %v", c.rows, photos-changed, err)
	}
}

// countingFile counts the bytes that are read at any offset, and the reads.
type countingFile struct {
	*os.File
	bytes, reads *atomic.Int64
}

func (f countingFile) ReadAt(p []byte, at int64) (int, error) {
	n, err := f.File.ReadAt(p, at)
	f.bytes.Add(int64(n))
	f.reads.Add(1)
	return n, err
}
