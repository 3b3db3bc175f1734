// Compares the normalisation of uint8 images with the formula in double, and the GPU with the CPU.
#include <cmath>
#include <random>

#include "support.h"

namespace {

using test::Sizes;
using test::Tensor;
using Bytes = std::vector<uint8_t>;

const float kMean[4] = {0.485F, 0.456F, 0.406F, 0.5F};
const float kStd[4] = {0.229F, 0.224F, 0.225F, 0.25F};

Bytes noise(int64_t count) {
  std::mt19937 random(7);
  Bytes bytes(static_cast<size_t>(count));
  for (auto& byte : bytes) byte = static_cast<uint8_t>(random());
  return bytes;
}

Tensor normalized(const Tensor& src, const Sizes& nhwc, int32_t dtype, int32_t format,
                  int32_t device = TS_DEVICE_CPU) {
  Tensor dst = test::empty({nhwc[0], nhwc[3], nhwc[1], nhwc[2]}, dtype, device, format);
  EXPECT_OK(ts_tensor_normalize_images(dst, src, kMean, kStd, static_cast<int32_t>(nhwc[3])));
  return dst;
}

TEST(Normalize, EqualsTheFormula) {
  for (const int64_t channels : {1, 2, 3, 4}) {
    for (const int32_t format : {TS_MEMORY_FORMAT_CONTIGUOUS, TS_MEMORY_FORMAT_CHANNELS_LAST}) {
      SCOPED_TRACE(channels * 10 + format);
      const Sizes nhwc = {2, 5, 7, channels};
      const Bytes bytes = noise(test::product(nhwc));
      Tensor src = test::make(bytes, nhwc);
      const auto values =
          test::read<float>(normalized(src, nhwc, TS_DTYPE_FLOAT32, format));  // in NCHW order
      size_t at = 0;
      for (int64_t n = 0; n < 2; ++n) {
        for (int64_t c = 0; c < channels; ++c) {
          for (int64_t p = 0; p < 35; ++p) {
            const double byte = bytes[static_cast<size_t>((n * 35 + p) * channels + c)];
            const double want = (byte / 255 - kMean[c]) / kStd[c];
            ASSERT_NEAR(values[at++], want, 1e-6);
          }
        }
      }
    }
  }
}

TEST(Normalize, HalvesAreTheRoundedFloats) {
  const Sizes nhwc = {1, 16, 16, 3};
  Tensor src = test::make(noise(test::product(nhwc)), nhwc);
  Tensor floats = normalized(src, nhwc, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS);
  for (const int32_t dtype : {TS_DTYPE_FLOAT16, TS_DTYPE_BFLOAT16}) {
    Tensor want;
    ASSERT_OK(ts_tensor_to(floats, TS_DEVICE_CPU, dtype, false, want.out()));
    EXPECT_EQ(test::read<uint16_t>(normalized(src, nhwc, dtype, TS_MEMORY_FORMAT_CHANNELS_LAST)),
              test::read<uint16_t>(want));
  }
}

TEST(Normalize, AnEmptyBatchStaysEmpty) {
  const Sizes nhwc = {0, 5, 7, 3};
  Tensor src = test::make(Bytes{}, nhwc);
  EXPECT_EQ(
      test::describe(normalized(src, nhwc, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS)).numel,
      0);
}

TEST(Normalize, ChecksItsOperands) {
  Tensor src = test::make(noise(30), {1, 2, 5, 3});
  Tensor dst = test::empty({1, 3, 2, 5});
  const float zero[4] = {};
  const float infinite[4] = {INFINITY, 0, 0, 0};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "channels",
               ts_tensor_normalize_images(dst, src, kMean, kStd, 4));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "channels",
               ts_tensor_normalize_images(dst, src, kMean, kStd, 0));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_tensor_normalize_images(dst, src, nullptr, kStd, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "deviation",
               ts_tensor_normalize_images(dst, src, kMean, zero, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "mean",
               ts_tensor_normalize_images(dst, src, infinite, kStd, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "uint8",
               ts_tensor_normalize_images(dst, dst, kMean, kStd, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "[N,C,H,W]",
               ts_tensor_normalize_images(test::empty({1, 3, 5, 2}), src, kMean, kStd, 3));
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "float32, float16 or bfloat16",
      ts_tensor_normalize_images(test::empty({1, 3, 2, 5}, TS_DTYPE_FLOAT64), src, kMean, kStd, 3));
  Tensor strided =
      test::Call("aten::permute").tensor(test::empty({5, 2, 3, 1})).ints({3, 2, 1, 0}).one();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "contiguous or channels_last",
               ts_tensor_normalize_images(strided, src, kMean, kStd, 3));
  Tensor turned = test::Call("aten::permute").tensor(src).ints({0, 2, 1, 3}).one();
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "contiguous [N,H,W,C]",
               ts_tensor_normalize_images(dst, turned, kMean, kStd, 3));
}

