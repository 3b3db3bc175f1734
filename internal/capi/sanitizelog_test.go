//go:build linux && cgo

package capi

import (
	"testing"
	"testing/synctest"
	"unsafe"

	"github.com/torchstream/torchstream/internal/racecheck"
)

// logged is a program on one GPU: log entries, and operators that read and write 64 bytes of
// memory. Numbers stand for stream handles.
type logged struct {
	t     *testing.T
	check *racecheck.Checker
	s     *Sanitizer
}

const (
	caller, forward, side = 1, 2, 3
	memory, event         = 0x1000, 0x2000
)

func newLogged(t *testing.T) *logged {
	check := racecheck.New(racecheck.Options{})
	return &logged{t, check, newSanitizer(check)}
}

// apply applies entries and returns the entries of calls.
func (l *logged) apply(entries ...entry) (own []entry) {
	l.s.mu.Lock()
	defer l.s.mu.Unlock()
	for i := range entries {
		own = l.s.applyLocked(&entries[i], l.check.Here("a backward pass", 0), own)
	}
	return own
}

func (l *logged) operator(stream uintptr, write bool) {
	l.s.mu.Lock()
	q := l.s.handleLocked(0, stream)
	l.s.mu.Unlock()
	l.check.Do(racecheck.Launch{At: l.check.Here("an operator", 0), Accesses: []racecheck.Access{{
		Memory: racecheck.Memory{Device: 0, Storage: memory, StorageBytes: 64,
			Region: racecheck.Bytes(memory, 64)}, Queue: q, Write: write,
	}}})
}

func (l *logged) want(races int) {
	l.t.Helper()
	if found := l.check.Findings(); len(found) != races {
		l.t.Errorf("%d findings, want %d", len(found), races)
		for _, f := range found {
			l.t.Logf("%v", &f)
		}
	}
}

func allocated(stream uintptr) entry {
	return entry{kind: logAllocated, address: memory, handle: stream, nbytes: 64}
}
func recorded(stream uintptr) entry {
	return entry{kind: logEventRecorded, address: event, handle: stream}
}
func awaited(stream uintptr) entry {
	return entry{kind: logEventAwaited, address: event, handle: stream}
}
func wrote(stream uintptr) entry {
	return entry{kind: logWritten, address: memory, handle: stream, nbytes: 64}
}

// A backward pass's work before a hook is ordered before the hook's operators, in the order of the
// pass. No other work is.
func TestOrderOfBackwardAppliesInTurn(t *testing.T) {
	gradient, record, wait, end := allocated(caller), recorded(caller), awaited(
		forward), entry{kind: logEventDeleted, address: event}
	for name, c := range map[string]struct {
		entries []entry
		races   int
	}{
		"the engine's edge":                       {[]entry{gradient, record, wait, end}, 0},
		"without the wait":                        {[]entry{gradient, record, end}, 1},
		"without the record":                      {[]entry{gradient, wait, end}, 1},
		"a wait of another stream":                {[]entry{gradient, record, awaited(side), end}, 1},
		"a record before the gradient is made":    {[]entry{record, wait, gradient, end}, 1},
		"a wait before the record":                {[]entry{gradient, wait, record, end}, 1},
		"an event that has ended before the wait": {[]entry{gradient, record, end, wait}, 1},
		"the host has waited": {[]entry{gradient,
			{kind: logStreamSynchronized, handle: caller}}, 0},
		"the host has waited for another stream": {[]entry{gradient, {kind: logStreamSynchronized, handle: side}}, 1},
		"the host has waited for the device":     {[]entry{gradient, {kind: logDeviceSynchronized}}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLogged(t)
			if own := l.apply(c.entries...); len(own) > 0 {
				t.Errorf("%d entries are left for finish, want none", len(own))
			}
			l.operator(forward, false)
			l.want(c.races)
		})
	}
}

