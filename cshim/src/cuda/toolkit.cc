#include "cuda/toolkit.h"

#include <cuda_occupancy.h>
#include <cuda_runtime_api.h>

#include <string>

#include "torchstream.h"

namespace {

// 13000 is CUDA 13.0.
constexpr int kCudaMajor = CUDART_VERSION / 1000;
constexpr int kCudaMinor = CUDART_VERSION % 1000 / 10;
static_assert(kCudaMajor >= 10 && kCudaMajor <= 99 && kCudaMinor <= 9,
              "the text below has 4 places");
constexpr char kCudaVersion[] = {'0' + kCudaMajor / 10, '0' + kCudaMajor % 10, '.',
                                 '0' + kCudaMinor, '\0'};

}  // namespace

const char* ts_cuda_version(void) { return kCudaVersion; }

namespace ts {

std::string why_no_gpu() {
  int driver = 0;
  int runtime = 0;
  cudaDriverGetVersion(&driver);  // 0 if there is no driver
  cudaRuntimeGetVersion(&runtime);
  const auto cuda = [](int version) {
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
  };
  if (driver == 0) {
    return "this machine has no NVIDIA driver, and " + cuda(runtime) + " needs driver 580 or newer";
  }
  if (driver / 1000 < runtime / 1000) {
    return "the NVIDIA driver is too old: it is for " + cuda(driver) + ", and " + cuda(runtime) +
           " needs driver 580 or newer";
  }
  return "the NVIDIA driver is for " + cuda(driver) + ", but lists no GPU";
}

double occupancy(int32_t device, int32_t threads, int32_t registers, int32_t shared_bytes) {
  cudaDeviceProp properties{};
  if (cudaGetDeviceProperties(&properties, device) != cudaSuccess) return 0;
  const cudaOccDeviceProp limits(properties);
  cudaOccFuncAttributes kernel;
  kernel.maxThreadsPerBlock = properties.maxThreadsPerBlock;
  kernel.numRegs = registers;
  kernel.sharedSizeBytes = static_cast<size_t>(shared_bytes);
  kernel.numBlockBarriers = 1;
  // A kernel that was launched may use as much shared memory as it did.
  kernel.shmemLimitConfig = FUNC_SHMEM_LIMIT_OPTIN;
  kernel.maxDynamicSharedSizeBytes = properties.sharedMemPerBlockOptin;
  const cudaOccDeviceState state;
  cudaOccResult result{};
  if (cudaOccMaxActiveBlocksPerMultiprocessor(&result, &limits, &kernel, &state, threads, 0) !=
          CUDA_OCC_SUCCESS ||
      properties.maxThreadsPerMultiProcessor <= 0) {
    return 0;
  }
  return static_cast<double>(result.activeBlocksPerMultiprocessor) * threads /
         properties.maxThreadsPerMultiProcessor;
}

}  // namespace ts
