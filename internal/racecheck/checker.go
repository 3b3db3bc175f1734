// Package racecheck checks the order of work on streams. Its input is the sequence of a program's
// calls: which queue reads and writes which memory, and which edges order the queues. If two
// accesses to the same bytes are not ordered by edges, and one is a write, it reports the later
// access. It does not depend on CUDA or LibTorch.
//
// A [Checker] keeps a vector clock for every queue and every recorded event. Two accesses are
// ordered if the later one's queue knows the earlier one's time: through the order of one queue, a
// wait, an event, or a wait by the host before it queued the later one. The actual order in the
// hardware does not count, so a report does not depend on timing.
//
// Memory is compared by bytes, not by tensors: views of one storage share a block. A block
// remembers the accesses that a later access may have to be ordered after. When a later write of
// the same bytes is ordered after an access, the block forgets the access: whatever is ordered
// after the write is ordered after both. So memory is bounded by the live allocations, see
// maxAccesses.
package racecheck

import (
	"regexp"
	"slices"
	"sync"
)

// Options are the options of New.
type Options struct {
	// Report is called with each new finding while the Checker is locked. It must not call the
	// Checker.
	Report func(*Finding)
	// MaxFindings is the maximum number of findings to report; 0 means 100. Further ones are
	// counted.
	MaxFindings int
	// Fingerprint returns a hash of the n bytes of host memory from an address on. The checker uses
	// it to find pinned memory that the program changes, through a slice, while a copy may still
	// read it. It is called only for memory between Allocate and Free.
	Fingerprint func(begin, n uintptr) uint64
	// Ignore drops findings if a function or a file:line of either stack matches.
	Ignore *regexp.Regexp
}

// Checker checks the order of one program. Its methods may be called from any goroutine, and each
// call is atomic.
type Checker struct {
	mu       sync.Mutex
	o        Options
	world    world // outside of captures
	spaces   map[int32]*space
	queues   []queue
	events   map[uintptr]*event
	graphs   map[uintptr]*graph
	capture  *capture // nil if none is running
	places   map[placeKey]*Place
	watched  []watched
	found    map[findingKey]*Finding
	findings []*Finding
	serial   uint64
	stats    Stats
	signals  []Queue           // for waits for external events, by number in their capture
	spare    map[Queue][]Queue // lanes of closed graphs, by stream
}

// Stats counts the observations of a Checker.
type Stats struct {
	Operations int64 // launches
	Accesses   int64
	Blocks     int   // current number
	Forgotten  int64 // accesses forgotten because a block had too many
	// Findings includes repeats, and findings beyond MaxFindings.
	Findings int
}

type queue struct {
	name   string
	made   *Place
	device int32
	of     Queue // the stream that a lane belongs to; 0 for streams
}

// world holds the clocks of queues. A capture has a separate world, because its work does not run
// when it is queued.
type world struct {
	clocks []clock
}

func (w *world) clock(q Queue) *clock {
	if n := int(q) + 1 - len(w.clocks); n > 0 {
		w.clocks = append(w.clocks, make([]clock, n)...)
	}
	return &w.clocks[q]
}

type event struct {
	clock    clock
	captured *capture // the capture that the latest record is in
	place    *Place   // of the latest record
	awaited  bool     // since the latest record
	recorded bool
	external bool
}

// New returns an empty Checker.
func New(o Options) *Checker {
	if o.MaxFindings < 1 {
		o.MaxFindings = 100
	}
	return &Checker{
		o: o, queues: []queue{{name: "the host", device: hostDevice}},
		spaces: map[int32]*space{}, events: map[uintptr]*event{}, graphs: map[uintptr]*graph{},
		places: map[placeKey]*Place{}, found: map[findingKey]*Finding{}, spare: map[Queue][]Queue{},
	}
}

const hostDevice = -1

// NewQueue adds a stream of the device and returns its number. The name is for reports.
func (c *Checker) NewQueue(name string, device int32) Queue {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queues = append(c.queues, queue{name: name, device: device})
	return Queue(len(c.queues) - 1)
}

