package imageloader

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// readers is how many goroutines read members of a plain .tar, so that a disk has several requests
// at a time; each costs next to nothing.
const readers = 4

// queueBytes bounds the compressed bytes between reading and decoding (besides the shuffle buffer),
// unless one sample alone is larger.
const queueBytes = 64 << 20

// pass is one epoch being read:
//
//	read (1 goroutine: inflate, shuffle) --> place (1: a row for each sample) --> work (Workers: decode into the row) --> assembly --> run (deliver in order)
//
// and for a plain .tar, whose samples can be read in any order, and for samples that are held in
// memory, place --> fetch (readers) --> work.
type pass struct {
	l     *Loader
	ctx   context.Context
	stop  context.CancelCauseFunc
	epoch int

	archive *archive.Archive
	known   *index.Index   // nil in the first pass over a .tar.gz with given classes
	build   *index.Builder // of the first pass; nil before

	order   order.Kind
	deal    order.Deal
	turn    int // of the deal: where this pass begins
	batches int // of the deal: so many were delivered before
	state   *run
	// stray is the turn from which on samples come out of their order: what is left in the shuffle
	// buffer when the archive can't be read on.
	stray atomic.Int64
	next  int // the turn that readStream sends next

	items   chan item
	fetches chan job // of samples whose content does not come in the archive's order
	jobs    chan job
	readErr error // why items ended too early; written before items is closed
	asm     *assembly
	buffers *arena.Buffers // of compressed samples
	budget  *budget
	queued  atomic.Int64 // samples between send and a worker
}

// item is a sample on its way from the archive to a row.
type item struct {
	sample Sample
	size   int64
	data   []byte // the content, unless it is fetched later
	bad    *SampleError

	epoch int    // that its random choices are drawn for: the pass's, unless Options.Repeat is set
	again uint64 // tells apart the times that a sample comes in an epoch
}

// weight is how many bytes the content has, or will have when it is fetched.
func (it *item) weight() int64 {
	if it.data == nil && it.bad == nil {
		return it.size
	}
	return int64(len(it.data))
}

type job struct {
	item
	position int
	dst      []byte
	borrowed bool // data is the index's: nobody writes there, and it goes into no buffers
}

// Fill produces the batches of one epoch, in order: it is what a prefetcher calls.
//
// lend is called from one goroutine at a time, and returns the memory of the next batch's fields:
// BatchSize * Size * Size * 3 bytes for images (uint8, NHWC, RGB) and BatchSize * 8 for labels
// (int64). It may block until memory is free, but not longer than its context; at the end of an
// epoch one slot more than needed may have been lent. deliver is called from Fill's own goroutine
// with the number of samples n, the first n rows of the oldest lent slot, and an [Info]; n is
// BatchSize, or less in the last batch, whose other rows are undefined. The slot's memory is not
// touched any more from then on.
//
// Damage ends the epoch with an error after all samples before it were delivered: in a batch that
// may be short, and those in a shuffle buffer out of their order. Batches that only come because of
// the damage have the State of the last one before them, so that the epoch can be gone on with when
// it is repaired. When ctx ends, the loader is closed, or lend or deliver fail, Fill stops its
// goroutines, waits for them, and returns the cause: within the time that one image takes to
// decode.
func (l *Loader) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error), deliver func(n int, info any) error) error {
	l.mu.Lock()
	if l.isClosed() {
		l.mu.Unlock()
		return ErrClosed
	}
	l.running.Add(1)
	l.mu.Unlock()
	defer l.running.Done()

	inner, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	p := &pass{l: l, ctx: inner, stop: stop, epoch: epoch, known: l.index.Load(), budget: newBudget(l.queueBytes)}
	p.begin()
	p.buffers = arena.NewBuffers(l.queueBytes + l.o.ShuffleBytes/4)
	defer p.buffers.Close() // when no goroutine of the pass is left
	a, err := archive.Open(inner, l.path, l.archiveConfig())
	if err != nil {
		return stopCause(ctx, err)
	}
	p.archive = a
	defer func() { _ = p.archive.Close() }() // only read
	if p.known != nil && !p.known.Matches(a) {
		return fmt.Errorf("imageloader: %s has changed since it was opened: open the loader again", l.path)
	}
	return p.run(lend, deliver)
}

