package imageloader

import (
	"math/bits"
	"sync"
	"sync/atomic"
)

// buffers recycles the memory of compressed samples. Capacities come in four classes an octave, so that a buffer fits many of the samples
// that follow.
type buffers struct {
	mu    sync.Mutex
	free  [maxClass][][]byte
	bytes int64 // in free
	limit int64 // of bytes: more are left to the garbage collector
}

const (
	maxClass   = 4 * 40
	fitsWithin = 4 // take a buffer of up to this many classes more than needed: an octave, so at most twice the bytes
)

// classFor is the smallest class whose capacity is at least n.
func classFor(n int) int {
	if n <= 4096 {
		return 0
	}
	n--
	octave := bits.Len(uint(n)) - 1 // 2^octave <= n
	quarter := n >> (octave - 2) & 3
	return 4*(octave-12) + quarter + 1
}

func capacityOf(class int) int {
	octave, quarter := 12+class/4, class%4
	return 1<<octave + quarter<<(octave-2)
}

func (b *buffers) get(n int) []byte {
	class := classFor(n)
	b.mu.Lock()
	for c := class; c < min(class+fitsWithin, maxClass); c++ {
		if last := len(b.free[c]) - 1; last >= 0 {
			p := b.free[c][last]
			b.free[c] = b.free[c][:last]
			b.bytes -= int64(cap(p))
			b.mu.Unlock()
			return p[:n]
		}
	}
	b.mu.Unlock()
	return make([]byte, n, capacityOf(class))
}

func (b *buffers) put(p []byte) {
	if cap(p) == 0 {
		return
	}
	class := classFor(cap(p))
	b.mu.Lock()
	if b.bytes+int64(cap(p)) <= b.limit {
		b.free[class] = append(b.free[class], p)
		b.bytes += int64(cap(p))
	}
	b.mu.Unlock()
}

// budget bounds the compressed bytes that wait for or are in a worker. One sample is always let in, however large it is.
type budget struct {
	mu      sync.Mutex
	room    sync.Cond
	limit   int64
	used    int64
	stopped bool
	total   *atomic.Int64 // of all passes, for Stats; may be nil
}

func newBudget(limit int64) *budget {
	b := &budget{limit: limit}
	b.room.L = &b.mu
	return b
}

// add is called with mu held.
func (b *budget) add(n int64) {
	b.used += n
	if b.total != nil {
		b.total.Add(n)
	}
}

func (b *budget) acquire(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.stopped && b.used > 0 && b.used+int64(n) > b.limit {
		b.room.Wait()
	}
	b.add(int64(n))
	return !b.stopped
}

func (b *budget) release(n int) {
	b.mu.Lock()
	b.add(-int64(n))
	b.room.Broadcast()
	b.mu.Unlock()
}

func (b *budget) stop() {
	b.mu.Lock()
	b.stopped = true
	b.room.Broadcast()
	b.mu.Unlock()
}
