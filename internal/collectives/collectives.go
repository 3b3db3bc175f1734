// Package collectives measures the collectives of [distributed.Group].
package collectives

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/distributed"
	"github.com/torchstream/torchstream/torch"
)

// Bench runs measurements on all ranks of a job. Each rank calls the same methods in the same
// order.
type Bench struct {
	World    *distributed.Group
	Device   cuda.Device // device of this rank's tensors
	Rounds   int         // the best round counts
	NoGraphs bool        // do not measure calls in graphs
}

// Wait blocks until the device has finished its work.
func (b *Bench) Wait() error {
	if b.Device == cuda.CPU {
		return nil
	}
	return b.Device.Synchronize()
}

// Collective is a collective operation of a group.
type Collective struct {
	Name string // name in the report, in -collectives and in pytorch_train.py
	// bus returns the factor for n ranks that converts the rate of whole, in bytes per second, to
	// the bus bandwidth, as defined in
	// https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md.
	bus  func(n float64) float64
	call func(g *distributed.Group, t tensors) error
}

// tensors are float32 zeros, so that sums stay finite.
type tensors struct {
	whole, other *torch.Tensor // of the row's size
	part         *torch.Tensor // a rank's part of other, with the size of its share of whole
}

// AllReduce is the collective that sums a tensor over all ranks.
func AllReduce() Collective {
	return Collective{"all-reduce", func(n float64) float64 { return 2 * (n - 1) / n },
		func(g *distributed.Group, t tensors) error { return g.AllReduce(t.whole, distributed.Sum) }}
}

// All returns the collectives that can be measured.
func All() []Collective {
	return []Collective{
		AllReduce(),
		{"reduce-scatter", partsOfOthers, func(g *distributed.Group, t tensors) error {
			return g.ReduceScatter(t.part, t.whole, distributed.Sum)
		}},
		{"all-gather", partsOfOthers,
			func(g *distributed.Group, t tensors) error { return g.AllGather(t.whole, t.part) }},
		{"broadcast", func(float64) float64 { return 1 },
			func(g *distributed.Group, t tensors) error { return g.Broadcast(t.whole, 0) }},
		{"all-to-all", partsOfOthers, func(g *distributed.Group, t tensors) error {
			return g.AllToAll(t.other, t.whole, distributed.AllToAllRows{})
		}},
	}
}

// partsOfOthers is the bus factor of collectives in which a rank's own part of whole stays on the
// rank.
func partsOfOthers(n float64) float64 { return (n - 1) / n }

// Names returns the names of all collectives, separated by commas.
func Names() string {
	var names []string
	for _, c := range All() {
		names = append(names, c.Name)
	}
	return strings.Join(names, ",")
}

// Parse returns the collectives with the names, which are separated by commas.
func Parse(names string) ([]Collective, error) {
	var found []Collective
	if names == "" {
		return nil, nil
	}
	all := All()
	for name := range strings.SplitSeq(names, ",") {
		i := slices.IndexFunc(all, func(c Collective) bool { return c.Name == name })
		if i < 0 {
			return nil, fmt.Errorf("-collectives: there is no %q: want some of %s", name, Names())
		}
		found = append(found, all[i])
	}
	return found, nil
}

// Row holds the times of one collective over all ranks on float32.
type Row struct {
	Name  string `json:"collective"`
	Bytes int64  `json:"bytes"` // size of the tensor that is reduced, gathered, broadcast or exchanged
	Times
	// GraphNodes is the number of graph nodes for each call, on a GPU.
	GraphNodes float64 `json:"graph_nodes,omitempty"`
	PyTorch    *Times  `json:"pytorch,omitempty"`
}

// Times are milliseconds for each call. A graph contains as many calls as an eager round. The
// graph's time is NCCL's time without the host's.
type Times struct {
	MS      float64 `json:"ms"`
	BusGBps float64 `json:"bus_gb_s"`           // computed from MS
	IssueMS float64 `json:"issue_ms,omitempty"` // host time, on a GPU
	GraphMS float64 `json:"graph_ms,omitempty"` // on a GPU
}

