// What depends on the CUDA that the library is built with, or on its absence: cuda/toolkit.cc, or
// nocuda/absent.cc.
#pragma once

#include <cstdint>
#include <string>

namespace ts {

// Says why there is no usable GPU: "this machine has no NVIDIA driver, ...".
std::string why_no_gpu();

// Returns the maximum share of a multiprocessor's threads that blocks with so many threads,
// registers a thread and bytes of shared memory hold at once; 0 if the calculator does not know.
double occupancy(int32_t device, int32_t threads, int32_t registers, int32_t shared_bytes);

}  // namespace ts
