// Decodes still WebP images, lossy and lossless, to 8-bit RGB with libwebp.
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

// Throws Failure (DECODE) unless the data has all bytes that the container promises. libwebp does
// not notice missing bytes behind the last row that is needed.
void webp_check(const uint8_t* data, size_t bytes);

class WebpDecoder {
 public:
  // Decodes the box, which must be inside the image, and pushes its rows to the sink. Throws
  // Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

 private:
  std::vector<uint8_t> pixels_;  // the pixels of the box and a margin
};

}  // namespace ts::image
