package index

import (
	"bytes"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
)

// TestSumsTellContentsApart: any number of goroutines may read a sample. The first read of a
// process saves the checksum, and the later reads of that process are not compared. Another process
// compares its first read with the saved checksum.
func TestSumsTellContentsApart(t *testing.T) {
	const n = 100
	fresh := func() *sums {
		return &sums{known: make([]atomic.Uint32, n), seen: make([]atomic.Uint32, (n+31)/32)}
	}
	content := func(i int32) []byte { return fmt.Append(nil, "content ", i) }
	first := fresh()
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			for i := range int32(n) {
				if !first.same(i, content(i)) {
					t.Errorf("content %d differs from itself", i)
				}
			}
		})
	}
	all.Wait()
	if dirty, same := first.dirty.Load(), first.same(3, content(4)); !dirty || !same {
		t.Errorf("dirty = %v, same() of another content in the process that read it = %v, want true, true",
			dirty, same)
	}
	var saved bytes.Buffer
	if err := first.write(&saved); err != nil || saved.Len() != n*sumBytes {
		t.Fatalf("%d bytes, %v, want no error, saved.Len() = %v", saved.Len(), err, n*sumBytes)
	}
	second := fresh()
	for i := range second.known {
		second.known[i].Store(first.known[i].Load())
	}
	for i := range int32(n) {
		if second.same(i, content(n-1-i)) || !second.same(i, content(i)) || second.dirty.Load() {
			t.Errorf("content %d: another one is taken for it, or it is not known", i)
		}
	}
}
