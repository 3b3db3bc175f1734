/* Streams, their order, and the calling thread's current stream. */
#ifndef TS_STREAM_H_
#define TS_STREAM_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A stream is a value, LibTorch's packed form: comparable, copied freely, never freed. id 0 is the
 * device's default stream. Any number of threads may use a stream at once. Only values made by
 * functions of this group are valid. */
typedef struct ts_stream {
  int64_t id;
  int32_t device;
} ts_stream;

/* Returns the next stream of LibTorch's pool, which has 32 for each device and priority, hands them
 * out in turn and never destroys them: the 33rd request gets the 1st stream again. Pool streams are
 * not ordered against the default stream. priority: 0 is normal, negative values down to
 * ts_stream_get_priority_range's greatest are more urgent. */
TS_API ts_error* ts_stream_from_pool(int32_t device, int32_t priority, ts_stream* stream);

/* Wraps a cudaStream_t made elsewhere. It is borrowed until the last tensor that used the stream is
 * freed; its maker destroys it after that. Handle 0 is the default stream. cudaStreamLegacy and
 * cudaStreamPerThread are refused, since LibTorch cannot name them. */
TS_API ts_error* ts_stream_from_handle(uintptr_t cuda_stream, int32_t device, ts_stream* stream);

/* Ends the use of a wrapped stream, before its maker destroys it. From then on the value is
 * TS_ERROR_INVALID_ARGUMENT everywhere, until the address is wrapped again. */
TS_API ts_error* ts_stream_forget(ts_stream stream);

/* Lends a stream that nobody else gets, otherwise like one of the pool, without a limit to their
 * number. ts_stream_release gives it back. */
TS_API ts_error* ts_stream_acquire(int32_t device, int32_t priority, ts_stream* stream);

/* ts_stream_acquire, for a stream whose kernels run on at most so many of the device's
 * multiprocessors, 1 or more. All streams of a device with the same number share them, and other
 * streams may use them too. *multiprocessors is the number, which the driver's granularity rounds
 * down (8 on compute capability 9.0), or 0 if the device has no more than the maximum: the stream
 * is then not bounded. Copies are not bounded. TS_ERROR_INVALID_ARGUMENT for fewer than the
 * driver's minimum, TS_ERROR_UNSUPPORTED with a driver before CUDA 12.5. */
TS_API ts_error* ts_stream_acquire_bounded(int32_t device,
                                           int32_t priority,
                                           int32_t max_multiprocessors,
                                           ts_stream* stream,
                                           int32_t* multiprocessors);

/* Takes back a stream of ts_stream_acquire or ts_stream_acquire_bounded, without waiting. From then
 * on the value is TS_ERROR_INVALID_ARGUMENT. It must not be current on any thread. The CUDA stream
 * lives on, because LibTorch remembers streams beyond their use (memory marked as used on one,
 * backward of what ran on one): ts_stream_acquire hands it out again once its work is done. */
TS_API ts_error* ts_stream_release(ts_stream stream);

/* Returns the device's default stream. */
TS_API ts_error* ts_stream_get_default(int32_t device, ts_stream* stream);

/* Says whether two values are one queue: equal values, or two values for one CUDA stream. */
TS_API ts_error* ts_stream_is_same(ts_stream a, ts_stream b, bool* same);

/* Returns the cudaStream_t. */
TS_API ts_error* ts_stream_get_handle(ts_stream stream, uintptr_t* cuda_stream);
TS_API ts_error* ts_stream_get_priority(ts_stream stream, int32_t* priority);

/* Returns 0 and the most urgent priority, for example -3. */
TS_API ts_error* ts_stream_get_priority_range(int32_t* least, int32_t* greatest);

/* Says whether work that is enqueued on the stream is captured, by any thread. */
TS_API ts_error* ts_stream_is_capturing(ts_stream stream, bool* capturing);

/* Says whether all work enqueued on the stream is done. TS_ERROR_CAPTURE, without harm to the
 * capture, while the stream is captured, and on a thread that captures. */
TS_API ts_error* ts_stream_query(ts_stream stream, bool* done);

/* Blocks until all work enqueued on the stream is done. Fails as ts_stream_query. */
TS_API ts_error* ts_stream_synchronize(ts_stream stream);

/* Enqueues a kernel that keeps the stream busy for at least the time, 0 to 60 s: for tests of the
 * order between streams. May be captured. */
TS_API ts_error* ts_stream_delay(ts_stream stream, int64_t nanoseconds);

/* ---- the current stream, as PyTorch names it ------------------------------------------------- */

/* These three calls break the rule that a function is ts_<noun>_<verb>. Their users know them from
 * LibTorch as getCurrentCUDAStream and setCurrentCUDAStream, and from torch.cuda as set_stream and
 * wait_stream, and look for these words. */

/* Returns the calling thread's current stream of the device, which may be TS_DEVICE_CURRENT. */
TS_API ts_error* ts_get_current_cuda_stream(int32_t device, ts_stream* stream);

/* Makes the stream current for its device on the calling OS thread. Other devices, other threads
 * and the current device stay as they are. */
TS_API ts_error* ts_set_cuda_stream(ts_stream stream);

/* Starts work enqueued on `waiter` from now on after everything enqueued on `on` so far. The host
 * does not block. The devices may differ. TS_ERROR_CAPTURE if `waiter` is captured and `on` is
 * not. */
TS_API ts_error* ts_wait_cuda_stream(ts_stream waiter, ts_stream on);

/* ---- order between several streams ----------------------------------------------------------- */

/* Starts work enqueued on each of the `count` streams `to` from now on after everything enqueued on
 * `from` so far, with one record for all. Streams may be of any device; `from` itself is passed
 * over in `to`. The host does not block. While a graph captures `from`, the forked streams join the
 * capture. TS_ERROR_CAPTURE if one of `to` is captured and `from` is not. */
TS_API ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int64_t count);

/* Starts work enqueued on `into` from now on after everything enqueued on each of the `count`
 * streams `from` so far. Otherwise as ts_stream_fork. */
TS_API ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int64_t count);

/* ---- guards ---------------------------------------------------------------------------------- */

/* A thread-local stream guard, a value. Guards nest and are exited in reverse order. */
typedef struct ts_stream_guard {
  uint64_t thread; /* the library's number of the thread that entered */
  uint64_t serial; /* the guard's ordinal on that thread */
} ts_stream_guard;

/* Makes the stream and its device current on the calling thread. */
TS_API ts_error* ts_stream_guard_enter(ts_stream stream, ts_stream_guard* guard);

/* Restores the stream and the device that were current at enter. Changes nothing and returns
 * TS_ERROR_WRONG_THREAD on another thread, TS_ERROR_OUT_OF_ORDER before an inner guard's exit or
 * after its own. */
TS_API ts_error* ts_stream_guard_exit(ts_stream_guard guard);

#ifdef __cplusplus
}
#endif

#endif /* TS_STREAM_H_ */
