// JPEG by libjpeg-turbo: the same pixels as Pillow and torchvision, but only those that are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "image/resize.h"
#include "torchstream.h"

namespace ts::image {

bool is_jpeg(const uint8_t* data, size_t bytes);

// Reads the segments up to the frame header. Throws Failure: DECODE or UNSUPPORTED.
ts_image_info jpeg_header(const uint8_t* data, size_t bytes);

// Walks over the whole file without decoding it and throws Failure (DECODE) unless its segments,
// restart markers and end marker are as they should be: what is found here does not depend on which
// part of the image is decoded. Bytes after the end marker are nobody's. About 0.01 ms for 100 KB.
void jpeg_check(const uint8_t* data, size_t bytes);

struct JpegState;  // libjpeg's

class JpegDecoder {
 public:
  explicit JpegDecoder(int64_t max_pixels);
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Decodes the box, which is inside the image, and pushes its rows to the sink. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

 private:
  std::unique_ptr<JpegState> state_;
  std::vector<uint8_t> band_;  // the rows of one push
};

}  // namespace ts::image
