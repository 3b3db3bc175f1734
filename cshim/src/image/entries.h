// Entry points of a JPEG file: the position of the bits of every n-th MCU, and its DC predictors,
// so that decoding can start there. docs/entry-points.md has their purpose and their guarantees.
//
// The layout of the blob in the sidecar index, which can be copied to a GPU as it is. Numbers are
// little-endian. Positions are those in the file, which count stuffed bytes and restart markers:
//
//    0  u32  "TSE1"
//    4  u32  bytes of the blob, a multiple of 8
//    8  u64  digest of the file (XXH64, seed 0)
//   16  u32  bytes of the file
//   20  u32  byte of the file where the scan's entropy-coded data starts
//   24  u32  MCUs in the scan
//   28  u32  spacing: entry i is before MCU i * spacing, in raster order over all rows
//   32  u32  entries: MCUs / spacing, rounded up
//   36  i32  origin       } entry i is at bit origin + (i * slope >> 8) + its position field,
//   40  u32  slope        } counted from the scan's first bit
//   44  i16  lowest[3]    the DC predictor of component c is lowest[c] + its field
//   50  u8   widths[4]    bits of an entry's fields: position, then the predictor of each component
//   54  u16  0
//   56  u64  digest of the blob: XXH64 of bytes 64 to the end, seeded with XXH64 of bytes 0 to 55
//   64       the packed entries: entry i starts at bit i * (sum of the widths), and its fields
//            follow one another, each from its lowest bit up; then at least 8 bytes of zeros
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace ts::image {

constexpr int kMaxComponents = 3;

// The position of an MCU's bits, and its DC predictors.
struct EntryPoint {
  // The offset from the scan's first byte in the file, stuffed bytes and markers included.
  uint32_t bit;
  int16_t dc[kMaxComponents];
};

inline bool operator==(const EntryPoint& a, const EntryPoint& b) {
  return a.bit == b.bit && a.dc[0] == b.dc[0] && a.dc[1] == b.dc[1] && a.dc[2] == b.dc[2];
}

uint64_t xxh64(const uint8_t* data, size_t bytes, uint64_t seed);

// The fields of a blob except its points.
struct EntriesOf {
  uint64_t digest;  // of the file
  uint64_t bytes;   // of the file
  uint64_t scan;    // byte where the entropy-coded data starts
  uint64_t mcus;
  uint32_t spacing;
};

// The packed entries of a blob, and the numbers that unpack them.
struct PackedEntries {
  const uint8_t* data;
  size_t bytes;  // including the zeros at the end
  uint32_t slope, stride;
  int32_t origin;
  int16_t lowest[kMaxComponents];
  uint8_t widths[1 + kMaxComponents];
};

// Reads a blob in place.
class Entries {
 public:
  // Borrows the blob. Returns false if its digest is wrong or a number in it is impossible.
  bool attach(const uint8_t* blob, size_t bytes);

  const EntriesOf& of() const { return of_; }
  uint32_t spacing() const { return of_.spacing; }
  uint32_t count() const { return count_; }
  EntryPoint at(uint32_t i) const;
  uint32_t bit_at(uint32_t i) const;  // of at(i)
  PackedEntries packed() const;

 private:
  uint32_t field(uint64_t bit, uint32_t width) const;

  const uint8_t* packed_ = nullptr;
  EntriesOf of_ = {};
  uint32_t count_ = 0, slope_ = 0, stride_ = 0;
  int32_t origin_ = 0;
  int16_t lowest_[kMaxComponents] = {};
  uint8_t widths_[1 + kMaxComponents] = {};
};

// Returns the size of the blob in bytes, and writes the blob to `buffer` if it has room. Returns 0
// if the format cannot hold the points.
size_t pack_entries(const EntriesOf& of, const std::vector<EntryPoint>& points, uint8_t* buffer,
                    size_t capacity);

// The usual and the maximum size of a blob in permille of its file, if the caller gives no spacing.
constexpr uint32_t kUsualPermille = 10;
constexpr uint32_t kMaxPermille = 15;

// Returns the smallest spacing that gives a blob of about kUsualPermille of the file. Returns 0 if
// the file is too small for entries to be worth their header.
uint32_t choose_spacing(uint64_t bytes, uint64_t mcus);

// Packs points as pack_entries does. Starts with the points of of.spacing, and doubles the spacing
// until the blob is at most kMaxPermille of the file. Removes the other points from `points`.
// Returns 0 also if no spacing is enough.
size_t pack_fitting(EntriesOf of, std::vector<EntryPoint>* points, uint8_t* buffer,
                    size_t capacity);

}  // namespace ts::image
