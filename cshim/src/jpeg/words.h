// Decodes Huffman codes from whole words: nearly all of a scan is codes and stuffed bytes, far from
// its end. This code does not check for the end of the data and tracks no position: it only counts
// bits. The careful functions handle everything else.
#pragma once

#include <cstdint>

#include "jpeg/huffman.h"
#include "jpeg/plan.h"

namespace ts::jpeg {

// The number of bytes before the end of the scan from which no word is taken. It has room for the
// bits of two words whose bytes are all stuffed, and for a word loaded ahead.
constexpr uint32_t kWordMargin = 48;

struct WordReader {
  const uint8_t* data;
  uint32_t next;   // the byte after the words that were taken, a multiple of four
  uint32_t until;  // the byte where the pass ends, a multiple of four
  uint32_t ahead;  // the word at `next`
  bool stuffed;    // the byte at `next` is a stuffed one
  uint64_t bits;   // the next bits, from the top down; followed by zeros
  int32_t count;   // the number of bits
  int32_t behind;  // of the bits that were taken, those after `until`
};

// Loads the word at a multiple of four bytes.
TS_HOST_DEVICE uint32_t load_word(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(__ldg(reinterpret_cast<const uint32_t*>(from)), 0, 0x0123);
#else
  return load_big_endian(from);
#endif
}

// Takes the word loaded ahead, from its byte `first` on. Needs room for 32 bits. Returns false for
// a 0xFF byte without a stuffed byte after it.
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

// Returns the position of the next bit.
TS_HOST_DEVICE uint32_t position_of(const BitReader& reader) {
  int32_t part;
  const uint32_t byte = current_byte(reader, &part);
  return byte * 8 + (part == 0 ? 0 : 8 - static_cast<uint32_t>(part));
}

// Returns the position of the bit that is `count` bits before byte `next`. Parameters are values,
// because a variable whose address is taken is kept in the thread's slow memory.
TS_HOST_DEVICE_RARE uint32_t position_before(const uint8_t* data, uint32_t next, int32_t count) {
  BitReader bytes = {};
  bytes.data = data;
  bytes.next = next;
  bytes.count = count;
  return position_of(bytes);
}

// Consumes bits that the reader has.
TS_HOST_DEVICE void skip_bits(WordReader* reader, uint32_t count) {
  reader->bits <<= count;
  reader->count -= static_cast<int32_t>(count);
}

// Starts at a bit of the data, in a byte that is not a stuffed one. The data is at a multiple of
// four bytes. Returns take_word's result.
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

// Returns the index for the next look-up.
TS_HOST_DEVICE uint32_t next_look(const WordReader& reader) {
  return static_cast<uint32_t>(reader.bits >> (64 - kLookBits));
}

// Returns the value after a step's code, from the next bits.
TS_HOST_DEVICE int32_t value_of(uint32_t step, const WordReader& reader) {
  const uint32_t size = value_bits(step);
  const uint64_t value = reader.bits << (step_bits(step) - size) >> 1 >> (63 - size);
  return extend(static_cast<uint32_t>(value), size);
}

}  // namespace ts::jpeg
