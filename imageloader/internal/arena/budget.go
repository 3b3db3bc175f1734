package arena

import (
	"sync"
	"sync/atomic"
)

// Budget limits the compressed bytes of samples that are waiting for a worker or being decoded.
// While it counts no bytes, it admits a sample of any size.
type Budget struct {
	mu      sync.Mutex
	room    sync.Cond
	limit   int64
	used    int64
	stopped bool
	total   *atomic.Int64 // bytes in use of all epochs, for Stats; may be nil
}

// NewBudget returns a budget of limit bytes. If total is not nil, the bytes in use are added to it.
func NewBudget(limit int64, total *atomic.Int64) *Budget {
	b := &Budget{limit: limit, total: total}
	b.room.L = &b.mu
	return b
}

// add counts n more bytes. The caller holds mu.
func (b *Budget) add(n int64) {
	b.used += n
	if b.total != nil {
		b.total.Add(n)
	}
}

// Acquire waits until there is room for n bytes. It returns false after Stop.
func (b *Budget) Acquire(n int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	for !b.stopped && b.used > 0 && b.used+int64(n) > b.limit {
		b.room.Wait()
	}
	b.add(int64(n))
	return !b.stopped
}

// Release returns n bytes to the budget.
func (b *Budget) Release(n int) {
	b.mu.Lock()
	b.add(-int64(n))
	b.room.Broadcast()
	b.mu.Unlock()
}

// Stop makes all calls of Acquire return false, including the calls that are waiting.
func (b *Budget) Stop() {
	b.mu.Lock()
	b.stopped = true
	b.room.Broadcast()
	b.mu.Unlock()
}

// Abandon releases all bytes in use. Call it when no other call will release them any more.
func (b *Budget) Abandon() {
	b.mu.Lock()
	b.add(-b.used)
	b.mu.Unlock()
}
