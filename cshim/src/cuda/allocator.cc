#include "cuda/allocator.h"

#include <ATen/core/CachingHostAllocator.h>
#include <ATen/cuda/MemPool.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDAException.h>
#include <fcntl.h>
#include <torch/csrc/cuda/memory_snapshot.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <tuple>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/foreign.h"
#include "torchstream.h"

namespace ts {
namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

struct Use {
  c10::intrusive_ptr<c10::StorageImpl> storage;
  c10::cuda::CUDAStream stream;
};

using UseKey = std::tuple<const c10::StorageImpl*, c10::DeviceIndex, c10::StreamId>;

struct Pools {
  // Held across calls of the allocator, which has its own locks. Never taken while one of these is
  // held.
  std::mutex mutex;
  int in_use = 0;                     // started and not ended
  std::map<UseKey, Use> uses;         // recorded once in_use is 0
  std::list<c10::MempoolId_t> ended;  // pools whose memory the allocator may still hold, unused
  std::map<c10::MempoolId_t, PoolKind> kinds;  // of pools that have not ended
  int ended_host = 0;  // ended pools that the allocator of pinned memory still has records of
};

Pools& pools() {
  static auto* all = new Pools;  // never destroyed: threads may outlive main
  return *all;
}

thread_local int entered_here = 0;

// Memory allocated on a captured stream belongs to the graph, even if the thread is inside a pool.
bool is_captured(cudaStream_t stream) {
  if (!somebody_captures() || stream == nullptr) return false;
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream, &status));
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

PrivatePool::PrivatePool(c10::DeviceIndex device, PoolKind kind)
    : device_(device), id_{at::cuda::MemPool::graph_pool_handle()} {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  const auto entry = all.kinds.try_emplace(id(), kind).first;
  try {
    allocator::createOrIncrefPool(device_, id());
  } catch (...) {
    all.kinds.erase(entry);
    throw;
  }
}

PrivatePool::~PrivatePool() {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  allocator::releasePool(device_, id());
  all.kinds.erase(id());
  all.ended.splice(all.ended.end(), id_);
}

void PrivatePool::begin(std::function<bool(cudaStream_t)> filter) {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  allocator::beginAllocateToPool(device_, id(), std::move(filter));
  ++all.in_use;
}

void PrivatePool::end() {
  Pools& all = pools();
  // Destroyed after the lock, since dropping the last reference frees memory.
  std::map<UseKey, Use> uses;
  const std::lock_guard<std::mutex> lock(all.mutex);
  allocator::endAllocateToPool(device_, id());
  allocator::releasePool(device_, id());  // begin counted one more user
  if (--all.in_use > 0) return;
  uses.swap(all.uses);
  for (const auto& [key, use] : uses) {
    allocator::recordStream(use.storage->data_ptr(), use.stream);
  }
}

void release_ended_pools() {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.in_use > 0) return;
  // Pools with live tensors stay on the list.
  all.ended.remove_if([](const c10::MempoolId_t& id) {
    allocator::emptyCache(id);
    return allocator::snapshot(id, /*include_traces=*/false).segments.empty();
  });
  // Every lookup of pinned memory walks through these records. Emptying the cache removes them, but
  // also loses free pinned memory, so it waits for many records. Records with live memory stay.
  if (all.ended_host < 64) return;
  at::getHostAllocator(at::kCUDA)->empty_cache();
  all.ended_host = 0;
}

void note_ended_host_pool() noexcept {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  ++all.ended_host;
}

void empty_cache() {
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.in_use > 0) {
    throw Failure(TS_ERROR_BUSY,
                  "a thread is inside a memory pool, and the allocator frees no memory until it "
                  "leaves: try again when the thread has left the pool");
  }
  allocator::emptyCache();
  at::getHostAllocator(at::kCUDA)->empty_cache();
  all.ended_host = 0;
}

