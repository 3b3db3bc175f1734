// The work of the blocks of batch_norm.cu. team.each(f) calls f with the number of each of the
// block's threads and then waits for all of them. The device has a team of its threads; the tests
// have a team that is a loop.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#include "base/target.h"
#include "torch/batch_norm_pass.h"

namespace ts::norm {

// The element types. widen is exact; narrow rounds to nearest, ties to even.
struct Float32 {
  using Type = float;
  static constexpr int kVector = 4;  // elements in 16 bytes
  TS_HOST_DEVICE static float widen(float value) { return value; }
  TS_HOST_DEVICE static float narrow(float value) { return value; }
};

struct BFloat16 {
  using Type = uint16_t;
  static constexpr int kVector = 8;
  TS_HOST_DEVICE static float widen(uint16_t value) {
    const uint32_t bits = static_cast<uint32_t>(value) << 16;
    float wide;
    memcpy(&wide, &bits, sizeof wide);
    return wide;
  }
  TS_HOST_DEVICE static uint16_t narrow(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if (value != value) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};

TS_HOST_DEVICE float multiply_add(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return std::fma(a, b, c);
#endif
}

template <typename E>
struct alignas(16) Vector {
  typename E::Type values[E::kVector];
};

template <typename E>
TS_HOST_DEVICE Vector<E> load(const void* from, int64_t element) {
  return *reinterpret_cast<const Vector<E>*>(static_cast<const typename E::Type*>(from) + element);
}

template <typename E>
TS_HOST_DEVICE void store(void* to, int64_t element, const Vector<E>& vector) {
  *reinterpret_cast<Vector<E>*>(static_cast<typename E::Type*>(to) + element) = vector;
}

struct Rows {
  int64_t begin;
  int64_t end;
};

TS_HOST_DEVICE Rows rows_of(const Parts& parts, int64_t rows, int part) {
  const int64_t begin = part * parts.rows;
  const int64_t end = begin + parts.rows;
  return {begin, end < rows ? end : rows};
}

// The position of a thread in a block: a vector of channels that starts at `channel`, which may be
// after the last channel, and every kStep-th row.
template <typename E, int kThreads>
struct Place {
  static constexpr int kLanes = kWidth / E::kVector;
  static constexpr int kStep = kThreads / kLanes;

  TS_HOST_DEVICE Place(int group, int thread)
      : column(thread % kLanes * E::kVector),
        channel(group * kWidth + column),
        row(thread / kLanes) {}

