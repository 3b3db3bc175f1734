// Order between streams: work enqueued on one stream waits for work on another.
#pragma once

#include <c10/cuda/CUDAStream.h>

namespace ts {

// Makes work enqueued on `waiter` from now on start after everything enqueued on `on` so far.
void order_after(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

}  // namespace ts
