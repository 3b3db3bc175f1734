#include "image/jpeg_plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "image/exif.h"
#include "image/resize.h"
#include "jpeg/huffman.h"
#include "jpeg/plan.h"
#include "jpeg/resample.h"

namespace ts::image {
namespace {

using jpeg::Plan;

// The maximum number of blocks in a segment. One thread decodes a segment, so entries that are too
// far apart would delay a whole batch.
constexpr uint64_t kMaxSegmentBlocks = 1024;

// Assigns positions to the parts of a plan.
class PartPlaces {
 public:
  uint32_t take(size_t bytes) {
    const size_t at = used_;
    used_ = (used_ + bytes + jpeg::kPlanAlign - 1) / jpeg::kPlanAlign * jpeg::kPlanAlign;
    return static_cast<uint32_t>(at);
  }

  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
};

bool same(const HuffmanCode& a, const HuffmanCode& b) {
  return std::memcmp(a.counts + 1, b.counts + 1, 16) == 0 &&
         std::memcmp(a.symbols, b.symbols, sizeof a.symbols) == 0;
}

// The Huffman codes of an image, each once.
struct Codes {
  const HuffmanCode* code[jpeg::kMaxTables];
  bool dc[jpeg::kMaxTables];
  uint8_t count = 0;

  // Returns the index of a code, or -1 if the plan cannot have it.
  int add(const HuffmanCode* wanted, bool is_dc) {
    if (wanted == nullptr) return -1;
    for (int i = 0; i < count; ++i) {
      if (dc[i] == is_dc && same(*code[i], *wanted)) return i;
    }
    jpeg::HuffmanCode plain;
    std::memcpy(plain.counts, wanted->counts + 1, sizeof plain.counts);
    std::memcpy(plain.symbols, wanted->symbols, sizeof plain.symbols);
    if (count == jpeg::kMaxTables || !jpeg::valid_code(plain, is_dc)) return -1;
    code[count] = wanted;
    dc[count] = is_dc;
    return count++;
  }
};

// Fills in the blocks of an MCU, and the codes.
bool plan_scan(const Scan& scan, Plan* plan, Codes* codes) {
  plan->mcus_per_row = scan.mcus_per_row;
  const uint64_t mcus = uint64_t{scan.mcus_per_row} * scan.mcu_rows;
  if (mcus > INT32_MAX) return false;
  plan->mcus = static_cast<uint32_t>(mcus);
  plan->restart_interval = scan.restart_interval;
  plan->components = static_cast<uint8_t>(scan.components);
  plan->blocks = static_cast<uint8_t>(scan.blocks);
  int placed[jpeg::kMaxComponents] = {};
  for (int i = 0; i < scan.blocks; ++i) {
    const uint8_t c = scan.component[i];
    const int dc = codes->add(scan.dc[scan.dc_table[i]], true);
    const int ac = codes->add(scan.ac[scan.ac_table[i]], false);
    if (dc < 0 || ac < 0) return false;
    plan->block_component[i] = c;
    plan->block_dc[i] = static_cast<uint8_t>(dc);
    plan->block_ac[i] = static_cast<uint8_t>(ac);
    plan->block_x[i] = static_cast<uint8_t>(placed[c] % plan->component[c].across);
    plan->block_y[i] = static_cast<uint8_t>(placed[c] / plan->component[c].across);
    ++placed[c];
  }
  plan->tables = codes->count;
  return true;
}

// Fills in the components except their planes, and how jdsample.c upsamples them.
bool plan_components(const Frame& frame, Plan* plan) {
  plan->color = frame.color;
  for (int c = 0; c < frame.components; ++c) {
    const Frame::Component& from = frame.component[c];
    jpeg::Component& to = plan->component[c];
    if (frame.max_h % from.h != 0 || frame.max_v % from.v != 0) return false;
    to.width = from.width;
    to.height = from.height;
    to.across = from.across;
    to.down = from.down;
    to.expand_x = frame.max_h / from.h;
    to.expand_y = frame.max_v / from.v;
    // jdsample.c interpolates components of half the size, unless they are very narrow.
    const bool wide = to.width > 2;
    to.fancy_x = to.expand_x == 2 && to.expand_y <= 2 && wide;
    to.fancy_y = to.expand_y == 2 && (to.expand_x == 1 || (to.expand_x == 2 && wide));
  }
  return true;
}

jpeg::Axis plan_axis(int32_t in, int32_t out, int32_t begin, int32_t size, bool reversed,
                     int32_t interpolation) {
  jpeg::Axis axis = {};
  axis.filter = in == out                                   ? jpeg::kIdentity
                : interpolation == TS_INTERPOLATION_NEAREST ? jpeg::kNearest
                : interpolation == TS_INTERPOLATION_BICUBIC ? jpeg::kBicubic
                                                            : jpeg::kBilinear;
  axis.in = in;
  axis.out = out;
  axis.begin = begin;
  axis.size = size;
  axis.reversed = reversed;
  const jpeg::Taps first = jpeg::taps_of(axis, begin);
  const jpeg::Taps last = jpeg::taps_of(axis, begin + size - 1);
  axis.source_begin = first.first;
  axis.source_size = last.first + last.count - first.first;
  double longest = 1;
  if (axis.filter == jpeg::kBilinear || axis.filter == jpeg::kBicubic) {
    longest = std::min<double>(std::ceil(jpeg::support_of(axis)) * 2 + 1, in);
  }
  axis.pitch = (static_cast<int32_t>(longest) + 1) / 2 * 2;
  return axis;
}

// Fills in the resize, and the pixels that it needs. Returns their box in the stored image.
Box plan_pixels(const Frame& frame, const ts_image_geometry& g, Plan* plan) {
  plan->x =
      plan_axis(g.crop_width, g.resize_width, g.window_x, g.window_width, g.flip, g.interpolation);
  plan->y = plan_axis(g.crop_height, g.resize_height, g.window_y, g.window_height, false,
                      g.interpolation);
  int32_t width = frame.width;
  int32_t height = frame.height;
  if (g.orientation >= 5) std::swap(width, height);
  const auto place = [&](int32_t x, int32_t y, int32_t* to_x, int32_t* to_y) {
    *to_x = g.crop_x + plan->x.source_begin + x;
    *to_y = g.crop_y + plan->y.source_begin + y;
    stored_place(g.orientation, width, height, to_x, to_y);
  };
  int32_t right_x, right_y, below_x, below_y, last_x, last_y;
  place(0, 0, &plan->stored_x, &plan->stored_y);
  place(1, 0, &right_x, &right_y);
  place(0, 1, &below_x, &below_y);
  place(plan->x.source_size - 1, plan->y.source_size - 1, &last_x, &last_y);
  plan->x_by_x = right_x - plan->stored_x;
  plan->y_by_x = right_y - plan->stored_y;
  plan->x_by_y = below_x - plan->stored_x;
  plan->y_by_y = below_y - plan->stored_y;
  return {std::min(plan->stored_x, last_x), std::min(plan->stored_y, last_y),
          std::max(plan->stored_x, last_x) + 1, std::max(plan->stored_y, last_y) + 1};
}

// Fills in how the pixels are computed, and the strips.
void plan_strips(Plan* plan) {
  const auto whole = [](const jpeg::Component& c) {
    return c.expand_x == 1 && c.expand_y == 1 && c.fancy_x == 0 && c.fancy_y == 0;
  };
  const auto halved = [](const jpeg::Component& c) { return c.fancy_x != 0 && c.fancy_y != 0; };
  const jpeg::Component(&component)[jpeg::kMaxComponents] = plan->component;
  plan->layout = jpeg::Layout::kAny;
  if (plan->x_by_x == 1 && whole(component[0])) {
    if (plan->color == jpeg::kGrey) {
      plan->layout = jpeg::Layout::kGrey;
    } else if (plan->color == jpeg::kYcc && whole(component[1]) && whole(component[2])) {
      plan->layout = jpeg::Layout::kWhole;
    } else if (plan->color == jpeg::kYcc && halved(component[1]) && halved(component[2])) {
      plan->layout = jpeg::Layout::kHalved;
    }
  }
  plan->strip_offset = 0;
  plan->strip_pitch = plan->x.source_size;
  if (plan->layout != jpeg::Layout::kAny) {
    const int32_t group = jpeg::kGroup;
    plan->strip_offset = plan->stored_x % group;
    plan->strip_pitch = (plan->strip_offset + plan->x.source_size + group - 1) / group * group;
  }
  // A block of threads resamples a strip. Where the result is much wider than the crop, strips have
  // fewer rows, so that no block has the work of many.
  const int32_t most = std::max(jpeg::kRowsAtOnce, 16 * jpeg::kStripPixels / plan->x.size);
  plan->strip_rows = std::min({jpeg::kStripPixels / plan->strip_pitch, most, plan->y.source_size});
}

// Reports whether the pixels of every step can be counted by int32_t.
bool small_enough(const Plan& plan) {
  const auto fits = [](int32_t a, int32_t b) { return int64_t{a} * b <= INT32_MAX / 4; };
  return fits(plan.x.source_size, plan.y.source_size) && fits(plan.x.size, plan.y.source_size) &&
         fits(plan.x.size, plan.y.size);
}

// Fills in the MCUs that the box needs, and the components' planes. Returns false for a crop that
// is too large for the plan.
bool plan_mcus(const Frame& frame, const Box& box, Plan* plan) {
  const bool alone = frame.components == 1;
  const int32_t mcu_width = DCTSIZE * (alone ? 1 : frame.max_h);
  const int32_t mcu_height = DCTSIZE * (alone ? 1 : frame.max_v);
  // An interpolated pixel needs its neighbouring samples, which are two pixels wide.
  int32_t margin_x = 0;
  int32_t margin_y = 0;
  for (int c = 0; c < plan->components; ++c) {
    if (plan->component[c].fancy_x != 0) margin_x = 2;
    if (plan->component[c].fancy_y != 0) margin_y = 2;
  }
  const auto range = [](int32_t begin, int32_t end, int32_t margin, int32_t mcu, uint32_t count,
                        uint32_t* first, uint32_t* size) {
    *first = static_cast<uint32_t>(std::max(0, begin - margin) / mcu);
    const auto last = static_cast<uint32_t>((end - 1 + margin) / mcu);
    *size = std::min(last, count - 1) - *first + 1;
  };
  range(box.x0, box.x1, margin_x, mcu_width, plan->mcus_per_row, &plan->mcu_x, &plan->mcu_columns);
  range(box.y0, box.y1, margin_y, mcu_height, plan->mcus / plan->mcus_per_row, &plan->mcu_y,
        &plan->mcu_rows);
  uint64_t blocks = 0;
  for (int c = 0; c < plan->components; ++c) {
    jpeg::Component& component = plan->component[c];
    component.first_block = static_cast<uint32_t>(blocks);
    component.block_columns = plan->mcu_columns * static_cast<uint32_t>(component.across);
    component.column_reciprocal = UINT32_MAX / component.block_columns;
    component.block_rows = plan->mcu_rows * static_cast<uint32_t>(component.down);
    blocks += uint64_t{component.block_columns} * component.block_rows;
    if (blocks > INT32_MAX / 64) return false;
  }
  plan->total_blocks = static_cast<uint32_t>(blocks);
  return true;
}

// Returns the byte of the file after the scan's data: the byte of the marker that ends it.
size_t scan_end(const Scan& scan, size_t from) {
  size_t at = from;
  while (at < scan.end) {
    const void* found = std::memchr(scan.data + at, 0xFF, scan.end - at);
    if (found == nullptr) return scan.end;
    at = static_cast<size_t>(static_cast<const uint8_t*>(found) - scan.data);
    if (at + 1 >= scan.end) return scan.end;
    const uint8_t next = scan.data[at + 1];
    const bool inside =
        next == 0 || next == 0xFF || (scan.restart_interval != 0 && next >= 0xD0 && next <= 0xD7);
    if (!inside) return at;
    at += next == 0xFF ? 1 : 2;
  }
  return scan.end;
}

// Calls use(first, last) for the entries that the crop needs, in runs of consecutive entries.
// Returns false if `use` does.
template <typename Use>
bool each_entries(const Plan& plan, Use&& use) {
  const uint64_t spacing = plan.spacing;
  int64_t done = -1;
  for (uint32_t row = plan.mcu_y; row < plan.mcu_y + plan.mcu_rows;) {
    const auto first_mcu = [&](uint32_t r) { return uint64_t{r} * plan.mcus_per_row + plan.mcu_x; };
    const auto last_entry = [&](uint32_t r) {
      return static_cast<int64_t>((first_mcu(r) + plan.mcu_columns - 1) / spacing);
    };
    const int64_t first = std::max(done + 1, static_cast<int64_t>(first_mcu(row) / spacing));
    int64_t last = last_entry(row);
    // Joins rows whose entries are consecutive.
    for (++row; row < plan.mcu_y + plan.mcu_rows &&
                static_cast<int64_t>(first_mcu(row) / spacing) <= last + 1;
         ++row) {
      last = std::max(last, last_entry(row));
    }
    if (first > last) continue;
    done = last;
    if (!use(static_cast<uint32_t>(first), static_cast<uint32_t>(last))) return false;
  }
  return true;
}

// Entries whose bytes are consecutive: those from `first` to `last`, and bytes of the file.
struct Run {
  uint32_t first, last;
  size_t begin, end;
};

// Calls use(run) for the runs of entries that the crop needs. Returns false if the entries are
// impossible, or `use` returns false.
template <typename Use>
bool each_run(const Plan& plan, const Scan& scan, const Entries& entries, Use&& use) {
  return each_entries(plan, [&](uint32_t first, uint32_t last) {
    Run run = {first, last, 0, 0};
    run.begin = scan.begin + (entries.bit_at(run.first) >> 3);
    if (run.last + 1 < entries.count()) {
      // The byte after the last one may be a stuffed one.
      run.end = scan.begin + ((size_t{entries.bit_at(run.last + 1)} + 7) >> 3) + 1;
    } else if (scan.data != nullptr) {
      run.end = scan_end(scan, std::min(scan.end, scan.begin + (entries.bit_at(run.last) >> 3)));
    } else {
      run.end = scan.end;
    }
    run.end = std::min(run.end, scan.end);
    return run.begin < run.end && use(run);
  });
}

// Fills in everything except the entries and the parts. Returns false for an image or geometry that
// only the host can decode.
bool plan_image(const Frame& frame, const Scan& scan, const ts_image_geometry& geometry, Plan* plan,
                Codes* codes) {
  if (!plan_components(frame, plan) || !plan_scan(scan, plan, codes)) return false;
  const Box box = plan_pixels(frame, geometry, plan);
  if (!small_enough(*plan) || !plan_mcus(frame, box, plan)) return false;
  plan_strips(plan);
  return true;
}

// The parts of a plan, in its memory.
struct Parts {
  uint8_t *header, *codes, *quantisers, *entries, *segments, *scan;
};

// Places the parts. Returns the plan's size in bytes, or 0 if it or the scratch memory is too
// large. Without room for the parts, parts->header is NULL.
size_t place_parts(size_t entries_bytes, bool has_scan, PlanMemory* to, Plan* plan, Parts* parts) {
  if (jpeg::scratch_of(*plan).total() > jpeg::kMaxPlanScratch) return 0;
  PartPlaces layout;
  layout.take(sizeof *plan);
  plan->codes_at = layout.take(plan->tables * sizeof(jpeg::HuffmanCode));
  plan->quantisers_at = layout.take(size_t{plan->components} * DCTSIZE2 * sizeof(uint16_t));
  plan->entries_at = layout.take(entries_bytes);
  plan->segments_at = layout.take(size_t{plan->segments} * sizeof(jpeg::Segment));
  plan->scan_at = has_scan ? layout.take(size_t{plan->scan_bytes} + jpeg::kScanSlack) : 0;
  const size_t bytes = layout.used();
  if (bytes > INT32_MAX) return 0;
  plan->magic = jpeg::kPlanMagic;
  plan->bytes = static_cast<uint32_t>(bytes);
  uint8_t* const memory = to->take(bytes);
  *parts = {};
  if (memory != nullptr) {
    *parts = {memory,
              memory + plan->codes_at,
              memory + plan->quantisers_at,
              memory + plan->entries_at,
              memory + plan->segments_at,
              memory + plan->scan_at};
  }
  return bytes;
}

// Writes the header, the codes and the quantisers.
void write_head(const Frame& frame, const Plan& plan, const Codes& codes, const Parts& parts) {
  std::memcpy(parts.header, &plan, sizeof plan);
  for (size_t i = 0; i < plan.tables; ++i) {
    uint8_t* const to = parts.codes + i * sizeof(jpeg::HuffmanCode);
    std::memcpy(to, codes.code[i]->counts + 1, 16);
    std::memcpy(to + 16, codes.code[i]->symbols, 256);
  }
  for (size_t c = 0; c < plan.components; ++c) {
    auto* const quantisers = reinterpret_cast<uint16_t*>(parts.quantisers) + c * DCTSIZE2;
    for (uint32_t i = 0; i < DCTSIZE2; ++i) {
      quantisers[jpeg::column_place(i)] = frame.component[c].quantisers[i];
    }
  }
}

uint8_t* write_segment(uint32_t entry, uint32_t shift, uint8_t* to) {
  const jpeg::Segment segment = {entry, shift};
  std::memcpy(to, &segment, sizeof segment);
  return to + sizeof segment;
}

// The maximum number of blocks in a segment of a plan without entries, unless an MCU has more. The
// longest segment is a lower bound for the time of a small batch; a short one costs 18 bytes of
// plan.
constexpr uint32_t kScanBlocks = 8;

// Returns the number of MCUs between two entries of a plan without entries. It divides `wanted`, if
// that is not 0.
uint32_t scan_spacing(uint32_t blocks, uint32_t wanted) {
  uint32_t spacing = std::max(1U, kScanBlocks / blocks);
  while (wanted % spacing != 0) --spacing;
  return spacing;
}

}  // namespace

uint8_t* PlanMemory::take(size_t wanted) {
  if (used == nullptr) {
    at = 0;
    return wanted <= bytes ? data : nullptr;
  }
  uint64_t before = __atomic_load_n(used, __ATOMIC_RELAXED);
  do {
    if (before > bytes || wanted > bytes - before) return nullptr;
    // No thread reads another thread's writes: the memory of plans is disjoint.
  } while (!__atomic_compare_exchange_n(used, &before, before + wanted, true, __ATOMIC_RELAXED,
                                        __ATOMIC_RELAXED));
  at = static_cast<size_t>(before);
  return data + at;
}

size_t plan_jpeg(const Frame& frame, const Scan& scan, const Entries& entries,
                 const ts_image_geometry& geometry, PlanMemory* to, FilePart* part) {
  Plan plan = {};
  Codes codes;
  if (!plan_image(frame, scan, geometry, &plan, &codes)) return 0;
  const PackedEntries packed = entries.packed();
  plan.spacing = entries.spacing();
  plan.entries = entries.count();
  plan.origin = packed.origin;
  plan.slope = packed.slope;
  plan.stride = packed.stride;
  std::copy(std::begin(packed.lowest), std::end(packed.lowest), plan.lowest);
  std::copy(std::begin(packed.widths), std::end(packed.widths), plan.widths);
  if (uint64_t{plan.spacing} * plan.blocks > kMaxSegmentBlocks) return 0;

  // Damaged entries could name the same bytes repeatedly.
  const uint64_t max_bytes = uint64_t{scan.end - scan.begin} + plan.entries;
  uint64_t scan_bytes = 0;
  uint64_t segments = 0;
  size_t first = scan.end;
  size_t end = scan.begin;
  const bool possible = each_run(plan, scan, entries, [&](const Run& run) {
    scan_bytes += run.end - run.begin;
    first = std::min(first, run.begin);
    end = std::max(end, run.end);
    segments += uint64_t{run.last} - run.first + 1;
    return scan_bytes <= max_bytes;
  });
  const bool has_scan = scan.data != nullptr || part != nullptr;
  if (part != nullptr) {
    if (end <= first) return 0;
    part->begin = first / part->piece * part->piece;
    part->bytes =
        std::min(scan.end, (end - 1) / part->piece * part->piece + part->piece) - part->begin;
    scan_bytes = part->bytes;
  } else if (!has_scan) {
    scan_bytes = scan.end - scan.begin;
  }
  if (!possible || scan_bytes > INT32_MAX / 2) return 0;
  plan.scan_bytes = static_cast<uint32_t>(scan_bytes);
  plan.segments = static_cast<uint32_t>(segments);

  Parts parts = {};
  const size_t size = place_parts(packed.bytes, has_scan, to, &plan, &parts);
  if (parts.header == nullptr) return size;
  write_head(frame, plan, codes, parts);
  std::memcpy(parts.entries, packed.data, packed.bytes);
  uint32_t copied = 0;
  uint8_t* segment_to = parts.segments;
  // A part may start before the scan.
  const auto of_part =
      part != nullptr ? static_cast<uint32_t>(scan.begin) - static_cast<uint32_t>(part->begin) : 0;
  each_run(plan, scan, entries, [&](const Run& run) {
    const auto begin = static_cast<uint32_t>(run.begin - scan.begin);
    const uint32_t shift = scan.data != nullptr ? copied - begin : of_part;
    for (uint32_t entry = run.first; entry <= run.last; ++entry) {
      segment_to = write_segment(entry, shift, segment_to);
    }
    if (scan.data != nullptr) {
      std::memcpy(parts.scan + copied, scan.data + run.begin, run.end - run.begin);
      copied += static_cast<uint32_t>(run.end - run.begin);
    }
    return true;
  });
  if (has_scan) std::memset(parts.scan + plan.scan_bytes, 0, jpeg::kScanSlack);
  if (part != nullptr) part->at = plan.scan_at;
  return plan.bytes;
}

size_t plan_whole_scan(const Frame& frame, const Scan& scan, const ts_image_geometry& geometry,
                       const ScanOptions& options, PlanMemory* to) {
  Plan plan = {};
  Codes codes;
  if (!plan_image(frame, scan, geometry, &plan, &codes)) return 0;
  const size_t end = scan_end(scan, scan.begin);
  const size_t bytes = end - scan.begin;
  const bool ends = end + 1 < scan.end && scan.data[end + 1] == JPEG_EOI;
  if (options.good_only && !ends) return 0;
  // Bits and blocks are counted by uint32_t. A block has two codes of at least a bit. So a scan
  // with fewer bits is damaged, and the entries of its frame would use the memory of other plans.
  const uint64_t blocks = uint64_t{plan.mcus} * plan.blocks;
  if (bytes > INT32_MAX / 8 || blocks > INT32_MAX || blocks > uint64_t{bytes} * 4) return 0;
  plan.scan_bytes = static_cast<uint32_t>(bytes);
  plan.subsequence_bytes = jpeg::kSubsequenceBytes;
  plan.subsequences = (plan.scan_bytes + jpeg::kSubsequenceBytes - 1) / jpeg::kSubsequenceBytes;
  const uint32_t wanted = options.search == nullptr ? 0 : choose_spacing(scan.end, plan.mcus);
  plan.spacing = scan_spacing(plan.blocks, wanted);
  plan.entries = (plan.mcus + plan.spacing - 1) / plan.spacing;
  if (options.search != nullptr) {
    *options.search = {0, 0, scan.end, scan.begin, plan.mcus, plan.spacing, plan.entries, wanted};
  }
  plan.stride = jpeg::kScanEntryBytes * 8;
  plan.widths[0] = 32;
  std::fill(plan.widths + 1, std::end(plan.widths), uint8_t{16});
  each_entries(plan, [&](uint32_t first, uint32_t last) {
    plan.segments += last - first + 1;
    return true;
  });
  // An entry is read by loading eight bytes.
  const size_t entries_bytes = size_t{plan.entries} * jpeg::kScanEntryBytes + 8;

  Parts parts = {};
  const size_t size = place_parts(entries_bytes, true, to, &plan, &parts);
  if (parts.header == nullptr) return size;
  write_head(frame, plan, codes, parts);
  std::memset(parts.entries, 0, entries_bytes);
  uint8_t* segment_to = parts.segments;
  each_entries(plan, [&](uint32_t first, uint32_t last) {
    for (uint32_t entry = first; entry <= last; ++entry) {
      segment_to = write_segment(entry, 0, segment_to);
    }
    return true;
  });
  std::memcpy(parts.scan, scan.data + scan.begin, bytes);
  std::memset(parts.scan + bytes, 0, jpeg::kScanSlack);
  return plan.bytes;
}

size_t pack_found(const ts_image_search& search, const uint8_t* found, uint8_t* buffer,
                  size_t capacity) {
  if (search.wanted == 0) return 0;
  std::vector<EntryPoint> points;
  points.reserve(search.mcus / search.wanted + 1);
  const uint32_t step = search.wanted / search.spacing;
  for (uint32_t i = 0; i < search.entries; i += step) {
    const uint8_t* const from = found + size_t{i} * jpeg::kScanEntryBytes;
    EntryPoint point;
    std::memcpy(&point.bit, from, sizeof point.bit);
    std::memcpy(point.dc, from + sizeof point.bit, sizeof point.dc);
    const bool follows = points.empty() ? point.bit == 0 : point.bit > points.back().bit;
    if (!follows || point.bit / 8 >= search.file_bytes - search.scan) return 0;
    points.push_back(point);
  }
  const EntriesOf of = {search.digest, search.file_bytes, search.scan, search.mcus, search.wanted};
  return pack_fitting(of, &points, buffer, capacity);
}

}  // namespace ts::image