// begin finds out where in the epoch the pass begins.
func (p *pass) begin() {
	l := p.l
	l.mu.Lock()
	p.order = l.order
	at := resume{epoch: p.epoch}
	if l.resume != nil && l.resume.epoch == p.epoch {
		at = *l.resume
	}
	l.mu.Unlock()
	p.turn, p.batches = at.turn, at.batches
	p.stray.Store(math.MaxInt64)
	p.deal = order.NewDeal(l.o.share(), l.positions(p.known), at.done)
	known := p.known
	p.state = &run{epoch: p.epoch, order: p.order, rank: l.o.Rank, world: l.o.World, done: at.done, before: at.before,
		classes: l.classesDigest(), options: l.fingerprint(p.order), identify: func() archiveIdentity { return l.identity(known) }}
}

func (p *pass) run(lend func(context.Context) ([][]byte, error), deliver func(int, any) error) error {
	o := &p.l.o
	p.asm = newAssembly(o.BatchSize, 3*o.Transform.Size*o.Transform.Size, o.BadSamples)
	soft, err := p.l.soft()
	if err != nil {
		return err
	}
	p.asm.soft = soft
	p.asm.dropLast = o.DropLast
	if o.BadSamples == Skip && p.deal.Fixed {
		p.asm.wanted = p.wanted()
	}
	p.items = make(chan item, 2*o.Workers)
	p.jobs = make(chan job, o.Workers)

	c := &p.l.counters
	c.begin(p)
	defer c.end(p)
	p.budget.total = &c.queueBytes
	defer func() { // what an early end left lying
		c.queue.Add(-p.queued.Load())
		c.queueBytes.Add(-p.budget.used)
	}()
	var all sync.WaitGroup
	defer all.Wait()
	defer p.stop(nil)
	all.Go(func() { // whatever ends the pass, wakes up those who don't wait in a channel
		select {
		case <-p.ctx.Done():
		case <-p.l.closed:
			p.stop(ErrClosed)
		}
		p.asm.stop()
		p.budget.stop()
	})
	all.Go(func() { p.lend(lend) })
	if o.StatsEvery > 0 {
		all.Go(p.report)
	}
	if p.known != nil && p.known.Random() {
		p.fetches = make(chan job, o.Workers)
		all.Go(p.list)
		var fetching sync.WaitGroup
		for range max(readers, o.Workers) { // those of a gzip file inflate, for more than half as long as a worker decodes
			fetching.Go(p.fetch)
		}
		all.Go(func() {
			fetching.Wait()
			close(p.jobs)
		})
		all.Go(func() {
			defer close(p.fetches)
			p.place(p.fetches)
		})
	} else {
		all.Go(p.readStream)
		all.Go(func() {
			defer close(p.jobs)
			p.place(p.jobs)
		})
	}
	for range o.Workers {
		all.Go(p.work)
	}
	return p.deliver(deliver)
}

// lend fetches slots when place asks for them. It is apart from place because place may get a row
// in another way while lend waits.
func (p *pass) lend(lend func(context.Context) ([][]byte, error)) {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.asm.ask:
		}
		fields, err := lend(p.ctx)
		if err == nil && len(fields) != 2 {
			err = fmt.Errorf("imageloader: the lent slot has %d fields, not 2: images and labels", len(fields))
		}
		if err == nil {
			err = p.asm.add(fields[0], fields[1])
		}
		if err != nil {
			p.stop(err) // no effect if the pass has ended already
			return
		}
	}
}

// place gives every sample a row and passes it on.
func (p *pass) place(to chan<- job) {
	for {
		var it item
		var more bool
		select {
		case it, more = <-p.items:
		case <-p.ctx.Done():
			return
		}
		if !more {
			p.asm.end(p.readErr)
			return
		}
		waited := p.asm.waited
		position, slot, row, ok := p.asm.place(it.sample)
		p.l.counters.waitSlot.Add(int64(p.asm.waited - waited)) // only place writes it
		if !ok {
			return
		}
		select {
		case to <- job{item: it, position: position, dst: slot.image(row, p.asm.row)}:
		case <-p.ctx.Done():
			return
		}
	}
}

