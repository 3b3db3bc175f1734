// The stages of decoding a plan, as functions of one thread's work each. The device's kernels
// (decode/decode.cu) and the tests' loops over the same indexes call them.
#pragma once

#include <cstdint>

#include "jpeg/huffman.h"
#include "jpeg/idct.h"
#include "jpeg/pixels.h"
#include "jpeg/plan.h"
#include "jpeg/resample.h"

namespace ts::jpeg {

// The memory of one image.
struct Memory {
  const uint8_t* base;  // the plan
  int16_t* coefficients;
  uint8_t* samples;
  uint32_t* pixels;   // source rows of source columns
  uint32_t* columns;  // source rows of resized columns
  uint8_t* weights;   // of x, then of y
  uint8_t* result;
};

TS_HOST_DEVICE const Plan& plan_at(const uint8_t* base) {
  return *reinterpret_cast<const Plan*>(base);
}

TS_HOST_DEVICE Memory memory_of(const Place& place, const uint8_t* staging, uint8_t* scratch,
                                uint8_t* results) {
  Memory memory;
  memory.base = staging + place.plan;
  memory.coefficients = reinterpret_cast<int16_t*>(scratch + place.coefficients);
  memory.samples = scratch + place.samples;
  memory.pixels = reinterpret_cast<uint32_t*>(scratch + place.pixels);
  memory.columns = reinterpret_cast<uint32_t*>(scratch + place.columns);
  memory.weights = scratch + place.weights;
  memory.result = results + place.result;
  return memory;
}

TS_HOST_DEVICE const uint16_t* quantisers_of(const Plan& plan, const Memory& memory,
                                             int32_t component) {
  return reinterpret_cast<const uint16_t*>(memory.base + plan.quantisers_at) + component * 64;
}

// Where block `index` of an image is: its component, and its top left sample.
struct BlockPlace {
  int32_t component;
  uint32_t sample;
  uint32_t stride;
};

TS_HOST_DEVICE BlockPlace place_of_block(const Plan& plan, uint32_t index) {
  int32_t c = 0;
  if (plan.components > 1 && index >= plan.component[1].first_block) c = 1;
  if (plan.components > 2 && index >= plan.component[2].first_block) c = 2;
  const Component& component = plan.component[c];
  const uint32_t block = index - component.first_block;
  const uint32_t columns = component.block_columns;
  uint32_t row = high_product(block, component.per_column);  // or one less
  uint32_t column = block - row * columns;
  if (column >= columns) {
    column -= columns;
    ++row;
  }
  return {c, (component.first_block + row * columns) * 64 + column * 8, columns * 8};
}

// The places of a picture that one thread works on: `count` of them, or as many as there are, from
// index `first` on and `step` apart, so that the threads of a warp have neighbours.
struct Places {
  int32_t first, step, count;
};

// Calls use(index, x, y) for places of a picture of `all` pixels. It divides once.
template <typename Use>
TS_HOST_DEVICE void each_place(const Places& places, int32_t width, int32_t all, Use use) {
  const int32_t rows = places.step / width;
  const int32_t columns = places.step - rows * width;
  int32_t index = places.first;
  int32_t y = index / width;
  int32_t x = index - y * width;
  for (int32_t i = 0; i < places.count && index < all; ++i) {
    use(index, x, y);
    index += places.step;
    y += rows;
    x += columns;
    if (x >= width) {
      x -= width;
      ++y;
    }
  }
}

// The stages below copy what they need of the plan, since a compiler must expect a store to change
// what a reference refers to, and would load it again for each pixel.

TS_HOST_DEVICE int32_t pixel_count(const Plan& plan) {
  return plan.x.source_size * plan.y.source_size;
}

TS_HOST_DEVICE void write_pixels(const Plan& plan, const Memory& memory, const Places& places) {
  const int32_t count = pixel_count(plan);
  if (places.first >= count) return;
  const Picture picture = picture_of(plan);
  const uint8_t* const samples = memory.samples;
  uint32_t* const pixels = memory.pixels;
  each_place(places, plan.x.source_size, count, [&](int32_t index, int32_t x, int32_t y) {
    pixels[index] = pixel_at(picture, samples, x, y);
  });
}

TS_HOST_DEVICE int32_t column_count(const Plan& plan) { return plan.x.size * plan.y.source_size; }

TS_HOST_DEVICE void write_columns(const Plan& plan, const Memory& memory, const Places& places) {
  const int32_t count = column_count(plan);
  if (places.first >= count) return;
  const Axis axis = plan.x;
  const Weights weights = weights_at(axis, memory.weights);
  const int32_t precision = precision_at(axis, weights);
  const uint32_t* const pixels = memory.pixels;
  uint32_t* const columns = memory.columns;
  each_place(places, axis.size, count, [&](int32_t index, int32_t x, int32_t y) {
    columns[index] = resampled(axis, weights, precision, x, pixels + y * axis.source_size, 1);
  });
}

TS_HOST_DEVICE int32_t result_count(const Plan& plan) { return plan.x.size * plan.y.size; }

TS_HOST_DEVICE void write_rgb(uint8_t* to, uint32_t rgb) {
  to[0] = static_cast<uint8_t>(rgb);
  to[1] = static_cast<uint8_t>(rgb >> 8);
  to[2] = static_cast<uint8_t>(rgb >> 16);
}

// Calls store(index, rgb) for the pixels of the result.
template <typename Store>
TS_HOST_DEVICE void each_result(const Plan& plan, const Memory& memory, const Places& places,
                                Store store) {
  const int32_t count = result_count(plan);
  if (places.first >= count) return;
  const Axis axis = plan.y;
  const int32_t width = plan.x.size;
  const Weights weights = weights_at(axis, memory.weights + weights_bytes(plan.x));
  const int32_t precision = precision_at(axis, weights);
  const uint32_t* const columns = memory.columns;
  each_place(places, width, count, [&](int32_t index, int32_t x, int32_t y) {
    store(index, resampled(axis, weights, precision, y, columns + x, width));
  });
}

}  // namespace ts::jpeg
