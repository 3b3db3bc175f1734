package streamprog

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/torchstream/torchstream/internal/racecheck"
)

var sanitized = flag.Uint64("sanitized", 1000, "programs to check with the stream sanitizer, correct and without edges")

// checked runs a program on two observers at once: the sanitizer, and an order that is computed
// without clocks.
type checked struct {
	t    *testing.T
	p    *Program
	c    *racecheck.Checker
	want order
	// The graph of the current capture; nil outside.
	inside  *replayed
	members map[int]bool

	tensors []*memory
	hosts   []*memory
	free    map[int][]*memory // by stream
	graphs  []*replayed
	next    uintptr
	at      string // the current operation
	refused bool   // CUDA refuses a capture: work is outside of it, or is not joined
	// The events below this number are external.
	externals int
}

// memory is a block of a device or a host buffer.
type memory struct {
	address uintptr
	device  int32
	owner   int
	uses    []int
}

type replayed struct {
	order          // order inside the graph
	last  int      // node of the latest replay; -1: none
	nodes []signal // records of and waits for external events, in the graph's order
}

// order is a graph of the program's operations: an operation is ordered after another if a path
// leads to it.
type order struct {
	before [][]uint64    // by node: the nodes that it is ordered after
	last   map[int]int   // by queue: its last node
	events map[int]int   // by event: the node of its latest record
	touch  []touch       // all accesses
	races  map[race]bool // pairs of operations
	second map[string]bool
}

type touch struct {
	m     *memory
	node  int
	write bool
	at    string
}

type race struct{ first, second string }

const (
	hostQueue      = -1
	allocatorQueue = -2
	graphQueue     = -3
)

func newOrder() order {
	return order{last: map[int]int{}, events: map[int]int{}, races: map[race]bool{}, second: map[string]bool{}}
}

// node adds an operation of the queue, after other nodes; -1 stands for none.
func (o *order) node(queue int, after ...int) int {
	n := len(o.before)
	set := make([]uint64, n/64+1)
	add := func(m int) {
		if m >= 0 {
			for i, w := range o.before[m] {
				set[i] |= w
			}
			set[m/64] |= 1 << (m % 64)
		}
	}
	for _, q := range []int{queue, hostQueue} { // a launch is ordered after what the host waited for
		if m, ok := o.last[q]; ok {
			add(m)
		}
	}
	for _, m := range after {
		add(m)
	}
	o.before = append(o.before, set)
	o.last[queue] = n
	return n
}

func (o *order) ordered(first, then int) bool {
	set := o.before[then]
	return first == then || first/64 < len(set) && set[first/64]&(1<<(first%64)) != 0
}

func (o *order) access(m *memory, node int, write bool, at string) {
	for _, old := range o.touch {
		if old.m == m && (old.write || write) && old.at != at && !o.ordered(old.node, node) {
			o.races[race{old.at, at}] = true
			o.second[at] = true
		}
	}
	o.touch = append(o.touch, touch{m, node, write, at})
}

func (m *memory) access(q racecheck.Queue, write bool) racecheck.Access {
	return racecheck.Access{
		Memory: racecheck.Memory{Device: m.device, Storage: m.address, StorageBytes: 512,
			Region: racecheck.Bytes(m.address, 512), Track: true},
		Queue: q, Write: write,
	}
}

// queue returns the sanitizer's number for a stream.
func queue(stream int) racecheck.Queue { return racecheck.Queue(stream + 1) }

func queues(streams []int) (qs []racecheck.Queue) {
	for _, s := range streams {
		qs = append(qs, queue(s))
	}
	return qs
}

func (k *checked) place() *racecheck.Place { return &racecheck.Place{What: k.at} }

func (k *checked) order() *order {
	if k.inside != nil {
		return &k.inside.order
	}
	return &k.want
}

func runChecked(t *testing.T, p *Program) *checked {
	k := newChecked(t, p)
	k.run()
	return k
}

