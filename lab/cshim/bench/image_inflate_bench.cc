// The rate at which one core inflates a gzip file:
// image_inflate_bench FILE.gz [ROUNDS [LIBRARY...]]
// The inflaters take turns: ours with and without checkpoints, zlib's, and the ones of the given
// shared libraries, each libdeflate, zlib-ng or another build of libtorchstream_image. They inflate
// the first gzip member from memory, without its checksum: libdeflate at once, the others in the
// loader's steps. Prints the MB of output a second of CPU time, as the median of the rounds, and
// the rate over ours with checkpoints, as the median of the ratios within a round. Exits with 1 if
// an inflater's bytes differ from zlib's.
#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>

#include "image_bench.h"

using namespace bench;

namespace {

constexpr size_t kWindow = TS_INFLATER_WINDOW_BYTES;
constexpr size_t kRoom = 128 << 10;    // of a step
constexpr size_t kInput = 256 << 10;   // bytes of input that a step gets, at most
constexpr size_t kSpacing = 16 << 10;  // of checkpoints, as in an index

struct Stream {
  const uint8_t* data;
  size_t bytes;  // with the trailer, which no inflater reads
  size_t most;   // bytes of output
};

// The loader's buffer: the window, then the room of a step.
class Output {
 public:
  explicit Output(bool check) : check_(check) {}

  uint8_t* buffer() { return bytes_.data(); }
  size_t begin() {
    if (at_ == bytes_.size()) {
      std::memmove(bytes_.data(), bytes_.data() + kRoom, kWindow);
      at_ = kWindow;
    }
    return at_;
  }
  size_t end() const { return bytes_.size(); }
  void add(size_t n) {
    sum(bytes_.data() + at_, n);
    at_ += n;
  }
  void sum(const uint8_t* data, size_t n) {
    if (check_) sum_ = crc32_z(sum_, data, n);
    total_ += n;
  }
  size_t total() const { return total_; }
  bool operator==(const Output& o) const { return total_ == o.total_ && sum_ == o.sum_; }

 private:
  bool check_;
  Bytes bytes_ = Bytes(kWindow + kRoom);
  size_t at_ = kWindow;
  size_t total_ = 0;
  uLong sum_ = 0;
};

using Run = std::function<void(const Stream&, Output*)>;

struct Inflater {
  std::string name;
  Run run;
  std::vector<double> rates;
};

template <typename F>
F* symbol(void* library, const char* name) {
  return reinterpret_cast<F*>(dlsym(library, name));
}

// The functions of this program's libtorchstream_image or of another build of it.
struct Ours {
  decltype(&ts_inflater_new) make;
  decltype(&ts_inflater_free) free;
  decltype(&ts_inflater_reset) reset;
  decltype(&ts_inflater_run) run;
  decltype(&ts_inflater_get_checkpoint) checkpoint;
};

void inflate_ours(const Ours& ours, size_t spacing, const Stream& in, Output* out) {
  ts_inflater* inflater = nullptr;
  check(ours.make(spacing, &inflater));
  check(ours.reset(inflater, 0, 0));
  ts_inflate_progress p = {};
  for (size_t at = 0; !p.done; at += p.consumed) {
    const size_t n = std::min(in.bytes - at, kInput);
    const size_t begin = out->begin();
    check(ours.run(inflater, in.data + at, n, at + n == in.bytes, out->buffer(), begin, out->end(),
                   &p));
    out->add(p.produced);
    for (ts_inflate_checkpoint c = {}; spacing > 0;) {
      check(ours.checkpoint(inflater, &c));
      if (c.window == nullptr) break;
    }
  }
  ours.free(inflater);
}

// zlib's stream, and zlib-ng's, which has other types.
struct NgStream {
  const uint8_t* next_in;
  uint32_t avail_in;
  size_t total_in;
  uint8_t* next_out;
  uint32_t avail_out;
  size_t total_out;
  const char* msg;
  void* state;
  void* zalloc;
  void* zfree;
  void* opaque;
  int data_type;
  uint32_t adler;
  unsigned long reserved;
};

template <typename Z, typename Begin, typename Step, typename End>
void inflate_zlib(const Stream& in, Output* out, Begin begin, Step step, End end) {
  Z z{};
  if (begin(&z) != Z_OK) stop("inflateInit2 failed");
  int status = Z_OK;
  z.next_in = const_cast<uint8_t*>(in.data);
  for (size_t at = 0; status == Z_OK;) {
    const size_t n = std::min(in.bytes - at, kInput);
    const size_t room = out->end() - out->begin();
    z.avail_in = static_cast<uint32_t>(n);
    z.next_out = out->buffer() + out->begin();
    z.avail_out = static_cast<uint32_t>(room);
    status = step(&z);
    at += n - z.avail_in;
    out->add(room - z.avail_out);
  }
  if (status != Z_STREAM_END) stop("the stream is damaged");
  end(&z);
}

Run zlib() {
  return [](const Stream& in, Output* out) {
    inflate_zlib<z_stream>(
        in, out, [](z_stream* z) { return inflateInit2(z, -15); },
        [](z_stream* z) { return inflate(z, Z_NO_FLUSH); }, [](z_stream* z) { inflateEnd(z); });
  };
}

Run zlib_ng(void* library) {
  auto* const init = symbol<int(NgStream*, int)>(library, "zng_inflateInit2");
  auto* const step = symbol<int(NgStream*, int)>(library, "zng_inflate");
  auto* const end = symbol<int(NgStream*)>(library, "zng_inflateEnd");
  return [=](const Stream& in, Output* out) {
    inflate_zlib<NgStream>(
        in, out, [=](NgStream* z) { return init(z, -15); },
        [=](NgStream* z) { return step(z, Z_NO_FLUSH); }, end);
  };
}

Run libdeflate(void* library, size_t most) {
  auto* const make = symbol<void*()>(library, "libdeflate_alloc_decompressor");
  auto* const run = symbol<int(void*, const void*, size_t, void*, size_t, size_t*)>(
      library, "libdeflate_deflate_decompress");
  void* const state = make();
  // Its pages are there before the first round that counts.
  auto room = std::make_shared<Bytes>(most);
  return [=](const Stream& in, Output* out) {
    size_t n = 0;
    if (run(state, in.data, in.bytes, room->data(), room->size(), &n) != 0) stop("libdeflate");
    out->sum(room->data(), n);
  };
}

void add_ours(const std::string& name, const Ours& ours, std::vector<Inflater>* to) {
  for (const size_t spacing : {kSpacing, size_t{0}}) {
    to->push_back({name + (spacing > 0 ? ", checkpoints" : ""),
                   [=](const Stream& in, Output* out) { inflate_ours(ours, spacing, in, out); },
                   {}});
  }
}

void add(const char* path, size_t most, std::vector<Inflater>* to) {
  void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) stop(dlerror());
  if (dlsym(library, "libdeflate_alloc_decompressor") != nullptr) {
    to->push_back({path, libdeflate(library, most), {}});
  } else if (dlsym(library, "zng_inflate") != nullptr) {
    to->push_back({path, zlib_ng(library), {}});
  } else if (dlsym(library, "ts_inflater_new") != nullptr) {
    add_ours(path,
             {symbol<decltype(ts_inflater_new)>(library, "ts_inflater_new"),
              symbol<decltype(ts_inflater_free)>(library, "ts_inflater_free"),
              symbol<decltype(ts_inflater_reset)>(library, "ts_inflater_reset"),
              symbol<decltype(ts_inflater_run)>(library, "ts_inflater_run"),
              symbol<decltype(ts_inflater_get_checkpoint)>(library, "ts_inflater_get_checkpoint")},
             to);
  } else {
    stop(std::string(path) + " has no known inflater");
  }
}

