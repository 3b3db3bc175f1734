// Package assembly makes batches, in the order of an epoch, from samples that several goroutines
// write to rows of lent memory in any order. It knows neither the samples nor the memory.
package assembly

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"time"
)

// Policy decides what happens to bad samples.
type Policy int

// The policies.
const (
	Fail       Policy = iota // a bad sample ends the epoch
	Skip                     // the bad sample is left out
	Substitute               // another sample of the same batch replaces the bad one
)

func (p Policy) String() string {
	switch p {
	case Fail:
		return "fail"
	case Skip:
		return "skip"
	case Substitute:
		return "substitute"
	}
	return "BadSamplePolicy(" + strconv.Itoa(int(p)) + ")"
}

// Config describes the batches.
type Config struct {
	Size     int // samples in a batch
	DropLast bool
	Policy   Policy
	Name     string // name of the package; error texts start with it
	// Fatal returns the error with which an epoch ends under the policy Fail. bad is the bad
	// sample's error.
	Fatal func(bad error) error
}

// Memory is the lent memory of a batch.
type Memory[M any] interface {
	// Exchange copies row fromRow of from to row. If both is set, it swaps the two rows.
	Exchange(row int, from M, fromRow int, both bool)
	// Substitute copies the row of a good sample to the row of a bad sample.
	Substitute(row, good int)
}

// ErrStopped is returned by Next after Stop.
var ErrStopped = errors.New("the assembly was stopped")

