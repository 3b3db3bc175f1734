// A decoder with JPEG engines: on the CPU, with a stand-in for nvJPEG (test/cuda/null_nvjpeg.c)
// whose images are a pattern.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <iostream>
#include <memory>

#include "image/steps.h"
#include "jpeg/plan.h"
#include "support.h"

namespace {

using namespace samples;

// The stand-in, if that is the library which is loaded.
struct StandIn {
  int (*live)() = nullptr;
  int (*decoded)() = nullptr;
  void (*fail)(int calls) = nullptr;
  void (*widen)(int pixels) = nullptr;
  uint8_t (*pixel)(int x, int y, int channel) = nullptr;

  StandIn() {
    // It stays loaded, as the library keeps it.
    void* const library = dlopen("libnvjpeg.so.13", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) return;
    load(library, "null_nvjpeg_live", live);
    load(library, "null_nvjpeg_decoded", decoded);
    load(library, "null_nvjpeg_fail", fail);
    load(library, "null_nvjpeg_widen", widen);
    load(library, "null_nvjpeg_pixel", pixel);
  }
  bool is_loaded() const { return live != nullptr && pixel != nullptr; }

  // Its image of this size.
  Image image(int width, int height) const {
    Image image{width, height, 3, {}};
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        for (int c = 0; c < 3; ++c) image.pixels.push_back(pixel(x, y, c));
      }
    }
    return image;
  }

 private:
  template <typename Function>
  static void load(void* library, const char* name, Function*& function) {
    function = reinterpret_cast<Function*>(dlsym(library, name));
  }
};

struct FreeGpuDecoder {
  void operator()(ts_gpu_decoder* decoder) const { ts_gpu_decoder_free(decoder); }
};
using GpuDecoder = std::unique_ptr<ts_gpu_decoder, FreeGpuDecoder>;

GpuDecoder new_gpu_decoder(int32_t device, int64_t images, size_t scratch) {
  ts_gpu_decoder* decoder = nullptr;
  EXPECT_OK(ts_gpu_decoder_new(device, images, 32 << 20, scratch, &decoder));
  return GpuDecoder(decoder);
}

ts_gpu_engines engines_of(const GpuDecoder& decoder) {
  ts_gpu_engines engines = {};
  engines.size = sizeof engines;
  EXPECT_OK(ts_gpu_decoder_get_engines(decoder.get(), &engines));
  return engines;
}

// How far the engines' pixels of smooth_picture may be from libjpeg-turbo's, in levels: in the mean
// of a sampling's images, and at most. Of 4:2:2 and 4:2:0 libjpeg-turbo's own pixels differ by 0.95
// and 7, and by 1.29 and 11, between chrominance that is interpolated and repeated, as nvJPEG does.
struct Near {
  size_t kind;  // of kKinds
  double mean;
  int most;
};
constexpr Near kNear[] = {{0, 0.5, 2}, {1, 1.5, 9}, {2, 1.8, 13}, {6, 0.5, 2}};

// Reports whether the frame of a file is a baseline one: 16-bit quantisers make another.
bool is_baseline(const Bytes& file) {
  size_t at = 2;
  while (file[at + 1] < 0xC0 || file[at + 1] > 0xC2) {
    const size_t length = static_cast<size_t>(file[at + 2]) << 8 | file[at + 3];
    at += file[at + 1] == 0xFF ? 1 : 2 + length;  // markers may have more than one 0xFF
  }
  return file[at + 1] == 0xC0;
}

struct Job {
  bool file;     // planned as a whole file
  bool engines;  // that engines decode
  bool refused;  // by the stand-in
  Bytes by_kernels, by_engines;
};

// A batch of images of all kinds, most of them planned as files.
struct Batch {
  static constexpr int64_t kImages = 24;

  int32_t device;
  test::HostMemory memory;
  size_t used = ts_gpu_decoder_head_bytes(kImages);
  std::vector<ts_gpu_decode_image> images;
  std::vector<Job> jobs;
  size_t result_bytes = 0;

  Batch(int32_t on, Random& random, ts_image_decoder* host, const StandIn& stand_in)
      : device(on), memory(on, 32 << 20) {
    for (int64_t i = 0; i < kImages; ++i) add(random, host, stand_in);
  }

