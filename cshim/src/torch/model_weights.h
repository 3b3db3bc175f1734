// The weights of a compiled model. All instances of the model read one block of memory, and a swap
// replaces it by another block. The buffers of LibTorch's containers are no help: each container
// has a copy, and overwrites the inactive one without waiting for the GPU.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

namespace ts {

// The tensors that compiled code uses, by the code's names.
using Constants = std::unordered_map<std::string, at::Tensor>;

// The memory of one set of values.
class WeightSet {
 public:
  explicit WeightSet(at::Tensor memory) : memory_(std::move(memory)) {}
  WeightSet(const WeightSet&) = delete;
  WeightSet& operator=(const WeightSet&) = delete;

  const at::Tensor& memory() const { return memory_; }  // bytes
  // Keeps the memory until the work that is now enqueued on the stream has read it. The stream must
  // exist as long as the set. A captured stream's graph keeps the memory too, and becomes stale
  // when the set is retired.
  void read_on(c10::cuda::CUDAStream stream);
  void retire() { retired_->store(true, std::memory_order_release); }

 private:
  const at::Tensor memory_;
  const std::shared_ptr<std::atomic<bool>> retired_ = std::make_shared<std::atomic<bool>>(false);
  std::mutex mutex_;
  std::vector<c10::cuda::CUDAStream> readers_;  // guarded by mutex_
};

// A weight of a model.
struct Weight {
  std::string name;      // in the model's state_dict
  std::string constant;  // in the compiled code
  at::ScalarType dtype;
  std::vector<int64_t> sizes;
  std::vector<int64_t> strides;
  int64_t offset;  // in a set's memory, in elements
  bool fixed;      // it is in no set: each instance has a copy, which cannot be replaced
};

// The weights of all instances of a model.
class ModelWeights {
 public:
  // own has the tensors that the library has loaded, by name. constants maps the compiled code's
  // names to these names. Copies the weights, and waits for the copies. If the code does not take
  // tensors of others, all weights are fixed.
  ModelWeights(const Constants& own, const std::unordered_map<std::string, std::string>& constants,
               c10::Device device, bool code_takes_tensors);

  const std::vector<Weight>& list() const { return list_; }  // sorted by name
  bool all_fixed() const { return fixed_ == list_.size(); }
  bool none_fixed() const { return fixed_ == 0; }
  std::shared_ptr<WeightSet> current() const;
  // Returns a weight of a set, without a copy.
  at::Tensor view(const WeightSet& set, const Weight& weight) const;
  // Held while a set is replaced and the instances are refreshed, or an instance is added. So only
  // one more set is in memory, and all instances have the current one.
  std::mutex& replacing() { return replacing_; }
  // Makes a current set in which the weights at these places of list() have new values, and returns
  // the last one. Waits for the copies: work that is enqueued later, on any stream, reads complete
  // values. The caller holds replacing(), and retires the last set when no instance reads it: a
  // graph of a run that has captured it is then stale, and captured again it has the current set.
  std::shared_ptr<WeightSet> replace(const std::vector<int64_t>& places,
                                     const std::vector<at::Tensor>& values);

 private:
  std::shared_ptr<WeightSet> new_set() const;
  // Waits for the copies into the set on the current stream, and makes it the current one. Returns
  // the last one.
  std::shared_ptr<WeightSet> publish(std::shared_ptr<WeightSet> next);

  const c10::Device device_;
  std::vector<Weight> list_;
  size_t fixed_ = 0;  // how many weights are fixed
  size_t bytes_ = 0;  // of a set
  std::mutex replacing_;
  mutable std::mutex mutex_;
  std::shared_ptr<WeightSet> current_;  // guarded by mutex_
};

}  // namespace ts
