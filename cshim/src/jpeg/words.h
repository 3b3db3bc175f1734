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

}  // namespace ts::jpeg
