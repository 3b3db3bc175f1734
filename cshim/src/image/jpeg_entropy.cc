#include "image/jpeg_entropy.h"

#include <algorithm>
#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define TS_LIKELY(x) __builtin_expect(!!(x), 1)
#define TS_UNLIKELY(x) __builtin_expect(!!(x), 0)
#define TS_INLINE inline __attribute__((always_inline))

namespace ts::image {
namespace {

// The widths of the look-ups, in bits. A wider table has more symbols in an entry, but takes longer
// to build (usually once an image) and does not fit into the first-level cache.
constexpr int kDcBits = 10;
constexpr int kAcBits = 11;
// The number of AC look-ups between two refills. They fit in the rest of 56 bits after a DC
// difference found by look-up.
constexpr int kLookups = 4;
static_assert(kDcBits + kLookups * kAcBits <= 56);

// Each of 64 coefficients needs at most a code of 16 bits and a value of 15 bits.
constexpr size_t kMaxBlockBytes = 64 * 4;
constexpr size_t kLoad = 16;  // bytes that may be read after a block's last bit
constexpr size_t kWindow = size_t{32} << 10;
constexpr size_t kTablesKept = 6;  // of each kind

// The natural order of the zigzag positions. A look-up may exceed the block's end by two runs.
// Their coefficients are written to the last position, which is written again or never used. The
// order repeats for the sums that include AcTable's flags.
constexpr int kZigzagSize = 256;
constexpr uint32_t kFlagged = 64 + 32;
constexpr uint32_t kFlaggedSlow = 2 * kFlagged;
constexpr std::array<uint8_t, kZigzagSize> natural_order() {
  constexpr uint8_t kOrder[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                  35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                  58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};
  std::array<uint8_t, kZigzagSize> places = {};
  for (uint32_t i = 0; i < kZigzagSize; ++i) {
    places[i] = i % kFlagged < 64 ? kOrder[i % kFlagged] : 63;
  }
  return places;
}
constexpr std::array<uint8_t, kZigzagSize> kNatural = natural_order();

TS_INLINE uint64_t load_big_endian(const uint8_t* from) {
  uint64_t word;
  std::memcpy(&word, from, sizeof word);
  return __builtin_bswap64(word);
}

// Counts the 0xFF bytes.
size_t count_ff(const uint8_t* from, size_t bytes) {
  size_t count = 0;
#if defined(__x86_64__)
  const __m128i ones = _mm_set1_epi8(static_cast<char>(0xFF));
  __m128i sums = _mm_setzero_si128();
  for (; bytes >= 16; bytes -= 16, from += 16) {
    const __m128i found =
        _mm_cmpeq_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)), ones);
    sums = _mm_add_epi64(
        sums, _mm_sad_epu8(_mm_sub_epi8(_mm_setzero_si128(), found), _mm_setzero_si128()));
  }
  count = static_cast<size_t>(_mm_cvtsi128_si64(sums)) +
          static_cast<size_t>(_mm_cvtsi128_si64(_mm_unpackhi_epi64(sums, sums)));
#endif
  for (; bytes > 0; --bytes) count += *from++ == 0xFF;
  return count;
}

// Returns the value that `size` (1 to 15) bits encode: half of the codes are negative.
TS_INLINE int32_t extend(int32_t bits, int32_t size) {
  return bits < 1 << (size - 1) ? bits + 1 - (1 << size) : bits;
}

// Finds a code by its length, for the symbols that the look-up tables do not hold.
struct LongCodes {
  uint32_t limit[17];  // the first 16-bit prefix without a code of this length or shorter
  int32_t offset[17];  // for a code of this length: its symbol's index minus the code
  HuffmanCode code;

