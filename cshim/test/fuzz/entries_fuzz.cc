// libFuzzer: forged or outdated entry points, through the exported functions. jpeg_fuzz changes a
// few bits of a blob by a hash. Here the fuzzer itself is the forger: the input describes the
// changes of the blob and of the file, and the digests are corrected afterwards.
//
//   byte 0: bits 0 and 1: whether to correct the blob's own digest, and the file's digest in it
//   byte 1: MCUs between two entries; byte 2: how many edits of the blob; 3: of the file
//   4 bytes an edit: where (two bytes), how (one), value (one)
//   the rest: a JPEG
//
// With any blob, the pixels and the verdict equal those without entries. If the caller trusts the
// blob (proof NULL), they may differ, but there is no other harm. The same holds for the segment
// decoder (src/jpeg), which also meets changed segments here, and must never leave its memory.
#include "../image/emulate.h"
#include "fuzz.h"

namespace {

using namespace fuzz;
using ts::image::xxh64;

constexpr int64_t kMaxPixels = 1 << 14;
constexpr size_t kHeader = 64;

void edit(Bytes* bytes, Reader* in, int count) {
  for (; count > 0; --count) {
    const size_t at = in->take<uint16_t>();
    const auto how = in->take<uint8_t>();
    const auto value = in->take<uint8_t>();
    if (bytes->empty()) return;
    uint8_t* const byte = &(*bytes)[at % bytes->size()];
    switch (how % 6) {
      case 0:
        *byte = value;
        break;
      case 1:
        *byte = static_cast<uint8_t>(*byte ^ 1 << value % 8);
        break;
      case 2:
        *byte = static_cast<uint8_t>(*byte + value);
        break;
      case 3:  // truncates the blob
        bytes->resize(bytes->size() - std::min<size_t>(bytes->size(), value));
        break;
      case 4:  // lengthens the blob
        bytes->resize(bytes->size() + value, value);
        break;
      default:  // copies a part of the blob over another part
        for (size_t i = 0; i < value % 32u && at % bytes->size() + i < bytes->size(); ++i) {
          byte[i] = (*bytes)[(static_cast<size_t>(how) * 8 + i) % bytes->size()];
        }
    }
  }
}

template <typename T>
void store(Bytes* to, size_t at, T value) {
  if (at + sizeof value <= to->size()) std::memcpy(to->data() + at, &value, sizeof value);
}

// Plans the decode. Returns nothing if only the host can decode the image.
Bytes plan_of(ts_image_decoder* decoder, const Bytes& file, const Bytes& blob,
              const ts_image_geometry& g, uint64_t* proof) {
  size_t size = 0;
  const Outcome sized(ts_image_plan_segments(decoder, file.data(), file.size(), &g,
                                             {blob.data(), blob.size()}, proof, nullptr, 0, &size));
  sized.of_bytes();
  if (sized.code != TS_ERROR_NONE || size == 0) return {};
  std::vector<uint64_t> memory(size / sizeof(uint64_t) + 1);  // aligned to 16 bytes
  auto* const plan = reinterpret_cast<uint8_t*>(memory.data());
  size_t written = 0;
  const Outcome planned(ts_image_plan_segments(decoder, file.data(), file.size(), &g,
                                               {blob.data(), blob.size()}, proof, plan, size,
                                               &written));
  demand(planned.code == TS_ERROR_NONE && written == size);
  return {plan, plan + size};
}

// Decodes the plan, and decodes it again with some of its untrusted bytes changed.
void decode_plan(const Bytes& plan, Choices* choices, bool proven, const Bytes& expected) {
  emulate::Device device(plan);
  const bool good = device.entropy();
  device.finish();
  demand(!proven || (good && device.result == expected));
  Bytes changed = plan;
  const ts::jpeg::Plan& header = device.plan();
  for (int changes = choices->draw(1, 8); changes > 0; --changes) {
    const auto at =
        static_cast<size_t>(choices->draw(0, static_cast<int32_t>(header.scan_bytes) - 1));
    changed[header.scan_at + at] = static_cast<uint8_t>(choices->draw(0, 300));
  }
  emulate::Device other(changed);
  other.entropy();
  other.finish();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ts_image_decoder* const decoder = new_decoder(kMaxPixels);
  static ts_image_decoder* const other = new_decoder(kMaxPixels);
  if (size < 8) return -1;
  Reader in(data, size);
  const auto flags = in.take<uint8_t>();
  const int32_t spacing = in.take<uint8_t>();
  const int blob_edits = in.take<uint8_t>() % 8;
  const int file_edits = in.take<uint8_t>() % 3;
  const size_t edits = static_cast<size_t>(blob_edits + file_edits) * 4;
  if (in.left() < edits + 4) return -1;
  Reader blob_reader(in.rest(), static_cast<size_t>(blob_edits) * 4);
  Reader file_reader(in.rest() + static_cast<size_t>(blob_edits) * 4,
                     static_cast<size_t>(file_edits) * 4);
  Bytes file(in.rest() + edits, in.rest() + in.left());

  ts_image_info info = {};
  info.size = sizeof info;
  const Outcome header(ts_image_get_info(file.data(), file.size(), &info));
  header.of_bytes();
  if (header.code != TS_ERROR_NONE || info.format != TS_IMAGE_FORMAT_JPEG ||
      int64_t{info.width} * info.height > kMaxPixels) {
    return -1;
  }
  Bytes blob(1 << 16);
  ts_image_entries_made written = {};
  const Outcome made(ts_image_make_entries(decoder, file.data(), file.size(),
                                           {blob.data(), blob.size(), spacing}, &written));
  made.of_bytes();
  if (made.code != TS_ERROR_NONE || written.bytes == 0 || written.bytes > blob.size()) return 0;
  blob.resize(written.bytes);
  blob.shrink_to_fit();

  Choices choices(data, size);
  edit(&file, &file_reader, file_edits);
  file.shrink_to_fit();
  edit(&blob, &blob_reader, blob_edits);
  if ((flags & 1) != 0) {
    store(&blob, 4, static_cast<uint32_t>(blob.size()));
    store(&blob, 8, xxh64(file.data(), file.size(), 0));
    store(&blob, 16, static_cast<uint32_t>(file.size()));
  }
  if ((flags & 2) != 0 && blob.size() >= kHeader) {
    store(&blob, 56,
          xxh64(blob.data() + kHeader, blob.size() - kHeader, xxh64(blob.data(), 56, 0)));
  }
  blob.shrink_to_fit();

  const Outcome reread(ts_image_get_info(file.data(), file.size(), &info));
  reread.of_bytes();
  if (reread.code != TS_ERROR_NONE || int64_t{info.width} * info.height > kMaxPixels) {
    info.width = info.height = 1;
  }
  const ts_image_geometry g = any_geometry(&choices, info.width, info.height);
  Picture expected(g.window_width, g.window_height);
  const Outcome plain(ts_image_decode(other, file.data(), file.size(), &g, expected.pixels.data(),
                                      expected.stride()));
  plain.of_bytes();
  const auto by = [&](uint64_t* with) {
    Picture got(g.window_width, g.window_height);
    const Outcome outcome(ts_image_decode_with_entries(decoder, file.data(), file.size(), &g,
                                                       {blob.data(), blob.size()},
                                                       got.pixels.data(), got.stride(), with));
    outcome.of_bytes();
    if (with == nullptr) return;
    demand(outcome.code == plain.code && outcome.message == plain.message);
    demand(plain.code != TS_ERROR_NONE || got.pixels == expected.pixels);
  };
  uint64_t first = 0;
  by(&first);  // compares every entry with the file
  if (first != 0) by(&first);
  uint64_t old = written.proof;
  by(&old);  // the proof of the original blob
  demand(old == written.proof);
  uint64_t guessed = written.proof ^ 1;
  by(&guessed);
  by(nullptr);

  for (const bool proven : {true, false}) {
    if (proven && (first == 0 || plain.code != TS_ERROR_NONE)) continue;
    const Bytes plan = plan_of(decoder, file, blob, g, proven ? &first : nullptr);
    if (!plan.empty()) decode_plan(plan, &choices, proven, expected.pixels);
  }
  return 0;
}
