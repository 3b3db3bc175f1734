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
// A sample is decoded straight into a row of a lent slot, usually into its final row. Under Skip,
// the next sample reuses the row of a bad sample, even if the next sample belongs to another batch.
// When a batch is complete, rows in the wrong places are exchanged. A bad sample therefore costs a
// few copies of rows, about one for each sample that is being decoded at that moment. An epoch
// without bad samples needs no copies, and a ring of one slot is enough.
type assembly struct {
	config *Config
	quota  quota

	mu       sync.Mutex
	progress sync.Cond // next waits for the sample at awaited, for a sample that is not good, for a row of closing, or for the end
	space    sync.Cond // place waits for a hole, for a slot, or for the decision whether more samples are wanted
	stopped  bool      // no more samples are placed

	sequence sequence
	rows     rows
	awaited  int // the position that next waits for; it may not be placed yet

	scratch []byte        // only next uses it
	waited  time.Duration // time that place waited for slots
}

// quota bounds the samples of an epoch. Under Skip a later sample replaces a bad one.
type quota struct {
	wanted int // number of samples to deliver; 0 means all
	lost   int // number of bad samples; only under Skip
}

// bounded reports whether the number of samples is bounded.
func (q *quota) bounded() bool { return q.wanted > 0 }

// reached reports whether the placed samples are enough, provided that no more of them turn out to
// be bad.
func (q *quota) reached(placed int) bool { return q.bounded() && placed-q.lost >= q.wanted }

// sequence holds the samples from place to delivery. Positions before base have been delivered,
// except those of members.
type sequence struct {
	flights []flight // samples from position base on
	base    int
	cursor  int      // the next position that judge looks at
	members []int    // positions of the next batch's samples found so far
	kept    []flight // flights of the members before base
	pending int      // placed samples whose Outcome is not known yet

	ended   bool // the last flight is the end of the sequence
	failure error
}

// end is the position of the next sample to place.
func (q *sequence) end() int { return q.base + len(q.flights) }

// add places a sample in a row, and returns its position.
func (q *sequence) add(f flight) int {
	q.pending++
	q.flights = append(q.flights, f)
	return q.end() - 1
}

// resolve records the Outcome of the sample at a position.
func (q *sequence) resolve(position int, state Outcome, err error) *flight {
	f := &q.flights[position-q.base]
	f.state, f.err = state, err
	q.pending--
	return f
}

// flight returns the flight at a position that is not delivered yet.
func (q *sequence) flight(position int) *flight {
	if position >= q.base {
		return &q.flights[position-q.base]
	}
	i, _ := slices.BinarySearch(q.members, position)
	return &q.kept[i]
}

// forget drops the flights before the cursor, except the members' flights.
func (q *sequence) forget() {
	for _, p := range q.members[len(q.kept):] {
		q.kept = append(q.kept, q.flights[p-q.base])
	}
	q.flights = append(q.flights[:0], q.flights[q.cursor-q.base:]...)
	q.base = q.cursor
}

// rows are the rows of the lent slots. Each slot gives its rows to samples once, in order. Under
// Skip, the rows of bad samples become holes, which other samples fill.
type rows struct {
	slots   []*slot // lent slots that are not delivered yet, in order
	lent    int
	ask     chan struct{}
	asked   bool   // a slot has been requested
	holes   []hole // rows of bad samples, to be filled by other samples; only under Skip
	closing *slot  // the oldest slot, while next waits for its rows
}

// request asks for another slot, unless a request is pending.
func (r *rows) request() {
	if !r.asked {
		r.asked = true
		r.ask <- struct{}{} // never blocks: there is at most one request
	}
}

// add adds a slot that was requested.
func (r *rows) add(s *slot) {
	s.seq = r.lent
	r.lent++
	r.slots = append(r.slots, s)
	r.asked = false
}

// free returns a row for the next sample, or nil if no row is free.
func (r *rows) free() (*slot, int) {
	if len(r.holes) > 0 { // choose the hole that is delivered first
		first := 0
		for i, h := range r.holes {
			if f := r.holes[first]; h.slot.seq < f.slot.seq || h.slot == f.slot && h.row < f.row {
				first = i
			}
		}
		h := r.holes[first]
		r.holes[first] = r.holes[len(r.holes)-1]
		r.holes = r.holes[:len(r.holes)-1]
		return h.slot, h.row
	}
	if n := len(r.slots); n > 0 && r.slots[n-1].fresh < len(r.slots[n-1].owner) {
		s := r.slots[n-1]
		s.fresh++
		return s, s.fresh - 1
	}
	return nil, 0
}

// close makes s, the oldest slot, the closing one. Its holes are no longer filled.
func (r *rows) close(s *slot) {
	r.closing = s
	r.holes = slices.DeleteFunc(r.holes, func(h hole) bool { return h.slot == s })
}

