// JPEG by libjpeg-turbo: the same pixels as Pillow and torchvision, but only those that are needed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "image/jpeg_entropy.h"
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

// How many images went which way.
struct JpegStats {
  int64_t own = 0;      // Huffman decoding of our own
  int64_t libjpeg = 0;  // all of libjpeg-turbo: unusual files, and those on which ours gave up
  int64_t gave_up = 0;  // of the latter: damaged, or stranger than their headers say
};

class JpegDecoder {
 public:
  explicit JpegDecoder(int64_t max_pixels);
  ~JpegDecoder();
  JpegDecoder(const JpegDecoder&) = delete;
  JpegDecoder& operator=(const JpegDecoder&) = delete;

  // Decodes the box, which is inside the image, and pushes its rows to the sink. Throws Failure.
  void decode(const uint8_t* data, size_t bytes, const Box& box, Resizer* sink);

  // Whether our own entropy decoder is used where it can be. It is, unless the linked libjpeg has
  // not the layout that it was written for.
  bool own() const { return own_; }
  void set_own(bool own) { own_ = own && works(); }

  const JpegStats& stats() const { return stats_; }

 private:
  bool works();
  bool attach(const uint8_t* data, size_t bytes);
  bool rows(const Box& box, Resizer* sink);

  std::unique_ptr<JpegState> state_;
  std::vector<uint8_t> band_;  // the rows of one push
  HuffmanCode codes_[2][4];    // of the image, as the file has them
  bool own_ = false;
  size_t scan_begin_ = 0;
  uint64_t mcus_ = 0;
  JpegStats stats_;
};

}  // namespace ts::image
