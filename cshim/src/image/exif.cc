#include "image/exif.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "torchstream_image.h"

namespace ts::image {
namespace {

constexpr int32_t kUpright = 1;

uint32_t number(const uint8_t* at, int bytes, bool big) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= static_cast<uint32_t>(at[i]) << 8 * (big ? bytes - 1 - i : i);
  }
  return value;
}

// Reads tag 274 in the first directory of a TIFF structure.
int32_t from_tiff(const uint8_t* data, size_t bytes) {
  if (bytes >= 6 && std::memcmp(data, "Exif\0\0", 6) == 0) {
    data += 6;
    bytes -= 6;
  }
  if (bytes < 8) return kUpright;
  const bool big = data[0] == 'M';
  if (std::memcmp(data, big ? "MM\0\x2A" : "II\x2A\0", 4) != 0) return kUpright;
  const size_t directory = number(data + 4, 4, big);
  if (directory > bytes || bytes - directory < 2) return kUpright;
  const size_t entries = number(data + directory, 2, big);
  for (size_t i = 0; i < entries; ++i) {
    const size_t at = directory + 2 + 12 * i;
    if (at > bytes || bytes - at < 12) return kUpright;
    const uint8_t* entry = data + at;
    if (number(entry, 2, big) != 274) continue;
    if (number(entry + 2, 2, big) != 3 || number(entry + 4, 4, big) != 1) return kUpright;
    const auto value = static_cast<int32_t>(number(entry + 8, 2, big));
    return value >= 1 && value <= 8 ? value : kUpright;
  }
  return kUpright;
}

int32_t of_jpeg(const uint8_t* data, size_t bytes) {
  for (size_t at = 2; at + 4 <= bytes;) {
    const int marker = data[at + 1];
    if (data[at] != 0xFF || marker == 0xFF || marker == 0) {  // a fill byte, or damage
      ++at;
      continue;
    }
    if (marker == 0xDA || marker == 0xD9) break;
    if (marker == 0x01 || (marker >= 0xD0 && marker <= 0xD8)) {  // without content
      at += 2;
      continue;
    }
    const size_t length = std::max<size_t>(number(data + at + 2, 2, true), 2);
    if (length > bytes - at - 2) break;
    if (marker == 0xE1 && length >= 8 && std::memcmp(data + at + 4, "Exif\0\0", 6) == 0) {
      return from_tiff(data + at + 4, length - 2);
    }
    at += 2 + length;
  }
  return kUpright;
}

// Reads EXIF data from the chunks of PNG (size, name, data, checksum) or RIFF (name, size, data, a
// byte to make it even).
int32_t of_chunks(const uint8_t* data, size_t bytes, size_t at, bool png) {
  while (at <= bytes && bytes - at >= 8) {
    const uint8_t* name = data + at + (png ? 4 : 0);
    const size_t size = number(data + at + (png ? 0 : 4), 4, png);
    if (size > bytes - at - 8) break;
    if (std::memcmp(name, png ? "eXIf" : "EXIF", 4) == 0) return from_tiff(data + at + 8, size);
    if (png && std::memcmp(name, "IEND", 4) == 0) break;
    at += 8 + size + (png ? 4 : size % 2);
  }
  return kUpright;
}

}  // namespace

int32_t exif_orientation(int32_t format, const uint8_t* data, size_t bytes) {
  switch (format) {
    case TS_IMAGE_FORMAT_JPEG:
      return of_jpeg(data, bytes);
    case TS_IMAGE_FORMAT_PNG:
      return of_chunks(data, bytes, 8, true);
    case TS_IMAGE_FORMAT_WEBP:
      return of_chunks(data, bytes, 12, false);
    default:
      return kUpright;
  }
}

void stored_place(int32_t orientation, int32_t upright_width, int32_t upright_height, int32_t* x,
                  int32_t* y) {
  const int32_t right = upright_width - 1;
  const int32_t bottom = upright_height - 1;
  switch (orientation) {
    case 2:
      *x = right - *x;
      return;
    case 3:
      *x = right - *x;
      *y = bottom - *y;
      return;
    case 4:
      *y = bottom - *y;
      return;
    case 5:
      std::swap(*x, *y);
      return;
    case 6: {  // stored lying on its left side
      const int32_t from = *x;
      *x = *y;
      *y = right - from;
      return;
    }
    case 7: {
      const int32_t from = *x;
      *x = bottom - *y;
      *y = right - from;
      return;
    }
    case 8: {
      const int32_t from = *x;
      *x = bottom - *y;
      *y = from;
      return;
    }
    default:
      return;
  }
}

}  // namespace ts::image
