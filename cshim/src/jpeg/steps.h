// The steps of a plan: operations of torchvision's transforms on the resized pixels, by a team of
// threads. A team is a block of a GPU (decode/decode.cu) or a loop on the host (jpeg/loops.h). It
// has
//   each(count, f)   calls f(0) to f(count - 1), in any order; then all threads have done so
//   add(at)          adds one to a number that several threads add to
// Every access is inside the image or its room, whatever the parameters.
#pragma once

#include <cstdint>

#include "jpeg/augment.h"
#include "jpeg/stages.h"
#include "torchstream_image.h"

namespace ts::jpeg {

// Reports whether run_steps runs an operation of this kind.
constexpr bool has_step(int32_t kind) {
  return kind >= TS_AUGMENT_FLIP_HORIZONTAL && kind <= TS_AUGMENT_MIX;
}

// The maximum number of pixels that a blur processes at a time, including the margins, and of rows.
// A thread computes a byte of each row.
constexpr int32_t kBlurPixels = 2048;
constexpr int32_t kBlurRows = 8;
static_assert(kBlurPixels > kMaxBlur, "a tile has more pixels than those beside it");

// The data that the threads of a team share.
struct StepState {
  int32_t counts[3][256];  // for the values of each channel, or for the grey values in the first
  uint8_t table[3][256];   // the replacement of the values of each channel
  float blurred[kBlurPixels * 3];              // blurred vertically only
  float across[kMaxBlur];                      // the weights of a blur
  float down[kMaxBlur + 2 * (kBlurRows - 1)];  // with zeros before and after them
};

// An image, and room for another one of its size.
struct Canvas {
  uint8_t* image;
  uint8_t* room;
  int32_t width, height;
  // The original image of a mixture, and the sum of images: null if the plan has no mixture.
  uint8_t* kept;
  float* sum;
};

TS_HOST_DEVICE const ts_augment_op* steps_of(const Plan& plan, const uint8_t* base) {
  return reinterpret_cast<const ts_augment_op*>(base + plan.steps_at);
}

// Calls f(x, y, pixel) for each pixel.
template <typename Team, typename F>
TS_DEVICE void each_pixel(Team& team, const Canvas& canvas, uint8_t* pixels, F f) {
  team.each(canvas.width * canvas.height, [&](int32_t i) {
    const int32_t y = i / canvas.width;
    f(i - y * canvas.width, y, pixels + static_cast<int64_t>(i) * 3);
  });
}

// Swaps the image and the room.
TS_HOST_DEVICE void exchange(Canvas* canvas) {
  uint8_t* const image = canvas->room;
  canvas->room = canvas->image;
  canvas->image = image;
}

// Calls f(x, y, pixel) for each pixel of the room, which then becomes the image.
template <typename Team, typename F>
TS_DEVICE void redraw(Team& team, Canvas* canvas, F f) {
  each_pixel(team, *canvas, canvas->room, f);
  exchange(canvas);
}

TS_HOST_DEVICE void copy_pixel(const uint8_t* from, uint8_t* to) {
  to[0] = from[0];
  to[1] = from[1];
  to[2] = from[2];
}

// Returns the image as the source of an operation, with the colour of the surroundings.
TS_HOST_DEVICE Sampled source_of(const Canvas& canvas, const int32_t* fill) {
  Sampled from = {canvas.image, canvas.width, canvas.height, {}, true};
  for (int c = 0; c < 3; ++c) from.fill[c] = static_cast<uint8_t>(fill[c]);
  return from;
}

TS_HOST_DEVICE void copy_from(const Sampled& from, int32_t x, int32_t y, uint8_t* to) {
  const bool inside = x >= 0 && x < from.width && y >= 0 && y < from.height;
  copy_pixel(inside ? pixel_of(from, x, y) : from.fill, to);
}

// ---- operations that replace bytes by a table --------------------------------------------------

template <typename Team>
TS_DEVICE void count_values(Team& team, const Canvas& canvas, bool greys, StepState* state) {
  team.each(3 * 256, [&](int32_t i) { state->counts[i / 256][i % 256] = 0; });
  each_pixel(team, canvas, canvas.image, [&](int32_t, int32_t, const uint8_t* pixel) {
    if (greys) {
      team.add(&state->counts[0][cut(grey(pixel[0], pixel[1], pixel[2]))]);
    } else {
      for (int c = 0; c < 3; ++c) team.add(&state->counts[c][pixel[c]]);
    }
  });
}

TS_HOST_DEVICE float mean_value(const int32_t* counts, int32_t pixels) {
  int64_t sum = 0;
  for (int32_t i = 0; i < 256; ++i) sum += static_cast<int64_t>(counts[i]) * i;
  return static_cast<float>(sum) / static_cast<float>(pixels);
}

TS_HOST_DEVICE int32_t lowest_value(const int32_t* counts) {
  int32_t low = 0;
  while (low < 255 && counts[low] == 0) ++low;
  return low;
}

TS_HOST_DEVICE int32_t highest_value(const int32_t* counts) {
  int32_t high = 255;
  while (high > 0 && counts[high] == 0) --high;
  return high;
}

TS_HOST_DEVICE uint8_t equalized_by(const int32_t* counts, int32_t pixels, int32_t byte) {
  int32_t below = 0;
  for (int32_t i = 0; i < byte; ++i) below += counts[i];
  return equalized(byte, below, (pixels - counts[highest_value(counts)]) / 255);
}

// Returns the replacement of a byte whose channel has these counts.
TS_HOST_DEVICE uint8_t replaced(const ts_augment_op& op, const StepState& state, int32_t channel,
                                int32_t byte, int32_t pixels) {
  const int32_t* const counts = state.counts[channel];
  const auto value = static_cast<float>(op.values[0]);
  switch (op.kind) {
    case TS_AUGMENT_BRIGHTNESS:
      return brightened(byte, value);
    case TS_AUGMENT_CONTRAST:
      return blended(byte, value, static_cast<float>(1.0 - op.values[0]),
                     mean_value(state.counts[0], pixels));
    case TS_AUGMENT_INVERT:
      return static_cast<uint8_t>(255 - byte);
    case TS_AUGMENT_SOLARIZE:
      return solarized(byte, value);
    case TS_AUGMENT_POSTERIZE:
      return posterized(byte, clamped(op.integers[0], 0, 8));
    case TS_AUGMENT_AUTOCONTRAST:
      return stretched(byte, stretch_of(lowest_value(counts), highest_value(counts)));
    default:
      return equalized_by(counts, pixels, byte);
  }
}

template <typename Team>
TS_DEVICE void replace_bytes(Team& team, const ts_augment_op& op, const Canvas& canvas,
                             StepState* state) {
  const bool greys = op.kind == TS_AUGMENT_CONTRAST;
  if (greys || op.kind == TS_AUGMENT_AUTOCONTRAST || op.kind == TS_AUGMENT_EQUALIZE) {
    count_values(team, canvas, greys, state);
  }
  team.each(3 * 256, [&](int32_t i) {
    state->table[i / 256][i % 256] =
        replaced(op, *state, i / 256, i % 256, canvas.width * canvas.height);
  });
  each_pixel(team, canvas, canvas.image, [&](int32_t, int32_t, uint8_t* pixel) {
    for (int c = 0; c < 3; ++c) pixel[c] = state->table[c][pixel[c]];
  });
}

// ---- operations on the colours of a pixel ------------------------------------------------------

template <typename Team>
TS_DEVICE void change_colors(Team& team, const ts_augment_op& op, const Canvas& canvas) {
  const auto value = static_cast<float>(op.values[0]);
  const auto rest = static_cast<float>(1.0 - op.values[0]);
  const int32_t* const in = op.integers;
  each_pixel(team, canvas, canvas.image, [&](int32_t x, int32_t y, uint8_t* pixel) {
    const uint8_t from[3] = {pixel[0], pixel[1], pixel[2]};
    switch (op.kind) {
      case TS_AUGMENT_SATURATION:
        saturate(pixel, value, rest);
        break;
      case TS_AUGMENT_GRAYSCALE:
        make_grey(pixel);
        break;
      case TS_AUGMENT_PERMUTE:
        for (int c = 0; c < 3; ++c) pixel[c] = from[clamped(in[c], 0, 2)];
        break;
      case TS_AUGMENT_ERASE:
        if (x >= in[0] && x - in[0] < in[2] && y >= in[1] && y - in[1] < in[3]) {
          for (int c = 0; c < 3; ++c) pixel[c] = static_cast<uint8_t>(in[4 + c]);
        }
        break;
      default: {  // hue
        float color[3];
        for (int c = 0; c < 3; ++c) color[c] = times(static_cast<float>(from[c]), kPerByte);
        turn_hue(&color[0], &color[1], &color[2], value);
        for (int c = 0; c < 3; ++c) pixel[c] = cut(color[c]);
      }
    }
  });
}

// ---- operations that compute a pixel from others -----------------------------------------------

// Flips, turns (a square, or by a half), crops and pads.
template <typename Team>
TS_DEVICE void move_pixels(Team& team, const ts_augment_op& op, Canvas* canvas) {
  const int32_t* const in = op.integers;
  const int32_t last_x = canvas->width - 1;
  const int32_t last_y = canvas->height - 1;
  const Sampled from = source_of(*canvas, in + 5);
  redraw(team, canvas, [&](int32_t x, int32_t y, uint8_t* to) {
    int32_t from_x = x;
    int32_t from_y = y;
    switch (op.kind) {
      case TS_AUGMENT_FLIP_HORIZONTAL:
        from_x = last_x - x;
        break;
      case TS_AUGMENT_FLIP_VERTICAL:
        from_y = last_y - y;
        break;
      case TS_AUGMENT_QUARTER_TURNS:  // counter-clockwise, as torch.rot90 turns
        if (in[0] == 1 || in[0] == 2) from_x = last_x - (in[0] == 1 ? y : x);
        if (in[0] == 3) from_x = y;
        if (in[0] == 2 || in[0] == 3) from_y = last_y - (in[0] == 3 ? x : y);
        if (in[0] == 1) from_y = x;
        break;
      default:  // crop
        from_x = padded(in[0] + x, from.width, in[4]);
        from_y = padded(in[1] + y, from.height, in[4]);
    }
    copy_from(from, from_x, from_y, to);
  });
}

template <typename Team>
TS_DEVICE void sharpen(Team& team, const ts_augment_op& op, Canvas* canvas) {
  const int32_t last_x = canvas->width - 1;
  const int32_t last_y = canvas->height - 1;
  const auto rest = static_cast<float>(1.0 - op.values[0]);
  const int64_t row = static_cast<int64_t>(canvas->width) * 3;
  const uint8_t* const image = canvas->image;
  redraw(team, canvas, [&](int32_t x, int32_t y, uint8_t* to) {
    const uint8_t* const here = image + y * row + x * 3;
    if (x == 0 || y == 0 || x == last_x || y == last_y) {
      copy_pixel(here, to);
      return;
    }
    for (int c = 0; c < 3; ++c) {
      to[c] = sharpened(here + c - row, here + c, here + c + row, rest);
    }
  });
}

// Runs an affine transform or a perspective.
template <typename Team>
TS_DEVICE void warp(Team& team, const ts_augment_op& op, Canvas* canvas) {
  const bool affine = op.kind == TS_AUGMENT_AFFINE;
  const bool whole = op.integers[0] == TS_INTERPOLATION_NEAREST;
  const Grid grid = grid_of(op.values, affine ? 6 : 8, canvas->width, canvas->height);
  const float first_x = affine ? first_place(canvas->width) : 0.5F;
  const float first_y = affine ? first_place(canvas->height) : 0.5F;
  Sampled from = source_of(*canvas, op.integers + 2);
  from.filled = op.integers[1] != 0;
  if (!from.filled) from.fill[0] = from.fill[1] = from.fill[2] = 0;
  redraw(team, canvas, [&](int32_t x, int32_t y, uint8_t* to) {
    float source_x, source_y;
    const float at_x = first_x + static_cast<float>(x);
    const float at_y = first_y + static_cast<float>(y);
    if (affine) {
      affine_source(grid, at_x, at_y, &source_x, &source_y);
    } else {
      perspective_source(grid, at_x, at_y, &source_x, &source_y);
    }
    if (whole) {
      sample_nearest(from, source_x, source_y, to);
    } else {
      sample_bilinear(from, source_x, source_y, to);
    }
  });
}

// ---- blur --------------------------------------------------------------------------------------

// The kernel of a blur. Its weights are in the plan, because the device's exponential function
// differs from the host's: i[2] of the operation is their position, written by plan_augment.
struct BlurKernel {
  int32_t width, height;
  const float* across;
  const float* down;
};

// Returns the size in bytes of a kernel's weights: for a row, then for a column.
TS_HOST_DEVICE uint32_t blur_bytes(int32_t width, int32_t height) {
  return static_cast<uint32_t>(width + height) * static_cast<uint32_t>(sizeof(float));
}

// Finds the kernel of a blur. Returns false if damaged parameters are out of range.
TS_HOST_DEVICE bool find_kernel(const Plan& plan, const uint8_t* base, const ts_augment_op& op,
                                const Canvas& canvas, BlurKernel* kernel) {
  const int32_t width = op.integers[0];
  const int32_t height = op.integers[1];
  const auto at = static_cast<uint32_t>(op.integers[2]);
  if (width < 1 || height < 1 || width > kMaxBlur || height > kMaxBlur ||
      width / 2 >= canvas.width || height / 2 >= canvas.height) {
    return false;
  }
  const uint32_t bytes = blur_bytes(width, height);
  if (at % sizeof(float) != 0 || at > plan.bytes || bytes > plan.bytes - at) return false;
  kernel->width = width;
  kernel->height = height;
  kernel->across = reinterpret_cast<const float*>(base + at);
  kernel->down = kernel->across + width;
  return true;
}

// Copies the weights of a blur. A weight of 0 adds exactly nothing.
template <typename Team>
TS_DEVICE void copy_weights(Team& team, const BlurKernel& kernel, StepState* state) {
  constexpr int32_t kZeros = kBlurRows - 1;
  team.each(kernel.width, [&](int32_t i) { state->across[i] = kernel.across[i]; });
  team.each(kernel.height + 2 * kZeros, [&](int32_t i) {
    const int32_t k = i - kZeros;
    state->down[i] = k >= 0 && k < kernel.height ? kernel.down[k] : 0.0F;
  });
}

// Blurs a tile of the image, whose first pixel is (left, top), into the room.
template <typename Team>
TS_DEVICE void blur_tile(Team& team, const BlurKernel& kernel, const Canvas& canvas, int32_t left,
                         int32_t top, int32_t columns, int32_t rows, StepState* state) {
  const int32_t margin = kernel.width / 2;
  const int32_t pitch = (columns + 2 * margin) * 3;
  const int64_t row_bytes = static_cast<int64_t>(canvas.width) * 3;
  team.each(pitch, [&](int32_t i) {
    const int32_t x = padded(left + i / 3 - margin, canvas.width, TS_PADDING_REFLECT);
    const uint8_t* const from = canvas.image + x * 3 + i % 3;
    float sums[kBlurRows] = {};
    for (int32_t j = 0; j < rows + kernel.height - 1; ++j) {
      const int32_t y = padded(top + j - kernel.height / 2, canvas.height, TS_PADDING_REFLECT);
      const auto value = static_cast<float>(from[y * row_bytes]);
      const float* const weights = state->down + j;
      for (int32_t row = 0; row < kBlurRows; ++row) {
        sums[row] = plus(sums[row], weights[kBlurRows - 1 - row], value);
      }
    }
    for (int32_t row = 0; row < kBlurRows; ++row) {
      if (row < rows) state->blurred[row * pitch + i] = sums[row];
    }
  });
  team.each(columns * 3, [&](int32_t i) {
    int32_t from[kBlurRows];  // after the last row, the last row
    float sums[kBlurRows] = {};
    for (int32_t row = 0; row < kBlurRows; ++row) {
      from[row] = smaller(row, rows - 1) * pitch + i;
    }
    for (int32_t k = 0; k < kernel.width; ++k) {
      const float weight = state->across[k];
      for (int32_t row = 0; row < kBlurRows; ++row) {
        sums[row] = plus(sums[row], weight, state->blurred[from[row] + k * 3]);
      }
    }
    for (int32_t row = 0; row < kBlurRows; ++row) {
      if (row < rows) {
        canvas.room[(top + row) * row_bytes + left * 3 + i] = cut(clamp255(nearest(sums[row])));
      }
    }
  });
}

template <typename Team>
TS_DEVICE void blur(Team& team, const Plan& plan, const uint8_t* base, const ts_augment_op& op,
                    StepState* state, Canvas* canvas) {
  BlurKernel kernel;
  if (!find_kernel(plan, base, op, *canvas, &kernel)) return;
  copy_weights(team, kernel, state);
  // A tile has kBlurRows rows, unless the margins take most of the memory.
  const int32_t margins = kernel.width / 2 * 2;
  const int32_t span =
      margins < kBlurPixels / kBlurRows / 2 ? kBlurPixels / kBlurRows : kBlurPixels;
  const int32_t columns = smaller(canvas->width, span - margins);
  const int32_t max_rows = smaller(kBlurRows, kBlurPixels / (columns + margins));
  for (int32_t top = 0; top < canvas->height; top += max_rows) {
    const int32_t rows = smaller(max_rows, canvas->height - top);
    for (int32_t left = 0; left < canvas->width; left += columns) {
      blur_tile(team, kernel, *canvas, left, top, smaller(columns, canvas->width - left), rows,
                state);
    }
  }
  exchange(canvas);
}

// ---- mixtures ----------------------------------------------------------------------------------

// Starts a mixture, moves to its next image, or ends it: i[0] is 0, 1 or 2.
template <typename Team>
TS_DEVICE void mix(Team& team, const ts_augment_op& op, const Canvas& canvas) {
  if (canvas.sum == nullptr) return;
  const int32_t part = op.integers[0];
  const auto weight = static_cast<float>(op.values[0]);
  team.each(canvas.width * canvas.height * 3, [&](int32_t i) {
    const float summand = times(weight, static_cast<float>(canvas.image[i]));
    const float sum = (part == 0 ? 0.0F : canvas.sum[i]) + summand;
    canvas.sum[i] = sum;
    if (part == 0) canvas.kept[i] = canvas.image[i];
    if (part == 1) canvas.image[i] = canvas.kept[i];
    if (part == 2) canvas.image[i] = cut(clamp255(sum));
  });
}

// ---- all ---------------------------------------------------------------------------------------

// Runs an operation for which has_step is true, which keeps the image's size.
template <typename Team>
TS_DEVICE void run_step(Team& team, const Plan& plan, const uint8_t* base, const ts_augment_op& op,
                        StepState* state, Canvas* canvas) {
  switch (op.kind) {
    case TS_AUGMENT_FLIP_HORIZONTAL:
    case TS_AUGMENT_FLIP_VERTICAL:
    case TS_AUGMENT_QUARTER_TURNS:
    case TS_AUGMENT_CROP:
      move_pixels(team, op, canvas);
      break;
    case TS_AUGMENT_SHARPNESS:
      sharpen(team, op, canvas);
      break;
    case TS_AUGMENT_AFFINE:
    case TS_AUGMENT_PERSPECTIVE:
      warp(team, op, canvas);
      break;
    case TS_AUGMENT_BLUR:
      blur(team, plan, base, op, state, canvas);
      break;
    case TS_AUGMENT_MIX:
      mix(team, op, *canvas);
      break;
    case TS_AUGMENT_SATURATION:
    case TS_AUGMENT_HUE:
    case TS_AUGMENT_GRAYSCALE:
    case TS_AUGMENT_ERASE:
    case TS_AUGMENT_PERMUTE:
      change_colors(team, op, *canvas);
      break;
    case TS_AUGMENT_BRIGHTNESS:
    case TS_AUGMENT_CONTRAST:
    case TS_AUGMENT_INVERT:
    case TS_AUGMENT_SOLARIZE:
    case TS_AUGMENT_POSTERIZE:
    case TS_AUGMENT_AUTOCONTRAST:
    case TS_AUGMENT_EQUALIZE:
      replace_bytes(team, op, *canvas, state);
      break;
    default:
      break;
  }
}

// Runs the steps of a plan on its result.
template <typename Team>
TS_DEVICE void run_steps(Team& team, const Plan& plan, const Memory& memory, StepState* state) {
  uint8_t* const room = memory.room;
  Canvas canvas = {memory.result, room, plan.x.size, plan.y.size, nullptr, nullptr};
  if (plan.mixes != 0) {
    const uint64_t bytes = aligned_scratch(static_cast<uint64_t>(canvas.width) *
                                           static_cast<uint64_t>(canvas.height) * 3);
    canvas.kept = room + bytes;
    canvas.sum = reinterpret_cast<float*>(room + 2 * bytes);
  }
  const ts_augment_op* const steps = steps_of(plan, memory.base);
  for (uint32_t i = 0; i < plan.steps; ++i) {
    run_step(team, plan, memory.base, steps[i], state, &canvas);
  }
  if (canvas.image == memory.result) return;
  const uint8_t* const image = canvas.image;
  each_pixel(team, canvas, memory.result, [&](int32_t x, int32_t y, uint8_t* to) {
    copy_pixel(image + (static_cast<int64_t>(y) * canvas.width + x) * 3, to);
  });
}

}  // namespace ts::jpeg
