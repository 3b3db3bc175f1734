package imageloader

import (
	"sync"
	"sync/atomic"
)

// budget bounds the compressed bytes that wait for a worker or are in one. One sample is always let
// in, however large it is.
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

// add counts n more bytes. The caller holds mu.
func (b *budget) add(n int64) {
	b.used += n
	if b.total != nil {
		b.total.Add(n)
	}
}

// acquire waits until there is room for n bytes. It returns false after stop.
func (b *budget) acquire(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.stopped && b.used > 0 && b.used+int64(n) > b.limit {
		b.room.Wait()
	}
	b.add(int64(n))
	return !b.stopped
}

// release makes room again.
func (b *budget) release(n int) {
	b.mu.Lock()
	b.add(-int64(n))
	b.room.Broadcast()
	b.mu.Unlock()
}

// stop ends all waiting.
func (b *budget) stop() {
	b.mu.Lock()
	b.stopped = true
	b.room.Broadcast()
	b.mu.Unlock()
}
