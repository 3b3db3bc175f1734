package serve_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/imageloader/decode"
	"github.com/torchstream/torchstream/imageloader/transform"
	"github.com/torchstream/torchstream/internal/settle"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// always returns run for every worker.
func always(run serve.Run) func(cuda.Device) (serve.Run, error) {
	return func(cuda.Device) (serve.Run, error) { return run, nil }
}

func identity(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
	return []*torch.Tensor{x}, nil
}

// rowOptions are options on the CPU for rows of two float32 numbers.
func rowOptions(run serve.Run) serve.BatcherOptions {
	return serve.BatcherOptions{Model: always(run), Devices: []cuda.Device{cuda.CPU},
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{2}}}
}

// row is a request for the numbers value and -value.
func row(value float32) serve.Request {
	return serve.Request{Row: serve.RowOf([]float32{value, -value})}
}

func newBatcher(t testing.TB, o serve.BatcherOptions) *serve.Batcher {
	t.Helper()
	b, err := serve.NewBatcher(o)
	return closed(t, b, err)
}

// closed closes the batcher at the end of the test.
func closed(t testing.TB, b *serve.Batcher, err error) *serve.Batcher {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := b.Close(context.Background()); err != nil {
			t.Errorf("Close: %v, want no error", err)
		}
	})
	return b
}

// result is what a call of Do returned.
type result struct {
	answer serve.Answer
	err    error
}

// do calls Do in a goroutine.
func do(ctx context.Context, b *serve.Batcher, r serve.Request) <-chan result {
	out := make(chan result, 1)
	go func() {
		a, err := b.Do(ctx, r)
		out <- result{a, err}
	}()
	return out
}

// wantRow fails the test if the answer is not the row value, -value times factor.
func wantRow(t testing.TB, got result, value, factor float32) {
	t.Helper()
	want := []float32{value * factor, -value * factor}
	if got.err != nil || len(got.answer.Outputs) == 0 || !slices.Equal(got.answer.Outputs[0].Values, want) {
		t.Errorf("the answer is %v, %v, want %v", got.answer.Outputs, got.err, want)
	}
}

// held is a model that waits in each run, except while it warms up, until the test lets it
// continue.
type held struct {
	mu      sync.Mutex
	holding bool
	batches [][]float32 // the first column of each batch, padding included
	runs    chan struct{}
	next    chan error
}

func newHeld() *held { return &held{runs: make(chan struct{}), next: make(chan error)} }

func (h *held) run(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
	h.mu.Lock()
	holding := h.holding
	h.mu.Unlock()
	if holding {
		column, err := x.Narrow(1, 0, 1).Float32s()
		if err != nil {
			return nil, err
		}
		h.mu.Lock()
		h.batches = append(h.batches, column)
		h.mu.Unlock()
		h.runs <- struct{}{}
		if err := <-h.next; err != nil {
			return nil, err
		}
	}
	return []*torch.Tensor{x.MulScalar(2)}, nil
}

// hold makes later runs wait: each sends to runs, and then returns the error from next.
func (h *held) hold() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.holding = true
}

// TestEachRequestGetsItsRow checks the values, shapes and dtypes of several outputs, and that a
// batch is padded with zeros to its bucket.
func TestEachRequestGetsItsRow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		cudatest.NoLeaks(t)
		var sizes []int64
		o := rowOptions(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			sizes = append(sizes, x.Shape()[0])
			sum := x.Abs().Sum() // of all rows, so that padding shows
			return []*torch.Tensor{x.MulScalar(3), x.Reshape(x.Shape()[0], 2, 1).ToDType(torch.Int64),
				x.Narrow(1, 0, 1).Reshape(-1).ToDType(torch.BFloat16), x.MulScalar(0).Add(sum)}, nil
		})
		o.MaxBatch, o.MaxDelay = 6, time.Millisecond
		b := newBatcher(t, o)
		if want := []int64{6, 4, 2, 1}; !slices.Equal(sizes, want) {
			t.Errorf("the first runs have sizes %v, want every bucket, the largest first: %v", sizes, want)
		}
		var calls []<-chan result
		for i := range 3 {
			calls = append(calls, do(t.Context(), b, row(float32(i+1))))
			synctest.Wait() // so that the order is known
		}
		for i, call := range calls {
			v := float32(i + 1)
			got := <-call
			if got.err != nil {
				t.Fatal(got.err)
			}
			want := []serve.Output{{Shape: []int64{2}, Values: []float32{3 * v, -3 * v}},
				{Shape: []int64{2, 1}, Values: []float32{v, -v}}, {Shape: []int64{}, Values: []float32{v}},
				{Shape: []int64{2}, Values: []float32{12, 12}}}
			if fmt.Sprint(got.answer.Outputs) != fmt.Sprint(want) {
				t.Errorf("request %d: outputs %v, want %v", i, got.answer.Outputs, want)
			}
			if a := got.answer; a.Batch != 3 || a.Device != cuda.CPU || a.Waited > time.Millisecond {
				t.Errorf("request %d: %d requests on %v after %v, want 3 on cpu after at most 1ms", i, a.Batch,
					a.Device, a.Waited)
			}
		}
		st := b.Stats()
		if st.Answered != 3 || st.Rows != 3 || st.Padding != 1 || st.Buckets[2].Batches != 1 || st.Took.Count != 3 {
			t.Errorf("%+v, want 3 answers of one batch of 3 rows and 1 of padding in the bucket of 4", st)
		}
	})
}

