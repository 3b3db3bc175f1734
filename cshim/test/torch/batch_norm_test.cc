// Batch normalisation with ReLU: the arithmetic of its kernels, with loops instead of a device's
// threads, and the tensors that the call supports.
#include <cmath>
#include <limits>
#include <random>

#include "support.h"
#include "torch/batch_norm_blocks.h"

namespace {

using namespace ts::norm;
using Floats = std::vector<float>;

// The threads of a block, one after the other. Their order must not matter.
struct Loop {
  int threads;
  bool backwards;

  template <typename F>
  void each(F f) const {
    for (int i = 0; i < threads; ++i) f(backwards ? threads - 1 - i : i);
  }
};

template <typename F>
void each_block(const Plan& plan, const Parts& parts, F f) {
  for (int part = 0; part < parts.count; ++part) {
    for (int group = 0; group < plan.groups; ++group) f(group, part);
  }
}

// Values that a thread must not read before they are written.
template <typename Memory>
std::unique_ptr<Memory> undefined() {
  auto memory = std::make_unique<Memory>();
  std::memset(static_cast<void*>(memory.get()), 0xff, sizeof(Memory));  // NaN
  return memory;
}

template <typename E, bool kResidual>
void run(const Forward& pass, bool backwards) {
  each_block(pass.plan, pass.plan.sums, [&](int group, int part) {
    auto memory = undefined<SumMemory<E>>();
    sum_moments<E>(Loop{kSumThreads, backwards}, pass, group, part, *memory);
  });
  each_block(pass.plan, pass.plan.outputs, [&](int group, int part) {
    auto memory = undefined<OutputMemory>();
    normalise<E, kResidual>(Loop{kOutputThreads, backwards}, pass, group, part, *memory);
  });
}

template <typename E, bool kResidual>
void run(const Backward& pass, bool backwards) {
  each_block(pass.plan, pass.plan.sums, [&](int group, int part) {
    auto memory = undefined<SumMemory<E>>();
    sum_gradients<E, kResidual>(Loop{kSumThreads, backwards}, pass, group, part, *memory);
  });
  each_block(pass.plan, pass.plan.outputs, [&](int group, int part) {
    auto memory = undefined<OutputMemory>();
    differentiate<E, kResidual>(Loop{kOutputThreads, backwards}, pass, group, part, *memory);
  });
}

// Elements in memory aligned like a GPU's, followed by NaN.
template <typename E>
class Elements {
 public:
  explicit Elements(size_t count) : memory_((count + E::kVector) / E::kVector + 1) {
    std::memset(static_cast<void*>(memory_.data()), 0xff, memory_.size() * sizeof(memory_[0]));
  }
  explicit Elements(const Floats& values) : Elements(values.size()) {
    for (size_t i = 0; i < values.size(); ++i) data()[i] = E::narrow(values[i]);
  }
  typename E::Type* data() { return memory_.front().values; }
  double operator[](size_t i) { return E::widen(data()[i]); }
  bool ends_at(size_t count) { return std::isnan((*this)[count]); }

