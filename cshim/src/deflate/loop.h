// The team of deflate/parallel.h on the host.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "deflate/parallel.h"

namespace ts::deflate {

// Runs the threads one after the other, from one barrier to the next.
struct Loop {
  template <typename F>
  void each(F f) {
    for (uint32_t t = 0; t < kThreads; ++t) f(t);
  }
  template <typename F>
  bool any(F f) {
    bool any = false;
    for (uint32_t t = 0; t < kThreads; ++t) any = f(t) || any;
    return any;
  }
  template <typename F>
  uint32_t min(F f) {
    uint32_t min = UINT32_MAX;
    for (uint32_t t = 0; t < kThreads; ++t) min = std::min(min, f(t));
    return min;
  }
  template <typename Value, typename Use>
  void scan(Value value, Use use) {
    std::array<uint32_t, kThreads> values;
    for (uint32_t t = 0; t < kThreads; ++t) values[t] = value(t);
    for (uint32_t t = 0, sum = 0; t < kThreads; sum += values[t++]) use(t, sum);
  }
  template <typename T>
  T read(const T& v) {
    return v;
  }
};

}  // namespace ts::deflate
