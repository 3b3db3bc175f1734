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
)

// countedSource counts what is read at random.
type countedSource struct {
	source
	bytes *atomic.Int64
}

func (s countedSource) ReadAt(p []byte, at int64) (int, error) {
	s.bytes.Add(int64(len(p)))
	return s.source.ReadAt(p, at)
}

// TestSegments: an epoch in any order over a stream of small samples that stays in memory, with many of them between two checkpoints, reads the file about once, and has the batches
// of one that reads it through; a damaged sample is named, and no other suffers.
func TestSegments(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 9))
	var members []tarMember
	for i := range 3000 {
		b := make([]byte, 200+rng.IntN(2500))
		for k := range b {
			b[k] = byte(rng.Uint32())
		}
		m := tarMember{name: fmt.Sprintf("train/class%d/%04d.png", i%3, i), data: fakeImage(string(b))}
		switch i % 50 {
		case 7:
			m.data = ""
		case 9:
			m = tarMember{name: fmt.Sprintf("notes/%d.txt", i), data: strings.Repeat("n", rng.IntN(3000))}
		case 11:
			m.kind, m.link, m.data = '2', "x", ""
		case 13:
			m.data = fakeImage(strings.Repeat("large", 5000))
		}
		members = append(members, m)
	}
	data := tarBytes(t, members...)
	path := writeFile(t, "a.tgz", gzipSplit(t, data, 500_000, 6))
	var read atomic.Int64
	file := func(path string) (source, error) {
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
			if x.lazy == nil || x.work < 10 {
				t.Fatalf("in memory %v, work %v", x.lazy != nil, x.work)
			}
			if size := l.bytes; read.Load() > 3*size {
				t.Errorf("%d bytes are read of a file of %d", read.Load(), size)
			}
			for i := range x.entries {
				if e := &x.entries[i]; e.size > o.MaxSampleBytes && x.lazy[i].Load() != nil {
					t.Errorf("%s stays in memory", x.name(i))
				}
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		o.NoIndex = false
	}

	// Another archive under the index, stored, so that one byte is one byte.
	store := gzipSplit(t, data, len(data), 0)
	path = writeFile(t, "b.tgz", store)
	l, err := open(t.Context(), path, o, file, fakeCodec{})
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	victim := slices.IndexFunc(members, func(m tarMember) bool { return strings.HasSuffix(m.name, "/1500.png") })
	at := bytes.Index(store, []byte(members[victim].data[20:60]))
	changed := bytes.Clone(store)
	changed[at] ^= 1
	sameTime(t, path, changed)
	if l, err = open(t.Context(), path, o, file, fakeCodec{}); err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	x := l.index.Load()
	a, err := openArchive(t.Context(), path, opener{file: file})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	r := newSampleReader(a, x)
	defer r.close()
	contents := contentOf(members)
	for _, i := range rand.Perm(len(x.entries)) {
		if e := &x.entries[i]; e.kind != kindFile || e.size == 0 {
			continue
		}
		b := make([]byte, x.entries[i].size)
		err := r.read(i, b)
		if name := x.name(i); name == members[victim].name && !errors.Is(err, errStale) || name != members[victim].name && (err != nil || string(b) != contents[name]) {
			t.Errorf("%s: error %v, or other bytes", name, err)
		}
	}
}
