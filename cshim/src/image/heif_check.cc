#include "image/heif_check.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.h"

namespace ts::image {
namespace {

[[noreturn]] void damaged(const std::string& what) {
  throw Failure(TS_ERROR_DECODE, "damaged HEIF: " + what);
}

[[noreturn]] void unsupported(const std::string& what) {
  throw Failure(TS_ERROR_UNSUPPORTED, "HEIF: " + what);
}

// Bytes of the file.
struct Span {
  const uint8_t* data = nullptr;
  size_t size = 0;

  uint64_t number(int bytes) {  // big-endian; moves past the number
    const uint8_t* const at = take(static_cast<size_t>(bytes)).data;
    uint64_t value = 0;
    for (int i = 0; i < bytes; ++i) value = value << 8 | at[i];
    return value;
  }
  Span take(size_t count) {
    if (count > size) damaged("a box ends early");
    const Span taken = {data, count};
    data += count;
    size -= count;
    return taken;
  }
};

// Returns the number of a type written as four characters.
constexpr uint32_t code(std::string_view name) {
  uint32_t value = 0;
  for (const char c : name) value = value << 8 | static_cast<uint8_t>(c);
  return value;
}

struct BoxSpan {
  uint32_t type;
  Span content;
};

BoxSpan next_box(Span* from) {
  const size_t left = from->size;
  uint64_t size = from->number(4);
  const auto type = static_cast<uint32_t>(from->number(4));
  size_t header = 8;
  if (size == 1) {
    size = from->number(8);
    header = 16;
  } else if (size == 0) {  // up to the end
    size = left;
  }
  if (size < header || size > left) damaged("a box is larger than its place");
  return {type, from->take(static_cast<size_t>(size) - header)};
}

// Reads bits from the highest on. Bits after the end are zeros.
class Bits {
 public:
  explicit Bits(std::vector<uint8_t> bytes) : bytes_(std::move(bytes)) {}

  uint32_t read(int count) {  // at most 32
    uint64_t value = 0;
    for (int i = 0; i < count; ++i, ++at_) {
      const size_t byte = at_ / 8;
      const int bit = byte < bytes_.size() ? bytes_[byte] >> (7 - at_ % 8) & 1 : 0;
      value = value << 1 | static_cast<uint64_t>(bit);
    }
    return static_cast<uint32_t>(value);
  }
  void skip(size_t count) { at_ += count; }
  // An unsigned Exp-Golomb code.
  uint64_t exp_golomb() {
    int zeros = 0;
    while (read(1) == 0) {
      if (++zeros > 32) damaged("a number in a parameter set");
    }
    return (uint64_t{1} << zeros) - 1 + (zeros == 0 ? 0 : read(zeros));
  }

 private:
  std::vector<uint8_t> bytes_;
  size_t at_ = 0;
};

// The share of the limit on pixels that a picture may have: decoding needs up to 16 bytes a pixel
// for HEVC, and 32 for AV1, of 10 bits and with alpha, while other formats need up to 8.
constexpr int64_t kHevcShare = 2;
constexpr int64_t kAv1Share = 4;

// Limits of libheif 1.19 and older, which newer versions lower. A count takes no bytes in the file,
// so without a limit a few bytes could demand much memory and time.
constexpr uint64_t kMaxItems = 20000;
constexpr uint64_t kMaxExtents = 32;  // of an item

// Pictures may share bytes, and each is read separately. This is the maximum of all their bytes
// together, in multiples of the file's size.
constexpr uint64_t kMaxShared = 16;

// HEVC codes whole blocks, so a picture may exceed its visible part by less than a block.
constexpr uint64_t kBlock = 64;
constexpr uint64_t kMaxCodedSide = 1000000 + kBlock;  // the visible sides are limited in image.cc

class Checker {
 public:
  Checker(Span file, int64_t max_pixels) : file_(file), max_pixels_(max_pixels / kHevcShare) {}

  HeifKind run() {
    bool found = false;
    for (Span rest = file_; rest.size > 0;) {
      const BoxSpan box = next_box(&rest);
      if (box.type != code("meta")) continue;
      if (found) unsupported("two lists of items");
      found = true;
      read_meta(box.content);
    }
    if (!found) unsupported("no picture, but perhaps a video");
    for (const Item& item : items_) check_picture(item);
    for (const Item& item : items_) check_grid(item);
    return kind_;
  }

 private:
  struct Item {
    uint64_t id;
    int method;  // how its bytes are found: 0 in the file, 1 in the box of item data
    std::vector<std::array<uint64_t, 2>> extents;  // offset, length
  };

