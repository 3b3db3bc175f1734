// Compares the team's inflater with our host inflater, which is compared with zlib: the same bytes
// from streams of every kind, from the start and from checkpoints, and the same verdict on damaged
// streams.
#include "deflate/parallel.h"

#include <gtest/gtest.h>

#include <random>
#include <string>

#include "base/error.h"
#include "deflate/inflate.h"
#include "streams.h"
#include "team.h"

namespace {

using streams::Bytes;
using streams::deflated;
using streams::random_bytes;
using team::Inflated;
using ts::deflate::kWindow;
using ts::image::Inflater;

struct Checkpoint {
  uint64_t bit, output;
  Bytes packed;
};

// Returns the checkpoints of a whole stream.
std::vector<Checkpoint> checkpoints(const Bytes& stream, size_t bytes, uint64_t spacing) {
  std::vector<Checkpoint> found;
  Inflater inflater(spacing);
  inflater.reset(0, 0);
  Bytes output(bytes);
  size_t in = 0;
  size_t out = 0;
  for (bool done = false; !done;) {
    const size_t room = std::min(bytes, out + 4096);
    const auto p =
        inflater.run(stream.data() + in, stream.size() - in, true, output.data(), out, room);
    in += p.consumed;
    out += p.produced;
    done = p.done;
    while (const auto* c = inflater.next_checkpoint()) {
      found.push_back({c->bit, c->output, team::pack_window(c->window.data(), c->used.data())});
    }
    if (out == bytes && p.consumed + p.produced == 0) break;
  }
  return found;
}

struct Expected {
  bool failed = false;
  Bytes output;
};

// Returns the first bytes of a stream, inflated by the host's inflater.
Expected by_host(const Bytes& stream, uint32_t skip_bits, const Bytes& window, size_t bytes) {
  Inflater inflater(0);
  inflater.reset(skip_bits, kWindow);
  Bytes room(window);
  room.resize(kWindow + bytes);
  size_t in = 0;
  size_t out = kWindow;
  Expected expected;
  try {
    while (out < room.size() && !expected.failed) {
      const auto p =
          inflater.run(stream.data() + in, stream.size() - in, true, room.data(), out, room.size());
      in += p.consumed;
      out += p.produced;
      expected.failed = out < room.size() && (p.done || p.consumed + p.produced == 0);
    }
  } catch (const ts::Failure&) {
    expected.failed = true;
  }
  expected.output.assign(room.begin() + kWindow, room.end());
  return expected;
}

uint32_t checksum_of(const uint8_t* data, size_t bytes) {
  return static_cast<uint32_t>(crc32(0, data, static_cast<uInt>(bytes)));
}

Inflated inflate(std::mt19937* rng, const Bytes& stream, uint32_t skip_bits, const Bytes& window,
                 size_t skip, size_t bytes) {
  const auto way = (*rng)() % 2 == 0 ? &team::inflate<team::Loop> : &team::inflate<team::Reverse>;
  Inflated inflated =
      way(stream, skip_bits, window, static_cast<uint32_t>(skip), static_cast<uint32_t>(bytes));
  // So it does where the range fails.
  EXPECT_EQ(inflated.behind, Bytes(inflated.behind.size(), 0));
  return inflated;
}

// Expects output[skip, skip + bytes) and its checksum.
void expect_part(const Inflated& got, const uint8_t* output, size_t skip, size_t bytes,
                 const std::string& what) {
  ASSERT_FALSE(got.failed) << what;
  ASSERT_EQ(got.checksum, checksum_of(output + skip, bytes)) << what;
  ASSERT_EQ(std::memcmp(got.room.data() + kWindow, output, skip + bytes), 0) << what;
}

class ParallelInflateKinds : public ::testing::TestWithParam<int> {};

TEST_P(ParallelInflateKinds, EqualsTheDataFromTheBeginningAndFromCheckpoints) {
  std::mt19937 rng(static_cast<uint32_t>(GetParam()));
  const struct {
    int level, strategy, memory;
  } ways[] = {{0, Z_DEFAULT_STRATEGY, 8},
              {1, Z_DEFAULT_STRATEGY, 8},
              {6, Z_DEFAULT_STRATEGY, 8},
              {9, Z_DEFAULT_STRATEGY, 9},
              {6, Z_FIXED, 8},
              {6, Z_HUFFMAN_ONLY, 8},
              {6, Z_RLE, 8},
              {6, Z_DEFAULT_STRATEGY, 1}};
  for (const auto& way : ways) {
    for (const size_t size : {size_t{1}, size_t{300}, size_t{70000}, size_t{200000}}) {
      const std::string what = "level " + std::to_string(way.level) + ", strategy " +
                               std::to_string(way.strategy) + ", " + std::to_string(size);
      const Bytes data = random_bytes(&rng, size, GetParam());
      const Bytes stream = deflated(data, way.level, way.strategy, way.memory);
      const size_t skip = rng() % 3 == 0 ? 0 : rng() % size;
      const size_t bytes = rng() % 3 == 0 ? size - skip : 1 + rng() % (size - skip);
      expect_part(inflate(&rng, stream, 0, {}, skip, bytes), data.data(), skip, bytes, what);
      const auto stops = checkpoints(stream, size, 8192);
      for (size_t i = rng() % 3; i < stops.size(); i += 1 + rng() % 5) {
        const Checkpoint& c = stops[i];
        const size_t left = std::min<size_t>(size - c.output, 60000);
        if (left == 0) continue;
        const Bytes rest(stream.begin() + static_cast<ptrdiff_t>(c.bit / 8), stream.end());
        const size_t ahead = rng() % left;
        expect_part(inflate(&rng, rest, c.bit % 8, c.packed, ahead, left - ahead),
                    data.data() + c.output, ahead, left - ahead,
                    what + ", from a checkpoint at " + std::to_string(c.output));
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, ParallelInflateKinds, ::testing::Range(0, 5));

// Damaged and random streams give the host's bytes and the host's verdict.
TEST(ParallelInflate, JudgesDamageAsTheHostDoes) {
  std::mt19937 rng(7);
  int refused = 0;
  int accepted = 0;
  for (int round = 0; round < 3000; ++round) {
    Bytes stream;
    if (round % 8 == 0) {
      stream = random_bytes(&rng, 1 + rng() % 400, 0);
    } else {
      const int strategy = round % 3 == 0 ? Z_FIXED : Z_DEFAULT_STRATEGY;
      const size_t size = 1 + rng() % (round % 16 == 1 ? 60000 : 3000);
      stream = deflated(random_bytes(&rng, size, static_cast<int>(rng() % 5)),
                        static_cast<int>(rng() % 10), strategy);
      for (uint32_t flips = rng() % 3; flips > 0; --flips) {
        const size_t among = rng() % 2 == 0 ? stream.size() : std::min<size_t>(stream.size(), 120);
        stream[rng() % among] ^= static_cast<uint8_t>(1u << rng() % 8);
      }
      if (rng() % 8 == 0) stream.resize(rng() % stream.size() + 1);
    }
    const Bytes window = random_bytes(&rng, kWindow, 0);
    const std::vector<uint64_t> all(kWindow / 64, ~uint64_t{0});
    const uint32_t skip_bits = round % 4 == 0 ? rng() % 8 : 0;
    const size_t bytes = 1 + rng() % (round % 16 == 1 ? 60000 : 4000);
    const size_t skip = rng() % bytes;
    const Expected want = by_host(stream, skip_bits, window, bytes);
    const Inflated got = inflate(&rng, stream, skip_bits,
                                 team::pack_window(window.data(), all.data()), skip, bytes - skip);
    ASSERT_EQ(got.failed, want.failed) << "round " << round;
    if (want.failed) {
      ++refused;
      continue;
    }
    ++accepted;
    expect_part(got, want.output.data(), skip, bytes - skip, "round " + std::to_string(round));
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(accepted, 500);
}

// The fixed codes have code words for two lengths and two distances that do not exist.
TEST(ParallelInflate, RefusesSymbolsThatDoNotExist) {
  struct Kind {
    uint32_t length_bits, length;      // the code word of a length, highest bit first
    uint32_t distance_bits, distance;  // of a distance
    bool exists;
  };
  std::mt19937 rng(11);
  for (const Kind& kind : {Kind{7, 1, 5, 0, true},
                           {8, 0xC6, 5, 0, false},
                           {8, 0xC7, 5, 0, false},
                           {7, 1, 5, 30, false},
                           {7, 1, 5, 31, false}}) {
    std::vector<bool> bits = {true, true, false};  // the last block, with fixed codes
    const auto add = [&](uint32_t count, uint32_t word) {
      while (count-- > 0) bits.push_back((word >> count & 1) != 0);
    };
    add(8, 0x30 + 42);  // a literal
    add(kind.length_bits, kind.length);
    add(kind.distance_bits, kind.distance);
    add(7, 0);  // the end
    Bytes stream(bits.size() / 8 + 8);
    for (size_t i = 0; i < bits.size(); ++i) {
      stream[i / 8] |= static_cast<uint8_t>(bits[i] ? 1 << i % 8 : 0);
    }
    const Inflated got = inflate(&rng, stream, 0, {}, 0, 4);
    EXPECT_EQ(got.failed, !kind.exists) << kind.length << " " << kind.distance;
    if (kind.exists) {
      EXPECT_EQ(Bytes(got.room.end() - 4, got.room.end()), Bytes(4, 42));
    }
  }
}

// Streams of empty blocks, which would keep a team busy for seconds, fail.
TEST(ParallelInflate, RefusesManyTinyBlocks) {
  std::mt19937 rng(10);
  for (const size_t blocks : {size_t{1000}, size_t{20000}}) {
    // Empty stored blocks, and a last one of a byte.
    Bytes stream;
    for (size_t i = 0; i < blocks; ++i) stream.insert(stream.end(), {0, 0, 0, 0xff, 0xff});
    stream.insert(stream.end(), {1, 1, 0, 0xfe, 0xff, 42});
    const Inflated got = inflate(&rng, stream, 0, {}, 0, 1);
    EXPECT_EQ(got.failed, blocks > 10000);
    if (!got.failed) {
      EXPECT_EQ(got.room.back(), 42);
    }
    // Input after the range does not raise the maximum number of blocks.
    stream.resize(stream.size() + (size_t{2} << 20));
    EXPECT_EQ(inflate(&rng, stream, 0, {}, 0, 1).failed, blocks > ts::deflate::kMaxBlocks);
  }
}

// Unpacks a window as imageloader/internal/archive does. Returns false if it is damaged.
bool unpacked(const Bytes& packed, Bytes* window) {
  window->assign(kWindow, 0);
  size_t at = 0;
  size_t place = 0;
  const auto number = [&](uint64_t* v) {
    *v = 0;
    for (int i = 0; i < 5 && at < packed.size(); ++i) {
      const uint8_t byte = packed[at++];
      *v |= static_cast<uint64_t>(byte & 0x7f) << (7 * i);
      if (byte < 0x80) return true;
    }
    return false;
  };
  while (at < packed.size()) {
    uint64_t skip, length;
    if (!number(&skip) || !number(&length)) return false;
    if (skip > kWindow - place || length > kWindow - place - skip || length > packed.size() - at) {
      return false;
    }
    place += skip;
    for (; length > 0; --length) (*window)[place++] = packed[at++];
  }
  return true;
}

// Arbitrary packed windows: correct ones of one run to thousands, and damaged ones.
TEST(ParallelInflate, UnpacksWindows) {
  std::mt19937 rng(8);
  const Bytes stream = deflated({1, 2, 3}, 6, Z_DEFAULT_STRATEGY);
  int refused = 0;
  for (int round = 0; round < 2000; ++round) {
    Bytes packed;
    if (round % 4 == 0) {
      packed = random_bytes(&rng, rng() % 3000, static_cast<int>(rng() % 5));
    } else {
      const Bytes content = random_bytes(&rng, kWindow, 0);
      std::vector<uint64_t> used(kWindow / 64);
      for (auto& word : used) {
        word = round % 4 == 1 ? ~uint64_t{0} : rng() % (1 + round % 50) == 0 ? rng() & rng() : 0;
      }
      packed = team::pack_window(content.data(), used.data());
      if (!packed.empty() && rng() % 4 == 0) packed[rng() % packed.size()] ^= 1 << rng() % 8;
      if (rng() % 8 == 0) packed.resize(rng() % (packed.size() + 1));
    }
    Bytes window;
    const bool whole = unpacked(packed, &window);
    // An odd number of skipped bits places the window last: skip the bit before the stream.
    Bytes shifted;
    for (size_t i = 0; i <= stream.size(); ++i) {
      const unsigned low = i > 0 ? stream[i - 1] >> 7 : 0;
      shifted.push_back(static_cast<uint8_t>(low | (i < stream.size() ? stream[i] << 1 : 0)));
    }
    const bool odd = rng() % 2 == 0;
    const Inflated got = inflate(&rng, odd ? shifted : stream, odd ? 1 : 0, packed, 1, 2);
    ASSERT_EQ(got.failed, !whole) << "round " << round;
    refused += !whole;
    if (!whole) continue;
    ASSERT_EQ(std::memcmp(got.room.data(), window.data(), kWindow), 0) << "round " << round;
    ASSERT_EQ(got.room.back(), 3);
  }
  EXPECT_GT(refused, 300);
}

// Windows of empty runs contain nothing, whatever their size: one that is too large is refused.
TEST(ParallelInflate, RefusesLongWindows) {
  std::mt19937 rng(9);
  const Bytes stream = deflated({1, 2, 3}, 6, Z_DEFAULT_STRATEGY);
  for (const size_t bytes : {size_t{4} * kWindow, size_t{4} * kWindow + 2}) {
    const Inflated got = inflate(&rng, stream, 0, Bytes(bytes), 1, 2);
    EXPECT_EQ(got.failed, bytes > 4 * kWindow);
  }
}

}  // namespace