  // Returns false if this is not a prefix code, or has a code of all ones, which the standard
  // forbids.
  bool build(const HuffmanCode& from) {
    code = from;
    uint32_t next = 0;
    int32_t index = 0;
    for (int length = 1; length <= 16; ++length) {
      offset[length] = index - static_cast<int32_t>(next);
      next += code.counts[length];
      index += code.counts[length];
      if (index > 256 || (code.counts[length] != 0 && next >= 1u << length)) return false;
      limit[length] = next << (16 - length);
      next <<= 1;
    }
    return true;
  }

  // Calls use(code, length, symbol) for every code of up to `bits` bits.
  template <typename Use>
  void each(int bits, Use&& use) const {
    uint32_t next = 0;
    size_t index = 0;
    for (int length = 1; length <= bits; ++length) {
      for (int i = 0; i < code.counts[length]; ++i) use(next++, length, code.symbols[index++]);
      next <<= 1;
    }
  }

  // Returns the length of the code at the start of the 16 bits `prefix`, or 0 if there is no code
  // longer than `shortest`.
  int find(uint32_t prefix, int shortest, int* symbol) const {
    for (int length = shortest + 1; length <= 16; ++length) {
      if (prefix < limit[length]) {
        *symbol = code.symbols[static_cast<int32_t>(prefix >> (16 - length)) + offset[length]];
        return length;
      }
    }
    return 0;
  }
};

// The fields of a DC entry.
constexpr uint32_t kLengthMask = 63;  // bits 0 to 5: the bits that the entry uses
constexpr uint32_t kSlow = 1 << 7;    // no fit: bits 8 to 12 are the code's length (0: longer
                                      // than the look-up), 16 to 23 its symbol

}  // namespace

struct DcTable {
  uint32_t entry[1 << kDcBits];  // without kSlow, bits 16 to 31 are the difference
  LongCodes codes;
  uint64_t used;

  bool build(const HuffmanCode& code) {
    if (!codes.build(code)) return false;
    bool good = true;
    std::fill(std::begin(entry), std::end(entry), kSlow);
    codes.each(kDcBits, [&](uint32_t bits, int length, int size) {
      if (size > 15) {
        good = false;
        return;
      }
      const int rest = kDcBits - length;
      uint32_t* first = entry + (static_cast<size_t>(bits) << rest);
      for (uint32_t i = 0; i < 1u << rest; ++i) {
        if (size > rest) {
          first[i] = kSlow | static_cast<uint32_t>(length) << 8 | static_cast<uint32_t>(size) << 16;
          continue;
        }
        const int32_t value =
            size == 0 ? 0 : extend(static_cast<int32_t>(i >> (rest - size)), size);
        first[i] = static_cast<uint32_t>(length + size) | static_cast<uint32_t>(value) << 16;
      }
    });
    for (int i = 0, count = 0; i < 16; ++i) {
      for (int k = 0; k < code.counts[i + 1]; ++k) good = good && code.symbols[count++] <= 15;
    }
    return good;
  }
};

// Holds one or two symbols: a coefficient after `run` zeros, and a second coefficient at the last
// of the `places` that both occupy in the block. A run of 16 zeros is a run of 15 and a coefficient
// 0. An end of block alone is a coefficient 0. Without a second coefficient, `second` repeats the
// first, so that storing both is always right. Each field is loaded separately, which needs fewer
// instructions than splitting a loaded entry.
struct AcEntry {
  uint8_t length;  // bits that the entry uses
  uint8_t run;
  uint8_t places;  // plus kFlagged if the block ends, so that one comparison finds special cases
  uint8_t first_length;  // of the first symbol
  int16_t first, second;
};

struct AcTable {
  // For a symbol that does not fit, `places` is kFlaggedSlow + 1, `length` is the code's length (0:
  // longer than the look-up), and first_length is the symbol. Its coefficients are zeros, stored
  // over zeros.
  AcEntry entry[1 << kAcBits];
  LongCodes codes;
  uint64_t used;

  static AcEntry slow(int length, int symbol) {
    return {static_cast<uint8_t>(length), 0, kFlaggedSlow + 1, static_cast<uint8_t>(symbol), 0, 0};
  }