// fetch reads samples in whatever order they come.
func (p *pass) fetch() {
	r := index.NewReader(p.known, p.archive)
	defer r.Close()
	for {
		var j job
		var more bool
		select {
		case j, more = <-p.fetches:
		case <-p.ctx.Done():
			return
		}
		if !more {
			return
		}
		if info, known := p.known.Oversize(j.sample.Index); known && j.bad == nil {
			j.bad = p.l.judge.header(&j.sample, &info)
		}
		if j.bad == nil {
			j.data = p.known.InMemory(j.sample.Index)
			j.borrowed = j.data != nil
		}
		if j.bad == nil && !j.borrowed {
			if !p.budget.acquire(int(j.size)) {
				return
			}
			began, spent := time.Now(), r.FileTime()
			j.data = p.buffers.Get(int(j.size))
			err := r.Read(j.sample.Index, j.data)
			p.l.counters.fetched(time.Since(began), r.FileTime()-spent)
			if err != nil {
				p.recycle(&j)
				p.asm.resolve(j.position, fatal, err)
				continue
			}
		}
		select {
		case p.jobs <- j:
		case <-p.ctx.Done():
			return
		}
	}
}

// recycle is for what was read for a job.
func (p *pass) recycle(j *job) {
	if j.bad != nil || j.borrowed {
		return
	}
	p.budget.release(len(j.data))
	p.buffers.Put(j.data)
}

// work decodes.
func (p *pass) work() {
	o, c := &p.l.o, &p.l.counters
	leave, err := o.settle()
	if err != nil {
		p.stop(err)
		return
	}
	defer leave()
	d, err := p.l.codec.newDecoder(o.MaxPixels)
	if err != nil {
		p.stop(fmt.Errorf("imageloader: no decoder: %w", err))
		return
	}
	defer d.close()
	w := worker{p: p, d: d, entries: p.l.entryPoints(p.known).by(d)}
	w.reset()
	if w.augmenter, err = p.l.plan.NewAugmenter(); err != nil {
		p.stop(fmt.Errorf("imageloader: no augmenter: %w", err))
		return
	}
	defer w.augmenter.Close()
	idle := time.Now()
	for {
		var j job
		var more bool
		select {
		case j, more = <-p.jobs:
		case <-p.ctx.Done():
			return
		}
		if !more || p.ctx.Err() != nil {
			return
		}
		p.queue(-1)
		began := time.Now()
		state, err := w.decode(&j)
		now := time.Now()
		c.waitData.Add(int64(began.Sub(idle)))
		c.decode.Add(int64(now.Sub(began)))
		c.bytes.Add(int64(len(j.data)))
		idle = now
		p.asm.resolve(j.position, state, err)
		p.recycle(&j)
	}
}

type worker struct {
	p        *pass
	d        decoder
	source   rand.PCG
	rng      *rand.Rand
	geometry imagecapi.Geometry

	augmenter *transform.Augmenter // nil without Transform.Ops
	entries   *byEntries           // nil: none are used
	counted   imagecapi.Stats
}

func (w *worker) reset() { w.rng = rand.New(&w.source) }

func (w *worker) decode(j *job) (flightState, error) {
	if j.bad != nil {
		return bad, j.bad
	}
	judge := &w.p.l.judge
	if index.Sniff(j.data) == "" {
		return bad, judge.notImage(&j.sample, j.data)
	}
	info, err := w.d.header(j.data)
	if err == nil {
		if e := judge.header(&j.sample, &info); e != nil {
			return bad, e
		}
		stride := 3 * w.p.l.o.Transform.Size
		order.SeedRepeat(&w.source, w.p.l.o.Seed, order.OfSample, j.epoch, j.sample.Index, j.again)
		if err := w.p.l.plan.Geometry(w.rng, &info, &w.geometry); err != nil {
			return bad, judge.bad(&j.sample, Unsupported, err)
		}
		if w.entries != nil && info.Format == imagecapi.JPEG && !info.Progressive {
			err = w.entries.decode(j.sample.Index, j.data, &w.geometry, j.dst, stride)
		} else {
			err = w.d.decode(j.data, &w.geometry, j.dst, stride)
		}
		w.count(&info)
		if err == nil && w.augmenter != nil {
			err = w.augmenter.Apply(w.rng, j.dst)
		}
	}
	if err == nil {
		return good, nil
	}
	e, err := judge.decoding(&j.sample, err)
	if err != nil {
		return fatal, err
	}
	return bad, e
}

// send passes a sample on to place.
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

func (p *pass) queue(n int64) {
	p.queued.Add(n)
	p.l.counters.queue.Add(n)
}

