package streamprog

import (
	"flag"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/torchstream/torchstream/internal/simulate"
)

var (
	programs = flag.Uint64("programs", 400, "simulated programs to run, from seed 1 on")
	only     = flag.Uint64("seed", 0, "run this one program, simulated or on a GPU, and print it")
)

// simulated runs a program on the simulated device.
type simulated struct {
	*simulate.World
	p       *Program
	tensors []*block
	hosts   []*simulate.Cell
	events  []*simulate.Event
	graphs  []*captured
	free    map[int][]*block // free memory by stream; the next allocation takes the last block
	// Freed blocks that wait for recorded streams. The simulation does not reuse them.
	late []*block
	want []int64 // values of the remaining checks
	gen  int     // number of the operation, for reports
}

// block is memory of a tensor.
type block struct {
	simulate.Cell
	owner int
	uses  []int // recorded streams
	ended []*simulate.Event
}

type captured struct {
	ops    []Op
	itself simulate.Cell
	last   simulate.Event // after the latest replay
	ran    bool
	reads  []int // tensors
	writes []int
}

// simulateProgram runs the program on the simulated device and returns the reports.
func simulateProgram(seed uint64, p *Program, trace func(string, ...any)) []string {
	w := simulate.New(seed, p.Streams)
	w.Trace, w.Lenient = trace, true
	m := &simulated{World: w, p: p, tensors: make([]*block, p.Tensors),
		events: make([]*simulate.Event, p.Events), graphs: make([]*captured, p.Graphs), want: p.Values(),
		free: map[int][]*block{}}
	for i := range p.HostBuffers {
		m.hosts = append(m.hosts, &simulate.Cell{Name: fmt.Sprint("host buffer ", i)})
	}
	for i := range m.events {
		m.events[i] = &simulate.Event{}
	}
	w.Go("host", func() {
		for i, o := range p.Ops {
			m.gen = i
			w.Note("%v", o)
			m.do(o)
		}
	})
	if err := w.Run(); err != nil {
		w.Report("%v", err)
	}
	for _, b := range m.late {
		w.TouchAfter(&b.Cell, "the allocator's next use", 0, b.ended...)
	}
	return w.Reports
}

func (m *simulated) kernel(stream int, name string, reads, writes []*simulate.Cell, run func()) {
	gen := m.gen
	m.Enqueue(stream, name, func(c *simulate.Clock) {
		for _, cell := range reads {
			m.TouchOn(stream, c, cell, name, gen, false)
		}
		for _, cell := range writes {
			m.TouchOn(stream, c, cell, name, gen, true)
		}
		if run != nil {
			run()
		}
	})
}

// cell returns an operand's memory. It exists even in a program without some edge, since only edges
// are removed.
func (m *simulated) cell(i int) *simulate.Cell { return &m.tensors[i].Cell }

func cells(cs ...*simulate.Cell) []*simulate.Cell { return cs }