  int column;  // in the block
  int channel;
  int row;
};

// Two numbers for each channel of a block, from each of several sources.
template <int kSources>
struct Pairs {
  float first[kSources][kWidth];
  float second[kSources][kWidth];
};

// The sums over the threads' rows, and their merged sums for each of `kSlots` rows of threads.
template <typename E>
struct SumMemory {
  static constexpr int kSlots = kSumThreads / kWidth;
  Pairs<Place<E, kSumThreads>::kStep> threads;
  Pairs<kSlots> slots;
};

struct OutputMemory {
  static constexpr int kSlots = kOutputThreads / kWidth;
  Pairs<kSlots> slots;
  float parameters[7][kWidth];
};

// Returns how many of n rows belong to the thread that starts at row `first` and advances by
// `step`.
TS_HOST_DEVICE float count_of(int64_t n, int first, int step) {
  return n > first ? static_cast<float>((n - first - 1) / step + 1) : 0.0F;
}

// The mean of n values and the sum of squared distances from it. Computed from the sums of the
// distances from `shift` and of their squares. The shift is one of the values, or the mean of some.
// The square of the shift's own distance from the mean is then part of the result, so cancellation
// loses at most n times the result, whatever the mean.
struct Moments {
  float mean;
  float squares;
};
TS_HOST_DEVICE Moments moments_of(float shift, float first, float second, float n) {
  const float distance = first / n;
  const float squares = second - first * distance;
  return {shift + distance, squares < 0 ? 0 : squares};  // NaN is preserved
}

// Adds the moments of n values to the sums that moments_of reads.
TS_HOST_DEVICE void add_moments(const Moments& of, float n, float shift, float* first,
                                float* second) {
  const float distance = of.mean - shift;
  *first += n * distance;
  *second += of.squares + n * distance * distance;
}

// ---- Forward

constexpr int kBatch = 4;  // rows whose loads a thread issues at a time

// Writes the moments of a part of the rows to the partials.
template <typename E, typename Team>
TS_DEVICE void sum_moments(Team team, const Forward& pass, int group, int part,
                           SumMemory<E>& memory) {
  constexpr int V = E::kVector;
  using At = Place<E, kSumThreads>;
  using Slots = SumMemory<E>;
  const int64_t channels = pass.plan.channels;
  const Rows rows = rows_of(pass.plan.sums, pass.plan.rows, part);
  const int64_t count = rows.end - rows.begin;
  team.each([&](int thread) {
    const At at(group, thread);
    if (at.channel >= channels) return;
    float shift[V] = {};
    float first[V] = {};
    float second[V] = {};
    int64_t row = rows.begin + at.row;
    if (row < rows.end) {
      const Vector<E> x = load<E>(pass.x, row * channels + at.channel);
      TS_UNROLL
      for (int v = 0; v < V; ++v) shift[v] = E::widen(x.values[v]);
    }
    for (row += At::kStep; row < rows.end; row += kBatch * At::kStep) {
      Vector<E> x[kBatch];
      TS_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next < rows.end) x[i] = load<E>(pass.x, next * channels + at.channel);
      }
      TS_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        if (row + i * At::kStep >= rows.end) break;
        TS_UNROLL
        for (int v = 0; v < V; ++v) {
          const float distance = E::widen(x[i].values[v]) - shift[v];
          first[v] += distance;
          second[v] = multiply_add(distance, distance, second[v]);
        }
      }
    }
    const float n = count_of(count, at.row, At::kStep);
    TS_UNROLL
    for (int v = 0; v < V; ++v) {
      const Moments own = n > 0 ? moments_of(shift[v], first[v], second[v], n) : Moments{0, 0};
      memory.threads.first[at.row][at.column + v] = own.mean;
      memory.threads.second[at.row][at.column + v] = own.squares;
    }
  });
  team.each([&](int thread) {
    const int column = thread % kWidth;
    const int slot = thread / kWidth;
    if (group * kWidth + column >= channels) return;
    const float shift = memory.threads.first[0][column];
    float first = 0;
    float second = 0;
    for (int i = slot; i < At::kStep; i += Slots::kSlots) {
      add_moments({memory.threads.first[i][column], memory.threads.second[i][column]},
                  count_of(count, i, At::kStep), shift, &first, &second);
    }
    memory.slots.first[slot][column] = first;
    memory.slots.second[slot][column] = second;
  });
  team.each([&](int column) {
    const int channel = group * kWidth + column;
    if (column >= kWidth || channel >= channels) return;
    float first = 0;
    float second = 0;
    for (int slot = 0; slot < Slots::kSlots; ++slot) {
      first += memory.slots.first[slot][column];
      second += memory.slots.second[slot][column];
    }
    const Moments own =
        moments_of(memory.threads.first[0][column], first, second, static_cast<float>(count));
    float* const to = pass.partials + part * channels + channel;
    to[0] = own.mean;
    to[pass.plan.sums.count * channels] = own.squares;
  });
}

// Returns the normalised value, with the arithmetic of LibTorch's kernel for channels_last, so that
// equal moments give equal bits.
TS_HOST_DEVICE float normalised(float x, float mean, float inverse, float weight, float bias) {
  return multiply_add(weight * (x - mean), inverse, bias);
}

// Preserves NaN, as LibTorch's ReLU does.
TS_HOST_DEVICE bool is_cut(float value) { return value <= 0; }

