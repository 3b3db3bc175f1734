// The dequantisation and the inverse DCT of libjpeg-turbo's JDCT_ISLOW, as its SIMD code for x86
// computes them (simd/x86_64/jidctint-avx2.asm). In range they are those of jidctint.c. Out of
// range, which only absurd coefficients reach, 16-bit values wrap and saturate where they do there.
#pragma once

#include <cstdint>

#include "jpeg/target.h"

namespace ts::jpeg {

TS_HOST_DEVICE int32_t wrap16(int32_t value) {
  return static_cast<int16_t>(static_cast<uint32_t>(value) & 0xFFFF);
}

TS_HOST_DEVICE int32_t dequantise(int16_t coefficient, uint16_t quantiser) {
  return static_cast<int16_t>(static_cast<uint32_t>(static_cast<int32_t>(coefficient)) * quantiser &
                              0xFFFF);
}

constexpr int kFirstPass = 11;   // the bits that the columns' pass drops
constexpr int kSecondPass = 18;  // the bits that the rows' pass drops

// Transforms eight values of 16 bits in place, and drops `shift` bits. No sum reaches 2^31.
TS_HOST_DEVICE void idct8(int32_t v[8], int shift) {
  // Fixed-point constants with 13 bits behind the point.
  constexpr int32_t k0298 = 2446, k0390 = 3196, k0541 = 4433, k0765 = 6270, k0899 = 7373,
                    k1175 = 9633, k1501 = 12299, k1847 = 15137, k1961 = 16069, k2053 = 16819,
                    k2562 = 20995, k3072 = 25172;
  const int32_t even2 = v[2] * k0541 + v[6] * (k0541 - k1847);
  const int32_t even3 = v[2] * (k0541 + k0765) + v[6] * k0541;
  const int32_t even0 = wrap16(v[0] + v[4]) * (1 << 13);
  const int32_t even1 = wrap16(v[0] - v[4]) * (1 << 13);
  const int32_t sum0 = even0 + even3;
  const int32_t sum3 = even0 - even3;
  const int32_t sum1 = even1 + even2;
  const int32_t sum2 = even1 - even2;

  const int32_t z3 = wrap16(v[7] + v[3]);
  const int32_t z4 = wrap16(v[5] + v[1]);
  const int32_t z3z = z3 * (k1175 - k1961) + z4 * k1175;
  const int32_t z4z = z3 * k1175 + z4 * (k1175 - k0390);
  const int32_t odd0 = v[7] * (k0298 - k0899) - v[1] * k0899 + z3z;
  const int32_t odd1 = v[5] * (k2053 - k2562) - v[3] * k2562 + z4z;
  const int32_t odd2 = v[3] * (k3072 - k2562) - v[5] * k2562 + z3z;
  const int32_t odd3 = v[1] * (k1501 - k0899) - v[7] * k0899 + z4z;

  const int32_t half = 1 << (shift - 1);
  const int32_t out[8] = {sum0 + odd3, sum1 + odd2, sum2 + odd1, sum3 + odd0,
                          sum3 - odd0, sum2 - odd1, sum1 - odd2, sum0 - odd3};
  for (int i = 0; i < 8; ++i) v[i] = clamped((out[i] + half) >> shift, -32768, 32767);
}

// Returns what the columns' pass makes of a column in a block without AC coefficients in rows 1 to
// 7: eight times this value. The SIMD code leaves the pass out, which differs only by its overflow.
TS_HOST_DEVICE int32_t flat_column(int32_t value) { return wrap16(value * (1 << 2)); }

TS_HOST_DEVICE uint8_t sample_of(int32_t value) {
  return static_cast<uint8_t>(clamped(value, -128, 127) + 128);
}

// Transforms one block. `out` has eight rows, stride bytes apart. The device's kernel does the same
// with eight threads.
inline void idct_block(const int16_t coefficients[64], const uint16_t quantisers[64], uint8_t* out,
                       uint32_t stride) {
  int32_t values[8][8];
  int32_t any = 0;
  for (int i = 8; i < 64; ++i) any |= coefficients[i];
  for (int x = 0; x < 8; ++x) {
    int32_t column[8];
    for (int y = 0; y < 8; ++y) {
      column[y] = dequantise(coefficients[y * 8 + x], quantisers[y * 8 + x]);
    }
    if (any == 0) {
      for (int y = 1; y < 8; ++y) column[y] = flat_column(column[0]);
      column[0] = flat_column(column[0]);
    } else {
      idct8(column, kFirstPass);
    }
    for (int y = 0; y < 8; ++y) values[y][x] = column[y];
  }
  for (int y = 0; y < 8; ++y) {
    idct8(values[y], kSecondPass);
    for (int x = 0; x < 8; ++x)
      out[static_cast<uint32_t>(y) * stride + x] = sample_of(values[y][x]);
  }
}

}  // namespace ts::jpeg
