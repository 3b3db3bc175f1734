// Package cuda has CUDA's streams, events, devices and pinned memory, as LibTorch uses them, for Go
// programs.
//
// # Streams
//
// A GPU takes work from queues, called streams. A kernel launch or an asynchronous copy puts work
// at the end of a stream and returns; the host goes on. Work on one stream runs in its order. Work
// on two streams runs in any order, and at the same time where the hardware has room: so a copy on
// one stream hides under the compute on another. What one stream needs from another has to be said,
// with [Stream.Wait] or an [Event]; nothing is ordered by chance that is not ordered by one of
// them, the default stream and the streams of [NewStream] included.
//
// # The current stream belongs to an OS thread
//
// An operator of package torch takes no stream: it queues its work on the current stream. LibTorch
// keeps the current stream for each OS thread, and for each device. A Go program runs goroutines,
// and Go moves a goroutine to another thread whenever it likes: at a channel, at a call into C, in
// the middle of a loop. So this does not do what it says:
//
//	setStream(side)     // sets the stream of the thread that the goroutine is on now
//	y := x.MatMul(w)    // runs on the thread that the goroutine is on by then
//
// With 64 goroutines that do so, nearly all second calls find another stream (99.8 % on an H200's
// host); and the first leaves its stream on a thread that some other goroutine gets next. It looks
// right in a small test, where no goroutine moves. (TestUnlockedGoroutinesLoseTheirStream measures
// it.)
//
// So this package has no call that sets a stream on an unlocked goroutine. [WithStream] locks the
// goroutine to its thread, sets the stream, runs a function, restores what was before, and unlocks,
// whatever the function does:
//
//	err := cuda.WithStream(side, func() error {
//		y = x.MatMul(w) // queued on side
//		return y.Err()
//	})
//
// [SetCUDAStream] is the same in two halves: it locks and sets, and returns the function that
// restores and unlocks. [GetCurrentCUDAStream] says what is current, and [WaitCUDAStream] makes one
// stream wait for another; these three have the names of the LibTorch calls that they stand for.
//
// A goroutine that was told of no stream is always on the default stream. A goroutine that fn
// starts is such a goroutine: the stream does not travel with go.
//
// Locking costs about 3 ns. What costs is to hand work to a goroutine that is locked, and back: 10
// to 60 µs for the two thread switches. A locked goroutine for life is right for a worker that does
// 100 µs and more at a time (the prefetcher's), never for single operators.
//
// # Blocking
//
// Calls that enqueue (Record, Wait, WaitEvent, and operators) do not wait for the device.
// Synchronize, of a [Stream], an [Event] or a [Device], does: it blocks its goroutine and that
// goroutine's OS thread; others go on. How many threads are in such calls at once is bounded, the
// rest wait as goroutines. A wait cannot be cancelled: a program that must react to a context polls
// [Event.Query].
//
// # Ownership
//
// A [Stream] is a value and needs no Close; an [OwnedStream] goes back to this package with Close.
// An [Event] is closed when no call uses it any more; streams that wait for it already go on
// waiting. A [Pinned] is closed when no copy from or to it is in flight and no slice of it is in
// use. What becomes unreachable before it was closed is found by the garbage collector, and counted
// by [Leaks].
//
// # Concurrency
//
// All functions and methods may be called by any number of goroutines at once and on any thread,
// except the restore function of [SetCUDAStream], which belongs to its goroutine.
//
// # Errors
//
// Errors of the C++ side are of type *[Error], and errors.Is finds their kind: [ErrNoDevice],
// [ErrOutOfMemory], [ErrNotRecorded], ... On a machine without a GPU, every call that needs one
// returns ErrNoDevice, and nothing else is different: the package loads, [DeviceCount] is 0, and
// the device to name is [CPU]. CUDA reports some failures late, at a later call than the one that
// caused them. After an illegal access ([ErrCUDA]) the process cannot use the GPU any more.
//
// docs/streams.md explains the model at length, and says which test holds each claim.
package cuda
