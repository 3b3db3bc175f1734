// Devices: how many there are, checks that come before any side effect, and the current one.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdint>

namespace ts {

// Cached; 0 without a usable GPU. Prints nothing.
int32_t device_count() noexcept;

[[noreturn]] void throw_no_device(int32_t device);

// NO_DEVICE unless `device` is the index of a GPU.
inline void require_device(int32_t device) {
  if (static_cast<uint32_t>(device) >= static_cast<uint32_t>(device_count())) {
    throw_no_device(device);
  }
}

// Readies LibTorch's CUDA side (allocator, generators), once a process: raw allocator calls fail
// before. The caller has checked that there is a GPU.
void ensure_cuda();

// The device of the header's index, TS_DEVICE_CPU included; NO_DEVICE for what is neither the CPU
// nor a GPU that exists.
c10::Device checked_device(int32_t device);

// The header's index of a device; INVALID_ARGUMENT for what is neither CPU nor CUDA.
int32_t device_index(c10::Device device);

// Makes a device current and restores the one before. Like c10::cuda::CUDAGuard, but does not query
// the driver about contexts when nothing changed.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device)
      : device_(static_cast<c10::DeviceIndex>(device)),
        previous_(c10::cuda::ExchangeDevice(device_)) {}
  ~DeviceScope() {
    // Not SetDevice: that would make a context on a device that never had one.
    if (previous_ != device_) C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(previous_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex device_;
  c10::DeviceIndex previous_;
};

}  // namespace ts
