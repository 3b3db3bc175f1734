/* Decoding JPEGs on a GPU. */
#ifndef TS_GPU_DECODER_H_
#define TS_GPU_DECODER_H_

#include "torchstream/error.h"
#include "torchstream/gpu_inflater.h"
#include "torchstream/image_plan.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Decodes crops of JPEGs on a GPU from their entry points. The pixels equal those of
 * ts_image_decode_with_entries, byte for byte. ts_image_plan_segments writes the plan of an image
 * to memory that is copied to the device.
 *
 * A decoder holds device memory, which only ts_gpu_decoder_new allocates. Its runs share this
 * memory, so they must be on one stream, or on streams that are ordered. One thread uses a decoder
 * at a time.
 *
 * A decoder of TS_DEVICE_CPU is for tests on machines without a GPU. It runs the same arithmetic on
 * the calling thread, image by image, and a run returns when it is done. It is slower than
 * ts_image_decode_with_entries. */
typedef struct ts_gpu_decoder ts_gpu_decoder;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum size of a run's head and plans
 * together. scratch_bytes: memory for coefficients and samples of the images that are decoded at
 * once, about 16 bytes for each pixel of a crop at 4:4:4, and 12 at 4:2:0. A batch that needs more
 * is decoded in parts; an image that alone needs more is refused. */
TS_API ts_error* ts_gpu_decoder_new(int32_t device,
                                    int64_t max_images,
                                    size_t staging_bytes,
                                    size_t scratch_bytes,
                                    ts_gpu_decoder** decoder);

/* Returns the memory to LibTorch's allocator, in the order of the runs' streams. Does not wait. */
TS_API void ts_gpu_decoder_free(ts_gpu_decoder* decoder);

/* Returns the size in bytes of the head for a run of this many images. The run writes the head at
 * the start of the staging memory, and the plans follow it. */
TS_API size_t ts_gpu_decoder_head_bytes(int64_t images);

typedef struct ts_gpu_decode_image {
  size_t plan;   /* byte of the staging memory where its plan starts, a multiple of 16 */
  size_t result; /* byte of the results where its pixels start: window_height rows of window_width *
                    3 bytes, without gaps */
} ts_gpu_decode_image;

/* Enqueues the decoding of `count` images, and returns. Allocates nothing, and does not wait for
 * the device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head and plans, written by
 * ts_image_plan_segments in this process. results: contiguous uint8 on the decoder's device.
 * failed: pinned memory of `count` numbers. Both pieces of host memory are borrowed until the
 * enqueued work has completed. A decoder of the CPU accepts any host memory, and a stream whose
 * device is TS_DEVICE_CPU.
 *
 * The work sets failed[i] to 0, or to 1 if the segments of image i do not match its plan. The
 * pixels of such an image are undefined, and the host has to decode it; other images are not
 * affected.
 *
 * Returns TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for an invalid plan, for pixels that do
 * not fit into the results, and for an image that needs more than the scratch memory. Returns
 * TS_ERROR_CAPTURE while the stream is captured. */
TS_API ts_error* ts_gpu_decoder_run(ts_gpu_decoder* decoder,
                                    uint8_t* staging,
                                    size_t bytes,
                                    const ts_gpu_decode_image* images,
                                    int64_t count,
                                    ts_tensor* results,
                                    int32_t* failed,
                                    ts_stream stream);

/* The entries that a run found for a plan of ts_image_plan_scan. */
typedef struct ts_gpu_decode_entries {
  size_t plan;  /* byte of the staging memory where the plan starts */
  size_t to;    /* byte of the host memory to write its entries to */
  size_t bytes; /* 10 for each of the entries in ts_image_search */
} ts_gpu_decode_entries;

/* Enqueues copies of the entries that the decoder's latest run found, and returns. staging, `bytes`
 * and stream: the same as in that run; this call reads the plans. memory: pinned memory of
 * memory_bytes bytes, borrowed until the copies have completed. The entries of an image that the
 * run flagged are undefined. Returns TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for an
 * invalid plan or one with its own entries, and for entries of the wrong size or without room. */
TS_API ts_error* ts_gpu_decoder_copy_entries(ts_gpu_decoder* decoder,
                                             const uint8_t* staging,
                                             size_t bytes,
                                             const ts_gpu_decode_entries* entries,
                                             int64_t count,
                                             uint8_t* memory,
                                             size_t memory_bytes,
                                             ts_stream stream);

