#include "base/thread.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <deque>
#include <limits>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "base/error.h"
#include "base/thread_id.h"
#include "torchstream.h"

namespace ts {

__thread uint64_t thread_number __attribute__((tls_model("initial-exec"))) = 0;
__thread bool library_thread __attribute__((tls_model("initial-exec"))) = false;

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

// The threads that entered. Maps the lower half of a pthread_t to the kernel's id of the latest
// thread that had it, and back. The table of pthread_t grows to the maximum number of simultaneous
// threads; of ended threads it keeps the latest kEnded.
struct ThreadIds {
  struct Known {
    int32_t pthread;
    uint64_t number;
  };
  static constexpr size_t kEnded = 4096;

  std::mutex mutex;
  std::unordered_map<int32_t, int64_t> by_pthread;
  std::unordered_map<int64_t, Known> pthread_of;
  std::deque<std::pair<int64_t, uint64_t>> ended;  // id and number, the oldest first

  void enter(int32_t pthread, int64_t id, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    by_pthread[pthread] = id;
    pthread_of[id] = {pthread, number};
  }
  void leave(int64_t id, uint64_t number) {
    const std::lock_guard<std::mutex> lock(mutex);
    ended.emplace_back(id, number);
    if (ended.size() <= kEnded) return;
    const auto [oldest, its_number] = ended.front();
    ended.pop_front();
    const auto found = pthread_of.find(oldest);  // the kernel may have reused its id
    if (found != pthread_of.end() && found->second.number == its_number) pthread_of.erase(found);
  }
};

ThreadIds& thread_ids() {
  static auto* ids = new ThreadIds;  // never destroyed, as the handler above
  return *ids;
}

int32_t lower_half(pthread_t thread) {
  return static_cast<int32_t>(static_cast<uint32_t>(static_cast<uint64_t>(thread)));
}

struct Presence {
  Presence() noexcept {
    thread_number = threads_ever.fetch_add(1, std::memory_order_relaxed) + 1;
    threads_alive.fetch_add(1, std::memory_order_relaxed);
    try_quietly([] {
      c10::WarningUtils::set_warning_handler(&silence());
      thread_ids().enter(lower_half(pthread_self()), ts_thread_id(), thread_number);
    });
  }
  ~Presence() {
    try_quietly([] { thread_ids().leave(ts_thread_id(), thread_number); });
    thread_number = 0;
    threads_alive.fetch_sub(1, std::memory_order_relaxed);
  }

  // Out of memory costs a thread only its name in recordings.
  template <typename Body>
  static void try_quietly(Body&& body) noexcept {
    ts_error_free(guard("thread", std::forward<Body>(body)));
  }
};

}  // namespace

void first_entry() noexcept {
  // A call from a later thread-local destructor, after this object is destroyed, is not counted.
  thread_local Presence presence;
}

int64_t thread_id_of(int64_t thread) {
  ThreadIds& ids = thread_ids();
  const std::lock_guard<std::mutex> lock(ids.mutex);
  const auto known = ids.pthread_of.find(thread);
  const auto found = ids.by_pthread.find(
      known != ids.pthread_of.end() ? known->second.pthread : static_cast<int32_t>(thread));
  return found == ids.by_pthread.end() ? thread : found->second;
}

}  // namespace ts

int64_t ts_thread_count(void) { return ts::threads_alive.load(std::memory_order_relaxed); }

int64_t ts_thread_id(void) { return syscall(SYS_gettid); }

ts_error* ts_parallelism_set(int32_t threads) {
  return ts::guard(__func__, [&] {
    ts::require(threads > 0, "the number of threads must be at least 1");
    ts::enter_thread();
    at::set_num_threads(threads);
  });
}

int32_t ts_parallelism(void) {
  int32_t threads = 1;
  ts_error_free(ts::guard(__func__, [&] {
    ts::enter_thread();
    threads = at::get_num_threads();
  }));
  return threads;
}
