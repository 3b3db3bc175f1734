//go:build linux

package prefetcher

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"math"
	"math/rand/v2"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/capi"
	"github.com/torchstream/torchstream/torch"
)

func TestMain(m *testing.M) { os.Exit(cudatest.Main(m)) }

// onDevices runs the test on the CPU and on a GPU.
func onDevices(t *testing.T, fn func(t *testing.T, device cuda.Device)) {
	t.Run("cpu", func(t *testing.T) { nothingLeft(t, func() { fn(t, cuda.CPU) }) })
	t.Run("cuda", func(t *testing.T) {
		cudatest.RequireGPUs(t, 1)
		nothingLeft(t, func() { fn(t, 0) })
	})
}

// eventually waits for effects that the runtime and the kernel complete a moment later, such as the
// end of a goroutine or a thread.
func eventually(ok func() bool) bool {
	for end := time.Now().Add(5 * time.Second); ; runtime.Gosched() {
		if ok() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
	}
}

// nothingLeft fails if fn leaves goroutines, threads in LibTorch, tensors, pinned or device memory
// behind.
func nothingLeft(t *testing.T, fn func()) {
	t.Helper()
	// LibTorch keeps memory per thread, and per process from its first use on, which is not this
	// package's. Allocate it here, before counting.
	if x, err := torch.Zeros(cuda.CPU, torch.Float32, 1); err != nil {
		t.Fatal(err)
	} else {
		x.Close()
	}
	device := func() int64 {
		if cuda.DeviceCount() == 0 {
			return 0
		}
		m, err := cuda.Device(0).Memory()
		if err != nil {
			t.Fatal(err)
		}
		return m.Allocated
	}
	goroutines, tensors, pinned, allocated := runtime.NumGoroutine(), torch.LiveTensors(), capi.PinnedBytesLive(), device()
	fn()
	if !eventually(func() bool { return runtime.NumGoroutine() <= goroutines }) {
		buf := make([]byte, 1<<20)
		t.Errorf("%d goroutines before, %d after\n%s", goroutines, runtime.NumGoroutine(),
			buf[:runtime.Stack(buf, true)])
	}
	if n := torch.LiveTensors(); n != tensors {
		t.Errorf("%d tensors before, %d after", tensors, n)
	}
	if n := capi.PinnedBytesLive(); n != pinned {
		t.Errorf("%d pinned bytes before, %d after", pinned, n)
	}
	if n := device(); n != allocated {
		t.Errorf("%d bytes on the device before, %d after", allocated, n)
	}
}

