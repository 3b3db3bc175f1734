// Checks a HEIF file (HEIC or AVIF) before libheif sees its pixels.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ts::image {

struct HeifKind {
  // There is AV1 of 8 bits whose colour has half the columns and rows.
  bool av1_420 = false;
};

// Returns what the configurations of the pictures say. Throws Failure unless every picture that a
// decoder could meet in the file has at most half of max_pixels, or a quarter with AV1, because
// libheif takes more memory a pixel than other decoders: by the properties of the items, by the
// parameter sets of HEVC and AV1 (in the configuration and in the pictures themselves), and by the
// grids. The decoders allocate by the parameter sets, and some of them have no limit. UNSUPPORTED
// for other codecs and for uncommon layouts, DECODE for damage.
HeifKind heif_check(const uint8_t* data, size_t bytes, int64_t max_pixels);

}  // namespace ts::image
