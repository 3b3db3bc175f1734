// Devices: their number, checks that run before any side effect, and the current device.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>

#include <cstdint>

namespace ts {

// Cached. 0 without a usable GPU. Prints nothing.
int32_t device_count() noexcept;

[[noreturn]] void throw_no_device(int32_t device);

// Throws NO_DEVICE unless `device` is the index of a GPU.
inline void require_device(int32_t device) {
  if (static_cast<uint32_t>(device) >= static_cast<uint32_t>(device_count())) {
    throw_no_device(device);
  }
}

// Initialises LibTorch's CUDA side (allocator, generators), once a process. Direct calls of the
// allocator fail before. The caller has checked that there is a GPU.
void ensure_cuda();

// Returns the device of the header's index, TS_DEVICE_CPU included. Throws NO_DEVICE for an index
// that is neither the CPU nor an existing GPU.
c10::Device checked_device(int32_t device);

// Returns the header's index of a device. Throws INVALID_ARGUMENT for a device that is neither CPU
// nor CUDA.
int32_t device_index(c10::Device device);

// Makes a device current and restores the previous one. Unlike c10::cuda::CUDAGuard it does not ask
// the driver about contexts if nothing changed.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device)
      : device_(static_cast<c10::DeviceIndex>(device)),
        previous_(c10::cuda::ExchangeDevice(device_)) {}
  ~DeviceScope() {
    // SetDevice would create a context on a device that never had one.
    if (previous_ != device_) C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(previous_));
  }
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  c10::DeviceIndex device_;
  c10::DeviceIndex previous_;
};

}  // namespace ts
