package torch_test

import (
	"errors"
	"fmt"
	"math"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

// maxLibraryThreads is the maximum of ts_library_thread_count.
const maxLibraryThreads = 20

// usedMemory returns the device memory that is in use by all processes, with LibTorch's cache.
func usedMemory(t *testing.T) int64 {
	t.Helper()
	if err := gpu.Synchronize(); err != nil {
		t.Fatal(err)
	}
	m, err := gpu.Memory()
	if err != nil {
		t.Fatal(err)
	}
	return m.Total - m.Free
}

// flat runs a step until the caches are full, and then many times. It requires that the device's
// memory has not grown by more than the given bytes. The steps stay on one OS thread, since each
// thread has separate handles and a separate workspace.
func flat(t *testing.T, warm, times int, bound int64, step func(i int) error) {
	t.Helper()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before int64
	for i := range warm + times {
		if i == warm {
			before = usedMemory(t)
		}
		if err := step(i); err != nil {
			t.Fatal(err)
		}
	}
	grown := usedMemory(t) - before
	t.Logf("%d times: %d MiB more", times, grown>>20)
	if grown > bound {
		t.Errorf("device memory has grown by %d MiB in %d times, want at most %d",
			grown>>20, times, bound>>20)
	}
}

func randn(t *testing.T, shape ...int64) *torch.Tensor {
	t.Helper()
	x, err := torch.Randn(gpu, torch.Float32, shape...)
	return must(t, x, err)
}

// A cuBLAS workspace has 32 MiB on a Hopper GPU. If each capture kept one, the sum would exceed
// this bound many times.
const oneWorkspace = 64 << 20

func TestCapturesKeepDeviceMemoryFlat(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	a, b, into := randn(t, 64, 64), randn(t, 64, 64), randn(t, 64, 64)
	flat(t, 20, 1000, oneWorkspace, func(int) error {
		g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
			y := a.MM(b)
			defer y.Close()
			return into.CopyFrom(y, torch.CopyOptions{NonBlocking: true})
		})
		if err != nil {
			return err
		}
		return errors.Join(g.Replay(cuda.DefaultStream(gpu)), g.Close())
	})
}

func TestGraphedRecapturesKeepDeviceMemoryFlat(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	w := randn(t, 64, 64)
	g := torch.NewGraphed(func(x []*torch.Tensor) ([]*torch.Tensor, error) {
		y := x[0].MM(w)
		return []*torch.Tensor{y}, y.Err()
	}, torch.GraphedOptions{MaxGraphs: 2})
	defer g.Close()
	var arguments []*torch.Tensor
	for range 5 { // more than MaxGraphs, so that every call captures
		arguments = append(arguments, randn(t, 64, 64))
	}
	flat(t, 20, 500, oneWorkspace, func(i int) error {
		_, err := g.Call(arguments[i%len(arguments)])
		return err
	})
	if s := g.Stats(); s.Captures < 500 {
		t.Errorf("%d captures, want at least 500", s.Captures)
	}
}

// Products that are queued on a stream before it joins a capture use another workspace than the
// graph. The graph replays at the same time on another stream.
func TestProductsBeforeAGraphOfTheirStream(t *testing.T) {
	o := newOrdering(t)
	own, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	o.check(err)
	defer own.Close()
	// 600 launches. CUDA queues about 1,000 on a stream that is held back, and the host then waits.
	const side, long, times = shortSide, longSide, 200
	b := randn(t, long, side)
	side1 := o.streams[1]
	of := [2]*torch.Tensor{randn(t, side, long), randn(t, side, long)}
	sum := [2]*torch.Tensor{randn(t, side, side), randn(t, side, side)}
	add := func(i int) error {
		return addTo(sum[i], times, func() *torch.Tensor { return of[i].MatMul(b) })
	}
	o.check(gpu.Synchronize())
	var want [2][]float32
	for i := range of {
		o.on(side1, func() error { return errors.Join(sum[i].Zero_().Err(), add(i)) })
		o.check(gpu.Synchronize())
		want[i] = read(t, sum[i])
	}
	start, err := cuda.NewEvent(cuda.EventOptions{})
	o.check(err)
	defer start.Close()
	// A capture returns the memory of closed graphs to the driver, which waits for the device. So
	// this memory is returned now, and the graphs below are closed at the end.
	o.check(cuda.EmptyCache())
	for round, delay := 0, 500*time.Millisecond; round < 3; {
		o.check(errors.Join(sum[0].Zero_().Err(), sum[1].Zero_().Err(), gpu.Synchronize()))
		cudatest.Delay(t, side1, delay)
		o.on(side1, func() error { return errors.Join(start.Record(side1), add(0)) })
		g, err := cuda.Capture(cuda.CaptureOptions{Stream: own.Stream}, func() error {
			return errors.Join(cuda.Fork(own.Stream, side1), cuda.WithStream(side1, func() error { return add(1) }),
				cuda.Join(own.Stream, side1))
		})
		o.check(err)
		defer g.Close()
		o.check(errors.Join(o.streams[0].WaitEvent(start), g.Replay(o.streams[0])))
		began, err := start.Query()
		o.check(errors.Join(err, gpu.Synchronize()))
		if began { // the products may have been done before the replay
			if delay *= 2; delay > 8*time.Second {
				t.Fatalf("the products began after %v, want the replay queued before: the host is too slow", delay/2)
			}
			continue
		}
		for i := range want {
			equalSums(t, fmt.Sprintf("round %d, sum %d", round, i), read(t, sum[i]), want[i])
		}
		round++
	}
}

