#include "image/augment.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <iterator>
#include <memory>
#include <string>
#include <utility>

#include "base/error.h"
#include "jpeg/augment.h"
#include "jpeg/plan.h"
#include "jpeg/steps.h"

#if defined(__x86_64__)
#define TS_HASWELL __attribute__((target("avx2,fma")))
#else
#define TS_HASWELL
#endif
#define TS_INLINE inline __attribute__((always_inline))

struct ts_augmenter {
  ts::image::Augmenter augmenter;
};

namespace ts::image {
namespace {

using jpeg::clamp255;
using jpeg::cut;
using jpeg::plus;

constexpr int32_t kMaxSide = 65535;
constexpr double kMinSigma = 1e-6;

// A kernel is a type with a static function run. It is compiled twice, and the version is chosen at
// run time by the processor. With AVX2 the loops are vectorised, and a fused multiply-add is one
// instruction. Both versions give the same results.
template <typename Kernel, typename... Args>
TS_HASWELL void run_haswell(Args... args) {
  Kernel::run(args...);
}

bool haswell() {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
  return false;
#endif
}

template <typename Kernel, typename... Args>
void run(Args... args) {
  if (haswell()) {
    run_haswell<Kernel>(args...);
  } else {
    Kernel::run(args...);
  }
}

// ---- tables: each byte is replaced independently of its neighbours ---------------------------

using Table = std::array<uint8_t, 256>;

void look_up(Pixels* image, const Table& table) {
  for (uint8_t& byte : image->bytes) byte = table[byte];
}

void look_up(Pixels* image, const std::array<Table, 3>& tables) {
  uint8_t* at = image->bytes.data();
  for (uint8_t* const end = at + image->bytes.size(); at != end; at += 3) {
    at[0] = tables[0][at[0]];
    at[1] = tables[1][at[1]];
    at[2] = tables[2][at[2]];
  }
}

template <typename F>
Table table_of(const F& f) {
  Table table{};
  for (int i = 0; i < 256; ++i) table[static_cast<size_t>(i)] = f(i);
  return table;
}

using Histograms = std::array<std::array<int32_t, 256>, 3>;

Histograms histograms(const Pixels& image) {
  // Two histograms of each channel, so that equal neighbours do not wait for each other's store.
  std::array<Histograms, 2> h{};
  const uint8_t* at = image.bytes.data();
  const size_t pixels = image.bytes.size() / 3;
  for (size_t i = 0; i < pixels; ++i, at += 3) {
    for (size_t c = 0; c < 3; ++c) ++h[i & 1][c][at[c]];
  }
  for (size_t c = 0; c < 3; ++c) {
    for (size_t v = 0; v < 256; ++v) h[0][c][v] += h[1][c][v];
  }
  return h[0];
}

void brightness(Pixels* image, double factor) {
  const auto f = static_cast<float>(factor);
  look_up(image, table_of([&](int i) { return jpeg::brightened(i, f); }));
}

struct GreySum {
  TS_INLINE static void run(const uint8_t* bytes, size_t pixels, int64_t* total) {
    int64_t sum = 0;
    while (pixels > 0) {
      const size_t count = std::min<size_t>(pixels, 4096);  // fits in 32 bits
      int32_t part = 0;
      for (size_t i = 0; i < count; ++i) {
        part += static_cast<int32_t>(jpeg::grey(bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2]));
      }
      sum += part;
      bytes += 3 * count;
      pixels -= count;
    }
    *total = sum;
  }
};

void contrast(Pixels* image, double factor) {
  int64_t sum = 0;
  const size_t pixels = image->bytes.size() / 3;
  run<GreySum>(static_cast<const uint8_t*>(image->bytes.data()), pixels, &sum);
  const float mean = static_cast<float>(sum) / static_cast<float>(pixels);
  const auto ratio = static_cast<float>(factor);
  const auto rest = static_cast<float>(1.0 - factor);
  look_up(image, table_of([&](int i) { return jpeg::blended(i, ratio, rest, mean); }));
}

void autocontrast(Pixels* image) {
  const Histograms h = histograms(*image);
  std::array<Table, 3> tables{};
  for (size_t c = 0; c < 3; ++c) {
    int low = 0;
    int high = 255;
    while (h[c][static_cast<size_t>(low)] == 0) ++low;
    while (h[c][static_cast<size_t>(high)] == 0) --high;
    const jpeg::Stretch stretch = jpeg::stretch_of(low, high);
    tables[c] = table_of([&](int i) { return jpeg::stretched(i, stretch); });
  }
  look_up(image, tables);
}

void equalize(Pixels* image) {
  const Histograms h = histograms(*image);
  const auto pixels = static_cast<int32_t>(image->bytes.size() / 3);
  std::array<Table, 3> tables{};
  for (size_t c = 0; c < 3; ++c) {
    int high = 255;
    while (h[c][static_cast<size_t>(high)] == 0) --high;
    const int32_t step = (pixels - h[c][static_cast<size_t>(high)]) / 255;
    int32_t below = 0;
    tables[c] = table_of([&](int i) {
      const uint8_t level = jpeg::equalized(i, below, step);
      below += h[c][static_cast<size_t>(i)];
      return level;
    });
  }
  look_up(image, tables);
}

// ---- colours of a pixel ----------------------------------------------------------------------

struct Grayscale {
  TS_INLINE static void run(uint8_t* bytes, size_t pixels) {
    for (size_t i = 0; i < pixels; ++i, bytes += 3) jpeg::make_grey(bytes);
  }
};

struct Saturation {
  TS_INLINE static void run(uint8_t* bytes, size_t pixels, float ratio, float rest) {
    for (size_t i = 0; i < pixels; ++i, bytes += 3) jpeg::saturate(bytes, ratio, rest);
  }
};

struct Hue {
  static constexpr size_t kBlock = 256;

