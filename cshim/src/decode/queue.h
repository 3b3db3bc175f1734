// The destination of a decoder's or inflater's work.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/device.h"
#include "decode/inflate.h"
#include "decode/launch.h"
#include "decode/read.h"
#include "torchstream.h"

namespace ts::decode {

// A GPU's stream, whose device is current while the queue exists, or the host, which does each
// piece of work before the call returns.
class Queue {
 public:
  // A stream whose device is TS_DEVICE_CPU means the host. Throws CAPTURE if the stream is
  // captured.
  explicit Queue(ts_stream stream);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int32_t device() const { return device_; }
  // Keeps a tensor's memory, which may be freed after the call, until the work enqueued so far is
  // done.
  void keep(const at::Tensor& memory) const;
  void copy_in(void* device_memory, const void* host_memory, size_t bytes) const;
  void copy_out(void* host_memory, const void* device_memory, size_t bytes) const;
  void zero(void* device_memory, size_t bytes) const;
  void launch(Stage stage, const Work& work) const;
  void launch(const InflateWork& work) const;
  void launch(const GatherWork& work) const;
  void launch(const ReadWork& work) const;

 private:
  int32_t device_;
  std::optional<c10::cuda::CUDAStream> stream_;
  std::optional<DeviceScope> scope_;
};

// Initialises LibTorch for allocations on the device: a GPU, or TS_DEVICE_CPU. Throws NO_DEVICE if
// there is no such GPU, and CAPTURE, with `what` in the message, if the thread captures a graph.
void ready_device(int32_t device, const char* what);

// Allocates memory on a device that is ready.
at::Tensor memory_on(int32_t device, size_t bytes);

}  // namespace ts::decode
