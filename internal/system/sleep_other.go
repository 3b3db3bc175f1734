//go:build !linux

package system

import "time"

// Sleep is time.Sleep.
func Sleep(d time.Duration) { time.Sleep(d) }

// SetTimerSlack does nothing.
func SetTimerSlack(time.Duration) error { return nil }