// An operator may record its events after its work, so they also apply after the call.
func TestOrderOfACallAppliesBeforeAndAfterIt(t *testing.T) {
	for _, behind := range []bool{true, false} {
		l := newLogged(t)
		own := []entry{recorded(caller), awaited(side)}
		for i := range own {
			own[i].ofCall = true
		}
		left := l.apply(own...)
		l.operator(caller, true)
		races := 1
		if behind {
			l.s.finish(left)
			races = 0
		}
		l.operator(side, false)
		l.want(races)
	}
}

// The reduction of gradients writes a bucket on a separate stream, and the caller waits for that
// stream.
func TestAccessesOfTheLibraryAreChecked(t *testing.T) {
	for _, wait := range []bool{true, false} {
		l := newLogged(t)
		entries := []entry{allocated(caller), recorded(caller), awaited(side), wrote(side)}
		races := 1
		if wait {
			entries = append(entries, recorded(side), awaited(caller))
			races = 0
		}
		l.apply(entries...)
		l.operator(caller, false)
		l.want(races)
		if found := l.check.Findings(); len(found) == 1 && found[0].First.What != "a backward pass" {
			t.Errorf("the first use is %q", found[0].First.What)
		}
	}
}

// A synchronisation before an operator's call does not order the call itself. It applies before the
// call's accesses; the call's own entries apply after them.
func TestWaitsBeforeACallDoNotHideItsRaces(t *testing.T) {
	for name, c := range map[string]struct {
		wait   entry
		before bool // the wait precedes the call
		races  int
	}{
		"a device, before the call": {entry{kind: logDeviceSynchronized, ofCall: true}, true, 1},
		"a stream, before the call": {entry{kind: logStreamSynchronized, handle: caller, ofCall: true}, true, 1},
		"a device, in the call":     {entry{kind: logDeviceSynchronized, ofCall: true}, false, 0},
		"a stream, in the call":     {entry{kind: logStreamSynchronized, handle: caller, ofCall: true}, false, 0},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLogged(t)
			var left []entry
			l.s.log = func(room []entry) int {
				n := copy(room, left)
				left = left[n:]
				return n
			}
			if c.before {
				left = []entry{c.wait}
			}
			l.s.begin()
			defer l.s.end()
			if !c.before {
				left = []entry{c.wait}
			}
			own := l.s.take("an operator", l.check.Here("an operator", 0))
			l.operator(caller, true)
			l.s.finish(own)
			l.operator(side, false)
			l.want(c.races)
		})
	}
}

