// Package streamprog generates random programs over streams and tensors: allocations, kernels,
// copies, frees, garbage collection, events, forks, joins and graphs. Every program is correct: the
// fewest possible edges order each read and overwrite on a stream after the earlier accesses to the
// same memory. So a program computes the same values as when it runs one operation at a time
// ([Program.Values], the oracle), and leaving out any of its edges ([Program.Without]) is a defect.
//
// The tests run the same programs on the simulated device of package simulate, which reports
// unordered accesses, and on GPUs, where they compare the numbers.
package streamprog

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
)

// Kind is the kind of an operation. Stream, Other and Streams are numbers of streams; Dst, A and B
// are numbers of tensors, host buffers or graphs.
type Kind uint8

const (
	New Kind = iota // allocates Dst on Stream and sets it to 5*A + 7*B + K
	Mix             // Dst = 3*Dst + 5*A + K, in place, on Stream
	// Dst = A, on Stream. If Dst is on another device, Other is the stream there, and the copy is
	// ordered on Other before and after.
	Copy
	Upload   // Dst = host buffer A, on Stream
	Download // host buffer Dst = A, on Stream
	HostFill // the host writes K to host buffer Dst
	Busy     // keeps Stream busy for a while
	Check    // the host reads A through Stream, and waits
	Free     // frees Dst
	Drop     // leaves the last handle of Dst to the garbage collector
	Record   // records event A on Stream
	Graph    // captures Body on Stream as graph Dst; nothing runs
	Replay   // runs graph Dst on Stream, after its previous replay on any stream

	// The edges.
	Wait      // Stream waits for Other
	WaitEvent // Stream waits for event A
	Fork      // each of Streams waits for Stream
	Join      // Stream waits for each of Streams
	Sync      // the host waits for Stream
	SyncEvent // the host waits for event A
	// Records tensor Dst as used on Stream: its memory is reused only after the work that is queued
	// on Stream when Dst is freed.
	Use
	HandOver // Stream waits for Other, of the same device: DLPack's export of a tensor
)

var kinds = [...]string{"New", "Mix", "Copy", "Upload", "Download", "HostFill", "Busy", "Check", "Free",
	"Drop", "Record", "Graph", "Replay", "Wait", "WaitEvent", "Fork",
	"Join", "Sync", "SyncEvent", "Use", "HandOver"}

func (k Kind) String() string { return kinds[k] }

// Op is one operation.
type Op struct {
	Kind          Kind
	Stream, Other int
	Streams       []int
	Dst, A, B     int
	K             int64
	Body          []Op
	Needed        bool // the program is wrong without this edge
}

func (o Op) String() string {
	switch o.Kind {
	case New, Mix:
		return fmt.Sprintf("%v t%d <- t%d t%d %d on %d", o.Kind, o.Dst, o.A, o.B, o.K, o.Stream)
	case Copy:
		return fmt.Sprintf("Copy t%d <- t%d on %d (%d)", o.Dst, o.A, o.Stream, o.Other)
	case Wait, HandOver:
		return fmt.Sprintf("%v of %d for %d", o.Kind, o.Stream, o.Other)
	case Fork, Join:
		return fmt.Sprintf("%v %d %v", o.Kind, o.Stream, o.Streams)
	case Graph:
		var b strings.Builder
		for _, op := range o.Body {
			fmt.Fprintf(&b, "\n    %v", op)
		}
		return fmt.Sprintf("Graph g%d on %d:%s", o.Dst, o.Stream, b.String())
	}
	return fmt.Sprintf("%v dst %d a %d k %d on %d", o.Kind, o.Dst, o.A, o.K, o.Stream)
}

// Program is a list of operations. Stream i belongs to device i % Devices. Graphs never contain the
// streams 0 to Devices-1, so that these can be default streams.
type Program struct {
	Streams, Devices, Tensors, HostBuffers, Events, Graphs int
	Ops                                                    []Op
}

// Options are the options of Generate. All numbers are required.
type Options struct {
	Ops, Streams, Devices int
	Graphs                bool
}

// stamp is a time on an actor's clock. The actors are the streams and, as the last one, the host.
type stamp struct{ actor, time int }

// tensor is the generator's state of a tensor or a host buffer.
type tensor struct {
	live   bool
	held   bool // a graph uses it: it must not be freed
	device int
	owner  int // the stream that allocated it
	write  stamp
	reads  map[int]int // the latest read since the write, by actor
}

