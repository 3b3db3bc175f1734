package world

import (
	"time"
	"unsafe"
)

// Host is a simulated host with one process. Its clock may be slow, and its process may be stopped.
type Host struct {
	Name string

	world   *World
	clock   clock
	wake    chan struct{} // not nil while the process is stopped; closed when it continues
	stopped time.Time
	dead    bool
	onDeath []func(power bool)
}

// clock is a host's clock: it runs at a rate in thousandths of simulated time.
type clock struct {
	start  time.Time
	rate   int64
	offset time.Duration
}

// NewHost returns a host whose clock runs at a rate in thousandths.
func (w *World) NewHost(name string, rate int) *Host {
	return &Host{Name: name, world: w, clock: clock{time.Now(), int64(rate), 0}}
}

// local is the label of a host's goroutines. The runtime copies the label of a goroutine to those
// that it starts.
type local struct {
	labels []string // none: profilers read a goroutine's label as a list
	host   *Host
}

//go:linkname getLabel runtime/pprof.runtime_getProfLabel
func getLabel() unsafe.Pointer

//go:linkname setLabel runtime/pprof.runtime_setProfLabel
func setLabel(unsafe.Pointer)

// Here returns the host of the current goroutine, or nil.
func Here() *Host {
	if l := (*local)(getLabel()); l != nil {
		return l.host
	}
	return nil
}

// Do runs f as the host's process. Goroutines that f starts belong to the process too.
func (h *Host) Do(f func()) {
	before := getLabel()
	setLabel(unsafe.Pointer(&local{host: h}))
	defer setLabel(before)
	f()
}

// Now returns the time of the host's clock. A nil host has the simulated time.
func (h *Host) Now() time.Time {
	now := time.Now()
	if h == nil {
		return now
	}
	since := now.Sub(h.clock.start)
	return now.Add(since*time.Duration(h.clock.rate)/1000 - since + h.clock.offset)
}

// Real returns the simulated time that a time of the host's clock takes.
func (h *Host) Real(d time.Duration) time.Duration {
	if h == nil {
		return d
	}
	return d * 1000 / time.Duration(h.clock.rate)
}

// Gate blocks while the host's process is stopped. Every call of the process passes it. When the
// process continues, its goroutines run in any order.
func (h *Host) Gate() {
	for h != nil && h.wake != nil && !h.dead {
		<-h.wake
		h.world.delay("continue")
	}
}

// Stopped reports whether the process is stopped.
func (h *Host) Stopped() bool { return h.wake != nil }

// Dead reports whether the process was killed.
func (h *Host) Dead() bool { return h != nil && h.dead }

// Stop stops the process.
func (h *Host) Stop() {
	h.world.Say("%s is stopped", h.Name)
	h.wake, h.stopped = make(chan struct{}), time.Now()
}

// Continue ends Stop. If frozen is set, the host's clock stood still meanwhile.
func (h *Host) Continue(frozen bool) {
	if h.wake == nil {
		return
	}
	h.world.Say("%s continues", h.Name)
	if frozen {
		h.clock.offset -= time.Since(h.stopped) * time.Duration(h.clock.rate) / 1000
	}
	close(h.wake)
	h.wake = nil
}

// OnDeath registers a function that Kill calls.
func (h *Host) OnDeath(f func(power bool)) { h.onDeath = append(h.onDeath, f) }

// Kill kills the process. With power the host loses power: it sends nothing more.
func (h *Host) Kill(power bool) {
	if h.dead {
		return
	}
	h.world.Say("%s is killed, power %v", h.Name, power)
	h.dead = true
	for _, f := range h.onDeath {
		f(power)
	}
	if h.wake != nil {
		close(h.wake)
		h.wake = nil
	}
}