  // Returns the entry of one coefficient after `run` zeros.
  static AcEntry one(int length, int run, int32_t value) {
    const auto coefficient = static_cast<int16_t>(value);
    return {static_cast<uint8_t>(length),
            static_cast<uint8_t>(run),
            static_cast<uint8_t>(run + 1),
            static_cast<uint8_t>(length),
            coefficient,
            coefficient};
  }

  bool build(const HuffmanCode& code) {
    if (!codes.build(code)) return false;
    std::fill(std::begin(entry), std::end(entry), slow(0, 0));
    codes.each(kAcBits, [&](uint32_t bits, int length, int symbol) {
      const int rest = kAcBits - length;
      const int size = symbol & 15;
      const int run = symbol >> 4;
      AcEntry* first = entry + (static_cast<size_t>(bits) << rest);
      for (uint32_t i = 0; i < 1u << rest; ++i) {
        if (size > rest) {
          first[i] = slow(length, symbol);
        } else if (size != 0) {
          first[i] =
              one(length + size, run, extend(static_cast<int32_t>(i >> (rest - size)), size));
        } else if (run == 15) {
          first[i] = one(length, 15, 0);
        } else {
          first[i] = one(length, 0, 0);
          first[i].places += kFlagged;
        }
      }
    });
    // Adds the second symbols. The entry found for a second symbol may itself have two by now. But
    // the fields of its first symbol have not changed, and an end of block alone is recognised by
    // its length.
    for (uint32_t i = 0; i < 1u << kAcBits; ++i) {
      AcEntry& one = entry[i];
      if (one.places >= kFlagged) continue;
      const AcEntry two = entry[i << one.length & ((1u << kAcBits) - 1)];
      if (two.places >= kFlaggedSlow || one.length + two.first_length > kAcBits) continue;
      one.length = static_cast<uint8_t>(one.length + two.first_length);
      if (two.places >= kFlagged && two.length == two.first_length) {
        one.places += kFlagged;
      } else {
        one.places = static_cast<uint8_t>(one.places + two.run + 1);
        one.second = two.first;
      }
    }
    return true;
  }
};

EntropyDecoder::EntropyDecoder(Instructions instructions) : instructions_(instructions) {}
EntropyDecoder::~EntropyDecoder() = default;

namespace {

bool same(const HuffmanCode& a, const HuffmanCode& b) {
  if (std::memcmp(a.counts + 1, b.counts + 1, 16) != 0) return false;
  size_t symbols = 0;
  for (int i = 1; i <= 16; ++i) symbols += a.counts[i];
  return symbols <= 256 && std::memcmp(a.symbols, b.symbols, symbols) == 0;
}

// Returns the code's table: a kept one, or a new one that replaces the least recently used. Returns
// NULL if the code is impossible.
template <typename Table>
const Table* find_table(std::vector<std::unique_ptr<Table>>* kept, const HuffmanCode& code,
                        uint64_t now) {
  for (auto& table : *kept) {
    if (table->used != 0 && same(table->codes.code, code)) {
      table->used = now;
      return table.get();
    }
  }
  Table* place = nullptr;
  if (kept->size() < kTablesKept) {
    kept->push_back(std::make_unique<Table>());
    place = kept->back().get();
  } else {
    place = std::min_element(kept->begin(), kept->end(), [](const auto& a, const auto& b) {
              return a->used < b->used;
            })->get();
  }
  place->used = 0;
  if (!place->build(code)) return nullptr;
  place->used = now;
  return place;
}

}  // namespace

