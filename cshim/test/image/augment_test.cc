// Augmentation gives the same bytes as torchvision's transforms, which make_augment.py wrote to
// data/augment.txt, and refuses parameters out of range.
#include "image/augment.h"

#include <zlib.h>

#include <cmath>
#include <limits>
#include <map>
#include <sstream>

#include "image/samples.h"

namespace {

using namespace samples;

struct FreeAugmenter {
  void operator()(ts_augmenter* augmenter) const { ts_augmenter_free(augmenter); }
};
using Augmenter = std::unique_ptr<ts_augmenter, FreeAugmenter>;

Augmenter new_augmenter() {
  ts_augmenter* augmenter = nullptr;
  const Outcome outcome(ts_augmenter_new(&augmenter));
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  return Augmenter(augmenter);
}

// make_augment.py has the same function.
Image numbered(uint64_t seed, int width, int height) {
  Image image{width, height, 3, {}};
  uint64_t state = seed;
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < 3; ++c) {
        state = state * 6364136223846793005ULL + 1442695040888963407ULL;
        const int noise = static_cast<int>(state >> 56);
        int slope = (x * 7 + y * 5 + c * 40) % 256;
        slope = slope < 128 ? 2 * slope : 510 - 2 * slope;
        const int values[] = {slope * 7 / 8 + noise / 8, noise, 100 + noise / 16,
                              slope * 7 / 8 + noise / 8};
        image.pixels.push_back(static_cast<uint8_t>(values[seed % 4]));
      }
    }
  }
  return image;
}

Outcome augment(ts_augmenter* augmenter, Image* image, const std::vector<ts_augment_op>& ops) {
  return Outcome(ts_augmenter_run(augmenter, image->pixels.data(), image->width, image->height,
                                  static_cast<size_t>(image->width) * 3, ops.data(),
                                  static_cast<int32_t>(ops.size())));
}

TEST(Augment, EqualsTorchvision) {
  const Augmenter augmenter = new_augmenter();
  const Bytes text = read_file("data/augment.txt");
  std::istringstream lines(std::string(text.begin(), text.end()));
  std::map<int, int> exact;
  std::map<int, int> near;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string how;
    uint64_t seed = 0;
    int width = 0;
    int height = 0;
    ts_augment_op op = {};
    words >> how >> seed >> width >> height >> op.kind;
    if (how == "#") continue;
    for (int32_t& i : op.integers) words >> i;
    for (double& v : op.values) words >> v;
    std::string expected;
    words >> expected;
    ASSERT_FALSE(words.fail()) << line;
    Image image = numbered(seed, width, height);
    std::vector<ts_augment_op> ops = {op};
    if (op.kind == TS_AUGMENT_MIX) {  // the sum of the image, its inverse and its mirror image
      ops = {{op.kind, {0}, {op.values[0]}},
             {TS_AUGMENT_INVERT, {}, {}},
             {op.kind, {1}, {op.values[1]}},
             {TS_AUGMENT_FLIP_HORIZONTAL, {}, {}},
             {op.kind, {2}, {op.values[2]}}};
    }
    const Outcome outcome = augment(augmenter.get(), &image, ops);
    const std::string what = line.substr(0, 200);
    ASSERT_EQ(outcome.code, TS_ERROR_NONE) << what << ": " << outcome.message;
    if (how == "exact") {
      char sum[9];
      std::snprintf(sum, sizeof sum, "%08lx",
                    crc32(0, image.pixels.data(), static_cast<unsigned>(image.pixels.size())));
      EXPECT_EQ(sum, expected) << what;
      ++exact[op.kind];
      continue;
    }
    ASSERT_EQ(how, "near");
    ASSERT_EQ(expected.size(), 2 * image.pixels.size()) << what;
    size_t different = 0;
    for (size_t i = 0; i < image.pixels.size(); ++i) {
      const int value = std::stoi(expected.substr(2 * i, 2), nullptr, 16);
      ASSERT_LE(std::abs(value - image.pixels[i]), 1) << what << " at byte " << i;
      if (value != image.pixels[i]) ++different;
    }
    EXPECT_LE(different, image.pixels.size() / 1000) << what;
    ++near[op.kind];
  }
  for (int kind = TS_AUGMENT_FLIP_HORIZONTAL; kind <= ts::image::kAugmentKinds; ++kind) {
    const bool rounds = kind == TS_AUGMENT_HUE || kind == TS_AUGMENT_BLUR;
    EXPECT_GE((rounds ? near : exact)[kind], rounds ? 4 : 12) << kind;
  }
}