func newChecked(t *testing.T, p *Program) *checked {
	k := &checked{
		t: t, p: p, c: racecheck.New(racecheck.Options{MaxFindings: 1 << 20}), want: newOrder(),
		tensors: make([]*memory, p.Tensors),
		free:    map[int][]*memory{}, graphs: make([]*replayed, p.Graphs), next: 1 << 20,
	}
	for s := range p.Streams {
		k.c.NewQueue(fmt.Sprint("stream ", s), int32(s%p.Devices))
	}
	for range p.HostBuffers {
		k.hosts = append(k.hosts, k.block(-1, hostQueue))
	}
	return k
}

func (k *checked) run() {
	for i, o := range k.p.Ops {
		k.at = fmt.Sprint(i)
		k.do(o)
	}
}

func (k *checked) block(device int32, owner int) *memory {
	k.next += 4096
	return &memory{address: k.next, device: device, owner: owner}
}

func (k *checked) allocate(i, stream int) *memory {
	m := k.block(int32(stream%k.p.Devices), stream)
	if n := len(k.free[stream]); n > 0 && k.inside == nil {
		m.address = k.free[stream][n-1].address
		k.free[stream] = k.free[stream][:n-1]
	}
	k.tensors[i] = m
	k.order().access(m, k.order().node(stream), true, k.at)
	k.c.Allocate(m.device, m.address, 512, queue(stream), k.place())
	return m
}

// kernel is one operation on a stream.
func (k *checked) kernel(stream int, reads, writes []*memory) {
	if k.inside != nil && !k.members[stream] {
		k.refused = true
	}
	o := k.order()
	n := o.node(stream)
	var all []racecheck.Access
	for _, m := range reads {
		o.access(m, n, false, k.at)
		all = append(all, m.access(queue(stream), false))
	}
	for _, m := range writes {
		o.access(m, n, true, k.at)
		all = append(all, m.access(queue(stream), true))
	}
	k.c.Do(racecheck.Launch{At: k.place(), Accesses: all})
}

func (k *checked) wait(waiter int, on ...int) {
	for _, s := range on {
		if k.inside != nil && k.members[s] {
			k.members[waiter] = true
		}
		k.order().node(waiter, k.order().node(s))
	}
}

func memories(m ...*memory) []*memory { return m }

func (k *checked) do(o Op) {
	switch o.Kind {
	case New, Mix, Copy, Upload, Download, HostFill, Check:
		k.compute(o)
	case Free, Drop:
		k.release(k.tensors[o.Dst])
	case Use:
		m := k.tensors[o.Dst]
		m.uses = append(m.uses, o.Stream)
		k.c.Use(m.device, m.address, queue(o.Stream))
	case Record:
		if !k.external(o) {
			k.order().events[o.A] = k.order().node(o.Stream)
		}
		k.c.Record(uintptr(o.A), queue(o.Stream), k.place())
	case WaitEvent:
		if e, ok := k.order().events[o.A]; !k.external(o) && ok {
			if k.inside != nil {
				k.members[o.Stream] = true
			}
			k.order().node(o.Stream, e)
		}
		k.c.WaitEvent(queue(o.Stream), uintptr(o.A))
	case SyncEvent:
		if e, ok := k.order().events[o.A]; ok {
			k.order().node(hostQueue, e)
		}
		k.c.WaitEvent(racecheck.Host, uintptr(o.A))
	case Wait, HandOver:
		k.wait(o.Stream, o.Other)
		k.c.Wait(queue(o.Stream), queue(o.Other))
	case Fork:
		for _, s := range o.Streams {
			k.wait(s, o.Stream)
		}
		k.c.Fork(queue(o.Stream), queues(o.Streams)...)
	case Join:
		k.wait(o.Stream, o.Streams...)
		k.c.Wait(queue(o.Stream), queues(o.Streams)...)
	case Sync:
		k.sync(o.Stream)
	case Graph:
		k.capture(o)
	case Replay:
		k.replay(o)
	}
}

func (k *checked) sync(stream int) {
	k.order().node(hostQueue, k.order().node(stream))
	k.c.Wait(racecheck.Host, queue(stream))
}

