/* Entry points: decoding only the part of a JPEG that a crop needs. */
#ifndef TS_IMAGE_ENTRIES_H_
#define TS_IMAGE_ENTRIES_H_

#include "torchstream/error.h"
#include "torchstream/image.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Entry points: a blob of about 1 % of a baseline JPEG's size, with the position of every n-th MCU
 * in the bit stream. With it, decoding a crop reads only the part of the file that it needs, and
 * gives the same pixels. docs/entry-points.md has the layout and the guarantees.
 *
 * A proof says that every entry was compared with the file in this process. It is 0 at first. A
 * call that makes or verifies entries sets it; the caller keeps it with the blob and passes it back
 * unchanged. */
typedef struct ts_image_entries {
  const uint8_t* data;
  size_t bytes;
} ts_image_entries;

/* The buffer that a call writes entry points to. Passed by value. */
typedef struct ts_image_entries_buffer {
  uint8_t* data;
  size_t capacity; /* bytes */
  int64_t spacing; /* MCUs between two entries; 0 chooses a blob of about 1 % of the file, at
                      most 1.5 % */
} ts_image_entries_buffer;

/* The result of making entry points. */
typedef struct ts_image_entries_made {
  size_t bytes; /* the blob's size. If it exceeds the capacity, nothing was written. 0: the file has
                   no entry points (small, not baseline, or damaged) */
  uint64_t proof; /* see ts_image_entries */
} ts_image_entries_made;

/* Makes the entry points of an image of `bytes` bytes without decoding pixels. */
TS_API ts_error* ts_image_make_entries(ts_image_decoder* decoder,
                                       const uint8_t* data,
                                       size_t bytes,
                                       ts_image_entries_buffer buffer,
                                       ts_image_entries_made* made);

/* Does ts_image_decode, and makes the entry points at the same time. This decodes everything below
 * and to the right of the crop too. */
TS_API ts_error* ts_image_decode_make_entries(ts_image_decoder* decoder,
                                              const uint8_t* data,
                                              size_t bytes,
                                              const ts_image_geometry* geometry,
                                              uint8_t* dst,
                                              size_t stride,
                                              ts_image_entries_buffer buffer,
                                              ts_image_entries_made* made);

/* Does ts_image_decode with the help of entry points. Entries that are damaged, wrong or of another
 * file never change a pixel: the image is then decoded without them, and ts_image_decoder_stats
 * counts it.
 *
 * proof: 0 compares all entries with the file first, which costs as much as decoding without them,
 * and sets the proof if they are right. Any other value must be one that an earlier call set for
 * these bytes. With NULL the call trusts the blob as far as its digests go: they detect every
 * accident, but no forgery.
 *
 * Damage is not detected in parts of the file that are not read: the digest says that the file is
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
