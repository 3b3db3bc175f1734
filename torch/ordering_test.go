package torch_test

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/cudatest"
	"github.com/torchstream/torchstream/torch"
)

// ordering is the fixture of the ordering tests: three streams, tensors, and work that keeps a
// stream busy for tens of milliseconds.
type ordering struct {
	t              *testing.T
	streams        [3]cuda.Stream
	src, dst, read *torch.Tensor
	load, from     *torch.Tensor
	scope          *torch.Scope
}

const staleValue, freshValue, orderedElements = 3, 7, 1 << 20

func newOrdering(t *testing.T) *ordering {
	t.Helper()
	cudatest.RequireGPUs(t, 1)
	o := &ordering{t: t, scope: torch.NewScope("test")}
	t.Cleanup(func() { o.scope.Close() })
	full := func(value float64, n int64) *torch.Tensor {
		x, err := torch.Full(gpu, torch.Float32, value, n)
		o.check(err)
		return o.scope.Own(x)
	}
	for i := range o.streams {
		var err error
		o.streams[i], err = cuda.NewStream(gpu, cuda.StreamOptions{})
		o.check(err)
	}
	o.src, o.dst, o.read = full(staleValue, orderedElements), full(staleValue, orderedElements), full(0,
		orderedElements)
	o.load, o.from = full(1, 1<<26), full(1, 1<<26)
	o.check(gpu.Synchronize())
	return o
}

func (o *ordering) check(err error) {
	o.t.Helper()
	if err != nil {
		o.t.Fatal(err)
	}
}

func (o *ordering) busy() error {
	for range 150 {
		if err := o.load.CopyFrom(o.from, torch.CopyOptions{}); err != nil {
			return err
		}
	}
	return nil
}

func (o *ordering) on(s cuda.Stream, fn func() error) {
	o.t.Helper()
	o.check(cuda.WithStream(s, fn))
}

// others returns several streams other than streams[0]. The driver has fewer queues than there are
// streams, and work of two streams in one queue is in order without an edge. So a test that must
// fail without an edge tries more than one stream.
func (o *ordering) others() []cuda.Stream {
	o.t.Helper()
	all := []cuda.Stream{o.streams[1], o.streams[2]}
	for range 3 {
		s, err := cuda.NewStream(gpu, cuda.StreamOptions{})
		o.check(err)
		all = append(all, s)
	}
	return all
}

// reset writes the stale values into all tensors, and waits.
func (o *ordering) reset() {
	o.t.Helper()
	o.check(errors.Join(gpu.Synchronize(), o.src.Fill_(staleValue).Err(), o.dst.Fill_(staleValue).Err(),
		o.read.Fill_(0).Err(), gpu.Synchronize()))
}

// take queues a copy of dst into read on the stream.
func (o *ordering) take(s cuda.Stream) {
	o.t.Helper()
	o.on(s, func() error { return o.read.CopyFrom(o.dst, torch.CopyOptions{}) })
}

func (o *ordering) want(name string, value float32) {
	o.t.Helper()
	o.check(gpu.Synchronize())
	got, err := o.read.Float32s()
	o.check(err)
	if got[0] != value || got[orderedElements-1] != value {
		o.t.Errorf("%s: read %v and %v, want %v", name, got[0], got[orderedElements-1], value)
	}
}

// CopyBatch copies data that was written before the event after. It records the event done after
// the copies, so a stream that waits for done reads the copies.
func TestCopyBatchIsOrdered(t *testing.T) {
	o := newOrdering(t)
	var events [2]*cuda.Event
	for i := range events {
		var err error
		events[i], err = cuda.NewEvent(cuda.EventOptions{})
		o.check(err)
		defer events[i].Close()
	}
	writer, copier, reader := o.streams[0], o.streams[1], o.streams[2]
	batch := func() {
		o.check(torch.CopyBatch(copier, events[0], []*torch.Tensor{o.dst}, []*torch.Tensor{o.src}, events[1]))
	}
	o.check(errors.Join(events[0].Record(copier), events[1].Record(copier)))
	fresh := func() error { return errors.Join(o.busy(), o.src.Fill_(freshValue).Err()) }

	// after: the source is written late.
	o.reset()
	o.on(writer, fresh)
	o.check(events[0].Record(writer))
	batch()
	o.check(reader.Wait(copier))
	o.take(reader)
	o.want("a source written late", freshValue)

	// done: the copy runs late.
	o.reset()
	o.on(copier, fresh)
	batch()
	o.check(reader.WaitEvent(events[1]))
	o.take(reader)
	o.want("a late copy", freshValue)

	// Without a wait the reader reads the earlier contents.
	o.reset()
	o.on(copier, fresh)
	batch()
	o.take(reader)
	o.want("no wait for the copy", staleValue)
}

// CopyPeer copies after all earlier work of both streams, and both continue after the copy.
func TestCopyPeerIsOrdered(t *testing.T) {
	o := newOrdering(t)
	sender, receiver := o.streams[0], o.streams[1]
	copyPeer := func() {
		o.check(torch.CopyPeer([]*torch.Tensor{o.dst}, receiver, []*torch.Tensor{o.src}, sender))
	}
	// The receiver still reads the earlier contents.
	o.reset()
	o.check(errors.Join(o.src.Fill_(freshValue).Err(), gpu.Synchronize()))
	o.on(receiver, o.busy)
	o.take(receiver)
	copyPeer()
	o.want("the receiver's read before the copy", staleValue)

	// The copy runs late.
	o.reset()
	o.on(sender, func() error { return errors.Join(o.busy(), o.src.Fill_(freshValue).Err()) })
	copyPeer()
	o.take(receiver)
	o.want("the receiver's read after the copy", freshValue)
}