TEST(NormalizeGpu, GivesTheSameBitsAsTheCpu) {
  NEEDS_GPUS(1);
  // With and without a multiple of four pixels, and more images than a grid has rows.
  const std::vector<Sizes> shapes = {
      {2, 5, 7, 0}, {3, 8, 6, 0}, {1, 224, 224, 0}, {70000, 1, 2, 0}};
  for (const Sizes& each : shapes) {
    for (const int64_t channels : {1, 2, 3, 4}) {
      Sizes nhwc = each;
      nhwc[3] = channels;
      Tensor src = test::make(noise(test::product(nhwc)), nhwc);
      Tensor moved;
      ASSERT_OK(ts_tensor_to(src, 0, -1, false, moved.out()));
      for (const int32_t dtype : {TS_DTYPE_FLOAT32, TS_DTYPE_FLOAT16, TS_DTYPE_BFLOAT16}) {
        for (const int32_t format : {TS_MEMORY_FORMAT_CONTIGUOUS, TS_MEMORY_FORMAT_CHANNELS_LAST}) {
          SCOPED_TRACE(testing::Message() << "height " << nhwc[1] << " channels " << channels
                                          << " dtype " << dtype << " format " << format);
          Tensor want = normalized(src, nhwc, dtype, format);
          Tensor got = normalized(moved, nhwc, dtype, format, 0);
          if (dtype == TS_DTYPE_FLOAT32) {
            // As bits: NaN would compare unequal, and -0 equal to 0.
            Bytes a(static_cast<size_t>(test::describe(want).bytes));
            Bytes b(a.size());
            ASSERT_OK(ts_tensor_read(want, a.data(), a.size()));
            ASSERT_OK(ts_tensor_read(got, b.data(), b.size()));
            EXPECT_TRUE(a == b);
          } else {
            EXPECT_TRUE(test::read<uint16_t>(want) == test::read<uint16_t>(got));
          }
        }
      }
    }
  }
}

TEST(NormalizeGpu, TakesUnalignedPixels) {
  NEEDS_GPUS(1);
  const Sizes nhwc = {1, 8, 8, 3};
  Tensor bytes = test::make(noise(193), {193});
  Tensor moved;
  ASSERT_OK(ts_tensor_to(bytes, 0, -1, false, moved.out()));
  const auto shifted = [&](const Tensor& from) {
    return test::Call("aten::as_strided")
        .tensor(from)
        .ints(nhwc)
        .ints({192, 24, 3, 1})
        .integer(1)
        .one();
  };
  EXPECT_EQ(test::read<float>(
                normalized(shifted(bytes), nhwc, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS)),
            test::read<float>(normalized(shifted(moved), nhwc, TS_DTYPE_FLOAT32,
                                         TS_MEMORY_FORMAT_CONTIGUOUS, 0)));
}

TEST(NormalizeGpu, RunsOnTheCurrentStream) {
  NEEDS_GPUS(1);
  const Sizes nhwc = {4, 32, 32, 3};
  Tensor src = test::make(noise(test::product(nhwc)), nhwc);
  Tensor moved;
  ASSERT_OK(ts_tensor_to(src, 0, -1, false, moved.out()));
  Tensor dst = normalized(moved, nhwc, TS_DTYPE_FLOAT32, TS_MEMORY_FORMAT_CONTIGUOUS,
                          0);  // loads the kernel
  ASSERT_OK(ts_device_synchronize(0));
  const ts_stream side = test::pool_stream();
  ts_stream_guard guard{};
  ASSERT_OK(ts_stream_guard_enter(side, &guard));
  {
    test::Gate gate(side);
    ASSERT_OK(ts_tensor_normalize_images(dst, moved, kMean, kStd, 3));
    EXPECT_FALSE(test::idle(side));
    EXPECT_TRUE(test::idle({0, 0}));
  }
  ASSERT_OK(ts_stream_guard_exit(guard));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "different devices",
               ts_tensor_normalize_images(dst, src, kMean, kStd, 3));
  ASSERT_OK(ts_device_synchronize(0));
}

}  // namespace
