// Casts of many tensors to a lower precision in one call, with one node of backward.
#include <ATen/core/Tensor.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "base/thread.h"
#include "cuda/capture.h"
#include "torch/node.h"
#include "torch/pending.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

using torch::autograd::variable_list;

// LibTorch's CUDA allocator aligns memory to this many bytes. Libraries choose kernels by the
// alignment of their operands.
constexpr int64_t kAlignment = 512;

// Returns uninitialised tensors with the sizes and strides of the given ones, which are dense and
// on one device, in one allocation. That saves the host an allocation and a release for each. The
// memory is freed with the last of them.
std::vector<at::Tensor> allocate_together(const std::vector<at::Tensor>& like,
                                          at::ScalarType dtype) {
  const auto step = kAlignment / static_cast<int64_t>(c10::elementSize(dtype));
  const auto padded = [step](const at::Tensor& t) { return (t.numel() + step - 1) / step * step; };
  int64_t total = 0;
  for (const at::Tensor& each : like) total += padded(each);
  const at::Tensor memory = at::empty({total}, like.front().options().dtype(dtype));
  std::vector<at::Tensor> parts;
  parts.reserve(like.size());
  int64_t offset = 0;
  for (const at::Tensor& each : like) {
    // Not a view for autograd: each part has its own version counter.
    parts.push_back(at::detail::make_tensor<c10::TensorImpl>(
        c10::TensorImpl::VIEW, c10::Storage(memory.storage()), memory.key_set(), memory.dtype()));
    c10::TensorImpl& part = *parts.back().unsafeGetTensorImpl();
    part.set_storage_offset(offset);
    part.set_sizes_and_strides(each.sizes(), each.strides());
    offset += padded(each);
  }
  return parts;
}

// Copies the tensors to another dtype with the same memory layout, in as few kernels as their
// devices allow. Autograd records nothing.
std::vector<at::Tensor> cast(const std::vector<at::Tensor>& from, at::ScalarType dtype) {
  if (from.empty()) return {};
  const c10::NoGradGuard no_grad;
  const c10::Device device = from.front().device();
  const bool together = std::all_of(from.begin(), from.end(), [device](const at::Tensor& each) {
    return each.device() == device && each.layout() == at::kStrided &&
           each.is_non_overlapping_and_dense();
  });
  std::vector<at::Tensor> to;
  if (together) {
    to = allocate_together(from, dtype);
  } else {
    for (const at::Tensor& each : from)
      to.push_back(at::empty_like(each, each.options().dtype(dtype)));
  }
  at::_foreach_copy_(to, from);
  return to;
}

// Casts the gradients of the casts back. Like the nodes that add to the leaves' gradients, the node
// runs as soon as it can, not in the reverse order of the forward pass. An optimizer or a reduction
// of gradients may wait for it, and it frees the gradients that it receives.
class CastsBackward final : public torch::autograd::Node {
 public:
  CastsBackward() : Node(/*sequence_nr=*/std::numeric_limits<uint64_t>::max()) {}

  std::string name() const override { return "CastsBackward"; }

  variable_list apply(variable_list&& gradients) override {
    variable_list results = std::move(gradients);
    if (at::GradMode::is_enabled()) {  // for double backward
      for (at::Tensor& each : results) {
        if (each.defined()) each = each.to(at::kFloat);
      }
      return results;
    }
    std::vector<at::Tensor> narrow;
    for (const at::Tensor& each : results) {
      if (each.defined()) narrow.push_back(each);
    }
    std::vector<at::Tensor> wide = cast(narrow, at::kFloat);
    auto next = wide.begin();
    for (at::Tensor& each : results) {
      if (each.defined()) each = std::move(*next++);
    }
    return results;
  }
};

// Makes the casts of tensors that require grad differentiable.
void record(const std::vector<at::Tensor>& from, const std::vector<at::Tensor>& to) {
  if (!at::GradMode::is_enabled()) return;
  variable_list inputs;
  variable_list outputs;
  for (size_t i = 0; i < from.size(); ++i) {
    if (!from[i].requires_grad()) continue;
    inputs.push_back(from[i]);
    outputs.push_back(to[i]);
  }
  if (inputs.empty()) return;
  auto node = make_node<CastsBackward>();
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  torch::autograd::set_history(outputs, node);
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_cast_all(ts_tensor* const* tensors, int64_t count, int32_t dtype,
                             ts_tensor** casts) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (tensors != nullptr && casts != nullptr), "an array is NULL");
    const at::ScalarType type = ts::checked_dtype(dtype);
    ts::require(type == at::kBFloat16 || type == at::kHalf, "dtype is not bfloat16 or float16");
    std::vector<at::Tensor> from;
    std::vector<int64_t> index;
    for (int64_t i = 0; i < count; ++i) {
      at::Tensor value = ts::value_of(tensors[i]);
      if (value.scalar_type() != at::kFloat) continue;
      ts::await_pending(value);
      if (ts::somebody_captures()) ts::hold_in_capture(value);
      from.push_back(std::move(value));
      index.push_back(i);
    }
    const ts::CaptureWatch watch("the casts of parameters");
    std::vector<at::Tensor> to = ts::cast(from, type);
    ts::record(from, to);
    if (ts::somebody_captures()) {
      for (const at::Tensor& each : to) ts::made_in_capture(each);
    }
    // Nothing below may fail: a failed call must not make handles.
    for (int64_t i = 0; i < count; ++i) casts[i] = nullptr;
    for (size_t i = 0; i < to.size(); ++i) casts[index[i]] = ts::to_handle(std::move(to[i]));
  });
}
