package epoch

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/assembly"
)

// deliver delivers the batches and returns the reason why the pass ended.
func (p *pass) deliver() error {
	policy, size := p.config.Policy, p.config.Batch.Size()
	d := delivering{p: p, place: Delivery{Batches: p.start.Batches, Turns: p.start.Turn},
		batches: p.start.Before + p.start.Batches,
		mixer: mixer{mixer: p.config.Batch.Transform.NewMixer(), labels: p.config.Labels,
			seed: p.config.Order.Seed, epoch: p.start.Epoch}}
	for {
		r, err := p.asm.Next()
		if errors.Is(err, assembly.ErrStopped) || errors.Is(err, archive.ErrStopped) {
			return p.cause()
		}
		for _, e := range r.Bad {
			p.env.Counters.Met(e.(*sample.Error), policy.BadSamples, p.env.Log)
		}
		for _, e := range r.Warned {
			p.env.Counters.Tolerated(e.(*sample.Error), policy.Damaged, p.env.Log)
		}
		if n := len(r.Bad); n > 0 {
			d.bad += n
			d.lastBad = r.Bad[n-1]
		}
		if r.Partial {
			continue
		}
		n := len(r.Samples)
		if n == size || n > 0 && !p.config.Batch.Share.DropLast {
			if err := d.hand(&r, n == size || err == nil && d.samples+n >= p.asm.Wanted()); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		if n < size {
			return d.end(&r)
		}
	}
}

// delivering counts the delivered batches and samples of a pass.
type delivering struct {
	p       *pass
	mixer   mixer
	place   Delivery // Batches and Turns after the last whole batch
	batches int      // batches of the epoch, including batches before this pass
	samples int      // samples of this pass
	stray   bool     // a batch of this pass has samples from flow.stray on
	bad     int      // bad samples of this pass
	lastBad error
}

// hand delivers a batch. whole is false if an error or bad samples cut the batch short. The
// position of such a batch is the position of the last whole batch.
func (d *delivering) hand(r *ready, whole bool) error {
	p, n := d.p, len(r.Samples)
	if p.ctx.Err() != nil {
		return p.cause()
	}
	turns := p.start.Turn + r.Judged
	if d.stray = d.stray || int64(turns) > p.flow.stray.Load(); whole && !d.stray {
		d.place.Batches++
		d.place.Turns = turns
	}
	if err := p.decodeLost(r); err != nil {
		return err
	}
	memory := r.Slot.Memory
	if p.config.Labels.Kind == Index {
		for row := range r.Samples {
			putLabel(memory.labels[8*row:], r.Samples[row].Label)
		}
	}
	d.mixer.run(memory.images, memory.labels, r.Samples)
	delivery := Delivery{Samples: r.Samples, Batches: d.place.Batches, Turns: d.place.Turns}
	if s := memory.staging; s != nil {
		delivery.Redos = s.Publish(n)
	}
	if err := p.to.Deliver(delivery); err != nil {
		return err
	}
	p.env.Counters.Delivered.Samples.Add(int64(n))
	p.env.Counters.Delivered.Batches.Add(1)
	d.batches++
	d.samples += n
	return nil
}

// end returns the result of a pass whose last batch is short or empty. It returns nil if the epoch
// delivered anything. Otherwise the error explains why there are no samples.
func (d *delivering) end(last *ready) error {
	p, share, file := d.p, &d.p.config.Batch.Share, d.p.env.Rules.File
	if d.stray { // there are enough samples, but others than in a whole archive
		return *p.flow.lost.Load()
	}
	none := func(format string, args ...any) error {
		return fmt.Errorf("%w in epoch %d of %s: "+format,
			append([]any{index.ErrNoSamples, p.start.Epoch, file}, args...)...)
	}
	switch n := len(last.Samples); {
	case d.samples < p.asm.Wanted():
		return none("%d samples are bad, so that rank %d of %d can't fill its batches; see torchstream "+
			"inspect", d.bad, share.Rank, share.World)
	case d.batches > 0:
		return nil
	case p.deal.Fixed && p.deal.Turns == 0:
		return none("%d samples are less than a batch of %d for each of %d ranks, and Options.DropLast is set", p.deal.Left,
			share.Batch, share.World)
	case n > 0:
		return none("%d samples are less than a batch of %d, and Options.DropLast is set", n, share.Batch)
	case d.bad > 0:
		return none("all %d are bad; the last one: %w", d.bad, d.lastBad)
	case p.ctx.Err() != nil: // the context ended before the first sample was read
		return p.cause()
	}
	orphans := 0
	if p.flow.build != nil {
		orphans = p.flow.build.Orphans()
	}
	return index.NoSamples(file, p.archive.Position(), orphans)
}

// cause returns the reason why the pass's context has ended.
func (p *pass) cause() error { return archive.CauseAfter(p.ctx, p.source.Requests.Failure()) }
