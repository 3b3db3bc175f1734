// Package ring is the prefetcher's core. A source fills host slots, a consumer reads device slots,
// and one goroutine moves batches from host slots to device slots. Four edges ensure that no slot
// is overwritten while it is still being read, or read before it is written: the source waits for
// copied, the copy waits for released, the consumer's stream waits for ready, and released is
// recorded on every stream that used the slot.
//
// The package does not depend on CUDA or LibTorch. Its requirements on a device are the interface
// [Device], and its requirements on goroutines the interface [Scheduler]. The prefetcher implements
// them with streams and events and with the Go runtime. The tests implement both with a model of
// CUDA's semantics and run this code under thousands of schedules.
//
//	source --fills--> host slot k --copy + finish on P--> device slot j --ready(j)--> consumer
//	   ^                   |                                   ^                         |
//	   +---- copied(k) ----+                                   +------ released(j) ------+
package ring

import (
	"context"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"
)

// Device is the ring's view of a device. S is a stream and E an event. P is the device's own
// stream, on which all copies run.
//
// Only the ring's own goroutine calls Open, Copy, Finish and Close. Any goroutine may call the
// other methods.
type Device[S comparable, E any] interface {
	// Open is the first call. It locks the goroutine to its OS thread and allocates the slots.
	Open() error
	// Close is the last call, even after a failed Open. It makes P wait for the events, waits until
	// P is idle, and frees the slots.
	Close(released []E) error

	// NewEvent creates an event. timed is set for the events that Copy records (copied in the
	// diagram), so that the device can measure the duration of copies.
	NewEvent(timed bool) (E, error)
	FreeEvent(E)
	// P returns the stream on which copies and finishes run.
	P() S
	// Current returns the calling goroutine's current stream.
	Current() (S, error)

	// Copy makes P wait for the events in released, copies the first n samples of the host slot to
	// the memory that Finish reads, and records copied on P right after. It enqueues the work and
	// returns.
	Copy(slot, host, n int, released []E, copied E) error
	// Finish enqueues on P the work that converts the copied samples to the consumer's fields.
	Finish(slot, host, n int) error
	// Check waits, on the host, until the device knows whether it could decode all images of the
	// batch of the slot's last Finish. Check then has the host decode those that the device could
	// not decode. It returns Unchecked as soon as busy reports true. bad is an error for which the
	// epoch ends without delivering this batch. err is an error of the device. The ring calls Check
	// only with Config.Checked, in the order of the batches, with the epoch's ctx.
	Check(ctx context.Context, slot, n int, info any, busy func() bool) (checked Checked, bad, err error)
	// Record records the event on the stream.
	Record(event E, stream S) error
	// Wait makes the stream wait for the event's latest record. The host does not block.
	Wait(stream S, event E) error
	// HostWait blocks until the latest record of copied(host) is reached. If stop returns an error
	// first, HostWait returns that error. It calls stop at least every few milliseconds.
	HostWait(host int, copied E, stop func() error) error
}

// Checked is the outcome of Device.Check.
type Checked int

const (
	Unchecked Checked = iota // the batch is not checked yet: call Check again
	Good                     // the batch is as Finish has enqueued it
	Mended                   // Check has enqueued more work on P for it
)

// Scheduler starts the ring's goroutines and lets them wait for each other. It has one lock, and
// waits for conditions that the lock guards.
type Scheduler interface {
	Go(name string, fn func())
	Lock()
	Unlock()
	// Wait releases the lock until ready returns true. It is called with the lock held, and
	// evaluates ready with the lock held.
	Wait(ready func() bool)
	// Wake must be called after a change to any condition for which a Wait may be waiting. The lock
	// is held.
	Wake()
	// Watch calls Wake when ctx ends. It returns a function that stops watching.
	Watch(ctx context.Context) (unwatch func() bool)
}

