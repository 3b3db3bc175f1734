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
  uint64_t sample;
  uint32_t stride;
};

TS_HOST_DEVICE BlockPlace place_of_block(const Plan& plan, uint32_t index) {
  int32_t c = 0;
  if (plan.components > 1 && index >= plan.component[1].first_block) c = 1;
  if (plan.components > 2 && index >= plan.component[2].first_block) c = 2;
  const Component& component = plan.component[c];
  const uint32_t block = index - component.first_block;
  const uint32_t row = block / component.block_columns;
  const uint32_t column = block - row * component.block_columns;
  const uint32_t stride = component.block_columns * 8;
  return {c, uint64_t{component.first_block} * 64 + uint64_t{row} * 8 * stride + column * 8,
          stride};
}

TS_HOST_DEVICE int32_t pixel_count(const Plan& plan) {
  return plan.x.source_size * plan.y.source_size;
}

TS_HOST_DEVICE void write_pixel(const Plan& plan, const Memory& memory, int32_t index) {
  const int32_t y = index / plan.x.source_size;
  const int32_t x = index - y * plan.x.source_size;
  memory.pixels[index] = pixel_at(plan, memory.samples, x, y);
}

TS_HOST_DEVICE int32_t column_count(const Plan& plan) { return plan.x.size * plan.y.source_size; }

TS_HOST_DEVICE void write_column(const Plan& plan, const Memory& memory, int32_t index) {
  const int32_t y = index / plan.x.size;
  const int32_t x = index - y * plan.x.size;
  const Weights weights = weights_at(plan.x, memory.weights);
  memory.columns[index] = resampled(
      plan.x, weights, x, memory.pixels + static_cast<int64_t>(y) * plan.x.source_size, 1);
}

TS_HOST_DEVICE int32_t result_count(const Plan& plan) { return plan.x.size * plan.y.size; }

TS_HOST_DEVICE void write_result(const Plan& plan, const Memory& memory, int32_t index) {
  const int32_t y = index / plan.x.size;
  const int32_t x = index - y * plan.x.size;
  const Weights weights = weights_at(plan.y, memory.weights + weights_bytes(plan.x));
  const uint32_t rgb = resampled(plan.y, weights, y, memory.columns + x, plan.x.size);
  uint8_t* const to = memory.result + static_cast<int64_t>(index) * 3;
  to[0] = static_cast<uint8_t>(rgb);
  to[1] = static_cast<uint8_t>(rgb >> 8);
  to[2] = static_cast<uint8_t>(rgb >> 16);
}

}  // namespace ts::jpeg
