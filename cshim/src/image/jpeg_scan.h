// Converts libjpeg's view of a scan to ours.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
// jpeglib.h needs cstdio before it.
#include <jpeglib.h>

#include "image/jpeg_entropy.h"

namespace ts::image {

// Describes the scan that the codec reads next, after jpeg_start_decompress or jpeg_read_header.
// Fills `codes`, to which the scan points. Returns false unless the image is of the usual kind: one
// baseline scan of one or three components.
bool describe_scan(const jpeg_decompress_struct& codec, const uint8_t* data, size_t bytes,
                   HuffmanCode codes[2][4], Scan* scan);

}  // namespace ts::image
