package nn

import (
	"sync"

	"github.com/torchstream/torchstream/torch"
)

// BatchCounts updates the batch counts of a model's normalisation layers in one call per forward
// pass. Without it, each [BatchNorm] adds 1 to its NumBatches for every training batch, and each
// addition costs the host as much as any other operator. Between Begin and End the additions are
// deferred; End makes all of them. So NumBatches equals PyTorch's num_batches_tracked before Begin
// and after End.
//
// Only one goroutine at a time may call Begin and End. The forward pass in between may use several
// goroutines.
type BatchCounts struct {
	mu      sync.Mutex
	scope   *torch.Scope // the scope of the pass, or nil; guarded by mu
	waiting []*torch.Tensor
	known   map[*torch.Tensor]bool // the same tensors as waiting; mu guards both fields
}

// NewBatchCounts makes every BatchNorm of the model count through the returned BatchCounts, instead
// of an earlier one. Do not call it while another goroutine uses the model.
func NewBatchCounts(m Module) *BatchCounts {
	c := &BatchCounts{known: map[*torch.Tensor]bool{}}
	walk("", m, func(_ string, part Module, _ Parts) {
		if b, ok := part.(interface{ countWith(c *BatchCounts) }); ok {
			b.countWith(c)
		}
	})
	return c
}

// Begin starts a pass. A normalisation whose input belongs to the scope is counted by End. Other
// normalisations count at once, for example in a function that is captured as a separate graph.
func (c *BatchCounts) Begin(scope *torch.Scope) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.end()
	c.scope = scope
}

// end forgets the pass. The caller must hold mu.
func (c *BatchCounts) end() {
	c.scope, c.waiting = nil, c.waiting[:0]
	clear(c.known)
}

// End adds 1 to the count of each deferred normalisation. It enqueues the additions on the current
// stream, even after a failed pass. The pass ends even if End fails.
func (c *BatchCounts) End() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	defer c.end()
	if len(c.waiting) == 0 {
		return nil
	}
	_, err := torch.Call("_foreach_add_.Scalar", c.waiting, 1)
	return err
}

// later reports whether End will add 1 to the count. If a pass uses a normalisation twice, the
// second use counts at once: LibTorch adds to all tensors of a list at the same time.
func (c *BatchCounts) later(count *torch.Tensor, scope *torch.Scope) bool {
	if c == nil || scope == nil || count.Err() != nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if !scope.Within(c.scope) || c.known[count] {
		return false
	}
	c.known[count] = true
	c.waiting = append(c.waiting, count)
	return true
}
