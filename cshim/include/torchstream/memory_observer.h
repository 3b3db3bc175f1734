/* Memory observers: notice of device allocations that fail. */
#ifndef TS_MEMORY_OBSERVER_H_
#define TS_MEMORY_OBSERVER_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A queue of the device allocations that failed, with a file descriptor. The thread whose
 * allocation fails adds an entry, and writes a snapshot if one is wanted, without a lock of the
 * allocator and before its call returns the error. No other code runs on that thread. */
typedef struct ts_memory_observer ts_memory_observer;

typedef struct ts_out_of_memory {
  int64_t number; /* from 1 on, by observer. A gap: more entries than the queue has room for */
  int32_t device;
  bool snapshot;          /* the file is written */
  size_t wanted_bytes;    /* rounded up by the allocator */
  size_t free_bytes;      /* what the driver could give, to all processes */
  size_t limit_bytes;     /* the device's memory, or the share of ts_allocator_limit */
  size_t allocated_bytes; /* in live tensors */
  size_t reserved_bytes;  /* held from the driver by the caching allocator */
} ts_out_of_memory;

/* Begins to observe the failures of all devices. snapshot_prefix: NULL, or the beginning of the
 * paths of snapshots (see ts_allocator_dump), which goes on with the entry's number and ".pickle".
 * max_snapshots: how many to write. Files that exist are not replaced. */
TS_API ts_error* ts_memory_observer_new(const char* snapshot_prefix,
                                        int64_t max_snapshots,
                                        ts_memory_observer** observer);

/* Ends the observer. A failure under way may still write its snapshot. */
TS_API void ts_memory_observer_free(ts_memory_observer* observer);

/* Returns an eventfd, as ts_notifier_fd does. */
TS_API int32_t ts_memory_observer_fd(const ts_memory_observer* observer);

/* Takes up to `capacity` entries in the order of the failures. count: how many. Does not block. */
TS_API ts_error* ts_memory_observer_take(ts_memory_observer* observer,
                                         ts_out_of_memory* entries,
                                         int64_t capacity,
                                         int64_t* count);

#ifdef __cplusplus
}
#endif

#endif /* TS_MEMORY_OBSERVER_H_ */
