// The caching allocator's private pools: those of graphs and of ts_memory_pool.
//
// While anything is allocated in one, the allocator gives no memory back to the driver (it ends the
// call with an internal error, and the process if that is a destructor), and it forgets which
// streams memory was used on if that is recorded and the memory freed in that time. So both wait
// here until no thread allocates in a private pool.
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

// What a private pool is for.
enum class PoolKind : int32_t {
  kMemoryPool = TS_POOL_KIND_MEMORY_POOL,
  kGraph = TS_POOL_KIND_GRAPH,
};

// A private pool on one device. Its tensors outlive it; after its end, release_ended_pools gives
// its free memory back to the driver.
class PrivatePool {
 public:
  PrivatePool(c10::DeviceIndex device, PoolKind kind);
  ~PrivatePool();
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;

  // From begin to end, which may be called on different threads, allocations on the device come
  // from the pool if the filter accepts their stream, on any thread. The filter runs under the
  // allocator's lock.
  void begin(std::function<bool(cudaStream_t)> filter);
  void end();

  c10::DeviceIndex device() const noexcept { return device_; }
  c10::MempoolId_t id() const noexcept { return id_.front(); }

 private:
  c10::DeviceIndex device_;
  // A list node made in advance for the list of ended pools, so that the end cannot fail.
  std::list<c10::MempoolId_t> id_;
};

// Gives free memory of ended pools back to the driver. While any thread allocates in a private pool
// this is left to a later call.
void release_ended_pools();

// Notes that a graph's pool of pinned memory has ended.
void note_ended_host_pool() noexcept;

// Gives all free memory back to the driver, LibTorch's pinned memory included. BUSY while a thread
// allocates in a private pool.
void empty_cache();

// Marks memory as used on the stream: once its last reference is dropped it is not handed out again
// before the stream's work until then is done.
void record_use(const c10::intrusive_ptr<c10::StorageImpl>& storage, c10::cuda::CUDAStream stream);

// Writes the allocators' state, and their history, for PyTorch's memory viewer.
void dump_allocator(const std::string& path, bool replace);

// Whether the calling thread has entered a ts_memory_pool.
bool inside_memory_pool() noexcept;

}  // namespace ts
