// What the library itself tells the log of a stream sanitizer. Each function costs an atomic load
// while nothing is logged.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>

namespace ts {

// Work enqueued on `waiter` from now on starts after everything enqueued on `on` so far.
void log_order(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on) noexcept;
// The addresses may come to mean other memory.
void log_unmapped(c10::DeviceIndex device, const void* memory, size_t bytes) noexcept;
// Work that is enqueued on `stream` now reads or writes the elements of a tensor. Tensors on the
// CPU, and those whose elements have gaps, are not logged.
void log_access(const at::Tensor& tensor, c10::cuda::CUDAStream stream, bool write) noexcept;
// The tensor's memory is recorded as used on `stream`.
void log_use(const at::Tensor& tensor, c10::cuda::CUDAStream stream) noexcept;

// Says whose work the calling thread does while this object exists: that of calls, or the
// library's own, as in a backward pass outside of its hooks. Without such an object, LibTorch's own
// threads do the library's work, and all others that of calls.
class LoggedFor {
 public:
  enum class Doer : int8_t { kUnknown, kCall, kLibrary };

  explicit LoggedFor(Doer doer) noexcept;
  ~LoggedFor();
  LoggedFor(const LoggedFor&) = delete;
  LoggedFor& operator=(const LoggedFor&) = delete;

 private:
  const Doer before_;
};

}  // namespace ts