bool EntropyDecoder::start(const Scan& scan) {
  scan_ = scan;
  if (scan.components < 1 || scan.components > kMaxComponents || scan.blocks < 1 ||
      scan.blocks > kMaxBlocks || scan.begin > scan.end || scan.mcus_per_row == 0 ||
      scan.mcu_rows == 0) {
    return false;
  }
  // An image has at most four tables of a kind, so none of them replaces another one of the same
  // image.
  const DcTable* dc[4] = {};
  const AcTable* ac[4] = {};
  ++clock_;
  for (int i = 0; i < scan.blocks; ++i) {
    const int d = scan.dc_table[i];
    const int a = scan.ac_table[i];
    if (d > 3 || a > 3 || scan.dc[d] == nullptr || scan.ac[a] == nullptr) return false;
    if (dc[d] == nullptr) dc[d] = find_table(&dc_tables_, *scan.dc[d], clock_);
    if (ac[a] == nullptr) ac[a] = find_table(&ac_tables_, *scan.ac[a], clock_);
    if (dc[d] == nullptr || ac[a] == nullptr) return false;
    dc_[i] = dc[d];
    ac_[i] = ac[a];
  }
  if (!window_) {
    window_ = std::make_unique<uint8_t[]>(kWindow + kMaxBlocks * kMaxBlockBytes + 2 * kLoad);
  }
  reserve_ = static_cast<size_t>(scan.blocks) * kMaxBlockBytes;
  mcus_ = uint64_t{scan.mcus_per_row} * scan.mcu_rows;
  called_ = 0;
  column_ = 0;
  want(0, scan.mcus_per_row - 1);
  entries_ = nullptr;
  jumps_ = records_ = false;
  recorded_.clear();
  next_entry_ = UINT64_MAX;
  spacing_ = 0;
  limit_ = scan.end;
  at_ = kNowhere;
  return true;
}

void EntropyDecoder::want(uint32_t first_column, uint32_t last_column) {
  first_column_ = first_column;
  last_column_ = last_column;
}

void EntropyDecoder::use(const Entries* entries) {
  entries_ = entries;
  spacing_ = entries->spacing();
  jumps_ = true;
  next_entry_ = 0;
}

void EntropyDecoder::record(uint32_t spacing) {
  spacing_ = spacing;
  records_ = true;
  recorded_.reserve(static_cast<size_t>((mcus_ + spacing - 1) / spacing));
  next_entry_ = 0;
}

void EntropyDecoder::verify(const Entries* entries) {
  entries_ = entries;
  spacing_ = entries->spacing();
  next_entry_ = 0;
}

bool EntropyDecoder::next(int16_t (*const* blocks)[64]) {
  const uint64_t mcu = called_++;
  const uint32_t column = column_;
  column_ = column + 1 == scan_.mcus_per_row ? 0 : column + 1;
  if (blocks == nullptr || column < first_column_ || column > last_column_) return true;
  if (TS_UNLIKELY(mcu >= mcus_)) return false;
  if (jumps_) {
    if ((column == first_column_ || at_ != mcu) && !begin_row(mcu)) return false;
  } else if (at_ != mcu && !advance(mcu)) {
    return false;
  }
  return decode<true>(blocks);
}

bool EntropyDecoder::finish() { return jumps_ || advance(std::min(called_, mcus_)); }
bool EntropyDecoder::finish_scan() { return !jumps_ && advance(mcus_); }

bool EntropyDecoder::advance(uint64_t mcu) {
  if (at_ == kNowhere) seek({}, 0);
  while (at_ < mcu) {
    if (!decode<false>(nullptr)) return false;
  }
  return true;
}

// Moves to the first wanted MCU of a row, by the nearest entry before it unless decoding is already
// past that entry. Loads nothing beyond the entry that follows the row's last wanted MCU.
bool EntropyDecoder::begin_row(uint64_t mcu) {
  const uint32_t column = static_cast<uint32_t>(mcu % scan_.mcus_per_row);
  const uint64_t end = mcu + (last_column_ - column) + 1;
  const uint64_t after = (end + spacing_ - 1) / spacing_;
  size_t limit = scan_.end;
  if (after < entries_->count()) {
    const uint64_t bit = entries_->at(static_cast<uint32_t>(after)).bit;
    limit = std::min<size_t>(limit, scan_.begin + static_cast<size_t>((bit + 7) / 8));
  }
  const uint64_t before = mcu / spacing_;
  const uint64_t from = before * spacing_;
  if (at_ < from || at_ > mcu) {  // also from kNowhere
    limit_ = limit;
    seek(entries_->at(static_cast<uint32_t>(before)), from);
  } else if (limit > limit_) {
    limit_ = limit;
    if (ended_ && !marker_) refill_window();
  }
  return advance(mcu);
}

