//go:build linux

package cuda

import (
	"errors"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/internal/capi"
)

func TestNilGraphIsRefused(t *testing.T) {
	for _, g := range []*Graph{nil, {}} {
		if err := g.Replay(Stream{}); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("Replay: %v, want ErrInvalidArgument", err)
		}
		if _, err := Capture(CaptureOptions{SharePool: g}, func() error { return nil }); g != nil &&
			DeviceCount() > 0 && !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("SharePool: %v", err)
		}
		if nodes, device, err := g.Nodes(), g.Device(), g.Close(); nodes != 0 || device != 0 || err != nil {
			t.Errorf("Nodes, Device, Close of a nil Graph = %d, %v, %v, want 0, cuda:0, nil", nodes, device, err)
		}
	}
	if _, err := Capture(CaptureOptions{}, nil); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("Capture without a function: got %v, want ErrInvalidArgument", err)
	}
}

func TestClosedGraphIsRefused(t *testing.T) {
	g := newGraph(nil, 0, nil)
	for range 2 {
		if err := g.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if err := g.Replay(Stream{}); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// A graph that a replay uses is freed when the replay returns.
func TestClosedGraphLivesUntilItsCallsEnd(t *testing.T) {
	g := newGraph(nil, 0, nil)
	if _, err := g.use("test"); err != nil {
		t.Fatal(err)
	}
	g.Close()
	if g.refs.Load() != 1 {
		t.Errorf("%d references, want 1", g.refs.Load())
	}
	g.done()
	if _, err := g.use("test"); !errors.Is(err, ErrClosed) {
		t.Errorf("got %v, want ErrClosed", err)
	}
}

// increments captures n additions of 1 to the counter.
func increments(t *testing.T, c *counter, n int, o CaptureOptions) *Graph {
	t.Helper()
	g := must[*Graph](t)(Capture(o, func() error {
		for range n {
			if err := c.increase(); err != nil {
				return err
			}
		}
		return nil
	}))
	c.expected = 0
	t.Cleanup(func() { g.Close() })
	return g
}

func TestCaptureAndReplay(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	g := increments(t, c, 5, CaptureOptions{})
	if got := c.value(t); got != 0 {
		t.Fatalf("the capture ran its work: the counter is %v, want 0", got)
	}
	if g.Nodes() != 5 || g.Device() != 0 {
		t.Errorf("%d nodes on %v, want 5, 0", g.Nodes(), g.Device())
	}
	for i, s := range append(newStreams(t, 3), DefaultStream(0)) {
		check(t, g.Replay(s))
		check(t, g.Replay(s))
		if got, want := c.value(t), float64(10*(i+1)); got != want {
			t.Errorf("after %d replays: %v, want %v", 2*(i+1), got, want)
		}
	}
	// Replays from many goroutines and on many streams at once run one after the other.
	streams := newStreams(t, 8)
	var all sync.WaitGroup
	for _, s := range streams {
		all.Go(func() {
			for range 50 {
				if err := g.Replay(s); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if got := c.value(t); got != 40+8*50*5 {
		t.Errorf("got %v, want %v", got, 40+8*50*5)
	}
	if err := g.Replay(DefaultStream(1)); err == nil {
		t.Error("Replay on a stream of another device: got no error, want one")
	}
	check(t, g.Close())
	if err := g.Replay(streams[0]); !errors.Is(err, ErrClosed) {
		t.Errorf("after Close: %v, want ErrClosed", err)
	}
}

// Close during running and queued replays: all accepted replays run.
func TestCloseWithReplaysInFlight(t *testing.T) {
	onGPU(t, 1)
	for range 20 {
		c := newCounter(t)
		g := increments(t, c, 100, CaptureOptions{})
		var all sync.WaitGroup
		var mu sync.Mutex
		accepted := 0
		for _, s := range newStreams(t, 4) {
			all.Go(func() {
				for {
					err := g.Replay(s)
					if errors.Is(err, ErrClosed) {
						return
					}
					mu.Lock()
					if err != nil {
						t.Error(err)
					}
					accepted++
					done := accepted == 20
					mu.Unlock()
					if done {
						g.Close()
					}
				}
			})
		}
		all.Wait()
		if got := c.value(t); got != float64(100*accepted) {
			t.Fatalf("%d replays: %v, want %v", accepted, got, float64(100*accepted))
		}
	}
}

// During a capture, other goroutines queue, synchronise, query, allocate and pin memory. Neither
// side disturbs the other.
func TestCaptureBesideOtherWork(t *testing.T) {
	onGPU(t, 1)
	stop := make(chan struct{})
	var all sync.WaitGroup
	for _, s := range newStreams(t, 6) {
		c := newCounter(t)
		e := must[*Event](t)(NewEvent(EventOptions{}))
		defer e.Close()
		all.Go(func() {
			fail := func(err error) bool {
				if err != nil {
					t.Errorf("a call beside a capture: got %v, want no error", err)
				}
				return err != nil
			}
			for size := int64(1); ; size = size*3%(1<<24) + 1 {
				select {
				case <-stop:
					return
				default:
				}
				bad := WithStream(s, func() error {
					x, err := capi.EmptyTensor([]int64{size}, capi.Float32, 0, capi.Contiguous)
					if err == nil {
						err = fill(x, 1)
						capi.FreeTensor(x)
					}
					return errors.Join(err, c.increase())
				})
				_, qerr := s.Query()
				if fail(bad) || fail(e.Record(s)) || fail(e.Synchronize()) || fail(s.Synchronize()) || fail(qerr) {
					return
				}
				if size%7 == 0 {
					p, err := NewPinned(1 << 16)
					if fail(err) || fail(p.Close()) || fail(Device(0).Synchronize()) {
						return
					}
				}
			}
		})
	}
	c := newCounter(t)
	for range 30 {
		g, err := Capture(CaptureOptions{}, func() error {
			for range 200 {
				if err := c.increase(); err != nil {
					return err
				}
				runtime.Gosched()
			}
			return nil
		})
		if err != nil {
			t.Error(err)
			break
		}
		check(t, g.Replay(DefaultStream(0)))
		check(t, g.Close())
	}
	close(stop)
	all.Wait()
	if got := c.value(t); got != 6000 {
		t.Errorf("got %v, want 6000", got)
	}
}

// Device.Synchronize on another goroutine does not return during a capture, and does not break it.
func TestDeviceWaitsForTheEndOfACapture(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	for range 5 {
		thread, ended := make(chan int64, 1), make(chan struct{})
		var waited error
		g, err := Capture(CaptureOptions{}, func() error {
			go func() {
				defer close(ended)
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				thread <- capi.ThreadID()
				waited = Device(0).Synchronize()
			}()
			if !sleepsIn(t, <-thread, "ts_device_synchronize", ended) {
				t.Errorf("Device.Synchronize returned during a capture: %v", waited)
			}
			return c.increase()
		})
		check(t, err)
		<-ended
		check(t, waited)
		if g.Nodes() == 0 {
			t.Error("Nodes() = 0, want at least 1")
		}
		check(t, g.Replay(DefaultStream(0)))
		check(t, g.Close())
	}
}

// Capture refuses each call that would break the capture and names the call. The capture then
// continues without the call, and afterwards everything works.
func TestCaptureRefusesBreakingCalls(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	other := newStreams(t, 1)[0]
	recorded := must[*Event](t)(NewEvent(EventOptions{}))
	defer recorded.Close()
	check(t, recorded.Record(other))
	host := must[*capi.Tensor](t)(capi.TensorFromData(make([]byte, 4), []int64{1}, capi.Float32))
	defer capi.FreeTensor(host)
	memory := mapped(t, 1<<16)
	timed := must[*Event](t)(NewEvent(EventOptions{Timing: true}))
	defer timed.Close()
	check(t, timed.Record(other))
	shared := must[*Event](t)(NewEvent(EventOptions{Interprocess: true}))
	defer shared.Close()
	pool := must[*MemoryPool](t)(NewMemoryPool(0))
	defer pool.Close()
	refused := map[string]struct {
		call func() error
		text string
	}{
		"Float64":  {func() error { _, err := capi.TensorItem(c.x); return err }, "reading values"},
		"Float32s": {func() error { return capi.ReadTensor(c.x, make([]byte, 4)) }, "reading values"},
		"a blocking copy": {func() error { return capi.CopyTensor(c.x, host, false) },
			"a copy between host and device"},
		"To": {func() error {
			_,
				err := capi.TensorTo(c.x, capi.DeviceCPU, capi.Float32, false)
			return err
		}, "a copy between"},
		"Stream.Synchronize": {other.Synchronize, "waiting for a stream"},
		"Stream.Query":       {func() error { _, err := other.Query(); return err }, "asking for a stream"},
		"Event.Query":        {func() error { _, err := recorded.Query(); return err }, "asking for an event"},
		"Event.Synchronize":  {recorded.Synchronize, "waiting for an event"},
		"Device.Synchronize": {Device(0).Synchronize, "waiting for a device"},
		"EmptyCache":         {EmptyCache, "EmptyCache"},
		"NewPinned":          {func() error { _, err := NewPinned(64); return err }, "pinning"},
		"RegisterPinned":     {func() error { _, err := RegisterPinned(memory); return err }, "pinning"},
		"Elapsed":            {func() error { _, err := Elapsed(timed, timed); return err }, "time between"},
		"Stream.WaitEvent": {func() error {
			here, err := GetCurrentCUDAStream(0)
			if err != nil {
				return err
			}
			return here.WaitEvent(recorded)
		}, "outside of the capture"},
		"Event.Export":   {func() error { _, err := shared.Export(0); return err }, "exporting"},
		"MemoryPool.Use": {func() error { return pool.Use(c.increase) }, "entering a memory pool"},
		"Capture": {func() error {
			_,
				err := Capture(CaptureOptions{}, func() error { return nil })
			return err
		}, "do not nest"},
		"nonzero": {func() error { return operate(c.x, "aten::nonzero") }, "aten::nonzero is not possible"},
	}
	captured := 0
	for name, r := range refused {
		t.Run(name, func(t *testing.T) {
			g, err := Capture(CaptureOptions{}, func() error {
				if err := c.increase(); err != nil {
					return err
				}
				if err := r.call(); !errors.Is(err, ErrCapture) || !strings.Contains(err.Error(), r.text) {
					t.Errorf("got %v, want ErrCapture with %q", err, r.text)
				}
				return nil
			})
			if err != nil {
				t.Fatalf("the capture around the call: %v, want no error", err)
			}
			captured++
			check(t, g.Replay(DefaultStream(0)))
			check(t, g.Close())
		})
	}
	if got := c.value(t); got != float64(captured) {
		t.Errorf("the counter is %v after %d replays, want %v", got, captured, float64(captured))
	}
	err := pool.Use(func() error {
		if err := EmptyCache(); !errors.Is(err, ErrBusy) {
			t.Errorf("EmptyCache in MemoryPool.Use: got %v, want ErrBusy", err)
		}
		_, err := Capture(CaptureOptions{}, c.increase)
		return err
	})
	if !errors.Is(err, ErrCapture) || !strings.Contains(err.Error(), "inside a memory pool") {
		t.Errorf("Capture in MemoryPool.Use: got %v, want ErrCapture", err)
	}
}

// A captured function does not wait for a Use in another goroutine, because that Use may wait for
// the end of the capture.
func TestCaptureBesideAUsedPool(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	pool := must[*MemoryPool](t)(NewMemoryPool(0))
	entered, captured, used := make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		used <- pool.Use(func() error {
			close(entered)
			<-captured
			return nil
		})
	}()
	<-entered
	g, err := Capture(CaptureOptions{}, func() error {
		if err := pool.Use(c.increase); !errors.Is(err, ErrCapture) {
			t.Errorf("Use: got %v, want ErrCapture", err)
		}
		if _, _, err := pool.Bytes(); !errors.Is(err, ErrBusy) {
			t.Errorf("Bytes: got %v, want ErrBusy", err)
		}
		if err := pool.Close(); !errors.Is(err, ErrBusy) {
			t.Errorf("Close: got %v, want ErrBusy", err)
		}
		return c.increase()
	})
	close(captured)
	check(t, errors.Join(err, <-used))
	check(t, g.Close())
	check(t, pool.Use(c.increase)) // the refused Close changed nothing
	check(t, pool.Close())
}

// Graphs that share memory have one stream, so their captures wait for each other on that stream
// too.
func TestCapturesThatShareAtOnce(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	first := must[*Graph](t)(Capture(CaptureOptions{}, c.increase))
	defer first.Close()
	const goroutines, each = 4, 25
	var all sync.WaitGroup
	for range goroutines {
		all.Go(func() {
			for range each {
				g, err := Capture(CaptureOptions{SharePool: first}, c.increase)
				if err == nil {
					err = errors.Join(g.Replay(DefaultStream(0)), g.Close())
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	if got := c.value(t); got != goroutines*each {
		t.Errorf("got %v, want %v", got, goroutines*each)
	}
}

// Close in a captured function works, and neither it nor the pools and the pinned memory of other
// goroutines break the capture.
func TestCaptureBesidePools(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	filled := func() (*MemoryPool, error) {
		p, err := NewMemoryPool(0)
		if err != nil {
			return nil, err
		}
		return p, p.Use(func() error {
			x, err := capi.EmptyTensor([]int64{1 << 20}, capi.Uint8, 0, capi.Contiguous)
			if err == nil {
				capi.FreeTensor(x)
			}
			return err
		})
	}
	stop := make(chan struct{})
	var all sync.WaitGroup
	for range 3 {
		memory := mapped(t, 1<<16)
		all.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				p, filling := filled()
				registered, pinning := RegisterPinned(memory)
				if err := errors.Join(filling, pinning, p.Close(), registered.Close()); err != nil {
					t.Errorf("pinning beside a capture: got %v, want no error", err)
					return
				}
			}
		})
	}
	for range 30 {
		p := must[*MemoryPool](t)(filled())
		pinned := must[*Pinned](t)(NewPinned(1 << 16))
		g, err := Capture(CaptureOptions{}, func() error {
			for range 100 {
				if err := c.increase(); err != nil {
					return err
				}
				runtime.Gosched()
			}
			return errors.Join(p.Close(), pinned.Close())
		})
		if err != nil {
			t.Error(err)
			break
		}
		check(t, g.Replay(DefaultStream(0)))
		check(t, g.Close())
	}
	close(stop)
	all.Wait()
	if got := c.value(t); got != 3000 {
		t.Errorf("got %v, want 3000", got)
	}
}

// A failed capture reports the reason. Afterwards the stream can be used and captured, its memory
// is free, and other captures work.
func TestFailedCapture(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	streams := newStreams(t, 2)
	stream, side := streams[0], streams[1]
	boom := errors.New("boom")
	cases := []struct {
		name string
		fn   func() error
		is   error
		text string
	}{
		{"the function's error", func() error { return errors.Join(c.increase(), boom) }, boom, "boom"},
		{"nothing was queued", func() error { return nil }, ErrCapture, "nothing was enqueued"},
		{"not joined", func() error {
			return errors.Join(c.increase(), side.Wait(stream),
				WithStream(side, c.increase))
		}, ErrCapture, "not joined"},
		{"waits for a stream outside", func() error { return errors.Join(c.increase(), stream.Wait(side)) },
			ErrCapture, "fork that one"},
		{"an operator that is not capturable", func() error {
			c.increase()
			operate(c.x, "aten::_local_scalar_dense") // refused, which breaks nothing; the result is ignored
			x, err := capi.EmptyTensor([]int64{1 << 22}, capi.Float32, 0, capi.Contiguous)
			if err != nil {
				return err
			}
			defer capi.FreeTensor(x)
			return errors.Join(fill(x, 1), boom)
		}, boom, "boom"},
	}
	before := must[MemoryStats](t)(Device(0).Memory())
	replayed := 0
	for _, k := range cases {
		t.Run(k.name, func(t *testing.T) {
			_, err := Capture(CaptureOptions{Stream: stream}, k.fn)
			if err == nil || k.is != nil && !errors.Is(err, k.is) || !strings.Contains(err.Error(), k.text) {
				t.Errorf("got %v, want %v, %q", err, k.is, k.text)
			}
			// A panic ends a capture as well.
			func() {
				defer func() {
					if recover() == nil {
						t.Error("recover() = nil, want the panic from inside Capture")
					}
				}()
				Capture(CaptureOptions{Stream: stream}, func() error { c.increase(); panic(k.name) })
			}()
			done := make(chan struct{})
			go func() {
				defer close(done)
				Capture(CaptureOptions{Stream: stream}, func() error { c.increase(); runtime.Goexit(); return nil })
			}()
			<-done
			check(t, WithStream(stream, c.increase))
			check(t, stream.Synchronize())
			check(t, side.Synchronize())
			g, err := Capture(CaptureOptions{Stream: stream}, c.increase)
			if err != nil {
				t.Fatalf("a capture afterwards: %v, want no error", err)
			}
			check(t, g.Replay(stream))
			check(t, g.Close())
			replayed++
		})
	}
	if got := c.value(t); got != float64(2*replayed) {
		t.Errorf("the counter is %v, want %v", got, 2*replayed)
	}
	if got := c.value(t); got != float64(2*replayed) {
		t.Errorf("the counter is %v, want %v", got, 2*replayed)
	}
	check(t, EmptyCache())
	if after := must[MemoryStats](t)(Device(0).Memory()); after.Allocated > before.Allocated+1<<20 ||
		after.Reserved > before.Reserved+40<<20 {
		t.Errorf("memory before %+v, after %+v", before, after)
	}
	// The driver may report errors late: none may be left.
	if err := Device(0).Synchronize(); err != nil {
		t.Error(err)
	}
}

// The graph contains branches on other streams that are forked and joined; other goroutines queue
// them.
func TestCaptureWithForks(t *testing.T) {
	onGPU(t, 1)
	a, b, sum := newCounter(t), newCounter(t), newCounter(t)
	streams := newStreams(t, 3)
	g, err := Capture(CaptureOptions{Stream: streams[0]}, func() error {
		if err := Fork(streams[0], streams[1:]...); err != nil {
			return err
		}
		errs := make(chan error, 2)
		for i, c := range []*counter{a, b} {
			go func() {
				errs <- WithStream(streams[1+i], func() error {
					for range 10 {
						if err := c.increase(); err != nil {
							return err
						}
					}
					return nil
				})
			}()
		}
		if err := errors.Join(<-errs, <-errs); err != nil {
			return err
		}
		if err := Join(streams[0], streams[1:]...); err != nil {
			return err
		}
		return sum.increase()
	})
	check(t, err)
	defer g.Close()
	if g.Nodes() < 21 {
		t.Errorf("%d nodes, want at least 21", g.Nodes())
	}
	for range 3 {
		check(t, g.Replay(DefaultStream(0)))
	}
	if a.value(t) != 30 || b.value(t) != 30 || sum.value(t) != 3 {
		t.Errorf("got %v, %v, %v, want 30, 30, 3", a.value(t), b.value(t), sum.value(t))
	}
}

// Another goroutine may query a stream that is captured: the answer is ErrCapture, and the capture
// continues.
func TestQueryOfACapturedStream(t *testing.T) {
	onGPU(t, 1)
	c := newCounter(t)
	stream := newStreams(t, 1)[0]
	errs := map[string]error{}
	g := must[*Graph](t)(Capture(CaptureOptions{Stream: stream}, func() error {
		done := make(chan struct{})
		go func() {
			defer close(done)
			_, errs["Query"] = stream.Query()
			errs["Synchronize"] = stream.Synchronize()
		}()
		<-done
		return c.increase()
	}))
	defer g.Close()
	for name, err := range errs {
		if !errors.Is(err, ErrCapture) {
			t.Errorf("%s: got %v, want ErrCapture", name, err)
		}
	}
	check(t, g.Replay(stream))
	if done := must[bool](t)(stream.Query()); !done {
		check(t, stream.Synchronize())
	}
	if got := c.value(t); got != 1 {
		t.Errorf("the graph counts to %v, want 1", got)
	}
}

// Graphs that share memory need less, and their replays on different streams do not overlap.
func TestSharedPool(t *testing.T) {
	onGPU(t, 1)
	const elements = 16 << 20
	c := newCounter(t)
	work := func() error {
		x, err := capi.EmptyTensor([]int64{elements}, capi.Float32, 0, capi.Contiguous)
		if err != nil {
			return err
		}
		defer capi.FreeTensor(x)
		for i := range 8 {
			if err := fill(x, float32(i)); err != nil {
				return err
			}
		}
		return c.increase()
	}
	reserved := func() int64 {
		check(t, EmptyCache())
		return must[MemoryStats](t)(Device(0).Memory()).Reserved
	}
	check(t, WithStream(newStreams(t, 1)[0], work))
	check(t, Device(0).Synchronize())
	start := reserved()
	first := must[*Graph](t)(Capture(CaptureOptions{}, work))
	one := reserved() - start
	second := must[*Graph](t)(Capture(CaptureOptions{SharePool: first}, work))
	two := reserved() - start
	alone := must[*Graph](t)(Capture(CaptureOptions{}, work))
	three := reserved() - start
	t.Logf("one graph %d MiB, with one that shares %d MiB, with one that does not %d MiB", one>>20, two>>20, three>>20)
	if one < 4*elements || two-one >= 4*elements || three-two < 4*elements {
		t.Errorf("reserved: %d, %d, %d bytes, want at least %v, less than %v, at least %v",
			one, two, three, 4*elements, 4*elements, 4*elements)
	}
	streams := newStreams(t, 2)
	for i := range 20 {
		check(t, []*Graph{first, second}[i%2].Replay(streams[i%2]))
	}
	if got := c.value(t); got != 21 {
		t.Errorf("got %v, want 21", got)
	}
	check(t, first.Close())
	check(t, second.Replay(streams[0])) // the memory still exists
	check(t, second.Close())
	check(t, alone.Close())
	check(t, Device(0).Synchronize())
	if left := reserved() - start; left > 0 {
		t.Errorf("%d bytes are still reserved, want 0", left)
	}
	if _, err := Capture(CaptureOptions{SharePool: first}, c.increase); !errors.Is(err, ErrClosed) {
		t.Errorf("SharePool is a closed graph: got %v, want ErrClosed", err)
	}
}

// BenchmarkReplay measures the host's cost of queueing a graph.
func BenchmarkReplay(b *testing.B) {
	if DeviceCount() == 0 {
		b.Skip("no GPU")
	}
	x, err := capi.EmptyTensor([]int64{1}, capi.Float32, 0, capi.Contiguous)
	if err != nil {
		b.Fatal(err)
	}
	defer capi.FreeTensor(x)
	g, err := Capture(CaptureOptions{}, func() error { return fill(x, 1) })
	if err != nil {
		b.Fatal(err)
	}
	defer g.Close()
	stream, err := NewStream(0, StreamOptions{})
	if err != nil {
		b.Fatal(err)
	}
	var inside time.Duration
	n := 0
	for b.Loop() {
		start := time.Now()
		if err := g.Replay(stream); err != nil {
			b.Fatal(err)
		}
		inside += time.Since(start)
		if n++; n%256 == 0 { // otherwise the queue fills up and the host waits for the device
			if err := stream.Synchronize(); err != nil {
				b.Fatal(err)
			}
		}
	}
	b.ReportMetric(float64(inside.Nanoseconds())/float64(n), "host-ns/op")
}
