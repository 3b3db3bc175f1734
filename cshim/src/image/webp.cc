#include "image/webp.h"

#include <webp/decode.h>

#include <algorithm>
#include <cstring>
#include <new>
#include <string>

#include "base/error.h"

namespace ts::image {
namespace {

constexpr size_t kRiffHeader = 12;

uint32_t little_endian(const uint8_t* at) {
  return static_cast<uint32_t>(at[3]) << 24 | static_cast<uint32_t>(at[2]) << 16 |
         static_cast<uint32_t>(at[1]) << 8 | at[0];
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

}  // namespace

bool is_webp(const uint8_t* data, size_t bytes) {
  return bytes >= kRiffHeader && std::memcmp(data, "RIFF", 4) == 0 &&
         std::memcmp(data + 8, "WEBP", 4) == 0;
}

ts_image_info webp_header(const uint8_t* data, size_t bytes) {
  WebPBitstreamFeatures features;
  const VP8StatusCode status = WebPGetFeatures(data, bytes, &features);
  if (status != VP8_STATUS_OK) fail(status);
  if (features.has_animation != 0) {
    throw Failure(TS_ERROR_UNSUPPORTED, "WebP: animations are not supported");
  }
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
  // The container's size counts the bytes behind the size field, rounded up to even.
  const uint64_t promised = uint64_t{little_endian(data + 4)} + 8;
  if (promised > bytes) {
    throw Failure(TS_ERROR_DECODE, "truncated WebP: " + std::to_string(bytes) + " bytes of " +
                                       std::to_string(promised));
  }
  for (size_t at = kRiffHeader; at + 8 <= promised;) {
    const uint64_t size = little_endian(data + at + 4);
    if (size > promised - at - 8) {
      throw Failure(TS_ERROR_DECODE, "damaged WebP: the chunk at byte " + std::to_string(at) +
                                         " is larger than the file");
    }
    at += static_cast<size_t>(8 + size + size % 2);
  }
}

void WebpDecoder::decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink) {
  WebPDecoderConfig config;
  if (WebPInitDecoderConfig(&config) == 0) {
    throw Failure(TS_ERROR_INTERNAL, "libwebp's ABI differs from its header's");
  }
  const ts_image_info info = webp_header(data, bytes);
  // libwebp interpolates colour between neighbours, and treats a crop's edge as the image's edge. A
  // margin of two pixels, from an even position on, keeps the wrong edge outside of the box.
  const int32_t left = std::max(0, box.x0 - 2) & ~1;
  const int32_t top = std::max(0, box.y0 - 2) & ~1;
  const int32_t right = std::min(info.width, box.x1 + 2);
  const int32_t bottom = std::min(info.height, box.y1 + 2);
  config.options.use_cropping = 1;
  config.options.crop_left = left;
  config.options.crop_top = top;
  config.options.crop_width = right - left;
  config.options.crop_height = bottom - top;
  const size_t stride = static_cast<size_t>(right - left) * 3;
  const size_t size = stride * static_cast<size_t>(bottom - top);
  // Frees the memory of an earlier large image, which is still here if that image failed.
  if (pixels_.capacity() > kMaxKept) pixels_ = std::vector<uint8_t>();
  pixels_.resize(size + kRowSlack);
  config.output.colorspace = MODE_RGB;
  config.output.is_external_memory = 1;
  config.output.u.RGBA.rgba = pixels_.data();
  config.output.u.RGBA.stride = static_cast<int>(stride);
  config.output.u.RGBA.size = size;
  const VP8StatusCode status = WebPDecode(data, bytes, &config);
  WebPFreeDecBuffer(&config.output);
  if (status != VP8_STATUS_OK) fail(status);
  sink->push(pixels_.data() + static_cast<size_t>(box.y0 - top) * stride +
                 static_cast<size_t>(box.x0 - left) * 3,
             stride, box.height());
  if (pixels_.capacity() > kMaxKept) pixels_ = std::vector<uint8_t>();
}

}  // namespace ts::image
