#include "cuda/foreign.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/TensorImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <unistd.h>

#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <optional>
#include <thread>
#include <utility>

#include "base/error.h"
#include "cuda/capture.h"
#include "cuda/device.h"
#include "cuda/same_stream.h"
#include "cuda/sanitizer.h"

namespace ts {

// The thread that returns foreign memory. It is started with the first foreign memory and never
// ends.
class Reaper {
 public:
  static Reaper& get() {
    static auto* reaper = new Reaper;  // never destroyed: tensors may end after main
    return *reaper;
  }

  // Returns the waiting memory before the process ends, and nothing later. An owner's code may
  // itself wait for the thread that ends the process, so this thread waits for it only briefly.
  static void end() {
    constexpr auto kLongest = std::chrono::seconds(1);
    Reaper& all = get();
    if (getpid() != all.process_) return;  // a child process has no such thread
    std::unique_lock<std::mutex> lock(all.mutex_);
    if (std::this_thread::get_id() == all.thread_) return;  // an owner's code is ending the process
    all.idle_.wait_for(lock, kLongest,
                       [&] { return all.ended_ || (all.first_ == nullptr && !all.busy_); });
    all.ended_ = true;
  }

  // Allocates nothing, since it is called where tensors end.
  void take(std::unique_ptr<Foreign> memory) noexcept {
    const std::lock_guard<std::mutex> lock(mutex_);
    Foreign* added = memory.release();
    (last_ == nullptr ? first_ : last_->next_) = added;
    last_ = added;
    ready_.notify_one();
  }

 private:
  Reaper() {
    std::thread thread([this] { work(); });
    thread_ = thread.get_id();
    thread.detach();
  }

  [[noreturn]] void work() noexcept {
    const LoggedFor library(LoggedFor::Doer::kLibrary);  // after a deleter's calls too
    for (;;) {
      next()->run();
      const std::lock_guard<std::mutex> lock(mutex_);
      busy_ = false;
      idle_.notify_all();
    }
  }

  std::unique_ptr<Foreign> next() {
    std::unique_lock<std::mutex> lock(mutex_);
    ready_.wait(lock, [this] { return first_ != nullptr && !ended_; });
    busy_ = true;
    std::unique_ptr<Foreign> memory(first_);
    first_ = std::exchange(memory->next_, nullptr);
    if (first_ == nullptr) last_ = nullptr;
    return memory;
  }

  const pid_t process_ = getpid();
  std::thread::id thread_;
  std::mutex mutex_;
  std::condition_variable ready_;
  std::condition_variable idle_;
  Foreign* first_ = nullptr;
  Foreign* last_ = nullptr;
  bool busy_ = false;
  bool ended_ = false;
};

namespace {

// Registers Reaper::end as an exit handler. It runs before the handlers that are already
// registered.
bool end_with_process() {
  if (std::atexit(&Reaper::end) == 0) return true;
  throw Failure(TS_ERROR_OUT_OF_MEMORY, "no memory to register the end of foreign memory");
}

// Returning memory must end before the libraries that it needs: CUDA registers its own exit handler
// when it is initialised.
void end_before_needs(c10::Device device) {
  [[maybe_unused]] static const bool host = end_with_process();
  if (!device.is_cuda()) return;
  [[maybe_unused]] static const bool gpu = end_with_process();
}

// Makes a device current, without errors. For code that must not throw.
class OnDevice {
 public:
  explicit OnDevice(c10::DeviceIndex device) {
    C10_CUDA_IGNORE_ERROR(c10::cuda::GetDevice(&previous_));
    C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(device));
  }
  ~OnDevice() { C10_CUDA_IGNORE_ERROR(c10::cuda::MaybeSetDevice(previous_)); }
  OnDevice(const OnDevice&) = delete;
  OnDevice& operator=(const OnDevice&) = delete;

 private:
  c10::DeviceIndex previous_ = 0;
};

}  // namespace

Foreign::~Foreign() {
  for (const Use& use : uses_) {
    const OnDevice device(use.stream.device_index());
    C10_CUDA_IGNORE_ERROR(cudaEventDestroy(use.event));
  }
}

Foreign* Foreign::of(const c10::StorageImpl& storage) noexcept {
  const at::DataPtr& data = storage.data_ptr();
  if (data.get_deleter() != &Foreign::release) return nullptr;
  return static_cast<Foreign*>(data.get_context());
}

at::Tensor Foreign::tensor(std::unique_ptr<Foreign> memory, void* data, size_t bytes,
                           at::IntArrayRef sizes, at::IntArrayRef strides, at::ScalarType dtype,
                           c10::Device device) {
  Reaper::get();  // if starting the thread fails, it fails here and not where a tensor ends
  end_before_needs(device);
  Foreign* const kept = memory.get();
  at::DataPtr pointer(data, memory.release(), &Foreign::release, device);
  auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                       std::move(pointer), /*allocator=*/nullptr,
                                                       /*resizable=*/false);
  const auto key = device.is_cuda() ? c10::DispatchKey::CUDA : c10::DispatchKey::CPU;
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::Storage(std::move(storage)), c10::DispatchKeySet(key), c10::scalarTypeToTypeMeta(dtype));
  made.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  kept->armed_ = true;
  return made;
}

void Foreign::use(c10::cuda::CUDAStream stream) {
  const std::lock_guard<std::mutex> lock(mutex_);
  for (const Use& use : uses_) {
    if (same_stream(use.stream, stream)) return;
  }
  uses_.reserve(uses_.size() + 1);
  const OnDevice device(stream.device_index());
  cudaEvent_t event = nullptr;
  C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync));
  uses_.push_back({stream, event, false});
}

// A record on a captured stream would become part of the graph.
void Foreign::record(Use& use) noexcept {
  const OnDevice device(use.stream.device_index());
  auto status = cudaStreamCaptureStatusNone;
  if (somebody_captures() && (cudaStreamIsCapturing(use.stream.stream(), &status) != cudaSuccess ||
                              status != cudaStreamCaptureStatusNone)) {
    C10_CUDA_CLEAR_ERROR();
    return;
  }
  C10_CUDA_IGNORE_ERROR(cudaEventRecord(use.event, use.stream.stream()));
  use.recorded = true;
}

void Foreign::release(void* context) noexcept {
  std::unique_ptr<Foreign> memory(static_cast<Foreign*>(context));
  if (!memory->armed_) return;
  for (Use& use : memory->uses_) memory->record(use);
  Reaper::get().take(std::move(memory));
}

void Foreign::run() noexcept {
  ts_error_free(guard("Foreign::run", [this] {
    for (Use& use : uses_) {
      if (use.recorded) continue;
      // The stream took part in a capture. It must not take part in another one before the record,
      // or the memory would be returned without a record.
      const auto turn = wait_for_no_capture();
      record(use);
    }
    // The owner's code may make calls that a capture elsewhere forbids to other threads.
    std::optional<c10::cuda::CUDAStreamCaptureModeGuard> relaxed;
    if (device_count() > 0) relaxed.emplace(cudaStreamCaptureModeRelaxed);
    give_back(uses_);
  }));
}

}  // namespace ts
