#include "torch/numerics.h"

#include <ATen/Context.h>
#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <condition_variable>
#include <list>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/thread.h"

namespace ts {

__thread NumericsSeat* numerics_seat __attribute__((tls_model("initial-exec"))) = nullptr;
NumericsState numerics_state;

namespace {

int32_t read_switches() {
  const at::Context& context = at::globalContext();
  return (context.allowTF32CuBLAS() ? TS_NUMERICS_FLAG_MATMUL_TF32 : 0) |
         (context.allowTF32CuDNN() ? TS_NUMERICS_FLAG_CONVOLUTION_TF32 : 0) |
         (context.benchmarkCuDNN() ? TS_NUMERICS_FLAG_BENCHMARK : 0) |
         (context.deterministicAlgorithms() ? TS_NUMERICS_FLAG_DETERMINISTIC : 0);
}

// Sets only the switches that differ, so that values that LibTorch holds besides these switches are
// kept.
void write_switches(int32_t from, int32_t to) {
  at::Context& context = at::globalContext();
  const int32_t changed = from ^ to;
  if ((changed & TS_NUMERICS_FLAG_MATMUL_TF32) != 0) {
    context.setAllowTF32CuBLAS((to & TS_NUMERICS_FLAG_MATMUL_TF32) != 0);
  }
  if ((changed & TS_NUMERICS_FLAG_CONVOLUTION_TF32) != 0) {
    context.setAllowTF32CuDNN((to & TS_NUMERICS_FLAG_CONVOLUTION_TF32) != 0);
  }
  if ((changed & TS_NUMERICS_FLAG_BENCHMARK) != 0) {
    context.setBenchmarkCuDNN((to & TS_NUMERICS_FLAG_BENCHMARK) != 0);
  }
  if ((changed & TS_NUMERICS_FLAG_DETERMINISTIC) != 0) {
    context.setDeterministicAlgorithms((to & TS_NUMERICS_FLAG_DETERMINISTIC) != 0,
                                       /*warn_only=*/false);
  }
}

// The turns of all threads. Waiting threads form a queue with one place for each value of the
// switches, so threads that want equal switches enter together. Once a thread waits, newcomers wait
// too: no value of the switches locks out the others.
class Turns {
 public:
  Turns() : current_(read_switches()) {
    numerics_state.need_fences =
        syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
    numerics_state.of_process.store(current_, std::memory_order_relaxed);
    numerics_state.open.store(current_, std::memory_order_release);
  }

  NumericsSeat& take() {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found =
        std::find_if(seats_.begin(), seats_.end(), [](auto& seat) { return !seat.used; });
    NumericsSeat& seat = found != seats_.end() ? *found : seats_.emplace_back();
    seat.used = true;
    return seat;
  }

  void give_back(NumericsSeat& seat) {
    const std::lock_guard<std::mutex> lock(mutex_);
    seat.used = false;
  }

  void wake() {
    // The waiting thread has already looked, or is waiting.
    const std::lock_guard<std::mutex> lock(mutex_);
    changed_.notify_all();
  }

  void enter(NumericsSeat& seat, int32_t switches) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int32_t now = numerics_state.open.load(std::memory_order_relaxed);
    if (now == switches) {  // the mutex keeps this true
      seat.held.store(switches, std::memory_order_relaxed);
      return;
    }
    if (now != NumericsSeat::kNone) close();
    seat.wanted = switches;
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(queued_);
    if (std::find(queue_.begin(), end, switches) == end) queue_[queued_++] = switches;
    while (seat.wanted != NumericsSeat::kNone) {
      if (!opening_ && queue_.front() == switches) {
        open(lock);
      } else {
        changed_.wait(lock);
      }
    }
  }

 private:
  // From now on no thread enters without the mutex, and threads that leave wake the others.
  void close() {
    numerics_state.differ.store(true, std::memory_order_relaxed);
    numerics_state.open.store(NumericsSeat::kNone, std::memory_order_relaxed);
    if (numerics_state.need_fences) {
      std::atomic_thread_fence(std::memory_order_seq_cst);
    } else {  // cannot fail after the registration
      syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
    }
  }

  // Waits for the threads inside, and admits those that want the switches at the front of the
  // queue.
  void open(std::unique_lock<std::mutex>& lock) {
    opening_ = true;
    for (NumericsSeat& seat : seats_) {  // a seat that is added meanwhile finds the turns closed
      changed_.wait(
          lock, [&] { return seat.held.load(std::memory_order_acquire) == NumericsSeat::kNone; });
    }
    opening_ = false;
    const int32_t next = queue_.front();
    std::copy(queue_.begin() + 1, queue_.begin() + static_cast<std::ptrdiff_t>(queued_),
              queue_.begin());
    --queued_;
    write_switches(std::exchange(current_, next), next);
    for (NumericsSeat& seat : seats_) {
      if (seat.wanted != next) continue;
      seat.wanted = NumericsSeat::kNone;
      seat.held.store(next, std::memory_order_relaxed);
    }
    if (queued_ == 0) numerics_state.open.store(next, std::memory_order_release);
    changed_.notify_all();
  }

  std::mutex mutex_;  // guards the rest
  std::condition_variable changed_;
  std::list<NumericsSeat> seats_;  // may grow while open waits
  std::array<int32_t, kSwitches + 1> queue_{};
  size_t queued_ = 0;
  bool opening_ = false;
  int32_t current_;  // LibTorch's switches
};

Turns& turns() {
  static auto* all = new Turns;  // never destroyed: threads may outlive main
  return *all;
}

// Returns the thread's seat when the thread ends.
struct SeatOfThread {
  ~SeatOfThread() {
    if (numerics_seat != nullptr) turns().give_back(*std::exchange(numerics_seat, nullptr));
  }
};

}  // namespace

void check_numerics(int32_t flags) {
  require(are_numerics(flags), "operands under different switches (Numerics)");
}

NumericsSeat& take_numerics_seat() {
  numerics_seat = &turns().take();
  thread_local SeatOfThread at_the_end;
  static_cast<void>(at_the_end);
  return *numerics_seat;
}

void wake_numerics() noexcept { turns().wake(); }

void change_numerics(NumericsSeat& seat, int32_t switches) noexcept {
  if (seat.held.load(std::memory_order_relaxed) != NumericsSeat::kNone) leave_numerics(seat);
  if (switches != NumericsSeat::kNone) turns().enter(seat, switches);
}

}  // namespace ts

ts_error* ts_numerics_set(int32_t flags) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require((flags & ~ts::kSwitches) == 0, "unknown flag");
    ts::turns();  // starts with LibTorch's switches
    ts::numerics_state.of_process.store(flags, std::memory_order_relaxed);
    const ts::NumericsTurn applied(0);  // code without turns then has these switches too
  });
}

ts_error* ts_numerics_get(int32_t* flags) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(flags != nullptr, "flags is NULL");
    ts::turns();  // starts with LibTorch's switches
    *flags = ts::numerics_state.of_process.load(std::memory_order_relaxed);
  });
}
