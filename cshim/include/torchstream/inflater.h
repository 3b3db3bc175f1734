/* Inflate: raw deflate streams, from the start or from a checkpoint. */
#ifndef TS_INFLATER_H_
#define TS_INFLATER_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The maximum distance, in bytes of output, of a back-reference in a deflate stream. */
#define TS_INFLATER_WINDOW_BYTES 32768

/* The tables and the state of inflating. One thread uses an inflater at a time. */
typedef struct ts_inflater ts_inflater;

/* Makes an inflater. With spacing > 0 it makes checkpoints: the next one is at the first block that
 * starts at least that many bytes of output after the last one. */
TS_API ts_error* ts_inflater_new(size_t spacing, ts_inflater** inflater);
TS_API void ts_inflater_free(ts_inflater* inflater);

/* Starts a stream, or enters one at a checkpoint. skip_bits (0 to 7): bits of the first byte of
 * input before the checkpoint. history: bytes of output before `begin` in the buffer of the next
 * run: 0 for a new stream, TS_INFLATER_WINDOW_BYTES (the window) at a checkpoint. */
TS_API ts_error* ts_inflater_reset(ts_inflater* inflater, int32_t skip_bits, size_t history);

typedef struct ts_inflate_progress {
  size_t consumed; /* bytes of input */
  size_t produced; /* bytes of output */
  bool done;       /* the stream has ended */
} ts_inflate_progress;

/* Inflates `bytes` bytes of input into buffer[begin, end). buffer[0, begin) holds the output before
 * it, at least the last TS_INFLATER_WINDOW_BYTES bytes, and is only read. The caller passes input
 * that was not consumed again, followed by the bytes after it. To make progress a run needs 1 KB of
 * input, or all that is left if `last` is set, and a byte of room. Returns TS_ERROR_DECODE for
 * damaged bytes and, with `last`, for a truncated stream; then call ts_inflater_reset before the
 * next run. */
TS_API ts_error* ts_inflater_run(ts_inflater* inflater,
                                 const uint8_t* input,
                                 size_t bytes,
                                 bool last,
                                 uint8_t* buffer,
                                 size_t begin,
                                 size_t end,
                                 ts_inflate_progress* progress);

/* A place where a stream can be entered. Its pointers are valid until the next call with the
 * inflater. */
typedef struct ts_inflate_checkpoint {
  uint64_t bit;    /* bit of the input since reset where a block starts */
  uint64_t output; /* bytes of output before it, since reset */
  /* The last TS_INFLATER_WINDOW_BYTES bytes of that output: those that later output refers to, and
   * the three bytes after each. The others are undefined. */
  const uint8_t* window;
  /* One bit for each byte of the window, from the lowest bit of the first word: set if later output
   * refers to the byte. */
  const uint64_t* used;
} ts_inflate_checkpoint;

/* Returns the next complete checkpoint; its window is NULL if there is none. A checkpoint is
 * complete after TS_INFLATER_WINDOW_BYTES more bytes of output, or when the stream ends. Call it
 * after every run: while 64 checkpoints wait, no more are made. */
TS_API ts_error* ts_inflater_get_checkpoint(ts_inflater* inflater,
                                            ts_inflate_checkpoint* checkpoint);

#ifdef __cplusplus
}
#endif

#endif /* TS_INFLATER_H_ */
