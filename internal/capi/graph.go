package capi

/*
#include "torchstream.h"
#cgo noescape ts_graph_begin
#cgo nocallback ts_graph_begin
#cgo nocallback ts_graph_end
#cgo nocallback ts_graph_replay
#cgo nocallback ts_graph_free
#cgo nocallback ts_capture_wait
*/
import "C"

type Graph = C.ts_graph

// BeginCapture may wait for another capture's end. share may be nil.
func BeginCapture(s Stream, share *Graph) (g *Graph, err error) {
	if err := Check(); err != nil {
		return nil, err
	}
	waiting.enter()
	defer waiting.leave()
	err = failure(C.ts_graph_begin(s.c(), share, &g))
	return g, err
}

func EndCapture(g *Graph) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_graph_end(g))
}

func ReplayGraph(g *Graph, s Stream) error {
	computing.enter()
	defer computing.leave()
	return failure(C.ts_graph_replay(g, s.c()))
}

func GraphNodes(g *Graph) int { return int(C.ts_graph_nodes(g)) }

func FreeGraph(g *Graph) {
	computing.enter()
	defer computing.leave()
	C.ts_graph_free(g)
}

// waitForCapture is what a call does that got CodeBusy, outside of the computing gate, which the capture may need.
func waitForCapture() error {
	waiting.enter()
	defer waiting.leave()
	return failure(C.ts_capture_wait())
}
