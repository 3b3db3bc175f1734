/* Memory observers: notification of device allocations that fail. */
#ifndef TS_MEMORY_OBSERVER_H_
#define TS_MEMORY_OBSERVER_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A queue of failed device allocations, with a file descriptor. The thread whose allocation fails
 * adds an entry, and writes a snapshot if one is wanted. It does so before its call returns the
 * error and holds no lock of the allocator. No other code runs on that thread. */
typedef struct ts_memory_observer ts_memory_observer;

typedef struct ts_out_of_memory {
  int64_t number; /* from 1 on, for each observer; a gap means that the queue was full */
  int32_t device;
  bool snapshot;          /* a snapshot was written */
  size_t wanted_bytes;    /* rounded up by the allocator */
  size_t free_bytes;      /* free in the driver, for all processes */
  size_t limit_bytes;     /* the device's memory, or the fraction set by ts_allocator_limit */
  size_t allocated_bytes; /* in live tensors */
  size_t reserved_bytes;  /* held from the driver by the caching allocator */
} ts_out_of_memory;

/* Starts to observe failures on all devices. snapshot_prefix: NULL for no snapshots, or the start
 * of their paths, which the entry's number and ".pickle" complete (see ts_allocator_dump).
 * max_snapshots: the maximum number of snapshots. Existing files are not replaced. */
TS_API ts_error* ts_memory_observer_new(const char* snapshot_prefix,
                                        int64_t max_snapshots,
                                        ts_memory_observer** observer);

/* Frees the observer. A failure in progress may still write its snapshot. */
TS_API void ts_memory_observer_free(ts_memory_observer* observer);

/* Returns an eventfd, as ts_notifier_fd does. */
TS_API int32_t ts_memory_observer_fd(const ts_memory_observer* observer);

/* Moves up to `capacity` entries, oldest first, to `entries`. count: their number. Does not block.
 */
TS_API ts_error* ts_memory_observer_take(ts_memory_observer* observer,
                                         ts_out_of_memory* entries,
                                         int64_t capacity,
                                         int64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* TS_MEMORY_OBSERVER_H_ */
