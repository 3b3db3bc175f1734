// The arithmetic of torchvision's transforms, as functions of one pixel or byte each. The host's
// operations (image/augment.h) and the device's (jpeg/steps.h) call them, so that both give the
// same bits: every rounding is written out here.
#pragma once

#include <cstdint>

#include "jpeg/target.h"
#include "torchstream_image.h"

// The host inlines these functions into loops that it compiles for several processors.
#if defined(__CUDACC__)
#define TS_PIXEL TS_HOST_DEVICE
#else
#define TS_PIXEL inline __attribute__((always_inline))
#endif

namespace ts::jpeg {

// ---- float32, rounded after each operation but in plus
// -----------------------------

// Computes a + alpha * b, rounded once, like torch's add(b, alpha) on float32.
TS_PIXEL float plus(float a, float alpha, float b) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(b, alpha, a);
#else
  return __builtin_fmaf(b, alpha, a);
#endif
}

// Computes a product that is never fused with a sum. On the host the compiler must not fuse either,
// hence -ffp-contract=off.
TS_PIXEL float times(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

// Rounds to the nearest integer, ties to even.
TS_PIXEL float nearest(float value) {
#if defined(__CUDA_ARCH__)
  return rintf(value);
#else
  return __builtin_rintf(value);
#endif
}

TS_PIXEL float round_down(float value) {
#if defined(__CUDA_ARCH__)
  return floorf(value);
#else
  return __builtin_floorf(value);
#endif
}

TS_PIXEL float clamp255(float value) {
  const float low = value > 0.0F ? value : 0.0F;  // NaN becomes 0 too
  return low < 255.0F ? low : 255.0F;
}

// Converts to uint8 like torch, which truncates.
TS_PIXEL uint8_t cut(float value) { return static_cast<uint8_t>(static_cast<int32_t>(value)); }

TS_PIXEL float grey(uint8_t r, uint8_t g, uint8_t b) {
  return plus(plus(times(static_cast<float>(r), 0.2989F), 0.587F, g), 0.114F, b);
}

// ---- bytes: each is replaced independently of its neighbours
// -------------------------------------

TS_PIXEL uint8_t brightened(int32_t byte, float factor) {
  return cut(clamp255(times(static_cast<float>(byte), factor)));
}

// Blends a byte with a grey value. `rest` is 1 - ratio, subtracted in double.
TS_PIXEL uint8_t blended(int32_t byte, float ratio, float rest, float with) {
  return cut(clamp255(plus(times(static_cast<float>(byte), ratio), rest, with)));
}

TS_PIXEL uint8_t solarized(int32_t byte, float threshold) {
  return static_cast<uint8_t>(static_cast<float>(byte) >= threshold ? 255 - byte : byte);
}

TS_PIXEL uint8_t posterized(int32_t byte, int32_t bits) {
  return static_cast<uint8_t>(byte & 0xFF << (8 - bits) & 0xFF);
}

// How autocontrast stretches a channel with values from `low` to `high`.
struct Stretch {
  float minimum, scale;
};

TS_PIXEL Stretch stretch_of(int32_t low, int32_t high) {
  if (low == high) return {0.0F, 1.0F};
  return {static_cast<float>(low),
          times(static_cast<float>(high - low), static_cast<float>(1.0 / 255.0))};
}

TS_PIXEL uint8_t stretched(int32_t byte, const Stretch& stretch) {
  return cut(clamp255((static_cast<float>(byte) - stretch.minimum) / stretch.scale));
}

// Returns the equalised byte. `below` is the number of pixels with smaller values. `step` is the
// number of pixels whose value is not the largest, divided by 255.
TS_PIXEL uint8_t equalized(int32_t byte, int32_t below, int32_t step) {
  if (step == 0) return static_cast<uint8_t>(byte);
  const int32_t level = byte == 0 ? 0 : (below + step / 2) / step;
  return static_cast<uint8_t>(level < 255 ? level : 255);
}

// ---- colours of a pixel
// --------------------------------------------------------------------------

TS_PIXEL void make_grey(uint8_t* pixel) {
  pixel[0] = pixel[1] = pixel[2] = cut(grey(pixel[0], pixel[1], pixel[2]));
}

TS_PIXEL void saturate(uint8_t* pixel, float ratio, float rest) {
  const auto light = static_cast<float>(static_cast<int32_t>(grey(pixel[0], pixel[1], pixel[2])));
  const uint8_t r = pixel[0];
  const uint8_t g = pixel[1];
  const uint8_t b = pixel[2];
  pixel[0] = blended(r, ratio, rest, light);
  pixel[1] = blended(g, ratio, rest, light);
  pixel[2] = blended(b, ratio, rest, light);
}

TS_PIXEL float unit(float value) {
  const float low = value > 0.0F ? value : 0.0F;
  return low < 1.0F ? low : 1.0F;
}

constexpr auto kPerByte = static_cast<float>(1.0 / 255.0);

// Converts a colour (0 to 1) to HSV, turns the hue, and converts back to bytes that are not
// truncated yet. It has no branches, so that the host's compiler vectorises loops over it.
TS_PIXEL void turn_hue(float* red, float* green, float* blue, float turn) {
  constexpr auto k6 = static_cast<float>(1.0 / 6.0);
  const float r = *red;
  const float g = *green;
  const float b = *blue;
  const float low = smaller(smaller(r, g), b);
  const float v = larger(larger(r, g), b);
  const bool equal = low == v;
  const float range = v - low;
  const float s = range / (equal ? 1.0F : v);
  const float divisor = equal ? 1.0F : range;
  const float rc = (v - r) / divisor;
  const float gc = (v - g) / divisor;
  const float bc = (v - b) / divisor;
  const float of_red = bc - gc;
  const float of_green = (rc + 2.0F) - bc;
  const float of_blue = (gc + 4.0F) - rc;
  float h = v == g ? of_green : of_blue;
  h = v == r ? of_red : h;
  h = plus(1.0F, h, k6);
  h = h >= 1.0F ? h - 1.0F : h;
  h += turn;
  h = h >= 1.0F ? h - 1.0F : h;
  h = h < 0.0F ? h + 1.0F : h;
  const float h6 = times(h, 6.0F);
  const auto sector = static_cast<int32_t>(h6);
  const float f = h6 - static_cast<float>(sector);
  const float rest = 1.0F - s;
  const float q = unit(times(plus(1.0F, -s, f), v));
  const float t = unit(times(plus(rest, s, f), v));
  const float p = unit(times(rest, v));
  const bool is0 = sector == 0 || sector >= 6;
  const bool is1 = sector == 1;
  const bool is2 = sector == 2;
  const bool is3 = sector == 3;
  const bool is4 = sector == 4;
  float to_red = v;  // sectors 0 and 5
  to_red = is1 ? q : to_red;
  to_red = is2 || is3 ? p : to_red;
  to_red = is4 ? t : to_red;
  float to_green = p;  // sectors 4 and 5
  to_green = is0 ? t : to_green;
  to_green = is1 || is2 ? v : to_green;
  to_green = is3 ? q : to_green;
  float to_blue = q;  // sector 5
  to_blue = is0 || is1 ? p : to_blue;
  to_blue = is2 ? t : to_blue;
  to_blue = is3 || is4 ? v : to_blue;
  *red = times(to_red, 255.999F);
  *green = times(to_green, 255.999F);
  *blue = times(to_blue, 255.999F);
}

// ---- neighbourhoods
// ------------------------------------------------------------------------------

constexpr int32_t kMaxBlur = 1001;  // maximum width and height of a blur's kernel

// Sharpens a byte inside an image from its channel's values above, next to and below it: pixels are
// three bytes apart. The blurred value is (8 neighbours + 5 times the byte) / 13, rounded. It is
// never half-way between two integers, so integer arithmetic gives torch's result.
TS_PIXEL uint8_t sharpened(const uint8_t* above, const uint8_t* here, const uint8_t* below,
                           float rest) {
  const int32_t sum = above[-3] + above[0] + above[3] + here[-3] + 5 * here[0] + here[3] +
                      below[-3] + below[0] + below[3];
  const int32_t blurred = (2 * sum + 13) / 26;
  const auto value = static_cast<float>(here[0]);
  return cut(clamp255(plus(value, rest, static_cast<float>(blurred) - value)));
}

// Returns the source index of index i of a padded side, or -1 for the fill.
TS_PIXEL int32_t padded(int32_t i, int32_t side, int32_t mode) {
  if (i >= 0 && i < side) return i;
  switch (mode) {
    case TS_PADDING_EDGE:
      return i < 0 ? 0 : side - 1;
    case TS_PADDING_REFLECT:
      return i < 0 ? -i : 2 * (side - 1) - i;
    case TS_PADDING_SYMMETRIC:
      return i < 0 ? -i - 1 : 2 * side - 1 - i;
    default:
      return -1;
  }
}

// ---- grid transforms: the source position of each output pixel
// -----------------------------------

// Converts a grid value to a coordinate like torch's grid_sample with align_corners=False. Far
// values and NaN become coordinates that are near the image, but still outside it.
TS_PIXEL float coordinate(float grid, float half, float side) {
  const float at = plus(-0.5F, half, grid + 1.0F);
  const float low = at > -2.0F ? at : -2.0F;
  return low < side + 1.0F ? low : side + 1.0F;
}

// The parameters of an image's grid transform.
struct Grid {
  float theta[8];
  float width, height;  // of the image
};

TS_PIXEL Grid grid_of(const double* values, int32_t count, int32_t width, int32_t height) {
  Grid grid = {};
  grid.width = static_cast<float>(width);
  grid.height = static_cast<float>(height);
  const float half[2] = {times(0.5F, grid.width), times(0.5F, grid.height)};
  for (int32_t i = 0; i < 6; ++i) grid.theta[i] = static_cast<float>(values[i]) / half[i / 3];
  for (int32_t i = 6; i < count; ++i) grid.theta[i] = static_cast<float>(values[i]);
  return grid;
}

// Returns the product of theta's row or column with (x, y), without its last summand.
TS_PIXEL float along(float theta_x, float theta_y, float x, float y) {
  return plus(times(x, theta_x), theta_y, y);
}

// Returns the position of the first of this many outputs, in pixels from their middle.
TS_PIXEL float first_place(int32_t outputs) {
  return times(1.0F - static_cast<float>(outputs), 0.5F);
}

// Writes the source of the output at (x, y), in pixels from the outputs' middle.
TS_PIXEL void affine_source(const Grid& grid, float x, float y, float* source_x, float* source_y) {
  const float gx = along(grid.theta[0], grid.theta[1], x, y) + grid.theta[2];
  const float gy = along(grid.theta[3], grid.theta[4], x, y) + grid.theta[5];
  *source_x = coordinate(gx, times(grid.width, 0.5F), grid.width);
  *source_y = coordinate(gy, times(grid.height, 0.5F), grid.height);
}

// Writes the source of the output whose middle is at (x, y).
TS_PIXEL void perspective_source(const Grid& grid, float x, float y, float* source_x,
                                 float* source_y) {
  const float gx = along(grid.theta[0], grid.theta[1], x, y) + grid.theta[2];
  const float gy = along(grid.theta[3], grid.theta[4], x, y) + grid.theta[5];
  const float under = along(grid.theta[6], grid.theta[7], x, y) + 1.0F;
  *source_x = coordinate(gx / under - 1.0F, times(grid.width, 0.5F), grid.width);
  *source_y = coordinate(gy / under - 1.0F, times(grid.height, 0.5F), grid.height);
}

struct Sampled {
  const uint8_t* image;
  int32_t width, height;
  uint8_t fill[3];
  // Whether there is a fill. torchvision's arithmetic without a fill differs from a black fill.
  bool filled;
};

TS_PIXEL const uint8_t* pixel_of(const Sampled& from, int32_t x, int32_t y) {
  return from.image + (static_cast<int64_t>(y) * from.width + x) * 3;
}

// The coordinates come from affine_source or perspective_source, so their integers fit.
TS_PIXEL void sample_nearest(const Sampled& from, float source_x, float source_y, uint8_t* out) {
  const auto x = static_cast<int32_t>(nearest(source_x));
  const auto y = static_cast<int32_t>(nearest(source_y));
  const bool inside = x >= 0 && x < from.width && y >= 0 && y < from.height;
  const uint8_t* pixel = inside ? pixel_of(from, x, y) : from.fill;
  out[0] = pixel[0];
  out[1] = pixel[1];
  out[2] = pixel[2];
}

TS_PIXEL void sample_bilinear(const Sampled& from, float source_x, float source_y, uint8_t* out) {
  const float left = round_down(source_x);
  const float top = round_down(source_y);
  const float w = source_x - left;
  const float e = 1.0F - w;
  const float n = source_y - top;
  const float s = 1.0F - n;
  const float weight[4] = {times(s, e), times(s, w), times(n, e), times(n, w)};
  const auto x = static_cast<int32_t>(left);
  const auto y = static_cast<int32_t>(top);
  const bool in_x[2] = {x >= 0 && x < from.width, x + 1 >= 0 && x + 1 < from.width};
  const bool in_y[2] = {y >= 0 && y < from.height, y + 1 >= 0 && y + 1 < from.height};
  const uint8_t nothing[3] = {0, 0, 0};
  const uint8_t* pixel[4];
  bool inside[4];
  for (int k = 0; k < 4; ++k) {
    inside[k] = in_x[k & 1] && in_y[k >> 1];
    pixel[k] = inside[k] ? pixel_of(from, x + (k & 1), y + (k >> 1)) : nothing;
  }
  float sum[3];
  for (int c = 0; c < 3; ++c) {
    float value = times(static_cast<float>(pixel[0][c]), weight[0]);
    for (int k = 1; k < 4; ++k) value = plus(value, weight[k], static_cast<float>(pixel[k][c]));
    sum[c] = value;
  }
  if (from.filled && !(inside[0] && inside[1] && inside[2] && inside[3])) {
    float mask = 0;
    for (int k = 0; k < 4; ++k) mask += inside[k] ? weight[k] : 0.0F;
    for (int c = 0; c < 3; ++c) {
      const auto fill = static_cast<float>(from.fill[c]);
      sum[c] = plus(fill, mask, sum[c] - fill);
    }
  }
  for (int c = 0; c < 3; ++c) out[c] = cut(clamp255(nearest(sum[c])));
}

}  // namespace ts::jpeg
