package racecheck

import "slices"

// maxWatched is the maximum number of copies whose host memory is watched.
const maxWatched = 256

// watched is host memory that a queued copy reads. The program must not change it before the host
// knows that the copy is done.
type watched struct {
	block  *block
	region Region
	shape  Shape
	queue  Queue
	time   uint64
	at     *Place
	sum    uint64
}

// watch records the content of pinned memory when a copy from it is queued. A device may write the
// memory: such a write ends the earlier watches, and no new watch starts until the host knows that
// the write is complete.
func (c *Checker) watch(b *block, a *Access, time uint64, at *Place) {
	if c.o.Fingerprint == nil || !b.pinned || a.Queue == Host {
		return
	}
	if a.Write {
		c.unwatch(b)
		return
	}
	if !a.Region.dense() || len(c.watched) >= maxWatched {
		return
	}
	known := *c.world.clock(Host)
	for _, old := range b.accesses {
		if old.write && old.queue != Host && old.time > known.at(old.queue) {
			return
		}
	}
	c.watched = append(c.watched,
		watched{b, a.Region, a.Shape, a.Queue, time, at,
			c.o.Fingerprint(a.Region.Begin, a.Region.End()-a.Region.Begin)})
}

// compare ends the watch of copies that the host now knows to be complete. The memory must still
// have the recorded content.
func (c *Checker) compare() {
	known := *c.world.clock(Host)
	c.watched = slices.DeleteFunc(c.watched, func(w watched) bool {
		if w.time > known.at(w.queue) {
			return false
		}
		if c.o.Fingerprint(w.region.Begin, w.region.End()-w.region.Begin) != w.sum {
			c.changed(&w)
		}
		return true
	})
}

// unwatch ends the watch of a block.
func (c *Checker) unwatch(b *block) {
	c.watched = slices.DeleteFunc(c.watched, func(w watched) bool { return w.block == b })
}