// TestImagesEqualDecoderBatch compares rows of images with a Decoder's batches of one image, for
// decoding on the host and with a device's arithmetic.
func TestImagesEqualDecoderBatch(t *testing.T) {
	images := photos(t)[:5]
	o := serve.Options{Device: cuda.CPU, Decode: decode.Options{Transform: transform.Eval(40, 32)}}
	d := newDecoder(t, o)
	for name, open := range map[string]func(serve.BatcherOptions) (*serve.Batcher, error){
		"host": serve.NewBatcher, "units": serve.NewUnitBatcher} {
		t.Run(name, func(t *testing.T) {
			cudatest.NoLeaks(t)
			b, err := open(serve.BatcherOptions{Model: always(identity), Images: o, MaxBatch: 3})
			closed(t, b, err)
			var all sync.WaitGroup
			for i, image := range images {
				all.Go(func() {
					got, err := b.Do(t.Context(), serve.Request{Image: image})
					if err != nil {
						t.Error(err)
						return
					}
					x, err := d.Batch(t.Context(), nil, image)
					if err != nil {
						t.Error(err)
						return
					}
					defer x.Close()
					want, err := x.Float32s()
					if err != nil || !slices.Equal(got.Outputs[0].Values, want) ||
						!slices.Equal(got.Outputs[0].Shape, []int64{3, 32, 32}) {
						t.Errorf("image %d: shape %v, error %v, or other values than Decoder.Batch, want its row", i,
							got.Outputs[0].Shape, err)
					}
				})
			}
			all.Wait()
		})
	}
}

// TestFaultyImageFailsAlone checks the error of a faulty image and the answers of its neighbours.
func TestFaultyImageFailsAlone(t *testing.T) {
	images := photos(t)[:2]
	for name, open := range map[string]func(serve.BatcherOptions) (*serve.Batcher, error){
		"host": serve.NewBatcher, "units": serve.NewUnitBatcher} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				o := serve.Options{Device: cuda.CPU, Decode: decode.Options{Transform: transform.Eval(40, 32)}}
				b, err := open(serve.BatcherOptions{Model: always(identity), Images: o, MaxDelay: time.Millisecond})
				closed(t, b, err)
				uploads := [][]byte{images[0], []byte("no image"), images[1], images[0][:200]}
				var calls []<-chan result
				for _, upload := range uploads {
					calls = append(calls, do(t.Context(), b, serve.Request{Image: upload}))
					synctest.Wait()
				}
				for i, call := range calls {
					got := <-call
					var faults decode.Errors
					if i%2 == 0 {
						if got.err != nil {
							t.Errorf("image %d: %v, want no error", i, got.err)
						}
					} else if !errors.As(got.err, &faults) || len(faults) != 1 || faults[0].Image != 0 {
						t.Errorf("image %d: %v, want decode.Errors with image 0", i, got.err)
					}
				}
				if _, err := b.Do(t.Context(), serve.Request{Image: []byte("alone")}); !errors.Is(err, decode.ErrNotImage) {
					t.Errorf("an upload in a batch alone: %v, want ErrNotImage", err)
				}
				if st := b.Stats(); st.Answered != 2 || st.Faulty != 3 || st.Waiting != 0 || st.Running != 0 {
					t.Errorf("%+v, want 2 answered, 3 faulty, none waiting or running", st)
				}
			})
		})
	}
}

