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

/* Inflates many ranges of raw deflate streams on a GPU, each from a checkpoint of ts_inflater.
 * Examples of such ranges are the members of a .tgz whose index has a checkpoint before each
 * member. The bytes equal those of the host's inflater.
 *
 * An inflater holds device memory, which only ts_gpu_inflater_new allocates. Its runs share this
 * memory, so they must be on one stream, or on streams that are ordered. One thread uses an
 * inflater at a time. An inflater of TS_DEVICE_CPU is for tests, like a ts_gpu_decoder of
 * TS_DEVICE_CPU. */
typedef struct ts_gpu_inflater ts_gpu_inflater;

/* device: a GPU, or TS_DEVICE_CPU. staging_bytes: the maximum size of a run's head, inputs and
 * windows together. */
TS_API ts_error* ts_gpu_inflater_new(int32_t device,
                                     int64_t max_ranges,
                                     size_t staging_bytes,
                                     ts_gpu_inflater** inflater);

/* Returns the memory to LibTorch's allocator, in the order of the runs' streams. Does not wait. */
TS_API void ts_gpu_inflater_free(ts_gpu_inflater* inflater);

/* Returns the size in bytes of the head for a run of this many ranges. The run writes the head at
 * the start of the staging memory, before the inputs and windows. */
TS_API size_t ts_gpu_inflater_head_bytes(int64_t ranges);

typedef struct ts_gpu_inflate_range {
  size_t input; /* byte of the staging memory where the compressed data from the checkpoint starts,
                   a multiple of 16, after the head */
  size_t input_bytes;  /* at most 256 MiB; may exceed the range's data */
  size_t window;       /* byte of the staging memory where the packed window starts */
  size_t window_bytes; /* size of the packed window (docs/index-format.md has its format); 0: all
                          bytes before the checkpoint are 0 */
  size_t skip;         /* bytes of output from the checkpoint to the range */
  size_t bytes;        /* size of the range; with `skip` at most 1 GiB */
  size_t room;         /* byte of `rooms`, a multiple of 16, where the output is written:
                          TS_INFLATER_WINDOW_BYTES bytes of window, `skip` bytes of output, then
                          the range. Rooms must not overlap. */
  int32_t skip_bits;   /* 0 to 7: bits of the first byte before the checkpoint */
} ts_gpu_inflate_range;

typedef struct ts_gpu_inflate_result {
  int32_t failed; /* 0 for success. 1 if the stream or the window is damaged, the stream ends before
                     the range does, it has more than 16384 blocks or more than 1024 plus one for
                     each 64 bytes of input, or the packed window exceeds 128 KiB */
  uint32_t checksum; /* CRC-32 (IEEE) of the range; 0 if it failed */
} ts_gpu_inflate_result;

/* Enqueues the inflating of `count` ranges, and returns. Allocates nothing, and does not wait for
 * the device.
 *
 * staging: pinned memory, aligned to 16 bytes, with `bytes` bytes of head, inputs and windows.
 * rooms: contiguous uint8 on the inflater's device, aligned to 16 bytes. results: pinned memory of
 * `count` results. Both pieces of host memory are borrowed until the enqueued work has completed.
 * An inflater of the CPU accepts any host memory, and a stream whose device is TS_DEVICE_CPU.
 *
 * The room of a failed range is undefined; other rooms are not affected. Whatever the bytes of an
 * input or a window, the device reads only them and the range's own room, and writes only that
 * room. Damage after the end of a range is not detected. The caller compares the checksum.
 *
 * Returns TS_ERROR_INVALID_ARGUMENT, with nothing enqueued, for a range whose memory is not inside
 * the staging memory or the rooms. Returns TS_ERROR_CAPTURE while the stream is captured. */
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
