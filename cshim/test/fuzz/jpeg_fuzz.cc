// libFuzzer: JPEGs. Compares four decoders with references. Our entropy decoder, with and without
// entry points, is compared with libjpeg-turbo alone. Tolerated damaged files are compared with
// libjpeg-turbo's whole decode. The GPU's decoder of a whole scan, emulated, is compared with both.
// Baseline copies of progressive files are compared with the files.
// A hash of the file determines the operations on it, so that any JPEG is a seed.
#include "../image/emulate.h"
#include "../image/libjpeg_whole.h"
#include "base/error.h"
#include "fuzz.h"
#include "image/jpeg.h"

namespace {

using namespace ts::image;
using fuzz::demand;

struct Result {
  int32_t code;
  std::string message;
  std::vector<uint8_t> pixels;
};

Result decode(JpegDecoder* decoder, const uint8_t* data, size_t bytes, const Box& box,
              const EntriesIn* in = nullptr, EntriesOut* out = nullptr) {
  const int32_t w = box.width();
  const int32_t h = box.height();
  const int32_t r = box.reduction;
  const ts_image_geometry g = {sizeof g, box.x0 * r, box.y0 * r, w * r, h * r, w, h,    0,
                               0,        w,          h,          0,     false, 0, false};
  Result result = {};
  result.pixels.resize(static_cast<size_t>(w) * static_cast<size_t>(h) * 3);
  Resizer resizer;
  ts_error* error = ts::guard(__func__, [&] {
    const Box needed = resizer.start(g, result.pixels.data(), static_cast<size_t>(w) * 3, r);
    decoder->decode(data, bytes, needed, &resizer, in, out);
  });
  if (error != nullptr) {
    result.code = ts_error_code(error);
    result.message = ts_error_message(error);
    result.pixels.clear();
    ts_error_free(error);
  }
  demand(result.code == TS_ERROR_NONE || result.code == TS_ERROR_DECODE ||
         result.code == TS_ERROR_UNSUPPORTED);
  return result;
}

void same(const Result& a, const Result& b) {
  demand(a.code == b.code);
  demand(a.message == b.message);
  demand(a.pixels == b.pixels);
}

// Finds the entries of the scan as the GPU does. They must equal the entries that the host's
// decoder makes, and the box must have the same pixels.
void search(JpegDecoder* own, const std::vector<uint8_t>& file, const ts_image_info& info,
            const Box& box, const Result& expected, fuzz::Choices choices) {
  const ts_image_geometry g = {sizeof g,     box.x0, box.y0, box.width(), box.height(), box.width(),
                               box.height(), 0,      0,      box.width(), box.height(), 0,
                               false,        0,      false};
  std::vector<uint8_t> plan, blob(1 << 18);
  EntriesOut out = {0, blob.data(), blob.size()};
  ts_error* error = ts::guard(__func__, [&] {
    PlanMemory to = {};
    plan.resize(own->plan_scan(file.data(), file.size(), info, g, &to));
    if (plan.empty()) return;
    to = {plan.data(), plan.size(), nullptr};
    own->plan_scan(file.data(), file.size(), info, g, &to);
  });
  if (error != nullptr) {
    demand(ts_error_code(error) == TS_ERROR_DECODE || ts_error_code(error) == TS_ERROR_UNSUPPORTED);
    ts_error_free(error);
    return;
  }
  if (plan.empty()) return;
  PlanMemory none = {};
  if (own->plan_scan(file.data(), file.size(), info, g, &none, {true, nullptr}) != 0) {
    // The file is good, whatever its scan contains.
    Resizer resizer;
    std::vector<uint8_t> pixels(static_cast<size_t>(g.window_width) *
                                static_cast<size_t>(g.window_height) * 3);
    const size_t stride = static_cast<size_t>(g.window_width) * 3;
    const Box needed = resizer.start(g, pixels.data(), stride, 1);
    own->decode_damaged(file.data(), file.size(), needed, false, &resizer);
  }
  out.spacing = reinterpret_cast<const ts::jpeg::Plan*>(plan.data())->spacing;
  own->make_entries(file.data(), file.size(), &out);
  emulate::Device device(plan);
  const auto threads = static_cast<uint32_t>(choices.draw(1, 9));
  const auto launches = static_cast<uint32_t>(choices.draw(1, 40));
  if (!device.synchronise(threads, launches, false, launches % 2 == 0)) return;
  demand(out.written != 0);
  if (out.written <= blob.size()) {
    Entries entries;
    demand(entries.attach(blob.data(), out.written) && entries.count() == device.plan().entries);
    for (uint32_t i = 0; i < entries.count(); ++i) {
      const EntryPoint want = entries.at(i);
      const ts::jpeg::Entry got = ts::jpeg::entry_at(device.plan(), device.base(), i);
      demand(got.bit == want.bit);
      for (int c = 0; c < kMaxComponents; ++c) demand(got.dc[c] == want.dc[c]);
    }
  }
  demand(device.entropy());
  device.finish();
  demand(expected.code == TS_ERROR_NONE && device.result == expected.pixels);
}

// Rewrites the file as a baseline one. That is only possible if the file is good, and changes no
// pixel.
void transcode(JpegDecoder* own, const std::vector<uint8_t>& file, const Box& box,
               const Result& expected) {
  std::vector<uint8_t> to(2 * file.size() + 4096);
  ts_error* error = ts::guard(
      __func__, [&] { to.resize(own->transcode(file.data(), file.size(), to.data(), to.size())); });
  if (error != nullptr) {
    demand(ts_error_code(error) == TS_ERROR_DECODE || ts_error_code(error) == TS_ERROR_UNSUPPORTED);
    ts_error_free(error);
    return;
  }
  if (!to.empty()) same(decode(own, to.data(), to.size(), box), expected);
  demand(to.empty() || expected.code == TS_ERROR_NONE);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* input, size_t size) {
  constexpr int64_t kMaxPixels = 1 << 16;
  static JpegDecoder own(kMaxPixels);
  static JpegDecoder libjpeg(kMaxPixels);
  libjpeg.set_own(false);
  demand(own.own());

  // A copy, so that ASAN detects reads beyond its ends.
  const std::vector<uint8_t> file(input, input + size);
  if (!is_jpeg(file.data(), file.size())) return 0;
  ts_image_info info = {};
  info.size = sizeof info;
  ts_error* error = ts::guard(__func__, [&] { info = jpeg_header(file.data(), file.size()); });
  if (error != nullptr) {
    ts_error_free(error);
    return 0;
  }
  if (int64_t{info.width} * info.height > kMaxPixels) return 0;

  static ts_image_decoder* const tolerant = fuzz::new_decoder(kMaxPixels);
  fuzz::damaged_file(tolerant, file.data(), file.size(), kMaxPixels,
                     [&](const fuzz::Bytes& pixels, int32_t width, int32_t height) {
                       fuzz::Bytes expected;
                       if (info.components == 4) return;
                       demand(libjpeg_whole::decode(file.data(), file.size(), &expected));
                       demand(expected.size() == size_t{3} * width * height);
                       demand(pixels == expected);
                     });

  fuzz::Choices choices(file.data(), file.size());
  const auto draw = [&](int32_t from, int32_t to) { return choices.draw(from, to); };
  Box box;
  box.x0 = draw(0, info.width - 1);
  box.y0 = draw(0, info.height - 1);
  box.x1 = draw(box.x0 + 1, info.width);
  box.y1 = draw(box.y0 + 1, info.height);
  if (draw(0, 3) == 0) box = {0, 0, info.width, info.height};

  const Result expected = decode(&libjpeg, file.data(), file.size(), box);
  same(decode(&own, file.data(), file.size(), box), expected);

  search(&own, file, info, box, expected, choices);
  transcode(&own, file, box, expected);

  std::vector<uint8_t> blob(1 << 18);
  EntriesOut out = {static_cast<uint32_t>(draw(1, 9)), blob.data(), blob.size()};
  same(decode(&own, file.data(), file.size(), box, nullptr, &out), expected);
  if (out.written == 0 || out.written > blob.size()) return 0;
  blob.resize(out.written);
  const Box other = {draw(0, box.x0), draw(0, box.y0), draw(box.x1, info.width),
                     draw(box.y1, info.height)};
  const Result whole = decode(&libjpeg, file.data(), file.size(), other);
  const int32_t reduction = 1 << draw(0, 3);
  const Box reduced = {other.x0 / reduction, other.y0 / reduction, other.x1 / reduction,
                       other.y1 / reduction, reduction};
  EntriesIn in = {blob.data(), blob.size(), nullptr};
  // Making the blob read the file to its end, so a larger box meets no other damage.
  same(decode(&own, file.data(), file.size(), other, &in), whole);
  if (reduced.width() > 0 && reduced.height() > 0) {
    const Result expected_reduced = decode(&libjpeg, file.data(), file.size(), reduced);
    same(decode(&own, file.data(), file.size(), reduced), expected_reduced);
    same(decode(&own, file.data(), file.size(), reduced, &in), expected_reduced);
  }
  uint64_t proof = 0;
  in.proof = &proof;
  same(decode(&own, file.data(), file.size(), box, &in), expected);
  demand(proof == out.proof);
  same(decode(&own, file.data(), file.size(), other, &in), whole);

  // Forges the blob, and corrects its digest.
  for (int changes = draw(1, 4); changes > 0; --changes) {
    const auto at = static_cast<size_t>(draw(16, static_cast<int32_t>(blob.size()) - 1));
    blob[at] = static_cast<uint8_t>(blob[at] ^ 1 << draw(0, 7));
  }
  const uint64_t digest = xxh64(blob.data() + 64, blob.size() - 64, xxh64(blob.data(), 56, 0));
  std::memcpy(blob.data() + 56, &digest, sizeof digest);
  proof = 0;
  same(decode(&own, file.data(), file.size(), other, &in), whole);
  in.proof = nullptr;
  decode(&own, file.data(), file.size(), other, &in);  // may give other pixels, but no other harm
  return 0;
}