  void check_pixels(uint64_t width, uint64_t height) const {
    if (width > 0 && height > static_cast<uint64_t>(max_pixels_) / width) {
      unsupported("a picture of " + std::to_string(width) + " x " + std::to_string(height) +
                  " is over the limit of " + std::to_string(max_pixels_) +
                  " pixels, a half (AVIF: a quarter) of that of other formats");
    }
  }

  void read_meta(Span meta) {
    std::map<uint32_t, Span> boxes;
    meta.take(4);  // the version and flags
    while (meta.size > 0) {
      const BoxSpan box = next_box(&meta);
      const bool repeated = !boxes.emplace(box.type, box.content).second;
      if (repeated && box.type != code("free") && box.type != code("uuid")) {
        damaged("a box comes twice");
      }
    }
    if (boxes.count(code("idat")) != 0) item_data_ = boxes[code("idat")];
    if (boxes.count(code("iinf")) != 0) read_types(boxes[code("iinf")]);
    for (const auto& [id, type] : types_) {
      if (type != code("av01")) continue;
      max_pixels_ = max_pixels_ / (kAv1Share / kHevcShare);
      break;
    }
    if (boxes.count(code("iref")) != 0) read_references(boxes[code("iref")]);
    if (boxes.count(code("iloc")) != 0) read_places(boxes[code("iloc")]);
    if (boxes.count(code("iprp")) == 0) damaged("no properties");
    for (Span properties = boxes[code("iprp")]; properties.size > 0;) {
      const BoxSpan box = next_box(&properties);
      for (Span list = box.content; box.type == code("ipco") && list.size > 0;) {
        read_property(next_box(&list));
      }
    }
  }

  // Reads the types of the items, and refuses codecs whose pictures are not checked here.
  void read_types(Span list) {
    constexpr std::array<std::string_view, 13> kUnchecked = {"avc1", "avc3", "evc1", "hev1", "iovl",
                                                             "j2k1", "j2ki", "jpeg", "lhv1", "mski",
                                                             "unci", "vvc1", "vvi1"};
    const uint64_t version = list.number(1);
    list.take(3);
    for (uint64_t count = list.number(version == 0 ? 2 : 4); count > 0; --count) {
      BoxSpan entry = next_box(&list);
      if (entry.type != code("infe")) continue;
      const uint64_t entry_version = entry.content.number(1);
      entry.content.take(3);
      if (entry_version < 2) unsupported("a list of items of before 2012");
      const uint64_t id = entry.content.number(entry_version == 2 ? 2 : 4);
      entry.content.take(2);  // the protection
      const auto type = static_cast<uint32_t>(entry.content.number(4));
      for (const std::string_view name : kUnchecked) {
        if (type == code(name)) unsupported("an item of type " + std::string(name));
      }
      if (!types_.emplace(id, type).second) damaged("an item comes twice");
    }
  }

  // Refuses pictures that refer to each other in a cycle, which libheif 1.15 follows until its
  // stack overflows. Without cycles the references end after three steps: a derived picture, its
  // parts, and the auxiliary pictures (alpha) of either.
  void read_references(Span list) {
    const int bytes = list.number(1) == 0 ? 2 : 4;
    list.take(3);
    std::set<uint64_t> parts;                   // of derived pictures
    std::map<uint64_t, bool> with_auxiliaries;  // whether one of them is not a coded picture
    std::vector<uint64_t> auxiliaries;
    while (list.size > 0) {
      BoxSpan box = next_box(&list);
      const uint64_t from = box.content.number(bytes);
      const bool part = box.type == code("dimg") && (is_a(from, "grid") || is_a(from, "iden"));
      const bool auxiliary = box.type == code("auxl");
      if (auxiliary) auxiliaries.push_back(from);
      for (uint64_t count = box.content.number(2); count > 0; --count) {
        const uint64_t to = box.content.number(bytes);
        if (part && !is_coded(to)) unsupported("a picture that is made of derived pictures");
        if (part) parts.insert(to);
        if (auxiliary) with_auxiliaries[to] |= !is_coded(from);
        if (with_auxiliaries.size() > kMaxItems) unsupported("references of too many items");
      }
    }
    for (const uint64_t id : auxiliaries) {
      if (with_auxiliaries.count(id) != 0) unsupported("an auxiliary picture of an auxiliary one");
    }
    for (const auto& [id, derived] : with_auxiliaries) {
      if (derived && parts.count(id) != 0) unsupported("a part with a derived auxiliary picture");
    }
  }

