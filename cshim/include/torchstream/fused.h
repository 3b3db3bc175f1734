/* Fused kernels: each does the work of several operators on tensors. */
#ifndef TS_FUSED_H_
#define TS_FUSED_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Casts `count` tensors to dtype, TS_DTYPE_BFLOAT16 or TS_DTYPE_FLOAT16, as autocast casts the
 * weights of one operator. All tensors share a few kernels, and those that require grad share one
 * graph node, which casts their gradients back to float32 once all of them are computed. casts:
 * count new references, NULL for a tensor that is not float32. */
TS_API ts_error* ts_tensor_cast_all(ts_tensor* const* tensors,
                                    int64_t count,
                                    int32_t dtype,
                                    ts_tensor** casts);

/* Computes dst[n,c,h,w] = (src[n,h,w,c] / 255 - mean[c]) / std[c]. src: uint8 [N,H,W,C],
 * contiguous. dst: float32, float16 or bfloat16 [N,C,H,W], contiguous or channels_last, on the same
 * device. mean, std: one value for each of 1 to 4 channels. The arithmetic is float32: src * scale
 * + offset, with the product rounded before the sum, then rounded to dst's type. CPU and GPU give
 * the same bits. */
TS_API ts_error* ts_tensor_normalize_images(ts_tensor* dst,
                                            const ts_tensor* src,
                                            const float* mean,
                                            const float* std,
                                            int64_t channels);

/* Does aten::batch_norm in training, adds `residual`, and applies ReLU, in two kernels, with two
 * more in backward.
 *
 * tensors: 6 tensors, x, weight, bias, running_mean, running_var and residual. All except x may be
 * NULL. The running statistics are updated in place. flags: as for ts_operator_call; autocast and
 * switches have no effect. result: a new reference, or NULL if the kernels do not support the
 * tensors. Nothing has happened then, and the caller uses operators, which compute the same.
 *
 * The kernels support x on a GPU, float32, float16 or bfloat16 [N,C,H,W], channels_last, with C *
 * element size a multiple of 16 bytes and more than one value for each channel; a residual like x;
 * and the others as float32 [C] on the same GPU. With equal statistics the values have the same
 * bits as the operators', including the rounding between operators; only the order of the
 * statistics' sums differs. Double backward uses operators. */
TS_API ts_error* ts_tensor_batch_norm_relu(ts_tensor* const* tensors,
                                           double momentum,
                                           double eps,
                                           int32_t flags,
                                           ts_tensor** result);

#ifdef __cplusplus
}
#endif

#endif /* TS_FUSED_H_ */