void record_use(const c10::intrusive_ptr<c10::StorageImpl>& storage, c10::cuda::CUDAStream stream) {
  if (Foreign* foreign = Foreign::of(*storage)) return foreign->use(stream);
  Pools& all = pools();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.in_use > 0) {
    all.uses.try_emplace({storage.get(), stream.device_index(), stream.id()}, Use{storage, stream});
  } else {
    allocator::recordStream(storage->data_ptr(), stream);
  }
}

void dump_allocator(const std::string& path, bool replace) {
  const std::string pickled = torch::cuda::_memory_snapshot_pickled();
  const int flags = O_WRONLY | O_CREAT | O_CLOEXEC | (replace ? O_TRUNC : O_EXCL);
  const int file = open(path.c_str(), flags, 0666);
  bool written = file >= 0;
  for (size_t at = 0; written && at < pickled.size();) {
    const ssize_t count = write(file, pickled.data() + at, pickled.size() - at);
    written = count >= 0 || errno == EINTR;
    if (count > 0) at += static_cast<size_t>(count);
  }
  const int reason = errno;
  const bool closed = file < 0 || close(file) == 0;
  if (written && closed) return;
  throw Failure(TS_ERROR_INVALID_ARGUMENT,
                path + " cannot be written: " + std::strerror(written ? errno : reason));
}

bool inside_memory_pool() noexcept { return entered_here > 0; }

namespace {

using PoolStats = std::map<c10::MempoolId_t, ts_pool_stats>;

void add_segment(ts_pool_stats& stats, const allocator::SegmentInfo& segment) {
  stats.reserved_bytes += segment.total_size;
  stats.allocated_bytes += segment.allocated_size;
  stats.requested_bytes += segment.requested_size;
  stats.active_bytes += segment.active_size;
  ++stats.segments;
  for (const auto& block : segment.blocks) {
    if (block.allocated) ++stats.allocations;
    if (!block.active) stats.max_free_bytes = std::max(stats.max_free_bytes, block.size);
  }
}

// The kinds are read before the walk: a pool that ends during the walk may still have its kind.
PoolStats pool_stats(c10::DeviceIndex device, c10::MempoolId_t only) {
  PoolStats found;
  std::map<c10::MempoolId_t, PoolKind> kinds;
  {
    Pools& all = pools();
    const std::lock_guard<std::mutex> lock(all.mutex);
    kinds = all.kinds;
  }
  for (const auto& segment : allocator::snapshot(only, /*include_traces=*/false).segments) {
    if (segment.device == device) add_segment(found[segment.owner_private_pool_id], segment);
  }
  for (auto& [id, stats] : found) {
    const auto kind = kinds.find(id);
    stats.device = device;
    // Ids of the library's pools differ in the second number, LibTorch's own in the first.
    stats.id = static_cast<int64_t>(id.second != 0 ? id.second : id.first);
    stats.kind = kind != kinds.end()            ? static_cast<int32_t>(kind->second)
                 : id == c10::MempoolId_t{0, 0} ? TS_POOL_KIND_DEFAULT
                                                : TS_POOL_KIND_ENDED;
  }
  return found;
}

}  // namespace

}  // namespace ts

struct ts_memory_pool {
  explicit ts_memory_pool(int32_t device)
      : pool(static_cast<c10::DeviceIndex>(device), ts::PoolKind::kMemoryPool) {}

  ts::PrivatePool pool;
  std::mutex mutex;
  uint64_t entered = 0;  // the number of the thread that allocates in it; 0: none
};

ts_error* ts_memory_pool_new(int32_t device, ts_memory_pool** pool) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    ts::require_device(device);
    ts::ensure_cuda();
    *pool = std::make_unique<ts_memory_pool>(device).release();
  });
}

ts_error* ts_memory_pool_destroy(ts_memory_pool* pool) {
  return ts::guard(__func__, [&] {
    if (pool == nullptr) return;
    ts::enter_thread();
    {
      const std::lock_guard<std::mutex> lock(pool->mutex);
      ts::require(pool->entered == 0, "a thread is inside the memory pool: leave it first");
    }
    { const std::unique_ptr<ts_memory_pool> owned(pool); }
    // The pool is gone. A later call frees memory that the driver does not take back now.
    ts_error_free(ts::guard("ts_memory_pool_destroy", [] { ts::release_ended_pools(); }));
  });
}