type access struct {
	t     *tensor
	write bool
}

type generator struct {
	*Program
	o       Options
	rng     *rand.Rand
	clocks  [][]int
	tensors []*tensor
	hosts   []*tensor
	graphs  []graph
	events  []event
	body    *body // the current capture; nil outside of a graph
	ops     *[]Op
}

// graph is the generator's state of a graph. The graph itself orders its replays, on any streams.
type graph struct {
	uses  []access
	clock []int // clock of the latest replay
}

type event struct {
	stream int
	clock  []int // nil: not recorded
}

// body is the graph being captured.
type body struct {
	origin int
	inside []bool // whether a stream takes part in the capture
	first  int    // events from this number on belong to the graph
	used   []access
}

// Generate returns the program of a seed.
func Generate(seed uint64, o Options) *Program {
	p := &Program{Streams: o.Streams, Devices: o.Devices}
	g := &generator{Program: p, o: o, rng: rand.New(rand.NewPCG(seed, 2)), ops: &p.Ops,
		clocks: newClocks(o.Streams + 1)}
	for range 3 {
		h := &tensor{live: true, device: -1, reads: map[int]int{}}
		g.hosts = append(g.hosts, h)
		g.hostFill(len(g.hosts) - 1)
	}
	p.HostBuffers = len(g.hosts)
	for d := range o.Devices {
		for range 2 {
			g.upload(g.stream(d))
		}
	}
	for len(p.Ops) < o.Ops {
		g.step()
	}
	for i, t := range g.tensors {
		if t.live {
			g.check(i)
		}
	}
	p.Tensors, p.Events, p.Graphs = len(g.tensors), len(g.events), len(g.graphs)
	return p
}

func newClocks(actors int) [][]int {
	clocks := make([][]int, actors)
	for i := range clocks {
		clocks[i] = make([]int, actors)
	}
	return clocks
}

func (g *generator) host() int             { return g.Streams }
func (g *generator) device(stream int) int { return stream % g.Devices }
func (g *generator) emit(op Op)            { *g.ops = append(*g.ops, op) }

// stream picks a stream of the device.
func (g *generator) stream(device int) int {
	return device + g.Devices*g.rng.IntN((g.Streams-device+g.Devices-1)/g.Devices)
}

// pick returns a live tensor of the device, or -1.
func (g *generator) pick(device int, free bool) int {
	var found []int
	for i, t := range g.tensors {
		if t.live && (device < 0 || t.device == device) && !(free && t.held) {
			found = append(found, i)
		}
	}
	if len(found) == 0 {
		return -1
	}
	return found[g.rng.IntN(len(found))]
}

func (g *generator) k() int64 { return g.rng.Int64N(1 << 40) }

func join(into, from []int) {
	for i := range into {
		into[i] = max(into[i], from[i])
	}
}

// issue models the host enqueueing work on a stream: the work is ordered after everything that the
// host has waited for.
func (g *generator) issue(stream int) {
	if g.body == nil {
		join(g.clocks[stream], g.clocks[g.host()])
	}
}

// do records the accesses of one operation.
func (g *generator) do(actor int, accesses ...access) {
	if actor != g.host() {
		g.issue(actor)
	}
	g.clocks[actor][actor]++
	now := g.clocks[actor][actor]
	for _, a := range accesses {
		if !a.write {
			a.t.reads[actor] = now
		}
	}
	for _, a := range accesses {
		if a.write {
			a.t.write, a.t.reads = stamp{actor, now}, map[int]int{}
		}
		if g.body != nil {
			g.body.used = append(g.body.used, a)
		}
	}
}

// missing lists the accesses that the actor must be ordered after but is not.
func (g *generator) missing(actor int, accesses []access) []stamp {
	return unknown(g.clocks[actor], accesses)
}

func unknown(clock []int, accesses []access) []stamp {
	var needs []stamp
	add := func(s stamp) {
		if clock[s.actor] >= s.time {
			return
		}
		if i := slices.IndexFunc(needs, func(n stamp) bool { return n.actor == s.actor }); i >= 0 {
			needs[i].time = max(needs[i].time, s.time)
			return
		}
		needs = append(needs, s)
	}
	for _, a := range accesses {
		add(a.t.write)
		if a.write {
			for reader := range clock {
				add(stamp{reader, a.t.reads[reader]})
			}
		}
	}
	return needs
}

