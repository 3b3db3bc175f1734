package cuda

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unsafe"

	"github.com/torchstream/torchstream/internal/capi"
)

// onGPU skips the test without that many GPUs, and ends the process with all stacks rather than let
// it hang.
func onGPU(t *testing.T, count int) {
	t.Helper()
	if n := DeviceCount(); n < count {
		t.Skipf("needs %d GPU(s), this machine has %d", count, n)
	}
	dog := time.AfterFunc(2*time.Minute, func() { panic(t.Name() + " hangs") })
	t.Cleanup(func() { dog.Stop() })
}

func must[T any](t *testing.T) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// newStreams returns different streams: the pool hands out 32 a priority before it repeats.
func newStreams(t *testing.T, n int) []Stream {
	t.Helper()
	streams := make([]Stream, n)
	seen := map[Stream]bool{}
	for i := range streams {
		streams[i] = must[Stream](t)(NewStream(0, StreamOptions{Priority: -(i / 32)}))
		if seen[streams[i]] {
			t.Fatalf("%v was handed out twice in %d", streams[i], n)
		}
		seen[streams[i]] = true
	}
	return streams
}

// eachThread runs visit on every thread of `used` that is alive, and on what other threads Go code
// runs on, once on each: it holds more goroutines locked at a time than there are threads.
func eachThread(t *testing.T, used *sync.Map, visit func() error) {
	t.Helper()
	tasks, err := os.ReadDir("/proc/self/task")
	check(t, err)
	type visited struct {
		thread int64
		err    error
	}
	arrived, release := make(chan visited), make(chan struct{})
	var all sync.WaitGroup
	threads := map[int64]bool{}
	hold := func(goroutines int) {
		for range goroutines {
			all.Go(func() {
				runtime.LockOSThread()
				defer runtime.UnlockOSThread()
				arrived <- visited{capi.ThreadID(), visit()}
				<-release
			})
		}
		for range goroutines {
			v := <-arrived
			if v.err != nil {
				t.Errorf("thread %d: %v", v.thread, v.err)
			}
			if threads[v.thread] {
				t.Errorf("two locked goroutines are on thread %d", v.thread)
			}
			threads[v.thread] = true
		}
	}
	hold(len(tasks) + 16)
	missing := func() (thread int64) {
		used.Range(func(key, _ any) bool {
			_, err := os.Stat("/proc/self/task/" + strconv.FormatInt(key.(int64), 10))
			if err == nil && !threads[key.(int64)] {
				thread = key.(int64)
			}
			return thread == 0
		})
		return thread
	}
	// One thread may be waiting in the runtime's poller. A timer wakes it, and it may come to run
	// one of us, or another takes its place there.
	for tries := 0; missing() != 0 && tries < 500; tries++ {
		<-time.After(time.Microsecond)
		hold(1)
	}
	close(release)
	all.Wait()
	if thread := missing(); thread != 0 {
		t.Errorf("thread %d used streams, is alive, and was not visited", thread)
	}
}

func onDefaultStream() error {
	s, err := capi.GetCurrentCUDAStream(0)
	if err == nil && s != DefaultStream(0).s {
		err = fmt.Errorf("%v was left current", Stream{s})
	}
	return err
}

func requireDefaultStreams(t *testing.T, used *sync.Map) {
	t.Helper()
	eachThread(t, used, onDefaultStream)
}

type counter struct {
	x        *capi.Tensor
	add      *capi.Operator
	one      *capi.Tensor
	expected float64
}

func newCounter(t *testing.T) *counter {
	t.Helper()
	c := &counter{x: tensor(t, 1, 0), one: tensor(t, 1, 1)}
	c.add = must[*capi.Operator](t)(capi.FindOperator("aten::add_", "Tensor"))
	return c
}

func (c *counter) increase() error {
	c.expected++
	_, err := capi.CallOperator(c.add, []capi.Arg{{Kind: capi.ArgTensor}, {Kind: capi.ArgTensor, Value: 1}}, []*capi.Tensor{c.x, c.one}, nil, nil, capi.CallNoGrad, nil)
	return err
}

