// Where the work of a decoder or an inflater goes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "cuda/device.h"
#include "decode/inflate.h"
#include "decode/launch.h"
#include "torchstream.h"

namespace ts::decode {

// A stream of a GPU, whose device is current while the queue lives, or the host, where each piece
// of work is done when its call returns.
class Queue {
 public:
  // A stream whose device is TS_DEVICE_CPU stands for the host. CAPTURE if the stream is captured.
  explicit Queue(ts_stream stream);
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  int32_t device() const { return device_; }
  // Keeps a tensor's memory, which may be freed after the call, until the work that is enqueued
  // before is done.
  void keep(const at::Tensor& memory) const;
  void copy_in(void* device_memory, const void* host_memory, size_t bytes) const;
  void copy_out(void* host_memory, const void* device_memory, size_t bytes) const;
  void zero(void* device_memory, size_t bytes) const;
  void launch(Stage stage, const Work& work) const;
  void launch(const InflateWork& work) const;
  void launch(const GatherWork& work) const;

 private:
  int32_t device_;
  std::optional<c10::cuda::CUDAStream> stream_;
  std::optional<DeviceScope> scope_;
};

// Readies LibTorch for allocations on the device: a GPU, or TS_DEVICE_CPU. NO_DEVICE if there is no
// such GPU. CAPTURE, with `what` in the message, if the thread captures a graph.
void ready_device(int32_t device, const char* what);

// Allocates memory on a device that is ready.
at::Tensor memory_on(int32_t device, size_t bytes);

}  // namespace ts::decode
