// Order between streams: work enqueued on one waits for work on another.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace ts {

// Starts work enqueued on `waiter` from now on after everything enqueued on `on` so far.
void order_after(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

}  // namespace ts