  TS_INLINE static void run(uint8_t* bytes, size_t pixels, float turn) {
    float r[kBlock];
    float g[kBlock];
    float b[kBlock];
    for (size_t done = 0; done < pixels; done += kBlock, bytes += 3 * kBlock) {
      const size_t count = std::min(kBlock, pixels - done);
      for (size_t i = 0; i < count; ++i) {
        r[i] = static_cast<float>(bytes[3 * i]) * jpeg::kPerByte;
        g[i] = static_cast<float>(bytes[3 * i + 1]) * jpeg::kPerByte;
        b[i] = static_cast<float>(bytes[3 * i + 2]) * jpeg::kPerByte;
      }
      for (size_t i = 0; i < count; ++i) jpeg::turn_hue(&r[i], &g[i], &b[i], turn);
      for (size_t i = 0; i < count; ++i) {
        bytes[3 * i] = cut(r[i]);
        bytes[3 * i + 1] = cut(g[i]);
        bytes[3 * i + 2] = cut(b[i]);
      }
    }
  }
};

// ---- neighbourhoods --------------------------------------------------------------------------

struct Sharpen {
  // Sharpens one row without its first and last pixel.
  TS_INLINE static void run(const uint8_t* above, const uint8_t* here, const uint8_t* below,
                            uint8_t* out, size_t begin, size_t end, float rest) {
    for (size_t i = begin; i < end; ++i) {
      out[i] = jpeg::sharpened(above + i, here + i, below + i, rest);
    }
  }
};

// Computes one row of the sum of weights * rows.
struct BlurRows {
  TS_INLINE static void run(const uint8_t* const* rows, const float* weights, int32_t taps,
                            float* out, size_t begin, size_t bytes) {
    for (size_t i = begin; i < bytes; ++i) out[i] = weights[0] * static_cast<float>(rows[0][i]);
    for (int32_t k = 1; k < taps; ++k) {
      const uint8_t* row = rows[k];
      for (size_t i = begin; i < bytes; ++i) {
        out[i] = plus(out[i], weights[k], static_cast<float>(row[i]));
      }
    }
  }
};

// Computes one row of the result. `in` has the reflected columns on both sides.
struct BlurColumns {
  TS_INLINE static void run(const float* in, const float* weights, int32_t taps, uint8_t* out,
                            size_t bytes) {
    constexpr size_t kBlock = 96;
    float sums[kBlock];
    for (size_t at = 0; at < bytes; at += kBlock) {
      const size_t count = std::min(kBlock, bytes - at);
      for (size_t i = 0; i < count; ++i) sums[i] = 0;
      for (int32_t k = 0; k < taps; ++k) {
        const float* from = in + at + 3 * static_cast<size_t>(k);
        const float weight = weights[k];
        for (size_t i = 0; i < count; ++i) sums[i] = plus(sums[i], weight, from[i]);
      }
      for (size_t i = 0; i < count; ++i) {
        out[at + i] = static_cast<uint8_t>(static_cast<int32_t>(__builtin_rintf(sums[i])));
      }
    }
  }
};

// Computes the weights of torchvision's _get_gaussian_kernel1d.
void gaussian(int32_t taps, double sigma, float* out) {
  const double limit = (taps - 1) / (2.0 * std::sqrt(2.0));
  double sum = 0;
  std::vector<double> exact(static_cast<size_t>(taps));
  for (int32_t i = 0; i < taps; ++i) {
    const double x = taps == 1 ? -limit : -limit + 2 * limit * i / (taps - 1);
    exact[static_cast<size_t>(i)] = std::exp(-(x / sigma) * (x / sigma));
    sum += exact[static_cast<size_t>(i)];
  }
  for (int32_t i = 0; i < taps; ++i) {
    out[i] = static_cast<float>(exact[static_cast<size_t>(i)] / sum);
  }
}

// ---- grid transforms: the source position of each output pixel -------------------------------

struct AffineRow {
  TS_INLINE static void run(float* xs, float* ys, int32_t outputs, float y, jpeg::Grid grid) {
    const float first = jpeg::first_place(outputs);
    for (int32_t i = 0; i < outputs; ++i) {
      jpeg::affine_source(grid, first + static_cast<float>(i), y, xs + i, ys + i);
    }
  }
};

struct PerspectiveRow {
  TS_INLINE static void run(float* xs, float* ys, int32_t outputs, float y, jpeg::Grid grid) {
    for (int32_t i = 0; i < outputs; ++i) {
      jpeg::perspective_source(grid, static_cast<float>(i) + 0.5F, y, xs + i, ys + i);
    }
  }
};

struct NearestRow {
  TS_INLINE static void run(jpeg::Sampled from, const float* xs, const float* ys, int32_t outputs,
                            uint8_t* out) {
    for (int32_t i = 0; i < outputs; ++i, out += 3) {
      jpeg::sample_nearest(from, xs[i], ys[i], out);
    }
  }
};

struct BilinearRow {
  TS_INLINE static void run(jpeg::Sampled from, const float* xs, const float* ys, int32_t outputs,
                            uint8_t* out) {
    for (int32_t i = 0; i < outputs; ++i, out += 3) {
      jpeg::sample_bilinear(from, xs[i], ys[i], out);
    }
  }
};

// ---- checks ----------------------------------------------------------------------------------

[[noreturn]] void refuse(const ts_augment_op& op, const char* what) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "operation " + std::to_string(op.kind) + ": " + what);
}

