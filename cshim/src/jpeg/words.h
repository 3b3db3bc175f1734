// Decodes Huffman codes from whole words: nearly all of a scan is codes and stuffed bytes, far from
// its end. There is no look at the end of the data, and no position: bits are only counted.
// Whatever else there may be is left to those who decode carefully.
#pragma once

#include <cstdint>

#include "jpeg/huffman.h"
#include "jpeg/plan.h"

namespace ts::jpeg {

// Bytes before the end of the scan that no word is taken from: the bits of two words, each byte of
// them stuffed, and a word that is loaded ahead, have room between there and the end.
constexpr uint32_t kWordMargin = 48;

struct WordReader {
  const uint8_t* data;
  uint32_t next;   // the byte behind those that were taken, a multiple of four
  uint32_t until;  // the byte at which the pass ends, a multiple of four
  uint32_t ahead;  // the word at `next`
  bool stuffed;    // the byte at `next` is a stuffed one
  uint64_t bits;   // the next bits, from the top down; zeros behind them
  int32_t count;   // the number of bits
  int32_t behind;  // of the bits that were taken, those from behind `until`
};

// Loads the word at a multiple of four bytes.
TS_HOST_DEVICE uint32_t load_word(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__ldg(reinterpret_cast<const uint32_t*>(from)), 0, 0x0123);
#else
  return load_big_endian(from);
#endif
}

// Takes the word ahead, from its byte `first` on. Needs room for 32 bits. Returns false for a byte
// 0xFF that no stuffed byte follows.
TS_HOST_DEVICE bool take_word(WordReader* reader, uint32_t first) {
  const uint32_t word = reader->ahead;
  const int32_t before = reader->count;
  const uint32_t ones = ((word & 0x7F7F7F7F) + 0x01010101) & word & 0x80808080;
  bool good = true;
  if (ones == 0 && !reader->stuffed && first == 0) {
    reader->bits |= uint64_t{word} << (32 - reader->count);
    reader->count += 32;
  } else {
    for (uint32_t i = first; i < 4; ++i) {
      const uint32_t byte = word >> (24 - 8 * i) & 0xFF;
      if (reader->stuffed) {
        good = good && byte == 0;
        reader->stuffed = false;
        continue;
      }
      reader->bits |= uint64_t{byte} << (56 - reader->count);
      reader->count += 8;
      reader->stuffed = byte == 0xFF;
    }
  }
  if (reader->next >= reader->until) reader->behind += reader->count - before;
  reader->next += 4;
  reader->ahead = load_word(reader->data + reader->next);
  return good && (!reader->stuffed || reader->ahead >> 24 == 0);
}

// Returns the place of the next bit.
TS_HOST_DEVICE uint32_t position_of(const BitReader& reader) {
  int32_t part;
  const uint32_t byte = current_byte(reader, &part);
  return byte * 8 + (part == 0 ? 0 : 8 - static_cast<uint32_t>(part));
}

// Returns the place of the bit that lies `count` bits before byte `next`. By values: whose address
// a call takes lies in the slow memory of its thread.
TS_HOST_DEVICE_RARE uint32_t position_before(const uint8_t* data, uint32_t next, int32_t count) {
  BitReader bytes = {};
  bytes.data = data;
  bytes.next = next;
  bytes.count = count;
  return position_of(bytes);
}

// Takes bits that the reader has.
TS_HOST_DEVICE void skip_bits(WordReader* reader, uint32_t count) {
  reader->bits <<= count;
  reader->count -= static_cast<int32_t>(count);
}

// Begins at a bit of the data, in a byte that is no stuffed one. The data are at a multiple of four
// bytes. Returns what take_word does.
TS_HOST_DEVICE bool begin_words(const uint8_t* data, uint32_t bit, uint32_t until,
                                WordReader* reader) {
  reader->data = data;
  reader->next = bit >> 5 << 2;
  reader->until = until;
  reader->ahead = load_word(data + reader->next);
  reader->stuffed = false;
  reader->bits = 0;
  reader->count = reader->behind = 0;
  const bool good = take_word(reader, bit >> 3 & 3);
  skip_bits(reader, bit & 7);
  return good;
}

// Returns the index of the next look-up.
TS_HOST_DEVICE uint32_t next_look(const WordReader& reader) {
  return static_cast<uint32_t>(reader.bits >> (64 - kLookBits));
}

// Returns the value behind the code of a step, from the next bits.
TS_HOST_DEVICE int32_t value_of(uint32_t step, const WordReader& reader) {
  const uint32_t size = value_bits(step);
  const uint64_t value = reader.bits << (step_bits(step) - size) >> 1 >> (63 - size);
  return extend(static_cast<uint32_t>(value), size);
}

// Stores the value behind a step's code, if it has one, before the coefficient that follows it.
TS_HOST_DEVICE void store_value(const HuffmanTables& tables, uint32_t step, int32_t value,
                                uint32_t coefficient, int16_t* out) {
  if (value_bits(step) == 0 || coefficient > 64 || out == nullptr) return;
  out[tables.natural[coefficient - 1]] = static_cast<int16_t>(value);
}