// tensor returns n float32 elements on the first GPU, complete, and frees them at the test's end.
func tensor(t *testing.T, n int64, value float32) *capi.Tensor {
	t.Helper()
	x := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Float32, 0, capi.Contiguous))
	t.Cleanup(func() { capi.FreeTensor(x) })
	check(t, fill(x, value))
	check(t, Device(0).Synchronize())
	return x
}

func fill(x *capi.Tensor, value float32) error {
	op, err := capi.FindOperator("aten::fill_", "Scalar")
	if err != nil {
		return err
	}
	_, err = capi.CallOperator(op, []capi.Arg{{Kind: capi.ArgTensor}, {Kind: capi.ArgInt, Value: int64(value)}}, []*capi.Tensor{x}, nil, nil, capi.CallNoGrad, nil)
	return err
}

// 64 goroutines, each with its own stream, 10,000 rounds of set, yield, use, restore: none is ever
// on a stream that is not its own, and afterwards no thread is left on another stream than the
// default.
func TestEveryGoroutineKeepsItsStream(t *testing.T) {
	onGPU(t, 1)
	const goroutines, rounds = 64, 10_000
	streams := newStreams(t, goroutines)
	for name, on := range map[string]func(Stream, func() error) error{
		"WithStream": WithStream,
		"SetCUDAStream": func(s Stream, fn func() error) error {
			restore, err := SetCUDAStream(s)
			if err != nil {
				return err
			}
			return errors.Join(fn(), restore())
		},
	} {
		t.Run(name, func(t *testing.T) {
			var wrong atomic.Int64
			var used sync.Map
			var all sync.WaitGroup
			for _, stream := range streams {
				sum := newCounter(t)
				all.Go(func() {
					for round := range rounds {
						err := on(stream, func() error {
							used.Store(capi.ThreadID(), nil)
							runtime.Gosched()
							current, err := GetCurrentCUDAStream(0)
							if current != stream {
								wrong.Add(1)
							}
							if err != nil || round%100 != 0 {
								return err
							}
							return sum.increase()
						})
						if err != nil {
							t.Error(err)
							return
						}
					}
					err := on(stream, func() error {
						if got, err := capi.TensorItem(sum.x); err != nil || got != sum.expected {
							return fmt.Errorf("the sum on %v is %v, want %v (%v)", stream, got, sum.expected, err)
						}
						return nil
					})
					if err != nil {
						t.Error(err)
					}
				})
			}
			all.Wait()
			if wrong.Load() != 0 {
				t.Errorf("wrong stream in %d of %d rounds", wrong.Load(), goroutines*rounds)
			}
			requireDefaultStreams(t, &used)
		})
	}
}

// The negative control of the test above: without a locked thread the same goes wrong most of the
// time, and leaves streams behind, which the visit finds.
func TestUnlockedGoroutinesLoseTheirStream(t *testing.T) {
	onGPU(t, 1)
	const goroutines, rounds = 64, 2_000
	streams := newStreams(t, goroutines)
	var wrong atomic.Int64
	var used sync.Map
	var all sync.WaitGroup
	for _, stream := range streams {
		all.Go(func() {
			for range rounds {
				used.Store(capi.ThreadID(), nil)
				if err := capi.SetCUDAStream(stream.s); err != nil {
					t.Error(err)
					return
				}
				runtime.Gosched()
				if current, err := capi.GetCurrentCUDAStream(0); err != nil || current != stream.s {
					wrong.Add(1)
				}
			}
		})
	}
	all.Wait()
	t.Logf("unlocked: wrong stream in %.1f %% of %d rounds", 100*float64(wrong.Load())/(goroutines*rounds), goroutines*rounds)
	if wrong.Load() == 0 {
		t.Error("nothing went wrong: the locked test shows nothing")
	}
	var left atomic.Int64
	eachThread(t, &used, func() error {
		if onDefaultStream() != nil {
			left.Add(1)
		}
		return capi.SetCUDAStream(DefaultStream(0).s)
	})
	if left.Load() == 0 {
		t.Error("no thread was left on another stream: the visit of the locked test shows nothing")
	}
	requireDefaultStreams(t, &used)
}

