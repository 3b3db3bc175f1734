/* torchstream_image: compressed images to pixels, augmentation and inflate, as plain C. The library
 * libtorchstream_image needs neither LibTorch nor a GPU. torchstream.h has the rest.
 *
 * Rules for every function of both headers:
 *
 *  - Names. A function is ts_<noun>_<verb>, a type is ts_<noun>, an enumerator is
 *    TS_<NOUN>_<VALUE>. ts_X_get_y fills in the y of X, and can fail; a getter that cannot fail
 *    returns its value and has no verb.
 *  - Errors. A function that can fail returns ts_error*: NULL means success; otherwise the caller
 *    owns the error and frees it with ts_error_free. There is no "last error", since the next call
 *    may come from another thread. Arguments are checked before anything is done, and on failure
 *    output parameters keep their values. When CUDA or an operator fails in the middle of a call
 *    (TS_ERROR_CUDA, TS_ERROR_OPERATOR, TS_ERROR_OUT_OF_MEMORY), the work enqueued so far stays
 *    enqueued.
 *  - Parameters. Outputs come last. Objects that a call writes into (dst) stand where their
 *    description says. A number of bytes is size_t, every other count is int64_t, and a time or
 *    duration is int64_t nanoseconds. Strings are UTF-8 and end with NUL unless a length is given.
 *  - Ownership. Every pointer parameter is borrowed for the call unless its comment says "takes
 *    ownership" or "borrowed until". An object that an output parameter returns belongs to the
 *    caller, who ends it with the noun's _free or _destroy.
 *  - Ends. ts_X_free returns nothing, cannot fail, takes ownership and accepts NULL. A noun whose
 *    end can fail has ts_X_destroy instead: it returns its error, accepts NULL, and takes ownership
 *    only if it succeeds.
 *  - NULL. No function crashes for a NULL object: those that return no error return NULL, 0 or "",
 *    and -1 for a descriptor.
 *  - Growth. A struct whose first member is `size` may grow. The caller sets size to
 *    sizeof(the struct) before every call; the library reads and writes no further. Other structs
 *    are fixed for an ABI version.
 *  - Threads. Any thread may call any function. Two threads must not use one object at once unless
 *    the comment on its type says that they may.
 */
#ifndef TORCHSTREAM_IMAGE_H_
#define TORCHSTREAM_IMAGE_H_

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A program that defines the functions itself, as jumps into a library that it opens, may define
 * TS_API. */
#if !defined(TS_API)
#if defined(__GNUC__)
#define TS_API __attribute__((visibility("default")))
#else
#define TS_API
#endif
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* ---- version --------------------------------------------------------------------------------- */

/* The version of torchstream, for both headers. */
#define TS_VERSION_MAJOR 0
#define TS_VERSION_MINOR 1
#define TS_VERSION_PATCH 0

/* Changes whenever a signature, a fixed struct or an enumerator of this header changes. A client
 * compares it with ts_image_abi_version() once at load. */
#define TS_IMAGE_ABI_VERSION 3

/* Returns the TS_IMAGE_ABI_VERSION of the loaded library. */
TS_API int32_t ts_image_abi_version(void);
/* Returns the name and version of the JPEG library, for example "libjpeg-turbo 2.1.5". Static. */
TS_API const char* ts_jpeg_version(void);

/* ---- errors ---------------------------------------------------------------------------------- */

typedef struct ts_error ts_error;

