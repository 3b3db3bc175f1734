package capi

import (
	"runtime"
	"sync/atomic"
)

// gate bounds the number of concurrent calls. Further calls wait in Go, where a blocked goroutine
// costs no OS thread.
//
// Gates do not deadlock, because a call inside a gate never waits for a call that has yet to enter
// the same gate. The device work that a call waits for was enqueued before the call. A call that
// ends a capture enters no gate in which other calls wait for the capture's end.
type gate struct {
	limit  int64
	inside atomic.Int64 // callers inside, plus callers waiting to enter
	wake   chan struct{}
}

func newGate(limit int) *gate { return &gate{limit: int64(limit), wake: make(chan struct{}, limit)} }

func (g *gate) enter() {
	if g.inside.Add(1) > g.limit {
		<-g.wake
	}
}

// leave passes one token to a waiting caller, if there is one. Each enter that raises inside above
// limit takes one token, and each leave that lowers inside from above limit sends one. So the
// numbers of tokens sent and taken are equal, and leave sends a token only while a counted caller
// still needs one.
func (g *gate) leave() {
	if g.inside.Add(-1) >= g.limit {
		g.wake <- struct{}{}
	}
}

// Several gates ensure that waiting goroutines never block the goroutines that they wait for. Calls
// that compute give the device its work. A capture ends only after every call of the captured
// function, including calls that wait for the device.
var (
	computing  = newGate(max(8, 2*runtime.GOMAXPROCS(0))) // GOMAXPROCS follows the cgroup's quota
	waiting    = newGate(max(64, 2*runtime.NumCPU()))
	forCapture = newGate(max(64, 2*runtime.NumCPU())) // waits for the end of a capture
	// Backward passes wait for Go code that computes: hooks, and the backward of functions.
	differentiating = newGate(max(8, 2*runtime.GOMAXPROCS(0)))
)
