package epoch

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/torchstream/torchstream/imageloader/internal/archive"
	"github.com/torchstream/torchstream/imageloader/internal/devplan"
	"github.com/torchstream/torchstream/imageloader/internal/sample"
	"github.com/torchstream/torchstream/internal/decodeplan"
)

// assembly makes batches, in sequence order, from samples that are decoded in any order. The
// samples of an epoch have positions 0, 1, 2, ... in its sequence. The contents of a batch depend
// on the sequence and on which samples are bad, never on timing:
//
//   - Fail: batch b contains positions b*size to (b+1)*size-1. The first bad sample ends the epoch.
//   - Substitute: the same positions; a bad sample's row is a copy of another row of the batch.
//   - Skip: the good samples, in order, size at a time.
//
// A sample is decoded straight into a row of a lent slot, usually the right one. Under Skip the row
// of a bad sample is reused for the next sample, even if that sample belongs to another batch. When
// a batch is complete, rows in the wrong places are exchanged. A bad sample thus costs a few copies
// of rows, about one for each sample in progress at that moment. An epoch without bad samples costs
// none, and a ring of one slot is enough.
type assembly struct {
	size       int // samples in a batch
	imageBytes int // size of a row
	labels     Labels
	policy     sample.BadSamplePolicy
	// dropLast reports whether a short last batch is dropped. Nothing is substituted in that batch,
	// and all its samples may be bad.
	dropLast bool

	// wanted is the number of samples to deliver; 0 means all. Under Skip a later sample replaces a
	// bad one.
	wanted int

	mu       sync.Mutex
	progress sync.Cond // next waits for: the sample at awaited, a sample that is not good, a row of closing, or the end
	space    sync.Cond // place waits for: a hole, a slot, or the decision whether more samples are wanted
	ask      chan struct{}
	asked    bool // a slot has been requested
	stopped  bool // no more samples are placed

	flights []flight // samples from position base on
	base    int
	members []int    // positions of the next batch's samples found so far
	kept    []flight // of the members before base
	slots   []*slot  // lent slots that are not delivered yet, in order
	lent    int
	holes   []hole // rows of bad samples, to be reused; Skip only
	closing *slot

	pending int  // placed samples that are not resolved
	lost    int  // bad samples; Skip only
	ended   bool // there are no positions after the flights
	failure error

	awaited int // the position that next waits for; it may not be placed yet

	// Only next uses these.
	cursor  int // the next position for judge
	scratch []byte

	waited time.Duration // time that place waited for slots
}

// flight is a sample between place and delivery.
type flight struct {
	sample sample.Sample
	slot   *slot
	row    int
	state  Outcome
	err    error // the tolerated damage, for a good sample
}

// Outcome is the result of decoding a sample.
type Outcome uint8

// The outcomes.
const (
	Pending Outcome = iota
	Good
	Bad   // the error is a *sample.Error
	Fatal // the archive cannot be read, or no image can be decoded
)

// slot is the lent memory for one batch.
type slot struct {
	seq    int
	images []byte
	labels []byte // or masks
	owner  []int  // the position of each row's sample, or noOwner
	fresh  int    // number of rows that have been assigned at least once

	staging *devplan.Staging // nil without plans
}

const noOwner = -1 // the owner of a row without a sample

// hole is a row whose sample was bad.
type hole struct {
	slot *slot
	row  int
}

// ready is a complete batch.
type ready struct {
	slot    *slot
	samples []sample.Sample
	bad     []*sample.Error // bad samples since the last call of next, in order
	warned  []*sample.Error // damage of good samples since the last call of next, in order
	judged  int             // number of positions up to the batch's end
	partial bool            // only bad samples; the batch is not complete yet
}

// maxBad is the maximum number of bad samples that are held back for a complete batch. Under Skip
// there may be any number of them.
const maxBad = 1024

func newAssembly(c *Config) *assembly {
	a := &assembly{size: c.Batch.Size(), imageBytes: c.Batch.imageBytes(), labels: c.Labels,
		policy: c.Policy.BadSamples, dropLast: c.Batch.Share.DropLast, ask: make(chan struct{}, 1)}
	a.progress.L = &a.mu
	a.space.L = &a.mu
	return a
}

