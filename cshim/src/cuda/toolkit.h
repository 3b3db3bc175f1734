// Functions that depend on the CUDA that the library is built with: cuda/toolkit.cc, or
// nocuda/absent.cc without CUDA.
#pragma once

#include <cstdint>
#include <string>

namespace ts {

// Says why there is no usable GPU: "this machine has no NVIDIA driver, ...".
std::string why_no_gpu();

// Returns the maximum share of a multiprocessor's threads that blocks of this size can occupy at
// once; 0 if the calculator does not know. registers: for each thread. shared_bytes: for each
// block.
double occupancy(int32_t device, int32_t threads, int32_t registers, int32_t shared_bytes);

}  // namespace ts