func (t *Times) String() string {
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

// Calls returns the number of calls in a round. Small calls need many, because a round also
// contains the time until the first call starts and until the host sees the end.
func Calls(bytes int64) int { return int(min(200, max(20, (1<<30)/bytes))) }

// Replays is the number of replays in a round. The launch of each, except the first, overlaps the
// previous replay.
const Replays = 4

// Measure measures a collective on the given number of bytes, rounded up so that all ranks have
// equal parts of a multiple of 16 bytes: NCCL needs that for its widest loads and stores.
func (b *Bench) Measure(c Collective, bytes int64) (_ *Row, err error) {
	n := int64(b.World.Size())
	part := (bytes + 16*n - 1) / (16 * n) * 4
	scope := torch.NewScope("a collective")
	defer func() { err = errors.Join(err, scope.Close()) }()
	var t tensors
	for _, x := range []**torch.Tensor{&t.whole, &t.other} {
		made, err := torch.Zeros(b.Device, torch.Float32, part*n)
		if err != nil {
			return nil, err
		}
		*x = scope.Own(made)
	}
	t.part = t.other.Narrow(0, 0, part)
	call := func() error { return c.call(b.World, t) }
	if err := call(); err != nil {
		return nil, err
	}
	row := &Row{Name: c.Name, Bytes: 4 * part * n}
	calls := Calls(row.Bytes)
	s, issue, err := b.BestIssued(calls, call)
	if err != nil {
		return nil, err
	}
	row.MS, row.BusGBps = s*1e3, c.bus(float64(n))*float64(row.Bytes)/s/1e9
	if b.Device == cuda.CPU {
		return row, nil
	}
	row.IssueMS = issue * 1e3
	if b.NoGraphs {
		return row, nil
	}
	row.GraphMS, row.GraphNodes, err = b.collectiveGraph(calls, call)
	return row, err
}

// collectiveGraph captures several calls in a graph. It returns the time in milliseconds and the
// number of nodes for each call.
func (b *Bench) collectiveGraph(calls int, call func() error) (ms, nodes float64, err error) {
	on := cuda.DefaultStream(b.Device)
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
	err = replay() // the first replay uploads the graph
	if err == nil {
		ms, err = b.Best(Replays, replay)
	}
	return ms * 1e3 / float64(calls), nodes, errors.Join(err, b.Wait(), graph.Close())
}

// Together returns on all ranks at nearly the same time: each rank waits for an all-reduce. Ranks
// leave a barrier of the hosts one after the other, so after such a barrier the first measured call
// would include a wait for the last rank.
func (b *Bench) Together() error {
	x, err := torch.Zeros(b.Device, torch.Float32, 1)
	if err != nil {
		return err
	}
	defer x.Close()
	return errors.Join(b.Wait(), b.World.Barrier(), b.World.AllReduce(x, distributed.Sum), b.Wait())
}

// Best returns the seconds for each call, of the slowest rank in the best round.
func (b *Bench) Best(calls int, call func() error) (float64, error) {
	took, _, err := b.BestIssued(calls, call)
	return took, err
}

// BestIssued is Best, and also returns the host's seconds to issue a call.
func (b *Bench) BestIssued(calls int, call func() error) (took, issue float64, err error) {
	for range b.Rounds {
		if err := b.Together(); err != nil {
			return 0, 0, err
		}
		begun := time.Now()
		for range calls {
			if err := call(); err != nil {
				return 0, 0, err
			}
		}
		issued := time.Since(begun)
		if err := b.Wait(); err != nil {
			return 0, 0, err
		}
		all, err := distributed.AllGatherObject(b.World,
			[2]float64{time.Since(begun).Seconds() / float64(calls), issued.Seconds() / float64(calls)})
		if err != nil {
			return 0, 0, err
		}
		slowest := slices.MaxFunc(all, func(a, b [2]float64) int { return cmp.Compare(a[0], b[0]) })
		if took == 0 || slowest[0] < took {
			took, issue = slowest[0], slowest[1]
		}
	}
	return took, issue, nil
}