void EntropyDecoder::seek(const EntryPoint& entry, uint64_t mcu) {
  at_ = mcu;
  for (int c = 0; c < kMaxComponents; ++c) predictor_[c] = entry.dc[c];
  if (scan_.restart_interval != 0) {
    restarts_to_go_ = scan_.restart_interval - static_cast<uint32_t>(mcu % scan_.restart_interval);
    next_restart_ = static_cast<int32_t>(mcu / scan_.restart_interval & 7);
  }
  if (spacing_ != 0 && entries_ != nullptr) {
    next_entry_ = (mcu + spacing_ - 1) / spacing_ * spacing_;
  }
  next_byte_ = std::min(scan_.end, scan_.begin + (entry.bit >> 3));
  filled_ = 0;
  counted_ = 0;
  counted_file_ = next_byte_;
  marker_ = ended_ = false;
  bits_ = {window_.get(), 0, 0};
  refill_window();
  bits_.buffer <<= entry.bit & 7;
  bits_.count -= static_cast<int32_t>(entry.bit & 7);
}

uint64_t EntropyDecoder::bits_used() const {
  return static_cast<uint64_t>(bits_.at - window_.get()) * 8 - static_cast<uint64_t>(bits_.count);
}

uint64_t EntropyDecoder::position() {
  const uint64_t used = bits_used();
  const auto byte = static_cast<size_t>(used >> 3);
  counted_file_ += byte - counted_ + count_ff(window_.get() + counted_, byte - counted_);
  counted_ = byte;
  return static_cast<uint64_t>(counted_file_ - scan_.begin) * 8 + (used & 7);
}

// Moves the unused bytes to the window's front and loads more after them, up to a marker or the
// limit. Refills the bit buffer, because it may hold zeros from beyond the old end.
void EntropyDecoder::refill_window() {
  uint8_t* window = window_.get();
  const uint64_t used = std::min<uint64_t>(bits_used(), uint64_t{filled_} * 8);
  const auto byte = static_cast<size_t>(used >> 3);
  if (byte != 0) {
    position();
    counted_ = 0;
    filled_ -= byte;
    std::memmove(window, window + byte, filled_);
  }
  ended_ = marker_ = false;

  const uint8_t* data = scan_.data;
  size_t from = next_byte_;
  size_t to = filled_;
  while (true) {
    if (from >= limit_) {
      ended_ = true;
      break;
    }
    if (to >= kWindow) break;
#if defined(__x86_64__)
    // Copies sixteen bytes at a time. The last copy may exceed kWindow, where the buffer has room.
    while (limit_ - from >= 16 && to < kWindow) {
      const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data + from));
      _mm_storeu_si128(reinterpret_cast<__m128i*>(window + to), bytes);
      const auto mask = static_cast<uint32_t>(
          _mm_movemask_epi8(_mm_cmpeq_epi8(bytes, _mm_set1_epi8(static_cast<char>(0xFF)))));
      const size_t plain = mask == 0 ? 16 : static_cast<size_t>(__builtin_ctz(mask));
      from += plain;
      to += plain;
      if (mask != 0) break;
    }
    if (from >= limit_ || to >= kWindow) continue;
