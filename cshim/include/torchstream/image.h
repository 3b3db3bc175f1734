/* Images: compressed bytes to pixels. */
#ifndef TS_IMAGE_H_
#define TS_IMAGE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* libheif decodes AVIF and HEIC. It is loaded for the first such image, and need not be installed:
 * TS_ERROR_UNSUPPORTED then says how to install it. */
enum {
  TS_IMAGE_FORMAT_JPEG = 1,
  TS_IMAGE_FORMAT_PNG = 2,
  TS_IMAGE_FORMAT_WEBP = 3,
  TS_IMAGE_FORMAT_AVIF = 4,
  TS_IMAGE_FORMAT_HEIC = 5
};

/* What an image's header says. width and height are as stored, before orientation is applied. */
typedef struct ts_image_info {
  size_t size;         /* sizeof(ts_image_info), set by the caller */
  int32_t format;      /* TS_IMAGE_FORMAT_ */
  int32_t width;       /* pixels */
  int32_t height;      /* pixels */
  int32_t components;  /* as stored: 1 grey, 2 grey and alpha, 3 colour or palette, 4 CMYK or colour
                          and alpha */
  int32_t bit_depth;   /* as stored: 8; 1, 2, 4 or 16 in PNG; 10 or 12 in AVIF and HEIC */
  int32_t orientation; /* EXIF's, 1 to 8; 1 if the image has none, and of AVIF and HEIC, which are
                          decoded upright */
  bool progressive;    /* progressive JPEG or interlaced PNG */
} ts_image_info;

/* Reads the header of an image of `bytes` bytes. TS_ERROR_UNSUPPORTED if the format is unknown,
 * TS_ERROR_DECODE if the header is damaged. Bytes between the segments of a JPEG are skipped:
 * ts_image_decode judges them. */
TS_API ts_error* ts_image_get_info(const uint8_t* data, size_t bytes, ts_image_info* info);

/* State, tables and buffers of decoding, reused from image to image. One decoder serves one thread
 * at a time. */
typedef struct ts_image_decoder ts_image_decoder;

/* Makes a decoder that accepts images of up to max_pixels pixels (0: 178,956,970, Pillow's limit);
 * larger ones, and those with a side over 1,000,000, are TS_ERROR_UNSUPPORTED. The limit bounds
 * memory too: decoding a progressive JPEG or an interlaced PNG takes up to 8 bytes a pixel. */
TS_API ts_error* ts_image_decoder_new(int64_t max_pixels, ts_image_decoder** decoder);
TS_API void ts_image_decoder_free(ts_image_decoder* decoder);

/* What a decoder does with a JPEG or PNG that is damaged. */
enum {
  TS_IMAGE_DAMAGE_REFUSE = 0, /* TS_ERROR_DECODE; what a new decoder does */
  /* Decodes what libjpeg-turbo repairs with a warning, to the pixels of its repair; and a PNG whose
   * image data inflates to all of the image, whatever the checksums of it and of ancillary chunks,
   * with a palette that a later one replaces, or without an end. An image that is cut off is still
   * TS_ERROR_DECODE. */
  TS_IMAGE_DAMAGE_WARN = 1,
  /* As TS_IMAGE_DAMAGE_WARN, and an image that is cut off is decoded up to there: the rest of a
   * JPEG is what libjpeg-turbo makes up, grey in a baseline one; in a PNG, whose image data may
   * also be damaged, it is black or the palette's first colour. */
  TS_IMAGE_DAMAGE_PARTIAL = 2
};

/* Sets what the decoder does with damaged images from now on. */
TS_API ts_error* ts_image_decoder_set_damage(ts_image_decoder* decoder, int32_t damage);

/* Returns the damage of the last image that was decoded, for people to read; "" if none was met.
 * Borrowed until the next call with the decoder. */
TS_API const char* ts_image_decoder_tolerated(const ts_image_decoder* decoder);

/* How pixels are computed from those around a place. */
enum {
  TS_INTERPOLATION_DEFAULT = 0,
  TS_INTERPOLATION_NEAREST = 1,
  TS_INTERPOLATION_BILINEAR = 2,
  TS_INTERPOLATION_BICUBIC = 3 /* of resizing alone */
};

/* Which part of an image becomes which pixels. The crop box, in source pixels and inside the image,
 * is resized to resize_width x resize_height; the window of the resized image is kept, and mirrored
 * if flip is set. */
