// ts_tensor_batch_norm_relu: the tensors that the kernels of batch_norm.cu support, and backward.
#include "torch/batch_norm.h"

#include <ATen/EmptyTensor.h>
#include <ATen/TensorSubclassLikeUtils.h>
#include <ATen/ops/batch_norm_elemt.h>
#include <ATen/ops/clone.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/native_batch_norm_backward.h>
#include <ATen/ops/sum.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/record_function.h>
#include <c10/core/GradMode.h>
#include <c10/core/MemoryFormat.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <limits>
#include <mutex>
#include <optional>
#include <utility>

#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torch/node.h"
#include "torch/operator.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

using torch::autograd::SavedVariable;
using torch::autograd::variable_list;

constexpr auto kFormat = c10::MemoryFormat::ChannelsLast;
constexpr uintptr_t kVectorBytes = 16;  // the kernels load this much at a time

struct Operands {
  explicit Operands(ts_tensor* const* tensors)
      : x(value_of(tensors[0], "x")),
        weight(value_or_undefined(tensors[1])),
        bias(value_or_undefined(tensors[2])),
        running_mean(value_or_undefined(tensors[3])),
        running_var(value_or_undefined(tensors[4])),
        residual(value_or_undefined(tensors[5])) {}

  const at::Tensor x, weight, bias, running_mean, running_var, residual;
};

// Allocates memory that a step computes with and frees when it ends.
c10::DataPtr allocate(size_t floats) {
  return c10::cuda::CUDACachingAllocator::get()->allocate(floats * sizeof(float));
}

at::Tensor empty(at::IntArrayRef sizes, at::ScalarType type,
                 std::optional<c10::MemoryFormat> format = std::nullopt) {
  return at::Tensor(at::detail::empty_generic(sizes, c10::cuda::CUDACachingAllocator::get(),
                                              c10::DispatchKeySet(c10::DispatchKey::CUDA), type,
                                              format));
}

cudaStream_t current_stream(const at::Tensor& tensor) {
  return c10::cuda::getCurrentCUDAStream(tensor.device().index()).stream();
}

std::optional<norm::Element> element_of(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
      return norm::Element::kFloat32;
    case at::kHalf:
      return norm::Element::kFloat16;
    case at::kBFloat16:
      return norm::Element::kBFloat16;
    default:
      return std::nullopt;
  }
}

// Whether the memory is rows of channels, the layout that the kernels load.
bool is_rows(const at::Tensor& tensor) {
  return tensor.is_contiguous(kFormat) &&
         reinterpret_cast<uintptr_t>(tensor.const_data_ptr()) % kVectorBytes == 0;
}

// Whether the tensor is on a GPU and is plain memory.
bool is_plain(const at::Tensor& tensor) {
  return tensor.is_cuda() && tensor.layout() == at::kStrided && !at::isTensorSubclassLike(tensor) &&
         !tensor._is_zerotensor() && !tensor._fw_grad(/*level=*/0).defined();
}

bool is_vector(const at::Tensor& tensor, const at::Tensor& of) {
  return is_plain(tensor) && tensor.scalar_type() == at::kFloat && tensor.device() == of.device() &&
         tensor.dim() == 1 && tensor.size(0) == of.size(1) && tensor.is_contiguous();
}

bool is_vector_or_absent(const at::Tensor& tensor, const at::Tensor& of) {
  return !tensor.defined() || is_vector(tensor, of);
}

// Whether the kernels support these tensors.
bool are_taken(const Operands& of) {
  const at::Tensor& x = of.x;
  if (!is_plain(x) || x.dim() != 4 || !element_of(x.scalar_type()) || x.numel() == 0) return false;
  const int64_t channels = x.size(1);
  if (channels * static_cast<int64_t>(x.element_size()) % static_cast<int64_t>(kVectorBytes) != 0 ||
      channels > std::numeric_limits<int32_t>::max() || x.numel() == channels || !is_rows(x)) {
    return false;
  }
  if (!is_vector_or_absent(of.weight, x) || !is_vector_or_absent(of.bias, x) ||
      !is_vector_or_absent(of.running_mean, x) || !is_vector_or_absent(of.running_var, x) ||
      of.running_mean.defined() != of.running_var.defined()) {
    return false;
  }
  const at::Tensor& residual = of.residual;
  return !residual.defined() ||
         (is_plain(residual) && residual.scalar_type() == x.scalar_type() &&
          residual.device() == x.device() && residual.sizes() == x.sizes() && is_rows(residual));
}

// Whether nothing else refers to the gradient or its memory, so that a node may overwrite it.
bool is_own(const at::Tensor& gradient) {
  return gradient.use_count() == 1 && gradient.storage().use_count() == 1;
}