// Config sizes a ring. All numbers are at least 1.
type Config struct {
	Slots int // device slots
	Hosts int // host slots that the source can fill
	Batch int // samples that fit in a slot
	// Direct omits the copy: the consumer reads the host slot itself, so the source cannot refill
	// it before the batch is released.
	Direct bool
	// Checked holds every batch back until Device.Check has passed it. Meanwhile the next batches
	// are copied. Checked excludes Direct.
	Checked   bool
	Scheduler Scheduler // nil selects the Go runtime
	// Range, if not nil, is called when the driver starts an activity or a wait, and when the
	// source starts a wait. It returns a function to call at the end. Both may be called with the
	// lock held.
	Range func(name string) (end func())

	maxReleased int // maximum number of release events per slot; 0 means 16
}

// The names of ranges.
const (
	enqueueing    = "prefetcher: enqueue"
	checkUnfilled = "prefetcher: check, no batch is filled"
	checkFull     = "prefetcher: check, no device slot is free"
	waitFilled    = "prefetcher: wait, no batch is filled"
	waitFree      = "prefetcher: wait, no device slot is free"
	lendWait      = "prefetcher: lend, no host slot is free"
	lendCopied    = "prefetcher: lend, the host slot is being copied"
)

var (
	// ErrClosed is returned by calls on a closed ring or batch.
	ErrClosed = errors.New("closed")
	// ErrRunning is returned when Run or Close is called while an epoch runs.
	ErrRunning = errors.New("an epoch is running")
	// ErrRetained ends an epoch whose consumer retains every device slot.
	ErrRetained = errors.New("every device slot is held by a retained batch")

	errLeft = errors.New("the consumer left the epoch")
)

// Ring moves batches from one source at a time to one consumer at a time.
type Ring[S comparable, E any] struct {
	dev   Device[S, E]
	cfg   Config
	sched Scheduler

	// The scheduler's lock guards all fields below, except a slot's events, which belong to the
	// holder of the slot.
	hosts     []hostSlot[E]
	slots     []deviceSlot[S, E]
	freeHosts []int // oldest first, so that the source waits for the copy that ends first
	freeSlots []int
	epoch     *epoch
	driver    driver
	leases    leaseCounts
	failure   failure
	stats     Stats
}

// driver is the state of the ring's goroutine, from its start to its end.
type driver struct {
	opened   bool
	moving   bool // the goroutine is copying or checking a batch
	closing  bool // no new epoch may start
	stopping bool // the goroutine must stop
	gone     bool // the goroutine has stopped
	err      error
}

// leaseCounts counts the leases that have not ended. A lease is first held, and then releasing.
type leaseCounts struct {
	held      int // device slots whose lease has references
	releasing int // leases that are being released now
}

func (l *leaseCounts) begin() { l.held++ }

// release is called when a lease has lost its last reference.
func (l *leaseCounts) release() {
	l.held--
	l.releasing++
}

func (l *leaseCounts) end() { l.releasing-- }

// failure holds the error that has left the device in an unknown state, if there is one.
type failure struct {
	err      error
	reported bool // a call has returned err
}

// set records the first error.
func (f *failure) set(err error) {
	if f.err == nil {
		f.err = err
	}
}

// report returns the error to a caller of the ring.
func (f *failure) report() error {
	f.reported = f.reported || f.err != nil
	return f.err
}

type hostSlot[E any] struct {
	copied  E
	pending bool // copied was recorded and has not been waited for
}

type deviceSlot[S comparable, E any] struct {
	ready    E
	released []release[S, E] // one per stream that has used the slot
	waits    []E             // events for which the next copy into the slot must wait
	lease    *Lease[S, E]
}

type release[S comparable, E any] struct {
	stream S
	event  E
}

type epoch struct {
	ctx     context.Context
	lent    []loan
	filled  []batch
	copied  []batch // batches that are enqueued but not checked, with Config.Checked
	ready   []batch
	index   int   // index of the next batch
	err     error // the error that stopped the driver
	ended   bool  // the source has returned
	result  error // the error that the source returned
	left    bool  // the consumer has left
	started time.Time
	first   bool // the consumer has received its first batch
}

type loan struct {
	host  int
	given bool
}

type batch struct {
	host, slot, n, index int
	info                 any
}

