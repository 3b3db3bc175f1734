package racecheck

// Queue is the number of a stream, or Host. The work of one queue runs in the order in which it was
// queued.
type Queue int32

// Host is the queue of the program itself. All goroutines count as one queue: the Go race detector
// checks the order between them.
const Host Queue = 0

// clock is a vector clock: for each queue, the time up to which its work is known to be complete.
// Queues beyond the end have time 0.
type clock []uint64

func (c clock) at(q Queue) uint64 {
	if int(q) < len(c) {
		return c[q]
	}
	return 0
}

func (c *clock) set(q Queue, time uint64) {
	if n := int(q) + 1 - len(*c); n > 0 {
		*c = append(*c, make(clock, n)...)
	}
	(*c)[q] = time
}

// join merges o into c.
func (c *clock) join(o clock) {
	if n := len(o) - len(*c); n > 0 {
		*c = append(*c, make(clock, n)...)
	}
	for i, t := range o {
		if t > (*c)[i] {
			(*c)[i] = t
		}
	}
}

// copyTo makes *to a copy of c, in the memory of *to if it has room.
func (c clock) copyTo(to *clock) { *to = append((*to)[:0], c...) }
