// libFuzzer: EXIF. The first byte says whether the other bytes are a TIFF structure, whose
// orientation must be the same in a JPEG, a PNG and a WebP, or a file of one of the three formats.
#include "fuzz.h"

namespace {

using namespace fuzz;

int32_t of(int32_t format, const Bytes& file) {
  const Bytes exact(file);
  const int32_t orientation = ts::image::exif_orientation(format, exact.data(), exact.size());
  demand(orientation >= 1 && orientation <= 8);
  return orientation;
}

void append(Bytes* to, const char* text, size_t size) { to->insert(to->end(), text, text + size); }

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 1) return -1;
  const uint8_t* const tiff = data + 1;
  const size_t bytes = size - 1;
  switch (data[0] % 4) {
    case TS_IMAGE_FORMAT_JPEG: {
      Bytes file = {0xFF, 0xD8};
      file.insert(file.end(), tiff, tiff + bytes);
      of(TS_IMAGE_FORMAT_JPEG, file);
      return 0;
    }
    case TS_IMAGE_FORMAT_PNG: {
      Bytes file;
      append(&file, "\x89PNG\r\n\x1a\n", 8);
      file.insert(file.end(), tiff, tiff + bytes);
      of(TS_IMAGE_FORMAT_PNG, file);
      return 0;
    }
    case TS_IMAGE_FORMAT_WEBP: {
      Bytes file;
      append(&file, "RIFF\0\0\0\0WEBP", 12);
      file.insert(file.end(), tiff, tiff + bytes);
      of(TS_IMAGE_FORMAT_WEBP, file);
      return 0;
    }
    default:
      break;
  }
  constexpr size_t kMaxSegment = 65535 - 2 - 6;
  if (bytes > kMaxSegment) return -1;

  // The JPEG has a segment before the structure, and one after it.
  Bytes jpeg = {0xFF, 0xD8, 0xFF, 0xFF, 0xE0, 0, 4, 1, 2, 0xFF, 0xE1};
  jpeg.push_back(static_cast<uint8_t>((bytes + 8) >> 8));
  jpeg.push_back(static_cast<uint8_t>(bytes + 8));
  append(&jpeg, "Exif\0\0", 6);
  jpeg.insert(jpeg.end(), tiff, tiff + bytes);
  append(&jpeg, "\xFF\xD9", 2);

  Bytes png;
  append(&png, "\x89PNG\r\n\x1a\n\0\0\0\1IHDR.....", 8 + 4 + 4 + 1 + 4);
  for (int shift = 24; shift >= 0; shift -= 8) {
    png.push_back(static_cast<uint8_t>(bytes >> shift));
  }
  append(&png, "eXIf", 4);
  png.insert(png.end(), tiff, tiff + bytes);
  append(&png, "....", 4);

  Bytes webp;
  append(&webp, "RIFF\0\0\0\0WEBPVP8 \1\0\0\0..EXIF", 12 + 8 + 2 + 4);
  for (int shift = 0; shift < 32; shift += 8) {
    webp.push_back(static_cast<uint8_t>(bytes >> shift));
  }
  webp.insert(webp.end(), tiff, tiff + bytes);

  const int32_t orientation = of(TS_IMAGE_FORMAT_JPEG, jpeg);
  // One "Exif" before the structure is skipped. In a JPEG that one belongs to the segment.
  if (bytes >= 6 && std::memcmp(tiff, "Exif\0\0", 6) == 0) return 0;
  demand(of(TS_IMAGE_FORMAT_PNG, png) == orientation);
  demand(of(TS_IMAGE_FORMAT_WEBP, webp) == orientation);
  return 0;
}
