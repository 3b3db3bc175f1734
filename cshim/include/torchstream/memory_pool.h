/* Memory pools: parts of the caching allocator that share no segment. */
#ifndef TS_MEMORY_POOL_H_
#define TS_MEMORY_POOL_H_

#include "torchstream/error.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A part of the caching allocator that shares no segment with the rest, so that destroying it frees
 * whole segments. Any number of threads may use a pool, but only one at a time may be inside. */
typedef struct ts_memory_pool ts_memory_pool;

TS_API ts_error* ts_memory_pool_new(int32_t device, ts_memory_pool** pool);

/* Destroys a pool. Tensors in it stay valid. Free memory returns to the driver at once or, if a
 * capture is running or a thread is inside another pool, when the next pool is destroyed or the
 * next capture starts. Memory of tensors freed later returns then too, or with
 * ts_allocator_empty_cache. Returns TS_ERROR_INVALID_ARGUMENT while a thread is inside. */
TS_API ts_error* ts_memory_pool_destroy(ts_memory_pool* pool);

/* Enters the pool: until ts_memory_pool_exit the calling thread's allocations on the pool's device
 * use it. Two kinds of allocation do not: those that other threads make for this one (backward has
 * a thread for each device), and captured ones, which have their own memory. While a thread is
 * inside, memory freed after ts_tensor_record_stream is kept. Returns TS_ERROR_INVALID_ARGUMENT if
 * a thread is already inside, TS_ERROR_CAPTURE if the calling thread takes part in a capture. */
TS_API ts_error* ts_memory_pool_enter(ts_memory_pool* pool);

/* Leaves the pool. Returns TS_ERROR_WRONG_THREAD on another thread than the one that entered. */
TS_API ts_error* ts_memory_pool_exit(ts_memory_pool* pool);

/* Returns the bytes that the pool holds from the driver, and the bytes in live tensors. Walks all
 * segments of the allocator. */
TS_API ts_error* ts_memory_pool_get_bytes(const ts_memory_pool* pool,
                                          size_t* reserved,
                                          size_t* allocated);

/* What a pool's memory is used for. */
enum {
  TS_POOL_KIND_DEFAULT = 0, /* everything else */
  TS_POOL_KIND_MEMORY_POOL = 1,
  TS_POOL_KIND_GRAPH = 2, /* shared by all graphs captured with the same `share` */
  TS_POOL_KIND_ENDED =
      3 /* of a destroyed pool or graph; live tensors use it, or it is not freed yet */
};

typedef struct ts_pool_stats {
  int64_t id;   /* equal in two calls for the same pool; 0 for the default pool */
  int32_t kind; /* TS_POOL_KIND_ */
  int32_t device;
  size_t reserved_bytes;  /* held from the driver */
  size_t allocated_bytes; /* in live tensors */
  size_t requested_bytes; /* requested by live tensors, before rounding up */
  size_t active_bytes;    /* live, or freed while a recorded stream still uses them */
  size_t max_free_bytes;  /* the largest free part: the largest allocation without a call to the
                             driver */
  int64_t allocations;    /* live */
  int64_t segments;       /* held from the driver */
} ts_pool_stats;

/* Writes the state of up to `capacity` pools of the device's caching allocator, the default pool
 * first. count: the number of pools, which may exceed the capacity. Walks all segments of the
 * allocator. */
TS_API ts_error* ts_allocator_get_pools(int32_t device,
                                        ts_pool_stats* pools,
                                        int64_t capacity,
                                        int64_t* count);

/* Returns the state of one pool. Walks the pool's segments. */
TS_API ts_error* ts_memory_pool_get_stats(const ts_memory_pool* pool, ts_pool_stats* stats);

#ifdef __cplusplus
}
#endif

#endif /* TS_MEMORY_POOL_H_ */
