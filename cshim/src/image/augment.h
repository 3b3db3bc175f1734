// torchvision's transforms on 8-bit RGB pixels: what comes after the crop.
//
// Results are those of torchvision.transforms.v2 on uint8 tensors, bit for bit where torchvision's
// are defined by its arithmetic (all but the blur, whose sums torchvision takes in an order of the
// convolution library's choice). Its arithmetic is float32 with fused multiply-adds, so it is here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchstream_image.h"

namespace ts::image {

// Rows of width * 3 bytes, without gaps.
struct Pixels {
  std::vector<uint8_t> bytes;
  int32_t width = 0, height = 0;

  void resize(int32_t w, int32_t h) {
    width = w;
    height = h;
    bytes.resize(row_bytes() * static_cast<size_t>(h));
  }
  size_t row_bytes() const { return static_cast<size_t>(width) * 3; }
  uint8_t* row(int32_t y) { return bytes.data() + static_cast<size_t>(y) * row_bytes(); }
  const uint8_t* row(int32_t y) const {
    return bytes.data() + static_cast<size_t>(y) * row_bytes();
  }
};

class Augmenter {
 public:
  // Runs the operations in order on rows that are stride bytes apart. The result has the image's
  // size again. Throws Failure (INVALID_ARGUMENT), with the pixels as they were.
  void run(uint8_t* pixels, int32_t width, int32_t height, size_t stride, const ts_augment_op* ops,
           int32_t count);

 private:
  void step(const ts_augment_op& op);
  void crop(const ts_augment_op& op);
  void affine(const ts_augment_op& op);
  void perspective(const ts_augment_op& op);
  // One output row of a grid transform: where it comes from is in x_ and y_.
  void sample(const ts_augment_op& op, int32_t y);
  void quarter_turns(int32_t turns);
  void sharpen(double factor);
  void blur(int32_t width, int32_t height, double sigma_x, double sigma_y);

  Pixels image_, other_;      // other_: what an operation writes, then exchanged
  std::vector<float> x_, y_;  // scratch: coordinates of a row, sums of the blur
  std::vector<float> weights_;
  std::vector<int32_t> columns_;
};

}  // namespace ts::image
