// The kernels that decode plans. No LibTorch here: decode.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::decode {

// The stages of a batch, in their order. Each is one kernel but the first, which is launch_sync.
// The coefficients are zeroed first.
enum class Stage { kSync, kEntropy, kTransform, kPixels, kWeights, kColumns, kResults, kAugment };
constexpr int kStages = 8;

// Images that are decoded at once. Pointers are to the device's memory.
struct Work {
  const jpeg::Place* places;  // one an image
  uint8_t* staging;           // the plans; kSync writes entries into those of whole scans
  uint8_t* scratch;
  uint8_t* results;
  int32_t* failed;  // one an image: set to 1 if the host must decode it
  uint32_t images;
  // The maximum of all images.
  uint32_t subsequences, segments, blocks, pixels, columns, outputs, steps;
};

// Enqueues a stage on the stream of the current device.
cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream);

// Enqueues the search for the entries of the plans of whole scans, if there are any.
cudaError_t launch_sync(const Work& work, cudaStream_t stream);

}  // namespace ts::decode
