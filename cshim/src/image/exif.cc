#include "image/exif.h"

#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>
#include <vector>

#include "torchstream_image.h"

namespace ts::image {
namespace {

constexpr int32_t kUpright = 1;
constexpr int32_t kMissing = 0;  // no orientation: other metadata is then read

// The maximum size in bytes of a PNG's text that is inflated or converted. Pillow has the same
// limit for compressed text.
constexpr size_t kMaxText = 1 << 20;

uint32_t number(const uint8_t* at, int bytes, bool big) {
  uint32_t value = 0;
  for (int i = 0; i < bytes; ++i) {
    value |= static_cast<uint32_t>(at[i]) << 8 * (big ? bytes - 1 - i : i);
  }
  return value;
}

// Reads tag 274 in the first directory of a TIFF structure. Returns kMissing without the tag.
int32_t from_tiff(const uint8_t* data, size_t bytes) {
  if (bytes >= 6 && std::memcmp(data, "Exif\0\0", 6) == 0) {
    data += 6;
    bytes -= 6;
  }
  if (bytes < 8) return kMissing;
  const bool big = data[0] == 'M';
  if (std::memcmp(data, big ? "MM\0\x2A" : "II\x2A\0", 4) != 0) return kMissing;
  const size_t directory = number(data + 4, 4, big);
  if (directory > bytes || bytes - directory < 2) return kMissing;
  const size_t entries = number(data + directory, 2, big);
  for (size_t i = 0; i < entries; ++i) {
    const size_t at = directory + 2 + 12 * i;
    if (at > bytes || bytes - at < 12) return kMissing;
    const uint8_t* entry = data + at;
    if (number(entry, 2, big) != 274) continue;
    if (number(entry + 2, 2, big) != 3 || number(entry + 4, 4, big) != 1) return kUpright;
    const auto value = static_cast<int32_t>(number(entry + 8, 2, big));
    return value >= 1 && value <= 8 ? value : kUpright;
  }
  return kMissing;
}

// Reads the digit after tiff:Orientation in an XMP packet, as an attribute or an element.
int32_t from_xmp(std::string_view packet) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (size_t at = packet.find(kName); at != packet.npos; at = packet.find(kName, at + 1)) {
    std::string_view value = packet.substr(at + kName.size());
    if (value.substr(0, 2) == "=\"") {
      value.remove_prefix(2);
    } else if (value.substr(0, 1) == ">") {
      value.remove_prefix(1);
    } else {
      continue;
    }
    if (value.empty() || value[0] < '0' || value[0] > '9') continue;
    return value[0] >= '1' && value[0] <= '8' ? value[0] - '0' : kUpright;
  }
  return kMissing;
}

std::string_view view(const uint8_t* data, size_t bytes) {
  return {reinterpret_cast<const char*>(data), bytes};
}

int32_t of_jpeg(const uint8_t* data, size_t bytes) {
  constexpr std::string_view kExif("Exif\0\0", 6);
  constexpr std::string_view kXmp("http://ns.adobe.com/xap/1.0/\0", 29);
  bool exif = false;
  std::string_view xmp;
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
    const std::string_view content = view(data + at + 4, length - 2);
    if (marker == 0xE1 && !exif && content.substr(0, kExif.size()) == kExif) {
      exif = true;
      const int32_t orientation = from_tiff(data + at + 4, length - 2);
      if (orientation != kMissing) return orientation;
    }
    if (marker == 0xE1 && content.substr(0, kXmp.size()) == kXmp) {
      xmp = content.substr(kXmp.size());
    }
    at += 2 + length;
  }
  return from_xmp(xmp);
}

// A chunk of a PNG (size, name, data, checksum) or of a RIFF (name, size, data, padding to an even
// size).
struct Chunk {
  std::string_view name;
  const uint8_t* data;
  size_t size;
};

// Calls visit with each chunk from `at` on, up to the PNG's end.
template <typename Visit>
void each_chunk(const uint8_t* data, size_t bytes, size_t at, bool png, const Visit& visit) {
  while (at <= bytes && bytes - at >= 8) {
    const Chunk chunk = {view(data + at + (png ? 4 : 0), 4), data + at + 8,
                         number(data + at + (png ? 0 : 4), 4, png)};
    if (chunk.size > bytes - at - 8 || (png && chunk.name == "IEND")) return;
    visit(chunk);
    at += 8 + chunk.size + (png ? 4 : chunk.size % 2);
  }
}

// Inflates up to kMaxText bytes. Returns none for damaged or larger data.
std::vector<uint8_t> inflated(std::string_view packed) {
  std::vector<uint8_t> text(kMaxText);
  uLongf size = text.size();
  const auto* source = reinterpret_cast<const Bytef*>(packed.data());
  if (uncompress(text.data(), &size, source, packed.size()) != Z_OK) size = 0;
  text.resize(size);
  return text;
}

