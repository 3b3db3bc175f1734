// What the other parts of the shim ask of the capture that is under way: at most one in the
// process.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <atomic>
#include <exception>
#include <shared_mutex>
#include <string>

namespace ts {

// Whether a capture is under way in the process. Everything here is behind this one load.
extern std::atomic<bool> capture_under_way;
inline bool somebody_captures() noexcept {
  return __builtin_expect(capture_under_way.load(std::memory_order_acquire), 0);
}

// The number of the latest capture, from 1 on: that of the one under way, if somebody captures.
extern std::atomic<uint64_t> captures_begun;
inline uint64_t latest_capture() noexcept { return captures_begun.load(std::memory_order_acquire); }

// Whether what the calling thread enqueues on its current stream is captured.
bool in_capture();
// Whether what is enqueued on the stream is captured.
bool in_capture(c10::cuda::CUDAStream stream);

// CAPTURE if the thread captures, or its current stream is captured: for calls that make the host
// wait for the device, or give memory back to the driver. CUDA refuses them too, but breaks the
// capture with it, and does not say which call it was.
void throw_if_in_capture(const char* what);
inline void refuse_in_capture(const char* what) {
  if (somebody_captures()) throw_if_in_capture(what);
}

// Tells the capture, if the stream is captured, that its graph works on the tensor's memory: the
// graph keeps it alive, and is not replayed when the tensor has come to lie elsewhere.
void hold_in_capture(const at::Tensor& tensor, c10::cuda::CUDAStream stream);
void hold_in_capture(const at::Tensor& tensor);
// Tells the capture that the memory was made in it.
void made_in_capture(const at::Tensor& tensor);
// Tells the capture that it works on gradients.
void gradients_in_capture();

// Around a call that may break a capture: the first that throws and leaves the capture broken is
// named in the error that ends it.
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

// Held by calls that CUDA refuses during any capture in the process, and breaks it for: waiting for
// a whole device, and giving memory back to the driver. They wait for the capture's end, and a
// capture for theirs.
std::shared_lock<std::shared_mutex> wait_for_no_capture();

// Held by an operator that draws random numbers while it runs outside of a capture. A capture takes
// the generators for itself, and LibTorch refuses everybody else's numbers until its end: BUSY
// then. Not a wait, since the capture may need what the caller holds.
class RandomTurn {
 public:
  RandomTurn();

 private:
  std::shared_lock<std::shared_mutex> lock_;
};

}  // namespace ts
