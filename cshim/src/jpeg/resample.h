// The resize of image/resize.h as functions of one output or four. The weights equal those of its
// Axis::plan, operation by operation, and the sums are the same integers.
#pragma once

#include <cmath>
#include <cstdint>

#include "jpeg/pixels.h"
#include "jpeg/plan.h"

namespace ts::jpeg {

// ---- taps --------------------------------------------------------------------------------------

struct Taps {
  int32_t first, count;
};

TS_HOST_DEVICE double filter_reach(const Axis& axis) { return axis.filter == kBicubic ? 2.0 : 1.0; }

TS_HOST_DEVICE double scale_of(const Axis& axis) { return static_cast<double>(axis.in) / axis.out; }

TS_HOST_DEVICE double support_of(const Axis& axis) {
  const double scale = scale_of(axis);
  return scale >= 1.0 ? multiply(filter_reach(axis), scale) : filter_reach(axis);
}

// Returns the sample of output i in LibTorch's "nearest", in its float32 arithmetic.
TS_HOST_DEVICE int32_t nearest_sample(const Axis& axis, int32_t i) {
  if (axis.out == 2 * int64_t{axis.in}) return i / 2;
  const float scale = static_cast<float>(axis.in) / static_cast<float>(axis.out);
  return smaller(static_cast<int32_t>(static_cast<float>(i) * scale), axis.in - 1);
}

TS_HOST_DEVICE double center_of(const Axis& axis, int32_t i) {
  return multiply(scale_of(axis), i + 0.5);
}

// Returns the samples of output i, among all outputs of the axis.
TS_HOST_DEVICE Taps taps_of(const Axis& axis, int32_t i) {
  if (axis.filter == kIdentity) return {i, 1};
  if (axis.filter == kNearest) return {nearest_sample(axis, i), 1};
  const double center = center_of(axis, i);
  const double support = support_of(axis);
  const int64_t longest = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  const int64_t from = larger<int64_t>(static_cast<int64_t>(add(add(center, -support), 0.5)), 0);
  const int64_t to =
      smaller<int64_t>(static_cast<int64_t>(add(add(center, support), 0.5)), axis.in);
  const int64_t count = larger<int64_t>(smaller<int64_t>(to - from, longest), 0);
  return {static_cast<int32_t>(from), static_cast<int32_t>(count)};
}

// Returns the filter's value at a non-negative distance from its centre.
TS_HOST_DEVICE double filter_at(int32_t filter, double x) {
  if (filter == kBilinear) return x < 1.0 ? 1.0 - x : 0.0;
  constexpr double a = -0.5;
  if (x < 1.0) {
    return add(multiply(multiply(add(multiply(a + 2.0, x), -(a + 3.0)), x), x), 1.0);
  }
  if (x < 2.0) {
    return add(multiply(add(multiply(add(multiply(a, x), -5.0 * a), x), 8.0 * a), x), -4.0 * a);
  }
  return 0.0;
}

// Returns the weight of tap j before the weights are divided by their sum.
TS_HOST_DEVICE double raw_weight(const Axis& axis, const Taps& taps, int32_t i, int32_t j) {
  if (axis.filter == kNearest) return 1.0;
  const double scale = scale_of(axis);
  const double inverse = scale >= 1.0 ? 1.0 / scale : 1.0;
  const double offset = add(add(static_cast<double>(j + taps.first), -center_of(axis, i)), 0.5);
  return filter_at(axis.filter, std::fabs(multiply(offset, inverse)));
}

TS_HOST_DEVICE double total_weight(const Axis& axis, const Taps& taps, int32_t i) {
  double total = 0.0;
  for (int32_t j = 0; j < taps.count; ++j) total = add(total, raw_weight(axis, taps, i, j));
  return total;
}

// Returns the largest weight of output i, at least 0.
TS_HOST_DEVICE double largest_weight(const Axis& axis, int32_t i) {
  const Taps taps = taps_of(axis, i);
  const double total = total_weight(axis, taps, i);
  double largest = 0.0;
  if (total == 0.0) return largest;
  for (int32_t j = 0; j < taps.count; ++j) {
    const double weight = raw_weight(axis, taps, i, j) / total;
    largest = larger(largest, weight);
  }
  return largest;
}

// Returns the fractional bits of an axis's weights, from the largest weight of all its outputs.
TS_HOST_DEVICE int32_t precision_of(double largest) {
  int32_t precision = 0;
  for (; precision < 22; ++precision) {
    const double next = multiply(largest, static_cast<double>(1 << (precision + 1)));
    if (static_cast<int32_t>(add(0.5, next)) >= 1 << 15) break;
  }
  return precision;
}

// ---- weights in memory (plan.h has the layout) -------------------------------------------------

struct Weights {
  int32_t* precision;
  int32_t* first;  // relative to source_begin
  int32_t* count;
  int16_t* weights;
};

TS_HOST_DEVICE Weights weights_at(const Axis& axis, uint8_t* memory) {
  Weights weights;
  weights.precision = reinterpret_cast<int32_t*>(memory);
  weights.first = reinterpret_cast<int32_t*>(memory + kWeightsHeader);
  weights.count = weights.first + axis.size;
  weights.weights = reinterpret_cast<int16_t*>(weights.count + axis.size);
  return weights;
}

// Writes the taps of wanted output `place`.
TS_HOST_DEVICE void write_weights(const Axis& axis, int32_t precision, int32_t place,
                                  const Weights& to) {
  const int32_t i = axis.begin + (axis.reversed != 0 ? axis.size - 1 - place : place);
  const Taps taps = taps_of(axis, i);
  const double total = total_weight(axis, taps, i);
  to.first[place] = taps.first - axis.source_begin;
  to.count[place] = taps.count;
  int16_t* weights = to.weights + static_cast<int64_t>(place) * axis.pitch;
  for (int32_t j = 0; j < taps.count; ++j) {
    double weight = raw_weight(axis, taps, i, j);
    if (total != 0.0) weight = weight / total;
    weight = multiply(weight, static_cast<double>(1 << precision));
    weights[j] = static_cast<int16_t>(
        static_cast<int32_t>(weight < 0.0 ? add(weight, -0.5) : add(weight, 0.5)));
  }
  if (taps.count % 2 != 0) weights[taps.count] = 0;
}

// ---- sums --------------------------------------------------------------------------------------

struct Sums {
  int32_t red, green, blue;
};

// Adds two pixels by their weights, which are at a multiple of four bytes.
TS_HOST_DEVICE void add_pixels(const int16_t* weights, uint32_t first, uint32_t second,
                               Sums* sums) {
#if defined(__CUDA_ARCH__)
  const uint32_t both = *reinterpret_cast<const uint32_t*>(weights);
  const uint32_t red_green = __byte_perm(first, second, 0x5140);
  const uint32_t blue = __byte_perm(first, second, 0x0062);
  asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(sums->red) : "r"(both), "r"(red_green));
  asm("dp2a.hi.s32.u32 %0, %1, %2, %0;" : "+r"(sums->green) : "r"(both), "r"(red_green));
  asm("dp2a.lo.s32.u32 %0, %1, %2, %0;" : "+r"(sums->blue) : "r"(both), "r"(blue));
#else
  const uint32_t pixels[2] = {first, second};
  for (int i = 0; i < 2; ++i) {
    sums->red += weights[i] * static_cast<int32_t>(pixels[i] & 255);
    sums->green += weights[i] * static_cast<int32_t>(pixels[i] >> 8 & 255);
    sums->blue += weights[i] * static_cast<int32_t>(pixels[i] >> 16 & 255);
  }
#endif
}