func newFeed(t *testing.T, s Source, o Options) *Prefetcher {
	t.Helper()
	p, err := New(s, o)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func closeFeed(t *testing.T, p *Prefetcher) {
	t.Helper()
	if err := p.Close(); err != nil {
		t.Error(err)
	}
}

// check compares a batch with its source's values.
func check(t *testing.T, b *Batch, size int) {
	t.Helper()
	first := b.Index * size
	if want := fmt.Sprintf("epoch %d batch %d", b.Epoch, b.Index); b.Info != want {
		t.Errorf("batch %d of epoch %d has the info %q, want %v", b.Index, b.Epoch, b.Info, want)
	}
	labels, err := b.Labels.Int64s()
	if err != nil {
		t.Fatal(err)
	}
	images, err := b.Images.Float32s()
	if err != nil {
		t.Fatal(err)
	}
	if len(labels) != b.N || b.N == 0 || b.Images.Shape()[0] != int64(b.N) {
		t.Fatalf("batch %d has N %d, %d labels, images %v", b.Index, b.N, len(labels), b.Images.Shape())
	}
	scale := float32(1)
	if b.Images.DType() == torch.Float32 {
		scale = 255
	}
	pixels := len(images) / b.N
	for i := range b.N {
		if labels[i] != label(b.Epoch, first+i) {
			t.Fatalf("epoch %d batch %d row %d has label %d, want %d",
				b.Epoch, b.Index, i, labels[i], label(b.Epoch, first+i))
		}
		want := float64(value(b.Epoch, first+i))
		for _, p := range images[i*pixels : (i+1)*pixels] {
			if math.Abs(float64(p*scale)-want) > 1e-3 {
				t.Fatalf("epoch %d batch %d row %d has a pixel %g, want %g",
					b.Epoch, b.Index, i, p*scale, want)
			}
		}
	}
}

func sources(batch, samples int) map[string]Source {
	raw := rawSource{batch: batch, samples: samples, ahead: 2}
	return map[string]Source{"raw": &raw, "finished": &floatSource{rawSource: raw}}
}

func TestEpochs(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		for name, source := range sources(4, 30) {
			for _, o := range []Options{{}, {Depth: 1, HostSlots: 2}, {Depth: 3, HostSlots: 2},
				{Depth: 2, HostSlots: 6}} {
				t.Run(fmt.Sprintf("%s, depth %d, host slots %d", name, o.Depth, o.HostSlots), func(t *testing.T) {
					o.Device = device
					p := newFeed(t, source, o)
					addresses := map[int]uintptr{}
					batches := 0
					for epoch := range 3 {
						index := 0
						for b, err := range p.Epoch(t.Context(), epoch) {
							if err != nil {
								t.Fatal(err)
							}
							if b.Index != index || b.Epoch != epoch || b.N != min(4, 30-4*index) {
								t.Errorf("batch %d of epoch %d comes as %d of %d with %d samples, want "+
									"b.Index = %v, b.Epoch = %v, b.N = %v",
									index, epoch, b.Index, b.Epoch, b.N, index, epoch, min(4, 30-4*index))
							}
							check(t, b, 4)
							if p.slots.out != nil { // otherwise the consumer gets the host slot
								a, err := b.Images.Pointer()
								if err != nil {
									t.Fatal(err)
								}
								if old, ok := addresses[b.Slot]; ok && old != a {
									t.Errorf("slot %d moves from %x to %x", b.Slot, old, a)
								}
								addresses[b.Slot] = a
							}
							if tensors := b.Tensors(); len(tensors) != 2 || tensors[0] != b.Images ||
								tensors[1] != b.Labels {
								t.Errorf("Tensors() = %v, want the images and labels", tensors)
							}
							index++
							batches++
						}
						if index != 8 {
							t.Errorf("%d batches, want 8", index)
						}
					}
					s := p.Stats()
					wantBytes := int64(0)
					if device != cuda.CPU {
						wantBytes = 3 * 30 * (side*side*3 + 8)
					}
					if s.Batches != int64(batches) || s.Images != 90 || s.Bytes != wantBytes ||
						s.Elapsed <= 0 || s.ConsumerWait < s.FirstWait || s.Stall() == "" {
						t.Errorf("Stats %+v", s)
					}
					closeFeed(t, p)
				})
			}
		}
	})
}

// A field in channels_last is copied in its memory order.
type channelsLast struct{ *rawSource }

func (s channelsLast) Fields() []torch.Spec {
	f := s.rawSource.Fields()
	f[0].Shape, f[0].MemoryFormat = []int64{3, side, side}, torch.ChannelsLast
	return f
}

func TestChannelsLastField(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		p := newFeed(t, channelsLast{&rawSource{batch: 2, samples: 5}}, Options{Device: device})
		defer closeFeed(t, p)
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			if !b.Images.IsContiguous(torch.ChannelsLast) ||
				!slices.Equal(b.Images.Shape(), []int64{int64(b.N), 3, side, side}) {
				t.Errorf("images %v", b.Images.Shape())
			}
			check(t, b, 2)
		}
	})
}

func TestEpochIsCompleteAfterLeavingAnother(t *testing.T) {
	leave := map[string]func(p *Prefetcher, at int) error{
		"break": func(p *Prefetcher, at int) error {
			for b, err := range p.Epoch(context.Background(), 0) {
				if err != nil {
					return err
				}
				if b.Index == at {
					break
				}
			}
			return nil
		},
		"panic": func(p *Prefetcher, at int) (err error) {
			defer func() {
				if v := recover(); v != "body" {
					err = fmt.Errorf("recovered %v", v)
				}
			}()
			for b := range p.Epoch(context.Background(), 0) {
				if b.Index == at {
					panic("body")
				}
			}
			return nil
		},
		"goexit": func(p *Prefetcher, at int) error {
			done := make(chan struct{})
			go func() {
				defer close(done)
				for b := range p.Epoch(context.Background(), 0) {
					if b.Index == at {
						runtime.Goexit()
					}
				}
			}()
			<-done
			return nil
		},
	}
	onDevices(t, func(t *testing.T, device cuda.Device) {
		p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 40, ahead: 2}}, Options{Device: device})
		defer closeFeed(t, p)
		for name, fn := range leave {
			t.Run(name, func(t *testing.T) {
				for at := range 4 {
					if err := fn(p, at); err != nil {
						t.Errorf("at %d: %v, want no error", at, err)
					}
					n := 0
					for b, err := range p.Epoch(t.Context(), 1) { // the next epoch is complete
						if err != nil {
							t.Fatalf("after leaving at %d: %v, want no error", at, err)
						}
						check(t, b, 4)
						n++
					}
					if n != 10 {
						t.Errorf("after leaving at %d: %d batches, want 10", at, n)
					}
				}
			})
		}
	})
}

