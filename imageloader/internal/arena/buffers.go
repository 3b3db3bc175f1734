package arena

import (
	"math/bits"
	"sync"

	"golang.org/x/sys/unix"
)

// Buffers recycle the memory of samples. Capacities come in four classes an octave, in whole pages,
// so that a buffer fits many of the samples that follow. Several goroutines may use them.
type Buffers struct {
	mu    sync.Mutex
	arena *Arena // nil before the first Get
	free  [maxClass][][]byte
	cold  [maxClass][][]byte // their pages are the system's
	bytes int64              // in free
	limit int64              // of bytes
}

const (
	pageBytes  = 4096
	maxClass   = 4 * 40
	fitsWithin = 4 // takes a buffer of fewer than this many classes more: an octave, so at most twice the bytes
)

// NewBuffers returns buffers of which up to limit bytes keep their memory while nobody uses them.
func NewBuffers(limit int64) *Buffers { return &Buffers{limit: limit} }

// classFor is the smallest class whose capacity is at least n.
func classFor(n int) int {
	if n <= pageBytes {
		return 0
	}
	n--
	octave := bits.Len(uint(n)) - 1 // 2^octave <= n
	quarter := n >> (octave - 2) & 3
	return 4*(octave-12) + quarter + 1
}

// capacityOf is the capacity of a class.
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
		b.arena = New()
	}
	if p := b.arena.alloc(capacityOf(class), pageBytes); p != nil {
		return p[:n]
	}
	return make([]byte, n, capacityOf(class)+1) // the odd capacity tells Put whose it is
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

// Put takes back what Get returned. Nobody may use it any more.
func (b *Buffers) Put(p []byte) {
	class := classFor(cap(p))
	if cap(p) != capacityOf(class) { // nothing, or Go's
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.bytes+int64(cap(p)) <= b.limit {
		b.free[class] = append(b.free[class], p)
		b.bytes += int64(cap(p))
		return
	}
	// The address space stays for a later Get; the pages go back. Without that the buffer would
	// only be larger than it needs to be, so an error is none.
	_ = unix.Madvise(p[:cap(p)], unix.MADV_DONTNEED)
	b.cold[class] = append(b.cold[class], p)
}

// Close gives the memory of all buffers back to the system, of those that were not put back too.
// Nobody may use them any more.
func (b *Buffers) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.arena.Free()
	b.free, b.cold, b.bytes = [maxClass][][]byte{}, [maxClass][][]byte{}, 0
}
