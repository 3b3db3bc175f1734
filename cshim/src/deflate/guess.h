// Decodes a block of mostly literals from several places at once.
// The length of a code word is known only after a look-up, so a processor that decodes symbol after
// symbol waits for memory most of the time. The loop here also decodes from guesses: places further
// on in the block. A decoder that starts within a code word reaches the right ones after some
// symbols, because prefix codes synchronise; in photographs after 30 on average. Once the decoder
// from the block's start meets a code word of a guess's trail, the guess is right from there on,
// and its output is copied. A wrong guess costs time and changes no byte.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "deflate/bits.h"

namespace ts::image {

// The number of places: one is right, the others are guesses.
constexpr size_t kChains = 3;

// A decoder in a block. `bits` has a marker bit above the stream's bits. The zeros above the marker
// are as many as the bits that were consumed since `in`.
struct Chain {
  static constexpr uint64_t kMarker = uint64_t{1} << 63;

  const uint8_t* in;
  uint64_t bits;
  uint8_t* out;

  TS_INLINE uint32_t consumed() const { return static_cast<uint32_t>(__builtin_clzll(bits)); }
  // Reads until there are at least 56 bits. Reads 8 bytes.
  TS_INLINE void refill() {
    const uint32_t n = consumed();
    in += n >> 3;
    bits = (load64(in) | kMarker) >> (n & 7);
  }
  // Consumes the bits of a table entry, whose low six bits are their number.
  TS_INLINE void use(uint32_t entry) { bits >>= entry & 63; }
  // Returns the position in bits after `base`.
  TS_INLINE uint32_t position(const uint8_t* base) const {
    return static_cast<uint32_t>(8 * (in - base)) + consumed();
  }
};

// What a chain decoded from a guess: literals, and the matches between them.
struct Guess {
  static constexpr size_t kSteps = 1024;  // maximum number of steps of the loop
  static constexpr size_t kPerStep = 5;   // maximum number of literals of a step
  static constexpr size_t kMatches = 256;
  static constexpr size_t kTrail = 256;

  struct Match {
    uint16_t literals;  // before it
    uint16_t length;
    uint32_t distance;
  };
  // A place where a code word starts, and the number of literals and matches before it.
  struct Place {
    uint32_t bit;
    uint16_t literals;
    uint16_t matches;
  };

  const uint8_t* start;
  size_t match_count;
  size_t places;
  std::array<uint8_t, kSteps * kPerStep> literals;
  std::array<Match, kMatches> matches;
  std::array<Place, kTrail> trail;
};

}  // namespace ts::image
