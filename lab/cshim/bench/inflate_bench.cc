// The rate at which a GPU inflates the members of a .tgz: inflate_bench [MEMBERS [ROUNDS
// [ARCHIVE.tar[.gz]]]]
// Packs MEMBERS (256) photographs of the archive, or synthetic ones of about 109 KB, into a gzip
// stream as tar does, and inflates each from the checkpoint that an index would have for it.
// Compares every byte and checksum. Prints a JSON object with the milliseconds of each piece, and
// the host's time for the same work on one core. Exits with 1 if a byte differs.
#include <zlib.h>

#include <algorithm>
#include <cstring>

#include "image_bench.h"
#include "photographs.h"
#include "pieces.h"
#include "test/deflate/team.h"
#include "torchstream.h"

using namespace bench;

namespace {

constexpr size_t kBlock = 512;  // of a tar
constexpr size_t kAlign = 16;
constexpr size_t kSpacing = 16 << 10;  // as in an index

size_t aligned(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

Bytes deflated(const Bytes& data) {
  z_stream z{};
  if (deflateInit2(&z, 6, Z_DEFLATED, -15, 8, Z_DEFAULT_STRATEGY) != Z_OK) stop("deflateInit2");
  Bytes out(deflateBound(&z, data.size()) + 64);
  z.next_in = const_cast<uint8_t*>(data.data());
  z.avail_in = static_cast<uInt>(data.size());
  z.next_out = out.data();
  z.avail_out = static_cast<uInt>(out.size());
  if (deflate(&z, Z_FINISH) != Z_STREAM_END) stop("deflate");
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

struct Checkpoint {
  uint64_t bit, output;
  Bytes window;
};

// Inflates the whole stream. The first checkpoint is its start.
std::vector<Checkpoint> checkpoints(const Bytes& stream, size_t bytes, double* seconds) {
  ts_inflater* inflater = nullptr;
  check(ts_inflater_new(kSpacing, &inflater));
  check(ts_inflater_reset(inflater, 0, 0));
  std::vector<Checkpoint> found = {{0, 0, {}}};
  // Without room after the output the inflater would not look for the end of the stream.
  Bytes output(bytes + 1);
  const double begin = cpu_seconds();
  size_t in = 0;
  size_t out = 0;
  for (bool done = false; !done;) {
    ts_inflate_progress p = {};
    check(ts_inflater_run(inflater, stream.data() + in, stream.size() - in, true, output.data(),
                          out, std::min(output.size(), out + (128 << 10)), &p));
    in += p.consumed;
    out += p.produced;
    done = p.done;
    for (ts_inflate_checkpoint c = {};;) {
      check(ts_inflater_get_checkpoint(inflater, &c));
      if (c.window == nullptr) break;
      found.push_back({c.bit, c.output, team::pack_window(c.window, c.used)});
    }
  }
  *seconds = cpu_seconds() - begin;
  ts_inflater_free(inflater);
  return found;
}

struct Member {
  size_t offset, bytes;
  const Checkpoint* from;
  size_t end;  // of its compressed bytes, at most
};

std::string measure(const std::vector<Bytes>& files, int rounds, int* wrong) {
  Bytes tar;
  std::vector<Member> members;
  for (const Bytes& file : files) {
    tar.resize(tar.size() + kBlock, static_cast<uint8_t>(members.size()));
    members.push_back({tar.size(), file.size(), nullptr, 0});
    tar.insert(tar.end(), file.begin(), file.end());
    tar.resize(aligned(tar.size(), kBlock));
  }
  const Bytes stream = deflated(tar);
  double host_seconds = 0;
  const std::vector<Checkpoint> points = checkpoints(stream, tar.size(), &host_seconds);

  // The memory of a batch: the head, then each member's window and compressed bytes.
  const auto count = static_cast<int64_t>(members.size());
  size_t used = ts_gpu_inflater_head_bytes(count);
  size_t rooms_bytes = 0;
  size_t windows = 0;
  size_t skipped = 0;
  std::vector<ts_gpu_inflate_range> ranges;
  for (Member& m : members) {
    size_t end = stream.size();
    for (const Checkpoint& c : points) {
      if (c.output + kBlock <= m.offset) m.from = &c;
      if (c.output >= m.offset + m.bytes) {
        end = std::min(end, static_cast<size_t>(c.bit / 8 + 1));
        break;
      }
    }
    m.end = end;
    ts_gpu_inflate_range range = {};
    range.input = used;
    range.input_bytes = end - m.from->bit / 8;
    used = aligned(used + range.input_bytes, kAlign);
    range.window = used;
    range.window_bytes = m.from->window.size();
    used = aligned(used + range.window_bytes, kAlign);
    range.skip = m.offset - m.from->output;
    range.bytes = m.bytes;
    range.room = rooms_bytes;
    range.skip_bits = static_cast<int32_t>(m.from->bit % 8);
    rooms_bytes =
        aligned(rooms_bytes + TS_INFLATER_WINDOW_BYTES + range.skip + range.bytes, kAlign);
    windows += range.window_bytes;
    skipped += range.skip;
    ranges.push_back(range);
  }
  ts_pinned* pinned = nullptr;
  check(ts_pinned_new(used, &pinned));
  uint8_t* const staging = ts_pinned_data(pinned);
  for (size_t i = 0; i < members.size(); ++i) {
    const Checkpoint& c = *members[i].from;
    std::memcpy(staging + ranges[i].input, stream.data() + c.bit / 8, ranges[i].input_bytes);
    if (!c.window.empty()) {
      std::memcpy(staging + ranges[i].window, c.window.data(), c.window.size());
    }
  }

  ts_gpu_inflater* inflater = nullptr;
  check(ts_gpu_inflater_new(0, count, used, &inflater));
  ts_stream on = {};
  check(ts_stream_from_pool(0, 0, &on));
  const int64_t shape[1] = {static_cast<int64_t>(rooms_bytes)};
  ts_tensor* rooms = nullptr;
  check(ts_tensor_new(shape, 1, TS_DTYPE_UINT8, 0, TS_MEMORY_FORMAT_CONTIGUOUS, &rooms));
  ts_pinned* outcomes = nullptr;
  check(ts_pinned_new(members.size() * sizeof(ts_gpu_inflate_result), &outcomes));
  auto* const results = reinterpret_cast<ts_gpu_inflate_result*>(ts_pinned_data(outcomes));
  double times[TS_BENCH_INFLATE_PIECES] = {};
  check(ts_bench_gpu_inflate(inflater, staging, used, ranges.data(), count, rooms, results, on,
                             rounds, times));
  check(ts_stream_synchronize(on));
  Bytes got(rooms_bytes);
  check(ts_tensor_read(rooms, got.data(), got.size()));
  for (size_t i = 0; i < members.size(); ++i) {
    const Bytes& file = files[i];
    const auto checksum = crc32(0, file.data(), static_cast<uInt>(file.size()));
    const size_t at = ranges[i].room + TS_INFLATER_WINDOW_BYTES + ranges[i].skip;
    *wrong += results[i].failed != 0 || results[i].checksum != checksum ||
              std::memcmp(got.data() + at, file.data(), file.size()) != 0;
  }
  ts_tensor_free(rooms);
  ts_gpu_inflater_free(inflater);
  check(ts_pinned_destroy(outcomes));
  check(ts_pinned_destroy(pinned));

  const auto all = static_cast<double>(members.size());
  const auto number = [](const char* name, double value) {
    char text[64];
    std::snprintf(text, sizeof text, ", \"%s\": %.4f", name, value);
    return std::string(text);
  };
  std::string json = "{\"members\": " + std::to_string(members.size()) +
                     ", \"rounds\": " + std::to_string(rounds) +
                     ", \"different\": " + std::to_string(*wrong) +
                     number("member_bytes", static_cast<double>(tar.size()) / all) +
                     number("staged_bytes", static_cast<double>(used) / all) +
                     number("skipped_bytes", static_cast<double>(skipped) / all) +
                     number("window_bytes", static_cast<double>(windows) / all) +
                     number("host_inflate_us", host_seconds * 1e6 / all);
  const char* names[] = {"copy", "kernel", "all"};
  for (int i = 0; i < TS_BENCH_INFLATE_PIECES; ++i) {
    json += number((std::string(names[i]) + "_ms").c_str(), times[i]) +
            number((std::string(names[i]) + "_members_per_second").c_str(), 1e3 * all / times[i]);
  }
  return json + "}";
}

}  // namespace

int main(int argc, char** argv) {
  const int count = argc > 1 ? std::atoi(argv[1]) : 256;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 30;
  if (count < 1 || rounds < 1) stop("usage: inflate_bench [MEMBERS [ROUNDS [ARCHIVE.tar[.gz]]]]");
  // The same photographs several times: a window is shorter than a photograph.
  constexpr size_t kDifferent = 32;
  const std::vector<Bytes> some = argc > 3 ? members(argv[3]) : photographs(kDifferent);
  if (some.empty()) stop("no member in the archive");
  std::vector<Bytes> files;
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) files.push_back(some[i % some.size()]);
  int wrong = 0;
  std::printf("%s\n", measure(files, rounds, &wrong).c_str());
  return wrong == 0 ? 0 : 1;
}