// Stats holds counts and times since New.
type Stats struct {
	Batches, Samples int64         // delivered to the consumer
	Elapsed          time.Duration // time in epochs
	ConsumerWait     time.Duration // time that the consumer waited for a batch
	FirstWait        time.Duration // the part of ConsumerWait before the first batch of each epoch
	SourceWait       time.Duration // time that the source waited for a host slot
}

// New allocates the slots and starts the goroutine that drives them. The caller closes the ring.
func New[S comparable, E any](dev Device[S, E], cfg Config) (*Ring[S, E], error) {
	if cfg.Slots < 1 || cfg.Hosts < 1 || cfg.Batch < 1 {
		return nil, fmt.Errorf("%d device slots, %d host slots, batches of %d samples: all must be at "+
			"least 1", cfg.Slots, cfg.Hosts, cfg.Batch)
	}
	if cfg.Checked && cfg.Direct {
		return nil, errors.New("a ring that omits the copy has no copies to check")
	}
	if cfg.maxReleased == 0 {
		cfg.maxReleased = 16
	}
	r := &Ring[S, E]{dev: dev, cfg: cfg, sched: cfg.Scheduler}
	if r.sched == nil {
		r.sched = newRuntime()
	}
	r.sched.Go("driver", r.drive)
	r.sched.Lock()
	r.sched.Wait(func() bool { return r.driver.opened || r.driver.gone })
	if r.driver.opened {
		r.sched.Unlock()
		return r, nil
	}
	err := errors.Join(r.failure.err, r.driver.err)
	r.sched.Unlock()
	return nil, err
}

// HostSlots returns the number of host slots. With Direct there is one more for every device slot.
func (c Config) HostSlots() int {
	if c.Direct {
		return c.Hosts + c.Slots
	}
	return c.Hosts
}

// ---- The driver, the only goroutine that copies

func (r *Ring[S, E]) drive() {
	normal := false
	defer func() {
		v := recover()
		var events []E
		r.sched.Lock()
		if !normal {
			r.failure.err = errors.New("the source's Finish ended the prefetcher's goroutine (runtime.Goexit)")
			if v != nil {
				r.failure.err = fmt.Errorf("the prefetcher's goroutine panicked: %v\n%s", v, debug.Stack())
			}
			r.driver.moving = false
			r.sched.Wake()
			r.sched.Wait(func() bool { return r.driver.stopping || !r.driver.opened })
		}
		for j := range r.slots {
			events = append(events, r.slots[j].waits...)
		}
		r.sched.Unlock()
		err := r.dev.Close(events)
		for k := range r.hosts {
			r.dev.FreeEvent(r.hosts[k].copied)
		}
		for j := range r.slots {
			r.dev.FreeEvent(r.slots[j].ready)
			for _, rel := range r.slots[j].released {
				r.dev.FreeEvent(rel.event)
			}
		}
		r.sched.Lock()
		r.driver.gone, r.driver.err = true, err
		r.sched.Wake()
		r.sched.Unlock()
	}()
	if err := r.open(); err != nil {
		r.sched.Lock()
		r.failure.err = err
		r.sched.Unlock()
		normal = true
		return
	}
	r.sched.Lock()
	r.driver.opened = true
	r.sched.Wake()
	for r.step() {
	}
	r.sched.Unlock()
	normal = true
}

func (r *Ring[S, E]) open() error {
	if err := r.dev.Open(); err != nil {
		return err
	}
	for k := range r.cfg.HostSlots() {
		e, err := r.dev.NewEvent(true)
		if err != nil {
			return err
		}
		r.hosts = append(r.hosts, hostSlot[E]{copied: e})
		r.freeHosts = append(r.freeHosts, k)
	}
	for j := range r.cfg.Slots {
		e, err := r.dev.NewEvent(false)
		if err != nil {
			return err
		}
		r.slots = append(r.slots, deviceSlot[S, E]{ready: e})
		r.freeSlots = append(r.freeSlots, j)
	}
	return nil
}

