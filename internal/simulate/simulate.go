// Package simulate models CUDA's streams and events for tests: it detects an unordered access to
// memory, on a machine without a GPU and under any schedule.
//
// A [World] has goroutines ("tasks"), of which one runs at a time, and streams, which are queues of
// operations. Whenever a task calls the world, a generator seeded by the test picks what continues:
// a stream whose first operation may run, or a task that is not waiting. So a schedule is a
// function of its seed alone, and a failing schedule can be replayed.
//
// Two accesses to a [Cell] are ordered only if an event, a stream's own order or the world's lock
// orders them in all schedules; their order in this schedule does not count. The world keeps vector
// clocks to check this: every task and every stream has a clock, and a cell remembers the time of
// its last write and of the reads since. An access whose clock does not include these times is
// reported, even if this schedule happened to order it.
//
// A world belongs to one test. Only its tasks call its methods, except for New, Go before Run, Run,
// and reads of the results after Run.
package simulate

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"strings"
)

// maxActors is the maximum number of streams and tasks in a world.
const maxActors = 24

// Clock is a vector clock: the time of every actor, as far as its owner knows.
type Clock [maxActors]uint32

// Join merges o into c.
func (c *Clock) Join(o *Clock) {
	for i := range c {
		c[i] = max(c[i], o[i])
	}
}

// Access is one read or write of a cell.
type Access struct {
	By   string // the kind of access, for reports
	Gen  int    // set by the test, for reports: for example the number of the batch
	time uint32 // the actor's time; 0 means never
}

// Cell is a piece of memory. The zero value has not been accessed.
type Cell struct {
	Name  string
	Value int // set by the test; the world does not read it
	write Access
	actor int // the actor of the last write
	reads [maxActors]Access
}

// LastWrite returns the last write of the cell.
func (m *Cell) LastWrite() Access { return m.write }

// World is a simulated host with its tasks, streams and events.
type World struct {
	Rand    *rand.Rand
	Reports []string                         // the first 32 errors
	Trace   func(format string, args ...any) // nil: no trace
	Steps   int
	Events  int // events created and not freed
	// Lenient makes a wait for an event that was never recorded do nothing, as in CUDA. Otherwise
	// the wait is an error.
	Lenient bool
	// Edge names the edge that should order a write and a read of a cell. If it is nil, reports
	// name no edge.
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
	ready  func() bool // nil if the task can continue
	woken  bool        // for tasks in Wait: the condition is evaluated only after a Wake
	waits  bool
	done   bool
	weight int
}

// Tick advances the task's own time, so that a copy of its clock covers only the work before.
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
	wait   *moment      // the operation may run when this moment is reached
	record *moment      // the operation reaches this moment
	run    func(*Clock) // the operation's accesses to memory
}

// moment is one record of an event.
type moment struct {
	reached bool
	clock   Clock
}

// Event is a mark in a stream's queue. The zero value was never recorded.
type Event struct {
	latest *moment
	freed  bool
}

// New returns a world with the given number of streams, numbered from 0.
func New(seed uint64, streams int) *World {
	w := &World{Rand: rand.New(rand.NewPCG(seed, 1)), finished: make(chan struct{})}
	for range streams {
		w.AddStream()
	}
	return w
}

// AddStream adds a stream and returns its number.
func (w *World) AddStream() int {
	w.streams = append(w.streams, &stream{id: w.actor(), weight: w.weight()})
	return len(w.streams) - 1
}

// Streams returns the number of streams.
func (w *World) Streams() int { return len(w.streams) }

// Running returns the task that runs now.
func (w *World) Running() *Task { return w.running }

// actor returns the number of a new stream or task. Actors beyond the maximum share the last clock,
// which is reported because edges between them would not be checked.
func (w *World) actor() int {
	if w.actors == maxActors {
		w.Report("more than %d streams and tasks", maxActors)
		return maxActors - 1
	}
	w.actors++
	return w.actors - 1
}

// weight draws an actor's weight. It makes some actors much slower than others, so that schedules
// differ in more than detail.
func (w *World) weight() int { return [...]int{1, 4, 16, 64}[w.Rand.IntN(4)] }

// Report records an error.
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

// ---- Tasks

// Go starts a task.
func (w *World) Go(name string, fn func()) { w.Spawn(name, fn) }

// Spawn starts a task and returns it.
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

// Run starts the tasks and returns when all have ended, or an error if none can continue.
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

// next lets streams run until a task is picked. t is the calling task if it wants to continue, and
// nil if it has ended.
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
			close(w.finished) // all tasks have ended, or the world is deadlocked
			if t != nil {
				select {} // abandoned: the test has failed
			}
			return
		}
		w.Steps++
		u := w.picked(w.Rand.IntN(total))
		if u == nil {
			continue // a stream ran
		}
		if u.waits && !u.ready() {
			u.woken = false // the condition does not hold: the task sleeps again
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

// Pause is a point where another task or a stream may run first. If ready is not nil, the task
// continues only when ready returns true.
func (w *World) Pause(ready func() bool) {
	t := w.running
	t.ready = ready
	w.next(t)
}

// ---- The lock, and waiting for a condition

// Lock takes the world's lock.
func (w *World) Lock() {
	w.Pause(func() bool { return !w.locked })
	w.acquire()
}

func (w *World) acquire() {
	w.locked = true
	w.running.Clock.Join(&w.lock)
}

// Unlock releases the world's lock.
func (w *World) Unlock() {
	t := w.running
	w.lock.Join(&t.Clock)
	t.Tick()
	w.locked = false
}

// Wait is called with the lock held. It releases the lock until ready returns true.
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

// Wake makes the tasks in Wait evaluate their condition again.
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

// Cancel cancels a context and, like context.AfterFunc, wakes the tasks that watch a context that
// has ended.
func (w *World) Cancel(cancel context.CancelCauseFunc, cause error) {
	w.Note("cancel")
	cancel(cause)
	for _, ctx := range w.watched {
		if ctx.Err() != nil {
			w.Wake()
		}
	}
}

// ---- Streams and memory

func (s *stream) enabled() bool {
	return len(s.queue) > 0 && (s.queue[0].wait == nil || s.queue[0].wait.reached)
}

// Enqueue puts an operation at the end of a stream's queue. The world calls run when the stream
// executes the operation, with the stream's clock, for [World.TouchOn].
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

// TouchOn records an access to a cell by an operation of the stream. c is the stream's clock.
func (w *World) TouchOn(stream int, c *Clock, m *Cell, by string, gen int, write bool) {
	w.touch(m, w.streams[stream].id, c, by, gen, write)
}

// Touch records an access to a cell by the running task, on the host.
func (w *World) Touch(m *Cell, by string, gen int, write bool) {
	w.touch(m, w.running.actor, &w.running.Clock, by, gen, write)
}

// TouchAfter records a write, after Run, that is ordered after the latest records of the events and
// after nothing else.
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
		w.Report("%s: %s (%d) is not ordered after %s that wrote it (%d)%s", m.Name, by, gen, last.By,
			last.Gen, w.missing(m, last, a))
	}
	if !write {
		m.reads[actor] = a
		return
	}
	for who, read := range m.reads {
		if read.time > c[who] {
			w.Report("%s: %s (%d) writes while %s may still read (%d)%s", m.Name, by, gen, read.By,
				read.Gen, w.missing(m, a, read))
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

// ---- Events

// NewEvent returns an event that Events counts until FreeEvent.
func (w *World) NewEvent() *Event { w.Events++; return &Event{} }

// FreeEvent frees an event.
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

// Synchronize makes the task wait for the event's latest record, or until stop returns an error.
// stop may be nil.
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
