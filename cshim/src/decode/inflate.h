// The kernel that inflates ranges. No LibTorch here: inflate.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "deflate/parallel.h"

namespace ts::decode {

// The ranges of one launch. Pointers are to device memory.
struct InflateWork {
  const deflate::Range* ranges;
  const uint8_t* staging;
  uint8_t* rooms;
  deflate::Result* results;  // one for each range
  uint32_t count;
};

// Enqueues the kernel on the stream of the current device.
cudaError_t launch(const InflateWork& work, cudaStream_t stream);

}  // namespace ts::decode
