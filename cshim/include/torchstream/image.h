/* Images: compressed bytes to pixels. */
#ifndef TS_IMAGE_H_
#define TS_IMAGE_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* libheif decodes AVIF and HEIC. The library loads it for the first such image. If it is not
 * installed, the call returns TS_ERROR_UNSUPPORTED with instructions to install it. */
enum {
  TS_IMAGE_FORMAT_JPEG = 1,
  TS_IMAGE_FORMAT_PNG = 2,
  TS_IMAGE_FORMAT_WEBP = 3,
  TS_IMAGE_FORMAT_AVIF = 4,
  TS_IMAGE_FORMAT_HEIC = 5
};

/* The contents of an image's header. width and height are as stored, before orientation is applied.
 */
typedef struct ts_image_info {
  size_t size;         /* sizeof(ts_image_info), set by the caller */
  int32_t format;      /* TS_IMAGE_FORMAT_ */
  int32_t width;       /* pixels */
  int32_t height;      /* pixels */
  int32_t components;  /* as stored: 1 grey, 2 grey and alpha, 3 colour or palette, 4 CMYK or colour
                          and alpha */
  int32_t bit_depth;   /* as stored: 8; 1, 2, 4 or 16 in PNG; 10 or 12 in AVIF and HEIC */
  int32_t orientation; /* EXIF orientation, 1 to 8; 1 if the image has none, and for AVIF and HEIC,
                          which are decoded upright */
  bool progressive;    /* progressive JPEG or interlaced PNG */
} ts_image_info;

/* Reads the header of an image of `bytes` bytes. Returns TS_ERROR_UNSUPPORTED if the format is
 * unknown, TS_ERROR_DECODE if the header is damaged. It skips bytes between the segments of a JPEG,
 * which only ts_image_decode checks. */
TS_API ts_error* ts_image_get_info(const uint8_t* data, size_t bytes, ts_image_info* info);

/* The state, tables and buffers of decoding, reused from image to image. One thread uses a decoder
 * at a time. */
typedef struct ts_image_decoder ts_image_decoder;

/* Makes a decoder that accepts images of up to max_pixels pixels; 0 means 178,956,970, Pillow's
 * limit. Larger images, and images with a side over 1,000,000, are TS_ERROR_UNSUPPORTED. The limit
 * also bounds memory: decoding a progressive JPEG or an interlaced PNG needs up to 8 bytes a pixel.
 */
TS_API ts_error* ts_image_decoder_new(int64_t max_pixels, ts_image_decoder** decoder);
TS_API void ts_image_decoder_free(ts_image_decoder* decoder);

/* How a decoder treats a damaged JPEG or PNG. */
enum {
  TS_IMAGE_DAMAGE_REFUSE = 0, /* returns TS_ERROR_DECODE; the default */
  /* Decodes a JPEG that libjpeg-turbo repairs with a warning, to the repaired pixels. Decodes a PNG
   * whose image data inflates to the whole image, even if a checksum of the image data or of an
   * ancillary chunk is wrong, if a later palette replaces the first, or if the end chunk is
   * missing. A truncated image is still TS_ERROR_DECODE. */
  TS_IMAGE_DAMAGE_WARN = 1,
  /* Like TS_IMAGE_DAMAGE_WARN, and also decodes a truncated image up to the cut. libjpeg-turbo
   * fills in the rest of a JPEG, with grey in a baseline one. The rest of a PNG, whose image data
   * may also be damaged, is black or the palette's first colour. */
  TS_IMAGE_DAMAGE_PARTIAL = 2
};

/* Sets how the decoder treats damaged images from now on. */
TS_API ts_error* ts_image_decoder_set_damage(ts_image_decoder* decoder, int32_t damage);

/* Returns a description of the damage in the last decoded image, for people to read, or "" if there
 * was none. Borrowed until the next call with the decoder. */
TS_API const char* ts_image_decoder_tolerated(const ts_image_decoder* decoder);

/* How a pixel is computed from its neighbours. */
enum {
  TS_INTERPOLATION_DEFAULT = 0,
  TS_INTERPOLATION_NEAREST = 1,
  TS_INTERPOLATION_BILINEAR = 2,
  TS_INTERPOLATION_BICUBIC = 3 /* for resizing only */
};

/* Which part of an image becomes which pixels. The crop box, in source pixels and inside the image,
 * is resized to resize_width x resize_height. The window of the resized image is kept, and mirrored
 * if flip is set. */
typedef struct ts_image_geometry {
  size_t size; /* sizeof(ts_image_geometry), set by the caller */
  int32_t crop_x, crop_y, crop_width, crop_height;
  int32_t resize_width, resize_height;
  int32_t window_x, window_y, window_width, window_height; /* inside the resized image */
  /* EXIF's number. 0 and 1 change nothing. With 2 to 8 the image is turned upright first, and every
   * other member describes the upright image. */
  int32_t orientation;
  bool flip; /* mirrors the window left to right */
  /* The TS_INTERPOLATION_ used to resize, with torchvision's uint8 results: antialiased bilinear
   * (also the default), antialiased bicubic, or nearest, which is torchvision's "nearest" and not
   * "nearest-exact". The struct of earlier headers ends before this member. That size is accepted
   * and means 0. */
  int32_t interpolation;
  /* Allows a JPEG to be decoded at 1/2, 1/4 or 1/8 of its size if the crop box is at least four
   * times as large as the result in both directions. The decoder picks the smallest size at which
   * the box is still twice as large as the result. This is faster, and the pixels differ from a
   * full-size decode. It does not apply to nearest or to damaged images. */
  bool dct_scaling;
} ts_image_geometry;

