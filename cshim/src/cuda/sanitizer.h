// Entries that the library itself adds to the log of a stream sanitizer. Each function costs an
// atomic load while logging is off.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>

namespace ts {

// Logs that work enqueued on `waiter` from now on starts after everything enqueued on `on` so far.
void log_order(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on) noexcept;
// Logs that other memory may get these addresses.
void log_unmapped(c10::DeviceIndex device, const void* memory, size_t bytes) noexcept;
// Logs that work now enqueued on `stream` reads or writes the elements of a tensor. Tensors on the
// CPU, and tensors with gaps between their elements, are not logged.
void log_access(const at::Tensor& tensor, c10::cuda::CUDAStream stream, bool write) noexcept;
// Logs that the tensor's memory is recorded as used on `stream`.
void log_use(const at::Tensor& tensor, c10::cuda::CUDAStream stream) noexcept;

// Says whose work the calling thread does while this object exists: a call's, or the library's own,
// as in a backward pass outside its hooks. Without such an object, LibTorch's own threads do the
// library's work, and all other threads do the work of calls.
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