// image returns the memory of a row.
func (s *slot) image(row, bytes int) []byte {
	return s.images[row*bytes : (row+1)*bytes : (row+1)*bytes]
}

// label returns the memory of a row's label of the given size.
func (s *slot) label(row, bytes int) []byte {
	return s.labels[row*bytes : (row+1)*bytes : (row+1)*bytes]
}

// workerLabelBytes is the size of a label that the sample's worker writes. It is 0 if labels are
// written when the batch is complete.
func (a *assembly) workerLabelBytes() int {
	if a.labels.byWorkers() {
		return a.labels.Bytes()
	}
	return 0
}

// add adds a slot that was requested.
func (a *assembly) add(lent decodeplan.Slot) error {
	images, labels, what := a.size*a.imageBytes, a.size*a.labels.Bytes(), "labels"
	if a.labels.byWorkers() {
		what = "masks or targets"
	}
	if len(lent.Images) < images || len(lent.Labels) < labels {
		return fmt.Errorf("imageloader: the lent slot has %d and %d bytes, a batch needs %d for images and %d for %s",
			len(lent.Images), len(lent.Labels), images, labels, what)
	}
	staging, err := devplan.NewStaging(lent.Plans, a.size)
	if err != nil {
		return err
	}
	s := &slot{images: lent.Images[:images], labels: lent.Labels[:labels], owner: make([]int, a.size), staging: staging}
	for i := range s.owner {
		s.owner[i] = noOwner
	}
	a.mu.Lock()
	s.seq = a.lent
	a.lent++
	a.slots = append(a.slots, s)
	a.asked = false
	a.space.Broadcast()
	a.mu.Unlock()
	return nil
}

// place assigns a row to the next sample of the sequence. It waits until a row is free. ok is false
// after stop, and at the end of the sequence, when no more samples are wanted. If wait is false,
// place returns ok = false instead of waiting.
func (a *assembly) place(s sample.Sample, wait bool) (position int, at *slot, row int, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var since time.Time
	for a.wanted > 0 && a.base+len(a.flights)-a.lost >= a.wanted && !a.stopped {
		if a.pending == 0 {
			a.ended = true
			a.progress.Signal()
			return 0, nil, 0, false
		}
		if !wait {
			return 0, nil, 0, false
		}
		a.space.Wait()
	}
	for {
		if a.stopped {
			return 0, nil, 0, false
		}
		if len(a.flights) >= len(a.slots)*a.size+2*maxBad { // one for each row, and the bad ones
			if !wait {
				return 0, nil, 0, false
			}
			a.space.Wait()
			continue
		}
		if at, row = a.freeRow(); at != nil {
			break
		}
		if !a.asked {
			a.asked = true
			a.ask <- struct{}{} // never blocks: there is at most one request
		}
		if !wait {
			return 0, nil, 0, false
		}
		if since.IsZero() {
			since = time.Now()
		}
		a.space.Wait()
	}
	if !since.IsZero() {
		a.waited += time.Since(since)
	}
	a.pending++
	position = a.base + len(a.flights)
	at.owner[row] = position
	a.flights = append(a.flights, flight{sample: s, slot: at, row: row})
	return position, at, row, true
}

// freeRow returns a row for the next sample, or nil if no row is free.
func (a *assembly) freeRow() (*slot, int) {
	if len(a.holes) > 0 { // choose the hole that is delivered first
		first := 0
		for i, h := range a.holes {
			if f := a.holes[first]; h.slot.seq < f.slot.seq || h.slot == f.slot && h.row < f.row {
				first = i
			}
		}
		h := a.holes[first]
		a.holes[first] = a.holes[len(a.holes)-1]
		a.holes = a.holes[:len(a.holes)-1]
		return h.slot, h.row
	}
	if n := len(a.slots); n > 0 && a.slots[n-1].fresh < a.size {
		s := a.slots[n-1]
		s.fresh++
		return s, s.fresh - 1
	}
	return nil, 0
}

// resolve records the Outcome of the sample at a position.
func (a *assembly) resolve(position int, state Outcome, err error) {
	a.mu.Lock()
	a.note(position, state, err)
	a.mu.Unlock()
}

