package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/order"
)

// store has objects, and does to those who read them what a bad network does.
type store struct {
	mu      sync.Mutex
	rng     *rand.Rand
	objects map[string]object
	bad     float64 // part of requests that fail, break off or stop
	stops   bool    // some of them stop until their context ends
	err     error   // what all requests get
	asked   int     // requests
	open    int     // readers and sources
}

type object struct {
	data    string
	version string
}

var errStore = errors.New("the store is busy")

func (s *store) openSource(_ context.Context, url string) (Source, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	o, ok := s.objects[url]
	switch {
	case !ok:
		return nil, fs.ErrNotExist
	case s.rng.Float64() < s.bad:
		return nil, errStore
	}
	s.open++
	return &storeSource{s, url, SourceInfo{Size: int64(len(o.data)), Version: o.version, ModTime: time.Unix(1e9, 0)}}, nil
}

type storeSource struct {
	s    *store
	url  string
	info SourceInfo
}

func (o *storeSource) Info() SourceInfo { return o.info }

func (o *storeSource) Close() error {
	o.s.mu.Lock()
	defer o.s.mu.Unlock()
	o.s.open--
	return nil
}

func (o *storeSource) ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error) {
	s := o.s
	s.mu.Lock()
	defer s.mu.Unlock()
	s.asked++
	now := s.objects[o.url]
	switch {
	case n < 1 || offset < 0 || offset+n > o.info.Size:
		return nil, fmt.Errorf("%d bytes at %d were asked for: %w", n, offset, errors.ErrUnsupported)
	case s.err != nil:
		return nil, s.err
	case now.version != o.info.Version:
		return nil, ErrSourceChanged
	}
	r := &storeReader{s: s, ctx: ctx, left: now.data[offset : offset+n]}
	if s.rng.Float64() < s.bad {
		switch r.fails = s.rng.IntN(int(min(n, 100_000))); s.rng.IntN(3) {
		case 0:
			return nil, errStore
		case 1:
			r.left = r.left[:r.fails]
		case 2:
			r.stops = s.stops
		}
	} else {
		r.fails = -1
	}
	s.open++
	return r, nil
}

type storeReader struct {
	s     *store
	ctx   context.Context
	left  string
	fails int // after so many bytes; negative: never
	stops bool
}

func (r *storeReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, r.ctx.Err()
	}
	if r.fails == 0 && r.stops {
		<-r.ctx.Done()
		return 0, r.ctx.Err()
	}
	if r.fails == 0 || r.left == "" {
		return 0, io.EOF
	}
	r.s.mu.Lock()
	n := 1 + r.s.rng.IntN(min(len(p), len(r.left)))
	r.s.mu.Unlock()
	if r.fails > 0 {
		n = min(n, r.fails)
		r.fails -= n
	}
	copy(p, r.left[:n])
	r.left = r.left[n:]
	return n, nil
}

func (r *storeReader) Close() error {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	r.s.open--
	return nil
}

