// The steps of libtorchstream's functions before they use LibTorch, done by its exported functions.
#pragma once

#include <ATen/Context.h>
#include <c10/core/Device.h>

#include <cstdint>

#include "base/error.h"
#include "torchstream.h"

namespace ts::lab {

// Enters LibTorch, as every call that uses it does: LibTorch's warnings stay off the thread.
inline void enter() { static_cast<void>(ts_parallelism()); }

// Throws NO_DEVICE unless `device` is the index of a GPU. Initialises LibTorch for it.
inline void require_gpu(int32_t device) {
  ts_device_info info{};
  info.size = sizeof info;
  if (ts_error* const error = ts_device_get_info(device, &info)) throw_error(error);
  at::globalContext().lazyInitDevice(c10::DeviceType::CUDA);
}

// Returns the device of the header's index, TS_DEVICE_CPU included. Throws NO_DEVICE for a device
// that does not exist.
inline c10::Device checked_device(int32_t device) {
  if (device == TS_DEVICE_CPU) return c10::Device(c10::DeviceType::CPU);
  require_gpu(device);
  return c10::Device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
}

}  // namespace ts::lab
