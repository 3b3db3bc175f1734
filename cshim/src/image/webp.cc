#include "image/webp.h"

#include <webp/decode.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "base/error.h"
#include "image/damage.h"

namespace ts::image {
namespace {

constexpr size_t kRiffHeader = 12;

uint32_t little_endian(const uint8_t* at) {
  return static_cast<uint32_t>(at[3]) << 24 | static_cast<uint32_t>(at[2]) << 16 |
         static_cast<uint32_t>(at[1]) << 8 | at[0];
}

uint32_t little_endian24(const uint8_t* at) {
  return static_cast<uint32_t>(at[2]) << 16 | static_cast<uint32_t>(at[1]) << 8 | at[0];
}

[[noreturn]] void fail(VP8StatusCode status) {
  switch (status) {
    case VP8_STATUS_OUT_OF_MEMORY:
      throw std::bad_alloc();
    case VP8_STATUS_UNSUPPORTED_FEATURE:
      throw Failure(TS_ERROR_UNSUPPORTED, "WebP: a feature that libwebp does not decode");
    case VP8_STATUS_NOT_ENOUGH_DATA:
    case VP8_STATUS_SUSPENDED:
      throw Failure(TS_ERROR_DECODE, "truncated WebP: the data ends early");
    case VP8_STATUS_BITSTREAM_ERROR:
      throw Failure(TS_ERROR_DECODE, "damaged WebP: an invalid bit stream");
    default:
      throw Failure(TS_ERROR_INTERNAL, "libwebp: status " + std::to_string(status));
  }
}

WebPBitstreamFeatures features_of(const uint8_t* data, size_t bytes) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = WebPGetFeatures(data, bytes, &features);
  if (status != VP8_STATUS_OK) fail(status);
  return features;
}

// A chunk of a RIFF container: a name, a size and data. An odd size has a byte of padding.
struct Chunk {
  const uint8_t* at;  // of the name
  size_t size;        // of the data
  const uint8_t* data() const { return at + 8; }
  bool is(const char* name) const { return std::memcmp(at, name, 4) == 0; }
};

// Returns the first chunk in [data, data + bytes) that `wanted` accepts. Throws Failure (DECODE) if
// there is none.
template <typename Wanted>
Chunk find_chunk(const uint8_t* data, size_t bytes, const Wanted& wanted) {
  for (size_t at = 0; bytes - at >= 8;) {
    const Chunk chunk = {data + at, little_endian(data + at + 4)};
    if (chunk.size > bytes - at - 8) break;
    if (wanted(chunk)) return chunk;
    at += std::min(8 + chunk.size + chunk.size % 2, bytes - at);
  }
  throw Failure(TS_ERROR_DECODE, "damaged WebP: an animation without a first frame");
}

// The bit stream of an image, and its position on the canvas.
struct Frame {
  const uint8_t* data;
  size_t bytes;
  Box box;
};

// Finds the first frame of an animation on a canvas of the given size. The frame's alpha is
// skipped: the first frame is not blended, and alpha is dropped.
Frame first_frame(const uint8_t* data, size_t bytes, int32_t width, int32_t height) {
  constexpr size_t kFrameHeader = 16;
  const Chunk animated = find_chunk(data + kRiffHeader, bytes - kRiffHeader,
                                    [](const Chunk& chunk) { return chunk.is("ANMF"); });
  if (animated.size < kFrameHeader) {
    throw Failure(TS_ERROR_DECODE, "damaged WebP: a frame without a header");
  }
  const uint8_t* const header = animated.data();
  const Chunk image =
      find_chunk(header + kFrameHeader, animated.size - kFrameHeader,
                 [](const Chunk& chunk) { return chunk.is("VP8 ") || chunk.is("VP8L"); });
  Frame frame = {image.at, 8 + image.size, {}};
  frame.box.x0 = static_cast<int32_t>(2 * little_endian24(header));
  frame.box.y0 = static_cast<int32_t>(2 * little_endian24(header + 3));
  frame.box.x1 = frame.box.x0 + 1 + static_cast<int32_t>(little_endian24(header + 6));
  frame.box.y1 = frame.box.y0 + 1 + static_cast<int32_t>(little_endian24(header + 9));
  const WebPBitstreamFeatures features = features_of(frame.data, frame.bytes);
  if (features.width != frame.box.width() || features.height != frame.box.height() ||
      frame.box.x1 > width || frame.box.y1 > height) {
    throw Failure(TS_ERROR_DECODE, "damaged WebP: a frame that does not fit its animation");
  }
  return frame;
}

}  // namespace

bool is_webp(const uint8_t* data, size_t bytes) {
  return bytes >= kRiffHeader && std::memcmp(data, "RIFF", 4) == 0 &&
         std::memcmp(data + 8, "WEBP", 4) == 0;
}