// addTo adds the results of a function to a sum, the given number of times.
func addTo(sum *torch.Tensor, times int, result func() *torch.Tensor) error {
	for range times {
		y := result()
		err := sum.Add_(y).Err()
		y.Close()
		if err != nil {
			return err
		}
	}
	return nil
}

// equalSums requires sums of long products to be equal. A part of another product changes a sum by
// more than 1, and the order of addition by less.
func equalSums(t *testing.T, name string, got, want []float32) {
	t.Helper()
	for j := range got {
		if !(math.Abs(float64(got[j]-want[j])) <= 1) {
			t.Fatalf("%s, element %d: %v instead of %v", name, j, got[j], want[j])
		}
	}
}

// A product is several kernels, which add parts in the workspace of the stream. Kernels of other
// goroutines on the same stream do not run in between.
func TestProductsOfGoroutinesOnOneStream(t *testing.T) {
	testGoroutinesOnOneStream(t, func(a, b *torch.Tensor) *torch.Tensor { return a.MatMul(b) })
}

// If cuDNN does not or must not compute a convolution, LibTorch computes it with a matrix product.
func TestConvolutionsOfGoroutinesOnOneStream(t *testing.T) {
	testGoroutinesOnOneStream(t, func(a, b *torch.Tensor) *torch.Tensor {
		turn := torch.NewScope("a convolution")
		defer turn.Close()
		// The product of a and b, as a convolution of one image with kernels of 1 x 1 pixels.
		image, kernels := b.In(turn).View(1, longSide, shortSide, 1), a.In(turn).View(shortSide, longSide, 1, 1)
		one, zero := []int64{1, 1}, []int64{0, 0}
		const transposed, benchmark, deterministic, useCuDNN, allowTF32 = false, false, false, false, false
		y, err := torch.Call("_convolution", image, kernels, nil, one, zero, one, transposed, zero, 1,
			benchmark, deterministic, useCuDNN, allowTF32)
		if err != nil {
			return y[0]
		}
		return y[0].View(shortSide, shortSide).Keep()
	})
}

// The sizes of products that are long enough to be computed in parts.
const shortSide, longSide = 64, 1 << 14

// testGoroutinesOnOneStream computes products of a short and wide with a long and narrow matrix in
// many goroutines at once.
func testGoroutinesOnOneStream(t *testing.T, product func(a, b *torch.Tensor) *torch.Tensor) {
	o := newOrdering(t)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	const side, long, times, goroutines = shortSide, longSide, 200, maxLibraryThreads
	b := randn(t, long, side)
	var of, sum [goroutines]*torch.Tensor
	for i := range of {
		of[i], sum[i] = randn(t, side, long), randn(t, side, side)
	}
	o.check(gpu.Synchronize())
	add := func(i int) error {
		return cuda.WithStream(o.streams[0], func() error {
			// The first product gives the thread's handle the workspace of the stream.
			first := of[i].MatMul(b)
			err := errors.Join(first.Err(), first.Close(), sum[i].Zero_().Err())
			return errors.Join(err, addTo(sum[i], times, func() *torch.Tensor { return product(of[i], b) }))
		})
	}
	var want [goroutines][]float32
	for i := range of {
		o.check(errors.Join(add(i), gpu.Synchronize()))
		want[i] = read(t, sum[i])
	}
	for round := range 3 {
		var all sync.WaitGroup
		errs := make([]error, goroutines)
		for i := range goroutines {
			all.Go(func() { errs[i] = add(i) })
		}
		all.Wait()
		o.check(errors.Join(append(errs, gpu.Synchronize())...))
		for i := range want {
			equalSums(t, fmt.Sprintf("round %d, goroutine %d", round, i), read(t, sum[i]), want[i])
		}
	}
}

