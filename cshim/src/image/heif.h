// Decodes HEIC and AVIF images to 8-bit RGB with libheif, if it is installed at run time.
#pragma once

#include <cstddef>
#include <cstdint>

#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

// Reports whether the data starts like a HEIC or AVIF file.
bool is_heif(const uint8_t* data, size_t bytes);

// Reads the headers of a whole file whose pictures have at most max_pixels pixels. The size is the
// upright image's: libheif turns the image as the file says. Throws Failure: DECODE, or
// UNSUPPORTED, also if libheif is not installed.
ts_image_info heif_header(const uint8_t* data, size_t bytes, int64_t max_pixels);

// Decodes the primary image, which must have at most max_pixels pixels, and pushes the rows of the
// box to the sink. The box must be inside the image. Throws Failure.
void heif_decode(const uint8_t* data, size_t bytes, int64_t max_pixels, const Box& box,
                 Resizer* sink);

}  // namespace ts::image
