// Host time of calls, for the measurements of torchstream-lab.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>

#include <chrono>
#include <cstdint>

#include "cuda/device.h"

namespace ts {

inline void finish(c10::Device device) {
  if (!device.is_cuda()) return;
  const DeviceScope scope(device.index());
  c10::cuda::device_synchronize();
}

// Returns nanoseconds for each call on the host. The device has nothing queued at the start; its
// unfinished work at the end is not counted.
template <typename Call>
double host_nanoseconds(c10::Device device, int32_t rounds, Call&& call) {
  constexpr int32_t kWarm = 100;
  for (int32_t i = 0; i < kWarm; ++i) call();
  finish(device);
  const auto start = std::chrono::steady_clock::now();
  for (int32_t i = 0; i < rounds; ++i) call();
  const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - start;
  finish(device);
  return took.count() / rounds;
}

}  // namespace ts