// Returns the fractional bits of the weights; 0 without weights.
TS_HOST_DEVICE int32_t precision_at(const Axis& axis, const Weights& weights) {
  return axis.filter == kIdentity ? 0 : *weights.precision;
}

// Returns output `place` for pixels of one word each, `step` words apart.
TS_HOST_DEVICE uint32_t resampled(const Axis& axis, const Weights& weights, int32_t precision,
                                  int32_t place, const uint32_t* pixels, int32_t step) {
  if (axis.filter == kIdentity) {
    return pixels[(axis.reversed != 0 ? axis.size - 1 - place : place) * step];
  }
  const int32_t half = 1 << (precision - 1);
  Sums sums = {half, half, half};
  const uint32_t* pixel = pixels + weights.first[place] * step;
  const int16_t* weight = weights.weights + place * axis.pitch;
  for (int32_t left = weights.count[place]; left > 0; left -= 2, pixel += 2 * step, weight += 2) {
    add_pixels(weight, pixel[0], left > 1 ? pixel[step] : 0, &sums);
  }
  return packed_rgb(sums.red >> precision, sums.green >> precision, sums.blue >> precision);
}

// The number of rows that one thread resamples at once, with the same weights.
constexpr int32_t kRowsAtOnce = 4;

// Returns output `place` for each of four rows of pixels. Each row is followed by another pixel.
TS_HOST_DEVICE void resample_rows(const Axis& axis, const Weights& weights, int32_t precision,
                                  int32_t place, const uint32_t* (&row)[kRowsAtOnce],
                                  uint32_t (&out)[kRowsAtOnce]) {
  if (axis.filter == kIdentity) {
    const int32_t at = axis.reversed != 0 ? axis.size - 1 - place : place;
    TS_UNROLL
    for (int32_t i = 0; i < kRowsAtOnce; ++i) out[i] = row[i][at];
    return;
  }
  const int32_t half = 1 << (precision - 1);
  Sums sums[kRowsAtOnce];
  const int32_t first = weights.first[place];
  TS_UNROLL
  for (int32_t i = 0; i < kRowsAtOnce; ++i) {
    sums[i] = {half, half, half};
    row[i] += first;
  }
  const int16_t* weight = weights.weights + place * axis.pitch;
  int32_t left = weights.count[place];  // at least one, and usually at most four
  TS_NO_UNROLL
  do {
    TS_UNROLL
    for (int32_t i = 0; i < kRowsAtOnce; ++i) {
      // The weight after the last one is 0.
      add_pixels(weight, row[i][0], row[i][1], &sums[i]);
      row[i] += 2;
    }
    left -= 2;
    weight += 2;
  } while (left > 0);
  TS_UNROLL
  for (int32_t i = 0; i < kRowsAtOnce; ++i) {
    out[i] =
        packed_rgb(sums[i].red >> precision, sums[i].green >> precision, sums[i].blue >> precision);
  }
}

