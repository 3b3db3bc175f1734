// Package cuda gives Go programs CUDA's streams, events, devices and pinned memory, as LibTorch
// uses them.
//
// # Streams
//
// A GPU takes work from queues, called streams. A kernel launch or an asynchronous copy puts work
// at the end of a stream and returns at once. Work on one stream runs in order. Work on two streams
// runs in any order, and at the same time where the hardware has room: a copy on one stream hides
// under the compute on another. [Stream.Wait] and [Event] order the work of one stream after the
// work of another. Nothing else does: neither the default stream nor the streams of [NewStream]
// wait for another stream by themselves.
//
// # The current stream belongs to an OS thread
//
// An operator of package torch takes no stream: it queues its work on the current stream. LibTorch
// keeps one current stream for each OS thread and device. Go moves a goroutine to another thread at
// any time: at a channel, at a call into C, in the middle of a loop. The following code therefore
// does not work as written:
//
//	setStream(side)     // sets the stream of the goroutine's present thread
//	y := x.MatMul(w)    // may run on another thread, with another stream
//
// With 64 goroutines that run this code, nearly all of the second calls find another stream (99.8 %
// on the host of an H200), and the first call leaves its stream on a thread that another goroutine
// gets next. The code passes a small test, where no goroutine moves.
// TestUnlockedGoroutinesLoseTheirStream measures the effect.
//
// This package therefore has no call that sets a stream on an unlocked goroutine. [WithStream]
// locks the goroutine to its thread, sets the stream, runs a function, restores the earlier stream
// and unlocks, however the function ends:
//
//	err := cuda.WithStream(side, func() error {
//		y = x.MatMul(w) // queued on side
//		return y.Err()
//	})
//
// [SetCUDAStream] does the same in two halves: it locks and sets, and returns a function that
// restores and unlocks. [GetCurrentCUDAStream] returns the current stream, and [WaitCUDAStream]
// makes one stream wait for another. These three functions are named after the LibTorch calls that
// they stand for.
//
// A goroutine that has set no stream is on the default stream. This includes a goroutine that fn
// starts: a go statement does not inherit the stream.
//
// Locking costs about 3 ns. Handing work to a locked goroutine and back costs two thread switches,
// 10 to 60 µs. Lock a goroutine for life only where it works for 100 µs or more at a time, as the
// prefetcher's worker does, and never for single operators.
//
// # Blocking
//
// Calls that enqueue work (Record, Wait, WaitEvent and operators) do not wait for the device.
// Synchronize, of a [Stream], an [Event] or a [Device], blocks its goroutine and that goroutine's
// OS thread until the work is done. Other goroutines continue. The package bounds the number of
// threads that are in such calls at once. Further callers wait as goroutines. A wait cannot be
// cancelled: a program that must react to a context polls [Event.Query].
//
// # Ownership
//
// A [Stream] is a value and needs no Close. Close returns an [OwnedStream] to this package. Close
// an [Event] when no call uses it any more. Streams that already wait for the event continue to
// wait. Close a [Pinned] when no copy from or to it is in flight and no slice of it is in use. The
// garbage collector finds an object that became unreachable before its Close, and [Leaks] counts
// it.
//
// # Concurrency
//
// Any number of goroutines may call all functions and methods at once, on any thread. The exception
// is the restore function of [SetCUDAStream], which belongs to its goroutine.
//
// # Errors
//
// Errors of the C++ side are of type *[Error], and errors.Is finds their kind: [ErrNoDevice],
// [ErrOutOfMemory], [ErrNotRecorded] and others. On a machine without a GPU, every call that needs
// a GPU returns ErrNoDevice. Nothing else differs there: the package loads, [DeviceCount] returns
// 0, and programs name the device [CPU]. CUDA may report a failure at a later call than the call
// that caused it. After an illegal access ([ErrCUDA]) the process cannot use the GPU any more.
//
// docs/streams.md explains the model in full, and names the test that proves each claim.
package cuda
