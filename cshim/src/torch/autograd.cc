// Gradients.
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/sanitizer.h"
#include "torch/callback.h"
#include "torch/node.h"
#include "torch/numerics.h"
#include "torch/pass.h"
#include "torch/pending.h"
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

void check_leaf(const at::Tensor& leaf, const std::unordered_set<const c10::TensorImpl*>& known) {
  if (known.count(leaf.unsafeGetTensorImpl()) != 0) return;
  std::ostringstream text;
  text << "a leaf that is not given requires grad: " << c10::toString(leaf.scalar_type()) << " "
       << leaf.sizes();
  throw Failure(TS_ERROR_INVALID_ARGUMENT, text.str());
}

constexpr int32_t kGradFlags = TS_GRAD_FLAG_RETAIN_GRAPH | TS_GRAD_FLAG_CREATE_GRAPH |
                               TS_GRAD_FLAG_ALLOW_UNUSED | TS_GRAD_FLAG_NO_LEAF_HOOKS;

}  // namespace
}  // namespace ts

ts_error* ts_tensor_backward(const ts_tensor* tensor, const ts_tensor* gradient, int32_t flags) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require((flags & ~(TS_GRAD_FLAG_RETAIN_GRAPH | ts::kNumericsFlags)) == 0, "unknown flag");
    ts::check_numerics(flags);
    const at::Tensor value = ts::value_of(tensor);
    const at::Tensor with = ts::value_or_undefined(gradient);
    ts::require(value.requires_grad(),
                "backward from a tensor that does not depend on any that requires grad");
    if (with.defined()) {
      ts::check_gradient(value, with);
    } else {
      ts::require(value.numel() == 1, "backward without a gradient needs a scalar");
    }
    ts::refuse_in_accumulation();
    if (ts::somebody_captures()) {
      ts::hold_in_capture(with);
      ts::gradients_in_capture();
    }
    ts::await_pending(with);
    const ts::CaptureWatch watch("backward");
    const ts::LoggedFor backward(ts::LoggedFor::Doer::kLibrary);
    ts::run_backward(value, with, (flags & TS_GRAD_FLAG_RETAIN_GRAPH) != 0, flags);
  });
}

ts_error* ts_tensor_grads(ts_tensor* const* outputs, ts_tensor* const* output_gradients,
                          int64_t output_count, ts_tensor* const* inputs, int64_t input_count,
                          int32_t flags, ts_tensor** gradients) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(output_count > 0 && input_count > 0, "there are no outputs or no inputs");
    ts::require(outputs != nullptr && inputs != nullptr, "outputs or inputs is NULL");
    ts::require(gradients != nullptr, "gradients is NULL");
    ts::require((flags & ~(ts::kGradFlags | ts::kNumericsFlags)) == 0, "unknown flag");
    ts::check_numerics(flags);
    torch::autograd::variable_list of;
    torch::autograd::variable_list with;
    torch::autograd::variable_list by;
    for (int64_t i = 0; i < output_count; ++i) {
      of.push_back(ts::value_of(outputs[i], "an output"));
      with.push_back(
          ts::value_or_undefined(output_gradients == nullptr ? nullptr : output_gradients[i]));
      ts::require(of.back().requires_grad(),
                  "an output does not depend on any tensor that requires grad");
      if (with.back().defined()) {
        ts::check_gradient(of.back(), with.back());
      } else {
        ts::require(of.back().numel() == 1, "an output without a gradient must be a scalar");
      }
    }
    for (int64_t i = 0; i < input_count; ++i) {
      by.push_back(ts::value_of(inputs[i], "an input"));
      ts::require(by.back().requires_grad(), "an input does not require grad");
    }
    if (ts::somebody_captures()) {
      for (const at::Tensor& each : with) ts::hold_in_capture(each);
    }
    for (const at::Tensor& each : with) ts::await_pending(each);
    const ts::CaptureWatch watch("gradients");
    const ts::LoggedFor backward(ts::LoggedFor::Doer::kLibrary);
    const bool create = (flags & TS_GRAD_FLAG_CREATE_GRAPH) != 0;
    std::optional<ts::NoLeafHooks> quiet;
    if ((flags & TS_GRAD_FLAG_NO_LEAF_HOOKS) != 0 && ts::in_capture()) quiet.emplace();
    const ts::NodeTurns turns(flags);
    const auto results =
        torch::autograd::grad(of, by, with, create || (flags & TS_GRAD_FLAG_RETAIN_GRAPH) != 0,
                              create, (flags & TS_GRAD_FLAG_ALLOW_UNUSED) != 0);
    if (ts::somebody_captures()) {
      for (const at::Tensor& each : results) ts::made_in_capture(each);
    }
    // Nothing below may fail: a failed call must not make handles.
    for (const at::Tensor& each : results) {
      *gradients++ = each.defined() ? ts::to_handle(each) : nullptr;
    }
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

