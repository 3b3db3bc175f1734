// Memory pools: parts of the caching allocator that a thread allocates from for a while.
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <memory>
#include <mutex>

#include "device.h"
#include "error.h"
#include "thread.h"
#include "torchstream.h"

namespace allocator = c10::cuda::CUDACachingAllocator;

struct ts_memory_pool {
  at::cuda::MemPool pool;
  std::mutex mutex;
  uint64_t entered = 0;  // the number of the thread that allocates in it; 0: none
};

ts_error* ts_memory_pool_new(int32_t device, ts_memory_pool** out) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(out != nullptr, "out is NULL");
    ts::require_device(device);
    ts::ensure_cuda();
    const ts::DeviceScope scope(device);  // LibTorch makes pools on the current device
    *out = std::make_unique<ts_memory_pool>().release();
  });
}

ts_error* ts_memory_pool_free(ts_memory_pool* pool) {
  return ts::guard(__func__, [&] {
    if (pool == nullptr) return;
    ts::enter_thread();
    // A graph may use it too, by its id; and LibTorch ends the process when a pool in use ends.
    ts::require(pool->entered == 0 && pool->pool.use_count() == 1,
                "the memory pool is in use: leave it first");
    const std::unique_ptr<ts_memory_pool> owned(pool);
  });
}

ts_error* ts_memory_pool_enter(ts_memory_pool* pool) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    const std::lock_guard<std::mutex> lock(pool->mutex);
    ts::require(pool->entered == 0, "the memory pool is entered already: one thread at a time");
    const uint64_t here = ts::thread_number;
    allocator::beginAllocateToPool(pool->pool.device(), pool->pool.id(),
                                   [here](cudaStream_t) { return ts::thread_number == here; });
    pool->entered = here;
  });
}

ts_error* ts_memory_pool_exit(ts_memory_pool* pool) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    const std::lock_guard<std::mutex> lock(pool->mutex);
    ts::require(pool->entered != 0, "the memory pool is not entered");
    if (pool->entered != ts::thread_number) {
      throw ts::Failure(TS_ERROR_WRONG_THREAD, "the memory pool was entered on another OS thread");
    }
    allocator::endAllocateToPool(pool->pool.device(), pool->pool.id());
    pool->entered = 0;
    // What beginAllocateToPool counted.
    allocator::releasePool(pool->pool.device(), pool->pool.id());
  });
}

ts_error* ts_memory_pool_bytes(ts_memory_pool* pool, int64_t* reserved, int64_t* allocated) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    ts::require(reserved != nullptr && allocated != nullptr, "an output parameter is NULL");
    int64_t held = 0;
    int64_t live = 0;
    const auto state = allocator::snapshot(pool->pool.id(), /*include_traces=*/false);
    for (const auto& segment : state.segments) {
      held += static_cast<int64_t>(segment.total_size);
      live += static_cast<int64_t>(segment.allocated_size);
    }
    *reserved = held;
    *allocated = live;
  });
}
