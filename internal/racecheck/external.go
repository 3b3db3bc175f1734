package racecheck

import "slices"

// An external event connects a graph with work outside it. A captured record or wait is a node of
// the graph, and every replay runs it. A stream that waits for the event after a replay is ordered
// after the operations that precede the record in the graph, not after the whole graph. The
// operations after a captured wait are ordered after the event's record at the time of the replay.
//
// So the accesses of a graph with such nodes fall into groups. All accesses of a group follow the
// same waits and precede the same records. In a replay each group has a separate queue, called a
// lane. The lane starts at the replay's position in its stream, and the stream's later work waits
// for the lane.

// External marks an event that has no record yet as external.
func (c *Checker) External(e uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.events[e] = &event{external: true}
}

// node is a graph's record of an external event, or wait for one.
type node struct {
	event *event
	at    *Place
	// clock is the queue's clock at a record, in the world of the capture.
	clock clock
	lanes []int // of a record: the groups that precede it
	waits []int // of a record: the waits that precede it
}

// captureRecord adds a record of the external event on a queue of the capture.
func (c *Checker) captureRecord(ev *event, q Queue, at *Place) {
	own := c.issue(q)
	c.capture.records = append(c.capture.records, node{
		event: ev, at: at, clock: slices.Clone(*own), waits: c.capture.waitsBefore(*own),
	})
}

// captureWait adds a wait for the external event on a queue of the capture. In the capture's clocks
// the wait is a queue, which has time 1 after the wait.
func (c *Checker) captureWait(ev *event, q Queue) {
	n := len(c.capture.waits)
	if n == len(c.signals) {
		c.queues = append(c.queues, queue{device: noDevice})
		c.signals = append(c.signals, Queue(len(c.queues)-1))
	}
	c.capture.waits = append(c.capture.waits, ev)
	c.capture.signals = c.signals[:n+1]
	c.issue(q).set(c.signals[n], 1)
}

// noDevice is the device of queues that are not streams.
const noDevice = -2

// waitsBefore returns the numbers of the waits that a clock of the capture knows.
func (c *capture) waitsBefore(known clock) (waits []int) {
	for i, q := range c.signals {
		if known.at(q) > 0 {
			waits = append(waits, i)
		}
	}
	return waits
}

// group returns the number of the group whose accesses follow these waits and precede these
// records. It adds a new group to the graph.
func (g *graph) group(waits, records []int) int {
	same := func(o group) bool { return slices.Equal(o.waits, waits) && slices.Equal(o.records, records) }
	if i := slices.IndexFunc(g.groups, same); i >= 0 {
		return i
	}
	for _, r := range records {
		g.records[r].lanes = append(g.records[r].lanes, len(g.groups))
	}
	g.groups = append(g.groups, group{waits, records})
	return len(g.groups) - 1
}

type group struct{ waits, records []int }

// recordsAfter returns the numbers of the records that follow an access of the capture.
func (c *capture) recordsAfter(f *foot) (records []int) {
	for i := range c.records {
		if f.time <= c.records[i].clock.at(f.queue) {
			records = append(records, i)
		}
	}
	return records
}

// lanes returns the graph's lanes on a stream, by group.
func (c *Checker) lanes(g *graph, q Queue) []Queue {
	if g.lanes == nil {
		g.lanes = map[Queue][]Queue{}
	}
	for len(g.lanes[q]) < len(g.groups) {
		var lane Queue
		if spare := c.spare[q]; len(spare) > 0 {
			lane, c.spare[q] = spare[len(spare)-1], spare[:len(spare)-1]
		} else {
			c.queues = append(c.queues, queue{device: noDevice, of: q})
			lane = Queue(len(c.queues) - 1)
		}
		g.lanes[q] = append(g.lanes[q], lane)
	}
	return g.lanes[q]
}

// enterLanes starts a replay of a graph with external events on the stream. It returns each group's
// queue.
func (c *Checker) enterLanes(g *graph, q Queue) []Queue {
	lanes := c.lanes(g, q)
	for i, lane := range lanes {
		own := slices.Clone(*c.issue(q))
		for _, w := range g.groups[i].waits {
			own.join(g.waits[w].clock)
		}
		own.set(lane, c.world.clock(lane).at(lane)+1)
		*c.world.clock(lane) = own
	}
	return lanes
}

// leaveLanes ends a replay: it records the events, and orders the stream after the whole graph.
func (c *Checker) leaveLanes(g *graph, q Queue, lanes []Queue) {
	if len(g.records)+len(g.waits) == 0 {
		return
	}
	base := slices.Clone(*c.issue(q))
	recorded := make([]clock, len(g.records))
	for i, r := range g.records {
		recorded[i] = slices.Clone(base)
		for _, w := range r.waits {
			recorded[i].join(g.waits[w].clock)
		}
		for _, l := range r.lanes {
			recorded[i].join(*c.world.clock(lanes[l]))
		}
	}
	own := c.issue(q)
	for _, w := range g.waits {
		own.join(w.clock)
		w.awaited = true
	}
	for _, lane := range lanes {
		at := *c.world.clock(lane)
		c.issue(q).join(at)
	}
	for i, r := range g.records {
		r.event.clock, r.event.recorded, r.event.place, r.event.awaited = recorded[i], true, r.at, false
	}
}

// freeLanes keeps a closed graph's lanes for other graphs on the same streams. Replays on one
// stream run in order, as the work of a lane must.
func (c *Checker) freeLanes(g *graph) {
	for q, lanes := range g.lanes {
		c.spare[q] = append(c.spare[q], lanes...)
	}
}
