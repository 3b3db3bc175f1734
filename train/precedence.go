package train

import (
	"errors"

	"github.com/torchstream/torchstream/cuda"
)

// WithPrecedence calls fn with a new high-priority stream as the device's current stream. The GPU
// starts queued work of fn before queued work of the prefetcher's streams and of the streams that
// decode images. Without WithPrecedence, a step waits for kernels that prepare later batches. CUDA
// graphs that fn captures have the same priority.
//
//	err := train.WithPrecedence(feed.Device(), func() error {
//		net, opt := build() // on the same stream as the steps
//		report, err = train.Run(ctx, train.Config{Model: net, Optimizer: opt, Feed: feed, ...})
//		return err
//	})
//
// Work of fn starts after the work already queued on the caller's current stream, and that stream
// then waits for the work of fn. The host waits for neither. LibTorch's allocator may reuse freed
// memory as soon as the stream that allocated it has come to the free. It does not wait for other
// streams. The streams of fn and the caller differ, so make and free the model and the optimizer
// within fn. If the caller later uses a tensor that fn made, call Tensor.RecordStream on it. A
// caller's tensor that fn uses must not be freed before fn has returned.
//
// fn runs on the calling goroutine, whose OS thread is locked during the call. On the CPU
// WithPrecedence only calls fn. It returns the error of fn, or of the streams.
func WithPrecedence(device cuda.Device, fn func() error) (err error) {
	if device == cuda.CPU {
		return fn()
	}
	caller, err := cuda.GetCurrentCUDAStream(device)
	if err != nil {
		return err
	}
	_, greatest, err := cuda.PriorityRange()
	if err != nil {
		return err
	}
	stream, err := cuda.NewOwnedStream(device, cuda.StreamOptions{Priority: max(-1, greatest)})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, stream.Close()) }()
	if err := cuda.Fork(caller, stream.Stream); err != nil {
		return err
	}
	// Join the streams after an error or a panic too: queued work of fn may still use the caller's
	// memory.
	defer func() { err = errors.Join(err, cuda.Join(caller, stream.Stream)) }()
	return cuda.WithStream(stream.Stream, fn)
}