/* What kind of failure an error is. */
enum {
  TS_ERROR_NONE = 0,
  TS_ERROR_INVALID_ARGUMENT = 1, /* an argument can never work */
  TS_ERROR_OUT_OF_MEMORY = 2,    /* device, pinned or host memory */
  TS_ERROR_NO_DEVICE = 3,        /* there is no usable GPU, or not that many */
  TS_ERROR_CUDA = 4,             /* CUDA failed; after an illegal access the process must exit */
  TS_ERROR_WRONG_THREAD = 5,     /* a stream guard, memory pool or capture was ended on another
                                    thread than it was begun on */
  TS_ERROR_OUT_OF_ORDER = 6,     /* a stream guard was exited before an inner one, or twice */
  TS_ERROR_NOT_RECORDED = 7,     /* the event was never recorded, or is untimed */
  TS_ERROR_NOT_FOUND = 8,        /* no such operator or overload */
  TS_ERROR_OPERATOR = 9,         /* LibTorch refused the operands */
  TS_ERROR_DECODE = 10,          /* image or deflate bytes are damaged */
  TS_ERROR_UNSUPPORTED = 11,     /* a format that is not handled, or a library is not installed */
  TS_ERROR_INTERNAL = 12,        /* a defect of this library or of one below it */
  TS_ERROR_CAPTURE = 13,         /* not possible while a graph is captured, or the capture failed */
  TS_ERROR_STALE = 14,           /* a graph's operands have moved since the capture */
  TS_ERROR_BUSY = 15,            /* a capture owns the random generators: see ts_capture_wait; or a
                                    thread is inside a memory pool: see ts_allocator_empty_cache */
  TS_ERROR_CALLBACK = 16 /* for the error of a caller's function, which this library calls */
};

/* Returns the TS_ERROR_ code; TS_ERROR_NONE for NULL. */
TS_API int32_t ts_error_code(const ts_error* error);
/* Returns a description, borrowed until the error is freed. */
TS_API const char* ts_error_message(const ts_error* error);
/* Returns the name of the C function that failed, borrowed until the error is freed. */
TS_API const char* ts_error_origin(const ts_error* error);
/* Returns how far the decoder had come in the bytes of an image when it met the damage of a
 * TS_ERROR_DECODE: from 0 to their number. The damage is at or near this byte, since decoders read
 * ahead and count whole blocks. -1 if the format's decoder does not tell, and for all other errors.
 * The description ends with the byte. */
TS_API int64_t ts_error_offset(const ts_error* error);
TS_API void ts_error_free(ts_error* error);
/* Makes an error, for libraries that return errors of their own. origin: borrowed until the process
 * ends. Never NULL: without memory the result is an error that says so. */
TS_API ts_error* ts_error_new(int32_t code, const char* origin, const char* message);
/* Sets what ts_error_offset returns, -1 for a new error. */
TS_API void ts_error_set_offset(ts_error* error, int64_t offset);

/* ---- images: compressed bytes to pixels ------------------------------------------------------ */

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
TS_API ts_error* ts_image_decode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                 const ts_image_geometry* geometry, uint8_t* dst, size_t stride);

/* Entry points: a blob, about 1 % of a baseline JPEG's size, with the position of every n-th MCU in
 * the bit stream. With it a decode reads only the part of the file that its crop needs; the pixels
 * are the same. docs/entry-points.md has the layout and the guarantees.
 *
 * A proof stands for "every entry was compared with the file, in this process". It is 0 at first. A
 * call that makes or verifies entries sets it; the caller keeps it with the blob and passes it back
 * unchanged. */
typedef struct ts_image_entries {
  const uint8_t* data;
  size_t bytes;
} ts_image_entries;

/* Where a call writes entry points. Passed by value. */
typedef struct ts_image_entries_buffer {
  uint8_t* data;
  size_t capacity; /* bytes */
  int64_t spacing; /* MCUs between two entries; 0 makes the blob about 1 % of the file, and never
                      more than 1.5 % */
} ts_image_entries_buffer;

/* What a call made. */
typedef struct ts_image_entries_made {
  size_t bytes;   /* the blob's size. More than the capacity: the blob did not fit and was not
                     written. 0: the file has no entry points (small, not baseline, or damaged) */
  uint64_t proof; /* see ts_image_entries */
} ts_image_entries_made;

