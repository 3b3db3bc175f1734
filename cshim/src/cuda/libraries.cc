#include "cuda/libraries.h"

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAMacros.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/workspaces.h"
#include "torchstream.h"

namespace ts {
namespace {

using c10::DeviceIndex;

// The number of a program's threads that may have handles: the first ones that ask. A thread's
// cuBLAS handle needs 64 MiB on an H200.
constexpr int kSeats = 16;
// The number of stand-in threads.
constexpr int kStandIns = 4;

std::atomic<int> seats_taken{0};
std::atomic<int> stand_ins{0};

class Seat;

// The calling thread's seat, if it has one. Most calls read only this.
__thread Seat* taken_seat __attribute__((tls_model("initial-exec"))) = nullptr;

// A thread's right to have handles. It ends with the thread, as the handles do: LibTorch passes
// them to the next thread that asks.
class Seat {
 public:
  Seat() = default;
  ~Seat() {
    taken_seat = nullptr;
    if (counted_) seats_taken.fetch_sub(1, std::memory_order_relaxed);
  }
  Seat(const Seat&) = delete;
  Seat& operator=(const Seat&) = delete;

  // A backward thread takes no seat. LibTorch's own products on it use its handle too, with the
  // thread's workspace and without the turn of bind_workspace.
  bool take() noexcept {
    if (taken_) return true;
    if (library_thread) return false;
    int count = seats_taken.load(std::memory_order_relaxed);
    while (count < kSeats) {
      if (!seats_taken.compare_exchange_weak(count, count + 1, std::memory_order_relaxed)) continue;
      return taken_ = counted_ = true;
    }
    return false;
  }
  void take_as_stand_in() noexcept { taken_ = true; }

  cublasHandle_t blas(DeviceIndex device) {
    cublasHandle_t& handle = blas_[static_cast<size_t>(device)];
    if (handle == nullptr) handle = make_blas_handle(device);
    return handle;
  }

 private:
  bool taken_ = false;
  bool counted_ = false;
  std::array<cublasHandle_t, C10_COMPILE_TIME_MAX_GPUS> blas_{};
};

Seat& seat() {
  thread_local Seat here;
  return here;
}

// Returns the calling thread's seat, or NULL if it gets none.
Seat* take_seat() {
  Seat& here = seat();
  if (here.take()) taken_seat = &here;
  return taken_seat;
}

// A call passed to a stand-in thread, with the caller's state.
struct Call {
  Libraries used;
  DeviceIndex device;
  c10::function_ref<void()> body;
  uint64_t thread;  // memory pools identify their thread by this number
  DeviceIndex current;
  std::vector<c10::cuda::CUDAStream> streams;
  ts_error* error = nullptr;
  bool done = false;  // guarded by StandIns' mutex
  std::condition_variable finished;
};

class StandIns {
 public:
  void run(Call& call) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (calls_.size() >= idle_ && stand_ins.load(std::memory_order_relaxed) < kStandIns) {
      std::thread([this] { serve(); }).detach();
      stand_ins.fetch_add(1, std::memory_order_relaxed);
    }
    calls_.push_back(&call);
    waiting_.notify_one();
    call.finished.wait(lock, [&] { return call.done; });
  }

 private:
  [[noreturn]] void serve() {
    enter_thread();
    seat().take_as_stand_in();
    take_seat();
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      ++idle_;
      waiting_.wait(lock, [this] { return !calls_.empty(); });
      --idle_;
      Call& call = *calls_.front();
      calls_.pop_front();
      lock.unlock();
      perform(call);
      lock.lock();
      call.done = true;
      // Under the lock, since the caller's Call is destroyed when its wait ends.
      call.finished.notify_one();
    }
  }

  static void perform(Call& call) noexcept {
    const uint64_t own = std::exchange(thread_number, call.thread);
    call.error = guard("a library's thread", [&] {
      const c10::cuda::CUDAMultiStreamGuard streams(call.streams);
      const c10::cuda::CUDAGuard device(call.current);
      run_with_libraries(call.used, call.device, call.body);
    });
    thread_number = own;
  }

  std::mutex mutex_;
  std::condition_variable waiting_;
  std::deque<Call*> calls_;
  size_t idle_ = 0;
};

StandIns& all_stand_ins() {
  static auto* all = new StandIns;  // never destroyed: its threads do not end
  return *all;
}

struct Name {
  std::string_view text;
  bool prefix;
  Libraries used;
};

