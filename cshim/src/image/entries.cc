#include "image/entries.h"

#include <algorithm>
#include <cstring>

namespace ts::image {
namespace {

constexpr uint32_t kMagic = 0x31455354;  // "TSE1"
constexpr size_t kHeader = 64;
constexpr size_t kTail = 8;  // a field is read by loading eight bytes
constexpr uint64_t kMaxEntries = uint64_t{1} << 26;

template <typename T>
T load(const uint8_t* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <typename T>
void store(uint8_t* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

uint64_t blob_digest(const uint8_t* blob, size_t bytes) {
  return xxh64(blob + kHeader, bytes - kHeader, xxh64(blob, kHeader - 8, 0));
}

uint32_t width_of(uint64_t range) {
  return range == 0 ? 0 : 64 - static_cast<uint32_t>(__builtin_clzll(range));
}

size_t blob_bytes(uint64_t entries, uint64_t stride) {
  return kHeader + (static_cast<size_t>((entries * stride + 7) / 8) + kTail + 7) / 8 * 8;
}

// ---- XXH64, from its specification

constexpr uint64_t kPrime1 = 0x9E3779B185EBCA87, kPrime2 = 0xC2B2AE3D27D4EB4F,
                   kPrime3 = 0x165667B19E3779F9, kPrime4 = 0x85EBCA77C2B2AE63,
                   kPrime5 = 0x27D4EB2F165667C5;

inline uint64_t rotate(uint64_t value, int bits) { return value << bits | value >> (64 - bits); }

inline uint64_t mix(uint64_t lane, uint64_t input) {
  return rotate(lane + input * kPrime2, 31) * kPrime1;
}

inline uint64_t merge(uint64_t hash, uint64_t lane) {
  return (hash ^ mix(0, lane)) * kPrime1 + kPrime4;
}

}  // namespace

uint64_t xxh64(const uint8_t* data, size_t bytes, uint64_t seed) {
  const uint8_t* const end = data + bytes;
  uint64_t hash;
  if (bytes >= 32) {
    uint64_t lane1 = seed + kPrime1 + kPrime2, lane2 = seed + kPrime2, lane3 = seed,
             lane4 = seed - kPrime1;
    for (; end - data >= 32; data += 32) {
      lane1 = mix(lane1, load<uint64_t>(data));
      lane2 = mix(lane2, load<uint64_t>(data + 8));
      lane3 = mix(lane3, load<uint64_t>(data + 16));
      lane4 = mix(lane4, load<uint64_t>(data + 24));
    }
    hash = rotate(lane1, 1) + rotate(lane2, 7) + rotate(lane3, 12) + rotate(lane4, 18);
    for (const uint64_t lane : {lane1, lane2, lane3, lane4}) hash = merge(hash, lane);
  } else {
    hash = seed + kPrime5;
  }
  hash += bytes;
  for (; end - data >= 8; data += 8) {
    hash = rotate(hash ^ mix(0, load<uint64_t>(data)), 27) * kPrime1 + kPrime4;
  }
  if (end - data >= 4) {
    hash = rotate(hash ^ load<uint32_t>(data) * kPrime1, 23) * kPrime2 + kPrime3;
    data += 4;
  }
  for (; data < end; ++data) hash = rotate(hash ^ *data * kPrime5, 11) * kPrime1;
  hash = (hash ^ hash >> 33) * kPrime2;
  hash = (hash ^ hash >> 29) * kPrime3;
  return hash ^ hash >> 32;
}

bool Entries::attach(const uint8_t* blob, size_t bytes) {
  if (blob == nullptr || bytes < kHeader + kTail || bytes % 8 != 0 || bytes > UINT32_MAX ||
      load<uint32_t>(blob) != kMagic || load<uint32_t>(blob + 4) != bytes ||
      load<uint64_t>(blob + 56) != blob_digest(blob, bytes)) {
    return false;
  }
  of_ = {load<uint64_t>(blob + 8), load<uint32_t>(blob + 16), load<uint32_t>(blob + 20),
         load<uint32_t>(blob + 24), load<uint32_t>(blob + 28)};
  count_ = load<uint32_t>(blob + 32);
  origin_ = load<int32_t>(blob + 36);
  slope_ = load<uint32_t>(blob + 40);
  std::memcpy(lowest_, blob + 44, sizeof lowest_);
  std::memcpy(widths_, blob + 50, sizeof widths_);
  if (of_.mcus == 0 || of_.spacing == 0 || of_.scan > of_.bytes || count_ > kMaxEntries ||
      count_ != (of_.mcus + of_.spacing - 1) / of_.spacing || load<uint16_t>(blob + 54) != 0) {
    return false;
  }
  stride_ = 0;
  for (int i = 0; i <= kMaxComponents; ++i) {
    if (widths_[i] > (i == 0 ? 32 : 16)) return false;
    stride_ += widths_[i];
  }
  packed_ = blob + kHeader;
  return bytes == blob_bytes(count_, stride_);
}

uint32_t Entries::field(uint64_t bit, uint32_t width) const {
  const auto word = load<uint64_t>(packed_ + (bit >> 3)) >> (bit & 7);
  return static_cast<uint32_t>(word & ((uint64_t{1} << width) - 1));
}

// Accepts any bits of a blob. The user of the entry checks it.
EntryPoint Entries::at(uint32_t i) const {
  EntryPoint entry;
  entry.bit = bit_at(i);
  uint64_t bit = uint64_t{i} * stride_ + widths_[0];
  for (int c = 0; c < kMaxComponents; ++c) {
    const uint32_t width = widths_[1 + c];
    entry.dc[c] = static_cast<int16_t>(static_cast<uint32_t>(lowest_[c]) + field(bit, width));
    bit += width;
  }
  return entry;
}

uint32_t Entries::bit_at(uint32_t i) const {
  return static_cast<uint32_t>(static_cast<uint64_t>(int64_t{origin_}) +
                               (uint64_t{i} * slope_ >> 8) +
                               field(uint64_t{i} * stride_, widths_[0]));
}

PackedEntries Entries::packed() const {
  PackedEntries packed = {
      packed_, blob_bytes(count_, stride_) - kHeader, slope_, stride_, origin_, {}, {}};
  std::memcpy(packed.lowest, lowest_, sizeof lowest_);
  std::memcpy(packed.widths, widths_, sizeof widths_);
  return packed;
}

size_t pack_entries(const EntriesOf& of, const std::vector<EntryPoint>& points, uint8_t* buffer,
                    size_t capacity) {
  if (of.bytes > UINT32_MAX || of.scan > of.bytes || of.mcus > UINT32_MAX || of.spacing == 0 ||
      points.empty() || points.size() > kMaxEntries ||
      points.size() != (of.mcus + of.spacing - 1) / of.spacing) {
    return 0;
  }
  const uint64_t slope =
      (uint64_t{points.back().bit} << 8) / std::max<size_t>(1, points.size() - 1);
  if (slope > UINT32_MAX) return 0;
  int64_t origin = INT64_MAX, farthest = INT64_MIN;
  int16_t lowest[kMaxComponents], highest[kMaxComponents];
  std::copy(points[0].dc, points[0].dc + kMaxComponents, lowest);
  std::copy(points[0].dc, points[0].dc + kMaxComponents, highest);
  for (size_t i = 0; i < points.size(); ++i) {
    const int64_t off = int64_t{points[i].bit} - static_cast<int64_t>(i * slope >> 8);
    origin = std::min(origin, off);
    farthest = std::max(farthest, off);
    for (int c = 0; c < kMaxComponents; ++c) {
      lowest[c] = std::min(lowest[c], points[i].dc[c]);
      highest[c] = std::max(highest[c], points[i].dc[c]);
    }
  }
  if (origin < INT32_MIN || farthest - origin > UINT32_MAX) return 0;
  uint8_t widths[1 + kMaxComponents];
  widths[0] = static_cast<uint8_t>(width_of(static_cast<uint64_t>(farthest - origin)));
  uint32_t stride = widths[0];
  for (int c = 0; c < kMaxComponents; ++c) {
    widths[1 + c] = static_cast<uint8_t>(width_of(static_cast<uint64_t>(highest[c] - lowest[c])));
    stride += widths[1 + c];
  }
  const size_t bytes = blob_bytes(points.size(), stride);
  if (bytes > UINT32_MAX) return 0;
  if (bytes > capacity) return bytes;

  std::memset(buffer, 0, bytes);
  store(buffer, kMagic);
  store(buffer + 4, static_cast<uint32_t>(bytes));
  store(buffer + 8, of.digest);
  store(buffer + 16, static_cast<uint32_t>(of.bytes));
  store(buffer + 20, static_cast<uint32_t>(of.scan));
  store(buffer + 24, static_cast<uint32_t>(of.mcus));
  store(buffer + 28, of.spacing);
  store(buffer + 32, static_cast<uint32_t>(points.size()));
  store(buffer + 36, static_cast<int32_t>(origin));
  store(buffer + 40, static_cast<uint32_t>(slope));
  std::memcpy(buffer + 44, lowest, sizeof lowest);
  std::memcpy(buffer + 50, widths, sizeof widths);
  uint64_t bit = 0;
  const auto put = [&](uint64_t value, uint32_t width) {
    uint8_t* to = buffer + kHeader + (bit >> 3);
    store(to, load<uint64_t>(to) | value << (bit & 7));
    bit += width;
  };
  for (size_t i = 0; i < points.size(); ++i) {
    put(static_cast<uint64_t>(int64_t{points[i].bit} - static_cast<int64_t>(i * slope >> 8) -
                              origin),
        widths[0]);
    for (int c = 0; c < kMaxComponents; ++c) {
      put(static_cast<uint64_t>(points[i].dc[c] - lowest[c]), widths[1 + c]);
    }
  }
  store(buffer + 56, blob_digest(buffer, bytes));
  return bytes;
}

size_t pack_fitting(EntriesOf of, std::vector<EntryPoint>* points, uint8_t* buffer,
                    size_t capacity) {
  const uint64_t max_bytes = of.bytes * kMaxPermille / 1000;
  size_t size = pack_entries(of, *points, buffer, capacity);
  while (size > max_bytes && points->size() > 1) {
    size_t kept = 0;
    for (size_t i = 0; i < points->size(); i += 2) (*points)[kept++] = (*points)[i];
    points->resize(kept);
    of.spacing *= 2;
    size = pack_entries(of, *points, buffer, capacity);
  }
  return size > max_bytes ? 0 : size;
}

uint32_t choose_spacing(uint64_t bytes, uint64_t mcus) {
  // A lower estimate of the bits of an entry: positions deviate from a straight line by some part
  // of the scan, and predictors differ. The caller notices an entry that needs more.
  constexpr uint64_t kUsual = 32;
  const uint64_t budget = bytes * kUsualPermille / 1000;
  if (budget < kHeader + kTail + 2 * 8) return 0;
  const uint64_t entries = (budget - kHeader - kTail) * 8 / kUsual;
  return static_cast<uint32_t>(std::min<uint64_t>((mcus + entries - 1) / entries, UINT32_MAX));
}

}  // namespace ts::image
