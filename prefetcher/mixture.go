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
	rows int       // of each decodeplan.Group
	free int       // slots that the source gets at the beginning of an epoch without waiting
	lent int       // slots that the source has and has not delivered
	last time.Time // when the source delivered a slot
	got  time.Time // when the source got a slot
	idle int       // consecutive slots before which the source had nothing to do for long
}

// The source's workers get a row more when the source has had nothing to do before idleSlots slots,
// each time for at least 1/idleShare of the time from slot to slot. They get a row less when that
// was less than 1/busyShare of it.
const (
	idleShare = 4
	busyShare = 8
	idleSlots = 2
)

// begin begins an epoch, whose source gets so many slots without waiting.
func (m *mixture) begin(free int) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.free, m.lent, m.idle = free, 0, 0
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
	switch {
	case nothing*busyShare < passed:
		m.rows, m.idle = max(m.rows-1, 0), 0
	case nothing*idleShare < passed:
		m.idle = 0
	default:
		if m.idle++; m.idle == idleSlots {
			m.rows, m.idle = min(m.rows+1, decodeplan.Group), 0
		}
	}
	return m.rows
}
