/* Plans: what a GPU needs to decode an image (gpu_decoder.h). */
#ifndef TS_IMAGE_PLAN_H_
#define TS_IMAGE_PLAN_H_

#include "torchstream/augmenter.h"
#include "torchstream/error.h"
#include "torchstream/image_entries.h"

#ifdef __cplusplus
extern "C" {
#endif

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
TS_API ts_error* ts_image_plan_segments(ts_image_decoder* decoder,
                                        const uint8_t* data,
                                        size_t bytes,
                                        const ts_image_geometry* geometry,
                                        ts_image_entries entries,
                                        uint64_t* proof,
                                        uint8_t* buffer,
                                        size_t capacity,
                                        size_t* planned);

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
TS_API ts_error* ts_image_plan_append(ts_image_decoder* decoder,
                                      const uint8_t* data,
                                      size_t bytes,
                                      const ts_image_geometry* geometry,
                                      ts_image_entries entries,
                                      uint64_t* proof,
                                      ts_image_plans plans,
                                      size_t* at,
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
TS_API ts_error* ts_image_plan_scan(ts_image_decoder* decoder,
                                    const uint8_t* data,
                                    size_t bytes,
                                    const ts_image_geometry* geometry,
                                    ts_image_plans plans,
                                    ts_image_search* search,
                                    size_t* at,
                                    size_t* planned);

/* Makes the blob that ts_image_decode_make_entries would make without a spacing, from the entries
 * that a GPU has found (ts_gpu_decoder_copy_entries) in a plan of ts_image_plan_scan, which it has
 * not flagged. found_bytes: 10 for each of search->entries. made->bytes is 0 if the file gets no
 * entries, and if the found ones are impossible. */
TS_API ts_error* ts_image_pack_entries(const ts_image_search* search,
                                       const uint8_t* found,
                                       size_t found_bytes,
                                       ts_image_entries_buffer buffer,
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
TS_API ts_error* ts_image_plan_head(ts_image_decoder* decoder,
                                    const ts_image_head* head,
                                    const ts_image_geometry* geometry,
                                    ts_image_entries entries,
                                    uint8_t* buffer,
                                    size_t capacity,
                                    size_t* planned);

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
TS_API ts_error* ts_image_plan_part(ts_image_decoder* decoder,
                                    const ts_image_head* head,
                                    const ts_image_geometry* geometry,
                                    ts_image_entries entries,
                                    size_t piece,
                                    ts_image_plans plans,
                                    ts_image_part* part);

/* Writes the digests of the pieces of `piece` bytes that the data consist of, of which the last may
 * be shorter: bytes / piece of them, rounded up. They are valid as long as the process lives, and
 * depend on a secret of the process. */
TS_API ts_error* ts_image_digest_pieces(const uint8_t* data,
                                        size_t bytes,
                                        size_t piece,
                                        uint64_t* digests);

/* Appends operations to a plan in `buffer`, which ts_image_plan_segments wrote and which has none:
 * ts_gpu_decoder_run then runs them on the image's pixels, to the bytes of ts_augmenter_run.
 * planned: the plan's bytes with them. More than the capacity: they did not fit, and the plan is
 * unchanged. 0: only the host runs one of them, and the plan is unchanged. That is so for an
 * operation whose result has another size than the image, and for an image that then takes more
 * than 256 MiB of scratch memory.
 * TS_ERROR_INVALID_ARGUMENT as in ts_augmenter_run, with the plan unchanged. */
TS_API ts_error* ts_image_plan_augment(uint8_t* buffer,
                                       size_t capacity,
                                       const ts_augment_op* ops,
                                       int64_t count,
                                       size_t* planned);

#ifdef __cplusplus
}
#endif

#endif /* TS_IMAGE_PLAN_H_ */