// Merges the moments of all parts, and computes a part of the output. The blocks of the first part
// also write the values of each channel.
template <typename E, bool kResidual, typename Team>
TS_DEVICE void normalise(Team team, const Forward& pass, int group, int part,
                         OutputMemory& memory) {
  constexpr int V = E::kVector;
  using At = Place<E, kOutputThreads>;
  const int64_t channels = pass.plan.channels;
  const Parts& sums = pass.plan.sums;
  const int64_t second_at = sums.count * channels;
  team.each([&](int thread) {
    const int column = thread % kWidth;
    const int channel = group * kWidth + column;
    const int slot = thread / kWidth;
    if (channel >= channels) return;
    const float shift = pass.partials[channel];
    float first = 0;
    float second = 0;
    for (int i = slot; i < sums.count; i += OutputMemory::kSlots) {
      const Rows of = rows_of(sums, pass.plan.rows, i);
      const float* const from = pass.partials + i * channels + channel;
      add_moments({from[0], from[second_at]}, static_cast<float>(of.end - of.begin), shift, &first,
                  &second);
    }
    memory.slots.first[slot][column] = first;
    memory.slots.second[slot][column] = second;
  });
  team.each([&](int column) {
    const int channel = group * kWidth + column;
    if (column >= kWidth || channel >= channels) return;
    float first = 0;
    float second = 0;
    for (int slot = 0; slot < OutputMemory::kSlots; ++slot) {
      first += memory.slots.first[slot][column];
      second += memory.slots.second[slot][column];
    }
    const auto n = static_cast<float>(pass.plan.rows);
    const Moments all = moments_of(pass.partials[channel], first, second, n);
    const float variance = all.squares / n;
    float saved[kSavedCount];
    saved[kMean] = all.mean;
    saved[kInverse] = 1 / std::sqrt(variance + pass.eps);
    saved[kWeight] = pass.weight == nullptr ? 1 : pass.weight[channel];
    saved[kBias] = pass.bias == nullptr ? 0 : pass.bias[channel];
    TS_UNROLL
    for (int i = 0; i < kSavedCount; ++i) memory.parameters[i][column] = saved[i];
    if (part != 0) return;
    TS_UNROLL
    for (int i = 0; i < kSavedCount; ++i) pass.saved[i * channels + channel] = saved[i];
    if (pass.running_mean == nullptr) return;
    const float momentum = pass.momentum;
    float* const mean = pass.running_mean + channel;
    float* const var = pass.running_var + channel;
    *mean = all.mean * momentum + (1 - momentum) * *mean;
    *var = all.squares / (n - 1) * momentum + (1 - momentum) * *var;
  });
  const Rows rows = rows_of(pass.plan.outputs, pass.plan.rows, part);
  team.each([&](int thread) {
    const At at(group, thread);
    if (at.channel >= channels) return;
    float saved[kSavedCount][V];
    TS_UNROLL
    for (int i = 0; i < kSavedCount; ++i) {
      TS_UNROLL
      for (int v = 0; v < V; ++v) saved[i][v] = memory.parameters[i][at.column + v];
    }
    for (int64_t row = rows.begin + at.row; row < rows.end; row += kBatch * At::kStep) {
      Vector<E> x[kBatch];
      Vector<E> residual[kBatch];
      TS_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        x[i] = load<E>(pass.x, next * channels + at.channel);
        if (kResidual) residual[i] = load<E>(pass.residual, next * channels + at.channel);
      }
      TS_UNROLL
      for (int i = 0; i < kBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        TS_UNROLL
        for (int v = 0; v < V; ++v) {
          auto y = E::narrow(normalised(E::widen(x[i].values[v]), saved[kMean][v],
                                        saved[kInverse][v], saved[kWeight][v], saved[kBias][v]));
          if (kResidual) y = E::narrow(E::widen(y) + E::widen(residual[i].values[v]));
          x[i].values[v] = is_cut(E::widen(y)) ? E::narrow(0) : y;
        }
        store<E>(pass.y, next * channels + at.channel, x[i]);
      }
    }
  });
}

