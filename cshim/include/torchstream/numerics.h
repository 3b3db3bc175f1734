/* Numerics: LibTorch's switches between speed, precision and reproducibility. */
#ifndef TS_NUMERICS_H_
#define TS_NUMERICS_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* LibTorch's switches between speed, precision and reproducibility. */
enum {
  TS_NUMERICS_FLAG_MATMUL_TF32 = 1,      /* float32 matrix products on a GPU may round to TF32 */
  TS_NUMERICS_FLAG_CONVOLUTION_TF32 = 2, /* float32 convolutions may too; LibTorch's default */
  TS_NUMERICS_FLAG_BENCHMARK = 4,        /* cuDNN measures its algorithms for each new shape */
  TS_NUMERICS_FLAG_DETERMINISTIC = 8     /* operators without a deterministic kernel fail */
};

/* A call's own switches, which replace those of the process. They are part of the flags of operator
 * calls, ts_tensor_backward, ts_tensor_grads and ts_autograd_callback: TS_NUMERICS_ON times the
 * switches that are on, plus TS_NUMERICS_OFF times the others. When the flags of several operands
 * are combined with "or", either no switch is set, or each of the four is on or off, but not both.
 * Otherwise the call returns TS_ERROR_INVALID_ARGUMENT.
 *
 * LibTorch keeps one value of each switch for the process. A call therefore waits until all
 * operators and backward nodes under other switches have ended on the host, and calls with other
 * switches wait for it. Calls with equal switches run at the same time. No call waits for a
 * callback (ts_autograd_callback), which may itself wait for any thread. The switches apply to the
 * kernels that a call enqueues, and so to replays of a graph that captured the call. */
enum { TS_NUMERICS_ON = 16, TS_NUMERICS_OFF = 256 };

/* Replaces the process's switches, which apply to calls without their own. flags: TS_NUMERICS_FLAG_
 * values, combined with "or". An operator that runs on another thread meanwhile sees the old or the
 * new switches. The call waits for operators under other switches, as an operator does. */
TS_API ts_error* ts_numerics_set(int32_t flags);

/* Returns the process's switches. */
TS_API ts_error* ts_numerics_get(int32_t* flags);

#ifdef __cplusplus
}
#endif

#endif /* TS_NUMERICS_H_ */
