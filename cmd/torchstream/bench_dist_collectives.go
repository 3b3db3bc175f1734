package main

import (
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/internal/printable"
	"github.com/torchstream/torchstream/torch"
)

// collective is one of the calls of a group that bench dist measures.
type collective struct {
	name string // in the report, in -collectives and in pytorch_train.py
	// bus is the bus bandwidth of n ranks over the bytes of whole by the time, as in
	// https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
	bus  func(n float64) float64
	call func(g *distributed.Group, t collectiveTensors) error
}

// collectiveTensors are zeros of float32: their sums stay finite.
type collectiveTensors struct {
	whole, other *torch.Tensor // of the row's bytes
	part         *torch.Tensor // of other: a rank's share of whole
}

// allReduce is also what doctor -dist measures.
var allReduce = collective{"all-reduce", func(n float64) float64 { return 2 * (n - 1) / n },
	func(g *distributed.Group, t collectiveTensors) error { return g.AllReduce(t.whole, distributed.Sum) }}

var collectives = []collective{
	allReduce,
	{"reduce-scatter", partsOfOthers, func(g *distributed.Group, t collectiveTensors) error {
		return g.ReduceScatter(t.part, t.whole, distributed.Sum)
	}},
	{"all-gather", partsOfOthers, func(g *distributed.Group, t collectiveTensors) error { return g.AllGather(t.whole, t.part) }},
	{"broadcast", func(float64) float64 { return 1 }, func(g *distributed.Group, t collectiveTensors) error { return g.Broadcast(t.whole, 0) }},
	{"all-to-all", partsOfOthers, func(g *distributed.Group, t collectiveTensors) error {
		return g.AllToAll(t.other, t.whole, distributed.AllToAllRows{})
	}},
}

// partsOfOthers is the factor of collectives in which a rank's own part of whole stays on the rank.
func partsOfOthers(n float64) float64 { return (n - 1) / n }

func collectiveNames() string {
	var names []string
	for _, c := range collectives {
		names = append(names, c.name)
	}
	return strings.Join(names, ",")
}

// parseCollectives returns the collectives of names that commas separate.
func parseCollectives(names string) ([]collective, error) {
	var found []collective
	if names == "" {
		return nil, nil
	}
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(collectives, func(c collective) bool { return c.name == name })
		if i < 0 {
			return nil, fmt.Errorf("bench distributed: -collectives: there is no %q: want some of %s", name, collectiveNames())
		}
		found = append(found, collectives[i])
	}
	return found, nil
}

// collectiveRow is a collective of all ranks on float32.
type collectiveRow struct {
	Name  string `json:"collective"`
	Bytes int64  `json:"bytes"` // of the tensor that is reduced, gathered, broadcast or exchanged
	collectiveTimes
	// GraphNodes is the number of nodes in the graph for each call, on a GPU.
	GraphNodes float64          `json:"graph_nodes,omitempty"`
	PyTorch    *collectiveTimes `json:"pytorch,omitempty"`
}

// collectiveTimes are milliseconds of a call. The graph has as many calls as an eager round, so its
// time is NCCL's without the host's.
type collectiveTimes struct {
	MS      float64 `json:"ms"`
	BusGBps float64 `json:"bus_gb_s"`           // by MS
	IssueMS float64 `json:"issue_ms,omitempty"` // of the host, on a GPU
	GraphMS float64 `json:"graph_ms,omitempty"` // on a GPU
}

func (t *collectiveTimes) String() string {
	switch {
	case t == nil:
		return "-\t-\t-\t-"
	case t.IssueMS == 0:
		return fmt.Sprintf("%.1f\t%.3f\t-\t-", t.BusGBps, t.MS)
	case t.GraphMS == 0:
		return fmt.Sprintf("%.1f\t%.3f\t%.3f\t-", t.BusGBps, t.MS, t.IssueMS)
	}
	return fmt.Sprintf("%.1f\t%.3f\t%.3f\t%.3f", t.BusGBps, t.MS, t.IssueMS, t.GraphMS)
}

// collectiveCalls is the number of calls in a round: small ones need many, because a round also has
// the time until the first one begins and until the host sees the end.
func collectiveCalls(bytes int64) int { return int(min(200, max(20, (1<<30)/bytes))) }

// collectiveReplays is the number of replays in a round: the launch of each but the first one is
// hidden under the replay before it.
const collectiveReplays = 4

// measureCollective measures a collective on bytes, rounded up to equal parts of 16 bytes or a
// multiple: NCCL needs that for its widest loads and stores.
func (b *distBench) measureCollective(c collective, bytes int64) (_ *collectiveRow, err error) {
	n := int64(b.world.Size())
	part := (bytes + 16*n - 1) / (16 * n) * 4
	scope := torch.NewScope("bench dist")
	defer func() { err = errors.Join(err, scope.Close()) }()
	var t collectiveTensors
	for _, x := range []**torch.Tensor{&t.whole, &t.other} {
		made, err := torch.Zeros(b.device, torch.Float32, part*n)
		if err != nil {
			return nil, err
		}
		*x = scope.Own(made)
	}
	t.part = t.other.Narrow(0, 0, part)
	call := func() error { return c.call(b.world, t) }
	if err := call(); err != nil {
		return nil, err
	}
	row := &collectiveRow{Name: c.name, Bytes: 4 * part * n}
	calls := collectiveCalls(row.Bytes)
	s, issue, err := b.bestIssued(calls, call)
	if err != nil {
		return nil, err
	}
	row.MS, row.BusGBps = s*1e3, c.bus(float64(n))*float64(row.Bytes)/s/1e9
	if b.device == cuda.CPU {
		return row, nil
	}
	row.IssueMS = issue * 1e3
	if b.noGraphs {
		return row, nil
	}
	row.GraphMS, row.GraphNodes, err = b.collectiveGraph(calls, call)
	return row, err
}

// collectiveGraph returns the milliseconds and the nodes of a call in a graph of several.
func (b *distBench) collectiveGraph(calls int, call func() error) (ms, nodes float64, err error) {
	on := cuda.DefaultStream(b.device)
	graph, err := cuda.Capture(cuda.CaptureOptions{Stream: on}, func() error {
		for range calls {
			if err := call(); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return 0, 0, err
	}
	nodes = float64(graph.Nodes()) / float64(calls)
	replay := func() error { return graph.Replay(on) }
	err = replay() // the first one uploads the graph
	if err == nil {
		ms, err = b.best(collectiveReplays, replay)
	}
	return ms * 1e3 / float64(calls), nodes, errors.Join(err, b.wait(), graph.Close())
}

func (r *distReport) collectivesTable(out io.Writer) error {
	if len(r.Collectives) == 0 {
		return nil
	}
	w := printable.NewTable(out, tabwriter.AlignRight)
	fmt.Fprintln(w, "\ncollective\tMiB\tbus GB/s\tms\tof the host\tin a graph\tPyTorch, bus GB/s\tms\tof the host\tin a graph\t")
	for _, row := range r.Collectives {
		fmt.Fprintf(w, "%s\t%d\t%v\t%v\t\n", row.Name, row.Bytes>>20, &row.collectiveTimes, row.PyTorch)
	}
	return w.Flush()
}