func requireCurrent(t *testing.T, want Stream) {
	t.Helper()
	if got := must[Stream](t)(GetCurrentCUDAStream(want.Device())); got != want {
		t.Errorf("%v is current, want %v", got, want)
	}
}

func TestWithStreamNests(t *testing.T) {
	onGPU(t, 1)
	streams := newStreams(t, 2)
	runtime.LockOSThread() // so that this goroutine's thread is the one looked at
	defer runtime.UnlockOSThread()
	problem := errors.New("problem")
	err := WithStream(streams[0], func() error {
		requireCurrent(t, streams[0])
		check(t, WithStream(streams[1], func() error {
			requireCurrent(t, streams[1])
			restore := must[func() error](t)(SetCUDAStream(streams[0]))
			requireCurrent(t, streams[0])
			check(t, restore())
			requireCurrent(t, streams[1])
			return nil
		}))
		requireCurrent(t, streams[0])
		return problem
	})
	if err != problem {
		t.Errorf("got %v, want fn's error as it is", err)
	}
	requireCurrent(t, DefaultStream(0))
}

func TestWithStreamSurvivesPanicAndGoexit(t *testing.T) {
	onGPU(t, 1)
	stream := newStreams(t, 1)[0]
	for name, end := range map[string]func(){"panic": func() { panic("on purpose") }, "Goexit": runtime.Goexit} {
		leave := func() {
			defer func() { recover() }()
			WithStream(stream, func() error {
				requireCurrent(t, stream)
				end()
				return nil
			})
		}
		// On one thread: the stream from before is back.
		done := make(chan error)
		go func() {
			runtime.LockOSThread()
			defer func() { done <- onDefaultStream() }()
			leave()
		}()
		if err := <-done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
		// And the lock is gone: goroutines that end that way do not take their threads with them.
		threads := map[int64]bool{}
		const goroutines = 300
		for range goroutines {
			thread := make(chan int64)
			go func() {
				defer func() { thread <- capi.ThreadID() }()
				leave()
			}()
			threads[<-thread] = true
		}
		if len(threads) > goroutines/2 {
			t.Errorf("%s: %d goroutines used %d threads: they ended locked", name, goroutines, len(threads))
		}
	}
	if n := threadsUsed(300, func() { WithStream(stream, func() error { return nil }) }); n > 150 {
		t.Errorf("300 goroutines used %d threads: they ended locked", n)
	}
	requireDefaultStreams(t, &sync.Map{})
}

// A stream that is set inside fn and not restored is reported, and no other goroutine ever gets the
// thread.
func TestForgottenRestore(t *testing.T) {
	onGPU(t, 1)
	streams := newStreams(t, 2)
	problem := errors.New("problem")
	done := make(chan int64)
	go func() {
		defer func() { done <- capi.ThreadID() }()
		var restore func() error
		err := WithStream(streams[0], func() (err error) {
			restore, err = SetCUDAStream(streams[1])
			return errors.Join(problem, err)
		})
		if !errors.Is(err, problem) || !errors.Is(err, ErrOutOfOrder) {
			t.Errorf("got %v, want fn's error and ErrOutOfOrder", err)
		}
		for range 100 { // still locked
			runtime.Gosched()
			requireCurrent(t, streams[1])
		}
		if err := restore(); err != nil {
			t.Error(err)
		}
		requireCurrent(t, streams[0])
	}()
	thread := "/proc/self/task/" + strconv.FormatInt(<-done, 10)
	until(t, "end of the thread with the left-over stream", func() bool { _, err := os.Stat(thread); return errors.Is(err, os.ErrNotExist) })
	requireDefaultStreams(t, &sync.Map{})
}

