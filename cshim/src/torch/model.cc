// Compiled models of AOTInductor. LibTorch's own package loader is not used: it unpacks an archive
// without limits, and waits on the host while all of a model's instances are busy.
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/cuda/CUDAStream.h>
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

}  // namespace

struct ts_model : std::enable_shared_from_this<ts_model> {
  ts_model(const char* library, const char* kernels, c10::Device device) : device_(device) {
    const OnDevice scope(device);
    const auto& makers = torch::inductor::getAOTIModelRunnerRegistry();
    const auto maker = makers.find(device.is_cuda() ? "cuda" : "cpu");
    ts::require(maker != makers.end(), "this LibTorch runs no compiled models on that device");
    runner_ = maker->second(library, 1, device.str(), kernels, true);
    const std::vector<std::string> structure = runner_->get_call_spec();
    ts::require(structure.size() == 2, "the library does not describe its arguments and results");
    arguments_ = structure[0];
    results_ = structure[1];
    // The names include weights that the model computes from others. The map does not.
    if (runner_->getConstantNamesToOriginalFQNs().size() !=
        runner_->extract_constants_map(false).size()) {
      throw ts::Failure(TS_ERROR_UNSUPPORTED,
                        "the model computes weights when it runs first: export it without "
                        "aot_inductor.use_runtime_constant_folding");
    }
    if (device.is_cuda()) anchor_ = at::empty({1}, at::device(device).dtype(at::kByte));
  }
  ~ts_model() {
    const OnDevice scope(device_);
    runner_.reset();
  }
  ts_model(const ts_model&) = delete;
  ts_model& operator=(const ts_model&) = delete;

  const std::string& arguments() const { return arguments_; }
  const std::string& results() const { return results_; }

  Tensors run(const Tensors& inputs) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const OnDevice scope(device_);
    const c10::NoGradGuard no_grad;
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (!device_.is_cuda()) return runner_->run(inputs);
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    if (ts::somebody_captures()) hold_in_capture(stream);
    return runner_->run(inputs, stream.stream());
  }

  // Waits for a call that uses the instance.
  void wait() { const std::lock_guard<std::mutex> lock(mutex_); }

 private:
  // Makes a graph that is being captured on the stream keep this instance: the graph's kernels read
  // its weights.
  void hold_in_capture(c10::cuda::CUDAStream stream) {
    const auto keep = [self = shared_from_this()](void*) {};
    ts::hold_in_capture(at::from_blob(anchor_.data_ptr(), {1}, keep, anchor_.options()), stream);
  }

  const c10::Device device_;
  std::mutex mutex_;
  at::Tensor anchor_;  // memory for hold_in_capture; undefined on the CPU
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

Tensors run_model(int64_t address, at::TensorList inputs) {
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
void check_inputs() {
  static const int once = setenv("AOTI_RUNTIME_CHECK_INPUTS", "1", 1);
  require(once == 0, "the environment variable AOTI_RUNTIME_CHECK_INPUTS cannot be set");
}

TORCH_LIBRARY(torchstream, library) {
  library.def("run_model(int model, Tensor[] inputs) -> Tensor[]", run_model);
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
    auto made = std::make_shared<ts_model>(library, kernels, on);
    ts_model* const address = made.get();
    const std::lock_guard<std::mutex> lock(ts::models().mutex);
    ts::models().all.emplace(ts::address_of(address), std::move(made));
    *model = address;
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