// TestCancel cancels while the source waits for a slot, while it waits for its input, while the
// consumer computes, and at random moments. The loop gets no more than the batch that was on its
// way to it. No source ends before it is cancelled.
func TestCancel(t *testing.T) {
	cause := errors.New("enough")
	onDevices(t, func(t *testing.T, device cuda.Device) {
		run := func(name string, p *Prefetcher, ctx context.Context, canceled *atomic.Bool, body func(b *Batch)) {
			t.Helper()
			var last error
			after := 0 // batches that the loop gets after the cancellation
			for b, err := range p.Epoch(ctx, 0) {
				if canceled.Load() && err == nil {
					after++
				}
				if after > 1 {
					t.Errorf("%s: the loop goes on after the cancellation, after %v, want at most 1",
						name, after)
					return
				}
				if err != nil {
					last = err
				} else {
					body(b)
				}
			}
			if !errors.Is(last, cause) {
				t.Errorf("%s: the loop ended with %v, want the error %v", name, last, cause)
			}
		}
		// Each start has a separate flag: a late cancel belongs to an epoch that has ended.
		start := func() (context.Context, *atomic.Bool, func()) {
			canceled := new(atomic.Bool)
			ctx, cancel := context.WithCancelCause(t.Context())
			return ctx, canceled, func() {
				cancel(cause)
				canceled.Store(true)
			}
		}

		// The source waits for a slot: if the consumer does not return, it has filled all slots and
		// waits in lend.
		lending := make(chan int, 100)
		source := &floatSource{rawSource: rawSource{batch: 4, samples: 400,
			before: func(_ context.Context, b int) error {
				lending <- b
				return nil
			}}}
		p := newFeed(t, source, Options{Device: device})
		ctx, canceled, cancel := start()
		run("in lend", p, ctx, canceled, func(b *Batch) {
			for <-lending < 5 { // 3 host slots and 2 device slots are full
			}
			cancel()
		})
		closeFeed(t, p)

		// The source waits for its input.
		waiting := make(chan struct{})
		source = &floatSource{rawSource: rawSource{batch: 4, samples: 400,
			before: func(ctx context.Context, b int) error {
				if b < 3 {
					return nil
				}
				close(waiting)
				<-ctx.Done()
				return ctx.Err()
			}}}
		p = newFeed(t, source, Options{Device: device})
		ctx, canceled, cancel = start()
		go func() {
			<-waiting
			cancel()
		}()
		run("slow source", p, ctx, canceled, func(*Batch) {})
		closeFeed(t, p)

		// Before the first batch, and at random moments, including copies, finishes and releases.
		source = &floatSource{rawSource: rawSource{batch: 64, samples: 1 << 50, ahead: 2}}
		p = newFeed(t, source, Options{Device: device})
		ctx, canceled, cancel = start()
		cancel()
		run("before the start", p, ctx, canceled, func(b *Batch) {
			t.Errorf("got batch %d after the cancellation, want none", b.Index)
		})
		rng := rand.New(rand.NewPCG(1, 1))
		for i := range 30 {
			ctx, canceled, cancel = start()
			time.AfterFunc(time.Duration(rng.IntN(20000))*time.Microsecond, cancel)
			run(fmt.Sprint("random ", i), p, ctx, canceled, func(b *Batch) { b.Images.MulScalar(2) })
		}
		closeFeed(t, p)
	})
}