// A PNG's text: tEXt, zTXt or iTXt.
struct Text {
  std::string_view content;
  bool compressed = false;
};

// Removes a string that ends with a zero byte from the start of `rest`.
std::string_view next_string(std::string_view* rest) {
  const size_t end = std::min(rest->find('\0'), rest->size());
  const std::string_view text = rest->substr(0, end);
  rest->remove_prefix(std::min(end + 1, rest->size()));
  return text;
}

// Stores the text in *text if the chunk is a text with the keyword.
void read_text(const Chunk& chunk, std::string_view keyword, Text* text) {
  const bool deflated = chunk.name == "zTXt";
  const bool international = chunk.name == "iTXt";
  if (chunk.name != "tEXt" && !deflated && !international) return;
  std::string_view rest = view(chunk.data, chunk.size);
  if (next_string(&rest) != keyword) return;
  bool compressed = deflated;
  if (international) {
    compressed = !rest.empty() && rest[0] != 0;
    rest.remove_prefix(std::min<size_t>(rest.size(), 2));  // the flag and the method
    next_string(&rest);                                    // the language
    next_string(&rest);                                    // the keyword in that language
  } else if (deflated) {
    rest.remove_prefix(std::min<size_t>(rest.size(), 1));  // the method
  }
  *text = {rest, compressed};
}

// Reads EXIF data that ImageMagick stores as text: three lines of header, then hexadecimal digits.
int32_t from_raw_profile(std::string_view text) {
  if (text.size() > kMaxText) return kMissing;
  for (int line = 0; line < 3; ++line) {
    const size_t end = text.find('\n');
    if (end == text.npos) return kMissing;
    text.remove_prefix(end + 1);
  }
  std::vector<uint8_t> data;
  int digits = 0;
  for (const char c : text) {
    if (c == ' ' || (c >= '\t' && c <= '\r')) continue;
    const bool decimal = c >= '0' && c <= '9';
    const char lower = static_cast<char>(c | 0x20);
    if (!decimal && (lower < 'a' || lower > 'f')) return kMissing;
    const int value = decimal ? c - '0' : lower - 'a' + 10;
    if (digits++ % 2 == 0) {
      data.push_back(static_cast<uint8_t>(value << 4));
    } else {
      data.back() = static_cast<uint8_t>(data.back() | value);
    }
  }
  return from_tiff(data.data(), data.size());
}

// Reads a text with `from`. Only the last text of a keyword is inflated, so that the time does not
// grow with the number of texts.
template <typename From>
int32_t from_text(const Text& text, const From& from) {
  if (!text.compressed) return from(text.content);
  const std::vector<uint8_t> content = inflated(text.content);
  return from(view(content.data(), content.size()));
}

// Reads the EXIF chunk, else the EXIF data in text, else the XMP packet, as Pillow does.
int32_t of_png(const uint8_t* data, size_t bytes) {
  Chunk exif = {};
  Text profile;
  Text xmp;
  each_chunk(data, bytes, 8, true, [&](const Chunk& chunk) {
    if (chunk.name == "eXIf" && exif.data == nullptr) exif = chunk;
    read_text(chunk, "Raw profile type exif", &profile);
    read_text(chunk, "XML:com.adobe.xmp", &xmp);
  });
  const int32_t orientation =
      exif.data != nullptr ? from_tiff(exif.data, exif.size) : from_text(profile, from_raw_profile);
  return orientation != kMissing ? orientation : from_text(xmp, from_xmp);
}

int32_t of_webp(const uint8_t* data, size_t bytes) {
  Chunk exif = {};
  std::string_view xmp;
  each_chunk(data, bytes, 12, false, [&](const Chunk& chunk) {
    if (chunk.name == "EXIF" && exif.data == nullptr) exif = chunk;
    if (chunk.name == "XMP ") xmp = view(chunk.data, chunk.size);
  });
  const int32_t orientation = exif.data != nullptr ? from_tiff(exif.data, exif.size) : kMissing;
  return orientation != kMissing ? orientation : from_xmp(xmp);
}

int32_t found(int32_t format, const uint8_t* data, size_t bytes) {
  switch (format) {
    case TS_IMAGE_FORMAT_JPEG:
      return of_jpeg(data, bytes);
    case TS_IMAGE_FORMAT_PNG:
      return of_png(data, bytes);
    case TS_IMAGE_FORMAT_WEBP:
      return of_webp(data, bytes);
    default:
      return kMissing;
  }
}

}  // namespace

int32_t exif_orientation(int32_t format, const uint8_t* data, size_t bytes) {
  const int32_t orientation = found(format, data, bytes);
  return orientation == kMissing ? kUpright : orientation;
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
    case 6: {  // stored on its left side
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
