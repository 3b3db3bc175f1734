package imageloader

import (
	"context"
	"fmt"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/order"
)

// readers is the minimum number of goroutines that read samples in any order, so that a disk has
// several requests at a time. Each costs next to nothing.
const readers = 4

// queueBytes bounds the compressed bytes between reading and decoding, besides those in the shuffle
// buffer. One sample alone may be larger.
const queueBytes = 64 << 20

// pass is one epoch under way. For a stream its goroutines are
//
//	readStream (1: inflate, shuffle) --> place (1: a row for each sample) --> work (Workers: decode
//	into the row) --> assembly --> deliver (1, in order)
//
// An archive with random access is not read before a row is known:
//
//	list (1: a row for each sample) --> fetch (readers: read, inflate) --> work (Workers: decode)
//	--> assembly --> deliver (1, in order)
//
// With plans (see FillPlans) fetch also plans the images that it can, and hands the others to work.
type pass struct {
	l     *Loader
	ctx   context.Context
	stop  context.CancelCauseFunc
	epoch int
	plans bool // the consumer decodes images from plans: see FillPlans

	archive  *archive.Archive
	requests *archive.Requests // of archive
	known    *index.Index      // nil in the first pass over a compressed archive with given classes
	build    *index.Builder    // of that first pass

	order   order.Kind
	deal    order.Deal
	turn    int // the turn of the deal with which this pass begins
	batches int // batches of the deal that were delivered before this pass
	state   *run
	// stray is the first turn whose sample comes out of its order: when the archive can't be read
	// any further, the samples that are left in the shuffle buffer are delivered all the same.
	stray atomic.Int64
	next  int // the turn that readStream sends next

	items   chan item
	fetches chan []job // of samples whose content does not come in the archive's order
	groups  chan []job // that fetch has emptied, for list
	jobs    chan job
	readErr error // why items ended early; written before items is closed
	asm     *assembly
	buffers *arena.Buffers // of compressed samples
	budget  *budget
	queued  atomic.Int64 // samples between send and work
}

// item is a sample on its way from the archive to a row.
type item struct {
	sample Sample
	size   int64
	data   []byte // the content, unless it is fetched later
	bad    *SampleError
	mask   maskItem

	epoch int    // of its random choices: the pass's, unless Options.Repeat is set
	again uint64 // tells apart the occurrences of a sample in an epoch
}

// maskItem is the mask of an item; the zero value without masks. Its content is fetched.
type maskItem struct {
	name     string // of the member
	size     int64
	data     []byte
	borrowed bool // data is the index's: read only, and not to be recycled
}

// weight is the number of bytes of the content, also while it is not fetched yet.
func (it *item) weight() int64 {
	if it.data == nil && it.bad == nil {
		return it.size
	}
	return int64(len(it.data))
}

// job is a sample on its way from place to assembly.
type job struct {
	item
	position  int
	dst       []byte
	dstTarget []byte         // empty without targets: see assembly.target
	staging   *staging       // for the plan of the row; nil: the image is decoded here
	row       int            // of staging
	borrowed  bool           // data is the index's: read only, and not to be recycled
	inflated  index.Inflated // data
}

// begin sets where in the epoch the pass begins.
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

// run starts the goroutines of the pass and delivers its batches.
func (p *pass) run(lend lender, deliver func(int, any) error) error {
	o := &p.l.o
	p.asm = newAssembly(o.BatchSize, 3*o.Transform.Size*o.Transform.Size, o.BadSamples)
	soft, err := p.l.soft()
	if err != nil {
		return err
	}
	p.asm.soft, p.asm.target = soft, p.l.targetBytes()
	p.asm.dropLast = o.DropLast
	if o.BadSamples == Skip && p.deal.Fixed {
		p.asm.wanted = p.wanted()
	}
	p.jobs = make(chan job, o.Workers)

	c := &p.l.counters
	c.begin(p)
	defer c.end(p)
	p.budget.total = &c.queueBytes
	defer func() { // samples that were queued when the pass ended early
		c.queue.Add(-p.queued.Load())
		c.queueBytes.Add(-p.budget.used)
	}()
	var all sync.WaitGroup
	defer all.Wait()
	defer p.stop(nil)
	all.Go(func() { // wakes the goroutines that wait in no channel, at any end of the pass
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
		p.fetches = make(chan []job, o.Workers)
		fetchers := max(readers, o.Workers) // those of a gzip file inflate, which takes more than half as long as decoding
		p.groups = make(chan []job, cap(p.fetches)+fetchers+1)
		all.Go(p.list)
		var fetching sync.WaitGroup
		for range fetchers {
			fetching.Go(p.fetch)
		}
		all.Go(func() {
			fetching.Wait()
			close(p.jobs)
		})
	} else {
		p.items = make(chan item, 2*o.Workers)
		all.Go(p.readStream)
		all.Go(p.place)
	}
	for range o.Workers {
		all.Go(p.work)
	}
	return p.deliver(deliver)
}

// lend asks the consumer for a slot when place needs one. It is a goroutine of its own because
// place may get a row in another way in the meantime.
func (p *pass) lend(lend lender) {
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-p.asm.ask:
		}
		fields, plans, err := lend(p.ctx)
		if err == nil && len(fields) != 2 {
			err = fmt.Errorf("imageloader: the lent slot has %d fields, not 2: see Loader.Fields", len(fields))
		}
		if err == nil {
			err = p.asm.add(fields[0], fields[1], plans)
		}
		if err != nil {
			p.stop(err) // no effect if the pass has ended already
			return
		}
	}
}

// place gives every sample of a stream a row, and sends it to be decoded.
func (p *pass) place() {
	defer close(p.jobs)
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
		j, ok := p.row(&it, true)
		if !ok {
			return
		}
		select {
		case p.jobs <- j:
		case <-p.ctx.Done():
			return
		}
	}
}

