/* Errors: the result of every function that can fail. */
#ifndef TS_ERROR_H_
#define TS_ERROR_H_

#include "torchstream/api.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ts_error ts_error;

/* Kinds of failure. */
enum {
  TS_ERROR_NONE = 0,
  TS_ERROR_INVALID_ARGUMENT = 1, /* an argument that can never work */
  TS_ERROR_OUT_OF_MEMORY = 2,    /* device, pinned or host memory */
  TS_ERROR_NO_DEVICE = 3,        /* no usable GPU, or no GPU with this index */
  TS_ERROR_CUDA = 4,             /* CUDA failed; after an illegal access the process must exit */
  TS_ERROR_WRONG_THREAD = 5, /* a stream guard, memory pool or capture was ended on another thread
                                than it was started on */
  TS_ERROR_OUT_OF_ORDER = 6, /* a stream guard was exited before an inner guard, or twice */
  TS_ERROR_NOT_RECORDED = 7, /* the event was never recorded, or is untimed */
  TS_ERROR_NOT_FOUND = 8,    /* no such operator or overload */
  TS_ERROR_OPERATOR = 9,     /* LibTorch refused the operands */
  TS_ERROR_DECODE = 10,      /* image or deflate bytes are damaged */
  TS_ERROR_UNSUPPORTED =
      11,                 /* a format that is not supported, or a library that is not installed */
  TS_ERROR_INTERNAL = 12, /* a bug in this library or in one that it uses */
  TS_ERROR_CAPTURE = 13,  /* not possible while a graph is captured, or the capture failed */
  TS_ERROR_STALE = 14,    /* a graph's operands have moved since the capture */
  TS_ERROR_BUSY = 15, /* a capture owns the random generators (see ts_capture_wait), or a thread is
                         inside a memory pool (see ts_allocator_empty_cache) */
  TS_ERROR_CALLBACK = 16 /* for errors that a caller's callback returns to this library */
};

/* Returns the error's TS_ERROR_ code, or TS_ERROR_NONE for NULL. */
TS_API int32_t ts_error_code(const ts_error* error);

/* Returns the message, borrowed until the error is freed. */
TS_API const char* ts_error_message(const ts_error* error);

/* Returns the name of the C function that failed, borrowed until the error is freed. */
TS_API const char* ts_error_origin(const ts_error* error);

/* Returns the decoder's position in the bytes of an image when it found the damage of a
 * TS_ERROR_DECODE, from 0 to the image's size. The damage is at or near this position, since
 * decoders read ahead and count whole blocks. The message ends with the position. Returns -1 if the
 * format's decoder does not report it, and for all other errors. */
TS_API int64_t ts_error_offset(const ts_error* error);
TS_API void ts_error_free(ts_error* error);

/* Makes an error, for libraries that return their own errors. origin: borrowed until the process
 * ends. The result is never NULL: if memory runs out, it is an error that says so. */
TS_API ts_error* ts_error_new(int32_t code, const char* origin, const char* message);

/* Sets the result of ts_error_offset, which is -1 for a new error. */
TS_API void ts_error_set_offset(ts_error* error, int64_t offset);

#ifdef __cplusplus
}
#endif

#endif /* TS_ERROR_H_ */