// order emits the edges that the actor needs before the accesses. It marks an edge as Needed if the
// other edges together do not replace it.
func (g *generator) order(actor int, accesses ...access) {
	if actor != g.host() {
		g.issue(actor)
	}
	before := slices.Clone(g.clocks[actor])
	type brought struct {
		op    int
		clock []int
	}
	var edges []brought
	for needs := g.missing(actor, accesses); len(needs) > 0; needs = g.missing(actor, accesses) {
		// Choose first an access that no other edge covers.
		next := needs[0]
		for _, n := range needs {
			if !slices.ContainsFunc(needs,
				func(by stamp) bool { return by.actor != n.actor && g.clocks[by.actor][n.actor] >= n.time }) {
				next = n
				break
			}
		}
		clock := slices.Clone(g.edge(next, actor))
		edges = append(edges, brought{len(*g.ops) - 1, clock})
		join(g.clocks[actor], clock)
	}
	for i, e := range edges {
		known := slices.Clone(before)
		for j, other := range edges {
			if j != i {
				join(known, other.clock)
			}
		}
		(*g.ops)[e.op].Needed = len(unknown(known, accesses)) > 0
	}
}

// edge orders the actor after the stamp with a randomly chosen kind of edge. It returns the clock
// that the edge transfers.
func (g *generator) edge(after stamp, actor int) []int {
	from := after.actor
	if g.rng.IntN(3) > 0 {
		for e, ev := range g.events {
			if ev.clock != nil && ev.clock[from] >= after.time && (g.body == nil || e >= g.body.first) {
				kind := WaitEvent
				if actor == g.host() {
					kind = SyncEvent
				}
				g.emit(Op{Kind: kind, Stream: actor, A: e})
				g.enter(actor)
				return ev.clock
			}
		}
	}
	way := g.rng.IntN(7)
	switch {
	case actor == g.host() || way == 0 && g.body == nil:
		g.issue(from)
		g.emit(Op{Kind: Sync, Stream: from})
		join(g.clocks[g.host()], g.clocks[from])
		return g.clocks[g.host()]
	case way <= 2:
		g.fork(from, append(g.others(from, actor), actor))
		return g.clocks[from]
	case way <= 4:
		return g.join(actor, append(g.others(actor, from), from))
	}
	kind := Wait
	if way == 6 && g.body == nil && g.device(from) == g.device(actor) {
		kind = HandOver
	}
	g.issue(from)
	g.emit(Op{Kind: kind, Stream: actor, Other: from})
	g.enter(actor)
	return g.clocks[from]
}

// others returns up to two further streams for an edge, which need not take part in it. In a graph
// they are streams that already take part in the capture.
func (g *generator) others(but ...int) []int {
	var some []int
	for range g.rng.IntN(3) {
		s := g.rng.IntN(g.Streams)
		if !slices.Contains(but, s) && !slices.Contains(some, s) && (g.body == nil || g.body.inside[s]) {
			some = append(some, s)
		}
	}
	return some
}

func (g *generator) enter(stream int) {
	if g.body != nil {
		g.body.inside[stream] = true
	}
}

func (g *generator) fork(from int, to []int) {
	g.issue(from)
	g.emit(Op{Kind: Fork, Stream: from, Streams: to})
	for _, s := range to {
		g.issue(s)
		join(g.clocks[s], g.clocks[from])
		g.enter(s)
	}
}

// join emits a Join and returns the clock that it transfers.
func (g *generator) join(into int, from []int) []int {
	g.issue(into)
	g.emit(Op{Kind: Join, Stream: into, Streams: from})
	brought := make([]int, len(g.clocks))
	for _, s := range from {
		g.issue(s)
		join(brought, g.clocks[s])
	}
	join(g.clocks[into], brought)
	g.enter(into)
	return brought
}

func read(t *tensor) access  { return access{t, false} }
func write(t *tensor) access { return access{t, true} }

// ---- Operations

