package prefetcher

import (
	"fmt"
	"slices"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/internal/origin"
	"github.com/torchstream/torchstream/prefetcher/internal/ring"
	"github.com/torchstream/torchstream/torch"
)

type lease = ring.Lease[cuda.Stream, *cuda.Event]

// Batch is one minibatch. The consumer gets it in one iteration of the loop, which is the batch's
// turn. The batch is valid until the turn ends, unless it is retained.
type Batch struct {
	// Images and Labels are the fields "images" and "labels", as the source's Outputs describe
	// them, with N rows. A field that the source does not have is nil. Both tensors belong to the
	// batch's scope, so the program does not close them. Their contents are valid only on streams
	// that wait for the batch: see Use.
	Images, Labels *torch.Tensor

	N     int // number of samples: the source's BatchSize, or fewer in the last batch
	Epoch int
	Index int // position in the epoch, from 0
	Slot  int // index of the batch's device slot; a slot's addresses never change
	Info  any // the info that the source passed to deliver; imagefeed.Batch has it as an imageloader.Info

	tenure  tenure
	tensors []*torch.Tensor
}

// tenure is the time during which a batch owns its slot. It ends when the last reference is
// dropped.
type tenure struct {
	made  origin.Origin
	holds origin.Holds
	p     *Prefetcher // keeps the Prefetcher reachable
	lease *lease
	scope *torch.Scope
}

// end is called once, when the last reference is dropped.
func (t *tenure) end() {
	t.holds.DropAll()
	t.made.Closed()
	t.scope.Close()
}

func (t *tenure) retain() error {
	t.holds.Add("retained batch")
	err := t.lease.Retain()
	if err != nil {
		t.holds.Drop()
	}
	return err
}

func (t *tenure) release() error {
	t.holds.Drop() // first, because the last release may end the batch
	return t.lease.Release()
}

func (p *Prefetcher) newBatch(l *lease, epoch int) (*Batch, error) {
	b := &Batch{N: l.N, Epoch: epoch, Index: l.Index, Slot: l.Slot, Info: l.Info}
	scope := torch.NewScope(fmt.Sprintf("batch %d of epoch %d", l.Index, epoch))
	b.tenure = tenure{made: origin.New("batch"), p: p, lease: l, scope: scope}
	l.OnEnd = b.tenure.end
	whole := p.slots.result(l.Slot, l.Host)
	b.tensors = make([]*torch.Tensor, len(whole))
	for i, t := range whole {
		if l.N == int(p.slots.batch) {
			t = t.In(scope)
		} else {
			t = scope.Own(t.Narrow(0, 0, int64(l.N)))
		}
		if err := t.Err(); err != nil {
			return nil, fmt.Errorf("prefetcher: batch %d of epoch %d: %w", l.Index, epoch, err)
		}
		b.tensors[i] = t
	}
	if i := p.slots.images; i >= 0 {
		b.Images = b.tensors[i]
	}
	if i := p.slots.labels; i >= 0 {
		b.Labels = b.tensors[i]
	}
	return b, nil
}

// Tensors returns the batch's fields in the source's order.
func (b *Batch) Tensors() []*torch.Tensor { return slices.Clone(b.tensors) }

// With returns a batch with other tensors instead of the batch's fields, in the source's order.
// They may be, for example, some rows of the fields. The caller owns the tensors. N is their number
// of rows. The scope, and the calls Use, Retain and Release, are the batch's.
func (b *Batch) With(tensors []*torch.Tensor) *Batch {
	of := &Batch{Epoch: b.Epoch, Index: b.Index, Slot: b.Slot, Info: b.Info, tensors: slices.Clone(tensors)}
	of.tenure = tenure{p: b.tenure.p, lease: b.tenure.lease, scope: b.tenure.scope}
	if shape := tensors[0].Shape(); len(shape) > 0 {
		of.N = int(shape[0])
	}
	if p := b.tenure.p; p != nil && p.slots.images >= 0 {
		of.Images = tensors[p.slots.images]
	}
	if p := b.tenure.p; p != nil && p.slots.labels >= 0 {
		of.Labels = tensors[p.slots.labels]
	}
	return of
}

// String returns a description for messages, for example "batch 3 of epoch 0: 256 samples in slot
// 1". It reads no tensor.
func (b *Batch) String() string {
	if b == nil {
		return "no batch"
	}
	return fmt.Sprintf("batch %d of epoch %d: %d samples in slot %d", b.Index, b.Epoch, b.N, b.Slot)
}

// Scope returns the scope to which all tensors computed from the batch belong. The scope ends with
// the turn, or with the last Release.
func (b *Batch) Scope() *torch.Scope { return b.tenure.scope }

// Use makes the stream wait until the batch is ready. It also makes the slot's next copy wait for
// all work that is on the stream at the end of the turn (or at the last Release). Call Use for
// every stream except the one that was current when the loop got the batch. The host does not wait.
// On the CPU Use does nothing.
func (b *Batch) Use(stream cuda.Stream) error {
	return b.error("use", b.tenure.lease.Use(stream))
}

// Retain keeps the batch, its tensors and its slot beyond the turn, until Release has been called
// once for each Retain. Meanwhile the ring has one slot less. If all slots are retained, the next
// turn fails with [ErrRetained], even if another goroutine is about to call Release. A consumer
// that passes batches to other goroutines must therefore always have fewer than Options.Depth of
// them retained. Close does not wait for a Release: it takes the slots back.
func (b *Batch) Retain() error {
	return b.error("retain", b.tenure.retain())
}

// Release undoes one Retain. Any goroutine may call it. The goroutine's current stream counts as a
// stream that used the batch, as if it had been passed to Use. If the turn is over, the last
// Release frees everything computed from the batch. If another goroutine may call Close at the same
// time, a current stream that was not passed to Use must be idle.
func (b *Batch) Release() error {
	return b.error("release", b.tenure.release())
}

func (b *Batch) error(what string, err error) error {
	if err != nil {
		err = fmt.Errorf("prefetcher: %s batch %d of epoch %d: %w", what, b.Index, b.Epoch, public(err))
	}
	return err
}
