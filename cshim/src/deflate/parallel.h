// Inflates a range of a raw deflate stream (RFC 1951) with the threads of a team, which is a block
// of threads on a GPU and a loop in the tests.
// Inflating starts at a checkpoint before the range: at the start of a deflate block, with the
// window of the output before it. The threads decode the codes of a block in parallel: thread k
// guesses where a code starts at or after bit k * kSubsequence, and decodes from there to the start
// of thread k + 1. That thread decodes again if its guess was different. Wrong guesses reach the
// right codes after some time, because prefix codes synchronise (Weissenberger and Schmidt, ICPP
// 2018); in the worst case the threads decode one after the other. The number of bytes that each
// thread produces then gives its position in the output. The threads have kept literals and
// matches, so that nearly nothing is decoded again: all literals are written, then the matches are
// copied. Whatever the bytes of a stream, a team reads only its input and its room, writes only its
// room, and ends. A damaged stream fails as in deflate/inflate.h, unless the damage is after the
// range. So does a stream of a great many tiny blocks, which no compressor makes.
#pragma once

#include <cstdint>

#include "base/target.h"

namespace ts::deflate {

constexpr uint32_t kThreads = 512;  // in a team
// The bits that a thread decodes in one step. A block of zlib has up to 16,383 symbols, which for
// JPEGs have 8 to 9 bits each. So it needs one step, without a second one for its last few symbols.
constexpr uint32_t kSubsequence = 288;
// The bits before its own that a thread decodes first, to start from a better guess.
constexpr uint32_t kWarm = 288;
constexpr uint32_t kWindow = 32768;  // bytes before the output
// The maximum number of bytes of an input, and of the output from the checkpoint to the end of a
// range. A position in bits has 32 bits.
constexpr uint32_t kMaxInput = 1u << 28;
constexpr uint32_t kMaxOutput = 1u << 30;
// The maximum number of bytes of a packed window, twice the index writer's worst case. A forged
// window of empty runs would keep a team busy for seconds.
constexpr uint32_t kMaxPackedWindow = 4 * kWindow;
// Inputs and rooms start at multiples of this number of bytes.
constexpr uint32_t kAlign = 16;
// The maximum number of blocks of a range: kBlocks, plus one for each kBlockInput bytes of input,
// up to kMaxBlocks. A block takes a team tens of microseconds, whether it has ten bits or a
// thousand. So blocks keep a team busy for at most a second a range.
constexpr uint32_t kBlocks = 1024;
constexpr uint32_t kBlockInput = 64;
constexpr uint32_t kMaxBlocks = 16384;

// What to inflate. Positions are bytes of the staging memory; the room's is a byte of the rooms.
struct Range {
  uint64_t input, window, room;
  uint32_t input_bytes;
  uint32_t skip_bits;     // of the first byte: they belong to the previous block
  uint32_t window_bytes;  // size of the packed window (docs/index-format.md has its format)
  uint32_t skip;          // bytes of output before the range
  uint32_t bytes;         // of the range
  uint32_t behind;        // zeros to write after the range, at most kThreads
};

struct Result {
  int32_t failed;     // 1 if the host must inflate the range; it then reports the reason
  uint32_t checksum;  // CRC-32 of the range
};

// ---- codes -------------------------------------------------------------------------------------

TS_HOST_DEVICE uint32_t smaller(uint32_t a, uint32_t b) { return b < a ? b : a; }

// Returns the number of bytes from an address to the next multiple of `align`.
TS_HOST_DEVICE uint32_t to_multiple_of(uint32_t align, const uint8_t* address) {
  return static_cast<uint32_t>(-reinterpret_cast<uintptr_t>(address)) % align;
}

TS_HOST_DEVICE uint32_t reversed(uint32_t v) {
#if defined(__CUDA_ARCH__)
  return __brev(v);
#else
  v = (v >> 1 & 0x55555555) | (v & 0x55555555) << 1;
  v = (v >> 2 & 0x33333333) | (v & 0x33333333) << 2;
  v = (v >> 4 & 0x0f0f0f0f) | (v & 0x0f0f0f0f) << 4;
  return __builtin_bswap32(v);
#endif
}

// Returns the number of bits that are set.
TS_HOST_DEVICE uint32_t ones(uint32_t v) {
#if defined(__CUDA_ARCH__)
  return static_cast<uint32_t>(__popc(v));
#else
  return static_cast<uint32_t>(__builtin_popcount(v));
#endif
}

constexpr uint32_t kMaxCodeBits = 15;

// A Huffman code.
template <uint32_t kSymbols>
struct Code {
  uint16_t symbols[kSymbols];        // in the order of their code words
  uint32_t count[kMaxCodeBits + 1];  // code words of each length
  // For each length: the first prefix of 15 bits, highest bit first, after the code words of up to
  // this length; and the position in `symbols` of the first symbol, minus its code word.
  uint32_t limit[kMaxCodeBits + 1];
  int32_t offset[kMaxCodeBits + 1];
};

// Returns how many of the first n symbols have code words of this length. The lengths, up to 15,
// are at a multiple of four bytes, and padded so that whole words can be loaded.
TS_HOST_DEVICE uint32_t count_of(const uint8_t* lengths, uint32_t n, uint32_t length) {
  const auto* const words = reinterpret_cast<const uint32_t*>(lengths);
  const uint32_t pattern = length * 0x01010101;
  // A byte that differs sets its highest bit, which was clear in every byte.
  const auto same = [&](uint32_t i) { return ~((words[i] ^ pattern) + 0x7f7f7f7f) & 0x80808080; };
  uint32_t count = 0;
  for (uint32_t i = 0; i < n / 4; ++i) count += ones(same(i));
  if (n % 4 != 0) count += ones(same(n / 4) << (32 - n % 4 * 8));
  return count;
}

// Computes `limit` and `offset` from `count`. Returns false if the lengths do not form a prefix
// code. Code words may stay unused if `single` is set and the only code word has one bit, or if
// there is none: then they are invalid.
template <typename C>
TS_HOST_DEVICE bool set_limits(C* code, bool single) {
  uint32_t next = 0;
  uint32_t index = 0;
  uint32_t longest = 0;
  bool fits = true;
  code->limit[0] = 0;
  for (uint32_t length = 1; length <= kMaxCodeBits; ++length) {
    next <<= 1;
    code->offset[length] = static_cast<int32_t>(index) - static_cast<int32_t>(next);
    next += code->count[length];
    index += code->count[length];
    if (code->count[length] != 0) longest = length;
    fits = fits && next <= 1u << length;
    next = smaller(next, 1u << length);
    code->limit[length] = next << (kMaxCodeBits - length);
  }
  return fits && (next == 1u << kMaxCodeBits || (single && longest <= 1));
}

// Inserts symbol i into the symbols, after set_limits. `rank` is the number of symbols before it
// with code words of the same length.
template <typename C>
TS_HOST_DEVICE void place_symbol(C* code, uint32_t length, uint32_t i, uint32_t rank) {
  // The first code word of the length starts where the code words of shorter lengths end.
  const uint32_t first = code->limit[length - 1] >> (kMaxCodeBits - length);
  code->symbols[static_cast<uint32_t>(static_cast<int32_t>(first) + code->offset[length]) + rank] =
      static_cast<uint16_t>(i);
}

// Finds the code word of kFirst to kLast bits at the start of `bits`. Returns its symbol << 4 |
// length, or 0 if there is none. The limits do not decrease, so the number of limits reached gives
// the length without a branch.
template <uint32_t kFirst, uint32_t kLast, typename C>
TS_HOST_DEVICE uint32_t search(const C& code, uint32_t bits) {
  const uint32_t prefix = reversed(bits) >> (32 - kMaxCodeBits);
  if (prefix < code.limit[kFirst - 1] || prefix >= code.limit[kLast]) return 0;
  uint32_t length = kFirst;
  TS_UNROLL
  for (uint32_t i = kFirst; i < kLast; ++i) length += prefix >= code.limit[i] ? 1 : 0;
  const int32_t index =
      static_cast<int32_t>(prefix >> (kMaxCodeBits - length)) + code.offset[length];
  return static_cast<uint32_t>(code.symbols[index]) << 4 | length;
}

constexpr uint32_t kLitlens = 288;  // symbols for literals and lengths, two of them invalid
constexpr uint32_t kDists = 32;     // symbols for distances, two of them invalid
constexpr uint32_t kPrecodes = 19;
using LitlenCode = Code<kLitlens>;
using DistCode = Code<kDists>;
using Precode = Code<kPrecodes>;

// The bits that are looked up at once.
constexpr uint32_t kLitlenBits = 11;
constexpr uint32_t kDistBits = 8;
constexpr uint32_t kPrecodeBits = 7;  // no code word of a precode is longer

// ---- bits --------------------------------------------------------------------------------------

struct Input {
  const uint8_t* data;  // aligned to kAlign
  uint32_t bytes;

