#include <algorithm>

#include "decode/read.h"

namespace ts::decode {

// Named, as in decode.cu.
namespace kernels {

constexpr uint32_t kReadThreads = 256;
// Eight blocks read as fast as the bus. More would only wait on multiprocessors that others need.
constexpr uint32_t kReadBlocks = 8;
constexpr uint32_t kWarp = 32;
constexpr uint32_t kChunk = sizeof(uint4);
constexpr uint32_t kPieceChunks = kPieceBytes / kChunk;
constexpr uint32_t kEach = kPieceChunks / kWarp;  // chunks of a piece for each thread
constexpr uint32_t kEveryLane = 0xFFFFFFFF;

// Returns the range of a piece.
__device__ Read range_of(const ReadWork& work, uint32_t piece) {
  uint32_t low = 0;
  for (uint32_t high = work.count; high - low > 1;) {
    const uint32_t middle = (low + high) / 2;
    if (work.reads[middle].first <= piece) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return work.reads[low];
}

__device__ uint4 shuffled(const uint4& v, uint32_t lane) {
  const auto from = static_cast<int>(lane);
  return {__shfl_sync(kEveryLane, v.x, from), __shfl_sync(kEveryLane, v.y, from),
          __shfl_sync(kEveryLane, v.z, from), __shfl_sync(kEveryLane, v.w, from)};
}

// Returns the 16 bytes that start `skip` bytes after the first of a and the b that follows it.
__device__ uint4 joined(const uint4& a, const uint4& b, uint32_t skip) {
  uint32_t words[] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
  if ((skip & 8) != 0) {
    for (int i = 0; i < 6; ++i) words[i] = words[i + 2];
  }
  if ((skip & 4) != 0) {
    for (int i = 0; i < 5; ++i) words[i] = words[i + 1];
  }
  const uint32_t bits = skip % 4 * 8;
  return {__funnelshift_r(words[0], words[1], bits), __funnelshift_r(words[1], words[2], bits),
          __funnelshift_r(words[2], words[3], bits), __funnelshift_r(words[3], words[4], bits)};
}

// Returns a chunk's first `bytes` bytes, followed by zeros.
__device__ uint4 cut(const uint4& v, uint32_t bytes) {
  const auto word = [bytes](uint32_t value, uint32_t at) {
    if (bytes >= at + 4) return value;
    return bytes <= at ? 0 : value & ((1U << (bytes - at) * 8) - 1);
  };
  return {word(v.x, 0), word(v.y, 4), word(v.z, 8), word(v.w, 12)};
}

// Loads a piece. Thread t of the warp gets the chunks t, t + 32, and so on, and zeros after the
// piece's end. All loads are aligned, so they touch no page that has no byte of the piece.
__device__ void load_piece(const uint8_t* from, uint32_t bytes, uint32_t lane, uint4* chunks) {
  const auto skip = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(from) % kChunk);
  const auto* const source = reinterpret_cast<const uint4*>(from - skip);
  const uint32_t loads = (skip + bytes + kChunk - 1) / kChunk;
  uint4 last = {};
#pragma unroll
  for (uint32_t k = 0; k < kEach; ++k) {
    const uint32_t i = k * kWarp + lane;
    chunks[k] = i < loads ? __ldcs(source + i) : uint4{};
  }
  if (loads > kPieceChunks && lane == 0) last = __ldcs(source + kPieceChunks);
  if (skip != 0) {
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) {
      const uint4 neighbour = shuffled(chunks[k], (lane + 1) % kWarp);
      const uint4 wrapped = shuffled(k + 1 < kEach ? chunks[k + 1] : last, 0);
      chunks[k] = joined(chunks[k], lane == kWarp - 1 ? wrapped : neighbour, skip);
    }
  }
  if (bytes == kPieceBytes) return;
#pragma unroll
  for (uint32_t k = 0; k < kEach; ++k) {
    const uint32_t begin = (k * kWarp + lane) * kChunk;
    chunks[k] = cut(chunks[k], begin < bytes ? bytes - begin : 0);
  }
}

// Returns the digest of a piece that load_piece has loaded. All threads of the warp get it.
__device__ uint64_t digest_of(const DigestKey& key, const uint4* chunks, uint32_t bytes,
                              uint32_t lane) {
  // A thread's chunks are all of one pair of lanes.
  constexpr uint32_t kPairs = kLanes / 2;
  const uint32_t pair = lane % kPairs;
  LanePair lanes = {};
#pragma unroll
  for (uint32_t k = 0; k < kEach; ++k) {
    const uint4& v = chunks[k];
    add_words(key, (k * kWarp + lane) / kPairs, pair, v.x | uint64_t{v.y} << 32,
              v.z | uint64_t{v.w} << 32, &lanes);
  }
  for (uint32_t distance = kPairs; distance < kWarp; distance *= 2) {
    lanes.even += __shfl_xor_sync(kEveryLane, lanes.even, static_cast<int>(distance));
    lanes.odd += __shfl_xor_sync(kEveryLane, lanes.odd, static_cast<int>(distance));
  }
  uint64_t sum = merged(key, pair, lanes);
  for (uint32_t distance = 1; distance < kPairs; distance *= 2) {
    sum += __shfl_xor_sync(kEveryLane, sum, static_cast<int>(distance));
  }
  return finished(sum, bytes);
}

// A warp for each piece, in turn.
__global__ void __launch_bounds__(kReadThreads) read_ranges(const __grid_constant__ ReadWork work) {
  __shared__ DigestKey key;
  const auto* const words = reinterpret_cast<const uint64_t*>(&work.key);
  for (uint32_t i = threadIdx.x; i < sizeof key / sizeof *words; i += kReadThreads) {
    reinterpret_cast<uint64_t*>(&key)[i] = words[i];
  }
  __syncthreads();
  const uint32_t lane = threadIdx.x % kWarp;
  for (uint32_t piece = (blockIdx.x * kReadThreads + threadIdx.x) / kWarp; piece < work.pieces;
       piece += gridDim.x * (kReadThreads / kWarp)) {
    const Read range = range_of(work, piece);
    const uint32_t index = piece - range.first;
    const uint32_t begin = index * kPieceBytes;
    const uint32_t bytes = min(kPieceBytes, range.bytes - begin);
    const uint64_t expected = range.digests != nullptr ? range.digests[index] : 0;
    auto* const to = reinterpret_cast<uint4*>(work.staging + range.to + begin);
    uint4 chunks[kEach];
    load_piece(range.from + begin, bytes, lane, chunks);
    const uint32_t stores = (bytes + kChunk - 1) / kChunk;
#pragma unroll
    for (uint32_t k = 0; k < kEach; ++k) {
      const uint32_t i = k * kWarp + lane;
      if (i < stores) to[i] = chunks[k];
    }
    if (range.digests == nullptr) continue;
    const bool same = digest_of(key, chunks, bytes, lane) == expected;
    if (lane != 0) continue;
    if (!same) work.failed[range.image] = 1;
    if (begin + bytes == range.bytes) to[stores] = uint4{};
  }
}

}  // namespace kernels

cudaError_t launch(const ReadWork& work, cudaStream_t stream) {
  using namespace kernels;
  constexpr uint32_t kWarps = kReadThreads / kWarp;
  const uint32_t blocks = std::min(kReadBlocks, (work.pieces - 1) / kWarps + 1);
  read_ranges<<<blocks, kReadThreads, 0, stream>>>(work);
  return cudaGetLastError();
}

}  // namespace ts::decode
