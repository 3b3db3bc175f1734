package nn_test

import (
	"errors"
	"runtime"
	"sync"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/nn"
	"github.com/torchstream/torchstream/torch"
)

const gpu = cuda.Device(0)

// stage holds the common parts of the tests below: a scope, a stream for the caller, and work that
// keeps a stream busy for tens of milliseconds and leaves room for other kernels.
type stage struct {
	t      *testing.T
	scope  *torch.Scope
	caller cuda.Stream
	load   [2]*torch.Tensor
}

const width = 1 << 16

func newStage(t *testing.T) *stage {
	t.Helper()
	cudatest.RequireGPUs(t, 1)
	s := &stage{t: t, scope: torch.NewScope("stage")}
	t.Cleanup(func() { s.scope.Close() })
	var err error
	if s.caller, err = cuda.NewStream(gpu, cuda.StreamOptions{}); err != nil {
		t.Fatal(err)
	}
	for i := range s.load {
		s.load[i] = s.full(1, 1<<26)
	}
	s.check(gpu.Synchronize())
	return s
}

func (s *stage) check(err error) {
	s.t.Helper()
	if err != nil {
		s.t.Fatal(err)
	}
}

// full allocates on the current stream. The tensor belongs to the stage's scope.
func (s *stage) full(value float64, n int64) *torch.Tensor {
	s.t.Helper()
	x, err := torch.Full(gpu, torch.Float32, value, n)
	s.check(err)
	return s.scope.Own(x)
}

// busy keeps the current stream busy.
func (s *stage) busy() {
	for range 150 {
		s.check(s.load[0].CopyFrom(s.load[1], torch.CopyOptions{NonBlocking: true}))
	}
}

func (s *stage) want(what string, y *torch.Tensor, value float32) {
	s.t.Helper()
	got, err := y.Float32s()
	s.check(err)
	for i, v := range got {
		if v != value {
			s.t.Errorf("%s: element %d of %d is %v, want %v", what, i, len(got), v, value)
			return
		}
	}
}

func (s *stage) on(stream cuda.Stream, fn func()) {
	s.t.Helper()
	s.check(cuda.WithStream(stream, func() error { fn(); return nil }))
}

// slow returns a branch that waits for a long time before it reads its input.
func (s *stage) slow(factor float64) nn.Module {
	return nn.Func(func(x *torch.Tensor) *torch.Tensor { s.busy(); return x.MulScalar(factor) })
}

func quick(factor float64) nn.Module {
	return nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.MulScalar(factor) })
}

// Every branch starts after the work already queued on the caller's stream. The caller's stream
// continues after every branch. Both hold in eager mode and from the default stream.
func TestParallelForksAndJoins(t *testing.T) {
	s := newStage(t)
	for _, caller := range []cuda.Stream{s.caller, cuda.DefaultStream(gpu)} {
		p := nn.NewParallel(nil, quick(2), quick(3), s.slow(5), quick(7))
		defer p.Close()
		s.on(caller, func() {
			x, into := s.full(1, width), make([]*torch.Tensor, 4)
			for i := range into {
				into[i] = s.full(0, width)
			}
			s.check(gpu.Synchronize())
			for round := range 3 {
				s.busy()
				x.AddScalar_(1) // the branches must see this: x is round + 2
				ys := p.Outputs(x)
				for i, y := range ys {
					s.check(into[i].CopyFrom(y, torch.CopyOptions{NonBlocking: true}))
				}
				for i, factor := range []float32{2, 3, 5, 7} {
					s.want("a branch", into[i], factor*float32(round+2))
				}
				for _, y := range ys {
					y.Fill_(-1) // the next round's memory must not hold a valid result
					y.Close()
				}
			}
		})
	}
}

// If the program frees an input before a branch reads it, the allocator must not reuse its memory
// before the branch has read it.
func TestParallelInputMayBeFreed(t *testing.T) {
	s := newStage(t)
	s.on(s.caller, func() {
		x, into := s.full(3, width), s.full(0, width)
		s.check(gpu.Synchronize())
		branch := nn.Func(func(x *torch.Tensor) *torch.Tensor {
			s.busy()
			s.check(into.CopyFrom(x, torch.CopyOptions{NonBlocking: true}))
			y := x.MulScalar(1)
			x.Close()
			// Simulates another goroutine on the caller's stream.
			s.on(s.caller, func() {
				for range 4 {
					s.full(-1, width)
				}
			})
			return y
		})
		p := nn.NewParallel(nil, quick(1), branch)
		defer p.Close()
		ys := p.Outputs(x)
		s.want("the input", into, 3)
		s.want("the output", ys[1], 3)
	})
}

