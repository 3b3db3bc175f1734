// libFuzzer: deflate streams. Compares our inflaters with zlib's: the host's in steps chosen by a
// hash of the input, from the start and from every checkpoint.
#include <zlib.h>

#include "../deflate/team.h"
#include "base/error.h"
#include "deflate/inflate.h"
#include "fuzz.h"

namespace {

using fuzz::Bytes;
using fuzz::demand;
using ts::image::best_instructions;
using ts::image::Inflater;
using ts::image::Instructions;
using ts::image::kWindow;

constexpr size_t kMaxOutput = 1 << 20;  // maximum bytes of output that are compared

struct Stop {
  uint64_t bit, output;
  Bytes window;
};

// Returns false if the stream is damaged.
bool inflated(Inflater* inflater, const uint8_t* data, size_t size, size_t in, size_t out,
              const Bytes& history, size_t most, Bytes* result, std::vector<Stop>* stops) {
  Bytes buffer(history);
  size_t at = 0;
  size_t given = 0;
  bool whole = true;
  ts_error* error = ts::guard(__func__, [&] {
    for (;;) {
      given = std::min(size, std::max(given, at) + in);
      if (buffer.size() > kWindow) {
        buffer.erase(buffer.begin(), buffer.end() - static_cast<ptrdiff_t>(kWindow));
      }
      const size_t begin = buffer.size();
      buffer.resize(begin + out);
      const Bytes piece(data + at, data + given);
      const auto p = inflater->run(piece.data(), piece.size(), given == size, buffer.data(), begin,
                                   buffer.size());
      buffer.resize(begin + p.produced);
      result->insert(result->end(), buffer.begin() + static_cast<ptrdiff_t>(begin), buffer.end());
      at += p.consumed;
      while (const auto* c = inflater->next_checkpoint()) {
        if (stops == nullptr) continue;
        Stop s{c->bit, c->output, Bytes(c->window.begin(), c->window.end())};
        for (size_t i = 0; i < kWindow; ++i) {
          if (!(c->used[i / 64] >> (i % 64) & 1)) s.window[i] ^= 0xff;
        }
        stops->push_back(std::move(s));
      }
      if (p.done || result->size() >= most) return;
      demand(p.consumed > 0 || p.produced > 0 || given < size);
    }
  });
  if (error != nullptr) {
    demand(ts_error_code(error) == TS_ERROR_DECODE);
    ts_error_free(error);
    whole = false;
  }
  return whole;
}

// Compares the team's inflater with zlib's bytes, and with itself where there is nothing else to
// compare with: from any bit, with the first bytes as a packed window.
void compare_team(const Bytes& stream, const Bytes& want, bool whole, uint32_t hash) {
  const auto bytes = static_cast<uint32_t>(want.size());
  const uint32_t skip = hash / 8 % (bytes + 1);
  const auto got = team::inflate<team::Loop>(stream, 0, {}, skip, bytes - skip);
  // A longer stream may have too many blocks.
  constexpr size_t kFewBlocks = 1280;
  demand(!got.failed || stream.size() > kFewBlocks);
  if (!got.failed) {
    demand(std::equal(want.begin(), want.end(), got.room.begin() + kWindow));
    demand(got.checksum == crc32(0, want.data() + skip, bytes - skip));
  }
  if (whole) demand(team::inflate<team::Loop>(stream, 0, {}, 0, bytes + 1).failed);

  const auto middle = stream.begin() + static_cast<ptrdiff_t>(hash / 64 % (stream.size() + 1));
  const Bytes window(stream.begin(), middle);
  const Bytes rest(middle, stream.end());
  const uint32_t some = hash / 128 % 5000;
  const auto one = team::inflate<team::Loop>(rest, hash % 8, window, some, 700);
  const auto other = team::inflate<team::Reverse>(rest, hash % 8, window, some, 700);
  demand(one.failed == other.failed && one.checksum == other.checksum);
  demand(one.failed || one.room == other.room);
  demand(one.behind == std::vector<uint8_t>(one.behind.size(), 0));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  uint32_t hash = 2166136261;
  for (size_t i = 0; i < size; ++i) hash = (hash ^ data[i]) * 16777619;
  const size_t in = hash % 3 == 0 ? 1 + hash / 3 % 900 : 1 << 20;
  const size_t out = hash % 5 == 0 ? 1 + hash / 5 % 700 : 1 << 16;

  z_stream z{};
  demand(inflateInit2(&z, -15) == Z_OK);
  Bytes want(kMaxOutput);
  z.next_in = const_cast<uint8_t*>(data);
  z.avail_in = static_cast<uInt>(size);
  z.next_out = want.data();
  z.avail_out = static_cast<uInt>(want.size());
  const bool ok = inflate(&z, Z_FINISH) == Z_STREAM_END;
  want.resize(z.total_out);
  inflateEnd(&z);
  compare_team({data, data + size}, want, ok, hash);

  Inflater inflater(hash % 2 == 0 ? 64 : 0,
                    hash % 4 < 2 ? Instructions::kBaseline : best_instructions());
  inflater.reset(0, 0);
  Bytes got;
  std::vector<Stop> stops;
  const bool whole = inflated(&inflater, data, size, in, out, {}, kMaxOutput, &got, &stops);
  if (want.size() >= kMaxOutput || got.size() >= kMaxOutput) return 0;
  demand(whole == ok);
  if (!whole) return 0;
  demand(got == want);
  for (size_t i = 0; i < stops.size(); i += 1 + i / 4) {
    Inflater entered(0);
    entered.reset(stops[i].bit % 8, kWindow);
    Bytes part;
    demand(inflated(&entered, data + stops[i].bit / 8, size - stops[i].bit / 8, in, out,
                    stops[i].window, SIZE_MAX, &part, nullptr));
    demand(std::equal(part.begin(), part.end(),
                      want.begin() + static_cast<ptrdiff_t>(stops[i].output), want.end()));
  }
  return 0;
}
