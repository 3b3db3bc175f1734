// The kernels that decode plans. No LibTorch here: decode.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::decode {

// The stages of a batch, in their order. The coefficients are zeroed first. kSync, kSums and
// kEntries are the search for the entries of whole scans (decode/sync.cu), and nothing without any.
enum class Stage {
  kTables,
  kSync,
  kSums,
  kEntries,
  kEntropy,
  kTransform,
  kPixels,
  kWeights,
  kColumns,
  kResults,
  kAugment
};
constexpr int kStages = 11;

// Images that are decoded at once. Pointers are to the device's memory.
struct Work {
  const jpeg::Place* places;  // one an image
  uint8_t* staging;           // the plans; kEntries writes entries into those of whole scans
  uint8_t* scratch;
  uint8_t* results;
  int32_t* failed;  // one an image: set to 1 if the host must decode it
  uint32_t images;
  // The maximum of all images.
  uint32_t subsequences, segments, blocks, pixels, columns, outputs, steps;
};

// Enqueues a stage on the stream of the current device.
cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream);

// Enqueues a stage of the search.
cudaError_t launch_search(Stage stage, const Work& work, cudaStream_t stream);

}  // namespace ts::decode