void put_color(const int32_t* from, uint8_t* to) {
  for (int c = 0; c < 3; ++c) to[c] = static_cast<uint8_t>(from[c]);
}

// ---- operations: each has a check and a run, which belong together in the table below -----------

struct Size {
  int32_t width, height;
  // Inside a mixture: the size at its start.
  bool mixing = false;
  int32_t mixed_width = 0, mixed_height = 0;
};

enum { kMixBegin = 0, kMixNext = 1, kMixEnd = 2 };

// For an operation that has no parameters, or accepts every value.
void check_nothing(const ts_augment_op&, Size*) {}

void check_factor(const ts_augment_op& op, Size*) {
  if (op.values[0] < 0 || op.values[0] > 1e6) refuse(op, "the factor is not in 0 to 1e6");
}

void check_hue(const ts_augment_op& op, Size*) {
  if (!(op.values[0] >= -0.5 && op.values[0] <= 0.5)) refuse(op, "the turn is not in -0.5 to 0.5");
}

void check_posterize(const ts_augment_op& op, Size*) {
  if (op.integers[0] < 0 || op.integers[0] > 8) refuse(op, "bits must be from 0 to 8");
}

void check_quarter_turns(const ts_augment_op& op, Size* size) {
  if (op.integers[0] < 0 || op.integers[0] > 3) refuse(op, "turns must be from 0 to 3");
  if (op.integers[0] % 2 == 1) std::swap(size->width, size->height);
}

void check_blur(const ts_augment_op& op, Size* size) {
  const int32_t* in = op.integers;
  if (in[0] < 1 || in[1] < 1 || in[0] % 2 == 0 || in[1] % 2 == 0 || in[0] > jpeg::kMaxBlur ||
      in[1] > jpeg::kMaxBlur) {
    refuse(op, "the kernel's sides must be odd and from 1 to 1001");
  }
  if (in[0] / 2 >= size->width || in[1] / 2 >= size->height) {
    refuse(op, "half of the kernel must be smaller than the image");
  }
  // With a smaller sigma even the weight of the kernel's centre may be 0, and then all weights.
  if (!(op.values[0] >= kMinSigma && op.values[1] >= kMinSigma)) {
    refuse(op, "sigma must be at least 1e-6");
  }
}

