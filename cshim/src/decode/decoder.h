// A decoder of plans on one GPU or the CPU: its memory, and the launches of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "decode/launch.h"
#include "decode/queue.h"
#include "torchstream.h"

// No run allocates, or waits for the device.
struct ts_gpu_decoder {
  ts_gpu_decoder(int32_t device, int64_t max_images, size_t staging_bytes, size_t scratch_bytes,
                 size_t rooms_bytes);

  // Of a run: see ts_gpu_decoder_run_inflating.
  struct Batch {
    uint8_t* staging;
    size_t bytes;
    const ts_gpu_decode_image* images;
    int64_t count;
    const ts_gpu_decode_member* members;
    int64_t member_count;
    uint8_t* results;
    size_t results_bytes;
    int32_t* failed;
    ts_gpu_inflate_result* inflated;
  };

  // Is called before the first piece of work, which copies and inflates, and after each: the copy,
  // and the stages in their order. Several times in a run if a batch needs more scratch memory than
  // there is.
  using Mark = std::function<void(int piece)>;
  static constexpr int kPieces = 1 + ts::decode::kStages;

  void run(const Batch& batch, const ts::decode::Queue& queue, const Mark& mark);

  int32_t device;
  int64_t max_images;
  size_t staging_bytes, rooms_at, rooms_bytes;
  at::Tensor staging;  // and the rooms behind it, so that plans reach them
  at::Tensor scratch, flags, outcomes;
};
