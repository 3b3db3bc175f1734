#include "device.h"

#include <ATen/Context.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <string>

#include "error.h"
#include "graph.h"
#include "mempool.h"
#include "thread.h"

namespace ts {

int32_t device_count() noexcept {
  // enter_thread first: a missing driver makes c10 warn.
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
    message += ": there is no usable GPU (no device, no driver, or a driver too old for CUDA)";
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

ts_error* ts_device_describe(int32_t device, ts_device_properties* out) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(out != nullptr, "out is NULL");
    ts::require_device(device);
    cudaDeviceProp properties;
    C10_CUDA_CHECK(cudaGetDeviceProperties(&properties, device));
    ts_device_properties result{};
    static_assert(sizeof result.name == sizeof properties.name);
    std::memcpy(result.name, properties.name, sizeof result.name);
    result.major = properties.major;
    result.minor = properties.minor;
    result.multiprocessors = properties.multiProcessorCount;
    result.async_engines = properties.asyncEngineCount;
    result.total_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    *out = result;
  });
}

ts_error* ts_device_memory(int32_t device, ts_memory_stats* out) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(out != nullptr, "out is NULL");
    ts::require_device(device);
    ts::ensure_cuda();
    const auto stats =
        c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    {
      ts::DeviceScope scope(device);
      C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    }
    ts_memory_stats result{};
    result.allocated_bytes = stats.allocated_bytes[all].current;
    result.peak_allocated_bytes = stats.allocated_bytes[all].peak;
    result.reserved_bytes = stats.reserved_bytes[all].current;
    result.peak_reserved_bytes = stats.reserved_bytes[all].peak;
    result.free_bytes = static_cast<int64_t>(free_bytes);
    result.total_bytes = static_cast<int64_t>(total_bytes);
    *out = result;
  });
}

ts_error* ts_device_allocator(int32_t device, ts_allocator_stats* out) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(out != nullptr, "out is NULL");
    ts::require_device(device);
    ts::ensure_cuda();
    const auto stats =
        c10::cuda::CUDACachingAllocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    ts_allocator_stats result{};
    result.requested_bytes = stats.requested_bytes[all].current;
    result.active_bytes = stats.active_bytes[all].current;
    result.split_bytes = stats.inactive_split_bytes[all].current;
    result.allocations = stats.allocation[all].current;
    result.total_allocations = stats.allocation[all].allocated;
    result.segments = stats.segment[all].current;
    result.driver_allocations = stats.num_device_alloc;
    result.driver_frees = stats.num_device_free;
    result.retries = stats.num_alloc_retries;
    result.out_of_memory = stats.num_ooms;
    *out = result;
  });
}

ts_error* ts_device_limit_memory(int32_t device, double fraction) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::require(fraction > 0 && fraction <= 1, "the fraction must be over 0 and at most 1");
    ts::ensure_cuda();
    c10::cuda::CUDACachingAllocator::setMemoryFraction(fraction,
                                                       static_cast<c10::DeviceIndex>(device));
  });
}

ts_error* ts_device_can_access_peer(int32_t device, int32_t peer, bool* can) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(can != nullptr, "can is NULL");
    ts::require_device(device);
    ts::require_device(peer);
    int access = 1;  // a device has access to its own memory; CUDA says no
    if (device != peer) C10_CUDA_CHECK(cudaDeviceCanAccessPeer(&access, device, peer));
    *can = access != 0;
  });
}

ts_error* ts_device_reset_peak(int32_t device) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::ensure_cuda();
    c10::cuda::CUDACachingAllocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

ts_error* ts_device_empty_cache(void) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(0);
    ts::ensure_cuda();
    ts::refuse_in_capture("giving memory back to the driver (EmptyCache)");
    const auto turn = ts::wait_for_no_capture();
    ts::empty_cache();
  });
}

ts_error* ts_device_synchronize(int32_t device) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::refuse_in_capture("waiting for a device");
    const auto turn = ts::wait_for_no_capture();
    // A device without a context has no work, and waiting for it would make one.
    if (!c10::cuda::hasPrimaryContext(static_cast<c10::DeviceIndex>(device))) return;
    const ts::DeviceScope scope(device);
    c10::cuda::device_synchronize();
  });
}
