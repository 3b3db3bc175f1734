/* Inflating on a GPU. */
#ifndef TS_GPU_INFLATER_H_
#define TS_GPU_INFLATER_H_

#include "torchstream/error.h"
#include "torchstream/inflater.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Inflates many ranges of raw deflate streams on a GPU, each from a checkpoint of ts_inflater: the
 * members of a .tgz, say, whose index has a checkpoint before each of them. The bytes are those of
 * the host's inflater.
 *
 * An inflater holds device memory, allocated by ts_gpu_inflater_new and by no other call. Its runs
 * share that memory, so they are on one stream, or on streams that are ordered. One thread uses an
 * inflater at a time. One of TS_DEVICE_CPU is as such a ts_gpu_decoder: for tests. */
typedef struct ts_gpu_inflater ts_gpu_inflater;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum of the inputs and windows of a run,
 * with the head. */
TS_API ts_error* ts_gpu_inflater_new(int32_t device,
                                     int64_t max_ranges,
                                     size_t staging_bytes,
                                     ts_gpu_inflater** inflater);

/* Returns the memory to LibTorch's allocator, in the order of the streams of the runs. Waits for
 * nothing. */
TS_API void ts_gpu_inflater_free(ts_gpu_inflater* inflater);

/* Returns the bytes at the beginning of the staging memory that a run of so many ranges writes. */
TS_API size_t ts_gpu_inflater_head_bytes(int64_t ranges);

typedef struct ts_gpu_inflate_range {
  size_t input;        /* byte of the staging memory where the compressed bytes from the checkpoint
                          on begin, a multiple of 16, behind the head */
  size_t input_bytes;  /* at most 256 MiB; more than the range needs do no harm */
  size_t window;       /* byte of the staging memory where the packed window begins */
  size_t window_bytes; /* of the packed window, as docs/index-format.md describes it; 0: all bytes
                          before the checkpoint are 0 */
  size_t skip;         /* bytes of output from the checkpoint to the range */
  size_t bytes;        /* of the range; with `skip` at most 1 GiB */
  size_t room;         /* byte of the rooms, a multiple of 16, where TS_INFLATER_WINDOW_BYTES bytes
                          of window are written, then `skip` bytes of output, then the range. Rooms
                          do not overlap. */
  int32_t skip_bits;   /* 0 to 7: bits of the first byte that come before the checkpoint */
} ts_gpu_inflate_range;

typedef struct ts_gpu_inflate_result {
  int32_t failed;    /* 0, or 1 if the stream or the window is damaged, if the stream ends before
                        the range does or has more blocks than 1024 and one for each 64 bytes of
                        input, or than 16384, or if the packed window has more than 128 KiB */
  uint32_t checksum; /* CRC-32 (IEEE) of the range; 0 if it failed */
} ts_gpu_inflate_result;

/* Enqueues the inflating of `count` ranges, and returns. Neither allocates nor waits for the
 * device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head, inputs and windows.
 * rooms: contiguous uint8 on the inflater's device, aligned to 16 bytes. results: pinned memory of
 * `count` results. Both pieces of host memory are borrowed until the work that is enqueued here has
 * completed. An inflater of the CPU takes any host memory, and a stream whose device is
 * TS_DEVICE_CPU.
 *
 * The room of a range that failed is undefined, those of the others are right: no bytes of an input
 * or a window make the device read anything but these and the range's own room, or write anything
 * but that room. Damage behind a range is not noticed. The caller compares the checksum.
 *
 * TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a range whose memory is not inside the
 * staging memory or the rooms. TS_ERROR_CAPTURE while the stream is captured. */
TS_API ts_error* ts_gpu_inflater_run(ts_gpu_inflater* inflater,
                                     uint8_t* staging,
                                     size_t bytes,
                                     const ts_gpu_inflate_range* ranges,
                                     int64_t count,
                                     ts_tensor* rooms,
                                     ts_gpu_inflate_result* results,
                                     ts_stream stream);

#ifdef __cplusplus
}
#endif

#endif /* TS_GPU_INFLATER_H_ */
