// The order between replays that share memory.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <optional>

namespace ts {

// Orders work on one stream after earlier work on others.
class ReplayOrder {
 public:
  ReplayOrder() = default;
  ~ReplayOrder() {
    if (event_ != nullptr) C10_CUDA_IGNORE_ERROR(cudaEventDestroy(event_));
  }
  ReplayOrder(const ReplayOrder&) = delete;
  ReplayOrder& operator=(const ReplayOrder&) = delete;

  void before(c10::cuda::CUDAStream stream) {
    if (last_.has_value() && number(stream) != number_) {
      C10_CUDA_CHECK(cudaStreamWaitEvent(stream.stream(), event_, cudaEventWaitDefault));
    }
  }
  void after(c10::cuda::CUDAStream stream) {
    if (event_ == nullptr) {
      C10_CUDA_CHECK(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    }
    C10_CUDA_CHECK(cudaEventRecord(event_, stream.stream()));
    last_ = stream;
    number_ = number(stream);
  }
  // Returns the stream of the latest work, or nothing if the work is done or the device is lost.
  std::optional<c10::cuda::CUDAStream> unfinished() const {
    if (!last_.has_value()) return std::nullopt;
    // Querying an event from before the capture does not harm the capture, on any thread.
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    const cudaError_t status = cudaEventQuery(event_);
    if (status == cudaSuccess) return std::nullopt;
    C10_CUDA_CLEAR_ERROR();
    return status == cudaErrorNotReady ? last_ : std::nullopt;
  }
  void wait() const {
    const c10::cuda::CUDAStreamCaptureModeGuard relaxed{cudaStreamCaptureModeRelaxed};
    C10_CUDA_CHECK(cudaEventSynchronize(event_));
  }

 private:
  // CUDA may give a new stream the address of a destroyed one whose work is not done yet, but never
  // its number.
  static unsigned long long number(c10::cuda::CUDAStream stream) {
    unsigned long long id = 0;
    C10_CUDA_CHECK(cudaStreamGetId(stream.stream(), &id));
    return id;
  }

  cudaEvent_t event_ = nullptr;
  std::optional<c10::cuda::CUDAStream> last_;
  unsigned long long number_ = 0;  // of last_
};

}  // namespace ts