typedef struct ts_image_geometry {
  size_t size; /* sizeof(ts_image_geometry), set by the caller */
  int32_t crop_x, crop_y, crop_width, crop_height;
  int32_t resize_width, resize_height;
  int32_t window_x, window_y, window_width, window_height; /* inside the resized image */
  /* EXIF's number. 0 and 1 change nothing. 2 to 8 turn the image upright first; every other member
   * then describes the upright image. */
  int32_t orientation;
  bool flip; /* exchange left and right after the window is taken */
  /* TS_INTERPOLATION_ of resizing, with torchvision's uint8 results: antialiased bilinear (also the
   * default) and bicubic, and nearest, which is torchvision's "nearest" and not "nearest-exact".
   * The struct of earlier headers ends before it; that size is accepted, and means 0. */
  int32_t interpolation;
  /* A JPEG whose crop box is at least four times as large as its result, in both directions, may be
   * decoded at 1/2, 1/4 or 1/8 of its size: the smallest at which the box is still twice as large.
   * That is faster, and other pixels than those of a whole decode. Nearest takes no part in it, nor
   * do damaged images. */
  bool dct_scaling;
} ts_image_geometry;

/* Decodes an image of `bytes` bytes to RGB and applies the geometry. Grey is tripled, alpha is
 * dropped, CMYK and YCCK are converted as Pillow does, and 16 bits are cut to 8.
 *
 * dst: window_height rows of window_width * 3 bytes, `stride` bytes apart; undefined after an
 * error. Only the rows and columns that the geometry needs are decoded where the codec allows; the
 * pixels equal those of a whole decode.
 *
 * TS_ERROR_DECODE for damaged or truncated bytes; a JPEG that libjpeg-turbo repairs with a warning
 * counts as damaged. Truncation, wrong checksums (PNG), and wrong segments or restart markers
 * (JPEG) are found with any geometry. Other damage is found only where decoding reaches it, so not
 * below the last row that the geometry needs.
 *
 * ts_image_decoder_set_damage has damage tolerated. An image in which damage is found is then
 * decoded whole, whatever the geometry: neither its pixels nor the verdict depend on the part that
 * is wanted. No entry points are made for it. */
TS_API ts_error* ts_image_decode(ts_image_decoder* decoder,
                                 const uint8_t* data,
                                 size_t bytes,
                                 const ts_image_geometry* geometry,
                                 uint8_t* dst,
                                 size_t stride);

/* Writes a progressive JPEG as a baseline one, losslessly: with the same coefficients, quantisers
 * and frame, so that it decodes to the same pixels, but without metadata. It has the standard's
 * Huffman tables; that of a photograph is about 15 % larger. It can have entry points, and plans.
 *
 * written: the new file's bytes. 0: the image is no progressive JPEG of one or three components, is
 * damaged (whatever ts_image_decoder_set_damage says) or lacks coefficients, has coefficients that
 * a baseline file cannot have, or the capacity is not over the new file's bytes. The buffer's
 * content is then undefined.
 * TS_ERROR_DECODE for a damaged header, wrong segments or markers, and a file that is cut off. */
TS_API ts_error* ts_image_transcode(ts_image_decoder* decoder,
                                    const uint8_t* data,
                                    size_t bytes,
                                    uint8_t* buffer,
                                    size_t capacity,
                                    size_t* written);

/* How many JPEGs a decoder has decoded in which way. The pixels are the same in all of them. */
typedef struct ts_image_decoder_stats {
  size_t size;              /* sizeof(ts_image_decoder_stats), set by the caller */
  int64_t jpeg_own;         /* this library's Huffman decoding, libjpeg-turbo for the rest */
  int64_t jpeg_libjpeg;     /* all by libjpeg-turbo: progressive, arithmetic, CMYK, several scans */
  int64_t jpeg_gave_up;     /* of jpeg_libjpeg: damaged, or not as the header says */
  int64_t entries_used;     /* of jpeg_own: only the part that the crop needs was read */
  int64_t entries_verified; /* of jpeg_own: all entries were compared with the file */
  int64_t entries_refused;  /* entries were given and not used: wrong, or another file's */
  int64_t entries_made;
} ts_image_decoder_stats;

TS_API ts_error* ts_image_decoder_get_stats(const ts_image_decoder* decoder,
                                            ts_image_decoder_stats* stats);

/* Resizes pixels by the rules and with the results of ts_image_decode. src: height rows of
 * width * 3 bytes, src_stride bytes apart; dst as there. */
TS_API ts_error* ts_image_resize(ts_image_decoder* decoder,
                                 const uint8_t* src,
                                 int32_t width,
                                 int32_t height,
                                 size_t src_stride,
                                 const ts_image_geometry* geometry,
                                 uint8_t* dst,
                                 size_t dst_stride);

#ifdef __cplusplus
}
#endif

#endif /* TS_IMAGE_H_ */
