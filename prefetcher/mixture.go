package prefetcher

import (
	"sync"
	"time"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// mixture decides how many images the source's workers decode while the device decodes the rest: as
// many as they have time for. If the source waits for a slot after it has delivered all earlier
// slots, its workers were idle and could have decoded more. If it gets a slot without waiting, the
// consumer needs its batches sooner. On a nil mixture the methods leave all images to the device.
type mixture struct {
	mu   sync.Mutex
	most int       // rows of a group at most
	rows int       // of each decodeplan.Group
	free int       // slots that the source gets at the beginning of an epoch without waiting
	lent int       // slots that the source has and has not delivered
	last time.Time // when the source delivered a slot
	got  time.Time // when the source got a slot

	// Counts since the last decision, which may span several short epochs. Batches take different
	// times, and the slots between the source and the loop even that out. So the sums decide, not a
	// single slot.
	slots, late   int // late: the source had next to nothing to do before the slot
	nothing, both time.Duration
}

// mixture decides after every decisionSlots slots. If the source was idle for at least 1/idleShare
// of the time, the workers get more rows, in proportion to the idle time. If it was idle for less
// than 1/busyShare of the time, they get fewer: a quarter fewer if every slot was late.
const (
	decisionSlots = 4
	idleShare     = 16
	busyShare     = 64
)

// newMixture returns a mixture for batches of the given number of rows.
func newMixture(batch int) *mixture { return &mixture{most: min(batch, decodeplan.Group)} }

// begin starts an epoch. The source gets the first free slots without waiting.
func (m *mixture) begin(free int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free, m.lent = free, 0
}

// delivers records that the source delivers a slot.
func (m *mixture) delivers(now time.Time) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.lent--
	m.last = now
}

// lends returns Plans.HostRows for a slot that the source asked for and now gets.
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
