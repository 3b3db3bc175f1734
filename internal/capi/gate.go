package capi

import (
	"runtime"
	"sync/atomic"
)

// A gate lets a bounded number of calls through at once; the others wait outside of C, where a
// goroutine costs no thread. Nobody inside a gate waits for somebody outside who might want to
// enter it: what a call waits for on the device was enqueued before it, and what ends a capture
// passes no gate that others wait in for that.
type gate struct {
	limit  int64
	inside atomic.Int64 // callers inside and waiting
	wake   chan struct{}
}

func newGate(limit int) *gate { return &gate{limit: int64(limit), wake: make(chan struct{}, limit)} }

func (g *gate) enter() {
	if g.inside.Add(1) > g.limit {
		<-g.wake
	}
}

// Every step of inside from n to n+1 with n >= limit is an enter that takes one token, every step
// back is a leave that puts one: as many are put as taken, and a token is put only when somebody
// has counted itself in that has not taken one yet.
func (g *gate) leave() {
	if g.inside.Add(-1) >= g.limit {
		g.wake <- struct{}{}
	}
}

// Several gates, so that goroutines that wait don't keep those from going on that they wait for:
// the device gets its work from those that compute, and a capture ends only after all that its
// function calls, waits for the device among it.
var (
	computing  = newGate(max(8, 2*runtime.NumCPU()))
	waiting    = newGate(max(64, 2*runtime.NumCPU()))
	forCapture = newGate(max(64, 2*runtime.NumCPU())) // for a capture's end
)
