// The dequantisation and the inverse DCT of libjpeg-turbo's JDCT_ISLOW, with the results of its
// SIMD code for x86 (simd/x86_64/jidctint-avx2.asm). Within range these are the results of
// jidctint.c. Out of range, which only absurd coefficients reach, 16-bit values wrap and saturate
// where they do in the SIMD code.
#pragma once

#include <cstdint>
#include <cstring>

#include "jpeg/target.h"

namespace ts::jpeg {

TS_HOST_DEVICE int32_t wrap16(int32_t value) {
  return static_cast<int16_t>(static_cast<uint32_t>(value) & 0xFFFF);
}

// Returns half of a word, a 16-bit number.
TS_HOST_DEVICE int32_t lower_half(uint32_t word) { return wrap16(static_cast<int32_t>(word)); }
TS_HOST_DEVICE int32_t upper_half(uint32_t word) { return static_cast<int32_t>(word) >> 16; }

// Multiplies the coefficients of a column by their quantisers. Each word has two of them.
TS_HOST_DEVICE void dequantise(const uint32_t coefficients[4], const uint32_t quantisers[4],
                               int32_t v[8]) {
  TS_UNROLL
  for (int i = 0; i < 4; ++i) {
    v[2 * i] = lower_half(coefficients[i] * quantisers[i]);
    v[2 * i + 1] = upper_half((coefficients[i] & 0xFFFF0000) * (quantisers[i] >> 16));
  }
}

constexpr int kFirstPass = 11;   // the bits that the columns' pass drops
constexpr int kSecondPass = 18;  // the bits that the rows' pass drops

// Transforms eight 16-bit values in place, and drops `shift` bits. No sum reaches 2^31. The results
// may have more than 16 bits.
TS_HOST_DEVICE void idct8(int32_t v[8], int shift) {
  // Fixed-point constants with 13 fractional bits.
  constexpr int32_t k0298 = 2446, k0390 = 3196, k0541 = 4433, k0765 = 6270, k0899 = 7373,
                    k1175 = 9633, k1501 = 12299, k1847 = 15137, k1961 = 16069, k2053 = 16819,
                    k2562 = 20995, k3072 = 25172;
  const int32_t even2 = v[2] * k0541 + v[6] * (k0541 - k1847);
  const int32_t even3 = v[2] * (k0541 + k0765) + v[6] * k0541;
  const int32_t half = 1 << (shift - 1);
  const int32_t even0 = wrap16(v[0] + v[4]) * (1 << 13) + half;
  const int32_t even1 = wrap16(v[0] - v[4]) * (1 << 13) + half;
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

  const int32_t out[8] = {sum0 + odd3, sum1 + odd2, sum2 + odd1, sum3 + odd0,
                          sum3 - odd0, sum2 - odd1, sum1 - odd2, sum0 - odd3};
  TS_UNROLL
  for (int i = 0; i < 8; ++i) v[i] = out[i] >> shift;
}

// Without AC coefficients in rows 1 to 7 of a block, the columns' pass multiplies each column's DC
// by four. The SIMD code skips the pass, which differs only in its overflow: skipping wraps, the
// pass saturates. So the bits that do not count are dropped before such a column's pass.
TS_HOST_DEVICE int32_t flat_column(int32_t value) {
  return static_cast<int32_t>(static_cast<uint32_t>(value) << 18) >> 18;
}
// Reports whether flat_column changes a value.
TS_HOST_DEVICE bool overflows_flat(int32_t value) {
  return static_cast<uint32_t>(value) + 8192 > 16383;
}
// Reports whether a column has coefficients in rows 1 to 7.
TS_HOST_DEVICE bool has_rows(const uint32_t coefficients[4]) {
  return ((coefficients[0] & 0xFFFF0000) | coefficients[1] | coefficients[2] | coefficients[3]) !=
         0;
}

// Packs two numbers into a word, each clamped to 16 bits.
TS_HOST_DEVICE uint32_t packed_halves(int32_t lower, int32_t upper) {
#if defined(__CUDA_ARCH__)
  uint32_t word;
  asm("cvt.pack.sat.s16.s32 %0, %1, %2;" : "=r"(word) : "r"(upper), "r"(lower));
  return word;
#else
  return (static_cast<uint32_t>(clamped(lower, -32768, 32767)) & 0xFFFF) |
         static_cast<uint32_t>(clamped(upper, -32768, 32767)) << 16;
#endif
}

// Packs four numbers into a word of samples: clamped to -128 to 127, plus 128.
TS_HOST_DEVICE uint32_t packed_samples(int32_t a, int32_t b, int32_t c, int32_t d) {
#if defined(__CUDA_ARCH__)
  uint32_t high, all;
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(high) : "r"(d), "r"(c), "r"(0));
  asm("cvt.pack.sat.s8.s32.b32 %0, %1, %2, %3;" : "=r"(all) : "r"(b), "r"(a), "r"(high));
  return all ^ 0x80808080;
#else
  const int32_t values[4] = {a, b, c, d};
  uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    word |= static_cast<uint32_t>(clamped(values[i], -128, 127) + 128) << (8 * i);
  }
  return word;
#endif
}

// Transforms a column of dequantised values. Each word receives two of the results.
TS_HOST_DEVICE void transform_column(int32_t v[8], uint32_t column[4]) {
  idct8(v, kFirstPass);
  TS_UNROLL
  for (int i = 0; i < 4; ++i) column[i] = packed_halves(v[2 * i], v[2 * i + 1]);
}

// Transforms a row of transform_column's results to eight samples.
TS_HOST_DEVICE void transform_row(int32_t v[8], uint32_t samples[2]) {
  idct8(v, kSecondPass);
  samples[0] = packed_samples(v[0], v[1], v[2], v[3]);
  samples[1] = packed_samples(v[4], v[5], v[6], v[7]);
}

// Transforms one block. `out` has eight rows, stride bytes apart. The device's kernel does the same
// with eight threads.
inline void idct_block(const int16_t coefficients[64], const uint16_t quantisers[64], uint8_t* out,
                       uint32_t stride) {
  uint32_t columns[8][4];
  bool flat = true;
  for (int x = 0; x < 8; ++x) {
    std::memcpy(columns[x], coefficients + 8 * x, sizeof columns[x]);
    flat = flat && !has_rows(columns[x]);
  }
  for (int x = 0; x < 8; ++x) {
    uint32_t quantiser[4];
    std::memcpy(quantiser, quantisers + 8 * x, sizeof quantiser);
    int32_t v[8];
    dequantise(columns[x], quantiser, v);
    if (flat) v[0] = flat_column(v[0]);
    transform_column(v, columns[x]);
  }
  for (int y = 0; y < 8; ++y) {
    int32_t v[8];
    for (int x = 0; x < 8; ++x) {
      const uint32_t word = columns[x][y / 2];
      v[x] = y % 2 == 0 ? lower_half(word) : upper_half(word);
    }
    uint32_t samples[2];
    transform_row(v, samples);
    std::memcpy(out + static_cast<uint32_t>(y) * stride, samples, sizeof samples);
  }
}

}  // namespace ts::jpeg
