// Random numbers in graphs. Captured kernels read seed and offset from device memory that belongs
// to their generator, and a replay advances the generator.
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
  // Returns the Randomness of the device's default generator, which is never destroyed.
  static const std::shared_ptr<Randomness>& of(c10::DeviceIndex device);

  // Allocates on the device, so the calling thread must not be capturing.
  explicit Randomness(at::Generator generator);
  Randomness(const Randomness&) = delete;
  Randomness& operator=(const Randomness&) = delete;

  c10::DeviceIndex device() const { return generator_.device().index(); }
  // Called when a capture first draws from the generator, with CUDA's number for the capture.
  void begin(unsigned long long capture);
  // Called at the end of the capture. Returns how far a replay advances the generator.
  uint64_t end();
  // Runs launch with the generator's numbers, and advances the generator.
  void draw(c10::cuda::CUDAStream stream, uint64_t increment, c10::function_ref<void()> launch);
  // The memory that replays read.
  const at::Tensor& inputs() const { return inputs_; }

 private:
  at::Generator generator_;
  at::Tensor inputs_;
  std::optional<GeneratorState> state_;  // has a value once the constructor returns
  ReplayOrder order_;                    // guarded by the generator's mutex
};

// Makes the running capture, if the calling thread takes part in it, own the generator's numbers.
// Throws CAPTURE if the generator belongs to another GPU.
void draw_in_capture(const std::shared_ptr<Randomness>& randomness);

}  // namespace ts