  TS_HOST_DEVICE uint32_t bits() const { return 8 * bytes; }
  // Returns 32 bits. Bits after the end are 0.
  TS_HOST_DEVICE uint32_t word(uint32_t i) const {
    if (i < bytes / 4) return reinterpret_cast<const uint32_t*>(data)[i];
    // At most three bytes are left. Not a loop, because nvcc would unroll it at every call.
    const uint32_t at = 4 * i;
    uint32_t word = at < bytes ? data[at] : 0;
    if (at + 1 < bytes) word |= uint32_t{data[at + 1]} << 8;
    if (at + 2 < bytes) word |= uint32_t{data[at + 2]} << 16;
    return word;
  }
  // Returns 32 bits, starting at any bit.
  TS_HOST_DEVICE uint32_t bits_at(uint32_t bit) const {
    const uint32_t low = word(bit / 32);
    const uint32_t shift = bit % 32;
    return shift == 0 ? low : low >> shift | word(bit / 32 + 1) << (32 - shift);
  }
};

class Bits {
 public:
  TS_HOST_DEVICE Bits(const Input& input, uint32_t bit)
      : input_(input), next_(bit / 32 + 1), bits_(input.word(bit / 32) >> bit % 32) {
    count_ = 32 - bit % 32;
  }
  // Loads until at least 33 bits are ready.
  TS_HOST_DEVICE void fill() {
    if (count_ > 32) return;
    bits_ |= uint64_t{input_.word(next_++)} << count_;
    count_ += 32;
  }
  TS_HOST_DEVICE uint32_t peek() const { return static_cast<uint32_t>(bits_); }
  TS_HOST_DEVICE void drop(uint32_t n) {
    bits_ >>= n;
    count_ -= n;
  }
  TS_HOST_DEVICE uint32_t take(uint32_t n) {  // at most 16, after fill
    const uint32_t v = peek() & ((1u << n) - 1);
    drop(n);
    return v;
  }
  TS_HOST_DEVICE uint32_t position() const { return 32 * next_ - count_; }

