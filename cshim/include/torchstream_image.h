/* torchstream's image part as plain C: compressed bytes to pixels, augmentation, inflate. The
 * library is libtorchstream_image, which needs neither LibTorch nor a GPU. The rules of
 * torchstream.h hold here too.
 */
#ifndef TORCHSTREAM_IMAGE_H_
#define TORCHSTREAM_IMAGE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version --------------------------------------------------------------------------------- */

/* Changes whenever a signature, a struct or an enum value below changes. A client compares it with
 * ts_image_abi_version() once at load. */
#define TS_IMAGE_ABI_VERSION 2

TS_API int32_t ts_image_abi_version(void);
/* Static, for example "libjpeg-turbo 2.1.5". */
TS_API const char* ts_jpeg_version(void);

/* ---- errors ---------------------------------------------------------------------------------- */

typedef struct ts_error ts_error;

enum {
  TS_OK = 0,
  TS_ERROR_INVALID_ARGUMENT = 1, /* the caller passed something that can never work */
  TS_ERROR_OUT_OF_MEMORY = 2,    /* device, pinned or host memory */
  TS_ERROR_NO_DEVICE = 3,        /* there is no usable GPU, or not that many */
  TS_ERROR_CUDA = 4,             /* CUDA failed; after an illegal access only an exit helps */
  TS_ERROR_WRONG_THREAD = 5,     /* a stream guard, memory pool or capture was left on another
                                    thread than entered on */
  TS_ERROR_OUT_OF_ORDER = 6,     /* a stream guard was left before an inner one, or twice */
  TS_ERROR_NOT_RECORDED = 7,     /* an event never recorded, or made without timing, was used */
  TS_ERROR_NOT_FOUND = 8,        /* no such operator or overload */
  TS_ERROR_OPERATOR = 9,         /* LibTorch refused the operands */
  TS_ERROR_DECODE = 10,          /* image bytes are damaged */
  TS_ERROR_UNSUPPORTED = 11,     /* image bytes are in a format that is not handled */
  TS_ERROR_INTERNAL = 12,        /* a defect of the shim or of a library below it */
  TS_ERROR_CAPTURE = 13,         /* not possible while a graph is captured, or the capture failed */
  TS_ERROR_STALE = 14,           /* a graph's operands do not lie where they were captured */
  TS_ERROR_BUSY = 15             /* a capture has the random generators: ts_capture_wait; or a
                                    thread is inside a memory pool: ts_device_empty_cache */
};

/* All three borrow the error; what they return is borrowed until the error is freed. The origin
 * names the C function that failed. */
TS_API int32_t ts_error_code(const ts_error* error);
TS_API const char* ts_error_message(const ts_error* error);
TS_API const char* ts_error_origin(const ts_error* error);
TS_API void ts_error_free(ts_error* error); /* takes ownership */
/* For libraries that return errors of their own. message: borrowed for the call; origin: borrowed
 * until the process ends. Never NULL: without memory the error says so. */
TS_API ts_error* ts_error_new(int32_t code, const char* origin, const char* message);

/* ---- images: compressed bytes to pixels. Needs no LibTorch and no GPU ------------------------ */

enum { TS_IMAGE_JPEG = 1, TS_IMAGE_PNG = 2, TS_IMAGE_WEBP = 3 };

typedef struct ts_image_info {
  int32_t format; /* TS_IMAGE_ */
  int32_t width;  /* pixels */
  int32_t height;
  int32_t components; /* as stored: 1 grey, 2 grey + alpha, 3 colour (palette too), 4 CMYK or colour
                         + alpha */
  int32_t bit_depth;  /* as stored: 8, or 1, 2, 4, 16 in PNG */
  bool progressive;   /* progressive JPEG or interlaced PNG */
  int32_t orientation; /* EXIF's, 1 to 8; 1 if there is none. width and height are as stored */
} ts_image_info;

/* Reads the header only. data: borrowed for the call. TS_ERROR_UNSUPPORTED if the bytes are of no
 * known format, TS_ERROR_DECODE if damaged. */
TS_API ts_error* ts_image_header(const uint8_t* data, size_t bytes, ts_image_info* out);

/* Decode state, tables and buffers, reused from image to image: one a worker, used by one thread at
 * a time. */
typedef struct ts_image_decoder ts_image_decoder;
/* max_pixels bounds width * height of what is accepted (0: 178,956,970, Pillow's bomb limit):
 * TS_ERROR_UNSUPPORTED beyond, and if a side is over 1,000,000. It bounds the memory too: a
 * progressive JPEG or an interlaced PNG takes up to 8 bytes a pixel while it is decoded. new
 * reference. */
TS_API ts_error* ts_image_decoder_new(int64_t max_pixels, ts_image_decoder** out);
TS_API void ts_image_decoder_free(ts_image_decoder* decoder); /* takes ownership */

/* What part of the image becomes which pixels: the crop box (source pixels, inside the image) is
 * resized to resize_width x resize_height with antialiased bilinear interpolation (torchvision's
 * uint8 result), of which the window is kept, and mirrored if flip says so. */