// resolveGood records that the samples at some positions are good.
func (a *assembly) resolveGood(positions []int) {
	a.mu.Lock()
	for _, position := range positions {
		a.note(position, Good, nil)
	}
	a.mu.Unlock()
}

// note is resolve for a caller that holds mu.
func (a *assembly) note(position int, state Outcome, err error) {
	f := &a.flights[position-a.base]
	f.state, f.err = state, err
	a.pending--
	if a.wanted > 0 {
		if state == Bad && a.policy == sample.Skip {
			a.lost++
		}
		a.space.Signal()
	}
	if position == a.awaited || state != Good || f.slot == a.closing {
		a.progress.Signal()
	}
	if state == Bad && a.policy == sample.Skip {
		f.slot.owner[f.row] = noOwner
		if f.slot != a.closing {
			a.holes = append(a.holes, hole{f.slot, f.row})
			a.space.Signal()
		}
	}
}

// end ends the sequence after the placed samples. If that is too early, failure is the reason.
func (a *assembly) end(failure error) {
	a.mu.Lock()
	a.ended, a.failure = true, failure
	a.progress.Signal()
	a.mu.Unlock()
}

// stop wakes all waiting goroutines.
func (a *assembly) stop() {
	a.mu.Lock()
	a.stopped = true
	a.progress.Signal()
	a.space.Broadcast()
	a.mu.Unlock()
}

// flight returns the flight at a position that is not delivered yet.
func (a *assembly) flight(position int) *flight {
	if position >= a.base {
		return &a.flights[position-a.base]
	}
	i, _ := slices.BinarySearch(a.members, position)
	return &a.kept[i]
}

// forget drops the flights before the cursor, except the members' flights.
func (a *assembly) forget() {
	for _, p := range a.members[len(a.kept):] {
		a.kept = append(a.kept, a.flights[p-a.base])
	}
	a.flights = append(a.flights[:0], a.flights[a.cursor-a.base:]...)
	a.base = a.cursor
	a.space.Signal()
}

// next waits for the next batch, or for maxBad bad samples; r then contains only these. At the end
// of the sequence samples is shorter than a batch or empty, and err may be the reason for the end.
// The caller must not call next again. The caller owns the returned slot's memory. After stop, next
// returns archive.ErrStopped.
func (a *assembly) next() (r ready, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ok, err := a.judge(&r)
	if r.partial {
		a.forget()
		return r, nil
	}
	if !ok || len(a.members) == 0 {
		return r, err
	}
	s := a.slots[0]
	if !a.settle(s) {
		return r, archive.ErrStopped
	}
	r.slot, r.judged = s, a.cursor
	r.samples = make([]sample.Sample, len(a.members))
	for row, p := range a.members {
		r.samples[row] = a.flight(p).sample
	}
	if a.policy == sample.Substitute && (len(a.members) == a.size || !a.dropLast) {
		if e := a.substitute(s, r.samples); e != nil {
			r.samples = nil
			return r, e
		}
	}
	for row := 0; a.labels.Kind == Index && row < len(r.samples); row++ {
		putLabel(s.labels[8*row:], r.samples[row].Label)
	}
	a.slots = append(a.slots[:0], a.slots[1:]...)
	a.closing = nil
	a.members, a.kept = a.members[:0], a.kept[:0]
	a.forget()
	return r, err
}

// judge waits for the samples of the next batch, in order, and adds the batch's samples to members.
// If the sequence ends before the batch is full, err is the reason. ok is false after stop.
func (a *assembly) judge(r *ready) (ok bool, err error) {
	for len(a.members) < a.size {
		if a.stopped {
			return false, archive.ErrStopped
		}
		if a.cursor == a.base+len(a.flights) {
			if a.ended {
				return true, a.failure
			}
			a.await()
			continue
		}
		switch f := &a.flights[a.cursor-a.base]; f.state {
		case Pending:
			a.await()
			continue
		case Bad:
			e := f.err.(*sample.Error)
			r.bad = append(r.bad, e)
			if a.policy == sample.Fail {
				return true, sample.Fatal{Bad: e}
			}
			if a.policy == sample.Substitute {
				a.members = append(a.members, a.cursor)
			} else if len(r.bad) == maxBad {
				r.partial = true
				a.cursor++
				return true, nil
			}
		case Fatal:
			return true, f.err
		case Good:
			if e, ok := f.err.(*sample.Error); ok {
				r.warned = append(r.warned, e)
			}
			a.members = append(a.members, a.cursor)
		}
		a.cursor++
	}
	return true, nil
}

