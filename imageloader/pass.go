package imageloader

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"math"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/order"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/imagecapi"
)

// readers is how many goroutines read members of a plain .tar, so that a disk has several requests at a time; each costs next to nothing.
const readers = 4

// queueBytes bounds the compressed bytes between reading and decoding (besides the shuffle buffer), unless one sample alone is larger.
const queueBytes = 64 << 20

// pass is one epoch being read:
//
//	read (1 goroutine: inflate, shuffle) --> place (1: a row for each sample) --> work (Workers: decode into the row) --> assembly --> run (deliver in order)
//
// and for a plain .tar, whose samples can be read in any order, and for samples that are held in memory, place --> fetch (readers) --> work.
type pass struct {
	l     *Loader
	ctx   context.Context
	stop  context.CancelCauseFunc
	epoch int

	archive *archive
	known   *index // nil in the first pass over a .tar.gz with given classes
	build   *indexer

	order   order.Kind
	deal    order.Deal
	turn    int // of the deal: where this pass begins
	batches int // of the deal: so many were delivered before
	state   *run
	// stray is the turn from which on samples come out of their order: what is left in the shuffle buffer when the archive can't be read on.
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
	offset int64
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
// lend is called from one goroutine at a time, and returns the memory of the next batch's fields: BatchSize * Size * Size * 3 bytes for images (uint8, NHWC, RGB)
// and BatchSize * 8 for labels (int64). It may block until memory is free, but not longer than its context; at the end of an epoch one slot more than needed may have been
// lent. deliver is called from Fill's own goroutine with the number of samples n, the first n rows of the oldest lent slot, and an [Info];
// n is BatchSize, or less in the last batch, whose other rows are undefined. The slot's memory is not touched any more from then on.
//
// Damage ends the epoch with an error after all samples before it were delivered: in a batch that may be short, and those in a shuffle buffer out of their order.
// Batches that only come because of the damage have the State of the last one before them, so that the epoch can be gone on with when it is repaired. When ctx ends, the loader is closed, or lend or deliver fail, Fill stops its
// goroutines, waits for them, and returns the cause: within the time that one image takes to decode.
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
	a, err := openArchive(inner, l.path, l.open)
	if err != nil {
		return stopCause(ctx, err)
	}
	p.archive = a
	defer func() { _ = p.archive.Close() }() // only read
	if p.known != nil && (!sameArchive(a.info, p.known.info)) {
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
		c.queueBytes.Add(-int64(p.budget.used))
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
	if p.known != nil && p.known.random() {
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

// lend fetches slots when place asks for them. It is apart from place because place may get a row in another way while lend waits.
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
	r := newSampleReader(p.archive, p.known)
	defer r.close()
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
		if h, known := p.known.oversize[int32(j.sample.Index)]; known && j.bad == nil {
			info, _, _ := h.info()
			j.bad = p.l.oversize(&j.item, info)
		}
		if j.bad == nil {
			j.data = p.known.inMemory(j.sample.Index)
			j.borrowed = j.data != nil
		}
		if j.bad == nil && !j.borrowed {
			if !p.budget.acquire(int(j.size)) {
				return
			}
			began, spent := time.Now(), r.timed.spent
			j.data = p.buffers.Get(int(j.size))
			err := r.read(j.sample.Index, j.data)
			p.l.counters.fetched(time.Since(began), r.timed.spent-spent)
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
	if sniff(j.data) == "" {
		return bad, w.p.l.bad(&j.item, NotImage, looksLike(&j.item))
	}
	info, err := w.d.header(j.data)
	if err == nil {
		if e := w.p.l.oversize(&j.item, info); e != nil {
			return bad, e
		}
		stride := 3 * w.p.l.o.Transform.Size
		order.SeedRepeat(&w.source, w.p.l.o.Seed, order.OfSample, j.epoch, j.sample.Index, j.again)
		if err := w.p.l.plan.Geometry(w.rng, &info, &w.geometry); err != nil {
			return bad, w.p.l.bad(&j.item, Unsupported, err)
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
	if err == nil { // before rejected, which lies on the heap
		return good, nil
	}
	var rejected transform.FuncError
	switch {
	case errors.As(err, &rejected):
		return bad, w.p.l.bad(&j.item, Rejected, rejected.Err)
	case errors.Is(err, imagecapi.CodeDecode):
		return bad, w.p.l.bad(&j.item, Damaged, err)
	case errors.Is(err, imagecapi.CodeUnsupported):
		return bad, w.p.l.bad(&j.item, Unsupported, err)
	}
	return fatal, fmt.Errorf("imageloader: %s: decoding %q: %w", w.p.l.path, j.sample.Name, err)
}

func (l *Loader) bad(it *item, r Reason, err error) *SampleError {
	return &SampleError{File: l.path, Name: it.sample.Name, Index: it.sample.Index, Reason: r, Err: err}
}

// unreadable says what is wrong with a member before its content was read; nil if nothing is.
func (l *Loader) unreadable(it *item, kind memberKind) *SampleError {
	switch {
	case kind == kindHardLink:
		return l.bad(it, NotRegular, errors.New("a hard link to another member; pack the archive with --hard-dereference"))
	case kind == kindSymlink:
		return l.bad(it, NotRegular, errors.New("a symbolic link; pack the archive with --dereference"))
	case kind == kindOther:
		return l.bad(it, NotRegular, errors.New("a device or pipe"))
	case kind == kindSparse:
		return l.bad(it, Sparse, errors.New("pack the archive without --sparse"))
	case it.size == 0:
		return l.bad(it, Empty, nil)
	case it.size > l.o.MaxSampleBytes:
		return l.bad(it, TooLarge, fmt.Errorf("%d bytes, over Options.MaxSampleBytes (%d)", it.size, l.o.MaxSampleBytes))
	}
	return nil
}

// oversize says that an image has too many pixels; nil if it has not.
func (l *Loader) oversize(it *item, info imagecapi.Info) *SampleError {
	if int64(info.Width)*int64(info.Height) <= l.o.MaxPixels {
		return nil
	}
	return l.bad(it, TooLarge, fmt.Errorf("%d x %d pixels, over Options.MaxPixels (%d)", info.Width, info.Height, l.o.MaxPixels))
}

// looksLike says what a member that is no image might be.
func looksLike(it *item) error {
	if len(it.data) >= 4 && string(it.data[:4]) == "\x00\x05\x16\x07" {
		return errors.New("an AppleDouble file that macOS's tar adds; pack the archive with COPYFILE_DISABLE=1")
	}
	return fmt.Errorf("it begins with %q", it.data[:min(len(it.data), 8)])
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
	e := &p.known.entries[i]
	it := item{sample: p.l.sample(p.known, i), offset: e.offset, size: e.size, epoch: p.epoch * p.l.o.Repeat}
	it.bad = p.l.unreadable(&it, e.kind)
	return it
}

// wanted is how many samples are still to be delivered, if that is fixed.
func (p *pass) wanted() int { return max(0, p.deal.Turns-p.batches*p.l.o.BatchSize) }

// end is the turn before which the pass ends. Under Skip, if the number of batches is fixed, assembly ends it earlier: when it has enough.
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
	// Told by the file's size, since the order must not depend on whether the archive was read before.
	b.Ramp = p.archive.info.Size() > o.ShuffleBytes
	return b
}

// repeated tells a sample that comes again, because there are not enough others, from the first time.
const repeated = 1 << 40

// list sends the samples of an archive with random access, content still to be fetched.
func (p *pass) list() {
	defer close(p.items)
	n, o := len(p.known.entries), &p.l.o
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
	a, err := openArchive(p.ctx, p.l.path, p.l.open)
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
	for i := range p.known.entries {
		it := p.item(i)
		if it.bad == nil {
			began, spent := time.Now(), p.archive.spent
			p.archive.names, p.archive.last = i+1, it.sample.Name // for errors
			if err := p.archive.seekTo(int(p.known.entries[i].shard), it.offset); err != nil {
				return err
			}
			it.data = p.buffers.Get(int(it.size))
			if _, err := io.ReadFull(p.archive.in, it.data); err != nil {
				return p.archive.fail(err)
			}
			if e := &p.known.entries[i]; e.flags&entrySummed != 0 && crc32.ChecksumIEEE(it.data) != e.crc {
				return p.archive.fail(errStale)
			}
			p.l.counters.streamed(p.archive, time.Since(began), spent)
		}
		if err := emit(it); err != nil {
			return err
		}
	}
	return p.archive.drainAll()
}

// readFirst reads member by member, and leaves an index behind.
func (p *pass) readFirst(emit func(item) error) (err error) {
	if p.build, err = p.l.indexer(); err != nil {
		return err
	}
	defer p.build.close()
	p.build.spools(p.l.spoolBeside(p.archive))
	p.build.hold(p.l.o.ShuffleBytes)
	if err := p.archive.noteCheckpoints(p.build.mark); err != nil {
		return err
	}
	take := func(m *member, head, data []byte) error {
		crc, h, err := p.archive.content(p.l.codec, p.build.last.flags&entryImage != 0, m, head, data)
		if err != nil {
			return err
		}
		p.build.sum(crc, entrySummed)
		p.build.head(h)
		return nil
	}
	for {
		began, spent := time.Now(), p.archive.spent
		m, head, err := p.archive.nextHead()
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		s, number, err := p.build.add(&m, head)
		if err != nil {
			return err
		}
		if number < 0 || s.Index < 0 && m.kind != kindFile {
			continue
		}
		if p.archive.mark != nil && m.kind == kindFile && m.size > 0 {
			p.archive.mark.member(m.offset)
		}
		it := item{sample: s, offset: m.offset, size: m.size}
		it.bad = p.l.unreadable(&it, m.kind)
		switch {
		case s.Index >= 0 && it.bad == nil:
			it.data = p.buffers.Get(int(m.size))
			if err := take(&m, head, it.data); err != nil {
				return err
			}
			var data []byte
			if p.build.wants(m.size) {
				data = bytes.Clone(it.data)
			}
			p.build.keep(number, data, m.size)
		case m.kind == kindFile: // no sample of these classes, or too large: only its checksum
			if err := take(&m, head, nil); err != nil {
				return err
			}
		}
		p.l.counters.streamed(p.archive, time.Since(began), spent)
		if s.Index < 0 {
			continue
		}
		if err := emit(it); err != nil {
			return err
		}
	}
	if p.build.samples > 0 && p.l.index.Load() == nil {
		x, err := p.l.saveIndex(p.archive, p.build)
		if err != nil { // the samples are all there
			p.l.o.Logger.Warn("no index", "archive", p.l.path, "error", err)
			return nil
		}
		if !p.l.index.CompareAndSwap(nil, x) {
			return x.close()
		}
	}
	return nil
}
