package torch_test

import (
	"errors"
	"math"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// An eager call, on the Graphed's own stream, starts after the caller's queued work, and the
// caller's stream continues after the call.
func TestGraphedIsOrdered(t *testing.T) {
	o := newOrdering(t)
	slow := false
	g := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		if slow {
			o.check(o.busy())
		}
		return []*torch.Tensor{in[0].MulScalar(2)}, nil
		// No call of this test captures.
	}, torch.GraphedOptions{Warmup: 10})
	defer g.Close()
	call := func() error {
		out, err := g.Call(o.src)
		if err != nil {
			return err
		}
		return o.read.CopyFrom(out[0], torch.CopyOptions{})
	}
	o.on(o.streams[0], call) // load the kernels

	o.reset()
	o.on(o.streams[0], func() error { return errors.Join(o.busy(), o.src.Fill_(freshValue).Err(), call()) })
	o.want("an argument that is written late", 2*freshValue)

	slow = true
	o.reset()
	o.on(o.streams[0], func() error { return errors.Join(o.src.Fill_(freshValue).Err(), call()) })
	o.want("a result that comes late", 2*freshValue)
}

// Close frees a result that the caller's stream has still to read. Its memory is not reused before
// that read.
func TestGraphedResultsMayBeFreed(t *testing.T) {
	o := newOrdering(t)
	argument, err := torch.Full(gpu, torch.Float32, staleValue, orderedElements)
	o.check(err)
	defer argument.Close()
	o.check(gpu.Synchronize())
	g := torch.NewGraphed(func(in []*torch.Tensor) ([]*torch.Tensor, error) {
		return []*torch.Tensor{in[0].MulScalar(2)}, nil
	}, torch.GraphedOptions{Warmup: 10})
	defer g.Close()
	o.on(o.streams[0], func() error {
		out, err := g.Call(argument) // argument has no scope, so only g holds the result
		if err != nil {
			return err
		}
		o.check(gpu.Synchronize())
		return errors.Join(o.busy(), o.read.CopyFrom(out[0], torch.CopyOptions{}), g.Close())
	})
	// The Graphed's stream has no work, so one of the next owned streams gets it at once.
	for range 8 {
		own, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
		o.check(err)
		defer own.Close()
		o.on(own.Stream, func() error {
			x, err := torch.Full(gpu, torch.Float32, -1, orderedElements)
			o.scope.Own(x)
			return err
		})
	}
	o.want("the result", 2*staleValue)
}

// A captured copy from host memory waits, on the host, for a copy into that memory from before the
// capture: a wait of the captured stream would break the capture.
func TestCapturedCopyFromMemoryThatACopyFills(t *testing.T) {
	o := newOrdering(t)
	host, err := torch.TensorOptions{DType: torch.Float32, Pinned: true, Scope: o.scope}.Zeros(orderedElements)
	o.check(err)
	o.check(errors.Join(o.src.Fill_(freshValue).Err(), gpu.Synchronize()))
	o.on(o.streams[0], func() error {
		return errors.Join(o.busy(), host.CopyFrom(o.src, torch.CopyOptions{NonBlocking: true}))
	})
	g, err := cuda.Capture(cuda.CaptureOptions{}, func() error {
		return o.read.CopyFrom(host, torch.CopyOptions{NonBlocking: true})
	})
	o.check(err)
	defer g.Close()
	o.check(g.Replay(o.streams[1]))
	o.want("a replay after the copy", freshValue)
}