 private:
  std::vector<Vector<E>> memory_;
};

struct Case {
  int64_t rows;
  int32_t channels;
  float mean = 0;
  float outlier = 0;  // added to the first row
  bool affine = true;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << "x" << c.channels << " mean " << c.mean << " outlier " << c.outlier;
}

struct Channel {
  double mean = 0;
  double variance = 0;
  double inverse = 0;
};

constexpr float kMomentum = 0.3F;
constexpr float kEps = 1e-5F;

// One pass forward and backward, compared with float64.
template <typename E, bool kResidual>
void compare(const Case& c, bool backwards) {
  SCOPED_TRACE(testing::Message() << c << " residual " << kResidual << " of " << E::kVector);
  const auto n = static_cast<size_t>(c.rows);
  const auto channels = static_cast<size_t>(c.channels);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  const auto noise = [&](size_t count, float scale, float shift) {
    Floats values(count);
    for (float& each : values) each = normal(random) * scale + shift;
    return values;
  };
  Floats input = noise(n * channels, 2, c.mean);
  for (size_t k = 0; k < channels; ++k) input[k] += c.outlier;
  for (size_t r = 0; r < n; ++r) input[r * channels] = 3;  // a channel without variance
  Elements<E> x(input);
  Elements<E> residual(noise(n * channels, 1, 0));
  Elements<E> dy(noise(n * channels, 1, 0.1F));
  Elements<E> y(n * channels);
  Elements<E> dx(n * channels);
  Elements<E> dresidual(n * channels);
  const Floats weight = c.affine ? noise(channels, 1, 0) : Floats(channels, 1);
  const Floats bias = c.affine ? noise(channels, 1, 0) : Floats(channels, 0);
  const Floats mean_before = noise(channels, 1, 0);
  const Floats var_before = noise(channels, 0.1F, 2);
  Floats running_mean = mean_before;
  Floats running_var = var_before;
  const Plan divided = plan(c.rows, c.channels);
  Floats saved(kSavedCount * channels, NAN);
  Floats partials(divided.partials(), NAN);

  Forward forward{};
  forward.x = x.data();
  if (kResidual) forward.residual = residual.data();
  if (c.affine) forward.weight = weight.data();
  if (c.affine) forward.bias = bias.data();
  forward.running_mean = running_mean.data();
  forward.running_var = running_var.data();
  forward.momentum = kMomentum;
  forward.eps = kEps;
  forward.y = y.data();
  forward.saved = saved.data();
  forward.partials = partials.data();
  forward.plan = divided;
  run<E, kResidual>(forward, backwards);
  ASSERT_TRUE(y.ends_at(n * channels));

  std::vector<Channel> exact(channels);
  for (size_t k = 0; k < channels; ++k) {
    Channel& of = exact[k];
    for (size_t r = 0; r < n; ++r) of.mean += x[r * channels + k] / static_cast<double>(n);
    for (size_t r = 0; r < n; ++r) {
      of.variance += std::pow(x[r * channels + k] - of.mean, 2) / static_cast<double>(n);
    }
    of.inverse = 1 / std::sqrt(of.variance + kEps);
    const double deviation = std::sqrt(of.variance);
    ASSERT_NEAR(saved[k], of.mean, 2e-7 * std::abs(of.mean) + 1e-6 * deviation) << k;
    // Means of parts are float32, so a mean far from 0 hides some of the deviation.
    const double hidden = deviation > 0 ? 6e-8 * std::abs(of.mean) / deviation : 0;
    ASSERT_NEAR(saved[channels + k], of.inverse, (1e-5 + hidden) * of.inverse) << k;
    ASSERT_EQ(saved[kWeight * channels + k], weight[k]) << k;
    ASSERT_EQ(saved[kBias * channels + k], bias[k]) << k;
    const double unbiased = of.variance * static_cast<double>(n) / static_cast<double>(n - 1);
    const double mean = of.mean * kMomentum + (1 - kMomentum) * mean_before[k];
    const double var = unbiased * kMomentum + (1 - kMomentum) * var_before[k];
    ASSERT_NEAR(running_mean[k], mean, 1e-6 * (std::abs(of.mean) + deviation + 1)) << k;
    ASSERT_NEAR(running_var[k], var, (1e-5 + 2 * hidden) * var) << k;
  }
  EXPECT_EQ(saved[channels], 1 / std::sqrt(kEps)) << "of a channel without variance";

  // The operators' values with the same statistics, rounded between them.
  for (size_t i = 0; i < n * channels; ++i) {
    const size_t k = i % channels;
    const auto value = static_cast<float>(x[i]);
    const float scaled = weight[k] * (value - saved[k]);
    double want = E::widen(E::narrow(std::fma(scaled, saved[channels + k], bias[k])));
    if (kResidual) want = E::widen(E::narrow(static_cast<float>(want + residual[i])));
    ASSERT_EQ(y[i], std::max(want, 0.0)) << i;
  }

  Floats dweight(channels, NAN);
  Floats dbias(channels, NAN);
  std::fill(partials.begin(), partials.end(), NAN);
  Backward backward{};
  backward.dy = dy.data();
  backward.x = x.data();
  if (kResidual) backward.y = y.data();
  backward.saved = saved.data();
  backward.dx = dx.data();
  if (kResidual) backward.dresidual = dresidual.data();
  backward.dweight = dweight.data();
  backward.dbias = dbias.data();
  backward.partials = partials.data();
  backward.plan = divided;
  run<E, kResidual>(backward, backwards);
  ASSERT_TRUE(dx.ends_at(n * channels));

  // The bound on the distance from float64's result, relative to the terms: the sums' bound, or the
  // type's precision.
  const double unit = E::kVector == 4 ? 1e-5 : 1.0 / 128;
  for (size_t k = 0; k < channels; ++k) {
    const Channel& of = exact[k];
    double sum = 0;
    double products = 0;
    double size = 0;  // of the terms
    for (size_t r = 0; r < n; ++r) {
      const size_t i = r * channels + k;
      const double g = y[i] > 0 ? dy[i] : 0;
      const double distance = (x[i] - of.mean) * of.inverse;
      sum += g;
      products += g * distance;
      size += std::abs(g) * (1 + std::abs(distance) + std::abs(of.mean) * of.inverse * 1e-2);
    }
    ASSERT_NEAR(dbias[k], sum, 1e-5 * size) << k;
    ASSERT_NEAR(dweight[k], products, 1e-5 * size) << k;
    const double scale = static_cast<double>(weight[k]) * of.inverse;
    for (size_t r = 0; r < n; ++r) {
      const size_t i = r * channels + k;
      const double g = y[i] > 0 ? dy[i] : 0;
      const double distance = (x[i] - of.mean) * of.inverse;
      const double mean = sum / static_cast<double>(n);
      const double slope = products / static_cast<double>(n);
      const double want = scale * (g - mean - distance * slope);
      const double terms =
          std::abs(scale) * (std::abs(g) + std::abs(mean) + std::abs(distance * slope) +
                             std::abs(of.mean * of.inverse) * 1e-2);
      ASSERT_NEAR(dx[i], want, unit * terms) << r << ", " << k;
      if (kResidual) {
        ASSERT_EQ(dresidual[i], g) << r << ", " << k;
      }
    }
  }
}

const Case kCases[] = {
    {2, 8},               // the fewest rows
    {7, 24},              // fewer rows than threads, part of a group
    {513, 40},            // two parts of unequal sizes
    {1568, 64},           // the last layers of a ResNet-50 with 32 images
    {12345, 8},           // many parts
    {3000, 32, 1e4F},     // a mean far from 0
    {3000, 32, 0, 1e6F},  // a first row far from the mean
    {3000, 32, 0, 0, false},
};

TEST(BatchNormBlocks, EqualFloat64InFloat32) {
  for (const Case& each : kCases) {
    compare<Float32, false>(each, false);
    compare<Float32, true>(each, false);
  }
}

TEST(BatchNormBlocks, EqualFloat64InBFloat16) {
  for (const Case& each : kCases) {
    compare<BFloat16, false>(each, false);
    compare<BFloat16, true>(each, true);
  }
}

// Threads in the opposite order give the same results.
TEST(BatchNormBlocks, HaveOneOrderOfSums) {
  const int64_t rows = 700;
  const int32_t channels = 8;
  const Plan divided = plan(rows, channels);
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  Floats values(static_cast<size_t>(rows * channels));
  for (float& each : values) each = normal(random);
  Elements<Float32> x(values);
  Floats results[2];
  for (const bool backwards : {false, true}) {
    Elements<Float32> y(values.size());
    Floats saved(kSavedCount * channels);
    Floats partials(divided.partials());
    Forward pass{};
    pass.x = x.data();
    pass.eps = kEps;
    pass.y = y.data();
    pass.saved = saved.data();
    pass.partials = partials.data();
    pass.plan = divided;
    run<Float32, false>(pass, backwards);
    results[backwards ? 1 : 0].assign(y.data(), y.data() + values.size());
  }
  EXPECT_EQ(results[0], results[1]);
}

// A NaN in a channel spreads to all its values, and ReLU preserves it, as LibTorch's does.
TEST(BatchNormBlocks, KeepNaN) {
  const int32_t channels = 8;
  Floats values(10 * channels, 1);
  values[3 * channels + 2] = NAN;
  Elements<BFloat16> x(values);
  Elements<BFloat16> y(values.size());
  const Plan divided = plan(10, channels);
  Floats saved(kSavedCount * channels);
  Floats partials(divided.partials());
  Forward pass{};
  pass.x = x.data();
  pass.eps = kEps;
  pass.y = y.data();
  pass.saved = saved.data();
  pass.partials = partials.data();
  pass.plan = divided;
  run<BFloat16, false>(pass, false);
  for (size_t i = 0; i < values.size(); ++i) EXPECT_EQ(std::isnan(y[i]), i % channels == 2) << i;
}

// Each row is in one part, and the number of blocks is about the requested one.
TEST(BatchNormPlan, HasEachRowOnce) {
  for (const int64_t rows : {2, 511, 512, 513, 100352, 401408, 3211264}) {
    for (const int32_t channels : {8, 64, 72, 256, 2048, 16384}) {
      const Plan divided = plan(rows, channels);
      for (const Parts& parts : {divided.sums, divided.outputs}) {
        ASSERT_GE(parts.count, 1);
        ASSERT_LE(parts.count, kOutputBlocks);
        int64_t next = 0;
        for (int part = 0; part < parts.count; ++part) {
          const Rows of = rows_of(parts, rows, part);
          ASSERT_EQ(of.begin, next);
          ASSERT_GT(of.end, of.begin);
          next = of.end;
        }
        ASSERT_EQ(next, rows);
      }
    }
  }
}

TEST(BatchNormReLU, LeavesOtherTensorsToOperators) {
  test::Tensor x =
      test::empty({2, 8, 2, 2}, TS_DTYPE_FLOAT32, TS_DEVICE_CPU, TS_MEMORY_FORMAT_CHANNELS_LAST);
  ts_tensor* tensors[6] = {x};
  ts_tensor* result = x;
  ASSERT_OK(ts_tensor_batch_norm_relu(tensors, 0.1, 1e-5, 0, &result));
  EXPECT_EQ(result, nullptr);
}

TEST(BatchNormReLU, Refuses) {
  ts_tensor* tensors[6] = {};
  ts_tensor* result = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "x is NULL",
               ts_tensor_batch_norm_relu(tensors, 0.1, 1e-5, 0, &result));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "tensors is NULL",
               ts_tensor_batch_norm_relu(nullptr, 0.1, 1e-5, 0, &result));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "result is NULL",
               ts_tensor_batch_norm_relu(tensors, 0.1, 1e-5, 0, nullptr));
  test::Tensor x = test::empty({2, 8, 2, 2});
  tensors[0] = x;
  for (const auto& [flags, says] :
       {std::make_pair(int32_t{1} << 28, "unknown call flag"),
        std::make_pair(TS_OPERATOR_FLAG_AUTOCAST_BFLOAT16 | TS_OPERATOR_FLAG_AUTOCAST_FLOAT16,
                       "autocast to two dtypes"),
        std::make_pair(int32_t{TS_NUMERICS_ON}, "different switches")}) {
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, says,
                 ts_tensor_batch_norm_relu(tensors, 0.1, 1e-5, flags, &result));
  }
}

}  // namespace
