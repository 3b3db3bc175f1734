// The capture registry: whether a graph is being captured, by which thread, and which calls the
// rest of the shim may make meanwhile. The process has at most one capture at a time. The graph
// itself is in graph.cc, which opens and closes the registry's only entry.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "torchstream.h"

namespace ts {

// Whether a capture is running in the process. While none is, in_capture, require_in_capture_of,
// refuse_in_capture, CaptureWatch and the functions that report to the capture cost one load of
// this flag. is_capturing and require_no_capture always ask CUDA, since other code in the process
// may capture too.
extern std::atomic<bool> capture_under_way;
inline bool somebody_captures() noexcept {
  return __builtin_expect(capture_under_way.load(std::memory_order_acquire), 0);
}

// The number of the latest capture, counted from 1. While a capture is running, its number.
extern std::atomic<uint64_t> captures_begun;
inline uint64_t latest_capture() noexcept { return captures_begun.load(std::memory_order_acquire); }

// A tensor from before the capture that the graph uses.
struct Held {
  at::Tensor tensor;
  c10::intrusive_ptr<c10::StorageImpl> storage;  // the tensor's memory at that time
  const void* data;
  at::Tensor gradient;  // at the end of the capture
  bool allocated;       // the storage had no memory and was given memory of the graph
};

class Randomness;  // cuda/randomness.h

// What a capture learns from all threads that take part in it. The registry's lock guards it from
// open_capture to close_capture. After that only its owner changes it.
struct CaptureRecord {
  explicit CaptureRecord(c10::cuda::CUDAStream on) : stream(on) {}
  CaptureRecord(const CaptureRecord&) = delete;
  CaptureRecord& operator=(const CaptureRecord&) = delete;

  // Whether the stream takes part in this capture. Needs no lock.
  bool has(cudaStream_t candidate) const;
  // Records that the stream takes part. The stream's workspaces belong to work outside the capture,
  // and a replay on another stream would overwrite them. So captured work gets new workspaces.
  void add_stream(cudaStream_t stream);

  const c10::cuda::CUDAStream stream;     // the stream that the capture started on
  std::atomic<unsigned long long> id{0};  // CUDA's number for the capture; 0 before it has started
  std::vector<Held> held;
  std::unordered_set<c10::TensorImpl*> known;  // the tensors in held
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  std::set<void*> streams;
  std::vector<std::shared_ptr<Randomness>> generators;  // generators that the graph draws from
  std::vector<std::shared_ptr<ts_event>> events;  // events that its replays record or wait for
  std::vector<std::shared_ptr<const std::atomic<bool>>> retired;  // see stale_in_capture
  bool gradients = false;
  bool made_elsewhere = false;      // memory was made on another GPU
  const char* broken_by = nullptr;  // the first call that invalidated the capture
};

// Returns the exclusive right to capture. Blocks until a running capture ends.
std::unique_lock<std::shared_mutex> take_capture_turn();

// Registers the record, borrowed until close_capture, as the calling thread's capture. The caller
// holds the turn.
void open_capture(CaptureRecord& record);
// Unregisters the record: after that, other threads add nothing to it. Called on the thread that
// opened it, any number of times.
void close_capture() noexcept;

// Whether the calling thread makes the running capture.
bool this_thread_captures() noexcept;

// Returns a stream's capture status and CUDA's number for the capture.
cudaStreamCaptureStatus capture_status(cudaStream_t stream, unsigned long long* id);

// Whether work that the calling thread enqueues on its current stream is captured.
bool in_capture();
// Whether work enqueued on the stream is captured.
bool in_capture(c10::cuda::CUDAStream stream);

bool is_capturing(c10::cuda::CUDAStream stream);

// Throws CAPTURE while the stream is captured. CUDA refuses such calls too, but invalidates the
// capture.
inline void require_no_capture(c10::cuda::CUDAStream stream) {
  if (!is_capturing(stream)) return;
  throw Failure(TS_ERROR_CAPTURE, "the stream is being captured: nothing runs on it now");
}

// Throws CAPTURE if the waiter is captured and the other stream is not: the wait would end the
// capture.
void require_in_capture_of(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// Throws CAPTURE if the thread captures or its current stream is captured. For calls that make the
// host wait for the device or return memory to the driver. CUDA refuses them too, but invalidates
// the capture and does not name the call.
void throw_if_in_capture(const char* what);
inline void refuse_in_capture(const char* what) {
  if (somebody_captures()) throw_if_in_capture(what);
}

// If the stream is captured, tells the capture that its graph uses the tensor's memory. The graph
// keeps it alive, and refuses to replay if the tensor has moved.
void hold_in_capture(const at::Tensor& tensor, c10::cuda::CUDAStream stream);
void hold_in_capture(const at::Tensor& tensor);
// Tells the capture that the memory was made in it. Tensors that the capture already holds are
// skipped: they are views of existing memory.
void made_in_capture(const at::Tensor& tensor);
// Tells the capture that a storage without memory was given memory in it. The capture may already
// hold tensors of that storage.
void allocated_in_capture(const at::Tensor& tensor);
// In a capture, throws CAPTURE for a tensor on a GPU whose memory is older than the capture, and
// for any tensor if the current stream of its device is not captured.
void require_own_memory_in_capture(const at::Tensor& tensor, const char* what);
// Throws the error of a capture that made memory on another GPU.
[[noreturn]] void throw_made_elsewhere();
// Tells the capture that it draws from the generator, which belongs to the device. The first time,
// calls begin with CUDA's number for the capture.
void generator_in_capture(const std::shared_ptr<Randomness>& generator, c10::DeviceIndex device,
                          const std::function<void(unsigned long long)>& begin);
// Tells the capture that its replays use the event.
void event_in_capture(const std::shared_ptr<ts_event>& event, c10::cuda::CUDAStream stream);
// Tells the capture that its graph must not be replayed once the flag is set: the weights of a
// model that it uses have been replaced.
void stale_in_capture(std::shared_ptr<const std::atomic<bool>> retired,
                      c10::cuda::CUDAStream stream);
// Tells the capture that it uses gradients.
void gradients_in_capture();

// Watches a call that may invalidate a capture. If such a call throws and the capture is then
// invalid, the error at the capture's end names the first such call.
class CaptureWatch {
 public:
  explicit CaptureWatch(const char* call)
      : call_(somebody_captures() ? call : nullptr), exceptions_(std::uncaught_exceptions()) {}
  ~CaptureWatch() {
    if (call_ != nullptr && std::uncaught_exceptions() > exceptions_) blame();
  }
  CaptureWatch(const CaptureWatch&) = delete;
  CaptureWatch& operator=(const CaptureWatch&) = delete;

 private:
  void blame() const noexcept;

  const char* call_;
  int exceptions_;
};

// Held by calls for which CUDA invalidates any capture in the process: waiting for a whole device,
// and returning memory to the driver. They wait for a capture to end, and a capture waits for them.
std::shared_lock<std::shared_mutex> wait_for_no_capture();

// Held by an operator that draws random numbers, while it runs outside a capture. A capture owns
// the generators, and LibTorch refuses to draw on other threads until it ends. The result is BUSY.
// It does not wait, because the capture may need something that the caller holds.
class RandomTurn {
 public:
  RandomTurn();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace ts
