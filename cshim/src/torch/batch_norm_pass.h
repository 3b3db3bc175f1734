// A pass of batch normalisation with ReLU, and its division among blocks. No CUDA here.
// A tensor is treated as rows of channels, the layout of channels_last memory. A block has kWidth
// neighbouring channels of a part of the rows. The forward pass is two kernels. The first computes
// the moments of each part. In the second, each block merges the moments of all parts and
// normalises. Backward is two kernels of the same form. So a pass needs neither atomics nor zeroed
// memory, and its sums have a fixed order: the results are the same in every run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ts::norm {

constexpr int kWidth = 32;
constexpr int kSumThreads = 512;     // in a block that sums
constexpr int kOutputThreads = 256;  // in a block that computes a tensor

// The number of blocks of a kernel, if there are enough rows: a few for each multiprocessor of
// current GPUs. It does not depend on the device, so that all kinds of GPUs compute the same sums.
constexpr int64_t kSumBlocks = 264;
constexpr int64_t kOutputBlocks = 528;
// The minimum rows of a part, so that each of its threads has a few rows.
constexpr int64_t kMinSumRows = 512;
constexpr int64_t kMinOutputRows = 256;

// The division of rows: `count` parts of `rows` rows; the last may be shorter. No part is empty.
struct Parts {
  int64_t rows;
  int32_t count;
};

inline Parts divide(int64_t rows, int64_t groups, int64_t blocks, int64_t least) {
  const int64_t most = std::max<int64_t>(blocks / groups, 1);
  const int64_t count = std::min(most, (rows + least - 1) / least);
  const int64_t each = (rows + count - 1) / count;
  return {each, static_cast<int32_t>((rows + each - 1) / each)};
}

struct Plan {
  int64_t rows;      // at least 1
  int32_t channels;  // at least 1
  int32_t groups;    // of kWidth channels
  Parts sums;
  Parts outputs;

  // Returns the number of floats in the sums of all parts.
  size_t partials() const {
    return 2 * static_cast<size_t>(sums.count) * static_cast<size_t>(channels);
  }
};

inline Plan plan(int64_t rows, int32_t channels) {
  const int32_t groups = (channels + kWidth - 1) / kWidth;
  return {rows, channels, groups, divide(rows, groups, kSumBlocks, kMinSumRows),
          divide(rows, groups, kOutputBlocks, kMinOutputRows)};
}

enum class Element { kFloat32, kFloat16, kBFloat16 };

// The values of the forward pass that backward needs, an array for each with one value a channel.
enum Saved { kMean, kInverse /* 1 / standard deviation */, kWeight, kBias, kSavedCount };

// y = relu((x - mean) / deviation * weight + bias + residual). Tensors are [rows, channels].
struct Forward {
  const void* x;
  const void* residual;  // NULL: none
  const float* weight;   // [channels], or NULL for ones
  const float* bias;     // NULL for zeros
  float* running_mean;   // [channels], or NULL like running_var
  float* running_var;
  float momentum;
  float eps;
  void* y;
  float* saved;     // [kSavedCount, channels]
  float* partials;  // [2, parts, channels], temporary
  Plan plan;
};

struct Backward {
  const void* dy;  // may be dx, or with a residual dresidual
  const void* x;
  const void* y;  // of a forward pass with a residual; NULL otherwise
  const float* saved;
  void* dx;
  void* dresidual;  // NULL without a residual
  float* dweight;   // [channels]
  float* dbias;
  float* partials;
  Plan plan;
};

}  // namespace ts::norm