/* Makes the entry points of an image of `bytes` bytes, without decoding pixels. */
TS_API ts_error* ts_image_make_entries(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                       ts_image_entries_buffer buffer, ts_image_entries_made* made);

/* Does ts_image_decode, and makes the entry points on the way. Costs the decoding of all that lies
 * below and right of the crop. */
TS_API ts_error* ts_image_decode_make_entries(ts_image_decoder* decoder, const uint8_t* data,
                                              size_t bytes, const ts_image_geometry* geometry,
                                              uint8_t* dst, size_t stride,
                                              ts_image_entries_buffer buffer,
                                              ts_image_entries_made* made);

/* Does ts_image_decode with the help of entry points. Entries that are damaged, wrong or another
 * file's never change a pixel: the image is decoded without them, and ts_image_decoder_stats counts
 * it.
 *
 * proof: with 0 all entries are compared with the file first, which costs as much as decoding
 * without them; if they are right the proof is set. Any other value must be one that an earlier
 * call set for these bytes. With NULL the blob is trusted as far as its digests go: they detect
 * every accident, but no forgery.
 *
 * Damage is not looked for in parts of the file that are not read: the digest says that the file is
 * the one that was read whole when the blob was made. */
TS_API ts_error* ts_image_decode_with_entries(ts_image_decoder* decoder, const uint8_t* data,
                                              size_t bytes, const ts_image_geometry* geometry,
                                              ts_image_entries entries, uint8_t* dst, size_t stride,
                                              uint64_t* proof);

/* Writes a progressive JPEG as a baseline one, losslessly: with the same coefficients, quantisers
 * and frame, so that it decodes to the same pixels, but without metadata. It has the standard's
 * Huffman tables; that of a photograph is about 15 % larger. It can have entry points, and plans.
 *
 * written: the new file's bytes. 0: the image is no progressive JPEG of one or three components, is
 * damaged (whatever ts_image_decoder_set_damage says) or lacks coefficients, has coefficients that
 * a baseline file cannot have, or the capacity is not over the new file's bytes. The buffer's
 * content is then undefined.
 * TS_ERROR_DECODE for a damaged header, wrong segments or markers, and a file that is cut off. */
TS_API ts_error* ts_image_transcode(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                    uint8_t* buffer, size_t capacity, size_t* written);

/* Plans what ts_image_decode_with_entries would decode, for ts_gpu_decoder_run of torchstream.h:
 * writes the plan, with the compressed bytes that it needs, to `buffer`, aligned to 16 bytes, for
 * this process and version of the library. With both entries.data and proof NULL the GPU finds the
 * entries in the scan, all of which is in the plan; it flags damage, of which the host is judge.
 * planned: the plan's bytes, a multiple of 16. More than the capacity: the plan did not fit, and
 * the buffer's content is undefined. 0: only the host decodes this image, geometry or entries. That
 * is so for entries that are not proven (`proof` as in ts_image_decode_with_entries, which verifies
 * entries; this call does not), or that are too far apart; with dct_scaling where it would scale,
 * for CMYK, for unusual Huffman tables, and for a crop whose decoding takes more than 256 MiB of
 * scratch memory (ts_gpu_decoder_new). TS_ERROR_DECODE is damage that libjpeg-turbo meets in the
 * file's header, and, without entries, a file that is cut off or has wrong segments or markers.
 */
TS_API ts_error* ts_image_plan_segments(ts_image_decoder* decoder, const uint8_t* data,
                                        size_t bytes, const ts_image_geometry* geometry,
                                        ts_image_entries entries, uint64_t* proof, uint8_t* buffer,
                                        size_t capacity, size_t* planned);

/* Memory that several threads write plans to, aligned to 16 bytes. */
typedef struct ts_image_plans {
  uint8_t* data;
  size_t bytes;
  uint64_t* used; /* the bytes from the beginning that plans have taken, a multiple of 16 */
} ts_image_plans;