// NameQueue replaces a stream's name and the place of its construction.
func (c *Checker) NameQueue(q Queue, name string, made *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.queues[q].name, c.queues[q].made = name, made
}

// Stats returns the counts so far.
func (c *Checker) Stats() Stats {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.stats
	for _, sp := range c.spaces {
		s.Blocks += sp.count
	}
	return s
}

// worldOf returns the clocks that now apply to work on the queue.
func (c *Checker) worldOf(q Queue) *world {
	if c.capture != nil && c.capture.inside(q) {
		return &c.capture.world
	}
	return &c.world
}

// issue returns the queue's clock for work that the host queues now.
func (c *Checker) issue(q Queue) *clock {
	w := c.worldOf(q)
	own := w.clock(q)
	if w == &c.world && q != Host {
		own.join(*c.world.clock(Host))
		own = w.clock(q)
	}
	return own
}

// ---- Edges

// Wait orders later work of a queue after all earlier work of others.
func (c *Checker) Wait(waiter Queue, on ...Queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range on {
		c.wait(waiter, q)
	}
	if waiter == Host {
		c.compare()
	}
}

// Fork orders later work of each queue of to after all earlier work of from.
func (c *Checker) Fork(from Queue, to ...Queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, q := range to {
		c.wait(q, from)
	}
}

func (c *Checker) wait(waiter, on Queue) {
	if waiter == on {
		return
	}
	if c.capture != nil {
		if c.capture.inside(on) && waiter != Host {
			c.capture.enter(waiter)
		}
		if c.capture.inside(on) != c.capture.inside(waiter) {
			return // CUDA refuses the wait
		}
	}
	from := *c.issue(on)
	c.issue(waiter).join(from)
}

// Record makes the event represent all earlier work of the queue.
func (c *Checker) Record(e uintptr, q Queue, at *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	ev := c.events[e]
	if ev == nil {
		ev = &event{}
		c.events[e] = ev
	}
	captured := c.capture != nil && c.capture.inside(q)
	if captured && ev.external {
		c.captureRecord(ev, q, at)
		return
	}
	c.issue(q).copyTo(&ev.clock)
	ev.captured, ev.place, ev.awaited, ev.recorded = nil, at, false, true
	if captured {
		ev.captured = c.capture
	}
}

// WaitEvent orders later work of the queue after the event's latest record. It reports whether the
// event was recorded.
func (c *Checker) WaitEvent(waiter Queue, e uintptr) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	ev := c.events[e]
	if ev == nil || !ev.recorded {
		return false
	}
	ev.awaited = true
	switch {
	case ev.external && c.capture != nil && c.capture.inside(waiter):
		c.captureWait(ev, waiter)
		return true
	case ev.captured != nil && (ev.captured != c.capture || waiter == Host):
		return true // CUDA refuses the wait, as in the next case
	case ev.captured != nil:
		c.capture.enter(waiter)
	case c.capture != nil && c.capture.inside(waiter):
		return true
	}
	c.issue(waiter).join(ev.clock)
	if waiter == Host {
		c.compare()
	}
	return true
}

// Drop forgets the event. at is the place of the call that drops it, or nil for an event that the
// program does not own.
func (c *Checker) Drop(e uintptr, at *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ev := c.events[e]; ev != nil && !ev.awaited && ev.place != nil && at != nil {
		c.note(KindEventNotAwaited, ev.place, at)
	}
	delete(c.events, e)
}

// WaitAll makes the host wait for all queues of the device.
func (c *Checker) WaitAll(device int32) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for q := range c.queues {
		if q != int(Host) && c.queues[q].device == device {
			c.wait(Host, Queue(q))
		}
	}
	c.compare()
}

// Snapshot returns a copy of the queue's clock, for WaitSnapshot.
func (c *Checker) Snapshot(q Queue) []uint64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(*c.issue(q))
}