 private:
  const Input input_;
  uint32_t next_;  // the word after those that were taken
  uint32_t count_;
  uint64_t bits_;
};

// ---- symbols -----------------------------------------------------------------------------------

enum Kind : uint32_t { kLiteral, kMatch, kEnd, kBad };

struct Symbol {
  Kind kind;
  uint32_t length;  // bytes of output
  uint32_t value;   // the literal, or the distance
};

// Returns the least length of a symbol << 16 | the number of extra bits << 13. For the end, 0.
TS_HOST_DEVICE uint32_t length_code(uint32_t symbol) {
  if (symbol == 256) return 0;
  // 3 to 10, then four lengths for each number of extra bits, up to 257, then 258.
  const uint32_t i = symbol - 257;
  const uint32_t extra = i < 8 || i == 28 ? 0 : i / 4 - 1;
  const uint32_t least = i == 28 ? 258 : i < 8 ? 3 + i : 3 + ((4 + i % 4) << extra);
  return least << 16 | extra << 13;
}

// Returns an entry of the look-up table for literals and lengths. Of a literal: the highest bit,
// its value << 8, and the bits of its code word. Of a length: its least value << 16 | the number of
// extra bits << 13 | the bits of its code word << 8. Of the end: the same, with a length of 0.
// Otherwise, also for longer code words, 0.
TS_HOST_DEVICE uint32_t litlen_entry(const LitlenCode& code, uint32_t bits) {
  const uint32_t found = search<1, kLitlenBits>(code, bits);
  const uint32_t symbol = found >> 4;
  const uint32_t passed = found & 15;
  if (found == 0) return 0;
  if (symbol < 256) return 1u << 31 | symbol << 8 | passed;
  return symbol > 285 ? 0 : length_code(symbol) | passed << 8;
}

// Returns an entry of the look-up table for distances: the least distance << 16 | the number of
// extra bits << 5 | the bits of the code word. For a longer code word, or an invalid one: 0.
TS_HOST_DEVICE uint32_t dist_entry(uint32_t found) {
  const uint32_t symbol = found >> 4;
  if (found == 0 || symbol > 29) return 0;
  // 1 to 4, then two distances for each number of extra bits.
  const uint32_t extra = symbol < 4 ? 0 : symbol / 2 - 1;
  const uint32_t least = symbol < 4 ? 1 + symbol : 1 + ((2 + symbol % 2) << extra);
  return least << 16 | extra << 5 | (found & 15);
}

TS_HOST_DEVICE bool is_literal(uint32_t entry) { return entry >> 31 != 0; }

// Shifts by the lowest five bits of n.
TS_HOST_DEVICE uint64_t shifted_right(uint64_t bits, uint32_t n) {
#if defined(__CUDA_ARCH__)
  const auto high = static_cast<uint32_t>(bits >> 32);
  return uint64_t{__funnelshift_r(high, 0, n)} << 32 |
         __funnelshift_r(static_cast<uint32_t>(bits), high, n);
#else
  return bits >> (n & 31);
#endif
}

TS_HOST_DEVICE uint32_t lowest(uint64_t bits, uint32_t n) {
  return static_cast<uint32_t>(bits) & ((1u << n) - 1);
}

struct ReadSymbol {
  Symbol symbol;
  uint32_t end;  // the position after it
};

// ---- checksums ---------------------------------------------------------------------------------

// The CRC-32 of gzip. Bit 31 of a number is the coefficient of x^0.
constexpr uint32_t kPolynomial = 0xedb88320;

TS_HOST_DEVICE uint32_t checksum_entry(uint32_t byte) {
  for (int i = 0; i < 8; ++i) byte = byte >> 1 ^ (byte & 1 ? kPolynomial : 0);
  return byte;
}

constexpr uint32_t kSlices = 4;  // number of tables: a word is added to a checksum at once

// The data that a thread loads at once to add it.
struct alignas(16) Piece {
  uint32_t words[4];
};

// Returns a * b modulo the polynomial.
TS_HOST_DEVICE uint32_t product(uint32_t a, uint32_t b) {
  uint32_t sum = 0;
  for (; a != 0; a <<= 1) {
    if (a >> 31) sum ^= b;
    b = b >> 1 ^ (b & 1 ? kPolynomial : 0);
  }
  return sum;
}

// Returns the contribution of a checksum when n more bytes follow, at most kMaxOutput.
TS_HOST_DEVICE uint32_t shifted(uint32_t checksum, uint32_t n) {
  // x^8, and repeated squares of it modulo the polynomial.
  constexpr uint32_t kPowers[] = {
      0x00800000, 0x00008000, 0xedb88320, 0xb1e6b092, 0xa06a2517, 0xed627dae,
      0x88d14467, 0xd7bbfe6a, 0xec447f11, 0x8e7ea170, 0x6427800e, 0x4d47bae0,
      0x09fe548f, 0x83852d0f, 0x30362f1a, 0x7b5a9cc3, 0x31fec169, 0x9fec022a,
      0x6c8dedc4, 0x15d6874d, 0x5fde7a4e, 0xbad90e37, 0x2e4e5eef, 0x4eaba214,
      0xa8a472c0, 0x429a969e, 0x148d302a, 0xc40ba6d0, 0xc4e22c3c, 0x40000000,
  };
  for (uint32_t i = 0; n >> i != 0; ++i) {
    if (n >> i & 1) checksum = product(kPowers[i], checksum);
  }
  return checksum;
}

// ---- a range -----------------------------------------------------------------------------------

constexpr uint32_t kPackedBytes = 1024;  // of a packed window, at once
constexpr uint32_t kRuns = 128;          // of a window, at once

struct Run {
  uint32_t place, from, length;
};

// The progress of reading the packed window.
struct Unpacking {
  uint32_t at, place, runs;
  bool bad;
};

enum BlockKind : uint32_t { kStored, kFixed, kDynamic, kDamaged };

struct Header {
  BlockKind kind;
  bool last;
  uint32_t bit;     // where the block's content starts
  uint32_t length;  // of a stored block
  uint32_t litlens, dists;
};

// The progress of reading a dynamic block's lengths.
struct Lengths {
  uint32_t bit;
  uint32_t count;  // of the lengths
  uint32_t heads;  // every kJump-th code word in the list
  uint32_t words;  // code words in the list
  bool bad;
};

// The bits of a header whose code words are decoded at once: for most headers, all of them.
constexpr uint32_t kSteps = 1024;
// A jump of level i passes 2^i code words of a header, and the thread that follows them all of
// these at once.
constexpr uint32_t kJumpLevels = 4;
constexpr uint32_t kJump = 1 << kJumpLevels;
constexpr uint32_t kMaxHeads = (kLitlens + kDists) / kJump + 1;

// A thread keeps the literals and the matches that it decodes. The literals have an odd number of
// words, so that the threads of a warp use different banks.
constexpr uint32_t kKeptBytes = ((kSubsequence / 28 + 5) | 1) * 4;
constexpr uint32_t kMaxMatches = 4;
// The number of literals that are read at once: nearly all symbols of a JPEG are literals with
// short code words.
constexpr uint32_t kLiteralsAtOnce = 5;
static_assert(kLiteralsAtOnce * kLitlenBits <= 64, "a window has as many bits");
// The words of a step's input: a window of 64 bits may start at its last bit.
constexpr uint32_t kStaged = kThreads * kSubsequence / 32 + 8;
static_assert(kKeptBytes <= 256, "places among the kept literals have 8 bits");

// The symbols whose code words are counted together.
constexpr uint32_t kGroup = 32;
constexpr uint32_t kGroups = (kLitlens + kDists) / kGroup;
static_assert(kLitlens % kGroup == 0 && kDists % kGroup == 0, "a group is of one code");

// The shared memory of a team.
struct State {
  LitlenCode litlen;
  DistCode dist;
  uint32_t literals[1 << kLitlenBits];  // see litlen_entry
  uint32_t distances[1 << kDistBits];   // see dist_entry
  // At multiples of four bytes, with whole words.
  alignas(4) uint8_t lengths[kLitlens + kDists];
  alignas(4) uint8_t precode_lengths[(kPrecodes + 3) / 4 * 4];
  uint8_t counts[kGroups][kMaxCodeBits + 1];  // code words of each length in each group
  bool fits[2];
  Header header;
  Lengths reading;
  union {
    struct {
      Unpacking unpacking;
      Run runs[kRuns];
      uint8_t packed[kPackedBytes];
    };
    // For a byte: its contribution to a checksum with up to kSlices - 1 bytes after it.
    uint32_t checksums[kSlices][256];
    struct {
      Precode precode;
      uint16_t precode_look[1 << kPrecodeBits];
      uint32_t steps[kSteps];  // of a header's bits: see length_step
      // Of a header's bits: the bits to the code word after the jump << 16 | the number of lengths.
      uint32_t jumps[kJumpLevels][kSteps];
      // The number of lengths before a code word << 16 | its position in `steps`: of every
      // kJump-th code word, and of all.
      uint32_t heads[kMaxHeads];
      uint32_t words[kLitlens + kDists];
    };
    struct {
      uint32_t staged[kStaged];  // the input of the step, from a multiple of 32 bits on
      alignas(4) uint8_t kept[kThreads][kKeptBytes];
      // Each: the kept literals before it | (length - 3) << 8 | (distance - 1) << 16.
      uint32_t matches[kMaxMatches][kThreads];
    };
  };
  // For each thread: its position in the staged input; where the next thread's codes start; how it
  // got there; the bytes that it produces; the literals and matches that it has kept, and the bit
  // where the codes after these start; the position of its bytes in the output; how many of them
  // are written, which its own thread knows first and the others after a barrier; and how many of
  // its matches are copied.
  uint32_t bit[kThreads];
  uint32_t end[kThreads];
  uint32_t bytes[kThreads];
  uint32_t rest[kThreads];
  uint32_t begin[kThreads];
  uint32_t cursor[kThreads];
  uint32_t done[kThreads];
  uint8_t state[kThreads];  // Kind: kLiteral, or how the block ended
  uint8_t literals_kept[kThreads];
  uint8_t matches_kept[kThreads];
  uint8_t copied[kThreads];
  bool again[kThreads];
  uint32_t total;
};

// Reads a number of up to 5 bytes. Returns the position after it, or 0 if it does not end.
TS_HOST_DEVICE uint32_t read_varint(const uint8_t* data, uint32_t at, uint32_t end, uint64_t* v) {
  *v = 0;
  for (uint32_t i = 0; i < 5 && at < end; ++i, ++at) {
    *v |= uint64_t{data[at] & 0x7fu} << (7 * i);
    if (data[at] < 0x80) return at + 1;
  }
  return 0;
}

// Reads the runs whose headers are in State::packed, the packed bytes from `begin` on.
TS_HOST_DEVICE void read_runs(uint32_t begin, uint32_t bytes, State* s) {
  constexpr uint32_t kHeaderBytes = 10;
  Unpacking u = s->unpacking;
  const uint32_t end = smaller(bytes - begin, kPackedBytes);
  u.runs = 0;
  while (u.runs < kRuns && u.at < bytes) {
    const uint32_t at = u.at - begin;
    if (at + kHeaderBytes > end && begin + end < bytes) break;
    uint64_t skip = 0;
    uint64_t length = 0;
    uint32_t next = read_varint(s->packed, at, end, &skip);
    if (next != 0) next = read_varint(s->packed, next, end, &length);
    const uint32_t from = begin + next;
    u.bad = next == 0 || skip > kWindow - u.place || length > kWindow - u.place - skip ||
            length > bytes - from;
    if (u.bad) break;
    u.place += static_cast<uint32_t>(skip);
    const auto n = static_cast<uint32_t>(length);
    s->runs[u.runs++] = {u.place, from, n};
    u.place += n;
    u.at = from + n;
  }
  s->unpacking = u;
}

// Writes the window to `room`. Returns false if it is damaged.
template <typename Team>
TS_DEVICE bool unpack_window(Team& team, const uint8_t* packed, uint32_t bytes, uint8_t* room,
                             State* s) {
  if (bytes > kMaxPackedWindow) return false;
  team.each([&](uint32_t t) {
    auto* const words = reinterpret_cast<uint64_t*>(room);
    for (uint32_t i = t; i < kWindow / 8; i += kThreads) words[i] = 0;
    if (t == 0) s->unpacking = {0, 0, 0, false};
  });
  for (uint32_t at = 0; at < bytes;) {
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < kPackedBytes && i < bytes - at; i += kThreads) {
        s->packed[i] = packed[at + i];
      }
    });
    team.each([&](uint32_t t) {
      if (t == 0) read_runs(at, bytes, s);
    });
    const Unpacking u = team.read(s->unpacking);
    if (u.bad) return false;
    team.each([&](uint32_t t) {
      for (uint32_t r = t / 32; r < u.runs; r += kThreads / 32) {
        const Run run = s->runs[r];
        for (uint32_t i = t % 32; i < run.length; i += 32) {
          room[run.place + i] = packed[run.from + i];
        }
      }
    });
    at = u.at;
  }
  return true;
}