// TestFullQueueRefusesAtOnce checks the bound, and that a cancelled request's place is free at
// once.
func TestFullQueueRefusesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		model := newHeld()
		o := rowOptions(model.run)
		o.MaxBatch, o.Queue = 1, 2
		b := newBatcher(t, o)
		model.hold()
		runs := do(t.Context(), b, row(1))
		<-model.runs // it has no place any more
		ctx, cancel := context.WithCancelCause(t.Context())
		cancelled := do(ctx, b, row(2))
		synctest.Wait()
		waits := do(t.Context(), b, row(3))
		synctest.Wait()
		if _, err := b.Do(t.Context(), row(4)); !errors.Is(err, serve.ErrQueueFull) {
			t.Errorf("Do with two waiting requests: %v, want ErrQueueFull", err)
		}
		gone := errors.New("the client has left")
		cancel(gone)
		if got := <-cancelled; got.err != gone {
			t.Errorf("the cancelled request: %v, want %v", got.err, gone)
		}
		last := do(t.Context(), b, row(5))
		synctest.Wait()
		if st := b.Stats(); st.Waiting != 2 || st.Running != 1 || st.Refused != 1 || st.Cancelled != 1 {
			t.Errorf("%+v, want 2 waiting, 1 running, 1 refused, 1 cancelled", st)
		}
		model.next <- nil
		wantRow(t, <-runs, 1, 2)
		for _, call := range []<-chan result{waits, last} {
			<-model.runs
			model.next <- nil
			if got := <-call; got.err != nil {
				t.Error(got.err)
			}
		}
	})
}

// A model with a fixed batch of one, as package aoti may have it, has a queue for many clients.
func TestDefaultQueueOfSmallBatchesHas64Places(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		model := newHeld()
		o := rowOptions(model.run)
		o.MaxBatch = 1
		b := newBatcher(t, o)
		model.hold()
		calls := []<-chan result{do(t.Context(), b, row(0))}
		<-model.runs
		for i := range 64 {
			calls = append(calls, do(t.Context(), b, row(float32(i))))
		}
		synctest.Wait()
		if _, err := b.Do(t.Context(), row(65)); !errors.Is(err, serve.ErrQueueFull) {
			t.Errorf("Do with 64 waiting requests: %v, want ErrQueueFull", err)
		}
		model.next <- nil
		for range 64 {
			<-model.runs
			model.next <- nil
		}
		for i, call := range calls {
			if got := <-call; got.err != nil {
				t.Errorf("request %d: %v, want an answer", i, got.err)
			}
		}
	})
}

// TestCancelledRowLeavesOtherRows cancels a request while its batch runs.
func TestCancelledRowLeavesOtherRows(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		model := newHeld()
		o := rowOptions(model.run)
		o.MaxBatch, o.MaxDelay = 4, time.Millisecond
		b := newBatcher(t, o)
		model.hold()
		ctx, cancel := context.WithCancel(t.Context())
		var calls []<-chan result
		for i, c := range []context.Context{t.Context(), ctx, t.Context()} {
			calls = append(calls, do(c, b, row(float32(i+1))))
			synctest.Wait()
		}
		<-model.runs
		cancel()
		if got := <-calls[1]; !errors.Is(got.err, context.Canceled) {
			t.Errorf("the cancelled request: %v, want context.Canceled before its batch ends", got.err)
		}
		model.next <- nil
		wantRow(t, <-calls[0], 1, 2)
		wantRow(t, <-calls[2], 3, 2)
		synctest.Wait()
		if st := b.Stats(); st.Answered != 2 || st.Cancelled != 1 || st.Running != 0 {
			t.Errorf("%+v, want 2 answered, 1 cancelled, 0 running", st)
		}
	})
}

