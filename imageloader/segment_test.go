package imageloader

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/archivetest"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// countedSource counts what is read at random.
type countedSource struct {
	archive.File
	bytes *atomic.Int64
}

func (s countedSource) ReadAt(p []byte, at int64) (int, error) {
	s.bytes.Add(int64(len(p)))
	return s.File.ReadAt(p, at)
}

// TestSegments: an epoch in any order over a stream of small samples that stays in memory, with
// many of them between two checkpoints, reads the file about once, and has the batches of one that
// reads it through; a damaged sample is named, and no other suffers.
func TestSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	var members []archivetest.Member
	for i := range 3000 {
		b := make([]byte, 200+rng.IntN(2500))
		for k := range b {
			b[k] = byte(rng.Uint32())
		}
		m := archivetest.Member{Name: fmt.Sprintf("train/class%d/%04d.png", i%3, i), Data: archivetest.Image(string(b))}
		switch i % 50 {
		case 7:
			m.Data = ""
		case 9:
			m = archivetest.Member{Name: fmt.Sprintf("notes/%d.txt", i), Data: strings.Repeat("n", rng.IntN(3000))}
		case 11:
			m.Kind, m.Link, m.Data = '2', "x", ""
		case 13:
			m.Data = archivetest.Image(strings.Repeat("large", 5000))
		}
		members = append(members, m)
	}
	data := archivetest.Tar(t, members...)
	path := archivetest.WriteFile(t, "a.tgz", archivetest.GzipSplit(t, data, 500_000, 6))
	var read atomic.Int64
	file := func(path string) (archive.File, error) {
		f, err := openFile(path)
		return countedSource{f, &read}, err
	}
	o := Options{Transform: Eval(4, 4), Shuffle: true, BadSamples: Skip, MaxSampleBytes: 10_000, Workers: 3, NoIndex: true}
	var want []string
	for round := range 3 { // read through, index made, index found
		read.Store(0)
		l, err := open(t.Context(), path, o, file, fakeCodec{})
		if err != nil {
			t.Fatal(err)
		}
		x := l.index.Load()
		for epoch := range 2 {
			batches, err := collect(t, l, epoch, 2)
			if err != nil {
				t.Fatal(err)
			}
			if round == 0 {
				want = append(want, digest(batches))
			} else if digest(batches) != want[epoch] {
				t.Errorf("round %d, epoch %d has other batches", round, epoch)
			}
		}
		if round == 2 {
			if !x.Random() || x.Work() < 10 { // so that it is random because the samples stay in memory
				t.Fatalf("in any order %v, work %v", x.Random(), x.Work())
			}
			if size := l.bytes; read.Load() > 3*size {
				t.Errorf("%d bytes are read of a file of %d", read.Load(), size)
			}
			for i := range x.Len() {
				if x.Size(i) > o.MaxSampleBytes && x.InMemory(i) != nil {
					t.Errorf("%s stays in memory", x.Name(i))
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		o.NoIndex = false
	}

	// Another archive under the index, stored, so that one byte is one byte.
	store := archivetest.GzipSplit(t, data, len(data), 0)
	path = archivetest.WriteFile(t, "b.tgz", store)
	l, err := open(t.Context(), path, o, file, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	victim := slices.IndexFunc(members, func(m archivetest.Member) bool { return strings.HasSuffix(m.Name, "/1500.png") })
	at := bytes.Index(store, []byte(members[victim].Data[20:60]))
	changed := bytes.Clone(store)
	changed[at] ^= 1
	archivetest.Rewrite(t, path, changed)
	if l, err = open(t.Context(), path, o, file, fakeCodec{}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x := l.index.Load()
	a, err := archive.Open(t.Context(), path, l.archiveConfig())
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := index.NewReader(x, a)
	defer r.Close()
	contents := archivetest.Contents(members)
	for _, i := range rand.Perm(x.Len()) {
		if s := x.Sample(i); s.Kind != archive.Regular || s.Size == 0 {
			continue
		}
		b := make([]byte, x.Size(i))
		err := r.Read(i, b)
		if name := x.Name(i); name == members[victim].Name && !errors.Is(err, index.ErrStale) || name != members[victim].Name && (err != nil || string(b) != contents[name]) {
			t.Errorf("%s: error %v, or other bytes", name, err)
		}
	}
}