/* Does ts_image_plan_segments, with entries, behind the plans that `plans` has: takes the memory by
 * one atomic addition to *plans.used, when the plan's size is known, and writes the plan there,
 * *at bytes from plans.data. planned: the plan's bytes, 0 also if there is no room for it; no
 * memory is taken then, nor after an error. */
TS_API ts_error* ts_image_plan_append(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                      const ts_image_geometry* geometry, ts_image_entries entries,
                                      uint64_t* proof, ts_image_plans plans, size_t* at,
                                      size_t* planned);

/* What ts_image_pack_entries has to know of a file in whose scan a GPU finds the entries. */
typedef struct ts_image_search {
  uint64_t digest;     /* of the file, for its blob */
  uint64_t proof;      /* of the file, for the proof of its entries; of this process alone */
  uint64_t file_bytes; /* of the file */
  uint64_t scan;       /* byte of the file where the scan's data begin */
  uint32_t mcus;       /* of the scan */
  uint32_t spacing;    /* MCUs between two entries that the GPU finds */
  uint32_t entries;    /* that the GPU finds, 10 bytes each */
  uint32_t wanted;     /* MCUs between two entries of the blob; 0: the file gets none */
} ts_image_search;

/* Does ts_image_plan_append without entries: the GPU finds them in the whole scan. plans.used may
 * be NULL: then the plan goes to the beginning of the memory, and planned is over plans.bytes if it
 * did not fit. It plans only files that are good whatever the scan has: a decoder with
 * TS_IMAGE_DAMAGE_WARN or TS_IMAGE_DAMAGE_PARTIAL decodes them, if need be with a warning. planned
 * is 0 for other files, unless they are TS_ERROR_DECODE. search, if not NULL, is set for
 * ts_image_pack_entries, which costs two digests of the file. */
TS_API ts_error* ts_image_plan_scan(ts_image_decoder* decoder, const uint8_t* data, size_t bytes,
                                    const ts_image_geometry* geometry, ts_image_plans plans,
                                    ts_image_search* search, size_t* at, size_t* planned);

/* Makes the blob that ts_image_decode_make_entries would make without a spacing, from the entries
 * that a GPU has found (ts_gpu_decoder_copy_entries) in a plan of ts_image_plan_scan, which it has
 * not flagged. found_bytes: 10 for each of search->entries. made->bytes is 0 if the file gets no
 * entries, and if the found ones are impossible. */
TS_API ts_error* ts_image_pack_entries(const ts_image_search* search, const uint8_t* found,
                                       size_t found_bytes, ts_image_entries_buffer buffer,
                                       ts_image_entries_made* made);

/* The beginning of a JPEG, up to the data of its scan, whose other bytes are elsewhere. */
typedef struct ts_image_head {
  const uint8_t* data; /* may lack segments that decoding does not need: APP1 to APP13, comments */
  size_t bytes;
  size_t file_bytes; /* of the whole file, as the entries know it */
  size_t scan;       /* byte of the whole file where the scan's data begin */
} ts_image_head;

/* Does ts_image_plan_segments for an image whose compressed data a ts_gpu_decoder inflates
 * (ts_gpu_decoder_run_inflating): the plan has everything but these. The caller vouches for what
 * this call cannot see: that the entries were verified with the whole file, and that its bytes are
 * still those. Whatever they are, the decoder's accesses are bounded. 0 also for entries of another
 * file_bytes or scan, and for a head of other than the usual segments. */
TS_API ts_error* ts_image_plan_head(ts_image_decoder* decoder, const ts_image_head* head,
                                    const ts_image_geometry* geometry, ts_image_entries entries,
                                    uint8_t* buffer, size_t capacity, size_t* planned);

/* A plan with room for a part of its file. All places are bytes. */
typedef struct ts_image_part {
  size_t at;      /* the plan, from plans.data; 0 without one */
  size_t planned; /* of the plan; 0: there is none */
  size_t file;    /* the part begins at this byte of the file, */
  size_t bytes;   /* has so many, */
  size_t to;      /* and goes here, from plans.data */
} ts_image_part;

