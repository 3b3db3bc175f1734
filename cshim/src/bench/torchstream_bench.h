/* Measurements that `torchstream bench` makes inside the library. Not installed, and no part of the
 * ABI; the rules of torchstream.h hold.
 */
#ifndef TORCHSTREAM_BENCH_H_
#define TORCHSTREAM_BENCH_H_

#include "torchstream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Does nothing: what a call costs. */
TS_API void ts_bench_noop(void);
/* Runs `rounds` calls of at::add_ and of at::add on a one-element float32 tensor of the device, and
 * returns host nanoseconds a call: the C++ peer of the same operator through ts_operator_call.
 * out_of_place: each result is freed at once; held: results are kept and freed 400 at a time. */
TS_API ts_error* ts_bench_add(int32_t device, int32_t rounds, double* in_place,
                              double* out_of_place, double* held);
/* Runs `rounds` calls of one operator, by its name in operators.cc, on tiny tensors of the device,
 * and returns host nanoseconds a call. Results are kept and freed 100 calls at a time. */
TS_API ts_error* ts_bench_operator(int32_t device, const char* name, int32_t rounds,
                                   double* nanoseconds);
/* Runs `rounds` copies of `bytes` bytes between two GPUs by plain cudaMemcpyPeerAsync, one after
 * the other with nothing beside them, and returns nanoseconds a copy: what the link can do. */
TS_API ts_error* ts_bench_peer(int32_t dst_device, int32_t src_device, size_t bytes, int32_t rounds,
                               double* nanoseconds);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_BENCH_H_ */