  void read_places(Span list) {
    const uint64_t version = list.number(1);
    list.take(3);
    const uint64_t sizes = list.number(2);
    const auto size = [&](int shift) {
      const auto bytes = static_cast<int>(sizes >> shift & 15);
      if (bytes != 0 && bytes != 4 && bytes != 8) damaged("a number of odd size");
      return bytes;
    };
    if (version > 2) unsupported("places of items of version " + std::to_string(version));
    uint64_t count = list.number(version < 2 ? 2 : 4);
    if (count > kMaxItems) unsupported("the places of " + std::to_string(count) + " items");
    for (; count > 0; --count) {
      Item item = {};
      item.id = list.number(version < 2 ? 2 : 4);
      if (version > 0) item.method = static_cast<int>(list.number(2) & 15);
      list.take(2);  // the place of the data: this file
      const uint64_t base = list.number(size(4));
      uint64_t extents = list.number(2);
      if (extents > kMaxExtents) {
        unsupported("an item in " + std::to_string(extents) + " pieces");
      }
      for (; extents > 0; --extents) {
        if (version > 0) list.number(size(0));  // an index
        const uint64_t offset = list.number(size(12));
        const uint64_t length = list.number(size(8));
        if (base > file_.size || offset > file_.size) damaged("an item beyond the data");
        item.extents.push_back({base + offset, length});
      }
      items_.push_back(std::move(item));
    }
  }

  void read_property(BoxSpan property) {
    Span content = property.content;
    if (property.type == code("ispe")) {
      content.take(4);
      const uint64_t width = content.number(4);
      check_pixels(width, content.number(4));
    } else if (property.type == code("hvcC")) {
      content.take(21);
      if ((content.number(1) & 3) != 3) unsupported("HEVC with short lengths");
      for (uint64_t arrays = content.number(1); arrays > 0; --arrays) {
        content.take(1);
        for (uint64_t count = content.number(2); count > 0; --count) {
          check_nal_unit(content.take(static_cast<size_t>(content.number(2))));
        }
      }
    } else if (property.type == code("av1C")) {
      content.take(2);
      constexpr uint64_t kDeepOrGrey = 0x40 | 0x20 | 0x10;
      constexpr uint64_t kHalved = 0x08 | 0x04;
      const uint64_t flags = content.number(1);
      kind_.av1_420 |= (flags & kDeepOrGrey) == 0 && (flags & kHalved) == kHalved;
      content.take(1);
      check_obus(content);
    }
  }

  // Returns the bytes of an item that must be in one piece.
  Span bytes_of(const Item& item) const {
    if (item.extents.size() != 1 || item.method > 1) unsupported("an item in several pieces");
    Span from = item.method == 0 ? file_ : item_data_;
    const auto [offset, length] = item.extents[0];
    if (offset > from.size || length > from.size - offset) damaged("an item beyond the data");
    from.take(static_cast<size_t>(offset));
    return length == 0 ? from : from.take(static_cast<size_t>(length));
  }

  bool is_a(uint64_t id, std::string_view name) const {
    const auto type = types_.find(id);
    return type != types_.end() && type->second == code(name);
  }

  bool is_coded(uint64_t id) const { return is_a(id, "hvc1") || is_a(id, "av01"); }

  void check_picture(const Item& item) {
    const bool hevc = is_a(item.id, "hvc1");
    if (!hevc && !is_a(item.id, "av01")) return;
    Span rest = bytes_of(item);
    read_ += rest.size;
    if (read_ / kMaxShared > file_.size) unsupported("pictures that share their bytes");
    if (!hevc) return check_obus(rest);
    while (rest.size > 0) check_nal_unit(rest.take(static_cast<size_t>(rest.number(4))));
  }

  // Checks the size of a grid. This also limits the time of decoding: all tiles may be the same
  // large picture.
  void check_grid(const Item& item) const {
    if (!is_a(item.id, "grid")) return;
    Span grid = bytes_of(item);
    grid.take(1);  // the version
    const int bytes = (grid.number(1) & 1) != 0 ? 4 : 2;
    const uint64_t rows = grid.number(1) + 1;
    const uint64_t tiles = rows * (grid.number(1) + 1);
    const uint64_t width = grid.number(bytes);
    const uint64_t height = grid.number(bytes);
    check_pixels(width, height);
    if (tiles > 1 && tiles > 4 * width * height / std::max<uint64_t>(largest_, 1)) {
      unsupported("a grid of " + std::to_string(tiles) + " pictures of up to " +
                  std::to_string(largest_) + " pixels for an image of " + std::to_string(width) +
                  " x " + std::to_string(height));
    }
  }