// Reads the start of a block, and for a dynamic block the lengths of the precode.
TS_HOST_DEVICE Header read_header(const Input& input, uint32_t bit, State* s) {
  constexpr uint8_t kOrder[] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
  Header header = {kDamaged, false, 0, 0, 0, 0};
  Bits bits(input, bit);
  bits.fill();
  header.last = bits.take(1) == 1;
  switch (bits.take(2)) {
    case 0: {
      bits.drop((8 - bits.position() % 8) % 8);
      bits.fill();
      header.length = bits.take(16);
      header.kind = (bits.take(16) ^ header.length) == 0xffff ? kStored : kDamaged;
      break;
    }
    case 1:
      header.kind = kFixed;
      break;
    case 2: {
      header.litlens = bits.take(5) + 257;
      header.dists = bits.take(5) + 1;
      const uint32_t precodes = bits.take(4) + 4;
      if (header.litlens > 286 || header.dists > 30) break;
      for (uint32_t i = 0; i < kPrecodes; ++i) {
        bits.fill();
        s->precode_lengths[kOrder[i]] = static_cast<uint8_t>(i < precodes ? bits.take(3) : 0);
      }
      header.kind = kDynamic;
      break;
    }
    default:
      break;
  }
  header.bit = bits.position();
  if (header.bit > input.bits()) header.kind = kDamaged;
  return header;
}

// The decoded form of a code word of the precode: the bits to its end << kPassedAt, the number of
// lengths << kTimesAt, and their value, or kRepeat for the previous length. If there is no code
// word, the number of lengths is larger than in any block.
constexpr uint32_t kPassedAt = 20;
constexpr uint32_t kTimesAt = 8;
constexpr uint32_t kMaxTimes = (1u << (kPassedAt - kTimesAt)) - 1;
constexpr uint32_t kRepeat = 16;
static_assert(kMaxTimes > kLitlens + kDists, "no block has so many");
static_assert(kMaxTimes << kJumpLevels < 1u << 16, "a jump keeps its times in 16 bits");

TS_HOST_DEVICE uint32_t value_of_step(uint32_t step) { return step & 0xff; }
TS_HOST_DEVICE uint32_t times_of_step(uint32_t step) { return step >> kTimesAt & kMaxTimes; }

TS_HOST_DEVICE uint32_t length_step(const uint16_t* look, uint32_t bits) {
  const uint32_t entry = look[bits & ((1u << kPrecodeBits) - 1)];
  const uint32_t passed = entry & 15;
  const uint32_t symbol = entry >> 4;
  bits >>= passed;
  if (entry == 0) return 1u << kPassedAt | kMaxTimes << kTimesAt;
  if (symbol < 16) return passed << kPassedAt | 1u << kTimesAt | symbol;
  if (symbol == 16) return (passed + 2) << kPassedAt | (3 + (bits & 3)) << kTimesAt | kRepeat;
  if (symbol == 17) return (passed + 3) << kPassedAt | (3 + (bits & 7)) << kTimesAt;
  return (passed + 7) << kPassedAt | (11 + (bits & 127)) << kTimesAt;
}

// Returns the jump of level `level` at bit `at` of State::steps.
TS_HOST_DEVICE uint32_t jump_at(const State& s, uint32_t level, uint32_t at) {
  if (level != 0) return s.jumps[level - 1][at];
  const uint32_t step = s.steps[at];
  return (step >> kPassedAt) << 16 | times_of_step(step);
}

// Sets the jumps of a level from the level below. A jump ends at the first code word after
// State::steps.
TS_HOST_DEVICE void set_jump(uint32_t level, uint32_t at, State* s) {
  const uint32_t first = jump_at(*s, level - 1, at);
  const uint32_t next = at + (first >> 16);
  s->jumps[level - 1][at] = first + (next < kSteps ? jump_at(*s, level - 1, next) : 0);
}

// Lists every kJump-th code word from State::reading on, up to the last one that starts in
// State::steps.
TS_HOST_DEVICE void list_heads(uint32_t all, State* s) {
  uint32_t heads = 0;
  uint32_t at = 0;
  uint32_t count = s->reading.count;
  while (at < kSteps && count < all) {
    s->heads[heads++] = count << 16 | at;
    const uint32_t jump = jump_at(*s, kJumpLevels, at);
    at += jump >> 16;
    count += jump & 0xffff;
  }
  s->reading.heads = heads;
}

// Lists the code word number `word`, if there are as many. `before` is State::reading before. The
// last word's thread sets State::reading.
TS_HOST_DEVICE void list_word(uint32_t word, uint32_t all, const Lengths& before, State* s) {
  uint32_t at = s->heads[word / kJump] & 0xffff;
  uint32_t count = s->heads[word / kJump] >> 16;
  for (uint32_t level = kJumpLevels; level-- > 0;) {
    if ((word >> level & 1) == 0 || at >= kSteps) continue;
    const uint32_t jump = jump_at(*s, level, at);
    at += jump >> 16;
    count += jump & 0xffff;
  }
  if (at >= kSteps || count >= all) return;
  s->words[word] = count << 16 | at;
  const uint32_t step = s->steps[at];
  at += step >> kPassedAt;
  count += times_of_step(step);
  if (at < kSteps && count < all) return;
  s->reading = before;
  s->reading.bit += at;
  s->reading.count = count;
  s->reading.words = word + 1;
  s->reading.bad = count > all || (before.count == 0 && value_of_step(s->steps[0]) == kRepeat);
}

