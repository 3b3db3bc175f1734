#include "thread.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <limits>
#include <mutex>
#include <unordered_map>

#include "error.h"
#include "thread_id.h"

namespace ts {

__thread uint64_t thread_number __attribute__((tls_model("initial-exec"))) = 0;

namespace {

std::atomic<uint64_t> threads_ever{0};
std::atomic<int64_t> threads_alive{0};

class Silence : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// Never destroyed: threads that outlive main's static objects may still warn.
Silence& silence() {
  static auto* handler = new Silence;
  return *handler;
}

// The threads that entered: the kernel's ids by the lower half of their pthread_t, of which the
// latest thread that had it counts, and back.
struct ThreadIds {
  std::mutex mutex;
  std::unordered_map<int32_t, int64_t> by_pthread;
  std::unordered_map<int64_t, int32_t> pthread_of;
};

ThreadIds& thread_ids() {
  static auto* ids = new ThreadIds;  // never destroyed, as the handler above
  return *ids;
}

int32_t lower_half(pthread_t thread) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(thread)));
}

struct Presence {
  Presence() {
    {
      ThreadIds& ids = thread_ids();
      const std::lock_guard<std::mutex> lock(ids.mutex);
      const int32_t self = lower_half(pthread_self());
      ids.by_pthread[self] = ts_thread_id();
      ids.pthread_of[ts_thread_id()] = self;
    }
    thread_number = threads_ever.fetch_add(1, std::memory_order_relaxed) + 1;
    threads_alive.fetch_add(1, std::memory_order_relaxed);
    c10::WarningUtils::set_warning_handler(&silence());
  }
  ~Presence() {
    thread_number = 0;
    threads_alive.fetch_sub(1, std::memory_order_relaxed);
  }
};

}  // namespace

void first_entry() noexcept {
  // After this object's end (a later thread-local destructor called) nothing is counted any more.
  thread_local Presence presence;
}

int64_t thread_id_of(int64_t thread) {
  ThreadIds& ids = thread_ids();
  const std::lock_guard<std::mutex> lock(ids.mutex);
  const auto known = ids.pthread_of.find(thread);
  const auto found = ids.by_pthread.find(
      known != ids.pthread_of.end() ? known->second : static_cast<int32_t>(thread));
  return found == ids.by_pthread.end() ? thread : found->second;
}

}  // namespace ts

int64_t ts_thread_count(void) { return ts::threads_alive.load(std::memory_order_relaxed); }

int64_t ts_thread_id(void) { return syscall(SYS_gettid); }

void ts_noop(void) {}

ts_error* ts_set_num_threads(int32_t threads) {
  return ts::guard(__func__, [&] {
    ts::require(threads > 0, "the number of threads must be at least 1");
    ts::enter_thread();
    at::set_num_threads(threads);
  });
}

int32_t ts_num_threads(void) {
  ts::enter_thread();
  return at::get_num_threads();
}
