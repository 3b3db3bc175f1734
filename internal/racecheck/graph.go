package racecheck

import "slices"

// capture is the graph being captured. Its work runs only in replays, so it has separate clocks and
// accesses that order the work inside the graph.
type capture struct {
	world   world
	members map[Queue]bool
	touched map[*block]*[]access
	order   []*block // the keys of touched, in the order of their first access
	feet    []foot
	known   map[footKey]int // numbers of feet
	records []node          // of external events
	waits   []*event        // external ones
	signals []Queue         // of waits
}

func (c *capture) inside(q Queue) bool { return c.members[q] }
func (c *capture) enter(q Queue)       { c.members[q] = true }

func (c *capture) accesses(b *block) *[]access {
	list := c.touched[b]
	if list == nil {
		list = new([]access)
		c.touched[b] = list
		c.order = append(c.order, b)
	}
	return list
}

func (c *capture) record(b *block, a access) {
	list := c.accesses(b)
	*list = append(*list, a)
}

// foot is one access of a graph's replays.
type foot struct {
	block *block
	mem   Memory
	write bool
	place *Place
	queue Queue  // in the capture
	time  uint64 // of the latest such access in the capture
	waits []int  // waits that precede the first one
	group int
}

type footKey struct {
	block  *block
	region Region
	write  bool
	queue  Queue
}

// step records an access of the capture at its queue's time. The same access later in the queue
// follows more waits and precedes fewer records. So the first time decides the waits, and the last
// time decides the records.
func (c *capture) step(b *block, a *Access, own clock, at *Place) {
	key := footKey{b, a.Region, a.Write, a.Queue}
	if i, ok := c.known[key]; ok {
		c.feet[i].time, c.feet[i].place = own.at(a.Queue), at
		return
	}
	c.known[key] = len(c.feet)
	c.feet = append(c.feet, foot{
		block: b, mem: a.Memory, write: a.Write, place: at, queue: a.Queue, time: own.at(a.Queue),
		waits: c.waitsBefore(own),
	})
}

// maxFeet is the maximum number of accesses that a graph keeps for one block. Above it, the graph
// keeps one access per group, to the whole block.
const maxFeet = 16

type graph struct {
	feet   []foot
	places map[*Place]*Place // the place of a replay's access, by the place in the capture
	at     *Place            // of the latest replay
	pool   *pool
	users  []Queue // of replays

	// Nodes of external events. All are empty for a graph without such nodes.
	records []node
	waits   []*event
	groups  []group
	lanes   map[Queue][]Queue // by stream
}

// pool is the memory that graphs share. Their replays are ordered.
type pool struct{ clock clock }

// Begin starts the capture of a stream.
func (c *Checker) Begin(origin Queue) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.capture = &capture{members: map[Queue]bool{origin: true}, touched: map[*block]*[]access{},
		known: map[footKey]int{}}
}

// End ends the capture. The caller chooses the graph's number; 0 means that the capture failed.
// share is the graph that shares its memory with the new graph, or 0.
func (c *Checker) End(g, share uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	was := c.capture
	c.capture = nil
	if was == nil || g == 0 {
		return
	}
	made := &graph{pool: &pool{}, records: was.records, waits: was.waits}
	if other := c.graphs[share]; other != nil {
		made.pool = other.pool
	}
	byBlock := map[*block][]foot{}
	for _, f := range was.feet {
		byBlock[f.block] = append(byBlock[f.block], f)
	}
	for _, b := range was.order {
		if b.captured && c.space(b.device).exact[b.begin] != b {
			continue // freed in the capture: unreachable outside the graph
		}
		made.feet = append(made.feet, made.footprint(was, byBlock[b])...)
	}
	c.graphs[g] = made
}

// footprint returns the replays' accesses to a block, derived from the capture's accesses.
func (g *graph) footprint(was *capture, feet []foot) []foot {
	if len(g.records)+len(g.waits) == 0 {
		feet = anyQueue(feet)
	} else {
		for i := range feet {
			feet[i].group = g.group(feet[i].waits, was.recordsAfter(&feet[i]))
		}
	}
	if len(feet) > maxFeet {
		feet = whole(feet)
	}
	return feet
}

// anyQueue merges accesses that differ only in their queues, and keeps the latest of each.
func anyQueue(feet []foot) (some []foot) {
	known := map[footKey]int{}
	for _, f := range feet {
		key := footKey{region: f.mem.Region, write: f.write}
		i, ok := known[key]
		if !ok {
			known[key] = len(some)
			some = append(some, f)
			continue
		}
		some[i] = f
	}
	return some
}

// whole returns one access to the whole block for each group.
func whole(feet []foot) (some []foot) {
	for _, f := range feet {
		f.mem.Region = Bytes(f.block.begin, f.block.end-f.block.begin)
		i := slices.IndexFunc(some, func(s foot) bool { return s.group == f.group })
		switch {
		case i < 0:
			some = append(some, f)
		case f.write:
			some[i].write, some[i].place = true, f.place
		}
	}
	return some
}

// Replay queues the graph's work, after the previous replay of any graph that shares its memory.
func (c *Checker) Replay(g uintptr, q Queue, at *Place) {
	c.mu.Lock()
	gr := c.graphs[g]
	if gr == nil {
		c.mu.Unlock()
		return
	}
	c.issue(q).join(gr.pool.clock)
	lanes := c.enterLanes(gr, q)
	accesses := make([]Access, len(gr.feet))
	for i, f := range gr.feet {
		accesses[i] = Access{Memory: f.mem, Queue: q, Write: f.write}
		if len(lanes) > 0 {
			accesses[i].Queue = lanes[f.group]
		}
	}
	if !slices.Contains(gr.users, q) {
		gr.users = append(gr.users, q)
	}
	c.stats.Operations++
	c.stats.Accesses += int64(len(accesses))
	own := c.issue(q)
	own.set(q, own.at(q)+1)
	for i := range accesses {
		c.check(&accesses[i], gr.place(c, i, at))
	}
	for i := range accesses {
		c.remember(&accesses[i], gr.place(c, i, at))
	}
	c.leaveLanes(gr, q, lanes)
	c.issue(q).copyTo(&gr.pool.clock)
	c.mu.Unlock()
}

// place returns the place of a replay's access: the call of Replay, and the captured operator.
func (g *graph) place(c *Checker, i int, at *Place) *Place {
	if g.at != at {
		g.at, g.places = at, map[*Place]*Place{}
	}
	in := g.feet[i].place
	p := g.places[in]
	if p == nil {
		p = c.replayed(at, in)
		g.places[in] = p
	}
	return p
}

// FreeGraph records that the graph is closed. The library keeps its operands' memory until the last
// replay is complete.
func (c *Checker) FreeGraph(g uintptr) {
	c.mu.Lock()
	defer c.mu.Unlock()
	gr := c.graphs[g]
	if gr == nil {
		return
	}
	delete(c.graphs, g)
	c.freeLanes(gr)
	for _, f := range gr.feet {
		b := f.block
		if c.space(b.device).exact[b.begin] != b {
			continue
		}
		for _, q := range gr.users {
			if !slices.Contains(b.uses, q) {
				b.uses = append(b.uses, q)
			}
		}
	}
}
