#include "cuda/capture.h"

#include <c10/core/ScalarType.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>

#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "base/thread.h"
#include "cuda/same_stream.h"
#include "cuda/storage.h"
#include "cuda/workspaces.h"
#include "torchstream.h"

namespace ts {

std::atomic<bool> capture_under_way{false};
std::atomic<uint64_t> captures_begun{0};

namespace {

using c10::cuda::CUDAStream;
using Storage = c10::intrusive_ptr<c10::StorageImpl>;
using Weak = c10::weak_intrusive_ptr<c10::StorageImpl>;

thread_local bool captures_here = false;

// The registry.
struct UnderWay {
  std::shared_mutex turn;  // the capture holds it exclusively, random operators share it
  std::mutex mutex;        // guards the rest
  CaptureRecord* capture = nullptr;
};

UnderWay& under_way() {
  static auto* here = new UnderWay;  // never destroyed: threads may outlive main
  return *here;
}

// The caller holds under_way().mutex.
bool is_of(const CaptureRecord& capture, CUDAStream stream) {
  if (stream.device_index() == capture.stream.device_index() &&
      same_stream(stream, capture.stream)) {
    return true;
  }
  if (stream.stream() == nullptr) return false;
  unsigned long long id = 0;
  return capture_status(stream.stream(), &id) == cudaStreamCaptureStatusInvalidated ||
         capture.has(stream.stream());
}

// Runs fn on the capture of the given stream. Without a stream, of the thread's current stream on
// the capture's device or on the current device.
template <typename Fn>
void with_capture(std::optional<CUDAStream> stream, Fn&& fn) {
  if (!somebody_captures()) return;
  UnderWay& all = under_way();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.capture == nullptr) return;
  if (!stream.has_value()) {
    const auto device = all.capture->stream.device_index();
    stream = c10::cuda::getCurrentCUDAStream(device);
    const auto current = c10::cuda::current_device();
    if (current != device && !is_of(*all.capture, *stream)) {
      stream = c10::cuda::getCurrentCUDAStream(current);
    }
  }
  if (is_of(*all.capture, *stream)) fn(*all.capture, *stream);
}

}  // namespace

cudaStreamCaptureStatus capture_status(cudaStream_t stream, unsigned long long* id) {
  auto status = cudaStreamCaptureStatusNone;
  if (stream != nullptr) C10_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, id));
  return status;
}

bool CaptureRecord::has(cudaStream_t candidate) const {
  unsigned long long current = 0;
  return capture_status(candidate, &current) == cudaStreamCaptureStatusActive &&
         current == id.load(std::memory_order_acquire);
}

void CaptureRecord::add_stream(cudaStream_t stream) {
  if (streams.insert(stream).second) drop_workspaces(stream);
}

std::unique_lock<std::shared_mutex> take_capture_turn() {
  return std::unique_lock<std::shared_mutex>(under_way().turn);
}

void open_capture(CaptureRecord& record) {
  captures_here = true;
  const std::lock_guard<std::mutex> lock(under_way().mutex);
  under_way().capture = &record;
  captures_begun.fetch_add(1, std::memory_order_release);
  capture_under_way.store(true, std::memory_order_release);
}

void close_capture() noexcept {
  const std::lock_guard<std::mutex> lock(under_way().mutex);
  under_way().capture = nullptr;
  capture_under_way.store(false, std::memory_order_release);
  captures_here = false;
}

bool this_thread_captures() noexcept { return captures_here; }

void throw_made_elsewhere() {
  throw Failure(TS_ERROR_CAPTURE,
                "memory was made on another GPU than the captured one, and a graph has memory of "
                "one GPU: make it before the capture, or capture a graph for each GPU");
}

bool is_capturing(CUDAStream stream) {
  if (stream.stream() == nullptr) return false;  // the default stream cannot be captured
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  C10_CUDA_CHECK(cudaStreamIsCapturing(stream.stream(), &status));
  return status != cudaStreamCaptureStatusNone;
}

void require_in_capture_of(CUDAStream waiter, CUDAStream on) {
  if (!somebody_captures() || !in_capture(waiter) || in_capture(on)) return;
  throw Failure(TS_ERROR_CAPTURE,
                "a stream that is captured cannot wait for one that is not: fork that one from the "
                "captured stream first, or wait for it before the capture");
}

std::shared_lock<std::shared_mutex> wait_for_no_capture() {
  return std::shared_lock<std::shared_mutex>(under_way().turn);
}

RandomTurn::RandomTurn() : lock_(under_way().turn, std::try_to_lock) {
  if (!lock_.owns_lock()) {
    throw Failure(TS_ERROR_BUSY,
                  "a capture on another thread has the random generators: wait for its end "
                  "(ts_capture_wait) and call again");
  }
}

bool in_capture() {
  bool result = false;
  with_capture(std::nullopt, [&](CaptureRecord&, CUDAStream) { result = true; });
  return result;
}

bool in_capture(CUDAStream stream) {
  bool result = false;
  with_capture(stream, [&](CaptureRecord&, CUDAStream) { result = true; });
  return result;
}

void throw_if_in_capture(const char* what) {
  if (!captures_here && !in_capture()) return;
  throw Failure(TS_ERROR_CAPTURE, std::string(what) + " is not possible while a graph is captured");
}