// step waits until a batch can be copied or checked, and does that. It returns false when the
// driver must stop. The lock is held on entry and on return.
func (r *Ring[S, E]) step() bool {
	due := func() bool { return r.driver.stopping || r.canCopy() || r.canCheck() }
	if !due() {
		end := r.begin(r.either(waitFilled, waitFree))
		r.sched.Wait(due)
		end()
	}
	switch {
	case r.driver.stopping:
		return false
	case r.canCopy():
		r.copy(r.epoch)
	default:
		r.check(r.epoch)
	}
	return true
}

// begin starts a range, and returns the function that ends it.
func (r *Ring[S, E]) begin(name string) (end func()) {
	if r.cfg.Range == nil {
		return func() {}
	}
	return r.cfg.Range(name)
}

// either returns full if a batch is filled, so that the driver can't copy because no device slot is
// free. Otherwise it returns unfilled. The lock is held.
func (r *Ring[S, E]) either(unfilled, full string) string {
	if r.epoch != nil && len(r.epoch.filled) > 0 {
		return full
	}
	return unfilled
}

// canCopy reports whether a filled host slot and a free device slot are available. The lock is
// held.
func (r *Ring[S, E]) canCopy() bool {
	ep := r.epoch
	return ep != nil && !ep.left && ep.err == nil && len(ep.filled) > 0 && len(r.freeSlots) > 0
}

// canCheck reports whether a batch has to be checked. The lock is held.
func (r *Ring[S, E]) canCheck() bool {
	ep := r.epoch
	return ep != nil && !ep.left && ep.ctx.Err() == nil && r.failure.err == nil && len(ep.copied) > 0
}

// copy enqueues the copy from the oldest filled host slot to a free device slot. The lock is held
// on entry and on return.
func (r *Ring[S, E]) copy(ep *epoch) {
	b := popFront(&ep.filled)
	b.slot = popFront(&r.freeSlots)
	slot := &r.slots[b.slot]
	r.driver.moving = true
	r.sched.Unlock()

	end := r.begin(enqueueing)
	fatal := r.dev.Copy(b.slot, b.host, b.n, slot.waits, r.hosts[b.host].copied)
	var finish error
	if fatal == nil {
		if finish = r.finish(b); finish == nil {
			fatal = r.dev.Record(slot.ready, r.dev.P())
		}
	}
	end()

	r.sched.Lock()
	r.driver.moving = false
	switch {
	case fatal != nil:
		// The device may still have work in flight: the slots stay out of the free lists, and the
		// ring does nothing more.
		r.fail(fatal)
	case finish != nil:
		// P wrote the slot and is also the next stream to write it, so the next copy needs no wait.
		ep.err = finish
		slot.waits = slot.waits[:0]
		r.freeSlots = append(r.freeSlots, b.slot)
		r.hosts[b.host].pending = true
		r.freeHosts = append(r.freeHosts, b.host)
	default:
		slot.waits = slot.waits[:0]
		r.hosts[b.host].pending = true
		if r.cfg.Checked {
			ep.copied = append(ep.copied, b) // check frees the host slot
			break
		}
		ep.ready = append(ep.ready, b)
		if !r.cfg.Direct {
			r.freeHosts = append(r.freeHosts, b.host)
		}
	}
	r.sched.Wake()
}

// check waits until the oldest copied batch passes its check, or another batch can be copied. The
// lock is held on entry and on return.
func (r *Ring[S, E]) check(ep *epoch) {
	b := ep.copied[0]
	slot := &r.slots[b.slot]
	r.driver.moving = true
	end := r.begin(r.either(checkUnfilled, checkFull))
	r.sched.Unlock()

	checked, bad, fatal := r.checkBatch(ep, b)
	if bad == nil && fatal == nil && checked == Mended {
		fatal = r.dev.Record(slot.ready, r.dev.P())
	}
	end()

	r.sched.Lock()
	r.driver.moving = false
	switch {
	case fatal != nil:
		r.fail(fatal)
	case bad != nil:
		// P wrote the slots and is also the next stream to write them.
		ep.err = bad
		for _, b := range ep.copied {
			r.freeSlots = append(r.freeSlots, b.slot)
			r.freeHosts = append(r.freeHosts, b.host)
		}
		ep.copied = nil
	case checked != Unchecked:
		// Check has waited for the device, so lend finds that the host slot is copied, and does not
		// have to poll.
		r.freeHosts = append(r.freeHosts, b.host)
		ep.ready = append(ep.ready, popFront(&ep.copied))
	}
	r.sched.Wake()
}