// If the program frees an output before the caller's stream reads it, the allocator must not reuse
// its memory before the stream has read it.
func TestParallelOutputMayBeFreed(t *testing.T) {
	s := newStage(t)
	s.on(s.caller, func() {
		x, into := s.full(3, width), s.full(0, width)
		var side cuda.Stream
		p := nn.NewParallel(nil, quick(1), nn.Func(func(x *torch.Tensor) *torch.Tensor {
			var err error
			side, err = cuda.GetCurrentCUDAStream(gpu)
			s.check(err)
			return x.MulScalar(2)
		}))
		defer p.Close()
		ys := p.Outputs(x)
		if side == s.caller {
			t.Fatalf("the second branch ran on %v, the caller's stream, want another", side)
		}
		s.check(gpu.Synchronize())
		s.busy()
		s.check(into.CopyFrom(ys[1], torch.CopyOptions{NonBlocking: true}))
		ys[1].Close()
		s.on(side, func() {
			for range 4 {
				s.full(-1, width)
			}
		})
		s.want("the output", into, 6)
	})
}

// TestParallelBackward runs backward through a Parallel whose input and outputs live only as long
// as backward needs them, while other allocations come and go. The caller's stream reads the
// gradients right afterwards.
func TestParallelBackward(t *testing.T) {
	s := newStage(t)
	s.on(s.caller, func() {
		var weights []*torch.Tensor
		var modules []nn.Module
		for i := range 4 {
			w := s.full(float64(i+1), width)
			s.check(w.SetRequiresGrad(true))
			weights = append(weights, w)
			modules = append(modules, nn.Func(func(x *torch.Tensor) *torch.Tensor {
				if i == 2 {
					s.busy()
				}
				return x.Mul(w)
			}))
		}
		p := nn.NewParallel(nn.Product(), modules...)
		defer p.Close()
		for round := range 5 {
			v := float64(round%2 + 1)
			turn := torch.NewScope("turn")
			made, err := torch.Full(gpu, torch.Float32, v, width)
			s.check(err)
			x := turn.Own(made)
			h := x.MulScalar(1)
			loss := p.Forward(h).Sum().Keep()
			turn.Close() // closes all tensors except those that backward keeps
			s.check(torch.ClearGrads(weights...))
			if err := loss.Backward(); err != nil {
				t.Fatal(err)
			}
			loss.Close()
			for i, w := range weights {
				// The derivative of the product of all v*w_j with respect to w_i.
				want := 24 * v * v * v * v / float64(i+1)
				g := w.In(s.scope).Grad()
				s.want("a gradient", g, float32(want))
				g.Close()
			}
		}
	})
}

