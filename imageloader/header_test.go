package imageloader

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/indextest"
)

// TestInspectIndex: what an index says of images is what decoding them says, whether it was made
// ahead or by the first epoch, except that it does not know what lies far behind in a file.
func TestInspectIndex(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Mixed(t)...)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data), "a.tar.zst": archivetest.Zstd(t, data)} {
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
			} else if name == "a.tar" || made != "by an epoch" { // which has all of the image in its hands
				t.Errorf("%s, made %s: the header far behind is found", name, made)
			}
			bad := func(r *Report) (list []string) {
				for _, e := range r.Bad {
					list = append(list, fmt.Sprint(e.Name, e.Index))
				}
				return list
			}
			if !maps.Equal(got.Formats, formats) || got.Width != want.Width || got.Height != want.Height || got.Bytes != want.Bytes || !slices.Equal(got.Classes, want.Classes) ||
				got.Format != want.Format || got.Samples != want.Samples || !slices.Equal(bad(got), bad(want)) || !maps.Equal(got.BadBy, want.BadBy) {
				t.Errorf("%s, made %s:\n%+v, bad %v\nwant %+v, bad %v", name, made, got, bad(got), want, bad(want))
			}
		}
	}
	if _, err := InspectIndex(t.Context(), t.TempDir(), Options{}, nil); err == nil {
		t.Error("a directory has an index")
	}
}

// pixelsOf are the rows of batches by sample.
func pixelsOf(batches []copied) map[string]string {
	m := map[string]string{}
	for _, b := range batches {
		row := len(b.images) / len(b.samples)
		for i, s := range b.samples {
			m[s.Name] = string(b.images[i*row : (i+1)*row])
		}
	}
	return m
}

// readCounter counts the bytes that are read at random.
type readCounter struct {
	archive.File
	bytes *int
}

func (r readCounter) ReadAt(p []byte, at int64) (int, error) {
	*r.bytes += len(p)
	return r.File.ReadAt(p, at)
}

// TestTooLargeByIndex: an image that the index says has too many pixels is the same bad sample as
// without an index, and is not read.
func TestTooLargeByIndex(t *testing.T) {
	var members []archivetest.Member
	for i := range 6 {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("a/%d.jpg", i), Data: string(photo(t, uint64(i)))})
	}
	members = append(members, archivetest.Member{Name: "a/small.png", Data: archivetest.PNG(t, archivetest.Gradient(20, 20))})
	path := archivetest.WriteFile(t, "a.tar", archivetest.Tar(t, members...))
	o := Options{Transform: Train(8), BadSamples: Skip, MaxPixels: 10_000, NoIndex: true}
	var bad [2]string
	var bytes int
	for i := range bad {
		l, err := open(t.Context(), path, o, func(path string) (archive.File, error) {
			f, err := openFile(path)
			return readCounter{f, &bytes}, err
		}, shimCodec{})
		if err != nil {
			t.Fatal(err)
		}
		o.Workers = 1
		bytes = 0
		batches, err := collect(t, l, 0, 2)
		if err != nil || !slices.Equal(names(batches), []string{"a/small.png"}) {
			t.Errorf("%v, error %v", names(batches), err)
		}
		for _, e := range l.Stats().BadNamed {
			bad[i] += e.Error() + "\n"
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		o.NoIndex = false
		if i == 0 {
			if _, err := MakeIndex(t.Context(), path, Options{}, nil); err != nil {
				t.Fatal(err)
			}
		}
	}
	if bad[0] != bad[1] || bad[0] == "" {
		t.Errorf("without an index:\n%swith it:\n%s", bad[0], bad[1])
	}
	if bytes > 3000 {
		t.Errorf("%d bytes are read", bytes)
	}
}

// TestForgedHeads: whatever an index says of an image's header, the pixels are the image's, or the
// sample is named as too large.
func TestForgedHeads(t *testing.T) {
	data := archivetest.Tar(t, archivetest.Mixed(t)...)
	for name, packed := range map[string][]byte{"a.tar": data, "a.tgz": archivetest.Gzip(t, data)} {
		path := archivetest.WriteFile(t, name, packed)
		side := filepath.Join(t.TempDir(), "index")
		o := Options{Transform: Train(8), BadSamples: Skip, IndexFile: side, ShuffleBytes: 1, BatchSize: 3}
		run := func() (map[string]string, Stats) {
			l, err := Open(path, o)
			if err != nil {
				t.Fatal(err)
			}
			defer l.Close()
			batches, err := collect(t, l, 1, 2)
			if err != nil && !errors.Is(err, ErrNoSamples) {
				t.Fatal(err)
			}
			return pixelsOf(batches), l.Stats()
		}
		want, before := run()
		index, err := os.ReadFile(side)
		if err != nil {
			t.Fatal(err)
		}
		rng := rand.New(rand.NewPCG(4, 4))
		for round := range 30 {
			forged := indextest.Forge(t, index, indextest.Headers, func(b []byte) {
				for k := range b {
					switch {
					case round == 0:
						b[k] = 0
					case round == 1:
						b[k] = 0xff
					case rng.IntN(3) == 0:
						b[k] = byte(rng.Uint32())
					}
				}
				if round > 20 { // within the limits, and wrong
					for ; len(b) > 0; b = b[indextest.HeaderBytes:] {
						binary.LittleEndian.PutUint32(b, 1+rng.Uint32N(100))
						binary.LittleEndian.PutUint32(b[4:], 1+rng.Uint32N(100))
						b[8] = byte(1 + rng.IntN(6))
					}
				}
			})
			if err := os.WriteFile(side, forged, 0o644); err != nil {
				t.Fatal(err)
			}
			got, stats := run()
			missing := 0
			for name, pixels := range want {
				if got[name] == "" {
					missing++
				} else if got[name] != pixels {
					t.Errorf("round %d: %s has other pixels", round, name)
				}
			}
			if more := stats.BadBy[TooLarge] - before.BadBy[TooLarge]; int(more) != missing || round > 20 && missing > 0 {
				t.Errorf("round %d: %d samples are missing, %d are named as too large", round, missing, more)
			}
		}
	}
}
