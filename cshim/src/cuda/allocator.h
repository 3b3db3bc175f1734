// The caching allocator's private pools: those of graphs and of ts_memory_pool.
//
// While anything is allocated in one, the allocator gives no memory back to the driver (it ends the
// call with an internal error, and the process if that is a destructor), and it forgets which
// streams memory was used on if that is recorded and the memory freed in that time. So both wait
// here until nobody allocates in a private pool.
#pragma once

#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>

#include <functional>
#include <list>

namespace ts {

// A part of the allocator of its own, on one device. Tensors in it outlive it; what is free in it
// after its end goes back to the driver by release_ended_pools.
class PrivatePool {
 public:
  explicit PrivatePool(c10::DeviceIndex device);
  ~PrivatePool();
  PrivatePool(const PrivatePool&) = delete;
  PrivatePool& operator=(const PrivatePool&) = delete;

  // From begin to end, on any two threads, what is allocated on the device by any thread on a
  // stream that the filter accepts comes from the pool. The filter runs under the allocator's lock.
  void begin(std::function<bool(cudaStream_t)> filter);
  void end();

  c10::DeviceIndex device() const noexcept { return device_; }
  c10::MempoolId_t id() const noexcept { return id_.front(); }

 private:
  c10::DeviceIndex device_;
  std::list<c10::MempoolId_t> id_;  // a node of the list of ended pools to be: an end cannot fail
};

// Gives what is free in ended pools back to the driver, unless somebody allocates in a private
// pool: then it is left to a later call.
void release_ended_pools();

// A graph's pool of pinned memory is gone.
void note_ended_host_pool() noexcept;

// Gives all that is free back to the driver, pinned memory of LibTorch's included. BUSY if somebody
// allocates in a private pool.
void empty_cache();

// Marks memory as used on the stream: once its last reference is dropped it is not handed out again
// before the stream's work until then is done.
void record_use(const c10::intrusive_ptr<c10::StorageImpl>& storage, c10::cuda::CUDAStream stream);

// Whether the calling thread has entered a ts_memory_pool.
bool inside_memory_pool() noexcept;

}  // namespace ts
