// The operations that image_augment_bench and decode_bench time, on 224 x 224 pixels.
#pragma once

#include "torchstream_image.h"

namespace bench {

constexpr int kSide = 224;

struct Operation {
  const char* name;
  ts_augment_op op;
};

constexpr Operation kOperations[] = {
    {"nothing", {TS_AUGMENT_QUARTER_TURNS, {0}, {}}},
    {"horizontal flip", {TS_AUGMENT_FLIP_HORIZONTAL, {}, {}}},
    {"vertical flip", {TS_AUGMENT_FLIP_VERTICAL, {}, {}}},
    {"quarter turn", {TS_AUGMENT_QUARTER_TURNS, {1}, {}}},
    {"crop, padding 4, reflect", {TS_AUGMENT_CROP, {-4, 4, kSide, kSide, TS_PADDING_REFLECT}, {}}},
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

}  // namespace bench
