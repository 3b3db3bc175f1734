// PNG by libpng, to 8-bit RGB.
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

// Walks over the chunks and throws Failure (DECODE) unless every checksum is right, there is image
// data, enough of it to hold the image, and an end chunk: so the damage found does not depend on
// the part of the image that is decoded. Bytes after the end chunk are ignored.
void png_check(const uint8_t* data, size_t bytes);

struct PngState;  // libpng's

class PngDecoder {
 public:
  // Decodes the box, which is inside the image, and pushes its rows to the sink. The bytes have
  // passed png_check. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

  // Decodes an image that png_check or decode has refused as damaged, if its image data inflates to
  // all rows: with wrong checksums of chunks that are ancillary or hold image data, a palette that
  // is replaced by a later one, a missing end. It decodes the whole image, so that the verdict does
  // not depend on the box. partial: pixels that the file does not have are zero, as in Pillow:
  // black, or the palette's first colour. Throws Failure.
  void decode_damaged(const uint8_t* data, size_t bytes, const Box& box, bool partial,
                      Resizer* sink);

 private:
  void read_rows(PngState* state, const Box& box, bool partial, Resizer* sink);

  std::vector<uint8_t> rows_;  // of one push
};

}  // namespace ts::image