// Four neighbouring pixels, starting at a multiple of four.
struct FourPixels {
  uint32_t at[4];
};

TS_HOST_DEVICE FourPixels four_pixels(const uint32_t* from) {
#if defined(__CUDA_ARCH__)
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  return {{words.x, words.y, words.z, words.w}};
#else
  return {{from[0], from[1], from[2], from[3]}};
#endif
}

// Returns output `place` for four columns, whose rows are `step` words apart.
TS_HOST_DEVICE FourPixels resample_columns(const Axis& axis, const Weights& weights,
                                           int32_t precision, int32_t place,
                                           const uint32_t* columns, int32_t step) {
  if (axis.filter == kIdentity) {
    return four_pixels(columns + (axis.reversed != 0 ? axis.size - 1 - place : place) * step);
  }
  const int32_t half = 1 << (precision - 1);
  Sums sums[4];
  TS_UNROLL
  for (Sums& sum : sums) sum = {half, half, half};
  const uint32_t* row = columns + weights.first[place] * step;
  const int16_t* weight = weights.weights + place * axis.pitch;
  int32_t left = weights.count[place];  // at least one
  TS_NO_UNROLL
  do {
    const FourPixels first = four_pixels(row);
    // There may be no memory after the last row.
    const FourPixels second = four_pixels(left > 1 ? row + step : row);
    TS_UNROLL
    for (int i = 0; i < 4; ++i) add_pixels(weight, first.at[i], second.at[i], &sums[i]);
    row += 2 * step;
    left -= 2;
    weight += 2;
  } while (left > 0);
  FourPixels out;
  TS_UNROLL
  for (int i = 0; i < 4; ++i) {
    out.at[i] =
        packed_rgb(sums[i].red >> precision, sums[i].green >> precision, sums[i].blue >> precision);
  }
  return out;
}

// Computes one output of resample_rows, for pixels of one row with long code: the code exists only
// once.
template <typename Pixel>
TS_HOST_DEVICE uint32_t resample_slowly(const Axis& axis, const Weights& weights, int32_t precision,
                                        int32_t place, Pixel pixel) {
  const bool identity = axis.filter == kIdentity;
  const int32_t first = !identity            ? weights.first[place]
                        : axis.reversed != 0 ? axis.size - 1 - place
                                             : place;
  const int32_t count = identity ? 1 : weights.count[place];
  const int16_t* const weight = weights.weights + place * axis.pitch;
  const int32_t half = identity ? 0 : 1 << (precision - 1);
  Sums sums = {half, half, half};
  for (int32_t i = 0; i < count; ++i) {
    const uint32_t one = pixel(first + i);
    if (identity) return one;
    sums.red += weight[i] * byte_of(one, 0);
    sums.green += weight[i] * byte_of(one, 1);
    sums.blue += weight[i] * byte_of(one, 2);
  }
  return packed_rgb(sums.red >> precision, sums.green >> precision, sums.blue >> precision);
}

}  // namespace ts::jpeg
