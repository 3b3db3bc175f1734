//go:build linux

package prefetcher

import (
	"context"
	"encoding/binary"
	"errors"
	"iter"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// countingSource fills a whole batch with one value, which differs between all batches that can be
// in flight, and finishes it like floatSource.
type countingSource struct {
	floatSource
	batches int
}

func (s *countingSource) Fill(ctx context.Context, epoch int, lend func(context.Context) ([][]byte, error),
	deliver func(int, any) error) error {
	for b := range s.batches {
		slot, err := lend(ctx)
		if err != nil {
			return err
		}
		serial := epoch*s.batches + b
		slot[0][0] = 255
		for n := 1; n < len(slot[0]); n *= 2 { // poison
			copy(slot[0][n:], slot[0][:n])
		}
		slot[0][0] = byte(serial % 251)
		for n := 1; n < len(slot[0]); n *= 2 {
			copy(slot[0][n:], slot[0][:n])
		}
		for i := range s.batch {
			binary.NativeEndian.PutUint64(slot[1][8*i:], uint64(serial))
		}
		if err := deliver(s.batch, serial); err != nil {
			return err
		}
	}
	return nil
}

// strained is a consumer that keeps its stream busy for about a millisecond per batch. It reads the
// batch before and after that work, so a missing edge changes the values read. The device also does
// the comparison, so the host does not wait until the end. The work consists of additions, because
// matrix products would allocate a cuBLAS workspace for each thread and stream. With these
// workspaces, the test could not compare the memory before and after.
type strained struct {
	t    *testing.T
	load *torch.Tensor
	bad  *torch.Tensor // number of wrong elements
}

func newStrained(t *testing.T) *strained {
	t.Helper()
	load, err := torch.Zeros(0, torch.Float32, 1<<27)
	if err != nil {
		t.Fatal(err)
	}
	bad, err := torch.Zeros(0, torch.Int64)
	if err != nil {
		t.Fatal(err)
	}
	return &strained{t, load, bad}
}

func (s *strained) close() {
	s.load.Close()
	s.bad.Close()
}

func (s *strained) compute(b *Batch) {
	work := s.load.In(b.Scope())
	for range 4 {
		work = work.AddScalar_(1)
	}
	if err := work.Err(); err != nil {
		s.t.Error(err)
	}
}

func (s *strained) read(b *Batch) {
	serial := b.Info.(int)
	wrong := b.Images.MulScalar(255).AddScalar(-float64(serial % 251)).Abs().GtScalar(0.5).Sum().Add(
		b.Labels.NeScalar(float64(serial)).Sum())
	if err := s.bad.Add_(wrong).Err(); err != nil {
		s.t.Error(err)
	}
}

// run consumes epochs from first on and returns the number of wrong elements read.
func (s *strained) run(p *Prefetcher, first, epochs int, each func(epoch int)) int64 {
	for epoch := first; epoch < first+epochs; epoch++ {
		for b, err := range p.Epoch(s.t.Context(), epoch) {
			if err != nil {
				s.t.Fatal(err)
			}
			s.read(b)
			s.compute(b)
			s.read(b)
		}
		if each != nil {
			each(epoch)
		}
	}
	n, err := s.bad.Int64()
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func countingFeed(t *testing.T, batches int, o Options, wrap func(ringDevice) ringDevice) *Prefetcher {
	t.Helper()
	source := &countingSource{batches: batches}
	source.batch, source.side = 64, 64
	p, err := open(source, o, wrap)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func unchanged(d ringDevice) ringDevice { return d }

// TestGPUStress runs 2,000 batches for a slow consumer on a side stream, then fewer in other
// shapes, and compares every element. Memory must not grow.
func TestGPUStress(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	stream, err := cuda.NewStream(0, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name    string
		o       Options
		epochs  int
		batches int
		stream  cuda.Stream
	}{
		{"default", Options{}, 5, 400, stream},
		{"one device slot", Options{Depth: 1, HostSlots: 2}, 2, 100, stream},
		{"three device slots", Options{Depth: 3, HostSlots: 5, Priority: -1}, 2, 100, stream},
		{"default stream", Options{}, 2, 100, cuda.DefaultStream(0)},
	} {
		t.Run(test.name, func(t *testing.T) {
			nothingLeft(t, func() {
				p := countingFeed(t, test.batches, test.o, unchanged)
				if err := cuda.WithStream(test.stream, func() error {
					s := newStrained(t)
					defer s.close()
					var after []int64
					bad := s.run(p, 0, test.epochs, func(int) {
						m, err := cuda.Device(0).Memory()
						if err != nil {
							t.Fatal(err)
						}
						after = append(after, m.Reserved)
					})
					if bad != 0 {
						t.Errorf("%+v on %v: %d wrong elements, want 0", test.o, test.stream, bad)
					}
					for epoch := 2; epoch < len(after); epoch++ {
						if after[epoch] > after[1] {
							t.Errorf("device memory after each epoch: %d, want at most %v", after, after[1])
							break
						}
					}
					return nil
				}); err != nil {
					t.Error(err)
				}
				source := p.source.(*countingSource)
				if len(source.threads) != 1 {
					t.Errorf("Finish ran on the threads %v, want 1", source.threads)
				}
				st := p.Stats()
				// The copies of 0.8 MB overlap with a millisecond of compute.
				if test.epochs == 5 && st.WaitShare() > 0.02 {
					t.Errorf("the GPU waited for data %.1f %% of the time", 100*st.WaitShare())
				}
				t.Logf("%s; %+v on %v: %+v, copies at %.1f GB/s", st.Stall(), test.o, test.stream, st,
					float64(st.Bytes)/float64(st.CopyTime))
				closeFeed(t, p)
			})
		})
	}
}

// TestGPUBatchesOnOtherStreamsAreOrdered uses batches on a second stream, and on a stream that
// becomes current during a turn.
func TestGPUBatchesOnOtherStreamsAreOrdered(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nothingLeft(t, func() {
		var streams [2]cuda.Stream
		var consumers [2]*strained
		for i := range streams {
			var err error
			if streams[i], err = cuda.NewStream(0, cuda.StreamOptions{}); err != nil {
				t.Fatal(err)
			}
			if err := cuda.WithStream(streams[i], func() error {
				consumers[i] = newStrained(t)
				return nil
			}); err != nil {
				t.Fatal(err)
			}
			defer consumers[i].close()
		}
		p := countingFeed(t, 200, Options{}, unchanged)
		defer closeFeed(t, p)
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			for i, s := range streams {
				if err := b.Use(s); err != nil {
					t.Fatal(err)
				}
				if err := cuda.WithStream(s, func() error {
					consumers[i].read(b)
					consumers[i].compute(b)
					consumers[i].read(b)
					return nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			// The batch's scope frees memory of the two streams, in their order.
		}
		for i, s := range streams {
			if err := cuda.WithStream(s, func() error {
				n, err := consumers[i].bad.Int64()
				if n != 0 {
					t.Errorf("%d wrong elements on %v, want 0", n, s)
				}
				return err
			}); err != nil {
				t.Error(err)
			}
		}
	})
}

// ConsumerWait shows a source that is slower than the GPU. It does not show a faster source,
// however long the host waits.
func TestGPUConsumerWaitShowsSlowSource(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nothingLeft(t, func() {
		const pause = 5 * time.Millisecond
		source := &floatSource{rawSource: rawSource{batch: 4, samples: 160,
			before: func(ctx context.Context, _ int) error {
				select {
				case <-time.After(pause):
					return nil
				case <-ctx.Done():
					return ctx.Err()
				}
			}}}
		p := newFeed(t, source, Options{})
		defer closeFeed(t, p)
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			b.Images.MulScalar(2)
		}
		if s := p.Stats(); s.WaitShare() < 0.5 || !strings.Contains(s.Stall(), "loader is the bottleneck") {
			t.Errorf("%s: %+v", s.Stall(), s)
		}
	})
}

// A second epoch that is refused while the loop waits for a batch does not change the measurement
// of that wait: the event at the end of the previous turn stays in use.
func TestRefusedEpochLeavesTheMeasurement(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	var p *Prefetcher
	// The number of events recorded at the end of a turn and not paired yet.
	ends := func() int {
		s := p.starved
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.events.used() - len(s.arrivals) - 2*len(s.pairs)
	}
	source := &floatSource{rawSource: rawSource{batch: 4, samples: 8,
		before: func(ctx context.Context, batch int) error {
			if batch == 0 {
				return nil
			}
			ctx, cancel := context.WithTimeout(ctx, time.Minute)
			defer cancel()
			for ends() == 0 {
				if ctx.Err() != nil {
					return ctx.Err()
				}
				runtime.Gosched()
			}
			for _, err := range p.Epoch(ctx, 1) {
				if !errors.Is(err, ErrRunning) {
					t.Errorf("a second epoch: %v, want the error %v", err, ErrRunning)
				}
			}
			if n := ends(); n != 1 {
				t.Errorf("%d ends of turns after the second epoch, want 1", n)
			}
			return nil
		}}}
	p = newFeed(t, source, Options{})
	defer closeFeed(t, p)
	for _, err := range p.Epoch(t.Context(), 0) {
		if err != nil {
			t.Fatal(err)
		}
	}
	if n := ends(); n != 0 {
		t.Errorf("%d ends of turns are left by the epoch, want 0", n)
	}
}

// A pulled sequence runs on the stream of the goroutine that pulls.
func TestGPUPull(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nothingLeft(t, func() {
		stream, err := cuda.NewStream(0, cuda.StreamOptions{})
		if err != nil {
			t.Fatal(err)
		}
		p := countingFeed(t, 50, Options{}, unchanged)
		defer closeFeed(t, p)
		if err := cuda.WithStream(stream, func() error {
			s := newStrained(t)
			defer s.close()
			next, stop := iter.Pull2(p.Epoch(t.Context(), 0))
			defer stop()
			for range 40 {
				b, err, ok := next()
				if err != nil || !ok {
					t.Fatal(err, ok)
				}
				if !slices.Contains(b.tenure.lease.Streams(), stream) {
					t.Fatalf("the batch is ready on %v", b.tenure.lease.Streams())
				}
				s.read(b)
				s.compute(b)
				s.read(b)
			}
			stop()
			n, err := s.bad.Int64()
			if n != 0 {
				t.Errorf("%d wrong elements, want 0", n)
			}
			return err
		}); err != nil {
			t.Error(err)
		}
	})
}

// Devices with one edge left out: the simulated device's mutants (internal/ring) on a real device.
type (
	gpuNoHostWait     struct{ ringDevice }
	gpuNoReleasedWait struct{ ringDevice }
	gpuNoReadyWait    struct{ ringDevice }
	gpuWrongRelease   struct{ ringDevice }
)

func (gpuNoHostWait) HostWait(int, *cuda.Event, func() error) error { return nil }

func (d gpuNoReleasedWait) Copy(slot, host, n int, _ []*cuda.Event, copied *cuda.Event) error {
	return d.ringDevice.Copy(slot, host, n, nil, copied)
}

func (gpuNoReadyWait) Wait(cuda.Stream, *cuda.Event) error { return nil }

func (d gpuWrongRelease) Record(e *cuda.Event, s cuda.Stream) error {
	if s == d.P() {
		return d.ringDevice.Record(e, s)
	}
	return d.ringDevice.Record(e, cuda.DefaultStream(0))
}

// TestGPUMissingEdges shows that TestGPUStress can fail: without an edge the consumer reads wrong
// elements.
func TestGPUMissingEdges(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	stream, err := cuda.NewStream(0, cuda.StreamOptions{})
	if err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name string
		o    Options
		wrap func(ringDevice) ringDevice
	}{
		{"copied", Options{}, func(d ringDevice) ringDevice { return gpuNoHostWait{d} }},
		{"released", Options{}, func(d ringDevice) ringDevice { return gpuNoReleasedWait{d} }},
		{"ready", Options{Depth: 1}, func(d ringDevice) ringDevice { return gpuNoReadyWait{d} }},
		{"released on the default stream", Options{}, func(d ringDevice) ringDevice { return gpuWrongRelease{d} }},
	} {
		t.Run(test.name, func(t *testing.T) {
			p := countingFeed(t, 200, test.o, test.wrap)
			if err := cuda.WithStream(stream, func() error {
				s := newStrained(t)
				defer s.close()
				if bad := s.run(p, 0, 1, nil); bad == 0 {
					t.Error("0 wrong elements were read without the event, want at least 1")
				} else {
					t.Logf("%d wrong elements", bad)
				}
				return nil
			}); err != nil {
				t.Error(err)
			}
			closeFeed(t, p)
		})
	}
}

// TestGPUCancelDoesNotWaitForKernels cancels while copies are queued behind a second of compute.
// The loop must end at once, and Close must end when the device has finished.
func TestGPUCancelDoesNotWaitForKernels(t *testing.T) {
	cudatest.RequireGPUs(t, 1)
	nothingLeft(t, func() {
		cause := errors.New("enough")
		big, err := torch.Zeros(0, torch.Float32, 1<<30)
		if err != nil {
			t.Fatal(err)
		}
		defer big.Close()
		if err := cuda.Device(0).Synchronize(); err != nil {
			t.Fatal(err)
		}
		p := countingFeed(t, 1000, Options{}, unchanged)
		ctx, cancel := context.WithCancelCause(t.Context())
		var canceled time.Time
		var last error
		for b, err := range p.Epoch(ctx, 0) {
			if err != nil {
				last = err
				continue
			}
			if b.Index == 0 {
				work := big.In(b.Scope())
				for range 400 {
					work = work.AddScalar_(1)
				}
				if err := work.Err(); err != nil {
					t.Error(err)
				}
			}
			if b.Index == 1 {
				canceled = time.Now()
				cancel(cause)
			}
		}
		took := time.Since(canceled)
		idle, err := cuda.DefaultStream(0).Query()
		if err != nil {
			t.Fatal(err)
		}
		if !errors.Is(last, cause) || took > 200*time.Millisecond {
			t.Errorf("the loop ended after %v with %v, want the error %v, took at most %v",
				took, last, cause, 200*time.Millisecond)
		}
		if idle {
			t.Error("the kernels had finished when the loop ended, want them still running")
		}
		t.Logf("the loop ended %v after the cancellation", took)
		closeFeed(t, p)
		cancel(nil)
	})
}
