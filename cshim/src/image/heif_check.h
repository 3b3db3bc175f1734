// Checks a HEIF file (HEIC or AVIF) before libheif sees its pixels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

struct HeifKind {
  // Some picture is 8-bit AV1 whose colour has half the columns and rows.
  bool av1_420 = false;
};

// Returns the facts in the pictures' configurations. Throws Failure unless every picture that a
// decoder could find in the file has at most half of max_pixels, or a quarter with AV1, because
// libheif needs more memory for each pixel than other decoders. Three sources of sizes are checked:
// the items' properties, the parameter sets of HEVC and AV1 (in the configuration and in the
// pictures themselves), and the grids. The decoders allocate by the parameter sets, and some have
// no limit. UNSUPPORTED for other codecs and for uncommon layouts, DECODE for damage.
HeifKind heif_check(const uint8_t* data, size_t bytes, int64_t max_pixels);

}  // namespace ts::image
