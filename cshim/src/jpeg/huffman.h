// Decodes the Huffman codes of a segment, some symbols at a time, so that the threads of a warp
// need not wait for each other at the ends of blocks.
// The decoder returns exactly the coefficients of image/jpeg_entropy.h, or reports a failure: a bad
// code, data that ends early, an unexpected marker, or an end that is not at the next entry. It
// loads no byte outside the plan, whatever the bytes and the entries are.
#pragma once

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::jpeg {

constexpr int kLookBits = 11;

// The effect of a symbol, packed into 16 bits: the bits of its code and the following value, the
// bits of the value, and the number of coefficients to advance. kBlockEnd ends a block.
constexpr uint32_t kBlockEnd = 127;  // more than a block from any coefficient, unlike a long run

TS_HOST_DEVICE uint32_t packed_step(uint32_t length, uint32_t symbol) {
  const uint32_t size = symbol & 15;
  const uint32_t run = symbol >> 4 & 15;
  const uint32_t passed = size == 0 && run != 15 ? kBlockEnd : run + 1;
  return (length + size) | size << 5 | passed << 9;
}

TS_HOST_DEVICE uint32_t step_bits(uint32_t step) { return step & 31; }
TS_HOST_DEVICE uint32_t value_bits(uint32_t step) { return step >> 5 & 15; }
TS_HOST_DEVICE uint32_t passed_by(uint32_t step) { return step >> 9; }

// A look-up table indexed by the next kLookBits bits: the packed step; 0 for longer codes.
struct HuffmanTable {
  uint16_t look[1 << kLookBits];
  // For each length: the first 16-bit prefix without a code of this length or shorter, and for a
  // code of this length its symbol's index minus the code.
  uint32_t limit[17];
  int32_t offset[17];
  uint8_t symbols[256];
};

// A block of the MCU. In the component's plane it is block `first` + per_row * row of MCUs +
// per_column * column of MCUs, counted from the first MCU that the crop needs.
struct BlockOfMcu {
  uint32_t first, per_row, per_column;
  uint8_t component, dc_table, ac_table, padding;
};

struct HuffmanTables {
  HuffmanTable table[kMaxTables];
  uint8_t places[64];  // positions of the zigzag order in a block
  BlockOfMcu block[kMaxBlocks];
};

// Look-ups of two symbols at once, for the search for entries (jpeg/sync.h), which needs no values.
// Indexed by the next kLookBits bits. An entry has the bits of both symbols, and the number of
// coefficients that they advance << 8. It has only the first symbol if that ends the block, or if
// the second one's code is not all among the bits. It is 0 if the first code is longer.
struct SearchTables : HuffmanTables {
  uint16_t pairs[kMaxTables][1 << kLookBits];
};

static_assert(sizeof(SearchTables) == kTablesScratch && sizeof(HuffmanTables) % 16 == 0 &&
                  kTablesScratch % 16 == 0,
              "jpeg/plan.h has the size, and the tables are copied by 16 bytes");

// Finds the codes that are not in a look-up table: see HuffmanTable.
struct LongCodes {
  uint32_t limit[17];
  int32_t offset[17];
  uint8_t symbols[256];
};

// What a pass of the search needs of SearchTables. An entry of `look` has a pair in its lower half:
// the bits (5 bits), and the number of coefficients from bit 8 on (7 bits; kBlockEnd also for a
// pair that ends the block). The upper half has the single symbol in the same format. The four
// other bits of the lower half are the size of the single symbol's value. A block of the MCU is its
// component | the first entry of its table for DC differences << 2 | that of its other table << 16.
struct PassTables {
  uint32_t look[kMaxTables << kLookBits];
  LongCodes longer[kMaxTables];
  uint32_t block[kMaxBlocks];
};

constexpr uint32_t kPairBits = 0x7F1F;  // the bits of an entry that its pair has

TS_HOST_DEVICE uint32_t pass_entry(uint32_t single, uint32_t pair) {
  const uint32_t size = single >> 5 & 15;
  const uint32_t passed = pair >> 8;
  return (pair & 31) | (size & 7) << 5 | (passed < kBlockEnd ? passed : kBlockEnd) << 8 |
         (size >> 3) << 15 | (single & 31) << 16 | single >> 9 << 24;
}

// Returns the packed step of an entry's single symbol.
TS_HOST_DEVICE uint32_t single_step(uint32_t entry) {
  return (entry >> 16 & 31) | (entry & 0xE0) | (entry >> 15 & 1) << 8 | entry >> 24 << 9;
}

TS_HOST_DEVICE uint32_t component_of(uint32_t block) { return block & 3; }
TS_HOST_DEVICE uint32_t dc_look(uint32_t block) { return block >> 2 & 0x3FFF; }
TS_HOST_DEVICE uint32_t ac_look(uint32_t block) { return block >> 16; }

TS_HOST_DEVICE uint8_t zigzag_place(uint32_t i) {
  constexpr uint8_t kOrder[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                  35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                  58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
  return static_cast<uint8_t>(column_place(kOrder[i]));
}

// Reports whether this is a prefix code without a code of all ones. A code for DC differences must
// also have sizes of at most 15 bits as symbols. The planner checks every code.
inline bool valid_code(const HuffmanCode& code, bool dc) {
  uint32_t next = 0;
  uint32_t symbols = 0;
  for (int length = 1; length <= 16; ++length) {
    const uint32_t count = code.counts[length - 1];
    next += count;
    symbols += count;
    if (symbols > 256 || (count != 0 && next >= 1u << length)) return false;
    next <<= 1;
  }
  for (uint32_t i = 0; dc && i < symbols; ++i) {
    if (code.symbols[i] > 15) return false;
  }
  return true;
}

TS_HOST_DEVICE void build_limits(const HuffmanCode& code, HuffmanTable* table) {
  uint32_t next = 0;
  int32_t index = 0;
  for (int length = 1; length <= 16; ++length) {
    table->offset[length] = index - static_cast<int32_t>(next);
    next += code.counts[length - 1];
    index += code.counts[length - 1];
    table->limit[length] = next << (16 - length);
    next <<= 1;
  }
}

// Returns the entry of `prefix`, after build_limits.
TS_HOST_DEVICE uint16_t look_up_entry(const HuffmanCode& code, const HuffmanTable& table,
                                      uint32_t prefix) {
  const uint32_t bits = prefix << (16 - kLookBits);
  for (int length = 1; length <= kLookBits; ++length) {
    if (bits < table.limit[length]) {
      const int32_t index = static_cast<int32_t>(bits >> (16 - length)) + table.offset[length];
      return static_cast<uint16_t>(
          packed_step(static_cast<uint32_t>(length), code.symbols[index & 255]));
    }
  }
  return 0;
}

TS_HOST_DEVICE BlockOfMcu block_of_mcu(const Plan& plan, uint32_t i) {
  const Component& component = plan.component[plan.block_component[i]];
  BlockOfMcu block;
  block.first = component.first_block + plan.block_y[i] * component.block_columns + plan.block_x[i];
  block.per_row = static_cast<uint32_t>(component.down) * component.block_columns;
  block.per_column = static_cast<uint32_t>(component.across);
  block.component = plan.block_component[i];
  block.dc_table = plan.block_dc[i];
  block.ac_table = plan.block_ac[i];
  block.padding = 0;
  return block;
}

// Builds the share of thread `thread` of `threads` of the tables, in steps with a barrier between
// them.
TS_HOST_DEVICE void build_tables_1(const Plan& plan, const uint8_t* base, HuffmanTables* tables,
                                   uint32_t thread, uint32_t threads) {
  const auto* codes = reinterpret_cast<const HuffmanCode*>(base + plan.codes_at);
  for (uint32_t i = thread; i < plan.tables; i += threads)
    build_limits(codes[i], &tables->table[i]);
  for (uint32_t i = thread; i < 64; i += threads) {
    tables->places[i] = zigzag_place(i);
  }
  for (uint32_t i = thread; i < plan.blocks; i += threads) tables->block[i] = block_of_mcu(plan, i);
}

TS_HOST_DEVICE void build_tables_2(const Plan& plan, const uint8_t* base, HuffmanTables* tables,
                                   uint32_t thread, uint32_t threads) {
  const auto* codes = reinterpret_cast<const HuffmanCode*>(base + plan.codes_at);
  for (uint32_t t = 0; t < plan.tables; ++t) {
    HuffmanTable& table = tables->table[t];
    for (uint32_t i = thread; i < 256; i += threads) table.symbols[i] = codes[t].symbols[i];
    for (uint32_t i = thread; i < 1u << kLookBits; i += threads) {
      table.look[i] = look_up_entry(codes[t], table, i);
    }
  }
}

TS_HOST_DEVICE uint16_t pair_entry(const HuffmanTable& table, uint32_t prefix) {
  const uint32_t first = table.look[prefix];
  const uint32_t bits = step_bits(first);
  const uint32_t passed = passed_by(first);
  if (first != 0 && passed != kBlockEnd && bits < kLookBits) {
    const uint32_t second = table.look[prefix << bits & ((1 << kLookBits) - 1)];
    if (second != 0 && step_bits(second) - value_bits(second) <= kLookBits - bits) {
      return static_cast<uint16_t>((bits + step_bits(second)) | (passed + passed_by(second)) << 8);
    }
  }
  return static_cast<uint16_t>(bits | passed << 8);
}

// Builds a thread's share of the pairs, after build_tables_2 and a barrier.
TS_HOST_DEVICE void build_tables_3(const Plan& plan, SearchTables* tables, uint32_t thread,
                                   uint32_t threads) {
  for (uint32_t t = 0; t < plan.tables; ++t) {
    for (uint32_t i = thread; i < 1u << kLookBits; i += threads) {
      tables->pairs[t][i] = pair_entry(tables->table[t], i);
    }
  }
}

// Copies a thread's share of what a pass needs, after build_tables_3.
TS_HOST_DEVICE void copy_pass_tables(const Plan& plan, const SearchTables& from, uint32_t thread,
                                     uint32_t threads, PassTables* tables) {
  for (uint32_t t = 0; t < plan.tables; ++t) {
    const HuffmanTable& table = from.table[t];
    for (uint32_t i = thread; i < 1u << kLookBits; i += threads) {
      tables->look[t << kLookBits | i] = pass_entry(table.look[i], from.pairs[t][i]);
    }
    LongCodes& longer = tables->longer[t];
    for (uint32_t i = thread; i < 17; i += threads) {
      longer.limit[i] = table.limit[i];
      longer.offset[i] = table.offset[i];
    }
    for (uint32_t i = thread; i < 256; i += threads) longer.symbols[i] = table.symbols[i];
  }
  for (uint32_t i = thread; i < plan.blocks; i += threads) {
    tables->block[i] = plan.block_component[i] | uint32_t{plan.block_dc[i]} << (kLookBits + 2) |
                       uint32_t{plan.block_ac[i]} << (kLookBits + 16);
  }
}

// ---- entry points ------------------------------------------------------------------------------

struct Entry {
  uint32_t bit;
  int32_t dc[kMaxComponents];
};

// Returns `width` (at most 32) bits of little-endian words.
TS_HOST_DEVICE uint32_t packed_field(const uint8_t* packed, uint64_t bit, uint32_t width) {
  const auto* words = reinterpret_cast<const uint32_t*>(packed) + (bit >> 5);
  const uint64_t both = uint64_t{words[1]} << 32 | words[0];
  return static_cast<uint32_t>(both >> (bit & 31) & ((uint64_t{1} << width) - 1));
}

// Computes image/entries.h's Entries::at.
TS_HOST_DEVICE Entry entry_at(const Plan& plan, const uint8_t* base, uint32_t i) {
  const uint8_t* packed = base + plan.entries_at;
  uint64_t bit = uint64_t{i} * plan.stride;
  Entry entry;
  entry.bit = static_cast<uint32_t>(static_cast<uint32_t>(plan.origin) +
                                    static_cast<uint32_t>(uint64_t{i} * plan.slope >> 8) +
                                    packed_field(packed, bit, plan.widths[0]));
  bit += plan.widths[0];
  for (int c = 0; c < kMaxComponents; ++c) {
    const uint32_t width = plan.widths[1 + c];
    entry.dc[c] = static_cast<int16_t>(static_cast<uint32_t>(plan.lowest[c]) +
                                       packed_field(packed, bit, width));
    bit += width;
  }
  return entry;
}

// ---- bits --------------------------------------------------------------------------------------

struct BitReader {
  const uint8_t* data;  // the plan's bytes
  uint32_t next;        // the next byte to load
  uint32_t limit;       // loading ends before this byte
  uint32_t end;         // the end of the bytes, after the limit
  uint64_t bits;        // the next bits, from the top down; followed by zeros
  int32_t count;        // valid bits, and zeros that count as valid
  int32_t zeros;        // part of count: zeros from after the end
};

TS_HOST_DEVICE uint32_t load_big_endian(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  const auto address = reinterpret_cast<uintptr_t>(from);
  const auto* words = reinterpret_cast<const uint32_t*>(address & ~uintptr_t{3});
  const uint32_t word =
      __funnelshift_r(__ldg(words), __ldg(words + 1), static_cast<uint32_t>(address & 3) * 8);
  return __byte_perm(word, 0, 0x0123);
#else
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return __builtin_bswap32(word);
#endif
}

TS_HOST_DEVICE uint32_t leading_zeros(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__clz(static_cast<int>(word)));
#else
  return word == 0 ? 32 : static_cast<uint32_t>(__builtin_clz(word));
#endif
}

// Loads byte by byte, up to a marker or the limit. Zeros follow.
TS_HOST_DEVICE void refill_slowly(BitReader* reader) {
  while (reader->count <= 56) {
    if (reader->next < reader->limit) {
      const uint32_t byte = reader->data[reader->next];
      const bool stuffed =
          byte == 0xFF && reader->next + 1 < reader->end && reader->data[reader->next + 1] == 0;
      if (byte != 0xFF || stuffed) {
        reader->bits |= uint64_t{byte} << (56 - reader->count);
        reader->count += 8;
        reader->next += stuffed ? 2 : 1;
        continue;
      }
    }
    reader->count += 8;
    reader->zeros += 8;
  }
}

// Loads until there are more than 32 bits, enough for a code of 16 bits and a value of 15 bits.
TS_HOST_DEVICE void refill(BitReader* reader) {
  while (reader->count <= 32) {
    // A word, and the next byte, which may be a stuffed one.
    if (reader->next + 5 > reader->limit) return refill_slowly(reader);
    uint32_t word = load_big_endian(reader->data + reader->next);
    const uint32_t ones = ((word & 0x7F7F7F7F) + 0x01010101) & word & 0x80808080;
    uint32_t bytes = 4;
    uint32_t step = 4;
    if (ones != 0) {  // a 0xFF byte: loads up to it, and skips the stuffed byte
      bytes = (leading_zeros(ones) >> 3) + 1;
      step = bytes + 1;
      if (reader->data[reader->next + bytes] != 0) return refill_slowly(reader);
      word &= 0xFFFFFFFFu << (32 - 8 * bytes);
    }
    reader->bits |= uint64_t{word} << (32 - reader->count);
    reader->count += static_cast<int32_t>(8 * bytes);
    reader->next += step;
  }
}

// Returns the byte with the next bit, if the reader has at least one bit from before the end;
// otherwise the byte after the last one. Sets *part to the number of its bits that are left, 1 to
// 8; 0 if all loaded bytes are used up.
TS_HOST_DEVICE uint32_t current_byte(const BitReader& reader, int32_t* part) {
  const int32_t left = reader.count - reader.zeros;
  uint32_t byte = reader.next;
  for (int32_t i = 0; i < left; i += 8) {
    const bool stuffed = byte >= 2 && reader.data[byte - 1] == 0 && reader.data[byte - 2] == 0xFF;
    byte -= stuffed ? 2 : 1;
  }
  *part = left == 0 ? 0 : (left - 1) % 8 + 1;
  return byte;
}

// Moves to the next restart interval: less than a byte of padding, then the expected marker.
TS_HOST_DEVICE bool restart(BitReader* reader, uint32_t expected) {
  int32_t part;
  uint32_t byte = current_byte(*reader, &part);
  if (part != 0 && part != 8) {
    const bool stuffed = reader->data[byte] == 0xFF;
    byte += stuffed ? 2 : 1;
  }
  const uint32_t first = byte;
  while (byte < reader->end && reader->data[byte] == 0xFF) ++byte;
  if (byte == first || byte >= reader->end || reader->data[byte] != 0xD0 + expected) return false;
  reader->next = byte + 1;
  // The limit is after the marker, unless an entry is forged.
  if (reader->next > reader->limit) return false;
  reader->bits = 0;
  reader->count = reader->zeros = 0;
  return true;
}

// ---- segments ----------------------------------------------------------------------------------

// The position of the search's decoder: a block of an MCU and a coefficient.
struct Cursor {
  uint32_t block, coefficient;
  int32_t dc[kMaxComponents];
  uint32_t component, dc_table, ac_table;  // of the block
};

// Finds a code that is not in the look-up table. Returns the packed step, or 0. `prefix` is the
// next 16 bits. The limits do not decrease, so the number of limits reached gives the length
// without a branch.
template <typename Table>
TS_HOST_DEVICE uint32_t find_long_code(const Table& table, uint32_t prefix) {
  if (prefix >= table.limit[16]) return 0;
  uint32_t length = kLookBits + 1;
  for (int i = kLookBits + 1; i < 16; ++i) length += prefix >= table.limit[i] ? 1 : 0;
  const int32_t index = static_cast<int32_t>(prefix >> (16 - length)) + table.offset[length];
  return packed_step(length, table.symbols[index & 255]);
}

// Returns the value that `size` (0 to 15) bits encode: half of the codes are negative.
TS_HOST_DEVICE int32_t extend(uint32_t bits, uint32_t size) {
  const int32_t value = static_cast<int32_t>(bits);
  return size == 0 || bits >> (size - 1) != 0 ? value : value + 1 - (1 << size);
}

// Returns the value that the first `size` (0 to 15) bits of a word encode: see extend.
TS_HOST_DEVICE int32_t extend_top(uint32_t word, uint32_t size) {
  const int32_t negative = static_cast<int32_t>(~word) >> 31;
  return static_cast<int32_t>(word >> 1 >> (31 - size)) +
         static_cast<int32_t>(static_cast<uint32_t>(negative) << size) - negative;
}

// The number of symbols between two refills of a thread's bits. All threads of a warp refill and
// move to the next block together, instead of waiting for single threads that must do so.
constexpr int kSymbolsAtOnce = 4;

enum class Step { kDecoded, kNeedsBits, kBad };

// Decodes the next symbol, if its bits are there: 31 bits are enough for any. kBad is a bad code,
// or a run beyond the block's end. At the block's end the coefficient is 64.
TS_HOST_DEVICE Step decode_symbol(const PassTables& tables, BitReader* reader, Cursor* at) {
  const uint32_t table = at->coefficient == 0 ? at->dc_table : at->ac_table;
  uint32_t found = single_step(
      tables.look[table << kLookBits | static_cast<uint32_t>(reader->bits >> (64 - kLookBits))]);
  if (found == 0) {
    found = find_long_code(tables.longer[table], static_cast<uint32_t>(reader->bits >> 48));
    if (found == 0) return reader->count < 16 ? Step::kNeedsBits : Step::kBad;
  }
  const uint32_t size = value_bits(found);
  if (static_cast<int32_t>(step_bits(found)) > reader->count) return Step::kNeedsBits;
  const uint64_t behind = reader->bits << (step_bits(found) - size);
  const int32_t value = extend(static_cast<uint32_t>(behind >> 1 >> (63 - size)), size);
  reader->bits = behind << size;
  reader->count -= static_cast<int32_t>(step_bits(found));

  if (at->coefficient == 0) {
    // Wraps like libjpeg's predictor. No array is indexed by a variable, because the device would
    // then keep it in slow memory.
    const int32_t before = at->component == 0   ? at->dc[0]
                           : at->component == 1 ? at->dc[1]
                                                : at->dc[2];
    const auto dc =
        static_cast<int32_t>(static_cast<uint32_t>(before) + static_cast<uint32_t>(value));
    if (at->component == 0) at->dc[0] = dc;
    if (at->component == 1) at->dc[1] = dc;
    if (at->component == 2) at->dc[2] = dc;
    at->coefficient = 1;
    return Step::kDecoded;
  }
  if (passed_by(found) == kBlockEnd) {
    at->coefficient = 64;
    return Step::kDecoded;
  }
  at->coefficient += passed_by(found);
  return at->coefficient > 64 ? Step::kBad : Step::kDecoded;
}

// Reports whether the reader and the predictors agree with the next entry.
TS_HOST_DEVICE bool meets(const Entry& entry, uint32_t shift, const BitReader& reader,
                          const int32_t (&dc)[kMaxComponents]) {
  int32_t part;
  const uint32_t byte = current_byte(reader, &part);
  const uint32_t used = part == 0 ? 0 : 8 - static_cast<uint32_t>(part);
  bool same = byte - shift == entry.bit >> 3 && used == (entry.bit & 7);
  for (int c = 0; c < kMaxComponents; ++c) same = same && dc[c] == entry.dc[c];
  return same;
}

// Reads the bytes of a segment in words, and loads one word ahead.
struct SegmentReader : BitReader {
  uint32_t ahead[2];  // the bytes from `next` on, as load_ahead has loaded them
};

// The number of bytes that load_ahead needs.
constexpr uint32_t kAheadBytes = 8;

TS_HOST_DEVICE void load_ahead(SegmentReader* reader) {
  if (reader->next + kAheadBytes > reader->limit) return;
  const uint8_t* const from = reader->data + reader->next;
#if defined(__CUDA_ARCH__)
  const auto* words =
      reinterpret_cast<const uint32_t*>(reinterpret_cast<uintptr_t>(from) & ~uintptr_t{3});
  reader->ahead[0] = __ldg(words);
  reader->ahead[1] = __ldg(words + 1);
#else
  std::memcpy(reader->ahead, from, sizeof reader->ahead);
#endif
}

// Returns the four bytes loaded ahead, the first one on top, and the byte after them.
TS_HOST_DEVICE uint32_t word_ahead(const SegmentReader& reader, uint32_t* behind) {
#if defined(__CUDA_ARCH__)
  const uint32_t shift =
      static_cast<uint32_t>(reinterpret_cast<uintptr_t>(reader.data + reader.next) & 3) * 8;
  *behind = reader.ahead[1] >> shift & 0xFF;
  return __byte_perm(__funnelshift_r(reader.ahead[0], reader.ahead[1], shift), 0, 0x0123);
#else
  *behind = reader.ahead[1] & 0xFF;
  return __builtin_bswap32(reader.ahead[0]);
#endif
}

// Loads once, if there are at most 32 bits. A 0xFF byte ends the load, and the stuffed byte after
// it is skipped, without a branch.
TS_HOST_DEVICE void refill_once(SegmentReader* reader) {
  if (reader->count > 32) return;
  if (reader->next + kAheadBytes > reader->limit) return refill_slowly(reader);
  uint32_t behind;
  const uint32_t word = word_ahead(*reader, &behind);
  const uint32_t ones = ((word & 0x7F7F7F7F) + 0x01010101) & word & 0x80808080;
  const uint32_t before = leading_zeros(ones) >> 3;  // the first 0xFF; 4: none
  const uint32_t bytes = smaller(before + 1, 4u);
  const uint64_t five = uint64_t{word} << 8 | behind;
  if (ones != 0 && (five >> (24 - 8 * smaller(before, 3u)) & 0xFF) != 0) {  // a marker
    refill_slowly(reader);
  } else {
    reader->bits |= uint64_t{word & 0xFFFFFFFFu << (32 - 8 * bytes)} << (32 - reader->count);
    reader->count += static_cast<int32_t>(8 * bytes);
    reader->next += bytes + (ones != 0 ? 1 : 0);
  }
  load_ahead(reader);
}

constexpr uint32_t kNotNeeded = UINT32_MAX;

// Decodes the blocks of a segment, one after the other.
struct SegmentDecoder {
  SegmentReader reader;
  uint32_t mcu, end;     // the MCU, and the first one after the segment
  uint32_t column, row;  // of the MCU, among the MCUs that the crop needs
  uint32_t block;        // of the MCU
  BlockOfMcu of;         // the block
  uint32_t place;        // position of the block among the crop's blocks, or kNotNeeded
  uint32_t coefficient;  // the next coefficient of the block; 64 or more at its end
  uint32_t written;      // coefficients to write: 64, or 0 for a block that is not needed
  uint32_t marker, to_restart;
  int32_t dc[kMaxComponents];
  int16_t* values;  // 64 coefficients of the block, column by column
  bool good;        // false: the host must decode the image, and the remaining blocks are zeros
};

TS_HOST_DEVICE void enter_block(const Plan& plan, const HuffmanTables& tables,
                                SegmentDecoder* decoder) {
  decoder->of = tables.block[decoder->block];
  const BlockOfMcu& of = decoder->of;
  decoder->place = decoder->column < plan.mcu_columns && decoder->row < plan.mcu_rows
                       ? of.first + decoder->row * of.per_row + decoder->column * of.per_column
                       : kNotNeeded;
  decoder->coefficient = 0;
  decoder->written = decoder->place != kNotNeeded ? 64 : 0;
}

// Writes a coefficient at its position in zigzag order.
TS_HOST_DEVICE void write_coefficient(const HuffmanTables& tables, const SegmentDecoder& decoder,
                                      uint32_t place, int32_t value) {
  decoder.values[tables.places[place]] = static_cast<int16_t>(value);
}

// Starts segment `index` of the plan, which is at `base`. `values` are zeros.
TS_HOST_DEVICE SegmentDecoder begin_segment(const Plan& plan, const uint8_t* base,
                                            const HuffmanTables& tables, uint32_t index,
                                            int16_t* values) {
  const Segment segment = reinterpret_cast<const Segment*>(base + plan.segments_at)[index];
  const Entry entry = entry_at(plan, base, segment.entry);
  const bool last = segment.entry + 1 >= plan.entries;
  SegmentDecoder decoder;
  SegmentReader& reader = decoder.reader;
  reader.data = base + plan.scan_at;
  // Bytes after the segment are loaded too, but never become part of it: its last bit must be at
  // the next entry.
  reader.limit = reader.end = plan.scan_bytes;
  reader.next = (entry.bit >> 3) + segment.shift;
  // The next entry may be within the last byte.
  const uint32_t bound =
      last ? reader.end : ((entry_at(plan, base, segment.entry + 1).bit + 7) >> 3) + segment.shift;
  decoder.good = bound <= reader.end && reader.next < bound;
  reader.bits = 0;
  reader.count = reader.zeros = 0;
  if (decoder.good) {
    load_ahead(&reader);
    refill_once(&reader);
    reader.bits <<= entry.bit & 7;
    reader.count -= static_cast<int32_t>(entry.bit & 7);
  } else {
    reader.next = reader.limit;  // a forged entry may be anywhere
  }
  const uint32_t mcu = segment.entry * plan.spacing;
  const uint32_t row = mcu / plan.mcus_per_row;
  decoder.mcu = mcu;
  decoder.end = last ? plan.mcus : mcu + plan.spacing;
  decoder.column = mcu - row * plan.mcus_per_row - plan.mcu_x;
  decoder.row = row - plan.mcu_y;
  decoder.block = 0;
  for (int c = 0; c < kMaxComponents; ++c) decoder.dc[c] = entry.dc[c];
  const uint32_t interval = plan.restart_interval;
  decoder.marker = interval == 0 ? 0 : mcu / interval & 7;
  decoder.to_restart = interval == 0 ? UINT32_MAX : interval - mcu % interval;
  decoder.values = values;
  enter_block(plan, tables, &decoder);
  return decoder;
}

// Decodes a DC difference, or a code that is not in the look-up table, if its bits are there.
// `step` is the table's entry. Returns false for a bad code.
TS_HOST_DEVICE bool decode_rare(const HuffmanTables& tables, uint32_t step,
                                SegmentDecoder* decoder) {
  SegmentReader& reader = decoder->reader;
  const bool dc = decoder->coefficient == 0;
  if (step == 0) {
    const HuffmanTable& table = tables.table[dc ? decoder->of.dc_table : decoder->of.ac_table];
    step = find_long_code(table, static_cast<uint32_t>(reader.bits >> 48));
    if (step == 0) return reader.count < 16;
  }
  if (static_cast<int32_t>(step_bits(step)) > reader.count) return true;
  const uint32_t size = value_bits(step);
  const uint64_t behind = reader.bits << (step_bits(step) - size);
  int32_t value = extend(static_cast<uint32_t>(behind >> 32) >> 1 >> (31 - size), size);
  reader.bits = behind << size;
  reader.count -= static_cast<int32_t>(step_bits(step));
  if (dc) {
    // Wraps like libjpeg's predictor. No array is indexed by a variable, because the device would
    // then keep it in slow memory.
    int32_t sum = 0;
    for (uint32_t c = 0; c < kMaxComponents; ++c) {
      const bool same = c == decoder->of.component;
      decoder->dc[c] = static_cast<int32_t>(static_cast<uint32_t>(decoder->dc[c]) +
                                            (same ? static_cast<uint32_t>(value) : 0));
      sum = same ? decoder->dc[c] : sum;
    }
    value = sum;
    decoder->coefficient = 1;
  } else {
    decoder->coefficient += passed_by(step);
  }
  if ((dc || size != 0) && decoder->coefficient <= decoder->written) {
    write_coefficient(tables, *decoder, decoder->coefficient - 1, value);
  }
  return true;
}

// The number of symbols that are decoded between two refills of a segment's bits.
constexpr int kSegmentSymbols = 6;

// Decodes some symbols of the block. Returns whether that was its end.
TS_HOST_DEVICE bool decode_symbols(const HuffmanTables& tables, SegmentDecoder* decoder) {
  if (!decoder->good) return true;
  SegmentReader& reader = decoder->reader;
  refill_once(&reader);
  const uint16_t* const look = tables.table[decoder->of.ac_table].look;
  const bool dc = decoder->coefficient == 0;
  const uint16_t* const first = dc ? tables.table[decoder->of.dc_table].look : look;
  const uint32_t found = first[reader.bits >> (64 - kLookBits)];
  if ((dc || found == 0) && !decode_rare(tables, found, decoder)) {
    decoder->good = false;
    return true;
  }
  // Without a branch, for which a warp would wait: a symbol that is not decoded has no bits.
  TS_UNROLL
  for (int i = 0; i < kSegmentSymbols; ++i) {
    const uint32_t step = look[reader.bits >> (64 - kLookBits)];
    const bool decoded =
        static_cast<int32_t>(step_bits(step)) <= reader.count && decoder->coefficient - 1 < 63;
    const uint32_t size = value_bits(step);
    const uint32_t taken = decoded ? step_bits(step) : 0;
    const auto value = static_cast<uint32_t>(reader.bits << (step_bits(step) - size) >> 32);
    decoder->coefficient += decoded ? passed_by(step) : 0;
    if (decoded && size != 0 && decoder->coefficient <= decoder->written) {
      write_coefficient(tables, *decoder, decoder->coefficient - 1, extend_top(value, size));
    }
    reader.bits <<= taken;
    reader.count -= static_cast<int32_t>(taken);
  }
  const uint32_t at = decoder->coefficient;
  if (at > 64 && at < kBlockEnd) decoder->good = false;  // a run beyond the block's end
  return at >= 64;
}

// Moves to the next block. The values are zeros again. Returns false at the end of the segment.
TS_HOST_DEVICE bool next_block(const Plan& plan, const HuffmanTables& tables,
                               SegmentDecoder* decoder) {
  if (++decoder->block == plan.blocks) {
    SegmentReader& reader = decoder->reader;
    decoder->block = 0;
    if (reader.count < reader.zeros) decoder->good = false;
    ++decoder->mcu;
    if (++decoder->column == plan.mcus_per_row - plan.mcu_x) {
      decoder->column = 0u - plan.mcu_x;
      ++decoder->row;
    }
    // The entry after a restart marker is positioned after the marker.
    if (--decoder->to_restart == 0 && decoder->mcu != plan.mcus) {
      if (decoder->good) decoder->good = restart(&reader, decoder->marker);
      load_ahead(&reader);
      decoder->marker = (decoder->marker + 1) & 7;
      decoder->to_restart = plan.restart_interval;
      for (int c = 0; c < kMaxComponents; ++c) decoder->dc[c] = 0;
    }
    if (decoder->mcu == decoder->end) return false;
  }
  enter_block(plan, tables, decoder);
  return true;
}

// Ends segment `index`. Returns false if the host must decode the image.
TS_HOST_DEVICE bool end_segment(const Plan& plan, const uint8_t* base, uint32_t index,
                                const SegmentDecoder& decoder) {
  const Segment segment = reinterpret_cast<const Segment*>(base + plan.segments_at)[index];
  if (!decoder.good || segment.entry + 1 >= plan.entries) return decoder.good;
  return meets(entry_at(plan, base, segment.entry + 1), segment.shift, decoder.reader, decoder.dc);
}

}  // namespace ts::jpeg