func (m *simulated) do(o Op) {
	switch o.Kind {
	case New:
		a, b, dst := m.cell(o.A), m.cell(o.B), m.allocate(o.Dst, o.Stream)
		m.kernel(o.Stream, o.Kind.String(), cells(a, b), cells(dst),
			func() { dst.Value = int(o.Result(0, int64(a.Value), int64(b.Value))) })
	case Mix:
		a, dst := m.cell(o.A), m.cell(o.Dst)
		m.kernel(o.Stream, o.Kind.String(), cells(a), cells(dst),
			func() { dst.Value = int(o.Result(int64(dst.Value), int64(a.Value), 0)) })
	case Copy:
		a, dst := m.cell(o.A), m.cell(o.Dst)
		m.order(o.Other, o.Stream)
		m.kernel(o.Stream, o.Kind.String(), cells(a), cells(dst), func() { dst.Value = a.Value })
		m.order(o.Stream, o.Other)
	case Upload:
		if m.tensors[o.Dst] == nil {
			m.allocate(o.Dst, o.Stream)
		}
		a, dst := m.hosts[o.A], m.cell(o.Dst)
		m.kernel(o.Stream, o.Kind.String(), cells(a), cells(dst), func() { dst.Value = a.Value })
	case Download:
		a, dst := m.cell(o.A), m.hosts[o.Dst]
		m.kernel(o.Stream, o.Kind.String(), cells(a), cells(dst), func() { dst.Value = a.Value })
	case HostFill:
		m.Pause(nil)
		m.Touch(m.hosts[o.Dst], "HostFill", m.gen, true)
		m.hosts[o.Dst].Value = int(o.K)
	case Check:
		a, got := m.cell(o.A), 0
		m.kernel(o.Stream, o.Kind.String(), cells(a), nil, func() { got = a.Value })
		m.sync(o.Stream)
		if want := m.want[0]; int64(got) != want {
			m.Report("operation %d, %v: %d, want %d", m.gen, o, got, want)
		}
		m.want = m.want[1:]
	case Free, Drop: // the collector may run at once
		m.release(m.tensors[o.Dst])
	case Use:
		m.tensors[o.Dst].uses = append(m.tensors[o.Dst].uses, o.Stream)
	case Record:
		m.RecordEvent(m.events[o.A], o.Stream)
	case WaitEvent:
		m.check(m.WaitEvent(o.Stream, m.events[o.A]))
	case SyncEvent:
		m.check(m.Synchronize(m.events[o.A], nil))
	case Wait, HandOver:
		m.order(o.Other, o.Stream)
	case Fork:
		for _, to := range o.Streams {
			m.order(o.Stream, to)
		}
	case Join:
		for _, from := range o.Streams {
			m.order(from, o.Stream)
		}
	case Sync:
		m.sync(o.Stream)
	case Graph:
		m.graphs[o.Dst] = m.capture(o)
	case Replay:
		m.replay(m.graphs[o.Dst], o.Stream)
	}
}

func (m *simulated) check(err error) {
	if err != nil {
		m.Report("operation %d: %v", m.gen, err)
	}
}

// order records an event on one stream and makes the other wait for it.
func (m *simulated) order(from, to int) {
	e := &simulate.Event{}
	m.RecordEvent(e, from)
	m.check(m.WaitEvent(to, e))
}

func (m *simulated) sync(stream int) {
	e := &simulate.Event{}
	m.RecordEvent(e, stream)
	m.check(m.Synchronize(e, nil))
}

// ---- The caching allocator

func (m *simulated) allocate(i, stream int) *simulate.Cell {
	b := &block{owner: stream}
	if n := len(m.free[stream]); n > 0 {
		b = m.free[stream][n-1]
		m.free[stream] = m.free[stream][:n-1]
	}
	b.Name, b.uses, b.ended = fmt.Sprint("tensor ", i), nil, nil
	m.tensors[i] = b
	return &b.Cell
}

// release returns memory to its stream: at once, or when the recorded streams have reached the
// current point.
func (m *simulated) release(b *block) {
	if len(b.uses) == 0 {
		m.back(b)
		return
	}
	for _, s := range append(b.uses, b.owner) {
		e := &simulate.Event{}
		m.RecordEvent(e, s)
		b.ended = append(b.ended, e)
	}
	m.late = append(m.late, b)
}

// back makes the memory available to its stream. The simulated allocator writes it at once, so that
// a missing edge is found without an allocation at the right time.
func (m *simulated) back(b *block) {
	m.kernel(b.owner, "the allocator's next use", nil, cells(&b.Cell), nil)
	m.free[b.owner] = append(m.free[b.owner], b)
}

// ---- Graphs

// capture checks in a separate world that the graph's own edges order its operations. An operation
// on the captured stream writes all memory before anything else, and another operation writes it at
// the end.
func (m *simulated) capture(o Op) *captured {
	g := &captured{ops: o.Body}
	g.itself.Name = fmt.Sprint("graph ", o.Dst)
	inside := &simulated{World: simulate.New(uint64(m.gen), m.p.Streams), p: m.p,
		tensors: slices.Clone(m.tensors), events: make([]*simulate.Event, m.p.Events),
		free: map[int][]*block{}}
	inside.Lenient = true
	for i := range inside.events {
		inside.events[i] = &simulate.Event{}
	}
	note := func(list *[]int, i int) {
		if m.tensors[i] != nil && !slices.Contains(*list, i) { // all others belong to the graph
			*list = append(*list, i)
		}
	}
	for _, op := range o.Body {
		switch op.Kind {
		case New:
			note(&g.reads, op.A)
			note(&g.reads, op.B)
		case Mix:
			note(&g.reads, op.A)
			note(&g.writes, op.Dst)
		}
	}
	inside.Go("capture", func() {
		var all []*simulate.Cell
		for i, b := range m.tensors {
			if b != nil {
				fresh := &block{owner: o.Stream}
				fresh.Name = fmt.Sprint("tensor ", i)
				inside.tensors[i] = fresh
				all = append(all, &fresh.Cell)
			}
		}
		inside.kernel(o.Stream, "the work before the graph", nil, all, nil)
		for _, op := range o.Body {
			inside.gen = m.gen
			inside.do(op)
		}
		for i, b := range inside.tensors {
			if b != nil && m.tensors[i] == nil {
				all = append(all, &b.Cell)
			}
		}
		inside.kernel(o.Stream, "the work after the graph", nil, all, nil)
	})
	if err := inside.Run(); err != nil {
		inside.Report("%v", err)
	}
	for _, r := range inside.Reports {
		m.Report("in a graph: %s", r)
	}
	return g
}

