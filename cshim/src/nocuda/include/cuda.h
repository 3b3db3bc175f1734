// What this library and LibTorch's headers name of CUDA's driver interface, for a build without
// CUDA.
#pragma once

#include <cstddef>

#define CUDA_VERSION 13000

using CUdeviceptr = unsigned long long;
enum CUresult { CUDA_SUCCESS = 0 };
extern "C" CUresult cuMemGetAddressRange(CUdeviceptr* begin, size_t* bytes, CUdeviceptr at);
