// libjpeg-turbo's upsampling and colours: the pixels of the crop from the samples of its MCUs.
#pragma once

#include <cstdint>
#include <cstring>

#include "jpeg/plan.h"

namespace ts::jpeg {

// A component's samples. Sample (x, y) of the component is at `origin` + y * stride + x, modulo
// 2^32, among the image's samples. Only the samples of the crop's MCUs are in memory.
struct Plane {
  uint32_t origin, stride;
  int32_t first_x;  // the first column in memory
  // The last sample of a row and of a column; the nearest one is used outside.
  int32_t last_x, last_y;
  int32_t expand_x, expand_y;  // pixels of a sample
  bool fancy_x, fancy_y;       // whether samples are interpolated between neighbours
};

TS_HOST_DEVICE Plane plane_of(const Plan& plan, const Component& component) {
  const uint32_t stride = component.block_columns * 8;
  const uint32_t x = plan.mcu_x * static_cast<uint32_t>(component.across) * 8;
  const uint32_t y = plan.mcu_y * static_cast<uint32_t>(component.down) * 8;
  return {component.first_block * 64 - y * stride - x,
          stride,
          static_cast<int32_t>(x),
          component.width - 1,
          component.height - 1,
          component.expand_x,
          component.expand_y,
          component.fancy_x != 0,
          component.fancy_y != 0};
}

// Reports whether the pixels use the same positions in both planes.
TS_HOST_DEVICE bool alike(const Plane& a, const Plane& b) {
  return a.stride == b.stride && a.last_x == b.last_x && a.last_y == b.last_y &&
         a.expand_x == b.expand_x && a.expand_y == b.expand_y && a.fancy_x == b.fancy_x &&
         a.fancy_y == b.fancy_y;
}

// The samples of a plane, from its origin on, that a pixel's value is computed from: the sample
// that covers the pixel and, for the triangle filter, its nearest neighbours.
struct Reach {
  uint32_t here, beside, below, diagonal;
  int32_t right, lower;  // whether the pixel is in the sample's right half, and in its lower half
};

// Returns the sample that covers a pixel, if each sample expands to `expand` pixels, usually one. A
// GPU has no division instruction.
TS_HOST_DEVICE int32_t covering(int32_t pixel, int32_t expand) {
  return expand == 1 ? pixel : pixel / expand;
}

TS_HOST_DEVICE uint32_t place_at(const Plane& plane, int32_t column, int32_t row) {
  return static_cast<uint32_t>(row) * plane.stride + static_cast<uint32_t>(column);
}

TS_HOST_DEVICE Reach reach_of(const Plane& plane, int32_t x, int32_t y) {
  Reach reach = {};
  reach.right = x & 1;
  reach.lower = y & 1;
  const int32_t column =
      smaller(plane.fancy_x ? x >> 1 : covering(x, plane.expand_x), plane.last_x);
  const int32_t row = smaller(plane.fancy_y ? y >> 1 : covering(y, plane.expand_y), plane.last_y);
  reach.here = place_at(plane, column, row);
  if (!plane.fancy_x && !plane.fancy_y) return reach;
  const int32_t next_column = clamped(column + 2 * reach.right - 1, 0, plane.last_x);
  const int32_t next_row = clamped(row + 2 * reach.lower - 1, 0, plane.last_y);
  reach.beside = place_at(plane, next_column, row);
  reach.below = place_at(plane, column, next_row);
  reach.diagonal = place_at(plane, next_column, next_row);
  return reach;
}

// Returns a plane's value at a pixel, as jdsample.c computes it: by the triangle filter if the
// component has half as many samples, otherwise the sample that covers the pixel.
TS_HOST_DEVICE int32_t upsampled(const Plane& plane, const uint8_t* samples, const Reach& reach) {
  const auto at = [&](uint32_t place) -> int32_t { return samples[plane.origin + place]; };
  if (!plane.fancy_x && !plane.fancy_y) return at(reach.here);
  if (!plane.fancy_y) return (3 * at(reach.here) + at(reach.beside) + 1 + reach.right) >> 2;
  const int32_t here = 3 * at(reach.here) + at(reach.below);
  if (!plane.fancy_x) return (here + 1 + reach.lower) >> 2;
  const int32_t beside = 3 * at(reach.beside) + at(reach.diagonal);
  return (3 * here + beside + 8 - reach.right) >> 4;
}

// Packs three numbers, clamped to 0 to 255, into the low bytes of a word.
TS_HOST_DEVICE uint32_t packed_rgb(int32_t red, int32_t green, int32_t blue) {
#if defined(__CUDA_ARCH__)
  uint32_t high, all;
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(0), "r"(blue), "r"(0));
  asm("cvt.pack.sat.u8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(green), "r"(red), "r"(high));
  return all;
#else
  return static_cast<uint32_t>(clamped(red, 0, 255)) |
         static_cast<uint32_t>(clamped(green, 0, 255)) << 8 |
         static_cast<uint32_t>(clamped(blue, 0, 255)) << 16;
#endif
}

// Converts like jdcolext.c with the tables of jdcolor.c.
TS_HOST_DEVICE uint32_t rgb_of_ycc(int32_t y, int32_t cb, int32_t cr) {
  cb -= 128;
  cr -= 128;
  const int32_t red = y + ((91881 * cr + 32768) >> 16);
  const int32_t green = y + ((-22554 * cb - 46802 * cr + 32768) >> 16);
  const int32_t blue = y + ((116130 * cb + 32768) >> 16);
  return packed_rgb(red, green, blue);
}

// Data shared by all pixels of an image.
struct Picture {
  int32_t stored_x, stored_y, x_by_x, x_by_y, y_by_x, y_by_y;  // as in the plan
  uint8_t color;
  Plane plane[kMaxComponents];
  bool chroma_alike;  // the second plane and the third one
};

TS_HOST_DEVICE Picture picture_of(const Plan& plan) {
  Picture picture;
  picture.stored_x = plan.stored_x;
  picture.stored_y = plan.stored_y;
  picture.x_by_x = plan.x_by_x;
  picture.x_by_y = plan.x_by_y;
  picture.y_by_x = plan.y_by_x;
  picture.y_by_y = plan.y_by_y;
  picture.color = plan.color;
  for (int c = 0; c < kMaxComponents; ++c) {
    picture.plane[c] = plane_of(plan, plan.component[c]);
  }
  const Plane(&plane)[kMaxComponents] = picture.plane;
  picture.chroma_alike = alike(plane[1], plane[2]);
  return picture;
}

TS_HOST_DEVICE uint32_t pixel_of(const Picture& picture, int32_t first, int32_t second,
                                 int32_t third) {
  return picture.color == kYcc ? rgb_of_ycc(first, second, third)
                               : packed_rgb(first, second, third);
}

// Returns pixel (x, y) of the pixels that the resize needs.
TS_HOST_DEVICE uint32_t pixel_at(const Picture& picture, const uint8_t* samples, int32_t x,
                                 int32_t y) {
  const int32_t column = picture.stored_x + x * picture.x_by_x + y * picture.x_by_y;
  const int32_t row = picture.stored_y + x * picture.y_by_x + y * picture.y_by_y;
  const Plane(&plane)[kMaxComponents] = picture.plane;
  const int32_t first = upsampled(plane[0], samples, reach_of(plane[0], column, row));
  if (picture.color == kGrey) return packed_rgb(first, first, first);
  const Reach reach = reach_of(plane[1], column, row);
  const int32_t second = upsampled(plane[1], samples, reach);
  const int32_t third =
      upsampled(plane[2], samples, picture.chroma_alike ? reach : reach_of(plane[2], column, row));
  return pixel_of(picture, first, second, third);
}

// ---- eight pixels of a row at once -------------------------------------------------------------

// Loads four samples, from a multiple of four.
TS_HOST_DEVICE uint32_t four_samples(const uint8_t* from) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const uint32_t*>(from);
#else
  uint32_t word;
  std::memcpy(&word, from, sizeof word);
  return word;
#endif
}

