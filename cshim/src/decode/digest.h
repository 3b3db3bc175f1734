// The digest of a piece of a file: the arithmetic of imageloader/internal/digest.
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/target.h"

namespace ts::decode {

// A piece is digested in stripes of eight words. Each word of a stripe has its own lane.
constexpr uint32_t kPieceBytes = 4096;
constexpr uint32_t kLanes = 8;
constexpr uint32_t kStripes = kPieceBytes / (kLanes * sizeof(uint64_t));

struct DigestKey {
  uint64_t words[kStripes + kLanes];  // stripe i uses eight words, starting at word i
  uint64_t merge[kLanes];
};

// Two neighbouring lanes, whose words enter both.
struct LanePair {
  uint64_t even, odd;
};

// Adds the words 2 * pair and 2 * pair + 1 of a stripe to their lanes.
TS_HOST_DEVICE void add_words(const DigestKey& key, uint32_t stripe, uint32_t pair, uint64_t even,
                              uint64_t odd, LanePair* lanes) {
  const uint64_t keyed_even = even ^ key.words[stripe + 2 * pair];
  const uint64_t keyed_odd = odd ^ key.words[stripe + 2 * pair + 1];
  lanes->even += (keyed_even & 0xFFFFFFFF) * (keyed_even >> 32) + odd;
  lanes->odd += (keyed_odd & 0xFFFFFFFF) * (keyed_odd >> 32) + even;
}

// Returns a pair's share of the digest.
TS_HOST_DEVICE uint64_t merged(const DigestKey& key, uint32_t pair, const LanePair& lanes) {
  const uint64_t a = lanes.even ^ key.merge[2 * pair];
  const uint64_t b = lanes.odd ^ key.merge[2 * pair + 1];
#if defined(__CUDA_ARCH__)
  return (a * b) ^ __umul64hi(a, b);
#else
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
#endif
}

// Returns the digest of a piece of `bytes` bytes, given the sum of the pairs' shares.
TS_HOST_DEVICE uint64_t finished(uint64_t sum, uint32_t bytes) {
  uint64_t digest = sum + bytes * uint64_t{0x9E3779B97F4A7C15};
  digest = (digest ^ digest >> 37) * 0x165667919E3779F9;
  return digest ^ digest >> 32;
}

}  // namespace ts::decode