// TestCancelledCallReturnsWhenItsUploadIsNotRead cancels a request while a worker reads its upload.
func TestCancelledCallReturnsWhenItsUploadIsNotRead(t *testing.T) {
	image := photos(t)[0]
	synctest.Test(t, func(t *testing.T) {
		o := serve.Options{Device: cuda.CPU, Concurrent: 1, Decode: decode.Options{Transform: transform.Eval(40, 32)}}
		b, err := serve.NewUnitBatcher(serve.BatcherOptions{Model: always(identity), Images: o, MaxBatch: 1})
		closed(t, b, err)
		release, err := serve.TakeBatcherUnit(b) // the worker waits for it, and reads the upload later
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		call := do(ctx, b, serve.Request{Image: image})
		synctest.Wait()
		cancel()
		synctest.Wait()
		select {
		case got := <-call:
			t.Errorf("the cancelled call returned %v while a worker had its upload, want it to wait", got.err)
		default:
		}
		release()
		if got := <-call; !errors.Is(got.err, context.Canceled) {
			t.Errorf("the cancelled call: %v, want context.Canceled", got.err)
		}
	})
}

// TestAnswerKeepsItsValues checks that a later batch does not change an answer, although the
// model's output is the memory of its input.
func TestAnswerKeepsItsValues(t *testing.T) {
	b := newBatcher(t, rowOptions(identity))
	first, err := b.Do(t.Context(), row(1))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.Do(t.Context(), row(2)); err != nil {
		t.Fatal(err)
	}
	wantRow(t, result{first, nil}, 1, 1)
}

// TestFailedRunLeavesNextBatch checks every kind of failure of Run: its requests get the error, and
// the next batch its values.
func TestFailedRunLeavesNextBatch(t *testing.T) {
	failure := errors.New("a failure of the model")
	for name, c := range map[string]struct {
		run  serve.Run
		want string
	}{
		"error": {func(context.Context, *torch.Tensor) ([]*torch.Tensor, error) { return nil, failure }, failure.Error()},
		"panic": {func(context.Context, *torch.Tensor) ([]*torch.Tensor, error) { panic("a panic") },
			"the model panicked: a panic"},
		"another batch size": {func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{x, x.Sum()}, nil
		}, "output 1 has the shape [], want the batch's 1 rows first"},
		"operator": {func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			return []*torch.Tensor{x.MatMul(x)}, nil
		}, "torch: MatMul("},
		"closed input": {func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			x.Close()
			return []*torch.Tensor{x}, nil
		}, "torch: "},
	} {
		for _, noGraphs := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s, NoGraphs %v", name, noGraphs), func(t *testing.T) {
				leavesNextBatch(t, c.run, c.want, noGraphs)
			})
		}
	}
}

func leavesNextBatch(t *testing.T, run serve.Run, want string, noGraphs bool) {
	cudatest.NoLeaks(t)
	var failing atomic.Bool
	o := rowOptions(func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		if failing.Load() {
			return run(ctx, x)
		}
		return []*torch.Tensor{x.MulScalar(2)}, nil
	})
	o.NoGraphs = noGraphs
	b := newBatcher(t, o)
	failing.Store(true)
	_, err := b.Do(t.Context(), row(1))
	const prefix = "serve: a batch of 1 on cpu: "
	text, ok := strings.CutPrefix(fmt.Sprint(err), prefix)
	if !ok || !strings.HasPrefix(strings.TrimPrefix(text, "output 0: "), want) {
		t.Errorf("the error is %v, want %q", err, prefix+want)
	}
	failing.Store(false)
	a, err := b.Do(t.Context(), row(2))
	wantRow(t, result{a, err}, 2, 2)
	if st := b.Stats(); st.Failed != 1 || st.Answered != 1 {
		t.Errorf("%d failed, %d answered, want 1, 1", st.Failed, st.Answered)
	}
}

