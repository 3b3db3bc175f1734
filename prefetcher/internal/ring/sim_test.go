package ring

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// The simulated world: goroutines ("tasks") of which one runs at a time, and streams that are queues of operations. Whenever a task calls the scheduler or the
// device, a generator seeded by the test picks who goes on: any stream whose first operation may run, or any task that is not waiting. So a schedule is a
// function of its seed alone, and a failing one can be replayed.
//
// What orders two accesses to a slot is not who came first in this schedule, but whether an event, a stream's own order or the ring's lock orders them in all
// schedules. The world keeps vector clocks for that: every task and every stream has one, and a slot remembers the time of its last write and of the reads
// since. An access that doesn't know of them is a report, even if this schedule was a lucky one. Content is checked besides.

const maxActors = 16 // streams and tasks

type clock [maxActors]uint32

func (c *clock) join(o *clock) {
	for i := range c {
		c[i] = max(c[i], o[i])
	}
}

// access kinds, as they are named in a report.
const (
	bySource   = "the source's fill"
	byCopy     = "a copy"
	byFinish   = "a finish"
	byConsumer = "the consumer's kernel"
	byFree     = "the ring's free"
)

type access struct {
	by   string
	time uint32 // of the actor; 0: never
	gen  int    // of the batch that the access belongs to: later batches have higher ones
}

type cell struct {
	name  string
	value int // of the batch that is in it
	write access
	actor int // of the last write
	reads [maxActors]access
}

// freed is the generation of the ring's free: after all batches.
const freed = 1 << 30

// edge names the edge that should order a write and a read of a slot: the read of the same batch or a later one comes after the write, the read of an earlier
// batch before it.
func edge(name string, write, read access) string {
	host := strings.HasPrefix(name, "host")
	switch {
	case write.by == byFree:
		return "close"
	case read.by == byConsumer && write.gen > read.gen:
		return "released"
	case read.by == byConsumer && !host:
		return "ready"
	case host && write.gen > read.gen:
		return "copied"
	case host:
		return "delivered" // the ring's lock: from the source to the driver
	}
	return "order of P"
}

type world struct {
	rng      *rand.Rand
	tasks    []*task
	running  *task
	streams  []*simStream
	actors   int
	locked   bool
	lock     clock
	watched  []context.Context
	finished chan struct{}
	reports  []string
	trace    func(format string, args ...any) // nil: none
	steps    int
	events   int  // live
	lenient  bool // a wait for an event that was never recorded is no error but does nothing, as in CUDA
}

type task struct {
	name   string
	actor  int
	clock  clock
	resume chan struct{}
	ready  func() bool // nil: can go on
	woken  bool        // for those in Scheduler.Wait: the condition is looked at only after a Wake
	waits  bool
	done   bool
	weight int
	stream int // current stream
}

type simStream struct {
	id     int
	clock  clock
	queue  []op
	weight int
}

type op struct {
	what   string
	issued clock
	wait   *moment      // the operation may run when this is reached
	record *moment      // is reached by the operation
	run    func(*clock) // what it does to memory
}

// moment is one record of an event.
type moment struct {
	reached bool
	clock   clock
}

type simEvent struct {
	latest *moment
	freed  bool
}

func newWorld(seed uint64, streams int) *world {
	w := &world{rng: rand.New(rand.NewPCG(seed, 1)), finished: make(chan struct{})}
	for i := range streams {
		w.streams = append(w.streams, &simStream{id: i, weight: w.weight()})
		w.actors++
	}
	return w
}

// weight makes some actors much slower than others, so that schedules differ in more than detail.
func (w *world) weight() int { return [...]int{1, 4, 16, 64}[w.rng.IntN(4)] }

func (w *world) report(format string, args ...any) {
	if len(w.reports) < 5 {
		w.reports = append(w.reports, fmt.Sprintf(format, args...))
	}
	w.note("REPORT "+format, args...)
}

func (w *world) note(format string, args ...any) {
	if w.trace != nil {
		name := "?"
		if w.running != nil {
			name = w.running.name
		}
		w.trace("%5d %-9s "+format, append([]any{w.steps, name}, args...)...)
	}
}

// ---- tasks ----------------------------------------------------------------------------------------------------------------------------------------

func (w *world) Go(name string, fn func()) { w.spawn(name, fn) }

