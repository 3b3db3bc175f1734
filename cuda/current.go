package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// GetCurrentCUDAStream returns the stream that the calling OS thread queues device d's work on.
// Inside [WithStream], or after [SetCUDAStream], on that stream's device, it is that stream; a
// goroutine that was told of no stream gets the default stream. It neither blocks nor locks.
func GetCurrentCUDAStream(d Device) (Stream, error) {
	if err := d.gpu("GetCurrentCUDAStream"); err != nil {
		return Stream{}, err
	}
	s, err := capi.GetCurrentCUDAStream(int32(d))
	return Stream{s}, checked(err)
}

// SetCUDAStream makes s the stream that the calling goroutine queues work on, and s's device its
// current device, until restore is called. It locks the goroutine to its OS thread
// (runtime.LockOSThread), because the current stream belongs to the thread; restore brings back the
// stream and the device from before, and unlocks. Goroutines that this one starts are not on s.
// Calls nest; restore in reverse order:
//
//	restore, err := cuda.SetCUDAStream(s)
//	if err != nil {
//		return err
//	}
//	defer restore()
//
// restore must be called by the same goroutine: on another it returns [ErrWrongThread], and before
// the restore of a later SetCUDAStream [ErrOutOfOrder]. It has then done nothing, and may be called
// again where it belongs. Once it has succeeded, further calls do nothing and return nil.
//
// A goroutine that ends without restore takes its OS thread with it, so that no other goroutine
// ever runs on a thread with a left-over stream. When in doubt use [WithStream], which cannot be
// forgotten. Neither blocks.
func SetCUDAStream(s Stream) (restore func() error, err error) {
	runtime.LockOSThread()
	guard, err := capi.StreamGuardEnter(s.s)
	if err != nil {
		runtime.UnlockOSThread()
		return nil, checked(err)
	}
	var restored atomic.Bool
	return func() error {
		if restored.Load() {
			return nil
		}
		if err := guard.Exit(); err != nil {
			return fmt.Errorf("restore of SetCUDAStream(%v): %w", s, err)
		}
		restored.Store(true)
		runtime.UnlockOSThread()
		return nil
	}, nil
}

// WaitCUDAStream makes work that is queued on waiter from now on start after everything queued on
// on so far. The host does not wait; the streams may be of two devices; any thread may call it.
func WaitCUDAStream(waiter, on Stream) error { return checked(capi.WaitCUDAStream(waiter.s, on.s)) }

// WithStream runs fn with s as the current stream and s's device as the current device, and brings
// back the stream and device from before. For that time the goroutine is locked to its OS thread.
// Everything is undone also when fn panics or ends the goroutine (runtime.Goexit, testing's
// FailNow). Calls nest, on the same and on different devices. Goroutines that fn starts are not on
// s. WithStream itself does not block and waits for no device work.
//
// It returns fn's error. If what was before cannot be brought back, because fn called
// [SetCUDAStream] and not its restore, or unlocked the thread that it had not locked, it returns
// that error too (errors.Join, fn's first). The goroutine then stays locked to its thread, so that
// no other goroutine inherits the left-over stream; the thread ends with the goroutine.
func WithStream(s Stream, fn func() error) (err error) {
	if fn == nil {
		return invalid("WithStream", "there is no function to call")
	}
	runtime.LockOSThread()
	guard, err := capi.StreamGuardEnter(s.s)
	if err != nil {
		runtime.UnlockOSThread()
		return checked(err)
	}
	defer func() {
		if left := guard.Exit(); left != nil {
			err = errors.Join(err, fmt.Errorf("WithStream(%v) could not bring back the stream from before, and its goroutine stays locked to its OS thread; call "+
				"what SetCUDAStream returned before the function ends: %w", s, left))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// WithStreams is [WithStream] for streams of several devices: each is current on its device while
// fn runs, and the current device is that of the first. At most one stream of a device: else it is
// [ErrInvalidArgument], as with no stream at all.
func WithStreams(streams []Stream, fn func() error) error {
	if len(streams) == 0 {
		return invalid("WithStreams", "there is no stream")
	}
	last := len(streams) - 1
	for i, s := range streams[:last] {
		for _, other := range streams[i+1:] {
			if s.Device() == other.Device() {
				return invalid("WithStreams", "two streams of %v: one can be current", s.Device())
			}
		}
	}
	if last == 0 {
		return WithStream(streams[0], fn)
	}
	if fn == nil {
		return invalid("WithStreams", "there is no function to call")
	}
	return WithStream(streams[last], func() error { return WithStreams(streams[:last], fn) })
}
