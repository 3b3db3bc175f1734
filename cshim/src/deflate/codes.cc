#include "deflate/codes.h"

#include <algorithm>

namespace ts::image {
namespace {

constexpr uint32_t kMaxCodeBits = 15;
constexpr size_t kMaxLitlens = 286;
constexpr size_t kMaxDists = 30;
// Symbols of the fixed codes, which have code words that are invalid.
constexpr size_t kLitlenSymbols = 288;
constexpr size_t kDistSymbols = 32;
constexpr size_t kPrecodeSymbols = 19;

constexpr uint16_t kLengthBase[] = {3,  4,  5,  6,  7,  8,  9,  10, 11,  13,  15,  17,  19,  23, 27,
                                    31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227, 258};
constexpr uint8_t kLengthExtra[] = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2,
                                    2, 3, 3, 3, 3, 4, 4, 4, 4, 5, 5, 5, 5, 0};
constexpr uint16_t kDistBase[] = {1,    2,    3,    4,    5,    7,    9,    13,    17,    25,
                                  33,   49,   65,   97,   129,  193,  257,  385,   513,   769,
                                  1025, 1537, 2049, 3073, 4097, 6145, 8193, 12289, 16385, 24577};
constexpr uint8_t kDistExtra[] = {0, 0, 0, 0, 1, 1, 2, 2,  3,  3,  4,  4,  5,  5,  6,
                                  6, 7, 7, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13};

// Tells whether the code words of lengths, and the one that ends the block, have at most 1/16 of
// the code's share, which is 2^-length for each code word.
bool has_few_lengths(const uint8_t* lengths, size_t symbols) {
  constexpr uint32_t kAll = 1u << kMaxCodeBits;
  uint32_t others = 0;
  for (size_t i = 256; i < symbols; ++i) others += lengths[i] > 0 ? kAll >> lengths[i] : 0;
  return others <= kAll / 16;
}

// The entries of the symbols, without the bits of their code words.
constexpr std::array<uint32_t, kLitlenSymbols> litlen_entries() {
  std::array<uint32_t, kLitlenSymbols> entries{};
  for (uint32_t i = 0; i < 256; ++i) entries[i] = kLiteral | i << 16;
  entries[256] = kUnusual | kEndOfBlock;
  for (uint32_t i = 257; i < kLitlenSymbols; ++i) {
    entries[i] = i >= kMaxLitlens
                     ? kUnusual | kInvalid
                     : static_cast<uint32_t>(kLengthBase[i - 257]) << 16 | kLengthExtra[i - 257];
  }
  return entries;
}

constexpr std::array<uint32_t, kDistSymbols> dist_entries() {
  std::array<uint32_t, kDistSymbols> entries{};
  for (uint32_t i = 0; i < kDistSymbols; ++i) {
    entries[i] = i >= kMaxDists ? kUnusual | kInvalid
                                : static_cast<uint32_t>(kDistBase[i]) << 16 | kDistExtra[i];
  }
  return entries;
}

constexpr std::array<uint32_t, kPrecodeSymbols> precode_entries() {
  std::array<uint32_t, kPrecodeSymbols> entries{};
  for (uint32_t i = 0; i < kPrecodeSymbols; ++i) entries[i] = i << 16;
  return entries;
}

constexpr auto kLitlenEntries = litlen_entries();
constexpr auto kDistEntries = dist_entries();
constexpr auto kPrecodeEntries = precode_entries();

// Which codes may leave code words unused: none, or a code with a single symbol.
enum class Incomplete { kNever, kSingle };

// Builds the table of a code from the lengths of its code words. Returns false if the lengths do
// not form a prefix code.
bool build(const uint8_t* lengths, size_t symbols, uint32_t root_bits, Incomplete allowed,
           const uint32_t* entries, uint32_t* table) {
  std::array<uint16_t, kMaxCodeBits + 1> counts{};
  for (size_t i = 0; i < symbols; ++i) ++counts[lengths[i]];
  uint32_t longest = kMaxCodeBits;
  while (longest > 0 && counts[longest] == 0) --longest;

  int32_t unused = 1;
  for (uint32_t n = 1; n <= kMaxCodeBits; ++n) {
    unused = 2 * unused - counts[n];
    if (unused < 0) return false;
  }
  if (unused > 0) {
    if (allowed == Incomplete::kNever || longest > 1) return false;
    std::fill(table, table + (size_t{1} << root_bits), kUnusual | kInvalid | 1u << 8 | 1u);
    for (size_t i = 0; i < symbols; ++i) {
      if (lengths[i] == 0) continue;
      for (size_t code = 0; code < size_t{1} << root_bits; code += 2) {
        table[code] = entries[i] + (1u << 8 | 1u);
      }
    }
    return true;
  }

  std::array<uint16_t, kMaxCodeBits + 2> offsets{};
  for (uint32_t n = 1; n <= kMaxCodeBits; ++n) {
    offsets[n + 1] = static_cast<uint16_t>(offsets[n] + counts[n]);
  }
  std::array<uint16_t, 320> sorted;
  for (size_t i = 0; i < symbols; ++i) {
    if (lengths[i] != 0) sorted[offsets[lengths[i]]++] = static_cast<uint16_t>(i);
  }

  // Visits the code words in order, with their bits reversed as in the stream. Fills the first part
  // of the root table, and doubles it for each longer length.
  const uint16_t* symbol = sorted.data();
  uint32_t code = 0;
  uint32_t length = 1;
  while (counts[length] == 0) ++length;
  uint32_t count = counts[length];
  uint32_t end = 1u << std::min(length, root_bits);
  const auto advance = [&](uint32_t n) {
    // Sets the last bit that is clear, and clears the ones after it.
    const uint32_t bit = 1u << (31 - __builtin_clz(code ^ ((1u << n) - 1)));
    code = (code & (bit - 1)) | bit;
  };
  while (length <= root_bits) {
    for (; count > 0; --count) {
      table[code] = entries[*symbol++] + (length << 8 | length);
      if (code == (1u << length) - 1) {
        for (; end < 1u << root_bits; end *= 2) std::copy(table, table + end, table + end);
        return true;
      }
      advance(length);
    }
    do {
      if (++length <= root_bits) {
        std::copy(table, table + end, table + end);
        end *= 2;
      }
    } while ((count = counts[length]) == 0);
  }
  end = 1u << root_bits;
  uint32_t prefix = ~0u;
  uint32_t start = 0;
  for (;;) {
    if (low(code, root_bits) != prefix) {
      prefix = low(code, root_bits);
      start = end;
      uint32_t bits = length - root_bits;
      for (uint32_t used = count; used < 1u << bits;) {
        ++bits;
        used = 2 * used + counts[root_bits + bits];
      }
      end = start + (1u << bits);
      table[prefix] = start << 16 | kUnusual | kSubtable | bits << 8 | root_bits;
    }
    const uint32_t extra = length - root_bits;
    const uint32_t e = entries[*symbol++] + (extra << 8 | extra);
    for (uint32_t i = start + (code >> root_bits); i < end; i += 1u << extra) table[i] = e;
    if (code == (1u << length) - 1) return true;
    advance(length);
    --count;
    while (count == 0) count = counts[++length];
  }
}

}  // namespace

