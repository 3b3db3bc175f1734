#include "thread.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <limits>

#include "error.h"

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

struct Presence {
  Presence() {
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
