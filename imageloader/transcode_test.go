package imageloader

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

func progressivePhoto(t *testing.T) []byte {
	t.Helper()
	data, err := os.ReadFile("../cshim/test/data/progressive.jpg")
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestTranscodeWritesABaselineFile: Transcode converts a progressive JPEG to a baseline JPEG with
// the same pixels. It writes nothing for other files or without room.
func TestTranscodeWritesABaselineFile(t *testing.T) {
	d, err := codec.New(1 << 24)
	if err != nil {
		t.Skip(err)
	}
	defer d.Close()
	data := progressivePhoto(t)
	buffer := make([]byte, 2*len(data))
	n, err := d.Transcode(data, buffer)
	if err != nil || n == 0 {
		t.Fatalf("%d bytes, %v, want no error, n not 0", n, err)
	}
	baseline := bytes.Clone(buffer[:n])
	info, err := d.Header(baseline)
	if err != nil || info.Progressive {
		t.Fatalf("%+v, %v, want no error, info.Progressive = false", info, err)
	}
	pixels := func(data []byte) []byte {
		w, h := info.Width, info.Height
		to := make([]byte, 3*w*h)
		g := imagecapi.Geometry{CropWidth: w, CropHeight: h, ResizeWidth: w, ResizeHeight: h,
			WindowWidth: w, WindowHeight: h}
		if err := d.Decode(data, &g, to, 3*int(w)); err != nil {
			t.Fatal(err)
		}
		return to
	}
	if got, want := pixels(baseline), pixels(data); !bytes.Equal(got, want) {
		t.Errorf("the pixels of the baseline file: %s; want the progressive file's",
			archivetest.Difference(got, want))
	}
	if n, err := d.Transcode(data, buffer[:len(baseline)]); err != nil || n != 0 {
		t.Errorf("without room: %d bytes, %v, want no error, n = 0", n, err)
	}
	if n, err := d.Transcode(baseline, buffer); err != nil || n != 0 {
		t.Errorf("a baseline file: %d bytes, %v, want no error, n = 0", n, err)
	}
	if n, err := d.Transcode(data[:len(data)/2], buffer); err == nil || n != 0 {
		t.Errorf("a file that is cut off: %d bytes, %v, want an error, n = 0", n, err)
	}
}

// TestProgressivePlansNeedNoArchive: once its baseline copy is stored, a progressive JPEG is
// planned without reading its file. Here only the plans are made; package prefetcher's tests
// compare their pixels. Close frees the copies.
func TestProgressivePlansNeedNoArchive(t *testing.T) {
	if d, err := (sample.Library{}).NewDecoder(0); err != nil {
		t.Skip(err)
	} else {
		d.Close()
	}
	data := string(progressivePhoto(t))
	var members []archivetest.Member
	const photos = 24
	for i := range photos {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("train/%c/%03d.jpg", 'a'+i%3, i), Data: data})
	}
	path := archivetest.WriteFile(t, "progressive.tar", archivetest.Tar(t, members...))
	l, err := Open(path, Options{BatchSize: 8, Shuffle: true, Workers: 2, Transform: Train(32),
		IndexFile: filepath.Join(t.TempDir(), "index")})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c := &planned{capacity: 4 << 20, slots: 2}
	for epoch := range 2 {
		c.rows = 0
		got, err := c.epoch(t, l, epoch)
		if err != nil {
			t.Fatal(err)
		}
		want, err := collect(t, l, epoch, 2)
		if err != nil {
			t.Fatal(err)
		}
		if c.rows != photos || len(got) != len(want) {
			t.Fatalf("epoch %d: %d rows have plans, %d batches, want c.rows = %v, len(got) = %v",
				epoch, c.rows, len(got), photos, len(want))
		}
		for i := range want {
			if !bytes.Equal(got[i].images, want[i].images) || !slices.Equal(got[i].labels, want[i].labels) {
				t.Errorf("epoch %d: batch %d is another one", epoch, i)
			}
		}
	}
	used := l.entryPoints(l.index.Load()).CopyBytes()
	if used < photos*int64(len(data)) || used > photos*int64(len(data)*3/2) || l.Stats().TranscodedBytes != used {
		t.Errorf("%d bytes of %d images of %d bytes, want used at least %v, used at most %v, "+
			"l.Stats().TranscodedBytes = %v",
			used, photos, len(data), photos*int64(len(data)), photos*int64(len(data)*3/2), used)
	}
	before := l.Stats()
	if _, err := c.epoch(t, l, 2); err != nil {
		t.Fatal(err)
	}
	if st := l.Stats().Since(before); st.Decoded[ByPlan] != photos || st.Read != 0 {
		t.Errorf("%d images are planned, reading takes %v, want st.Decoded[ByPlan] = %v, st.Read = 0",
			st.Decoded[ByPlan], st.Read, photos)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if n := l.Stats().TranscodedBytes; n != 0 {
		t.Errorf("%d bytes after Close, want 0", n)
	}
}
