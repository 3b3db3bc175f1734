// The kernel that reads host memory: plans from a batch's pinned memory, and parts of files and
// compressed members from their registered mappings. No LibTorch here: read.cu includes it.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "decode/digest.h"

namespace ts::decode {

// A range of host memory to read. Zeros follow its bytes, up to a multiple of 16.
struct Read {
  const uint8_t* from;  // any alignment
  // The digests of the pieces of a part of a file, in host memory. If a piece has another digest,
  // the image is flagged. Another 16 zeros follow the part. NULL: the bytes are not compared. They
  // are of the pinned memory, or of a member, whose checksum the caller compares.
  const uint64_t* digests;
  uint64_t to;     // byte of the staging memory, a multiple of 16
  uint32_t bytes;  // not 0
  uint32_t first;  // number of pieces of the batch's earlier ranges
  uint32_t image;
  uint32_t padding;
};

// The ranges of a batch. Pointers are to device memory.
struct ReadWork {
  const Read* reads;
  uint8_t* staging;
  int32_t* failed;  // one for each image
  uint32_t count, pieces;
  DigestKey key;
};
static_assert(sizeof(ReadWork) <= 4096, "the parameters of a kernel have 4 KB");

constexpr uint32_t pieces_of(uint32_t bytes) { return (bytes - 1) / kPieceBytes + 1; }

// Enqueues the kernel on the stream of the current device.
cudaError_t launch(const ReadWork& work, cudaStream_t stream);

}  // namespace ts::decode
