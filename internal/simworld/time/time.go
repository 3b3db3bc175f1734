// Package time replaces the standard library's time in code that simulated hosts run. Each host has
// its own clock.
package time

import (
	"time"

	"github.com/torchstream/torchstream/internal/simworld/world"
)

// Types that need no replacement.
type (
	Duration = time.Duration
	Time     = time.Time
)

// Durations.
const (
	Millisecond = time.Millisecond
	Second      = time.Second
)

// Now returns the time of the host's clock.
func Now() Time { return world.Here().Now() }

// Since returns the time since t by the host's clock.
func Since(t Time) Duration { return Now().Sub(t) }

// Ticker sends the time at intervals, like time.Ticker.
type Ticker struct {
	C    <-chan Time
	stop chan struct{}
}

// NewTicker returns a ticker. Call Stop.
func NewTicker(d Duration) *Ticker {
	h := world.Here()
	c, stop := make(chan Time, 1), make(chan struct{})
	go func() {
		tick := time.NewTicker(h.Real(d))
		defer tick.Stop()
		for {
			select {
			case <-stop:
				return
			case <-tick.C:
			}
			h.Gate()
			select {
			case c <- h.Now():
			default:
			}
		}
	}()
	return &Ticker{C: c, stop: stop}
}

// Stop ends the ticker.
func (t *Ticker) Stop() { close(t.stop) }
