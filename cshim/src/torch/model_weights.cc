#include "torch/model_weights.h"

#include <ATen/Functions.h>
#include <ATen/MemoryOverlap.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/heap.h"
#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/order.h"
#include "cuda/same_stream.h"
#include "cuda/sanitizer.h"
#include "cuda/storage.h"
#include "torch/tensor.h"

namespace ts {
namespace {

// Inductor aligns weights to this number of bytes.
constexpr size_t kAlignment = 64;

size_t aligned(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// Whether a tensor's values can be copied into other memory, and replaced. oneDNN's layouts are
// opaque. A model for a GPU may have small weights on the CPU.
bool can_be_copied(const at::Tensor& tensor, c10::Device device) {
  return tensor.layout() == at::kStrided && tensor.device() == device &&
         at::has_internal_overlap(tensor) != at::MemOverlap::Yes;
}

// Logs what the current stream does with a tensor of the GPU. Tensors elsewhere are not logged. The
// entries are for the log of all threads, because the work of other threads depends on them.
void log_copy(const at::Tensor& tensor, c10::Device gpu, bool write) {
  if (!gpu.is_cuda() || tensor.device() != gpu) return;
  const LoggedFor library(LoggedFor::Doer::kLibrary);
  log_access(tensor, c10::cuda::getCurrentCUDAStream(gpu.index()), write);
}

// Throws an error with the weight's name if a tensor cannot replace the weight.
void require_value(const Weight& weight, const at::Tensor& value) {
  const std::string name = "weight " + weight.name;
  require(!weight.fixed, (name + " cannot be replaced").c_str());
  require(value.layout() == at::kStrided, (name + ": the new tensor is not dense").c_str());
  require(value.sizes() == at::IntArrayRef(weight.sizes), (name + " has another shape").c_str());
}

}  // namespace

void WeightSet::read_on(c10::cuda::CUDAStream stream) {
  if (somebody_captures() && in_capture(stream)) {
    hold_in_capture(memory_, stream);
    stale_in_capture(retired_, stream);
    return;
  }
  const LoggedFor library(LoggedFor::Doer::kLibrary);
  log_access(memory_, stream, false);
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto same = [&](c10::cuda::CUDAStream other) { return same_stream(stream, other); };
  if (std::any_of(readers_.begin(), readers_.end(), same)) return;
  log_use(memory_, stream);
  record_use(storage_of(memory_), stream);
  readers_.push_back(stream);
}

ModelWeights::ModelWeights(const Constants& own,
                           const std::unordered_map<std::string, std::string>& constants,
                           c10::Device device, bool code_takes_tensors)
    : device_(device) {
  for (const auto& [constant, name] : constants) {
    const at::Tensor& tensor = own.at(name);
    Weight weight{name, constant, tensor.scalar_type(), tensor.sizes().vec(), {}, 0, true};
    weight.fixed = !code_takes_tensors || !can_be_copied(tensor, device);
    if (weight.fixed) {
      ++fixed_;
    } else {
      weight.strides = tensor.strides().vec();
      weight.offset = static_cast<int64_t>(bytes_ / tensor.element_size());
      bytes_ += aligned(checked_extent(weight.sizes, weight.strides.data(), weight.dtype));
    }
    list_.push_back(std::move(weight));
  }
  std::sort(list_.begin(), list_.end(),
            [](const Weight& a, const Weight& b) { return a.name < b.name; });
  // LibTorch has copied its weights to the GPU on the default stream, perhaps without a wait.
  if (device.is_cuda()) {
    order_after(c10::cuda::getCurrentCUDAStream(device.index()),
                c10::cuda::getDefaultCUDAStream(device.index()));
  }
  auto first = new_set();
  for (const Weight& weight : list_) {
    if (!weight.fixed) view(*first, weight).copy_(own.at(weight.name));
  }
  publish(std::move(first));
}

std::shared_ptr<WeightSet> ModelWeights::new_set() const {
  const auto options = at::device(device_).dtype(at::kByte);
  const size_t bytes = device_.is_cuda() ? bytes_ : std::max(bytes_, kMappedBlock);
  return std::make_shared<WeightSet>(at::empty({static_cast<int64_t>(bytes)}, options));
}

at::Tensor ModelWeights::view(const WeightSet& set, const Weight& weight) const {
  at::Tensor view = at::empty({0}, at::device(device_).dtype(weight.dtype));
  return view.set_(set.memory().storage(), weight.offset, weight.sizes, weight.strides);
}

std::shared_ptr<WeightSet> ModelWeights::current() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return current_;
}

std::shared_ptr<WeightSet> ModelWeights::publish(std::shared_ptr<WeightSet> next) {
  log_copy(next->memory(), device_, true);
  if (device_.is_cuda()) {
    const LoggedFor library(LoggedFor::Doer::kLibrary);
    const auto stream = c10::cuda::getCurrentCUDAStream(device_.index());
    stream.synchronize();
  }
  const std::lock_guard<std::mutex> lock(mutex_);
  return std::exchange(current_, std::move(next));
}

std::shared_ptr<WeightSet> ModelWeights::replace(const std::vector<int64_t>& places,
                                                 const std::vector<at::Tensor>& values) {
  const std::shared_ptr<WeightSet> last = current();
  std::vector<at::Tensor> from(list_.size());
  for (size_t i = 0; i < places.size(); ++i) {
    require(places[i] >= 0 && static_cast<size_t>(places[i]) < list_.size(),
            "the model has no such weight");
    const Weight& weight = list_[places[i]];
    require_value(weight, values[i]);
    require(!from[places[i]].defined(), ("weight " + weight.name + " has two new values").c_str());
    from[places[i]] = values[i];
  }
  auto next = new_set();
  for (size_t i = 0; i < list_.size(); ++i) {
    if (list_[i].fixed) continue;
    if (!from[i].defined()) from[i] = view(*last, list_[i]);
    // A model on the CPU reads the copy at once.
    view(*next, list_[i]).copy_(from[i], /*non_blocking=*/device_.is_cuda());
    log_copy(from[i], device_, false);
  }
  return publish(std::move(next));
}

}  // namespace ts
