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

/* Decodes crops of JPEGs on a GPU from their entry points, as ts_image_decode_with_entries does on
 * the host: the pixels are the same, byte for byte. ts_image_plan_segments plans an image into
 * memory that travels to the device.
 *
 * A decoder holds device memory, allocated by ts_gpu_decoder_new and by no other call. Its runs
 * share that memory, so they are on one stream, or on streams that are ordered. One thread uses a
 * decoder at a time.
 *
 * A decoder of TS_DEVICE_CPU runs the same arithmetic on the calling thread, image by image, and
 * its runs return when they are done: for tests on machines without a GPU. It is slower than
 * ts_image_decode_with_entries. */
typedef struct ts_gpu_decoder ts_gpu_decoder;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum of the plans of a run, with the head.
 * scratch_bytes: coefficients and samples of the images that are decoded at once; a batch that
 * needs more is decoded in parts, and an image that needs more by itself is refused. A crop takes
 * about 16 bytes a pixel at 4:4:4, and 12 at 4:2:0. */
TS_API ts_error* ts_gpu_decoder_new(int32_t device,
                                    int64_t max_images,
                                    size_t staging_bytes,
                                    size_t scratch_bytes,
                                    ts_gpu_decoder** decoder);

/* Returns the memory to LibTorch's allocator, in the order of the streams of the runs. Waits for
 * nothing. */
TS_API void ts_gpu_decoder_free(ts_gpu_decoder* decoder);

/* Returns the bytes at the beginning of the staging memory that a run of so many images writes. The
 * plans lie behind them. */
TS_API size_t ts_gpu_decoder_head_bytes(int64_t images);

typedef struct ts_gpu_decode_image {
  size_t plan;   /* byte of the staging memory where its plan begins, a multiple of 16 */
  size_t result; /* byte of the results where its pixels begin: window_height rows of
                    window_width * 3 bytes, without gaps */
} ts_gpu_decode_image;

/* Enqueues the decoding of `count` images, and returns. Neither allocates nor waits for the device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head and plans, written by
 * ts_image_plan_segments in this process. results: contiguous uint8 on the decoder's device.
 * failed: pinned memory of `count` numbers. Both pieces of host memory are borrowed until the work
 * that is enqueued here has completed. A decoder of the CPU takes any host memory, and a stream
 * whose device is TS_DEVICE_CPU.
 *
 * failed[i] is then 0, or 1 if the segments of image i are not as its plan says: its pixels are
 * undefined, those of the others are right, and the host has to decode the image.
 *
 * TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a plan that is none, for pixels that do not
 * fit into the results, and for an image that needs more scratch memory than there is.
 * TS_ERROR_CAPTURE while the stream is captured. */
TS_API ts_error* ts_gpu_decoder_run(ts_gpu_decoder* decoder,
                                    uint8_t* staging,
                                    size_t bytes,
                                    const ts_gpu_decode_image* images,
                                    int64_t count,
                                    ts_tensor* results,
                                    int32_t* failed,
                                    ts_stream stream);

/* The entries that a run has found for a plan of ts_image_plan_scan. */
typedef struct ts_gpu_decode_entries {
  size_t plan;  /* byte of the staging memory where the plan begins */
  size_t to;    /* byte of the host memory where its entries go */
  size_t bytes; /* 10 for each of ts_image_search's entries */
} ts_gpu_decode_entries;

/* Enqueues copies of what the decoder's latest run has found, and returns. staging and `bytes` are
 * that run's, whose plans this call reads, and so is the stream. memory: pinned memory of
 * memory_bytes bytes, borrowed until the copies have completed. The entries of an image that the
 * run has flagged are undefined. TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a plan that
 * is none or has its own entries, and for entries of another size or without room. */
TS_API ts_error* ts_gpu_decoder_copy_entries(ts_gpu_decoder* decoder,
                                             const uint8_t* staging,
                                             size_t bytes,
                                             const ts_gpu_decode_entries* entries,
                                             int64_t count,
                                             uint8_t* memory,
                                             size_t memory_bytes,
                                             ts_stream stream);

/* Makes a ts_gpu_decoder for ts_gpu_decoder_run_inflating. rooms_bytes: the maximum of the rooms of
 * a run's members, each TS_INFLATER_WINDOW_BYTES, the bytes up to the end of its range, and 16. The
 * staging memory and the rooms together have less than 4 GiB. */
TS_API ts_error* ts_gpu_decoder_new_inflating(int32_t device,
                                              int64_t max_images,
                                              size_t staging_bytes,
                                              size_t scratch_bytes,
                                              size_t rooms_bytes,
                                              ts_gpu_decoder** decoder);

/* Returns the bytes at the beginning of the staging memory that a run of so many images and members
 * writes. */
TS_API size_t ts_gpu_decoder_inflating_head_bytes(int64_t images, int64_t members);

/* An image whose compressed data are in a deflate stream. */
typedef struct ts_gpu_decode_member {
  size_t image;               /* which of the images, whose plan ts_image_plan_head has written */
  size_t scan;                /* byte of the range where the data of its scan begin; they reach to
                                 the end of the range, or before it */
  ts_gpu_inflate_range range; /* its room is a byte of the decoder's rooms */
} ts_gpu_decode_member;

/* Does ts_gpu_decoder_run, after it has inflated the ranges of members, at most one an image. The
 * places of a range's input and window are those in the staging memory. inflated: pinned memory of
 * member_count results, borrowed as `failed` is.
 *
 * An image whose range failed, or has another checksum than it should have, was decoded from wrong
 * bytes: failed[i] may be 0, and the caller looks at inflated too. No bytes of a stream, a window
 * or an image make the device read or write outside of what belongs to the image. */
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

#ifdef __cplusplus
}
#endif

#endif /* TS_GPU_DECODER_H_ */