// Returns the value of the last length of the first n code words in the list, or `before`, the
// value before the list.
TS_HOST_DEVICE uint32_t last_value(const State& s, uint32_t n, uint32_t before) {
  while (n-- > 0) {
    const uint32_t value = value_of_step(s.steps[s.words[n] & 0xffff]);
    if (value != kRepeat) return value;
  }
  return before;
}

// Sets the lengths of a listed code word. State::lengths is zero before.
TS_HOST_DEVICE void set_lengths(uint32_t word, uint32_t before, uint32_t litlens, uint32_t all,
                                State* s) {
  const uint32_t step = s->steps[s->words[word] & 0xffff];
  const uint32_t value = last_value(*s, word + 1, before);
  const uint32_t begin = s->words[word] >> 16;
  const uint32_t end = value == 0 ? begin : smaller(begin + times_of_step(step), all);
  for (uint32_t i = begin; i < end; ++i) {
    s->lengths[i < litlens ? i : kLitlens + i - litlens] = static_cast<uint8_t>(value);
  }
}

// Reads the lengths of the code words of a dynamic block, whose precode has its lengths. Returns
// the bit after them, or 0 if they are damaged. All threads decode the code words at all bits, so
// that the thread that follows them from one to the next has little else to do.
template <typename Team>
TS_DEVICE uint32_t read_lengths(Team& team, const Input& input, const Header& header, State* s) {
  team.each([&](uint32_t t) {
    if (t <= kMaxCodeBits) s->precode.count[t] = count_of(s->precode_lengths, kPrecodes, t);
  });
  team.each([&](uint32_t t) {
    if (t != 0) return;
    s->fits[0] = set_limits(&s->precode, false);
    s->reading = {header.bit, 0, 0, 0, false};
  });
  if (!team.read(s->fits[0])) return 0;
  team.each([&](uint32_t t) {
    const uint32_t length = t < kPrecodes ? s->precode_lengths[t] : 0;
    if (length != 0) {
      place_symbol(&s->precode, length, t, count_of(s->precode_lengths, t, length));
    }
  });
  team.each([&](uint32_t t) {
    if (t < 1u << kPrecodeBits) {
      s->precode_look[t] = static_cast<uint16_t>(search<1, kPrecodeBits>(s->precode, t));
    }
  });
  const uint32_t all = header.litlens + header.dists;
  Lengths now = {header.bit, 0, 0, 0, false};
  uint32_t before = 0;
  while (now.count < all) {
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < kSteps; i += kThreads) {
        s->steps[i] = length_step(s->precode_look, input.bits_at(now.bit + i));
      }
    });
    for (uint32_t level = 1; level <= kJumpLevels; ++level) {
      team.each([&](uint32_t t) {
        for (uint32_t i = t; i < kSteps; i += kThreads) set_jump(level, i, s);
      });
    }
    team.each([&](uint32_t t) {
      if (t == 0) list_heads(all, s);
    });
    const uint32_t most = team.read(s->reading.heads) * kJump;
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < most; i += kThreads) list_word(i, all, now, s);
    });
    now = team.read(s->reading);
    if (now.bad || now.bit > input.bits()) return 0;
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < now.words; i += kThreads) {
        set_lengths(i, before, header.litlens, all, s);
      }
    });
    before = last_value(*s, now.words, before);
    team.each([](uint32_t) {});  // all have read the list
  }
  return s->lengths[256] == 0 ? 0 : now.bit;
}

// Builds the codes of State::lengths. Returns false if they are impossible.
template <typename Team>
TS_DEVICE bool build_codes(Team& team, State* s) {
  constexpr uint32_t kEach = kMaxCodeBits + 1;
  team.each([&](uint32_t t) {
    for (uint32_t i = t; i < kGroups * kEach; i += kThreads) {
      s->counts[i / kEach][i % kEach] =
          static_cast<uint8_t>(count_of(s->lengths + i / kEach * kGroup, kGroup, i % kEach));
    }
  });
  team.each([&](uint32_t t) {
    if (t >= 2 * kEach) return;
    const bool dist = t >= kEach;
    uint32_t count = 0;
    for (uint32_t i = dist ? kLitlens / kGroup : 0; i < (dist ? kGroups : kLitlens / kGroup); ++i) {
      count += s->counts[i][t % kEach];
    }
    uint32_t* const counts = dist ? s->dist.count : s->litlen.count;
    counts[t % kEach] = count;
  });
  team.each([&](uint32_t t) {
    if (t == 0) s->fits[0] = set_limits(&s->litlen, true);
    if (t == 32) s->fits[1] = set_limits(&s->dist, true);
  });
  const bool fits_litlen = team.read(s->fits[0]);
  const bool fits_dist = team.read(s->fits[1]);
  if (!fits_litlen || !fits_dist) return false;
  team.each([&](uint32_t t) {
    for (uint32_t i = t; i < kLitlens + kDists; i += kThreads) {
      const uint32_t length = s->lengths[i];
      if (length == 0) continue;
      const uint32_t group = i / kGroup;
      uint32_t rank = count_of(s->lengths + group * kGroup, i % kGroup, length);
      for (uint32_t k = i < kLitlens ? 0 : kLitlens / kGroup; k < group; ++k) {
        rank += s->counts[k][length];
      }
      if (i < kLitlens) {
        place_symbol(&s->litlen, length, i, rank);
      } else {
        place_symbol(&s->dist, length, i - kLitlens, rank);
      }
    }
  });
  team.each([&](uint32_t t) {
    for (uint32_t i = t; i < 1u << kLitlenBits; i += kThreads) {
      s->literals[i] = litlen_entry(s->litlen, i);
    }
    for (uint32_t i = t; i < 1u << kDistBits; i += kThreads) {
      s->distances[i] = dist_entry(search<1, kDistBits>(s->dist, i));
    }
  });
  return true;
}

// Reads a block's header and builds its codes. Returns kDamaged if that fails.
template <typename Team>
TS_DEVICE Header begin_block(Team& team, const Input& input, uint32_t bit, State* s) {
  team.each([&](uint32_t t) {
    for (uint32_t i = t; i < kLitlens + kDists; i += kThreads) s->lengths[i] = 0;
    if (t == 0) s->header = read_header(input, bit, s);
  });
  Header header = team.read(s->header);
  if (header.kind == kDynamic) {
    header.bit = read_lengths(team, input, header, s);
    if (header.bit == 0) header.kind = kDamaged;
  } else if (header.kind == kFixed) {
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < kLitlens + kDists; i += kThreads) {
        const uint32_t litlen = i < 144 ? 8 : i < 256 ? 9 : i < 280 ? 7 : 8;
        s->lengths[i] = static_cast<uint8_t>(i < kLitlens ? litlen : 5);
      }
    });
  }
  if ((header.kind == kDynamic || header.kind == kFixed) && !build_codes(team, s)) {
    header.kind = kDamaged;
  }
  return header;
}

