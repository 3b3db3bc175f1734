package prefetcher

import (
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// mixture decides how many images the source's workers decode beside the device: as many as they
// have time for. The source has nothing to do while it waits for a slot and has delivered every
// slot before: its workers could have decoded more. A slot that it need not wait for shows that its
// batches are needed sooner. The methods of nil leave all images to the device.
type mixture struct {
	mu   sync.Mutex
	most int       // rows of a group at most
	rows int       // of each decodeplan.Group
	free int       // slots that the source gets at the beginning of an epoch without waiting
	lent int       // slots that the source has and has not delivered
	last time.Time // when the source delivered a slot
	got  time.Time // when the source got a slot

	// Of the slots since the last decision, which may be of several short epochs. Batches take
	// different times, and the slots between the source and the loop even that out, so the sums
	// decide and no single slot does.
	slots, late   int // late: the source had next to nothing to do before the slot
	nothing, both time.Duration
}

// A decision is due after each decisionSlots slots. The workers get more rows where the source has
// had nothing to do for at least 1/idleShare of the time, the more the longer it was, and fewer
// where that was less than 1/busyShare of it, a quarter fewer where each slot was late.
const (
	decisionSlots = 4
	idleShare     = 16
	busyShare     = 64
)

// newMixture returns the mixture of batches of so many rows.
func newMixture(batch int) *mixture { return &mixture{most: min(batch, decodeplan.Group)} }

// begin begins an epoch, whose source gets so many slots without waiting.
func (m *mixture) begin(free int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free, m.lent = free, 0
}

// delivers notes that the source delivers a slot.
func (m *mixture) delivers(now time.Time) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lent--
	m.last = now
}

// lends returns Plans.HostRows of a slot that the source has asked for and gets.
func (m *mixture) lends(asked, now time.Time) int {
	if m == nil {
		return 0
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	passed := now.Sub(m.got)
	var nothing time.Duration // time without anything to do
	if m.lent == 0 {
		nothing = min(now.Sub(asked), now.Sub(m.last))
	}
	m.got = now
	m.lent++
	if m.free > 0 {
		m.free--
		return m.rows
	}
	m.slots++
	m.nothing += nothing
	m.both += passed
	if nothing*busyShare < passed {
		m.late++
	}
	if m.slots < decisionSlots || m.both == 0 { // a coarse clock may stand still
		return m.rows
	}
	switch {
	case m.late == m.slots:
		m.rows = max(m.rows-1-m.rows/4, 0)
	case m.nothing*busyShare < m.both:
		m.rows = max(m.rows-1, 0)
	case m.nothing*idleShare >= m.both:
		more := int(m.nothing * time.Duration(m.most) / 8 / m.both)
		m.rows = min(m.rows+1+more, m.most)
	}
	m.slots, m.late, m.nothing, m.both = 0, 0, 0, 0
	return m.rows
}
