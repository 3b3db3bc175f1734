// libFuzzer: entry points that are forged or aged, by the exported functions. jpeg_fuzz changes a
// few bits of a blob by a hash; here the forger is the fuzzer: the input says what is changed, in
// the blob and in the file, and its digests are made right afterwards.
//
//   byte 0: bits 0 and 1: whether the blob's own digest and the file's in it are made right
//   byte 1: MCUs between two entries; byte 2: how many edits of the blob; 3: of the file
//   4 bytes an edit: where (two bytes), how (one), value (one)
//   the rest: a JPEG
//
// However it was forged or aged, the pixels and the verdict are those without entries. Where the
// caller trusts the blob (proof NULL) they need not be, but nothing worse happens.
#include "fuzz.h"

namespace {

using namespace fuzz;
using ts::image::xxh64;

constexpr int64_t kMostPixels = 1 << 14;
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
      case 3:  // cut off
        bytes->resize(bytes->size() - std::min<size_t>(bytes->size(), value));
        break;
      case 4:  // longer
        bytes->resize(bytes->size() + value, value);
        break;
      default:  // a part of it in the place of another
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

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ts_image_decoder* const decoder = new_decoder(kMostPixels);
  static ts_image_decoder* const other = new_decoder(kMostPixels);
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
      int64_t{info.width} * info.height > kMostPixels) {
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
  if (reread.code != TS_ERROR_NONE || int64_t{info.width} * info.height > kMostPixels) {
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
  by(&first);  // every entry is compared with the file
  if (first != 0) by(&first);
  uint64_t old = written.proof;
  by(&old);  // the proof of the blob that was not forged
  demand(old == written.proof);
  uint64_t guessed = written.proof ^ 1;
  by(&guessed);
  by(nullptr);
  return 0;
}
