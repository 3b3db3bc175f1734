// The measurement of nvJPEG: on a GPU with the library, or on null devices with a stand-in for the
// library (cshim/test/cuda/null_nvjpeg.c).
#include <algorithm>
#include <fstream>
#include <iterator>

#include "support.h"
#include "torchstream_lab.h"

namespace {

// Consecutive images.
struct Images {
  std::vector<uint8_t> data;
  std::vector<size_t> sizes;

  void add(const std::string& name, int copies) {
    std::ifstream file("data/" + name, std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), {});
    ASSERT_FALSE(bytes.empty()) << name;
    for (int i = 0; i < copies; ++i) {
      data.insert(data.end(), bytes.begin(), bytes.end());
      sizes.push_back(bytes.size());
    }
  }
};

ts_error* measure(const Images& images, int32_t backend, int64_t batch, int32_t threads,
                  ts_bench_nvjpeg_rate* rate) {
  return ts_bench_nvjpeg(0, backend, images.data.data(), images.sizes.data(),
                         static_cast<int64_t>(images.sizes.size()), batch, threads, 0.02, rate);
}

// Returns a count of the stand-in for nvJPEG, or -1 if another library is loaded.
int stand_in(const char* name) {
  void* const library = dlopen("libnvjpeg.so.13", RTLD_NOW | RTLD_NOLOAD);
  if (library == nullptr) return -1;
  auto* const count = reinterpret_cast<int (*)()>(dlsym(library, name));
  dlclose(library);
  return count == nullptr ? -1 : count();
}

TEST(Nvjpeg, WrongArgumentsAreRefused) {
  const uint8_t data[4] = {};
  const size_t sizes[1] = {4};
  ts_bench_nvjpeg_rate rate{};
  rate.images = 77;
  constexpr int32_t kHardware = TS_BENCH_NVJPEG_HARDWARE;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "backend",
               ts_bench_nvjpeg(0, 1, data, sizes, 1, 1, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_bench_nvjpeg(0, kHardware, nullptr, sizes, 1, 1, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_bench_nvjpeg(0, kHardware, data, nullptr, 1, 1, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "NULL",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 1, 1, 1, 1, nullptr));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "count",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 0, 1, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "batch",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 1, 0, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "batch",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 1, 4097, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "threads",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 1, 1, 65, 1, &rate));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "seconds",
               ts_bench_nvjpeg(0, kHardware, data, sizes, 1, 1, 1, 0, &rate));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU",
               ts_bench_nvjpeg(99, kHardware, data, sizes, 1, 1, 1, 1, &rate));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU",
               ts_bench_nvjpeg(TS_DEVICE_CPU, kHardware, data, sizes, 1, 1, 1, 1, &rate));
  EXPECT_EQ(rate.images, 77);
}

class NvjpegOn : public testing::TestWithParam<int32_t> {};

TEST_P(NvjpegOn, DecodesWholeBatches) {
  NEEDS_GPUS(1);
  Images images;
  images.add("420.jpg", 5);
  images.add("rgb.png", 1);  // left out
  images.add("444.jpg", 6);
  ts_bench_nvjpeg_rate rate{};
  const test::Outcome outcome(measure(images, GetParam(), 4, 3, &rate));
  if (outcome.code == TS_ERROR_UNSUPPORTED) GTEST_SKIP() << outcome;
  ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome;
  EXPECT_EQ(rate.left_out, 1);
  EXPECT_EQ(rate.batch, 4);
  EXPECT_GE(rate.images, 3 * 4);  // each thread decodes at least a batch
  EXPECT_EQ(rate.images % 4, 0);
  EXPECT_GE(rate.seconds, 0.02);
  EXPECT_GE(rate.cpu_seconds, 0);
  EXPECT_EQ(rate.engines > 0, GetParam() == TS_BENCH_NVJPEG_HARDWARE);
}

TEST_P(NvjpegOn, FewImagesAreOneBatch) {
  NEEDS_GPUS(1);
  Images images;
  images.add("420.jpg", 3);
  ts_bench_nvjpeg_rate rate{};
  const test::Outcome outcome(measure(images, GetParam(), 256, 1, &rate));
  if (outcome.code == TS_ERROR_UNSUPPORTED) GTEST_SKIP() << outcome;
  ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome;
  EXPECT_EQ(rate.batch, 3);
}

INSTANTIATE_TEST_SUITE_P(All, NvjpegOn,
                         testing::Values(TS_BENCH_NVJPEG_CUDA, TS_BENCH_NVJPEG_HARDWARE));

TEST(Nvjpeg, EnginesAreAskedForEachImage) {
  NEEDS_GPUS(1);
  Images images;
  images.add("progressive.jpg", 2);
  ts_bench_nvjpeg_rate rate{};
  EXPECT_FAILS(TS_ERROR_UNSUPPORTED, "", measure(images, TS_BENCH_NVJPEG_HARDWARE, 4, 1, &rate));
  EXPECT_EQ(rate.images, 0);
  images.add("420.jpg", 4);
  const test::Outcome outcome(measure(images, TS_BENCH_NVJPEG_HARDWARE, 4, 1, &rate));
  if (outcome.code == TS_ERROR_UNSUPPORTED) GTEST_SKIP() << outcome;
  ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome;
  EXPECT_EQ(rate.left_out, 2);
}

// Only the stand-in counts its objects.
TEST(Nvjpeg, EverythingIsDestroyed) {
  NEEDS_GPUS(1);
  Images images;
  images.add("420.jpg", 8);
  ts_bench_nvjpeg_rate rate{};
  const int before = std::max(stand_in("null_nvjpeg_decoded"), 0);
  const test::Outcome outcome(measure(images, TS_BENCH_NVJPEG_HARDWARE, 2, 4, &rate));
  const int live = stand_in("null_nvjpeg_live");
  if (live < 0) GTEST_SKIP() << "the stand-in for nvJPEG is not loaded";
  ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome;
  EXPECT_EQ(live, 0);
  // Each thread decodes all images once before the clock starts.
  EXPECT_EQ(stand_in("null_nvjpeg_decoded") - before, rate.images + 4 * 8);
  EXPECT_EQ(rate.engines, 7);
}

}  // namespace