void check_erase(const ts_augment_op& op, Size* size) {
  const int32_t* in = op.integers;
  if (in[0] < 0 || in[1] < 0 || in[2] < 0 || in[3] < 0 || in[0] > size->width - in[2] ||
      in[1] > size->height - in[3]) {
    refuse(op, "the box is not inside the image");
  }
}

// Reports whether a crop [begin, begin + length) exceeds the image's side by more than the padding
// can fill.
bool beyond_padding(int32_t padding, int64_t begin, int64_t length, int64_t side) {
  int64_t room = 1 << 20;
  if (padding == TS_PADDING_REFLECT) room = side - 1;
  if (padding == TS_PADDING_SYMMETRIC) room = side;
  return begin < -room || begin + length > side + room;
}

void check_crop(const ts_augment_op& op, Size* size) {
  const int32_t* in = op.integers;
  if (in[2] < 1 || in[3] < 1 || in[2] > kMaxSide || in[3] > kMaxSide) {
    refuse(op, "the box must be from 1 to 65535 pixels a side");
  }
  if (in[4] < TS_PADDING_CONSTANT || in[4] > TS_PADDING_SYMMETRIC) refuse(op, "no such padding");
  if (beyond_padding(in[4], in[0], in[2], size->width) ||
      beyond_padding(in[4], in[1], in[3], size->height)) {
    refuse(op, "more padding than the image can give");
  }
  size->width = in[2];
  size->height = in[3];
}

void check_perspective(const ts_augment_op& op, Size*) {
  if (op.integers[0] != TS_INTERPOLATION_NEAREST && op.integers[0] != TS_INTERPOLATION_BILINEAR) {
    refuse(op, "no such interpolation");
  }
}

void check_affine(const ts_augment_op& op, Size* size) {
  check_perspective(op, size);
  const int32_t* in = op.integers;
  if (in[5] == 0 && in[6] == 0) return;
  if (in[5] < 1 || in[6] < 1 || in[5] > kMaxSide || in[6] > kMaxSide) {
    refuse(op, "the result must be from 1 to 65535 pixels a side");
  }
  size->width = in[5];
  size->height = in[6];
}

void check_permute(const ts_augment_op& op, Size*) {
  for (int c = 0; c < 3; ++c) {
    if (op.integers[c] < 0 || op.integers[c] > 2) refuse(op, "channels must be from 0 to 2");
  }
}

void check_mix(const ts_augment_op& op, Size* size) {
  const int32_t part = op.integers[0];
  if (part < kMixBegin || part > kMixEnd) refuse(op, "its part is not 0, 1 or 2");
  if (!(op.values[0] >= 0.0 && op.values[0] <= 1.0)) refuse(op, "its weight is not in 0 to 1");
  if (part == kMixBegin) {
    if (size->mixing) refuse(op, "a mixture is begun within another");
    size->mixing = true;
    size->mixed_width = size->width;
    size->mixed_height = size->height;
    return;
  }
  if (!size->mixing) refuse(op, "there is no mixture");
  if (size->width != size->mixed_width || size->height != size->mixed_height) {
    refuse(op, "a chain of a mixture changes the image's size");
  }
  size->mixing = part != kMixEnd;
}

void flip_horizontal(Workspace* work, const ts_augment_op&) {
  for (int32_t y = 0; y < work->image.height; ++y) {
    uint8_t* left = work->image.row(y);
    uint8_t* right = left + work->image.row_bytes() - 3;
    for (; left < right; left += 3, right -= 3) std::swap_ranges(left, left + 3, right);
  }
}

void flip_vertical(Workspace* work, const ts_augment_op&) {
  Pixels& image = work->image;
  for (int32_t y = 0; y < image.height / 2; ++y) {
    std::swap_ranges(image.row(y), image.row(y) + image.row_bytes(),
                     image.row(image.height - 1 - y));
  }
}

void brightness(Workspace* work, const ts_augment_op& op) {
  brightness(&work->image, op.values[0]);
}

void contrast(Workspace* work, const ts_augment_op& op) { contrast(&work->image, op.values[0]); }

void saturation(Workspace* work, const ts_augment_op& op) {
  run<Saturation>(work->image.bytes.data(), work->image.count(), static_cast<float>(op.values[0]),
                  static_cast<float>(1.0 - op.values[0]));
}

void hue(Workspace* work, const ts_augment_op& op) {
  run<Hue>(work->image.bytes.data(), work->image.count(), static_cast<float>(op.values[0]));
}

void grayscale(Workspace* work, const ts_augment_op&) {
  run<Grayscale>(work->image.bytes.data(), work->image.count());
}