// checkBatch calls Device.Check, in which the source may decode images and panic.
func (r *Ring[S, E]) checkBatch(ep *epoch, b batch) (checked Checked, bad, err error) {
	defer func() {
		if v := recover(); v != nil {
			bad = fmt.Errorf("the source panicked while it decoded an image again: %v\n%s", v, debug.Stack())
		}
	}()
	return r.dev.Check(ep.ctx, b.slot, b.n, b.info, func() bool {
		r.sched.Lock()
		defer r.sched.Unlock()
		return r.canCopy() || ep.left || ep.ctx.Err() != nil
	})
}

// finish calls the source's Finish, which may panic.
func (r *Ring[S, E]) finish(b batch) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the source's Finish panicked: %v\n%s", v, debug.Stack())
		}
	}()
	return r.dev.Finish(b.slot, b.host, b.n)
}

// fail records an error that leaves the device in an unknown state. The lock is held.
func (r *Ring[S, E]) fail(err error) {
	r.failure.set(err)
	if r.epoch != nil && r.epoch.err == nil {
		r.epoch.err = r.failure.err
	}
	r.sched.Wake()
}

// ---- Epochs

// Lend gives the source the next host slot. It blocks until one is free.
type Lend func(ctx context.Context) (host int, err error)

// Deliver takes the oldest lent host slot, filled with n samples.
type Deliver func(n int, info any) error

// Run runs one epoch. It calls fill once, in a new goroutine. It calls turn in the caller's
// goroutine, once for each batch and in order. The epoch ends when fill has returned and turn has
// received all batches, when turn returns false, or on an error. Run returns only after fill has
// returned. It does not wait for the device: the edges order the work that is still queued.
func (r *Ring[S, E]) Run(ctx context.Context, fill func(context.Context, Lend, Deliver) error,
	turn func(*Lease[S, E]) bool) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(errLeft)
	ep := &epoch{ctx: ctx, started: time.Now()}
	r.sched.Lock()
	err := r.state()
	if err == nil && r.epoch != nil {
		err = ErrRunning
	}
	if err != nil {
		r.sched.Unlock()
		return err
	}
	r.epoch = ep
	r.sched.Unlock()
	unwatch := r.sched.Watch(ctx)
	defer unwatch()
	defer r.leave(ep, cancel) // even if turn panics or ends the goroutine
	r.sched.Go("source", func() { r.source(ep, fill) })
	for {
		lease, err := r.next(ep)
		if lease == nil {
			return err
		}
		more, err := r.turn(lease, turn)
		if !more || err != nil {
			return err
		}
	}
}

func (r *Ring[S, E]) state() error {
	if r.driver.closing {
		return ErrClosed
	}
	return r.failure.report()
}

// source runs fill and records its result.
func (r *Ring[S, E]) source(ep *epoch, fill func(context.Context, Lend, Deliver) error) {
	err := errors.New("the source ended its goroutine (runtime.Goexit)")
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("the source panicked: %v\n%s", v, debug.Stack())
		}
		r.sched.Lock()
		ep.ended, ep.result = true, err
		r.sched.Wake()
		r.sched.Unlock()
	}()
	err = fill(ep.ctx, func(ctx context.Context) (int, error) { return r.lend(ctx, ep) },
		func(n int, info any) error { return r.deliver(ep, n, info) })
}