/* Makes a ts_gpu_decoder for ts_gpu_decoder_run_inflating. rooms_bytes: the maximum total size of
 * the rooms of a run's members. The room of a member has TS_INFLATER_WINDOW_BYTES bytes, plus the
 * bytes up to the end of its range, plus 16. The staging memory and the rooms together must be
 * smaller than 4 GiB. */
TS_API ts_error* ts_gpu_decoder_new_inflating(int32_t device,
                                              int64_t max_images,
                                              size_t staging_bytes,
                                              size_t scratch_bytes,
                                              size_t rooms_bytes,
                                              ts_gpu_decoder** decoder);

/* Returns the size in bytes of the head for a run of this many images and members. */
TS_API size_t ts_gpu_decoder_inflating_head_bytes(int64_t images, int64_t members);

/* An image whose compressed data is in a deflate stream. */
typedef struct ts_gpu_decode_member {
  size_t image; /* index of the image, whose plan ts_image_plan_head wrote */
  size_t scan; /* byte of the range where the data of its scan starts; it ends at the range's end or
                  earlier */
  ts_gpu_inflate_range range; /* its room is in the decoder's rooms */
} ts_gpu_decode_member;

/* Inflates the ranges of the members, at most one for each image, and then does ts_gpu_decoder_run.
 * A range's input and window are positions in the staging memory. inflated: pinned memory of
 * member_count results, borrowed as `failed` is.
 *
 * If the range of an image failed, or its checksum is not the expected one, the image was decoded
 * from wrong bytes even if failed[i] is 0: check `inflated` too. Whatever the bytes of a stream, a
 * window or an image, the device reads and writes only memory of that image. */
TS_API ts_error* ts_gpu_decoder_run_inflating(ts_gpu_decoder* decoder,
                                              uint8_t* staging,
                                              size_t bytes,
                                              const ts_gpu_decode_image* images,
                                              int64_t count,
                                              const ts_gpu_decode_member* members,
                                              int64_t member_count,
                                              ts_tensor* results,
                                              int32_t* failed,
                                              ts_gpu_inflate_result* inflated,
                                              ts_stream stream);

/* Returns the size in bytes of the head for a run of this many images, members and files. */
TS_API size_t ts_gpu_decoder_reading_head_bytes(int64_t images, int64_t members, int64_t files);

/* An image whose part of its file, or whose member's input, the device reads from host memory. */
typedef struct ts_gpu_decode_file {
  size_t image; /* index of the image: it has a member, or ts_image_plan_part wrote its plan */
  const uint8_t* from; /* the first byte, in memory of ts_pinned_register_read_only */
} ts_gpu_decode_file;

typedef struct ts_gpu_decode_files {
  const ts_gpu_decode_file* list; /* at most one for each image */
  int64_t count;
  const uint64_t* key; /* 80 numbers: see the digests of imageloader/internal/digest. NULL if all
                          images have members */
} ts_gpu_decode_files;

/* Does ts_gpu_decoder_run_inflating, but first reads the files.
 *
 * In the staging memory, the room for an image's part has the digests of its pieces of 4,096 bytes
 * instead of the part. If a digest differs, failed is 1 for that image.
 *
 * The room for a member's input is the input rounded up to a multiple of 16 bytes; what it has is
 * ignored. The input has no digests: see ts_gpu_decoder_run_inflating for its checksum.
 *
 * The files' memory is borrowed as the staging memory is, and may change meanwhile. A decoder of
 * the CPU accepts any memory.
 *
 * A kernel reads the files and the staging memory between them, without a copy engine. */
TS_API ts_error* ts_gpu_decoder_run_reading(ts_gpu_decoder* decoder,
                                            uint8_t* staging,
                                            size_t bytes,
                                            const ts_gpu_decode_image* images,
                                            int64_t count,
                                            const ts_gpu_decode_member* members,
                                            int64_t member_count,
                                            ts_gpu_decode_files files,
                                            ts_tensor* results,
                                            int32_t* failed,
                                            ts_gpu_inflate_result* inflated,
                                            ts_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TS_GPU_DECODER_H_ */