// The sequence may be pulled, and stopped at any position.
func TestEpochCanBePulled(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 40}}, Options{Device: device})
		defer closeFeed(t, p)
		for at := range 12 {
			next, stop := iter.Pull2(p.Epoch(t.Context(), at))
			for i := range at {
				b, err, ok := next()
				if err != nil || ok != (i < 10) {
					t.Fatalf("pull %d: %v, %t, want no error, ok = %v", i, err, ok, (i < 10))
				}
				if ok {
					check(t, b, 4)
				}
			}
			stop()
		}
	})
}

func TestErrorsEndTheEpochInOrder(t *testing.T) {
	boom := errors.New("boom")
	fails := func(at int, fn func() error) func(context.Context, int) error {
		return func(_ context.Context, b int) error {
			if b == at {
				return fn()
			}
			return nil
		}
	}
	onDevices(t, func(t *testing.T, device cuda.Device) {
		finishes := 0
		raw := rawSource{batch: 4, samples: 40}
		tests := []struct {
			name   string
			source *floatSource
			want   string
			is     error
			seen   int
		}{
			{"source error", &floatSource{rawSource: rawSource{batch: 4, samples: 40,
				before: fails(5, func() error { return boom })}}, "boom", boom, 5},
			{"first thing", &floatSource{rawSource: rawSource{batch: 4, samples: 40,
				before: fails(0, func() error { return boom })}}, "boom", boom, 0},
			{"source panic", &floatSource{rawSource: rawSource{batch: 4, samples: 40,
				before: fails(2, func() error { panic("argh") })}}, "source panicked: argh", nil, 2},
			{"source goexit", &floatSource{rawSource: rawSource{batch: 4, samples: 40,
				before: fails(2, func() error { runtime.Goexit(); return nil })}}, "Goexit", nil, 2},
			{"finish error", &floatSource{rawSource: raw, finish: func() error {
				if finishes++; finishes == 4 {
					return boom
				}
				return nil
			}}, "boom", boom, 3},
			{"finish panic", &floatSource{rawSource: raw, finish: func() error {
				if finishes++; finishes == 2 {
					panic("argh")
				}
				return nil
			}}, "Finish panicked: argh", nil, 1},
		}
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) {
				finishes = 0
				p := newFeed(t, test.source, Options{Device: device})
				seen := 0
				var last error
				for b, err := range p.Epoch(t.Context(), 0) {
					if last = err; err == nil {
						check(t, b, 4)
						seen++
					} else if b != nil {
						t.Errorf("got batch %d with the error %v, want a nil batch", b.Index, err)
					}
				}
				if last == nil || !strings.Contains(last.Error(), test.want) || test.is != nil &&
					!errors.Is(last, test.is) || seen != test.seen {
					t.Errorf("%d batches, %v", seen, last)
				}
				test.source.before = nil // a failed epoch must not affect the next
				for b, err := range p.Epoch(t.Context(), 1) {
					if err != nil {
						t.Fatalf("the next epoch: %v, want no error", err)
					}
					check(t, b, 4)
				}
				closeFeed(t, p)
			})
		}
	})
}

// A Finish that ends the driver's goroutine ends the prefetcher after the good batches.
func TestFinishGoexit(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		n := 0
		p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 40}, finish: func() error {
			if n++; n == 3 {
				runtime.Goexit()
			}
			return nil
		}}, Options{Device: device})
		for epoch, want := range []int{2, 0} {
			seen := 0
			var last error
			for b, err := range p.Epoch(t.Context(), epoch) {
				if last = err; err == nil {
					check(t, b, 4)
					seen++
				}
			}
			if last == nil || !strings.Contains(last.Error(), "Goexit") || seen != want {
				t.Errorf("epoch %d: %d batches, %v, want an error with %q, seen = %v",
					epoch, seen, last, "Goexit", want)
			}
		}
		closeFeed(t, p)
	})
}

