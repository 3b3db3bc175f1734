// What the library itself tells the log of a stream sanitizer. Both functions cost an atomic load
// while nothing is logged.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>

namespace ts {

// Work enqueued on `waiter` from now on starts after everything enqueued on `on` so far.
void log_order(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on) noexcept;
// The addresses may come to mean other memory.
void log_unmapped(c10::DeviceIndex device, const void* memory, size_t bytes) noexcept;

}  // namespace ts
