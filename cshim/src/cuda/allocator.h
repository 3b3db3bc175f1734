// The caching allocator's private pools: pools of graphs and of ts_memory_pool.
//
// While anything is allocated in a private pool, the allocator returns no memory to the driver: it
// ends the call with an internal error, and the process if the call is a destructor. It also
// forgets on which streams memory was used, if both the use and the free happen in that time. So
// both kinds of call wait here until no thread allocates in a private pool.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <list>
#include <string>

#include "torchstream.h"

namespace ts {

// What a private pool is used for.
enum class PoolKind : int32_t {
  kMemoryPool = TS_POOL_KIND_MEMORY_POOL,
  kGraph = TS_POOL_KIND_GRAPH,
};

// A private pool on one device. Its tensors may outlive it. After its end, release_ended_pools
// returns its free memory to the driver.
class PrivatePool {
 public:
  PrivatePool(c10::DeviceIndex device, PoolKind kind);
  ~PrivatePool();
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;

  // Between begin and end, allocations on the device use the pool, on any thread, if the filter
  // accepts their stream. begin and end may be called on different threads. The filter runs under
  // the allocator's lock.
  void begin(std::function<bool(cudaStream_t)> filter);
  void end();

  c10::DeviceIndex device() const noexcept { return device_; }
  c10::MempoolId_t id() const noexcept { return id_.front(); }

 private:
  c10::DeviceIndex device_;
  // A list node for the list of ended pools, made in advance so that ending cannot fail.
  std::list<c10::MempoolId_t> id_;
};

// Returns free memory of ended pools to the driver. While any thread allocates in a private pool, a
// later call does it.
void release_ended_pools();

// Records that a graph's pool of pinned memory has ended.
void note_ended_host_pool() noexcept;

// Returns all free memory to the driver, including LibTorch's pinned memory. Throws BUSY while a
// thread allocates in a private pool.
void empty_cache();

// Records that the stream uses the memory: once its last reference is dropped, it is not reused
// before the stream's work up to then is done.
void record_use(const c10::intrusive_ptr<c10::StorageImpl>& storage, c10::cuda::CUDAStream stream);

// Writes the allocators' state and history for PyTorch's memory viewer.
void dump_allocator(const std::string& path, bool replace);

// Whether the calling thread has entered a ts_memory_pool.
bool inside_memory_pool() noexcept;

}  // namespace ts
