package imageloader

import (
	"archive/zip"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/codec"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// countingCodec is the real codec. It also sums the counts of its decoders.
type countingCodec struct {
	mu  *sync.Mutex
	sum *imagecapi.Stats
}

type countingDecoder struct {
	*codec.Decoder
	c countingCodec
}

func (countingCodec) Header(data []byte) (imagecapi.Info, error) {
	return sample.Library{}.Header(data)
}

func (c countingCodec) NewDecoder(maxPixels int64) (sample.Decoder, error) {
	d, err := sample.Library{}.NewDecoder(maxPixels)
	if err != nil {
		return nil, err
	}
	return countingDecoder{d.(*codec.Decoder), c}, nil
}

func (d countingDecoder) Close() {
	d.c.mu.Lock()
	defer d.c.mu.Unlock()
	if s, err := d.Stats(); err == nil {
		d.c.sum.EntriesMade += s.EntriesMade
		d.c.sum.EntriesUsed += s.EntriesUsed
		d.c.sum.EntriesVerified += s.EntriesVerified
		d.c.sum.EntriesRefused += s.EntriesRefused
	}
	d.Decoder.Close()
}

// TestSourcesWithoutAnIndexFileKeepEntryPoints: the second epoch over a zip, a directory, or an
// archive with NoIndex uses the entry points that the first has made, and its batches equal the
// batches of a loader without entry points. They end with the loader, and leave no file.
func TestSourcesWithoutAnIndexFileKeepEntryPoints(t *testing.T) {
	cache := t.TempDir()
	t.Setenv("XDG_CACHE_HOME", cache)
	var members []archivetest.Member
	for i := range 12 {
		members = append(members, archivetest.Member{Name: fmt.Sprintf("%c/%d.jpg", 'a'+i%3, i),
			Data: string(archivetest.Photo(t, uint64(i)))})
	}
	data := archivetest.Tar(t, members...)
	dir := writeNamed(t, map[string][]byte{"stored.zip": zipped(t, data, zip.Store),
		"deflated.zip": zipped(t, data, zip.Deflate), "a.tar": data, "a.tgz": archivetest.Gzip(t, data)})
	for _, path := range []string{filepath.Join(dir, "stored.zip"), filepath.Join(dir, "deflated.zip"),
		filepath.Join(dir, "a.tar"), filepath.Join(dir, "a.tgz"),
		archivetest.Extract(t, members)} {
		t.Run(filepath.Base(path), func(t *testing.T) {
			var want []string
			for _, o := range []Options{{NoEntryPoints: true}, {NoIndex: true}, {}, {TrustIndex: true}, {}} {
				o.NoIndex = o.NoIndex || strings.HasPrefix(filepath.Base(path), "a.t")
				o.BatchSize, o.Transform, o.Shuffle, o.Workers = 8, Train(64), true, 3
				l, err := Open(path, o)
				if err != nil {
					t.Fatal(err)
				}
				for epoch := range 2 {
					batches, err := collect(t, l, epoch, 2)
					if err != nil {
						t.Fatal(err)
					}
					got := digest(batches)
					if len(want) == epoch { // of the first loader, which has no entry points
						want = append(want, got)
					}
					if got != want[epoch] {
						t.Errorf("%+v: epoch %d has digest %s, want %s", o, epoch, got, want[epoch])
					}
				}
				made, used := int64(12), int64(12)
				if o.NoEntryPoints {
					made, used = 0, 0
				}
				if s := l.Stats(); s.EntriesMade != made || s.Decoded[ByEntryPoints] != used || s.EntriesRefused != 0 {
					t.Errorf("%+v: entry points of %d images made, %d used, %d refused, want %d, %d and 0", o,
						s.EntriesMade, s.Decoded[ByEntryPoints], s.EntriesRefused, made, used)
				}
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}
		})
	}
	for _, pattern := range []string{filepath.Join(cache, "torchstream", "index", "*"), filepath.Join(dir, "*.t*.*")} {
		if found, _ := filepath.Glob(pattern); len(found) > 0 {
			t.Errorf("got the files %v, want none", found)
		}
	}
}

// TestEntryPointsChangeNoBatch: the first epoch makes entry points, and the second uses them. The
// next loader finds them in the sidecar, and compares them before it uses them. The batches equal
// the batches of a loader without entry points.
func TestEntryPointsChangeNoBatch(t *testing.T) {
	var members []archivetest.Member
	for i := range 24 {
		members = append(members,
			archivetest.Member{Name: "train/" + string(rune('a'+i%3)) + "/" + string(rune('a'+i)) + ".jpg",
				Data: string(archivetest.Photo(t, uint64(i)))})
	}
	members = append(members,
		archivetest.Member{Name: "train/a/z.png", Data: archivetest.PNG(t, archivetest.Gradient(50, 40))})
	for _, c := range []struct {
		name string
		data []byte
	}{{"t.tar", archivetest.Tar(t, members...)}, {"t.tgz", archivetest.Gzip(t, archivetest.Tar(t, members...))}} {
		t.Run(c.name, func(t *testing.T) {
			path := archivetest.WriteFile(t, c.name, c.data)
			var done imagecapi.Stats
			codec := countingCodec{new(sync.Mutex), &done}
			run := func(o Options) *Loader {
				o.BatchSize, o.Transform, o.Shuffle, o.Workers = 8, Train(64), true, 3
				l, err := open(t.Context(), path, o, openFile, codec)
				if err != nil {
					t.Fatal(err)
				}
				return l
			}
			epoch := func(l *Loader, e int) (string, imagecapi.Stats) {
				done = imagecapi.Stats{}
				batches, err := collect(t, l, e, 2)
				if err != nil {
					t.Fatal(err)
				}
				return digest(batches), done
			}
			end := func(l *Loader) {
				if err := l.Close(); err != nil {
					t.Fatal(err)
				}
			}

			var want []string
			plain := run(Options{NoIndex: true, NoEntryPoints: true})
			for e := range 4 {
				d, s := epoch(plain, e)
				if s != (imagecapi.Stats{}) {
					t.Errorf("without entry points: %+v", s)
				}
				want = append(want, d)
			}
			end(plain)

			expect := func(what string, l *Loader, e int, wantStats imagecapi.Stats) {
				t.Helper()
				if got, s := epoch(l, e); got != want[e] || s != wantStats {
					t.Errorf("%s: %+v, want %+v; batches equal: %t", what, s, wantStats, got == want[e])
				}
			}
			side := path + ".index"
			l := run(Options{NoIndex: true})
			expect("first epoch without an index", l, 0, imagecapi.Stats{EntriesMade: 24})
			expect("second epoch without an index", l, 1, imagecapi.Stats{EntriesUsed: 24})
			end(l)
			l = run(Options{IndexFile: side, NoEntryPoints: true})
			expect("not wanted", l, 0, imagecapi.Stats{})
			end(l)
			l = run(Options{IndexFile: side})
			expect("first epoch", l, 0, imagecapi.Stats{EntriesMade: 24})
			expect("second epoch", l, 1, imagecapi.Stats{EntriesUsed: 24})
			end(l)
			l = run(Options{IndexFile: side})
			expect("another loader", l, 2, imagecapi.Stats{EntriesVerified: 24})
			expect("its second epoch", l, 3, imagecapi.Stats{EntriesUsed: 24})
			end(l)
			l = run(Options{IndexFile: side, TrustIndex: true})
			expect("a loader that trusts", l, 0, imagecapi.Stats{EntriesUsed: 24})
			end(l)
		})
	}
}
