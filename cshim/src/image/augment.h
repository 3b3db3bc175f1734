// Runs torchvision's transforms on 8-bit RGB pixels, after the crop.
// Results equal torchvision.transforms.v2 on uint8 tensors, bit for bit where torchvision's
// arithmetic defines its results. That is so for all operations except the blur, whose order of
// summation is up to the convolution library. torchvision computes in float32 with fused
// multiply-adds, and so does this code.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchstream_image.h"

namespace ts::image {

// The number of operations. Their kinds are 1 to kAugmentKinds. The tests compare, and the fuzzer
// runs, every kind in this range; augment.cc asserts that its table has as many rows.
inline constexpr int32_t kAugmentKinds = TS_AUGMENT_MIX;

// Rows of width * 3 bytes, without gaps.
struct Pixels {
  std::vector<uint8_t> bytes;
  int32_t width = 0, height = 0;

  void resize(int32_t w, int32_t h) {
    width = w;
    height = h;
    bytes.resize(row_bytes() * static_cast<size_t>(h));
  }
  size_t count() const { return bytes.size() / 3; }
  size_t row_bytes() const { return static_cast<size_t>(width) * 3; }
  uint8_t* row(int32_t y) { return bytes.data() + static_cast<size_t>(y) * row_bytes(); }
  const uint8_t* row(int32_t y) const {
    return bytes.data() + static_cast<size_t>(y) * row_bytes();
  }
};

// The buffers of the operations, reused from image to image.
struct Workspace {
  Pixels image;
  Pixels other;             // the result of an operation, swapped with `image` when it is complete
  std::vector<float> x, y;  // coordinates of a row, or sums of the blur
  std::vector<float> weights;
  std::vector<int32_t> columns;
  Pixels kept;             // the original image of a mixture
  std::vector<float> sum;  // the mixture's sum so far
};

// Appends operations to a plan of plan_jpeg (image/jpeg_plan.h), which is aligned as there. Returns
// the plan's size in bytes. Returns 0, with the plan unchanged, if only the host can run one of the
// operations. Returns more than the capacity, with the plan unchanged, if there is no room. Throws
// Failure (INVALID_ARGUMENT) for operations that Augmenter::run refuses, and for a plan that is
// invalid or already has operations.
size_t plan_augment(uint8_t* buffer, size_t capacity, const ts_augment_op* ops, int64_t count);

class Augmenter {
 public:
  // Runs the operations in order on rows that are `stride` bytes apart. Together they must keep the
  // image's size. Throws Failure (INVALID_ARGUMENT) before any pixel changes.
  void run(uint8_t* pixels, int32_t width, int32_t height, size_t stride, const ts_augment_op* ops,
           int64_t count);

 private:
  Workspace work_;
};

}  // namespace ts::image