norm::Plan plan_of(const at::Tensor& x) {
  const int64_t channels = x.size(1);
  return norm::plan(x.numel() / channels, static_cast<int32_t>(channels));
}

class BatchNormReLUBackward final : public torch::autograd::Node {
 public:
  std::string name() const override { return "BatchNormReLUBackward"; }

  // Called when y has this node as its history.
  void save(const Operands& of, const at::Tensor& y, double eps, c10::DataPtr saved) {
    x_ = SavedVariable(of.x, /*is_output=*/false);
    has_residual_ = of.residual.defined();
    if (has_residual_) y_ = SavedVariable(y, /*is_output=*/true);
    if (of.weight.defined()) weight_ = SavedVariable(of.weight, /*is_output=*/false);
    eps_ = eps;
    saved_ = std::move(saved);
  }

  variable_list apply(variable_list&& gradients) override {
    const std::lock_guard<std::mutex> lock(mutex_);  // with release_variables
    variable_list results(num_outputs());
    at::Tensor dy = std::move(gradients.front());
    if (!dy.defined()) return results;
    const at::Tensor x = x_.unpack();
    at::Tensor y;
    if (has_residual_) y = y_.unpack(getptr());
    TORCH_CHECK(dy.sizes() == x.sizes() && dy.scalar_type() == x.scalar_type(),
                "BatchNormReLUBackward: the gradient is ", dy.toString(), dy.sizes(), " and x is ",
                x.toString(), x.sizes());
    const DeviceScope scope(x.device().index());
    variable_list all =
        at::GradMode::is_enabled() ? compute_recorded(dy, x, y) : compute(std::move(dy), x, y);
    for (size_t i = 0; i < results.size(); ++i) {
      if (next_edge(i).is_valid()) results[i] = std::move(all[i]);
    }
    return results;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    x_.reset_data();
    y_.reset_data();
    weight_.reset_data();
    saved_.clear();
  }

 private:
  // Returns the gradients of x, weight, bias and residual.
  variable_list compute(at::Tensor dy, const at::Tensor& x, const at::Tensor& y) const {
    if (!is_rows(dy)) dy = dy.clone(kFormat);
    const int64_t channels = x.size(1);
    // The residual's gradient, or without a residual the gradient of x, may overwrite the gradient
    // of y element by element.
    at::Tensor first = is_own(dy) ? dy : empty(x.sizes(), x.scalar_type(), kFormat);
    at::Tensor dx = has_residual_ ? empty(x.sizes(), x.scalar_type(), kFormat) : std::move(first);
    at::Tensor dresidual = std::move(first);
    at::Tensor dweight = empty({channels}, at::kFloat);
    at::Tensor dbias = empty({channels}, at::kFloat);
    norm::Backward pass{};
    pass.plan = plan_of(x);
    const c10::DataPtr partials = allocate(pass.plan.partials());
    pass.dy = dy.const_data_ptr();
    pass.x = x.const_data_ptr();
    pass.saved = static_cast<const float*>(saved_.get());
    pass.dx = dx.mutable_data_ptr();
    pass.dweight = dweight.mutable_data_ptr<float>();
    pass.dbias = dbias.mutable_data_ptr<float>();
    pass.partials = static_cast<float*>(partials.get());
    if (has_residual_) {
      pass.y = y.const_data_ptr();
      pass.dresidual = dresidual.mutable_data_ptr();
    }
    C10_CUDA_CHECK(norm::launch(*element_of(x.scalar_type()), pass, current_stream(x)));
    return {std::move(dx), std::move(dweight), std::move(dbias), std::move(dresidual)};
  }

  // Does compute with LibTorch's operators, for double backward. Those gradients depend on the
  // weight itself, which must still have the values of the forward pass.
  variable_list compute_recorded(const at::Tensor& dy, const at::Tensor& x,
                                 const at::Tensor& y) const {
    const at::Tensor weight = weight_.unpack();
    at::Tensor values = y;
    at::Tensor saved;
    {
      const c10::NoGradGuard no_grad;
      saved = at::from_blob(saved_.get(), {norm::kSavedCount, x.size(1)},
                            at::TensorOptions(x.device()).dtype(at::kFloat))
                  .clone();
      if (!has_residual_) {
        values = at::batch_norm_elemt(x, saved[norm::kWeight], saved[norm::kBias],
                                      saved[norm::kMean], saved[norm::kInverse], eps_);
      }
    }
    const at::Tensor cut = at::threshold_backward(dy, values.detach(), 0);
    auto [dx, dweight, dbias] = at::native_batch_norm_backward(
        cut, x, weight, {}, {}, saved[norm::kMean], saved[norm::kInverse], /*train=*/true, eps_,
        {true, weight.defined(), weight.defined()});
    // The operator returns no gradient for a bias without a weight.
    if (!weight.defined()) dbias = at::sum(cut, {0, 2, 3}, /*keepdim=*/false, at::kFloat);
    return {std::move(dx), std::move(dweight), std::move(dbias), cut};
  }