func TestRestore(t *testing.T) {
	onGPU(t, 1)
	streams := newStreams(t, 2)
	done := make(chan struct{})
	go func() {
		defer close(done)
		outer := must[func() error](t)(SetCUDAStream(streams[0]))
		inner := must[func() error](t)(SetCUDAStream(streams[1]))
		if err := outer(); !errors.Is(err, ErrOutOfOrder) {
			t.Errorf("outer before inner: got %v, want ErrOutOfOrder", err)
		}
		requireCurrent(t, streams[1])
		elsewhere := make(chan error)
		go func() { elsewhere <- inner() }()
		if err := <-elsewhere; !errors.Is(err, ErrWrongThread) {
			t.Errorf("on another goroutine: got %v, want ErrWrongThread", err)
		}
		requireCurrent(t, streams[1])
		for _, restore := range []func() error{inner, inner, outer, inner, outer} { // in order, and again
			if err := restore(); err != nil {
				t.Error(err)
			}
		}
		requireCurrent(t, DefaultStream(0))
	}()
	<-done
	requireDefaultStreams(t, &sync.Map{})
}

// The guards of the C side by themselves.
func TestGuards(t *testing.T) {
	onGPU(t, 1)
	streams := newStreams(t, 2)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	outer := must[capi.StreamGuard](t)(capi.StreamGuardEnter(streams[0].s))
	inner := must[capi.StreamGuard](t)(capi.StreamGuardEnter(streams[1].s))
	if err := outer.Exit(); !errors.Is(err, ErrOutOfOrder) {
		t.Errorf("outer before inner: got %v, want ErrOutOfOrder", err)
	}
	elsewhere := make(chan error)
	go func() { elsewhere <- inner.Exit() }() // this goroutine holds its thread
	if err := <-elsewhere; !errors.Is(err, ErrWrongThread) {
		t.Errorf("on another thread: got %v, want ErrWrongThread", err)
	}
	requireCurrent(t, streams[1])
	check(t, inner.Exit())
	if err := inner.Exit(); !errors.Is(err, ErrOutOfOrder) {
		t.Errorf("inner twice: got %v, want ErrOutOfOrder", err)
	}
	check(t, outer.Exit())
	if err := outer.Exit(); !errors.Is(err, ErrOutOfOrder) {
		t.Errorf("outer twice: got %v, want ErrOutOfOrder", err)
	}
	if err := (capi.StreamGuard{}).Exit(); !errors.Is(err, ErrWrongThread) {
		t.Errorf("no guard: got %v, want ErrWrongThread", err)
	}
	requireCurrent(t, DefaultStream(0))
}

// work keeps a stream busy for tens of milliseconds, far longer than it takes to queue it.
type work struct{ a, b *capi.Tensor }

const workBytes = 256 << 20

func newWork(t *testing.T) work { return work{tensor(t, workBytes/4, 1), tensor(t, workBytes/4, 1)} }

func (w work) queue() error {
	for range 200 {
		if err := capi.CopyTensor(w.a, w.b, true); err != nil {
			return err
		}
	}
	return nil
}

