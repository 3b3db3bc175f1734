// Decodes HEIC and AVIF images to 8-bit RGB with libheif, if it is installed where the program
// runs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

// Reports whether the data begins as a HEIC or AVIF file does.
bool is_heif(const uint8_t* data, size_t bytes);

// Reads the headers of a whole file whose pictures have at most max_pixels pixels. The size is that
// of the upright image: libheif turns it as the file says. Throws Failure: DECODE or UNSUPPORTED,
// also if libheif is not installed.
ts_image_info heif_header(const uint8_t* data, size_t bytes, int64_t max_pixels);

// Decodes the primary image, which must have at most max_pixels pixels, and pushes the rows of the
// box to the sink. The box must be inside the image. Throws Failure.
void heif_decode(const uint8_t* data, size_t bytes, int64_t max_pixels, const Box& box,
                 Resizer* sink);

}  // namespace ts::image