void invert(Workspace* work, const ts_augment_op&) {
  for (uint8_t& byte : work->image.bytes) byte = static_cast<uint8_t>(255 - byte);
}

void solarize(Workspace* work, const ts_augment_op& op) {
  const auto threshold = static_cast<float>(op.values[0]);
  look_up(&work->image, table_of([&](int i) { return jpeg::solarized(i, threshold); }));
}

void posterize(Workspace* work, const ts_augment_op& op) {
  const int32_t bits = op.integers[0];
  for (uint8_t& byte : work->image.bytes) byte = jpeg::posterized(byte, bits);
}

void autocontrast(Workspace* work, const ts_augment_op&) { autocontrast(&work->image); }

void equalize(Workspace* work, const ts_augment_op&) { equalize(&work->image); }

void erase(Workspace* work, const ts_augment_op& op) {
  const int32_t* in = op.integers;
  uint8_t color[3];
  put_color(in + 4, color);
  for (int32_t y = in[1]; y < in[1] + in[3]; ++y) {
    uint8_t* at = work->image.row(y) + 3 * static_cast<size_t>(in[0]);
    for (int32_t x = 0; x < in[2]; ++x, at += 3) std::copy_n(color, 3, at);
  }
}

void permute(Workspace* work, const ts_augment_op& op) {
  uint8_t* const bytes = work->image.bytes.data();
  const size_t pixels = work->image.count();
  for (size_t i = 0; i < pixels; ++i) {
    const uint8_t from[3] = {bytes[3 * i], bytes[3 * i + 1], bytes[3 * i + 2]};
    for (size_t c = 0; c < 3; ++c) bytes[3 * i + c] = from[op.integers[c]];
  }
}

void quarter_turns(Workspace* work, const ts_augment_op& op) {
  const int32_t turns = op.integers[0];
  if (turns == 0) return;
  const int32_t w = work->image.width;
  const int32_t h = work->image.height;
  work->other.resize(turns % 2 == 1 ? h : w, turns % 2 == 1 ? w : h);
  for (int32_t y = 0; y < work->other.height; ++y) {
    uint8_t* to = work->other.row(y);
    for (int32_t x = 0; x < work->other.width; ++x, to += 3) {
      // Counter-clockwise, as torch.rot90 turns.
      const int32_t from_x = turns == 1 ? w - 1 - y : turns == 2 ? w - 1 - x : y;
      const int32_t from_y = turns == 1 ? x : turns == 2 ? h - 1 - y : h - 1 - x;
      std::copy_n(work->image.row(from_y) + 3 * static_cast<size_t>(from_x), 3, to);
    }
  }
  std::swap(work->image, work->other);
}

void crop(Workspace* work, const ts_augment_op& op) {
  const int32_t left = op.integers[0];
  const int32_t top = op.integers[1];
  uint8_t fill[3];
  put_color(op.integers + 5, fill);
  work->other.resize(op.integers[2], op.integers[3]);
  work->columns.resize(static_cast<size_t>(work->other.width));
  for (int32_t x = 0; x < work->other.width; ++x) {
    work->columns[static_cast<size_t>(x)] =
        jpeg::padded(left + x, work->image.width, op.integers[4]);
  }
  for (int32_t y = 0; y < work->other.height; ++y) {
    const int32_t source = jpeg::padded(top + y, work->image.height, op.integers[4]);
    uint8_t* to = work->other.row(y);
    const uint8_t* row = source < 0 ? nullptr : work->image.row(source);
    for (const int32_t column : work->columns) {
      std::copy_n(row == nullptr || column < 0 ? fill : row + 3 * static_cast<size_t>(column), 3,
                  to);
      to += 3;
    }
  }
  std::swap(work->image, work->other);
}

void sharpness(Workspace* work, const ts_augment_op& op) {
  if (work->image.width <= 2 || work->image.height <= 2) return;
  work->other = work->image;
  const auto rest = static_cast<float>(1.0 - op.values[0]);
  const size_t end = work->image.row_bytes() - 3;
  for (int32_t y = 1; y < work->image.height - 1; ++y) {
    const uint8_t* here = work->image.row(y);
    run<Sharpen>(static_cast<const uint8_t*>(work->image.row(y - 1)), here,
                 static_cast<const uint8_t*>(work->image.row(y + 1)), work->other.row(y), size_t{3},
                 end, rest);
  }
  std::swap(work->image, work->other);
}

// Computes the weights of a blur's rows, then the weights of its columns.
void blur_weights(const ts_augment_op& op, float* out) {
  gaussian(op.integers[0], op.values[0], out);
  gaussian(op.integers[1], op.values[1], out + op.integers[0]);
}

