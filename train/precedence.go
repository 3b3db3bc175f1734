package train

import (
	"errors"

	"github.com/torchstream/torchstream/cuda"
)

// WithPrecedence calls fn with a stream of its own as the device's current stream, which has a
// higher priority than the prefetcher's streams and those that decode images: the GPU starts queued
// work of fn first. Without it a step waits for kernels that prepare later batches. Graphs that a
// Graphed captures within fn have the priority too.
//
//	err := train.WithPrecedence(feed.Device(), func() error {
//		net, opt := build() // on the same stream as the steps
//		report, err = train.Run(ctx, train.Config{Model: net, Optimizer: opt, Feed: feed, ...})
//		return err
//	})
//
// Work of fn begins after what the caller's current stream has queued, and that stream then waits
// for the work of fn; the host waits for neither. LibTorch reuses memory in the order of the stream
// that it was allocated for, and that of fn is not the caller's. So make and free the model and the
// optimizer within fn. A tensor that fn made and that the caller uses afterwards needs
// Tensor.RecordStream, and one of the caller that fn uses must not be freed before fn has returned.
//
// fn runs on the calling goroutine, which holds its OS thread meanwhile. On the CPU WithPrecedence
// only calls fn. It returns the error of fn, or of the streams.
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
	// Join after an error and a panic too: what fn queued may still use the caller's memory.
	defer func() { err = errors.Join(err, cuda.Join(caller, stream.Stream)) }()
	return cuda.WithStream(stream.Stream, fn)
}
