//go:build linux

package cuda

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/leaks"
)

func TestLeaksAreCounted(t *testing.T) {
	before := Leaks()
	closed := newEvent(nil)
	closed.Close()
	inner := newEvent(nil).event // its Event is unreachable from here on
	newPinned(nil, make([]byte, 100))
	newOwnedStream(Stream{})
	until(t, "the run of the cleanups", func() bool {
		after := Leaks()
		return after.Events > before.Events && after.Pinned > before.Pinned && after.Streams > before.Streams
	})
	after := Leaks()
	if after.Events != before.Events+1 || after.Streams != before.Streams+1 ||
		after.Pinned != before.Pinned+1 || after.PinnedBytes != before.PinnedBytes+100 {
		t.Errorf("got %+v after %+v", after, before)
	}
	until(t, "the release of the event", func() bool { return inner.refs.Load() == 0 })
}

// through returns, by kind, the count of sites whose stack contains a function with the suffix
// function.
func through(sites leaks.Sites, function string) map[string]int64 {
	n := map[string]int64{}
	for _, s := range sites {
		for _, f := range s.Stack {
			if strings.HasSuffix(f.Function, function) {
				n[s.Kind] += s.Count
				break
			}
		}
	}
	return n
}

//go:noinline
func forgetHandles() {
	newEvent(nil)
	newGraph(nil, 0, nil)
	newOwnedStream(Stream{})
	newPinned(nil, make([]byte, 100))
	newMemoryPool(nil, 0, func(*capi.MemoryPool) error { return nil })
}

func TestLeaksNameTheirMaker(t *testing.T) {
	if !leaks.Enabled {
		t.Skip("needs the tag debug")
	}
	forgetHandles()
	kinds := []string{"event", "graph", "stream", "pinned memory", "memory pool"}
	until(t, "the run of the cleanups", func() bool {
		caught := through(leaks.Caught(), "cuda."+t.Name())
		for _, kind := range kinds {
			if caught[kind] == 0 {
				return false
			}
		}
		return true
	})
	for kind, n := range through(leaks.Caught(), "cuda."+t.Name()) {
		if n != 1 {
			t.Errorf("%s: caught %d, want 1", kind, n)
		}
	}
}

//go:noinline
func openHandles() (end func()) {
	e, g, p := newEvent(nil), newGraph(nil, 0, nil), newPinned(nil, make([]byte, 100))
	return func() {
		e.Close()
		g.Close()
		p.Close()
	}
}

func TestOpenHandlesNameTheirMaker(t *testing.T) {
	if !leaks.Enabled {
		t.Skip("needs the tag debug")
	}
	end := openHandles()
	open := through(leaks.Open(), "cuda."+t.Name())
	for _, kind := range []string{"event", "graph", "pinned memory"} {
		if open[kind] != 1 {
			t.Errorf("%s: %d open, want 1", kind, open[kind])
		}
	}
	end()
	end()
	if open := through(leaks.Open(), "cuda."+t.Name()); len(open) > 0 {
		t.Errorf("open after Close: %v, want none", open)
	}
}
