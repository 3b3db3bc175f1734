// Package settle waits for the garbage collector. It is for tests that count what the collector
// frees, and imports no other package of the module, so that the tests of every package can import
// it.
package settle

import (
	"runtime"
	"testing"
	"time"
)

// limit is the time after which a count that still changes ends the test.
const limit = time.Minute

// Wait collects garbage until a count stays the same in three collections, each with its cleanups,
// and returns the count. A count that still changes after a minute ends the test, as t.Fatal does.
func Wait(t testing.TB, count func() int64) int64 {
	t.Helper()
	return wait(t, count, limit)
}

func wait(t testing.TB, count func() int64, limit time.Duration) int64 {
	t.Helper()
	end := time.After(limit)
	last, same := count(), 0
	for same < 3 {
		ran := make(chan struct{})
		runtime.AddCleanup(new(*int), func(ran chan struct{}) { close(ran) }, ran)
		runtime.GC()
		select {
		case <-ran: // the collector runs the cleanups now
		case <-end:
			t.Fatalf("settle: after %v the collector has not run a cleanup: another one blocks; the "+
				"count is %d", limit, last)
		}
		runtime.Gosched()
		before := last
		if last = count(); last == before {
			same++
			continue
		}
		same = 0
		select {
		case <-end:
			t.Fatalf("settle: after %v the count still changes: it was %d, and is %d", limit, before, last)
		default:
		}
	}
	return last
}
