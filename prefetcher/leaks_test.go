//go:build linux

package prefetcher

import (
	"strings"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/leaks"
)

// openBatches returns the number of batches, by kind, that this test's loop holds or retains.
func openBatches() map[string]int64 {
	n := map[string]int64{}
	for _, s := range leaks.Open() {
		for _, f := range s.Stack {
			if strings.Contains(f.Function, "TestOpenBatchesNameTheirLoop") {
				n[s.Kind] += s.Count
				break
			}
		}
	}
	return n
}

// Package leaks names open batches by the loop that holds them, and retained batches by the caller
// of Retain.
func TestOpenBatchesNameTheirLoop(t *testing.T) {
	if !leaks.Enabled {
		t.Skip("needs the tag debug")
	}
	p := newFeed(t, sources(4, 40)["raw"], Options{Device: cuda.CPU, Depth: 3})
	want := func(when string, batches, retained int64) {
		t.Helper()
		if n := openBatches(); n["batch"] != batches || n["retained batch"] != retained {
			t.Errorf("%s: %v, want %d batches, retained %d times", when, n, batches, retained)
		}
	}
	var kept []*Batch
	for b, err := range p.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
		want("in a turn", int64(len(kept))+1, 2*int64(len(kept)))
		if b.Index < 2 {
			for range 2 {
				if err := b.Retain(); err != nil {
					t.Fatal(err)
				}
			}
			kept = append(kept, b)
		}
	}
	want("after the epoch", 2, 4)
	if err := kept[0].Release(); err != nil {
		t.Fatal(err)
	}
	want("after one of two releases", 2, 3)
	if err := kept[0].Release(); err != nil {
		t.Fatal(err)
	}
	want("after the last release", 1, 2)
	if n := openBatches(); n["prefetcher"] != 1 {
		t.Errorf("%d prefetchers are open, want 1", n["prefetcher"])
	}
	closeFeed(t, p)
	closeFeed(t, p)
	want("after Close", 0, 0)
	if n := openBatches(); n["prefetcher"] != 0 {
		t.Errorf("%d prefetchers are open after Close", n["prefetcher"])
	}
}