func (m *simulated) replay(g *captured, stream int) {
	outside := slices.Clone(m.tensors)
	var reads []*simulate.Cell
	writes := cells(&g.itself)
	for _, i := range g.reads {
		reads = append(reads, m.cell(i))
	}
	for _, i := range g.writes {
		writes = append(writes, m.cell(i))
	}
	if g.ran {
		m.check(m.WaitEvent(stream, &g.last))
	}
	defer m.RecordEvent(&g.last, stream)
	g.ran = true
	m.kernel(stream, g.itself.Name, reads, writes, func() {
		own := map[int]*simulate.Cell{}
		at := func(i int) *simulate.Cell {
			if outside[i] != nil {
				return &outside[i].Cell
			}
			if own[i] == nil {
				own[i] = &simulate.Cell{}
			}
			return own[i]
		}
		for _, op := range g.ops {
			if op.Kind == New || op.Kind == Mix {
				at(op.Dst).Value = int(op.Result(int64(at(op.Dst).Value), int64(at(op.A).Value), int64(at(op.B).Value)))
			}
		}
	})
}

// ---- Tests

func options(seed uint64) Options {
	return Options{Ops: 60 + int(seed%5)*20, Streams: 2 + int(seed%6), Devices: 1 + int(seed/6%2), Graphs: true}
}

// Every program computes the same values as when it runs one operation at a time, without any
// report.
func TestPrograms(t *testing.T) {
	if *only > 0 {
		p := Generate(*only, options(*only))
		for i, o := range p.Ops {
			t.Logf("%d: %v", i, o)
		}
		for _, r := range simulateProgram(*only, p, nil) {
			t.Error(r)
		}
		return
	}
	var count [len(kinds)]int
	edges := 0
	for seed := uint64(1); seed <= *programs; seed++ {
		p := Generate(seed, options(seed))
		for _, r := range simulateProgram(seed, p, nil) {
			t.Errorf("seed %d: %s\nreplay it with: go test ./internal/streamprog -run TestPrograms -v "+
				"-seed %d", seed, r, seed)
		}
		if t.Failed() {
			return
		}
		for _, o := range p.Ops {
			count[o.Kind]++
		}
		edges += p.Edges()
	}
	for k, n := range count {
		if n == 0 {
			t.Errorf("no program has a %v", Kind(k))
		}
	}
	t.Logf("%d programs, %d needed edges; operations %v", *programs, edges, count)
}

// The simulation reports every program that lacks a needed edge.
func TestMissingEdgeIsReported(t *testing.T) {
	edges := 0
	for seed := uint64(1); seed <= (*programs+9)/10; seed++ {
		p := Generate(seed, options(seed))
		for e := range p.Edges() {
			less, gone := p.Without(e)
			reports := simulateProgram(seed, less, nil)
			if len(reports) == 0 {
				t.Fatalf("seed %d without edge %d, %v: nothing is reported", seed, e, gone)
			}
			if !slices.ContainsFunc(reports, func(r string) bool {
				return strings.Contains(r, "ordered") ||
					strings.Contains(r, "may still read")
			}) {
				t.Errorf("seed %d without edge %d, %v: %v", seed, e, gone, reports)
			}
			edges++
		}
	}
	if edges == 0 {
		t.Error("0 edges were left out, want some")
	}
	t.Logf("%d edges left out, all reported", edges)
}
