// Gradients, and the seed of the random generators.
#include <ATen/Context.h>
#include <ATen/core/Tensor.h>

#include <string>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

// Requires a gradient's shape, dtype and device to be the tensor's.
void check_gradient(const at::Tensor& tensor, const at::Tensor& gradient) {
  require(gradient.sizes() == tensor.sizes(), "the gradient's shape is not the tensor's");
  require(gradient.scalar_type() == tensor.scalar_type(),
          "the gradient's dtype is not the tensor's");
  require(gradient.device() == tensor.device(),
          "the gradient and the tensor are on different devices");
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_backward(const ts_tensor* tensor, const ts_tensor* gradient,
                             bool retain_graph) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    const at::Tensor with = ts::value_or_undefined(gradient);
    ts::require(value.requires_grad(),
                "backward from a tensor that does not depend on any that requires grad");
    if (with.defined()) {
      ts::check_gradient(value, with);
    } else {
      ts::require(value.numel() == 1, "backward without a gradient needs a scalar");
    }
    if (ts::somebody_captures()) {
      ts::hold_in_capture(with);
      ts::gradients_in_capture();
    }
    const ts::CaptureWatch watch("backward");
    value.backward(with, retain_graph, /*create_graph=*/false);
  });
}

ts_error* ts_tensor_get_grad(const ts_tensor* tensor, ts_tensor** gradient) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(gradient != nullptr, "gradient is NULL");
    const at::Tensor value = ts::value_of(tensor);
    // Bypasses Tensor::grad, which warns about tensors that are not leaves.
    const at::Tensor& known = value.unsafeGetTensorImpl()->grad();
    if (ts::somebody_captures()) {
      ts::hold_in_capture(value);
      ts::gradients_in_capture();
    }
    *gradient = known.defined() ? ts::to_handle(known) : nullptr;
  });
}

ts_error* ts_tensor_set_grad(ts_tensor* tensor, const ts_tensor* gradient) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require(value.is_leaf(), "the gradient of a tensor that is not a leaf cannot be set");
    if (gradient == nullptr) {
      if (value.unsafeGetTensorImpl()->grad().defined()) value.mutable_grad().reset();
      return;
    }
    at::Tensor with = ts::value_of(gradient);
    ts::check_gradient(value, with);
    ts::require(!with.is_same(value), "a tensor cannot be its own gradient");
    value.mutable_grad() = std::move(with);
  });
}

ts_error* ts_tensor_clear_grads(ts_tensor* const* tensors, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || tensors != nullptr, "tensors is NULL");
    for (int64_t i = 0; i < count; ++i) ts::value_of(tensors[i]);
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor value = ts::value_of(tensors[i]);
      if (value.unsafeGetTensorImpl()->grad().defined()) value.mutable_grad().reset();
    }
  });
}

ts_error* ts_tensor_set_requires_grad(ts_tensor* tensor, bool requires_grad) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    const at::Tensor value = ts::value_of(tensor);
    ts::require(value.is_leaf() || requires_grad,
                "the tensor was computed from others that require grad: it cannot stop requiring "
                "it; use a detached one");
    ts::require(!requires_grad || value.is_floating_point() || value.is_complex(),
                "only floating point tensors can require grad");
    value.requires_grad_(requires_grad);
  });
}

ts_error* ts_random_seed(uint64_t seed) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    if (ts::device_count() > 0) ts::ensure_cuda();
    at::manual_seed(seed);
  });
}