// The input of a step. Positions in it count from its first staged bit.
struct Step {
  uint32_t bit;  // the first staged one
  uint32_t end;  // of the input
};

// Returns 64 bits of the staged input.
TS_HOST_DEVICE uint64_t window_at(const State& s, uint32_t at) {
  const uint32_t* const words = s.staged + at / 32;
#if defined(__CUDA_ARCH__)
  const uint32_t middle = words[1];
  return uint64_t{__funnelshift_r(middle, words[2], at)} << 32 |
         __funnelshift_r(words[0], middle, at);
#else
  const uint64_t low = words[0] | uint64_t{words[1]} << 32;
  return at % 32 == 0 ? low : low >> at % 32 | uint64_t{words[2]} << (64 - at % 32);
#endif
}

// Reads the symbol at a position of the staged input, whose entry this is. A symbol has at most 48
// bits.
TS_HOST_DEVICE ReadSymbol read_symbol(uint32_t at, uint32_t entry, const State& s) {
  const ReadSymbol bad = {{kBad, 0, 0}, at};
  uint64_t bits = window_at(s, at);
  if (entry == 0 || is_literal(entry)) {
    const uint32_t found =
        search<kLitlenBits + 1, kMaxCodeBits>(s.litlen, static_cast<uint32_t>(bits));
    const uint32_t symbol = found >> 4;
    const uint32_t end = at + (found & 15);
    if (found == 0 || symbol > 285) return bad;
    if (symbol < 256) return {{kLiteral, 1, symbol}, end};
    entry = length_code(symbol) | (found & 15) << 8;
  }
  const uint32_t passed = entry >> 8 & 31;
  const uint32_t extra = entry >> 13 & 7;
  if (entry >> 16 == 0) return {{kEnd, 0, 0}, at + passed};
  const uint32_t length = (entry >> 16) + lowest(bits >> passed, extra);
  bits >>= passed + extra;
  uint32_t found = s.distances[lowest(bits, kDistBits)];
  if (found == 0) {
    found = dist_entry(search<kDistBits + 1, kMaxCodeBits>(s.dist, static_cast<uint32_t>(bits)));
    if (found == 0) return bad;
  }
  const uint32_t more = found >> 5 & 15;
  const uint32_t distance = (found >> 16) + lowest(bits >> (found & 31), more);
  return {{kMatch, length, distance}, at + passed + extra + (found & 31) + more};
}

// Decodes codes from position `at` to `stop`, the last of which may end later. Returns where they
// end, and sets *kind to kLiteral, or to how the block ended before. With kKeeps, keeps what thread
// t produces.
template <bool kKeeps>
TS_HOST_DEVICE uint32_t decode(const Step& step, uint32_t at, uint32_t stop, uint32_t t, Kind* kind,
                               State* s) {
  const uint32_t limit = smaller(stop, step.end);
  // Literals are written here when the thread keeps nothing more.
  constexpr uint32_t kUnused = kKeptBytes - kLiteralsAtOnce;
  uint8_t* const kept = s->kept[t];
  uint32_t place = 0;  // of the next literal in `kept`
  bool keeps = true;   // false: the thread keeps nothing more
  uint32_t bytes = 0;
  uint32_t literals = 0, matches = 0, rest = 0;
  *kind = kLiteral;
  while (at < stop) {
    if (kKeeps && keeps && place + kLiteralsAtOnce >= kUnused) {
      literals = place;
      rest = at;
      place = kUnused;
      keeps = false;
    }
    uint64_t bits = window_at(*s, at);
    uint32_t entries[kLiteralsAtOnce];
    uint32_t all = ~0u;
    uint32_t sum = 0;  // the lowest byte has the sum of the bits
    TS_UNROLL
    for (uint32_t i = 0; i < kLiteralsAtOnce; ++i) {
      entries[i] = s->literals[lowest(bits, kLitlenBits)];
      bits = shifted_right(bits, entries[i]);
      if (kKeeps) kept[place + i] = static_cast<uint8_t>(entries[i] >> 8);
      all &= entries[i];
      sum += entries[i];
    }
    if (is_literal(all) && at + (sum & 255) <= limit) {
      at += sum & 255;
      place += keeps ? kLiteralsAtOnce : 0;
      bytes += kLiteralsAtOnce;
      continue;
    }
    uint32_t count = 0;
    uint32_t entry = 0;
    TS_UNROLL
    for (uint32_t i = 0; i < kLiteralsAtOnce; ++i) {
      if (count != i) continue;
      entry = entries[i];
      const uint32_t next = at + (entry & 31);
      if (!is_literal(entry) || at >= stop || next > step.end) continue;
      at = next;
      ++count;
    }
    place += keeps ? count : 0;
    bytes += count;
    if (count == kLiteralsAtOnce || at >= stop) continue;
    const ReadSymbol read = read_symbol(at, entry, *s);
    const Symbol& symbol = read.symbol;
    const uint32_t before = at;
    at = read.end;
    if (symbol.kind >= kEnd || at > step.end) {
      *kind = at > step.end ? kBad : symbol.kind;
      break;
    }
    if (!kKeeps) continue;
    bytes += symbol.length;
    if (symbol.kind == kLiteral) {
      kept[place] = static_cast<uint8_t>(symbol.value);
      place += keeps ? 1 : 0;
    } else if (keeps && matches < kMaxMatches) {
      s->matches[matches++][t] = place | (symbol.length - 3) << 8 | (symbol.value - 1) << 16;
    } else if (keeps) {
      literals = place;
      rest = before;
      place = kUnused;
      keeps = false;
    }
  }
  if (kKeeps) {
    s->bytes[t] = bytes;
    s->literals_kept[t] = static_cast<uint8_t>(keeps ? place : literals);
    s->matches_kept[t] = static_cast<uint8_t>(matches);
    s->rest[t] = keeps ? at : rest;
  }
  return at;
}

// Decodes the codes of thread t from its position to `stop`.
TS_HOST_DEVICE void follow(const Step& step, uint32_t t, uint32_t stop, State* s) {
  Kind kind;
  s->end[t] = decode<true>(step, s->bit[t], stop, t, &kind, s);
  s->state[t] = static_cast<uint8_t>(kind);
}

// Returns a guess where codes start, at or after `at`. The `before` bits before it are codes too.
TS_HOST_DEVICE uint32_t guessed_start(const Step& step, uint32_t at, uint32_t before, State* s) {
  if (before == 0) return at;
  Kind kind;
  const uint32_t reached = decode<false>(step, at - before, at, 0, &kind, s);
  return kind == kLiteral ? reached : at;
}

// Reports whether the output in [from, to), which is before the output of thread t, is written.
TS_HOST_DEVICE bool written(const State& s, uint32_t t, uint32_t from, uint32_t to) {
  // The last thread that starts at or before `from`.
  uint32_t low = 0;
  uint32_t high = t;
  while (high - low > 1) {
    const uint32_t middle = (low + high) / 2;
    (s.begin[middle] <= from ? low : high) = middle;
  }
  for (; low < t && s.begin[low] < to; ++low) {
    if (s.done[low] < smaller(to, s.begin[low + 1])) return false;
  }
  return true;
}