typedef struct ts_image_geometry {
  int32_t crop_x, crop_y, crop_width, crop_height;
  int32_t resize_width, resize_height;
  int32_t window_x, window_y, window_width, window_height; /* inside the resized image */
  bool flip; /* left and right exchanged, after the window is taken */
  /* 0 or 1: none of what follows. 2 to 8, EXIF's numbers: the image is turned upright first, and
   * all of the above is about the upright image. */
  int32_t orientation;
} ts_image_geometry;

/* Decodes to RGB (grey is tripled, alpha dropped, CMYK and YCCK converted as Pillow does, 16 bit
 * cut to 8) and applies the geometry. Only the rows and columns that the geometry needs are decoded
 * where the codec allows; the pixels are the same as from a whole decode. dst: window_height rows
 * of window_width * 3 bytes, `stride` bytes apart, borrowed for the call; on failure its content is
 * undefined. TS_ERROR_DECODE for damaged or truncated bytes: a JPEG that libjpeg-turbo repairs with
 * a warning counts as damaged. Truncation, wrong checksums (PNG), and segments or restart markers
 * that are not as they should be (JPEG) are found whatever the geometry; other damage only if it is
 * met, so not below the last row that is needed. */
TS_API ts_error* ts_image_decode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                 const ts_image_geometry* geometry, uint8_t* dst, size_t stride);

/* Entry points: a blob, about 1 % of a baseline JPEG's size, that says where every n-th MCU's bits
 * begin, so that a later decode reads only the part of the file that its crop needs. The pixels are
 * the same. docs/entry-points.md has the layout and what is guaranteed.
 *
 * proof: 0 at first. It stands for "every entry was compared with the file, in this process": the
 * call sets it, and the caller keeps it with the blob and gives it back unchanged.
 *
 * ts_image_entries_make makes the blob of a file. spacing: MCUs between two entries; 0 has it
 * chosen so that the blob takes about 1 % of the file and never more than 1.5 %. written: the
 * blob's size; more than the capacity if it did not fit (then nothing is written); 0 if there are
 * no entries for this file (small, not baseline, damaged). Everything is borrowed for the call. */
TS_API ts_error* ts_image_entries_make(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                       int32_t spacing, uint8_t* buffer, size_t capacity,
                                       size_t* written, uint64_t* proof);

/* ts_image_decode, and the blob made on the way: costs what lies below and right of the crop. */
TS_API ts_error* ts_image_decode_make_entries(ts_image_decoder* decoder, const uint8_t* data,
                                              size_t bytes, const ts_image_geometry* geometry,
                                              uint8_t* dst, size_t stride, int32_t spacing,
                                              uint8_t* buffer, size_t capacity, size_t* written,
                                              uint64_t* proof);

/* ts_image_decode by a blob. Entries that are not this file's, damaged or not right never give
 * other pixels: the image is decoded without them, which ts_image_stats counts. proof: 0 has all of
 * them compared with the file first, which costs as much as decoding without them, and sets it if
 * they are right; another value is what an earlier call set, for these bytes. NULL: the blob is
 * trusted as far as its digests go, which stop every accident, but not a forger. Damage in a part
 * of the file that is not read is not looked for: the digest says that the file is the one that was
 * read whole when the blob was made. */
TS_API ts_error* ts_image_decode_entries(ts_image_decoder* decoder, const uint8_t* data,
                                         size_t bytes, const ts_image_geometry* geometry,
                                         uint8_t* dst, size_t stride, const uint8_t* entries,
                                         size_t entries_bytes, uint64_t* proof);

/* How many of a decoder's JPEGs went which way. The pixels are the same. */
typedef struct ts_image_stats {
  int64_t jpeg_own;     /* Huffman decoding of our own, the rest by libjpeg-turbo */
  int64_t jpeg_libjpeg; /* all by libjpeg-turbo: progressive, arithmetic, CMYK, several scans ... */
  int64_t jpeg_gave_up; /* of the latter: damaged, or stranger than their headers say */
  int64_t entries_used; /* of jpeg_own: only what the crop needs was read */
  int64_t entries_verified; /* of jpeg_own: all entries were compared with the file */
  int64_t entries_refused;  /* entries were given, and not used: not this file's, or not right */
  int64_t entries_made;
} ts_image_stats;
TS_API ts_error* ts_image_decoder_stats(const ts_image_decoder* decoder, ts_image_stats* out);

/* The resize alone, on pixels: src height rows of width * 3 bytes, stride apart; the same geometry
 * and results. Borrowed for the call. */
TS_API ts_error* ts_image_resize(ts_image_decoder* decoder, const uint8_t* src, int32_t width,
                                 int32_t height, size_t src_stride,
                                 const ts_image_geometry* geometry, uint8_t* dst,
                                 size_t dst_stride);

/* ---- augmentation: torchvision's transforms on pixels. Needs no LibTorch and no GPU ---------- */

/* Kinds of operations. Beside each what it reads: i are its integers, v its values. Results are
 * those of torchvision.transforms.v2.functional on uint8 RGB tensors. */
