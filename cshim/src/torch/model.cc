// Compiled models of AOTInductor. LibTorch's own package loader is not used: it unpacks an archive
// without limits, and waits on the host while all of a model's instances are busy.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner.h>
#include <torch/library.h>

#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torch/model_weights.h"
#include "torch/tensor.h"
#include "torchstream.h"

namespace {

using torch::inductor::AOTIModelContainerRunner;
using Tensors = std::vector<at::Tensor>;

// Makes a GPU the current device until the end of the block; does nothing for the CPU. LibTorch's
// runner sets the current device and does not restore it.
class OnDevice {
 public:
  explicit OnDevice(c10::Device device) {
    if (device.is_cuda()) scope_.emplace(device.index());
  }

 private:
  std::optional<ts::DeviceScope> scope_;
};

// Whether the code of a loaded library can use tensors of others as its weights. PyTorch before 2.8
// compiled libraries that cannot.
bool takes_weights(const std::string& library) {
  const std::unique_ptr<void, int (*)(void*)> loaded(
      dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD), &dlclose);
  if (loaded == nullptr) return false;
  for (const char* name :
       {"UpdateUserManagedConstantBuffer", "SwapConstantBuffer", "FreeInactiveConstantBuffer"}) {
    const std::string symbol = std::string("AOTInductorModelContainer") + name;
    if (dlsym(loaded.get(), symbol.c_str()) == nullptr) return false;
  }
  return true;
}

}  // namespace

struct ts_model : std::enable_shared_from_this<ts_model> {
  // other: another instance of the same library, to share the weights with, or nullptr. After an
  // exception the destructor runs, because the other constructor has ended.
  ts_model(std::string library, std::string kernels, c10::Device device, const ts_model* other)
      : ts_model(std::move(library), std::move(kernels), device) {
    const OnDevice scope(device);
    const auto& makers = torch::inductor::getAOTIModelRunnerRegistry();
    const auto maker = makers.find(device.is_cuda() ? "cuda" : "cpu");
    ts::require(maker != makers.end(), "this LibTorch runs no compiled models on that device");
    runner_ = maker->second(library_, 1, device.str(), kernels_, true);
    const std::vector<std::string> structure = runner_->get_call_spec();
    ts::require(structure.size() == 2, "the library does not describe its arguments and results");
    arguments_ = structure[0];
    results_ = structure[1];
    if (device.is_cuda()) anchor_ = at::empty({1}, at::device(device).dtype(at::kByte));
    weights_ = other != nullptr ? other->weights_ : load_weights();
    if (!weights_->all_fixed()) share_weights();
  }
  ~ts_model() {
    const OnDevice scope(device_);
    runner_.reset();
    set_storage(nothing_);
  }
  ts_model(const ts_model&) = delete;
  ts_model& operator=(const ts_model&) = delete;

  // Makes another instance, with the same weights.
  std::shared_ptr<ts_model> another() const {
    return std::make_shared<ts_model>(library_, kernels_, device_, this);
  }

  c10::Device device() const { return device_; }
  const std::string& arguments() const { return arguments_; }
  const std::string& results() const { return results_; }
  ts::ModelWeights& weights() const { return *weights_; }

