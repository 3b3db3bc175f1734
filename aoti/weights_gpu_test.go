package aoti

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/internal/hostblock"
	"github.com/torchstream/torchstream/serve"
	"github.com/torchstream/torchstream/tensor"
	"github.com/torchstream/torchstream/torch"
)

// scaledExample returns the example "scaled" of make_models.py, whose weights can be replaced, and
// a stress of it.
func scaledExample(t *testing.T) (example, *stress) {
	t.Helper()
	e, ok := gpuExamples(t)["scaled"]
	if !ok {
		t.Skip("the folder has no scaled.pt2")
	}
	base := map[string]*torch.Tensor{}
	for _, w := range e.model.Weights() {
		x, err := e.model.Weight(w.Name)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		base[w.Name] = x
	}
	want, err := e.sizes[0].loaded[0].Float64s()
	if err != nil {
		t.Fatal(err)
	}
	s := &stress{model: e.model, sets: scaledSets(t, base), want: want, bound: 1e-3}
	if err := e.model.Device().Synchronize(); err != nil { // afterwards all streams may read the sets
		t.Fatal(err)
	}
	return e, s
}

// onStreams returns a function that runs the example on one of four streams.
func (e example) onStreams(t *testing.T) func(g int) ([]float32, error) {
	t.Helper()
	var streams [4]cuda.Stream
	for i := range streams {
		streams[i] = cudatest.Stream(t, e.model.Device())
	}
	return func(g int) (values []float32, err error) {
		err = cuda.WithStream(streams[g%len(streams)], func() error {
			scope := torch.NewScope("run")
			defer scope.Close()
			outputs, err := e.model.Run(context.Background(), e.sizes[0].inputs[0].In(scope))
			if err == nil {
				values, err = outputs[0].Float32s()
			}
			return err
		})
		return values, err
	}
}

// 64 goroutines on 4 streams run the model while its weights are swapped.
func TestGPUWeightsAreSwappedWhileRunsAreQueued(t *testing.T) {
	e, s := scaledExample(t)
	s.run(t, e.onStreams(t))
}

// The sanitizer sees that a set is complete before other streams read it, and that its memory is
// reused after they have read it.
func TestSanitizerOfWeights(t *testing.T) {
	e, s := scaledExample(t)
	one := e.onStreams(t)
	cudatest.NoFindings(t)
	s.run(t, one)
	if err := e.model.Device().Synchronize(); err != nil {
		t.Fatal(err)
	}
}

