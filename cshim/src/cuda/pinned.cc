// Pinned host memory directly from the driver. LibTorch's own allocator rounds up to a power of two
// and polls CUDA events when it allocates.
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "torchstream.h"

struct ts_pinned {
  uint8_t* data;
  size_t size;
  bool registered;  // the memory belongs to the caller
};

namespace {

std::atomic<size_t> bytes_live{0};

// Returns a device that already has a context. Pinning on another device would create a context
// there, which takes hundreds of megabytes. Portable memory serves all devices anyway.
int32_t device_for_pinning() {
  return c10::cuda::getDeviceIndexWithPrimaryContext().value_or(c10::cuda::current_device());
}

ts_pinned* register_memory(uint8_t* data, size_t bytes, unsigned flags) {
  const ts::DeviceScope scope(device_for_pinning());
  auto made = std::make_unique<ts_pinned>(ts_pinned{data, bytes, true});
  const cudaError_t status = cudaHostRegister(data, bytes, flags);
  if (status != cudaSuccess) C10_CUDA_CLEAR_ERROR();
  if (status == cudaErrorMemoryAllocation) {
    throw ts::Failure(TS_ERROR_OUT_OF_MEMORY,
                      "the driver cannot pin " + std::to_string(bytes) + " bytes of host memory");
  }
  if (status == cudaErrorNotSupported) {
    throw ts::Failure(TS_ERROR_UNSUPPORTED, "the driver cannot pin this kind of host memory");
  }
  ts::require(status != cudaErrorHostMemoryAlreadyRegistered,
              "a part of the memory is pinned already");
  ts::require(status != cudaErrorInvalidValue,
              "the driver cannot pin this memory: it is not mapped, or a file's and read-only");
  C10_CUDA_CHECK(status);
  bytes_live.fetch_add(bytes, std::memory_order_relaxed);
  return made.release();
}

// Throws UNSUPPORTED unless the device reads registered read-only memory at its host address.
void require_read_only(int32_t device) {
  for (const cudaDeviceAttr attribute :
       {cudaDevAttrHostRegisterReadOnlySupported, cudaDevAttrCanUseHostPointerForRegisteredMem}) {
    int supported = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&supported, attribute, device));
    if (supported == 0) {
      throw ts::Failure(TS_ERROR_UNSUPPORTED,
                        "GPU " + std::to_string(device) + " cannot read read-only host memory");
    }
  }
}

}  // namespace

ts_error* ts_pinned_new(size_t bytes, ts_pinned** pinned) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pinned != nullptr, "pinned is NULL");
    ts::require(bytes > 0, "pinned memory of 0 bytes");
    ts::require_device(0);
    ts::refuse_in_capture("pinning memory");
    // LibTorch treats no memory as pinned before its CUDA side is initialised.
    ts::ensure_cuda();
    const ts::DeviceScope scope(device_for_pinning());
    auto made = std::make_unique<ts_pinned>();
    void* data = nullptr;
    const cudaError_t status = cudaHostAlloc(&data, bytes, cudaHostAllocPortable);
    if (status == cudaErrorMemoryAllocation) {
      C10_CUDA_CLEAR_ERROR();
      throw ts::Failure(TS_ERROR_OUT_OF_MEMORY,
                        "the driver cannot pin " + std::to_string(bytes) + " bytes of host memory");
    }
    C10_CUDA_CHECK(status);
    std::memset(data, 0, bytes);
    made->data = static_cast<uint8_t*>(data);
    made->size = bytes;
    made->registered = false;
    bytes_live.fetch_add(bytes, std::memory_order_relaxed);
    *pinned = made.release();
  });
}

ts_error* ts_pinned_register(uint8_t* data, size_t bytes, ts_pinned** pinned) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pinned != nullptr, "pinned is NULL");
    ts::require(data != nullptr && bytes > 0, "pinned memory of 0 bytes");
    ts::require_device(0);
    ts::refuse_in_capture("pinning memory");
    ts::ensure_cuda();
    *pinned = register_memory(data, bytes, cudaHostRegisterPortable);
  });
}

ts_error* ts_pinned_register_read_only(const uint8_t* data, size_t bytes, ts_pinned** pinned) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pinned != nullptr, "pinned is NULL");
    ts::require(data != nullptr && bytes > 0, "pinned memory of 0 bytes");
    ts::require_device(0);
    ts::refuse_in_capture("pinning memory");
    ts::ensure_cuda();
    for (int32_t device = 0; device < ts_device_count(); ++device) require_read_only(device);
    constexpr unsigned kFlags =
        cudaHostRegisterReadOnly | cudaHostRegisterMapped | cudaHostRegisterPortable;
    *pinned = register_memory(const_cast<uint8_t*>(data), bytes, kFlags);
  });
}

uint8_t* ts_pinned_data(const ts_pinned* pinned) {
  return pinned == nullptr ? nullptr : pinned->data;
}

size_t ts_pinned_size(const ts_pinned* pinned) { return pinned == nullptr ? 0 : pinned->size; }

ts_error* ts_pinned_destroy(ts_pinned* pinned) {
  return ts::guard(__func__, [&] {
    if (pinned == nullptr) return;
    ts::enter_thread();
    const ts::DeviceScope scope(device_for_pinning());
    // A thread that captures may free pinned memory: the call is not part of the capture.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    C10_CUDA_CHECK(pinned->registered ? cudaHostUnregister(pinned->data)
                                      : cudaFreeHost(pinned->data));
    const std::unique_ptr<ts_pinned> owned(pinned);
    bytes_live.fetch_sub(owned->size, std::memory_order_relaxed);
  });
}

size_t ts_pinned_live_bytes(void) { return bytes_live.load(std::memory_order_relaxed); }