void blur(Workspace* work, const ts_augment_op& op) {
  const int32_t width = op.integers[0];
  const int32_t height = op.integers[1];
  work->weights.resize(static_cast<size_t>(width) + static_cast<size_t>(height));
  blur_weights(op, work->weights.data());
  const auto margin = static_cast<size_t>(width / 2);
  const size_t bytes = work->image.row_bytes();
  work->x.resize(bytes + 6 * margin);
  work->other.resize(work->image.width, work->image.height);
  std::vector<const uint8_t*> rows(static_cast<size_t>(height));
  for (int32_t y = 0; y < work->image.height; ++y) {
    for (int32_t k = 0; k < height; ++k) {
      rows[static_cast<size_t>(k)] =
          work->image.row(jpeg::padded(y + k - height / 2, work->image.height, TS_PADDING_REFLECT));
    }
    float* line = work->x.data() + 3 * margin;
    run<BlurRows>(static_cast<const uint8_t* const*>(rows.data()),
                  static_cast<const float*>(work->weights.data() + width), height, line, size_t{0},
                  bytes);
    for (size_t m = 1; m <= margin; ++m) {
      std::copy_n(line + 3 * m, 3, line - 3 * m);
      std::copy_n(line + bytes - 3 - 3 * m, 3, line + bytes - 3 + 3 * m);
    }
    run<BlurColumns>(static_cast<const float*>(work->x.data()),
                     static_cast<const float*>(work->weights.data()), width, work->other.row(y),
                     bytes);
  }
  std::swap(work->image, work->other);
}

// Writes one output row of a grid transform from the source coordinates in work->x and work->y.
void sample(Workspace* work, const ts_augment_op& op, int32_t y) {
  jpeg::Sampled from = {work->image.bytes.data(), work->image.width, work->image.height, {}, false};
  from.filled = op.integers[1] != 0;
  if (from.filled) put_color(op.integers + 2, from.fill);
  const float* xs = work->x.data();
  const float* ys = work->y.data();
  if (op.integers[0] == TS_INTERPOLATION_NEAREST) {
    run<NearestRow>(from, xs, ys, work->other.width, work->other.row(y));
  } else {
    run<BilinearRow>(from, xs, ys, work->other.width, work->other.row(y));
  }
}

void affine(Workspace* work, const ts_augment_op& op) {
  const bool same = op.integers[5] == 0;
  work->other.resize(same ? work->image.width : op.integers[5],
                     same ? work->image.height : op.integers[6]);
  work->x.resize(static_cast<size_t>(work->other.width));
  work->y.resize(static_cast<size_t>(work->other.width));
  const jpeg::Grid grid = jpeg::grid_of(op.values, 6, work->image.width, work->image.height);
  const float first = jpeg::first_place(work->other.height);
  for (int32_t y = 0; y < work->other.height; ++y) {
    run<AffineRow>(work->x.data(), work->y.data(), work->other.width, first + static_cast<float>(y),
                   grid);
    sample(work, op, y);
  }
  std::swap(work->image, work->other);
}

void perspective(Workspace* work, const ts_augment_op& op) {
  work->other.resize(work->image.width, work->image.height);
  work->x.resize(static_cast<size_t>(work->image.width));
  work->y.resize(static_cast<size_t>(work->image.width));
  const jpeg::Grid grid = jpeg::grid_of(op.values, 8, work->image.width, work->image.height);
  for (int32_t y = 0; y < work->image.height; ++y) {
    run<PerspectiveRow>(work->x.data(), work->y.data(), work->image.width,
                        static_cast<float>(y) + 0.5F, grid);
    sample(work, op, y);
  }
  std::swap(work->image, work->other);
}

struct AddWeighted {
  TS_INLINE static void run(float* sum, const uint8_t* bytes, size_t count, float weight) {
    for (size_t i = 0; i < count; ++i) {
      // The product is exact in double, and rounded before it is added: no fused multiply-add.
      sum[i] += static_cast<float>(static_cast<double>(weight) * bytes[i]);
    }
  }
};

void mix(Workspace* work, const ts_augment_op& op) {
  const size_t count = work->image.bytes.size();
  if (op.integers[0] == kMixBegin) {
    work->kept = work->image;
    work->sum.assign(count, 0.0F);
  }
  run<AddWeighted>(work->sum.data(), static_cast<const uint8_t*>(work->image.bytes.data()), count,
                   static_cast<float>(op.values[0]));
  if (op.integers[0] == kMixNext) work->image = work->kept;
  if (op.integers[0] == kMixEnd) {
    for (size_t i = 0; i < count; ++i) work->image.bytes[i] = cut(clamp255(work->sum[i]));
  }
}

