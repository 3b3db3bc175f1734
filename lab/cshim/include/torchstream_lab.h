/* libtorchstream_lab: the C++ peers of torchstream-lab, which use libtorchstream. Not installed.
 * The rules of torchstream.h apply. */
#ifndef TORCHSTREAM_LAB_H_
#define TORCHSTREAM_LAB_H_

#include "torchstream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Returns the version of this header: TS_ABI_VERSION of the torchstream.h that the library was
 * built with. */
TS_API int32_t ts_bench_abi_version(void);

/* Does nothing, to measure the cost of a call. */
TS_API void ts_bench_noop(void);

/* Runs `rounds` calls of at::add_ and of at::add on a one-element float32 tensor of the device, and
 * returns host nanoseconds for each call: the C++ peer of the same operator through
 * ts_operator_call. out_of_place: each result is freed at once. held: results are kept and freed
 * 400 at a time. */
TS_API ts_error* ts_bench_add(int32_t device,
                              int32_t rounds,
                              double* in_place,
                              double* out_of_place,
                              double* held);

/* Runs `rounds` rounds of 400 calls of one operator, by its name in operators.cc, on tiny tensors
 * of the device, and returns host nanoseconds for each call. The results of a round are freed at
 * its end. The device has nothing queued when a round starts. */
TS_API ts_error* ts_bench_operator(int32_t device,
                                   const char* name,
                                   int32_t rounds,
                                   double* nanoseconds);

/* The nvJPEG implementations to measure, with nvJPEG's numbers (nvjpegBackend_t). */
enum {
  TS_BENCH_NVJPEG_CUDA = 2,    /* Huffman codes on CUDA cores too, in large batches */
  TS_BENCH_NVJPEG_HARDWARE = 3 /* the GPU's JPEG engines */
};

typedef struct ts_bench_nvjpeg_rate {
  int64_t images;   /* decoded in the measured time */
  int64_t left_out; /* images of the call that nvJPEG does not decode in batches */
  int64_t batch;    /* images in a batch: fewer than requested if there are not so many */
  double seconds;   /* measured */
  double cpu_seconds;
  int32_t engines; /* of the GPU; 0 except for TS_BENCH_NVJPEG_HARDWARE */
  int32_t cores_per_engine;
} ts_bench_nvjpeg_rate;

/* Decodes JPEGs with NVIDIA's nvJPEG for `seconds` seconds, after each thread has decoded all of
 * them once: whole images, to interleaved RGB in device memory, without a crop. The batches
 * alternate. Each thread has its own decoder state and stream, and waits for each of its batches.
 * data: `count` consecutive images with these sizes in bytes. The first call loads libnvjpeg.
 * Returns TS_ERROR_UNSUPPORTED without the library, without the implementation on this GPU, or if
 * it decodes none of the images. Blocks. */
TS_API ts_error* ts_bench_nvjpeg(int32_t device,
                                 int32_t backend,
                                 const uint8_t* data,
                                 const size_t* sizes,
                                 int64_t count,
                                 int64_t batch,
                                 int32_t threads,
                                 double seconds,
                                 ts_bench_nvjpeg_rate* rate);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_LAB_H_ */