/* Decodes an image of `bytes` bytes to RGB and applies the geometry. Grey is copied to all three
 * channels, alpha is dropped, CMYK and YCCK are converted as Pillow does, and 16-bit samples are
 * truncated to 8 bits.
 *
 * dst: window_height rows of window_width * 3 bytes, `stride` bytes apart; undefined after an
 * error. Where the codec allows it, only the rows and columns that the geometry needs are decoded;
 * the pixels equal a whole decode's.
 *
 * Returns TS_ERROR_DECODE for damaged or truncated bytes; a JPEG that libjpeg-turbo repairs with a
 * warning counts as damaged. Truncation, wrong checksums (PNG), and wrong segments or restart
 * markers (JPEG) are found with any geometry. Other damage is found only where decoding reaches it,
 * so not below the last row that the geometry needs.
 *
 * ts_image_decoder_set_damage makes a decoder tolerate damage. It then decodes a damaged image
 * whole, so that neither the pixels nor the verdict depend on the geometry. It makes no entry
 * points for such an image. */
TS_API ts_error* ts_image_decode(ts_image_decoder* decoder,
                                 const uint8_t* data,
                                 size_t bytes,
                                 const ts_image_geometry* geometry,
                                 uint8_t* dst,
                                 size_t stride);

/* Rewrites a progressive JPEG as a baseline JPEG without loss. Coefficients, quantisers and frame
 * stay, so the pixels are the same; metadata is dropped. The new file uses the standard's Huffman
 * tables; for a photograph it is about 15 % larger. It can have entry points and plans.
 *
 * written: the new file's size in bytes. It is 0 if the image is not a progressive JPEG of one or
 * three components, is damaged (whatever ts_image_decoder_set_damage says), lacks coefficients, or
 * has coefficients that a baseline file cannot hold, or if the capacity is not larger than the new
 * file. The buffer's content is then undefined. Returns TS_ERROR_DECODE for a damaged header, wrong
 * segments or markers, and a truncated file. */
TS_API ts_error* ts_image_transcode(ts_image_decoder* decoder,
                                    const uint8_t* data,
                                    size_t bytes,
                                    uint8_t* buffer,
                                    size_t capacity,
                                    size_t* written);

/* The number of JPEGs that a decoder has decoded by each path. All paths give the same pixels. */
typedef struct ts_image_decoder_stats {
  size_t size;      /* sizeof(ts_image_decoder_stats), set by the caller */
  int64_t jpeg_own; /* Huffman decoding by this library, the rest by libjpeg-turbo */
  int64_t
      jpeg_libjpeg; /* everything by libjpeg-turbo: progressive, arithmetic, CMYK, several scans */
  int64_t jpeg_gave_up; /* of jpeg_libjpeg: damaged, or unlike its header */
  int64_t
      entries_used; /* of jpeg_own: decoded from only the part of the file that the crop needs */
  int64_t entries_verified; /* of jpeg_own: all entries were compared with the file */
  int64_t entries_refused;  /* images whose entries were not used: wrong, or of another file */
  int64_t entries_made;
} ts_image_decoder_stats;

TS_API ts_error* ts_image_decoder_get_stats(const ts_image_decoder* decoder,
                                            ts_image_decoder_stats* stats);

/* Resizes pixels as ts_image_decode does, with the same results. src: height rows of width * 3
 * bytes, src_stride bytes apart. dst: as for ts_image_decode. */
TS_API ts_error* ts_image_resize(ts_image_decoder* decoder,
                                 const uint8_t* src,
                                 int32_t width,
                                 int32_t height,
                                 size_t src_stride,
                                 const ts_image_geometry* geometry,
                                 uint8_t* dst,
                                 size_t dst_stride);

/* Encodes pixels as a baseline JPEG with 4:2:0 chroma and libjpeg's quantisers for a quality of 1
 * to 100. pixels: height rows of width * 3 bytes of RGB, `stride` bytes apart; at most 65,500 rows
 * and columns. The decoder serves as scratch memory.
 *
 * written: the file's size in bytes. It is 0 if the capacity is not larger than the file. The
 * buffer's content is then undefined. */
TS_API ts_error* ts_image_encode_jpeg(ts_image_decoder* decoder,
                                      const uint8_t* pixels,
                                      int32_t width,
                                      int32_t height,
                                      size_t stride,
                                      int32_t quality,
                                      uint8_t* buffer,
                                      size_t capacity,
                                      size_t* written);

#ifdef __cplusplus
}
#endif

#endif /* TS_IMAGE_H_ */