// ---- the table -------------------------------------------------------------------------------

struct Operation {
  int32_t kind;
  // Throws Failure if the operation cannot run on an image of *size. Sets *size to the result's.
  void (*check)(const ts_augment_op& op, Size* size);
  void (*run)(Workspace* work, const ts_augment_op& op);
};

// In the order of their numbers, which start at 1.
constexpr Operation kOperations[] = {
    {TS_AUGMENT_FLIP_HORIZONTAL, check_nothing, flip_horizontal},
    {TS_AUGMENT_FLIP_VERTICAL, check_nothing, flip_vertical},
    {TS_AUGMENT_QUARTER_TURNS, check_quarter_turns, quarter_turns},
    {TS_AUGMENT_CROP, check_crop, crop},
    {TS_AUGMENT_BRIGHTNESS, check_factor, brightness},
    {TS_AUGMENT_CONTRAST, check_factor, contrast},
    {TS_AUGMENT_SATURATION, check_factor, saturation},
    {TS_AUGMENT_SHARPNESS, check_factor, sharpness},
    {TS_AUGMENT_HUE, check_hue, hue},
    {TS_AUGMENT_GRAYSCALE, check_nothing, grayscale},
    {TS_AUGMENT_INVERT, check_nothing, invert},
    {TS_AUGMENT_SOLARIZE, check_nothing, solarize},
    {TS_AUGMENT_POSTERIZE, check_posterize, posterize},
    {TS_AUGMENT_AUTOCONTRAST, check_nothing, autocontrast},
    {TS_AUGMENT_EQUALIZE, check_nothing, equalize},
    {TS_AUGMENT_BLUR, check_blur, blur},
    {TS_AUGMENT_ERASE, check_erase, erase},
    {TS_AUGMENT_AFFINE, check_affine, affine},
    {TS_AUGMENT_PERSPECTIVE, check_perspective, perspective},
    {TS_AUGMENT_PERMUTE, check_permute, permute},
    {TS_AUGMENT_MIX, check_mix, mix},
};

constexpr bool in_order() {
  int32_t kind = 0;
  for (const Operation& each : kOperations) {
    if (each.kind != ++kind) return false;
  }
  return true;
}
static_assert(in_order(), "operation_of finds an operation by its number");
static_assert(std::size(kOperations) == kAugmentKinds, "a new operation raises kAugmentKinds");

const Operation& operation_of(const ts_augment_op& op) {
  if (op.kind < 1 || op.kind > kAugmentKinds) {
    refuse(op, "there is no such operation");
  }
  return kOperations[op.kind - 1];
}

void check(const ts_augment_op& op, Size* size) {
  for (const double value : op.values) {
    if (!std::isfinite(value)) refuse(op, "a value is not finite");
  }
  operation_of(op).check(op, size);
}

// Checks operations on an image of the given size, which they must keep together. After each
// operation, calls use(op, size) with the size of its result.
template <typename Use>
void check_all(const ts_augment_op* ops, int64_t count, int32_t width, int32_t height, Use&& use) {
  Size size = {};
  size.width = width;
  size.height = height;
  for (int64_t i = 0; i < count; ++i) {
    check(ops[i], &size);
    use(ops[i], size);
  }
  require(size.width == width && size.height == height, "the operations change the image's size");
  require(!size.mixing, "a mixture is begun and not ended");
}

// Returns the size in bytes of an operation's data in a plan, besides its parameters.
size_t weight_bytes(const ts_augment_op& op) {
  return op.kind == TS_AUGMENT_BLUR ? jpeg::blur_bytes(op.integers[0], op.integers[1]) : 0;
}

}  // namespace