func (k *checked) compute(o Op) {
	switch o.Kind {
	case New:
		k.kernel(o.Stream, memories(k.tensors[o.A], k.tensors[o.B]), memories(k.allocate(o.Dst, o.Stream)))
	case Mix:
		k.kernel(o.Stream, memories(k.tensors[o.A]), memories(k.tensors[o.Dst]))
	case Copy:
		k.wait(o.Stream, o.Other)
		k.c.Wait(queue(o.Stream), queue(o.Other))
		k.kernel(o.Stream, memories(k.tensors[o.A]), memories(k.tensors[o.Dst]))
		k.wait(o.Other, o.Stream)
		k.c.Wait(queue(o.Other), queue(o.Stream))
	case Upload:
		if k.tensors[o.Dst] == nil {
			k.allocate(o.Dst, o.Stream)
		}
		k.kernel(o.Stream, memories(k.hosts[o.A]), memories(k.tensors[o.Dst]))
	case Download:
		k.kernel(o.Stream, memories(k.tensors[o.A]), memories(k.hosts[o.Dst]))
	case HostFill:
		m := k.hosts[o.Dst]
		k.want.access(m, k.want.node(hostQueue), true, k.at)
		k.c.Do(racecheck.Launch{At: k.place(), Accesses: []racecheck.Access{m.access(racecheck.Host, true)}})
	case Check:
		k.kernel(o.Stream, memories(k.tensors[o.A]), nil)
		k.sync(o.Stream)
	}
}

// release frees memory. Its owner's next allocation counts as a write that happens at once.
func (k *checked) release(m *memory) {
	o := k.order()
	if len(m.uses) == 0 {
		o.access(m, o.node(m.owner), true, k.at)
		if k.inside == nil {
			k.free[m.owner] = append(k.free[m.owner], m)
		}
	} else {
		after := []int{o.node(m.owner)}
		for _, s := range m.uses {
			after = append(after, o.node(s))
		}
		o.access(m, o.node(allocatorQueue, after...), true, k.at) // delays no stream
		delete(o.last, allocatorQueue)
	}
	k.c.Free(m.device, m.address, k.place())
}

// capture checks the graph's own order: its first operation is ordered after everything before.
func (k *checked) capture(o Op) {
	g := &replayed{order: newOrder(), last: -1}
	k.graphs[o.Dst] = g
	outside := slices.Clone(k.tensors)
	k.inside, k.members = g, map[int]bool{o.Stream: true}
	k.c.Begin(queue(o.Stream))
	at := k.at
	for i, op := range o.Body {
		k.at = fmt.Sprintf("%s.%d", at, i)
		k.do(op)
	}
	end := g.node(o.Stream)
	for s := range k.members {
		if n, ok := g.order.last[s]; ok && !g.ordered(n, end) {
			k.refused = true
		}
	}
	k.c.End(uintptr(o.Dst+1), 0)
	k.at, k.inside, k.members = at, nil, nil
	for r := range g.races {
		k.want.races[r] = true
	}
	for s := range g.second {
		k.want.second[s] = true
	}
	own := func(t touch) bool { return !slices.Contains(outside, t.m) }
	g.touch = slices.DeleteFunc(g.touch, own)
	for i, m := range k.tensors {
		if outside[i] == nil && m != nil {
			k.tensors[i] = nil // it belongs to the graph
		}
	}
}

// replay adds the graph's operations to the program's, with their order inside the graph.
func (k *checked) replay(o Op) {
	g, w := k.graphs[o.Dst], &k.want
	begin := w.node(o.Stream, g.last)
	nodes := make([]int, len(g.before))
	for i := range nodes {
		after := []int{begin}
		for j := range i {
			if g.ordered(j, i) {
				after = append(after, nodes[j])
			}
		}
		for _, e := range g.nodes {
			if recorded, ok := w.events[e.event]; ok && e.node == i && !e.record {
				after = append(after, recorded)
			}
		}
		nodes[i] = w.node(graphQueue, after...)
		delete(w.last, graphQueue)
	}
	for _, t := range g.touch {
		w.access(t.m, nodes[t.node], t.write, k.at)
	}
	for _, e := range g.nodes {
		if e.record {
			w.events[e.event] = nodes[e.node]
		}
	}
	g.last = w.node(o.Stream, nodes...)
	k.c.Replay(uintptr(o.Dst+1), queue(o.Stream), k.place())
}