// Returns a byte of a word.
TS_HOST_DEVICE int32_t byte_of(uint32_t word, int i) {
  return static_cast<int32_t>(word >> (8 * i) & 255);
}

// Eight samples of a row, from a column that is a multiple of eight.
struct Samples {
  uint32_t low, high;
  TS_HOST_DEVICE int32_t at(int i) const { return byte_of(i < 4 ? low : high, i % 4); }
};

TS_HOST_DEVICE Samples eight_samples(const Plane& plane, const uint8_t* samples, int32_t column,
                                     int32_t row) {
  const uint8_t* const from = samples + (plane.origin + place_at(plane, column, row));
#if defined(__CUDA_ARCH__)
  const uint2 words = *reinterpret_cast<const uint2*>(from);
  return {words.x, words.y};
#else
  return {four_samples(from), four_samples(from + 4)};
#endif
}

// Writes the values at eight pixels of a plane with half the columns and rows, by the triangle
// filter: see upsampled.
TS_HOST_DEVICE void eight_upsampled(const Plane& plane, const uint8_t* samples, int32_t x,
                                    int32_t y, int32_t values[kGroup]) {
  const int32_t column = x >> 1;
  const int32_t row = smaller(y >> 1, plane.last_y);
  const int32_t next = clamped(row + 2 * (y & 1) - 1, 0, plane.last_y);
  const auto sum = [&](int32_t at) {
    return 3 * samples[plane.origin + place_at(plane, at, row)] +
           samples[plane.origin + place_at(plane, at, next)];
  };
  // Sums for the sample to the left of the four, the four, and the sample to their right. Sums for
  // pixels that nobody needs may use any sample inside the plane.
  int32_t sums[6];
  sums[0] = sum(larger(column - 1, plane.first_x));
  const uint32_t near = four_samples(samples + (plane.origin + place_at(plane, column, row)));
  const uint32_t far = four_samples(samples + (plane.origin + place_at(plane, column, next)));
  TS_UNROLL
  for (int i = 0; i < 4; ++i) sums[1 + i] = 3 * byte_of(near, i) + byte_of(far, i);
  sums[5] = sum(smaller(column + 4, plane.last_x));
  TS_UNROLL
  for (int i = 1; i < 5; ++i) {
    if (column + i > plane.last_x) sums[1 + i] = sums[i];
  }
  TS_UNROLL
  for (int i = 0; i < 4; ++i) {
    values[2 * i] = (3 * sums[1 + i] + sums[i] + 8) >> 4;
    values[2 * i + 1] = (3 * sums[1 + i] + sums[2 + i] + 7) >> 4;
  }
}