// A stream that waits reads what another has written; one that does not reads what was there
// before.
func TestOrdering(t *testing.T) {
	onGPU(t, 1)
	const stale, fresh, n = 3, 7, 1 << 20
	load := newWork(t)
	made, read := tensor(t, n, stale), tensor(t, n, 0)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	side := newStreams(t, 2)
	pairs := map[string][2]Stream{
		"pool to pool":    {side[0], side[1]},
		"default to pool": {DefaultStream(0), side[0]},
		"pool to default": {side[0], DefaultStream(0)},
	}
	for _, c := range []struct {
		name  string
		order func(from, to Stream) error
		want  float32
	}{
		{"nothing", func(from, to Stream) error { return nil }, stale},
		{"a wait in the wrong direction", func(from, to Stream) error { return from.Wait(to) }, stale},
		{"WaitCUDAStream", func(from, to Stream) error { return WaitCUDAStream(to, from) }, fresh},
		{"Stream.Wait", func(from, to Stream) error { return to.Wait(from) }, fresh},
		{"event", func(from, to Stream) error { return errors.Join(event.Record(from), to.WaitEvent(event)) }, fresh},
		{"event recorded again elsewhere after the wait", func(from, to Stream) error {
			return errors.Join(event.Record(from), to.WaitEvent(event), event.Record(side[1]))
		}, fresh},
		{"Event.Synchronize", func(from, to Stream) error { return errors.Join(event.Record(from), event.Synchronize()) }, fresh},
		{"Stream.Synchronize", func(from, to Stream) error { return from.Synchronize() }, fresh},
		{"Device.Synchronize", func(from, to Stream) error { return Device(0).Synchronize() }, fresh},
	} {
		for name, pair := range pairs {
			from, to := pair[0], pair[1]
			check(t, WithStream(from, func() error { return errors.Join(fill(made, stale), from.Synchronize()) }))
			check(t, WithStream(from, func() error { return errors.Join(load.queue(), fill(made, fresh)) }))
			check(t, c.order(from, to))
			check(t, WithStream(to, func() error { return capi.CopyTensor(read, made, true) }))
			check(t, to.Synchronize())
			got := firstAndLast(t, read, n)
			check(t, Device(0).Synchronize())
			if got != [2]float32{c.want, c.want} {
				t.Errorf("%s, %s: read %v, want %v", name, c.name, got, c.want)
			}
		}
	}
}

// firstAndLast reads on a stream of its own, so that the reading orders nothing.
func firstAndLast(t *testing.T, x *capi.Tensor, n int) (ends [2]float32) {
	t.Helper()
	memory := make([]byte, 4*n)
	check(t, WithStream(must[Stream](t)(NewStream(0, StreamOptions{})), func() error { return capi.ReadTensor(x, memory) }))
	values := unsafe.Slice((*float32)(unsafe.Pointer(unsafe.SliceData(memory))), n)
	return [2]float32{values[0], values[n-1]}
}

func TestQueryAndElapsed(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	stream := newStreams(t, 1)[0]
	start := must[*Event](t)(NewEvent(EventOptions{Timing: true}))
	end := must[*Event](t)(NewEvent(EventOptions{Timing: true, Blocking: true}))
	plain := must[*Event](t)(NewEvent(EventOptions{}))
	for _, e := range []*Event{start, end, plain} {
		defer e.Close()
		for name, call := range map[string]func() error{
			"Query":       func() error { _, err := e.Query(); return err },
			"Synchronize": e.Synchronize,
			"WaitEvent":   func() error { return stream.WaitEvent(e) },
			"Elapsed":     func() error { _, err := Elapsed(e, e); return err },
		} {
			if err := call(); !errors.Is(err, ErrNotRecorded) {
				t.Errorf("%s before Record: got %v, want ErrNotRecorded", name, err)
			}
		}
	}
	begin := time.Now()
	check(t, start.Record(stream))
	check(t, WithStream(stream, load.queue))
	check(t, end.Record(stream))
	check(t, stream.Record(plain))
	for name, query := range map[string]func() (bool, error){"Stream.Query": stream.Query, "Event.Query": end.Query} {
		if done := must[bool](t)(query()); done {
			t.Errorf("%s: done while the work runs", name)
		}
	}
	if _, err := Elapsed(start, end); err == nil {
		t.Error("Elapsed of work that runs: no error")
	}
	check(t, end.Synchronize())
	wall := time.Since(begin)
	check(t, stream.Synchronize())
	for name, query := range map[string]func() (bool, error){"Stream.Query": stream.Query, "Event.Query": end.Query} {
		if done := must[bool](t)(query()); !done {
			t.Errorf("%s: not done after Synchronize", name)
		}
	}
	elapsed := must[time.Duration](t)(Elapsed(start, end))
	if elapsed <= time.Millisecond || elapsed > wall {
		t.Errorf("elapsed %v on the device, %v on the host", elapsed, wall)
	}
	if _, err := Elapsed(start, plain); !errors.Is(err, ErrNotRecorded) {
		t.Errorf("Elapsed without Timing: got %v, want ErrNotRecorded", err)
	}
}