// Whole networks compute the same numbers as if the branches ran one after another. The test has
// nested Parallels, both kinds of callers' streams, and several goroutines at once.
func TestParallelEqualsInTurnOnTheGPU(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	b := newBranches(t)
	if err := nn.To(b.parallel, gpu); err != nil {
		t.Fatal(err)
	}
	made, err := torch.Randn(gpu, torch.Float32, 64, 8)
	if err != nil {
		t.Fatal(err)
	}
	defer made.Close()
	for range 20 {
		b.compare(t, made)
	}
	stream, err := cuda.NewStream(gpu, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if err := stream.Wait(cuda.DefaultStream(gpu)); err != nil {
		t.Fatal(err)
	}
	if err := cuda.WithStream(stream, func() error {
		for range 20 {
			b.compare(t, made)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	want, err := b.inTurn(made.NoGrad()).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			run := func() error {
				for range 50 {
					y := b.parallel.Forward(made.NoGrad())
					got, err := y.Float32s()
					if err != nil {
						return err
					}
					for i := range want {
						if got[i] != want[i] {
							return errors.New("a concurrent forward computed something else")
						}
					}
				}
				return nil
			}
			var err error
			if g%2 == 0 {
				err = run()
			} else if mine, e := cuda.NewStream(gpu, cuda.StreamOptions{}); e != nil {
				err = e
			} else {
				err = cuda.WithStream(mine, run)
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

// A Parallel takes its streams once per caller's stream and uses none twice. The first branch runs
// on the caller's stream.
func TestParallelTakesItsStreamsOnce(t *testing.T) {
	s := newStage(t)
	var used []cuda.Stream
	note := nn.Func(func(x *torch.Tensor) *torch.Tensor {
		current, err := cuda.GetCurrentCUDAStream(gpu)
		s.check(err)
		used = append(used, current)
		return x.MulScalar(1)
	})
	p := nn.NewParallel(nn.Sum(), note, note, note, note)
	defer p.Close()
	x := s.full(1, 1)
	s.check(s.caller.Wait(cuda.DefaultStream(gpu)))
	var first []cuda.Stream
	for range 40 {
		used = nil
		s.on(s.caller, func() { s.want("the sum", p.Forward(x), 4) })
		if first == nil {
			first = used
			seen := map[cuda.Stream]bool{}
			for _, u := range used {
				seen[u] = true
			}
			if used[0] != s.caller || len(seen) != 4 {
				t.Errorf("the caller is on %v and the branches ran on %v", s.caller, used)
			}
		}
		for i := range used {
			if used[i] != first[i] {
				t.Fatalf("the branches ran on %v, want %v as at first", used, first)
			}
		}
	}
}

// Branches have their caller's priority.
func TestParallelHasThePriorityOfItsCaller(t *testing.T) {
	s := newStage(t)
	urgent, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{Priority: -1})
	s.check(err)
	defer func() { s.check(urgent.Close()) }()
	for _, caller := range []cuda.Stream{s.caller, urgent.Stream} {
		want, err := caller.Priority()
		s.check(err)
		note := nn.Func(func(x *torch.Tensor) *torch.Tensor {
			current, err := cuda.GetCurrentCUDAStream(gpu)
			s.check(err)
			if got, err := current.Priority(); got != want || err != nil {
				t.Errorf("a branch has the priority %d, and its caller %d: %v", got, want, err)
			}
			return x.MulScalar(1)
		})
		p := nn.NewParallel(nn.Sum(), note, note)
		x := s.full(1, 1)
		s.check(caller.Wait(cuda.DefaultStream(gpu)))
		s.on(caller, func() { s.check(p.Forward(x).Err()) })
		s.check(p.Close())
	}
}

// A branch that panics leaves the streams joined, so that a capture continues without the branch,
// and leaves the caller's stream current.
func TestParallelPanics(t *testing.T) {
	s := newStage(t)
	x := s.full(1, 1)
	s.check(s.caller.Wait(cuda.DefaultStream(gpu)))
	p := nn.NewParallel(nn.Sum(), quick(1), s.slow(1),
		nn.Func(func(*torch.Tensor) *torch.Tensor { panic("on purpose") }))
	defer p.Close()
	panics := func() {
		defer func() { recover() }()
		p.Forward(x.NoGrad())
		t.Error("Forward returned, want the branch's panic")
	}
	s.on(s.caller, func() {
		panics()
		current, err := cuda.GetCurrentCUDAStream(gpu)
		s.check(err)
		if current != s.caller {
			t.Errorf("%v is current, want %v", current, s.caller)
		}
	})
	s.check(gpu.Synchronize())
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error { panics(); return nil })
	if err != nil {
		t.Fatalf("a capture in which a branch panicked: %v, want no error", err)
	}
	s.check(g.Close())
}

// pool is the number of streams that cuda.NewStream hands out in rotation.
const pool = 32

// A Parallel's streams are exclusive: while its first call is captured, work that other goroutines
// queue on every stream of the pool neither enters the graph nor breaks the capture.
func TestParallelInACaptureUsesExclusiveStreams(t *testing.T) {
	s := newStage(t)
	var strangers []cuda.Stream
	var counters []*torch.Tensor
	for range pool {
		stranger, err := cuda.NewStream(gpu, cuda.StreamOptions{})
		s.check(err)
		strangers, counters = append(strangers, stranger), append(counters, s.full(0, 1))
	}
	x, into := s.full(2, width), s.full(0, width)
	s.check(gpu.Synchronize())
	beside := func() error {
		for i, stranger := range strangers {
			if err := cuda.WithStream(stranger,
				func() error { return counters[i].NoGrad().AddScalar_(1).Err() }); err != nil {
				return err
			}
		}
		return nil
	}
	meanwhile := nn.Func(func(x *torch.Tensor) *torch.Tensor {
		failed := make(chan error)
		go func() { failed <- beside() }()
		if err := <-failed; err != nil {
			return torch.Fail("the other goroutine", err)
		}
		return x.MulScalar(3)
	})
	p := nn.NewParallel(nn.Sum(), meanwhile, meanwhile, meanwhile)
	defer p.Close()
	own, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	s.check(err)
	defer own.Close()
	g, err := cuda.Capture(cuda.CaptureOptions{Stream: own.Stream}, func() error {
		turn := torch.NewScope("turn")
		defer turn.Close()
		return into.CopyFrom(p.Forward(x.NoGrad().In(turn)), torch.CopyOptions{NonBlocking: true})
	})
	s.check(err)
	defer g.Close()
	s.check(gpu.Synchronize())
	for i, counter := range counters {
		if n, err := counter.Float64(); n != 3 || err != nil {
			t.Errorf("stream %d of the pool counted %v, %v, want 3, nil", i, n, err)
		}
	}
	// The graph no longer needs the Parallel.
	s.check(p.Close())
	for range 3 {
		s.check(g.Replay(s.caller))
	}
	s.check(gpu.Synchronize())
	s.want("the sum", into, 18)
	for i, counter := range counters {
		if n, err := counter.Float64(); n != 3 || err != nil {
			t.Errorf("the replays counted on stream %d of the pool as well: %v (%v), want 3, nil",
				i, n, err)
		}
	}
}

// Close returns the streams, once, but not while they are being captured.
func TestParallelCloseOnTheGPU(t *testing.T) {
	s := newStage(t)
	var used cuda.Stream
	note := nn.Func(func(x *torch.Tensor) *torch.Tensor {
		var err error
		used, err = cuda.GetCurrentCUDAStream(gpu)
		s.check(err)
		return x.MulScalar(2)
	})
	p := nn.NewParallel(nn.Sum(), quick(1), note)
	x := s.full(1, 1)
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		y := p.Forward(x.NoGrad())
		defer y.Close()
		if err := p.Close(); !errors.Is(err, cuda.ErrInvalidArgument) {
			t.Errorf("Close of a Parallel whose stream is captured: %v, want cuda.ErrInvalidArgument", err)
		}
		return y.Err()
	})
	s.check(err)
	s.check(g.Close())
	for range 2 {
		s.check(nn.Close(nn.NewSequential(p)))
	}
	if _, err := used.Query(); !errors.Is(err, cuda.ErrInvalidArgument) {
		t.Errorf("the stream was not given back: %v, want cuda.ErrInvalidArgument", err)
	}
	if err := p.Forward(x).Err(); !errors.Is(err, cuda.ErrClosed) {
		t.Errorf("Forward after Close: %v, want cuda.ErrClosed", err)
	}
}

// Every capture uses a stream of the branches. No memory stays after the end of the captured graph.
func TestCapturesOfAParallelKeepDeviceMemoryFlat(t *testing.T) {
	runtime.LockOSThread() // LibTorch makes handles and a workspace for every thread
	defer runtime.UnlockOSThread()
	s := newStage(t)
	square := func(value float64) *torch.Tensor { return s.full(value, 64*64).View(64, 64) }
	x, w, into := square(2), square(1), square(0)
	product := nn.Func(func(x *torch.Tensor) *torch.Tensor { return x.MM(w) })
	p := nn.NewParallel(nn.Sum(), product, product, product)
	defer p.Close()
	used := func() int64 {
		s.check(gpu.Synchronize())
		m, err := gpu.Memory()
		s.check(err)
		return m.Total - m.Free
	}
	var before int64
	for i := range 320 {
		if i == 20 {
			before = used()
		}
		g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
			turn := torch.NewScope("turn")
			defer turn.Close()
			return into.CopyFrom(p.Forward(x.NoGrad().In(turn)), torch.CopyOptions{NonBlocking: true})
		})
		s.check(err)
		s.check(errors.Join(g.Replay(cuda.DefaultStream(gpu)), g.Close()))
	}
	if grown := used() - before; grown > 128<<20 {
		t.Errorf("device memory has grown by %d MiB in 300 captures, want at most 128", grown>>20)
	}
}
