// An inflater of ranges on one GPU or the CPU: its memory, and the launches of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "decode/queue.h"
#include "torchstream.h"

// No run allocates, or waits for the device.
struct ts_gpu_inflater {
  ts_gpu_inflater(int32_t device, int64_t max_ranges, size_t staging_bytes);

  // Is called before the first piece of work, with -1, and after the copy (0) and the kernel (1).
  using Mark = std::function<void(int piece)>;
  static constexpr int kPieces = 2;

  void run(uint8_t* from, size_t bytes, const ts_gpu_inflate_range* ranges, int64_t count,
           uint8_t* rooms, size_t rooms_bytes, ts_gpu_inflate_result* results,
           const ts::decode::Queue& queue, const Mark& mark);

  int32_t device;
  int64_t max_ranges;
  at::Tensor staging, outcomes;
};
