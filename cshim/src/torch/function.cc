// Functions of the library's caller as nodes of the autograd graph.
#include <ATen/ops/view_as.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/saved_variable.h>

#include <algorithm>
#include <mutex>
#include <string>

#include "base/thread.h"
#include "cuda/capture.h"
#include "torch/callback.h"
#include "torch/node.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace ts {
namespace {

using torch::autograd::variable_list;

class FunctionNode final : public torch::autograd::Node {
 public:
  FunctionNode(std::string name, std::shared_ptr<Callback> backward)
      : name_(std::move(name)), backward_(std::move(backward)) {}

  std::string name() const override { return name_; }

  // Called once the outputs have this node as their history: a saved output must not own the node.
  void save(const variable_list& tensors) {
    for (const at::Tensor& each : tensors) {
      saved_.emplace_back(each, /*is_output=*/each.grad_fn().get() == this);
    }
  }

  variable_list apply(variable_list&& gradients) override {
    variable_list tensors = std::move(gradients);
    for (size_t i = 0; i < tensors.size(); ++i) {
      if (!tensors[i].defined()) tensors[i] = zeros(i);
    }
    {
      const std::lock_guard<std::mutex> lock(mutex_);  // with release_variables
      for (const auto& each : saved_) tensors.push_back(each.unpack(getptr()));
    }
    variable_list results = (*backward_)(tensors, num_outputs());
    for (size_t i = 0; i < results.size(); ++i) {
      if (!next_edge(i).is_valid()) results[i].reset();
    }
    return results;
  }

  void release_variables() override {
    const std::lock_guard<std::mutex> lock(mutex_);
    for (auto& each : saved_) each.reset_data();
  }

 private:
  // Returns the gradient of an output that nothing used. An output without a gradient gets none.
  at::Tensor zeros(size_t output) const {
    const auto& metadata = input_metadata(output);
    return metadata.was_default_constructed() ? at::Tensor() : metadata.zeros_like();
  }

  const std::string name_;
  const std::shared_ptr<Callback> backward_;
  std::vector<torch::autograd::SavedVariable> saved_;  // guarded by mutex_ after save
};

variable_list values_of(ts_tensor* const* tensors, int64_t count, const char* name) {
  if (count < 0 || (count > 0 && tensors == nullptr)) {
    throw Failure(TS_ERROR_INVALID_ARGUMENT,
                  std::string(name) + ": a negative count, or NULL with a count above 0");
  }
  variable_list values;
  values.reserve(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) values.push_back(value_of(tensors[i], name));
  return values;
}

bool is_one_of(const at::Tensor& tensor, const variable_list& others) {
  return std::any_of(others.begin(), others.end(),
                     [&](const at::Tensor& other) { return other.is_same(tensor); });
}

std::vector<std::optional<at::Tensor>> attach(const ts_function& function,
                                              const std::shared_ptr<Callback>& backward) {
  const variable_list inputs = values_of(function.inputs, function.input_count, "inputs");
  const variable_list outputs = values_of(function.outputs, function.output_count, "outputs");
  const variable_list saved = values_of(function.saved, function.saved_count, "saved");
  require(!outputs.empty(), "there are no outputs");
  require(torch::autograd::any_variable_requires_grad(inputs),
          "no input requires grad: the outputs need no history");
  std::unordered_set<at::TensorImpl*> constant;
  for (size_t i = 0; i < outputs.size(); ++i) {
    require(!outputs[i].requires_grad() || is_one_of(outputs[i], inputs),
            "an output that is no input has a history already");
    if (function.constant != nullptr && function.constant[i]) {
      constant.insert(outputs[i].unsafeGetTensorImpl());
    }
  }
  auto node = make_node<FunctionNode>(function.name, backward);
  node->set_next_edges(torch::autograd::collect_next_edges(inputs));
  node->clear_input_metadata();
  const std::vector<std::optional<at::Tensor>> raw(outputs.begin(), outputs.end());
  auto wrapped = wrap(
      Outputs{inputs, constant, raw}, NodePointer(node),
      [](const variable_list& /*inputs*/, const variable_list& /*tangents*/) -> variable_list {
        throw Failure(TS_ERROR_UNSUPPORTED, "a function of the caller has no forward derivative");
      },
      [](const at::Tensor& tensor) { return tensor.view_as(tensor); }, 0);
  node->save(saved);
  return wrapped;
}

}  // namespace
}  // namespace ts

ts_error* ts_function_attach(ts_function function, ts_tensor** results) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(results != nullptr, "results is NULL");
    ts::require(function.name != nullptr, "name is NULL");
    ts::require(function.backward != nullptr, "backward is NULL");
    const auto backward = std::make_shared<ts::Callback>(function.backward, function.context);
    const auto wrapped = ts::attach(function, backward);
    backward->keep();
    for (const auto& each : wrapped) *results++ = ts::to_handle(*each);
  });
}
