package streamprog

import (
	"errors"
	"flag"
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

var duration = flag.Duration("for", 3*time.Second, "time to run programs on the GPUs")

// machine runs programs on GPUs.
type machine struct {
	t        *testing.T
	devices  int
	elements int64
	streams  []cuda.Stream
	load     []*torch.Tensor // by stream
	hosts    []host

	tensors []*torch.Tensor
	events  []*cuda.Event
	graphs  []*cuda.Graph
	want    []int64
	program string // the current program, for messages

	dog *time.Timer
	now atomic.Pointer[step]
}

// step is the machine's current step.
type step struct {
	program string
	what    string // "" for an operation
	index   int
	op      Op
}

func (s *step) String() string {
	if s.what != "" {
		return s.program + s.what
	}
	return fmt.Sprintf("%soperation %d, %v", s.program, s.index, s.op)
}

// stuck is much longer than any step takes, however busy the machine is.
const stuck = 2 * time.Minute

// begin records the start of a step. If the step takes longer than stuck, the program ends with the
// stacks of all goroutines.
func (m *machine) begin(s step) {
	m.now.Store(&s)
	m.dog.Reset(stuck)
}

// watch starts the watchdog, for a first step.
func (m *machine) watch(what string) {
	name := m.t.Name()
	m.now.Store(&step{what: what})
	m.dog = time.AfterFunc(stuck, func() {
		debug.SetTraceback("all")
		panic(fmt.Sprintf("%s: %v: takes longer than %v", name, m.now.Load(), stuck))
	})
}

type host struct {
	pinned *cuda.Pinned
	values *torch.Tensor
}

func newMachine(t *testing.T, devices int) *machine {
	t.Helper()
	cudatest.RequireGPUs(t, devices)
	m := &machine{t: t, devices: devices}
	m.watch("the streams")
	t.Cleanup(func() {
		m.dog.Stop()
		for _, x := range m.load {
			x.Close()
		}
		for _, h := range m.hosts {
			h.values.Close()
			h.pinned.Close()
		}
	})
	for i := range 8 {
		if i < devices {
			m.streams = append(m.streams, cuda.DefaultStream(cuda.Device(i)))
			continue
		}
		s, err := cuda.NewStream(cuda.Device(i%devices), cuda.StreamOptions{Priority: -(i / devices % 2)})
		m.check(err)
		m.streams = append(m.streams, s)
	}
	for _, s := range m.streams {
		m.check(cuda.WithStream(s, func() error {
			x, err := torch.Zeros(s.Device(), torch.Float32, 1<<24)
			m.load = append(m.load, x)
			return err
		}))
	}
	m.size(1)
	return m
}

// size allocates the host buffers that all programs use.
func (m *machine) size(elements int64) {
	for _, h := range m.hosts {
		h.values.Close()
		m.check(h.pinned.Close())
	}
	m.hosts, m.elements = nil, elements
	for range 3 {
		p, err := cuda.NewPinned(int(8 * elements))
		m.check(err)
		v, err := torch.FromMemory(p.Bytes(), torch.Int64, elements)
		m.check(err)
		m.hosts = append(m.hosts, host{p, v})
	}
}

func (m *machine) check(err error) {
	m.t.Helper()
	if err != nil {
		m.t.Fatalf("%s%v", m.program, err)
	}
}

// run runs the program and returns the number of checks that differ from the oracle.
func (m *machine) run(p *Program) (wrong int) {
	m.tensors, m.events, m.graphs, m.want = make([]*torch.Tensor, p.Tensors), make([]*cuda.Event,
		p.Events), make([]*cuda.Graph, p.Graphs), p.Values()
	for i := range m.events {
		var err error
		m.events[i], err = cuda.NewEvent(cuda.EventOptions{})
		m.check(err)
	}
	for i, o := range p.Ops {
		m.begin(step{program: m.program, index: i, op: o})
		ok, err := m.do(o)
		if err != nil {
			m.t.Fatalf("%soperation %d, %v: %v", m.program, i, o, err)
		}
		if !ok {
			wrong++
		}
	}
	m.begin(step{program: m.program, what: "the end"})
	for d := range m.devices {
		m.check(cuda.Device(d).Synchronize())
	}
	for _, g := range m.graphs {
		m.check(g.Close())
	}
	for _, x := range m.tensors {
		x.Close()
	}
	for _, e := range m.events {
		m.check(e.Close())
	}
	return wrong
}

func (m *machine) streamsOf(numbers []int) (s []cuda.Stream) {
	for _, n := range numbers {
		s = append(s, m.streams[n])
	}
	return s
}

// do runs one operation. ok is false for a check that differs from the oracle.
func (m *machine) do(o Op) (ok bool, err error) {
	switch o.Kind {
	case New, Mix, Copy, Upload, Download, HostFill, Busy:
		return true, m.compute(o)
	case Check:
		return m.checkTensor(o)
	}
	return true, m.order(o)
}

// compute runs an operation that computes or copies values.
func (m *machine) compute(o Op) (err error) {
	on := func(fn func() error) { err = cuda.WithStream(m.streams[o.Stream], fn) }
	asynchronous := torch.CopyOptions{NonBlocking: true}
	switch o.Kind {
	case New:
		on(func() error {
			a, b := m.tensors[o.A].MulInt(5), m.tensors[o.B].MulInt(7)
			sum := a.Add(b)
			m.tensors[o.Dst] = sum.AddInt(o.K)
			return errors.Join(m.tensors[o.Dst].Err(), a.Close(), b.Close(), sum.Close())
		})
	case Mix:
		on(func() error {
			dst := m.tensors[o.Dst]
			// Compute both before dst changes: A may be the same tensor.
			twice, a := dst.MulInt(2), m.tensors[o.A].MulInt(5)
			failed := dst.Add_(twice).Add_(a).AddInt_(o.K).Err()
			return errors.Join(failed, twice.Close(), a.Close())
		})
	case Copy:
		if m.tensors[o.Dst].Device() != m.tensors[o.A].Device() {
			err = m.copyPeer(o)
			break
		}
		on(func() error { return m.tensors[o.Dst].CopyFrom(m.tensors[o.A], asynchronous) })
	case Upload:
		on(func() error {
			if m.tensors[o.Dst] == nil {
				var err error
				if m.tensors[o.Dst], err = torch.Empty(m.streams[o.Stream].Device(), torch.Int64,
					m.elements); err != nil {
					return err
				}
			}
			return m.tensors[o.Dst].CopyFrom(m.hosts[o.A].values, asynchronous)
		})
	case Download:
		on(func() error { return m.hosts[o.Dst].values.CopyFrom(m.tensors[o.A], asynchronous) })
	case HostFill:
		// One tensor operation on the CPU would split the work over threads, which is slower here.
		values, e := torch.FromInt64s(slices.Repeat([]int64{o.K}, int(m.elements)))
		err = errors.Join(e, m.hosts[o.Dst].values.CopyFrom(values, torch.CopyOptions{}), values.Close())
	case Busy:
		on(func() error {
			load := m.load[o.Stream]
			for range 4 {
				if err := load.AddScalar_(1).Err(); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return err
}

// checkTensor compares a tensor with the oracle's next value.
func (m *machine) checkTensor(o Op) (ok bool, err error) {
	ok = true
	err = cuda.WithStream(m.streams[o.Stream], func() error {
		got, err := m.tensors[o.A].Int64s()
		for _, v := range got {
			ok = ok && v == m.want[0]
		}
		m.want = m.want[1:]
		return err
	})
	return ok, err
}

// handOver orders the stream to after the stream from, as an export of from's tensor does.
func (m *machine) handOver(from, to cuda.Stream) error {
	x := m.load[slices.Index(m.streams, from)]
	return cuda.WithStream(from, func() error {
		p, err := x.ToDLPack(torch.DLPackOptions{Stream: to})
		torch.FreeDLPack(p, torch.DLPackOptions{})
		return err
	})
}

// order runs an operation that frees memory, orders streams, or captures or replays a graph.
func (m *machine) order(o Op) (err error) {
	switch o.Kind {
	case Free:
		err = m.tensors[o.Dst].Close()
	case Drop:
		m.tensors[o.Dst] = nil
		if o.Dst%4 == 0 {
			runtime.GC()
		}
	case Use:
		err = m.tensors[o.Dst].RecordStream(m.streams[o.Stream])
	case Record:
		err = m.events[o.A].Record(m.streams[o.Stream])
	case WaitEvent:
		err = m.streams[o.Stream].WaitEvent(m.events[o.A])
	case SyncEvent:
		err = m.events[o.A].Synchronize()
	case Wait:
		err = m.streams[o.Stream].Wait(m.streams[o.Other])
	case HandOver:
		err = m.handOver(m.streams[o.Other], m.streams[o.Stream])
	case Fork:
		err = cuda.Fork(m.streams[o.Stream], m.streamsOf(o.Streams)...)
	case Join:
		err = cuda.Join(m.streams[o.Stream], m.streamsOf(o.Streams)...)
	case Sync:
		err = m.streams[o.Stream].Synchronize()
	case Graph:
		m.graphs[o.Dst], err = m.capture(o)
	case Replay:
		err = m.graphs[o.Dst].Replay(m.streams[o.Stream])
	default:
		err = fmt.Errorf("a machine cannot run %v", o.Kind)
	}
	return err
}

// setSize sets the size of a program's tensors: small ones measure launches alone; kernels and
// copies on large ones take long enough to be overtaken.
func (m *machine) setSize(seed uint64) {
	m.size([...]int64{1 << 8, 1 << 16, 1 << 20, 1 << 18}[seed%4])
}

func gpuOptions(seed uint64, devices int) Options {
	return Options{Ops: 80 + int(seed%5)*40, Streams: max(2*devices, 2+int(seed%7)), Devices: devices, Graphs: graphs}
}

// Random programs on one and on two GPUs compute the same values as when they run one operation at
// a time.
func TestProgramsOnGPUs(t *testing.T) {
	for _, devices := range []int{1, 2} {
		t.Run(fmt.Sprintf("%d devices", devices), func(t *testing.T) {
			m := newMachine(t, devices)
			var count [len(kinds)]int
			n, operations := uint64(0), 0
			for start := time.Now(); time.Since(start) < *duration; {
				n++
				seed := max(*only, n)
				if n%50 == 1 || *only > 0 {
					m.setSize(seed / 50)
				}
				m.program = fmt.Sprintf("seed %d, %d devices, %d elements: ", seed, devices, m.elements)
				p := Generate(seed, gpuOptions(seed, devices))
				if wrong := m.run(p); wrong > 0 {
					t.Fatalf("%s%d of %d checks differ from the oracle, want 0",
						m.program, wrong, len(p.Values()))
				}
				for _, o := range p.Ops {
					count[o.Kind]++
					operations++
				}
			}
			t.Logf("%d programs, %d operations %v", n, operations, count)
		})
	}
}

// The negative control: programs without their edges compute other values.
func TestProgramsWithoutEdgesOnGPUs(t *testing.T) {
	m := newMachine(t, 1)
	m.size(1 << 20)
	different := 0
	const n = 40
	for seed := uint64(1); seed <= n; seed++ {
		o := gpuOptions(seed, 1)
		o.Graphs = false // a capture without its forks is an error, not a race
		p := Generate(seed, o)
		for p.Edges() > 0 {
			p, _ = p.Without(0)
		}
		p.Ops = slices.DeleteFunc(p.Ops, func(o Op) bool { return o.Kind >= Wait })
		if m.run(p) > 0 {
			different++
		}
	}
	t.Logf("%d of %d programs without edges computed other values", different, n)
	if different == 0 {
		t.Errorf("0 of %d programs computed other values, want some: the comparison proves nothing", n)
	}
}
