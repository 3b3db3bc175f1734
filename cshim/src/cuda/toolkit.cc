#include "cuda/toolkit.h"

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

}  // namespace ts
