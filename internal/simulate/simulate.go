// Package simulate is a model of CUDA's streams and events for tests: it shows an access to memory
// that nothing orders, on a machine without a GPU and whatever the luck of the schedule.
//
// A [World] has goroutines ("tasks"), of which one runs at a time, and streams, which are queues of
// operations. Whenever a task calls the world, a generator seeded by the test picks who goes on:
// any stream whose first operation may run, or any task that is not waiting. So a schedule is a
// function of its seed alone, and a failing one can be replayed.
//
// What orders two accesses to a [Cell] is not who came first in this schedule, but whether an
// event, a stream's own order or the world's lock orders them in all schedules. The world keeps
// vector clocks for that: every task and every stream has one, and a cell remembers the time of its
// last write and of the reads since. An access that doesn't know of them is a report, even if this
// schedule was a lucky one.
//
// A world belongs to one test. Its methods are called by its tasks, but for New, Go before Run,
// Run, and reading what is left after it.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
)

// maxActors bounds how many streams and tasks a world has in all.
const maxActors = 24

// Clock is the time of every actor, as far as its owner knows.
type Clock [maxActors]uint32

// Join makes c know what o knows.
func (c *Clock) Join(o *Clock) {
	for i := range c {
		c[i] = max(c[i], o[i])
	}
}

// Access is one read or write of a cell.
type Access struct {
	By   string // what did it, for reports
	Gen  int    // the test's, for reports: for example the batch that it belongs to
	time uint32 // of the actor; 0: never
}

// Cell is a piece of memory. The zero value is one that nobody has touched.
type Cell struct {
	Name  string
	Value int // the test's: World does not look at it
	write Access
	actor int // of the last write
	reads [maxActors]Access
}

// LastWrite returns the last write of the cell.
func (m *Cell) LastWrite() Access { return m.write }

// World is what is simulated.
type World struct {
	Rand    *rand.Rand
	Reports []string                         // what went wrong, the first 32
	Trace   func(format string, args ...any) // nil: none
	Steps   int
	Events  int // made and not freed
	// Lenient: a wait for an event that was never recorded is no error but does nothing, as in
	// CUDA.
	Lenient bool
	// Edge names the edge that should order a write and a read of a cell; nil: edges have no names.
	Edge func(cell *Cell, write, read Access) string

	tasks    []*Task
	running  *Task
	streams  []*stream
	actors   int
	locked   bool
	lock     Clock
	watched  []context.Context
	finished chan struct{}
}

// Task is a goroutine of the world.
type Task struct {
	Name   string
	Stream int // the task's current stream
	Clock  Clock

	actor  int
	resume chan struct{}
	ready  func() bool // nil: can go on
	woken  bool        // for those in Wait: the condition is looked at only after a Wake
	waits  bool
	done   bool
	weight int
}

// Tick ends what the task has done so far, for others that take over its clock.
func (t *Task) Tick() { t.Clock[t.actor]++ }

type stream struct {
	id     int
	clock  Clock
	queue  []op
	weight int
}

type op struct {
	what   string
	issued Clock
	wait   *moment      // the operation may run when this is reached
	record *moment      // is reached by the operation
	run    func(*Clock) // what it does to memory
}

// moment is one record of an event.
type moment struct {
	reached bool
	clock   Clock
}

// Event is a mark in a stream's queue. The zero value is one that was never recorded.
type Event struct {
	latest *moment
	freed  bool
}

// New returns a world with so many streams, whose numbers start at 0.
func New(seed uint64, streams int) *World {
	w := &World{Rand: rand.New(rand.NewPCG(seed, 1)), finished: make(chan struct{})}
	for range streams {
		w.AddStream()
	}
	return w
}

// AddStream returns the number of a new stream.
func (w *World) AddStream() int {
	w.streams = append(w.streams, &stream{id: w.actor(), weight: w.weight()})
	return len(w.streams) - 1
}

// Streams returns how many streams there are.
func (w *World) Streams() int { return len(w.streams) }

// Running returns the task that runs now.
func (w *World) Running() *Task { return w.running }

// actor numbers streams and tasks; those beyond the last share its clock, which is reported because
// edges between them would not be seen.
func (w *World) actor() int {
	if w.actors == maxActors {
		w.Report("more than %d streams and tasks", maxActors)
		return maxActors - 1
	}
	w.actors++
	return w.actors - 1
}

