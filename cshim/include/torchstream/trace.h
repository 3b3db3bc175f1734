/* Traces: recordings of operators, CUDA calls and device work. */
#ifndef TS_TRACE_H_
#define TS_TRACE_H_

#include "torchstream/error.h"
#include "torchstream/stream.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A recording made with LibTorch's profiler: the operators of all threads and, with a GPU, the CUDA
 * calls of all threads and the work of all devices. A process makes one recording at a time; any
 * thread may start it and any other may stop it. */
typedef struct ts_trace ts_trace;

enum {
  TS_TRACE_KIND_KERNEL = 1, /* device work: lane is the stream's number */
  TS_TRACE_KIND_MEMCPY = 2,
  TS_TRACE_KIND_MEMSET = 3,
  TS_TRACE_KIND_RUNTIME = 4,  /* a call of the CUDA runtime or driver: lane is the OS thread */
  TS_TRACE_KIND_OPERATOR = 5, /* one of LibTorch's operators on the host */
  TS_TRACE_KIND_RANGE = 6     /* a named range of the program: lane is the thread that started it */
};

typedef struct ts_trace_event {
  int64_t start;       /* Unix time in nanoseconds; one clock for the host and all devices */
  int64_t duration;    /* nanoseconds */
  int64_t bytes;       /* of a memcpy or memset; otherwise -1 */
  int64_t correlation; /* equal for a runtime call and the device work that it enqueued */
  int64_t lane;
  int32_t device; /* TS_DEVICE_CPU for work on the host */
  int32_t kind;   /* TS_TRACE_KIND_ */
  int32_t name;   /* index into ts_trace_names */
} ts_trace_event;

/* The launch parameters of a kernel. */
typedef struct ts_trace_launch {
  int64_t blocks;       /* of the grid */
  int32_t threads;      /* of a block */
  int32_t registers;    /* of a thread */
  int32_t shared_bytes; /* static and dynamic shared memory of a block */
  /* The fraction of a multiprocessor's threads that blocks of this size can occupy at once,
   * computed by CUDA's occupancy calculator (cuda_occupancy.h); 0 if unknown. */
  double occupancy;
} ts_trace_launch;

enum {
  TS_TRACE_FLAG_NO_OPERATORS = 1 /* only device work and CUDA calls; ignored without a GPU */
};

/* Starts a recording. Returns TS_ERROR_INVALID_ARGUMENT if one is running. The first recording of a
 * process initialises CUPTI. */
TS_API ts_error* ts_trace_start(int32_t flags);

/* Stops the recording. It waits for no device and leaves out work that is not done, so synchronize
 * first. Events are in no particular order. */
TS_API ts_error* ts_trace_stop(ts_trace** trace);
TS_API void ts_trace_free(ts_trace* trace);

/* Returns the events, borrowed until the trace is freed. */
TS_API const ts_trace_event* ts_trace_events(const ts_trace* trace);
TS_API int64_t ts_trace_event_count(const ts_trace* trace);

/* Returns the names, borrowed until the trace is freed. */
TS_API const char* const* ts_trace_names(const ts_trace* trace);
TS_API int64_t ts_trace_name_count(const ts_trace* trace);

/* Returns the launch of each TS_TRACE_KIND_KERNEL event, in the order of these events. Borrowed
 * until the trace is freed. */
TS_API const ts_trace_launch* ts_trace_launches(const ts_trace* trace);
TS_API int64_t ts_trace_launch_count(const ts_trace* trace);

/* Returns the lane of a stream's work: the profiler's number for the stream, unique on its device.
 */
TS_API ts_error* ts_trace_get_lane(ts_stream stream, int64_t* lane);

#ifdef __cplusplus
}
#endif

#endif /* TS_TRACE_H_ */
