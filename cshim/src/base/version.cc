// The versions of this library, LibTorch and CUDA.
#include <cuda_runtime_api.h>
#include <torch/version.h>

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

int32_t ts_abi_version(void) { return TS_ABI_VERSION; }

const char* ts_libtorch_version(void) { return TORCH_VERSION; }

const char* ts_cuda_version(void) { return kCudaVersion; }
