// Compiled models of AOTInductor. LibTorch's own package loader is not used: it unpacks an archive
// without limits, and waits on the host while all of a model's instances are busy.
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/GradMode.h>
#include <c10/cuda/CUDAStream.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/error.h"
#include "cuda/device.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace {

using torch::inductor::AOTIModelContainerRunner;
using torch::inductor::TensorConstantMap;

// A constant that can be replaced.
struct Constant {
  std::string name;  // in the exported module
  std::string key;   // in the library
};

using Tensors = std::vector<at::Tensor>;

bool same_layout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.device() == b.device() && a.sizes() == b.sizes() &&
         a.strides() == b.strides();
}

std::string layout_of(const at::Tensor& tensor) {
  std::ostringstream text;
  text << tensor.scalar_type() << " " << tensor.sizes() << ", strides " << tensor.strides()
       << ", on " << tensor.device();
  return text.str();
}

}  // namespace

struct ts_model {
  ts_model(const char* library, const char* kernels, c10::Device device) : device_(device) {
    const auto& makers = torch::inductor::getAOTIModelRunnerRegistry();
    const auto maker = makers.find(device.is_cuda() ? "cuda" : "cpu");
    ts::require(maker != makers.end(), "this LibTorch runs no compiled models on that device");
    runner_ = maker->second(library, 1, device.str(), kernels, true);
    const std::vector<std::string> structure = runner_->get_call_spec();
    ts::require(structure.size() == 2, "the library does not describe its arguments and results");
    arguments_ = structure[0];
    results_ = structure[1];
    read_constants();
  }

  const std::string& arguments() const { return arguments_; }
  const std::string& results() const { return results_; }
  const std::vector<Constant>& constants() const { return constants_; }

  Tensors constant_values() {
    const std::lock_guard<std::mutex> lock(mutex_);
    return *values_;
  }

  void set_constants(Tensors values) {
    const std::lock_guard<std::mutex> lock(mutex_);
    check_constants(values);
    auto kept = std::make_unique<Tensors>(std::move(values));
    if (owns_constants_) {
      // The library's own constants are in the first of two buffers. This frees them, and makes the
      // first buffer the active one again: a run requires that it is ready, active or not.
      put(*kept, true);
      runner_->swap_constant_buffer();
      runner_->free_inactive_constant_buffer();
      put(*kept, true);
      runner_->swap_constant_buffer();
      owns_constants_ = false;
    } else {
      put(*kept, false);
    }
    values_ = std::move(kept);
    if (folds_) {
      const c10::NoGradGuard no_grad;
      runner_->run_const_fold(false, reinterpret_cast<AOTInductorStreamHandle>(stream()));
    }
    if (device_.is_cuda()) c10::cuda::getCurrentCUDAStream(device_.index()).synchronize();
  }

  Tensors run(const Tensors& inputs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const c10::NoGradGuard no_grad;
    return runner_->run(inputs, stream());
  }

 private:
  // NULL on the CPU.
  void* stream() const {
    return device_.is_cuda() ? c10::cuda::getCurrentCUDAStream(device_.index()).stream() : nullptr;
  }

  void read_constants() {
    const auto values = runner_->extract_constants_map(false);
    std::map<std::string, std::string> keys;  // by name, so that the order is always the same
    for (auto& [key, name] : runner_->getConstantNamesToOriginalFQNs()) {
      if (values.count(name) != 0) keys.emplace(name, key);
      folds_ = folds_ || values.count(name) == 0;
    }
    values_ = std::make_unique<Tensors>();
    for (const auto& [name, key] : keys) {
      constants_.push_back({name, key});
      values_->push_back(values.at(name));
    }
  }

  void check_constants(const Tensors& values) const {
    for (size_t i = 0; i < values.size(); ++i) {
      if (same_layout(values[i], (*values_)[i])) continue;
      throw ts::Failure(TS_ERROR_INVALID_ARGUMENT,
                        "constant " + constants_[i].name + " is " + layout_of((*values_)[i]) +
                            "; the replacement is " + layout_of(values[i]));
    }
  }

  // Makes a buffer refer to the tensors, which must stay where they are.
  void put(Tensors& values, bool inactive) {
    TensorConstantMap map;
    for (size_t i = 0; i < values.size(); ++i) map.emplace(constants_[i].key, &values[i]);
    runner_->update_constant_buffer(map, inactive, true, true);
  }

