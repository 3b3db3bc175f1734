//go:build linux

package cuda

import (
	"bytes"
	"errors"
	"strings"
	"testing"
	"time"
)

func TestNodesHandlesAndDOTOfAGraph(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	var inside, outside bool
	g := must[*Graph](t)(Capture(CaptureOptions{Debug: true}, func() error {
		s, err := GetCurrentCUDAStream(0)
		if err != nil {
			return err
		}
		if inside, err = s.Capturing(); err != nil {
			return err
		}
		outside, err = DefaultStream(0).Capturing()
		return errors.Join(err, c.increase(), c.increase())
	}))
	defer g.Close()
	if !inside || outside {
		t.Errorf("Capturing: %v of the captured stream, %v of the default stream", inside, outside)
	}
	n := must[NodeKinds](t)(g.NodeKinds())
	if sum := n.Kernels + n.Copies + n.Fills + n.HostFunctions + n.EventRecords + n.EventWaits +
		n.Empty + n.Others; sum != g.Nodes() || n.Kernels < 2 {
		t.Errorf("%+v, %d nodes", n, g.Nodes())
	}
	dot := must[[]byte](t)(g.DOT(false))
	if !bytes.HasPrefix(dot, []byte("digraph")) {
		t.Errorf("the DOT file begins with %.40q", dot)
	}
	if long := must[[]byte](t)(g.DOT(true)); len(long) <= len(dot) {
		t.Errorf("verbose has %d bytes, not verbose %d", len(long), len(dot))
	}
	exec, graph, err := g.Handles()
	if err != nil || exec == 0 || graph == 0 {
		t.Errorf("handles %#x, %#x, %v", exec, graph, err)
	}
	if s := g.String(); !strings.Contains(s, "nodes on cuda:0") {
		t.Errorf("String: %s, want it to contain \"nodes on cuda:0\"", s)
	}
	plain := must[*Graph](t)(Capture(CaptureOptions{}, c.increase))
	defer plain.Close()
	if _, err := plain.DOT(false); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("DOT without Debug: %v, want ErrInvalidArgument", err)
	}
	if exec, graph, err := plain.Handles(); err != nil || exec == 0 || graph != 0 {
		t.Errorf("handles without Debug %#x, %#x, %v", exec, graph, err)
	}
}

// External events measure the time inside a replay. They also order other work after a point in the
// replay, and a replay after other work.
func TestExternalEventsInAGraph(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	streams := newStreams(t, 3)
	event := func(o EventOptions) *Event {
		e := must[*Event](t)(NewEvent(o))
		t.Cleanup(func() { e.Close() })
		return e
	}
	begin, end := event(EventOptions{Timing: true, External: true}), event(EventOptions{Timing: true, External: true})
	start := event(EventOptions{External: true})
	check(t, start.Record(streams[2]))
	g := must[*Graph](t)(Capture(CaptureOptions{Stream: streams[0]}, func() error {
		err := errors.Join(streams[0].WaitEvent(start), begin.Record(streams[0]))
		for range 200 {
			err = errors.Join(err, c.increase())
		}
		return errors.Join(err, end.Record(streams[0]))
	}))
	defer g.Close()
	n := must[NodeKinds](t)(g.NodeKinds())
	if n.EventRecords != 2 || n.EventWaits != 1 {
		t.Errorf("%+v, want 2 records and a wait", n)
	}
	if _, err := end.Query(); !errors.Is(err, ErrNotRecorded) {
		t.Errorf("before the first replay: %v, want ErrNotRecorded", err)
	}
	for range 3 {
		check(t, g.Replay(streams[0]))
		check(t, streams[0].Synchronize())
		if took := must[time.Duration](t)(Elapsed(begin, end)); took <= 0 || took > time.Second {
			t.Errorf("the replay took %v, want more than 0, at most %v", took, time.Second)
		}
	}
	c.expected = 0
	check(t, end.Synchronize())
}

func TestEventHandleAndString(t *testing.T) {
	onGPU(t, 1)
	e := must[*Event](t)(NewEvent(EventOptions{}))
	if _, _, err := e.Handle(); !errors.Is(err, ErrNotRecorded) {
		t.Errorf("before Record: %v, want ErrNotRecorded", err)
	}
	if s := e.String(); s != "event that was never recorded" {
		t.Errorf("before Record: %s, want \"event that was never recorded\"", s)
	}
	check(t, e.Record(DefaultStream(0)))
	if h, d, err := e.Handle(); err != nil || h == 0 || d != 0 {
		t.Errorf("%#x, %v, %v", h, d, err)
	}
	if s := e.String(); !strings.HasSuffix(s, "of cuda:0") {
		t.Errorf("String: %s", s)
	}
	check(t, e.Close())
	if s := e.String(); s != "closed event" {
		t.Errorf("after Close: %s, want \"closed event\"", s)
	}
}

func TestMemoryLimitIsReturned(t *testing.T) {
	onGPU(t, 1)
	defer Device(0).LimitMemory(1)
	if got := must[float64](t)(Device(0).MemoryLimit()); got != 1 {
		t.Errorf("at the start: %v, want 1", got)
	}
	check(t, Device(0).LimitMemory(0.5))
	if got := must[float64](t)(Device(0).MemoryLimit()); got < 0.49 || got > 0.51 {
		t.Errorf("after LimitMemory(0.5): %v, want at least 0.49, none.51", got)
	}
}

// The snapshot is a pickle, as the memory viewer reads it, and grows with the history.
func TestMemorySnapshot(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	check(t, c.increase())
	before := must[[]byte](t)(MemorySnapshot())
	check(t, RecordMemoryHistory(1000))
	defer RecordMemoryHistory(0)
	for range 50 {
		newCounter(t)
	}
	after := must[[]byte](t)(MemorySnapshot())
	if len(before) < 2 || before[0] != 0x80 || !bytes.Contains(before, []byte("segments")) {
		t.Errorf("the snapshot begins with %x", before[:min(8, len(before))])
	}
	if len(after) < len(before)+1000 {
		t.Errorf("%d bytes with a history, %d without, want at least %v",
			len(after), len(before), len(before)+1000)
	}
	if err := RecordMemoryHistory(-1); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("-1 entries: %v, want ErrInvalidArgument", err)
	}
}

func TestConfigureAllocator(t *testing.T) {
	onGPU(t, 1)
	check(t, ConfigureAllocator("garbage_collection_threshold:0.9"))
	check(t, ConfigureAllocator(""))
	if err := ConfigureAllocator("no_such_setting:1"); err == nil {
		t.Error("ConfigureAllocator with an unknown setting: got no error, want one")
	}
}