// deliver removes the closing slot.
func (r *rows) deliver() {
	r.slots = append(r.slots[:0], r.slots[1:]...)
	r.closing = nil
}

// flight is a sample on its way from place to delivery.
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
	owner  []int  // position of each row's sample, or noOwner
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
	partial bool            // the batch is not complete yet: bad is the only result
}

// maxBad is the maximum number of bad samples that next collects before it returns them without a
// batch. Under Skip, any number of bad samples may precede a batch.
const maxBad = 1024

func newAssembly(c *Config) *assembly {
	a := &assembly{config: c, rows: rows{ask: make(chan struct{}, 1)}}
	a.progress.L = &a.mu
	a.space.L = &a.mu
	return a
}

func (a *assembly) size() int                      { return a.config.Batch.Size() }
func (a *assembly) imageBytes() int                { return a.config.Batch.imageBytes() }
func (a *assembly) policy() sample.BadSamplePolicy { return a.config.Policy.BadSamples }

// image returns the memory of a row.
func (s *slot) image(row, bytes int) []byte {
	return s.images[row*bytes : (row+1)*bytes : (row+1)*bytes]
}

// label returns the memory of a row's label of the given size.
func (s *slot) label(row, bytes int) []byte {
	return s.labels[row*bytes : (row+1)*bytes : (row+1)*bytes]
}

// workerLabelBytes is the size of a label that the sample's worker writes. It is 0 if labels are
// written only when the batch is complete.
func (a *assembly) workerLabelBytes() int {
	if a.config.Labels.byWorkers() {
		return a.config.Labels.Bytes()
	}
	return 0
}

// add adds the memory that the consumer has lent for a requested slot.
func (a *assembly) add(lent decodeplan.Slot) error {
	size := a.size()
	images, labels, what := size*a.imageBytes(), size*a.config.Labels.Bytes(), "labels"
	if a.config.Labels.byWorkers() {
		what = "masks or targets"
	}
	if len(lent.Images) < images || len(lent.Labels) < labels {
		return fmt.Errorf("imageloader: the lent slot has %d and %d bytes, a batch needs %d for images and %d for %s",
			len(lent.Images), len(lent.Labels), images, labels, what)
	}
	staging, err := devplan.NewStaging(lent.Plans, size)
	if err != nil {
		return err
	}
	s := &slot{images: lent.Images[:images], labels: lent.Labels[:labels], owner: make([]int, size), staging: staging}
	for i := range s.owner {
		s.owner[i] = noOwner
	}
	a.mu.Lock()
	a.rows.add(s)
	a.space.Broadcast()
	a.mu.Unlock()
	return nil
}

