#include "cuda/device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/toolkit.h"
#include "torchstream.h"

namespace ts {

int32_t device_count() noexcept {
  // enter_thread must run first: a missing driver makes c10 warn.
  static const int32_t count = [] {
    enter_thread();
    return static_cast<int32_t>(c10::cuda::device_count());
  }();
  return count;
}

void throw_no_device(int32_t device) {
  const int32_t count = device_count();
  std::string message = "device " + std::to_string(device);
  if (count == 0) {
    message += ": there is no usable GPU: " + why_no_gpu();
  } else if (count == 1) {
    message += ": there is one GPU, device 0";
  } else {
    message +=
        ": there are " + std::to_string(count) + " GPUs, devices 0 to " + std::to_string(count - 1);
  }
  throw Failure(TS_ERROR_NO_DEVICE, std::move(message));
}

void ensure_cuda() { at::globalContext().lazyInitDevice(c10::DeviceType::CUDA); }

c10::Device checked_device(int32_t device) {
  if (device == TS_DEVICE_CPU) return c10::Device(c10::DeviceType::CPU);
  require_device(device);
  ensure_cuda();
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
}

int32_t device_index(c10::Device device) {
  if (device.is_cpu()) return TS_DEVICE_CPU;
  if (device.is_cuda()) return device.index();
  throw Failure(TS_ERROR_INVALID_ARGUMENT,
                "a tensor on " + device.str() + ": only CPU and CUDA tensors can be used");
}

}  // namespace ts

int32_t ts_device_count(void) { return ts::device_count(); }

ts_error* ts_device_get_info(int32_t device, ts_device_info* info) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(info, "info");
    ts::require_device(device);
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    ts_device_info result{};
    static_assert(sizeof result.name == sizeof properties.name);
    std::memcpy(result.name, properties.name, sizeof result.name);
    result.major = properties.major;
    result.minor = properties.minor;
    result.multiprocessors = properties.multiProcessorCount;
    result.async_engines = properties.asyncEngineCount;
    result.total_bytes = properties.totalGlobalMem;
    ts::fill(info, result);
  });
}

ts_error* ts_device_get_identity(int32_t device, ts_device_identity* identity) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(identity, "identity");
    ts::require_device(device);
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    ts_device_identity result{};
    static_assert(sizeof result.uuid == sizeof properties.uuid.bytes);
    std::memcpy(result.uuid, properties.uuid.bytes, sizeof result.uuid);
    C10_CUDA_CHECK(cudaDeviceGetPCIBusId(result.pci_bus_id,
                                         static_cast<int>(sizeof result.pci_bus_id), device));
    ts::fill(identity, result);
  });
}

ts_error* ts_device_can_access_peer(int32_t device, int32_t peer, bool* accessible) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(accessible != nullptr, "accessible is NULL");
    ts::require_device(device);
    ts::require_device(peer);
    int access = 1;  // a device can access its own memory, although CUDA says no
    if (device != peer) C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&access, device, peer));
    *accessible = access != 0;
  });
}

ts_error* ts_device_synchronize(int32_t device) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::refuse_in_capture("waiting for a device");
    const auto turn = ts::wait_for_no_capture();
    // A device without a context has no work, and waiting for it would create a context.
    if (!c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(device))) return;
    const ts::DeviceScope scope(device);
    c10::cuda::device_synchronize();
  });
}
