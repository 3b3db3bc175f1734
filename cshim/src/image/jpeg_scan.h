// From libjpeg's view of an image to ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
// After cstdio, which it needs.
#include <jpeglib.h>

#include "image/jpeg_entropy.h"

namespace ts::image {

// Describes the scan that the codec stands before, after jpeg_start_decompress or jpeg_read_header.
// codes: filled, and pointed at by the scan. False: it is not of the usual kind, which is one
// baseline scan of one or three components.
bool describe_scan(const jpeg_decompress_struct& codec, const uint8_t* data, size_t bytes,
                   HuffmanCode codes[2][4], Scan* scan);

}  // namespace ts::image
