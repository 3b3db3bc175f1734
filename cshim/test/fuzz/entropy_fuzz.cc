// libFuzzer: the entropy decoder alone, on scans of any shape with any Huffman codes, compared with
// a decoder that reads bit by bit. All its ways of decoding agree: with and without BMI2, with and
// without stores, and from entry points. Every block that it decodes is right, and it gives up only
// where the slow decoder finds damage too.
#include <array>

#include "fuzz.h"
#include "image/jpeg_entropy.h"

namespace {

using namespace fuzz;
using namespace ts::image;

using Block = std::array<int16_t, 64>;

constexpr uint8_t kNatural[64] = {0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,
                                  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13, 6,  7,  14, 21, 28,
                                  35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51,
                                  58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

// ---- the slow decoder

class Slow {
 public:
  explicit Slow(const Scan& scan) : scan_(scan), at_(scan.begin) {}

  // Returns false if the scan is damaged or of an unusual kind.
  bool mcu(Block* blocks) {
    if (scan_.restart_interval != 0 && done_ != 0 && done_ % scan_.restart_interval == 0 &&
        !restart()) {
      return false;
    }
    ++done_;
    for (int b = 0; b < scan_.blocks; ++b) {
      if (!block(*scan_.dc[scan_.dc_table[b]], *scan_.ac[scan_.ac_table[b]], scan_.component[b],
                 &blocks[b])) {
        return false;
      }
    }
    return true;
  }

 private:
  int bit() {
    if (left_ == 0) {
      if (at_ >= scan_.end) return -1;
      byte_ = scan_.data[at_];
      if (byte_ == 0xFF) {
        if (at_ + 1 >= scan_.end || scan_.data[at_ + 1] != 0) return -1;  // a marker
        ++at_;
      }
      ++at_;
      left_ = 8;
    }
    return byte_ >> --left_ & 1;
  }
  int symbol(const HuffmanCode& code) {
    int prefix = 0;
    int first = 0;
    int index = 0;
    for (int length = 1; length <= 16; ++length) {
      const int next = bit();
      if (next < 0) return -1;
      prefix = prefix << 1 | next;
      first <<= 1;
      if (prefix - first < code.counts[length]) return code.symbols[index + prefix - first];
      first += code.counts[length];
      index += code.counts[length];
    }
    return -1;
  }
  bool number(int size, int* value) {
    int bits = 0;
    for (int i = 0; i < size; ++i) {
      const int next = bit();
      if (next < 0) return false;
      bits = bits << 1 | next;
    }
    *value = size != 0 && bits < 1 << (size - 1) ? bits - (1 << size) + 1 : bits;
    return true;
  }
  bool block(const HuffmanCode& dc, const HuffmanCode& ac, int component, Block* out) {
    const int size = symbol(dc);
    int value = 0;
    if (size < 0 || !number(size, &value)) return false;
    uint32_t& predictor = predictor_[component];
    predictor += static_cast<uint32_t>(value);
    (*out)[0] = static_cast<int16_t>(predictor);
    for (int k = 1; k < 64; ++k) {
      const int next = symbol(ac);
      if (next < 0) return false;
      if ((next & 15) == 0) {
        if (next != 0xF0) break;
        k += 15;
        if (k > 63) return false;
        continue;
      }
      k += next >> 4;
      if (k > 63 || !number(next & 15, &value)) return false;
      (*out)[kNatural[k]] = static_cast<int16_t>(value);
    }
    return true;
  }
  bool restart() {
    left_ = 0;
    if (at_ + 1 >= scan_.end || scan_.data[at_] != 0xFF || scan_.data[at_ + 1] == 0) return false;
    while (at_ < scan_.end && scan_.data[at_] == 0xFF) ++at_;
    const uint64_t turn = done_ / scan_.restart_interval - 1;
    if (at_ >= scan_.end || scan_.data[at_] != 0xD0 + turn % 8) return false;
    ++at_;
    for (uint32_t& predictor : predictor_) predictor = 0;
    return true;
  }

  const Scan& scan_;
  size_t at_;
  int byte_ = 0, left_ = 0;
  uint64_t done_ = 0;
  uint32_t predictor_[kMaxComponents] = {};
};

// ---- scans

// The usual codes: the luminance codes of the standard's annex K.
const HuffmanCode kDc = {{0, 0, 1, 5, 1, 1, 1, 1, 1, 1}, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}};
const HuffmanCode kAc = {
    {0, 0, 2, 1, 3, 3, 2, 4, 3, 5, 5, 4, 4, 0, 0, 1, 125},
    {0x01, 0x02, 0x03, 0x00, 0x04, 0x11, 0x05, 0x12, 0x21, 0x31, 0x41, 0x06, 0x13, 0x51, 0x61,
     0x07, 0x22, 0x71, 0x14, 0x32, 0x81, 0x91, 0xa1, 0x08, 0x23, 0x42, 0xb1, 0xc1, 0x15, 0x52,
     0xd1, 0xf0, 0x24, 0x33, 0x62, 0x72, 0x82, 0x09, 0x0a, 0x16, 0x17, 0x18, 0x19, 0x1a, 0x25,
     0x26, 0x27, 0x28, 0x29, 0x2a, 0x34, 0x35, 0x36, 0x37, 0x38, 0x39, 0x3a, 0x43, 0x44, 0x45,
     0x46, 0x47, 0x48, 0x49, 0x4a, 0x53, 0x54, 0x55, 0x56, 0x57, 0x58, 0x59, 0x5a, 0x63, 0x64,
     0x65, 0x66, 0x67, 0x68, 0x69, 0x6a, 0x73, 0x74, 0x75, 0x76, 0x77, 0x78, 0x79, 0x7a, 0x83,
     0x84, 0x85, 0x86, 0x87, 0x88, 0x89, 0x8a, 0x92, 0x93, 0x94, 0x95, 0x96, 0x97, 0x98, 0x99,
     0x9a, 0xa2, 0xa3, 0xa4, 0xa5, 0xa6, 0xa7, 0xa8, 0xa9, 0xaa, 0xb2, 0xb3, 0xb4, 0xb5, 0xb6,
     0xb7, 0xb8, 0xb9, 0xba, 0xc2, 0xc3, 0xc4, 0xc5, 0xc6, 0xc7, 0xc8, 0xc9, 0xca, 0xd2, 0xd3,
     0xd4, 0xd5, 0xd6, 0xd7, 0xd8, 0xd9, 0xda, 0xe1, 0xe2, 0xe3, 0xe4, 0xe5, 0xe6, 0xe7, 0xe8,
     0xe9, 0xea, 0xf1, 0xf2, 0xf3, 0xf4, 0xf5, 0xf6, 0xf7, 0xf8, 0xf9, 0xfa}};

HuffmanCode any_code(Reader* in, bool dc) {
  const auto kind = in->take<uint8_t>();
  if (kind % 4 == 0) return dc ? kDc : kAc;
  HuffmanCode code = {};
  size_t total = 0;
  uint32_t free = 1;
  for (int length = 1; length <= 16; ++length) {
    const auto byte = in->take<uint8_t>();
    free *= 2;
    if (kind % 4 == 1) {  // any counts, possible or not
      code.counts[length] = byte;
    } else {  // leaves the code word of all ones unused
      code.counts[length] = static_cast<uint8_t>(std::min<size_t>({byte % free, 255, 256 - total}));
      free -= code.counts[length];
    }
    total += code.counts[length];
  }
  const auto step = in->take<uint8_t>();
  for (size_t i = 0; i < 256; ++i) {
    const size_t symbol = i < 24 ? in->take<uint8_t>() : i * (step | 1u);
    code.symbols[i] = static_cast<uint8_t>(dc && kind % 4 != 1 ? symbol % 16 : symbol);
  }
  return code;
}

struct Decoded {
  uint64_t mcus = 0;  // number of MCUs before the decoder gave up
  bool whole = false;
  std::vector<Block> blocks;
};

// Decodes the columns first to last of every row.
Decoded decode(EntropyDecoder* decoder, const Scan& scan, uint32_t first, uint32_t last) {
  const auto per_mcu = static_cast<size_t>(scan.blocks);
  const uint64_t mcus = uint64_t{scan.mcus_per_row} * scan.mcu_rows;
  Decoded out;
  out.blocks.resize(static_cast<size_t>(mcus) * per_mcu, Block{});
  decoder->want(first, last);
  for (uint64_t i = 0; i < mcus; ++i) {
    int16_t(*pointers[kMaxBlocks])[64];
    for (size_t b = 0; b < per_mcu; ++b) {
      Block& block = out.blocks[static_cast<size_t>(i) * per_mcu + b];
      pointers[b] = reinterpret_cast<int16_t(*)[64]>(block.data());
    }
    if (!decoder->next(pointers)) return out;
    ++out.mcus;
  }
  out.whole = decoder->finish();
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static EntropyDecoder baseline(Instructions::kBaseline);
  static EntropyDecoder best;
  if (size < 12) return -1;
  Reader in(data, size);
  Scan scan = {};
  scan.components = 1 + in.take<uint8_t>() % kMaxComponents;
  scan.blocks = 1 + in.take<uint8_t>() % kMaxBlocks;
  const int codes = 1 + in.take<uint8_t>() % 2;
  for (int b = 0; b < scan.blocks; ++b) {
    scan.component[b] = static_cast<uint8_t>(b % scan.components);
    scan.dc_table[b] = scan.ac_table[b] = static_cast<uint8_t>(b % scan.components % codes);
  }
  scan.mcus_per_row = 1 + in.take<uint8_t>() % 24u;
  scan.mcu_rows = 1 + in.take<uint8_t>() % 12u;
  const auto interval = in.take<uint8_t>();
  scan.restart_interval = interval % 3 == 0 ? interval / 3u : 0;
  const auto spacing = 1 + in.take<uint8_t>() % 40u;
  const uint32_t first = in.take<uint8_t>() % scan.mcus_per_row;
  const uint32_t last = first + in.take<uint8_t>() % (scan.mcus_per_row - first);
  const auto repeat = in.take<uint8_t>();
  HuffmanCode dc[2], ac[2];
  for (int i = 0; i < codes; ++i) {
    dc[i] = any_code(&in, true);
    ac[i] = any_code(&in, false);
    scan.dc[i] = &dc[i];
    scan.ac[i] = &ac[i];
  }
  Bytes file(in.rest(), in.rest() + in.left());
  // Sometimes exceeds the decoder's window, so that the window moves.
  if (repeat % 16 == 0 && !file.empty()) {
    while (file.size() < 40000) file.insert(file.end(), in.rest(), in.rest() + in.left());
    file.shrink_to_fit();
  }
  scan.data = file.data();
  scan.end = file.size();

  const bool started = best.start(scan);
  demand(baseline.start(scan) == started);
  if (!started) return 0;
  const uint64_t mcus = uint64_t{scan.mcus_per_row} * scan.mcu_rows;
  const auto per_mcu = static_cast<size_t>(scan.blocks);
  best.record(spacing);
  const Decoded got = decode(&best, scan, 0, scan.mcus_per_row - 1);
  if (got.whole) demand(best.finish_scan());
  const std::vector<EntryPoint> points = best.recorded();
  const Decoded plain = decode(&baseline, scan, 0, scan.mcus_per_row - 1);
  demand(plain.whole == got.whole && plain.mcus == got.mcus);

  Slow slow(scan);
  uint64_t right = 0;
  std::vector<Block> blocks(static_cast<size_t>(mcus) * per_mcu, Block{});
  while (right < mcus && slow.mcu(&blocks[static_cast<size_t>(right) * per_mcu])) ++right;
  demand(right == got.mcus);
  const auto same = [&](const std::vector<Block>& other, uint64_t from, uint64_t to) {
    return std::equal(other.begin() + static_cast<ptrdiff_t>(from * per_mcu),
                      other.begin() + static_cast<ptrdiff_t>(to * per_mcu),
                      blocks.begin() + static_cast<ptrdiff_t>(from * per_mcu));
  };
  demand(same(got.blocks, 0, right) && same(plain.blocks, 0, right));

  // Decodes some columns, without and with entries.
  const auto part = [&](EntropyDecoder* decoder) {
    const Decoded columns = decode(decoder, scan, first, last);
    if (right == mcus) demand(columns.whole);
    for (uint64_t row = 0; row < columns.mcus / scan.mcus_per_row; ++row) {
      const uint64_t begin = row * scan.mcus_per_row;
      // A jump would skip damage before its entry, but a scan with entries has no damage.
      if (begin + last < right) demand(same(columns.blocks, begin + first, begin + last + 1));
    }
  };
  demand(best.start(scan));
  part(&best);
  if (right < mcus || points.empty()) return 0;
  const EntriesOf of = {0, file.size(), 0, mcus, spacing};
  Bytes blob(1 << 16);
  blob.resize(pack_entries(of, points, blob.data(), blob.size()));
  blob.shrink_to_fit();
  Entries entries;
  demand(!blob.empty() && entries.attach(blob.data(), blob.size()));
  for (EntropyDecoder* decoder : {&best, &baseline}) {
    demand(decoder->start(scan));
    decoder->use(&entries);
    part(decoder);
    demand(decoder->start(scan));
    decoder->verify(&entries);
    demand(decode(decoder, scan, 0, scan.mcus_per_row - 1).whole && decoder->finish_scan());
  }
  // Verification refuses an entry that is moved by a bit, or that has another predictor.
  std::vector<EntryPoint> moved = points;
  EntryPoint& point = moved[moved.size() / 2];
  if (spacing % 2 == 0) {
    ++point.bit;
  } else {
    point.dc[0] = static_cast<int16_t>(point.dc[0] + 1);
  }
  blob.resize(1 << 16);
  blob.resize(pack_entries(of, moved, blob.data(), blob.size()));
  if (!blob.empty() && entries.attach(blob.data(), blob.size())) {
    demand(best.start(scan));
    best.verify(&entries);
    demand(!decode(&best, scan, 0, scan.mcus_per_row - 1).whole);
  }
  return 0;
}
