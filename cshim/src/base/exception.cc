// Maps LibTorch's exceptions to the header's error codes.
#include <c10/cuda/CUDAException.h>
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <cstring>
#include <stdexcept>
#include <system_error>

#include "base/error.h"

namespace ts {
namespace {

int32_t cuda_code(int32_t error) noexcept {
  switch (error) {
    case cudaErrorMemoryAllocation:
      return TS_ERROR_OUT_OF_MEMORY;
    case cudaErrorNoDevice:
    case cudaErrorInvalidDevice:
    case cudaErrorInsufficientDriver:
      return TS_ERROR_NO_DEVICE;
    default:
      return TS_ERROR_CUDA;
  }
}

int32_t code_of(const c10::Error& error) noexcept {
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error)) return TS_ERROR_OUT_OF_MEMORY;
  if (const auto* cuda = dynamic_cast<const c10::AcceleratorError*>(&error)) {
    return cuda_code(cuda->get_error_code());
  }
  if (dynamic_cast<const c10::CUDAError*>(&error)) return TS_ERROR_CUDA;
  // LibTorch has no type for a failed allocation on the host, only this prefix.
  if (std::strstr(error.what_without_backtrace(), "DefaultCPUAllocator: ")) {
    return TS_ERROR_OUT_OF_MEMORY;
  }
  return TS_ERROR_OPERATOR;
}

}  // namespace

ts_error* classify(const char* origin, const std::exception& exception) noexcept {
  if (const auto* error = dynamic_cast<const c10::Error*>(&exception)) {
    return ts_error_new(code_of(*error), origin, error->what_without_backtrace());
  }
  // Gloo and some operators throw standard exceptions. system_error is one of these too: a thread
  // could not be started.
  if (dynamic_cast<const std::runtime_error*>(&exception) &&
      !dynamic_cast<const std::system_error*>(&exception)) {
    return ts_error_new(TS_ERROR_OPERATOR, origin, exception.what());
  }
  return ts_error_new(TS_ERROR_INTERNAL, origin, exception.what());
}

}  // namespace ts
