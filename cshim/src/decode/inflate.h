// The kernel that inflates ranges. No LibTorch here: inflate.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "deflate/parallel.h"

namespace ts::decode {

// Ranges that are inflated at once. Pointers are to the device's memory.
struct InflateWork {
  const deflate::Range* ranges;
  const uint8_t* staging;
  uint8_t* rooms;
  deflate::Result* results;  // one a range
  uint32_t count;
};

// Enqueues the kernel on the stream of the current device.
cudaError_t launch(const InflateWork& work, cudaStream_t stream);

}  // namespace ts::decode