  // Guarded by mutex_ after save.
  SavedVariable x_;
  SavedVariable y_;       // with a residual; without one, x tells where y is 0
  SavedVariable weight_;  // for compute_recorded
  c10::DataPtr saved_;    // norm::Saved
  double eps_ = 0;
  bool has_residual_ = false;
};

bool requires_grad(const Operands& of) {
  const auto wanted = [](const at::Tensor& t) { return t.defined() && t.requires_grad(); };
  return at::GradMode::is_enabled() &&
         (wanted(of.x) || wanted(of.weight) || wanted(of.bias) || wanted(of.residual));
}

at::Tensor batch_norm_relu(const Operands& of, double momentum, double eps) {
  // A recording of operators has an event for this call, as for LibTorch's operators.
  std::optional<at::RecordFunction> event;
  if (auto recorders = at::getStepCallbacksUnlessEmpty(at::RecordScope::FUNCTION)) {
    event.emplace(std::move(*recorders));
    event->before("torchstream::batch_norm_relu");
  }
  const at::Tensor& x = of.x;
  const DeviceScope scope(x.device().index());
  norm::Forward pass{};
  pass.plan = plan_of(x);
  at::Tensor y = empty(x.sizes(), x.scalar_type(), kFormat);
  c10::DataPtr saved = allocate(norm::kSavedCount * static_cast<size_t>(pass.plan.channels));
  const c10::DataPtr partials = allocate(pass.plan.partials());
  pass.x = x.const_data_ptr();
  if (of.residual.defined()) pass.residual = of.residual.const_data_ptr();
  if (of.weight.defined()) pass.weight = of.weight.const_data_ptr<float>();
  if (of.bias.defined()) pass.bias = of.bias.const_data_ptr<float>();
  if (of.running_mean.defined()) {
    pass.running_mean = of.running_mean.mutable_data_ptr<float>();
    pass.running_var = of.running_var.mutable_data_ptr<float>();
  }
  pass.momentum = static_cast<float>(momentum);
  pass.eps = static_cast<float>(eps);
  pass.y = y.mutable_data_ptr();
  pass.saved = static_cast<float*>(saved.get());
  pass.partials = static_cast<float*>(partials.get());
  C10_CUDA_CHECK(norm::launch(*element_of(x.scalar_type()), pass, current_stream(x)));
  if (!requires_grad(of)) return y;
  auto node = make_node<BatchNormReLUBackward>();
  if (of.residual.defined()) {
    node->set_next_edges(torch::autograd::collect_next_edges(x, of.weight, of.bias, of.residual));
  } else {
    node->set_next_edges(torch::autograd::collect_next_edges(x, of.weight, of.bias));
  }
  torch::autograd::set_history(y, node);
  node->save(of, y, eps, std::move(saved));
  return y;
}

void tell_capture(const Operands& of) {
  for (const at::Tensor* each :
       {&of.x, &of.weight, &of.bias, &of.running_mean, &of.running_var, &of.residual}) {
    if (each->defined()) hold_in_capture(*each);
  }
}

}  // namespace
}  // namespace ts

ts_error* ts_tensor_batch_norm_relu(ts_tensor* const* tensors, double momentum, double eps,
                                    int32_t flags, ts_tensor** result) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(tensors != nullptr, "tensors is NULL");
    ts::require(result != nullptr, "result is NULL");
    ts::check_flags(flags);
    const ts::Operands operands(tensors);
    std::optional<c10::NoGradGuard> no_grad;
    if ((flags & TS_OPERATOR_FLAG_NO_GRAD) != 0) no_grad.emplace();
    // For a tensor that backward cannot save, LibTorch's operators report the error.
    const auto is_inference = [](const at::Tensor& t) { return t.defined() && t.is_inference(); };
    const bool unsaved =
        (is_inference(operands.x) || is_inference(operands.weight)) && ts::requires_grad(operands);
    if (unsaved || !ts::are_taken(operands)) {
      *result = nullptr;
      return;
    }
    const bool captured = ts::somebody_captures();
    if (captured) ts::tell_capture(operands);
    const ts::CaptureWatch watch("torchstream::batch_norm_relu");
    at::Tensor y = ts::batch_norm_relu(operands, momentum, eps);
    if (captured) ts::made_in_capture(y);
    *result = ts::to_handle(std::move(y));
  });
}
