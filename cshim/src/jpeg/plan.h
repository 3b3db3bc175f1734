// A plan describes how the crop of one JPEG is decoded from its segments, the parts of its scan
// between two entry points. The host writes the plan and the segments' bytes into one piece of
// memory, which is copied to the device unchanged.
// Only a plan's compressed bytes and entry points are untrusted: the planner (image/jpeg_plan.h)
// has checked sizes, tables and offsets. The decoder checks the rest.
#pragma once

#include <cstdint>

#include "jpeg/target.h"

namespace ts::jpeg {

constexpr int kMaxComponents = 3;
constexpr int kMaxBlocks = 10;  // in an MCU, by the standard
constexpr int kMaxTables = 4;   // Huffman tables of an image
// Changes with the contents of a plan: one library writes it and another reads it.
constexpr uint32_t kPlanMagic = 0x36505354;
// Every part of a plan, and the plan itself, starts at a multiple of this number of bytes.
constexpr uint32_t kPlanAlign = 16;
TS_HOST_DEVICE uint64_t aligned_plan(uint64_t bytes) {
  return (bytes + kPlanAlign - 1) / kPlanAlign * kPlanAlign;
}
// For a plan of a whole scan (subsequences != 0), whose entries are not known yet: the bytes of a
// subsequence, the parts that jpeg/sync.h divides the scan into, a multiple of four; and the bytes
// of an entry, which is a bit (uint32_t) and three predictors (int16_t).
constexpr uint32_t kSubsequenceBytes = 256;
constexpr uint32_t kScanEntryBytes = 10;
// Bytes after the compressed bytes that loads may touch.
constexpr uint32_t kScanSlack = 16;

// Returns the position of a coefficient, or of a quantiser, among the 64 of a block: column by
// column, so that a thread of the inverse DCT reads its column as 16 bytes. `natural` counts row by
// row.
TS_HOST_DEVICE uint32_t column_place(uint32_t natural) { return natural % 8 * 8 + natural / 8; }

// The number of codes of each length from 1 to 16, and their symbols in order.
struct HuffmanCode {
  uint8_t counts[16];
  uint8_t symbols[256];
};

struct Component {
  int32_t width, height;       // samples, without padding of the last blocks
  int32_t across, down;        // blocks in an MCU
  int32_t expand_x, expand_y;  // pixels of a sample
  int32_t fancy_x, fancy_y;    // whether samples are interpolated between neighbours
  uint32_t block_columns;      // of the decoded plane
  uint32_t column_reciprocal;  // (2^32 - 1) / block_columns: a GPU has no division instruction
  uint32_t block_rows;         // of the decoded plane
  uint32_t first_block;        // of the plane, among the image's blocks
};

enum Color : uint8_t { kGrey = 0, kYcc = 1, kRgb = 2 };

// How pixels are computed. Eight pixels of a row are computed at once if they are neighbours in the
// stored image too.
enum class Layout : int32_t {
  kAny,     // one by one
  kGrey,    // eight at once, with a sample for each
  kWhole,   // the same, with a sample in each of three planes
  kHalved,  // the same, but the planes of chrominance have half as many rows and columns
};
constexpr int32_t kGroup = 8;  // pixels at once

// The maximum number of pixels of a strip: source rows that are together in a block's shared
// memory, and from which the columns are resampled.
constexpr int32_t kStripPixels = 4096;

enum Filter : int32_t { kIdentity = 0, kNearest = 1, kBilinear = 2, kBicubic = 3 };

// How one axis of the crop box is resized.
struct Axis {
  int32_t filter;        // Filter
  int32_t in, out;       // samples of the crop box, and outputs
  int32_t begin, size;   // the wanted outputs
  int32_t reversed;      // 1: the last wanted output is first
  int32_t source_begin;  // the first sample that a wanted output needs
  int32_t source_size;   // the number of samples from there to the last needed one
  int32_t pitch;         // the maximum number of taps of an output, rounded up to even
};

// A run of entries with consecutive bytes. Byte b of the scan is byte b + shift (modulo 2^32) of
// the plan.
struct Segment {
  uint32_t entry;
  uint32_t shift;
};

struct Plan {
  uint32_t magic;
  uint32_t bytes;  // size of the plan with all its parts

  // The scan.
  uint32_t mcus, mcus_per_row;
  uint32_t restart_interval;  // in MCUs; 0: none
  uint8_t components, blocks, color, tables;
  uint8_t block_component[kMaxBlocks];
  uint8_t block_dc[kMaxBlocks], block_ac[kMaxBlocks];  // indexes of tables
  uint8_t block_x[kMaxBlocks], block_y[kMaxBlocks];  // position in the component's part of the MCU
  uint8_t padding[2];
  Component component[kMaxComponents];

  // The MCUs that the crop needs.
  uint32_t mcu_x, mcu_y, mcu_columns, mcu_rows;
  uint32_t total_blocks;  // in them

  // Entry points, as in image/entries.h.
  uint32_t spacing, entries, slope, stride;
  int32_t origin;
  int16_t lowest[kMaxComponents];
  uint8_t widths[1 + kMaxComponents];
  uint8_t mixes;  // 1: one of the operations is a mixture of images
  uint8_t padding2;

