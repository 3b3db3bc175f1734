// The stages of decoding a plan, as functions of one thread's work. The device's kernels
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
  uint8_t* room;      // for operations
  uint32_t* columns;  // source rows of resized columns
  uint8_t* weights;   // of x, followed by those of y
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
  memory.room = scratch + place.room;
  memory.columns = reinterpret_cast<uint32_t*>(scratch + place.columns);
  memory.weights = scratch + place.weights;
  memory.result = results + place.result;
  return memory;
}

TS_HOST_DEVICE const uint16_t* quantisers_of(const Plan& plan, const Memory& memory,
                                             int32_t component) {
  return reinterpret_cast<const uint16_t*>(memory.base + plan.quantisers_at) + component * 64;
}

// The position of block `index` of an image: its component, and its top left sample.
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
  uint32_t row = high_product(block, component.column_reciprocal);  // or one too few
  uint32_t column = block - row * columns;
  if (column >= columns) {
    column -= columns;
    ++row;
  }
  return {c, (component.first_block + row * columns) * 64 + column * 8, columns * 8};
}

// The pixels of a picture that one thread processes: from index `first` on, `step` apart, so that
// the threads of a warp have neighbours.
struct Places {
  int32_t first, step;
};

// Iterates over pixels of a picture of this width. It divides twice.
class Walk {
 public:
  TS_HOST_DEVICE Walk(const Places& places, int32_t width)
      : places_(places),
        width_(width),
        y_(quotient(places.first, width)),
        x_(places.first - y_ * width),
        rows_(quotient(places.step, width)),
        columns_(places.step - rows_ * width) {}

  // Calls use(index, x, y) for the pixels before index `end`.
  template <typename Use>
  TS_HOST_DEVICE void each(int32_t end, Use use) const {
    int32_t y = y_;
    int32_t x = x_;
    TS_NO_UNROLL
    for (int32_t index = places_.first; index < end; index += places_.step) {
      use(index, x, y);
      y += rows_;
      x += columns_;
      if (x >= width_) {
        x -= width_;
        ++y;
      }
    }
  }

 private:
  TS_HOST_DEVICE static int32_t quotient(int32_t a, int32_t b) {
    return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
  }

  Places places_;
  int32_t width_, y_, x_, rows_, columns_;
};

// The stages below copy what they need of the plan, since a compiler must expect a store to change
// what a reference refers to, and would load it again for each pixel.

// The words of a strip in memory. Weights are in pairs, so the pixel after the last may be read:
// its weight is 0, whatever the memory contains.
constexpr int32_t kStripWords = kStripPixels + 4;

// Returns the number of strips of an image.
TS_HOST_DEVICE int32_t strip_count(const Plan& plan) {
  const int32_t rows = larger(plan.strip_rows, 1);
  return (plan.y.source_size + rows - 1) / rows;
}

TS_HOST_DEVICE void copy_group(uint32_t* to, const uint32_t pixels[kGroup]) {
#if defined(__CUDA_ARCH__)
  auto* const words = reinterpret_cast<uint4*>(to);
  words[0] = make_uint4(pixels[0], pixels[1], pixels[2], pixels[3]);
  words[1] = make_uint4(pixels[4], pixels[5], pixels[6], pixels[7]);
#else
  for (int i = 0; i < kGroup; ++i) to[i] = pixels[i];
#endif
}

// Computes a thread's part of the pixels of strips from `first` to `end`, and calls filled(index)
// after each. A team of threads synchronises in that call.
template <typename Filled>
TS_HOST_DEVICE void fill_strips(const Plan& plan, const Memory& memory, const Places& places,
                                int32_t first, int32_t end, uint32_t* strip, Filled filled) {
  const uint8_t* const samples = memory.samples;
  const int32_t rows = plan.strip_rows;
  const int32_t height = plan.y.source_size;
  if (rows == 0) {
    for (int32_t index = first; index < end; ++index) filled(index);
  } else if (plan.layout == Layout::kAny) {
    const Picture picture = picture_of(plan);
    const int32_t width = plan.strip_pitch;
    const Walk walk(places, width);
    for (int32_t index = first; index < end; ++index) {
      const int32_t top = index * rows;
      walk.each(smaller(rows, height - top) * width, [&](int32_t at, int32_t x, int32_t y) {
        strip[at] = pixel_at(picture, samples, x, top + y);
      });
      filled(index);
    }
  } else {
    const GroupedPicture picture(plan);
    const int32_t width = plan.strip_pitch / kGroup;
    const int32_t column = plan.stored_x - plan.strip_offset;
    const int32_t row = plan.stored_y;
    const int32_t down = plan.y_by_y;
    const Walk walk(places, width);
    for (int32_t index = first; index < end; ++index) {
      const int32_t top = index * rows;
      walk.each(smaller(rows, height - top) * width, [&](int32_t at, int32_t x, int32_t y) {
        uint32_t pixels[kGroup];
        picture.write(samples, column + x * kGroup, row + (top + y) * down, pixels);
        copy_group(strip + at * kGroup, pixels);
      });
      filled(index);
    }
  }
}