// place assigns a row to the next sample of the sequence, and waits until a row is free. If wait is
// false, it returns ok = false instead of waiting. ok is also false after stop, and when no more
// samples are wanted.
func (a *assembly) place(s sample.Sample, wait bool) (position int, at *slot, row int, ok bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	var since time.Time
	for a.quota.reached(a.sequence.end()) && !a.stopped {
		if a.sequence.pending == 0 {
			a.sequence.ended = true
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
		if len(a.sequence.flights) >= len(a.rows.slots)*a.size()+2*maxBad { // one flight for each row, and the bad samples
			if !wait {
				return 0, nil, 0, false
			}
			a.space.Wait()
			continue
		}
		if at, row = a.rows.free(); at != nil {
			break
		}
		a.rows.request()
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
	position = a.sequence.add(flight{sample: s, slot: at, row: row})
	at.owner[row] = position
	return position, at, row, true
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
	f := a.sequence.resolve(position, state, err)
	skip := state == Bad && a.policy() == sample.Skip
	if a.quota.bounded() {
		if skip {
			a.quota.lost++
		}
		a.space.Signal()
	}
	if position == a.awaited || state != Good || f.slot == a.rows.closing {
		a.progress.Signal()
	}
	if skip {
		f.slot.owner[f.row] = noOwner
		if f.slot != a.rows.closing {
			a.rows.holes = append(a.rows.holes, hole{f.slot, f.row})
			a.space.Signal()
		}
	}
}

// end marks the end of the sequence after the placed samples. If that is too early, failure is the
// reason.
func (a *assembly) end(failure error) {
	a.mu.Lock()
	a.sequence.ended, a.sequence.failure = true, failure
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

// forget drops the flights of delivered and bad samples.
func (a *assembly) forget() {
	a.sequence.forget()
	a.space.Signal()
}

// next waits for the next batch. After maxBad bad samples without a batch, it returns only these
// bad samples (r.partial). At the end of the sequence, r.samples is shorter than a batch or empty,
// and err may be the reason for the end. The caller must then not call next again. The caller owns
// the memory of the returned slot. After stop, next returns archive.ErrStopped.
func (a *assembly) next() (r ready, err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ok, err := a.judge(&r)
	if r.partial {
		a.forget()
		return r, nil
	}
	members := a.sequence.members
	if !ok || len(members) == 0 {
		return r, err
	}
	s := a.rows.slots[0]
	if !a.settle(s) {
		return r, archive.ErrStopped
	}
	r.slot, r.judged = s, a.sequence.cursor
	r.samples = make([]sample.Sample, len(members))
	for row, p := range members {
		r.samples[row] = a.sequence.flight(p).sample
	}
	if a.policy() == sample.Substitute && (len(members) == a.size() || !a.config.Batch.Share.DropLast) {
		if e := a.substitute(s, r.samples); e != nil {
			r.samples = nil
			return r, e
		}
	}
	for row := 0; a.config.Labels.Kind == Index && row < len(r.samples); row++ {
		putLabel(s.labels[8*row:], r.samples[row].Label)
	}
	a.rows.deliver()
	a.sequence.members, a.sequence.kept = members[:0], a.sequence.kept[:0]
	a.forget()
	return r, err
}

// judge waits for the samples of the next batch, in order, and adds them to members. If the
// sequence ends before the batch is full, err is the reason. ok is false after stop.
func (a *assembly) judge(r *ready) (ok bool, err error) {
	q, size, policy := &a.sequence, a.size(), a.policy()
	for len(q.members) < size {
		if a.stopped {
			return false, archive.ErrStopped
		}
		if q.cursor == q.end() {
			if q.ended {
				return true, q.failure
			}
			a.await()
			continue
		}
		switch f := &q.flights[q.cursor-q.base]; f.state {
		case Pending:
			a.await()
			continue
		case Bad:
			e := f.err.(*sample.Error)
			r.bad = append(r.bad, e)
			if policy == sample.Fail {
				return true, sample.Fatal{Bad: e}
			}
			if policy == sample.Substitute {
				q.members = append(q.members, q.cursor)
			} else if len(r.bad) == maxBad {
				r.partial = true
				q.cursor++
				return true, nil
			}
		case Fatal:
			return true, f.err
		case Good:
			if e, ok := f.err.(*sample.Error); ok {
				r.warned = append(r.warned, e)
			}
			q.members = append(q.members, q.cursor)
		}
		q.cursor++
	}
	return true, nil
}

// await waits while samples of the next batch are pending or not yet placed. Waking up for each
// sample would cost more than the rest of the assembly. So await wakes up only for the last of
// these samples, for a sample that is not good, or for the end.
func (a *assembly) await() {
	q := &a.sequence
	last, end := q.cursor+a.size()-len(q.members)-1, q.end()
	if q.ended || last < end {
		for last = min(last, end-1); q.flights[last-q.base].state != Pending; {
			last--
		}
	}
	a.awaited = last
	a.progress.Wait()
}

// settle moves the members of the next batch to their rows of s, the oldest slot. Before that, it
// waits until no worker writes to s. It returns false after stop.
func (a *assembly) settle(s *slot) bool {
	a.rows.close(s)
	if !a.quiet(s) {
		return false
	}
	if a.policy() == sample.Skip {
		a.arrange(s)
	}
	return true
}

// quiet waits until no worker writes to a slot. Workers may also be decoding samples of later
// batches into its rows.
func (a *assembly) quiet(s *slot) bool {
	for row := 0; row < len(s.owner); {
		if p := s.owner[row]; p != noOwner && a.sequence.flight(p).state == Pending {
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

// arrange moves every member to its row of s. If the row holds a sample of another batch, the two
// samples change places.
func (a *assembly) arrange(s *slot) {
	image, label := a.imageBytes(), a.workerLabelBytes()
	for row, p := range a.sequence.members {
		f := a.sequence.flight(p)
		if f.slot == s && f.row == row {
			continue
		}
		from, fromRow := f.slot, f.row
		other := s.owner[row]
		a.exchange(s.image(row, image), from.image(fromRow, image), other != noOwner)
		a.exchange(s.label(row, label), from.label(fromRow, label), other != noOwner)
		devplan.Exchange(s.staging, row, from.staging, fromRow, other != noOwner)
		s.owner[row], f.slot, f.row = p, s, row
		from.owner[fromRow] = other
		if other != noOwner {
			o := a.sequence.flight(other)
			o.slot, o.row = from, fromRow
		} else if from != s {
			a.rows.holes = append(a.rows.holes, hole{from, fromRow})
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
	image, label := a.imageBytes(), a.workerLabelBytes()
	at := func(row int) *flight { return a.sequence.flight(a.sequence.members[row]) }
	isBad := func(row int) bool { return at(row).state == Bad }
	first := 0
	for first < len(samples) && isBad(first) {
		first++
	}
	if first == len(samples) {
		return fmt.Errorf("imageloader: all %d samples of a batch are bad, so none can be substituted; "+
			"the last one: %w",
			len(samples), at(first-1).err)
	}
	from := first
	for row := range samples {
		if !isBad(row) {
			from = row
			continue
		}
		copy(s.image(row, image), s.image(from, image))
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
