//go:build linux

package cuda

import (
	"errors"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

func isClosed(done <-chan struct{}) bool {
	select {
	case <-done:
		return true
	default:
		return false
	}
}

func wait(t *testing.T, done <-chan struct{}) {
	t.Helper()
	select {
	case <-done:
	case <-time.After(20 * time.Second):
		t.Fatal("got no notice within 20 s, want one")
	}
}

// post delivers the notice at once, as a stream without work does.
func post(n *capi.Notifier, token uint64) error { return capi.PostNotice(n, token) }

// TestNoticesArrive covers the path from the C queue to the channel without a GPU: every notice
// closes its own channel and no other.
func TestNoticesArrive(t *testing.T) {
	var b dispatcher
	var later []uint64 // tokens that are not delivered yet
	keep := func(_ *capi.Notifier, token uint64) error { later = append(later, token); return nil }
	var held []<-chan struct{}
	for range 200 { // more than one read takes
		held = append(held, must[<-chan struct{}](t)(b.add(Stream{}, keep)))
		wait(t, must[<-chan struct{}](t)(b.add(Stream{}, post)))
	}
	for i, done := range held {
		if isClosed(done) {
			t.Errorf("notice %d arrived before its token", i)
		}
	}
	for i := len(held) - 1; i >= 0; i-- {
		check(t, capi.PostNotice(b.notifier, later[i]))
	}
	for _, done := range held {
		wait(t, done)
	}
	// The goroutine ends with the last notice, and another starts with the next.
	until(t, "the end of the goroutine",
		func() bool { b.mu.Lock(); defer b.mu.Unlock(); return !b.running && len(b.waiting) == 0 })
	wait(t, must[<-chan struct{}](t)(b.add(Stream{}, post)))
}

func TestNoticesFromManyGoroutines(t *testing.T) {
	var b dispatcher
	var all sync.WaitGroup
	for range 16 {
		all.Go(func() {
			for range 200 {
				done, err := b.add(Stream{}, post)
				if err != nil {
					t.Error(err)
					return
				}
				<-done
			}
		})
	}
	all.Wait()
}

// A notice that could not be enqueued is an error, and leaves nothing pending.
func TestFailedNoticeLeavesNothingPending(t *testing.T) {
	var b dispatcher
	problem := errors.New("problem")
	if done, err := b.add(Stream{}, func(*capi.Notifier, uint64) error { return problem }); done != nil ||
		!errors.Is(err, problem) {
		t.Errorf("got %v, %v, want nil, %v", done, err, problem)
	}
	if b.running || len(b.waiting) != 0 {
		t.Errorf("%d notices are pending, want 0", len(b.waiting))
	}
	// A token without a notice is dropped.
	check(t, capi.PostNotice(b.notifier, 1000))
	wait(t, must[<-chan struct{}](t)(b.add(Stream{}, post)))
}

// A channel is closed after the work before it and not earlier, independently of other streams.
func TestNotify(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	side := newStreams(t, 2)
	check(t, WithStream(side[0], load.queue))
	busy := must[<-chan struct{}](t)(side[0].Notify())
	idle := must[<-chan struct{}](t)(side[1].Notify())
	wait(t, idle)
	if done := must[bool](t)(side[0].Query()); !done && isClosed(busy) {
		t.Error("got the notice while the work before it runs, want it after the work")
	}
	wait(t, busy)
	check(t, side[0].Synchronize())
	wait(t, must[<-chan struct{}](t)(DefaultStream(0).Notify()))
	var all sync.WaitGroup
	for i := range 32 {
		all.Go(func() {
			for range 100 {
				done, err := side[i%2].Notify()
				if err != nil {
					t.Error(err)
					return
				}
				<-done
			}
		})
	}
	all.Wait()
	if n := len(notices.waiting); n != 0 {
		t.Errorf("%d notices are pending, want 0", n)
	}
}

// After a failure of the device no token arrives: the dispatcher detects the failure by itself.
func TestNoticesOfALostDevice(t *testing.T) {
	var b dispatcher
	done := must[<-chan struct{}](t)(b.add(DefaultStream(1000), func(*capi.Notifier, uint64) error { return nil }))
	// A device that does not exist is not a lost device.
	b.close(true)
	if isClosed(done) {
		t.Error("the channel is closed without a failure of the device, want it open")
	}
	b.mu.Lock()
	b.lost = func(Stream) bool { return true }
	b.mu.Unlock()
	b.close(true)
	wait(t, done)
}
