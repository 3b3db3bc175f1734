//go:build linux && cgo

package capi

import (
	"errors"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// Under load at most limit callers are inside a gate, every caller enters eventually, and no token
// is left.
func TestGateBoundsConcurrency(t *testing.T) {
	for _, limit := range []int{1, 3, 8} {
		const callers, rounds = 64, 2000
		g := newGate(limit)
		var inside, peak atomic.Int64
		var all sync.WaitGroup
		for range callers {
			all.Go(func() {
				for round := range rounds {
					g.enter()
					n := inside.Add(1)
					for m := peak.Load(); n > m && !peak.CompareAndSwap(m, n); m = peak.Load() {
					}
					if round%7 == 0 {
						runtime.Gosched()
					}
					inside.Add(-1)
					g.leave()
				}
			})
		}
		waitFor(t, &all)
		if peak.Load() > int64(limit) {
			t.Errorf("limit %d: %d inside at once, want at most %v", limit, peak.Load(), int64(limit))
		}
		if limit > 1 && peak.Load() < 2 {
			t.Errorf("limit %d: never two inside at once, so the test proves nothing", limit)
		}
		if g.inside.Load() != 0 || len(g.wake) != 0 {
			t.Errorf("limit %d: afterwards %d inside and %d tokens, want 0, 0",
				limit, g.inside.Load(), len(g.wake))
		}
	}
}

// A full gate lets no caller in, and each leave lets in exactly one.
func TestGateHandsOverOneByOne(t *testing.T) {
	const limit, waiters = 3, 5
	g := newGate(limit)
	for range limit {
		g.enter()
	}
	var all sync.WaitGroup
	entered := make(chan struct{}, waiters)
	for range waiters {
		all.Go(func() {
			g.enter()
			entered <- struct{}{}
		})
	}
	for g.inside.Load() != limit+waiters {
		runtime.Gosched()
	}
	for round := range waiters {
		if len(entered) != 0 {
			t.Fatalf("round %d: a caller entered a full gate, want none", round)
		}
		g.leave()
		<-entered
	}
	waitFor(t, &all)
	for range limit {
		g.leave()
	}
	if g.inside.Load() != 0 || len(g.wake) != 0 {
		t.Errorf("afterwards %d inside and %d tokens, want 0, 0", g.inside.Load(), len(g.wake))
	}
}

// waitFor waits for the goroutines. It fails the test with all stacks after 30 seconds.
func waitFor(t *testing.T, all *sync.WaitGroup) {
	t.Helper()
	done := make(chan struct{})
	go func() {
		all.Wait()
		close(done)
	}()
	select {
	case <-done:
	case <-time.After(30 * time.Second):
		stacks := make([]byte, 1<<16)
		t.Fatalf("callers hang\n%s", stacks[:runtime.Stack(stacks, true)])
	}
}

// Each call waits while its gate is full.
func TestCallsPassTheirGate(t *testing.T) {
	x, err := TensorFromData([]byte{1, 2, 3, 4}, []int64{4}, Uint8)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(x)
	for name, c := range map[string]struct {
		gate *gate
		call func()
	}{
		"FreeEvent":               {computing, func() { FreeEvent(nil) }},
		"ManualSeed":              {computing, func() { ManualSeed(1) }},
		"SetNumThreads":           {computing, func() { SetNumThreads(int32(NumThreads())) }},
		"NumThreads":              {computing, func() { NumThreads() }},
		"RecordStream":            {computing, func() { RecordStream(x, Stream{}) }},
		"CopyTensor non-blocking": {computing, func() { CopyTensor(x, x, true) }},
		"CopyTensor":              {copying(false), func() { CopyTensor(x, x, false) }},
		"TensorTo": {copying(false), func() {
			if r, err := TensorTo(x, DeviceCPU, Float32, false); err == nil {
				FreeTensor(r)
			}
		}},
		"CallOperator":            {computing, func() { CallOperator(nil, nil, nil, nil, 0, nil) }},
		"CallOperatorOne":         {computing, func() { CallOperatorOne(nil, nil, nil, nil, 0) }},
		"CallOperator that waits": {copying(false), func() { CallOperator(nil, nil, nil, nil, CallWaits, nil) }},
		"TensorData of the host":  {waiting, func() { TensorData(x, DeviceCPU) }},
		"NotifyStream":            {computing, func() { NotifyStream(Stream{}, nil, 0) }},
		"FreeGraph":               {computing, func() { FreeGraph(nil) }},
		"BeginCapture":            {forCapture, func() { BeginCapture(Stream{}, nil) }},
		"EmptyCache":              {forCapture, func() { EmptyCache() }},
		"SynchronizeDevice":       {forCapture, func() { SynchronizeDevice(0) }},
		"waitForCapture":          {forCapture, func() { waitForCapture() }},
	} {
		full := c.gate.limit
		for range full {
			c.gate.enter()
		}
		var all sync.WaitGroup
		returned := make(chan struct{})
		all.Go(func() { c.call(); close(returned) })
		for c.gate.inside.Load() == full {
			select {
			case <-returned:
				t.Fatalf("%s did not pass its gate", name)
			default:
				runtime.Gosched()
			}
		}
		for range full {
			c.gate.leave()
		}
		waitFor(t, &all)
	}
}

// Goroutines that wait for the device do not block a call that works on its memory.
func TestWaitersForADeviceLeaveRoom(t *testing.T) {
	x, err := TensorFromData([]byte{1, 2, 3, 4}, []int64{4}, Uint8)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(x)
	for range waiting.limit {
		waiting.enter()
		defer waiting.leave()
	}
	var all sync.WaitGroup
	all.Go(func() { TensorData(x, 0) })
	waitFor(t, &all)
}

// A gate full of waiters for a capture does not block the captured function's calls.
func TestWaitersForACaptureLeaveRoom(t *testing.T) {
	for name, c := range map[string]struct {
		full *gate
		call func()
	}{
		"FreeMemoryPool":     {forCapture, func() { FreeMemoryPool(nil) }},
		"SynchronizeEvent":   {forCapture, func() { SynchronizeEvent(nil) }},
		"SynchronizeStream":  {forCapture, func() { Stream{}.Synchronize() }},
		"FreePinned":         {forCapture, func() { FreePinned(nil) }},
		"EndCapture":         {forCapture, func() { EndCapture(nil) }},
		"waitForCapture":     {waiting, func() { waitForCapture() }},
		"SynchronizeDevice":  {waiting, func() { SynchronizeDevice(1000) }},
		"EmptyCache of none": {waiting, func() { EmptyCache() }},
	} {
		t.Run(name, func(t *testing.T) {
			for range c.full.limit {
				c.full.enter()
				defer c.full.leave()
			}
			var all sync.WaitGroup
			all.Go(c.call)
			waitFor(t, &all)
		})
	}
}

// A capture continues and ends while more goroutines wait for it than a gate lets in. Calls of the
// capturing thread that would wait for the capture itself return an error.
func TestCaptureBesideManyWaiters(t *testing.T) {
	if DeviceCount() == 0 {
		t.Skip("needs 1 GPU(s), this machine has 0")
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	x, err := EmptyTensor([]int64{4}, Float32, 0, Contiguous)
	if err != nil {
		t.Fatal(err)
	}
	defer FreeTensor(x)
	zero, err := FindOperator("aten::zero_", "")
	if err != nil {
		t.Fatal(err)
	}
	queue := func() error {
		err := CallOperator(zero, []Arg{{Kind: ArgTensor}}, []*Tensor{x}, nil, 0, nil)
		return err
	}
	if err := queue(); err != nil {
		t.Fatal(err)
	}
	s, err := StreamFromPool(0, 0)
	if err != nil {
		t.Fatal(err)
	}
	guard, err := StreamGuardEnter(s)
	if err != nil {
		t.Fatal(err)
	}
	g, err := BeginCapture(s, nil)
	if err != nil {
		t.Fatal(err)
	}
	waiters := forCapture.limit + 10
	var all sync.WaitGroup
	for i := range waiters {
		all.Go(func() {
			var err error
			switch i % 3 {
			case 0:
				err = SynchronizeDevice(0)
			case 1:
				err = EmptyCache()
			default:
				err = waitForCapture()
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	for forCapture.inside.Load() < waiters {
		runtime.Gosched()
	}
	done := make(chan struct{})
	go func() {
		select {
		case <-done:
		case <-time.After(30 * time.Second):
			panic("deadlock: the capture waits for goroutines that wait for the capture")
		}
	}()
	_, nested := BeginCapture(s, nil)
	for name, err := range map[string]error{
		"SynchronizeDevice": SynchronizeDevice(0), "EmptyCache": EmptyCache(),
		"waitForCapture": waitForCapture(), "BeginCapture": nested, "Synchronize": s.Synchronize(),
	} {
		if !errors.Is(err, CodeCapture) {
			t.Errorf("%s in the capture: got %v, want CodeCapture", name, err)
		}
	}
	if err := queue(); err != nil {
		t.Error(err)
	}
	if err := EndCapture(g); err != nil {
		t.Error(err)
	}
	close(done)
	waitFor(t, &all)
	if err := FreeGraph(g); err != nil {
		t.Error(err)
	}
	if err := guard.Exit(); err != nil {
		t.Error(err)
	}
}

// A blocking copy passes the gate of calls that wait for the device. Without a GPU every copy
// passes the computing gate.
func TestBlockingCopiesPassTheWaitingGate(t *testing.T) {
	want := computing
	if DeviceCount() > 0 {
		want = waiting
	}
	if wait, async := copying(false), copying(true); wait != want || async != computing {
		t.Errorf("blocking and other copies pass the gates %v, %v, want %v, %v", wait, async, want, computing)
	}
}

func BenchmarkGate(b *testing.B) {
	g := newGate(8)
	for b.Loop() {
		g.enter()
		g.leave()
	}
}