  // Parts of the plan: bytes from its start.
  uint32_t codes_at;       // HuffmanCode[tables]
  uint32_t quantisers_at;  // uint16_t[components][64], column by column
  uint32_t entries_at;     // the packed entries
  uint32_t segments_at;    // Segment[segments]
  uint32_t scan_at;        // the bytes
  uint32_t segments, scan_bytes;
  // The parts of a whole scan, which is in the plan without gaps. The device finds the entries and
  // writes them to entries_at before it decodes segments. 0: the plan has the entries.
  uint32_t subsequences, subsequence_bytes;

  // The pixels that the resize needs, in the upright frame: their pixel (x, y) is pixel (stored_x +
  // x * x_by_x + y * x_by_y, stored_y + x * y_by_x + y * y_by_y) of the stored image.
  int32_t stored_x, stored_y, x_by_x, x_by_y, y_by_x, y_by_y;
  Axis x, y;
  Layout layout;
  // Of a strip: a row's first pixel, the pixels of a row, and the number of rows. 0 rows: a strip
  // has no room for a row.
  int32_t strip_offset, strip_pitch, strip_rows;

  // Operations on the resized pixels (jpeg/steps.h), which keep the image's size:
  // ts_augment_op[steps], followed by the weights of blurs. They are the last part of the plan.
  uint32_t steps, steps_at;
};

// The device memory that decoding an image needs, in bytes. Each part is a multiple of
// kScratchAlign. The search, the coefficients and the columns have the same memory one after the
// other.
struct Scratch {
  uint64_t coefficients, samples, room, columns, weights, tables, sync;
  TS_HOST_DEVICE uint64_t shared() const {
    const uint64_t later = columns < coefficients ? coefficients : columns;
    return later < sync ? sync : later;
  }
  TS_HOST_DEVICE uint64_t total() const { return shared() + samples + room + weights + tables; }
};

constexpr uint64_t kScratchAlign = 256;

// The maximum of Scratch::total for a plan, so that a decoder with this much scratch memory accepts
// any plan. It is enough for a crop of 29 million pixels of 4:4:4, or 58 million of 4:2:0.
constexpr uint64_t kMaxPlanScratch = uint64_t{256} << 20;

TS_HOST_DEVICE uint64_t aligned_scratch(uint64_t bytes) {
  return (bytes + kScratchAlign - 1) / kScratchAlign * kScratchAlign;
}

// The layout of an axis's weights: the precision in 16 bytes, then int32_t first[size],
// count[size], and int16_t weights[size][pitch]. The weight after an odd count is 0.
constexpr uint64_t kWeightsHeader = 16;

TS_HOST_DEVICE uint64_t weights_bytes(const Axis& axis) {
  if (axis.filter == kIdentity) return 0;
  const auto size = static_cast<uint64_t>(axis.size);
  return aligned_scratch(kWeightsHeader + size * 8 +
                         size * static_cast<uint64_t>(axis.pitch) * sizeof(int16_t));
}

constexpr uint64_t kTablesScratch = 34560;  // SearchTables of jpeg/huffman.h

// The search for entries in a whole scan (jpeg/sync.h): the subsequences of one block of threads,
// and the bytes for each subsequence and each block.
constexpr uint32_t kSyncThreads = 128;
constexpr uint64_t kSubsequenceScratch = 56;
constexpr uint64_t kSyncBlockScratch = 16;
// The search's paths: the maximum number of subsequences that a path passes; the bytes of a path,
// of which there is one for each block of the MCU; and further bytes for each subsequence.
constexpr uint32_t kPathReach = 4;
constexpr uint64_t kPathScratch = 33;
constexpr uint64_t kRouteScratch = 2;

TS_HOST_DEVICE uint32_t sync_blocks(const Plan& plan) {
  return (plan.subsequences + kSyncThreads - 1) / kSyncThreads;
}

TS_HOST_DEVICE Scratch scratch_of(const Plan& plan) {
  const auto height = static_cast<uint64_t>(plan.y.source_size);
  Scratch scratch = {};
  scratch.coefficients = aligned_scratch(uint64_t{plan.total_blocks} * 64 * sizeof(int16_t));
  scratch.samples = aligned_scratch(uint64_t{plan.total_blocks} * 64);
  if (plan.steps != 0) {  // an operation may need room for its result
    const auto result = aligned_scratch(static_cast<uint64_t>(plan.x.size) *
                                        static_cast<uint64_t>(plan.y.size) * 3);
    // A mixture needs room for the original image, and for its sum too.
    const uint64_t room = result * (plan.mixes != 0 ? 1 + 1 + sizeof(float) : 1);
    scratch.room = aligned_scratch(room);
  }
  scratch.columns = aligned_scratch(static_cast<uint64_t>(plan.x.size) * height * 4);
  scratch.weights = weights_bytes(plan.x) + weights_bytes(plan.y);
  scratch.tables = aligned_scratch(kTablesScratch);
  scratch.sync = aligned_scratch(
      plan.subsequences * (kSubsequenceScratch + plan.blocks * kPathScratch + kRouteScratch) +
      sync_blocks(plan) * kSyncBlockScratch);
  return scratch;
}

// The positions of an image's plan, scratch memory and result, as byte offsets.
struct Place {
  uint64_t plan;                                                         // in the staging memory
  uint64_t coefficients, samples, room, columns, weights, tables, sync;  // in the scratch memory
  uint64_t result;  // in the batch: rows of x.size * 3 bytes
};

}  // namespace ts::jpeg
