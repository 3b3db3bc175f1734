package capi

/*
#include "torchstream.h"
#cgo noescape ts_graph_begin
#cgo nocallback ts_graph_begin
#cgo nocallback ts_graph_end
#cgo nocallback ts_graph_replay
#cgo nocallback ts_graph_destroy
#cgo nocallback ts_capture_wait
#cgo noescape ts_capture_is_active
#cgo nocallback ts_capture_is_active
*/
import "C"

type Graph = C.ts_graph

// BeginCapture begins a capture on the stream. It may wait for the end of another capture. share is
// a graph whose memory the new graph shares, or nil.
func BeginCapture(s Stream, share *Graph) (g *Graph, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	err = awaitCapture(func() error { return failure(C.ts_graph_begin(s.c(), share, &g)) })
	if on := sanitizer.Load(); on != nil && err == nil {
		on.began(g, s, share)
	}
	return g, err
}

func EndCapture(g *Graph) error {
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_graph_end(g))
	if s := sanitizer.Load(); s != nil && err == nil {
		s.ended(g, true)
	}
	return err
}

func ReplayGraph(g *Graph, s Stream) error {
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_graph_replay(g, s.c()))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.replayed(g, s)
	}
	return err
}

func GraphNodes(g *Graph) int { return int(C.ts_graph_node_count(g)) }

// FreeGraph destroys the graph. If it fails, the graph is unchanged.
func FreeGraph(g *Graph) error {
	computing.enter()
	defer computing.leave()
	if s := sanitizer.Load(); s != nil {
		defer s.freedGraph(g)
	}
	return failure(C.ts_graph_destroy(g))
}

// CaptureHere reports whether the calling thread takes part in the capture that is under way. Such
// a thread must not wait for another goroutine, since that goroutine may wait for the capture's
// end.
func CaptureHere() (bool, error) {
	var here C.bool
	err := failure(C.ts_capture_is_active(&here))
	return bool(here), err
}

// awaitCapture makes a call that may wait for the end of a capture. A thread that takes part in the
// capture passes no gate, because the goroutines inside the gate may wait for this very capture;
// the shim refuses its call.
func awaitCapture(call func() error) error {
	here, err := CaptureHere()
	if err != nil {
		return err
	}
	if !here {
		forCapture.enter()
		defer forCapture.leave()
	}
	return call()
}

// waitForCapture waits for the end of the capture under way. A call that failed with CodeBusy uses
// it after leaving the computing gate, which the capture may need.
func waitForCapture() error {
	return awaitCapture(func() error { return failure(C.ts_capture_wait()) })
}
