/* Augmentation: torchvision's transforms on pixels. */
#ifndef TS_AUGMENTER_H_
#define TS_AUGMENTER_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Operations, and the members of ts_augment_op that each reads: i are the integers, v the values.
 * Results equal torchvision.transforms.v2.functional on uint8 RGB tensors. */
enum {
  TS_AUGMENT_FLIP_HORIZONTAL = 1,
  TS_AUGMENT_FLIP_VERTICAL = 2,
  TS_AUGMENT_QUARTER_TURNS = 3, /* i[0]: 0 to 3, counter-clockwise */
  TS_AUGMENT_CROP = 4,       /* i[0..3]: x, y, width, height; i[4]: TS_PADDING_ outside the image;
                                i[5..7]: red, green, blue of TS_PADDING_CONSTANT */
  TS_AUGMENT_BRIGHTNESS = 5, /* v[0]: factor, at least 0, as in the next three */
  TS_AUGMENT_CONTRAST = 6,
  TS_AUGMENT_SATURATION = 7,
  TS_AUGMENT_SHARPNESS = 8,
  TS_AUGMENT_HUE = 9, /* v[0]: -0.5 to 0.5 */
  TS_AUGMENT_GRAYSCALE = 10,
  TS_AUGMENT_INVERT = 11,
  TS_AUGMENT_SOLARIZE = 12,  /* v[0]: threshold, 0 to 255 */
  TS_AUGMENT_POSTERIZE = 13, /* i[0]: bits, 0 to 8 */
  TS_AUGMENT_AUTOCONTRAST = 14,
  TS_AUGMENT_EQUALIZE = 15,
  TS_AUGMENT_BLUR = 16,  /* i[0], i[1]: width and height of the kernel, odd; v[0], v[1]: sigmas,
                          * at least 1e-6 */
  TS_AUGMENT_ERASE = 17, /* i[0..3]: x, y, width, height; i[4..6]: red, green, blue */
  TS_AUGMENT_AFFINE =
      18, /* i[0]: TS_INTERPOLATION_; i[1]: 1 if there is a fill, else 0; i[2..4]: the fill's red,
             green, blue; i[5], i[6]: width and height of the result, 0 for the image's; v[0..5]:
             the inverse matrix, row by row, in pixels from the image's centre */
  TS_AUGMENT_PERSPECTIVE = 19, /* i[0..4] as above; v[0..7]: torchvision's eight coefficients */
  TS_AUGMENT_PERMUTE = 20,     /* i[0..2]: which channels become red, green and blue */
  /* A weighted sum of the results of several chains of operations on one image, in float32,
   * truncated to uint8. The operation occurs several times. i[0] is 0 at the start: the image times
   * v[0] is the first summand, and the first chain follows. i[0] is 1 at the end of a chain: adds
   * the image times v[0], and restores the original image. i[0] is 2 at the end of the last chain:
   * adds too, and the sum becomes the image. v[0]: 0 to 1. Sums do not nest, and each chain keeps
   * the image's size. */
  TS_AUGMENT_MIX = 21
};
enum {
  TS_PADDING_CONSTANT = 0,
  TS_PADDING_EDGE = 1,
  TS_PADDING_REFLECT = 2,
  TS_PADDING_SYMMETRIC = 3
};

typedef struct ts_augment_op {
  int32_t kind; /* TS_AUGMENT_ */
  int32_t integers[9];
  double values[8];
} ts_augment_op;

/* Buffers, reused from image to image. One thread uses an augmenter at a time. */
typedef struct ts_augmenter ts_augmenter;
TS_API ts_error* ts_augmenter_new(ts_augmenter** augmenter);
TS_API void ts_augmenter_free(ts_augmenter* augmenter);

/* Runs `count` operations in order and in place on `height` rows of `width` RGB pixels, `stride`
 * bytes apart. Together the operations must keep the image's size. Returns
 * TS_ERROR_INVALID_ARGUMENT, with the pixels unchanged, if a parameter is out of range. */
TS_API ts_error* ts_augmenter_run(ts_augmenter* augmenter,
                                  uint8_t* pixels,
                                  int32_t width,
                                  int32_t height,
                                  size_t stride,
                                  const ts_augment_op* ops,
                                  int64_t count);

#ifdef __cplusplus
}
#endif

#endif /* TS_AUGMENTER_H_ */