func (r *Ring[S, E]) lend(ctx context.Context, ep *epoch) (int, error) {
	stop := func() error {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		if ep.ctx.Err() != nil {
			return context.Cause(ep.ctx)
		}
		return nil
	}
	r.sched.Lock()
	if len(r.freeHosts) == 0 && ctx != ep.ctx {
		defer r.sched.Watch(ctx)()
	}
	start := time.Now()
	end := r.begin(lendWait)
	r.sched.Wait(func() bool { return len(r.freeHosts) > 0 || stop() != nil || ep.left || ep.ended })
	end()
	err := stop()
	if err == nil && (ep.left || ep.ended) {
		err = errLeft
	}
	if err != nil {
		r.sched.Unlock()
		return 0, err
	}
	k := popFront(&r.freeHosts)
	// From here on the order of the batches is fixed.
	ep.lent = append(ep.lent, loan{host: k})
	pending := r.hosts[k].pending
	r.sched.Unlock()

	end = r.begin(lendCopied)
	if pending {
		err = r.dev.HostWait(k, r.hosts[k].copied, stop)
	}
	end()

	r.sched.Lock()
	defer r.sched.Unlock()
	r.stats.SourceWait += time.Since(start)
	if err != nil {
		if stop() == nil {
			r.fail(err)
		}
		return 0, err // the slot returns at the end of the epoch, still pending
	}
	r.hosts[k].pending = false
	for i := range ep.lent {
		if ep.lent[i].host == k {
			ep.lent[i].given = true
		}
	}
	return k, nil
}

func (r *Ring[S, E]) deliver(ep *epoch, n int, info any) error {
	r.sched.Lock()
	defer r.sched.Unlock()
	switch {
	case ep.ctx.Err() != nil:
		return context.Cause(ep.ctx)
	case ep.left || ep.ended:
		return errLeft
	case ep.err != nil:
		return ep.err
	case n < 1 || n > r.cfg.Batch:
		return fmt.Errorf("deliver of %d samples: a batch has 1 to %d", n, r.cfg.Batch)
	case len(ep.lent) == 0 || !ep.lent[0].given:
		return errors.New("deliver without a slot lent before")
	}
	ep.filled = append(ep.filled, batch{host: popFront(&ep.lent).host, n: n, index: ep.index, info: info})
	ep.index++
	r.sched.Wake()
	return nil
}

// next waits for the consumer's next batch and orders the consumer's current stream after it. When
// the epoch is over, next returns no batch. err is then the reason, or nil after a complete epoch.
func (r *Ring[S, E]) next(ep *epoch) (*Lease[S, E], error) {
	r.sched.Lock()
	if err := r.over(ep); err != nil {
		r.sched.Unlock()
		return nil, err
	}
	start := time.Now()
	drained := func() bool { return ep.ended && len(ep.filled) == 0 && len(ep.copied) == 0 && !r.driver.moving }
	stuck := func() bool { return len(ep.filled) > 0 && r.leases.held == r.cfg.Slots }
	r.sched.Wait(func() bool { return len(ep.ready) > 0 || r.over(ep) != nil || drained() || stuck() })
	waited := time.Since(start)
	r.stats.ConsumerWait += waited
	if !ep.first {
		ep.first = true
		r.stats.FirstWait += waited
	}
	if len(ep.ready) == 0 || ep.ctx.Err() != nil {
		err := r.over(ep)
		if err == nil && stuck() {
			err = ErrRetained
		}
		if err == nil {
			err = ep.result
		}
		r.sched.Unlock()
		return nil, err
	}
	b := popFront(&ep.ready)
	lease := &Lease[S, E]{N: b.n, Index: b.index, Slot: b.slot, Host: b.host, Info: b.info, ring: r, refs: 1}
	slot := &r.slots[b.slot]
	slot.lease = lease
	r.leases.begin()
	r.stats.Batches++
	r.stats.Samples += int64(b.n)
	r.sched.Unlock()
	if _, err := lease.useCurrent(true); err != nil {
		// The consumer never sees the batch. Its slot is lost together with the ring.
		return nil, errors.Join(err, lease.drop())
	}
	return lease, nil
}

// over returns the error that ends the epoch, if ctx has ended or the consumer has received all
// good batches before the error. The lock is held.
func (r *Ring[S, E]) over(ep *epoch) error {
	switch {
	case ep.ctx.Err() != nil:
		return context.Cause(ep.ctx)
	case len(ep.ready) > 0:
		return nil
	case r.failure.err != nil:
		return r.failure.report()
	case len(ep.copied) > 0:
		return nil
	}
	return ep.err
}