  void add(Random& random, ts_image_decoder* host, const StandIn& stand_in) {
    const Kind& kind = kKinds[random() % 8];
    const std::string name = kind.name;
    const int width = uniform(random, 1, 200);
    const int height = uniform(random, 1, 200);
    const Bytes file = usual(random, kind, width, height);
    const ts_image_geometry g = draw_geometry(random, width, height, 100);
    Bytes blob(1 << 18);
    ts_image_entries_made made = {};
    EXPECT_OK(ts_image_make_entries(host, file.data(), file.size(), {blob.data(), blob.size(), 5},
                                    &made));
    Job job = {random() % 4 != 0, false, false, {}, {}};
    const bool suits =
        job.file && (name == "444" || name == "422" || name == "420" || name == "grey");
    job.engines = suits && is_baseline(file);
    job.refused = suits && !is_baseline(file);
    uint8_t* const to = memory.data() + used;
    const size_t room = (32 << 20) - used;
    size_t at = 0, planned = 0;
    if (job.file) {
      EXPECT_OK(ts_image_plan_file(host, file.data(), file.size(), &g, {blob.data(), made.bytes},
                                   &made.proof, {to, room, nullptr}, &at, &planned));
    } else {
      EXPECT_OK(ts_image_plan_segments(host, file.data(), file.size(), &g,
                                       {blob.data(), made.bytes}, &made.proof, to, room, &planned));
    }
    ASSERT_GT(planned, 0u);
    Image image;
    EXPECT_EQ(decode(host, file, g, &image).code, TS_ERROR_NONE);
    job.by_kernels = image.pixels;
    const Image pattern = stand_in.image(width, height);
    job.by_engines.resize(image.pixels.size());
    EXPECT_OK(ts_image_resize(host, pattern.pixels.data(), width, height,
                              static_cast<size_t>(width) * 3, &g, job.by_engines.data(),
                              static_cast<size_t>(g.window_width) * 3));
    images.push_back({used, result_bytes});
    used += planned;
    result_bytes += image.pixels.size();
    jobs.push_back(std::move(job));
  }

  int64_t for_engines() const {
    return std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return job.engines; });
  }

  int64_t refused() const {
    return std::count_if(jobs.begin(), jobs.end(), [](const Job& job) { return job.refused; });
  }

  Bytes run(ts_gpu_decoder* decoder) const {
    const ts_stream stream = test::stream_on(device);
    test::Tensor results =
        test::empty({static_cast<int64_t>(result_bytes)}, TS_DTYPE_UINT8, device);
    const test::HostMemory flags(device, images.size() * sizeof(int32_t));
    std::memset(flags.data(), 1, images.size() * sizeof(int32_t));
    test::synchronize(device);
    EXPECT_OK(ts_gpu_decoder_run(decoder, memory.data(), used, images.data(), kImages, results,
                                 reinterpret_cast<int32_t*>(flags.data()), stream));
    test::synchronize(device);
    for (int64_t i = 0; i < kImages; ++i) {
      EXPECT_EQ(reinterpret_cast<const int32_t*>(flags.data())[i], 0) << i;
    }
    return test::read<uint8_t>(results);
  }

  // Compares the pixels of all images with those that they have from engines that work, or fail.
  void check(const Bytes& results, bool engines) const {
    for (size_t i = 0; i < jobs.size(); ++i) {
      const Bytes& wanted = jobs[i].engines && engines ? jobs[i].by_engines : jobs[i].by_kernels;
      ASSERT_EQ(std::memcmp(results.data() + images[i].result, wanted.data(), wanted.size()), 0)
          << "image " << i << " of engines: " << jobs[i].engines;
    }
  }
};

class Engines : public testing::Test {
 protected:
  void SetUp() override {
    if (!stand_in.is_loaded()) GTEST_SKIP() << "the stand-in for nvJPEG is not loaded";
    stand_in.fail(0);
    stand_in.widen(0);
  }
  const StandIn stand_in;
  const Decoder host = new_decoder();
};

// Also in parts, and beside images of all other plans.
TEST_F(Engines, PixelsOfFilesAreTheirsAndOthersTheHosts) {
  Random random(91);
  const int live = stand_in.live();
  for (const size_t scratch : {size_t{256} << 20, size_t{3} << 20}) {
    const GpuDecoder decoder = new_gpu_decoder(TS_DEVICE_CPU, Batch::kImages, scratch);
    EXPECT_EQ(engines_of(decoder).engines, 0);
    EXPECT_OK(ts_gpu_decoder_add_engines(decoder.get()));
    EXPECT_EQ(engines_of(decoder).engines, 7);
    EXPECT_GT(engines_of(decoder).bytes, 0u);
    int64_t decoded = 0;
    int64_t refused = 0;
    for (int i = 0; i < 6; ++i) {
      const Batch batch(TS_DEVICE_CPU, random, host.get(), stand_in);
      batch.check(batch.run(decoder.get()), true);
      batch.check(batch.run(decoder.get()), true);  // a batch may run again
      decoded += 2 * batch.for_engines();
      refused += 2 * batch.refused();
      EXPECT_EQ(engines_of(decoder).decoded, decoded);
      EXPECT_EQ(engines_of(decoder).refused, refused);
    }
    EXPECT_GT(decoded, 60);
    EXPECT_GT(refused, 0);
    EXPECT_EQ(engines_of(decoder).failed, 0);
    EXPECT_EQ(engines_of(decoder).failure, nullptr);
  }
  EXPECT_EQ(stand_in.live(), live);
}

