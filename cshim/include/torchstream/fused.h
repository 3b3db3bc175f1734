/* Fused kernels: each does the work of several operators on tensors. */
#ifndef TS_FUSED_H_
#define TS_FUSED_H_

#include "torchstream/error.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Casts `count` tensors to dtype, TS_DTYPE_BFLOAT16 or TS_DTYPE_FLOAT16, as autocast does with the
 * weights of one operator, but in a few kernels for all tensors, and with one graph node for those
 * that require grad: the node casts their gradients back to float32 when all of them are computed.
 * casts: count new references, NULL for a tensor that is not float32. */
TS_API ts_error* ts_tensor_cast_all(ts_tensor* const* tensors,
                                    int64_t count,
                                    int32_t dtype,
                                    ts_tensor** casts);

/* Computes dst[n,c,h,w] = (src[n,h,w,c] / 255 - mean[c]) / std[c]. src: uint8 [N,H,W,C],
 * contiguous. dst: float32, float16 or bfloat16 [N,C,H,W], contiguous or channels_last, on the same
 * device. mean, std: one value for each of 1 to 4 channels. Computed in float32 as src * scale +
 * offset with the product rounded before the sum, then rounded to dst's type: the same bits on the
 * CPU and the GPU. */
TS_API ts_error* ts_tensor_normalize_images(ts_tensor* dst,
                                            const ts_tensor* src,
                                            const float* mean,
                                            const float* std,
                                            int64_t channels);

/* Does aten::batch_norm in training, adds `residual`, and computes ReLU, in two kernels, with two
 * more in backward. `tensors` has 6: x, weight, bias, running_mean, running_var and residual, of
 * which each but x may be NULL; the running statistics are changed in place. flags: as for
 * ts_operator_call; autocast and switches change nothing. result: a new reference, or NULL for
 * tensors that the kernels do not take: then nothing has happened, and operators compute the same.
 * The kernels take an x on a GPU, float32, float16 or bfloat16 [N,C,H,W], channels_last, with C *
 * element size a multiple of 16 bytes and more than one value for each channel; a residual like x;
 * and float32 [C] on the same GPU. With equal statistics the values have the bits of the operators,
 * rounded between them; the statistics' sums have another order. Gradients of gradients are those
 * of operators. */
TS_API ts_error* ts_tensor_batch_norm_relu(ts_tensor* const* tensors,
                                           double momentum,
                                           double eps,
                                           int32_t flags,
                                           ts_tensor** result);

#ifdef __cplusplus
}
#endif

#endif /* TS_FUSED_H_ */
