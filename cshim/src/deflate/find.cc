#include "deflate/find.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "deflate/bits.h"

namespace ts::image {
namespace {

constexpr std::array<uint8_t, 19> kOrder = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                            11, 4,  12, 3, 13, 2, 14, 1, 15};

// Counts the code words of a code, in units of its longest possible ones.
struct Space {
  uint32_t used = 0;
  uint32_t codes = 0;

  void add(uint32_t length, uint32_t longest) {
    if (length == 0) return;
    used += 1u << (longest - length);
    ++codes;
  }
  // Reports whether the code words use the space. One code word of one bit may be alone.
  bool full(uint32_t longest) const {
    const uint32_t all = 1u << longest;
    return used == all || (codes == 1 && used == all / 2) || codes == 0;
  }
};

// Returns up to 64 bits from a bit of the input on. Beyond its end the bits are 0.
uint64_t bits_at(const uint8_t* input, size_t bytes, uint64_t bit) {
  uint64_t v = 0;
  const size_t at = bit / 8;
  if (at + 8 <= bytes) {
    v = load64(input + at);
  } else if (at < bytes) {
    std::memcpy(&v, input + at, bytes - at);
  }
  return v >> bit % 8;
}

// The code of the code lengths, as a table of its next 7 bits: symbol << 3 | length of the code.
class LengthCode {
 public:
  // Returns false if the lengths do not form a complete code.
  bool build(const std::array<uint8_t, 19>& lengths) {
    Space space;
    for (const uint8_t n : lengths) space.add(n, 7);
    if (space.used != 128) return false;
    uint32_t code = 0;
    for (uint32_t n = 1; n <= 7; ++n) {
      for (size_t symbol = 0; symbol < lengths.size(); ++symbol) {
        if (lengths[symbol] != n) continue;
        uint32_t reversed = 0;
        for (uint32_t i = 0; i < n; ++i) reversed |= (code >> i & 1) << (n - 1 - i);
        for (uint32_t i = reversed; i < 128; i += 1u << n) {
          table_[i] = static_cast<uint8_t>(symbol << 3 | n);
        }
        ++code;
      }
      code <<= 1;
    }
    return true;
  }
  uint8_t next(uint64_t bits) const { return table_[bits & 127]; }

 private:
  std::array<uint8_t, 128> table_;
};

// Reports whether code lengths that start at a bit form the two codes of a block.
bool codes_at(const uint8_t* input, size_t bytes, uint64_t bit, uint32_t litlens, uint32_t dists,
              const LengthCode& code) {
  Space litlen;
  Space dist;
  bool has_end = false;
  uint32_t previous = 0;
  for (uint32_t i = 0; i < litlens + dists;) {
    if (bit + 14 > 8 * uint64_t{bytes}) return false;
    uint64_t bits = bits_at(input, bytes, bit);
    const uint32_t e = code.next(bits);
    bits >>= e & 7;
    bit += e & 7;
    uint32_t length = e >> 3;
    uint32_t times = 1;
    if (length == 16) {
      if (i == 0) return false;
      length = previous;
      times = 3 + low(bits, 2);
      bit += 2;
    } else if (length > 16) {
      const uint32_t extra = length == 17 ? 3 : 7;
      times = (length == 17 ? 3 : 11) + low(bits, extra);
      bit += extra;
      length = 0;
    }
    if (times > litlens + dists - i) return false;
    previous = length;
    for (; times > 0; --times, ++i) {
      (i < litlens ? litlen : dist).add(length, 15);
      has_end = has_end || (i == 256 && length > 0);
    }
    if (litlen.used > 1u << 15 || dist.used > 1u << 15) return false;
  }
  return has_end && litlen.full(15) && dist.full(15);
}

// Reports whether a block that is not the last one, with codes of its own, may start at a bit.
bool dynamic_at(const uint8_t* input, size_t bytes, uint64_t bit) {
  const uint64_t bits = bits_at(input, bytes, bit);
  const uint32_t litlens = low(bits >> 3, 5) + 257;
  const uint32_t dists = low(bits >> 8, 5) + 1;
  if (low(bits, 3) != 4 || litlens > 286 || dists > 30) return false;
  const uint32_t count = low(bits >> 13, 4) + 4;
  const uint64_t packed = bits_at(input, bytes, bit + 17);
  uint32_t used = 0;
  for (uint32_t i = 0; i < count; ++i) {
    const uint32_t n = packed >> 3 * i & 7;
    if (n > 0) used += 128u >> n;
  }
  if (used != 128) return false;
  std::array<uint8_t, 19> lengths{};
  for (uint32_t i = 0; i < count; ++i) lengths[kOrder[i]] = packed >> 3 * i & 7;
  LengthCode code;
  return code.build(lengths) && codes_at(input, bytes, bit + 17 + 3 * count, litlens, dists, code);
}

// Reports whether the length of a stored block that is not the last one may be at a byte.
bool stored_at(const uint8_t* input, size_t bytes, size_t at) {
  if (at == 0 || at + 4 > bytes || input[at - 1] >> 5 != 0) return false;
  return (input[at] ^ input[at + 2]) == 0xff && (input[at + 1] ^ input[at + 3]) == 0xff;
}

bool member_at(const uint8_t* input, size_t bytes, size_t at) {
  return at + 10 <= bytes && input[at] == 0x1f && input[at + 1] == 0x8b && input[at + 2] == 8 &&
         input[at + 3] < 32;
}

}  // namespace

ts_inflate_found find_start(const uint8_t* input, size_t bytes, uint64_t from, uint64_t to) {
  to = std::min(to, 8 * uint64_t{bytes});
  for (uint64_t at = from / 8; 8 * at < to; ++at) {
    // Bit i of a byte may start a dynamic block if the bits from there on are 0, 0, 1.
    const uint64_t v = bits_at(input, bytes, 8 * at);
    uint32_t starts = static_cast<uint32_t>(~v & ~(v >> 1) & v >> 2) & 0xff;
    const uint32_t first = from > 8 * at ? static_cast<uint32_t>(from % 8) : 0;
    starts &= 0xffu << first;
    if (first == 0 && member_at(input, bytes, at)) return {8 * at, TS_INFLATE_FOUND_MEMBER};
    const bool stored = first <= 5 && stored_at(input, bytes, at + 1);
    for (; starts != 0; starts &= starts - 1) {
      const auto i = static_cast<uint32_t>(__builtin_ctz(starts));
      if (stored && i > 5) break;
      if (dynamic_at(input, bytes, 8 * at + i)) return {8 * at + i, TS_INFLATE_FOUND_DYNAMIC};
    }
    if (stored) return {8 * at + 5, TS_INFLATE_FOUND_STORED};
  }
  return {0, TS_INFLATE_FOUND_NONE};
}

}  // namespace ts::image
