package index

import (
	"bytes"
	"sync"
	"sync/atomic"
	"testing"
	"unsafe"

	"github.com/torchstream/torchstream/imageloader/internal/arena"
)

// TestConcurrentReadersKeepOneCopy: readers that keep the same samples at the same time use the
// memory of one copy.
func TestConcurrentReadersKeepOneCopy(t *testing.T) {
	const samples, size, readers = 2000, 1 << 6, 8 // one copy fits one piece of an arena
	c := contents{arena: arena.New(), lazy: make([]atomic.Pointer[byte], samples)}
	defer c.arena.Free()
	first := c.arena.Alloc(size)
	var begin, all sync.WaitGroup
	begin.Add(1)
	for range readers {
		all.Go(func() {
			data := make([]byte, size)
			begin.Wait()
			for i := range samples {
				data[0], data[size-1] = byte(i), byte(i>>8)
				c.keep(i, data)
			}
		})
	}
	begin.Done()
	all.Wait()
	last := c.arena.Alloc(size)
	taken := uintptr(unsafe.Pointer(&last[0])) - uintptr(unsafe.Pointer(&first[0]))
	if want := uintptr((samples + 1) * size); taken != want {
		t.Errorf("%d samples of %d bytes take %d bytes, want %d", samples, size, taken, want)
	}
	want := make([]byte, size)
	for i := range samples {
		want[0], want[size-1] = byte(i), byte(i>>8)
		if !bytes.Equal(c.of(i, size), want) {
			t.Fatalf("sample %d has other bytes", i)
		}
	}
}
