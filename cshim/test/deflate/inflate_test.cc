// Compares the inflater with zlib: the same bytes from streams of every kind, in steps of every
// size, from the start and from every checkpoint, and the same verdict on damaged streams.
#include "deflate/inflate.h"

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "base/error.h"
#include "streams.h"

namespace {

using streams::Bytes;
using streams::deflated;
using streams::random_bytes;
using ts::image::best_instructions;
using ts::image::Inflater;
using ts::image::Instructions;
using ts::image::kWindow;

// Inflates a stream with zlib. Sets *ok to whether the stream is whole.
Bytes by_zlib(const Bytes& stream, size_t most, bool* ok) {
  z_stream z{};
  EXPECT_EQ(inflateInit2(&z, -15), Z_OK);
  z.next_in = const_cast<uint8_t*>(stream.data());
  z.avail_in = static_cast<uInt>(stream.size());
  Bytes out;
  Bytes piece(1 << 13);
  int status = Z_OK;
  while (status == Z_OK && out.size() < most) {
    z.next_out = piece.data();
    z.avail_out = static_cast<uInt>(piece.size());
    status = inflate(&z, Z_NO_FLUSH);
    out.insert(out.end(), piece.data(), z.next_out);
  }
  *ok = status == Z_STREAM_END;
  inflateEnd(&z);
  return out;
}

struct Stop {
  uint64_t bit, output;
  Bytes window;  // with the unused bytes overwritten
};

// Inflates a stream in steps of `in` bytes of input and `out` bytes of room. The inflater's
// exceptions pass through.
Bytes by_us(Inflater* inflater, const Bytes& stream, size_t first, size_t in, size_t out,
            const Bytes& history, size_t most, std::vector<Stop>* stops) {
  Bytes result;
  std::vector<uint8_t> buffer(history);
  size_t at = first;
  size_t given = first;
  int idle = 0;
  for (;;) {
    given = std::min(stream.size(), given + in);
    const bool last = given == stream.size();
    if (buffer.size() > kWindow) {
      buffer.erase(buffer.begin(), buffer.end() - static_cast<ptrdiff_t>(kWindow));
    }
    const size_t begin = buffer.size();
    buffer.resize(begin + out);
    // A separate copy of the input, so that the sanitizer detects reads beyond it.
    const Bytes piece(stream.begin() + static_cast<ptrdiff_t>(at),
                      stream.begin() + static_cast<ptrdiff_t>(given));
    const auto p =
        inflater->run(piece.data(), piece.size(), last, buffer.data(), begin, buffer.size());
    buffer.resize(begin + p.produced);
    result.insert(result.end(), buffer.begin() + static_cast<ptrdiff_t>(begin), buffer.end());
    at += p.consumed;
    while (const auto* c = inflater->next_checkpoint()) {
      Stop s{c->bit, c->output, Bytes(c->window.begin(), c->window.end())};
      for (size_t i = 0; i < kWindow; ++i) {
        if (!(c->used[i / 64] >> (i % 64) & 1)) s.window[i] ^= 0xa5;
      }
      if (stops != nullptr) stops->push_back(std::move(s));
    }
    if (p.done || result.size() >= most) return result;
    idle = p.consumed + p.produced == 0 && last ? idle + 1 : 0;
    if (idle > 2) throw std::runtime_error("no progress");
  }
}

class InflateKinds : public ::testing::TestWithParam<int> {};

TEST_P(InflateKinds, EqualsZlibFromTheBeginningAndFromEveryCheckpoint) {
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
  int turn = 0;
  for (const auto& way : ways) {
    for (const size_t size : {size_t{0}, size_t{1}, size_t{300}, size_t{70000}, size_t{400000}}) {
      const Bytes data = random_bytes(&rng, size, GetParam());
      const Bytes stream = deflated(data, way.level, way.strategy, way.memory);
      // The largest room holds the largest stream. More would cost time, since it is cleared.
      for (const size_t in : {size_t{1000}, size_t{3333}, size_t{1} << 20}) {
        for (const size_t out : {size_t{257}, size_t{4096}, size_t{1} << 19}) {
          if (size > 100000 && in * out < size_t{1} << 20) continue;
          // Alternates the two instruction sets for each kind of data.
          Inflater inflater(8192, turn++ % 2 == 0 ? Instructions::kBaseline : best_instructions());
          inflater.reset(0, 0);
          std::vector<Stop> stops;
          ASSERT_EQ(by_us(&inflater, stream, 0, in, out, {}, SIZE_MAX, &stops), data)
              << way.level << " " << way.strategy << " " << size << " " << in << " " << out;
          for (size_t i = 0; i < stops.size(); i += 1 + rng() % 3) {
            const Stop& s = stops[i];
            Inflater entered(0);
            entered.reset(s.bit % 8, kWindow);
            const size_t want = std::min<size_t>(data.size() - s.output, 90000);
            Bytes part = by_us(&entered, stream, s.bit / 8, in, out, s.window, want, nullptr);
            ASSERT_GE(part.size(), want);
            ASSERT_TRUE(std::equal(part.begin(), part.begin() + static_cast<ptrdiff_t>(want),
                                   data.begin() + static_cast<ptrdiff_t>(s.output)))
                << "from a checkpoint at " << s.output;
          }
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Bytes, InflateKinds, ::testing::Range(0, 5));

TEST(Inflate, MakesCheckpointsAtTheSpacing) {
  std::mt19937 rng(1);
  const Bytes data = random_bytes(&rng, 1 << 20, 3);
  const Bytes stream = deflated(data, 6, Z_DEFAULT_STRATEGY);
  Inflater inflater(20000);
  inflater.reset(0, 0);
  std::vector<Stop> stops;
  by_us(&inflater, stream, 0, 1 << 16, 1 << 16, {}, SIZE_MAX, &stops);
  ASSERT_GE(stops.size(), 20u);
  for (size_t i = 1; i < stops.size(); ++i) {
    EXPECT_GE(stops[i].output - stops[i - 1].output, 20000u);
    EXPECT_GT(stops[i].bit, stops[i - 1].bit);
  }
}

// Damaged and random streams give zlib's bytes and zlib's verdict.
TEST(Inflate, JudgesDamageAsZlibDoes) {
  std::mt19937 rng(7);
  int refused = 0;
  int accepted = 0;
  for (int round = 0; round < 6000; ++round) {
    const int kind = static_cast<int>(rng() % 5);
    Bytes stream;
    if (round % 8 == 0) {
      stream = random_bytes(&rng, 1 + rng() % 400, 0);
    } else {
      const int strategy = round % 3 == 0 ? Z_FIXED : Z_DEFAULT_STRATEGY;
      stream = deflated(random_bytes(&rng, 1 + rng() % 3000, kind), static_cast<int>(rng() % 10),
                        strategy);
      for (uint32_t flips = rng() % 3; flips > 0; --flips) {
        stream[rng() % std::min<size_t>(stream.size(), 120)] ^=
            static_cast<uint8_t>(1u << rng() % 8);
      }
      if (rng() % 8 == 0) stream.resize(rng() % stream.size() + 1);
    }
    bool ok = false;
    const size_t most = 1 << 20;
    const Bytes want = by_zlib(stream, most, &ok);
    Inflater inflater(rng() % 2 == 0 ? 64 : 0,
                      round % 2 == 0 ? Instructions::kBaseline : best_instructions());
    inflater.reset(0, 0);
    Bytes got;
    bool whole = true;
    try {
      got = by_us(&inflater, stream, 0, 700 + rng() % 2000, 1 + rng() % 5000, {}, most, nullptr);
    } catch (const ts::Failure& failure) {
      EXPECT_EQ(failure.code(), TS_ERROR_DECODE);
      whole = false;
    }
    if (want.size() >= most) continue;
    ASSERT_EQ(whole, ok) << "round " << round;
    if (whole) {
      ASSERT_EQ(got, want) << "round " << round;
      ++accepted;
    } else {
      ++refused;
    }
  }
  EXPECT_GT(refused, 1000);
  EXPECT_GT(accepted, 1000);
}

// A checkpoint with a wrong bit position or window gives wrong bytes or an error, and no other
// harm.
TEST(Inflate, SurvivesForgedCheckpoints) {
  std::mt19937 rng(9);
  for (int round = 0; round < 2000; ++round) {
    const Bytes data = random_bytes(&rng, 40000, static_cast<int>(rng() % 5));
    const Bytes stream = deflated(data, 6, Z_DEFAULT_STRATEGY);
    Inflater inflater(round % 2 == 0 ? 64 : 0);
    const size_t history = round % 3 == 0 ? rng() % kWindow : kWindow;
    inflater.reset(rng() % 8, history);
    try {
      by_us(&inflater, stream, rng() % stream.size(), 1 + rng() % 60000, 1 + rng() % 60000,
            random_bytes(&rng, history, 0), 200000, nullptr);
    } catch (const ts::Failure& failure) {
      EXPECT_EQ(failure.code(), TS_ERROR_DECODE);
    }
  }
}

TEST(Inflate, WrongArgumentsThrow) {
  Inflater inflater(0);
  inflater.reset(0, 100);
  uint8_t buffer[200];
  EXPECT_THROW(inflater.run(buffer, 1, true, buffer, 50, 200), ts::Failure);
  EXPECT_THROW(inflater.run(buffer, 1, true, buffer, 150, 100), ts::Failure);
}

}  // namespace