#endif
    if (data[from] != 0xFF) {
      window[to++] = data[from++];
    } else if (from + 1 < scan_.end && data[from + 1] == 0) {
      window[to++] = 0xFF;
      from += 2;
    } else {
      ended_ = marker_ = true;
      break;
    }
  }
  next_byte_ = from;
  filled_ = to;
  if (ended_) std::memset(window + to, 0, reserve_ + kLoad);

  // At the end there may be fewer bits. The zeros after them count as bits, and decode() notices
  // their use.
  const auto skip = static_cast<int32_t>(used & 7);
  bits_ = {window + 7, load_big_endian(window) << skip, 56 - skip};
}

// Moves from one restart interval to the next: less than a byte of padding, then the expected
// marker.
bool EntropyDecoder::restart() {
  if (!marker_) refill_window();
  if (!marker_ || uint64_t{filled_} * 8 - bits_used() >= 8) return false;
  size_t at = next_byte_;
  while (at < scan_.end && scan_.data[at] == 0xFF) ++at;
  if (at >= scan_.end || scan_.data[at] != 0xD0 + next_restart_) return false;
  next_restart_ = (next_restart_ + 1) & 7;
  restarts_to_go_ = scan_.restart_interval;
  std::fill(std::begin(predictor_), std::end(predictor_), 0);
  next_byte_ = at + 1;
  filled_ = 0;
  counted_ = 0;
  counted_file_ = next_byte_;
  bits_ = {window_.get(), 0, 0};
  refill_window();
  return true;
}

// Records or compares the entry before the current MCU.
bool EntropyDecoder::pass_entry() {
  const uint64_t bit = position();
  EntryPoint here = {static_cast<uint32_t>(bit), {}};
  bool fits = bit <= INT32_MAX;
  for (int c = 0; c < kMaxComponents; ++c) {
    here.dc[c] = static_cast<int16_t>(predictor_[c]);
    fits = fits && here.dc[c] == predictor_[c];
  }
  if (!records_) {
    if (!fits || !(here == entries_->at(static_cast<uint32_t>(next_entry_ / spacing_))))
      return false;
  } else if (fits) {
    recorded_.push_back(here);
  } else {  // the file gets no entries, but its pixels are decoded
    recorded_.clear();
    next_entry_ = UINT64_MAX;
    return true;
  }
  next_entry_ += spacing_;
  return true;
}

