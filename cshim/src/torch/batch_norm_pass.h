// A pass of the batch normalisation with ReLU, and how it is divided among blocks. No CUDA here.
//
// A tensor is seen as rows of channels, which is what channels_last memory is. A block has kWidth
// neighbouring channels of a part of the rows. The forward pass is two kernels: the first one
// computes the moments of each part, the second one merges those of all parts, each of its blocks
// for itself, and normalises. Backward is two kernels in the same way. So a pass needs neither
// atomics nor zeroed memory, and its sums have one order: its results are the same in every run.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace ts::norm {

constexpr int kWidth = 32;
constexpr int kSumThreads = 512;     // of a block that sums
constexpr int kOutputThreads = 256;  // of a block that computes a tensor

// Blocks of a kernel, where there are rows enough: a few for each multiprocessor of the GPUs that
// there are. It is no number of the device's, so that GPUs of several kinds have the same sums.
constexpr int64_t kSumBlocks = 264;
constexpr int64_t kOutputBlocks = 528;
// What a part has at least, so that its threads have a few rows each.
constexpr int64_t kMinSumRows = 512;
constexpr int64_t kMinOutputRows = 256;

// The division of rows: `count` parts of `rows` rows, of which the last one may be shorter. None is
// empty.
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

  // The floats that the sums of all parts take.
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

// What backward needs of the forward pass, an array of each for every channel.
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