// TestOutOfMemoryHalvesBucket checks that the requests of a batch without memory are answered from
// smaller batches, and that later batches stay small.
func TestOutOfMemoryHalvesBucket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		model, room := newHeld(), int64(8)
		o := rowOptions(func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			if x.Shape()[0] > room {
				return nil, fmt.Errorf("%d rows: %w", x.Shape()[0], cuda.ErrOutOfMemory)
			}
			return model.run(ctx, x)
		})
		o.MaxBatch, o.MaxDelay = 8, time.Millisecond
		var log bytes.Buffer
		o.Logger = slog.New(slog.NewTextHandler(&log, nil))
		b := newBatcher(t, o)
		model.hold()
		send := func(n int) (calls []<-chan result) {
			for i := range n {
				calls = append(calls, do(t.Context(), b, row(float32(i+1))))
				synctest.Wait()
			}
			return calls
		}
		warm := send(1)
		<-model.runs
		room = 2 // the worker waits, and sees it with its next run
		model.next <- nil
		wantRow(t, <-warm[0], 1, 2)
		calls := send(7)
		for i, call := range calls {
			if i%2 == 0 {
				<-model.runs
				model.next <- nil
			}
			wantRow(t, <-call, float32(i+1), 2)
		}
		st := b.Stats()
		if st.Devices[0].MaxBatch != 2 || st.OutOfMemory != 2 || st.Failed != 0 {
			t.Errorf("a maximum batch of %d after %d batches without memory, %d failed, want 2, 2 (of 8 and 4), 0",
				st.Devices[0].MaxBatch, st.OutOfMemory, st.Failed)
		}
		for _, words := range []string{"out of memory: batches get smaller", "batch=8 now=4", "batch=4 now=2"} {
			if !strings.Contains(log.String(), words) {
				t.Errorf("the log is %s, want it to contain %q", &log, words)
			}
		}
		room = 0
		if _, err := b.Do(t.Context(), row(1)); !errors.Is(err, cuda.ErrOutOfMemory) {
			t.Errorf("without memory for one row: %v, want ErrOutOfMemory", err)
		}
	})
}

// TestWarmUpLeavesOutBucketsWithoutMemory checks the start of a model that is too large for
// MaxBatch, and of one that does not run at all.
func TestWarmUpLeavesOutBucketsWithoutMemory(t *testing.T) {
	room := int64(3)
	o := rowOptions(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		if x.Shape()[0] > room {
			return nil, cuda.ErrOutOfMemory
		}
		return []*torch.Tensor{x}, nil
	})
	o.Buckets = []int{1, 3, 16}
	if st := newBatcher(t, o).Stats(); st.Devices[0].MaxBatch != 3 || st.OutOfMemory != 0 {
		t.Errorf("a maximum batch of %d, %d batches ran out of memory, want 3, 0", st.Devices[0].MaxBatch, st.OutOfMemory)
	}
	cudatest.NoLeaks(t)
	room = 0
	if b, err := serve.NewBatcher(o); b != nil || !errors.Is(err, cuda.ErrOutOfMemory) ||
		!strings.Contains(err.Error(), "serve: cpu: the first batch of 1: ") {
		t.Errorf("%v, %v, want no batcher, an error of the first batch of 1", b, err)
	}
}

// TestFirstRunGetsMemoryOfLargerBuckets checks a bucket that has no memory while a larger one holds
// it: the larger one is given up.
func TestFirstRunGetsMemoryOfLargerBuckets(t *testing.T) {
	var sizes []int64
	o := rowOptions(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		sizes = append(sizes, x.Shape()[0])
		if len(sizes) == 2 {
			return nil, cuda.ErrOutOfMemory
		}
		return []*torch.Tensor{x}, nil
	})
	o.MaxBatch = 4
	st := newBatcher(t, o).Stats()
	if want := []int64{4, 2, 2, 1}; !slices.Equal(sizes, want) || st.Devices[0].MaxBatch != 2 {
		t.Errorf("the first runs have sizes %v, and the maximum batch is %d, want %v, 2", sizes, st.Devices[0].MaxBatch, want)
	}
}

