// XXH3, from its specification, for inputs of more than 240 bytes: three times as fast as XXH64. No
// stored data depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

constexpr size_t kMinXxh3 = 241;

// Returns the 64-bit digest of at least kMinXxh3 bytes.
uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed);

// The vector instructions that a processor uses for it. Each level includes the lower ones.
enum class Vectors { kNone, kAvx2, kAvx512 };
Vectors vectors_of_processor();

// The same with the given instructions, which the processor must have. For tests.
uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed, Vectors vectors);

}  // namespace ts::image
