package prefetcher

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/decodeplan"
)

// simulateMixture simulates a source and a training loop. The source's workers take the time work
// for a batch that they decode alone, and the time planning for a batch that they only plan. The
// work of a batch varies by up to spread. The loop takes a batch every interval, and the source
// prepares up to ahead batches. simulateMixture returns the number of rows of each group that the
// workers decode at the end. It also returns the mean of that number and the loop's waiting time,
// both over the second half.
func simulateMixture(m *mixture, work, planning, interval time.Duration, spread float64, batches,
	ahead int) (rows int, mean float64, waited time.Duration) {
	m.begin(ahead)
	random := rand.New(rand.NewPCG(1, 2))
	start := time.Unix(0, 0)
	var taken []time.Time // when the loop takes each batch
	now := start
	for b := range batches {
		asked := now
		if b >= ahead && taken[b-ahead].After(now) {
			now = taken[b-ahead] // a slot becomes free
		}
		rows = m.lends(asked, now)
		decoding := float64(rows) * float64(work) / float64(m.most) * (1 + spread*(2*random.Float64()-1))
		now = now.Add(planning + time.Duration(decoding))
		m.delivers(now)
		next := start
		if b > 0 {
			next = taken[b-1].Add(interval)
		}
		if b >= batches/2 {
			mean += float64(rows)
			waited += max(now.Sub(next), 0)
		}
		if now.After(next) {
			next = now
		}
		taken = append(taken, next)
	}
	return rows, mean / float64(batches-batches/2), waited
}

// TestMixtureUsesTheWorkersTime: the workers decode as much as they have time for, and the loop
// never waits for them.
func TestMixtureUsesTheWorkersTime(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		name                     string
		work, planning, interval time.Duration
		spread                   float64
		min, max                 float64
	}{
		{"workers that are faster than the loop", 10 * ms, ms, 20 * ms, 0, 64, 64},
		{"workers that manage a half", 35 * ms, 2 * ms, 20 * ms, 0, 30, 33},
		{"workers that manage little", 160 * ms, 4 * ms, 20 * ms, 0, 5, 6.5},
		{"workers that have just time to plan", 35 * ms, 19 * ms, 20 * ms, 0, 0, 0},
		{"a loop that waits for the plans", 35 * ms, 3 * ms, 2 * ms, 0, 0, 0},
		{"batches that take different times", 48 * ms, 3 * ms, 15 * ms, 0.3, 14, 16},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, rows, waited := simulateMixture(newMixture(256), test.work, test.planning, test.interval,
				test.spread, 1000, 6)
			if rows < test.min || rows > test.max {
				t.Errorf("the workers decode %.1f of %d rows, and should %v to %v, want rows at least "+
					"%v, rows at most %v", rows, decodeplan.Group, test.min, test.max, test.min, test.max)
			}
			if test.planning < test.interval && waited != 0 {
				t.Errorf("the loop waited %v", waited)
			}
		})
	}
}

// TestMixtureFollowsTheLoopsSpeed: a loop that becomes faster gets the device's help within some
// batches, also with small batches. A new epoch starts with the mixture of the last one.
func TestMixtureFollowsTheLoopsSpeed(t *testing.T) {
	const ms = time.Millisecond
	for _, batch := range []int{256, 64, 16, 5} {
		m := newMixture(batch)
		all := min(batch, decodeplan.Group)
		if rows, _, _ := simulateMixture(m, 10*ms, ms, 20*ms, 0, 300, 6); rows != all {
			t.Fatalf("batches of %d: the workers decode %d rows of a group, want %v", batch, rows, all)
		}
		if rows, _, _ := simulateMixture(m, 10*ms, ms, ms, 0, 6, 6); rows != all {
			t.Errorf("batches of %d: after a new epoch's first slots, for which no source waits, the "+
				"workers decode %d rows, want %v", batch, rows, all)
		}
		if rows, _, _ := simulateMixture(m, 10*ms, ms, ms, 0, 22, 6); rows > all/2 {
			t.Errorf("batches of %d: after 16 slots the workers decode %d rows for a loop that waits, "+
				"want at most %v", batch, rows, all/2)
		}
		if rows, _, _ := simulateMixture(m, 10*ms, ms, ms, 0, 46, 6); rows != 0 {
			t.Errorf("batches of %d: the workers decode %d rows for a loop that waits, want 0", batch, rows)
		}
	}
}

// TestMixtureDecidesAcrossShortEpochs: a decision may use the slots of several short epochs.
func TestMixtureDecidesAcrossShortEpochs(t *testing.T) {
	const ms = time.Millisecond
	m := newMixture(256)
	rows := 0
	for range 300 {
		rows, _, _ = simulateMixture(m, 10*ms, ms, 20*ms, 0, 9, 6)
	}
	if rows < decodeplan.Group/4 {
		t.Errorf("after 300 epochs of 9 batches the workers decode %d rows, want at least %v",
			rows, decodeplan.Group/4)
	}
}

// TestMixtureWaitsForTheClock: a clock may be too coarse for four slots.
func TestMixtureWaitsForTheClock(t *testing.T) {
	m := newMixture(256)
	m.begin(1)
	now := time.Unix(0, 0)
	for range 10 {
		if rows := m.lends(now, now); rows != 0 {
			t.Fatalf("the workers decode %d rows, want 0", rows)
		}
		m.delivers(now)
	}
}

// TestDeviceDecodesAllWithoutAuto: without Auto the device decodes all images that it can.
func TestDeviceDecodesAllWithoutAuto(t *testing.T) {
	var m *mixture
	m.begin(1)
	m.delivers(time.Unix(0, 0))
	if rows := m.lends(time.Unix(0, 0), time.Unix(9, 0)); rows != 0 {
		t.Errorf("%d rows, want 0", rows)
	}
}