template <bool kStore>
TS_INLINE bool EntropyDecoder::decode_blocks(EntropyDecoder* self, int16_t (*const* blocks)[64]) {
  const uint8_t* at = self->bits_.at;
  uint64_t bits = self->bits_.buffer;
  // Only the low byte of `count` matters, and only the low six bits of a dropped length, so that
  // refill and drop need no masks.
  auto count = static_cast<uint32_t>(self->bits_.count);
  const auto refill = [&]() __attribute__((always_inline)) {
    bits |= load_big_endian(at) >> (count & 63);
    at += ~count >> 3 & 7;
    count |= 56;
  };
  const auto drop = [&](uint64_t length) __attribute__((always_inline)) {
    bits <<= length & 63;
    count -= static_cast<uint32_t>(length);
  };
  for (int b = 0; b < self->scan_.blocks; ++b) {
    int16_t* out = kStore ? *blocks[b] : nullptr;
    refill();
    const DcTable& dc = *self->dc_[b];
    const uint32_t first = dc.entry[bits >> (64 - kDcBits)];
    int32_t difference = static_cast<int32_t>(first) >> 16;
    if (TS_LIKELY((first & kSlow) == 0)) {
      drop(first & kLengthMask);
    } else {
      int length = static_cast<int>(first >> 8 & 31);
      int size = static_cast<int>(first >> 16 & 255);
      if (length == 0) {
        length = dc.codes.find(static_cast<uint32_t>(bits >> 48), kDcBits, &size);
        if (length == 0) return false;
      }
      drop(static_cast<uint64_t>(length));
      difference = 0;
      if (size != 0) {
        difference = extend(static_cast<int32_t>(bits >> (64 - size)), size);
        drop(static_cast<uint64_t>(size));
      }
      refill();
    }
    // Wraps like libjpeg's predictor. Blocks of 8-bit samples stay far from the overflow.
    int32_t& predictor = self->predictor_[self->scan_.component[b]];
    predictor =
        static_cast<int32_t>(static_cast<uint32_t>(predictor) + static_cast<uint32_t>(difference));
    if (kStore) out[0] = static_cast<int16_t>(predictor);

    const AcTable& ac = *self->ac_[b];
    uint32_t k = 1;
    while (true) {
#pragma GCC unroll 4
      for (int i = 0; i < kLookups; ++i) {
        // The next look-up waits only for `word`. The asm prevents the compiler from deriving the
        // address of `word` from the address of the other fields, which costs a cycle for each
        // look-up.
        const uint64_t index = bits >> (64 - kAcBits);
        uint64_t word;
        std::memcpy(&word, &ac.entry[index], sizeof word);
        uint64_t same = index;
        __asm__("" : "+r"(same));
        const AcEntry& entry = ac.entry[same];
        const uint32_t k1 = k + entry.run;
        const uint32_t next = k + entry.places;
        if (kStore) {
          out[kNatural[k1]] = entry.first;
          out[kNatural[next - 1]] = entry.second;
        }
        if (TS_LIKELY(next < 64)) {
          drop(word);
          k = next;
          continue;
        }
        if (TS_LIKELY(next < kFlaggedSlow)) {
          if (k1 == 63) {  // the second symbol belongs to the next block
            if (kStore) out[63] = entry.first;
            drop(entry.first_length);
          } else {
            if (next % kFlagged > 64) return false;
            drop(entry.length);
          }
          goto block_done;
        }
        refill();
        int length = entry.length;
        int symbol = entry.first_length;
        if (length == 0) {
          length = ac.codes.find(static_cast<uint32_t>(bits >> 48), kAcBits, &symbol);
          if (length == 0) return false;
        }
        drop(static_cast<uint64_t>(length));
        const int size = symbol & 15;
        k += static_cast<uint32_t>(symbol >> 4);
        if (size == 0) {
          if (symbol >> 4 != 15) goto block_done;
        } else {
          if (k > 63) return false;
          const int32_t value = extend(static_cast<int32_t>(bits >> (64 - size)), size);
          drop(static_cast<uint64_t>(size));
          if (kStore) out[kNatural[k]] = static_cast<int16_t>(value);
        }
        if (++k >= 64) {
          if (k > 64) return false;
          goto block_done;
        }
        break;
      }
      refill();
    }
  block_done:;
  }
  self->bits_ = {at, bits, static_cast<int32_t>(count & 0xFF)};
  return true;
}

template <bool kStore>
bool EntropyDecoder::decode_blocks_baseline(EntropyDecoder* self, int16_t (*const* blocks)[64]) {
  return decode_blocks<kStore>(self, blocks);
}

#if defined(__x86_64__)
template <bool kStore>
__attribute__((target("bmi,bmi2"))) bool EntropyDecoder::decode_blocks_bmi2(
    EntropyDecoder* self, int16_t (*const* blocks)[64]) {
  return decode_blocks<kStore>(self, blocks);
}
#endif

template <bool kStore>
TS_INLINE bool EntropyDecoder::decode(int16_t (*const* blocks)[64]) {
  if (scan_.restart_interval != 0) {
    if (restarts_to_go_ == 0 && !restart()) return false;
    --restarts_to_go_;
  }
  if (at_ == next_entry_ && !pass_entry()) return false;
  if (!ended_ && bits_.at + reserve_ + kLoad > window_.get() + filled_) refill_window();
#if defined(__x86_64__)
  const bool good = instructions_ == Instructions::kBmi2
                        ? decode_blocks_bmi2<kStore>(this, blocks)
                        : decode_blocks_baseline<kStore>(this, blocks);
#else
  const bool good = decode_blocks_baseline<kStore>(this, blocks);
#endif
  ++at_;
  return good && bits_used() <= uint64_t{filled_} * 8;
}

}  // namespace ts::image
