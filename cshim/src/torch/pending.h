// Copies from a device into host memory that are enqueued and that nobody has waited for. Reads of
// the memory through this library wait for them: the host waits for an event, a stream waits in
// order.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <cstdint>

namespace ts {

// The number of such copies. While it is 0, each function below costs one load.
extern std::atomic<int64_t> pending_copies;
inline bool any_pending() noexcept {
  return __builtin_expect(pending_copies.load(std::memory_order_acquire) != 0, 0);
}

// Records that work enqueued on the stream so far writes the host tensor's memory.
void note_pending(const at::Tensor& host, c10::cuda::CUDAStream stream);

// Blocks until all copies into the host tensor's memory are done.
void await_pending(const at::Tensor& host);

// Makes work enqueued on the stream from now on start after the copies into the host tensor's
// memory.
void order_after_pending(c10::cuda::CUDAStream stream, const at::Tensor& host);

}  // namespace ts
