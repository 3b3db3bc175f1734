// Streams: the header's values and c10's, checked on the way in.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include "torchstream.h"

namespace ts {

// The stream of the value, after checking that it names one that exists: NO_DEVICE or
// INVALID_ARGUMENT otherwise. c10 checks nothing and would write past its tables.
c10::cuda::CUDAStream checked_stream(ts_stream stream);

ts_stream to_value(c10::cuda::CUDAStream stream) noexcept;

}  // namespace ts