// Names without "aten::" and underscores at either end. An operator that is missing here still
// works, on any thread, but that thread keeps handles.
constexpr Name kNames[] = {
    {"addbmm", false, Libraries::kBlas},
    {"addmm", true, Libraries::kBlas},
    {"addmv", false, Libraries::kBlas},
    {"affine_grid_generator", true, Libraries::kBlas},
    {"baddbmm", false, Libraries::kBlas},
    {"batch_norm", true, Libraries::kHandles},
    {"bilinear", false, Libraries::kBlas},
    {"bmm", false, Libraries::kBlas},
    {"cdist", true, Libraries::kBlas},
    {"chain_matmul", false, Libraries::kBlas},
    {"cholesky", true, Libraries::kBlas},
    {"conv", true, Libraries::kBlas},  // without cuDNN's support LibTorch uses matrix products
    {"corrcoef", false, Libraries::kBlas},
    {"cov", false, Libraries::kBlas},
    {"ctc_loss", true, Libraries::kHandles},
    {"cudnn", true, Libraries::kHandles},
    {"det", false, Libraries::kBlas},
    {"dot", false, Libraries::kBlas},
    {"einsum", false, Libraries::kBlas},
    {"geqrf", false, Libraries::kBlas},
    {"grid_sampler", true, Libraries::kHandles},
    {"grouped_mm", false, Libraries::kBlas},
    {"gru", true, Libraries::kBlas},
    {"inner", false, Libraries::kBlas},
    {"instance_norm", false, Libraries::kHandles},
    {"int_mm", false, Libraries::kBlas},
    {"inverse", false, Libraries::kBlas},
    {"linalg_", true, Libraries::kBlas},
    {"linear", true, Libraries::kBlas},
    {"logdet", false, Libraries::kBlas},
    {"lstm", true, Libraries::kBlas},
    {"lu_", true, Libraries::kBlas},
    {"matmul", true, Libraries::kBlas},
    {"matrix_", true, Libraries::kBlas},
    {"mm", false, Libraries::kBlas},
    {"mv", false, Libraries::kBlas},
    {"native_batch_norm", true, Libraries::kHandles},
    {"native_multi_head_attention", false, Libraries::kBlas},
    {"norm", false, Libraries::kBlas},
    {"nuclear_norm", false, Libraries::kBlas},
    {"orgqr", false, Libraries::kBlas},
    {"ormqr", false, Libraries::kBlas},
    {"pinverse", false, Libraries::kBlas},
    {"qr", false, Libraries::kBlas},
    {"rnn_", true, Libraries::kBlas},
    {"scaled_", true, Libraries::kBlas},
    {"slogdet", false, Libraries::kBlas},
    {"slow_conv", true, Libraries::kBlas},
    {"sparse_", true, Libraries::kBlas},
    {"svd", false, Libraries::kBlas},
    {"tensordot", false, Libraries::kBlas},
    {"thnn_", true, Libraries::kBlas},
    {"torchstream::run_model", false, Libraries::kBlas},
    {"transformer_encoder_layer_fwd", false, Libraries::kBlas},
    {"triangular_solve", false, Libraries::kBlas},
    {"trilinear", false, Libraries::kBlas},
    {"vdot", false, Libraries::kBlas},
};

}  // namespace

Libraries libraries_of(const std::string& name) {
  std::string_view text = name;
  if (text.substr(0, 6) == "aten::") text.remove_prefix(6);
  while (!text.empty() && text.front() == '_') text.remove_prefix(1);
  while (!text.empty() && text.back() == '_') text.remove_suffix(1);
  for (const Name& each : kNames) {
    const bool match = each.prefix ? text.substr(0, each.text.size()) == each.text  //
                                   : text == each.text;
    if (match) return each.used;
  }
  return Libraries::kNone;
}

bool use_libraries_here(Libraries used, DeviceIndex device,
                        std::unique_lock<std::mutex>& workspace) {
  Seat* here = taken_seat;
  if (__builtin_expect(here == nullptr, 0) && (here = take_seat()) == nullptr) return false;
  if (used == Libraries::kBlas) {
    workspace = bind_workspace(here->blas(device), c10::cuda::getCurrentCUDAStream(device));
  }
  return true;
}

void run_with_libraries(Libraries used, DeviceIndex device, c10::function_ref<void()> body) {
  {
    std::unique_lock<std::mutex> workspace;
    if (use_libraries_here(used, device, workspace)) {
      body();
      return;
    }
  }
  Call call{used, device, body, thread_number, c10::cuda::current_device(), {}, nullptr, false, {}};
  for (DeviceIndex i = 0; i < c10::cuda::device_count(); ++i) {
    call.streams.push_back(c10::cuda::getCurrentCUDAStream(i));
  }
  all_stand_ins().run(call);
  if (call.error != nullptr) throw_error(call.error);
}

void prepare_libraries(DeviceIndex device) {
  if (seat().take()) seat().blas(device);
}

}  // namespace ts

int64_t ts_library_thread_count(void) {
  return ts::seats_taken.load(std::memory_order_relaxed) +
         ts::stand_ins.load(std::memory_order_relaxed);
}
