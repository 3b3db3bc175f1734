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
  // The bytes that other plans occupy, a multiple of 16, if several threads write plans to the
  // memory. NULL: the plan is at the start of the memory.
  uint64_t* used;
  size_t at = 0;  // position of the last take

  // Returns NULL if there is no room.
  uint8_t* take(size_t wanted);
};

// The part of a file that a plan needs, in whole pieces of the file.
struct FilePart {
  size_t piece;                 // bytes
  size_t begin = 0, bytes = 0;  // of the file, in whole pieces
  size_t at = 0;                // where the caller writes them, bytes from the plan's start
};

// Writes the plan (jpeg/plan.h) of an image with its compressed segments. The geometry, which must
// be valid, applies to the upright image. Returns the plan's size in bytes, also if the memory has
// no room for it. It then reserves none, and the content of memory that is not shared is undefined.
// Returns 0 for an image or geometry that only the host can decode.
// Without scan.data the plan has no compressed segments, its scan_at is 0, and its scan_bytes reach
// from scan.begin to the file's end. The decoder's caller sets scan_at to their position. With
// `part`, for scans without data, the plan has room for that part of the file instead of the
// segments, and the caller fills it in: it is one run, including the bytes between the segments.
size_t plan_jpeg(const Frame& frame, const Scan& scan, const Entries& entries,
                 const ts_image_geometry& geometry, PlanMemory* to, FilePart* part = nullptr);

// Options for the plan of a whole scan.
struct ScanOptions {
  // Plans only files whose scan is followed by the end marker. libjpeg-turbo decodes these whatever
  // the scan contains, perhaps with a warning: it finds the end marker before the file's end, and
  // no other marker that it could refuse.
  bool good_only = false;
  // If not NULL, is filled in except for the digest and the proof, which the caller sets. The
  // plan's entries then include all entries of the file's blob.
  ts_image_search* search = nullptr;
};

// Writes a plan of an image without entries, which the decoder finds itself (jpeg/sync.h). The plan
// has all bytes of the scan. Otherwise like plan_jpeg.
size_t plan_whole_scan(const Frame& frame, const Scan& scan, const ts_image_geometry& geometry,
                       const ScanOptions& options, PlanMemory* to);

// Makes a file's blob from the entries that a decoder found for its plan, in the plan's format
// (jpeg/plan.h). search.digest is set. Returns the blob's size as pack_fitting does, and 0 also for
// entries that do not follow each other in the scan.
size_t pack_found(const ts_image_search& search, const uint8_t* found, uint8_t* buffer,
                  size_t capacity);

}  // namespace ts::image
