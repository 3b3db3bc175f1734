package prefetcher

import (
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// mixture decides how many images the source's workers decode while the device decodes the rest.
// The workers should decode as many as they have time for. If the source has delivered all earlier
// slots and waits for the next one, its workers are idle and could have decoded more. If it gets a
// slot without waiting, the consumer needs its batches sooner. With a nil mixture, the device
// decodes all images that it can.
type mixture struct {
	mu    sync.Mutex
	most  int // maximum of rows
	rows  int // number of rows in each decodeplan.Group that the workers decode
	loans loans
	tally tally // since the last decision
}

// loans counts the slots that the source holds.
type loans struct {
	free int       // slots that the source can still get without waiting, at the start of an epoch
	lent int       // slots that the source holds
	last time.Time // when the source last delivered a slot
	got  time.Time // when the source last got a slot
}

// deliver records that the source delivers a slot.
func (l *loans) deliver(now time.Time) {
	l.lent--
	l.last = now
}

// lend records that the source gets a slot that it asked for. passed is the time since the source
// got the previous slot. nothing is the part of this time in which the source had no slot and was
// idle. waits is false if the source gets the slot without waiting.
func (l *loans) lend(asked, now time.Time) (passed, nothing time.Duration, waits bool) {
	passed = now.Sub(l.got)
	if l.lent == 0 {
		nothing = min(now.Sub(asked), now.Sub(l.last))
	}
	l.got = now
	l.lent++
	if l.free > 0 {
		l.free--
		return passed, nothing, false
	}
	return passed, nothing, true
}

// tally adds up the slots since the last decision, which may span several short epochs. Batches
// take different times, and the slots between the source and the loop even out these differences.
// Decisions are therefore based on sums over several slots.
type tally struct {
	slots, late   int // late counts the slots that the source got with hardly any idle time
	nothing, both time.Duration
}

// add counts a slot.
func (t *tally) add(passed, nothing time.Duration) {
	t.slots++
	t.nothing += nothing
	t.both += passed
	if nothing*busyShare < passed {
		t.late++
	}
}

// full reports whether a decision is due.
func (t *tally) full() bool {
	return t.slots >= decisionSlots && t.both != 0 // a coarse clock may not have advanced
}

// rows returns the new number of rows, given the old one. The result is at most most.
func (t *tally) rows(rows, most int) int {
	switch {
	case t.late == t.slots:
		return max(rows-1-rows/4, 0)
	case t.nothing*busyShare < t.both:
		return max(rows-1, 0)
	case t.nothing*idleShare >= t.both:
		more := int(t.nothing * time.Duration(most) / 8 / t.both)
		return min(rows+1+more, most)
	}
	return rows
}

// mixture makes a decision after every decisionSlots slots. If the source was idle for at least
// 1/idleShare of the time, the workers get more rows, in proportion to the idle time. If it was
// idle for less than 1/busyShare of the time, they get one row fewer. If that is true for every
// single slot, they get a quarter fewer.
const (
	decisionSlots = 4
	idleShare     = 16
	busyShare     = 64
)

// newMixture returns a mixture for batches of the given number of rows.
func newMixture(batch int) *mixture { return &mixture{most: min(batch, decodeplan.Group)} }

// begin starts an epoch. The source gets its first slots without waiting, and free is their number.
func (m *mixture) begin(free int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loans.free, m.loans.lent = free, 0
}

// delivers records that the source delivers a slot.
func (m *mixture) delivers(now time.Time) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.loans.deliver(now)
}

// lends returns the value of Plans.HostRows for a slot that the source has asked for and now gets.
func (m *mixture) lends(asked, now time.Time) int {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	passed, nothing, waits := m.loans.lend(asked, now)
	if !waits {
		return m.rows
	}
	m.tally.add(passed, nothing)
	if m.tally.full() {
		m.rows = m.tally.rows(m.rows, m.most)
		m.tally = tally{}
	}
	return m.rows
}