TEST_F(Engines, DecodersWithoutThemDecodeFilesBySegments) {
  Random random(92);
  const GpuDecoder decoder = new_gpu_decoder(TS_DEVICE_CPU, Batch::kImages, 64 << 20);
  const Batch batch(TS_DEVICE_CPU, random, host.get(), stand_in);
  batch.check(batch.run(decoder.get()), false);
}

TEST_F(Engines, KernelsDecodeTheImagesOfACallThatFails) {
  Random random(93);
  const GpuDecoder decoder = new_gpu_decoder(TS_DEVICE_CPU, Batch::kImages, 256 << 20);
  EXPECT_OK(ts_gpu_decoder_add_engines(decoder.get()));
  const Batch batch(TS_DEVICE_CPU, random, host.get(), stand_in);
  batch.check(batch.run(decoder.get()), true);
  stand_in.fail(1);
  batch.check(batch.run(decoder.get()), false);
  EXPECT_EQ(engines_of(decoder).failed, batch.for_engines());
  EXPECT_STREQ(engines_of(decoder).failure, "EXECUTION_FAILED");
  batch.check(batch.run(decoder.get()), true);
  EXPECT_EQ(engines_of(decoder).decoded, 2 * batch.for_engines());
}

// nvJPEG would write as many pixels as it reads from the header.
TEST_F(Engines, AnotherSizeIsLeftToTheKernels) {
  Random random(94);
  const GpuDecoder decoder = new_gpu_decoder(TS_DEVICE_CPU, Batch::kImages, 256 << 20);
  EXPECT_OK(ts_gpu_decoder_add_engines(decoder.get()));
  const Batch batch(TS_DEVICE_CPU, random, host.get(), stand_in);
  stand_in.widen(1);
  batch.check(batch.run(decoder.get()), false);
  EXPECT_EQ(engines_of(decoder).refused, batch.for_engines() + batch.refused());
  EXPECT_EQ(engines_of(decoder).decoded, 0);
}

// On devices that compute nothing: all that the host does.
TEST_F(Engines, OnADeviceEveryFileIsDecoded) {
  NEEDS_GPUS(1);
  Random random(95);
  const int live = stand_in.live();
  {
    const GpuDecoder decoder = new_gpu_decoder(0, Batch::kImages, 64 << 20);
    EXPECT_OK(ts_gpu_decoder_add_engines(decoder.get()));
    const int before = stand_in.decoded();
    const Batch batch(0, random, host.get(), stand_in);
    for (int i = 0; i < 3; ++i) batch.run(decoder.get());
    EXPECT_EQ(stand_in.decoded() - before, 3 * batch.for_engines());
    EXPECT_EQ(engines_of(decoder).decoded, 3 * batch.for_engines());
  }
  EXPECT_EQ(stand_in.live(), live);
}

// Returns an image as smooth as most of a photograph.
Image smooth_picture(Random& random, int width, int height, int channels) {
  Image image{width, height, channels, {}};
  double phase[3];
  for (double& p : phase) p = uniform(random, 0, 628) / 100.0;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < channels; ++c) {
        const double value = 128 + 60 * std::sin(x / 17.0 + phase[c]) +
                             50 * std::sin(y / 13.0 - x / 29.0 + phase[(c + 1) % 3]);
        image.pixels.push_back(static_cast<uint8_t>(value + uniform(random, -3, 3)));
      }
    }
  }
  return image;
}

