// Resize of 8-bit RGB rows, equal to torchvision's result on uint8 tensors: antialiased bilinear,
// antialiased bicubic, and nearest.
// The arithmetic is LibTorch's uint8 kernel's (and Pillow's). The resize is separable, columns
// first. Nearest has one weight of 1 for each output. Weights are computed in double and rounded to
// int16 at the largest precision that holds them. Sums are int32, rounded to uint8 after each pass.
// Everything after the weights is integer arithmetic, so every kernel gives the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "torchstream_image.h"

namespace ts::image {

// Half-open: columns x0 to x1 - 1, rows y0 to y1 - 1, of an image decoded at 1/reduction of its
// size.
struct Box {
  int32_t x0, y0, x1, y1;
  int32_t reduction = 1;
  int32_t width() const { return x1 - x0; }
  int32_t height() const { return y1 - y0; }
};

// The number of readable bytes that Resizer::push needs after the last pixel of every row, because
// its loads are wider than a pixel.
constexpr size_t kRowSlack = 16;

// The maximum size of a buffer that a decoder keeps from one image to the next, in bytes.
constexpr size_t kMaxKept = 32 << 20;

enum class Kernel { kScalar, kAvx2, kAvx512 };  // from the slowest to the fastest

// Returns the fastest kernel that this processor supports. It supports all slower kernels too.
Kernel best_kernel();

// The samples of the crop box, and their weights, for each output along one axis of the window.
class Axis {
 public:
  // A part of an axis: from begin to end, within samples 0 to count - 1. Sample i extends from i to
  // i + 1.
  struct Span {
    int32_t count;
    double begin, end;
  };

  // Plans the window [begin, begin + size) of a span that is resized to `out`. With reversed, the
  // window's outputs are in reverse order. With mirrored, the samples are read from the last to the
  // first. interpolation is a TS_INTERPOLATION_ value; nearest needs a span of whole samples.
  void plan(Span in, int32_t out, int32_t begin, int32_t size, bool reversed, bool mirrored,
            int32_t interpolation);

  bool identity() const { return identity_; }
  int32_t source_begin() const { return source_begin_; }
  int32_t source_end() const { return source_end_; }
  int32_t outputs() const { return outputs_; }
  // The number of taps of every output: even, filled up with zero weights.
  int32_t taps() const { return taps_; }
  int32_t precision() const { return precision_; }
  // The first tap of output i, counted from source_begin(), and the weights of output i.
  int32_t first(int32_t i) const { return first_[static_cast<size_t>(i)]; }
  const int16_t* weights(int32_t i) const {
    return weights_.data() + static_cast<size_t>(i) * static_cast<size_t>(taps_);
  }

 private:
  // Sets weights_ and related members from the outputs' samples and exact weights, `pitch` for
  // each.
  void round(size_t pitch, double largest);
  void mirror(int32_t count);

  bool identity_ = true;
  int32_t source_begin_ = 0, source_end_ = 0, outputs_ = 0, taps_ = 0, precision_ = 0;
  std::vector<int32_t> first_;
  std::vector<int16_t> weights_;
  std::vector<int32_t> size_;  // scratch of plan
  std::vector<double> exact_;  // scratch of plan
};

// Resizes an image whose source rows arrive from the top down as they are decoded. It writes each
// row of the window (each column, if the image is stored on its side) as soon as the row's sources
// have arrived. It holds only the source rows that one row of the window needs.
class Resizer {
 public:
  explicit Resizer(Kernel kernel = best_kernel()) : kernel_(kernel) {}

  // Starts an image and returns the part of the source that it needs. The geometry must be valid,
  // except that crop_x and crop_y are the position of the crop box in the stored image. dst has
  // window_height rows, stride bytes apart, and is borrowed until the last row is pushed. The
  // source's rows belong to the image at 1/reduction of its size.
  Box start(const ts_image_geometry& geometry, uint8_t* dst, size_t stride, int32_t reduction = 1);

  // Starts the same image again from its first row.
  void restart() { rows_in_ = rows_out_ = 0; }

  // Takes the next `count` rows of the box. Each row starts at the box's column x0; rows are stride
  // bytes apart, with kRowSlack readable bytes after each.
  void push(const uint8_t* rows, size_t stride, int32_t count);

 private:
  uint8_t* ring_row(int32_t y) {
    return ring_.data() + static_cast<size_t>(y & ring_mask_) * ring_stride_;
  }
  void columns(const uint8_t* const in[4], uint8_t* const out[4], int32_t count);
  bool ready(int32_t output) const;
  void add_rows(int32_t output, size_t bytes, uint8_t* out);
  const uint8_t* line(int32_t y) const {
    return turned_ ? lines_[static_cast<size_t>(y & ring_mask_)].data()
                   : ring_.data() + static_cast<size_t>(y & ring_mask_) * ring_stride_;
  }
  int32_t slot(int32_t output) const { return descending_ ? y_.outputs() - 1 - output : output; }
  void emit();
  void keep(const uint8_t* row);
  void emit_turned();

  Kernel kernel_;
  Axis x_, y_;               // along the rows of the source, and along its columns
  bool flip_ = false;        // mirrors x_'s outputs, if x_ is the identity
  bool descending_ = false;  // y_'s last output comes first
  bool turned_ = false;      // the source's rows are the window's columns
  uint8_t* dst_ = nullptr;
  size_t dst_stride_ = 0;
  int32_t rows_in_ = 0;        // rows pushed so far
  int32_t rows_out_ = 0;       // outputs of y_ written so far
  std::vector<uint8_t> ring_;  // the latest rows after the columns pass
  size_t ring_stride_ = 0;
  int32_t ring_mask_ = 0;
  std::vector<const uint8_t*> taps_;  // scratch of emit

  // The latest rows of a turned image, as they arrived. A row's memory is allocated when the row
  // arrives, so that a header alone allocates none.
  std::vector<std::vector<uint8_t>> lines_;
  size_t lines_bytes_ = 0;
  size_t line_bytes_ = 0;
  std::vector<uint8_t> turning_;  // four rows before the columns pass, four after, and a spare row
};

}  // namespace ts::image
