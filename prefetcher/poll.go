package prefetcher

import (
	"runtime"
	"time"

	"github.com/torchstream/torchstream/internal/system"
)

const (
	maxLate  = 200 * time.Microsecond // a poller whose sleeps are later than this spins
	maxSpin  = 2 * time.Millisecond   // in one wait
	spinEach = 3 * time.Microsecond   // between two queries
	minCPUs  = 4                      // with fewer CPUs a spinning thread would delay the source
)

// poller pauses between two queries of an event. It sleeps if sleeps end in time. Where they do
// not, as in some virtual machines and sandboxes, it spins at the start of each wait, because a
// decoder may have no work until the wait ends. The zero value is ready for use by one goroutine.
type poller struct {
	late  time.Duration                     // mean time by which recent sleeps were late
	sleep func(time.Duration) time.Duration // nil: sleep
	cpus  int                               // GOMAXPROCS at the start of the wait; 0: not asked yet
}

// pause pauses for about d. waited is the time since the start of the wait.
func (p *poller) pause(d, waited time.Duration) {
	if p.late > maxLate && waited < maxSpin && p.maySpin() {
		for began := time.Now(); time.Since(began) < spinEach; {
		}
		return
	}
	if p.sleep == nil {
		p.sleep = sleep
	}
	p.late += (p.sleep(d) - d - p.late) / 8
}

// sleep sleeps for about d, and returns the time that it slept.
func sleep(d time.Duration) time.Duration {
	began := time.Now()
	system.Sleep(d)
	return time.Since(began)
}

// forget is called after each wait. It makes the poller sleep again some hundred waits after a late
// sleep, to find out whether sleeps are still late.
func (p *poller) forget() { p.late, p.cpus = p.late-p.late/512, 0 }

// maySpin reports whether the program has enough CPUs to spin in this wait.
func (p *poller) maySpin() bool {
	if p.cpus == 0 {
		p.cpus = runtime.GOMAXPROCS(0)
	}
	return p.cpus >= minCPUs
}
