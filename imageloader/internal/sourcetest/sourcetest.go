// Package sourcetest has a Source of archives whose reads fail as over a bad network.
package sourcetest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
)

// Store holds objects. Reading them fails at random, as over a bad network. Set its fields before
// the first use, or with Lock held.
type Store struct {
	sync.Mutex
	Objects map[string]Object // by URL
	Bad     float64           // share of requests that fail, break off or stop
	Stops   bool              // some of the bad requests stop until their context ends
	Err     error             // the error of every request; nil: none
	Asked   int               // number of requests so far
	Open    int               // number of open readers and sources

	rng *rand.Rand
}

// Object is a version of an object.
type Object struct{ Data, Version string }

// ErrBusy is the error of requests that fail.
var ErrBusy = errors.New("the store is busy")

// New returns a Store with these objects. seed decides which requests fail, and how.
func New(seed uint64, objects map[string]Object) *Store {
	return &Store{Objects: objects, rng: rand.New(rand.NewPCG(seed, seed+1))}
}

// OpenSource implements archive.Config.OpenSource.
func (s *Store) OpenSource(_ context.Context, url string) (archive.Source, error) {
	s.Lock()
	defer s.Unlock()
	o, ok := s.Objects[url]
	switch {
	case !ok:
		return nil, fs.ErrNotExist
	case s.rng.Float64() < s.Bad:
		return nil, ErrBusy
	}
	s.Open++
	return &storeSource{s, url, archive.SourceInfo{Size: int64(len(o.Data)), Version: o.Version,
		ModTime: time.Unix(1e9, 0)}}, nil
}

type storeSource struct {
	s    *Store
	url  string
	info archive.SourceInfo
}

func (o *storeSource) Info() archive.SourceInfo { return o.info }

func (o *storeSource) Close() error {
	o.s.Lock()
	defer o.s.Unlock()
	o.s.Open--
	return nil
}

func (o *storeSource) ReadRange(ctx context.Context, offset, n int64) (io.ReadCloser, error) {
	s := o.s
	s.Lock()
	defer s.Unlock()
	s.Asked++
	now := s.Objects[o.url]
	switch {
	case n < 1 || offset < 0 || offset+n > o.info.Size:
		return nil, fmt.Errorf("a request for %d bytes at %d: %w", n, offset, errors.ErrUnsupported)
	case s.Err != nil:
		return nil, s.Err
	case now.Version != o.info.Version:
		return nil, archive.ErrSourceChanged
	}
	r := &storeReader{s: s, ctx: ctx, left: now.Data[offset : offset+n]}
	if s.rng.Float64() < s.Bad {
		switch r.fails = s.rng.IntN(int(min(n, 100_000))); s.rng.IntN(3) {
		case 0:
			return nil, ErrBusy
		case 1:
			r.left = r.left[:r.fails]
		case 2:
			r.stops = s.Stops
		}
	} else {
		r.fails = -1
	}
	s.Open++
	return r, nil
}

type storeReader struct {
	s     *Store
	ctx   context.Context
	left  string
	fails int // number of bytes after which reading fails; negative: never
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
	r.s.Lock()
	n := 1 + r.s.rng.IntN(min(len(p), len(r.left)))
	r.s.Unlock()
	if r.fails > 0 {
		n = min(n, r.fails)
		r.fails -= n
	}
	copy(p, r.left[:n])
	r.left = r.left[n:]
	return n, nil
}

func (r *storeReader) Close() error {
	r.s.Lock()
	defer r.s.Unlock()
	r.s.Open--
	return nil
}