// Resamples a thread's part of the columns of a strip, or of a row whose pixels have no room in the
// strip.
class ColumnWriter {
 public:
  TS_HOST_DEVICE ColumnWriter(const Plan& plan, const Memory& memory, const Places& places)
      : plan_(plan),
        axis_(plan.x),
        weights_(weights_at(axis_, memory.weights)),
        precision_(precision_at(axis_, weights_)),
        samples_(memory.samples),
        columns_(memory.columns),
        offset_(plan.strip_offset),
        pitch_(plan.strip_pitch),
        rows_(plan.strip_rows),
        height_(plan.y.source_size),
        walk_(places, axis_.size) {}

  TS_HOST_DEVICE void write(int32_t index, const uint32_t* strip) const {
    if (rows_ == 0) return write_slowly(index);
    const int32_t first = index * rows_;
    const int32_t last = smaller(rows_, height_ - first) - 1;
    const int32_t all = (last / kRowsAtOnce + 1) * axis_.size;
    walk_.each(all, [&](int32_t, int32_t x, int32_t y) {
      const uint32_t* row[kRowsAtOnce];
      TS_UNROLL
      for (int32_t i = 0; i < kRowsAtOnce; ++i) {
        row[i] = strip + smaller(y * kRowsAtOnce + i, last) * pitch_ + offset_;
      }
      uint32_t out[kRowsAtOnce];
      resample_rows(axis_, weights_, precision_, x, row, out);
      uint32_t* const to = columns_ + ((first + y * kRowsAtOnce) * axis_.size + x);
      TS_UNROLL
      for (int32_t i = 0; i < kRowsAtOnce; ++i) {
        if (y * kRowsAtOnce + i <= last) to[i * axis_.size] = out[i];
      }
    });
  }

 private:
  TS_HOST_DEVICE void write_slowly(int32_t row) const {
    const Picture picture = picture_of(plan_);
    walk_.each(axis_.size, [&](int32_t, int32_t x, int32_t) {
      columns_[row * axis_.size + x] =
          resample_slowly(axis_, weights_, precision_, x,
                          [&](int32_t column) { return pixel_at(picture, samples_, column, row); });
    });
  }

  const Plan& plan_;
  const Axis axis_;
  const Weights weights_;
  const int32_t precision_;
  const uint8_t* const samples_;
  uint32_t* const columns_;
  const int32_t offset_, pitch_, rows_, height_;
  const Walk walk_;
};

TS_HOST_DEVICE int32_t result_count(const Plan& plan) { return plan.x.size * plan.y.size; }

TS_HOST_DEVICE void write_rgb(uint8_t* to, uint32_t rgb) {
  to[0] = static_cast<uint8_t>(rgb);
  to[1] = static_cast<uint8_t>(rgb >> 8);
  to[2] = static_cast<uint8_t>(rgb >> 16);
}

// Writes four pixels, to a multiple of four bytes.
TS_HOST_DEVICE void write_four(uint8_t* to, const FourPixels& rgb) {
#if defined(__CUDA_ARCH__)
  auto* const words = reinterpret_cast<uint32_t*>(to);
  words[0] = __byte_perm(rgb.at[0], rgb.at[1], 0x4210);
  words[1] = __byte_perm(rgb.at[1], rgb.at[2], 0x5421);
  words[2] = __byte_perm(rgb.at[2], rgb.at[3], 0x6542);
#else
  for (int i = 0; i < 4; ++i) write_rgb(to + 3 * i, rgb.at[i]);
#endif
}

// Writes a thread's pixels of the result to `to`: from index `begin` to `end`, which a team of
// `threads` threads covers together. Both are multiples of four, or `end` is the result's end.
TS_HOST_DEVICE void write_results(const Plan& plan, const Memory& memory, int32_t thread,
                                  int32_t threads, int32_t begin, int32_t end, uint8_t* to) {
  const Axis axis = plan.y;
  const int32_t width = plan.x.size;
  const Weights weights = weights_at(axis, memory.weights + weights_bytes(plan.x));
  const int32_t precision = precision_at(axis, weights);
  const uint32_t* const columns = memory.columns;
  if (width % 4 == 0) {  // four neighbours are in one row
    const Walk walk({begin / 4 + thread, threads}, width / 4);
    walk.each(end / 4, [&](int32_t index, int32_t x, int32_t y) {
      write_four(to + (index * 4 - begin) * 3,
                 resample_columns(axis, weights, precision, y, columns + x * 4, width));
    });
    return;
  }
  Walk({begin + thread, threads}, width).each(end, [&](int32_t index, int32_t x, int32_t y) {
    write_rgb(to + (index - begin) * 3, resampled(axis, weights, precision, y, columns + x, width));
  });
}

}  // namespace ts::jpeg