// Assembly makes batches, in sequence order, from samples that are decoded in any order. The
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
type Assembly[S any, M Memory[M]] struct {
	config Config
	quota  quota

	mu       sync.Mutex
	progress sync.Cond // Next waits for the sample at awaited, for a sample that is not good, for a row of closing, or for the end
	space    sync.Cond // place waits for a hole, for a slot, or for the decision whether more samples are wanted
	stopped  bool      // no more samples are placed

	sequence sequence[S, M]
	rows     rows[S, M]
	awaited  int // the position for which Next waits; it may not be placed yet

	waited time.Duration // time that Place has waited for slots
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
// except the positions in members.
type sequence[S, M any] struct {
	flights []flight[S, M] // samples from position base on
	base    int
	cursor  int            // the next position that judge looks at
	members []int          // positions of the next batch's samples found so far
	kept    []flight[S, M] // flights of the members before base
	pending int            // placed samples whose Outcome is not known yet

	ended   bool // the last flight is the end of the sequence
	failure error
	short   bool // failure counts only if more samples are wanted
}

// end is the position of the next sample to place.
func (q *sequence[S, M]) end() int { return q.base + len(q.flights) }

// add places a sample in a row, and returns its position.
func (q *sequence[S, M]) add(f flight[S, M]) int {
	q.pending++
	q.flights = append(q.flights, f)
	return q.end() - 1
}

// resolve records the Outcome of the sample at a position.
func (q *sequence[S, M]) resolve(position int, state Outcome, err error) *flight[S, M] {
	f := &q.flights[position-q.base]
	f.state, f.err = state, err
	q.pending--
	return f
}

// flight returns the flight at a position that is not delivered yet.
func (q *sequence[S, M]) flight(position int) *flight[S, M] {
	if position >= q.base {
		return &q.flights[position-q.base]
	}
	i, _ := slices.BinarySearch(q.members, position)
	return &q.kept[i]
}

// forget drops the flights before the cursor, except the members' flights.
func (q *sequence[S, M]) forget() {
	for _, p := range q.members[len(q.kept):] {
		q.kept = append(q.kept, q.flights[p-q.base])
	}
	q.flights = append(q.flights[:0], q.flights[q.cursor-q.base:]...)
	q.base = q.cursor
}

// rows are the rows of the lent slots. Each slot gives its rows to samples once, in order. Under
// Skip, the rows of bad samples become holes, which other samples fill.
type rows[S, M any] struct {
	slots   []*Slot[M] // lent slots that are not delivered yet, in order
	lent    int
	ask     chan struct{}
	asked   bool      // a slot has been requested
	holes   []hole[M] // rows of bad samples, to be filled by other samples; only under Skip
	closing *Slot[M]  // the oldest slot, while Next waits for its rows
}

// request asks for another slot, unless a request is pending.
func (r *rows[S, M]) request() {
	if !r.asked {
		r.asked = true
		r.ask <- struct{}{} // never blocks: there is at most one request
	}
}

// add adds a slot that was requested.
func (r *rows[S, M]) add(s *Slot[M]) {
	s.seq = r.lent
	r.lent++
	r.slots = append(r.slots, s)
	r.asked = false
}

// free returns a row for the next sample, or nil if no row is free.
func (r *rows[S, M]) free() (*Slot[M], int) {
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
func (r *rows[S, M]) close(s *Slot[M]) {
	r.closing = s
	r.holes = slices.DeleteFunc(r.holes, func(h hole[M]) bool { return h.slot == s })
}

// deliver removes the closing slot.
func (r *rows[S, M]) deliver() {
	r.slots = append(r.slots[:0], r.slots[1:]...)
	r.closing = nil
}

// flight is a sample on its way from place to delivery.
type flight[S, M any] struct {
	sample S
	slot   *Slot[M]
	row    int
	state  Outcome
	err    error // for a good sample: a warning, or nil
}

// Outcome is the result of decoding a sample.
type Outcome uint8

// The outcomes.
const (
	Pending Outcome = iota
	Good
	Bad
	Fatal // no sample can be made
)

// Slot is the lent memory of one batch, and the state of its rows.
type Slot[M any] struct {
	Memory M

	seq   int
	owner []int // the position of each row's sample, or noOwner
	fresh int   // number of rows that have been assigned at least once
}

const noOwner = -1 // the owner of a row without a sample

// hole is a row whose sample was bad.
type hole[M any] struct {
	slot *Slot[M]
	row  int
}

// Ready is a complete batch.
type Ready[S, M any] struct {
	Slot    *Slot[M]
	Samples []S     // one for each row
	Bad     []error // errors of the bad samples since the last call of Next, in order
	Warned  []error // warnings about the good samples since the last call of Next, in order
	Judged  int     // number of positions up to the batch's end
	Partial bool    // the batch is not complete yet: Bad is the only result
}

// maxBad is the maximum number of bad samples that Next collects before it returns them without a
// batch. Under Skip, any number of bad samples may precede a batch.
const maxBad = 1024

// New returns an assembly. If wanted is not 0, the assembly delivers wanted samples: under Skip, a
// sample that is placed later replaces a bad one.
func New[S any, M Memory[M]](c Config, wanted int) *Assembly[S, M] {
	a := &Assembly[S, M]{config: c, quota: quota{wanted: wanted}, rows: rows[S, M]{ask: make(chan struct{}, 1)}}
	a.progress.L = &a.mu
	a.space.L = &a.mu
	return a
}

// Wanted returns the number of samples to deliver. 0 means all.
func (a *Assembly[S, M]) Wanted() int { return a.quota.wanted }

// Asked receives a value when Place needs another slot. The receiver then calls Add.
func (a *Assembly[S, M]) Asked() <-chan struct{} { return a.rows.ask }

// Waited returns the time that Place has waited for slots. Only the goroutine that calls Place may
// call it.
func (a *Assembly[S, M]) Waited() time.Duration { return a.waited }

// Add adds the lent memory of a batch.
func (a *Assembly[S, M]) Add(memory M) {
	s := &Slot[M]{Memory: memory, owner: make([]int, a.config.Size)}
	for i := range s.owner {
		s.owner[i] = noOwner
	}
	a.mu.Lock()
	a.rows.add(s)
	a.space.Broadcast()
	a.mu.Unlock()
}

// Place assigns a row to the next sample of the sequence, and waits until a row is free. If wait is
// false, it returns ok = false instead of waiting. ok is also false after Stop, and when no more
// samples are wanted.
func (a *Assembly[S, M]) Place(s S, wait bool) (position int, at *Slot[M], row int, ok bool) {
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
		if len(a.sequence.flights) >= len(a.rows.slots)*a.config.Size+2*maxBad { // one flight for each row, and the bad samples
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
	position = a.sequence.add(flight[S, M]{sample: s, slot: at, row: row})
	at.owner[row] = position
	return position, at, row, true
}

// Resolve records the Outcome of the sample at a position. For a bad or fatal sample, err is the
// reason. For a good sample, err is nil or a warning.
func (a *Assembly[S, M]) Resolve(position int, state Outcome, err error) {
	a.mu.Lock()
	a.note(position, state, err)
	a.mu.Unlock()
}

// ResolveGood records that the samples at some positions are good.
func (a *Assembly[S, M]) ResolveGood(positions []int) {
	a.mu.Lock()
	for _, position := range positions {
		a.note(position, Good, nil)
	}
	a.mu.Unlock()
}

// note is Resolve for a caller that holds mu.
func (a *Assembly[S, M]) note(position int, state Outcome, err error) {
	f := a.sequence.resolve(position, state, err)
	skip := state == Bad && a.config.Policy == Skip
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
			a.rows.holes = append(a.rows.holes, hole[M]{f.slot, f.row})
			a.space.Signal()
		}
	}
}

// End marks the end of the sequence after the placed samples. If that is too early, failure is the
// reason.
func (a *Assembly[S, M]) End(failure error) { a.end(failure, false) }

// EndShort is like End for a failure to get more samples. If the placed samples turn out to be
// enough, the failure is ignored.
func (a *Assembly[S, M]) EndShort(failure error) { a.end(failure, true) }

func (a *Assembly[S, M]) end(failure error, short bool) {
	a.mu.Lock()
	a.sequence.ended, a.sequence.failure, a.sequence.short = true, failure, short
	a.progress.Signal()
	a.mu.Unlock()
}

// ending returns the reason why the sequence ended too early, or nil. All samples are judged.
func (a *Assembly[S, M]) ending() error {
	if q := &a.sequence; !q.short || !a.quota.reached(q.end()) {
		return q.failure
	}
	return nil
}

// Stop wakes all waiting goroutines.
func (a *Assembly[S, M]) Stop() {
	a.mu.Lock()
	a.stopped = true
	a.progress.Signal()
	a.space.Broadcast()
	a.mu.Unlock()
}

// forget drops the flights of delivered and bad samples.
func (a *Assembly[S, M]) forget() {
	a.sequence.forget()
	a.space.Signal()
}

// Next waits for the next batch. After maxBad bad samples without a batch, it returns only these
// bad samples (r.Partial). At the end of the sequence, r.Samples is shorter than a batch or empty,
// and err may be the reason for the end. The caller must then not call Next again. The caller owns
// the memory of the returned slot. After Stop, Next returns ErrStopped.
func (a *Assembly[S, M]) Next() (r Ready[S, M], err error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	ok, err := a.judge(&r)
	if r.Partial {
		a.forget()
		return r, nil
	}
	members := a.sequence.members
	if !ok || len(members) == 0 {
		return r, err
	}
	s := a.rows.slots[0]
	if !a.settle(s) {
		return r, ErrStopped
	}
	r.Slot, r.Judged = s, a.sequence.cursor
	r.Samples = make([]S, len(members))
	for row, p := range members {
		r.Samples[row] = a.sequence.flight(p).sample
	}
	if a.config.Policy == Substitute && (len(members) == a.config.Size || !a.config.DropLast) {
		if e := a.substitute(s, r.Samples); e != nil {
			r.Samples = nil
			return r, e
		}
	}
	a.rows.deliver()
	a.sequence.members, a.sequence.kept = members[:0], a.sequence.kept[:0]
	a.forget()
	return r, err
}

// judge waits for the samples of the next batch, in order, and adds them to members. If the
// sequence ends before the batch is full, err is the reason. ok is false after Stop.
func (a *Assembly[S, M]) judge(r *Ready[S, M]) (ok bool, err error) {
	q, size, policy := &a.sequence, a.config.Size, a.config.Policy
	for len(q.members) < size {
		if a.stopped {
			return false, ErrStopped
		}
		if q.cursor == q.end() {
			if q.ended {
				return true, a.ending()
			}
			a.await()
			continue
		}
		switch f := &q.flights[q.cursor-q.base]; f.state {
		case Pending:
			a.await()
			continue
		case Bad:
			r.Bad = append(r.Bad, f.err)
			if policy == Fail {
				return true, a.config.Fatal(f.err)
			}
			if policy == Substitute {
				q.members = append(q.members, q.cursor)
			} else if len(r.Bad) == maxBad {
				r.Partial = true
				q.cursor++
				return true, nil
			}
		case Fatal:
			return true, f.err
		case Good:
			if f.err != nil {
				r.Warned = append(r.Warned, f.err)
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
func (a *Assembly[S, M]) await() {
	q := &a.sequence
	last, end := q.cursor+a.config.Size-len(q.members)-1, q.end()
	if q.ended || last < end {
		for last = min(last, end-1); q.flights[last-q.base].state != Pending; {
			last--
		}
	}
	a.awaited = last
	a.progress.Wait()
}

// settle moves the members of the next batch to their rows of s, the oldest slot. Before that, it
// waits until no worker writes to s. It returns false after Stop.
func (a *Assembly[S, M]) settle(s *Slot[M]) bool {
	a.rows.close(s)
	if !a.quiet(s) {
		return false
	}
	if a.config.Policy == Skip {
		a.arrange(s)
	}
	return true
}

// quiet waits until no worker writes to a slot. Workers may also be decoding samples of later
// batches into its rows.
func (a *Assembly[S, M]) quiet(s *Slot[M]) bool {
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
func (a *Assembly[S, M]) arrange(s *Slot[M]) {
	for row, p := range a.sequence.members {
		f := a.sequence.flight(p)
		if f.slot == s && f.row == row {
			continue
		}
		from, fromRow := f.slot, f.row
		other := s.owner[row]
		s.Memory.Exchange(row, from.Memory, fromRow, other != noOwner)
		s.owner[row], f.slot, f.row = p, s, row
		from.owner[fromRow] = other
		if other != noOwner {
			o := a.sequence.flight(other)
			o.slot, o.row = from, fromRow
		} else if from != s {
			a.rows.holes = append(a.rows.holes, hole[M]{from, fromRow})
			a.space.Signal()
		}
	}
}

// substitute fills the rows of bad samples with copies of good ones.
func (a *Assembly[S, M]) substitute(s *Slot[M], samples []S) error {
	at := func(row int) *flight[S, M] { return a.sequence.flight(a.sequence.members[row]) }
	isBad := func(row int) bool { return at(row).state == Bad }
	first := 0
	for first < len(samples) && isBad(first) {
		first++
	}
	if first == len(samples) {
		return fmt.Errorf("%s: all %d samples of a batch are bad, so none can be substituted; "+
			"the last one: %w", a.config.Name, len(samples), at(first-1).err)
	}
	from := first
	for row := range samples {
		if !isBad(row) {
			from = row
			continue
		}
		s.Memory.Substitute(row, from)
		samples[row] = samples[from]
	}
	return nil
}
