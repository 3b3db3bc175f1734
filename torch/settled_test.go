package torch

import "runtime"

// Settled waits until the garbage collector has freed the tensors of earlier tests, and returns the
// number of references.
func Settled() int64 {
	last, same := LiveTensors(), 0
	for same < 3 {
		ran := make(chan struct{})
		runtime.AddCleanup(new(*int), func(ran chan struct{}) { close(ran) }, ran)
		runtime.GC()
		<-ran // the collector runs the cleanups now
		runtime.Gosched()
		if n := LiveTensors(); n == last {
			same++
		} else {
			last, same = n, 0
		}
	}
	return last
}
