// Decodes Huffman codes from whole words: nearly all of a scan is codes and stuffed bytes, far from
// its end. This code does not check for the end of the data and tracks no position: it only counts
// bits. The careful functions handle everything else.
#pragma once

#include <cstdint>

#include "jpeg/huffman.h"
#include "jpeg/plan.h"

namespace ts::jpeg {

// The number of bytes before the end of the scan from which no word is taken. It has room for the
// bits of two words whose bytes are all stuffed, and for words loaded early.
constexpr uint32_t kWordMargin = 48;

struct WordReader {
  const uint8_t* data;
  const uint8_t* from;  // the word after those that were taken, at a multiple of four
  int32_t left;         // the bytes from there to the byte where the pass ends
  uint32_t word;        // the word at `from`
  uint32_t ahead;       // the word after it
  uint32_t later;       // the word after that as it is stored: a load takes long
  uint32_t stuffed;     // 0x80000000 if the first byte of `word` is a stuffed one, otherwise 0
  uint32_t full;        // full_bytes of `word`
  uint32_t part;        // the word without its stuffed bytes, from the top down
  int32_t size;         // the bits of the part; 0 if a 0xFF byte has no stuffed byte after it
  uint64_t bits;        // the next bits, from the top down; followed by zeros
  int32_t count;        // the number of bits
  int32_t behind;       // of the bits that were taken, those after the byte where the pass ends
};

// Loads the word at a multiple of four bytes, as it is stored.
TS_HOST_DEVICE uint32_t load_word(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  return __ldg(reinterpret_cast<const uint32_t*>(from));
#else
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
#endif
}

// Returns a stored word with its first byte on top.
TS_HOST_DEVICE uint32_t big_endian(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return __byte_perm(word, 0, 0x0123);
#else
  return __builtin_bswap32(word);
#endif
}

// Sets the highest bit of each byte that is 0xFF.
TS_HOST_DEVICE uint32_t full_bytes(uint32_t word) {
  return ((word & 0x7F7F7F7F) + 0x01010101) & word & 0x80808080;
}

// Returns the bytes whose highest bits `removed` does not have, from the top down.
TS_HOST_DEVICE uint32_t without_bytes(uint32_t word, uint32_t removed) {
  // From the last byte to the first, so that those before it keep their places.
  if ((removed & 0x80) != 0) word &= 0xFFFFFF00;
  if ((removed & 0x8000) != 0) word = (word & 0xFFFF0000) | (word & 0xFF) << 8;
  if ((removed & 0x800000) != 0) word = (word & 0xFF000000) | (word & 0xFFFF) << 8;
  if ((removed & 0x80000000) != 0) word <<= 8;
  return word;
}

TS_HOST_DEVICE uint32_t count_ones(uint32_t word) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(word));
#else
  return static_cast<uint32_t>(__builtin_popcount(word));
#endif
}

// Computes the part of `word`, before the pass needs it.
TS_HOST_DEVICE void prepare_word(WordReader* reader) {
  const uint32_t full = reader->full = full_bytes(reader->word);
  reader->part = reader->word;
  reader->size = 32;
  if ((full | reader->stuffed) == 0) return;
  const uint32_t stuffed = full >> 8 | reader->stuffed;
  reader->part = without_bytes(reader->word, stuffed);
  reader->size = 32 - 8 * static_cast<int32_t>(count_ones(stuffed));
  if ((reader->word & (stuffed >> 7) * 0xFF) != 0 ||
      ((full & 0x80) != 0 && reader->ahead >> 24 != 0)) {
    reader->size = 0;
  }
}

// Takes the prepared word if there are at most 32 bits. Returns false for a 0xFF byte without a
// stuffed byte after it. A word must be prepared before the next call.
TS_HOST_DEVICE bool take_word(WordReader* reader) {
  if (reader->count > 32) return true;
  if (reader->size == 0) return false;
  reader->bits |= uint64_t{reader->part} << 32 >> reader->count;
  reader->count += reader->size;
  reader->behind += reader->left <= 0 ? reader->size : 0;
  reader->stuffed = reader->full << 24;
  reader->word = reader->ahead;
  reader->ahead = big_endian(reader->later);
  reader->later = load_word(reader->from + 12);
  reader->from += 4;
  reader->left -= 4;
  return true;
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

// Shifts by the lowest five bits of n.
TS_HOST_DEVICE uint64_t shifted_left(uint64_t bits, uint32_t n) {
#if defined(__CUDA_ARCH__)
  const auto low = static_cast<uint32_t>(bits);
  return uint64_t{__funnelshift_l(low, static_cast<uint32_t>(bits >> 32), n)} << 32 |
         __funnelshift_l(0, low, n);
#else
  return bits << (n & 31);
#endif
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
  reader->from = data + (bit >> 5 << 2);
  reader->left = static_cast<int32_t>(until - (bit >> 5 << 2));
  const uint32_t before = bit >> 3 & 3;  // bytes of the word
  reader->word = big_endian(load_word(reader->from)) & 0xFFFFFFFF >> (8 * before);
  reader->ahead = big_endian(load_word(reader->from + 4));
  reader->later = load_word(reader->from + 8);
  reader->stuffed = 0;
  reader->bits = 0;
  reader->count = reader->behind = 0;
  prepare_word(reader);
  const bool good = take_word(reader);
  skip_bits(reader, 8 * before + (bit & 7));
  prepare_word(reader);
  return good;
}

// Returns the value after a step's code, from the next bits.
TS_HOST_DEVICE int32_t value_of(uint32_t step, const WordReader& reader) {
  const uint32_t size = value_bits(step);
  const uint64_t value = reader.bits << (step_bits(step) - size);
  return extend_top(static_cast<uint32_t>(value >> 32), size);
}

}  // namespace ts::jpeg
