//go:build linux

package cuda

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

func TestNilOwnedStreamCloses(t *testing.T) {
	var o *OwnedStream
	if err := o.Close(); err != nil {
		t.Error(err)
	}
}

// There are more owned streams than streams in the pool. The owned streams are distinct, and work
// like any other stream. Calls refuse a stream that was given back, and NewOwnedStream hands it out
// again.
func TestOwnedStreams(t *testing.T) {
	onGPU(t, 1)
	own := make([]*OwnedStream, 3*PoolStreams)
	seen := map[Stream]bool{}
	for i := range own {
		own[i] = must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{Priority: -1}))
		seen[own[i].Stream] = true
	}
	if len(seen) != len(own) {
		t.Errorf("%d distinct streams, want %d", len(seen), len(own))
	}
	first := own[0]
	check(t, WithStream(first.Stream, func() error {
		requireCurrent(t, first.Stream)
		return nil
	}))
	check(t, first.Wait(own[1].Stream))
	if p := must[int](t)(first.Priority()); p != -1 {
		t.Errorf("priority %d, want -1", p)
	}
	for i, a := range own[:3] {
		for j, b := range own[:3] {
			if same := must[bool](t)(a.SameQueue(b.Stream)); same != (i == j) {
				t.Errorf("streams %d and %d: SameQueue is %v", i, j, same)
			}
		}
	}
	for _, o := range own {
		check(t, o.Synchronize())
		check(t, o.Close())
		check(t, o.Close())
		for name, call := range map[string]func() error{
			"Synchronize": o.Synchronize,
			"Wait":        func() error { return o.Wait(DefaultStream(0)) },
			"WithStream":  func() error { return WithStream(o.Stream, func() error { return nil }) },
			"Forget":      o.Forget,
		} {
			if err := call(); !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("%s after Close: got %v, want ErrInvalidArgument", name, err)
			}
		}
	}
	again := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{Priority: -1}))
	defer again.Close()
	if !seen[again.Stream] {
		t.Errorf("%v is new, want one of the %d streams that were given back", again, len(seen))
	}
}

// TestBoundedStreams: NewOwnedStream rounds the bound down. It hands out a stream that was given
// back only for the same bound. No stream of the pool has a bound.
func TestBoundedStreams(t *testing.T) {
	onGPU(t, 1)
	bounded := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{Priority: -1, MaxMultiprocessors: 23}))
	if n := bounded.Multiprocessors(); n < 8 || n > 23 {
		t.Errorf("a bound of 23 gives %d multiprocessors, want at least 8, at most 23", n)
	}
	if p := must[int](t)(bounded.Priority()); p != -1 {
		t.Errorf("priority %d, want -1", p)
	}
	e := must[*Event](t)(NewEvent(EventOptions{}))
	defer e.Close()
	check(t, e.Record(bounded.Stream))
	check(t, DefaultStream(0).WaitEvent(e))
	check(t, e.Record(DefaultStream(0)))
	check(t, bounded.WaitEvent(e))
	check(t, bounded.Synchronize())
	check(t, bounded.Close())
	plain := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{Priority: -1}))
	defer plain.Close()
	if plain.Stream == bounded.Stream || plain.Multiprocessors() != 0 {
		t.Errorf("%v has %d multiprocessors", plain, plain.Multiprocessors())
	}
	again := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{Priority: -1, MaxMultiprocessors: 23}))
	defer again.Close()
	if again.Stream != bounded.Stream {
		t.Errorf("%v, want %v, which was given back", again, bounded)
	}
	for _, refused := range []int{1, -5, math.MinInt} {
		if s, err := NewOwnedStream(0, StreamOptions{MaxMultiprocessors: refused}); !errors.Is(err,
			ErrInvalidArgument) {
			t.Errorf("a bound of %d: %v, %v, want ErrInvalidArgument", refused, s, err)
		}
	}
	if s, err := NewStream(0, StreamOptions{MaxMultiprocessors: 16}); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a bound for a stream of the pool: %v, %v, want ErrInvalidArgument", s, err)
	}
}

// Memory that was used on an owned stream may be freed after the stream was given back.
func TestOwnedStreamMayCloseBeforeItsMemory(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	own := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{}))
	x := tensor(t, 1<<20, 1) // freed at the end of the test
	check(t, WithStream(own.Stream, func() error { return errors.Join(load.queue(), fill(x, 2)) }))
	for _, used := range []*capi.Tensor{x, load.a, load.b} {
		check(t, capi.RecordStream(used, own.s))
	}
	check(t, own.Close())
	next := must[*OwnedStream](t)(NewOwnedStream(0, StreamOptions{}))
	defer next.Close()
	if next.Stream == own.Stream {
		t.Errorf("NewOwnedStream returned %v, which has work on it, want another stream", next.Stream)
	}
}