func (r *Ring[S, E]) turn(lease *Lease[S, E], turn func(*Lease[S, E]) bool) (more bool, err error) {
	defer func() {
		if e := lease.drop(); e != nil {
			err = e
		}
	}()
	return turn(lease), nil
}

// leave ends an epoch. It stops the source, waits for it, and frees the slots that the source
// filled. Batches that were copied but not consumed need no event: P wrote their slots and is also
// the next stream to write them.
func (r *Ring[S, E]) leave(ep *epoch, cancel context.CancelCauseFunc) {
	cancel(errLeft)
	r.sched.Lock()
	defer r.sched.Unlock()
	ep.left = true
	r.sched.Wake()
	r.sched.Wait(func() bool { return ep.ended && !r.driver.moving })
	for _, b := range append(ep.ready, ep.copied...) {
		r.freeSlots = append(r.freeSlots, b.slot)
	}
	if r.cfg.Direct {
		for _, b := range ep.ready {
			r.freeHosts = append(r.freeHosts, b.host)
		}
	}
	for _, b := range append(ep.filled, ep.copied...) {
		r.freeHosts = append(r.freeHosts, b.host)
	}
	for _, l := range ep.lent {
		r.freeHosts = append(r.freeHosts, l.host)
	}
	r.stats.Elapsed += time.Since(ep.started)
	r.epoch = nil
	r.sched.Wake()
}

// ---- Leases

// Lease is a batch that the consumer holds. The ring does not write to its device slot until the
// last reference is dropped.
type Lease[S comparable, E any] struct {
	N, Index   int // number of samples, and position in the epoch
	Slot, Host int
	Info       any
	// OnEnd is called once, when the last reference has been dropped and before the release is
	// recorded. The consumer sets it at the start of the turn.
	OnEnd func()

	ring    *Ring[S, E]
	refs    int // the scheduler's lock guards refs, retains and streams
	retains int
	streams []S // streams that may have used the slot
}

// Use orders a stream after the batch. It also orders the slot's next copy after the work that is
// on the stream at the time of the release.
func (l *Lease[S, E]) Use(stream S) error {
	r := l.ring
	r.sched.Lock()
	if l.refs == 0 {
		r.sched.Unlock()
		return ErrClosed
	}
	l.add(stream)
	ready := r.slots[l.Slot].ready
	r.sched.Unlock()
	return r.dev.Wait(stream, ready)
}

func (l *Lease[S, E]) add(stream S) {
	if !slices.Contains(l.streams, stream) {
		l.streams = append(l.streams, stream)
	}
}

// Streams returns the streams that have used the batch so far.
func (l *Lease[S, E]) Streams() []S {
	l.ring.sched.Lock()
	defer l.ring.sched.Unlock()
	return slices.Clone(l.streams)
}

// useCurrent records the calling goroutine's current stream as a user of the batch. If wait is set,
// it also orders the stream after the batch.
func (l *Lease[S, E]) useCurrent(wait bool) (S, error) {
	r := l.ring
	stream, err := r.dev.Current()
	if err == nil && wait {
		err = r.dev.Wait(stream, r.slots[l.Slot].ready)
	}
	r.sched.Lock()
	defer r.sched.Unlock()
	if err != nil {
		r.fail(err)
		return stream, err
	}
	l.add(stream)
	return stream, nil
}

// Retain keeps the batch beyond its turn until Release.
func (l *Lease[S, E]) Retain() error {
	l.ring.sched.Lock()
	defer l.ring.sched.Unlock()
	if l.refs == 0 {
		return ErrClosed
	}
	l.refs++
	l.retains++
	return nil
}

// Release undoes one Retain. Any goroutine may call it. The goroutine's current stream counts as a
// user of the batch.
func (l *Lease[S, E]) Release() error {
	l.ring.sched.Lock()
	if l.refs == 0 {
		l.ring.sched.Unlock()
		return ErrClosed
	}
	if l.retains == 0 {
		l.ring.sched.Unlock()
		return errors.New("release of a batch that is not retained")
	}
	l.retains--
	l.ring.sched.Unlock()
	return l.drop()
}

