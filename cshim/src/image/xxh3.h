// XXH3, from its specification, for inputs of more than 240 bytes: three times as fast as XXH64.
// Nothing that is stored depends on it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

constexpr size_t kMinXxh3 = 241;

// Returns the digest of 64 bits. There are at least kMinXxh3 bytes.
uint64_t xxh3(const uint8_t* data, size_t bytes, uint64_t seed);

// The same without vector instructions, for tests.
uint64_t xxh3_scalar(const uint8_t* data, size_t bytes, uint64_t seed);

}  // namespace ts::image
