package torch_test

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

func (o *ordering) capture(share *cuda.Graph, fn func() error) *cuda.Graph {
	o.t.Helper()
	g, err := cuda.Capture(cuda.CaptureOptions{SharePool: share}, fn)
	o.check(err)
	o.t.Cleanup(func() { g.Close() })
	return g
}

// Two graphs share memory: the second graph, on another stream, does not use the memory before the
// first has finished.
func TestReplaysOfASharedPoolAreOrdered(t *testing.T) {
	o := newOrdering(t)
	other, err := torch.Full(gpu, torch.Float32, -1, orderedElements)
	o.check(err)
	other = o.scope.Own(other)
	// The event comes when the first graph has written the memory that it shares, and before the
	// graph reads the memory again.
	written, err := cuda.NewEvent(cuda.EventOptions{External: true})
	o.check(err)
	t.Cleanup(func() { written.Close() })
	first := o.capture(nil, func() error {
		made := o.src.MulScalar(1)
		defer made.Close()
		on, err := cuda.GetCurrentCUDAStream(gpu)
		if err == nil {
			err = written.Record(on)
		}
		return errors.Join(err, o.busy(), o.read.CopyFrom(made, torch.CopyOptions{}))
	})
	second := o.capture(first, func() error {
		made := other.MulScalar(1)
		defer made.Close()
		return o.dst.CopyFrom(made, torch.CopyOptions{})
	})
	o.reset()
	for range 3 { // a busy host may be later than the first graph, and would then find no error
		for _, later := range o.others() {
			o.check(errors.Join(first.Replay(o.streams[0]), later.WaitEvent(written), second.Replay(later)))
			o.want("the result of the first graph", staleValue)
		}
	}
}

// A graph that shares memory does not overwrite tensors that earlier captured functions made and
// that are open at its capture. Its own temporaries, which need as much memory, are elsewhere.
func TestResultsOfASharedPoolSurvive(t *testing.T) {
	o := newOrdering(t)
	var results [2]*torch.Tensor
	work := func(i int, factor float64) func() error {
		return func() error {
			for range 4 { // memory that the graph gives back at once
				made := o.src.MulScalar(-factor)
				if err := errors.Join(made.Err(), made.Close()); err != nil {
					return err
				}
			}
			results[i] = o.src.MulScalar(factor)
			return results[i].Err()
		}
	}
	first := o.capture(nil, work(0, 2))
	second := o.capture(first, work(1, 3))
	o.reset()
	for range 3 {
		o.check(errors.Join(first.Replay(o.streams[0]), second.Replay(o.streams[1]), gpu.Synchronize()))
		for i, want := range []float32{2 * staleValue, 3 * staleValue} {
			got := read(t, results[i])
			if got[0] != want || got[orderedElements-1] != want {
				t.Errorf("the result of graph %d is %v and %v, want %v", i, got[0], got[orderedElements-1], want)
			}
		}
	}
}

// Two graphs draw random numbers on two streams: the second graph's place in the sequence does not
// reach the first, whose draw runs later.
func TestRandomReplaysAreOrdered(t *testing.T) {
	o := newOrdering(t)
	first := o.capture(nil, func() error { return errors.Join(o.busy(), o.read.Uniform_(0, 1).Err()) })
	second := o.capture(nil, func() error { return o.dst.Uniform_(0, 1).Err() })
	run := func(a, b cuda.Stream) (x, y []float32) {
		o.reset()
		o.check(errors.Join(torch.ManualSeed(3), gpu.Synchronize(), first.Replay(a), second.Replay(b),
			gpu.Synchronize()))
		x, err := o.read.Float32s()
		o.check(err)
		y, err = o.dst.Float32s()
		o.check(err)
		return x, y
	}
	x, y := run(o.streams[0], o.streams[0])
	for range 3 {
		gotX, gotY := run(o.streams[0], o.streams[1])
		for i := range x {
			if gotX[i] != x[i] || gotY[i] != y[i] {
				t.Fatalf("number %d on two streams: %v and %v, on one: %v and %v", i, gotX[i], gotY[i], x[i], y[i])
			}
		}
	}
	if x[0] == y[0] {
		t.Errorf("both graphs drew %v first, want different numbers", x[0])
	}
}
