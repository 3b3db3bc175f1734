// Observers of failed device allocations. LibTorch calls its observers on the allocating thread,
// which may be LibTorch's, and inside any call, so no code of the program runs there. An entry
// is added to a queue, and the queue's descriptor wakes waiters.
#include <c10/cuda/CUDACachingAllocator.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/allocator.h"
#include "cuda/device.h"
#include "torchstream.h"

namespace ts {
namespace {

// The length of a queue from which nobody takes; later entries are dropped.
constexpr size_t kMaxEntries = 64;

// State that an observer shares with failures in progress, which may outlive it.
class Failures {
 public:
  Failures(std::string prefix, int64_t max_snapshots)
      : prefix_(std::move(prefix)),
        snapshots_left_(max_snapshots),
        fd_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (fd_ < 0) {
      throw Failure(TS_ERROR_INTERNAL, std::string("eventfd: ") + std::strerror(errno));
    }
  }
  ~Failures() { close(fd_); }
  Failures(const Failures&) = delete;
  Failures& operator=(const Failures&) = delete;

  int fd() const noexcept { return fd_; }

  void add(ts_out_of_memory entry) {
    bool wants_snapshot = false;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      entry.number = ++count_;
      wants_snapshot = snapshots_left_ > 0;
      if (wants_snapshot) --snapshots_left_;
    }
    if (wants_snapshot) entry.snapshot = write_snapshot(entry.number);
    const std::lock_guard<std::mutex> lock(mutex_);
    if (entries_.size() < kMaxEntries) entries_.push_back(entry);
    const uint64_t one = 1;
    // Fails only if the counter is full, and then the descriptor is already readable.
    [[maybe_unused]] const ssize_t written = write(fd_, &one, sizeof one);
  }

  int64_t take(ts_out_of_memory* entries, int64_t capacity) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto count = std::min(static_cast<size_t>(capacity), entries_.size());
    const auto end = entries_.begin() + static_cast<ptrdiff_t>(count);
    std::copy(entries_.begin(), end, entries);
    entries_.erase(entries_.begin(), end);
    return static_cast<int64_t>(count);
  }

 private:
  bool write_snapshot(int64_t number) const noexcept {
    ts_error* error = guard("ts_memory_observer", [&] {
      dump_allocator(prefix_ + std::to_string(number) + ".pickle", /*replace=*/false);
    });
    const bool written = error == nullptr;
    ts_error_free(error);
    return written;
  }

  const std::string prefix_;
  std::mutex mutex_;
  std::deque<ts_out_of_memory> entries_;  // guarded by mutex_, as are the next members
  int64_t count_ = 0;
  int64_t snapshots_left_;
  const int fd_;
};

struct Observers {
  std::mutex mutex;
  std::vector<std::shared_ptr<Failures>> all;
  std::once_flag attached;
};

Observers& observers() {
  static auto* all = new Observers;  // never destroyed: threads may outlive main
  return *all;
}

// The allocator has released its lock.
void observe(int64_t device, size_t wanted, size_t limit, size_t free_bytes) noexcept {
  ts_error_free(guard("ts_memory_observer", [&] {
    std::vector<std::shared_ptr<Failures>> all;
    {
      const std::lock_guard<std::mutex> lock(observers().mutex);
      all = observers().all;
    }
    if (all.empty()) return;
    namespace allocator = c10::cuda::CUDACachingAllocator;
    const auto stats = allocator::getDeviceStats(static_cast<c10::DeviceIndex>(device));
    constexpr auto sum = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    ts_out_of_memory entry{};
    entry.device = static_cast<int32_t>(device);
    entry.wanted_bytes = wanted;
    entry.free_bytes = free_bytes;
    entry.limit_bytes = limit;
    entry.allocated_bytes = static_cast<size_t>(stats.allocated_bytes[sum].current);
    entry.reserved_bytes = static_cast<size_t>(stats.reserved_bytes[sum].current);
    for (const auto& failures : all) failures->add(entry);
  }));
}

}  // namespace
}  // namespace ts

struct ts_memory_observer {
  std::shared_ptr<ts::Failures> failures;
};

ts_error* ts_memory_observer_new(const char* snapshot_prefix, int64_t max_snapshots,
                                 ts_memory_observer** observer) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(observer != nullptr, "observer is NULL");
    ts::require(max_snapshots >= 0, "max_snapshots is negative");
    ts::require_device(0);
    ts::ensure_cuda();
    const bool wanted = snapshot_prefix != nullptr;
    auto made = std::make_unique<ts_memory_observer>();
    made->failures =
        std::make_shared<ts::Failures>(wanted ? snapshot_prefix : "", wanted ? max_snapshots : 0);
    ts::Observers& all = ts::observers();
    // LibTorch cannot detach an observer: it calls this one until the process ends.
    std::call_once(all.attached, [] {
      c10::cuda::CUDACachingAllocator::attachOutOfMemoryObserver(&ts::observe);
    });
    const std::lock_guard<std::mutex> lock(all.mutex);
    all.all.push_back(made->failures);
    *observer = made.release();
  });
}

void ts_memory_observer_free(ts_memory_observer* observer) {
  if (observer == nullptr) return;
  const std::unique_ptr<ts_memory_observer> owned(observer);
  auto& all = ts::observers();
  const std::lock_guard<std::mutex> lock(all.mutex);
  all.all.erase(std::remove(all.all.begin(), all.all.end(), owned->failures), all.all.end());
}

int32_t ts_memory_observer_fd(const ts_memory_observer* observer) {
  return observer == nullptr ? -1 : observer->failures->fd();
}

ts_error* ts_memory_observer_take(ts_memory_observer* observer, ts_out_of_memory* entries,
                                  int64_t capacity, int64_t* count) {
  return ts::guard(__func__, [&] {
    ts::require(observer != nullptr, "observer is NULL");
    ts::require(count != nullptr, "count is NULL");
    ts::require(capacity >= 0 && (capacity == 0 || entries != nullptr),
                "entries is NULL or capacity negative");
    *count = observer->failures->take(entries, capacity);
  });
}
