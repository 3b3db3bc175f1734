// Random operations that a device runs (jpeg/steps.h), and the host's results.
#pragma once

#include <memory>
#include <vector>

#include "image/entropy.h"
#include "jpeg/steps.h"

namespace samples {

using Ops = std::vector<ts_augment_op>;

struct FreeAugmenter {
  void operator()(ts_augmenter* augmenter) const { ts_augmenter_free(augmenter); }
};
using HostAugmenter = std::unique_ptr<ts_augmenter, FreeAugmenter>;

inline HostAugmenter new_host_augmenter() {
  ts_augmenter* augmenter = nullptr;
  EXPECT_EQ(ts_augmenter_new(&augmenter), nullptr);
  return HostAugmenter(augmenter);
}

inline double real(Random& random, double low, double high) {
  return low + (high - low) * (random() / 4294967296.0);
}

inline void draw_affine(Random& random, ts_augment_op* op) {
  const double far = random() % 8 == 0 ? 1e9 : 1.0;
  for (int i = 0; i < 6; ++i) op->values[i] = real(random, -1.5, 1.5) * far;
  if (random() % 3 == 0) {  // moves by whole and half pixels
    op->values[0] = op->values[4] = 1;
    op->values[1] = op->values[3] = 0;
    op->values[2] = uniform(random, -9, 9) / 2.0;
    op->values[5] = uniform(random, -9, 9) / 2.0;
  }
}

inline void draw_perspective(Random& random, ts_augment_op* op) {
  for (double& v : op->values) v = real(random, -0.1, 0.1);
  op->values[0] += 1;
  op->values[4] += 1;
  if (random() % 8 == 0) op->values[6] = -1;  // divides by zero
}

// Draws an operation of the kind for images of the given size, which the operation keeps.
inline ts_augment_op draw_step(Random& random, int32_t kind, int32_t width, int32_t height) {
  ts_augment_op op = {};
  op.kind = kind;
  int32_t* const in = op.integers;
  for (int c = 0; c < 9; ++c) in[c] = uniform(random, 0, 255);
  switch (kind) {
    case TS_AUGMENT_QUARTER_TURNS:
      in[0] = width == height ? uniform(random, 0, 3) : 2 * uniform(random, 0, 1);
      break;
    case TS_AUGMENT_CROP: {
      in[4] = uniform(random, TS_PADDING_CONSTANT, TS_PADDING_SYMMETRIC);
      const int32_t reach_x = std::min(20, width - 1);
      const int32_t reach_y = std::min(20, height - 1);
      in[0] = uniform(random, -reach_x, reach_x);
      in[1] = uniform(random, -reach_y, reach_y);
      in[2] = width;
      in[3] = height;
      break;
    }
    case TS_AUGMENT_HUE:
      op.values[0] = random() % 8 == 0 ? 0.5 : real(random, -0.5, 0.5);
      break;
    case TS_AUGMENT_SOLARIZE:
      op.values[0] = real(random, 0, 256);
      break;
    case TS_AUGMENT_POSTERIZE:
      in[0] = uniform(random, 0, 8);
      break;
    case TS_AUGMENT_ERASE:
      in[2] = uniform(random, 0, width);
      in[3] = uniform(random, 0, height);
      in[0] = uniform(random, 0, width - in[2]);
      in[1] = uniform(random, 0, height - in[3]);
      break;
    case TS_AUGMENT_AFFINE:
    case TS_AUGMENT_PERSPECTIVE:
      in[0] = random() % 2 == 0 ? TS_INTERPOLATION_NEAREST : TS_INTERPOLATION_BILINEAR;
      in[1] = uniform(random, 0, 1);
      in[5] = in[6] = 0;
      kind == TS_AUGMENT_AFFINE ? draw_affine(random, &op) : draw_perspective(random, &op);
      break;
    case TS_AUGMENT_BLUR:
      in[0] = 1 + 2 * uniform(random, 0, std::min(width - 1, random() % 8 == 0 ? 500 : 11));
      in[1] = 1 + 2 * uniform(random, 0, std::min(height - 1, random() % 8 == 0 ? 500 : 11));
      for (int i = 0; i < 2; ++i) op.values[i] = real(random, 0.1, random() % 8 == 0 ? 1e3 : 4);
      break;
    case TS_AUGMENT_PERMUTE:
      for (int c = 0; c < 3; ++c) in[c] = uniform(random, 0, 2);
      break;
    default:  // factors
      op.values[0] = random() % 8 == 0 ? 0 : real(random, 0, random() % 8 == 0 ? 1e5 : 2.5);
  }
  return op;
}

// Draws an operation of any kind, except parts of a mixture.
inline ts_augment_op draw_step(Random& random, int32_t width, int32_t height) {
  const int32_t kind = uniform(random, TS_AUGMENT_FLIP_HORIZONTAL, TS_AUGMENT_MIX - 1);
  return draw_step(random, kind, width, height);
}

// Draws at most `max` operations, some of them in mixtures.
inline Ops draw_steps(Random& random, int32_t max, int32_t width, int32_t height) {
  Ops ops;
  bool mixing = false;
  const auto mix = [&](int32_t part) {
    ops.push_back({TS_AUGMENT_MIX, {part}, {real(random, 0, random() % 8 == 0 ? 1 : 0.4)}});
    mixing = part != 2;
  };
  for (int32_t count = uniform(random, 0, max); count > 0; --count) {
    if (random() % 6 == 0) mix(mixing ? uniform(random, 1, 2) : 0);
    ops.push_back(draw_step(random, width, height));
  }
  if (mixing) mix(2);
  return ops;
}

inline Bytes run_on_host(ts_augmenter* augmenter, Image image, const Ops& ops) {
  const Outcome outcome(ts_augmenter_run(augmenter, image.pixels.data(), image.width, image.height,
                                         static_cast<size_t>(image.width) * 3, ops.data(),
                                         static_cast<int64_t>(ops.size())));
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  return image.pixels;
}

}  // namespace samples
