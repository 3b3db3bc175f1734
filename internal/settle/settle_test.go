package settle

import (
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

// Each of a chain of values becomes unreachable when the cleanup of the one before has run, so the
// count falls in more than one collection.
func TestWaitFollowsAChainOfCleanups(t *testing.T) {
	var live atomic.Int64
	type link struct{ next *link }
	var chain *link
	for range 5 {
		chain = &link{chain}
		live.Add(1)
		runtime.SetFinalizer(chain, func(*link) { live.Add(-1) })
	}
	runtime.KeepAlive(chain)
	chain = nil
	if n := Wait(t, live.Load); n != 0 {
		t.Errorf("%d values remain, want 0", n)
	}
}

// fatal is a test that keeps the message of Fatalf.
type fatal struct {
	testing.TB
	message string
}

func (f *fatal) Helper() {}
func (f *fatal) Fatalf(format string, args ...any) {
	f.message = fmt.Sprintf(format, args...)
	runtime.Goexit()
}

// A count that always changes ends the test.
func TestWaitIsBounded(t *testing.T) {
	var n int64
	f, done := &fatal{TB: t}, make(chan struct{})
	go func() {
		defer close(done)
		wait(f, func() int64 { n++; return n }, time.Millisecond)
	}()
	<-done
	if !strings.HasPrefix(f.message, "settle: after 1ms the count still changes: it was ") &&
		!strings.HasPrefix(f.message, "settle: after 1ms the collector has not run a cleanup") {
		t.Errorf("the message is %q", f.message)
	}
}