// Copies whole pieces of kPiece bytes from byte i on. Returns the number of the byte behind them.
template <uint32_t kPiece>
TS_HOST_DEVICE uint32_t copy_pieces(uint8_t* to, const uint8_t* from, uint32_t i, uint32_t length) {
  for (; i + kPiece <= length; i += kPiece) {
    uint8_t piece[kPiece];
    TS_UNROLL
    for (uint32_t k = 0; k < kPiece; ++k) piece[k] = from[i + k];
    TS_UNROLL
    for (uint32_t k = 0; k < kPiece; ++k) to[i + k] = piece[k];
  }
  return i;
}

TS_HOST_DEVICE void copy_match(uint8_t* to, uint32_t distance, uint32_t length) {
  const uint8_t* const from = to - distance;
  uint32_t i = 0;
  if (distance == 1) {
    for (const uint8_t value = *from; i < length; ++i) to[i] = value;
  } else {
    // The device waits for all loads of a piece at once.
    if (distance >= 16) i = copy_pieces<16>(to, from, i, length);
    if (distance >= 4) i = copy_pieces<4>(to, from, i, length);
  }
  for (; i < length; ++i) to[i] = from[i];
}

// Copies a match to output[at], unless other threads have yet to write bytes of it: then it returns
// false. `first` bytes were written before this step of the team; bytes from `end` on are not
// written.
TS_HOST_DEVICE bool try_match(const State& s, uint32_t t, uint32_t first, uint32_t at, uint32_t end,
                              uint32_t length, uint32_t distance, uint8_t* output) {
  // Here positions count from the start of the window.
  const uint32_t from = kWindow + at - distance;
  const uint32_t to = from + smaller(length, distance);
  const uint32_t begin = s.begin[t];
  if (to > kWindow + first && from < kWindow + begin &&
      !written(s, t, from < kWindow + first ? first : from - kWindow,
               smaller(to - kWindow, begin))) {
    return false;
  }
  copy_match(output + at, distance, smaller(length, end - at));
  return true;
}

// Writes the kept literals of the threads of t's warp that are before `wanted`: the warp's threads
// write each thread's together.
TS_HOST_DEVICE void write_literals(uint32_t t, uint32_t wanted, uint8_t* output, const State& s) {
  constexpr uint32_t kWarp = 32;
  for (uint32_t i = t / kWarp * kWarp; i < t / kWarp * kWarp + kWarp; ++i) {
    const uint32_t literals = s.literals_kept[i];
    const uint32_t matches = s.matches_kept[i];
    const uint32_t begin = s.begin[i];
    for (uint32_t k = t % kWarp; k < literals; k += kWarp) {
      uint32_t to = begin + k;
      for (uint32_t m = 0; m < matches; ++m) {
        const uint32_t match = s.matches[m][i];
        to += (match & 255) <= k ? (match >> 8 & 255) + 3 : 0;
      }
      if (to < wanted) output[to] = s.kept[i][k];
    }
  }
}

// Sets where the bytes of thread t are written. Its cursor is at the first one that write_literals
// leaves out.
TS_HOST_DEVICE void begin_writing(uint32_t t, uint32_t begin, State* s) {
  const uint32_t literals = s->matches_kept[t] != 0 ? s->matches[0][t] & 255 : s->literals_kept[t];
  s->begin[t] = begin;
  s->cursor[t] = s->done[t] = begin + literals;
  s->copied[t] = 0;
}

// Writes the other bytes of thread t to `output`, from its cursor up to a match of bytes that other
// threads have not written yet. Returns whether any are left.
TS_HOST_DEVICE bool write(uint32_t t, uint32_t first, uint32_t wanted, uint8_t* output, State* s) {
  const uint32_t end = smaller(s->begin[t] + s->bytes[t], wanted);
  uint32_t at = s->cursor[t];
  if (at >= end) return false;
  const uint32_t matches = s->matches_kept[t];
  uint32_t copied = s->copied[t];
  bool waits = false;
  while (copied < matches && at < end && !waits) {
    const uint32_t match = s->matches[copied][t];
    const uint32_t length = (match >> 8 & 255) + 3;
    waits = !try_match(*s, t, first, at, end, length, (match >> 16) + 1, output);
    if (waits) break;
    ++copied;
    const uint32_t next = copied < matches ? s->matches[copied][t] & 255 : s->literals_kept[t];
    at += length + next - (match & 255);
  }
  s->copied[t] = static_cast<uint8_t>(copied);
  uint32_t bit = s->rest[t];
  while (at < end && !waits) {
    const uint32_t entry = s->literals[lowest(window_at(*s, bit), kLitlenBits)];
    ReadSymbol read = {{kLiteral, 1, entry >> 8 & 255}, bit + (entry & 31)};
    if (!is_literal(entry)) read = read_symbol(bit, entry, *s);
    const Symbol& symbol = read.symbol;
    if (symbol.kind == kLiteral) {
      output[at] = static_cast<uint8_t>(symbol.value);
    } else {
      waits = !try_match(*s, t, first, at, end, symbol.length, symbol.value, output);
      if (waits) break;
    }
    at += symbol.length;
    bit = read.end;
  }
  s->rest[t] = bit;
  s->cursor[t] = at;
  return at < end;
}

// Inflates the codes of a block from `bit` on, and returns where they end. Sets *produced to the
// bytes of output, which may exceed `wanted`. Returns 0 if the block is damaged.
template <typename Team>
TS_DEVICE uint32_t inflate_codes(Team& team, const Input& input, uint32_t bit, uint32_t wanted,
                                 uint8_t* output, uint32_t* produced, State* s) {
  for (;;) {
    const uint32_t first = *produced;
    const Step step = {bit / 32 * 32, input.bits() - bit / 32 * 32};
    const uint32_t begin = bit % 32;
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < kStaged; i += kThreads) s->staged[i] = input.word(bit / 32 + i);
    });
    team.each([&](uint32_t t) {
      const uint32_t from = begin + t * kSubsequence;
      s->bit[t] = guessed_start(step, from, smaller(kWarm, t * kSubsequence), s);
      follow(step, t, from + kSubsequence, s);
    });
    // A round settles at least one more thread. Threads after the end of the block keep their
    // guess.
    while (team.any([&](uint32_t t) {
      s->again[t] = t > 0 && s->state[t - 1] == kLiteral && s->bit[t] != s->end[t - 1];
      if (s->again[t]) s->bit[t] = s->end[t - 1];
      return s->again[t];
    })) {
      team.each([&](uint32_t t) {
        if (s->again[t]) follow(step, t, begin + (t + 1) * kSubsequence, s);
      });
    }
    const uint32_t last =
        team.min([&](uint32_t t) { return s->state[t] == kLiteral ? kThreads : t; });
    team.scan([&](uint32_t t) { return t <= last ? s->bytes[t] : 0; },
              [&](uint32_t t, uint32_t before) {
                if (t > last) s->bytes[t] = s->literals_kept[t] = s->matches_kept[t] = 0;
                begin_writing(t, first + before, s);
                if (t == kThreads - 1) s->total = before + s->bytes[t];
              });
    *produced = first + team.read(s->total);
    const bool bad = last < kThreads && team.read(s->state[last]) == kBad;
    if (bad && *produced < wanted) return 0;
    team.each([&](uint32_t t) { write_literals(t, wanted, output, *s); });
    while (team.any([&](uint32_t t) { return write(t, first, wanted, output, s); })) {
      team.each([&](uint32_t t) { s->done[t] = s->cursor[t]; });
    }
    bit = step.bit + team.read(s->end[smaller(last, kThreads - 1)]);
    if (last < kThreads || *produced >= wanted) return bit;
  }
}