/* Does ts_image_plan_append for an image whose file the caller reads after this call: the plan has
 * room for the part of the file with the segments that the geometry needs, in whole pieces of
 * `piece` bytes (the last one of a file may be shorter). The caller writes the file's bytes there,
 * and vouches for them as for ts_image_plan_head, which says when there is no plan; with
 * ts_image_digest_pieces of the file it can tell whether they are still the same. */
TS_API ts_error* ts_image_plan_part(ts_image_decoder* decoder, const ts_image_head* head,
                                    const ts_image_geometry* geometry, ts_image_entries entries,
                                    size_t piece, ts_image_plans plans, ts_image_part* part);

/* Writes the digests of the pieces of `piece` bytes that the data consist of, of which the last may
 * be shorter: bytes / piece of them, rounded up. They are valid as long as the process lives, and
 * depend on a secret of the process. */
TS_API ts_error* ts_image_digest_pieces(const uint8_t* data, size_t bytes, size_t piece,
                                        uint64_t* digests);

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
TS_API ts_error* ts_image_resize(ts_image_decoder* decoder, const uint8_t* src, int32_t width,
                                 int32_t height, size_t src_stride,
                                 const ts_image_geometry* geometry, uint8_t* dst,
                                 size_t dst_stride);

/* ---- augmentation: torchvision's transforms on pixels ---------------------------------------- */

/* Operations, and the members of ts_augment_op that each reads: i are the integers, v the values.
 * Results are those of torchvision.transforms.v2.functional on uint8 RGB tensors. */
