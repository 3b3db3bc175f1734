// LibTorch's switches between speed, precision and reproducibility (TF32, cuDNN's benchmark,
// deterministic kernels), for each call. LibTorch keeps one value of each for the process, which
// operators read while they run. So calls under different switches take turns: a turn sets the
// switches once every call under other switches has left. Calls under equal switches run at the
// same time.
// A turn belongs to a thread, and is the library's innermost lock. A thread takes it after a seat
// or a stand-in of libraries.h, a stream's workspace and the turn of random operators, and waits
// for no other lock of the library inside it. Code of the library's caller (hooks, backward
// functions), and hooks that communicate, run outside turns (NumericsPause), so they may wait for
// any other thread. A call that must wait for a GPU waits before its turn where it can.
// Work without a turn (copies, allocation, sums of gradients) runs under the switches of any turn,
// and must not depend on them.
#pragma once

#include <atomic>
#include <cstdint>

#include "torchstream.h"

namespace ts {

constexpr int32_t kSwitches = TS_NUMERICS_FLAG_MATMUL_TF32 | TS_NUMERICS_FLAG_CONVOLUTION_TF32 |
                              TS_NUMERICS_FLAG_BENCHMARK | TS_NUMERICS_FLAG_DETERMINISTIC;
// The flags of a call that set its own switches.
constexpr int32_t kNumericsFlags = kSwitches * TS_NUMERICS_ON | kSwitches * TS_NUMERICS_OFF;

// Whether the flags set all switches or none, each either on or off.
constexpr bool are_numerics(int32_t flags) {
  const int32_t on = flags / TS_NUMERICS_ON & kSwitches;
  const int32_t off = flags / TS_NUMERICS_OFF & kSwitches;
  return (on | off) == 0 || (on ^ off) == kSwitches;
}

// Throws INVALID_ARGUMENT unless are_numerics.
void check_numerics(int32_t flags);

// A thread's entry in the turns.
struct alignas(64) NumericsSeat {
  static constexpr int32_t kNone = -1;

  // The switches that the thread uses or requests; kNone outside a turn.
  std::atomic<int32_t> held{kNone};
  // The mutex of all seats guards the next members.
  int32_t wanted = kNone;  // the switches that the thread waits for
  bool used = false;       // a thread has this seat
};

// The calling thread's seat, or null before its first turn.
extern __thread NumericsSeat* numerics_seat __attribute__((tls_model("initial-exec")));
NumericsSeat& take_numerics_seat();

// The data that every turn reads, in one cache line.
struct alignas(64) NumericsState {
  // The switches under which a turn may start without waiting, or NumericsSeat::kNone.
  std::atomic<int32_t> open{NumericsSeat::kNone};
  // The switches for calls without their own.
  std::atomic<int32_t> of_process{0};
  // Whether turns under different switches have been requested. It stays true.
  std::atomic<bool> differ{false};
  // Whether this kernel lacks membarrier.
  bool need_fences = false;
};
extern NumericsState numerics_state;

// Orders a store of this thread before its next load. A thread that closes turns makes all threads
// pass a barrier (membarrier) between its store and its loads, so one of the two threads sees the
// other's store. On this side, which every operator passes twice, it is then enough that the
// compiler does not swap the two.
inline void order_numerics() {
  if (__builtin_expect(numerics_state.need_fences, 0)) {
    std::atomic_thread_fence(std::memory_order_seq_cst);
  } else {
    std::atomic_signal_fence(std::memory_order_seq_cst);
  }
}

// Wakes the threads that wait for turns to end.
void wake_numerics() noexcept;

// Ends the thread's turn, or withdraws its request.
inline void leave_numerics(NumericsSeat& seat) noexcept {
  seat.held.store(NumericsSeat::kNone, std::memory_order_release);
  order_numerics();
  if (__builtin_expect(numerics_state.open.load(std::memory_order_relaxed) == NumericsSeat::kNone,
                       0)) {
    wake_numerics();
  }
}

// Ends the thread's turn, if it has one, and starts a turn under the switches, unless they are
// kNone.
void change_numerics(NumericsSeat& seat, int32_t switches) noexcept;

// A turn of the thread, from construction to destruction: LibTorch has the switches of the call's
// flags, or the process's. A turn inside another one replaces it until it ends.
class NumericsTurn {
 public:
  explicit NumericsTurn(int32_t flags)
      : seat_(numerics_seat != nullptr ? *numerics_seat : take_numerics_seat()),
        before_(seat_.held.load(std::memory_order_relaxed)) {
    const int32_t switches = (flags & kNumericsFlags) != 0
                                 ? flags / TS_NUMERICS_ON & kSwitches
                                 : numerics_state.of_process.load(std::memory_order_relaxed);
    if (__builtin_expect(before_ == NumericsSeat::kNone, 1)) {
      seat_.held.store(switches, std::memory_order_relaxed);
      order_numerics();
      if (__builtin_expect(numerics_state.open.load(std::memory_order_acquire) == switches, 1)) {
        return;
      }
    } else if (before_ == switches) {
      return;
    }
    change_numerics(seat_, switches);
  }
  ~NumericsTurn() {
    if (__builtin_expect(before_ == NumericsSeat::kNone, 1)) {
      leave_numerics(seat_);
    } else if (seat_.held.load(std::memory_order_relaxed) != before_) {
      change_numerics(seat_, before_);
    }
  }
  NumericsTurn(const NumericsTurn&) = delete;
  NumericsTurn& operator=(const NumericsTurn&) = delete;

 private:
  NumericsSeat& seat_;
  const int32_t before_;
};

// While it exists, the thread has no turn. The called code may wait for other threads.
class NumericsPause {
 public:
  NumericsPause()
      : seat_(numerics_seat),
        before_(seat_ == nullptr ? NumericsSeat::kNone
                                 : seat_->held.load(std::memory_order_relaxed)) {
    if (before_ != NumericsSeat::kNone) change_numerics(*seat_, NumericsSeat::kNone);
  }
  ~NumericsPause() {
    if (before_ != NumericsSeat::kNone) change_numerics(*seat_, before_);
  }
  NumericsPause(const NumericsPause&) = delete;
  NumericsPause& operator=(const NumericsPause&) = delete;

 private:
  NumericsSeat* const seat_;
  const int32_t before_;
};

}  // namespace ts