// Decodes a segment that another one follows, of a scan without restart markers, whose bytes end
// before byte `limit` of the plan's bytes. Returns false for whatever is no symbol, and if the next
// entry is not met: then decode_carefully decides, which writes the same coefficients first.
TS_HOST_DEVICE bool decode_words(const Plan& plan, const uint8_t* base, const HuffmanTables& tables,
                                 const Segment& segment, const Entry& entry, const Entry& next,
                                 uint32_t limit, int16_t* coefficients) {
  // Members of archives begin at any byte.
  const uint8_t* const data = base + plan.scan_at;
  const auto odd = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data) & 3);
  const uint32_t begin = (entry.bit >> 3) + segment.shift + odd;
  WordReader reader;
  if (!begin_words(data - odd, begin * 8 + (entry.bit & 7), UINT32_MAX, &reader)) return false;
  const uint32_t max_next = limit + odd + 16;

  Cursor at;
  at.mcu = segment.entry * plan.spacing;
  at.row = at.mcu / plan.mcus_per_row;
  at.column = at.mcu - at.row * plan.mcus_per_row;
  at.block = 0;
  for (int c = 0; c < kMaxComponents; ++c) at.dc[c] = entry.dc[c];
  enter_block(plan, coefficients, &at);
  const uint32_t end = at.mcu + plan.spacing;
  uint32_t coefficient = 0;
  while (true) {
    if (reader.count <= 32) {
      // While symbols are left, no more is taken than the bits of a word from behind their end.
      if (reader.next >= max_next || !take_word(&reader, 0)) return false;
    }
    const HuffmanTable& table = tables.table[coefficient == 0 ? at.dc_table : at.ac_table];
    uint32_t step = table.look[next_look(reader)];
    if (coefficient == 0 || step == 0) {
      // A DC difference, or a long code. One more word is enough for any.
      if (reader.count <= 32) continue;
      if (step == 0) step = find_long_code(table, static_cast<uint32_t>(reader.bits >> 48));
      if (step == 0) return false;
      const int32_t value = value_of(step, reader);
      skip_bits(&reader, step_bits(step));
      if (coefficient == 0) {
        for (uint32_t c = 0; c < kMaxComponents; ++c) {
          if (c != at.component) continue;
          at.dc[c] =
              static_cast<int32_t>(static_cast<uint32_t>(at.dc[c]) + static_cast<uint32_t>(value));
          if (at.out != nullptr) at.out[0] = static_cast<int16_t>(at.dc[c]);
        }
        coefficient = 1;
      } else {
        coefficient += passed_by(step);
        store_value(tables, step, value, coefficient, at.out);
      }
    }
    // With hardly a branch, for which a warp would wait: what is not decoded has no bits.
    const uint16_t* const look = tables.table[at.ac_table].look;
    TS_UNROLL
    for (int i = 0; i < kSymbolsAtOnce; ++i) {
      const uint32_t next_step = look[next_look(reader)];
      const uint32_t bits = step_bits(next_step);
      const bool decoded =
          bits != 0 && static_cast<int32_t>(bits) <= reader.count && coefficient < 64;
      const int32_t value = value_of(next_step, reader);
      coefficient += decoded ? passed_by(next_step) : 0;
      store_value(tables, decoded ? next_step : 0, value, coefficient, at.out);
      skip_bits(&reader, decoded ? bits : 0);
    }
    if (coefficient < 64) continue;
    if (coefficient != 64 && coefficient < kBlockEnd) return false;  // a run out of the block
    coefficient = 0;
    if (++at.block == plan.blocks) {
      at.block = 0;
      if (++at.mcu == end) break;
      if (++at.column == plan.mcus_per_row) {
        at.column = 0;
        ++at.row;
      }
    }
    enter_block(plan, coefficients, &at);
  }
  const uint32_t bit =
      position_before(reader.data, reader.next + (reader.stuffed ? 1 : 0), reader.count);
  bool met = (bit >> 3) - odd - segment.shift == next.bit >> 3 && (bit & 7) == (next.bit & 7);
  for (int c = 0; c < kMaxComponents; ++c) met = met && at.dc[c] == next.dc[c];
  return met;
}

// Decodes segment `index` of the plan, which is at `base`. Writes the coefficients of the MCUs that
// the crop needs into their blocks, in natural order; the others stay as they are, so the caller
// has zeroed the memory. Returns false if the host must decode the image.
TS_HOST_DEVICE bool decode_segment(const Plan& plan, const uint8_t* base,
                                   const HuffmanTables& tables, uint32_t index,
                                   int16_t* coefficients) {
  const Segment segment = reinterpret_cast<const Segment*>(base + plan.segments_at)[index];
  // Bits of the plan's bytes are counted by uint32_t.
  if (segment.entry + 1 < plan.entries && plan.restart_interval == 0 &&
      plan.scan_bytes < 1u << 28) {
    const Entry entry = entry_at(plan, base, segment.entry);
    const Entry next = entry_at(plan, base, segment.entry + 1);
    const uint32_t begin = (entry.bit >> 3) + segment.shift;
    const uint32_t limit = ((next.bit + 7) >> 3) + segment.shift;
    if (begin < limit && limit < plan.scan_bytes && plan.scan_bytes - limit >= kWordMargin &&
        decode_words(plan, base, tables, segment, entry, next, limit, coefficients)) {
      return true;
    }
  }
  return decode_carefully(plan, base, tables, index, coefficients);
}

}  // namespace ts::jpeg
