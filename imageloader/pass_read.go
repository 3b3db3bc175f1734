package imageloader

import (
	"errors"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/order"
)

// send sends a sample to place.
func (p *pass) send(it item) error {
	if it.bad == nil && it.data != nil && !p.budget.acquire(len(it.data)) {
		return errStopped
	}
	select {
	case p.items <- it:
		p.queue(1)
		return nil
	case <-p.ctx.Done():
		return errStopped
	}
}

// queue counts n samples into the queue between send and work, or out of it.
func (p *pass) queue(n int64) {
	p.queued.Add(n)
	p.l.counters.queue.Add(n)
}

// item makes an item of sample i of the index.
func (p *pass) item(i int) item {
	s := p.known.Sample(i)
	it := item{sample: Sample{Name: s.Name, Index: i, Label: s.Label}, size: s.Size, epoch: p.epoch * p.l.o.Repeat}
	it.bad = p.l.judge.member(&it.sample, s.Kind, s.Size)
	if p.l.o.Masks.masked() {
		mask := p.known.Sample(p.known.Mask(i))
		it.mask = maskItem{name: mask.Name, size: mask.Size}
		if it.bad == nil {
			it.bad = p.l.judge.member(&Sample{Name: mask.Name, Index: i}, mask.Kind, mask.Size)
		}
	}
	return it
}

// wanted is the number of samples that are still to be delivered, if that is fixed.
func (p *pass) wanted() int { return max(0, p.deal.Turns-p.batches*p.l.o.BatchSize) }

// end is the turn before which the pass ends. Under Skip, if the number of batches is fixed,
// assembly ends the pass earlier, when it has enough samples.
func (p *pass) end() int {
	switch {
	case p.deal.Fixed && p.wanted() == 0:
		return p.turn
	case p.asm.wanted > 0:
		return p.deal.MaxTurns()
	}
	return p.deal.Turns
}

// newBuffer makes the buffer that a stream is shuffled through.
func newBuffer[T any](p *pass, epoch int) *order.Shuffler[T] {
	o := &p.l.o
	b := order.NewShuffler[T](o.ShuffleBuffer, o.ShuffleBytes, o.Seed, epoch)
	// By the file's size, because the order must not depend on whether the archive was read before.
	b.Ramp = p.archive.Info().Size() > o.ShuffleBytes
	return b
}

// repeated is added to item.again for a sample that comes again because there are not enough
// others.
const repeated = 1 << 40

// maxGroup is the maximum number of samples that list hands on at once.
const maxGroup = 16

// groupSize is the number of samples that list hands on at once. Planning an image takes little
// longer than waking the goroutine that does it. Decoding takes far longer, so samples that are to
// be decoded here go to any goroutine that is free.
func (p *pass) groupSize() int {
	if !p.fetchPlans() {
		return 1
	}
	return max(1, min(maxGroup, p.l.o.BatchSize/p.l.o.Workers))
}

// list gives the samples of an archive with random access their rows, and sends them to be read.
func (p *pass) list() {
	defer close(p.fetches)
	n, o := p.known.Len(), &p.l.o
	s := order.Sequence{Kind: p.order, Seed: o.Seed, Epoch: p.epoch, Rounds: o.Repeat, PerRound: p.l.perRound(p.known), Weights: p.l.weights}
	s.Shuffled = func(epoch int) []int32 {
		if p.order == order.Buffered {
			return order.Through(newBuffer[int32](p, epoch), n, func(i int) int64 { it := p.item(i); return it.weight() })
		}
		return order.Permutation(n, o.Seed, epoch)
	}
	size := p.groupSize()
	group := make([]job, 0, size)
	hand := func() bool {
		p.queue(int64(len(group)))
		select {
		case p.fetches <- group:
		case <-p.ctx.Done():
			return false
		}
		select {
		case group = <-p.groups:
		default:
			group = make([]job, 0, size)
		}
		return true
	}
	for turn := p.turn; turn < p.end(); turn++ {
		position, before := p.deal.At(turn)
		i, epoch, again := s.At(position)
		it := p.item(i)
		it.epoch, it.again = epoch, again+uint64(before)*repeated
		j, ok := p.row(&it, len(group) == 0)
		if !ok && len(group) > 0 { // a row may become free only after those of the group
			if !hand() {
				return
			}
			j, ok = p.row(&it, true)
		}
		if !ok {
			return
		}
		if group = append(group, j); len(group) == size && !hand() {
			return
		}
	}
	if len(group) == 0 || hand() {
		p.asm.end(nil)
	}
}

