/* Numerics: LibTorch's switches between speed, precision and reproducibility. */
#ifndef TS_NUMERICS_H_
#define TS_NUMERICS_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* LibTorch's switches between speed, precision and reproducibility. */
enum {
  TS_NUMERICS_FLAG_MATMUL_TF32 = 1,      /* float32 products on a GPU may round to TF32 */
  TS_NUMERICS_FLAG_CONVOLUTION_TF32 = 2, /* so may float32 convolutions; LibTorch's default */
  TS_NUMERICS_FLAG_BENCHMARK = 4,        /* cuDNN measures its algorithms for each new shape */
  TS_NUMERICS_FLAG_DETERMINISTIC = 8     /* operators without a deterministic kernel fail */
};

/* A call's own switches, instead of those of the process, in the flags of the calls of operators,
 * ts_tensor_backward, ts_tensor_grads and ts_autograd_callback: TS_NUMERICS_ON times those that are
 * on, and TS_NUMERICS_OFF times the others. Of all flags of several operands, added by "or", none
 * or each of the four is either on or off: otherwise TS_ERROR_INVALID_ARGUMENT.
 *
 * LibTorch keeps one value of each switch for the process. So the call waits until all operators
 * and nodes of backward passes under other switches have ended on the host, and others wait for it;
 * those under equal switches run at the same time. No call waits so for a callback
 * (ts_autograd_callback), which may wait for any thread. The switches are those of the kernels that
 * a call enqueues, and so of the replays of a graph that it is captured into. */
enum { TS_NUMERICS_ON = 16, TS_NUMERICS_OFF = 256 };

/* Replaces the process's switches, which calls without their own find. flags: TS_NUMERICS_FLAG_
 * values, added. An operator that runs on another thread meanwhile sees the old or the new ones.
 * Waits as an operator does for those under other switches. */
TS_API ts_error* ts_numerics_set(int32_t flags);

/* Returns the process's switches. */
TS_API ts_error* ts_numerics_get(int32_t* flags);

#ifdef __cplusplus
}
#endif

#endif /* TS_NUMERICS_H_ */