ts_error* ts_tensor_get_grads(ts_tensor* const* tensors, int64_t count, ts_tensor** gradients) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (tensors != nullptr && gradients != nullptr),
                "tensors or gradients is NULL");
    for (int64_t i = 0; i < count; ++i) ts::require(tensors[i] != nullptr, "a tensor is NULL");
    if (ts::somebody_captures()) {
      for (int64_t i = 0; i < count; ++i) ts::hold_in_capture(ts::value_of(tensors[i]));
      ts::gradients_in_capture();
    }
    // Nothing below may fail: a failed call must not make handles.
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor& known = ts::impl_of(tensors[i])->grad();
      gradients[i] = known.defined() ? ts::to_handle(known) : nullptr;
    }
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

ts_error* ts_tensor_forget_accumulators(ts_tensor* const* leaves, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || leaves != nullptr, "leaves is NULL");
    for (int64_t i = 0; i < count; ++i) {
      const at::Tensor leaf = ts::value_of(leaves[i], "a leaf");
      ts::require(leaf.is_leaf(), "a tensor is not a leaf");
      const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
      if (node != nullptr && !node->post_hooks().empty()) {
        throw ts::Failure(TS_ERROR_CAPTURE,
                          "what adds to a leaf's gradient has hooks, such as those of c10d's own "
                          "reducer, which would not be called any more");
      }
    }
    for (int64_t i = 0; i < count; ++i) {
      auto* meta = torch::autograd::impl::get_autograd_meta(ts::value_of(leaves[i]));
      if (meta == nullptr) continue;
      using Weak = decltype(meta->grad_accumulator_);
      const std::lock_guard<std::mutex> lock(meta->mutex_);
      meta->grad_accumulator_ = Weak(ts::NodePointer());
    }
  });
}

ts_error* ts_tensor_check_leaves(ts_tensor* const* outputs, int64_t output_count,
                                 ts_tensor* const* leaves, int64_t leaf_count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(output_count >= 0 && leaf_count >= 0, "a count is negative");
    ts::require(output_count == 0 || outputs != nullptr, "outputs is NULL");
    ts::require(leaf_count == 0 || leaves != nullptr, "leaves is NULL");
    std::unordered_set<const c10::TensorImpl*> known;
    for (int64_t i = 0; i < leaf_count; ++i) {
      known.insert(ts::value_of(leaves[i], "a leaf").unsafeGetTensorImpl());
    }
    std::vector<torch::autograd::Node*> open;
    for (int64_t i = 0; i < output_count; ++i) {
      const at::Tensor output = ts::value_of(outputs[i], "an output");
      if (!output.requires_grad()) continue;
      if (output.is_leaf()) {
        ts::check_leaf(output, known);
      } else {
        open.push_back(output.grad_fn().get());
      }
    }
    std::unordered_set<torch::autograd::Node*> seen(open.begin(), open.end());
    while (!open.empty()) {
      torch::autograd::Node* node = open.back();
      open.pop_back();
      if (const auto* leaf = dynamic_cast<torch::autograd::AccumulateGrad*>(node)) {
        ts::check_leaf(leaf->variable, known);
      }
      for (const torch::autograd::Edge& edge : node->next_edges()) {
        if (edge.is_valid() && seen.insert(edge.function.get()).second) {
          open.push_back(edge.function.get());
        }
      }
    }
  });
}