// An event that is closed while a stream waits for it goes on holding the stream back.
func TestCloseOfAnEventInUse(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	const n = 1024
	made, read := tensor(t, n, 3), tensor(t, n, 0)
	side := newStreams(t, 2)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	check(t, WithStream(side[0], func() error { return errors.Join(load.queue(), fill(made, 7)) }))
	check(t, event.Record(side[0]))
	check(t, side[1].WaitEvent(event))
	check(t, event.Close())
	check(t, WithStream(side[1], func() error { return capi.CopyTensor(read, made, true) }))
	check(t, side[1].Synchronize())
	if got := firstAndLast(t, read, n); got != [2]float32{7, 7} {
		t.Errorf("read %v, want 7", got)
	}
}

// Memory that is freed while another stream still has to read it is handed out again, unless that
// stream is recorded or waited for.
func TestFreedMemoryAndOtherStreams(t *testing.T) {
	onGPU(t, 1)
	load := newWork(t)
	const n, first, next = 1 << 20, 3, 7
	read := tensor(t, n, 0)
	side := newStreams(t, 2)
	for _, c := range []struct {
		name    string
		protect func(x *capi.Tensor) error
		want    float32
	}{
		{"nothing", func(x *capi.Tensor) error { return nil }, next},
		{"record_stream", func(x *capi.Tensor) error { return capi.RecordStream(x, side[1].s) }, first},
		{"the allocation's stream waits", func(x *capi.Tensor) error { return side[0].Wait(side[1]) }, first},
	} {
		create := func(value float32) (x *capi.Tensor, address uintptr) {
			check(t, WithStream(side[0], func() (err error) {
				if x, err = capi.EmptyTensor([]int64{n}, capi.Float32, 0, capi.Contiguous); err != nil {
					return err
				}
				address, err = capi.TensorData(x)
				return errors.Join(err, fill(x, value))
			}))
			return x, address
		}
		x, was := create(first)
		check(t, side[0].Synchronize())
		check(t, WithStream(side[1], func() error { return errors.Join(load.queue(), capi.CopyTensor(read, x, true)) }))
		check(t, c.protect(x))
		capi.FreeTensor(x)
		y, is := create(next)
		check(t, Device(0).Synchronize())
		got := firstAndLast(t, read, n)
		capi.FreeTensor(y)
		if c.want == next && is != was {
			t.Logf("%s: the allocator did not hand the memory out again: nothing to see", c.name)
		} else if got != [2]float32{c.want, c.want} {
			t.Errorf("%s: read %v, want %v", c.name, got, c.want)
		}
	}
}

func TestEventFromManyGoroutines(t *testing.T) {
	onGPU(t, 1)
	for range 50 {
		event := must[*Event](t)(NewEvent(EventOptions{}))
		var all sync.WaitGroup
		for range 8 {
			all.Go(func() {
				for range 50 {
					_, queried := event.Query()
					for _, err := range []error{event.Record(Stream{}), queried, Stream{}.WaitEvent(event), event.Synchronize()} {
						if err != nil && !errors.Is(err, ErrClosed) && !errors.Is(err, ErrNotRecorded) {
							t.Error(err)
						}
					}
				}
			})
		}
		all.Go(func() {
			for range 100 {
				runtime.Gosched()
			}
			event.Close()
		})
		all.Wait()
	}
}

