// What depends on the CUDA that the library is built with, or on its absence: cuda/toolkit.cc, or
// nocuda/absent.cc.
#pragma once

#include <string>

namespace ts {

// Says why there is no usable GPU: "this machine has no NVIDIA driver, ...".
std::string why_no_gpu();

}  // namespace ts
