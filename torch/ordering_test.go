package torch_test

import (
	"errors"
	"testing"

	"github.com/torchstream/torchstream/cuda"
	"github.com/torchstream/torchstream/torch"
)

// CopyBatch copies what was written before the event after, and its event done means the copies: a stream that waits for it reads them.
func TestCopyBatchIsOrdered(t *testing.T) {
	onGPU(t)
	const stale, fresh, n = 3, 7, 1 << 20
	s := torch.NewScope("test")
	defer s.Close()
	full := func(value float64, n int64) *torch.Tensor {
		x, err := torch.Full(gpu, torch.Float32, value, n)
		must(t, x, err)
		return s.Own(x)
	}
	var streams [3]cuda.Stream
	var events [2]*cuda.Event
	for i := range streams {
		var err error
		if streams[i], err = cuda.NewStream(gpu, cuda.StreamOptions{}); err != nil {
			t.Fatal(err)
		}
	}
	for i := range events {
		var err error
		if events[i], err = cuda.NewEvent(cuda.EventOptions{}); err != nil {
			t.Fatal(err)
		}
		defer events[i].Close()
	}
	src, dst, read, load, from := full(stale, n), full(stale, n), full(0, n), full(1, 1<<26), full(1, 1<<26)
	busy := func() error {
		for range 150 {
			if err := load.CopyFrom(from, torch.CopyOptions{}); err != nil {
				return err
			}
		}
		return nil
	}
	writer, copier, reader := streams[0], streams[1], streams[2]
	check := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	want := func(what string, value float32) {
		t.Helper()
		check(cuda.WithStream(reader, func() error { return read.CopyFrom(dst, torch.CopyOptions{}) }))
		check(gpu.Synchronize())
		got, err := read.Float32s()
		check(err)
		if got[0] != value || got[n-1] != value {
			t.Errorf("%s: read %v and %v, want %v", what, got[0], got[n-1], value)
		}
	}
	batch := func() error {
		return torch.CopyBatch(copier, events[0], []*torch.Tensor{dst}, []*torch.Tensor{src}, events[1])
	}
	check(errors.Join(gpu.Synchronize(), events[0].Record(copier), events[1].Record(copier)))
	// after: the source is written late.
	check(cuda.WithStream(writer, func() error { return errors.Join(busy(), src.Fill_(fresh).Err(), events[0].Record(writer)) }))
	check(batch())
	check(reader.Wait(copier))
	want("a source written late", fresh)
	// done: the copy comes late.
	check(errors.Join(dst.Fill_(stale).Err(), gpu.Synchronize()))
	check(cuda.WithStream(copier, busy))
	check(batch())
	check(reader.WaitEvent(events[1]))
	want("a late copy", fresh)
	// And without an edge it reads what was there before.
	check(errors.Join(dst.Fill_(stale).Err(), gpu.Synchronize()))
	check(cuda.WithStream(copier, busy))
	check(batch())
	want("no wait for the copy", stale)
}