func TestPoolAndPriorities(t *testing.T) {
	onGPU(t, 1)
	least, greatest, err := PriorityRange()
	if err != nil || least != 0 || greatest >= 0 {
		t.Fatalf("priorities from %d to %d (%v)", least, greatest, err)
	}
	for p := greatest; p <= least; p++ {
		s := must[Stream](t)(NewStream(0, StreamOptions{Priority: p}))
		if got := must[int](t)(s.Priority()); got != p {
			t.Errorf("asked for priority %d, got %d", p, got)
		}
	}
	for _, p := range []int{1, greatest - 1, -1 << 40, 1 << 32} {
		if s, err := NewStream(0, StreamOptions{Priority: p}); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("priority %d: got %v, %v, want ErrInvalidArgument", p, s, err)
		}
	}
	first := must[Stream](t)(NewStream(0, StreamOptions{}))
	for range 31 {
		if s := must[Stream](t)(NewStream(0, StreamOptions{})); s == first {
			t.Error("the first stream came back among the first 32")
		}
	}
	if s := must[Stream](t)(NewStream(0, StreamOptions{})); s != first {
		t.Errorf("the 33rd stream is %v, not the first, %v", s, first)
	}
	if _, err := NewStream(Device(DeviceCount()), StreamOptions{}); !errors.Is(err, ErrNoDevice) {
		t.Errorf("one device too many: got %v, want ErrNoDevice", err)
	}
}

func TestExternalStream(t *testing.T) {
	onGPU(t, 1)
	for _, handle := range []uintptr{1, 2, 0x7f0000000001} {
		if s, err := ExternalStream(handle, 0); !errors.Is(err, ErrInvalidArgument) {
			t.Errorf("handle %#x: got %v, %v, want ErrInvalidArgument", handle, s, err)
		}
	}
	if s := must[Stream](t)(ExternalStream(0, 0)); s != DefaultStream(0) {
		t.Errorf("handle 0 is %v, want the default stream", s)
	}
	pool := newStreams(t, 1)[0]
	handle := must[uintptr](t)(pool.Handle())
	wrapped := must[Stream](t)(ExternalStream(handle, 0))
	if got := must[uintptr](t)(wrapped.Handle()); got != handle {
		t.Errorf("handle %#x became %#x", handle, got)
	}
	check(t, WithStream(wrapped, func() error { requireCurrent(t, wrapped); return nil }))
	if made := (Stream{capi.Stream{ID: 1 << 40, Device: 0}}); WaitCUDAStream(made, pool) == nil {
		t.Error("a stream that was never made was accepted")
	}
}

func TestPinned(t *testing.T) {
	onGPU(t, 1)
	const n = 1<<20 + 12
	before := PinnedBytes()
	p := must[*Pinned](t)(NewPinned(n))
	if got := PinnedBytes() - before; got != n {
		t.Errorf("%d bytes more are pinned, want %d", got, n)
	}
	memory := p.Bytes()
	if len(memory) != n || cap(memory) != n || !bytes.Equal(memory, make([]byte, n)) {
		t.Errorf("%d bytes of capacity %d, or not zeroed", len(memory), cap(memory))
	}
	for i := range memory {
		memory[i] = byte(i % 251)
	}
	host := must[*capi.Tensor](t)(capi.TensorFromMemory(memory, []int64{n}, capi.Uint8))
	if info := must[capi.TensorInfo](t)(capi.DescribeTensor(host)); !info.Pinned {
		t.Error("LibTorch does not see that the memory is pinned")
	}
	device := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{n}, capi.Uint8, 0, capi.Contiguous))
	defer capi.FreeTensor(device)
	check(t, capi.CopyTensor(device, host, true))
	back := make([]byte, n)
	check(t, capi.ReadTensor(device, back))
	if !bytes.Equal(memory, back) {
		t.Error("the bytes changed on their way to the device and back")
	}
	capi.FreeTensor(host)
	for range 2 {
		check(t, p.Close())
	}
	if p.Bytes() != nil {
		t.Error("Bytes after Close is not nil")
	}
	if got := PinnedBytes(); got != before {
		t.Errorf("%d bytes are pinned, %d were before", got, before)
	}
}

