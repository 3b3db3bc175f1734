// Plans the decoding of a JPEG's crop from its entry points, for a decoder that has no libjpeg
// (src/jpeg): on a GPU, or its emulation in the tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
// jpeglib.h needs cstdio before it.
#include <jpeglib.h>

#include "image/entries.h"
#include "image/jpeg_entropy.h"
#include "torchstream_image.h"

namespace ts::image {

// Writes the plan (jpeg/plan.h) of an image with its compressed segments to `buffer`, which is
// aligned to 16 bytes. `codec` has begun to decompress the image that `scan` describes, and the
// geometry, which must be valid, is that of the upright image. Returns the plan's bytes. Returns 0
// for an image or geometry that only the host decodes, and more than the capacity if the buffer is
// too small; then the buffer's content is undefined.
size_t plan_jpeg(const jpeg_decompress_struct& codec, const Scan& scan, const Entries& entries,
                 const ts_image_geometry& geometry, uint8_t* buffer, size_t capacity);

// Writes a plan of an image without entries, which the decoder finds by itself (jpeg/sync.h): it
// has all bytes of the scan. Otherwise this is plan_jpeg.
size_t plan_whole_scan(const jpeg_decompress_struct& codec, const Scan& scan,
                       const ts_image_geometry& geometry, uint8_t* buffer, size_t capacity);

}  // namespace ts::image
