package arena

import (
	"math/bits"
	"sync"
)

// Buffers recycle the memory of samples. A buffer has one of a few capacities, four per power of
// two and in whole pages, so that it fits many later samples. Buffers are safe for concurrent use.
type Buffers struct {
	mu    sync.Mutex
	arena *Arena             // nil before the first Get
	free  [maxClass][][]byte // unused buffers that keep their pages
	cold  [maxClass][][]byte // unused buffers whose pages have gone back to the system
	bytes int64              // capacity of all buffers in free
	limit int64              // maximum of bytes
}

const (
	pageBytes  = 4096
	maxClass   = 4 * 40
	fitsWithin = 4 // number of classes that Get searches: up to twice the size
)

// NewBuffers returns an empty set of buffers. Unused buffers keep at most limit bytes of memory.
func NewBuffers(limit int64) *Buffers { return &Buffers{limit: limit} }

// classFor returns the smallest class whose capacity is at least n.
func classFor(n int) int {
	if n <= pageBytes {
		return 0
	}
	n--
	octave := bits.Len(uint(n)) - 1 // 2^octave <= n
	quarter := n >> (octave - 2) & 3
	return 4*(octave-12) + quarter + 1
}

// capacityOf returns the capacity of a class in bytes.
func capacityOf(class int) int {
	octave, quarter := 12+class/4, class%4
	return 1<<octave + quarter<<(octave-2)
}

// Get returns n bytes whose content is undefined.
func (b *Buffers) Get(n int) []byte {
	class := classFor(n)
	b.mu.Lock()
	defer b.mu.Unlock()
	for c := class; c < min(class+fitsWithin, maxClass); c++ {
		if p, ok := pop(&b.free[c]); ok {
			b.bytes -= int64(cap(p))
			return p[:n]
		}
	}
	if p, ok := pop(&b.cold[class]); ok {
		return p[:n]
	}
	if b.arena == nil {
		b.arena = newSmallPages()
	}
	if p := b.arena.alloc(capacityOf(class), pageBytes); p != nil {
		return p[:n]
	}
	return make([]byte, n, capacityOf(class)+1) // no class has this capacity, so Put recognizes heap memory by it
}

func pop(list *[][]byte) (p []byte, ok bool) {
	last := len(*list) - 1
	if last < 0 {
		return nil, false
	}
	p = (*list)[last]
	*list = (*list)[:last]
	return p, true
}

// Put takes back a buffer that Get has returned. The buffer must not be used afterwards.
func (b *Buffers) Put(p []byte) {
	class := classFor(cap(p))
	if cap(p) != capacityOf(class) { // nil, or heap memory
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bytes+int64(cap(p)) <= b.limit {
		b.free[class] = append(b.free[class], p)
		b.bytes += int64(cap(p))
		return
	}
	dropPages(p[:cap(p)]) // the addresses stay mapped for a later Get
	b.cold[class] = append(b.cold[class], p)
}

// Close returns the memory of all buffers to the system, including buffers that were not put back.
// No buffer may be used afterwards.
func (b *Buffers) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arena.Free()
	b.free, b.cold, b.bytes = [maxClass][][]byte{}, [maxClass][][]byte{}, 0
}
