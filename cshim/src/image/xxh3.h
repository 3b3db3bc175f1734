// XXH3, from its specification, for inputs of more than 240 bytes: three times as fast as XXH64.
// Nothing that is stored depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

constexpr size_t kMinXxh3 = 241;

// Returns the digest of 64 bits. There are at least kMinXxh3 bytes.
uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed);

// What a processor computes it with. Each has those before it too.
enum class Vectors { kNone, kAvx2, kAvx512 };
Vectors vectors_of_processor();

// The same, with vectors that the processor has, for tests.
uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed, Vectors vectors);

}  // namespace ts::image