  // Checks the size in a sequence parameter set of HEVC (ITU-T H.265, 7.3.2.2). Other units of the
  // bit stream have no size.
  void check_nal_unit(Span unit) {
    if (unit.size < 2) return;
    const int type = unit.data[0] >> 1 & 63;
    const int layer = (unit.data[0] & 1) << 5 | unit.data[1] >> 3;
    if (type != 33 || layer != 0) return;
    std::vector<uint8_t> bytes;
    int zeros = 0;
    for (size_t i = 2; i < std::min<size_t>(unit.size, 512); ++i) {
      const uint8_t byte = unit.data[i];
      const bool prevention = zeros >= 2 && byte == 3;
      zeros = byte == 0 ? zeros + 1 : 0;
      if (!prevention) bytes.push_back(byte);
    }
    Bits bits(std::move(bytes));
    bits.skip(4);
    const auto layers = static_cast<int>(bits.read(3));  // temporal ones, less one
    bits.skip(1 + 88 + 8);                               // the general profile and level
    int profiles = 0;
    int levels = 0;
    for (int i = 0; i < layers; ++i) {
      profiles += static_cast<int>(bits.read(1));
      levels += static_cast<int>(bits.read(1));
    }
    if (layers > 0) bits.skip(2 * static_cast<size_t>(8 - layers));
    bits.skip(88 * static_cast<size_t>(profiles) + 8 * static_cast<size_t>(levels));
    bits.exp_golomb();                         // the number of the set
    if (bits.exp_golomb() == 3) bits.skip(1);  // the chroma format
    const uint64_t width = bits.exp_golomb();
    const uint64_t height = bits.exp_golomb();
    if (width > kMaxCodedSide || height > kMaxCodedSide) {
      unsupported("a picture of " + std::to_string(width) + " x " + std::to_string(height));
    }
    const auto visible = [](uint64_t side) { return side < kBlock ? 1 : side - (kBlock - 1); };
    check_pixels(visible(width), visible(height));
    largest_ = std::max(largest_, width * height);
  }

  // Checks the units of an AV1 bit stream (AV1, 5.3).
  void check_obus(Span rest) {
    while (rest.size > 0) {
      const uint64_t header = rest.number(1);
      if ((header & 4) != 0) rest.take(1);
      size_t size = rest.size;
      if ((header & 2) != 0) {
        uint64_t value = 0;
        for (int i = 0; i < 8; ++i) {
          const uint64_t byte = rest.number(1);
          value |= (byte & 127) << 7 * i;
          if ((byte & 128) == 0) break;
        }
        size = static_cast<size_t>(value);
      }
      const Span unit = rest.take(size);
      if ((header >> 3 & 15) == 1) check_sequence(unit);
    }
  }

  // Checks the size in a sequence header of AV1 (5.5.1). A frame may have any size that its bits
  // can express, unless the header belongs to a still picture.
  void check_sequence(Span header) {
    const size_t size = std::min<size_t>(header.size, 512);
    Bits bits(std::vector<uint8_t>(header.data, header.data + size));
    bits.skip(3 + 1);  // the profile, and whether it is a still picture
    const bool reduced = bits.read(1) == 1;
    if (reduced) {
      bits.skip(5);  // the level
    } else {
      skip_operating_points(&bits);
    }
    const auto width_bits = static_cast<int>(bits.read(4)) + 1;
    const auto height_bits = static_cast<int>(bits.read(4)) + 1;
    if (!reduced &&
        (uint64_t{1} << (width_bits + height_bits)) / 4 > static_cast<uint64_t>(max_pixels_)) {
      unsupported("AV1 whose frames may be larger than the header says");
    }
    const uint64_t width = bits.read(width_bits) + uint64_t{1};
    const uint64_t height = bits.read(height_bits) + uint64_t{1};
    check_pixels(width, height);
    largest_ = std::max(largest_, width * height);
  }

  static void skip_operating_points(Bits* bits) {
    bool model = false;
    size_t delay_bits = 0;
    if (bits->read(1) == 1) {  // timing
      bits->skip(64);
      if (bits->read(1) == 1) bits->exp_golomb();
      model = bits->read(1) == 1;
      if (model) {
        delay_bits = bits->read(5) + 1;
        bits->skip(32 + 5 + 5);
      }
    }
    const bool delays = bits->read(1) == 1;
    for (uint32_t points = bits->read(5) + 1; points > 0; --points) {
      bits->skip(12);
      if (bits->read(5) > 7) bits->skip(1);  // the level, and its tier
      if (model && bits->read(1) == 1) bits->skip(2 * delay_bits + 1);
      if (delays && bits->read(1) == 1) bits->skip(4);
    }
  }

  Span file_;
  HeifKind kind_;
  int64_t max_pixels_;
  uint64_t largest_ = 0;  // pixels of a coded picture
  uint64_t read_ = 0;     // bytes of pictures
  Span item_data_;
  std::map<uint64_t, uint32_t> types_;  // by the items' numbers
  std::vector<Item> items_;
};

}  // namespace

HeifKind heif_check(const uint8_t* data, size_t bytes, int64_t max_pixels) {
  return Checker({data, bytes}, max_pixels).run();
}

}  // namespace ts::image
