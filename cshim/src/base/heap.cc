// Keeps freed host memory in the process. A training step on the CPU frees its activations and
// gradients, and the next step allocates as much again. With malloc's defaults most of that memory
// returns to the kernel in between, which must clear its pages again.
#include "base/heap.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>
#include <c10/util/Exception.h>
#include <malloc.h>
#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <list>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <utility>

namespace {

// The maximum of malloc's mmap threshold. malloc maps larger blocks one by one.
constexpr size_t kThreshold = ts::kMappedBlock;
// The largest tensor in malloc's heap. Before malloc compares, it adds a header and the alignment,
// at most a page.
constexpr size_t kLargestOfHeap = kThreshold - (128 << 10);
// The maximum that malloc, and the tensors' large blocks, each keep.
constexpr size_t kKeptAtMost = 1 << 30;

// Blocks of tensors that malloc would map and unmap each time. A freed block is kept for the next
// tensor of its size. A block of another size evicts kept blocks of the same total size, the oldest
// first, so that used and kept blocks together never exceed the peak of the used ones. Memory
// recordings see the tensors.
class LargeBlocks {
 public:
  static LargeBlocks& instance() {
    static auto* all = new LargeBlocks;  // never destroyed: threads may outlive main
    return *all;
  }

  // Calls LibTorch's allocator. If it has no memory, drops the kept blocks and calls it again.
  template <typename Allocate>
  auto allocate(const Allocate& ask) {
    try {
      return ask();
    } catch (const c10::Error&) {
      Blocks dropped;
      {
        const std::lock_guard<std::mutex> lock(mutex_);
        dropped = drop(kept_bytes_);
      }
      if (dropped.empty()) throw;
      release(dropped);
    }
    return ask();
  }

  void* take(size_t bytes) {
    if (void* kept = take_kept(bytes)) {
      c10::profiledCPUMemoryReporter().New(kept, bytes);
      return kept;
    }
    std::unique_ptr<void, c10::DeleterFnPtr> data(
        allocate([bytes] { return c10::GetDefaultCPUAllocator()->raw_allocate(bytes); }),
        c10::GetDefaultCPUAllocator()->raw_deleter());
    Blocks block{{data.get(), bytes}};
    const std::lock_guard<std::mutex> lock(mutex_);
    used_.emplace(data.get(), std::move(block));
    return data.release();
  }

  // Returns whether the memory was one of these blocks. It allocates nothing, since it runs where
  // tensors end and no exception may escape.
  bool give_back(void* data) noexcept {
    Blocks dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = used_.find(data);
      if (found == used_.end()) return false;
      Blocks block = std::move(found->second);
      used_.erase(found);
      c10::profiledCPUMemoryReporter().Delete(data);  // before another thread may take it
      if (block.front().bytes > kKeptAtMost) {
        dropped = std::move(block);
      } else {
        kept_bytes_ += block.front().bytes;
        kept_.splice(kept_.end(), block);
        if (kept_bytes_ > kKeptAtMost) dropped = drop(kept_bytes_ - kKeptAtMost);
      }
    }
    release(dropped);
    return true;
  }

  // A child process has only the calling thread, so a mutex that another thread had locked would
  // stay locked.
  static void before_fork() { instance().mutex_.lock(); }
  static void after_fork() { instance().mutex_.unlock(); }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };
  using Blocks = std::list<Block>;  // a block moves from one list to another without an allocation

  // Returns the memory of a kept block, or nullptr if there is none of that size. Then kept blocks
  // of the same total size have been returned to the kernel.
  void* take_kept(size_t bytes) {
    Blocks dropped;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      const auto found = std::find_if(kept_.rbegin(), kept_.rend(),
                                      [bytes](const Block& b) { return b.bytes == bytes; });
      if (found != kept_.rend()) {
        const auto block = std::prev(found.base());
        Blocks& used = used_[block->data];
        used.splice(used.end(), kept_, block);
        kept_bytes_ -= bytes;
        return used.front().data;
      }
      dropped = drop(bytes);
    }
    release(dropped);
    return nullptr;
  }

  // Removes blocks of at least this many bytes together, or all, from the kept ones, the oldest
  // first.
  Blocks drop(size_t bytes) noexcept {
    auto end = kept_.begin();
    for (size_t sum = 0; end != kept_.end() && sum < bytes; ++end) {
      sum += end->bytes;
      kept_bytes_ -= end->bytes;
    }
    Blocks dropped;
    dropped.splice(dropped.end(), kept_, kept_.begin(), end);
    return dropped;
  }

  static void release(const Blocks& blocks) noexcept {
    for (const Block& block : blocks) c10::free_cpu(block.data);
  }

  std::mutex mutex_;
  Blocks kept_;  // in the order in which they were freed
  size_t kept_bytes_ = 0;
  std::unordered_map<void*, Blocks> used_;  // one block each
};

// LibTorch's allocator, except for large blocks.
class KeepingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    LargeBlocks& large = LargeBlocks::instance();
    if (bytes <= kLargestOfHeap) {
      return large.allocate([bytes] { return c10::GetDefaultCPUAllocator()->allocate(bytes); });
    }
    void* data = large.take(bytes);
    return {data, data, &give_back, c10::Device(c10::DeviceType::CPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

 private:
  static void give_back(void* data) {
    if (data == nullptr) return;
    if (LargeBlocks::instance().give_back(data)) return;
    c10::GetDefaultCPUAllocator()->raw_deallocate(data);
  }
};

// Whether the environment configures malloc; such settings have priority.
bool is_configured() {
  const char* tunables = std::getenv("GLIBC_TUNABLES");
  return (tunables != nullptr && std::strstr(tunables, "glibc.malloc.") != nullptr) ||
         std::getenv("MALLOC_TRIM_THRESHOLD_") != nullptr ||
         std::getenv("MALLOC_MMAP_THRESHOLD_") != nullptr ||
         std::getenv("MALLOC_MMAP_MAX_") != nullptr;
}

// Runs when the library is loaded.
[[gnu::constructor]] void keep_freed_memory() {
  if (is_configured()) return;
  mallopt(M_MMAP_THRESHOLD, static_cast<int>(kThreshold));
  mallopt(M_TRIM_THRESHOLD, static_cast<int>(kKeptAtMost));
  if (pthread_atfork(&LargeBlocks::before_fork, &LargeBlocks::after_fork,
                     &LargeBlocks::after_fork) != 0) {
    return;
  }
  c10::SetCPUAllocator(new KeepingAllocator);  // never destroyed: threads may outlive main
}

}  // namespace