  Tensors run(const Tensors& inputs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const OnDevice scope(device_);
    const c10::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!device_.is_cuda()) return runner_->run(inputs);
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    if (ts::somebody_captures()) hold_in_capture(stream);
    if (set_ != nullptr) set_->read_on(stream);
    return runner_->run(inputs, stream.stream());
  }

  // Makes later runs use the model's current weights. Waits for a call that uses the instance.
  void refresh() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const OnDevice scope(device_);
    const auto next = weights_->current();
    set_storage(next->memory());
    ts::Constants none;
    runner_->update_constant_buffer(none, false, false, true);  // reads the addresses again
    set_ = next;
  }

  // Waits for a call that uses the instance.
  void wait() { const std::lock_guard<std::mutex> lock(mutex_); }

 private:
  ts_model(std::string library, std::string kernels, c10::Device device)
      : library_(std::move(library)), kernels_(std::move(kernels)), device_(device) {}

  std::shared_ptr<ts::ModelWeights> load_weights() {
    const auto own = runner_->extract_constants_map(false);
    const auto names = runner_->getConstantNamesToOriginalFQNs();
    // The names include weights that the model computes from others. The map does not.
    if (names.size() != own.size()) {
      throw ts::Failure(TS_ERROR_UNSUPPORTED,
                        "the model computes weights when it runs first: export it without "
                        "aot_inductor.use_runtime_constant_folding");
    }
    const c10::NoGradGuard no_grad;
    return std::make_shared<ts::ModelWeights>(own, names, device_, takes_weights(library_));
  }

  // Makes the instance read the model's weights, and frees the ones that its container has loaded.
  // LibTorch frees a container's buffer only while it is inactive, and frees fixed weights with it.
  //
  // Code that PyTorch 2.11 has compiled never frees its references to the tensors that it is given.
  // So an instance gives it one tensor for each weight, whose storage it then replaces.
  void share_weights() {
    nothing_ = at::empty({0}, at::device(device_).dtype(at::kByte));
    set_ = weights_->current();
    for (const ts::Weight& weight : weights_->list()) {
      if (!weight.fixed) tensors_.emplace(weight.constant, weights_->view(*set_, weight));
    }
    if (!weights_->none_fixed()) {
      runner_->update_constant_buffer(tensors_, false, false, true);
      return;
    }
    runner_->update_constant_buffer(tensors_, true, false, true);
    runner_->swap_constant_buffer();
    {
      const auto turn = ts::wait_for_no_capture();  // of cudaFree
      runner_->free_inactive_constant_buffer();
    }
    runner_->update_constant_buffer(tensors_, true, false, true);
    runner_->swap_constant_buffer();
  }

  void set_storage(const at::Tensor& memory) {
    for (auto& [constant, tensor] : tensors_) {
      tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(memory.storage());
    }
  }

  // Makes a graph that is being captured on the stream keep this instance: the graph's kernels are
  // its code.
  void hold_in_capture(c10::cuda::CUDAStream stream) {
    const auto keep = [self = shared_from_this()](void*) {};
    ts::hold_in_capture(at::from_blob(anchor_.data_ptr(), {1}, keep, anchor_.options()), stream);
  }

  const std::string library_;
  const std::string kernels_;
  const c10::Device device_;
  std::mutex mutex_;
  at::Tensor anchor_;  // memory for hold_in_capture; undefined on the CPU
  std::shared_ptr<ts::ModelWeights> weights_;
  std::shared_ptr<ts::WeightSet> set_;  // nullptr if all weights are fixed
  at::Tensor nothing_;                  // the storage of tensors_ at the end
  ts::Constants tensors_;               // what the runner reads: views of set_
  std::unique_ptr<AOTIModelContainerRunner> runner_;
  std::string arguments_;
  std::string results_;
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

ts_model* add(std::shared_ptr<ts_model> made) {
  ts_model* const address = made.get();
  const std::lock_guard<std::mutex> lock(models().mutex);
  models().all.emplace(address_of(address), std::move(made));
  return address;
}

std::shared_ptr<ts_model> model_at(int64_t address) {
  const std::lock_guard<std::mutex> lock(models().mutex);
  const auto found = models().all.find(address);
  require(found != models().all.end(), "the model is closed");
  return found->second;
}

// Returns the instances of a model.
std::vector<std::shared_ptr<ts_model>> instances_of(const ModelWeights& weights) {
  std::vector<std::shared_ptr<ts_model>> found;
  const std::lock_guard<std::mutex> lock(models().mutex);
  for (const auto& [address, model] : models().all) {
    if (&model->weights() == &weights) found.push_back(model);
  }
  return found;
}

Tensors run_model(int64_t address, at::TensorList inputs) {
  return model_at(address)->run(inputs.vec());
}

