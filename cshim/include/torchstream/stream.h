/* Streams, their order, and the calling thread's current stream. */
#ifndef TS_STREAM_H_
#define TS_STREAM_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A stream is a value, LibTorch's packed form: comparable, copied freely, never freed. id 0 is the
 * device's default stream. Any number of threads may use a stream at once. Only values that
 * functions of this header made are valid. */
typedef struct ts_stream {
  int64_t id;
  int32_t device;
} ts_stream;

/* Returns the next stream of LibTorch's pool. The pool has 32 streams for each device and priority,
 * hands them out in turn and never destroys them: the 33rd request gets the 1st stream again. Pool
 * streams are not ordered against the default stream. priority: 0 is normal; negative values are
 * more urgent, down to `greatest` of ts_stream_get_priority_range. */
TS_API ts_error* ts_stream_from_pool(int32_t device, int32_t priority, ts_stream* stream);

/* Wraps a cudaStream_t made elsewhere. It is borrowed until the last tensor that used the stream is
 * freed; its owner destroys it after that. Handle 0 is the default stream. cudaStreamLegacy and
 * cudaStreamPerThread are refused, because LibTorch has no name for them. */
TS_API ts_error* ts_stream_from_handle(uintptr_t cuda_stream, int32_t device, ts_stream* stream);

/* Ends the use of a wrapped stream, before its owner destroys it. From then on every call with the
 * value returns TS_ERROR_INVALID_ARGUMENT, until the address is wrapped again. */
TS_API ts_error* ts_stream_forget(ts_stream stream);

/* Lends an exclusive stream, which otherwise behaves like a pool stream. The number of such streams
 * is not limited. ts_stream_release returns the stream. */
TS_API ts_error* ts_stream_acquire(int32_t device, int32_t priority, ts_stream* stream);

/* Does ts_stream_acquire for a stream whose kernels run on at most max_multiprocessors of the
 * device's multiprocessors, 1 or more. All streams of a device with the same bound share these
 * multiprocessors, and other streams may use them too. *multiprocessors: the actual bound, which
 * the driver rounds down (to a multiple of 8 on compute capability 9.0). It is 0 if the device has
 * no more than max_multiprocessors, so that the stream is not bounded. Copies are not bounded.
 * Returns TS_ERROR_INVALID_ARGUMENT for less than the driver's minimum, and TS_ERROR_UNSUPPORTED
 * with a driver before CUDA 12.5. */
TS_API ts_error* ts_stream_acquire_bounded(int32_t device,
                                           int32_t priority,
                                           int32_t max_multiprocessors,
                                           ts_stream* stream,
                                           int32_t* multiprocessors);

/* Returns a stream of ts_stream_acquire or ts_stream_acquire_bounded, without waiting. It must not
 * be current on any thread. From then on every call with the value returns
 * TS_ERROR_INVALID_ARGUMENT. The CUDA stream stays alive, because LibTorch may remember it (for
 * memory recorded on the stream, and for the backward of its work). ts_stream_acquire lends it
 * again once its work is done. */
TS_API ts_error* ts_stream_release(ts_stream stream);

/* Returns the device's default stream. */
TS_API ts_error* ts_stream_get_default(int32_t device, ts_stream* stream);

/* Reports whether two values name the same queue: equal values, or two values for one CUDA stream.
 */
TS_API ts_error* ts_stream_is_same(ts_stream a, ts_stream b, bool* same);

/* Returns the cudaStream_t. */
TS_API ts_error* ts_stream_get_handle(ts_stream stream, uintptr_t* cuda_stream);
TS_API ts_error* ts_stream_get_priority(ts_stream stream, int32_t* priority);

/* Returns 0 and the most urgent priority, for example -3. */
TS_API ts_error* ts_stream_get_priority_range(int32_t* least, int32_t* greatest);

/* Reports whether any thread captures work enqueued on the stream. */
TS_API ts_error* ts_stream_is_capturing(ts_stream stream, bool* capturing);

/* Reports whether all work enqueued on the stream is done. While the stream is captured, and on a
 * thread that captures, it returns TS_ERROR_CAPTURE and does not harm the capture. */
TS_API ts_error* ts_stream_query(ts_stream stream, bool* done);

/* Blocks until all work enqueued on the stream is done. Fails like ts_stream_query. */
TS_API ts_error* ts_stream_synchronize(ts_stream stream);

/* Enqueues a kernel that keeps the stream busy for at least the given time, 0 to 60 s. For tests of
 * the order between streams. It may be captured. */
TS_API ts_error* ts_stream_delay(ts_stream stream, int64_t nanoseconds);

/* ---- the current stream, as PyTorch names it ------------------------------------------------- */

/* These three calls break the rule that a function is ts_<noun>_<verb>, for their users' sake:
 * LibTorch has getCurrentCUDAStream and setCurrentCUDAStream, and torch.cuda has set_stream and
 * wait_stream. */

/* Returns the calling thread's current stream of the device. device may be TS_DEVICE_CURRENT. */
TS_API ts_error* ts_get_current_cuda_stream(int32_t device, ts_stream* stream);

/* Makes the stream current for its device on the calling OS thread. Other devices, other threads
 * and the current device do not change. */
TS_API ts_error* ts_set_cuda_stream(ts_stream stream);

/* Makes `waiter` wait for `on`: work enqueued on `waiter` after this call starts only after all
 * work that was enqueued on `on` before the call. The host does not block. The devices may differ.
 * Returns TS_ERROR_CAPTURE if `waiter` is captured and `on` is not. */
TS_API ts_error* ts_wait_cuda_stream(ts_stream waiter, ts_stream on);

/* ---- order between several streams ----------------------------------------------------------- */

/* Makes each of the `count` streams `to` wait for `from`: work enqueued on them after this call
 * starts only after all work that was enqueued on `from` before the call. One event record serves
 * all streams. The streams may be of any device; `from` is skipped if it is among them. The host
 * does not block. While a graph captures `from`, the forked streams join the capture. Returns
 * TS_ERROR_CAPTURE if a stream in `to` is captured and `from` is not. */
TS_API ts_error* ts_stream_fork(ts_stream from, const ts_stream* to, int64_t count);

/* Makes `into` wait for each of the `count` streams `from`: work enqueued on `into` after this call
 * starts only after all work that was enqueued on them before the call. Otherwise like
 * ts_stream_fork. */
TS_API ts_error* ts_stream_join(ts_stream into, const ts_stream* from, int64_t count);

/* ---- guards ---------------------------------------------------------------------------------- */

/* A stream guard of one thread, a value. Guards nest; exit them in reverse order. */
typedef struct ts_stream_guard {
  uint64_t thread; /* the library's number for the thread that entered */
  uint64_t serial; /* the guard's ordinal on that thread */
} ts_stream_guard;

/* Makes the stream and its device current on the calling thread. */
TS_API ts_error* ts_stream_guard_enter(ts_stream stream, ts_stream_guard* guard);

/* Restores the stream and the device that were current at enter. Changes nothing and returns
 * TS_ERROR_WRONG_THREAD on another thread, and TS_ERROR_OUT_OF_ORDER before an inner guard has
 * exited, or if this guard has already exited. */
TS_API ts_error* ts_stream_guard_exit(ts_stream_guard guard);

#ifdef __cplusplus
}
#endif

#endif /* TS_STREAM_H_ */
