// libFuzzer: PNGs, unchanged and with every checksum corrected, so that inputs reach the code after
// the checks. A resized and turned part must equal the same part of the whole image.
#include <zlib.h>

#include "fuzz.h"

namespace {

using namespace fuzz;

constexpr size_t kSignature = 8;
constexpr int64_t kMaxPixels = 1 << 15;

// Corrects all checksums, shortens a truncated chunk, and adds a missing end chunk.
Bytes repaired(const uint8_t* data, size_t size) {
  static const uint8_t kEnd[] = {0, 0, 0, 0, 'I', 'E', 'N', 'D'};
  Bytes out(data, data + std::min(size, kSignature));
  const auto chunk = [&](const uint8_t* type, size_t bytes) {
    for (int shift = 24; shift >= 0; shift -= 8) {
      out.push_back(static_cast<uint8_t>(bytes >> shift));
    }
    out.insert(out.end(), type, type + 4 + bytes);
    const uLong sum = crc32(0, type, static_cast<uInt>(4 + bytes));
    for (int shift = 24; shift >= 0; shift -= 8) out.push_back(static_cast<uint8_t>(sum >> shift));
  };
  for (size_t at = kSignature; at + 8 <= size;) {
    const uint8_t* const from = data + at;
    const uint32_t promised = static_cast<uint32_t>(from[0]) << 24 |
                              static_cast<uint32_t>(from[1]) << 16 |
                              static_cast<uint32_t>(from[2]) << 8 | from[3];
    const size_t bytes = std::min<size_t>(promised, size - at - 8);
    chunk(from + 4, bytes);
    if (std::memcmp(from + 4, "IEND", 4) == 0) return out;
    at += 8 + bytes + 4;
  }
  chunk(kEnd + 4, 0);
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ts_image_decoder* const decoder = new_decoder(kMaxPixels);
  if (size < kSignature || std::memcmp(data, "\x89PNG\r\n\x1a\n", kSignature) != 0) return -1;
  damaged_file(decoder, data, size, kMaxPixels, [](const Bytes&, int32_t, int32_t) {});
  const Bytes good = repaired(data, size);
  Picture picture(1, 1);
  const bool whole = image_file(decoder, good.data(), good.size(), kMaxPixels, &picture);
  if (good.size() == size && std::memcmp(good.data(), data, size) == 0) return 0;
  Picture as_it_is(1, 1);
  if (image_file(decoder, data, size, kMaxPixels, &as_it_is)) {
    // A file that decodes unchanged decodes the same after the repair.
    demand(whole && as_it_is.pixels == picture.pixels);
  }
  return 0;
}
