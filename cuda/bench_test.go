package cuda

import (
	"runtime"
	"testing"
)

// What it costs to have something done by another goroutine, and wait for it: the reason why
// operators are not sent to a goroutine that is locked to its thread.
func BenchmarkHandOver(b *testing.B) {
	for name, lock := range map[string]bool{"unlocked": false, "locked": true} {
		b.Run(name, func(b *testing.B) {
			calls, done := make(chan func()), make(chan struct{})
			go func() {
				if lock {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
				}
				for call := range calls {
					call()
					done <- struct{}{}
				}
				close(done)
			}()
			nothing := func() {}
			for b.Loop() {
				calls <- nothing
				<-done
			}
			close(calls)
			<-done
		})
	}
}

func BenchmarkWithStream(b *testing.B) {
	if DeviceCount() == 0 {
		b.Skip("needs a GPU")
	}
	nothing := func() error { return nil }
	for b.Loop() {
		if err := WithStream(Stream{}, nothing); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkEventUse(b *testing.B) {
	e := newEvent(nil)
	defer e.Close()
	for b.Loop() {
		if _, err := e.use("bench"); err != nil {
			b.Fatal(err)
		}
		e.done()
	}
}
