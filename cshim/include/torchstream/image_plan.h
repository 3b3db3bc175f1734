/* Plans: the input of a GPU that decodes images (gpu_decoder.h). */
#ifndef TS_IMAGE_PLAN_H_
#define TS_IMAGE_PLAN_H_

#include "torchstream/augmenter.h"
#include "torchstream/error.h"
#include "torchstream/image_entries.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Plans the decoding of an image as ts_image_decode_with_entries would do it, for
 * ts_gpu_decoder_run. Writes the plan, with the compressed bytes that it needs, to `buffer`, which
 * is aligned to 16 bytes. A plan is valid only for this process and version of the library.
 *
 * With both entries.data and proof NULL the plan contains the whole scan, and the GPU finds the
 * entries. It flags damage; the host then decides.
 *
 * planned: the plan's size in bytes, a multiple of 16. If it exceeds the capacity, the plan did not
 * fit, and the buffer's content is undefined. It is 0 if only the host can decode this image with
 * this geometry and these entries:
 *
 * - Entries that are not proven, or are too far apart. `proof` is as in
 *   ts_image_decode_with_entries, except that this call does not verify entries.
 * - dct_scaling where it would scale, CMYK, and unusual Huffman tables.
 * - A crop whose decoding needs more than 256 MiB of scratch memory (ts_gpu_decoder_new).
 *
 * Returns TS_ERROR_DECODE for damage that libjpeg-turbo finds in the file's header and, without
 * entries, for a truncated file or wrong segments or markers. */
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
  uint64_t* used; /* bytes from the start that plans occupy, a multiple of 16 */
} ts_image_plans;

/* Does ts_image_plan_segments, with entries, and puts the plan after the plans that `plans` has.
 * Once it knows the plan's size, it reserves the memory by one atomic addition to *plans.used, and
 * writes the plan to plans.data + *at. planned: the plan's size in bytes, 0 also if there is no
 * room for it. Without room, and after an error, it reserves no memory. */
TS_API ts_error* ts_image_plan_append(ts_image_decoder* decoder,
                                      const uint8_t* data,
                                      size_t bytes,
                                      const ts_image_geometry* geometry,
                                      ts_image_entries entries,
                                      uint64_t* proof,
                                      ts_image_plans plans,
                                      size_t* at,
                                      size_t* planned);

/* The facts that ts_image_pack_entries needs about a file in whose scan a GPU finds the entries. */
typedef struct ts_image_search {
  uint64_t digest;     /* of the file, for its blob */
  uint64_t proof;      /* the future proof of its entries, valid in this process only */
  uint64_t file_bytes; /* the file's size */
  uint64_t scan;       /* byte of the file where the scan's data starts */
  uint32_t mcus;       /* in the scan */
  uint32_t spacing;    /* MCUs between two entries that the GPU finds */
  uint32_t entries;    /* entries that the GPU finds, 10 bytes each */
  uint32_t wanted;     /* MCUs between two entries of the blob; 0: the file gets no blob */
} ts_image_search;

/* Does ts_image_plan_append without entries: the GPU finds them in the whole scan. With plans.used
 * NULL the plan is written to the start of the memory, and planned exceeds plans.bytes if it did
 * not fit.
 *
 * It plans only files that are good whatever their scan contains: a decoder with
 * TS_IMAGE_DAMAGE_WARN or TS_IMAGE_DAMAGE_PARTIAL decodes them, perhaps with a warning. For other
 * files planned is 0, or the result is TS_ERROR_DECODE. search: if not NULL, filled in for
 * ts_image_pack_entries, which costs two digests of the file. */
TS_API ts_error* ts_image_plan_scan(ts_image_decoder* decoder,
                                    const uint8_t* data,
                                    size_t bytes,
                                    const ts_image_geometry* geometry,
                                    ts_image_plans plans,
                                    ts_image_search* search,
                                    size_t* at,
                                    size_t* planned);

/* Makes the blob that ts_image_decode_make_entries would make with spacing 0, from the entries that
 * a GPU found (ts_gpu_decoder_copy_entries) for a plan of ts_image_plan_scan. The GPU must not have
 * flagged the image. found_bytes: 10 for each of search->entries. made->bytes is 0 if the file gets
 * no entries, and if the found entries are impossible. */
TS_API ts_error* ts_image_pack_entries(const ts_image_search* search,
                                       const uint8_t* found,
                                       size_t found_bytes,
                                       ts_image_entries_buffer buffer,
                                       ts_image_entries_made* made);

/* The start of a JPEG, up to its scan's data. The rest of the file is elsewhere. */
typedef struct ts_image_head {
  const uint8_t*
      data; /* segments that decoding does not need (APP1 to APP13, comments) may be left out */
  size_t bytes;
  size_t file_bytes; /* of the whole file, as recorded in the entries */
  size_t scan;       /* byte of the whole file where the scan's data starts */
} ts_image_head;

/* Does ts_image_plan_segments for an image whose compressed data a ts_gpu_decoder inflates
 * (ts_gpu_decoder_run_inflating). The plan has everything except this data. The caller guarantees
 * that the entries were verified with the whole file and that the file's bytes have not changed
 * since, which this call cannot see. With other bytes the decoder's memory accesses still stay in
 * bounds. planned is 0 also for entries with another file_bytes or scan, and for a head with
 * unusual segments. */
TS_API ts_error* ts_image_plan_head(ts_image_decoder* decoder,
                                    const ts_image_head* head,
                                    const ts_image_geometry* geometry,
                                    ts_image_entries entries,
                                    uint8_t* buffer,
                                    size_t capacity,
                                    size_t* planned);

/* A plan with room for a part of its file. All positions are in bytes. */
typedef struct ts_image_part {
  size_t at;      /* position of the plan from plans.data; 0 without a plan */
  size_t planned; /* the plan's size; 0: there is no plan */
  size_t file;    /* position of the part in the file */
  size_t bytes;   /* size of the part */
  size_t to;      /* where the caller writes the part, from plans.data */
} ts_image_part;

/* Does ts_image_plan_append for an image whose file the caller reads after this call. The plan has
 * room for the part of the file with the segments that the geometry needs, in whole pieces of
 * `piece` bytes; the last piece of a file may be shorter. The caller writes the file's bytes there.
 * It guarantees the same about them as for ts_image_plan_head. The comment there also says when
 * there is no plan. */
TS_API ts_error* ts_image_plan_part(ts_image_decoder* decoder,
                                    const ts_image_head* head,
                                    const ts_image_geometry* geometry,
                                    ts_image_entries entries,
                                    size_t piece,
                                    ts_image_plans plans,
                                    ts_image_part* part);

/* Appends operations to a plan in `buffer` that ts_image_plan_segments wrote and that has none.
 * ts_gpu_decoder_run then applies them to the image's pixels, with the results of ts_augmenter_run.
 *
 * planned: the plan's size in bytes with the operations. If it exceeds the capacity, they did not
 * fit, and the plan is unchanged. If it is 0, the plan is unchanged too, because only the host can
 * run one of the operations: its result has another size than the image, or the image would need
 * more than 256 MiB of scratch memory. Returns TS_ERROR_INVALID_ARGUMENT as ts_augmenter_run does,
 * with the plan unchanged. */
TS_API ts_error* ts_image_plan_augment(uint8_t* buffer,
                                       size_t capacity,
                                       const ts_augment_op* ops,
                                       int64_t count,
                                       size_t* planned);

#ifdef __cplusplus
}
#endif

#endif /* TS_IMAGE_PLAN_H_ */
