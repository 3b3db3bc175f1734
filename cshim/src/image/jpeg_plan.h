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

// The part of a file that a plan needs, in whole pieces of the file.
struct FilePart {
  size_t piece;                 // bytes
  size_t begin = 0, bytes = 0;  // of the file: from the beginning of a piece to the end of one
  size_t at = 0;                // where they go, bytes from the plan's beginning
};

// Writes the plan (jpeg/plan.h) of an image with its compressed segments. The geometry, which must
// be valid, is that of the upright image. Returns the plan's bytes, also if the memory has no room
// for them; then it takes none, and the content of memory that is not shared is undefined. Returns
// 0 for an image or geometry that only the host decodes.
//
// Without scan.data the plan has no compressed segments, its scan_at is 0, and its scan_bytes are
// those from scan.begin to the file's end. Whoever decodes it sets scan_at to where they are. With
// `part`, which is for scans without data, the plan has room for that part of the file in place of
// the segments, and the caller fills it in: it is one run, with the bytes between the segments.
size_t plan_jpeg(const Frame& frame, const Scan& scan, const Entries& entries,
                 const ts_image_geometry& geometry, PlanMemory* to, FilePart* part = nullptr);

// What a plan of a whole scan is for.
struct ScanOptions {
  // Whether only files are planned whose scan is followed by the end marker. libjpeg-turbo decodes
  // those whatever the scan has, with a warning if need be: it meets the end marker before the
  // file's end, and no other marker that it could refuse.
  bool good_only = false;
  // If not NULL, is set but for the digest and the proof, which are the caller's, and the entries
  // of the plan include those that the file's blob would have.
  ts_image_search* search = nullptr;
};

// Writes a plan of an image without entries, which the decoder finds by itself (jpeg/sync.h): it
// has all bytes of the scan. Otherwise this is plan_jpeg.
size_t plan_whole_scan(const Frame& frame, const Scan& scan, const ts_image_geometry& geometry,
                       const ScanOptions& options, PlanMemory* to);

// Makes the blob of a file from the entries that a decoder has found in its plan, as its plan has
// them (jpeg/plan.h), with search.digest set. Returns the blob's size as pack_fitting does, 0 also
// for entries that do not follow each other in the scan.
size_t pack_found(const ts_image_search& search, const uint8_t* found, uint8_t* buffer,
                  size_t capacity);

}  // namespace ts::image
