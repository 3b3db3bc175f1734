package epoch

import (
	"context"
	"math"
	"sync"
	"sync/atomic"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/arena"
	"github.com/torchstream/torchstream/imageloader/internal/count"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/index"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/decodeplan"
	"github.com/torchstream/torchstream/internal/order"
)

// Source is the archive that an epoch reads.
type Source struct {
	// Open opens the archive, which must be the one that Known describes. Reads end when ctx ends.
	// Run closes the archive.
	Open     func(ctx context.Context) (*archive.Archive, error)
	Requests *archive.Requests // requests of the archives that Open opens
	Known    *index.Index      // nil in the first pass over a compressed archive with given classes
	First    First             // for a pass without Known
	Plans    Plans
}

// First holds the inputs for making an index during a pass over an archive that has none.
type First struct {
	Index index.Config
	// Keep is called when a pass has read the whole archive. It calls finish, which builds the
	// index, and stores the result, unless the loader already has an index.
	Keep func(finish func() (*index.Index, error)) error
}

// Plans holds what is known of an archive's images, for a consumer that decodes from plans: their
// entry points, and the images whose entry points the consumer must not search for again.
type Plans struct {
	Points       *devplan.EntryPoints // nil if entry points are not used
	Searches     *devplan.Searches    // nil if the consumer searches for no entry points
	MaxCopyBytes int64                // see devplan.Settings
}

// Consumer receives the batches of an epoch.
type Consumer interface {
	// Plans reports whether the consumer decodes images from plans. It then also lends memory for
	// plans.
	Plans() bool
	// Lend returns the memory for the next batch. One goroutine at a time calls it. It may block
	// until memory is free or ctx ends.
	Lend(ctx context.Context) (decodeplan.Slot, error)
	// Deliver passes the batch in the oldest lent slot to the consumer, which owns the slot again.
	Deliver(d Delivery) error
}

// Delivery is a complete batch.
type Delivery struct {
	Samples []sample.Sample // one for each row; may be kept
	Batches int             // batches delivered in this deal (order.Deal), including this one
	Turns   int             // turns taken in this deal
	Redos   []devplan.Redo  // one for each row, if the slot has plans
}

// minFetchers is the minimum number of goroutines that read samples by random access. Several
// goroutines keep several requests in the disk's queue, and a goroutine costs next to nothing.
const minFetchers = 4

// Fetchers returns the number of goroutines that read samples by random access, and plan them for a
// device. For a gzip file they also inflate, which takes more than half as long as decoding.
func Fetchers(workers int) int { return max(minFetchers, workers) }

// pass is one run over an epoch. The goroutines of the epoch share it.
type pass struct {
	config *Config
	env    *Env
	source Source
	start  order.Start
	to     Consumer
	ctx    context.Context
	stop   context.CancelCauseFunc

	archive *archive.Archive
	deal    order.Deal
	flow    flow
	asm     *batches
	queue   queue
}

// queue bounds and counts the compressed samples between reading and decoding. The loader's
// counters include them.
type queue struct {
	buffers *arena.Buffers
	budget  *arena.Budget
	samples atomic.Int64 // samples that have been read but not taken by a worker
	total   *count.Queue
}

func (q *queue) init(c *Config, total *count.Queue) {
	q.buffers = arena.NewBuffers(c.Threads.QueueBytes + c.Order.Buffer.Bytes/4)
	q.budget, q.total = arena.NewBudget(c.Threads.QueueBytes, &total.Bytes), total
}

// add adds n samples. n is negative for removed samples.
func (q *queue) add(n int64) {
	q.samples.Add(n)
	q.total.Samples.Add(n)
}

// release frees the content of a sample.
func (q *queue) release(data []byte) {
	q.budget.Release(len(data))
	q.buffers.Put(data)
}

// abandon removes the samples that were still queued when the pass ended early.
func (q *queue) abandon() {
	q.total.Samples.Add(-q.samples.Load())
	q.budget.Abandon()
}