func TestDevice(t *testing.T) {
	onGPU(t, 1)
	p := must[DeviceProperties](t)(Device(0).Properties())
	if p.Name == "" || p.Major < 5 || p.Multiprocessors < 1 || p.AsyncEngines < 1 || p.TotalBytes < 1<<30 {
		t.Errorf("got %+v", p)
	}
	check(t, Device(0).ResetPeak())
	before := must[MemoryStats](t)(Device(0).Memory())
	x := must[*capi.Tensor](t)(capi.EmptyTensor([]int64{1 << 20}, capi.Uint8, 0, capi.Contiguous))
	during := must[MemoryStats](t)(Device(0).Memory())
	capi.FreeTensor(x)
	after := must[MemoryStats](t)(Device(0).Memory())
	if during.Allocated != before.Allocated+1<<20 || after.Allocated != before.Allocated || after.PeakAllocated < during.Allocated {
		t.Errorf("1 MiB was allocated and freed: before %+v, during %+v, after %+v", before, during, after)
	}
	if after.Free <= 0 || after.Free > after.Total || after.Reserved < after.Allocated {
		t.Errorf("got %+v", after)
	}
	check(t, EmptyCache())
}

func TestTwoDevices(t *testing.T) {
	onGPU(t, 2)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	a, b := must[Stream](t)(NewStream(0, StreamOptions{})), must[Stream](t)(NewStream(1, StreamOptions{}))
	check(t, WithStream(a, func() error {
		check(t, WithStream(b, func() error {
			requireCurrent(t, a)
			requireCurrent(t, b)
			current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent))
			if current != b.s {
				t.Errorf("the current device's stream is %v, want %v", Stream{current}, b)
			}
			return errors.Join(a.Wait(b), b.Wait(a))
		}))
		requireCurrent(t, a)
		requireCurrent(t, DefaultStream(1))
		return nil
	}))
	if current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent)); current != DefaultStream(0).s {
		t.Errorf("the current device's stream is %v afterwards", Stream{current})
	}
	for _, streams := range [][]Stream{{a, b}, {b, a}} {
		check(t, WithStreams(streams, func() error {
			requireCurrent(t, a)
			requireCurrent(t, b)
			if current := must[capi.Stream](t)(capi.GetCurrentCUDAStream(capi.DeviceCurrent)); current != streams[0].s {
				t.Errorf("the current device's stream is %v, want %v", Stream{current}, streams[0])
			}
			return nil
		}))
		requireCurrent(t, DefaultStream(0))
		requireCurrent(t, DefaultStream(1))
	}
	if can, back := must[bool](t)(Device(0).CanAccessPeer(1)), must[bool](t)(Device(1).CanAccessPeer(0)); can != back {
		t.Errorf("0 can access 1: %v, 1 can access 0: %v", can, back)
	}
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	check(t, event.Record(a))
	check(t, b.WaitEvent(event))
	if err := event.Record(b); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("an event of device 0 recorded on device 1: got %v, want ErrInvalidArgument", err)
	}
	if s, err := ExternalStream(must[uintptr](t)(a.Handle()), 1); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("a stream of device 0 wrapped for device 1: got %v, %v, want ErrInvalidArgument", s, err)
	}
}

// The calls on the path of a step make no garbage.
func TestCallsDoNotAllocate(t *testing.T) {
	onGPU(t, 1)
	side := newStreams(t, 2)
	event := must[*Event](t)(NewEvent(EventOptions{}))
	defer event.Close()
	check(t, event.Record(side[0]))
	nothing := func() error { return nil }
	for name, call := range map[string]func() error{
		"GetCurrentCUDAStream": func() error { _, err := GetCurrentCUDAStream(0); return err },
		"WithStream":           func() error { return WithStream(side[0], nothing) },
		"WaitCUDAStream":       func() error { return WaitCUDAStream(side[0], side[1]) },
		"Event.Record":         func() error { return event.Record(side[0]) },
		"Stream.WaitEvent":     func() error { return side[1].WaitEvent(event) },
		"Event.Query":          func() error { _, err := event.Query(); return err },
	} {
		check(t, call())
		if n := testing.AllocsPerRun(100, func() { call() }); n != 0 {
			t.Errorf("%s: %v allocations a call", name, n)
		}
	}
}