ts_error* ts_memory_pool_enter(ts_memory_pool* pool) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    ts::refuse_in_capture("entering a memory pool");
    const std::lock_guard<std::mutex> lock(pool->mutex);
    ts::require(pool->entered == 0, "the memory pool is entered already: one thread at a time");
    const uint64_t here = ts::thread_number;
    pool->pool.begin([here](cudaStream_t stream) {
      return ts::thread_number == here && !ts::is_captured(stream);
    });
    pool->entered = here;
    ++ts::entered_here;
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
    pool->entered = 0;
    --ts::entered_here;
    pool->pool.end();
  });
}

ts_error* ts_memory_pool_get_bytes(const ts_memory_pool* pool, size_t* reserved,
                                   size_t* allocated) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    ts::require(reserved != nullptr && allocated != nullptr, "an output parameter is NULL");
    size_t held = 0;
    size_t live = 0;
    const auto state = ts::allocator::snapshot(pool->pool.id(), /*include_traces=*/false);
    for (const auto& segment : state.segments) {
      held += segment.total_size;
      live += segment.allocated_size;
    }
    *reserved = held;
    *allocated = live;
  });
}

ts_error* ts_memory_pool_get_stats(const ts_memory_pool* pool, ts_pool_stats* stats) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(pool != nullptr, "pool is NULL");
    ts::require(stats != nullptr, "stats is NULL");
    const c10::MempoolId_t id = pool->pool.id();
    ts_pool_stats result{};
    result.id = static_cast<int64_t>(id.second);
    result.kind = TS_POOL_KIND_MEMORY_POOL;
    result.device = pool->pool.device();
    const auto found = ts::pool_stats(pool->pool.device(), id);
    if (const auto at = found.find(id); at != found.end()) result = at->second;
    *stats = result;
  });
}

ts_error* ts_allocator_get_pools(int32_t device, ts_pool_stats* pools, int64_t capacity,
                                 int64_t* count) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(count != nullptr, "count is NULL");
    ts::require(capacity >= 0 && (capacity == 0 || pools != nullptr),
                "pools is NULL or capacity negative");
    ts::require_device(device);
    ts::ensure_cuda();
    auto found = ts::pool_stats(static_cast<c10::DeviceIndex>(device), {0, 0});
    found[{0, 0}].device = device;  // also if the default pool has no segment
    int64_t at = 0;
    for (const auto& [id, stats] : found) {
      if (at < capacity) pools[at] = stats;
      ++at;
    }
    *count = at;
  });
}

ts_error* ts_device_get_memory(int32_t device, ts_device_memory* memory) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(memory, "memory");
    ts::require_device(device);
    ts::ensure_cuda();
    const auto stats = ts::allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    {
      ts::DeviceScope scope(device);
      C10_CUDA_CHECK(cudaMemGetInfo(&free_bytes, &total_bytes));
    }
    ts_device_memory result{};
    result.allocated_bytes = static_cast<size_t>(stats.allocated_bytes[all].current);
    result.peak_allocated_bytes = static_cast<size_t>(stats.allocated_bytes[all].peak);
    result.reserved_bytes = static_cast<size_t>(stats.reserved_bytes[all].current);
    result.peak_reserved_bytes = static_cast<size_t>(stats.reserved_bytes[all].peak);
    result.free_bytes = free_bytes;
    result.total_bytes = total_bytes;
    ts::fill(memory, result);
  });
}

