package system

import (
	"runtime"
	"testing"
	"time"
)

// TestSleepIsShorterThanAMillisecond takes the shortest of many sleeps, because other programs may
// delay some. With time.Sleep even the shortest takes a millisecond.
func TestSleepIsShorterThanAMillisecond(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("Sleep is time.Sleep here")
	}
	const pause = 20 * time.Microsecond
	var shortest time.Duration
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // the thread ends with the goroutine
		err := SetTimerSlack(time.Microsecond)
		for i := range 200 {
			began := time.Now()
			Sleep(pause)
			if took := time.Since(began); i == 0 || took < shortest {
				shortest = took
			}
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Errorf("SetTimerSlack: %v, want nil", err)
	}
	if shortest < pause || shortest > 500*time.Microsecond {
		t.Errorf("the shortest of 200 sleeps of %v took %v, want at most 500µs", pause, shortest)
	}
}