func (w *world) spawn(name string, fn func()) *task {
	if w.actors == maxActors {
		panic("too many actors")
	}
	t := &task{name: name, actor: w.actors, resume: make(chan struct{}), weight: w.weight(), stream: 1}
	w.actors++
	if p := w.running; p != nil {
		t.clock = p.clock
		p.clock[p.actor]++
	}
	t.clock[t.actor] = 1
	w.tasks = append(w.tasks, t)
	go func() {
		<-t.resume
		defer func() {
			t.done = true
			w.next(nil)
		}()
		fn()
	}()
	return t
}

// run starts the tasks and returns when all have ended, or an error if none can go on.
func (w *world) run() error {
	w.next(nil)
	<-w.finished
	for _, t := range w.tasks {
		if !t.done {
			var b strings.Builder
			for _, t := range w.tasks {
				if !t.done {
					fmt.Fprintf(&b, " %s", t.name)
				}
			}
			return fmt.Errorf("deadlock, waiting for ever:%s", b.String())
		}
	}
	for _, s := range w.streams {
		if len(s.queue) > 0 {
			return fmt.Errorf("stream %d never gets to its %s", s.id, s.queue[0].what)
		}
	}
	return nil
}

// next lets streams run until a task is picked; t is the calling task if it wants to go on, else nil.
func (w *world) next(t *task) {
	for {
		total := 0
		for _, s := range w.streams {
			if s.enabled() {
				total += s.weight
			}
		}
		for _, u := range w.tasks {
			if w.runnable(u) {
				total += u.weight
			}
		}
		if total == 0 {
			close(w.finished) // all done, or a deadlock
			if t != nil {
				select {} // given up; the test has failed
			}
			return
		}
		w.steps++
		pick := w.rng.IntN(total)
		u := w.picked(pick)
		if u == nil {
			continue // a stream ran
		}
		if u.waits && !u.ready() {
			u.woken = false // looked at its condition and went back to sleep
			continue
		}
		u.ready, u.waits = nil, false
		w.running = u
		if u == t {
			return
		}
		u.resume <- struct{}{}
		if t != nil {
			<-t.resume
		}
		return
	}
}

func (w *world) picked(pick int) *task {
	for _, s := range w.streams {
		if s.enabled() {
			if pick -= s.weight; pick < 0 {
				w.execute(s)
				return nil
			}
		}
	}
	for _, u := range w.tasks {
		if w.runnable(u) {
			if pick -= u.weight; pick < 0 {
				return u
			}
		}
	}
	panic("unreachable")
}

func (w *world) runnable(u *task) bool {
	switch {
	case u.done:
		return false
	case u.waits:
		return u.woken && !w.locked
	}
	return u.ready == nil || u.ready()
}

// pause is a point where another task or a stream may go first. With ready the task goes on only when that holds.
func (w *world) pause(ready func() bool) {
	t := w.running
	t.ready = ready
	w.next(t)
}

// ---- Scheduler ------------------------------------------------------------------------------------------------------------------------------------

func (w *world) Lock() {
	w.pause(func() bool { return !w.locked })
	w.acquire()
}

func (w *world) acquire() {
	w.locked = true
	w.running.clock.join(&w.lock)
}

func (w *world) Unlock() {
	t := w.running
	w.lock.join(&t.clock)
	t.clock[t.actor]++
	w.locked = false
}

func (w *world) Wait(ready func() bool) {
	if ready() {
		return
	}
	t := w.running
	w.Unlock()
	t.waits, t.woken = true, false
	w.pause(ready)
	w.acquire()
}

func (w *world) Wake() {
	for _, t := range w.tasks {
		t.woken = true
	}
}

func (w *world) Watch(ctx context.Context) func() bool {
	w.watched = append(w.watched, ctx)
	if ctx.Err() != nil {
		w.Wake()
	}
	return func() bool { return true }
}

// cancel cancels and does what context.AfterFunc does: it wakes those who watch a context that has ended.
func (w *world) cancel(cancel context.CancelCauseFunc, cause error) {
	w.note("cancel")
	cancel(cause)
	for _, ctx := range w.watched {
		if ctx.Err() != nil {
			w.Wake()
		}
	}
}

// ---- streams and memory ---------------------------------------------------------------------------------------------------------------------------

func (s *simStream) enabled() bool {
	return len(s.queue) > 0 && (s.queue[0].wait == nil || s.queue[0].wait.reached)
}

func (w *world) enqueue(stream int, o op) {
	t, s := w.running, w.streams[stream]
	o.issued = t.clock
	t.clock[t.actor]++
	s.queue = append(s.queue, o)
	w.note("enqueue on %d: %s", stream, o.what)
}