void Codes::read(BitReader* in) {
  static constexpr uint8_t kOrder[] = {16, 17, 18, 0, 8,  7, 9,  6, 10, 5,
                                       11, 4,  12, 3, 13, 2, 14, 1, 15};
  const size_t litlens = in->take(5) + 257;
  const size_t dists = in->take(5) + 1;
  const size_t precodes = in->take(4) + 4;
  if (litlens > kMaxLitlens || dists > kMaxDists) damaged("too many codes");
  std::array<uint8_t, kPrecodeSymbols> precode{};
  for (size_t i = 0; i < precodes; ++i) precode[kOrder[i]] = static_cast<uint8_t>(in->take(3));
  std::array<uint32_t, 128> table;
  if (!build(precode.data(), precode.size(), 7, Incomplete::kNever, kPrecodeEntries.data(),
             table.data())) {
    damaged("the code of code lengths is impossible");
  }
  std::array<uint8_t, kMaxLitlens + kMaxDists> lengths;
  for (size_t i = 0; i < litlens + dists;) {
    if (in->count < 14) in->refill();
    const uint32_t e = table[low(in->bits, 7)];
    in->take(e & 0xff);
    const uint32_t symbol = e >> 16;
    if (symbol < 16) {
      lengths[i++] = static_cast<uint8_t>(symbol);
      continue;
    }
    uint8_t what = 0;
    size_t times;
    if (symbol == 16) {
      if (i == 0) damaged("a code length repeats nothing");
      what = lengths[i - 1];
      times = 3 + in->take(2);
    } else {
      times = symbol == 17 ? 3 + in->take(3) : 11 + in->take(7);
    }
    if (times > litlens + dists - i) damaged("too many code lengths");
    std::fill_n(lengths.begin() + static_cast<ptrdiff_t>(i), times, what);
    i += times;
  }
  if (lengths[256] == 0) damaged("a block has no end");
  fixed_ = false;
  mostly_literals_ = has_few_lengths(lengths.data(), litlens);
  if (!build(lengths.data(), litlens, kLitlenBits, Incomplete::kSingle, kLitlenEntries.data(),
             litlen_.data())) {
    damaged("the code of literals and lengths is impossible");
  }
  if (!build(lengths.data() + litlens, dists, kDistBits, Incomplete::kSingle, kDistEntries.data(),
             dist_.data())) {
    damaged("the code of distances is impossible");
  }
}

void Codes::set_fixed() {
  if (fixed_) return;
  mostly_literals_ = false;
  std::array<uint8_t, kLitlenSymbols> lengths;
  std::fill(lengths.begin(), lengths.begin() + 144, uint8_t{8});
  std::fill(lengths.begin() + 144, lengths.begin() + 256, uint8_t{9});
  std::fill(lengths.begin() + 256, lengths.begin() + 280, uint8_t{7});
  std::fill(lengths.begin() + 280, lengths.end(), uint8_t{8});
  build(lengths.data(), kLitlenSymbols, kLitlenBits, Incomplete::kNever, kLitlenEntries.data(),
        litlen_.data());
  std::fill(lengths.begin(), lengths.begin() + kDistSymbols, uint8_t{5});
  build(lengths.data(), kDistSymbols, kDistBits, Incomplete::kNever, kDistEntries.data(),
        dist_.data());
  fixed_ = true;
}

}  // namespace ts::image
