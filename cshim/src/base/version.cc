// The versions of this library and of LibTorch. ts_cuda_version is in cuda/toolkit.cc.
#include <torch/version.h>

#include "torchstream.h"

int32_t ts_abi_version(void) { return TS_ABI_VERSION; }

const char* ts_libtorch_version(void) { return TORCH_VERSION; }