func (g *generator) step() {
	device := g.rng.IntN(g.Devices)
	s := g.stream(device)
	switch n := g.rng.IntN(100); {
	case n < 34:
		g.mix(s)
	case n < 46:
		g.create(s)
	case n < 56:
		g.copy(s)
	case n < 60:
		g.upload(s)
	case n < 63:
		g.download(s)
	case n < 66:
		g.hostFill(g.rng.IntN(len(g.hosts)))
	case n < 72:
		g.issue(s)
		g.emit(Op{Kind: Busy, Stream: s})
	case n < 79:
		g.free(g.pick(-1, true))
	case n < 87:
		g.record(s)
	case n < 89:
		g.check(g.pick(-1, false))
	case n < 92: // unnecessary edges
		if others := g.others(s); len(others) > 0 && g.rng.IntN(2) == 0 {
			g.fork(s, others)
		} else {
			g.join(s, others)
		}
	case n < 94:
		g.graph(s)
	default:
		g.replay(s)
	}
}

// operands picks three tensors of the device at random; they may be the same.
func (g *generator) operands(device int) (dst, a, b int, ok bool) {
	dst, a, b = g.pick(device, false), g.pick(device, false), g.pick(device, false)
	return dst, a, b, dst >= 0
}

func (g *generator) mix(s int) {
	dst, a, _, ok := g.operands(g.device(s))
	if !ok {
		return
	}
	g.order(s, write(g.tensors[dst]), read(g.tensors[a]))
	g.emit(Op{Kind: Mix, Stream: s, Dst: dst, A: a, K: g.k()})
	g.do(s, read(g.tensors[a]), write(g.tensors[dst]))
}

func (g *generator) newTensor(s int) (int, *tensor) {
	t := &tensor{live: true, device: g.device(s), owner: s, reads: map[int]int{}}
	g.tensors = append(g.tensors, t)
	return len(g.tensors) - 1, t
}

func (g *generator) create(s int) int {
	_, a, b, ok := g.operands(g.device(s))
	if !ok || g.live() > 24 {
		return -1
	}
	g.order(s, read(g.tensors[a]), read(g.tensors[b]))
	i, t := g.newTensor(s)
	g.emit(Op{Kind: New, Stream: s, Dst: i, A: a, B: b, K: g.k()})
	g.do(s, read(g.tensors[a]), read(g.tensors[b]), write(t))
	return i
}

func (g *generator) live() (n int) {
	for _, t := range g.tensors {
		if t.live {
			n++
		}
	}
	return n
}

func (g *generator) copy(s int) {
	a, dst := g.pick(g.device(s), false), g.pick(-1, false)
	if a < 0 || dst < 0 || a == dst {
		return
	}
	there := g.tensors[dst].device
	if there == g.device(s) {
		g.order(s, write(g.tensors[dst]), read(g.tensors[a]))
		g.emit(Op{Kind: Copy, Stream: s, Other: s, Dst: dst, A: a})
		g.do(s, read(g.tensors[a]), write(g.tensors[dst]))
		return
	}
	// A copy between devices runs on the sender's stream. It is ordered after the receiver's
	// stream, and the receiver's stream after it.
	other := g.stream(there)
	g.issue(other)
	join(g.clocks[s], g.clocks[other])
	g.order(s, write(g.tensors[dst]), read(g.tensors[a]))
	g.emit(Op{Kind: Copy, Stream: s, Other: other, Dst: dst, A: a})
	g.do(s, read(g.tensors[a]), write(g.tensors[dst]))
	join(g.clocks[other], g.clocks[s])
}

func (g *generator) upload(s int) {
	h := g.rng.IntN(len(g.hosts))
	dst := g.pick(g.device(s), false)
	if dst < 0 || g.rng.IntN(2) == 0 && g.live() < 24 {
		dst, _ = g.newTensor(s)
	}
	g.order(s, write(g.tensors[dst]), read(g.hosts[h]))
	g.emit(Op{Kind: Upload, Stream: s, Dst: dst, A: h})
	g.do(s, read(g.hosts[h]), write(g.tensors[dst]))
}

func (g *generator) download(s int) {
	a, h := g.pick(g.device(s), false), g.rng.IntN(len(g.hosts))
	if a < 0 {
		return
	}
	g.order(s, write(g.hosts[h]), read(g.tensors[a]))
	g.emit(Op{Kind: Download, Stream: s, Dst: h, A: a})
	g.do(s, read(g.tensors[a]), write(g.hosts[h]))
}

