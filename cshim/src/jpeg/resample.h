// The resize of image/resize.h as functions of one output each. The weights are those of its
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

// The sample of output i in LibTorch's "nearest", in its float32 arithmetic.
TS_HOST_DEVICE int32_t nearest_sample(const Axis& axis, int32_t i) {
  if (axis.out == 2 * int64_t{axis.in}) return i / 2;
  const float scale = static_cast<float>(axis.in) / static_cast<float>(axis.out);
  return smaller(static_cast<int32_t>(static_cast<float>(i) * scale), axis.in - 1);
}

TS_HOST_DEVICE double center_of(const Axis& axis, int32_t i) {
  return multiply(scale_of(axis), i + 0.5);
}

// Returns the samples of output i, of all outputs of the axis.
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

// Returns the filter at a distance from its centre that is not negative.
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

// Returns the bits behind the point of the weights of an axis, from the largest of all its outputs.
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

// Writes the taps of place `place` of the wanted outputs.
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
}

// ---- sums --------------------------------------------------------------------------------------

// Returns the output of the place for pixels of one word each, `step` words apart.
TS_HOST_DEVICE uint32_t resampled(const Axis& axis, const Weights& weights, int32_t place,
                                  const uint32_t* pixels, int64_t step) {
  if (axis.filter == kIdentity) {
    return pixels[(axis.reversed != 0 ? axis.size - 1 - place : place) * step];
  }
  const int32_t precision = *weights.precision;
  const int32_t half = 1 << (precision - 1);
  int32_t red = half, green = half, blue = half;
  const uint32_t* pixel = pixels + weights.first[place] * step;
  const int16_t* weight = weights.weights + static_cast<int64_t>(place) * axis.pitch;
  for (int32_t j = weights.count[place]; j > 0; --j, pixel += step, ++weight) {
    red += *weight * static_cast<int32_t>(*pixel & 255);
    green += *weight * static_cast<int32_t>(*pixel >> 8 & 255);
    blue += *weight * static_cast<int32_t>(*pixel >> 16 & 255);
  }
  return packed_rgb(clamped(red >> precision, 0, 255), clamped(green >> precision, 0, 255),
                    clamped(blue >> precision, 0, 255));
}

}  // namespace ts::jpeg
