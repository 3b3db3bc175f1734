package imageloader

import (
	"context"
	"errors"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// Fill produces the batches of one epoch, in order. A prefetcher calls it.
//
// Fill calls lend from one goroutine at a time. lend returns the memory of the next batch's fields:
// BatchSize * Size * Size * 3 bytes for images (uint8, NHWC, RGB) and BatchSize * 8 for labels
// (int64), or with Transform.Mix BatchSize * classes * 4 (float32), or with Options.Masks or Target
// for those instead: see Loader.Fields. It may block until memory is free, but not longer than its
// context. At the end of an epoch one slot more than needed may have been lent.
//
// Fill calls deliver from its own goroutine, with the number of samples n in the oldest lent slot
// and an [Info]. n is BatchSize, or less in the last batch, whose other rows are undefined. From
// then on Fill does not touch the slot's memory.
//
// Damage ends the epoch with an error, after all samples before it were delivered: in a batch that
// may be short, and those of a shuffle buffer out of their order. A batch that is only delivered
// because of the damage has the State of the last batch before it, so that the epoch can be
// continued when the archive is repaired.
//
// When ctx ends, the loader is closed, or lend or deliver fails, Fill stops its goroutines, waits
// for them, and returns the cause: within the time that one image takes to decode.
func (l *Loader) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error), deliver func(n int, info any) error) error {
	return l.fill(ctx, epoch, false, func(ctx context.Context) ([][]byte, *decodeplan.Plans, error) {
		fields, err := lend(ctx)
		return fields, nil, err
	}, deliver)
}

// lender lends the memory of a batch's fields, and for its plans, or nil: see FillPlans.
type lender func(context.Context) ([][]byte, *decodeplan.Plans, error)

// fill implements Fill, and with plans FillPlans.
func (l *Loader) fill(ctx context.Context, epoch int, plans bool, lend lender, deliver func(n int, info any) error) error {
	if !l.begin() {
		return ErrClosed
	}
	defer l.running.Done()

	inner, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	c := l.archiveConfig()
	c.Again = true
	p := &pass{l: l, ctx: inner, stop: stop, requests: c.Requests, epoch: epoch, plans: plans, known: l.index.Load(), budget: newBudget(l.queueBytes)}
	p.begin()
	p.buffers = arena.NewBuffers(l.queueBytes + l.o.ShuffleBytes/4)
	defer p.buffers.Close() // when no goroutine of the pass is left
	a, err := archive.Open(inner, l.path, c)
	if err != nil {
		return stopCause(ctx, err)
	}
	p.archive = a
	defer func() { _ = p.archive.Close() }() // nothing was written
	if p.known != nil {
		if err := p.known.Changed(a); err != nil {
			return err
		}
	}
	return p.run(lend, deliver)
}

// soft returns how many classes the labels of mixed batches have; 0 if batches are not mixed.
func (l *Loader) soft() (int, error) {
	if len(l.o.Transform.Mix) == 0 || l.targetWidth() > 0 {
		return 0, nil
	}
	if n := len(l.Classes()); n > 0 {
		return n, nil
	}
	return 0, errors.New("imageloader: Transform.Mix needs classes, and there are none")
}
