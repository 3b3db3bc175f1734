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

/* Where a stream may be entered without a checkpoint: something that looks like the start of a
 * block, or of a gzip member. */
typedef struct ts_inflate_found {
  uint64_t bit; /* of the input; of a stored block, 3 bits before its length */
  int32_t kind; /* TS_INFLATE_FOUND_* */
} ts_inflate_found;
enum {
  TS_INFLATE_FOUND_NONE = 0,
  TS_INFLATE_FOUND_DYNAMIC = 1, /* a block with codes of its own */
  TS_INFLATE_FOUND_STORED = 2,  /* a stored block */
  TS_INFLATE_FOUND_MEMBER = 3,  /* the header of a gzip member */
};

/* Finds the first such place from bit `from` to before bit `to` of the input. It may be wrong, and
 * the last block of a stream and fixed blocks are not found. A place whose header does not end
 * within the input is not found. */
TS_API ts_error* ts_inflater_find(const uint8_t* input,
                                  size_t bytes,
                                  uint64_t from,
                                  uint64_t to,
                                  ts_inflate_found* found);

/* A copy of `length` bytes, from `distance` bytes before position `at` to `at`. Positions count
 * from the start of a window of TS_INFLATER_WINDOW_BYTES bytes. */
typedef struct ts_inflate_copy {
  uint32_t at;
  uint16_t distance;
  uint16_t length;
} ts_inflate_copy;

/* Like ts_inflater_reset, for a stream that is entered before its window is known: history is then
 * TS_INFLATER_WINDOW_BYTES, `begin` of the first run too, and positions of output start there. The
 * bytes of the window may be anything. When the window is known, the copies of
 * ts_inflater_get_state, made again in order, give the output. With history 0 a stream starts.
 * Every block start after the first becomes a checkpoint, whose window is undefined. While 64 of
 * them wait, no more are made. */
TS_API ts_error* ts_inflater_follow(ts_inflater* inflater, int32_t skip_bits, size_t history);

/* Continues like after ts_inflater_reset, now that buffer[0, end) ends with all output, which is
 * right, after its window. Of the checkpoints that are not complete, those at least `spacing` bytes
 * apart stay, after the position `last` of output. */
TS_API ts_error* ts_inflater_settle(ts_inflater* inflater,
                                    const uint8_t* buffer,
                                    size_t end,
                                    size_t spacing,
                                    uint64_t last);

/* Completes all checkpoints, at the start of a block from which another inflater has followed the
 * stream, with these copies, for at least TS_INFLATER_WINDOW_BYTES or to its end. window holds the
 * TS_INFLATER_WINDOW_BYTES bytes of output before the block. */
TS_API ts_error* ts_inflater_finish(ts_inflater* inflater,
                                    const uint8_t* window,
                                    const ts_inflate_copy* copies,
                                    size_t count);

/* Makes runs end at the first block that starts at this bit of the input since reset, or after it,
 * until the next reset. */
TS_API ts_error* ts_inflater_stop_at(ts_inflater* inflater, uint64_t bit);

typedef struct ts_inflate_state {
  uint64_t bit; /* of the input since reset: of the next symbol or block */
  const ts_inflate_copy*
      copies; /* since ts_inflater_follow; valid until the next call with the inflater */
  size_t copy_count;
  uint32_t reach; /* bytes of the unknown window that are copied from, counted from its end */
  bool at_block;  /* the next symbol is the header of a block */
  bool lacking;   /* a checkpoint is lacking, since 64 waited */
  uint8_t rest;   /* the bits of the byte at `bit`, from that bit on, in the lowest bits */
} ts_inflate_state;
TS_API ts_error* ts_inflater_get_state(const ts_inflater* inflater, ts_inflate_state* state);

#ifdef __cplusplus
}
#endif

#endif /* TS_INFLATER_H_ */
