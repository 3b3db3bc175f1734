// Random numbers in graphs. Captured kernels read seed and offset from device memory that belongs
// to their generator, and a replay moves the generator on.
#pragma once

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <optional>

#include "cuda/libtorch_version.h"
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
  // Called at the begin of a capture that draws from the generator, with CUDA's number of it.
  void begin(unsigned long long capture);
  // Called at its end. Returns how far a replay moves the generator.
  uint64_t end();
  // Runs launch with the generator's numbers, and moves it on.
  void draw(c10::cuda::CUDAStream stream, uint64_t increment, c10::function_ref<void()> launch);
  // The memory that replays read.
  const at::Tensor& inputs() const { return inputs_; }

 private:
  at::Generator generator_;
  at::Tensor inputs_;
  std::optional<GeneratorState> state_;  // always one, once this is made
  ReplayOrder order_;                    // guarded by the generator's mutex
};

// Makes the capture under way, if the calling thread takes part in it, own the generator's numbers.
// CAPTURE if the generator belongs to another GPU.
void draw_in_capture(const std::shared_ptr<Randomness>& randomness);

}  // namespace ts
