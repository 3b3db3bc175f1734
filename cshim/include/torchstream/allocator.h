/* LibTorch's caching allocators of device memory and of pinned memory. */
#ifndef TS_ALLOCATOR_H_
#define TS_ALLOCATOR_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct ts_allocator_stats {
  size_t size;                /* sizeof(ts_allocator_stats), set by the caller */
  size_t requested_bytes;     /* requested by live tensors, before rounding up */
  size_t active_bytes;        /* live, or freed while a recorded stream still uses them */
  size_t split_bytes;         /* free parts of segments that are partly in use: fragmentation */
  int64_t allocations;        /* live */
  int64_t total_allocations;  /* since the start */
  int64_t segments;           /* held from the driver */
  int64_t driver_allocations; /* calls of cudaMalloc since the start */
  int64_t driver_frees;       /* calls of cudaFree since the start */
  int64_t retries;            /* times the cache was emptied to make room, since the start */
  int64_t out_of_memory;      /* times there was still no room, since the start */
} ts_allocator_stats;

TS_API ts_error* ts_allocator_get_stats(int32_t device, ts_allocator_stats* stats);

/* Returns the fraction set by ts_allocator_limit, or 1 if there is no limit. */
TS_API ts_error* ts_allocator_get_limit(int32_t device, double* fraction);

/* Copies the settings of the latest ts_allocator_configure, or of the environment, with a NUL, to
 * `capacity` bytes. A longer text is truncated. length: the whole text's length. */
TS_API ts_error* ts_allocator_get_settings(char* settings, size_t capacity, size_t* length);

/* Changes settings of LibTorch's allocators, in the syntax of the variable PYTORCH_ALLOC_CONF.
 * Settings that are not named get their defaults. Returns TS_ERROR_OPERATOR for an unknown setting.
 */
TS_API ts_error* ts_allocator_configure(const char* settings);

/* Records allocations and frees of all devices from now on, keeping at most max_entries; 0 stops
 * the recording. Earlier entries are dropped. */
TS_API ts_error* ts_allocator_record_history(int64_t max_entries);

/* Writes the allocators' segments and the recorded history to a file for PyTorch's memory viewer
 * (pytorch.org/memory_viz). Replaces an existing file. */
TS_API ts_error* ts_allocator_dump(const char* path);

/* Limits the memory that the allocator gets from the driver to a fraction of the device's memory,
 * over 0 and at most 1. */
TS_API ts_error* ts_allocator_limit(int32_t device, double fraction);

typedef struct ts_host_stats {
  size_t size;                /* sizeof(ts_host_stats), set by the caller */
  size_t active_bytes;        /* in live tensors, rounded up to powers of two */
  size_t reserved_bytes;      /* active_bytes, and memory kept for later tensors */
  size_t peak_bytes;          /* the maximum of reserved_bytes */
  int64_t allocations;        /* live */
  int64_t driver_allocations; /* calls of cudaHostAlloc since the start */
  int64_t driver_frees;       /* calls of cudaFreeHost since the start */
  int64_t driver_nanoseconds; /* spent in these calls */
} ts_host_stats;

/* Returns the state of LibTorch's caching allocator of pinned memory. It serves
 * ts_tensor_new_pinned and non_blocking copies to the host, but not ts_pinned. */
TS_API ts_error* ts_host_allocator_get_stats(ts_host_stats* stats);

/* Returns unused reserved memory of every device to the driver, and pinned memory that LibTorch
 * keeps for its own copies. Waits for a running capture to end. Returns TS_ERROR_BUSY while a
 * thread is inside a memory pool. */
TS_API ts_error* ts_allocator_empty_cache(void);

#ifdef __cplusplus
}
#endif

#endif /* TS_ALLOCATOR_H_ */
