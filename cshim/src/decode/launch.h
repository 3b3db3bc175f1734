// The kernels that decode plans. No LibTorch here: decode.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::decode {

// The stages of a batch, in their order. kSync, kSums and kEntries are the search for the entries
// of whole scans (decode/sync.cu), and nothing without any.
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

// Images that are decoded at once. Pointers are to the device's memory.
struct Work {
  const jpeg::Place* places;  // one an image
  uint8_t* staging;           // the plans; kEntries writes entries into those of whole scans
  uint8_t* scratch;
  uint8_t* results;
  int32_t* failed;  // one an image: set to 1 if the host must decode it
  uint32_t images;
  // The maximum of all images. Paths are those of the search.
  uint32_t subsequences, paths, segments, blocks, strips, outputs, steps;
};

// The maximum number of paths of an image that the search follows: a thread walks along them.
constexpr uint32_t kMaxImagePaths = 1 << 14;

// Reports whether the search follows paths (jpeg/sync.h): for a few images, since it decodes
// several times as much. A GPU has about so many threads at once.
inline bool follows_paths(const Work& work) {
  constexpr uint64_t kMaxPaths = 1 << 16;
  return work.paths <= kMaxImagePaths && uint64_t{work.images} * work.paths <= kMaxPaths;
}

// Enqueues a stage on the stream of the current device.
cudaError_t launch(Stage stage, const Work& work, cudaStream_t stream);

// Enqueues a stage of the search.
cudaError_t launch_search(Stage stage, const Work& work, cudaStream_t stream);

// Bytes of the staging memory that are put behind one another. All numbers are even.
struct GatherWork {
  static constexpr uint32_t kMaxPieces = 128;  // they travel as the kernel's parameters
  struct Piece {
    uint64_t from, to;  // byte of the staging memory, and of where they are put
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
