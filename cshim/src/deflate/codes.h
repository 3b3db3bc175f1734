// The two prefix codes of a deflate block, as decoding tables.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "deflate/bits.h"

namespace ts::image {

// Entries of the decoding tables. The low byte is the number of bits of the code and its extra bits
// together (in a second-level table, without the bits of the root table); the next four bits are
// the number of bits of the code alone. Bits 16 and up are the literal, the base of the length or
// distance, or the index of a second-level table, whose size in bits is in the field of the code's
// bits.
constexpr uint32_t kLiteral = 1u << 31;
constexpr uint32_t kUnusual = 1u << 15;
constexpr uint32_t kSubtable = 1u << 14;
constexpr uint32_t kEndOfBlock = 1u << 13;
constexpr uint32_t kInvalid = 1u << 12;

constexpr uint32_t kLitlenBits = 11;
constexpr uint32_t kDistBits = 9;

constexpr size_t kHeaderBytes = 640;  // maximum size of a block header
constexpr uint32_t kSymbolBits = 48;  // maximum size of a symbol: a length and its distance

// Returns the length or distance of an entry whose code starts at the lowest bit of `bits`.
TS_INLINE uint32_t value(uint32_t entry, uint64_t bits) {
  return (entry >> 16) + (low(bits, entry & 0xff) >> (entry >> 8 & 15));
}

// The codes of a block: literals and lengths, and distances.
class Codes {
 public:
  // Reads the codes of a dynamic block, after its type. The input has kHeaderBytes bytes, or all
  // that are left. Throws if the codes are impossible or the input is cut off.
  void read(BitReader* in);
  // Sets the codes of a fixed block.
  void set_fixed();

  // Tells whether nearly all symbols are literals, if the codes suit the block.
  bool mostly_literals() const { return mostly_literals_; }

  const uint32_t* litlen() const { return litlen_.data(); }
  const uint32_t* dist() const { return dist_.data(); }

 private:
  bool fixed_ = false;  // the tables hold the fixed codes
  bool mostly_literals_ = false;
  // Root tables of 11 and 9 bits, followed by their second-level tables: at most 2342 and 594
  // entries.
  std::array<uint32_t, 2400> litlen_;
  std::array<uint32_t, 640> dist_;
};

}  // namespace ts::image
