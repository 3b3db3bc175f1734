// The kernels behind ts_tensor_batch_norm_relu. No LibTorch here: batch_norm.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include "torch/batch_norm_pass.h"

namespace ts::norm {

// These functions enqueue both kernels of a pass on the stream of the current device.
cudaError_t launch(Element element, const Forward& pass, cudaStream_t stream);
cudaError_t launch(Element element, const Backward& pass, cudaStream_t stream);

}  // namespace ts::norm