// flow has the channels between the goroutines of a pass, and the results of reading a stream.
type flow struct {
	items   chan Item
	fetches chan []job // samples to be read out of the archive's order
	groups  chan []job // slices that fetch has emptied, for reuse by list
	jobs    chan job
	readErr error // the reason why items ended early; written before items is closed
	short   bool  // readErr is a failure to start another pass over the archive

	build *index.Builder // the index of a first pass
	next  int            // the next turn for readStream to send
	// If the archive cannot be read to its end, the pass still delivers the samples that are left
	// in the shuffle buffer, but at other turns than in a whole archive. stray is the first of
	// these turns.
	stray atomic.Int64
	lost  atomic.Pointer[error] // why the archive cannot be read; written before stray
}

// Run runs an epoch from a position to its end. It returns nil if it has delivered every batch, and
// otherwise the reason why it ended: the cause if ctx has ended, or the consumer's error. Run stops
// its goroutines and waits for them before it returns.
func Run(ctx context.Context, source Source, at order.Start, c *Config, e *Env, to Consumer) error {
	inner, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	p := &pass{config: c, env: e, source: source, start: at, to: to, ctx: inner, stop: stop}
	p.queue.init(c, &e.Counters.Queue)
	p.flow.stray.Store(math.MaxInt64)
	p.deal = order.NewDeal(c.Batch.Share, c.Order.positions(source.Known != nil), at.Done)
	defer p.queue.buffers.Close() // runs when all goroutines of the pass have ended
	a, err := source.Open(inner)
	if err != nil {
		return archive.StopCause(ctx, err)
	}
	p.archive = a
	defer func() { _ = p.archive.Close() }() // nothing was written
	return p.run()
}

// run starts the goroutines of the pass and delivers its batches.
func (p *pass) run() error {
	wanted := 0
	if p.skips() && p.deal.Fixed {
		wanted = p.deal.Remaining(&p.start)
	}
	p.asm = newAssembly(p.config, wanted)
	workers, c := p.config.Threads.Workers, p.env.Counters
	p.flow.jobs = make(chan job, workers)
	defer c.StartEpoch()()
	defer p.queue.abandon()
	var all sync.WaitGroup
	defer all.Wait()
	defer p.stop(nil)
	all.Go(func() { // wakes the goroutines that do not wait in a channel, however the pass ends
		<-p.ctx.Done()
		p.asm.Stop()
		p.queue.budget.Stop()
	})
	all.Go(p.lend)
	if p.random() {
		p.startFetching(&all)
	} else {
		p.flow.items = make(chan Item, 2*workers)
		all.Go(p.readStream)
		all.Go(p.place)
	}
	for range workers {
		all.Go(p.work)
	}
	return p.deliver()
}

// skips reports whether bad samples are left out.
func (p *pass) skips() bool { return p.config.Policy.BadSamples == sample.Skip }

// end returns the turn at which the reading goroutine stops. If bad samples are left out and the
// number of batches is fixed, assembly ends the pass earlier, when it has enough samples.
func (p *pass) end() int { return p.deal.End(&p.start, p.skips()) }

// random reports whether samples are read by random access.
func (p *pass) random() bool { return p.source.Known != nil && p.source.Known.Random() }

// startFetching starts the goroutines that read an archive with random access.
func (p *pass) startFetching(all *sync.WaitGroup) {
	workers, f := p.config.Threads.Workers, &p.flow
	f.fetches = make(chan []job, workers)
	fetchers := Fetchers(workers)
	f.groups = make(chan []job, cap(f.fetches)+fetchers+1)
	all.Go(p.list)
	var fetching sync.WaitGroup
	for range fetchers {
		fetching.Go(p.fetch)
	}
	all.Go(func() {
		fetching.Wait()
		close(f.jobs)
	})
}
