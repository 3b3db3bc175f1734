// Reads the bits of a deflate stream.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

#define TS_INLINE inline __attribute__((always_inline))

namespace ts::image {

[[noreturn]] inline void damaged(const char* what) {
  throw Failure(TS_ERROR_DECODE, std::string("deflate: ") + what);
}

// Returns the lowest n bits, n < 64.
TS_INLINE uint32_t low(uint64_t bits, uint32_t n) {
  return static_cast<uint32_t>(bits & ((uint64_t{1} << n) - 1));
}

TS_INLINE uint64_t load64(const uint8_t* p) {
  uint64_t v;
  std::memcpy(&v, p, sizeof(v));
  return v;
}

// Bits that were read but not consumed, and the bytes after them. Above its `count` bits, `bits`
// may have some that follow.
struct BitReader {
  const uint8_t* next;
  const uint8_t* end;
  uint64_t bits;
  uint32_t count;
  bool last;             // the stream has no bytes after `end`
  const uint8_t* begin;  // of this input

  // Reads until there are at least 56 bits, or all.
  void refill() {
    if (end - next >= 8) {
      bits |= load64(next) << count;
      next += (63 - count) >> 3;
      count |= 56;
      return;
    }
    while (count < 56 && next < end) {
      bits |= static_cast<uint64_t>(*next++) << count;
      count += 8;
    }
  }

  // Consumes n bits, at most 32. Throws if the input has fewer.
  uint32_t take(uint32_t n) {
    if (count < n) refill();
    if (count < n) damaged("the stream is cut off");
    const uint32_t v = low(bits, n);
    bits >>= n;
    count -= n;
    return v;
  }

  // Unreads the whole bytes in `bits`.
  void give_back() {
    next -= count >> 3;
    count &= 7;
    bits = low(bits, count);
  }
};

}  // namespace ts::image