func (g *generator) hostFill(h int) {
	g.order(g.host(), write(g.hosts[h]))
	g.emit(Op{Kind: HostFill, Dst: h, K: g.k()})
	g.do(g.host(), write(g.hosts[h]))
}

func (g *generator) check(a int) {
	if a < 0 {
		return
	}
	s := g.stream(g.tensors[a].device)
	g.order(s, read(g.tensors[a]))
	g.emit(Op{Kind: Check, Stream: s, A: a})
	g.do(s, read(g.tensors[a]))
	join(g.clocks[g.host()], g.clocks[s])
}

func (g *generator) record(s int) {
	if g.body != nil && !g.body.inside[s] {
		return
	}
	g.issue(s)
	e := len(g.events)
	// Record an old event again: work that already waits for it keeps waiting for the earlier
	// record.
	if first := g.firstEvent(); e-first >= 6 {
		e = first + g.rng.IntN(e-first)
		if g.device(g.events[e].stream) != g.device(s) {
			return // an event belongs to the device of its first record
		}
	} else {
		g.events = append(g.events, event{stream: s})
	}
	g.events[e] = event{s, slices.Clone(g.clocks[s])}
	g.emit(Op{Kind: Record, Stream: s, A: e})
}

func (g *generator) firstEvent() int {
	if g.body != nil {
		return g.body.first
	}
	return 0
}

// free frees a tensor. Its memory returns to its owner's stream. Therefore either that stream is
// ordered after all users, or their streams are recorded.
func (g *generator) free(i int) {
	if i < 0 || g.live() < 4 && g.body == nil {
		return
	}
	t := g.tensors[i]
	g.issue(t.owner)
	if g.rng.IntN(2) == 0 && g.body == nil {
		needs := g.missing(t.owner, []access{write(t)})
		for _, n := range needs {
			covered := slices.ContainsFunc(needs,
				func(by stamp) bool { return by.actor != n.actor && g.clocks[by.actor][n.actor] >= n.time })
			g.emit(Op{Kind: Use, Stream: n.actor, Dst: i, Needed: !covered})
		}
	} else {
		g.order(t.owner, write(t))
	}
	kind := Free
	if g.rng.IntN(4) == 0 && g.body == nil {
		kind = Drop
	}
	g.emit(Op{Kind: kind, Dst: i})
	t.live = false
}

// ---- Graphs

// graph captures a few operations on existing tensors. Only the capture's own edges order the
// operations in its body: at the start only the captured stream is ordered after the memory's
// users, and at the end it waits for all other streams.
func (g *generator) graph(s int) {
	if !g.o.Graphs || s < g.Devices || len(g.graphs) >= 4 || g.pick(g.device(s), false) < 0 {
		return
	}
	outside := g.tensors
	in, originals := g.capture(s)
	in.bodySteps(s)
	in.endCapture(s)
	// The graph's own tensors and events get numbers, but the program does not use them.
	for range in.tensors[len(outside):] {
		g.tensors = append(g.tensors, &tensor{})
	}
	for _, e := range in.events[in.body.first:] {
		g.events = append(g.events, event{stream: e.stream})
	}
	uses := in.body.uses(originals)
	if len(uses) == 0 {
		return
	}
	g.graphs = append(g.graphs, graph{uses, make([]int, len(g.clocks))})
	g.emit(Op{Kind: Graph, Stream: s, Dst: len(g.graphs) - 1, Body: *in.ops})
}

// capture returns the generator for a graph's body, with a copy of every tensor, and a map from the
// copies to the originals.
func (g *generator) capture(s int) (in *generator, originals map[*tensor]*tensor) {
	in = &generator{
		Program: g.Program, o: g.o, rng: g.rng, clocks: newClocks(g.Streams + 1),
		events: slices.Clone(g.events), ops: &[]Op{},
	}
	in.body = &body{origin: s, inside: make([]bool, g.Streams), first: len(g.events)}
	in.body.inside[s] = true
	in.clocks[s][s] = 1
	originals = map[*tensor]*tensor{}
	for _, t := range g.tensors {
		c := &tensor{
			live: t.live && t.device == g.device(s), held: true, device: t.device,
			write: stamp{s, 1}, reads: map[int]int{},
		}
		in.tensors = append(in.tensors, c)
		originals[c] = t
	}
	return in, originals
}

