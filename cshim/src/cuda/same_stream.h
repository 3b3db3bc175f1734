// The identity of streams.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace ts {

// Reports whether two values are one stream: a cudaStream_t may have both a pool id and an external
// id.
inline bool same_stream(c10::cuda::CUDAStream a, c10::cuda::CUDAStream b) {
  return a.device_index() == b.device_index() && a.stream() == b.stream();
}

}  // namespace ts
