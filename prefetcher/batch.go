package prefetcher

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

type lease = ring.Lease[cuda.Stream, *cuda.Event]

// Batch is what the consumer gets in one turn of the loop. It is valid until the turn ends, unless
// it is retained.
type Batch struct {
	// Images and Labels are the fields of these names, as the source's Outputs describe them, with
	// N rows; nil if there is no such field. They belong to the batch's scope: the program doesn't
	// close them. Rows are only valid on streams that the batch is ready on: see Use.
	Images, Labels *torch.Tensor

	N     int // samples: the source's BatchSize, or fewer in the last batch
	Epoch int
	Index int // position in the epoch, from 0
	Slot  int // which device slot the batch is in: same slot, same addresses
	Info  any // what the source gave to deliver

	p       *Prefetcher
	lease   *lease
	scope   *torch.Scope
	tensors []*torch.Tensor
}

func (p *Prefetcher) newBatch(l *lease, epoch int) (*Batch, error) {
	b := &Batch{N: l.N, Epoch: epoch, Index: l.Index, Slot: l.Slot, Info: l.Info, p: p, lease: l}
	b.scope = torch.NewScope(fmt.Sprintf("batch %d of epoch %d", l.Index, epoch))
	l.OnEnd = func() { b.scope.Close() }
	whole := p.slots.result(l.Slot, l.Host)
	b.tensors = make([]*torch.Tensor, len(whole))
	for i, t := range whole {
		if l.N == int(p.slots.batch) {
			t = t.In(b.scope)
		} else {
			t = b.scope.Own(t.Narrow(0, 0, int64(l.N)))
		}
		if err := t.Err(); err != nil {
			return nil, fmt.Errorf("prefetcher: batch %d of epoch %d: %w", l.Index, epoch, err)
		}
		b.tensors[i] = t
	}
	if p.images >= 0 {
		b.Images = b.tensors[p.images]
	}
	if p.labels >= 0 {
		b.Labels = b.tensors[p.labels]
	}
	return b, nil
}

// Tensors returns the batch's fields in the source's order.
func (b *Batch) Tensors() []*torch.Tensor { return slices.Clone(b.tensors) }

// Scope returns the scope that everything computed from the batch joins. It ends with the turn, or
// with the last Release.
func (b *Batch) Scope() *torch.Scope { return b.scope }

// Use makes the stream wait until the batch is ready, and makes the slot's next copy wait for the
// work that the stream has been given by the end of the turn (or the last Release). It is needed
// for every stream but the one that was current when the batch came. The host does not wait. On the
// CPU it does nothing.
func (b *Batch) Use(stream cuda.Stream) error {
	return b.error("use", b.lease.Use(stream))
}

// Retain keeps the batch, its tensors and its slot beyond the turn, until Release is called as
// often. The slot is missing from the ring meanwhile: with all of them retained the next turn is
// [ErrRetained], even if another goroutine is about to call Release: a consumer that hands batches
// to other goroutines keeps fewer than Options.Depth of them out. Close waits for nobody who
// retains: it takes the slots back.
func (b *Batch) Retain() error { return b.error("retain", b.lease.Retain()) }

// Release undoes one Retain. Any goroutine may call it: its current stream counts as one that used
// the batch, like those given to Use. Everything computed from the batch is freed with the last
// Release, if the turn is over. A stream that is known only by the Release must be idle, or named
// by Use before, when another goroutine may call Close.
func (b *Batch) Release() error { return b.error("release", b.lease.Release()) }

func (b *Batch) error(what string, err error) error {
	if err != nil {
		err = fmt.Errorf("prefetcher: %s batch %d of epoch %d: %w", what, b.Index, b.Epoch, public(err))
	}
	return err
}
