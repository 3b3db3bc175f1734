package archive

import "slices"

// Checkpoint is a place where a gzip file can be entered without inflating what comes before.
type Checkpoint struct {
	Bit    int64 // of the file: where a deflate block begins
	Output int64 // inflated bytes before it
	// Window has the output before it that later bytes copy from, packed by packWindow; empty at
	// the beginning of a gzip member.
	Window []byte
}

// Mark is a Checkpoint whose window lies elsewhere, in an index file for example.
type Mark struct {
	Bit, Output int64
	At          int64 // of the window
	Size        int32 // of the window, in bytes
}

// MaxWindowBytes is more than a packed window ever has.
const MaxWindowBytes = 4 * windowBytes

// minSpacing is the minimum distance of two checkpoints, in inflated bytes for each byte of the
// second one's window. So windows take at most 1/48 of the inflated bytes.
const minSpacing = 48

// checkpointer keeps, of the checkpoints of a stream, those that members are best read from: the
// last one before each member.
type checkpointer struct {
	keep    func(Checkpoint)
	reached func() int64 // no member that is still to come begins before it
	last    int64        // Output of the one that was kept last; -1: none is kept
	pending []Checkpoint // in order; the first may be kept already
	wanted  []int64      // offsets of members that wait for a decision
	done    int          // how many of wanted are decided
}

func newCheckpointer(keep func(Checkpoint), reached func() int64) *checkpointer {
	return &checkpointer{keep: keep, reached: reached, last: -1}
}

// note takes the next checkpoint of the stream.
func (k *checkpointer) note(c Checkpoint) {
	k.pending = append(k.pending, c)
	if k.last < 0 {
		k.last = c.Output
		k.keep(c)
	}
	k.decide(false)
	if len(k.wanted) == 0 { // in the middle of a member, however large
		k.forget(k.reached())
	}
}

// member says that a member's content begins at offset. Later members begin behind it.
func (k *checkpointer) member(offset int64) {
	k.wanted = append(k.wanted, offset)
	k.decide(false)
	if k.done == len(k.wanted) {
		k.forget(offset)
	}
}

// forget drops the checkpoints that no member from offset on needs.
func (k *checkpointer) forget(offset int64) {
	n := 0
	for n+1 < len(k.pending) && k.pending[n+1].Output <= offset {
		n++
	}
	k.pending = slices.Delete(k.pending, 0, n)
}

// decide keeps the checkpoints of the members for which no better one can come. At the end none
// can.
func (k *checkpointer) decide(end bool) {
	for k.done < len(k.wanted) {
		offset := k.wanted[k.done]
		if !end && (len(k.pending) == 0 || k.pending[len(k.pending)-1].Output <= offset) {
			return // a better one may come
		}
		k.done++
		k.forget(offset)
		if len(k.pending) == 0 {
			continue
		}
		c := &k.pending[0]
		if c.Output > k.last && c.Output <= offset && c.Output-k.last >= int64(minSpacing*len(c.Window)) {
			k.last = c.Output
			k.keep(*c)
		}
	}
	k.wanted, k.done = k.wanted[:0], 0
}

// finish decides the rest: no more checkpoints come.
func (k *checkpointer) finish() { k.decide(true) }
