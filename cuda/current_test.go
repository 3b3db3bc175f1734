//go:build linux

package cuda

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/torchstream/torchstream/internal/capi"
)

// BenchmarkHandOver measures a call that another goroutine runs, including the wait for it. Its
// result is the reason not to send operators to a goroutine that is locked to its thread.
func BenchmarkHandOver(b *testing.B) {
	for name, lock := range map[string]bool{"unlocked": false, "locked": true} {
		b.Run(name, func(b *testing.B) {
			calls, done := make(chan func()), make(chan struct{})
			go func() {
				if lock {
					runtime.LockOSThread()
					defer runtime.UnlockOSThread()
				}
				for call := range calls {
					call()
					done <- struct{}{}
				}
				close(done)
			}()
			nothing := func() {}
			for b.Loop() {
				calls <- nothing
				<-done
			}
			close(calls)
			<-done
		})
	}
}

func BenchmarkWithStream(b *testing.B) {
	if DeviceCount() == 0 {
		b.Skip("needs a GPU")
	}
	nothing := func() error { return nil }
	for b.Loop() {
		if err := WithStream(Stream{}, nothing); err != nil {
			b.Fatal(err)
		}
	}
}

func TestWithStreamNeedsAFunction(t *testing.T) {
	if err := WithStream(Stream{}, nil); !errors.Is(err, ErrInvalidArgument) {
		t.Errorf("got %v, want ErrInvalidArgument", err)
	}
}

func TestFailureLeavesNoLock(t *testing.T) {
	const goroutines = 300
	nowhere := DefaultStream(1000)
	for name, fn := range map[string]func(){
		"WithStream":    func() { WithStream(nowhere, func() error { return nil }) },
		"SetCUDAStream": func() { SetCUDAStream(nowhere) },
	} {
		t.Run(name, func(t *testing.T) {
			if n := threadsUsed(goroutines, fn); n > goroutines/2 {
				t.Errorf("%d goroutines used %d threads, want at most %d: they ended locked",
					goroutines, n, goroutines/2)
			}
		})
	}
	if n := threadsUsed(goroutines, runtime.LockOSThread); n <= goroutines/2 {
		t.Errorf("%d goroutines that ended locked used %d threads, want more: the test proves nothing",
			goroutines, n)
	}
}

// 64 goroutines, each with its own stream, run 10,000 rounds of set, yield, use and restore. No
// goroutine is ever on another stream than its own, and afterwards every thread is on the default
// stream.
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
				t.Errorf("wrong stream in %d of %d rounds, want 0", wrong.Load(), goroutines*rounds)
			}
			requireDefaultStreams(t, &used)
		})
	}
}

// TestUnlockedGoroutinesLoseTheirStream is the negative control of
// TestEveryGoroutineKeepsItsStream: without a locked thread most rounds find a wrong stream, and
// threads are left on streams, which the visit finds.
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
	t.Logf("unlocked: wrong stream in %.1f %% of %d rounds", 100*float64(wrong.Load())/(goroutines*rounds),
		goroutines*rounds)
	if wrong.Load() == 0 {
		t.Error("got no round with a wrong stream, want at least one: the locked test proves nothing")
	}
	var left atomic.Int64
	eachThread(t, &used, func() error {
		if onDefaultStream() != nil {
			left.Add(1)
		}
		return capi.SetCUDAStream(DefaultStream(0).s)
	})
	if left.Load() == 0 {
		t.Error("got no thread on another stream, want one: the visit of the locked test proves nothing")
	}
	requireDefaultStreams(t, &used)
}

func TestWithStreamNests(t *testing.T) {
	onGPU(t, 1)
	streams := newStreams(t, 2)
	runtime.LockOSThread() // so that requireCurrent looks at this goroutine's thread
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
		t.Run(name, func(t *testing.T) {
			leave := func() {
				defer func() { recover() }()
				WithStream(stream, func() error {
					requireCurrent(t, stream)
					end()
					return nil
				})
			}
			// The earlier stream is restored on the goroutine's thread.
			done := make(chan error)
			go func() {
				runtime.LockOSThread()
				defer func() { done <- onDefaultStream() }()
				leave()
			}()
			if err := <-done; err != nil {
				t.Errorf("%v", err)
			}
			// The lock is released: goroutines that end this way do not end their threads.
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
				t.Errorf("%d goroutines used %d threads, want at most half: they ended locked",
					goroutines, len(threads))
			}
		})
	}
	if n := threadsUsed(300, func() { WithStream(stream, func() error { return nil }) }); n > 150 {
		t.Errorf("300 goroutines used %d threads, want at most 150: they ended locked", n)
	}
	requireDefaultStreams(t, &sync.Map{})
}

// WithStream reports a stream that fn set and did not restore, and no other goroutine ever gets the
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
	until(t, "the end of the thread with the left-over stream",
		func() bool { _, err := os.Stat(thread); return errors.Is(err, os.ErrNotExist) })
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
		// In order, and repeatedly.
		for _, restore := range []func() error{inner, inner, outer, inner, outer} {
			if err := restore(); err != nil {
				t.Error(err)
			}
		}
		requireCurrent(t, DefaultStream(0))
	}()
	<-done
	requireDefaultStreams(t, &sync.Map{})
}

// TestGuards calls the guards of the C side directly.
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
	go func() { elsewhere <- inner.Exit() }() // the test's goroutine holds its own thread
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
		t.Errorf("the zero guard: got %v, want ErrWrongThread", err)
	}
	requireCurrent(t, DefaultStream(0))
}

func TestWithStreamsRefusesTwoStreamsOfADevice(t *testing.T) {
	fn := func() error { return errors.New("fn was called") }
	for name, err := range map[string]error{
		"no stream":                WithStreams(nil, fn),
		"two of a device":          WithStreams([]Stream{DefaultStream(0), DefaultStream(1), DefaultStream(0)}, fn),
		"no function":              WithStreams([]Stream{DefaultStream(0), DefaultStream(1)}, nil),
		"no function, one stream":  WithStreams([]Stream{DefaultStream(0)}, nil),
		"two of a device, swapped": WithStreams([]Stream{DefaultStream(1), DefaultStream(0), DefaultStream(0)}, fn),
	} {
		t.Run(name, func(t *testing.T) {
			if !errors.Is(err, ErrInvalidArgument) {
				t.Errorf("got %v, want ErrInvalidArgument", err)
			}
		})
	}
}
