// Finds places where a deflate stream may be entered.
#pragma once

#include <cstddef>
#include <cstdint>

#include "torchstream_image.h"

namespace ts::image {

// See ts_inflater_find.
ts_inflate_found find_start(const uint8_t* input, size_t bytes, uint64_t from, uint64_t to);

}  // namespace ts::image