func (w *world) execute(s *simStream) {
	o := s.queue[0]
	s.queue = s.queue[1:]
	w.note("stream %d runs %s", s.id, o.what)
	s.clock.join(&o.issued)
	s.clock[s.id]++
	if o.wait != nil {
		s.clock.join(&o.wait.clock)
	}
	if o.run != nil {
		o.run(&s.clock)
	}
	if o.record != nil {
		o.record.reached, o.record.clock = true, s.clock
	}
}

// touch is one access to a slot by an actor whose time is c[actor].
func (w *world) touch(m *cell, actor int, c *clock, by string, gen int, write bool) {
	a := access{by, c[actor], gen}
	if last := m.write; last.time > c[m.actor] {
		w.report("%s: %s (batch %d) is not ordered after %s that wrote it (batch %d): edge %q is missing", m.name, by, gen, last.by, last.gen, edge(m.name, last, a))
	}
	if !write {
		m.reads[actor] = a
		return
	}
	for who, read := range m.reads {
		if read.time > c[who] {
			w.report("%s: %s (batch %d) writes while %s may still read (batch %d): edge %q is missing", m.name, by, gen, read.by, read.gen, edge(m.name, a, read))
		}
	}
	m.write, m.actor = a, actor
	m.reads = [maxActors]access{}
}

// ---- Device ---------------------------------------------------------------------------------------------------------------------------------------

// simDevice is a GPU: stream 0 is P, stream 1 the default stream.
type simDevice struct {
	*world
	host  []*cell
	stage *cell
	slot  []*cell
	open  bool
	gen   int // of the batch that the driver works on
}

func newSimDevice(w *world, cfg Config) *simDevice {
	d := &simDevice{world: w, stage: &cell{name: "stage"}}
	for k := range cfg.HostSlots() {
		d.host = append(d.host, &cell{name: fmt.Sprint("host slot ", k)})
	}
	for j := range cfg.Slots {
		d.slot = append(d.slot, &cell{name: fmt.Sprint("device slot ", j)})
	}
	return d
}

func (d *simDevice) driver(what string) {
	if d.running.name != "driver" {
		d.report("%s is called by %s, not by the driver", what, d.running.name)
	}
}

func (d *simDevice) Open() error {
	d.driver("Open")
	d.pause(nil)
	d.open = true
	return nil
}

func (d *simDevice) Close(released []*simEvent) error {
	d.driver("Close")
	for _, e := range released {
		if err := d.Wait(0, e); err != nil {
			return err
		}
	}
	idle := &simEvent{}
	if err := d.Record(idle, 0); err != nil {
		return err
	}
	if err := d.HostWait(0, idle, func() error { return nil }); err != nil {
		return err
	}
	t := d.running
	for _, cells := range [][]*cell{d.host, d.slot, {d.stage}} {
		for _, m := range cells {
			d.touch(m, t.actor, &t.clock, byFree, freed, true)
			m.value = freed
		}
	}
	d.open = false
	return nil
}

func (d *simDevice) NewEvent(bool) (*simEvent, error) { d.events++; return &simEvent{}, nil }
func (d *simDevice) FreeEvent(e *simEvent) {
	d.live(e)
	e.freed = true
	d.events--
}

func (d *simDevice) P() int { return 0 }

func (d *simDevice) live(e *simEvent) {
	if e.freed {
		d.report("an event is used after it was freed")
	}
}

func (d *simDevice) Current() (int, error) {
	d.pause(nil)
	return d.running.stream, nil
}

func (d *simDevice) Copy(slot, host, n int, released []*simEvent, copied *simEvent) error {
	d.driver("Copy")
	for i, e := range released {
		if slices.Contains(released[:i], e) {
			d.report("the copy into slot %d waits twice for one event", slot)
		}
		if err := d.Wait(0, e); err != nil {
			return err
		}
	}
	d.pause(nil)
	d.copy(slot, host, n)
	return d.Record(copied, 0)
}

// copy and finish take two steps each, so that others get between their beginning and their end.
func (d *simDevice) copy(slot, host, n int) {
	src, dst, value := d.host[host], d.stage, 0
	d.gen = src.write.gen
	gen := d.gen
	d.enqueue(0, op{what: fmt.Sprintf("copy host %d", host), run: func(c *clock) {
		d.touch(src, 0, c, byCopy, gen, false)
		d.touch(dst, 0, c, byCopy, gen, true)
		value = src.value
	}})
	d.enqueue(0, op{what: fmt.Sprintf("copy host %d, end", host), run: func(c *clock) {
		d.touch(src, 0, c, byCopy, gen, false)
		d.touch(dst, 0, c, byCopy, gen, true)
		if src.value != value {
			d.report("host slot %d changes from %d to %d while it is copied", host, value, src.value)
		}
		dst.value = value
	}})
}

