// Decodes WebP with libwebp, to 8-bit RGB: still images, lossy and lossless, and the first frame of
// animations.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

bool is_webp(const uint8_t* data, size_t bytes);

// Reads the headers. Throws Failure: DECODE or UNSUPPORTED.
ts_image_info webp_header(const uint8_t* data, size_t bytes);

// Throws Failure (DECODE) unless the data has all bytes that the container announces. libwebp does
// not notice missing bytes after the last row that is needed.
void webp_check(const uint8_t* data, size_t bytes);

class WebpDecoder {
 public:
  // Decodes the box, which must be inside the image, and pushes its rows to the sink. Throws
  // Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

 private:
  // Decodes the box of an image of the given size into pixels_. Returns the box's first pixel, and
  // the distance of its rows in *stride.
  const uint8_t* decode_part(const uint8_t* data, size_t bytes, const Box& box, int32_t width,
                             int32_t height, size_t* stride);

  std::vector<uint8_t> pixels_;  // the pixels of the box and a margin
};

}  // namespace ts::image