func TestMisuse(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		p := newFeed(t, &rawSource{batch: 4, samples: 40}, Options{Device: device})
		ends := func(epoch int, want error) {
			t.Helper()
			n := 0
			for b, err := range p.Epoch(t.Context(), epoch) {
				if n++; b != nil || !errors.Is(err, want) {
					t.Errorf("batch %v, %v, want b = nil, the error %v", b, err, want)
				}
			}
			if n != 1 {
				t.Errorf("%d pairs, want 1", n)
			}
		}
		var first *Batch
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			if first == nil {
				first = b
				ends(1, ErrRunning)
				if err := p.Close(); !errors.Is(err, ErrRunning) {
					t.Errorf("Close in an epoch: %v, want the error %v", err, ErrRunning)
				}
				if err := b.Release(); err == nil {
					t.Error("Release without Retain = nil, want an error")
				}
			}
		}
		if err := first.Images.AddInt(1).Err(); !errors.Is(err, ErrClosed) ||
			!strings.Contains(err.Error(), "batch 0 of epoch 0") {
			t.Errorf("a tensor used after its turn: %v, want the error %v with %q",
				err, ErrClosed, "batch 0 of epoch 0")
		}
		for name, fn := range map[string]func() error{
			"Retain": first.Retain, "Release": first.Release, "Use": func() error { return first.Use(cuda.Stream{}) },
		} {
			t.Run(name, func(t *testing.T) {
				if err := fn(); !errors.Is(err, ErrClosed) {
					t.Errorf("after the turn: %v, want the error %v", err, ErrClosed)
				}
			})
		}
		closeFeed(t, p)
		closeFeed(t, p)
		ends(0, ErrClosed)
	})
	bad := []struct {
		name   string
		source Source
		o      Options
		want   string
	}{
		{"no source", nil, Options{}, "source is nil"},
		{"batch size", &rawSource{samples: 4}, Options{}, "BatchSize"},
		{"depth", &rawSource{batch: 1}, Options{Depth: -1}, "Depth"},
		{"host slots", &rawSource{batch: 1}, Options{HostSlots: 1}, "HostSlots"},
		{"device", &rawSource{batch: 1}, Options{Device: 1000}, "device"},
		{"no such device", &rawSource{batch: 1}, Options{Device: -7}, "-7"},
	}
	for _, test := range bad {
		t.Run(test.name, func(t *testing.T) {
			nothingLeft(t, func() {
				if p, err := New(test.source, test.o); err == nil ||
					!strings.Contains(err.Error(), test.want) || p != nil {
					t.Error(err)
				}
			})
		})
	}
}

func TestScope(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		weight, err := torch.Ones(device, torch.Float32, 3*side*side)
		if err != nil {
			t.Fatal(err)
		}
		defer weight.Close()
		p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 40}}, Options{Device: device})
		defer closeFeed(t, p)
		live := torch.LiveTensors()
		var kept, lost *torch.Tensor
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			if b.N == 4 { // the driver creates views of a short batch at any time
				if n := torch.LiveTensors(); n > live+4 { // the batch's two, and those kept
					t.Errorf("batch %d starts with %d tensors more than before the epoch, want at most 4",
						b.Index, n-live)
				}
			}
			y := b.Images.Flatten(1, -1).Mul(weight).Sum()
			if y.Scope() != b.Scope() {
				t.Errorf("a tensor computed from the batch is in scope %v, want the batch's, %v", y.Scope(),
					b.Scope())
			}
			if b.Index == 0 {
				kept, lost = y.Keep(), y
			}
		}
		if _, err := kept.Float64(); err != nil {
			t.Errorf("a kept tensor: %v, want no error", err)
		}
		if _, err := lost.Float64(); !errors.Is(err, ErrClosed) {
			t.Errorf("a tensor that was not kept: %v, want the error %v", err, ErrClosed)
		}
		kept.Close()
		if n := torch.LiveTensors(); n != live {
			t.Errorf("%d tensors before the epoch, %d after", live, n)
		}
	})
}

// The tensors of a batch are in a slot. Keep returns an error after the turn that advises Clone. A
// clone does not change when later batches fill the slot.
func TestFieldsOfABatchAreClonedNotKept(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		p := newFeed(t, &floatSource{rawSource: rawSource{batch: 4, samples: 40}}, Options{Device: device, Depth: 2})
		defer closeFeed(t, p)
		var cloned, field *torch.Tensor
		var want []float32
		for b, err := range p.Epoch(t.Context(), 0) {
			if err != nil {
				t.Fatal(err)
			}
			if b.Index > 0 {
				continue
			}
			for name, x := range map[string]*torch.Tensor{"a field": b.Images, "a view": b.Images.Narrow(0, 1, 1)} {
				if err := x.Keep().Err(); !errors.Is(err, cuda.ErrInvalidArgument) ||
					!strings.Contains(err.Error(), "Clone") {
					t.Errorf("Keep of %s: %v, want ErrInvalidArgument that says Clone", name, err)
				}
			}
			if want, err = b.Images.Float32s(); err != nil {
				t.Fatal(err)
			}
			cloned, field = b.Images.Clone().Keep(), b.Images
		}
		defer cloned.Close()
		if got, err := cloned.Float32s(); err != nil || !slices.Equal(got, want) {
			t.Errorf("the clone is %v (%v), want %v", got, err, want)
		}
		if _, err := field.Float32s(); !errors.Is(err, ErrClosed) || !strings.Contains(err.Error(), "Clone") {
			t.Errorf("a field after its turn: %v, want ErrClosed that says Clone", err)
		}
	})
}

