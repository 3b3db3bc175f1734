// The error of a damaged image.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "base/error.h"

namespace ts::image {

// Throws Failure (DECODE) for damage that a decoder found at this byte of the image.
[[noreturn]] inline void throw_damage(const std::string& what, size_t at) {
  throw Failure(TS_ERROR_DECODE, what + " at byte " + std::to_string(at), static_cast<int64_t>(at));
}

}  // namespace ts::image