// A graph has an exclusive workspace in which cuBLAS adds the parts of a long product. Products of
// the same thread on the graph's capture stream use another workspace while the graph replays.
func TestProductsBesideAGraphOfTheirStream(t *testing.T) {
	o := newOrdering(t)
	own, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	o.check(err)
	defer own.Close()
	random := func(rows, columns int64) *torch.Tensor {
		x, err := torch.Randn(gpu, torch.Float32, rows, columns)
		o.check(err)
		return o.scope.Own(x)
	}
	const side, long, times = 64, 1 << 14, 200
	b := random(long, side)
	type products struct {
		of, sum *torch.Tensor
		want    []float32
	}
	var both [2]products
	for i := range both {
		both[i].of, both[i].sum = random(side, long), random(side, side)
	}
	o.check(gpu.Synchronize())
	add := func(p products) error {
		for range times {
			y := p.of.MatMul(b)
			err := p.sum.Add_(y).Err()
			y.Close()
			if err != nil {
				return err
			}
		}
		return nil
	}
	o.on(own.Stream, func() error {
		for i := range both {
			p := &both[i]
			if err := errors.Join(p.sum.Zero_().Err(), add(*p)); err != nil {
				return err
			}
			var err error
			if p.want, err = p.sum.Float32s(); err != nil {
				return err
			}
		}
		g, err := cuda.Capture(cuda.CaptureOptions{Stream: own.Stream}, func() error { return add(both[0]) })
		if err != nil {
			return err
		}
		defer g.Close()
		for round := range 5 {
			err := errors.Join(both[0].sum.Zero_().Err(), both[1].sum.Zero_().Err(), gpu.Synchronize(),
				g.Replay(o.streams[0]), add(both[1]), gpu.Synchronize())
			if err != nil {
				return err
			}
			for i, p := range both {
				got, err := p.sum.Float32s()
				if err != nil {
					return err
				}
				for j := range got {
					if math.Abs(float64(got[j]-p.want[j])) > 1 {
						t.Fatalf("round %d, sum %d, element %d: got %v, want %v as without the graph",
							round, i, j, got[j], p.want[j])
					}
				}
			}
		}
		return nil
	})
}

// LibTorch's kernels copy non-contiguous tensors: they run on the named streams, not on the
// caller's.
func TestStridedCopiesAreOrdered(t *testing.T) {
	o := newOrdering(t)
	const side = 1 << 10
	to, from := o.dst.In(o.scope).View(side, side), o.src.In(o.scope).View(side, side).Transpose(0, 1)
	for _, view := range []*torch.Tensor{to, from} {
		o.check(view.Err())
	}
	slow := func() error { return errors.Join(o.busy(), o.src.Fill_(freshValue).Err()) }
	copier, receiver := o.streams[0], o.streams[1]
	for name, enqueue := range map[string]func() error{
		"CopyBatch": func() error {
			return errors.Join(torch.CopyBatch(copier, nil, []*torch.Tensor{to}, []*torch.Tensor{from},
				nil), receiver.Wait(copier))
		},
		"CopyPeer": func() error {
			return torch.CopyPeer([]*torch.Tensor{to}, receiver, []*torch.Tensor{from}, copier)
		},
	} {
		o.check(enqueue()) // load the kernel
		o.reset()
		o.on(copier, slow)
		o.check(enqueue())
		o.take(receiver)
		o.want(name, freshValue)
	}
}

// The source of a captured copy stays until the graph is closed, even if the graph holds its only
// reference.
func TestGraphKeepsTheSourcesOfItsCopies(t *testing.T) {
	o := newOrdering(t)
	own, err := cuda.NewOwnedStream(gpu, cuda.StreamOptions{})
	o.check(err)
	defer own.Close()
	full := func(value float64) *torch.Tensor {
		x, err := torch.Full(gpu, torch.Float32, value, 1024)
		o.check(err)
		return x
	}
	for name, enqueue := range map[string]func(dst, src *torch.Tensor) error{
		"CopyFrom": func(dst, src *torch.Tensor) error { return dst.CopyFrom(src, torch.CopyOptions{}) },
		"CopyBatch": func(dst, src *torch.Tensor) error {
			return torch.CopyBatch(own.Stream, nil, []*torch.Tensor{dst}, []*torch.Tensor{src}, nil)
		},
	} {
		src, dst := full(3), o.scope.Own(full(0))
		o.check(gpu.Synchronize())
		g, err := cuda.Capture(cuda.CaptureOptions{Stream: own.Stream}, func() error { return enqueue(dst, src) })
		o.check(err)
		o.check(src.Close())
		for range 50 { // these would reuse the memory
			o.scope.Own(full(5))
		}
		o.check(errors.Join(gpu.Synchronize(), g.Replay(own.Stream), gpu.Synchronize()))
		if v, err := dst.Float32s(); err != nil || v[0] != 3 || v[1023] != 3 {
			t.Errorf("%s: read %v, want 3 (%v)", name, v[0], err)
		}
		o.check(g.Close())
	}
}