enum {
  TS_AUGMENT_FLIP_HORIZONTAL = 1,
  TS_AUGMENT_FLIP_VERTICAL = 2,
  TS_AUGMENT_QUARTER_TURNS = 3, /* i[0]: 0 to 3, counter-clockwise */
  TS_AUGMENT_CROP = 4,          /* i[0..3]: x, y, width, height; i[4]: TS_PADDING_ outside of the
                                 * image; i[5..7]: red, green, blue of TS_PADDING_CONSTANT */
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
  TS_AUGMENT_BLUR = 16,   /* i[0], i[1]: width and height of the kernel, odd; v[0], v[1]: sigmas,
                           * at least 1e-6 */
  TS_AUGMENT_ERASE = 17,  /* i[0..3]: x, y, width, height; i[4..6]: red, green, blue */
  TS_AUGMENT_AFFINE = 18, /* i[0]: TS_INTERPOLATION_; i[1]: whether there is a fill; i[2..4]: its
                           * red, green, blue; i[5], i[6]: width and height of the result, 0 for
                           * the image's; v[0..5]: the inverse matrix, row by row, in pixels from
                           * the image's centre */
  TS_AUGMENT_PERSPECTIVE = 19, /* i[0..4] as above; v[0..7]: torchvision's eight coefficients */
  TS_AUGMENT_PERMUTE = 20,     /* i[0..2]: which channels become red, green and blue */
  /* A weighted sum of what several chains of operations make of one image, in float32, cut to
   * uint8. i[0]: 0 begins it: the image, times v[0], is the first summand, and the first chain
   * follows; 1 ends a chain: adds the image times v[0], and returns to the image of the beginning;
   * 2 does so for the last chain, and the sum becomes the image. v[0]: 0 to 1. Sums do not nest,
   * and each chain keeps the image's size. */
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

/* Buffers, reused from image to image. One augmenter serves one thread at a time. */
typedef struct ts_augmenter ts_augmenter;
TS_API ts_error* ts_augmenter_new(ts_augmenter** augmenter);
TS_API void ts_augmenter_free(ts_augmenter* augmenter);

/* Runs `count` operations in order and in place on height rows of width RGB pixels, stride bytes
 * apart. Together they must keep the size. TS_ERROR_INVALID_ARGUMENT, with the pixels unchanged, if
 * a parameter is out of range. */
TS_API ts_error* ts_augmenter_run(ts_augmenter* augmenter, uint8_t* pixels, int32_t width,
                                  int32_t height, size_t stride, const ts_augment_op* ops,
                                  int64_t count);

/* Appends operations to a plan in `buffer`, which ts_image_plan_segments wrote and which has none:
 * ts_gpu_decoder_run then runs them on the image's pixels, to the bytes of ts_augmenter_run.
 * planned: the plan's bytes with them. More than the capacity: they did not fit, and the plan is
 * unchanged. 0: only the host runs one of them, and the plan is unchanged. That is so for an
 * operation whose result has another size than the image, and for an image that then takes more
 * than 256 MiB of scratch memory.
 * TS_ERROR_INVALID_ARGUMENT as in ts_augmenter_run, with the plan unchanged. */
TS_API ts_error* ts_image_plan_augment(uint8_t* buffer, size_t capacity, const ts_augment_op* ops,
                                       int64_t count, size_t* planned);

/* ---- inflate: raw deflate, from the start or from a checkpoint ------------------------------- */

/* How many bytes of output a deflate stream can refer back to. */
#define TS_INFLATER_WINDOW_BYTES 32768

/* Tables and state. One inflater serves one thread at a time. */
typedef struct ts_inflater ts_inflater;

/* Makes an inflater. With spacing > 0, the first block at least that many bytes of output after the
 * last checkpoint becomes the next one. */
TS_API ts_error* ts_inflater_new(size_t spacing, ts_inflater** inflater);
TS_API void ts_inflater_free(ts_inflater* inflater);

/* Begins a stream, or enters one at a checkpoint. skip_bits (0 to 7) of the first byte of input
 * come before the checkpoint; `history` bytes of output stand before `begin` in the buffer of the
 * next run (0 for a new stream, TS_INFLATER_WINDOW_BYTES at a checkpoint: its window). */
TS_API ts_error* ts_inflater_reset(ts_inflater* inflater, int32_t skip_bits, size_t history);

typedef struct ts_inflate_progress {
  size_t consumed; /* bytes of input */
  size_t produced; /* bytes of output */
  bool done;       /* the stream has ended */
} ts_inflate_progress;

/* Inflates `bytes` bytes of input into buffer[begin, end). buffer[0, begin) holds the output before
 * that, at least its last TS_INFLATER_WINDOW_BYTES bytes, and is not written. Input that was not
 * consumed must be passed again, together with what follows it. Progress needs 1 KB of input, or
 * whatever is left if `last` is set, and a byte of room. TS_ERROR_DECODE for damaged bytes and,
 * with `last`, for a stream that is cut off; ts_inflater_reset is needed after it. */
TS_API ts_error* ts_inflater_run(ts_inflater* inflater, const uint8_t* input, size_t bytes,
                                 bool last, uint8_t* buffer, size_t begin, size_t end,
                                 ts_inflate_progress* progress);

/* A place where a stream can be entered. Its pointers last until the next call. */
typedef struct ts_inflate_checkpoint {
  uint64_t bit;          /* of the input since reset: where a block begins */
  uint64_t output;       /* bytes of output before it, since reset */
  const uint8_t* window; /* the last TS_INFLATER_WINDOW_BYTES of them; zeros before the first */
  const uint64_t* used;  /* one bit for each byte of the window, from the lowest bit of the first
                            word on: whether the following output refers to it */
} ts_inflate_checkpoint;

/* Returns the next complete checkpoint; its window is NULL if there is none. A checkpoint is
 * complete TS_INFLATER_WINDOW_BYTES bytes of output later, or when the stream ends. Ask after every
 * run: while 64 wait, no more are made. */
TS_API ts_error* ts_inflater_get_checkpoint(ts_inflater* inflater,
                                            ts_inflate_checkpoint* checkpoint);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_IMAGE_H_ */
