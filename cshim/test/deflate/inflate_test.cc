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
  std::vector<uint64_t> used;
  Bytes kept;  // the used bytes and the ones after them
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
      Stop s{c->bit,
             c->output,
             Bytes(c->window.begin(), c->window.end()),
             {c->used.begin(), c->used.end()},
             {}};
      size_t kept = 0;
      for (size_t i = 0; i < kWindow; ++i) {
        const bool used = c->used[i / 64] >> (i % 64) & 1;
        if (used) kept = i + ts::image::kGap + 1;
        if (i < kept) s.kept.push_back(s.window[i]);
        if (!used) s.window[i] ^= 0xa5;
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

// Bytes as of JPEGs in an archive: literals of 7 to 10 bits, short and long repeats, and zeros.
Bytes photographs(std::mt19937* rng, size_t n, uint32_t repeats) {
  Bytes b = random_bytes(rng, n, 3);
  for (size_t i = 600; i < n; ++i) {
    if (repeats == 0 || (*rng)() % 5000 >= repeats) continue;
    const size_t length = (*rng)() % 8 == 0 ? 3 + (*rng)() % 600 : 3 + (*rng)() % 4;
    const size_t back = (*rng)() % 8 == 0 ? 1 : 1 + (*rng)() % std::min<size_t>(i, 32768);
    for (size_t k = 0; k < length && i < n; ++k, ++i) b[i] = b[i - back];
  }
  return b;
}

// Chains give zlib's bytes and, from guesses and without them, the same checkpoints.
TEST(Inflate, ChainsDecodePhotographs) {
  std::mt19937 rng(11);
  for (const uint32_t repeats : {0, 5, 60, 150}) {
    for (const auto instructions : {Instructions::kBaseline, best_instructions()}) {
      const Bytes data = photographs(&rng, 300000 + rng() % 5000, repeats);
      // A smaller memory gives smaller blocks.
      const int memory = repeats == 60 ? 6 : 8;
      for (const int strategy : {Z_DEFAULT_STRATEGY, Z_HUFFMAN_ONLY}) {
        const Bytes stream = deflated(data, 6, strategy, memory);
        Inflater chained(16384, instructions);
        chained.reset(0, 0);
        std::vector<Stop> stops;
        ASSERT_EQ(by_us(&chained, stream, 0, 1 << 18, 1 << 18, {}, SIZE_MAX, &stops), data)
            << repeats << " " << memory << " " << strategy;
        EXPECT_GT(chained.guessed(), repeats < 100 ? data.size() / 3 : 0)
            << repeats << " " << memory << " " << strategy;
        // Steps this small have no room for chains.
        Inflater single(16384, instructions);
        single.reset(0, 0);
        std::vector<Stop> want;
        ASSERT_EQ(by_us(&single, stream, 0, 1 << 18, 1000, {}, SIZE_MAX, &want), data);
        EXPECT_EQ(single.guessed(), 0u);
        ASSERT_EQ(stops.size(), want.size());
        for (size_t i = 0; i < stops.size(); ++i) {
          EXPECT_EQ(stops[i].bit, want[i].bit);
          EXPECT_EQ(stops[i].output, want[i].output);
          EXPECT_EQ(stops[i].used, want[i].used) << "of checkpoint " << i;
          EXPECT_EQ(stops[i].kept, want[i].kept) << "of checkpoint " << i;
        }
        // From the middle of the stream, in steps that end anywhere in a block.
        for (const size_t step : {size_t{3000}, size_t{7001}, size_t{40000}}) {
          const Stop& s = stops[rng() % stops.size()];
          Inflater entered(0, instructions);
          entered.reset(s.bit % 8, kWindow);
          const Bytes part =
              by_us(&entered, stream, s.bit / 8, step, step + 333, s.window, SIZE_MAX, nullptr);
          ASSERT_TRUE(std::equal(part.begin(), part.end(),
                                 data.begin() + static_cast<ptrdiff_t>(s.output), data.end()))
              << "from a checkpoint at " << s.output << " in steps of " << step;
        }
      }
    }
  }
}

// Damage anywhere in blocks that chains decode gives zlib's bytes and zlib's verdict.
TEST(Inflate, ChainsJudgeDamageAsZlibDoes) {
  std::mt19937 rng(13);
  int refused = 0;
  int accepted = 0;
  uint64_t guessed = 0;
  for (int round = 0; round < 400; ++round) {
    const Bytes data = photographs(&rng, 20000 + rng() % 60000, rng() % 100);
    Bytes stream = deflated(data, 1 + static_cast<int>(rng() % 9),
                            round % 4 == 0 ? Z_HUFFMAN_ONLY : Z_DEFAULT_STRATEGY,
                            7 + static_cast<int>(rng() % 3));
    for (uint32_t flips = rng() % 4; flips > 0; --flips) {
      stream[rng() % stream.size()] ^= static_cast<uint8_t>(1u << rng() % 8);
    }
    if (rng() % 4 == 0) stream.resize(rng() % stream.size() + 1);
    bool ok = false;
    const size_t most = 1 << 20;
    const Bytes want = by_zlib(stream, most, &ok);
    if (want.size() >= most) continue;
    Inflater inflater(rng() % 2 == 0 ? 16384 : 0,
                      round % 2 == 0 ? Instructions::kBaseline : best_instructions());
    inflater.reset(0, 0);
    Bytes got;
    bool whole = true;
    try {
      const size_t steps = round % 3 == 0 ? 5000 + rng() % 9000 : 1 << 18;
      got = by_us(&inflater, stream, 0, steps, steps, {}, most, nullptr);
    } catch (const ts::Failure& failure) {
      EXPECT_EQ(failure.code(), TS_ERROR_DECODE);
      whole = false;
    }
    guessed += inflater.guessed();
    ASSERT_EQ(whole, ok) << "round " << round;
    whole ? ++accepted : ++refused;
    if (whole) {
      ASSERT_EQ(got, want) << "round " << round;
    }
  }
  EXPECT_GT(refused, 100);
  EXPECT_GT(accepted, 100);
  EXPECT_GT(guessed, uint64_t{1} << 20);
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