// Copies thread t's share of `length` bytes of the input, from byte `from` on; all are inside the
// input.
TS_HOST_DEVICE void copy_stored(const Input& input, uint32_t from, uint32_t length, uint32_t t,
                                uint8_t* to) {
  constexpr uint32_t kAtOnce = 8;  // words that a thread loads before it stores them
  const uint32_t head = smaller(to_multiple_of(4, to), length);
  // The words of the output are in as many words of the input and one more.
  const uint32_t shift = (from + head) % 4 * 8;
  const auto* const in = reinterpret_cast<const uint32_t*>(input.data + (from + head) / 4 * 4);
  const uint32_t inside = input.bytes / 4 - smaller(input.bytes / 4, (from + head) / 4 + 1);
  const uint32_t words = smaller((length - head) / 4, inside);
  const uint32_t tail = head + 4 * words;
  if (t < head) to[t] = input.data[from + t];
  for (uint32_t i = tail + t; i < length; i += kThreads) to[i] = input.data[from + i];
  auto* const out = reinterpret_cast<uint32_t*>(to + head);
  for (uint32_t first = t; first < words; first += kAtOnce * kThreads) {
    uint64_t values[kAtOnce];
    TS_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kThreads;
      if (i < words) values[k] = in[i] | uint64_t{in[i + 1]} << 32;
    }
    TS_UNROLL
    for (uint32_t k = 0; k < kAtOnce; ++k) {
      const uint32_t i = first + k * kThreads;
      if (i < words) out[i] = static_cast<uint32_t>(values[k] >> shift);
    }
  }
}

// Adds a word to a checksum, with the tables of State::checksums.
TS_HOST_DEVICE uint32_t add_word(const State& s, uint32_t sum, uint32_t word) {
  sum ^= word;
  return s.checksums[3][sum & 0xff] ^ s.checksums[2][sum >> 8 & 0xff] ^
         s.checksums[1][sum >> 16 & 0xff] ^ s.checksums[0][sum >> 24];
}

TS_HOST_DEVICE uint32_t add_bytes(const State& s, uint32_t sum, const uint8_t* data, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) sum = s.checksums[0][(sum ^ data[i]) & 0xff] ^ sum >> 8;
  return sum;
}

// Returns the CRC-32 of bytes. A thread processes consecutive pieces of 16 bytes.
template <typename Team>
TS_DEVICE uint32_t checksum(Team& team, const uint8_t* data, uint32_t bytes, State* s) {
  const uint32_t head = smaller(to_multiple_of(sizeof(Piece), data), bytes);
  const auto* const pieces = reinterpret_cast<const Piece*>(data + head);
  const uint32_t count = (bytes - head) / sizeof(Piece);
  const uint32_t tail = head + count * sizeof(Piece);
  const uint32_t each = (count + kThreads - 1) / kThreads;
  team.each([&](uint32_t t) {
    for (uint32_t i = t; i < 256; i += kThreads) {
      uint32_t entry = i;
      for (uint32_t k = 0; k < kSlices; ++k) s->checksums[k][i] = entry = checksum_entry(entry);
    }
  });
  team.each([&](uint32_t t) {
    uint32_t sum = t == 0 ? add_bytes(*s, 0xffffffff, data, head) : 0;
    const uint32_t end = smaller((t + 1) * each, count);
    // The next piece is loaded while this one is added.
    Piece next = {};
    if (t * each < end) next = pieces[t * each];
    for (uint32_t i = t * each; i < end; ++i) {
      const Piece piece = next;
      if (i + 1 < end) next = pieces[i + 1];
      for (const uint32_t word : piece.words) sum = add_word(*s, sum, word);
    }
    if (t == kThreads - 1) sum = add_bytes(*s, sum, data + tail, bytes - tail);
    const uint32_t from_end = t == kThreads - 1 ? 0 : bytes - head - end * sizeof(Piece);
    s->bytes[t] = shifted(sum, from_end);
  });
  constexpr uint32_t kEach = 16;
  team.each([&](uint32_t t) {
    uint32_t sum = 0;
    for (uint32_t i = 0; t % kEach == 0 && i < kEach; ++i) sum ^= s->bytes[t + i];
    if (t % kEach == 0) s->begin[t] = sum;
  });
  team.each([&](uint32_t t) {
    uint32_t sum = 0;
    for (uint32_t i = 0; t == 0 && i < kThreads; i += kEach) sum ^= s->begin[i];
    if (t == 0) s->total = ~sum;
  });
  return team.read(s->total);
}

// Fills a room, except for the zeros after the range. For a range that fails, a part of the room is
// unchanged.
// A team has kThreads threads. each(f) calls f(thread) in each of them. any(f) also returns whether
// one f returned true, and min(f) returns the minimum. scan(value, use) calls use(thread, sum of
// the values of the threads before it). read(v) returns a copy of v. After each of these calls all
// threads see all writes, and may overwrite data that others have read.
template <typename Team>
TS_DEVICE Result fill_room(Team& team, const Range& range, const uint8_t* staging, uint8_t* room,
                           State* s) {
  const Result failed = {1, 0};
  const Input input = {staging + range.input, range.input_bytes};
  uint8_t* const output = room + kWindow;
  const uint32_t wanted = range.skip + range.bytes;
  if (!unpack_window(team, staging + range.window, range.window_bytes, room, s)) return failed;
  uint32_t produced = 0;
  uint32_t bit = range.skip_bits;
  uint32_t blocks = smaller(kBlocks + input.bytes / kBlockInput, kMaxBlocks);
  for (bool last = false; produced < wanted; --blocks) {
    if (last || blocks == 0) return failed;
    const Header header = begin_block(team, input, bit, s);
    last = header.last;
    bit = header.bit;
    if (header.kind == kDamaged) return failed;
    if (header.kind == kStored) {
      const uint32_t from = bit / 8;
      const uint32_t length = smaller(header.length, wanted - produced);
      if (length > input.bytes - from) return failed;
      team.each([&](uint32_t t) { copy_stored(input, from, length, t, output + produced); });
      produced += length;
      bit += 8 * length;
    } else {
      bit = inflate_codes(team, input, bit, wanted, output, &produced, s);
      if (bit == 0) return failed;
    }
  }
  return {0, checksum(team, output + range.skip, range.bytes, s)};
}

// Inflates a range to its room: kWindow bytes of window, then `skip` bytes of output, then the
// range, then `behind` zeros. The output of a failed range is zeros: an image is decoded from it
// before the host learns of the failure.
template <typename Team>
TS_DEVICE Result inflate(Team& team, const Range& range, const uint8_t* staging, uint8_t* rooms,
                         State* s) {
  uint8_t* const room = rooms + range.room;
  uint8_t* const output = room + kWindow;
  const uint32_t wanted = range.skip + range.bytes;
  team.each([&](uint32_t t) {
    if (t < range.behind) output[wanted + t] = 0;
  });
  const Result result = fill_room(team, range, staging, room, s);
  if (result.failed != 0) {
    team.each([&](uint32_t t) {
      for (uint32_t i = t; i < wanted; i += kThreads) output[i] = 0;
    });
  }
  return result;
}

}  // namespace ts::deflate