// warm runs each instance once on the stream, and leaves free memory for eight sets of weights. The
// first run of an instance loads kernels, and new memory comes from the driver: both may wait for
// the device.
func (s *stress) warm(t *testing.T, e example, stream cuda.Stream) {
	t.Helper()
	err := cuda.WithStream(stream, func() error {
		scope := torch.NewScope("warm")
		defer scope.Close()
		for range e.model.instances {
			if _, err := e.model.Run(t.Context(), e.sizes[0].inputs[0].In(scope)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, x := range s.fill(t, 8) {
		x.Close()
	}
	if err := s.model.Device().Synchronize(); err != nil {
		t.Fatal(err)
	}
}

// fill overwrites the memory of n sets of weights, if so much is free.
func (s *stress) fill(t *testing.T, n int) (filled []*torch.Tensor) {
	t.Helper()
	for range n {
		x, err := torch.Zeros(s.model.Device(), torch.Uint8, hostblock.Bytes(s.model.Weights()))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { x.Close() })
		filled = append(filled, x)
	}
	return filled
}

// replaceBehind replaces the weights by a set while work is in the stream's queue.
func (s *stress) replaceBehind(t *testing.T, stream cuda.Stream, set int) {
	t.Helper()
	if err := s.model.ReplaceWeights(t.Context(), s.sets[set]); err != nil {
		t.Fatal(err)
	}
	if done, err := stream.Query(); err != nil || done {
		t.Fatalf("after set %d: the queue is empty: got %t, %v, want false", set, done, err)
	}
}

// checkSet compares outputs with a set's.
func (s *stress) checkSet(set int, y *torch.Tensor) error {
	got, err := y.Float32s()
	if err != nil {
		return err
	}
	only := &stress{model: s.model, sets: s.sets[:set+1], want: s.want, bound: s.bound, seen: map[int]bool{}}
	return only.check(got, set)
}

// The device computes late, so that a set is replaced, and its memory reused, while runs that read
// it are queued.
func TestGPUWeightsOfQueuedRunsStay(t *testing.T) {
	e, s := scaledExample(t)
	stream := cudatest.Stream(t, e.model.Device())
	if err := e.model.ReplaceWeights(t.Context(), s.sets[0]); err != nil {
		t.Fatal(err)
	}
	s.warm(t, e, stream)
	scope := torch.NewScope("runs")
	defer scope.Close()
	cudatest.Delay(t, stream, time.Second)
	var results []*torch.Tensor
	for i := range 4 {
		err := cuda.WithStream(stream, func() error {
			outputs, err := e.model.Run(t.Context(), e.sizes[0].inputs[0].In(scope))
			results = append(results, outputs...)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		s.replaceBehind(t, stream, i+1)
	}
	s.fill(t, 16)
	if err := stream.Synchronize(); err != nil {
		t.Fatal(err)
	}
	for i, y := range results {
		if err := s.checkSet(i, y); err != nil {
			t.Errorf("run %d: %v", i, err)
		}
	}
}

// A graph keeps the weights of its capture for replays that are queued when they are replaced.
func TestGPUWeightsOfQueuedReplaysStay(t *testing.T) {
	e, s := scaledExample(t)
	stream := cudatest.Stream(t, e.model.Device())
	if err := e.model.ReplaceWeights(t.Context(), s.sets[0]); err != nil {
		t.Fatal(err)
	}
	// A run on the stream would also keep the weights until the stream's work is done.
	s.warm(t, e, cudatest.Stream(t, e.model.Device()))
	scope := torch.NewScope("capture")
	defer scope.Close()
	var outputs []*torch.Tensor
	graph, err := cuda.Capture(cuda.CaptureOptions{}, func() (err error) {
		outputs, err = e.model.Run(t.Context(), e.sizes[0].inputs[0].In(scope))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer graph.Close()
	if err := graph.Replay(stream); err != nil { // the first replay uploads the graph
		t.Fatal(err)
	}
	if err := stream.Synchronize(); err != nil {
		t.Fatal(err)
	}
	cudatest.Delay(t, stream, time.Second)
	if err := graph.Replay(stream); err != nil {
		t.Fatal(err)
	}
	for i := range 3 {
		s.replaceBehind(t, stream, i+1)
	}
	s.fill(t, 16)
	if err := stream.Synchronize(); err != nil {
		t.Fatal(err)
	}
	if err := s.checkSet(0, outputs[0]); err != nil {
		t.Error(err)
	}
}

// A graph has the weights of its capture. A Graphed captures again after a swap.
func TestGPUGraphOfReplacedWeightsIsStale(t *testing.T) {
	e, s := scaledExample(t)
	x := e.sizes[0].inputs[0]
	call := func(x []*torch.Tensor) ([]*torch.Tensor, error) { return e.model.Run(context.Background(), x...) }
	graphed := torch.NewGraphed(call, torch.GraphedOptions{})
	defer graphed.Close()
	for set := range 3 {
		if err := e.model.ReplaceWeights(t.Context(), s.sets[set]); err != nil {
			t.Fatal(err)
		}
		for range 3 { // capture, and two replays
			results, err := graphed.Call(x)
			if err != nil {
				t.Fatal(err)
			}
			if err := s.checkSet(set, results[0]); err != nil {
				t.Errorf("set %d: %v", set, err)
			}
		}
	}
	if st := graphed.Stats(); st.Stale != 2 || st.Captures != 3 {
		t.Errorf("got %d stale graphs and %d captures, want 2 and 3", st.Stale, st.Captures)
	}
	scope := torch.NewScope("capture")
	defer scope.Close()
	graph, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		if err := e.model.ReplaceWeights(t.Context(), s.sets[0]); !errors.Is(err, cuda.ErrCapture) {
			t.Errorf("ReplaceWeights in a capture: got the error %v, want ErrCapture", err)
		}
		_, err := e.model.Run(t.Context(), x.In(scope))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer graph.Close()
	if err := graph.Replay(cuda.DefaultStream(e.model.Device())); err != nil {
		t.Fatal(err)
	}
	if err := e.model.ReplaceWeights(t.Context(), s.sets[0]); err != nil {
		t.Fatal(err)
	}
	if err := graph.Replay(cuda.DefaultStream(e.model.Device())); !errors.Is(err, cuda.ErrStale) {
		t.Errorf("a replay after the swap: got the error %v, want ErrStale", err)
	}
}

// A Batcher with graphs serves while its model's weights are swapped.
func TestGPUWeightsOfABatcherAreSwapped(t *testing.T) {
	e, s := scaledExample(t)
	b, err := serve.NewBatcher(serve.BatcherOptions{
		Model: func(cuda.Device) (serve.Run, error) {
			return func(ctx context.Context, x *torch.Tensor) ([]*torch.Tensor, error) { return e.model.Run(ctx, x) }, nil
		},
		Devices: []cuda.Device{e.model.Device()}, Workers: 2, Buckets: []int{16, 64}, Queue: 64,
		Input: tensor.Spec{DType: torch.Float32, Shape: []int64{64}},
	})
	if err != nil {
		t.Fatal(err)
	}
	row, err := e.sizes[0].inputs[0].Narrow(0, 0, 1).Float32s()
	if err != nil {
		t.Fatal(err)
	}
	s.want, s.sets = s.want[:32], s.sets[:20]
	s.run(t, func(int) ([]float32, error) {
		a, err := b.Do(context.Background(), serve.Request{Row: serve.RowOf(row)})
		if err != nil {
			return nil, err
		}
		return a.Outputs[0].Values, nil
	})
	if st := b.Stats(); st.Replays == 0 {
		t.Error("no batch was a replay, want some")
	}
	if err := b.Close(context.Background()); err != nil {
		t.Error(err)
	}
}