ts_error* ts_allocator_get_stats(int32_t device, ts_allocator_stats* stats) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(stats, "stats");
    ts::require_device(device);
    ts::ensure_cuda();
    const auto read = ts::allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    ts_allocator_stats result{};
    result.requested_bytes = static_cast<size_t>(read.requested_bytes[all].current);
    result.active_bytes = static_cast<size_t>(read.active_bytes[all].current);
    result.split_bytes = static_cast<size_t>(read.inactive_split_bytes[all].current);
    result.allocations = read.allocation[all].current;
    result.total_allocations = read.allocation[all].allocated;
    result.segments = read.segment[all].current;
    result.driver_allocations = read.num_device_alloc;
    result.driver_frees = read.num_device_free;
    result.retries = read.num_alloc_retries;
    result.out_of_memory = read.num_ooms;
    ts::fill(stats, result);
  });
}

ts_error* ts_host_allocator_get_stats(ts_host_stats* stats) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_size(stats, "stats");
    ts::require_device(0);
    ts::ensure_cuda();
    const auto read = at::getHostAllocator(at::kCUDA)->get_stats();
    ts_host_stats result{};
    result.active_bytes = static_cast<size_t>(read.active_bytes.current);
    result.reserved_bytes = static_cast<size_t>(read.allocated_bytes.current);
    result.peak_bytes = static_cast<size_t>(read.allocated_bytes.peak);
    result.allocations = read.active_requests.current;
    result.driver_allocations = read.num_host_alloc;
    result.driver_frees = read.num_host_free;
    result.driver_nanoseconds = 1000 * (read.host_alloc_time.total + read.host_free_time.total);
    ts::fill(stats, result);
  });
}

ts_error* ts_allocator_limit(int32_t device, double fraction) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::require(fraction > 0 && fraction <= 1, "the fraction must be over 0 and at most 1");
    ts::ensure_cuda();
    ts::allocator::setMemoryFraction(fraction, static_cast<c10::DeviceIndex>(device));
  });
}

ts_error* ts_allocator_get_limit(int32_t device, double* fraction) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(fraction != nullptr, "fraction is NULL");
    ts::require_device(device);
    ts::ensure_cuda();
    *fraction = ts::allocator::getMemoryFraction(static_cast<c10::DeviceIndex>(device));
  });
}

ts_error* ts_allocator_configure(const char* settings) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(settings != nullptr, "settings is NULL");
    ts::require_device(0);
    ts::ensure_cuda();
    c10::CachingAllocator::setAllocatorSettings(settings);
  });
}

ts_error* ts_allocator_get_settings(char* settings, size_t capacity, size_t* length) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(settings != nullptr && capacity > 0, "settings is NULL or capacity 0");
    ts::require(length != nullptr, "length is NULL");
    ts::require_device(0);
    ts::ensure_cuda();
    const std::string now = c10::CachingAllocator::getAllocatorSettings();
    const size_t copied = std::min(capacity - 1, now.size());
    std::memcpy(settings, now.data(), copied);
    settings[copied] = '\0';
    *length = now.size();
  });
}

ts_error* ts_allocator_record_history(int64_t max_entries) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(max_entries >= 0, "max_entries is negative");
    ts::require_device(0);
    ts::ensure_cuda();
    // Without stacks: C++ stacks name no line of the program.
    torch::cuda::_record_memory_history(max_entries > 0, /*record_context=*/false, max_entries,
                                        /*trace_alloc_record_context=*/false,
                                        /*record_cpp_context=*/false, /*clearHistory=*/true);
  });
}

ts_error* ts_allocator_dump(const char* path) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(path != nullptr, "path is NULL");
    ts::require_device(0);
    ts::ensure_cuda();
    ts::dump_allocator(path, /*replace=*/true);
  });
}

ts_error* ts_device_reset_peak_memory(int32_t device) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(device);
    ts::ensure_cuda();
    ts::allocator::resetPeakStats(static_cast<c10::DeviceIndex>(device));
  });
}

ts_error* ts_allocator_empty_cache(void) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require_device(0);
    ts::ensure_cuda();
    ts::refuse_in_capture("giving memory back to the driver (EmptyCache)");
    const auto turn = ts::wait_for_no_capture();
    ts::empty_cache();
  });
}