// TestOpenSource: an archive in a program's own store gives the batches that a file gives, in order and at random, when some requests fail; its index is kept where the
// options say; nothing stays open.
func TestOpenSource(t *testing.T) {
	noLeaks(t)
	data := fakeArchive(t, 150, nil)
	zipped := gzipBytes(t, data)
	want := map[order.Kind]string{}
	for _, shuffle := range []bool{false, true} {
		l := openFake(t, writeFile(t, "a.tar", data), Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle})
		got, err := collect(t, l, 1, 2)
		if err != nil {
			t.Fatal(err)
		}
		want[l.opened] = digest(got)
	}
	for name, data := range map[string][]byte{"a.tar": data, "a.tgz": zipped, "a.tar.zst": zstdBytes(t, data)} {
		s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{"store://b/" + name: {string(data), "1"}}, bad: 0.04}
		for _, classes := range [][]string{nil, {"class0", "class1", "class2", "class3", "class4"}} {
			index := filepath.Join(t.TempDir(), "index")
			for round := range 2 {
				for _, shuffle := range []bool{false, true} {
					o := Options{BatchSize: 16, Transform: Train(4), Shuffle: shuffle, ShuffleBytes: 20_000, Classes: classes, IndexFile: index, OpenSource: s.openSource}
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
		s.mu.Lock()
		if s.open != 0 {
			t.Errorf("%s: %d readers and sources are open", name, s.open)
		}
		s.mu.Unlock()
	}
}

// TestSourceErrors: what is wrong with a store, or with an object, is an error that names it and keeps nobody waiting.
func TestSourceErrors(t *testing.T) {
	within(t)
	noLeaks(t)
	const url = "store://b/a.tgz"
	data := string(gzipBytes(t, fakeArchive(t, 20, nil)))
	for name, c := range map[string]struct {
		url  string
		do   func(*store) // after Open
		want error
		says string
	}{
		"no such object": {"store://b/none.tgz", nil, fs.ErrNotExist, "store://b/none.tgz"},
		"replaced":       {url, func(s *store) { s.objects[url] = object{data, "2"} }, nil, "has changed since it was opened"},
		"forbidden":      {url, func(s *store) { s.err = fs.ErrPermission }, fs.ErrPermission, url},
	} {
		s := &store{rng: rand.New(rand.NewPCG(1, 2)), objects: map[string]object{url: {data, "1"}}}
		o := Options{BatchSize: 4, Transform: Eval(4, 4), NoIndex: true, ShuffleBytes: 1, OpenSource: s.openSource}
		l, err := open(t.Context(), c.url, o, openFile, fakeCodec{})
		if err == nil {
			s.mu.Lock()
			c.do(s)
			s.mu.Unlock()
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

// TestSourceTries: a request that fails is made again, some times; what stops is given up; bytes that came before a failure are not lost.
func TestSourceTries(t *testing.T) {
	within(t)
	noLeaks(t)
	data := make([]byte, 3_000_000)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	times := sourceTimes{time.Microsecond, 100 * time.Millisecond}
	s := &store{rng: rand.New(rand.NewPCG(5, 6)), objects: map[string]object{"store://x": {string(data), "1"}}, bad: 0.1, stops: true}
	f, err := openRemote(t.Context(), "store://x", s.openSource, times)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(f); err != nil || !bytes.Equal(got, data) {
		t.Errorf("%d bytes, error %v", len(got), err)
	}
	for range 200 { // forwards and backwards, near and far
		at := rng.Int64N(int64(len(data)))
		if rng.IntN(2) == 0 {
			at = min(int64(len(data))-1, max(0, f.at+rng.Int64N(200_000)-50_000))
		}
		if _, err := f.Seek(at, io.SeekStart); err != nil {
			t.Fatal(err)
		}
		p := make([]byte, 1+rng.IntN(90_000))
		n, err := io.ReadFull(f, p)
		if err != nil && (err != io.ErrUnexpectedEOF || int(at)+n != len(data)) || !bytes.Equal(p[:n], data[at:][:n]) {
			t.Fatalf("%d bytes at %d: %d came, error %v", len(p), at, n, err)
		}
	}
	if err := f.Close(); err != nil {
		t.Error(err)
	}

	s.bad, s.asked = 0, 0
	if f, err = openRemote(t.Context(), "store://x", s.openSource, times); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(f, make([]byte, 1000)); err != nil {
		t.Fatal(err)
	}
	for _, p := range f.ahead {
		<-p.ready
	}
	s.mu.Lock()
	if s.asked != piecesAhead {
		t.Errorf("%d requests for the first bytes", s.asked)
	}
	s.err = errStore
	s.mu.Unlock()
	came := int64(1000)
	for {
		n, err := f.Read(make([]byte, 100_000))
		if came += int64(n); err != nil {
			if !errors.Is(err, errStore) || !strings.Contains(err.Error(), "store://x") {
				t.Errorf("error %v", err)
			}
			break
		}
	}
	if want := int64(firstPiece * (1 + 2 + 4 + 8)); came != want {
		t.Errorf("%d bytes came before the error, %d were there", came, want)
	}
	if err := f.Close(); err != nil || s.open != 0 {
		t.Errorf("%d are open, error %v", s.open, err)
	}
}

// lyingSource says that it is larger than it is, or sends nothing without an end.
type lyingSource struct{ size int64 }

func (l lyingSource) Info() SourceInfo { return SourceInfo{Size: l.size} }
func (l lyingSource) Close() error     { return nil }
func (l lyingSource) ReadRange(context.Context, int64, int64) (io.ReadCloser, error) {
	return io.NopCloser(nothing{}), nil
}

type nothing struct{}

func (nothing) Read([]byte) (int, error) { return 0, nil }

// TestSourceLies: a Source that breaks its contract is an error, never a hang.
func TestSourceLies(t *testing.T) {
	within(t)
	for size, want := range map[int64]string{-1: "-1 bytes", 0: "empty", 5000: io.ErrNoProgress.Error()} {
		times := sourceTimes{time.Microsecond, time.Minute}
		f, err := openRemote(t.Context(), "store://x", func(context.Context, string) (Source, error) { return lyingSource{size}, nil }, times)
		if err == nil {
			_, err = f.ReadAt(make([]byte, 10), 0)
			if err == io.EOF {
				err = errors.New("empty")
			}
			f.Close()
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%d bytes: error %v", size, err)
		}
	}
}
