// The team of deflate/loop.h with its threads in reverse order, and helpers for the tests of
// deflate/parallel.h: streams, checkpoints and packed windows.
#pragma once

#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "deflate/loop.h"

namespace team {

using Bytes = std::vector<uint8_t>;
using ts::deflate::kThreads;

using ts::deflate::Loop;

// Loop, with the threads in reverse order.
struct Reverse : Loop {
  template <typename F>
  void each(F f) {
    for (uint32_t t = kThreads; t-- > 0;) f(t);
  }
  template <typename F>
  bool any(F f) {
    bool any = false;
    for (uint32_t t = kThreads; t-- > 0;) any = f(t) || any;
    return any;
  }
};

// Packs a window whose `used` bytes matter, as docs/index-format.md describes it.
inline Bytes pack_window(const uint8_t* window, const uint64_t* used) {
  constexpr size_t kSize = ts::deflate::kWindow;
  const auto is_used = [&](size_t i) { return (used[i / 64] >> (i % 64) & 1) != 0; };
  Bytes packed;
  const auto number = [&](size_t v) {
    for (; v >= 0x80; v >>= 7) packed.push_back(static_cast<uint8_t>(v | 0x80));
    packed.push_back(static_cast<uint8_t>(v));
  };
  size_t last = 0;
  for (size_t i = 0; i < kSize;) {
    if (!is_used(i)) {
      ++i;
      continue;
    }
    size_t end = i;
    while (end < kSize && is_used(end)) ++end;
    number(i - last);
    number(end - i);
    packed.insert(packed.end(), window + i, window + end);
    last = i = end;
  }
  return packed;
}

struct Inflated {
  bool failed;
  uint32_t checksum;
  Bytes room;    // the window, the skipped bytes and the range
  Bytes behind;  // the bytes after the range: zeros
};

// Inflates a range. The input, or the window if `skip_bits` is odd, is at the end of its memory, so
// that a sanitizer detects accesses after it.
template <typename Team>
Inflated inflate(const Bytes& input, uint32_t skip_bits, const Bytes& window, uint32_t skip,
                 uint32_t bytes) {
  constexpr size_t kAlign = ts::deflate::kAlign;
  const bool window_last = skip_bits % 2 == 1;
  const Bytes& first = window_last ? input : window;
  const Bytes& second = window_last ? window : input;
  const size_t begin = (first.size() + kAlign - 1) / kAlign * kAlign;
  Bytes staging(begin + second.size());
  std::copy(first.begin(), first.end(), staging.begin());
  std::copy(second.begin(), second.end(), staging.begin() + static_cast<ptrdiff_t>(begin));

  ts::deflate::Range range = {};
  (window_last ? range.window : range.input) = begin;
  range.input_bytes = static_cast<uint32_t>(input.size());
  range.skip_bits = skip_bits;
  range.window_bytes = static_cast<uint32_t>(window.size());
  range.skip = skip;
  range.bytes = bytes;
  range.behind = 16;
  Inflated inflated = {};
  inflated.room.assign(size_t{ts::deflate::kWindow} + skip + bytes + range.behind, 0xa5);
  // The state has arbitrary content at first.
  const auto state = std::make_unique<ts::deflate::State>();
  std::memset(static_cast<void*>(state.get()), 0xA5, sizeof *state);
  Team team;
  const auto result =
      ts::deflate::inflate(team, range, staging.data(), inflated.room.data(), state.get());
  inflated.failed = result.failed != 0;
  inflated.checksum = result.checksum;
  inflated.behind.assign(inflated.room.end() - range.behind, inflated.room.end());
  inflated.room.resize(inflated.room.size() - range.behind);
  return inflated;
}

}  // namespace team