// WaitSnapshot makes the host wait for the work before the Snapshot.
func (c *Checker) WaitSnapshot(taken []uint64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.world.clock(Host).join(taken)
	c.compare()
}

// ---- Memory

// Memory is a tensor's memory: Region is inside the storage [Storage, Storage+StorageBytes).
type Memory struct {
	Device       int32
	Storage      uintptr
	StorageBytes uintptr
	Region       Region
	Shape        Shape
	// Track makes the checker remember unknown host memory. Otherwise an access to such memory
	// costs one lookup.
	Track bool
}

// Access is a read or a write.
type Access struct {
	Memory
	Queue Queue
	Write bool
	Fresh bool // the operation made the memory: reports name its place
}

func (c *Checker) space(device int32) *space {
	s := c.spaces[device]
	if s == nil {
		s = &space{}
		c.spaces[device] = s
	}
	return s
}

// Register records existing memory that devices read until Free, and whose content the program may
// change at any time.
func (c *Checker) Register(device int32, begin, bytes uintptr, at *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.newBlock(c.space(device), device, begin, bytes, Host, at)
}

// Allocate records that the queue's allocator has handed out the memory. Only the owner's queue is
// ordered after earlier users of the memory: for all others the allocation counts as a write.
func (c *Checker) Allocate(device int32, begin, bytes uintptr, owner Queue, at *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.space(device)
	b := c.newBlock(s, device, begin, bytes, owner, at)
	if b == nil || owner == Host {
		if b != nil {
			b.pinned = device == hostDevice
		}
		return
	}
	own := c.issue(owner)
	own.set(owner, own.at(owner)+1)
	a := access{region: Bytes(begin, bytes), queue: owner, write: true, time: own.at(owner)}
	if c.capture != nil && c.capture.inside(owner) {
		b.captured = true
		c.capture.record(b, a)
		return
	}
	b.accesses = append(b.accesses, a)
}

// newBlock replaces the checker's record of the memory.
func (c *Checker) newBlock(s *space, device int32, begin, bytes uintptr, owner Queue, at *Place) *block {
	if bytes == 0 {
		return nil
	}
	for old := s.find(begin, begin+bytes); old != nil; old = s.find(begin, begin+bytes) {
		s.remove(old)
		c.unwatch(old)
	}
	if s.count >= maxBlocks {
		c.stats.Forgotten++
		return nil
	}
	c.serial++
	b := &block{device: device, begin: begin, end: begin + bytes, owner: owner, made: at, serial: c.serial}
	s.add(b)
	return b
}

// Use records that the memory may be used on the queue until it is freed. It is reused only after
// the work that the queue has at that time.
func (c *Checker) Use(device int32, storage uintptr, q Queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if b := c.space(device).exact[storage]; b != nil && !slices.Contains(b.uses, q) {
		b.uses = append(b.uses, q)
	}
}

// Free records that the memory returns to its owner's allocator. Uses by other queues are reported
// unless the owner's queue is ordered after them, since the owner's next allocation may be the same
// memory.
func (c *Checker) Free(device int32, begin uintptr, at *Place) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.space(device)
	b := s.exact[begin]
	if b == nil {
		return
	}
	s.remove(b)
	c.unwatch(b)
	if b.owner == Host && device != hostDevice {
		return // the owner of memory from before the Checker is unknown
	}
	// Memory from before a capture may be freed during the capture, by the garbage collector.
	list, w := &b.accesses, &c.world
	if b.captured {
		if c.capture == nil || !c.capture.inside(b.owner) {
			return // the memory still belongs to a graph
		}
		list, w = c.capture.accesses(b), &c.capture.world
	}
	known := slices.Clone(*w.clock(b.owner))
	for _, q := range b.uses {
		known.join(*w.clock(q))
	}
	if !b.captured {
		known.join(*c.world.clock(Host))
	}
	for i := range *list {
		if a := &(*list)[i]; a.queue != b.owner && a.time > known.at(a.queue) {
			c.freed(b, a, at)
		}
	}
}