at::Tensor read_weight(int64_t address, int64_t place) {
  const auto model = model_at(address);
  const auto& list = model->weights().list();
  require(place >= 0 && static_cast<size_t>(place) < list.size(), "the model has no such weight");
  const Weight& weight = list[place];
  require(!weight.fixed, "the weight cannot be read");
  const c10::NoGradGuard no_grad;
  const auto set = model->weights().current();
  const at::Tensor value = model->weights().view(*set, weight);
  if (value.is_cuda()) set->read_on(c10::cuda::getCurrentCUDAStream(value.get_device()));
  return value.clone();
}

// PyTorch's generated code checks its inputs only if this variable is set when it first runs. It
// would read beyond the memory of a smaller input.
void check_inputs() {
  static const int once = setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  require(once == 0, "the environment variable AOTI_RUNTIME_CHECK_INPUTS cannot be set");
}

TORCH_LIBRARY(torchstream, library) {
  library.def("run_model(int model, Tensor[] inputs) -> Tensor[]", run_model);
  library.def("read_weight(int model, int place) -> Tensor", read_weight);
}

}  // namespace
}  // namespace ts

ts_error* ts_model_open(const char* library, const char* kernels, int32_t device,
                        ts_model** model) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(library != nullptr, "library is NULL");
    ts::require(kernels != nullptr, "kernels is NULL");
    ts::require(model != nullptr, "model is NULL");
    const c10::Device on = ts::checked_device(device);
    ts::refuse_in_capture("loading a model");
    ts::check_inputs();
    *model = ts::add(std::make_shared<ts_model>(library, kernels, on, nullptr));
  });
}

ts_error* ts_model_add_instance(const ts_model* model, ts_model** instance) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(model != nullptr, "model is NULL");
    ts::require(instance != nullptr, "instance is NULL");
    ts::refuse_in_capture("loading a model");
    const std::lock_guard<std::mutex> turn(model->weights().replacing());
    *instance = ts::add(model->another());
  });
}

void ts_model_free(ts_model* model) {
  ts::enter_thread();
  std::shared_ptr<ts_model> last;
  {
    const std::lock_guard<std::mutex> lock(ts::models().mutex);
    const auto found = ts::models().all.find(ts::address_of(model));
    if (found == ts::models().all.end()) return;
    last = std::move(found->second);
    ts::models().all.erase(found);
  }
  last->wait();
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

ts_error* ts_model_get_weight(const ts_model* model, int64_t place, ts_model_weight* weight) {
  return ts::guard(__func__, [&] {
    ts::require(model != nullptr, "model is NULL");
    ts::require(weight != nullptr, "weight is NULL");
    const auto& list = model->weights().list();
    *weight = {};
    weight->count = static_cast<int64_t>(list.size());
    if (place < 0 || place >= weight->count) return;
    const ts::Weight& found = list[place];
    weight->name = found.name.c_str();
    weight->sizes = found.sizes.data();
    weight->ndim = static_cast<int32_t>(found.sizes.size());
    weight->dtype = static_cast<int32_t>(found.dtype);
    weight->fixed = found.fixed;
  });
}

ts_error* ts_model_set_weights(ts_model* model, const int64_t* places, ts_tensor* const* values,
                               int64_t count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(model != nullptr, "model is NULL");
    ts::require(count >= 0, "count is negative");
    ts::require(count == 0 || (places != nullptr && values != nullptr), "places or values is NULL");
    ts::refuse_in_capture("replacing a model's weights");
    ts::require(!model->weights().all_fixed(), "the model has no weights that can be replaced");
    const OnDevice scope(model->device());
    const c10::NoGradGuard no_grad;
    std::vector<at::Tensor> all;
    for (int64_t i = 0; i < count; ++i) all.push_back(ts::value_of(values[i]));
    ts::ModelWeights& weights = model->weights();
    const std::lock_guard<std::mutex> turn(weights.replacing());
    const auto last = weights.replace({places, places + count}, all);
    for (const auto& instance : ts::instances_of(weights)) instance->refresh();
    last->retire();
  });
}
