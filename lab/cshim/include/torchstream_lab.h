/* libtorchstream_lab: the C++ peers of torchstream-lab, beside libtorchstream.
 * Not installed; the rules of torchstream.h hold.
 */
#ifndef TORCHSTREAM_LAB_H_
#define TORCHSTREAM_LAB_H_

#include "torchstream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of this header: TS_ABI_VERSION of the torchstream.h that the
 * library was built with. */
TS_API int32_t ts_bench_abi_version(void);

/* Does nothing: what a call costs. */
TS_API void ts_bench_noop(void);
/* Runs `rounds` calls of at::add_ and of at::add on a one-element float32
 * tensor of the device, and returns host nanoseconds a call: the C++ peer of
 * the same operator through ts_operator_call. out_of_place: each result is
 * freed at once; held: results are kept and freed 400 at a time. */
TS_API ts_error* ts_bench_add(int32_t device, int32_t rounds, double* in_place,
                              double* out_of_place, double* held);
/* Runs `rounds` rounds of 400 calls of one operator, by its name in
 * operators.cc, on tiny tensors of the device, and returns host nanoseconds a
 * call. The results of a round are kept and freed at its end. The device has
 * nothing queued when a round begins. */
TS_API ts_error* ts_bench_operator(int32_t device, const char* name, int32_t rounds,
                                   double* nanoseconds);
/* The implementations of nvJPEG that are measured, with nvJPEG's numbers
 * (nvjpegBackend_t). */
enum {
  TS_BENCH_NVJPEG_CUDA = 2,    /* Huffman codes on CUDA cores too, in large batches */
  TS_BENCH_NVJPEG_HARDWARE = 3 /* the GPU's JPEG engines */
};

typedef struct ts_bench_nvjpeg_rate {
  int64_t images;   /* decoded in the measured time */
  int64_t left_out; /* of the call's images, those that nvJPEG does not decode
                       in batches */
  int64_t batch;    /* images a batch: fewer than asked for if there are not so many */
  double seconds;   /* measured */
  double cpu_seconds;
  int32_t engines; /* of the GPU, and 0 but for TS_BENCH_NVJPEG_HARDWARE */
  int32_t cores_per_engine;
} ts_bench_nvjpeg_rate;

/* Decodes JPEGs with NVIDIA's nvJPEG for so many seconds, after each thread has
 * decoded all of them once: whole images, to interleaved RGB in device memory,
 * without a crop. The batches take turns. Each thread has a decoder state and a
 * stream of its own and waits for each of its batches. data: the images behind
 * one another, `count` of them with these sizes in bytes. libnvjpeg is loaded
 * at the first call. UNSUPPORTED without the library, without the
 * implementation on this GPU, or if it decodes none of the images. Blocks. */
TS_API ts_error* ts_bench_nvjpeg(int32_t device, int32_t backend, const uint8_t* data,
                                 const size_t* sizes, int64_t count, int64_t batch, int32_t threads,
                                 double seconds, ts_bench_nvjpeg_rate* rate);

#ifdef __cplusplus
}
#endif

#endif /* TORCHSTREAM_LAB_H_ */
