// Decodes PNG to 8-bit RGB with libpng.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "image/resize.h"
#include "torchstream_image.h"

namespace ts::image {

bool is_png(const uint8_t* data, size_t bytes);

// Reads the header chunk. Throws Failure: DECODE or UNSUPPORTED.
ts_image_info png_header(const uint8_t* data, size_t bytes);

// Checks all chunks, so that the damage found does not depend on the part of the image that is
// decoded. Throws Failure (DECODE) unless every checksum is right, the image data can hold the
// image, and there is an end chunk. Ignores bytes after the end chunk.
void png_check(const uint8_t* data, size_t bytes);

struct PngState;  // libpng's state for one image

class PngDecoder {
 public:
  // Decodes the box, which must be inside the image, and pushes its rows to the sink. The bytes
  // must have passed png_check. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

  // Decodes an image that png_check or decode has refused as damaged, if its image data inflates to
  // all rows. Tolerates wrong checksums of ancillary chunks and of image data, a palette that a
  // later palette replaces, and a missing end chunk. Decodes the whole image, so that the verdict
  // does not depend on the box. With partial, missing pixels are zero, as in Pillow: black, or the
  // palette's first colour. Throws Failure.
  void decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                      Resizer* sink);

 private:
  void read_rows(PngState* state, const Box& box, bool partial, Resizer* sink);

  std::vector<uint8_t> rows_;  // the rows of one push
};

}  // namespace ts::image