// weight makes some actors much slower than others, so that schedules differ in more than detail.
func (w *World) weight() int { return [...]int{1, 4, 16, 64}[w.Rand.IntN(4)] }

// Report notes something that is wrong.
func (w *World) Report(format string, args ...any) {
	if len(w.Reports) < 32 {
		w.Reports = append(w.Reports, fmt.Sprintf(format, args...))
	}
	w.Note("REPORT "+format, args...)
}

// Note writes a step into the trace.
func (w *World) Note(format string, args ...any) {
	if w.Trace != nil {
		name := "?"
		if w.running != nil {
			name = w.running.Name
		}
		w.Trace("%5d %-9s "+format, append([]any{w.Steps, name}, args...)...)
	}
}

// ---- tasks
// ----------------------------------------------------------------------------------------------------------------------------------------

// Go starts a task.
func (w *World) Go(name string, fn func()) { w.Spawn(name, fn) }

// Spawn is Go and returns the task.
func (w *World) Spawn(name string, fn func()) *Task {
	t := &Task{Name: name, actor: w.actor(), resume: make(chan struct{}), weight: w.weight(), Stream: 1}
	if p := w.running; p != nil {
		t.Clock = p.Clock
		p.Tick()
	}
	t.Clock[t.actor] = 1
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

// Run starts the tasks and returns when all have ended, or an error if none can go on.
func (w *World) Run() error {
	w.next(nil)
	<-w.finished
	for _, t := range w.tasks {
		if !t.done {
			var b strings.Builder
			for _, t := range w.tasks {
				if !t.done {
					fmt.Fprintf(&b, " %s", t.Name)
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

// next lets streams run until a task is picked; t is the calling task if it wants to go on, else
// nil.
func (w *World) next(t *Task) {
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
		w.Steps++
		u := w.picked(w.Rand.IntN(total))
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

func (w *World) picked(pick int) *Task {
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
	return nil
}

func (w *World) runnable(u *Task) bool {
	switch {
	case u.done:
		return false
	case u.waits:
		return u.woken && !w.locked
	}
	return u.ready == nil || u.ready()
}

// Pause is a point where another task or a stream may go first. With ready the task goes on only
// when that holds.
func (w *World) Pause(ready func() bool) {
	t := w.running
	t.ready = ready
	w.next(t)
}

// ---- one lock, and waiting for what it guards
// -------------------------------------------------------------------------------------------------------

// Lock takes the world's lock.
func (w *World) Lock() {
	w.Pause(func() bool { return !w.locked })
	w.acquire()
}

func (w *World) acquire() {
	w.locked = true
	w.running.Clock.Join(&w.lock)
}

// Unlock gives it up.
func (w *World) Unlock() {
	t := w.running
	w.lock.Join(&t.Clock)
	t.Tick()
	w.locked = false
}

// Wait is called with the lock held. It gives it up until ready holds.
func (w *World) Wait(ready func() bool) {
	if ready() {
		return
	}
	t := w.running
	w.Unlock()
	t.waits, t.woken = true, false
	w.Pause(ready)
	w.acquire()
}

// Wake lets those in Wait look at their condition again.
func (w *World) Wake() {
	for _, t := range w.tasks {
		t.woken = true
	}
}

// Watch makes Cancel of ctx call Wake.
func (w *World) Watch(ctx context.Context) func() bool {
	w.watched = append(w.watched, ctx)
	if ctx.Err() != nil {
		w.Wake()
	}
	return func() bool { return true }
}

// Cancel cancels and does what context.AfterFunc does: it wakes those who watch a context that has
// ended.
func (w *World) Cancel(cancel context.CancelCauseFunc, cause error) {
	w.Note("cancel")
	cancel(cause)
	for _, ctx := range w.watched {
		if ctx.Err() != nil {
			w.Wake()
		}
	}
}

// ---- streams and memory
// ---------------------------------------------------------------------------------------------------------------------------

func (s *stream) enabled() bool {
	return len(s.queue) > 0 && (s.queue[0].wait == nil || s.queue[0].wait.reached)
}

// Enqueue puts an operation at the end of a stream's queue. run is called when the stream comes to
// it, with the stream's clock, for [World.Touch].
func (w *World) Enqueue(stream int, what string, run func(*Clock)) {
	w.enqueue(stream, op{what: what, run: run})
}

func (w *World) enqueue(stream int, o op) {
	t, s := w.running, w.streams[stream]
	o.issued = t.Clock
	t.Tick()
	s.queue = append(s.queue, o)
	w.Note("enqueue on %d: %s", stream, o.what)
}

func (w *World) execute(s *stream) {
	o := s.queue[0]
	s.queue = s.queue[1:]
	w.Note("stream %d runs %s", s.id, o.what)
	s.clock.Join(&o.issued)
	s.clock[s.id]++
	if o.wait != nil {
		s.clock.Join(&o.wait.clock)
	}
	if o.run != nil {
		o.run(&s.clock)
	}
	if o.record != nil {
		o.record.reached, o.record.clock = true, s.clock
	}
}

// TouchOn is an access to a cell by an operation of the stream, whose clock c is.
func (w *World) TouchOn(stream int, c *Clock, m *Cell, by string, gen int, write bool) {
	w.touch(m, w.streams[stream].id, c, by, gen, write)
}

// Touch is an access to a cell by the running task, on the host.
func (w *World) Touch(m *Cell, by string, gen int, write bool) {
	w.touch(m, w.running.actor, &w.running.Clock, by, gen, write)
}

// TouchAfter is a write, after Run, by somebody who has waited for the latest records of the events
// and knows nothing else.
func (w *World) TouchAfter(m *Cell, by string, gen int, events ...*Event) {
	var c Clock
	for _, e := range events {
		c.Join(&e.latest.clock)
	}
	w.touch(m, 0, &c, by, gen, true)
}

func (w *World) touch(m *Cell, actor int, c *Clock, by string, gen int, write bool) {
	a := Access{by, gen, c[actor]}
	if last := m.write; last.time > c[m.actor] {
		w.Report("%s: %s (%d) is not ordered after %s that wrote it (%d)%s", m.Name, by, gen, last.By, last.Gen, w.missing(m, last, a))
	}
	if !write {
		m.reads[actor] = a
		return
	}
	for who, read := range m.reads {
		if read.time > c[who] {
			w.Report("%s: %s (%d) writes while %s may still read (%d)%s", m.Name, by, gen, read.By, read.Gen, w.missing(m, a, read))
		}
	}
	m.write, m.actor = a, actor
	m.reads = [maxActors]Access{}
}

func (w *World) missing(m *Cell, write, read Access) string {
	if w.Edge == nil {
		return ""
	}
	return fmt.Sprintf(": edge %q is missing", w.Edge(m, write, read))
}

// ---- events
// -----------------------------------------------------------------------------------------------------------------------------------------

// NewEvent returns an event that counts in Events until FreeEvent.
func (w *World) NewEvent() *Event { w.Events++; return &Event{} }

// FreeEvent frees it.
func (w *World) FreeEvent(e *Event) {
	w.live(e)
	e.freed = true
	w.Events--
}

func (w *World) live(e *Event) {
	if e.freed {
		w.Report("an event is used after it was freed")
	}
}

// RecordEvent puts the event at the end of the stream's queue.
func (w *World) RecordEvent(e *Event, stream int) {
	w.Pause(nil)
	w.live(e)
	m := &moment{}
	e.latest = m
	w.enqueue(stream, op{what: "record", record: m})
}

var errNotRecorded = errors.New("event not recorded")

// WaitEvent makes the stream wait for the event's latest record.
func (w *World) WaitEvent(stream int, e *Event) error {
	w.Pause(nil)
	w.live(e)
	if e.latest == nil {
		if w.Lenient {
			return nil
		}
		return errNotRecorded
	}
	w.enqueue(stream, op{what: "wait", wait: e.latest})
	return nil
}

// Synchronize makes the task wait for the event's latest record, or until stop, if not nil, returns
// an error.
func (w *World) Synchronize(e *Event, stop func() error) error {
	m := e.latest
	if m == nil {
		return errNotRecorded
	}
	w.Pause(func() bool { return m.reached || stop != nil && stop() != nil })
	if m.reached {
		w.running.Clock.Join(&m.clock)
		return nil
	}
	return stop()
}
