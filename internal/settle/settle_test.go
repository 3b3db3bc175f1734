package settle

import (
	"runtime"
	"sync/atomic"
	"testing"
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
	if n := Wait(live.Load); n != 0 {
		t.Errorf("%d values remain", n)
	}
}