  const c10::Device device_;
  std::mutex mutex_;
  std::unique_ptr<Tensors> values_;  // the active buffer refers to them, so they end after runner_
  std::unique_ptr<AOTIModelContainerRunner> runner_;
  std::string arguments_;
  std::string results_;
  std::vector<Constant> constants_;
  bool owns_constants_ = true;  // the constants in use are the library's own
  bool folds_ = false;          // the model has constants that it computes from others
};

namespace ts {
namespace {

// The instances, so that the operator never follows an address that is none.
struct Models {
  std::mutex mutex;
  std::map<int64_t, std::shared_ptr<ts_model>> all;
};

Models& models() {
  static auto* const all = new Models;  // used by calls while the process ends
  return *all;
}

int64_t address_of(const ts_model* model) { return reinterpret_cast<int64_t>(model); }

// constants: only for the capture of a graph, which holds an operator's operands.
Tensors run_model(int64_t address, at::TensorList /*constants*/, at::TensorList inputs) {
  std::shared_ptr<ts_model> model;
  {
    const std::lock_guard<std::mutex> lock(models().mutex);
    const auto found = models().all.find(address);
    require(found != models().all.end(), "the model is closed");
    model = found->second;
  }
  return model->run(inputs.vec());
}

// PyTorch's generated code checks its inputs only if this variable is set when it first runs. It
// would read beyond the memory of a smaller input.
void check_inputs() { setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1); }

TORCH_LIBRARY(torchstream, library) {
  library.def("run_model(int model, Tensor[] constants, Tensor[] inputs) -> Tensor[]", run_model);
}

}  // namespace
}  // namespace ts

ts_error* ts_model_open(const char* library, const char* kernels, int32_t device,
                        ts_model** model) {
  return ts::guard(__func__, [&] {
    ts::require(library != nullptr, "library is NULL");
    ts::require(kernels != nullptr, "kernels is NULL");
    ts::require(model != nullptr, "model is NULL");
    const c10::Device on = ts::checked_device(device);
    ts::check_inputs();
    auto made = std::make_shared<ts_model>(library, kernels, on);
    const std::lock_guard<std::mutex> lock(ts::models().mutex);
    *model = made.get();
    ts::models().all.emplace(ts::address_of(made.get()), std::move(made));
  });
}

void ts_model_free(ts_model* model) {
  std::shared_ptr<ts_model> last;
  const std::lock_guard<std::mutex> lock(ts::models().mutex);
  const auto found = ts::models().all.find(ts::address_of(model));
  if (found == ts::models().all.end()) return;
  last = std::move(found->second);
  ts::models().all.erase(found);
}

ts_error* ts_model_get_structure(const ts_model* model, const char** arguments,
                                 const char** results) {
  return ts::guard(__func__, [&] {
    ts::require(model != nullptr, "model is NULL");
    ts::require(arguments != nullptr && results != nullptr, "arguments or results is NULL");
    *arguments = model->arguments().c_str();
    *results = model->results().c_str();
  });
}

int64_t ts_model_constant_count(const ts_model* model) {
  return model == nullptr ? 0 : static_cast<int64_t>(model->constants().size());
}

const char* ts_model_constant_name(const ts_model* model, int64_t index) {
  if (index < 0 || index >= ts_model_constant_count(model)) return nullptr;
  return model->constants()[static_cast<size_t>(index)].name.c_str();
}

ts_error* ts_model_get_constants(ts_model* model, ts_tensor** tensors) {
  return ts::guard(__func__, [&] {
    ts::require(model != nullptr, "model is NULL");
    ts::require(tensors != nullptr || model->constants().empty(), "tensors is NULL");
    for (at::Tensor& value : model->constant_values()) *tensors++ = ts::to_handle(std::move(value));
  });
}

ts_error* ts_model_set_constants(ts_model* model, ts_tensor* const* tensors, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::require(model != nullptr, "model is NULL");
    ts::require(count == ts_model_constant_count(model), "count is not the number of constants");
    ts::require(tensors != nullptr || count == 0, "tensors is NULL");
    Tensors values;
    for (int64_t i = 0; i < count; ++i) values.push_back(ts::value_of(tensors[i]));
    model->set_constants(std::move(values));
  });
}
