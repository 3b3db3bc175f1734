// libjpeg-turbo's upsampling and colours: the pixels of the crop from the samples of its MCUs.
#pragma once

#include <cstdint>

#include "jpeg/plan.h"

namespace ts::jpeg {

// Returns the sample that covers a pixel, of which each expands to so many: mostly to one. A GPU
// has no instruction that divides.
TS_HOST_DEVICE int32_t covering(int32_t pixel, int32_t expand) {
  return expand == 1 ? pixel : pixel / expand;
}

// Returns a sample by its place in the component. Outside of it the nearest sample counts.
TS_HOST_DEVICE int32_t sample_at(const Plan& plan, const Component& component,
                                 const uint8_t* samples, int32_t x, int32_t y) {
  x = clamped(x, 0, component.width - 1) - static_cast<int32_t>(plan.mcu_x) * component.across * 8;
  y = clamped(y, 0, component.height - 1) - static_cast<int32_t>(plan.mcu_y) * component.down * 8;
  // An image's samples are less than kMaxPlanScratch.
  return samples[component.first_block * 64 +
                 static_cast<uint32_t>(y) * component.block_columns * 8 + static_cast<uint32_t>(x)];
}

// Returns a component at pixel (x, y) of the stored image, as jdsample.c computes it: the triangle
// filter if the component has half as many samples, or else the sample that covers the pixel.
TS_HOST_DEVICE int32_t upsampled(const Plan& plan, const Component& component,
                                 const uint8_t* samples, int32_t x, int32_t y) {
  const auto at = [&](int32_t column, int32_t row) {
    return sample_at(plan, component, samples, column, row);
  };
  if (component.fancy_x == 0 && component.fancy_y == 0) {
    return at(covering(x, component.expand_x), covering(y, component.expand_y));
  }
  const int32_t right = x & 1;
  const int32_t below = y & 1;
  const int32_t column = component.fancy_x != 0 ? x >> 1 : covering(x, component.expand_x);
  const int32_t row = component.fancy_y != 0 ? y >> 1 : covering(y, component.expand_y);
  const int32_t next_column = right != 0 ? column + 1 : column - 1;
  const int32_t next_row = below != 0 ? row + 1 : row - 1;
  if (component.fancy_y == 0) {
    return (3 * at(column, row) + at(next_column, row) + 1 + right) >> 2;
  }
  const int32_t here = 3 * at(column, row) + at(column, next_row);
  if (component.fancy_x == 0) return (here + 1 + below) >> 2;
  const int32_t beside = 3 * at(next_column, row) + at(next_column, next_row);
  return (3 * here + beside + 8 - right) >> 4;
}

// Packs three bytes into the low bytes of a word.
TS_HOST_DEVICE uint32_t packed_rgb(int32_t red, int32_t green, int32_t blue) {
  return static_cast<uint32_t>(red) | static_cast<uint32_t>(green) << 8 |
         static_cast<uint32_t>(blue) << 16;
}

// Converts like jdcolext.c with the tables of jdcolor.c.
TS_HOST_DEVICE uint32_t rgb_of_ycc(int32_t y, int32_t cb, int32_t cr) {
  cb -= 128;
  cr -= 128;
  const int32_t red = y + ((91881 * cr + 32768) >> 16);
  const int32_t green = y + ((-22554 * cb - 46802 * cr + 32768) >> 16);
  const int32_t blue = y + ((116130 * cb + 32768) >> 16);
  return packed_rgb(clamped(red, 0, 255), clamped(green, 0, 255), clamped(blue, 0, 255));
}

// Returns pixel (x, y) of those that the resize needs.
TS_HOST_DEVICE uint32_t pixel_at(const Plan& plan, const uint8_t* samples, int32_t x, int32_t y) {
  const int32_t column = plan.stored_x + x * plan.x_by_x + y * plan.x_by_y;
  const int32_t row = plan.stored_y + x * plan.y_by_x + y * plan.y_by_y;
  const int32_t first = upsampled(plan, plan.component[0], samples, column, row);
  if (plan.color == kGrey) return packed_rgb(first, first, first);
  const int32_t second = upsampled(plan, plan.component[1], samples, column, row);
  const int32_t third = upsampled(plan, plan.component[2], samples, column, row);
  return plan.color == kYcc ? rgb_of_ycc(first, second, third) : packed_rgb(first, second, third);
}

}  // namespace ts::jpeg
