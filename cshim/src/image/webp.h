// WebP by libwebp, to 8-bit RGB: still images, lossy and lossless.
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

// Throws Failure (DECODE) unless all the bytes are there that the container promises: libwebp stops
// reading below the last row that is needed.
void webp_check(const uint8_t* data, size_t bytes);

class WebpDecoder {
 public:
  // Decodes the box, which is inside the image, and pushes its rows to the sink. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

 private:
  std::vector<uint8_t> pixels_;  // of the box and a margin
};

}  // namespace ts::image
