// Order between streams: what is enqueued on one waits for what is on another.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace ts {

// What is enqueued on `waiter` from now on starts after what is on `on` now.
void order_after(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

}  // namespace ts