// row gives an item its row. ok is that of assembly.place.
func (p *pass) row(it *item, wait bool) (j job, ok bool) {
	waited := p.asm.waited
	position, slot, row, ok := p.asm.place(it.sample, wait)
	p.l.counters.waitSlot.Add(int64(p.asm.waited - waited)) // only one goroutine places samples
	if !ok {
		return job{}, false
	}
	return job{item: *it, position: position, dst: slot.image(row, p.asm.row), dstTarget: slot.targetOf(row, p.asm.target), staging: slot.staging.of(row), row: row}, true
}

// fetch reads samples from an archive with random access, and plans the images that it can plan.
func (p *pass) fetch() {
	r := index.NewReader(p.known, p.archive)
	defer r.Close()
	plan, err := p.newPlanner(r)
	if err != nil {
		p.stop(err)
		return
	}
	defer plan.close()
	for {
		var group []job
		var more bool
		select {
		case group, more = <-p.fetches:
		case <-p.ctx.Done():
			return
		}
		if !more {
			return
		}
		plan.begin()
		for i := range group {
			if j := &group[i]; !plan.try(j) && !p.fetchJob(j, r) {
				return
			}
		}
		plan.end()
		select {
		case p.groups <- group[:0]:
		default:
		}
	}
}

// fetchJob reads the contents of a job, and hands it to work. It returns false if the pass has
// ended.
func (p *pass) fetchJob(j *job, r *index.Reader) bool {
	if info, known := p.known.Oversize(j.sample.Index); known && j.bad == nil {
		j.bad = p.l.judge.header(&j.sample, &info)
	}
	if j.bad == nil {
		ok, err := p.contents(j, r)
		if !ok {
			return false
		}
		if err != nil {
			p.recycle(j)
			p.asm.resolve(j.position, fatal, err)
			return true
		}
	}
	select {
	case p.jobs <- *j:
		return true
	case <-p.ctx.Done():
		return false
	}
}

// contents fetches the content of a job, and that of its mask. Their memory is acquired at once: a
// fetch that holds a part while it waits for another could wait for ever. ok is false if the pass
// has ended. After an error the job is to be recycled too.
func (p *pass) contents(j *job, r *index.Reader) (ok bool, err error) {
	i, mask := j.sample.Index, p.known.Mask(j.sample.Index)
	j.data = p.known.InMemory(i)
	j.borrowed = j.data != nil
	need := int64(0)
	if !j.borrowed {
		need = j.size
	}
	if j.mask.size > 0 {
		j.mask.data = p.known.InMemory(mask)
		if j.mask.borrowed = j.mask.data != nil; !j.mask.borrowed {
			need += j.mask.size
		}
	}
	if need == 0 {
		return true, nil
	}
	if !p.budget.acquire(int(need)) {
		return false, nil
	}
	began, spent := time.Now(), r.FileTime()
	if !j.borrowed {
		j.data = p.buffers.Get(int(j.size))
	}
	if j.mask.size > 0 && !j.mask.borrowed {
		j.mask.data = p.buffers.Get(int(j.mask.size))
	}
	if !j.borrowed {
		err = r.Read(i, j.data)
		j.inflated = r.Inflated(i)
	}
	if err == nil && j.mask.size > 0 && !j.mask.borrowed {
		err = r.Read(mask, j.mask.data)
	}
	p.l.counters.fetched(time.Since(began), r.FileTime()-spent)
	return true, err
}

// recycle gives back the memory of a job's contents.
func (p *pass) recycle(j *job) {
	if j.bad != nil {
		return
	}
	if !j.borrowed {
		p.budget.release(len(j.data))
		p.buffers.Put(j.data)
	}
	if j.mask.size > 0 && !j.mask.borrowed {
		p.budget.release(len(j.mask.data))
		p.buffers.Put(j.mask.data)
	}
}

// work decodes samples into their rows.
func (p *pass) work() {
	o, c := &p.l.o, &p.l.counters
	leave, err := o.settle()
	if err != nil {
		p.stop(err)
		return
	}
	defer leave()
	d, err := newDecoder(p.l.codec, o.MaxPixels, o.Damaged)
	if err != nil {
		p.stop(fmt.Errorf("imageloader: no decoder: %w", err))
		return
	}
	defer d.Close()
	w := worker{p: p, d: d, points: p.l.entryPoints(p.known).forWorker(d), mask: maskDecoder{o: &o.Masks}}
	w.reset()
	if w.augmenter, err = p.l.plan.NewAugmenter(); err != nil {
		p.stop(fmt.Errorf("imageloader: no augmenter: %w", err))
		return
	}
	defer w.augmenter.Close()
	planned, idle := p.fetchPlans(), time.Now()
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
		if !planned { // otherwise hardly any sample comes here
			c.waitData.Add(int64(began.Sub(idle)))
		}
		c.decode.Add(int64(now.Sub(began)))
		c.bytes.Add(int64(len(j.data) + len(j.mask.data)))
		idle = now
		p.asm.resolve(j.position, state, err)
		p.recycle(&j)
	}
}

// report logs the Stats since its last report, every Options.StatsEvery while the pass runs.
func (p *pass) report() {
	ticker := time.NewTicker(p.l.o.StatsEvery)
	defer ticker.Stop()
	before := p.l.Stats()
	for {
		select {
		case <-p.ctx.Done():
			return
		case <-ticker.C:
		}
		now := p.l.Stats()
		p.l.o.Logger.Info("loader", "archive", archive.Shown(p.l.path), "epoch", p.epoch, "stats", now.Since(before))
		before = now
	}
}