ts_image_info webp_header(const uint8_t* data, size_t bytes) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = WebPGetFeatures(data, bytes, &features);
  if (status == VP8_STATUS_NOT_ENOUGH_DATA) {
    throw_damage("truncated WebP: the headers do not end before the file, which ends", bytes);
  }
  if (status != VP8_STATUS_OK) fail(status);
  if (features.width < 1 || features.height < 1) {
    throw Failure(TS_ERROR_DECODE, "damaged WebP: an impossible width or height");
  }
  ts_image_info info = {};
  info.format = TS_IMAGE_FORMAT_WEBP;
  info.width = features.width;
  info.height = features.height;
  info.components = features.has_alpha != 0 ? 4 : 3;
  info.bit_depth = 8;
  return info;
}

void webp_check(const uint8_t* data, size_t bytes) {
  // The container's size counts the bytes after the size field, rounded up to even.
  const uint64_t promised = uint64_t{little_endian(data + 4)} + 8;
  if (promised > bytes) {
    throw_damage("truncated WebP: of " + std::to_string(promised) + " bytes, the file ends", bytes);
  }
  for (size_t at = kRiffHeader; at + 8 <= promised;) {
    const uint64_t size = little_endian(data + at + 4);
    if (size > promised - at - 8) {
      throw_damage("damaged WebP: a chunk that is larger than the file", at);
    }
    at += static_cast<size_t>(8 + size + size % 2);
  }
}

void WebpDecoder::decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink) {
  const WebPBitstreamFeatures features = features_of(data, bytes);
  Frame frame = {data, bytes, {0, 0, features.width, features.height}};
  if (features.has_animation != 0) {
    frame = first_frame(data, bytes, features.width, features.height);
  }
  const Box part = {std::max(box.x0, frame.box.x0), std::max(box.y0, frame.box.y0),
                    std::min(box.x1, frame.box.x1), std::min(box.y1, frame.box.y1)};
  // Frees the memory of an earlier large image that failed.
  if (pixels_.capacity() > kMaxKept) pixels_ = std::vector<uint8_t>();
  const uint8_t* rows = nullptr;
  size_t stride = 0;
  if (part.x0 < part.x1 && part.y0 < part.y1) {
    rows = decode_part(frame.data, frame.bytes,
                       {part.x0 - frame.box.x0, part.y0 - frame.box.y0, part.x1 - frame.box.x0,
                        part.y1 - frame.box.y0},
                       frame.box.width(), frame.box.height(), &stride);
  }
  if (rows != nullptr && part.width() == box.width() && part.height() == box.height()) {
    sink->push(rows, stride, box.height());
  } else {
    // The canvas is black around the frame.
    const size_t row_bytes = static_cast<size_t>(box.width()) * 3;
    std::vector<uint8_t> row(row_bytes + kRowSlack);
    for (int32_t y = box.y0; y < box.y1; ++y) {
      std::fill(row.begin(), row.end(), uint8_t{0});
      if (rows != nullptr && y >= part.y0 && y < part.y1) {
        std::memcpy(row.data() + static_cast<size_t>(part.x0 - box.x0) * 3,
                    rows + static_cast<size_t>(y - part.y0) * stride,
                    static_cast<size_t>(part.width()) * 3);
      }
      sink->push(row.data(), row_bytes, 1);
    }
  }
  if (pixels_.capacity() > kMaxKept) pixels_ = std::vector<uint8_t>();
}

const uint8_t* WebpDecoder::decode_part(const uint8_t* data, size_t bytes, const Box& box,
                                        int32_t width, int32_t height, size_t* stride) {
  WebPDecoderConfig config;
  if (WebPInitDecoderConfig(&config) == 0) {
    throw Failure(TS_ERROR_INTERNAL, "libwebp's ABI differs from its header's");
  }
  // libwebp interpolates colour between neighbours, and treats a crop's edge as the image's edge. A
  // margin of two pixels, starting at an even position, keeps the wrong edge outside the box.
  const int32_t left = std::max(0, box.x0 - 2) & ~1;
  const int32_t top = std::max(0, box.y0 - 2) & ~1;
  const int32_t right = std::min(width, box.x1 + 2);
  const int32_t bottom = std::min(height, box.y1 + 2);
  config.options.use_cropping = 1;
  config.options.crop_left = left;
  config.options.crop_top = top;
  config.options.crop_width = right - left;
  config.options.crop_height = bottom - top;
  *stride = static_cast<size_t>(right - left) * 3;
  const size_t size = *stride * static_cast<size_t>(bottom - top);
  pixels_.resize(size + kRowSlack);
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = pixels_.data();
  config.output.u.RGBA.stride = static_cast<int>(*stride);
  config.output.u.RGBA.size = size;
  const VP8StatusCode status = WebPDecode(data, bytes, &config);
  WebPFreeDecBuffer(&config.output);
  if (status != VP8_STATUS_OK) fail(status);
  return pixels_.data() + static_cast<size_t>(box.y0 - top) * *stride +
         static_cast<size_t>(box.x0 - left) * 3;
}

}  // namespace ts::image
