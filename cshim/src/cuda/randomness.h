// Random numbers in graphs. Captured kernels read seed and offset from device memory that belongs
// to their generator, and a replay moves the generator on.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/core/StorageImpl.h>
#include <c10/cuda/CUDAException.h>
#include <c10/util/intrusive_ptr.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <mutex>

#include "cuda/replay_order.h"

namespace ts {

class Randomness {
 public:
  // Returns that of the device's default generator, which is never destroyed.
  static const std::shared_ptr<Randomness>& of(c10::DeviceIndex device);

  // Allocates on the device: not while the calling thread captures.
  explicit Randomness(at::Generator generator);
  Randomness(const Randomness&) = delete;
  Randomness& operator=(const Randomness&) = delete;

  c10::DeviceIndex device() const { return generator_.device().index(); }
  // Called at the begin of a capture that draws from the generator.
  void begin();
  // Called at its end. Returns how far a replay moves the generator.
  uint64_t end();
  // Runs launch with the generator's numbers, and moves it on.
  template <typename Launch>
  void draw(c10::cuda::CUDAStream stream, uint64_t increment, Launch&& launch) {
    const std::lock_guard<std::mutex> lock(generator_.mutex());
    const uint64_t inputs[2] = {state_->seed_, state_->philox_offset_per_thread_};
    order_.before(stream);  // the replay before this one reads what is written here
    // From pageable memory: the driver has taken the 16 bytes when this returns.
    C10_CUDA_CHECK(cudaMemcpyAsync(inputs_.mutable_data_ptr(), inputs, sizeof inputs,
                                   cudaMemcpyHostToDevice, stream.stream()));
    launch();
    state_->philox_offset_per_thread_ += increment;
    order_.after(stream);
  }
  // The memory that replays read.
  const at::Tensor& inputs() const { return inputs_; }

 private:
  struct Anchor : at::cuda::CUDAGraph {
    c10::intrusive_ptr<at::CUDAGeneratorState> state() const {
      return captured_generator_states_.begin()->first;
    }
  };

  at::Generator generator_;
  Anchor anchor_;
  c10::intrusive_ptr<at::CUDAGeneratorState> state_;
  at::Tensor inputs_;
  ReplayOrder order_;  // guarded by the generator's mutex
};

// Makes the capture under way, if the calling thread takes part in it, own the generator's numbers.
// CAPTURE if the generator belongs to another GPU.
void draw_in_capture(const std::shared_ptr<Randomness>& randomness);

}  // namespace ts
