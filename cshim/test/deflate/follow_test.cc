// Enters streams in the middle, before the window is known, and finds places to enter.
#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <utility>
#include <vector>

#include "base/error.h"
#include "deflate/find.h"
#include "deflate/inflate.h"
#include "streams.h"

namespace {

using streams::Bytes;
using streams::deflated;
using streams::random_bytes;
using ts::image::best_instructions;
using ts::image::find_start;
using ts::image::Inflater;
using ts::image::Instructions;
using ts::image::kWindow;

struct Point {
  uint64_t bit, output;
  std::vector<uint64_t> used;
  Bytes window;

  bool operator==(const Point& p) const {
    return bit == p.bit && output == p.output && used == p.used;
  }
};

// Collects the checkpoints, with offsets added to their positions.
void collect(Inflater* inflater, uint64_t bit, uint64_t output, std::vector<Point>* points) {
  while (const auto* c = inflater->next_checkpoint()) {
    points->push_back({c->bit + bit,
                       c->output + output,
                       {c->used.begin(), c->used.end()},
                       {c->window.begin(), c->window.end()}});
  }
}

// Inflates up to the end of the room or the input, in steps of `step` bytes of room, or until runs
// stop. Returns the end of the output.
size_t run(Inflater* inflater, const Bytes& stream, size_t* at, Bytes* buffer, size_t begin,
           size_t step, uint64_t bit, uint64_t output, std::vector<Point>* points) {
  for (;;) {
    const size_t end = std::min(buffer->size(), begin + step);
    const auto p =
        inflater->run(stream.data() + *at, stream.size() - *at, true, buffer->data(), begin, end);
    *at += p.consumed;
    begin += p.produced;
    collect(inflater, bit, output, points);
    if (p.done || p.consumed + p.produced == 0) return begin;
  }
}

std::vector<Point> block_starts(const Bytes& stream, size_t size, uint64_t spacing) {
  Inflater inflater(spacing);
  inflater.reset(0, 0);
  Bytes out(size + 1);
  size_t at = 0;
  std::vector<Point> points;
  run(&inflater, stream, &at, &out, 0, 20000, 0, 0, &points);
  return points;
}

class FollowKinds : public ::testing::TestWithParam<int> {};

// From each block, the recorded copies make the output right. The checkpoints are the same as
// without a break: before the block, at the block, and after it.
TEST_P(FollowKinds, CopiesMadeAgainGiveTheOutput) {
  constexpr uint64_t kSpacing = 9000;
  std::mt19937 rng(static_cast<uint32_t>(GetParam()));
  int entered = 0;
  for (const int level : {0, 1, 6, 9}) {
    const Bytes data = random_bytes(&rng, 900000, GetParam());
    const Bytes stream = deflated(data, level, Z_DEFAULT_STRATEGY, 5 + level / 3);
    const auto starts = block_starts(stream, data.size(), 1);
    const auto want = block_starts(stream, data.size(), kSpacing);
    for (size_t i = 0; i < starts.size(); i += 1 + rng() % (1 + starts.size() / 5)) {
      const Point& start = starts[i];
      if (start.output < kWindow || data.size() - start.output < 3 * kWindow) continue;
      ++entered;
      // The inflater before the place.
      Inflater before(kSpacing, i % 2 == 0 ? Instructions::kBaseline : best_instructions());
      before.reset(0, 0);
      before.stop_at(start.bit);
      Bytes out(data.size() + 1);
      std::vector<Point> points;
      size_t at = 0;
      ASSERT_EQ(run(&before, stream, &at, &out, 0, 70000, 0, 0, &points), start.output);
      const auto state = before.state();
      ASSERT_TRUE(state.at_block);
      ASSERT_EQ(state.bit, start.bit);

      // The one that follows, with a wrong window.
      Inflater after(1, i % 2 == 0 ? Instructions::kBaseline : best_instructions());
      after.follow(start.bit % 8, kWindow);
      Bytes buffer(kWindow + 2 * kWindow + rng() % 9000, 0xa5);
      at = start.bit / 8;
      std::vector<Point> followed;
      const size_t end = run(&after, stream, &at, &buffer, kWindow, 10000, start.bit / 8 * 8,
                             start.output - kWindow, &followed);
      ASSERT_GE(end, 3 * kWindow);
      if (after.state().lacking) continue;
      ASSERT_LE(after.state().reach, kWindow);

      const std::vector<ts_inflate_copy> copies(after.state().copies,
                                                after.state().copies + after.state().copy_count);
      std::copy(data.begin() + static_cast<ptrdiff_t>(start.output - kWindow),
                data.begin() + static_cast<ptrdiff_t>(start.output), buffer.begin());
      before.finish(buffer.data(), copies.data(), copies.size());
      collect(&before, 0, 0, &points);
      const size_t known = points.size();
      std::vector<uint64_t> used(kWindow / 64);
      for (const auto& c : copies) {
        for (size_t k = 0; k < c.length && c.at + k < end; ++k) {
          buffer[c.at + k] = buffer[c.at + k - c.distance];
        }
        for (size_t k = c.at - c.distance;
             k < std::min<size_t>(c.at - c.distance + c.length, kWindow); ++k) {
          used[k / 64] |= uint64_t{1} << (k % 64);
        }
      }
      ASSERT_TRUE(std::equal(buffer.begin(), buffer.begin() + static_cast<ptrdiff_t>(end),
                             data.begin() + static_cast<ptrdiff_t>(start.output - kWindow)));

      uint64_t last = points.empty() ? 0 : points.back().output;
      std::vector<Point> there = {{start.bit, start.output, used, {}}};
      there.insert(there.end(), followed.begin(), followed.end());
      for (auto& p : there) {
        if (p.output - last < kSpacing) continue;
        last = p.output;
        points.push_back(p);
      }
      after.settle(buffer.data(), end, kSpacing, last - (start.output - kWindow));
      std::copy(data.begin(), data.begin() + static_cast<ptrdiff_t>(start.output), out.begin());
      std::copy(buffer.begin() + kWindow, buffer.begin() + static_cast<ptrdiff_t>(end),
                out.begin() + static_cast<ptrdiff_t>(start.output));
      const size_t settled = points.size();
      run(&after, stream, &at, &out, start.output + end - kWindow, 70000, start.bit / 8 * 8,
          start.output - kWindow, &points);
      out.pop_back();
      ASSERT_EQ(out, data);
      const auto outputs = [](const std::vector<Point>& list) {
        std::vector<uint64_t> all;
        for (const auto& p : list) all.push_back(p.output);
        return all;
      };
      ASSERT_EQ(outputs(points), outputs(want)) << "entered at " << start.output << ", " << settled;
      for (size_t k = 0; k < points.size(); ++k) {
        ASSERT_EQ(points[k], want[k])
            << "checkpoint " << k << " at " << want[k].output << ", entered at " << start.output;
        if (points[k].window.empty() || (k >= known && k < settled)) continue;
        for (size_t b = 0; b < kWindow; ++b) {
          if (want[k].used[b / 64] >> (b % 64) & 1) {
            ASSERT_EQ(points[k].window[b], want[k].window[b]) << k << " " << b;
          }
        }
      }
    }
  }
  EXPECT_GT(entered, 2);
}

INSTANTIATE_TEST_SUITE_P(Bytes, FollowKinds, ::testing::Range(0, 5));

// Every dynamic block and every stored one is found. Other places are rare.
TEST(FindStart, FindsTheStartsOfBlocks) {
  std::mt19937 rng(3);
  for (const int level : {0, 6}) {
    const Bytes data = random_bytes(&rng, 600000, 3);
    const Bytes stream = deflated(data, level, Z_DEFAULT_STRATEGY);
    const auto starts = block_starts(stream, data.size(), 1);
    ASSERT_GT(starts.size(), 8u);
    int wrong = 0;
    uint64_t from = 1;
    for (size_t i = 0; i + 1 < starts.size();) {  // the last block is not found
      const auto found = find_start(stream.data(), stream.size(), from, 8 * stream.size());
      ASSERT_NE(found.kind, TS_INFLATE_FOUND_NONE) << "block " << i;
      const bool stored = found.kind == TS_INFLATE_FOUND_STORED;
      ASSERT_LE(found.bit, starts[i].bit + 7)
          << "block " << i << " of " << starts.size() << " is not found, level " << level;
      const bool right = stored ? starts[i].bit / 8 == found.bit / 8 || starts[i].bit == found.bit
                                : starts[i].bit == found.bit;
      wrong += right ? 0 : 1;
      i += right ? 1 : 0;
      from = found.bit + 1;
    }
    EXPECT_LE(wrong, 12);
  }
  const uint8_t member[16] = {7, 0x1f, 0x8b, 8, 4};
  EXPECT_EQ(find_start(member, 16, 0, 128).kind, TS_INFLATE_FOUND_MEMBER);
  EXPECT_EQ(find_start(member, 16, 0, 128).bit, 8u);
  EXPECT_EQ(find_start(member, 10, 0, 128).kind, TS_INFLATE_FOUND_NONE);
  EXPECT_EQ(find_start(nullptr, 0, 0, 128).kind, TS_INFLATE_FOUND_NONE);
}

// Any bytes can be searched and followed: the only errors are about damage.
TEST(FindStart, TakesAnyBytes) {
  std::mt19937 rng(4);
  for (int round = 0; round < 2000; ++round) {
    Bytes stream = random_bytes(&rng, 1 + rng() % 2000, 0);
    if (round % 2 == 0) {
      stream = deflated(random_bytes(&rng, 40000, 2), 6, Z_DEFAULT_STRATEGY);
      stream[rng() % stream.size()] ^= static_cast<uint8_t>(1u << rng() % 8);
    }
    const auto found = find_start(stream.data(), stream.size(), rng() % 80, 8 * stream.size());
    if (found.kind == TS_INFLATE_FOUND_NONE || found.kind == TS_INFLATE_FOUND_MEMBER) continue;
    ASSERT_LT(found.bit, 8 * stream.size());
    Inflater inflater(1);
    inflater.follow(found.bit % 8, kWindow);
    Bytes buffer(kWindow + 50000);
    size_t at = found.bit / 8;
    std::vector<Point> points;
    try {
      const size_t end =
          run(&inflater, stream, &at, &buffer, kWindow, 3000, found.bit / 8 * 8, 0, &points);
      for (size_t i = 0; i < inflater.state().copy_count; ++i) {
        const auto& c = inflater.state().copies[i];
        ASSERT_LE(c.distance, c.at);
        ASSERT_LT(c.at, end);
        ASSERT_GE(c.length, 3);
      }
    } catch (const ts::Failure& failure) {
      EXPECT_EQ(failure.code(), TS_ERROR_DECODE);
    }
  }
}

}  // namespace