// item makes the i-th sample of the index.
func (p *pass) item(i int) item {
	s := p.known.Sample(i)
	it := item{sample: Sample{Name: s.Name, Index: i, Label: s.Label}, size: s.Size, epoch: p.epoch * p.l.o.Repeat}
	it.bad = p.l.judge.member(&it.sample, s.Kind, s.Size)
	return it
}

// wanted is how many samples are still to be delivered, if that is fixed.
func (p *pass) wanted() int { return max(0, p.deal.Turns-p.batches*p.l.o.BatchSize) }

// end is the turn before which the pass ends. Under Skip, if the number of batches is fixed,
// assembly ends it earlier: when it has enough.
func (p *pass) end() int {
	switch {
	case p.deal.Fixed && p.wanted() == 0:
		return p.turn
	case p.asm.wanted > 0:
		return p.deal.MaxTurns()
	}
	return p.deal.Turns
}

// buffer is what the samples of an archive that is larger than memory are shuffled through.
func newBuffer[T any](p *pass, epoch int) *order.Shuffler[T] {
	o := &p.l.o
	b := order.NewShuffler[T](o.ShuffleBuffer, o.ShuffleBytes, o.Seed, epoch)
	// Told by the file's size, since the order must not depend on whether the archive was read
	// before.
	b.Ramp = p.archive.Info().Size() > o.ShuffleBytes
	return b
}

// repeated tells a sample that comes again, because there are not enough others, from the first
// time.
const repeated = 1 << 40

// list sends the samples of an archive with random access, content still to be fetched.
func (p *pass) list() {
	defer close(p.items)
	n, o := p.known.Len(), &p.l.o
	s := order.Sequence{Kind: p.order, Seed: o.Seed, Epoch: p.epoch, Rounds: o.Repeat, PerRound: p.l.perRound(p.known), Weights: p.l.weights}
	s.Shuffled = func(epoch int) []int32 {
		if p.order == order.Buffered {
			return order.Through(newBuffer[int32](p, epoch), n, func(i int) int64 { it := p.item(i); return it.weight() })
		}
		return order.Permutation(n, o.Seed, epoch)
	}
	for turn := p.turn; turn < p.end(); turn++ {
		position, before := p.deal.At(turn)
		i, epoch, again := s.At(position)
		it := p.item(i)
		it.epoch, it.again = epoch, again+uint64(before)*repeated
		if p.send(it) != nil {
			return
		}
	}
}

// readStream sends the samples of an archive without random access.
func (p *pass) readStream() {
	defer close(p.items)
	end := p.end()
	p.next = p.turn
	for before := 0; ; before++ { // once, unless samples come again to fill up
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

// rewind begins with the archive again.
func (p *pass) rewind() error {
	a, err := p.archive.Reopen()
	if err != nil {
		return err
	}
	_ = p.archive.Close() // only read
	p.archive = a
	return nil
}

// readRound goes through the archive once; take gets its samples in the order of the epoch.
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
	if stopped := flush(); stopped != nil { // also before an error: nothing that was read is lost
		return stopped
	}
	return err
}

// readKnown reads the samples of an index, and the rest of the file for its checksum.
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

// readFirst reads member by member, and leaves an index behind.
func (p *pass) readFirst(emit func(item) error) error {
	b, err := index.NewBuilder(p.l.path, p.l.indexConfig())
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
	if err != nil { // the samples are all there
		p.l.o.Logger.Warn("no index", "archive", p.l.path, "error", err)
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

	began time.Time     // when the sample before was emitted
	spent time.Duration // of the archive's ReadTime until then
}

// Buffer is index.Visitor's.
func (v *firstVisitor) Buffer(f *index.Found) ([]byte, error) {
	s := Sample{Name: f.Name, Index: f.Index, Label: f.Label}
	if v.bad = v.p.l.judge.member(&s, f.Kind, f.Size); v.bad != nil {
		return nil, nil
	}
	return v.p.buffers.Get(int(f.Size)), nil
}

// Visit is index.Visitor's.
func (v *firstVisitor) Visit(f *index.Found, data []byte) error {
	a := v.p.archive
	v.p.l.counters.streamed(a, time.Since(v.began), v.spent)
	it := item{sample: Sample{Name: f.Name, Index: f.Index, Label: f.Label}, size: f.Size, data: data, bad: v.bad}
	err := v.emit(it)
	v.began, v.spent = time.Now(), a.ReadTime()
	return err
}