void hold_in_capture(const at::Tensor& tensor, CUDAStream stream) {
  with_capture(stream, [&](CaptureRecord& capture, CUDAStream on) {
    capture.add_stream(on.stream());
    if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    if (capture.made.count(storage) != 0) return;
    if (!capture.known.insert(tensor.unsafeGetTensorImpl()).second) return;
    capture.held.push_back({tensor, storage_of(tensor), tensor.const_data_ptr(), {}, false});
  });
}

void hold_in_capture(const at::Tensor& tensor) {
  if (!somebody_captures() || !tensor.defined() || !tensor.is_cuda()) return;
  hold_in_capture(tensor, c10::cuda::getCurrentCUDAStream(tensor.get_device()));
}

namespace {

// Records that the storage's memory was made in the capture.
void add_made(CaptureRecord& capture, const at::Tensor& tensor) {
  if (tensor.get_device() != capture.stream.device_index()) {
    // The work is captured, so the capture cannot become a graph any more.
    capture.made_elsewhere = true;
    throw_made_elsewhere();
  }
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  // The weak reference prevents another storage from getting the same address.
  capture.made.emplace(storage, Weak(Storage::reclaim_copy(storage)));
}

}  // namespace

void made_in_capture(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda() || !tensor.has_storage()) return;
  if (!somebody_captures()) return;
  const auto stream = c10::cuda::getCurrentCUDAStream(tensor.get_device());
  with_capture(stream, [&](CaptureRecord& capture, CUDAStream) {
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    for (const Held& held : capture.held) {
      if (held.storage.get() == storage) return;  // a view of existing memory
    }
    add_made(capture, tensor);
  });
}

void allocated_in_capture(const at::Tensor& tensor) {
  if (!somebody_captures() || !tensor.is_cuda()) return;
  const auto stream = c10::cuda::getCurrentCUDAStream(tensor.get_device());
  with_capture(stream, [&](CaptureRecord& capture, CUDAStream) {
    add_made(capture, tensor);
    auto* storage = tensor.storage().unsafeGetStorageImpl();
    for (Held& held : capture.held) {
      if (held.storage.get() == storage) held.allocated = true;
    }
  });
}

void require_own_memory_in_capture(const at::Tensor& tensor, const char* what) {
  if (!somebody_captures()) return;
  if (!tensor.is_cuda()) return throw_if_in_capture(what);
  bool captured = false;
  bool own = false;
  with_capture(c10::cuda::getCurrentCUDAStream(tensor.get_device()),
               [&](CaptureRecord& capture, CUDAStream) {
                 captured = true;
                 auto* storage = tensor.storage().unsafeGetStorageImpl();
                 own = storage->nbytes() == 0 || capture.made.count(storage) != 0;
               });
  if (captured ? own : !captures_here) return;
  throw Failure(TS_ERROR_CAPTURE,
                std::string(what) + " is not possible while a graph is captured: " +
                    (captured ? "the memory is from before" : "the stream is not captured"));
}

void generator_in_capture(const std::shared_ptr<Randomness>& generator, c10::DeviceIndex device,
                          const std::function<void(unsigned long long)>& begin) {
  with_capture(std::nullopt, [&](CaptureRecord& capture, CUDAStream) {
    auto& all = capture.generators;
    if (std::find(all.begin(), all.end(), generator) != all.end()) return;
    if (device != capture.stream.device_index()) {
      throw Failure(TS_ERROR_CAPTURE,
                    "a random generator of another GPU than the captured one: a graph draws "
                    "numbers of one GPU");
    }
    all.push_back(generator);
    begin(capture.id.load(std::memory_order_relaxed));
  });
}

void event_in_capture(const std::shared_ptr<ts_event>& event, CUDAStream stream) {
  with_capture(stream, [&](CaptureRecord& capture, CUDAStream) {
    auto& all = capture.events;
    if (std::find(all.begin(), all.end(), event) == all.end()) all.push_back(event);
  });
}

void stale_in_capture(std::shared_ptr<const std::atomic<bool>> retired, CUDAStream stream) {
  with_capture(stream, [&](CaptureRecord& capture, CUDAStream) {
    auto& all = capture.retired;
    if (std::find(all.begin(), all.end(), retired) == all.end()) all.push_back(std::move(retired));
  });
}

void gradients_in_capture() {
  with_capture(std::nullopt, [](CaptureRecord& capture, CUDAStream) { capture.gradients = true; });
}

void CaptureWatch::blame() const noexcept {
  UnderWay& all = under_way();
  const std::lock_guard<std::mutex> lock(all.mutex);
  if (all.capture == nullptr || all.capture->broken_by != nullptr) return;
  auto status = cudaStreamCaptureStatusNone;
  C10_CUDA_IGNORE_ERROR(cudaStreamIsCapturing(all.capture->stream.stream(), &status));
  if (status == cudaStreamCaptureStatusInvalidated) all.capture->broken_by = call_;
}

}  // namespace ts

ts_error* ts_capture_is_active(bool* active) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(active != nullptr, "active is NULL");
    *active = ts::somebody_captures() && (ts::this_thread_captures() || ts::in_capture());
  });
}

ts_error* ts_capture_wait(void) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::refuse_in_capture("waiting for a capture's end");
    ts::wait_for_no_capture();
  });
}
