// libFuzzer: deflate streams that are entered before the window is known, at the first place that
// find_start finds. The recorded copies must give what the inflater makes with the window, and the
// checkpoints must be the same.
#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "deflate/find.h"
#include "deflate/inflate.h"
#include "fuzz.h"

namespace {

using fuzz::Bytes;
using fuzz::demand;
using ts::image::best_instructions;
using ts::image::find_start;
using ts::image::Inflater;
using ts::image::Instructions;
using ts::image::kWindow;

constexpr size_t kRoom = 3 * kWindow;

struct Result {
  Bytes buffer;  // the window and the output
  size_t end = kWindow;
  bool damaged = false;
  struct Point {
    uint64_t bit, output;
    Bytes used;
  };
  std::vector<Point> points;
};

void run(Inflater* inflater, const uint8_t* data, size_t size, size_t step, Result* r) {
  r->buffer.resize(kWindow + kRoom);
  size_t at = 0;
  ts_error* error = ts::guard(__func__, [&] {
    for (;;) {
      const size_t end = std::min(r->buffer.size(), r->end + step);
      const auto p = inflater->run(data + at, size - at, true, r->buffer.data(), r->end, end);
      at += p.consumed;
      r->end += p.produced;
      while (const auto* c = inflater->next_checkpoint()) {
        Bytes used(sizeof(c->used));
        std::memcpy(used.data(), c->used.data(), used.size());
        r->points.push_back({c->bit, c->output, std::move(used)});
      }
      if (p.done || p.consumed + p.produced == 0) return;
    }
  });
  if (error == nullptr) return;
  demand(ts_error_code(error) == TS_ERROR_DECODE);
  ts_error_free(error);
  r->damaged = true;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t hash = 2166136261;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 16777619;
  const uint64_t from = hash % 4 == 0 ? hash / 4 % (8 * size + 1) : 0;
  const auto found = find_start(data, size, from, 8 * size);
  demand(found.kind == TS_INFLATE_FOUND_NONE || (found.bit >= from && found.bit < 8 * size));
  // The bytes may be the blocks of a stream even if no place is found.
  const bool block =
      found.kind == TS_INFLATE_FOUND_DYNAMIC || found.kind == TS_INFLATE_FOUND_STORED;
  const uint64_t bit = block ? found.bit : from % 8;
  if (bit / 8 >= size) return 0;
  const auto instructions = hash % 2 == 0 ? Instructions::kBaseline : best_instructions();
  const size_t step = hash % 3 == 0 ? 1 + hash / 8 % 900 : 20000;

  Result want;
  want.buffer.resize(kWindow);
  for (size_t i = 0; i < kWindow; ++i) {
    want.buffer[i] = static_cast<uint8_t>((i + hash) * 2654435761u >> 13);
  }
  const Bytes window = want.buffer;
  Inflater known(1, instructions);
  known.reset(bit % 8, kWindow);
  run(&known, data + bit / 8, size - bit / 8, step, &want);

  Result got;
  got.buffer.assign(kWindow, 0xa5);
  Inflater follower(1, instructions);
  follower.follow(bit % 8, kWindow);
  run(&follower, data + bit / 8, size - bit / 8, step, &got);
  demand(got.damaged == want.damaged && got.end == want.end);

  const auto state = follower.state();
  std::copy(window.begin(), window.end(), got.buffer.begin());
  for (size_t i = 0; i < state.copy_count; ++i) {
    const auto& c = state.copies[i];
    demand(c.at >= kWindow && c.distance <= c.at);
    for (size_t k = 0; k < c.length && c.at + k < got.end; ++k) {
      got.buffer[c.at + k] = got.buffer[c.at + k - c.distance];
    }
  }
  demand(std::equal(got.buffer.begin(), got.buffer.begin() + static_cast<ptrdiff_t>(got.end),
                    want.buffer.begin()));
  if (got.damaged || state.lacking || known.state().lacking) return 0;
  demand(got.points.size() == want.points.size());
  for (size_t i = 0; i < got.points.size(); ++i) {
    demand(got.points[i].bit == want.points[i].bit);
    demand(got.points[i].output == want.points[i].output + kWindow);
    // The known inflater marks no copies from its first window.
    for (size_t k = 0; k < got.points[i].used.size(); ++k) {
      demand((want.points[i].used[k] & ~got.points[i].used[k]) == 0);
    }
  }
  return 0;
}
