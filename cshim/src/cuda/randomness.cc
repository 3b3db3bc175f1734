#include "cuda/randomness.h"

#include <ATen/ops/empty.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAMacros.h>
#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <utility>

#include "cuda/capture.h"

namespace ts {

const std::shared_ptr<Randomness>& Randomness::of(c10::DeviceIndex device) {
  static auto* all = new std::array<std::shared_ptr<Randomness>, C10_COMPILE_TIME_MAX_GPUS>;
  static auto* mutex = new std::mutex;  // neither destroyed: threads may outlive main
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& mine = (*all)[static_cast<size_t>(device)];
  if (mine == nullptr) {
    mine = std::make_shared<Randomness>(at::cuda::detail::getDefaultCUDAGenerator(device));
  }
  return mine;
}

Randomness::Randomness(at::Generator generator) : generator_(std::move(generator)) {
  const c10::cuda::CUDAStreamGuard guard(c10::cuda::getDefaultCUDAStream(device()));
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  // Next to each other, so that a replay needs one copy.
  inputs_ = at::empty({2}, at::TensorOptions().dtype(at::kLong).device(at::kCUDA, device()));
  state_.emplace(generator_, inputs_.narrow(0, 0, 1), inputs_.narrow(0, 1, 1));
}

void Randomness::begin(unsigned long long capture) {
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  state_->begin_capture(capture);
}

uint64_t Randomness::end() {
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  return (state_->end_capture() + 3) / 4 * 4;
}

void Randomness::draw(c10::cuda::CUDAStream stream, uint64_t increment,
                      c10::function_ref<void()> launch) {
  const std::lock_guard<std::mutex> lock(generator_.mutex());
  const uint64_t inputs[2] = {state_->seed(), state_->offset()};
  order_.before(stream);  // the previous replay reads the memory that is written here
  // From pageable memory: the driver has copied the 16 bytes when this returns.
  C10_CUDA_CHECK(cudaMemcpyAsync(inputs_.mutable_data_ptr(), inputs, sizeof inputs,
                                 cudaMemcpyHostToDevice, stream.stream()));
  launch();
  state_->advance(increment);
  order_.after(stream);
}

void draw_in_capture(const std::shared_ptr<Randomness>& randomness) {
  generator_in_capture(randomness, randomness->device(),
                       [&](unsigned long long capture) { randomness->begin(capture); });
}

}  // namespace ts
