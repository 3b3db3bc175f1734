// The kernels that decode plans. No LibTorch here: decode.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::decode {

// The stages of a batch, in their order. kSync, kSums and kEntries search for the entries of whole
// scans (decode/sync.cu), and do nothing if there are none.
enum class Stage {
  kTables,
  kSync,
  kSums,
  kEntries,
  kEntropy,
  kTransform,
  kWeights,
  kColumns,
  kResults,
  kAugment
};
constexpr int kStages = 10;

// The images that are decoded at once. Pointers are to device memory.
struct Work {
  const jpeg::Place* places;  // one for each image
  uint8_t* staging;           // the plans; kEntries writes entries into plans of whole scans
  uint8_t* scratch;
  uint8_t* results;
  int32_t* failed;  // one for each image: set to 1 if the host must decode it
  uint32_t images;
  // The maximum over all images. Paths belong to the search.
  uint32_t subsequences, paths, segments, blocks, strips, outputs, steps;
};

// The maximum number of an image's paths that the search follows: one thread walks along all of
// them.
constexpr uint32_t kMaxImagePaths = 1 << 14;

// Reports whether the search follows paths (jpeg/sync.h). It does so for a few images only, since
// it then decodes several times as much. A GPU runs about this many threads at once.
inline bool follows_paths(const Work& work) {
  constexpr uint64_t kMaxPaths = 1 << 16;
  return work.paths <= kMaxImagePaths && uint64_t{work.images} * work.paths <= kMaxPaths;
}

// Enqueues a stage on the stream of the current device.
cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream);

// Enqueues a stage of the search.
cudaError_t launch_search(Stage stage, const Work& work, cudaStream_t stream);

// Pieces of the staging memory that are written one after another. All numbers are even.
struct GatherWork {
  static constexpr uint32_t kMaxPieces = 128;  // they are passed as the kernel's parameters
  struct Piece {
    uint64_t from, to;  // byte of the staging memory, and the byte to write to
    uint32_t bytes;
  };
  const uint8_t* staging;
  uint8_t* gathered;
  uint32_t count;
  Piece pieces[kMaxPieces];
};
static_assert(sizeof(GatherWork) <= 4096, "the parameters of a kernel have 4 KB");

// Enqueues the kernel on the stream of the current device.
cudaError_t launch(const GatherWork& work, cudaStream_t stream);

}  // namespace ts::decode
