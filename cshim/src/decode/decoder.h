// A decoder of plans on one GPU or the CPU: its memory, and the launches of a batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstddef>
#include <cstdint>
#include <functional>

#include "decode/launch.h"
#include "decode/queue.h"
#include "torchstream.h"

// No run allocates memory or waits for the device.
struct ts_gpu_decoder {
  ts_gpu_decoder(int32_t device, int64_t max_images, size_t staging_bytes, size_t scratch_bytes,
                 size_t rooms_bytes);

  // The arguments of a run: see ts_gpu_decoder_run_reading.
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
    ts_gpu_decode_files files;
  };

  // Called before the first piece of work, which copies and inflates, and after each piece: the
  // copy, and the stages in their order. If a batch needs more than the scratch memory, a run does
  // this several times.
  using Mark = std::function<void(int piece)>;
  static constexpr int kPieces = 1 + ts::decode::kStages;

  void run(const Batch& batch, const ts::decode::Queue& queue, const Mark& mark);

  int32_t device;
  int64_t max_images;
  size_t staging_bytes, rooms_at, rooms_bytes;
  at::Tensor staging;  // followed by the rooms, so that plans can refer to them
  at::Tensor scratch, flags, outcomes;
};
