/* The inputs of a stream sanitizer: where tensors are, and LibTorch's own use of memory and
 * streams. */
#ifndef TS_SANITIZER_H_
#define TS_SANITIZER_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"
#include "torchstream/tensor.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The memory of a tensor's elements, and the stream that an operator on the tensor would run on.
 * The elements are in `rows` rows of row_bytes bytes, whose starts are `pitch` bytes apart.
 * Elements that do not fit this pattern are described as one row from the first to the last. */
#define TS_EXTENT_SIZES 6
typedef struct ts_tensor_extent {
  uintptr_t storage; /* first byte of the memory that views share; 0 if there is none */
  size_t storage_bytes;
  uintptr_t begin;
  size_t row_bytes; /* 0 for a tensor without elements */
  int64_t rows;
  size_t pitch;
  ts_stream stream; /* the calling thread's current stream of the device; unset on the CPU */
  int32_t device;
  int32_t dtype;
  int32_t ndim;
  int64_t sizes[TS_EXTENT_SIZES]; /* of the first dimensions */
} ts_tensor_extent;

/* Fills in `count` extents. A NULL tensor gets an extent without memory. */
TS_API ts_error* ts_tensor_get_extents(ts_tensor* const* tensors,
                                       int64_t count,
                                       ts_tensor_extent* extents);

#define TS_SANITIZER_ALLOCATED 1           /* address, bytes, stream */
#define TS_SANITIZER_FREED 2               /* address, bytes, stream */
#define TS_SANITIZER_UNMAPPED 3            /* address, bytes: returned to the driver */
#define TS_SANITIZER_EVENT_RECORDED 4      /* address, stream */
#define TS_SANITIZER_EVENT_AWAITED 5       /* address, stream: the stream waits for the event */
#define TS_SANITIZER_EVENT_DELETED 6       /* address */
#define TS_SANITIZER_STREAM_SYNCHRONIZED 7 /* stream: the host has waited */
#define TS_SANITIZER_EVENT_SYNCHRONIZED 8  /* address */
#define TS_SANITIZER_DEVICE_SYNCHRONIZED 9
#define TS_SANITIZER_READ 10    /* address, bytes, stream */
#define TS_SANITIZER_WRITTEN 11 /* address, bytes, stream */
#define TS_SANITIZER_USED 12    /* address, stream: ts_tensor_record_stream was called */

typedef struct ts_sanitizer_entry {
  int32_t kind; /* TS_SANITIZER_ */
  int32_t device;
  uintptr_t address; /* of memory, or the cudaEvent_t */
  uintptr_t stream;  /* cudaStream_t; 0 is the device's default stream */
  size_t bytes;
  bool of_call; /* made inside a call of the thread that takes it */
} ts_sanitizer_entry;

/* Starts logging. Before the first start, LibTorch does not call this library. After it, LibTorch
 * calls this library for each entry until the process ends. While logging is off, such a call costs
 * an atomic load. Without a GPU there is nothing to log. */
TS_API ts_error* ts_sanitizer_start(void);

/* Stops logging and drops all entries. */
TS_API void ts_sanitizer_stop(void);

/* Moves up to `capacity` of the oldest entries to `entries` and returns their number. The entries
 * of all threads are first, in the order in which they happened: allocations, frees, and everything
 * that backward passes do outside their hooks, on any thread. The events, waits and
 * synchronisations made inside calls of the calling thread (of_call) follow. Cannot fail. */
TS_API int64_t ts_sanitizer_take(ts_sanitizer_entry* entries, int64_t capacity);

#ifdef __cplusplus
}
#endif

#endif /* TS_SANITIZER_H_ */
