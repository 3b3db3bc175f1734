package racecheck

import "testing"

// externalProgram has a graph on one stream, and two other streams. The events 1 and 2 are
// external.
type externalProgram struct {
	*Checker
	side, first, last Queue
}

func newExternal() externalProgram {
	c := New(Options{})
	p := externalProgram{c, c.NewQueue("side", 0), c.NewQueue("first", 0), c.NewQueue("last", 0)}
	c.External(1)
	c.External(2)
	return p
}

// use reads or writes the memory with this number.
func (p externalProgram) use(q Queue, memory uintptr, write bool) {
	at := memory << 12
	p.Do(Launch{Accesses: []Access{{Memory: Memory{Storage: at, StorageBytes: 64, Region: Bytes(at, 64)},
		Queue: q, Write: write}}})
}

func (p externalProgram) capture(body func()) {
	p.Begin(p.side)
	body()
	p.End(7, 0)
}

func (p externalProgram) replay(q Queue) { p.Replay(7, q, p.Here("Graph.Replay", 0)) }

// A graph waits for one record and then records an event. A waiter for that event is ordered after
// the first record, even if the graph does no work between the two.
func TestExternalWaitIsPassedOn(t *testing.T) {
	for _, wait := range []bool{true, false} {
		p := newExternal()
		p.Record(1, p.first, nil)
		p.capture(func() {
			if wait {
				p.WaitEvent(p.side, 1)
			}
			p.Record(2, p.side, nil)
			p.use(p.side, 9, true)
		})
		p.use(p.first, 5, true)
		p.Record(1, p.first, nil)
		p.replay(p.side)
		if !p.WaitEvent(p.last, 2) {
			t.Fatal("WaitEvent after the replay = false, want true: the replay records the event")
		}
		p.use(p.last, 5, false)
		want := 1
		if wait {
			want = 0
		}
		if found := p.Findings(); len(found) != want {
			t.Errorf("wait %v: %d findings, want %d: %v", wait, len(found), want, found)
		}
	}
}

// An external event is recorded by a replay, not by the capture.
func TestExternalEventIsRecordedByReplays(t *testing.T) {
	p := newExternal()
	p.capture(func() {
		p.use(p.side, 5, true)
		p.Record(1, p.side, p.Here("Event.Record", 0))
	})
	if p.WaitEvent(p.last, 1) {
		t.Error("WaitEvent after the capture = true, want false: only a replay records the event")
	}
	p.replay(p.side)
	p.Drop(1, p.Here("Event.Close", 0))
	if found := p.Findings(); len(found) != 1 || found[0].Kind != KindEventNotAwaited {
		t.Errorf("found %v, want a note that nothing waited for the event", found)
	}
}

// A graph with many accesses to one block distinguishes the accesses before a record from those
// after it.
func TestExternalEventsDivideManyAccesses(t *testing.T) {
	for _, write := range []bool{false, true} {
		p := newExternal()
		views := func(write bool) {
			for i := range uintptr(2 * maxFeet) {
				m := Memory{Storage: 4096, StorageBytes: 4096, Region: Bytes(4096+64*i, 64)}
				p.Do(Launch{Accesses: []Access{{Memory: m, Queue: p.side, Write: write}}})
			}
		}
		p.capture(func() {
			views(true)
			p.Record(1, p.side, nil)
			views(write)
		})
		p.replay(p.side)
		p.WaitEvent(p.last, 1)
		p.Do(Launch{Accesses: []Access{{Memory: Memory{Storage: 4096, StorageBytes: 4096,
			Region: Bytes(4096, 4096)}, Queue: p.last}}})
		found := p.Findings()
		if (len(found) > 0) != write {
			t.Errorf("the graph writes behind the record: %v, and there are %d findings", write, len(found))
		}
		if n := len(p.graphs[7].feet); n > 2 {
			t.Errorf("the graph keeps %d accesses, want one before the record and one behind it", n)
		}
	}
}

// A finding about a replay names the stream of the replay.
func TestFindingNamesTheStreamOfAReplay(t *testing.T) {
	p := newExternal()
	p.capture(func() {
		p.Record(1, p.side, nil)
		p.use(p.side, 5, true)
	})
	p.replay(p.first)
	p.WaitEvent(p.last, 1)
	p.use(p.last, 5, false)
	found := p.Findings()
	if len(found) != 1 || found[0].First.Stream != "first" || found[0].Missing != "last.Wait(first)" {
		t.Errorf("found %v, want one race with first, missing last.Wait(first)", found)
	}
}

// The host can wait for a replay with external events as for any work of the stream.
func TestHostWaitsForExternalReplays(t *testing.T) {
	for name, wait := range map[string]func(p externalProgram){
		"the stream": func(p externalProgram) { p.Wait(Host, p.side) },
		"the device": func(p externalProgram) { p.WaitAll(0) },
	} {
		p := newExternal()
		p.capture(func() {
			p.Record(1, p.side, nil)
			p.use(p.side, 5, true)
		})
		p.replay(p.side)
		wait(p)
		p.use(p.last, 5, false)
		if found := p.Findings(); len(found) != 0 {
			t.Errorf("%s: %v, want none", name, found)
		}
	}
}

// A program may capture repeatedly: a closed graph leaves no memory behind.
func TestExternalGraphsAreBounded(t *testing.T) {
	p := newExternal()
	queues := 0
	for i := range 100 {
		p.capture(func() {
			p.use(p.side, 5, true)
			p.Record(1, p.side, nil)
			p.use(p.side, 6, true)
		})
		p.replay(p.side)
		p.FreeGraph(7)
		if i == 0 {
			queues = len(p.queues)
		}
	}
	if len(p.queues) != queues {
		t.Errorf("%d queues, and %d after the first graph", len(p.queues), queues)
	}
	if found := p.Findings(); len(found) != 0 {
		t.Errorf("found %v, want none", found)
	}
}