// However many threads run operators, the device memory for handles and workspaces is bounded.
func TestManyGoroutinesKeepDeviceMemoryFlat(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(16))
	const goroutines, side = 1000, 32
	var streams [4]cuda.Stream
	for i := range streams {
		var err error
		if streams[i], err = cuda.NewStream(gpu, cuda.StreamOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	x, image := randn(t, side, side), randn(t, 1, 4, 16, 16)
	w, kernel := randn(t, side, side), randn(t, 4, 4, 3, 3)
	if err := gpu.Synchronize(); err != nil { // the streams read what the default stream has written
		t.Fatal(err)
	}
	report := func(when string) {
		t.Logf("%s: %d MiB of the device in use, %d threads in LibTorch, %d of them with handles",
			when, usedMemory(t)>>20, capi.ThreadCount(), capi.LibraryThreads())
	}
	work := func(i int) error {
		return cuda.WithStream(streams[i%len(streams)], func() error {
			turn := torch.NewScope(fmt.Sprint("goroutine ", i))
			defer turn.Close()
			x, image := x.In(turn), image.In(turn)
			if i%2 == 0 {
				return errors.Join(x.MM(w).Err(), image.Conv2d(kernel, nil, torch.Conv2dOptions{}).Err())
			}
			// Each goroutine has separate leaves, since goroutines must not add to the same
			// gradients.
			mine, own := turn.Own(w.Detach()), turn.Own(kernel.Detach())
			if err := errors.Join(mine.SetRequiresGrad(true), own.SetRequiresGrad(true)); err != nil {
				return err
			}
			return errors.Join(x.MM(mine).Sum().Backward(),
				image.Conv2d(own, nil, torch.Conv2dOptions{}).Sum().Backward())
		})
	}
	report("at the start")
	// A goroutine inside WithStream has an OS thread to itself. The runtime keeps threads for more.
	maxThreads := capi.ThreadCount() + int64(goroutines+2*runtime.GOMAXPROCS(0))
	flat(t, 3, 6, 3*oneWorkspace, func(round int) error {
		var all sync.WaitGroup
		errs := make([]error, goroutines)
		for i := range goroutines {
			all.Go(func() { errs[i] = work(i) })
		}
		all.Wait()
		report(fmt.Sprint("after round ", round))
		return errors.Join(errs...)
	})
	if n := capi.LibraryThreads(); n > maxLibraryThreads {
		t.Errorf("%d threads have handles of cuBLAS and its kin, want at most %d", n, maxLibraryThreads)
	}
	if now := capi.ThreadCount(); now > maxThreads {
		t.Errorf("%d threads are in LibTorch, more than the %d that the goroutines can have at once", now, maxThreads)
	}
}

// Every way to call an operator takes a handle slot for its thread before it uses a library's
// handle. The test also runs on devices that compute nothing.
func TestProductsReuseTheHandleSlot(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	const side = 8
	x, w := randn(t, side, side), randn(t, side, side)
	image, kernel, heads := randn(t, 1, 4, side, side), randn(t, 4, 4, 3, 3), randn(t, 1, 2, 4, side)
	for _, c := range []struct {
		name string
		call func() error
	}{
		{"MM", func() error { return failureOf(x.NoGrad().MM(w)) }},
		{"MatMul", func() error { return failureOf(x.MatMul(w)) }},
		{"Linear", func() error { return failureOf(x.Linear(w, nil)) }},
		{"AddMM", func() error { return failureOf(x.AddMM(x, w, torch.AddMMOptions{})) }},
		{"Conv2d", func() error { return failureOf(image.Conv2d(kernel, nil, torch.Conv2dOptions{})) }},
		{"Call1", func() error { return failureOf(torch.Call1("mm", x, w)) }},
		// LibTorch takes a complex argument only in a boxed call.
		{"a complex number", func() error {
			return failureOf(torch.Call1("addmm", x, x, w, torch.Keywords{"beta": complex(1, 0)}))
		}},
		{"attention", func() error {
			return failureOf(heads.ScaledDotProductAttention(heads, heads, torch.ScaledDotProductAttentionOptions{}))
		}},
		{"autocast", func() error { return failureOf(x.Autocast(torch.BFloat16).MM(w)) }},
	} {
		var before, with int64
		var err error
		// A thread that has ended may release its slot between the two counts. It is therefore
		// enough that one of ten new threads is seen to take a slot.
		for attempt := 0; attempt < 10 && err == nil && with != before+1; attempt++ {
			var done sync.WaitGroup
			done.Go(func() {
				runtime.LockOSThread() // to the end, so that the thread ends too
				before = capi.LibraryThreads()
				err = c.call()
				with = capi.LibraryThreads()
			})
			done.Wait()
		}
		if err != nil || before < maxLibraryThreads && with != before+1 {
			t.Errorf("%s: %d threads have seats, and %d before it: %v", c.name, with, before, err)
		}
	}
}

// failureOf closes a result and returns its error.
func failureOf(y *torch.Tensor) error {
	defer y.Close()
	return y.Err()
}