// bodySteps emits a graph's operations and frees the tensors that the graph allocated.
func (g *generator) bodySteps(s int) {
	device := g.device(s)
	for range 3 + g.rng.IntN(8) {
		u := s
		for range 4 {
			if side := g.stream(device); side >= g.Devices {
				u = side
				break
			}
		}
		switch g.rng.IntN(6) {
		case 0:
			g.create(u)
		case 1:
			g.free(g.pick(device, true))
		case 2:
			g.record(u)
		default:
			g.mix(u)
		}
	}
	for i, t := range g.tensors {
		if t.live && !t.held {
			g.free(i)
		}
	}
}

// endCapture joins all streams of the capture into the captured stream.
func (g *generator) endCapture(s int) {
	var all []access
	for _, t := range g.tensors {
		all = append(all, write(t))
	}
	var sides []int
	for side, inside := range g.body.inside {
		if inside && side != s {
			sides = append(sides, side)
		}
	}
	if len(sides) > 0 {
		needed := len(g.missing(s, all)) > 0
		g.join(s, sides)
		(*g.ops)[len(*g.ops)-1].Needed = needed
	}
}

// uses returns the graph's accesses to the program's tensors, one per tensor, and marks these
// tensors as held.
func (b *body) uses(originals map[*tensor]*tensor) []access {
	var uses []access
	for _, a := range b.used {
		t, ok := originals[a.t]
		if !ok {
			continue
		}
		t.held = true
		if i := slices.IndexFunc(uses, func(u access) bool { return u.t == t }); i < 0 {
			uses = append(uses, access{t, a.write})
		} else {
			uses[i].write = uses[i].write || a.write
		}
	}
	return uses
}

func (g *generator) replay(s int) {
	if len(g.graphs) == 0 {
		return
	}
	i := g.rng.IntN(len(g.graphs))
	replayed := &g.graphs[i]
	if replayed.uses[0].t.device != g.device(s) {
		return
	}
	g.issue(s)
	join(g.clocks[s], replayed.clock)
	g.order(s, replayed.uses...)
	g.emit(Op{Kind: Replay, Stream: s, Dst: i})
	g.do(s, replayed.uses...)
	replayed.clock = slices.Clone(g.clocks[s])
}

// ---- The oracle, and programs without an edge

// Values is the oracle: it returns the value that each Check reads if the operations run one at a
// time.
func (p *Program) Values() []int64 {
	device, host, graphs := make([]int64, p.Tensors), make([]int64, p.HostBuffers), make([][]Op, p.Graphs)
	var values []int64
	var run func(ops []Op)
	run = func(ops []Op) {
		for _, o := range ops {
			switch o.Kind {
			case New, Mix:
				device[o.Dst] = o.Result(device[o.Dst], device[o.A], device[o.B])
			case Copy:
				device[o.Dst] = device[o.A]
			case Upload:
				device[o.Dst] = host[o.A]
			case Download:
				host[o.Dst] = device[o.A]
			case HostFill:
				host[o.Dst] = o.K
			case Check:
				values = append(values, device[o.A])
			case Graph:
				graphs[o.Dst] = o.Body
			case Replay:
				run(graphs[o.Dst])
			}
		}
	}
	run(p.Ops)
	return values
}

// Result returns the value that New and Mix compute.
func (o Op) Result(dst, a, b int64) int64 {
	if o.Kind == New {
		return 5*a + 7*b + o.K
	}
	return 3*dst + 5*a + o.K
}

// Edges returns the number of needed edges, including those in graphs.
func (p *Program) Edges() int { return countNeeded(p.Ops) }

func countNeeded(ops []Op) (n int) {
	for _, o := range ops {
		if o.Needed {
			n++
		}
		n += countNeeded(o.Body)
	}
	return n
}

// Without returns the program without needed edge number edge, and that edge.
func (p *Program) Without(edge int) (*Program, Op) {
	less := *p
	var gone Op
	less.Ops = without(p.Ops, &edge, &gone)
	return &less, gone
}

func without(ops []Op, edge *int, gone *Op) []Op {
	var left []Op
	for _, o := range ops {
		if o.Needed {
			if *edge--; *edge == -1 {
				*gone = o
				continue
			}
		}
		o.Body = without(o.Body, edge, gone)
		left = append(left, o)
	}
	return left
}