// A call with events in the log first takes the entries of earlier calls. Calls on the CPU and
// failed calls take none of those.
func TestCallsTakeWhatEarlierOnesLeft(t *testing.T) {
	x, err := TensorFromData([]byte{1, 2, 3, 4}, []int64{4}, Uint8)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(x)
	clone, unbind := operator(t, "aten::clone", ""), operator(t, "aten::unbind", "int")
	self, on := []Arg{{Kind: ArgTensor}}, []*Tensor{x}
	s := newLogged(t).s
	taken := 0
	s.log = func([]entry) int {
		taken++
		return 0
	}
	if !sanitizer.CompareAndSwap(nil, s) {
		t.Skip("the environment has started a sanitizer")
	}
	defer sanitizer.Store(nil)
	one := func(r *Tensor, _ error) []*Tensor { return []*Tensor{r} }
	for name, call := range map[string]func() []*Tensor{
		"EmptyTensor":    func() []*Tensor { return one(EmptyTensor([]int64{1}, Float32, DeviceCPU, Contiguous)) },
		"PinnedTensor":   func() []*Tensor { return one(PinnedTensor([]int64{1}, Float32, Contiguous)) },
		"TensorFromData": func() []*Tensor { return one(TensorFromData([]byte{1}, []int64{1}, Uint8)) },
		"TensorTo":       func() []*Tensor { return one(TensorTo(x, DeviceCPU, Float32, false)) },
		"CopyTensor":     func() []*Tensor { CopyTensor(x, x, false); return nil },
		"MapTensor":      func() []*Tensor { return one(MapTensor(-1, 0, []int64{1}, Uint8)) },
		"OpenIPC": func() []*Tensor {
			return one(OpenIPC(1000, IPCHandle{}, 0, []int64{1},
				[]int64{1}, Uint8, -1))
		},
		"NormalizeImages": func() []*Tensor { NormalizeImages(x, x, nil, nil); return nil },
		"BatchNormReLU":   func() []*Tensor { return one(BatchNormReLU(&[6]*Tensor{x}, 0.1, 1e-5, 0)) },
		"CopyBatch":       func() []*Tensor { CopyBatch(Stream{Device: 1000}, nil, on, on, nil); return nil },
		"CopyPeer":        func() []*Tensor { CopyPeer(Stream{Device: 1000}, on, Stream{}, on); return nil },
		"CallOperator": func() []*Tensor {
			out := make([]*Tensor, 1)
			CallOperator(clone, self, on, nil, 0, out)
			return out
		},
		"CallOperatorOne": func() []*Tensor { return one(CallOperatorOne(clone, self, on, nil, 0)) },
		"CallOperatorList": func() []*Tensor {
			var out List
			CallOperatorList(unbind, self, on, nil, 0, &out)
			return out.Tensors()
		},
		"CallOperatorResults": func() []*Tensor {
			r, _ := CallOperatorResults(clone, self, on, nil, 0)
			return r.Tensors
		},
		"SynchronizeDevice": func() []*Tensor { SynchronizeDevice(1000); return nil },
		"Synchronize":       func() []*Tensor { Stream{Device: 1000}.Synchronize(); return nil },
	} {
		taken = 0
		made := call()
		if taken == 0 {
			t.Errorf("%s leaves the entries of earlier calls in the log", name)
		}
		for _, r := range made {
			if r != nil {
				FreeTensor(r)
			}
		}
	}
}

// places are the addresses of two graphs. They are not pointers into Go's memory, which may move.
var places [2]byte

// A capture may start in one goroutine before another goroutine has reported the end of its
// capture. The new capture counts from that report on: otherwise its operators would count as
// ordinary work of the stream.
func TestCapturesFollowEachOther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := newLogged(t)
		l.s.log = func([]entry) int { return 0 }
		first, second := (*Graph)(unsafe.Pointer(&places[0])), (*Graph)(unsafe.Pointer(&places[1]))
		l.s.began(first, Stream{}, nil)
		began := make(chan struct{})
		go func() {
			defer close(began)
			l.s.began(second, Stream{}, nil)
		}()
		synctest.Wait()
		select {
		case <-began:
			t.Error("the second capture has begun during the first, want it to wait for the first one's end")
		default:
		}
		l.s.ended(first, true)
		<-began
		if l.s.capture.graph != second {
			t.Errorf("the sanitizer's capture is of the graph %p, want the second, %p", l.s.capture.graph, second)
		}
	})
}

// If a goroutine captures a graph while another frees one, the new graph may get the same address.
// Its capture continues.
func TestFreedGraphDoesNotEndACaptureAtItsAddress(t *testing.T) {
	l := newLogged(t)
	l.s.log = func([]entry) int { return 0 }
	g := (*Graph)(unsafe.Pointer(&places[0]))
	l.s.began(g, Stream{}, nil)
	l.s.ended(g, true)
	captured := l.s.freeing(g)
	l.s.began(g, Stream{}, nil)
	l.s.freedGraph(g, captured)
	if l.s.capture.graph != g {
		t.Fatalf("after the end of a graph the capture is of %p, want %p, the next one", l.s.capture.graph, g)
	}
	if captured = l.s.freeing(g); !captured {
		t.Error("freeing of a graph that is being captured = false, want true")
	}
	l.s.freedGraph(g, captured)
	if l.s.capture.graph != nil {
		t.Errorf("after a failed capture the capture is of %p, want nil", l.s.capture.graph)
	}
}
