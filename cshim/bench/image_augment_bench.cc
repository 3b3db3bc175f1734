// What each operation of ts_augmenter_run costs on a 224 x 224 picture.
//
//   image_augment_bench [REPETITIONS]
//
// Prints CPU nanoseconds per image, the best of ten rounds. The copy into the operation's buffer
// and back, which a chain of operations pays once, is in all of them, and is what "nothing" costs.
#include <algorithm>

#include "image_bench.h"

using namespace bench;

int main(int argc, char** argv) {
  const int repetitions = argc > 1 ? std::atoi(argv[1]) : 50;
  constexpr int kSide = 224;
  std::mt19937 random(1);
  Bytes source(size_t{kSide} * kSide * 3);
  for (size_t i = 0; i < source.size(); ++i) {
    source[i] = static_cast<uint8_t>(i / 3 % 200 + random() % 50);
  }
  ts_augmenter* augmenter = nullptr;
  check(ts_augmenter_new(&augmenter));
  const struct {
    const char* name;
    ts_augment_op op;
  } cases[] = {
      {"nothing", {TS_AUGMENT_QUARTER_TURNS, {0}, {}}},
      {"horizontal flip", {TS_AUGMENT_FLIP_HORIZONTAL, {}, {}}},
      {"vertical flip", {TS_AUGMENT_FLIP_VERTICAL, {}, {}}},
      {"quarter turn", {TS_AUGMENT_QUARTER_TURNS, {1}, {}}},
      {"crop, padding 4, reflect",
       {TS_AUGMENT_CROP, {-4, 4, kSide, kSide, TS_PADDING_REFLECT}, {}}},
      {"brightness", {TS_AUGMENT_BRIGHTNESS, {}, {1.3}}},
      {"contrast", {TS_AUGMENT_CONTRAST, {}, {1.3}}},
      {"saturation", {TS_AUGMENT_SATURATION, {}, {1.3}}},
      {"hue", {TS_AUGMENT_HUE, {}, {0.1}}},
      {"grayscale", {TS_AUGMENT_GRAYSCALE, {}, {}}},
      {"invert", {TS_AUGMENT_INVERT, {}, {}}},
      {"solarize", {TS_AUGMENT_SOLARIZE, {}, {128}}},
      {"posterize", {TS_AUGMENT_POSTERIZE, {4}, {}}},
      {"autocontrast", {TS_AUGMENT_AUTOCONTRAST, {}, {}}},
      {"equalize", {TS_AUGMENT_EQUALIZE, {}, {}}},
      {"sharpness", {TS_AUGMENT_SHARPNESS, {}, {1.7}}},
      {"blur 3 x 3", {TS_AUGMENT_BLUR, {3, 3}, {1, 1}}},
      {"blur 23 x 23", {TS_AUGMENT_BLUR, {23, 23}, {2, 2}}},
      {"erase a third", {TS_AUGMENT_ERASE, {20, 20, 130, 130}, {}}},
      {"rotate 20, nearest",
       {TS_AUGMENT_AFFINE, {TS_INTERPOLATION_NEAREST, 1}, {0.94, -0.342, 0, 0.342, 0.94, 0}}},
      {"rotate 20, bilinear",
       {TS_AUGMENT_AFFINE, {TS_INTERPOLATION_BILINEAR, 1}, {0.94, -0.342, 0, 0.342, 0.94, 0}}},
      {"perspective, bilinear",
       {TS_AUGMENT_PERSPECTIVE,
        {TS_INTERPOLATION_BILINEAR, 1},
        {1.07, -0.1, -8, 0.08, 1.08, -22, -4e-4, -6e-5}}},
  };
  for (const auto& c : cases) {
    Bytes pixels = source;
    double best = 1e9;
    for (int round = 0; round < 10; ++round) {
      const double began = cpu_seconds();
      for (int i = 0; i < repetitions; ++i) {
        check(
            ts_augmenter_run(augmenter, pixels.data(), kSide, kSide, size_t{kSide} * 3, &c.op, 1));
      }
      best = std::min(best, (cpu_seconds() - began) / repetitions);
      pixels = source;
    }
    std::printf("%-26s %8.0f\n", c.name, best * 1e9);
  }
  ts_augmenter_free(augmenter);
  return 0;
}