func (d *simDevice) Finish(slot, host, n int) error {
	d.driver("Finish")
	d.pause(nil)
	src, dst, gen := d.stage, d.slot[slot], d.gen
	d.enqueue(0, op{what: fmt.Sprintf("finish into slot %d", slot), run: func(c *clock) {
		d.touch(src, 0, c, byFinish, gen, false)
		d.touch(dst, 0, c, byFinish, gen, true)
		dst.value = 0
	}})
	d.enqueue(0, op{what: fmt.Sprintf("finish into slot %d, end", slot), run: func(c *clock) {
		d.touch(src, 0, c, byFinish, gen, false)
		d.touch(dst, 0, c, byFinish, gen, true)
		dst.value = src.value
	}})
	return nil
}

func (d *simDevice) Record(e *simEvent, stream int) error {
	d.pause(nil)
	d.live(e)
	m := &moment{}
	e.latest = m
	d.enqueue(stream, op{what: "record", record: m})
	return nil
}

func (d *simDevice) Wait(stream int, e *simEvent) error {
	d.pause(nil)
	d.live(e)
	if e.latest == nil {
		if d.lenient {
			return nil
		}
		return fmt.Errorf("event not recorded")
	}
	d.enqueue(stream, op{what: "wait", wait: e.latest})
	return nil
}

func (d *simDevice) HostWait(_ int, e *simEvent, stop func() error) error {
	m := e.latest
	if m == nil {
		return fmt.Errorf("event not recorded")
	}
	d.pause(func() bool { return m.reached || stop() != nil })
	if m.reached {
		d.running.clock.join(&m.clock)
		return nil
	}
	return stop()
}

// fill is the source writing a host slot, in two steps.
func (d *simDevice) fill(host, value int) {
	t, m := d.running, d.host[host]
	d.touch(m, t.actor, &t.clock, bySource, value, true)
	m.value = 0
	d.pause(nil)
	d.touch(m, t.actor, &t.clock, bySource, value, true)
	m.value = value
	d.note("filled host %d with %d", host, value)
}

// kernel is the consumer reading a batch on a stream, in two steps.
func (d *simDevice) kernel(l *Lease[int, *simEvent], stream, value int) {
	m := d.slot[l.Slot]
	for _, what := range []string{"kernel", "kernel, end"} {
		d.enqueue(stream, op{what: fmt.Sprintf("%s on slot %d", what, l.Slot), run: func(c *clock) {
			d.touch(m, stream, c, byConsumer, value, false)
			if m.value != value {
				d.report("device slot %d holds batch %d, the consumer's is %d", l.Slot, m.value, value)
			}
		}})
	}
}

// order is a program's own event between two of its streams.
func (d *simDevice) order(e *simEvent, first, second int) error {
	return errors.Join(d.Record(e, first), d.Wait(second, e))
}

// cpuDevice is the world without a GPU: what would be enqueued is done at once by the calling task.
type cpuDevice struct {
	*simDevice
	direct bool
}

func (d *cpuDevice) Close([]*simEvent) error                            { return d.simDevice.Close(nil) }
func (d *cpuDevice) Current() (int, error)                              { return 0, nil }
func (d *cpuDevice) Record(*simEvent, int) error                        { return nil }
func (d *cpuDevice) Wait(int, *simEvent) error                          { return nil }
func (d *cpuDevice) Copy(_, _, _ int, _ []*simEvent, _ *simEvent) error { return nil }
func (d *cpuDevice) HostWait(int, *simEvent, func() error) error        { return nil }

func (d *cpuDevice) Finish(slot, host, n int) error {
	d.driver("Finish")
	d.pause(nil)
	if !d.direct {
		t := d.running
		gen := d.host[host].write.gen
		d.touch(d.host[host], t.actor, &t.clock, byFinish, gen, false)
		d.touch(d.slot[slot], t.actor, &t.clock, byFinish, gen, true)
		d.slot[slot].value = d.host[host].value
	}
	return nil
}

func (d *cpuDevice) kernel(l *Lease[int, *simEvent], _, value int) {
	t, m := d.running, d.slot[l.Slot]
	if d.direct {
		m = d.host[l.Host]
	}
	for range 2 {
		d.touch(m, t.actor, &t.clock, byConsumer, value, false)
		if m.value != value {
			d.report("%s holds %d, the consumer's batch is %d", m.name, m.value, value)
		}
		d.pause(nil)
	}
}