enum {
  TS_AUGMENT_FLIP_HORIZONTAL = 1,
  TS_AUGMENT_FLIP_VERTICAL = 2,
  TS_AUGMENT_QUARTER_TURNS = 3, /* i[0]: 0 to 3, counter-clockwise */
  TS_AUGMENT_CROP = 4,          /* i[0..3]: x, y, width, height; outside of the image: i[4] TS_PAD_,
                                 * i[5..7] red, green, blue of TS_PAD_CONSTANT */
  TS_AUGMENT_BRIGHTNESS = 5,    /* v[0]: factor, at least 0, as in the next three */
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
  TS_AUGMENT_BLUR = 16,        /* i[0], i[1]: width, height of the kernel, odd; v[0], v[1]: sigmas,
                                * at least 1e-6 */
  TS_AUGMENT_ERASE = 17,       /* i[0..3]: x, y, width, height; i[4..6]: red, green, blue */
  TS_AUGMENT_AFFINE = 18,      /* i[0]: TS_NEAREST or TS_BILINEAR; i[1]: whether there is a fill;
                                * i[2..4]: its red, green, blue; i[5], i[6]: width and height of the
                                * result, 0: the image's; v[0..5]: the inverse matrix, row by row, in
                                * pixels from the image's centre */
  TS_AUGMENT_PERSPECTIVE = 19, /* i[0..4] as above; v[0..7]: torchvision's eight coefficients */
  TS_AUGMENT_PERMUTE = 20      /* i[0..2]: which of the channels become red, green and blue */
};
enum { TS_NEAREST = 1, TS_BILINEAR = 2 };
enum { TS_PAD_CONSTANT = 0, TS_PAD_EDGE = 1, TS_PAD_REFLECT = 2, TS_PAD_SYMMETRIC = 3 };

typedef struct ts_augment_op {
  int32_t kind; /* TS_AUGMENT_ */
  int32_t integers[9];
  double values[8];
} ts_augment_op;

/* Buffers, reused from image to image: one a worker, used by one thread at a time. */
typedef struct ts_augmenter ts_augmenter;
TS_API ts_error* ts_augmenter_new(ts_augmenter** out);  /* new; free with ts_augmenter_free */
TS_API void ts_augmenter_free(ts_augmenter* augmenter); /* takes ownership */

/* Runs the operations one after the other on height rows of width RGB pixels, stride bytes apart,
 * in place: together they must keep the size. Borrowed for the call. An error (INVALID_ARGUMENT: a
 * parameter is out of range) leaves the pixels as they were. */
TS_API ts_error* ts_image_augment(ts_augmenter* augmenter, uint8_t* pixels, int32_t width,
                                  int32_t height, size_t stride, const ts_augment_op* ops,
                                  int32_t count);

/* ---- inflate: raw deflate, in order or entered in the middle ------------------------ */

/* Tables and state: used by one thread at a time. */
typedef struct ts_inflater ts_inflater;
/* With spacing > 0 the beginnings of blocks that are at least so many bytes of output apart become
 * checkpoints. new reference. */
TS_API ts_error* ts_inflater_new(uint64_t spacing, ts_inflater** out);
TS_API void ts_inflater_free(ts_inflater* inflater); /* takes ownership */
/* Begins a stream, or enters one at a checkpoint: skip_bits (0 to 7) of the first byte of input
 * come before it, and `history` bytes of output stand before `begin` in the buffer of the next run
 * (at a checkpoint 32768, its window; 0 at the beginning). */
TS_API ts_error* ts_inflater_reset(ts_inflater* inflater, int32_t skip_bits, size_t history);

typedef struct ts_inflate_progress {
  size_t consumed; /* bytes of input */
  size_t produced; /* bytes of output */
  bool done;       /* the stream has ended */
} ts_inflate_progress;

/* Inflates input into buffer[begin, end), both borrowed for the call; buffer[0, begin) holds the
 * output before that, the last 32768 bytes if there are so many, and is not written. Input that was
 * not consumed has to be passed again, together with what follows it: 1 KB of it, or with `last`
 * whatever is left, and a byte of room are enough for progress. TS_ERROR_DECODE for damaged bytes
 * and, with `last`, for a stream that is cut off; reset is needed after it. */
TS_API ts_error* ts_inflater_run(ts_inflater* inflater, const uint8_t* input, size_t bytes,
                                 bool last, uint8_t* buffer, size_t begin, size_t end,
                                 ts_inflate_progress* out);

typedef struct ts_inflate_checkpoint {
  uint64_t bit;          /* of the input since reset: where a block begins */
  uint64_t output;       /* bytes of output before it, since reset */
  const uint8_t* window; /* the last 32768 of them; zeros before the first */
  const uint64_t* used;  /* 32768 bits, from the lowest of the first word on: which bytes of the
                            window matter for what follows */
} ts_inflate_checkpoint;

/* The next checkpoint that is complete, which it is 32768 bytes of output later or when the stream
 * ends; window is NULL if there is none. What it points to lasts until the next call. Ask after
 * every run: when 64 wait no more are made. */
TS_API ts_error* ts_inflater_checkpoint(ts_inflater* inflater, ts_inflate_checkpoint* out);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_IMAGE_H_ */