// TestLostDeviceLeavesOthersServing checks two devices, of which first one and then the other is
// lost.
func TestLostDeviceLeavesOthersServing(t *testing.T) {
	cudatest.NoLeaks(t)
	var failing, broken atomic.Bool
	o := rowOptions(func(_ context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
		if failing.Load() {
			return nil, cuda.ErrCUDA
		}
		return []*torch.Tensor{x.MulScalar(2)}, nil
	})
	o.Devices, o.Workers = []cuda.Device{cuda.CPU, cuda.CPU}, 2
	sticky := errors.New("an illegal memory access")
	b, err := serve.NewProbedBatcher(o, func(cuda.Device) error {
		if broken.Load() {
			return sticky
		}
		return nil
	})
	closed(t, b, err)
	failing.Store(true)
	if _, err := b.Do(t.Context(), row(1)); !errors.Is(err, cuda.ErrCUDA) || errors.Is(err, serve.ErrDeviceLost) {
		t.Errorf("a failure that leaves the device usable: %v, want ErrCUDA and not ErrDeviceLost", err)
	}
	for lost := range 2 {
		failing.Store(true)
		broken.Store(true)
		_, err := b.Do(t.Context(), row(1))
		if !errors.Is(err, serve.ErrDeviceLost) || !errors.Is(err, sticky) || !strings.Contains(err.Error(), "cpu") {
			t.Errorf("lost device %d: %v, want ErrDeviceLost and the reason", lost, err)
		}
		failing.Store(false)
		broken.Store(false)
		a, err := b.Do(t.Context(), row(2))
		if lost == 0 {
			wantRow(t, result{a, err}, 2, 2)
			if b.Err() != nil {
				t.Errorf("Err is %v with a device left, want nil", b.Err())
			}
		} else if !errors.Is(err, serve.ErrDeviceLost) || !errors.Is(b.Err(), serve.ErrDeviceLost) {
			t.Errorf("Do without a device: %v, and Err %v, want ErrDeviceLost", err, b.Err())
		}
		n := 0
		for _, d := range b.Stats().Devices {
			if d.Lost != nil {
				n++
			}
		}
		if n != lost+1 {
			t.Errorf("Stats has %d lost devices, want %d", n, lost+1)
		}
	}
}

// TestCloseAnswersRequests checks that Close waits for requests that wait or run, and refuses
// others.
func TestCloseAnswersRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		model := newHeld()
		o := rowOptions(model.run)
		o.MaxBatch = 1
		b := newBatcher(t, o)
		model.hold()
		runs := do(t.Context(), b, row(1))
		<-model.runs
		waits := do(t.Context(), b, row(2))
		synctest.Wait()
		closes := make(chan error, 1)
		go func() { closes <- b.Close(t.Context()) }()
		synctest.Wait()
		if _, err := b.Do(t.Context(), row(3)); !errors.Is(err, serve.ErrClosed) || !errors.Is(b.Err(), serve.ErrClosed) {
			t.Errorf("Do during Close: %v, Err %v, want ErrClosed", err, b.Err())
		}
		select {
		case err := <-closes:
			t.Fatalf("Close returned %v during a run, want it to wait", err)
		default:
		}
		model.next <- nil
		wantRow(t, <-runs, 1, 2)
		<-model.runs
		model.next <- nil
		wantRow(t, <-waits, 2, 2)
		if err := <-closes; err != nil {
			t.Errorf("Close: %v, want no error", err)
		}
	})
}

// TestCloseGivesUpWhenItsContextEnds checks that waiting requests are answered at once, and that
// Close still waits for the run that uses the model.
func TestCloseGivesUpWhenItsContextEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		running := make(chan struct{})
		warm := true
		o := rowOptions(func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) {
			if !warm {
				close(running)
				<-ctx.Done()
				time.Sleep(time.Second) // of the bubble's clock
				return nil, context.Cause(ctx)
			}
			return []*torch.Tensor{x}, nil
		})
		o.MaxBatch = 1
		b, err := serve.NewBatcher(o)
		if err != nil {
			t.Fatal(err)
		}
		warm = false
		runs := do(t.Context(), b, row(1))
		<-running
		waits := do(t.Context(), b, row(2))
		synctest.Wait()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		began := time.Now()
		err = b.Close(ctx)
		if took := time.Since(began); !errors.Is(err, context.DeadlineExceeded) || took != time.Minute+time.Second {
			t.Errorf("Close: %v after %v, want context.DeadlineExceeded after 1m1s", err, took)
		}
		for name, call := range map[string]<-chan result{"running": runs, "waiting": waits} {
			if got := <-call; !errors.Is(got.err, serve.ErrClosed) {
				t.Errorf("the %s request: %v, want ErrClosed", name, got.err)
			}
		}
		if err := b.Close(t.Context()); err != nil {
			t.Errorf("a second Close: %v, want no error", err)
		}
	})
}