// compare requires that every finding is a race of the order, and that every operation that races
// with an earlier one has a finding.
func (k *checked) compare(what string) {
	k.t.Helper()
	if k.refused {
		return
	}
	found := map[string]bool{}
	for _, f := range k.c.Findings() {
		first := f.First.What
		if !k.want.races[race{first, f.Second.What}] {
			k.t.Errorf("%s: the sanitizer reports operations %s and %s, which are ordered:\n%v", what,
				first, f.Second.What, &f)
		}
		found[f.Second.What] = true
	}
	for at := range k.want.second {
		if !found[at] {
			k.t.Errorf("%s: operation %s is not ordered after an earlier one, and the sanitizer does not "+
				"report it", what, at)
		}
	}
	if s := k.c.Stats(); s.Forgotten > 0 {
		k.t.Errorf("%s: %d accesses were forgotten", what, s.Forgotten)
	}
}

// thin removes edges at random, at every level.
func thin(rng *rand.Rand, ops []Op, share float64) (left []Op, gone int) {
	for _, o := range ops {
		if o.Kind >= Wait && rng.Float64() < share {
			gone++
			continue
		}
		var n int
		o.Body, n = thin(rng, o.Body, share)
		gone += n
		left = append(left, o)
	}
	return left, gone
}

// The sanitizer reports nothing about correct programs.
func TestSanitizerPassesCorrectPrograms(t *testing.T) {
	for seed := uint64(1); seed <= *sanitized && !t.Failed(); seed++ {
		p := Generate(seed, options(seed))
		k := runChecked(t, p)
		k.compare(fmt.Sprintf("seed %d", seed))
		for _, f := range k.c.Findings() {
			t.Errorf("seed %d: a correct program has a finding:\n%v", seed, &f)
		}
	}
}

// The sanitizer reports every operation that races with an earlier one, and no other, in programs
// without some of their edges.
func TestSanitizerFindsMissingEdges(t *testing.T) {
	races, clean, pairs := 0, 0, 0
	for seed := uint64(1); seed <= *sanitized && !t.Failed(); seed++ {
		rng := rand.New(rand.NewPCG(seed, 3))
		p := *Generate(seed, options(seed))
		share := [...]float64{0.03, 0.1, 0.3, 1}[rng.IntN(4)]
		gone := 0
		for gone == 0 {
			var ops []Op
			if ops, gone = thin(rng, p.Ops, share); gone > 0 {
				p.Ops = ops
			} else if p.Edges() == 0 {
				break
			}
			share = min(1, 2*share)
		}
		k := runChecked(t, &p)
		k.compare(fmt.Sprintf("seed %d without %d edges", seed, gone))
		if len(k.want.races) > 0 {
			races++
			pairs += len(k.c.Findings())
		} else {
			clean++
		}
	}
	if races == 0 || clean == 0 {
		t.Errorf("%d programs with races and %d without: the comparison proves nothing", races, clean)
	}
	t.Logf("%d programs have races (%d findings), %d are correct without the edges that were left out",
		races, pairs, clean)
}

// The sanitizer agrees with the simulated device about each program that lacks one needed edge.
func TestSanitizerFindsEachMissingEdge(t *testing.T) {
	edges := 0
	for seed := uint64(1); seed <= (*sanitized+9)/10; seed++ {
		p := Generate(seed, options(seed))
		for e := range p.Edges() {
			less, gone := p.Without(e)
			k := runChecked(t, less)
			k.compare(fmt.Sprintf("seed %d without edge %d", seed, e))
			if len(k.c.Findings()) == 0 && !k.refused {
				t.Fatalf("seed %d without edge %d, %v: nothing is reported", seed, e, gone)
			}
			edges++
		}
	}
	t.Logf("%d edges left out, all reported", edges)
}