// With nvJPEG and engines: images of each sampling that they take, of odd sizes, beside images that
// the kernels decode.
TEST(EnginesOnAGpu, PixelsAreNearTheHosts) {
  NEEDS_GPUS(1);
  if (StandIn().is_loaded()) GTEST_SKIP() << "the stand-in for nvJPEG is loaded";
  constexpr int64_t kImages = 64;
  constexpr size_t kStaging = 32 << 20;
  const GpuDecoder decoder = new_gpu_decoder(0, kImages, 256 << 20);
  const test::Outcome added(ts_gpu_decoder_add_engines(decoder.get()));
  if (added.code == TS_ERROR_UNSUPPORTED) GTEST_SKIP() << added;
  ASSERT_EQ(added.code, TS_ERROR_NONE) << added;
  const Decoder host = new_decoder();
  Random random(96);
  for (const Near& near : kNear) {
    const Kind& kind = kKinds[near.kind];
    const test::HostMemory memory(0, kStaging);
    size_t used = ts_gpu_decoder_head_bytes(kImages);
    std::vector<ts_gpu_decode_image> images;
    std::vector<Bytes> expected;
    size_t result_bytes = 0;
    for (int64_t i = 0; i < kImages; ++i) {
      const int width = uniform(random, 33, 500);
      const int height = uniform(random, 33, 400);
      JpegOptions options;
      options.quality = 90;
      for (int c = 0; c < kind.channels; ++c) {
        options.sampling[c][0] = kind.factors[c][0];
        options.sampling[c][1] = kind.factors[c][1];
      }
      const Bytes file = encode_jpeg(smooth_picture(random, width, height, kind.channels), options);
      const ts_image_geometry g =
          i % 2 == 0 ? crop(0, 0, width, height) : draw_geometry(random, width, height, 200);
      Bytes blob(1 << 18);
      ts_image_entries_made made = {};
      ASSERT_OK(ts_image_make_entries(host.get(), file.data(), file.size(),
                                      {blob.data(), blob.size(), 5}, &made));
      size_t at = 0, planned = 0;
      const auto plan = i % 4 == 3 ? ts_image_plan_append : ts_image_plan_file;
      uint64_t taken = used;
      ASSERT_OK(plan(host.get(), file.data(), file.size(), &g, {blob.data(), made.bytes},
                     &made.proof, {memory.data(), kStaging, &taken}, &at, &planned));
      ASSERT_GT(planned, 0u);
      images.push_back({at, result_bytes});
      used = taken;
      Image image;
      ASSERT_EQ(decode(host.get(), file, g, &image).code, TS_ERROR_NONE);
      expected.push_back(image.pixels);
      result_bytes += image.pixels.size();
    }
    const int64_t before = engines_of(decoder).decoded;
    const ts_stream stream = test::stream_on(0);
    test::Tensor results = test::empty({static_cast<int64_t>(result_bytes)}, TS_DTYPE_UINT8, 0);
    const test::HostMemory flags(0, kImages * sizeof(int32_t));
    test::synchronize(0);
    ASSERT_OK(ts_gpu_decoder_run(decoder.get(), memory.data(), used, images.data(), kImages,
                                 results, reinterpret_cast<int32_t*>(flags.data()), stream));
    test::synchronize(0);
    const Bytes got = test::read<uint8_t>(results);
    EXPECT_EQ(engines_of(decoder).decoded - before, kImages / 4 * 3) << kind.name;
    EXPECT_EQ(engines_of(decoder).failed, 0) << engines_of(decoder).failure;
    double sum = 0, count = 0;
    int most = 0;
    for (int64_t i = 0; i < kImages; ++i) {
      EXPECT_EQ(reinterpret_cast<const int32_t*>(flags.data())[i], 0) << i;
      const uint8_t* const pixels = got.data() + images[i].result;
      if (i % 4 == 3) {
        EXPECT_EQ(std::memcmp(pixels, expected[i].data(), expected[i].size()), 0)
            << kind.name << ", image " << i << ", which the kernels decode";
        continue;
      }
      for (size_t k = 0; k < expected[i].size(); ++k) {
        const int difference = std::abs(pixels[k] - expected[i][k]);
        sum += difference;
        most = std::max(most, difference);
      }
      count += static_cast<double>(expected[i].size());
    }
    std::cout << kind.name << ": mean difference " << sum / count << " levels, at most " << most
              << "\n";
    EXPECT_LE(sum / count, near.mean) << kind.name;
    EXPECT_LE(most, near.most) << kind.name;
  }
}

TEST(EnginesArguments, WrongOnesAreRefused) {
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "decoder is NULL", ts_gpu_decoder_add_engines(nullptr));
  ts_gpu_engines engines = {};
  engines.size = sizeof engines;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "decoder is NULL",
               ts_gpu_decoder_get_engines(nullptr, &engines));
  const GpuDecoder decoder = new_gpu_decoder(TS_DEVICE_CPU, 1, 1 << 20);
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "engines is NULL",
               ts_gpu_decoder_get_engines(decoder.get(), nullptr));
  engines.size = 1;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "size",
               ts_gpu_decoder_get_engines(decoder.get(), &engines));
  if (!StandIn().is_loaded()) return;
  EXPECT_OK(ts_gpu_decoder_add_engines(decoder.get()));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "has engines", ts_gpu_decoder_add_engines(decoder.get()));
}

}  // namespace