func TestRetain(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		for name, source := range sources(4, 40) {
			t.Run(name, func(t *testing.T) {
				p := newFeed(t, source, Options{Device: device, Depth: 3})
				// With two of three slots retained the epoch continues with the third, and the
				// retained slots keep their content.
				var kept []*Batch
				for b, err := range p.Epoch(t.Context(), 0) {
					if err != nil {
						t.Fatal(err)
					}
					if b.Index < 2 {
						if err := errors.Join(b.Retain(), b.Retain(), b.Release()); err != nil {
							t.Error(err)
						}
						kept = append(kept, b)
					}
				}
				for _, b := range kept {
					check(t, b, 4)
				}
				// With all three retained the next turn is an error and does not hang.
				seen := 0
				var last error
				for b, err := range p.Epoch(t.Context(), 1) {
					if last = err; err == nil {
						seen++
						if err := b.Retain(); err != nil {
							t.Error(err)
						}
						kept = append(kept, b)
					}
				}
				if seen != 1 || !errors.Is(last, ErrRetained) {
					t.Errorf("with all slots retained: %d batches, %v, want seen = 1, the error %v",
						seen, last, ErrRetained)
				}
				for _, b := range kept {
					check(t, b, 4)
				}
				// Another goroutine releases two batches during an epoch.
				released := make(chan error)
				go func() { released <- errors.Join(kept[1].Release(), kept[2].Release()) }()
				if err := <-released; err != nil {
					t.Error(err)
				}
				if _, err := kept[1].Images.Float32s(); !errors.Is(err, ErrClosed) {
					t.Errorf("a released batch: %v, want the error %v", err, ErrClosed)
				}
				n := 0
				for b, err := range p.Epoch(t.Context(), 2) {
					if err != nil {
						t.Fatal(err)
					}
					check(t, b, 4)
					n++
				}
				if n != 10 {
					t.Errorf("%d batches, want 10", n)
				}
				check(t, kept[0], 4)
				closeFeed(t, p) // one batch is still retained
				if _, err := kept[0].Images.Float32s(); !errors.Is(err, ErrClosed) {
					t.Errorf("a retained batch after Close: %v, want the error %v", err, ErrClosed)
				}
				if err := kept[0].Release(); !errors.Is(err, ErrClosed) {
					t.Errorf("Release after Close: %v, want the error %v", err, ErrClosed)
				}
			})
		}
	})
}

// One thread runs all finishes, and it ends with Close.
func TestFinishRunsOnOneThread(t *testing.T) {
	onDevices(t, func(t *testing.T, device cuda.Device) {
		entered := capi.ThreadCount()
		source := &floatSource{rawSource: rawSource{batch: 4, samples: 400}}
		p := newFeed(t, source, Options{Device: device})
		for epoch := range 3 {
			for b, err := range p.Epoch(t.Context(), epoch) {
				if err != nil {
					t.Fatal(err)
				}
				if b.Index == 50 {
					break
				}
			}
		}
		closeFeed(t, p)
		if len(source.threads) != 1 {
			t.Errorf("Finish ran on the threads %v, want 1", source.threads)
		}
		for id := range source.threads {
			if id != os.Getpid() && !eventually(func() bool {
				_, err := os.Stat(fmt.Sprintf("/proc/self/task/%d", id))
				return errors.Is(err, os.ErrNotExist)
			}) {
				t.Errorf("thread %d of the driver still runs after Close, want it to have ended", id)
			}
		}
		t.Logf("threads in LibTorch: %d before, %d after", entered, capi.ThreadCount())
	})
}
