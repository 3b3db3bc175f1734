// Memory that another library or process owns and tensors use.
//
// Tensors end on any thread, inside any call, under locks of LibTorch. Returning foreign memory may
// block, may call code of the program, and must not invalidate a capture. So the end of a tensor
// only notes the work so far of the streams that used the memory, and one thread of the library
// does the rest.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace ts {

class Foreign {
 public:
  Foreign() = default;
  virtual ~Foreign();
  Foreign(const Foreign&) = delete;
  Foreign& operator=(const Foreign&) = delete;

  // Makes a tensor over `bytes` bytes at data, which contain all elements. If it throws, the memory
  // is not returned to its owner.
  static at::Tensor tensor(std::unique_ptr<Foreign> memory, void* data, size_t bytes,
                           at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           c10::Device device);
  // Returns the foreign memory of a storage, or null.
  static Foreign* of(const c10::StorageImpl& storage) noexcept;

  // Records that the stream uses the memory: the memory is returned after the stream's work up to
  // then.
  void use(c10::cuda::CUDAStream stream);

 protected:
  struct Use {
    c10::cuda::CUDAStream stream;
    cudaEvent_t event;  // recorded after the stream's work
    bool recorded;
  };

  // Returns the memory to its owner, on the library's thread, after the uses are recorded. It may
  // throw, but nobody sees the exception.
  virtual void give_back(const std::vector<Use>& uses) = 0;

 private:
  friend class Reaper;
  static void release(void* context) noexcept;
  void record(Use& use) noexcept;
  void run() noexcept;

  bool armed_ = false;
  std::mutex mutex_;
  std::vector<Use> uses_;  // guarded by mutex_
  Foreign* next_ = nullptr;
};

}  // namespace ts
