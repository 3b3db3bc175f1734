// Backward passes.
#pragma once

#include <ATen/core/Tensor.h>

namespace ts {

// Adds the gradients of all leaves that the value depends on, as LibTorch's Tensor::backward does,
// to the same bits. gradient: that of the value, or undefined for a scalar's, which is 1.
void run_backward(const at::Tensor& value, const at::Tensor& gradient, bool retain_graph);

}  // namespace ts