Bytes read(const char* path) {
  FILE* const file = std::fopen(path, "rb");
  if (file == nullptr) stop(std::string("cannot open ") + path);
  Bytes all;
  Bytes piece(1 << 20);
  for (size_t n; (n = std::fread(piece.data(), 1, piece.size(), file)) > 0;) {
    all.insert(all.end(), piece.begin(), piece.begin() + static_cast<ptrdiff_t>(n));
  }
  std::fclose(file);
  return all;
}

// Returns the size of a gzip header.
size_t header_size(const Bytes& file) {
  constexpr int kMore = 4;
  constexpr int kName = 8;
  constexpr int kComment = 16;
  if (file.size() < 64 || file[0] != 0x1f || file[1] != 0x8b) stop("not a gzip file");
  size_t at = 10;
  if (file[3] & kMore) at += 2u + file[10] + 256u * file[11];
  for (const int flag : {kName, kComment}) {
    if (!(file[3] & flag)) continue;
    while (at < file.size() && file[at] != 0) ++at;
    ++at;
  }
  if (at >= file.size()) stop("the gzip file is cut off");
  return at;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + static_cast<ptrdiff_t>(v.size() / 2), v.end());
  return v[v.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: image_inflate_bench FILE.gz [ROUNDS [LIBRARY...]]");
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 9;
  if (rounds < 1) stop("ROUNDS is not a positive number");
  const Bytes file = read(argv[1]);
  const size_t at = header_size(file);
  const Stream stream = {file.data() + at, file.size() - at, 0};

  Output want(true);
  zlib()(stream, &want);
  std::vector<Inflater> inflaters;
  add_ours("ours",
           {ts_inflater_new, ts_inflater_free, ts_inflater_reset, ts_inflater_run,
            ts_inflater_get_checkpoint},
           &inflaters);
  inflaters.push_back({"zlib", zlib(), {}});
  for (int i = 3; i < argc; ++i) add(argv[i], want.total(), &inflaters);

  int wrong = 0;
  for (Inflater& i : inflaters) {
    Output got(true);
    i.run(stream, &got);
    if (!(got == want)) {
      std::printf("%s: wrong bytes\n", i.name.c_str());
      wrong = 1;
    }
  }
  for (int round = 0; round < rounds; ++round) {
    for (Inflater& i : inflaters) {
      Output got(false);
      const double begin = cpu_seconds();
      i.run(stream, &got);
      i.rates.push_back(static_cast<double>(got.total()) / 1e6 / (cpu_seconds() - begin));
    }
  }
  for (const Inflater& i : inflaters) {
    std::vector<double> over;
    for (size_t k = 0; k < i.rates.size(); ++k) {
      over.push_back(i.rates[k] / inflaters[0].rates[k]);
    }
    std::printf("%7.1f MB/s  %.3f  %s\n", median(i.rates), median(over), i.name.c_str());
  }
  return wrong;
}
