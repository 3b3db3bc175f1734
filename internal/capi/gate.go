package capi

import (
	"runtime"
	"sync/atomic"
)

// A gate lets a bounded number of calls through at once; the others wait outside of C, where a goroutine costs no thread. Nobody inside a gate waits for
// somebody outside: what a call waits for on the device was enqueued before it.
type gate struct {
	limit  int64
	inside atomic.Int64 // callers inside and waiting
	wake   chan struct{}
}

func newGate(limit int) *gate { return &gate{limit: int64(limit), wake: make(chan struct{})} }

func (g *gate) enter() {
	if g.inside.Add(1) > g.limit {
		<-g.wake
	}
}

func (g *gate) leave() {
	if g.inside.Add(-1) >= g.limit {
		g.wake <- struct{}{} // somebody who counted itself in enter receives this: the wait is short
	}
}

// Two gates, so that goroutines that wait for the device don't keep others from giving it work.
var (
	computing = newGate(max(8, 2*runtime.NumCPU()))
	waiting   = newGate(max(64, 2*runtime.NumCPU()))
)