size_t plan_augment(uint8_t* buffer, size_t capacity, const ts_augment_op* ops, int64_t count) {
  require(capacity >= sizeof(jpeg::Plan), "there is no plan in the buffer");
  jpeg::Plan plan;
  std::memcpy(&plan, buffer, sizeof plan);
  require(plan.magic == jpeg::kPlanMagic && plan.bytes <= capacity && plan.steps == 0,
          "the buffer has no plan, or one with operations");
  bool on_device = true;
  check_all(ops, count, plan.x.size, plan.y.size, [&](const ts_augment_op& op, const Size& size) {
    if (op.kind == TS_AUGMENT_MIX) plan.mixes = 1;
    on_device = on_device && jpeg::has_step(op.kind) && size.width == plan.x.size &&
                size.height == plan.y.size;
  });
  if (!on_device || count > INT32_MAX / static_cast<int64_t>(2 * sizeof(ts_augment_op))) return 0;
  if (count == 0) return plan.bytes;
  static_assert(alignof(ts_augment_op) <= jpeg::kPlanAlign, "a plan's part is aligned");
  const size_t bytes = static_cast<size_t>(count) * sizeof(ts_augment_op);
  size_t weights = plan.bytes + bytes;  // the position of the next blur's weights
  size_t end = weights;
  for (int64_t i = 0; i < count; ++i) end += weight_bytes(ops[i]);
  const size_t padding = (jpeg::kPlanAlign - end % jpeg::kPlanAlign) % jpeg::kPlanAlign;
  const size_t size = end + padding;
  plan.steps = static_cast<uint32_t>(count);
  if (size > INT32_MAX || jpeg::scratch_of(plan).total() > jpeg::kMaxPlanScratch) return 0;
  if (size > capacity) return size;
  plan.steps_at = plan.bytes;
  plan.bytes = static_cast<uint32_t>(size);
  auto* const steps = reinterpret_cast<ts_augment_op*>(buffer + plan.steps_at);
  std::memcpy(steps, ops, bytes);
  for (int64_t i = 0; i < count; ++i) {
    if (ops[i].kind != TS_AUGMENT_BLUR) continue;
    steps[i].integers[2] = static_cast<int32_t>(weights);
    blur_weights(ops[i], reinterpret_cast<float*>(buffer + weights));
    weights += weight_bytes(ops[i]);
  }
  std::memset(buffer + end, 0, padding);
  std::memcpy(buffer, &plan, sizeof plan);
  return size;
}

void Augmenter::run(uint8_t* pixels, int32_t width, int32_t height, size_t stride,
                    const ts_augment_op* ops, int64_t count) {
  check_all(ops, count, width, height, [](const ts_augment_op&, const Size&) {});
  Pixels& image = work_.image;  // the result too: operations swap its contents with work_.other
  image.resize(width, height);
  for (int32_t y = 0; y < height; ++y) {
    std::memcpy(image.row(y), pixels + static_cast<size_t>(y) * stride, image.row_bytes());
  }
  for (int64_t i = 0; i < count; ++i) operation_of(ops[i]).run(&work_, ops[i]);
  for (int32_t y = 0; y < height; ++y) {
    std::memcpy(pixels + static_cast<size_t>(y) * stride, image.row(y), image.row_bytes());
  }
}

}  // namespace ts::image

ts_error* ts_augmenter_new(ts_augmenter** augmenter) {
  return ts::guard(__func__, [&] {
    ts::require(augmenter != nullptr, "augmenter is NULL");
    *augmenter = std::make_unique<ts_augmenter>().release();
  });
}

void ts_augmenter_free(ts_augmenter* augmenter) {
  const std::unique_ptr<ts_augmenter> owned(augmenter);
}

ts_error* ts_augmenter_run(ts_augmenter* augmenter, uint8_t* pixels, int32_t width, int32_t height,
                           size_t stride, const ts_augment_op* ops, int64_t count) {
  return ts::guard(__func__, [&] {
    ts::require(augmenter != nullptr, "augmenter is NULL");
    ts::require(pixels != nullptr, "pixels is NULL");
    ts::require(
        width >= 1 && height >= 1 && width <= ts::image::kMaxSide && height <= ts::image::kMaxSide,
        "width and height must be from 1 to 65535");
    ts::require(stride >= static_cast<size_t>(width) * 3, "stride is less than width * 3 bytes");
    ts::require(count >= 0 && (ops != nullptr || count == 0), "ops is NULL");
    augmenter->augmenter.run(pixels, width, height, stride, ops, count);
  });
}

ts_error* ts_image_plan_augment(uint8_t* buffer, size_t capacity, const ts_augment_op* ops,
                                int64_t count, size_t* planned) {
  return ts::guard(__func__, [&] {
    ts::require(buffer != nullptr, "buffer is NULL");
    ts::require(reinterpret_cast<uintptr_t>(buffer) % ts::jpeg::kPlanAlign == 0,
                "buffer is not aligned to 16 bytes");
    ts::require(count >= 0 && (ops != nullptr || count == 0), "ops is NULL");
    ts::require(planned != nullptr, "planned is NULL");
    *planned = ts::image::plan_augment(buffer, capacity, ops, count);
  });
}
