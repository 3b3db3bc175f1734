package imageloader

import (
	"errors"
	"fmt"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
)

// deliver delivers the batches and returns the reason of the pass's end.
func (p *pass) deliver(deliver func(int, any) error) error {
	o := &p.l.o
	d := delivery{p: p, deliver: deliver, batches: p.state.before + p.batches, state: State{run: p.state, batches: p.batches},
		mixer: mixer{mixer: p.l.plan.NewMixer(), seed: o.Seed, epoch: p.epoch, classes: p.asm.soft, width: p.l.targetWidth()}}
	for {
		r, err := p.asm.next()
		if errors.Is(err, errStopped) {
			return p.cause()
		}
		for _, e := range r.bad {
			p.l.counters.met(e, o.BadSamples, o.Logger)
		}
		for _, e := range r.warned {
			p.l.counters.tolerated(e, o.Damaged, o.Logger)
		}
		if n := len(r.bad); n > 0 {
			d.bad += n
			d.lastBad = r.bad[n-1]
		}
		if r.partial {
			continue
		}
		n := len(r.samples)
		if n == o.BatchSize || n > 0 && !o.DropLast {
			if err := d.hand(&r, err == nil || n == o.BatchSize); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		if n < o.BatchSize {
			return d.end(&r)
		}
	}
}

// delivery counts the batches and samples that a pass has delivered so far.
type delivery struct {
	p       *pass
	deliver func(int, any) error
	mixer   mixer
	state   State // after the last batch
	batches int   // of the epoch, those before the pass included
	samples int   // of the pass
	bad     int   // samples of the pass
	lastBad *SampleError
}

// hand delivers a batch. whole says that no error cut it short: otherwise its state is that of the
// last batch that the epoch has without the error.
func (d *delivery) hand(r *ready, whole bool) error {
	p, n := d.p, len(r.samples)
	if p.ctx.Err() != nil {
		return p.cause()
	}
	if turns := p.turn + r.judged; whole && int64(turns) <= p.stray.Load() {
		d.state.batches++
		d.state.turns = turns
	}
	if err := p.decodeLost(r); err != nil {
		return err
	}
	if d.mixer.mixer != nil {
		d.mixer.run(r.slot.images, r.slot.labels, r.samples)
	}
	if err := d.deliver(n, p.info(r, d.state)); err != nil {
		return err
	}
	p.l.counters.samples.Add(int64(n))
	p.l.counters.batches.Add(1)
	d.batches++
	d.samples += n
	return nil
}

// end says how a pass ended whose last batch is short or empty: nil if the epoch delivered
// anything, otherwise why it has no samples.
func (d *delivery) end(last *ready) error {
	p, o := d.p, &d.p.l.o
	none := func(format string, args ...any) error {
		return fmt.Errorf("%w in epoch %d of %s: "+format, append([]any{ErrNoSamples, p.epoch, archive.Shown(p.l.path)}, args...)...)
	}
	switch n := len(last.samples); {
	case d.samples < p.asm.wanted:
		return none("%d samples are bad, so that rank %d of %d can't fill its batches; see torchstream inspect", d.bad, o.Rank, o.World)
	case d.batches > 0:
		return nil
	case p.deal.Fixed && p.deal.Turns == 0:
		return none("%d samples are less than a batch of %d for each of %d ranks, and Options.DropLast is set", p.deal.Left, o.BatchSize, o.World)
	case n > 0:
		return none("%d samples are less than a batch of %d, and Options.DropLast is set", n, o.BatchSize)
	case d.bad > 0:
		return none("all %d are bad; the last one: %w", d.bad, d.lastBad)
	case p.ctx.Err() != nil: // it ended before the first sample came
		return p.cause()
	}
	orphans := 0
	if p.build != nil {
		orphans = p.build.Orphans()
	}
	return index.NoSamples(archive.Shown(p.l.path), p.archive.Position(), orphans, false)
}

// cause returns the cause of the end of the pass's context.
func (p *pass) cause() error { return causeAfter(p.ctx, p.requests.Failure()) }