// A mixture that is incomplete, nested or changes sizes is refused, and the pixels stay unchanged.
TEST(Augment, BrokenMixturesAreRefused) {
  const Augmenter augmenter = new_augmenter();
  const auto part = [](int32_t which, double weight = 0.25) {
    return ts_augment_op{TS_AUGMENT_MIX, {which}, {weight}};
  };
  const ts_augment_op cut = {TS_AUGMENT_CROP, {0, 0, 5, 5}, {}};
  const ts_augment_op back = {TS_AUGMENT_CROP, {0, 0, 17, 9}, {}};
  const std::vector<ts_augment_op> broken[] = {
      {part(0)},
      {part(1)},
      {part(2)},
      {part(0), part(1)},
      {part(0), part(0), part(2)},
      {part(0), part(2), part(2)},
      {part(0), cut, part(1), back, part(2)},
      {part(0), cut, part(2), back},
      {part(0), part(3)},
      {part(-1), part(2)},
      {part(0, -0.1), part(2)},
      {part(0), part(2, 1.1)},
  };
  for (const auto& ops : broken) {
    Image image = numbered(3, 17, 9);
    EXPECT_EQ(augment(augmenter.get(), &image, ops).code, TS_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(image.pixels, numbered(3, 17, 9).pixels);
  }
  Image image = numbered(3, 17, 9);
  const std::vector<ts_augment_op> whole = {part(0, 1), part(2, 0), cut,       back,
                                            part(0, 0), part(1, 0), part(2, 1)};
  EXPECT_EQ(augment(augmenter.get(), &image, whole).code, TS_ERROR_NONE);
}

// Rows with gaps, several operations, and sizes that change between them.
TEST(Augment, HonoursStrideAndOrder) {
  const Augmenter augmenter = new_augmenter();
  const Image source = numbered(3, 17, 9);
  const size_t stride = 17 * 3 + 5;
  Bytes apart(stride * 9 - 5, 0xA5);
  for (int y = 0; y < 9; ++y) {
    std::copy_n(source.at(0, y), 17 * 3, apart.begin() + static_cast<std::ptrdiff_t>(stride) * y);
  }
  const ts_augment_op pad = {TS_AUGMENT_CROP, {-2, -3, 21, 15, TS_PADDING_EDGE}, {}};
  const ts_augment_op turn = {TS_AUGMENT_QUARTER_TURNS, {1}, {}};
  const ts_augment_op back = {TS_AUGMENT_QUARTER_TURNS, {3}, {}};
  const ts_augment_op cut = {TS_AUGMENT_CROP, {2, 3, 17, 9}, {}};
  const ts_augment_op invert = {TS_AUGMENT_INVERT, {}, {}};
  const std::vector<ts_augment_op> ops = {pad, turn, invert, back, cut};
  const Outcome outcome(ts_augmenter_run(augmenter.get(), apart.data(), 17, 9, stride, ops.data(),
                                         static_cast<int32_t>(ops.size())));
  ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  for (int y = 0; y < 9; ++y) {
    for (int i = 0; i < 17 * 3; ++i) {
      ASSERT_EQ(apart[stride * static_cast<size_t>(y) + static_cast<size_t>(i)],
                255 - source.at(0, y)[i]);
    }
    for (size_t i = 17 * 3; y < 8 && i < stride; ++i) {
      ASSERT_EQ(apart[stride * static_cast<size_t>(y) + i], 0xA5);
    }
  }
}

TEST(Augment, RefusesParametersOutOfRange) {
  const Augmenter augmenter = new_augmenter();
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const int32_t least = std::numeric_limits<int32_t>::min();
  const int32_t most = std::numeric_limits<int32_t>::max();
  const std::vector<ts_augment_op> wrong = {
      {0, {}, {}},
      {ts::image::kAugmentKinds + 1, {}, {}},
      {TS_AUGMENT_PERMUTE, {0, 1, 3}, {}},
      {TS_AUGMENT_AFFINE, {TS_INTERPOLATION_NEAREST, 0, 0, 0, 0, 65536, 1}, {}},
      {TS_AUGMENT_AFFINE, {TS_INTERPOLATION_NEAREST, 0, 0, 0, 0, 17, 0}, {}},
      {TS_AUGMENT_BRIGHTNESS, {}, {-0.1}},
      {TS_AUGMENT_CONTRAST, {}, {nan}},
      {TS_AUGMENT_SHARPNESS, {}, {INFINITY}},
      {TS_AUGMENT_HUE, {}, {0.51}},
      {TS_AUGMENT_POSTERIZE, {9}, {}},
      {TS_AUGMENT_POSTERIZE, {-1}, {}},
      {TS_AUGMENT_QUARTER_TURNS, {4}, {}},
      {TS_AUGMENT_QUARTER_TURNS, {1}, {}},  // 9 x 7 becomes 7 x 9
      {TS_AUGMENT_BLUR, {2, 3}, {1, 1}},
      {TS_AUGMENT_BLUR, {19, 3}, {1, 1}},
      {TS_AUGMENT_BLUR, {3, 3}, {0, 1}},
      {TS_AUGMENT_BLUR, {7, 3}, {1, 1e-300}},
      {TS_AUGMENT_BLUR, {most, 1}, {1, 1}},
      {TS_AUGMENT_ERASE, {1, 0, 9, 1}, {}},
      {TS_AUGMENT_ERASE, {-1, 0, 1, 1}, {}},
      {TS_AUGMENT_ERASE, {most, 0, most, 1}, {}},
      {TS_AUGMENT_ERASE, {0, 0, least, 1}, {}},
      {TS_AUGMENT_CROP, {0, 0, 9, 6}, {}},
      {TS_AUGMENT_CROP, {0, 0, 0, 7}, {}},
      {TS_AUGMENT_CROP, {least, 0, 9, 7}, {}},
      {TS_AUGMENT_CROP, {most, most, 9, 7}, {}},
      {TS_AUGMENT_CROP, {-9, 0, 9, 7, TS_PADDING_REFLECT}, {}},
      {TS_AUGMENT_CROP, {0, 8, 9, 7, TS_PADDING_SYMMETRIC}, {}},
      {TS_AUGMENT_CROP, {0, 0, 9, 7, 4}, {}},
      {TS_AUGMENT_AFFINE, {3}, {1, 0, 0, 0, 1, 0}},
      {TS_AUGMENT_PERSPECTIVE, {TS_INTERPOLATION_NEAREST}, {nan}},
  };
  for (size_t i = 0; i < wrong.size(); ++i) {
    Image image = numbered(1, 9, 7);
    const Image before = image;
    const ts_augment_op invert = {TS_AUGMENT_INVERT, {}, {}};
    const Outcome outcome = augment(augmenter.get(), &image, {invert, wrong[i]});
    EXPECT_EQ(outcome.code, TS_ERROR_INVALID_ARGUMENT) << i;
    EXPECT_EQ(image.pixels, before.pixels) << i;
  }
  Image image = numbered(1, 9, 7);
  EXPECT_EQ(Outcome(ts_augmenter_run(nullptr, image.pixels.data(), 9, 7, 27, nullptr, 0)).code,
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(
      Outcome(ts_augmenter_run(augmenter.get(), image.pixels.data(), 9, 7, 26, nullptr, 0)).code,
      TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(
      Outcome(ts_augmenter_run(augmenter.get(), image.pixels.data(), 9, 7, 27, nullptr, 1)).code,
      TS_ERROR_INVALID_ARGUMENT);
}

// Any operation with any numbers gives a result or an error, without a report of the sanitizers.
// The memory around the pixels does not affect the result.
TEST(Augment, AnyNumbersGiveAResultOrAnError) {
  const Augmenter augmenter = new_augmenter();
  Random random(7);
  const double odd[] = {0, -0.0, 1, -1, 0.5, 1e-30, -1e-30, 1e30, -1e30, 1e300, 3e38, -7.25, 255};
  int done = 0;
  for (int i = 0; i < 40000; ++i) {
    Image image = numbered(static_cast<uint64_t>(i), uniform(random, 1, 9), uniform(random, 1, 9));
    ts_augment_op op = {};
    op.kind = uniform(random, 1, ts::image::kAugmentKinds);
    for (int32_t& n : op.integers) {
      n = random() % 8 == 0 ? static_cast<int32_t>(random()) : uniform(random, -3, 9);
    }
    for (double& v : op.values) v = odd[random() % (sizeof odd / sizeof *odd)];
    const Outcome outcome = augment(augmenter.get(), &image, {op});
    ASSERT_TRUE(outcome.code == TS_ERROR_NONE || outcome.code == TS_ERROR_INVALID_ARGUMENT)
        << op.kind << ": " << outcome.message;
    if (outcome.code == TS_ERROR_NONE) ++done;
  }
  EXPECT_GT(done, 10000);
}

}  // namespace