// ---- Backward

constexpr int kGradientBatch = 2;  // kBatch for a row of two or three loads

// A thread's values of its channels from the forward pass.
template <typename E>
struct SavedValues {
  static constexpr int V = E::kVector;
  float values[kSavedCount][V];

  TS_HOST_DEVICE SavedValues(const float* from, int64_t channels, int channel) {
    TS_UNROLL
    for (int i = 0; i < kSavedCount; ++i) {
      TS_UNROLL
      for (int v = 0; v < V; ++v) values[i][v] = from[i * channels + channel + v];
    }
  }

  // Whether ReLU zeroed the normalised value of x, computed as in the forward pass.
  TS_HOST_DEVICE bool cuts(float x, int v) const {
    const float y =
        normalised(x, values[kMean][v], values[kInverse][v], values[kWeight][v], values[kBias][v]);
    return is_cut(E::widen(E::narrow(y)));
  }
};

// Writes two sums over a part of the rows to the partials: of the gradient where ReLU is not zero,
// and of its products with x - mean. With a residual, that gradient is also the residual's, and is
// written.
template <typename E, bool kResidual, typename Team>
TS_DEVICE void sum_gradients(Team team, const Backward& pass, int group, int part,
                             SumMemory<E>& memory) {
  constexpr int V = E::kVector;
  using At = Place<E, kSumThreads>;
  using Slots = SumMemory<E>;
  const int64_t channels = pass.plan.channels;
  const Rows rows = rows_of(pass.plan.sums, pass.plan.rows, part);
  team.each([&](int thread) {
    const At at(group, thread);
    if (at.channel >= channels) return;
    const SavedValues<E> saved(pass.saved, channels, at.channel);
    float first[V] = {};
    float second[V] = {};
    for (int64_t row = rows.begin + at.row; row < rows.end; row += kGradientBatch * At::kStep) {
      Vector<E> dy[kGradientBatch];
      Vector<E> x[kGradientBatch];
      Vector<E> y[kGradientBatch];
      TS_UNROLL
      for (int i = 0; i < kGradientBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        dy[i] = load<E>(pass.dy, next * channels + at.channel);
        x[i] = load<E>(pass.x, next * channels + at.channel);
        if (kResidual) y[i] = load<E>(pass.y, next * channels + at.channel);
      }
      TS_UNROLL
      for (int i = 0; i < kGradientBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        TS_UNROLL
        for (int v = 0; v < V; ++v) {
          const float value = E::widen(x[i].values[v]);
          const bool cut = kResidual ? is_cut(E::widen(y[i].values[v])) : saved.cuts(value, v);
          if (cut) dy[i].values[v] = E::narrow(0);
          const float gradient = E::widen(dy[i].values[v]);
          first[v] += gradient;
          second[v] = multiply_add(gradient, value - saved.values[kMean][v], second[v]);
        }
        if (kResidual) store<E>(pass.dresidual, next * channels + at.channel, dy[i]);
      }
    }
    TS_UNROLL
    for (int v = 0; v < V; ++v) {
      memory.threads.first[at.row][at.column + v] = first[v];
      memory.threads.second[at.row][at.column + v] = second[v];
    }
  });
  team.each([&](int thread) {
    const int column = thread % kWidth;
    const int slot = thread / kWidth;
    if (group * kWidth + column >= channels) return;
    float first = 0;
    float second = 0;
    for (int i = slot; i < At::kStep; i += Slots::kSlots) {
      first += memory.threads.first[i][column];
      second += memory.threads.second[i][column];
    }
    memory.slots.first[slot][column] = first;
    memory.slots.second[slot][column] = second;
  });
  team.each([&](int column) {
    const int channel = group * kWidth + column;
    if (column >= kWidth || channel >= channels) return;
    float first = 0;
    float second = 0;
    for (int slot = 0; slot < Slots::kSlots; ++slot) {
      first += memory.slots.first[slot][column];
      second += memory.slots.second[slot][column];
    }
    float* const to = pass.partials + part * channels + channel;
    to[0] = first;
    to[pass.plan.sums.count * channels] = second;
  });
}

