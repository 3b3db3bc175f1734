package prefetcher

import (
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// simulateMixture runs a source whose workers take work for a batch that they decode alone, and
// planning for one that they only plan, in front of a loop that takes a batch every interval and
// holds ahead batches. It returns the rows of each group that the workers decode at last, and how
// long the loop has waited in the second half.
func simulateMixture(m *mixture, work, planning, interval time.Duration, batches, ahead int) (rows int, waited time.Duration) {
	m.begin(ahead)
	start := time.Unix(0, 0)
	var taken []time.Time // when the loop takes each batch
	now := start
	for b := range batches {
		asked := now
		if b >= ahead && taken[b-ahead].After(now) {
			now = taken[b-ahead] // a slot becomes free
		}
		rows = m.lends(asked, now)
		now = now.Add(planning + time.Duration(rows)*work/decodeplan.Group)
		m.delivers(now)
		next := start
		if b > 0 {
			next = taken[b-1].Add(interval)
		}
		if now.After(next) {
			if b > batches/2 {
				waited += now.Sub(next)
			}
			next = now
		}
		taken = append(taken, next)
	}
	return rows, waited
}

// TestMixtureUsesTheWorkersTime: the workers decode as much as they have time for, and the loop
// never waits for them.
func TestMixtureUsesTheWorkersTime(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		name                     string
		work, planning, interval time.Duration
		min, max                 int
	}{
		{"workers that are faster than the loop", 10 * ms, ms, 20 * ms, 16, 16},
		{"workers that manage a half", 35 * ms, 2 * ms, 20 * ms, 6, 8},
		{"workers that manage little", 160 * ms, 4 * ms, 20 * ms, 1, 2},
		{"workers that have just time to plan", 35 * ms, 19 * ms, 20 * ms, 0, 0},
		{"a loop that waits for the plans", 35 * ms, 3 * ms, 2 * ms, 0, 0},
	} {
		t.Run(test.name, func(t *testing.T) {
			rows, waited := simulateMixture(&mixture{}, test.work, test.planning, test.interval, 400, 6)
			if rows < test.min || rows > test.max {
				t.Errorf("the workers decode %d of %d rows, and should %d to %d", rows, decodeplan.Group, test.min, test.max)
			}
			if test.planning < test.interval && waited != 0 {
				t.Errorf("the loop waited %v", waited)
			}
		})
	}
}

// TestMixtureGivesWay: a loop that becomes faster gets the device's help within a few batches, and
// a new epoch begins with the mixture of the last one.
func TestMixtureGivesWay(t *testing.T) {
	const ms = time.Millisecond
	m := &mixture{}
	if rows, _ := simulateMixture(m, 10*ms, ms, 20*ms, 100, 6); rows != decodeplan.Group {
		t.Fatalf("the workers decode %d rows", rows)
	}
	if rows, _ := simulateMixture(m, 10*ms, ms, ms, 6, 6); rows != decodeplan.Group {
		t.Errorf("after a new epoch's first slots, for which no source waits, the workers decode %d rows", rows)
	}
	if rows, _ := simulateMixture(m, 10*ms, ms, ms, 40, 6); rows != 0 {
		t.Errorf("the workers decode %d rows for a loop that waits", rows)
	}
}

// TestNoMixture: without Auto the device decodes all that it can.
func TestNoMixture(t *testing.T) {
	var m *mixture
	m.begin(1)
	m.delivers(time.Unix(0, 0))
	if rows := m.lends(time.Unix(0, 0), time.Unix(9, 0)); rows != 0 {
		t.Errorf("%d rows", rows)
	}
}