// readStream sends the samples of an archive without random access.
func (p *pass) readStream() {
	defer close(p.items)
	end := p.end()
	p.next = p.turn
	for before := 0; ; before++ { // more than once only if samples come again to fill up
		position := 0
		take := func(it item) error {
			turn, mine := p.deal.Turn(position, before)
			position++
			if !mine || turn < p.turn || turn >= end {
				p.buffers.Put(it.data)
				return nil
			}
			p.next = turn + 1
			it.again = uint64(before) * repeated
			return p.send(it)
		}
		for round := range p.l.o.Repeat {
			if before+round > 0 {
				if p.readErr = p.rewind(); p.readErr != nil {
					return
				}
			}
			if p.readErr = p.readRound(p.epoch*p.l.o.Repeat+round, take); p.readErr != nil {
				return
			}
			if before > 0 && p.next >= end {
				return
			}
		}
		if end == order.Unknown || p.next >= end {
			return
		}
	}
}

// rewind goes back to the beginning of the archive.
func (p *pass) rewind() error {
	a, err := p.archive.Reopen()
	if err != nil {
		return err
	}
	_ = p.archive.Close() // nothing was written
	p.archive = a
	return nil
}

// readRound reads the archive once, and hands its samples to take in the order of the epoch.
func (p *pass) readRound(epoch int, take func(item) error) error {
	emit, flush := take, func() error { return nil }
	if p.order == order.Buffered {
		buffer := newBuffer[item](p, epoch)
		emit = func(it item) error {
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
	if p.known != nil {
		read = p.readKnown
	}
	err := read(func(it item) error {
		it.epoch = epoch
		return emit(it)
	})
	if errors.Is(err, errStopped) {
		return err
	}
	if err != nil {
		p.stray.Store(int64(p.next))
	}
	if stopped := flush(); stopped != nil { // also before an error, so that no sample that was read is lost
		return stopped
	}
	return err
}

// readKnown reads the samples of an index in the archive's order, and the rest of the files for
// their checksums.
func (p *pass) readKnown(emit func(item) error) error {
	for i := range p.known.Len() {
		it := p.item(i)
		if it.bad == nil {
			began, spent := time.Now(), p.archive.ReadTime()
			it.data = p.buffers.Get(int(it.size))
			if err := p.known.ReadForward(p.archive, i, it.data); err != nil {
				return err
			}
			p.l.counters.streamed(p.archive, time.Since(began), spent)
		}
		if err := emit(it); err != nil {
			return err
		}
	}
	return p.archive.ReadToEnd()
}

// readFirst reads the archive member by member, and makes its index.
func (p *pass) readFirst(emit func(item) error) error {
	b, err := index.NewBuilder(archive.Shown(p.l.path), p.l.indexConfig())
	if err != nil {
		return err
	}
	defer b.Close()
	p.build = b
	if err := b.Walk(p.archive, &firstVisitor{p: p, emit: emit, began: time.Now(), spent: p.archive.ReadTime()}); err != nil {
		return err
	}
	if b.Samples() == 0 || p.l.index.Load() != nil {
		return nil
	}
	x, err := b.Finish(p.archive)
	if err != nil { // every sample was delivered all the same
		p.l.o.Logger.Warn("no index", "archive", archive.Shown(p.l.path), "error", err)
		return nil
	}
	if !p.l.index.CompareAndSwap(nil, x) {
		return x.Close()
	}
	return nil
}

// firstVisitor emits the samples of an archive's first pass, while its index is made.
type firstVisitor struct {
	p    *pass
	emit func(item) error
	bad  *SampleError // of the sample that is being visited

	began time.Time     // when the previous sample was emitted
	spent time.Duration // the archive's ReadTime at that moment
}

// Buffer returns memory for a sample that can be read. It is a method of index.Visitor.
func (v *firstVisitor) Buffer(f *index.Found) ([]byte, error) {
	s := Sample{Name: f.Name, Index: f.Index, Label: f.Label}
	if v.bad = v.p.l.judge.member(&s, f.Kind, f.Size); v.bad != nil {
		return nil, nil
	}
	return v.p.buffers.Get(int(f.Size)), nil
}

// Visit emits a sample. It is a method of index.Visitor.
func (v *firstVisitor) Visit(f *index.Found, data []byte) error {
	a := v.p.archive
	v.p.l.counters.streamed(a, time.Since(v.began), v.spent)
	it := item{sample: Sample{Name: f.Name, Index: f.Index, Label: f.Label}, size: f.Size, data: data, bad: v.bad}
	err := v.emit(it)
	v.began, v.spent = time.Now(), a.ReadTime()
	return err
}
