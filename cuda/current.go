package cuda

import (
	"errors"
	"fmt"
	"runtime"
	"sync/atomic"

	"github.com/torchstream/torchstream/internal/capi"
)

// GetCurrentCUDAStream returns the stream on which the calling OS thread queues device d's work.
// Inside [WithStream], or after [SetCUDAStream], this is the stream of that call, if the stream
// belongs to d. A goroutine that has set no stream gets the default stream. GetCurrentCUDAStream
// neither blocks nor locks.
func GetCurrentCUDAStream(d Device) (Stream, error) {
	if err := d.gpu("GetCurrentCUDAStream"); err != nil {
		return Stream{}, err
	}
	s, err := capi.GetCurrentCUDAStream(int32(d))
	return Stream{s}, checked(err)
}

// SetCUDAStream makes s the current stream of the calling goroutine, and s's device its current
// device, until restore is called. It locks the goroutine to its OS thread (runtime.LockOSThread),
// because the current stream belongs to the thread. restore brings back the earlier stream and
// device, and unlocks. Goroutines that the calling goroutine starts are not on s. Calls nest;
// restore in reverse order:
//
//	restore, err := cuda.SetCUDAStream(s)
//	if err != nil {
//		return err
//	}
//	defer restore()
//
// The same goroutine must call restore. On another goroutine restore returns [ErrWrongThread]. If a
// later SetCUDAStream has not been restored yet, restore returns [ErrOutOfOrder]. A failed restore
// changes nothing, and may be called again in the right place. After a successful restore, further
// calls do nothing and return nil.
//
// If a goroutine ends without restore, its OS thread ends too, so that no other goroutine ever runs
// on a thread with a left-over stream. Prefer [WithStream], which always restores. Neither
// SetCUDAStream nor restore blocks.
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

// WaitCUDAStream makes one stream wait for another. Work that is queued on waiter after the call
// starts only when all work that was queued on the other stream before the call is done. The host
// does not wait. The streams may belong to two devices. Any thread may call it.
func WaitCUDAStream(waiter, on Stream) error { return checked(capi.WaitCUDAStream(waiter.s, on.s)) }

// WithStream runs fn with s as the current stream and s's device as the current device, and then
// restores the earlier stream and device. During the call the goroutine is locked to its OS thread.
// WithStream also restores and unlocks if fn panics or ends the goroutine (runtime.Goexit,
// testing's FailNow). Calls nest, on the same and on different devices. Goroutines that fn starts
// are not on s. WithStream itself does not block and waits for no device work.
//
// WithStream returns fn's error. It also returns an error, joined after fn's by errors.Join, if it
// cannot restore the earlier stream: fn called [SetCUDAStream] without its restore, or unlocked a
// thread that it had not locked. The goroutine then stays locked to its thread, so that no other
// goroutine inherits the left-over stream; the thread ends with the goroutine.
func WithStream(s Stream, fn func() error) (err error) {
	if fn == nil {
		return invalid("WithStream", "fn is nil: pass the function to run")
	}
	runtime.LockOSThread()
	guard, err := capi.StreamGuardEnter(s.s)
	if err != nil {
		runtime.UnlockOSThread()
		return checked(err)
	}
	defer func() {
		if left := guard.Exit(); left != nil {
			err = errors.Join(err, fmt.Errorf("WithStream(%v) could not restore the earlier stream, and "+
				"its goroutine stays locked to its OS thread; call "+
				"the restore function of SetCUDAStream before fn ends: %w", s, left))
			return
		}
		runtime.UnlockOSThread()
	}()
	return fn()
}

// WithStreams is [WithStream] for streams of several devices: each stream is current on its device
// while fn runs, and the current device is the first stream's. It returns [ErrInvalidArgument] for
// two streams of one device, and for no stream at all.
func WithStreams(streams []Stream, fn func() error) error {
	if len(streams) == 0 {
		return invalid("WithStreams", "no streams given: pass at least one")
	}
	last := len(streams) - 1
	for i, s := range streams[:last] {
		for _, other := range streams[i+1:] {
			if s.Device() == other.Device() {
				return invalid("WithStreams",
					"two streams of %v: only one stream of a device can be current", s.Device())
			}
		}
	}
	if last == 0 {
		return WithStream(streams[0], fn)
	}
	if fn == nil {
		return invalid("WithStreams", "fn is nil: pass the function to run")
	}
	return WithStream(streams[last], func() error { return WithStreams(streams[:last], fn) })
}
