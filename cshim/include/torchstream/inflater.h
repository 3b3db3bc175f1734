/* Inflate: raw deflate streams, from the start or from a checkpoint. */
#ifndef TS_INFLATER_H_
#define TS_INFLATER_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How many bytes of output a deflate stream can refer back to. */
#define TS_INFLATER_WINDOW_BYTES 32768

/* Tables and state. One inflater serves one thread at a time. */
typedef struct ts_inflater ts_inflater;

/* Makes an inflater. With spacing > 0, the first block at least that many bytes of output after the
 * last checkpoint becomes the next one. */
TS_API ts_error* ts_inflater_new(size_t spacing, ts_inflater** inflater);
TS_API void ts_inflater_free(ts_inflater* inflater);

/* Begins a stream, or enters one at a checkpoint. skip_bits (0 to 7) of the first byte of input
 * come before the checkpoint; `history` bytes of output stand before `begin` in the buffer of the
 * next run (0 for a new stream, TS_INFLATER_WINDOW_BYTES at a checkpoint: its window). */
TS_API ts_error* ts_inflater_reset(ts_inflater* inflater, int32_t skip_bits, size_t history);

typedef struct ts_inflate_progress {
  size_t consumed; /* bytes of input */
  size_t produced; /* bytes of output */
  bool done;       /* the stream has ended */
} ts_inflate_progress;

/* Inflates `bytes` bytes of input into buffer[begin, end). buffer[0, begin) holds the output before
 * that, at least its last TS_INFLATER_WINDOW_BYTES bytes, and is not written. Input that was not
 * consumed must be passed again, together with what follows it. Progress needs 1 KB of input, or
 * whatever is left if `last` is set, and a byte of room. TS_ERROR_DECODE for damaged bytes and,
 * with `last`, for a stream that is cut off; ts_inflater_reset is needed after it. */
TS_API ts_error* ts_inflater_run(ts_inflater* inflater,
                                 const uint8_t* input,
                                 size_t bytes,
                                 bool last,
                                 uint8_t* buffer,
                                 size_t begin,
                                 size_t end,
                                 ts_inflate_progress* progress);

/* A place where a stream can be entered. Its pointers last until the next call. */
typedef struct ts_inflate_checkpoint {
  uint64_t bit;          /* of the input since reset: where a block begins */
  uint64_t output;       /* bytes of output before it, since reset */
  const uint8_t* window; /* the last TS_INFLATER_WINDOW_BYTES of them; zeros before the first */
  const uint64_t* used;  /* one bit for each byte of the window, from the lowest bit of the first
                            word on: whether the following output refers to it */
} ts_inflate_checkpoint;

/* Returns the next complete checkpoint; its window is NULL if there is none. A checkpoint is
 * complete TS_INFLATER_WINDOW_BYTES bytes of output later, or when the stream ends. Ask after every
 * run: while 64 wait, no more are made. */
TS_API ts_error* ts_inflater_get_checkpoint(ts_inflater* inflater,
                                            ts_inflate_checkpoint* checkpoint);

#ifdef __cplusplus
}
#endif

#endif /* TS_INFLATER_H_ */
