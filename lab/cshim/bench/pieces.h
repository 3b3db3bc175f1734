// The time of each piece of a GPU decoder's and an inflater's work. The functions use the internals
// of these objects, so a program that calls them is linked with the library's objects.
#pragma once

#include "torchstream.h"

/* The pieces of ts_bench_gpu_decode's time. */
enum {
  TS_BENCH_DECODE_COPY = 0, /* the staging memory to the device */
  TS_BENCH_DECODE_TABLES = 1,
  TS_BENCH_DECODE_SYNC = 2,    /* the states in whole scans */
  TS_BENCH_DECODE_SUMS = 3,    /* the sums before each of their subsequences */
  TS_BENCH_DECODE_ENTRIES = 4, /* their entries */
  TS_BENCH_DECODE_ENTROPY = 5,
  TS_BENCH_DECODE_TRANSFORM = 6,
  TS_BENCH_DECODE_WEIGHTS = 7,
  TS_BENCH_DECODE_COLUMNS = 8,
  TS_BENCH_DECODE_RESULTS = 9,
  TS_BENCH_DECODE_AUGMENT = 10, /* nothing without steps */
  TS_BENCH_DECODE_ALL = 11,     /* a whole run, of several enqueued one after the other */
  TS_BENCH_DECODE_PIECES = 12
};

/* Does ts_gpu_decoder_run `rounds` times, twice, and waits. milliseconds:
 * TS_BENCH_DECODE_PIECES times of the device, the medians of the rounds;
 * TS_BENCH_DECODE_ALL is a mean. */
ts_error* ts_bench_gpu_decode(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                              const ts_gpu_decode_image* images, int64_t count, ts_tensor* results,
                              int32_t* failed, ts_stream stream, int32_t rounds,
                              double* milliseconds);

/* The pieces of ts_bench_gpu_inflate's time. */
enum {
  TS_BENCH_INFLATE_COPY = 0,   /* the staging memory to the device */
  TS_BENCH_INFLATE_KERNEL = 1, /* the inflating and the checksums */
  TS_BENCH_INFLATE_ALL = 2,    /* a whole run, of several enqueued one after the other */
  TS_BENCH_INFLATE_PIECES = 3
};

/* Does ts_gpu_inflater_run `rounds` times, twice, and waits. milliseconds:
 * TS_BENCH_INFLATE_PIECES times of the device, the medians of the rounds;
 * TS_BENCH_INFLATE_ALL is a mean. */
ts_error* ts_bench_gpu_inflate(ts_gpu_inflater* inflater, uint8_t* staging, size_t bytes,
                               const ts_gpu_inflate_range* ranges, int64_t count, ts_tensor* rooms,
                               ts_gpu_inflate_result* results, ts_stream stream, int32_t rounds,
                               double* milliseconds);
