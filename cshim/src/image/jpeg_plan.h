// Plans the decoding of a JPEG's crop from its entry points, for a decoder that has no libjpeg
// (src/jpeg): on a GPU, or its emulation in the tests.
#pragma once

#include <cstddef>
#include <cstdint>

#include "image/entries.h"
#include "image/jpeg_entropy.h"
#include "image/jpeg_frame.h"
#include "torchstream_image.h"

namespace ts::image {

// The memory that a plan is written to, aligned to 16 bytes.
struct PlanMemory {
  uint8_t* data;
  size_t bytes;
  // The bytes that other plans have taken, a multiple of 16: several threads put plans into the
  // memory. NULL: the plan is at its beginning.
  uint64_t* used;
  size_t at = 0;  // where the last take is

  // Returns NULL if there is no room.
  uint8_t* take(size_t wanted);
};

// Writes the plan (jpeg/plan.h) of an image with its compressed segments. The geometry, which must
// be valid, is that of the upright image. Returns the plan's bytes, also if the memory has no room
// for them; then it takes none, and the content of memory that is not shared is undefined. Returns
// 0 for an image or geometry that only the host decodes.
//
// Without scan.data the plan has no compressed segments, its scan_at is 0, and its scan_bytes are
// those from scan.begin to the file's end. Whoever decodes it sets scan_at to where they are.
size_t plan_jpeg(const Frame& frame, const Scan& scan, const Entries& entries,
                 const ts_image_geometry& geometry, PlanMemory* to);

// Writes a plan of an image without entries, which the decoder finds by itself (jpeg/sync.h): it
// has all bytes of the scan. Otherwise this is plan_jpeg.
size_t plan_whole_scan(const Frame& frame, const Scan& scan, const ts_image_geometry& geometry,
                       PlanMemory* to);

}  // namespace ts::image
