// Bytes of several kinds, and zlib's deflate streams of them.
#pragma once

#include <gtest/gtest.h>
#include <zlib.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <vector>

namespace streams {

using Bytes = std::vector<uint8_t>;

inline Bytes deflated(const Bytes& data, int level, int strategy, int memory = 8) {
  z_stream z{};
  EXPECT_EQ(deflateInit2(&z, level, Z_DEFLATED, -15, memory, strategy), Z_OK);
  Bytes out(deflateBound(&z, data.size()) + 64);
  z.next_in = const_cast<uint8_t*>(data.data());
  z.avail_in = static_cast<uInt>(data.size());
  z.next_out = out.data();
  z.avail_out = static_cast<uInt>(out.size());
  EXPECT_EQ(deflate(&z, Z_FINISH), Z_STREAM_END);
  out.resize(z.total_out);
  deflateEnd(&z);
  return out;
}

inline Bytes random_bytes(std::mt19937* rng, size_t n, int kind) {
  Bytes b(n);
  switch (kind) {
    case 0:  // incompressible
      for (auto& x : b) x = static_cast<uint8_t>((*rng)());
      break;
    case 1:  // text-like, with far repeats
      for (size_t i = 0; i < n; ++i) {
        const size_t back = 1 + (*rng)() % 33000;
        b[i] =
            i > back && (*rng)() % 4 != 0 ? b[i - back] : static_cast<uint8_t>('a' + (*rng)() % 20);
      }
      break;
    case 2:  // long repeats at all distances
      for (size_t i = 0; i < n;) {
        const size_t back = (*rng)() % 3 == 0 ? 1 + (*rng)() % 20 : 1 + (*rng)() % 32768;
        const size_t length = 3 + (*rng)() % 400;
        for (size_t k = 0; k < length && i < n; ++k, ++i) {
          b[i] = i >= back ? b[i - back] : static_cast<uint8_t>((*rng)());
        }
        if (i < n) b[i++] = static_cast<uint8_t>((*rng)());
      }
      break;
    case 3:  // like the bytes of a photograph: unevenly distributed literals
      for (auto& x : b) x = static_cast<uint8_t>((*rng)() & ((*rng)() | 0x3f));
      break;
    default:  // a single value
      std::fill(b.begin(), b.end(), uint8_t{7});
  }
  return b;
}

}  // namespace streams