// Launch is work that the host queues, or does itself.
type Launch struct {
	At       *Place
	Accesses []Access
}

// Do records the accesses of one operation. All accesses on one queue have the same time.
func (c *Checker) Do(l Launch) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stats.Operations++
	c.stats.Accesses += int64(len(l.Accesses))
	last := Queue(-1)
	for i := range l.Accesses {
		a := &l.Accesses[i]
		if a.Queue != last {
			last = a.Queue
			own := c.issue(last)
			own.set(last, own.at(last)+1)
		}
		c.check(a, l.At)
	}
	for i := range l.Accesses {
		c.remember(&l.Accesses[i], l.At)
	}
}

// block returns the block of the memory, and makes one if there is none.
func (c *Checker) block(a *Access, at *Place) *block {
	if a.Storage == 0 || a.Region.Row == 0 {
		return nil
	}
	s := c.spaces[a.Device]
	if s == nil {
		if a.Device == hostDevice && !a.Track {
			return nil
		}
		s = c.space(a.Device)
	}
	if b := s.exact[a.Storage]; b != nil && a.Region.End() <= b.end {
		return b
	}
	if b := s.find(a.Region.Begin, a.Region.End()); b != nil && b.begin <= a.Region.Begin && a.Region.End() <= b.end {
		return b
	}
	if a.Device == hostDevice && !a.Track {
		return nil
	}
	begin, end := min(a.Storage, a.Region.Begin), max(a.Storage+a.StorageBytes, a.Region.End())
	return c.newBlock(s, a.Device, begin, end-begin, Host, nil)
}

// accesses returns the accesses that an access to the block on the queue may conflict with.
func (c *Checker) accesses(b *block, q Queue) *[]access {
	if c.capture != nil && c.capture.inside(q) {
		return c.capture.accesses(b)
	}
	return &b.accesses
}

func (c *Checker) check(a *Access, at *Place) {
	b := c.block(a, at)
	if b == nil {
		return
	}
	if a.Fresh {
		b.made, b.shape = at, a.Shape
	}
	own := *c.worldOf(a.Queue).clock(a.Queue)
	for i, old := range *c.accesses(b, a.Queue) {
		if old.queue != a.Queue && (old.write || a.Write) && old.time > own.at(old.queue) &&
			old.region.overlaps(a.Region) {
			c.race(b, &(*c.accesses(b, a.Queue))[i], a, at)
			if a.Queue == Host {
				c.unwatch(b) // the change is reported
			}
		}
	}
}

func (c *Checker) remember(a *Access, at *Place) {
	b := c.block(a, at)
	if b == nil {
		return
	}
	own := *c.worldOf(a.Queue).clock(a.Queue)
	list := c.accesses(b, a.Queue)
	if list != &b.accesses {
		c.capture.step(b, a, own, at)
	}
	*list = slices.DeleteFunc(*list, func(old access) bool {
		if !a.Region.covers(old.region) || !a.Write && (old.write || old.queue != a.Queue) {
			return false
		}
		return old.queue == a.Queue || old.time <= own.at(old.queue)
	})
	if list == &b.accesses {
		c.watch(b, a, own.at(a.Queue), at)
		c.stats.Forgotten += int64(b.trim(*c.world.clock(Host)))
	}
	*list = append(*list, access{a.Region, a.Queue, a.Write, own.at(a.Queue), at, a.Shape})
}

// Unmap records that the memory returns to the driver, which waits for all work on it.
func (c *Checker) Unmap(device int32, begin, bytes uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.space(device)
	for b := s.find(begin, begin+bytes); b != nil; b = s.find(begin, begin+bytes) {
		s.remove(b)
		c.unwatch(b)
	}
}

// Tracks reports whether the checker knows memory of the device.
func (c *Checker) Tracks(device int32) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.spaces[device]
	return s != nil && s.count > 0
}
