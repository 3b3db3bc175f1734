// An inflater of ranges on one GPU or the CPU: its memory, and the launches of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "decode/queue.h"
#include "torchstream.h"

namespace ts::decode {

// Returns the size in bytes of the ranges' descriptions for the kernel.
size_t range_head_bytes(int64_t ranges);

// Returns the description of a range, after checking its memory. Its input and window must be
// inside the `bytes` bytes of staging memory, after the first `head` bytes. Its room, followed by
// `behind` bytes, which become zeros, must be inside the rooms. Throws INVALID_ARGUMENT, which
// names the range by its index.
deflate::Range checked_range(int64_t index, const ts_gpu_inflate_range& range, size_t head,
                             size_t bytes, size_t rooms_bytes, size_t behind = 0);

}  // namespace ts::decode

// No run allocates memory or waits for the device.
struct ts_gpu_inflater {
  ts_gpu_inflater(int32_t device, int64_t max_ranges, size_t staging_bytes);

  // Called before the first piece of work, with -1, and after the copy (0) and the kernel (1).
  using Mark = std::function<void(int piece)>;
  static constexpr int kPieces = 2;

  void run(uint8_t* from, size_t bytes, const ts_gpu_inflate_range* ranges, int64_t count,
           uint8_t* rooms, size_t rooms_bytes, ts_gpu_inflate_result* results,
           const ts::decode::Queue& queue, const Mark& mark);

  int32_t device;
  int64_t max_ranges;
  at::Tensor staging, outcomes;
};
