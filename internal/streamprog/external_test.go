package streamprog

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// signal is a node of a graph: the record of an external event, or a wait for one.
type signal struct {
	event, node int
	record      bool
}

// external records in k.inside that the capture records an external event or waits for one. It
// returns false for other operations.
func (k *checked) external(o Op) bool {
	if k.inside == nil || o.A >= k.externals {
		return false
	}
	_, recorded := k.want.events[o.A]
	if o.Kind == Record || recorded { // the library refuses a wait for an event without a record
		k.inside.nodes = append(k.inside.nodes, signal{o.A, k.inside.node(o.Stream), o.Kind == Record})
	}
	return true
}

// externalProgram returns a random program, correct or not, with graphs whose nodes record external
// events and wait for them. Events below the given number are external. All streams are on one
// device.
func externalProgram(seed uint64, externals int) *Program {
	rng := rand.New(rand.NewPCG(seed, 5))
	p := &Program{Streams: 2 + rng.IntN(4), Devices: 1, Tensors: 2 + rng.IntN(6), HostBuffers: 1,
		Events: externals + 2, Graphs: 3}
	for i := range p.Tensors {
		p.Ops = append(p.Ops, Op{Kind: Upload, Dst: i, Stream: 0})
	}
	p.Ops = append(p.Ops, Op{Kind: Sync, Stream: 0})
	edges := 1 + rng.IntN(9) // share of edges, in tenths
	step := func(events int) Op {
		o := Op{Stream: rng.IntN(p.Streams), Other: rng.IntN(p.Streams), Dst: rng.IntN(p.Tensors), A: rng.IntN(events)}
		switch n := rng.IntN(3); {
		case rng.IntN(10) >= edges:
			o.Kind, o.A = Mix, rng.IntN(p.Tensors)
		case n == 0 && o.Stream != o.Other:
			o.Kind = Wait
		case n == 1:
			o.Kind = WaitEvent
		default:
			o.Kind = Record
		}
		return o
	}
	var sides []int
	for s := range p.Streams - 1 {
		sides = append(sides, s+1)
	}
	graphs := 0
	for range 60 {
		switch n := rng.IntN(12); {
		case n == 0 && graphs < p.Graphs:
			body := []Op{{Kind: Fork, Stream: 0, Streams: sides}}
			for range 2 + rng.IntN(8) {
				body = append(body, step(externals))
			}
			body = append(body, Op{Kind: Join, Stream: 0, Streams: sides})
			p.Ops = append(p.Ops, Op{Kind: Graph, Stream: 0, Dst: graphs, Body: body})
			graphs++
		case n < 4 && graphs > 0:
			p.Ops = append(p.Ops, Op{Kind: Replay, Stream: rng.IntN(p.Streams), Dst: rng.IntN(graphs)})
		case n == 4 && rng.IntN(4) == 0:
			p.Ops = append(p.Ops, Op{Kind: SyncEvent, A: rng.IntN(p.Events)})
		default:
			p.Ops = append(p.Ops, step(p.Events))
		}
	}
	return p
}

// The sanitizer knows which part of a replay comes before the record of an external event in the
// graph, and which part comes after a wait for one: it reports every operation that races with an
// earlier one, and no other.
func TestSanitizerKnowsExternalEvents(t *testing.T) {
	const externals = 2
	var nodes, races, clean int
	for seed := uint64(1); seed <= *sanitized && !t.Failed(); seed++ {
		k := newChecked(t, externalProgram(seed, externals))
		k.externals = externals
		for e := range externals {
			k.c.External(uintptr(e))
		}
		k.run()
		k.compare(fmt.Sprintf("seed %d", seed))
		for _, g := range k.graphs {
			if g != nil {
				nodes += len(g.nodes)
			}
		}
		if len(k.want.races) > 0 {
			races++
		} else {
			clean++
		}
	}
	if nodes == 0 || races == 0 || clean == 0 {
		t.Errorf("%d nodes of external events, %d programs with races and %d without: the comparison "+
			"proves nothing", nodes, races, clean)
	}
	t.Logf("%d nodes of external events; %d programs have races, %d have none", nodes, races, clean)
}