// Merges the sums of all parts, and computes a part of the gradient of x. The blocks of the first
// part also write the gradients of weight and bias.
template <typename E, bool kResidual, typename Team>
TS_DEVICE void differentiate(Team team, const Backward& pass, int group, int part,
                             OutputMemory& memory) {
  enum { kMeanGradient, kSlope, kFactor };  // parameters
  constexpr int V = E::kVector;
  using At = Place<E, kOutputThreads>;
  const int64_t channels = pass.plan.channels;
  const int64_t parts = pass.plan.sums.count;
  team.each([&](int thread) {
    const int column = thread % kWidth;
    const int channel = group * kWidth + column;
    const int slot = thread / kWidth;
    if (channel >= channels) return;
    float first = 0;
    float second = 0;
    for (int64_t i = slot; i < parts; i += OutputMemory::kSlots) {
      const float* const from = pass.partials + i * channels + channel;
      first += from[0];
      second += from[parts * channels];
    }
    memory.slots.first[slot][column] = first;
    memory.slots.second[slot][column] = second;
  });
  team.each([&](int column) {
    const int channel = group * kWidth + column;
    if (column >= kWidth || channel >= channels) return;
    float first = 0;
    float second = 0;
    for (int slot = 0; slot < OutputMemory::kSlots; ++slot) {
      first += memory.slots.first[slot][column];
      second += memory.slots.second[slot][column];
    }
    const float share = 1 / static_cast<float>(pass.plan.rows);
    const float inverse = pass.saved[kInverse * channels + channel];
    memory.parameters[kMeanGradient][column] = first * share;
    memory.parameters[kSlope][column] = inverse * inverse * second * share;
    memory.parameters[kFactor][column] = pass.saved[kWeight * channels + channel] * inverse;
    if (part != 0) return;
    pass.dweight[channel] = second * inverse;
    pass.dbias[channel] = first;
  });
  const Rows rows = rows_of(pass.plan.outputs, pass.plan.rows, part);
  const void* const gradients = kResidual ? pass.dresidual : pass.dy;
  team.each([&](int thread) {
    const At at(group, thread);
    if (at.channel >= channels) return;
    const SavedValues<E> saved(pass.saved, channels, at.channel);
    float parameters[3][V];
    TS_UNROLL
    for (int i = 0; i < 3; ++i) {
      TS_UNROLL
      for (int v = 0; v < V; ++v) parameters[i][v] = memory.parameters[i][at.column + v];
    }
    for (int64_t row = rows.begin + at.row; row < rows.end; row += kGradientBatch * At::kStep) {
      Vector<E> dy[kGradientBatch];
      Vector<E> x[kGradientBatch];
      TS_UNROLL
      for (int i = 0; i < kGradientBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        dy[i] = load<E>(gradients, next * channels + at.channel);
        x[i] = load<E>(pass.x, next * channels + at.channel);
      }
      TS_UNROLL
      for (int i = 0; i < kGradientBatch; ++i) {
        const int64_t next = row + i * At::kStep;
        if (next >= rows.end) break;
        TS_UNROLL
        for (int v = 0; v < V; ++v) {
          const float value = E::widen(x[i].values[v]);
          float gradient = E::widen(dy[i].values[v]);
          if (!kResidual && saved.cuts(value, v)) gradient = 0;
          // LibTorch's arithmetic, as in the forward pass.
          const float rest = multiply_add(saved.values[kMean][v] - value, parameters[kSlope][v],
                                          gradient - parameters[kMeanGradient][v]);
          x[i].values[v] = E::narrow(rest * parameters[kFactor][v]);
        }
        store<E>(pass.dx, next * channels + at.channel, x[i]);
      }
    }
  });
}

}  // namespace ts::norm
