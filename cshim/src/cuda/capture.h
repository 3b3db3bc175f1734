// The capture registry: whether a graph is being captured, by whom, and what every other part of
// the shim may do meanwhile. At most one capture is under way in the process. The graph itself is
// in graph.cc, which opens and closes the registry's one entry.
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

// Whether a capture is under way in the process. While there is none, in_capture,
// require_in_capture_of, refuse_in_capture, CaptureWatch and the functions that tell the capture
// something cost one load of it; is_capturing and require_no_capture always ask CUDA, since other
// code of the process may capture too.
extern std::atomic<bool> capture_under_way;
inline bool somebody_captures() noexcept {
  return __builtin_expect(capture_under_way.load(std::memory_order_acquire), 0);
}

// The number of the latest capture, from 1 on: that of the one under way, while there is one.
extern std::atomic<uint64_t> captures_begun;
inline uint64_t latest_capture() noexcept { return captures_begun.load(std::memory_order_acquire); }

// A tensor from before the capture that the graph works on.
struct Held {
  at::Tensor tensor;
  c10::intrusive_ptr<c10::StorageImpl> storage;  // the memory that the tensor had then
  const void* data;
  at::Tensor gradient;  // at the capture's end
  bool allocated;       // the storage had no memory, and was given the graph's
};

class Randomness;  // cuda/randomness.h

// What a capture learns from all threads that take part in it. The registry's lock guards it from
// open_capture to close_capture; afterwards only its owner changes it.
struct CaptureRecord {
  explicit CaptureRecord(c10::cuda::CUDAStream on) : stream(on) {}
  CaptureRecord(const CaptureRecord&) = delete;
  CaptureRecord& operator=(const CaptureRecord&) = delete;

  // Whether the stream takes part in this capture. Needs no lock.
  bool has(cudaStream_t candidate) const;
  // Notes that the stream takes part. Its workspaces are those of work that is not captured, which
  // a replay on another stream would overwrite: captured work gets new ones.
  void add_stream(cudaStream_t stream);

  const c10::cuda::CUDAStream stream;     // the capture's first one
  std::atomic<unsigned long long> id{0};  // CUDA's number of the capture; 0 before its begin
  std::vector<Held> held;
  std::unordered_set<c10::TensorImpl*> known;  // the tensors of held
  std::unordered_map<c10::StorageImpl*, c10::weak_intrusive_ptr<c10::StorageImpl>> made;
  std::set<void*> streams;
  std::vector<std::shared_ptr<Randomness>> generators;  // that the graph draws from
  std::vector<std::shared_ptr<ts_event>> events;        // that its replays record or wait for
  bool gradients = false;
  bool made_elsewhere = false;      // memory was made on another GPU
  const char* broken_by = nullptr;  // the first call that broke the capture
};

// Returns the exclusive right to capture. Blocks until the capture under way ends.
std::unique_lock<std::shared_mutex> take_capture_turn();

// Registers the record, borrowed until close_capture, as the calling thread's capture. The caller
// holds the turn.
void open_capture(CaptureRecord& record);
// Unregisters the record: other threads add nothing to it afterwards. Called on the thread that
// opened it, any number of times.
void close_capture() noexcept;

// Whether the calling thread makes the capture under way.
bool this_thread_captures() noexcept;

// The capture that a stream takes part in, and CUDA's number of it.
cudaStreamCaptureStatus capture_status(cudaStream_t stream, unsigned long long* id);

// Whether what the calling thread enqueues on its current stream is captured.
bool in_capture();
// Whether what is enqueued on the stream is captured.
bool in_capture(c10::cuda::CUDAStream stream);

bool is_capturing(c10::cuda::CUDAStream stream);

// CAPTURE while the stream is captured. CUDA refuses such calls too, but breaks the capture.
inline void require_no_capture(c10::cuda::CUDAStream stream) {
  if (!is_capturing(stream)) return;
  throw Failure(TS_ERROR_CAPTURE, "the stream is being captured: nothing runs on it now");
}

// CAPTURE if the waiter is captured and the other stream is not, which would end the capture.
void require_in_capture_of(c10::cuda::CUDAStream waiter, c10::cuda::CUDAStream on);

// CAPTURE if the thread captures, or its current stream is captured: for calls that make the host
// wait for the device, or give memory back to the driver. CUDA refuses them too, but breaks the
// capture and does not name the call.
void throw_if_in_capture(const char* what);
inline void refuse_in_capture(const char* what) {
  if (somebody_captures()) throw_if_in_capture(what);
}

// Tells the capture, if the stream is captured, that its graph works on the tensor's memory: the
// graph keeps it alive, and refuses to replay after the tensor has moved.
void hold_in_capture(const at::Tensor& tensor, c10::cuda::CUDAStream stream);
void hold_in_capture(const at::Tensor& tensor);
// Tells the capture that the memory was made in it. It leaves alone what it holds: such a tensor is
// a view of what was there.
void made_in_capture(const at::Tensor& tensor);
// Tells the capture that a storage without memory was given some in it. The capture may hold
// tensors of that storage.
void allocated_in_capture(const at::Tensor& tensor);
// CAPTURE, in a capture, for a tensor on a GPU that has memory from before it, and for any tensor
// if the current stream of its device is not captured.
void require_own_memory_in_capture(const at::Tensor& tensor, const char* what);
// The error of a capture that made memory on another GPU.
[[noreturn]] void throw_made_elsewhere();
// Tells the capture that it draws from the generator, which belongs to the device. Calls begin with
// CUDA's number of the capture the first time.
void generator_in_capture(const std::shared_ptr<Randomness>& generator, c10::DeviceIndex device,
                          const std::function<void(unsigned long long)>& begin);
// Tells the capture that its replays use the event.
void event_in_capture(const std::shared_ptr<ts_event>& event, c10::cuda::CUDAStream stream);
// Tells the capture that it works on gradients.
void gradients_in_capture();

// Watches a call that may break a capture. The first such call that throws and leaves the capture
// broken is named in the error of the capture's end.
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

// Held by calls for which CUDA breaks any capture in the process: waiting for a whole device, and
// giving memory back to the driver. They wait for the capture's end, and a capture waits for
// theirs.
std::shared_lock<std::shared_mutex> wait_for_no_capture();

// Held by an operator that draws random numbers while it runs outside of a capture. A capture owns
// the generators, and LibTorch refuses numbers to all other threads until its end: BUSY. It does
// not wait, because the capture may need what the caller holds.
class RandomTurn {
 public:
  RandomTurn();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace ts
