//go:build linux

package capi

/*
#include "torchstream.h"
#cgo noescape ts_graph_begin
#cgo nocallback ts_graph_begin
#cgo nocallback ts_graph_end
#cgo nocallback ts_graph_replay
#cgo nocallback ts_graph_keep_for_dump
#cgo noescape ts_graph_dump
#cgo nocallback ts_graph_dump
#cgo noescape ts_graph_get_nodes
#cgo nocallback ts_graph_get_nodes
#cgo noescape ts_graph_get_handles
#cgo nocallback ts_graph_get_handles
#cgo nocallback ts_graph_destroy
#cgo nocallback ts_capture_wait
#cgo noescape ts_capture_is_active
#cgo nocallback ts_capture_is_active
*/
import "C"

import "os"

type Graph = C.ts_graph

// BeginCapture starts a capture on the stream. It may wait for the end of another capture. share,
// if not nil, is a graph that shares its memory with the new graph.
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
	if err := Check(); err != nil {
		return err
	}
	computing.enter()
	defer computing.leave()
	err := failure(C.ts_graph_replay(g, s.c()))
	if on := sanitizer.Load(); on != nil && err == nil {
		on.replayed(g, s)
	}
	return err
}

func GraphNodes(g *Graph) int { return int(C.ts_graph_node_count(g)) }

// KeepGraph keeps the cudaGraph_t of a graph that is being captured.
func KeepGraph(g *Graph) error { return failure(C.ts_graph_keep_for_dump(g)) }

type NodeKinds struct {
	Kernels, Copies, Fills, HostFunctions, EventRecords, EventWaits, Empty, Others int
}

func GraphNodeKinds(g *Graph) (NodeKinds, error) {
	n := C.ts_graph_nodes{size: C.sizeof_ts_graph_nodes}
	if err := failure(C.ts_graph_get_nodes(g, &n)); err != nil {
		return NodeKinds{}, err
	}
	return NodeKinds{
		Kernels: int(n.kernels), Copies: int(n.copies), Fills: int(n.fills), HostFunctions: int(n.host_functions),
		EventRecords: int(n.event_records), EventWaits: int(n.event_waits), Empty: int(n.empty), Others: int(n.others),
	}, nil
}

// DumpGraph returns the graph in the language of Graphviz.
func DumpGraph(g *Graph, verbose bool) ([]byte, error) {
	return written("torchstream-*.dot",
		func(path *C.char) error { return failure(C.ts_graph_dump(g, path, C.bool(verbose))) })
}

// written returns the content of a file that write creates.
func written(pattern string, write func(path *C.char) error) ([]byte, error) {
	f, err := os.CreateTemp("", pattern)
	if err != nil {
		return nil, err
	}
	defer os.Remove(f.Name())
	if err := f.Close(); err != nil {
		return nil, err
	}
	computing.enter()
	err = withString(f.Name(), write)
	computing.leave()
	if err != nil {
		return nil, err
	}
	return os.ReadFile(f.Name())
}

// GraphHandles returns the cudaGraphExec_t and, if KeepGraph kept it, the cudaGraph_t.
func GraphHandles(g *Graph) (exec, graph uintptr, err error) {
	var e, h C.uintptr_t
	err = failure(C.ts_graph_get_handles(g, &e, &h))
	return uintptr(e), uintptr(h), err
}

// FreeGraph destroys the graph. If it fails, the graph is unchanged.
func FreeGraph(g *Graph) error {
	computing.enter()
	defer computing.leave()
	s, captured := sanitizer.Load(), false
	if s != nil {
		captured = s.freeing(g)
	}
	err := failure(C.ts_graph_destroy(g))
	if s != nil && err == nil {
		s.freedGraph(g, captured)
	}
	return err
}

// CaptureHere reports whether the calling thread takes part in the running capture. Such a thread
// must not wait for another goroutine, since that goroutine may wait for the capture's end.
func CaptureHere() (bool, error) {
	if err := Check(); err != nil {
		return false, err
	}
	var here C.bool
	err := failure(C.ts_capture_is_active(&here))
	return bool(here), err
}

// awaitCapture makes a call that may wait for the end of a capture. A thread that takes part in the
// capture does not enter the gate, because the goroutines inside the gate may wait for this
// capture. The shim refuses such a thread's call.
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

// waitForCapture waits for the end of the running capture. A call that failed with CodeBusy uses it
// after leaving the computing gate, which the capture may need.
func waitForCapture() error {
	return awaitCapture(func() error { return failure(C.ts_capture_wait()) })
}
