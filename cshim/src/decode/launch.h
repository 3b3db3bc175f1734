// The kernels that decode plans. No LibTorch here: decode.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::decode {

// The stages of a batch, in their order. Each is one kernel, and the coefficients are zeroed first.
enum class Stage { kEntropy, kTransform, kPixels, kWeights, kColumns, kResults };
constexpr int kStages = 6;

// Images that are decoded at once. Pointers are to the device's memory.
struct Work {
  const jpeg::Place* places;  // one an image
  const uint8_t* staging;
  uint8_t* scratch;
  uint8_t* results;
  int32_t* failed;  // one an image: set to 1 if the host must decode it
  uint32_t images;
  // The maximum of all images.
  uint32_t segments, blocks, pixels, columns, outputs;
};

// Enqueues a stage on the stream of the current device.
cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream);

}  // namespace ts::decode
