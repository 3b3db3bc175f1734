package epoch

import (
	"errors"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/order"
)

// repeated is added to Draw.Again for a sample that is repeated to fill up the epoch. Its random
// choices then differ from the choices of its other occurrences.
const repeated = 1 << 40

// newShuffler returns the shuffle buffer of a stream.
func newShuffler[T any](p *pass, epoch int) *order.Shuffler[T] {
	o := &p.config.Order
	b := order.NewShuffler[T](o.Buffer.Samples, o.Buffer.Bytes, o.Seed, epoch)
	// Use the file's size, because the order must not depend on whether the archive was read
	// before.
	b.Ramp = p.archive.Info().Size() > o.Buffer.Bytes
	return b
}

// send sends a sample to place. It waits for memory first.
func (p *pass) send(it Item) error {
	if it.bad == nil && it.Data != nil && !p.queue.budget.Acquire(len(it.Data)) {
		return archive.ErrStopped
	}
	select {
	case p.flow.items <- it:
		p.queue.add(1)
		return nil
	case <-p.ctx.Done():
		return archive.ErrStopped
	}
}

// readStream sends the samples of an archive without random access.
func (p *pass) readStream() {
	f, repeat := &p.flow, p.config.Order.Repeat
	defer close(f.items)
	end := p.end()
	f.next = p.start.Turn
	for before := 0; ; before++ { // more than one iteration only if samples are repeated to fill up the epoch
		position := 0
		take := func(it Item) error {
			turn, mine := p.deal.Turn(position, before)
			position++
			if !mine || turn < p.start.Turn || turn >= end {
				p.queue.buffers.Put(it.Data)
				return nil
			}
			f.next = turn + 1
			it.Draw.Again = uint64(before) * repeated
			return p.send(it)
		}
		for round := range repeat {
			if before+round > 0 {
				if f.readErr = p.rewind(); f.readErr != nil {
					f.short = true // the samples so far may be enough
					return
				}
			}
			if f.readErr = p.readRound(p.start.Epoch*repeat+round, take); f.readErr != nil {
				return
			}
			if before > 0 && f.next >= end {
				return
			}
		}
		if end == order.Unknown || f.next >= end {
			return
		}
	}
}

// rewind restarts reading at the first byte of the archive, which must not have changed: the order
// of the epoch depends on its size.
func (p *pass) rewind() error {
	a, err := p.archive.Reopen()
	if err != nil {
		return err
	}
	if err := a.Changed(p.archive.Info()); err != nil {
		_ = a.Close() // nothing was written
		return err
	}
	_ = p.archive.Close() // nothing was written
	p.archive = a
	return nil
}

// readRound reads the archive once and calls take with its samples, in the order of the epoch.
func (p *pass) readRound(epoch int, take func(Item) error) error {
	emit, flush := take, func() error { return nil }
	if p.config.Order.Kind == order.Buffered {
		buffer := newShuffler[Item](p, epoch)
		emit = func(it Item) error {
			for buffer.Full(it.weight()) {
				if err := take(buffer.Take()); err != nil {
					return err
				}
			}
			buffer.Add(it, it.weight())
			return nil
		}
		flush = func() error {
			for buffer.Len() > 0 {
				if err := take(buffer.Take()); err != nil {
					return err
				}
			}
			return nil
		}
	}
	read := p.readFirst
	if p.source.Known != nil {
		read = p.readKnown
	}
	err := read(func(it Item) error {
		it.Draw.Epoch = epoch
		return emit(it)
	})
	if errors.Is(err, archive.ErrStopped) {
		return err
	}
	if err != nil {
		p.flow.lost.Store(&err)
		p.flow.stray.Store(int64(p.flow.next))
	}
	if stopped := flush(); stopped != nil { // even after an error, so that no sample is lost
		return stopped
	}
	return err
}

// readKnown reads the samples of an index in the archive's order. It then reads the rest of the
// files, for their checksums.
func (p *pass) readKnown(emit func(Item) error) error {
	known := p.source.Known
	for i := range known.Len() {
		it := p.item(i)
		if it.bad == nil {
			began, spent := time.Now(), p.archive.ReadTime()
			it.Data = p.queue.buffers.Get(int(it.Size))
			if err := known.ReadForward(p.archive, i, it.Data); err != nil {
				return err
			}
			p.env.Counters.Times.Streamed(p.archive, time.Since(began), spent)
		}
		if err := emit(it); err != nil {
			return err
		}
	}
	return p.archive.ReadToEnd()
}

// readFirst reads the archive member by member, and makes its index.
func (p *pass) readFirst(emit func(Item) error) error {
	b, err := index.NewBuilder(p.env.Rules.File, p.source.First.Index)
	if err != nil {
		return err
	}
	defer b.Close()
	p.flow.build = b
	if err := b.Walk(p.archive,
		&firstVisitor{p: p, emit: emit, began: time.Now(), spent: p.archive.ReadTime()}); err != nil {
		return err
	}
	if b.Samples() == 0 {
		return nil
	}
	return p.source.First.Keep(func() (*index.Index, error) { return b.Finish(p.archive) })
}

// firstVisitor emits the samples of an archive's first pass, while a builder makes the index.
type firstVisitor struct {
	p    *pass
	emit func(Item) error
	bad  *sample.Error // reason why the current sample is bad, or nil

	began time.Time     // when the previous sample was emitted
	spent time.Duration // the archive's ReadTime at that moment
}

// Buffer returns memory for a sample's contents, or nil if the sample is bad. It is a method of
// index.Visitor.
func (v *firstVisitor) Buffer(f *index.Found) ([]byte, error) {
	s := sample.Sample{Name: f.Name, Index: f.Index, Label: f.Label}
	if v.bad = v.p.env.Rules.Member(&s, f.Kind, f.Size); v.bad != nil {
		return nil, nil
	}
	return v.p.queue.buffers.Get(int(f.Size)), nil
}

// Visit emits a sample. It is a method of index.Visitor.
func (v *firstVisitor) Visit(f *index.Found, data []byte) error {
	a := v.p.archive
	v.p.env.Counters.Times.Streamed(a, time.Since(v.began), v.spent)
	it := Item{Sample: sample.Sample{Name: f.Name, Index: f.Index, Label: f.Label}, Size: f.Size,
		Data: data, bad: v.bad}
	if f.Damage != nil {
		v.p.queue.buffers.Put(data)
		it.Data, it.bad = nil, v.p.env.Rules.Bad(&it.Sample, sample.Damaged, f.Damage)
	}
	err := v.emit(it)
	v.began, v.spent = time.Now(), a.ReadTime()
	return err
}
