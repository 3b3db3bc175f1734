package archive

import "slices"

// Checkpoint is a position in a gzip file where inflating can start, without the bytes before it.
type Checkpoint struct {
	Bit    int64 // start of a deflate block in the file, in bits
	Output int64 // inflated bytes before the checkpoint
	// Window has the earlier output that later bytes refer to, packed by packWindow. It is empty at
	// the beginning of a gzip member.
	Window []byte
}

// Mark is a Checkpoint whose window is stored elsewhere, for example in an index file.
type Mark struct {
	Bit, Output int64
	At          int64 // position of the window in its file
	Size        int32 // of the window, in bytes
}

// MaxWindowBytes is an upper bound of the size of a packed window.
const MaxWindowBytes = 4 * windowBytes

// minSpacing is the minimum distance between two checkpoints, as a multiple of the size of the
// second checkpoint's window. The distance is in inflated bytes. It limits all windows together to
// 1/48 of the inflated bytes.
const minSpacing = 48

// checkpointer keeps the checkpoints of a stream that are best for reading members: the last one
// before each member.
type checkpointer struct {
	keep    func(Checkpoint)
	reached func() int64 // offset that the reading has reached: later members do not start before
	last    int64        // Output of the last kept checkpoint; -1: none
	pending []Checkpoint // in order; the first may already be kept
	wanted  []int64      // offsets of members that need a checkpoint
	done    int          // members in wanted for which decide has finished
}

func newCheckpointer(keep func(Checkpoint), reached func() int64) *checkpointer {
	return &checkpointer{keep: keep, reached: reached, last: -1}
}

// note adds the next checkpoint of the stream.
func (k *checkpointer) note(c Checkpoint) {
	k.pending = append(k.pending, c)
	if k.last < 0 {
		k.last = c.Output
		k.keep(c)
	}
	k.decide(false)
	if len(k.wanted) == 0 { // every member so far has its checkpoint
		k.forget(k.reached())
	}
}

// member records that a member's content starts at offset. Later members start after it.
func (k *checkpointer) member(offset int64) {
	k.wanted = append(k.wanted, offset)
	k.decide(false)
	if k.done == len(k.wanted) {
		k.forget(offset)
	}
}

// forget drops the checkpoints that no member at or after offset needs.
func (k *checkpointer) forget(offset int64) {
	n := 0
	for n+1 < len(k.pending) && k.pending[n+1].Output <= offset {
		n++
	}
	k.pending = slices.Delete(k.pending, 0, n)
}

// decide keeps the best checkpoint of each member, as soon as no better one can follow. At the end
// of the stream it decides for all members.
func (k *checkpointer) decide(end bool) {
	for k.done < len(k.wanted) {
		offset := k.wanted[k.done]
		if !end && (len(k.pending) == 0 || k.pending[len(k.pending)-1].Output <= offset) {
			return // a better checkpoint may come
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

// finish decides for all remaining members, because no more checkpoints come.
func (k *checkpointer) finish() { k.decide(true) }
