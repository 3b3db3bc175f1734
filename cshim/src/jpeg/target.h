// Small functions for the host and the device.
#pragma once

#include <cstdint>
#include <cstring>

#include "base/target.h"

namespace ts::jpeg {

template <typename T>
TS_HOST_DEVICE T smaller(T a, T b) {
  return b < a ? b : a;
}

template <typename T>
TS_HOST_DEVICE T larger(T a, T b) {
  return a < b ? b : a;
}

TS_HOST_DEVICE int32_t clamped(int32_t value, int32_t low, int32_t high) {
  return value < low ? low : value > high ? high : value;
}

// Returns the upper half of a product.
TS_HOST_DEVICE uint32_t high_product(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__)
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

// Arithmetic whose rounding is part of a result. nvcc fuses a product and a sum unless the
// intrinsics forbid it.
TS_HOST_DEVICE double multiply(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dmul_rn(a, b);
#else
  return a * b;
#endif
}

TS_HOST_DEVICE double add(double a, double b) {
#if defined(__CUDA_ARCH__)
  return __dadd_rn(a, b);
#else
  return a + b;
#endif
}

}  // namespace ts::jpeg
