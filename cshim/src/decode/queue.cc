#include "decode/queue.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <cstring>

#include "cuda/allocator.h"
#include "cuda/capture.h"
#include "cuda/storage.h"
#include "cuda/stream.h"
#include "decode/host.h"

namespace ts::decode {

Queue::Queue(ts_stream stream) : device_(stream.device) {
  if (device_ == TS_DEVICE_CPU) return;
  stream_ = checked_stream(stream);
  require_no_capture(*stream_);
  scope_.emplace(device_);
}

void Queue::keep(const at::Tensor& memory) const {
  if (!stream_) return;
  record_use(storage_of(memory), *stream_);
}

void Queue::copy_in(void* device_memory, const void* host_memory, size_t bytes) const {
  if (!stream_) {
    std::memcpy(device_memory, host_memory, bytes);
    return;
  }
  C10_CUDA_CHECK(cudaMemcpyAsync(device_memory, host_memory, bytes, cudaMemcpyHostToDevice,
                                 stream_->stream()));
}

void Queue::copy_out(void* host_memory, const void* device_memory, size_t bytes) const {
  if (!stream_) {
    std::memcpy(host_memory, device_memory, bytes);
    return;
  }
  C10_CUDA_CHECK(cudaMemcpyAsync(host_memory, device_memory, bytes, cudaMemcpyDeviceToHost,
                                 stream_->stream()));
}

void Queue::zero(void* device_memory, size_t bytes) const {
  if (!stream_) {
    std::memset(device_memory, 0, bytes);
    return;
  }
  C10_CUDA_CHECK(cudaMemsetAsync(device_memory, 0, bytes, stream_->stream()));
}

void Queue::launch(Stage stage, const Work& work) const {
  if (!stream_) {
    run_on_host(stage, work);
    return;
  }
  C10_CUDA_CHECK(decode::launch(stage, work, stream_->stream()));
}

void Queue::launch(const InflateWork& work) const {
  if (!stream_) {
    run_on_host(work);
    return;
  }
  C10_CUDA_CHECK(decode::launch(work, stream_->stream()));
}

void Queue::launch(const GatherWork& work) const {
  if (!stream_) {
    run_on_host(work);
    return;
  }
  C10_CUDA_CHECK(decode::launch(work, stream_->stream()));
}

void Queue::launch(const ReadWork& work) const {
  if (!stream_) {
    run_on_host(work);
    return;
  }
  C10_CUDA_CHECK(decode::launch(work, stream_->stream()));
}

at::Tensor memory_on(int32_t device, size_t bytes) {
  return at::empty({static_cast<int64_t>(bytes)},
                   at::TensorOptions().dtype(at::ScalarType::Byte).device(checked_device(device)));
}

void ready_device(int32_t device, const char* what) {
  if (device == TS_DEVICE_CPU) return;
  require_device(device);
  refuse_in_capture(what);
  ensure_cuda();
}

}  // namespace ts::decode
