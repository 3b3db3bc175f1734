// Package settle waits for the garbage collector. It is for tests that count what the collector
// frees, and imports no other package of the module, so that the tests of every package can import
// it.
package settle

import "runtime"

// Wait collects garbage until a count stays the same in three collections, each with its cleanups,
// and returns the count. A count that always changes makes Wait run for ever.
func Wait(count func() int64) int64 {
	last, same := count(), 0
	for same < 3 {
		ran := make(chan struct{})
		runtime.AddCleanup(new(*int), func(ran chan struct{}) { close(ran) }, ran)
		runtime.GC()
		<-ran // the collector runs the cleanups now
		runtime.Gosched()
		if n := count(); n == last {
			same++
		} else {
			last, same = n, 0
		}
	}
	return last
}