// drop drops one reference. When it drops the last one, it records the release on every stream that
// used the batch, and frees the slot.
func (l *Lease[S, E]) drop() error {
	r := l.ring
	_, err := l.useCurrent(false)
	r.sched.Lock()
	if l.refs == 0 { // the ring has been closed in the meantime
		r.sched.Unlock()
		return nil
	}
	l.refs--
	if l.refs > 0 {
		r.sched.Unlock()
		return err
	}
	return l.end(err)
}

// end ends the lease after the last reference is dropped. The lock is held on entry and released on
// return.
func (l *Lease[S, E]) end(err error) error {
	r := l.ring
	r.leases.release()
	slot := &r.slots[l.Slot]
	slot.lease = nil
	// A Release that runs while Close ends the lease may still add a stream.
	streams := l.streams
	r.sched.Unlock()
	if l.OnEnd != nil {
		l.OnEnd()
	}
	for _, s := range streams {
		if err != nil {
			break
		}
		var e E
		if e, err = r.event(slot, s); err == nil {
			if err = r.dev.Record(e, s); err == nil {
				slot.waits = append(slot.waits, e)
			}
		}
	}
	r.sched.Lock()
	defer r.sched.Unlock()
	r.leases.end()
	if err != nil {
		r.fail(err)
		return err
	}
	r.freeSlots = append(r.freeSlots, l.Slot)
	if r.cfg.Direct {
		r.freeHosts = append(r.freeHosts, l.Host)
	}
	r.sched.Wake()
	return nil
}

// event returns the slot's event for releases on a stream, and creates it at the first release. An
// event stays with its stream, because CUDA ties it to the stream's device. The number of events
// per slot is limited, so that a program that keeps creating streams does not accumulate events.
func (r *Ring[S, E]) event(slot *deviceSlot[S, E], stream S) (E, error) {
	for _, rel := range slot.released {
		if rel.stream == stream {
			return rel.event, nil
		}
	}
	e, err := r.dev.NewEvent(false)
	if err != nil {
		return e, err
	}
	// The oldest event may be freed only after all waits for it have been enqueued. That is so
	// here: the last copy has enqueued its waits, and this release has recorded no event yet.
	if len(slot.released) >= r.cfg.maxReleased && len(slot.waits) == 0 {
		r.dev.FreeEvent(slot.released[0].event)
		slot.released = slices.Delete(slot.released, 0, 1)
	}
	slot.released = append(slot.released, release[S, E]{stream, e})
	return e, nil
}

// ---- Close

// Close releases batches that are still retained, waits until the device has finished with the
// slots, and frees them. While an epoch runs it does nothing and returns [ErrRunning]. A second
// Close does nothing.
func (r *Ring[S, E]) Close() error {
	r.sched.Lock()
	if r.epoch != nil {
		r.sched.Unlock()
		return ErrRunning
	}
	if r.driver.stopping {
		r.sched.Wait(func() bool { return r.driver.gone })
		r.sched.Unlock()
		return nil
	}
	r.driver.closing = true
	for j := range r.slots {
		if l := r.slots[j].lease; l != nil {
			l.refs = 0
			_ = l.end(nil) // r.failure keeps an error
			r.sched.Lock()
		}
	}
	r.sched.Wait(func() bool { return r.leases.releasing == 0 })
	r.driver.stopping = true
	r.sched.Wake()
	r.sched.Wait(func() bool { return r.driver.gone })
	defer r.sched.Unlock()
	if r.failure.err != nil && !r.failure.reported {
		return errors.Join(r.failure.err, r.driver.err)
	}
	return r.driver.err
}

// Stats returns the counts so far.
func (r *Ring[S, E]) Stats() Stats {
	r.sched.Lock()
	defer r.sched.Unlock()
	s := r.stats
	if r.epoch != nil {
		s.Elapsed += time.Since(r.epoch.started)
	}
	return s
}

func popFront[T any](q *[]T) T {
	v := (*q)[0]
	n := copy(*q, (*q)[1:])
	clear((*q)[n:])
	*q = (*q)[:n]
	return v
}
