/* Entry points: decoding only the part of a JPEG that a crop needs. */
#ifndef TS_IMAGE_ENTRIES_H_
#define TS_IMAGE_ENTRIES_H_

#include "torchstream/error.h"
#include "torchstream/image.h"

#ifdef __cplusplus
extern "C" {
#endif

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
TS_API ts_error* ts_image_make_entries(ts_image_decoder* decoder,
                                       const uint8_t* data,
                                       size_t bytes,
                                       ts_image_entries_buffer buffer,
                                       ts_image_entries_made* made);

/* Does ts_image_decode, and makes the entry points on the way. Costs the decoding of all that lies
 * below and right of the crop. */
TS_API ts_error* ts_image_decode_make_entries(ts_image_decoder* decoder,
                                              const uint8_t* data,
                                              size_t bytes,
                                              const ts_image_geometry* geometry,
                                              uint8_t* dst,
                                              size_t stride,
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
TS_API ts_error* ts_image_decode_with_entries(ts_image_decoder* decoder,
                                              const uint8_t* data,
                                              size_t bytes,
                                              const ts_image_geometry* geometry,
                                              ts_image_entries entries,
                                              uint8_t* dst,
                                              size_t stride,
                                              uint64_t* proof);

#ifdef __cplusplus
}
#endif

#endif /* TS_IMAGE_ENTRIES_H_ */