// await waits for the samples of the next batch that are pending or not yet placed. Waking up for
// each sample would cost more than the rest of the assembly. Therefore it waits for the last of
// them, for a sample that is not good, or for the end.
func (a *assembly) await() {
	last, end := a.cursor+a.size-len(a.members)-1, a.base+len(a.flights)
	if a.ended || last < end {
		for last = min(last, end-1); a.flights[last-a.base].state != Pending; {
			last--
		}
	}
	a.awaited = last
	a.progress.Wait()
}

// settle moves the members of the next batch to their rows of s, the oldest slot, and waits until
// no worker writes to s. It returns false after stop.
func (a *assembly) settle(s *slot) bool {
	a.closing = s
	if a.policy == sample.Skip {
		a.holes = slices.DeleteFunc(a.holes, func(h hole) bool { return h.slot == s })
	}
	if !a.quiet(s) {
		return false
	}
	if a.policy == sample.Skip {
		a.arrange(s)
	}
	return true
}

// quiet waits until no worker writes to a slot. Samples of later batches may have rows in it.
func (a *assembly) quiet(s *slot) bool {
	for row := 0; row < a.size; {
		if p := s.owner[row]; p != noOwner && a.flight(p).state == Pending {
			if a.stopped {
				return false
			}
			a.progress.Wait()
			continue
		}
		row++
	}
	return true
}

// arrange moves every member to its row of s. If another batch's sample occupies the row, the two
// are exchanged.
func (a *assembly) arrange(s *slot) {
	label := a.workerLabelBytes()
	for row, p := range a.members {
		f := a.flight(p)
		if f.slot == s && f.row == row {
			continue
		}
		from, fromRow := f.slot, f.row
		other := s.owner[row]
		a.exchange(s.image(row, a.imageBytes), from.image(fromRow, a.imageBytes), other != noOwner)
		a.exchange(s.label(row, label), from.label(fromRow, label), other != noOwner)
		devplan.Exchange(s.staging, row, from.staging, fromRow, other != noOwner)
		s.owner[row], f.slot, f.row = p, s, row
		from.owner[fromRow] = other
		if other != noOwner {
			o := a.flight(other)
			o.slot, o.row = from, fromRow
		} else if from != s {
			a.holes = append(a.holes, hole{from, fromRow})
			a.space.Signal()
		}
	}
}

// exchange copies from into to. If both is set it swaps the two.
func (a *assembly) exchange(to, from []byte, both bool) {
	if both {
		a.scratch = append(a.scratch[:0], to...)
	}
	copy(to, from)
	if both {
		copy(from, a.scratch)
	}
}

// substitute fills the rows of bad samples with copies of good ones.
func (a *assembly) substitute(s *slot, samples []sample.Sample) error {
	label := a.workerLabelBytes()
	isBad := func(row int) bool { return a.flight(a.members[row]).state == Bad }
	first := 0
	for first < len(samples) && isBad(first) {
		first++
	}
	if first == len(samples) {
		return fmt.Errorf("imageloader: all %d samples of a batch are bad, so none can be substituted; the last one: %w",
			len(samples), a.flight(a.members[first-1]).err)
	}
	from := first
	for row := range samples {
		if !isBad(row) {
			from = row
			continue
		}
		copy(s.image(row, a.imageBytes), s.image(from, a.imageBytes))
		copy(s.label(row, label), s.label(from, label))
		if s.staging != nil {
			s.staging.Take(row, s.staging, from)
			s.staging.Rows[row].Redo.Substitute = true
		}
		samples[row] = samples[from]
	}
	return nil
}

// putLabel writes label as an int64.
func putLabel(p []byte, label int) {
	v := uint64(label)
	_ = p[7]
	for i := range 8 { // little endian, the byte order of x86-64
		p[i] = byte(v >> (8 * i))
	}
}