// The planes of a picture whose pixels are computed eight at once.
struct GroupedPicture {
  Layout layout;
  Plane plane[kMaxComponents];

  TS_HOST_DEVICE explicit GroupedPicture(const Plan& plan) : layout(plan.layout) {
    for (int c = 0; c < kMaxComponents; ++c) {
      plane[c] = plane_of(plan, plan.component[c]);
      // Of eight pixels, unneeded ones may be outside the memory.
      plane[c].last_x =
          smaller(plane[c].last_x, plane[c].first_x + static_cast<int32_t>(plane[c].stride) - 1);
    }
  }

  // Writes eight pixels of a row of the stored image, starting at a column that is a multiple of
  // eight.
  TS_HOST_DEVICE void write(const uint8_t* samples, int32_t column, int32_t row,
                            uint32_t pixels[kGroup]) const {
    const Samples first = eight_samples(plane[0], samples, column, row);
    if (layout == Layout::kHalved) {
      int32_t second[kGroup];
      int32_t third[kGroup];
      eight_upsampled(plane[1], samples, column, row, second);
      eight_upsampled(plane[2], samples, column, row, third);
      TS_UNROLL
      for (int i = 0; i < kGroup; ++i) pixels[i] = rgb_of_ycc(first.at(i), second[i], third[i]);
    } else if (layout == Layout::kWhole) {
      const Samples second = eight_samples(plane[1], samples, column, row);
      const Samples third = eight_samples(plane[2], samples, column, row);
      TS_UNROLL
      for (int i = 0; i < kGroup; ++i) {
        pixels[i] = rgb_of_ycc(first.at(i), second.at(i), third.at(i));
      }
    } else {
      TS_UNROLL
      for (int i = 0; i < kGroup; ++i) pixels[i] = static_cast<uint32_t>(first.at(i)) * 0x010101;
    }
  }
};

}  // namespace ts::jpeg
