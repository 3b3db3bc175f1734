#include "image/xxh3.h"

#include <cstring>

#if defined(__x86_64__)
// GCC 12 warns about its own _mm512_undefined_epi32.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic pop
#endif
#define TS_AVX2 __attribute__((target("avx2")))
#define TS_AVX512 __attribute__((target("avx512f")))
#endif

namespace ts::image {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kStripe = kLanes * 8;
constexpr size_t kSecretBytes = 192;
constexpr size_t kStripesInBlock = (kSecretBytes - kStripe) / 8;
constexpr size_t kBlock = kStripesInBlock * kStripe;

constexpr uint64_t kPrime32_1 = 0x9E3779B1, kPrime32_2 = 0x85EBCA77, kPrime32_3 = 0xC2B2AE3D;
constexpr uint64_t kPrime64_1 = 0x9E3779B185EBCA87, kPrime64_2 = 0xC2B2AE3D27D4EB4F,
                   kPrime64_3 = 0x165667B19E3779F9, kPrime64_4 = 0x85EBCA77C2B2AE63,
                   kPrime64_5 = 0x27D4EB2F165667C5;

// The specification's default secret.
constexpr uint8_t kSecret[kSecretBytes] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

uint64_t load(const uint8_t* from) {
  uint64_t value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

void accumulate(uint64_t* lanes, const uint8_t* data, const uint8_t* secret) {
  for (size_t i = 0; i < kLanes; ++i) {
    const uint64_t value = load(data + 8 * i);
    const uint64_t key = value ^ load(secret + 8 * i);
    lanes[i ^ 1] += value;
    lanes[i] += (key & 0xFFFFFFFF) * (key >> 32);
  }
}

void scramble(uint64_t* lanes, const uint8_t* secret) {
  for (size_t i = 0; i < kLanes; ++i) {
    lanes[i] = (lanes[i] ^ lanes[i] >> 47 ^ load(secret + 8 * i)) * kPrime32_1;
  }
}

// Each of these functions processes whole blocks, each followed by a scramble, and then stripes.
// The secret of a stripe is 8 bytes after the secret of the previous stripe in its block.
using Accumulate = void(uint64_t* lanes, const uint8_t* data, size_t blocks, size_t stripes,
                        const uint8_t* secret);

void scalar(uint64_t* lanes, const uint8_t* data, size_t blocks, size_t stripes,
            const uint8_t* secret) {
  for (; blocks > 0; --blocks, data += kBlock) {
    scalar(lanes, data, 0, kStripesInBlock, secret);
    scramble(lanes, secret + kSecretBytes - kStripe);
  }
  for (size_t n = 0; n < stripes; ++n) accumulate(lanes, data + n * kStripe, secret + n * 8);
}

#if defined(__x86_64__)
TS_AVX2 inline __m256i avx2_stripe(__m256i sum, __m256i value, __m256i secret) {
  const __m256i key = _mm256_xor_si256(value, secret);
  const __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
  const __m256i swapped = _mm256_shuffle_epi32(value, _MM_SHUFFLE(1, 0, 3, 2));
  return _mm256_add_epi64(_mm256_add_epi64(sum, swapped), product);
}

TS_AVX2 void avx2(uint64_t* lanes, const uint8_t* data, size_t blocks, size_t stripes,
                  const uint8_t* secret) {
  auto* const memory = reinterpret_cast<__m256i*>(lanes);
  for (; blocks > 0; --blocks, data += kBlock) {
    avx2(lanes, data, 0, kStripesInBlock, secret);
    scramble(lanes, secret + kSecretBytes - kStripe);
  }
  __m256i sum[2] = {_mm256_loadu_si256(memory), _mm256_loadu_si256(memory + 1)};
  for (size_t n = 0; n < stripes; ++n) {
    const auto* const from = reinterpret_cast<const __m256i*>(data + n * kStripe);
    const auto* const with = reinterpret_cast<const __m256i*>(secret + n * 8);
    for (int i = 0; i < 2; ++i) {
      sum[i] = avx2_stripe(sum[i], _mm256_loadu_si256(from + i), _mm256_loadu_si256(with + i));
    }
  }
  _mm256_storeu_si256(memory, sum[0]);
  _mm256_storeu_si256(memory + 1, sum[1]);
}

TS_AVX512 inline __m512i avx512_stripe(__m512i sum, const uint8_t* data, __m512i secret) {
  const __m512i value = _mm512_loadu_si512(data), key = _mm512_xor_si512(value, secret);
  const __m512i product = _mm512_mul_epu32(key, _mm512_srli_epi64(key, 32));
  const __m512i swapped = _mm512_shuffle_epi32(value, _MM_PERM_BADC);
  return _mm512_add_epi64(_mm512_add_epi64(sum, swapped), product);
}

// Multiplies lanes by a 32-bit number, in halves.
TS_AVX512 inline __m512i avx512_scramble(__m512i sum, __m512i secret) {
  const __m512i prime = _mm512_set1_epi64(kPrime32_1);
  const __m512i mixed = _mm512_xor_si512(_mm512_xor_si512(sum, _mm512_srli_epi64(sum, 47)), secret);
  const __m512i high = _mm512_mul_epu32(_mm512_srli_epi64(mixed, 32), prime);
  return _mm512_add_epi64(_mm512_mul_epu32(mixed, prime), _mm512_slli_epi64(high, 32));
}

TS_AVX512 void avx512(uint64_t* lanes, const uint8_t* data, size_t blocks, size_t stripes,
                      const uint8_t* secret) {
  __m512i sum = _mm512_loadu_si512(lanes);
  if (blocks > 0) {
    __m512i with[kStripesInBlock + 1];  // the last one is the scramble's
    for (size_t n = 0; n <= kStripesInBlock; ++n) with[n] = _mm512_loadu_si512(secret + n * 8);
    for (; blocks > 0; --blocks, data += kBlock) {
      for (size_t n = 0; n < kStripesInBlock; ++n) {
        sum = avx512_stripe(sum, data + n * kStripe, with[n]);
      }
      sum = avx512_scramble(sum, with[kStripesInBlock]);
    }
  }
  for (size_t n = 0; n < stripes; ++n) {
    sum = avx512_stripe(sum, data + n * kStripe, _mm512_loadu_si512(secret + n * 8));
  }
  _mm512_storeu_si512(lanes, sum);
}
#endif

uint64_t fold(uint64_t a, uint64_t b) {
  const auto product = static_cast<unsigned __int128>(a) * b;
  return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

uint64_t digest(const uint8_t* data, size_t bytes, uint64_t seed, Accumulate* accumulate) {
  uint8_t secret[kSecretBytes];
  for (size_t i = 0; i < kSecretBytes; i += 16) {
    const uint64_t pair[2] = {load(kSecret + i) + seed, load(kSecret + i + 8) - seed};
    std::memcpy(secret + i, pair, sizeof pair);
  }
  uint64_t lanes[kLanes] = {kPrime32_3, kPrime64_1, kPrime64_2, kPrime64_3,
                            kPrime64_4, kPrime32_2, kPrime64_5, kPrime32_1};
  accumulate(lanes, data, (bytes - 1) / kBlock, (bytes - 1) % kBlock / kStripe, secret);
  accumulate(lanes, data + bytes - kStripe, 0, 1, secret + kSecretBytes - kStripe - 7);
  uint64_t hash = bytes * kPrime64_1;
  for (size_t i = 0; i < kLanes; i += 2) {
    const uint8_t* const with = secret + 11 + 8 * i;
    hash += fold(lanes[i] ^ load(with), lanes[i + 1] ^ load(with + 8));
  }
  hash = (hash ^ hash >> 37) * 0x165667919E3779F9;
  return hash ^ hash >> 32;
}

Accumulate* accumulate_with(Vectors vectors) {
#if defined(__x86_64__)
  if (vectors == Vectors::kAvx512) return avx512;
  if (vectors == Vectors::kAvx2) return avx2;
#endif
  static_cast<void>(vectors);
  return scalar;
}

}  // namespace

Vectors vectors_of_processor() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512f")) return Vectors::kAvx512;
  if (__builtin_cpu_supports("avx2")) return Vectors::kAvx2;
#endif
  return Vectors::kNone;
}

uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed) {
  static const Vectors vectors = vectors_of_processor();
  return xxh3(data, bytes, seed, vectors);
}

uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed, Vectors vectors) {
  return digest(data, bytes, seed, accumulate_with(vectors));
}

}  // namespace ts::image
