package prefetcher

import (
	"runtime"
	"testing"
	"time"
)

// TestPollerSpinsWhereSleepsAreLate counts the sleeps of a poller.
func TestPollerSpinsWhereSleepsAreLate(t *testing.T) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(minCPUs))
	sleeps := 0
	p := &poller{sleep: func(d time.Duration) time.Duration { sleeps++; return d + 10*time.Millisecond }}
	wait := func(pauses int, waited time.Duration) int {
		before := sleeps
		for range pauses {
			p.pause(10*time.Microsecond, waited)
		}
		p.forget()
		return sleeps - before
	}
	if n := wait(100, 0); n != 1 {
		t.Errorf("%d of 100 pauses were sleeps, want 1: the first was 10 ms late", n)
	}
	if n := wait(10, maxSpin); n != 10 {
		t.Errorf("%d of 10 pauses were sleeps after %v of a wait, want 10", n, maxSpin)
	}
	waits := 0
	for p.sleep = func(d time.Duration) time.Duration { sleeps++; return d }; p.late > maxLate; waits++ {
		wait(1, 0)
	}
	if waits < 100 || waits > 10000 {
		t.Errorf("the poller sleeps again after %d waits, want 100 to 10000", waits)
	}
	if n := wait(10, 0); n != 10 {
		t.Errorf("%d of 10 pauses were sleeps that are not late, want 10", n)
	}
	p.late = time.Second
	runtime.GOMAXPROCS(minCPUs - 1)
	if n := wait(10, 0); n != 10 {
		t.Errorf("%d of 10 pauses were sleeps with %d CPUs, want 10", n, minCPUs-1)
	}
}