// TestUnreachableBatcherIsClosed checks that the workers of a Batcher that was never closed leave.
func TestUnreachableBatcherIsClosed(t *testing.T) {
	cudatest.NoLeaks(t)
	warned := make(chan string, 1)
	o := rowOptions(identity)
	o.Logger = slog.New(slog.NewTextHandler(writer(func(text []byte) { warned <- string(text) }), nil))
	if _, err := serve.NewBatcher(o); err != nil {
		t.Fatal(err)
	}
	settle.Wait(t, func() int64 { return int64(len(warned)) })
	if len(warned) == 0 {
		t.Fatal("no message about a Batcher that became unreachable before Close, want one")
	}
	if text := <-warned; !strings.Contains(text, "a Batcher became unreachable before Close") {
		t.Errorf("the message is %s, want one about a Batcher that became unreachable before Close", text)
	}
}

// writer is an io.Writer that calls a function.
type writer func(text []byte)

func (w writer) Write(text []byte) (int, error) {
	w(text)
	return len(text), nil
}

func TestWrongBatcherOptionsAreNamed(t *testing.T) {
	cudatest.NoLeaks(t)
	failure := errors.New("no model here")
	images := func(o *serve.BatcherOptions) { o.Input = tensor.Spec{} }
	for words, change := range map[string]func(*serve.BatcherOptions){
		"BatcherOptions.Model is nil": func(o *serve.BatcherOptions) { o.Model = nil },
		"no model here": func(o *serve.BatcherOptions) {
			o.Model = func(cuda.Device) (serve.Run, error) { return nil, failure }
		},
		"Model returned no function":       func(o *serve.BatcherOptions) { o.Model = always(nil) },
		"Buckets is [2 1]":                 func(o *serve.BatcherOptions) { o.Buckets = []int{2, 1} },
		"the last bucket must be MaxBatch": func(o *serve.BatcherOptions) { o.Buckets, o.MaxBatch = []int{1, 2}, 3 },
		"Buckets is [-1]":                  func(o *serve.BatcherOptions) { o.MaxBatch = -1 },
		"Workers is -1":                    func(o *serve.BatcherOptions) { o.Workers = -1 },
		"Queue -2":                         func(o *serve.BatcherOptions) { o.Queue = -2 },
		"MaxDelay -1s":                     func(o *serve.BatcherOptions) { o.MaxDelay = -time.Second },
		"the shape [2 0] has no elements":  func(o *serve.BatcherOptions) { o.Input.Shape = []int64{2, 0} },
		"serve: cuda:99: cuda.NewOwnedStream: ": func(o *serve.BatcherOptions) {
			o.Devices = []cuda.Device{99}
		},
		"BatcherOptions.Images: serve: Options.Decode: Planar": func(o *serve.BatcherOptions) {
			images(o)
			o.Images.Decode.Planar = true
		},
		"BatcherOptions.Images: serve: Options.Device": func(o *serve.BatcherOptions) {
			images(o)
			o.Devices = []cuda.Device{99}
		},
	} {
		o := rowOptions(identity)
		change(&o)
		b, err := serve.NewBatcher(o)
		if b != nil || err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v, %v, want no batcher, an error with %q", b, err, words)
		}
	}
}

func TestWrongRequestsAreNamed(t *testing.T) {
	rows := newBatcher(t, rowOptions(identity))
	images := newBatcher(t, serve.BatcherOptions{Model: always(identity), MaxBatch: 1,
		Images: serve.Options{Device: cuda.CPU, Decode: decode.Options{Transform: transform.Eval(40, 32)}}})
	for words, c := range map[string]struct {
		b *serve.Batcher
		r serve.Request
	}{
		"Row has 4 bytes, want 8: float32[2]": {rows, serve.Request{Row: make([]byte, 4)}},
		"Image is set":                        {rows, serve.Request{Image: []byte{1}}},
		"Row is set":                          {images, row(1)},
		"Priority is 2":                       {rows, serve.Request{Row: make([]byte, 8), Priority: 2}},
	} {
		if _, err := c.b.Do(t.Context(), c.r); err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%v, want an error with %q", err, words)
		}
	}
	if st := rows.Stats(); st.Faulty != 3 {
		t.Errorf("%d faulty requests, want 3", st.Faulty)
	}
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := rows.Do(ended, row(1)); !errors.Is(err, context.Canceled) || rows.Stats().Cancelled != 1 {
		t.Errorf("Do with an ended context: %v, %d cancelled, want context.Canceled, 1", err, rows.Stats().Cancelled)
	}
}
