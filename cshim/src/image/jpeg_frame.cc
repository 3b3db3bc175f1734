#include "image/jpeg_frame.h"

#include <algorithm>
#include <cstring>

namespace ts::image {
namespace {

enum Marker : uint8_t {
  kSof0 = 0xC0,
  kSof1 = 0xC1,
  kDht = 0xC4,
  kSoi = 0xD8,
  kSos = 0xDA,
  kDqt = 0xDB,
  kDri = 0xDD,
  kApp0 = 0xE0,
  kApp14 = 0xEE,
  kApp15 = 0xEF,
  kCom = 0xFE,
};

constexpr uint8_t kNaturalOrder[64] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48,
    41, 34, 27, 20, 13, 6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23,
    30, 37, 44, 51, 58, 59, 52, 45, 38, 31, 39, 46, 53, 60, 61, 54, 47, 55, 62, 63};

int32_t round_up(int64_t value, int64_t unit) {
  return static_cast<int32_t>((value + unit - 1) / unit);
}

uint16_t word(const uint8_t* from) { return static_cast<uint16_t>(from[0] << 8 | from[1]); }

// Reads the segments of one file. Every function returns false if libjpeg-turbo has to read the
// file.
class Reader {
 public:
  Reader(const uint8_t* data, size_t bytes, size_t file_bytes, Tables* tables, Frame* frame,
         Scan* scan)
      : data_(data),
        bytes_(bytes),
        file_bytes_(file_bytes),
        tables_(tables),
        frame_(frame),
        scan_(scan) {
    *frame_ = {};
    *scan_ = {};
  }

  bool read() {
    if (bytes_ < 4 || data_[0] != 0xFF || data_[1] != kSoi) return false;
    size_t at = 2;
    while (true) {
      if (bytes_ - at < 4 || data_[at] != 0xFF) return false;
      const uint8_t marker = data_[at + 1];
      if (marker == 0xFF) {  // a fill byte
        ++at;
        continue;
      }
      const size_t length = word(data_ + at + 2);
      if (length < 2 || bytes_ - at - 2 < length) return false;
      const uint8_t* const segment = data_ + at + 4;
      at += 2 + length;
      if (!take(marker, segment, length - 2)) return false;
      if (marker == kSos) {
        scan_->begin = at;
        return true;
      }
    }
  }

 private:
  bool take(uint8_t marker, const uint8_t* segment, size_t size) {
    switch (marker) {
      case kSof0:
      case kSof1:
        return frame(segment, size);
      case kDht:
        return huffman(segment, size);
      case kDqt:
        return quantisers(segment, size);
      case kDri:
        if (size != 2) return false;
        scan_->restart_interval = word(segment);
        return true;
      case kSos:
        return scan(segment, size) && layout();
      case kApp0:
        if (size < 14 || std::memcmp(segment, "JFIF", 5) != 0) return true;
        jfif_ = true;
        return segment[5] == 1;  // libjpeg-turbo warns about other versions
      case kApp14:
        if (size >= 12 && std::memcmp(segment, "Adobe", 5) == 0) adobe_ = segment[11];
        return true;
      default:
        return (marker > kApp0 && marker <= kApp15) || marker == kCom;
    }
  }

  bool frame(const uint8_t* segment, size_t size) {
    if (frame_->components != 0 || size < 6 || segment[0] != 8) return false;
    frame_->height = word(segment + 1);
    frame_->width = word(segment + 3);
    const int components = segment[5];
    if (frame_->width == 0 || frame_->height == 0 || frame_->width > JPEG_MAX_DIMENSION ||
        frame_->height > JPEG_MAX_DIMENSION || (components != 1 && components != kMaxComponents) ||
        size != 6 + 3 * static_cast<size_t>(components)) {
      return false;
    }
    frame_->components = components;
    for (int c = 0; c < components; ++c) {
      const uint8_t* const from = segment + 6 + 3 * c;
      Frame::Component& to = frame_->component[c];
      id_[c] = from[0];
      to.h = from[1] >> 4;
      to.v = from[1] & 15;
      if (to.h < 1 || to.h > 4 || to.v < 1 || to.v > 4 || from[2] > 3 ||
          std::count(id_, id_ + c, id_[c]) != 0) {
        return false;
      }
      to.quantisers = tables_->quantisers[from[2]];
      quantiser_[c] = from[2];
      frame_->max_h = std::max(frame_->max_h, to.h);
      frame_->max_v = std::max(frame_->max_v, to.v);
    }
    return true;
  }

  bool huffman(const uint8_t* segment, size_t size) {
    while (size > 0) {
      if (size < 17 || (segment[0] & 0xEF) > 3) return false;
      const int kind = segment[0] >> 4;
      const int index = segment[0] & 15;
      HuffmanCode& code = tables_->codes[kind][index];
      size_t symbols = 0;
      code.counts[0] = 0;
      for (int i = 1; i <= 16; ++i) symbols += code.counts[i] = segment[i];
      if (symbols > 256 || size - 17 < symbols) return false;
      std::memcpy(code.symbols, segment + 17, symbols);
      std::memset(code.symbols + symbols, 0, sizeof code.symbols - symbols);
      (kind == 0 ? scan_->dc : scan_->ac)[index] = &code;
      segment += 17 + symbols;
      size -= 17 + symbols;
    }
    return true;
  }

  bool quantisers(const uint8_t* segment, size_t size) {
    while (size > 0) {
      const size_t bytes = segment[0] >> 4 == 0 ? 64 : 128;
      const int index = segment[0] & 15;
      if (segment[0] >> 4 > 1 || index > 3 || size - 1 < bytes) return false;
      uint16_t* const to = tables_->quantisers[index];
      for (size_t i = 0; i < 64; ++i) {
        to[kNaturalOrder[i]] = bytes == 64 ? segment[1 + i] : word(segment + 1 + 2 * i);
      }
      defined_[index] = true;
      segment += 1 + bytes;
      size -= 1 + bytes;
    }
    return true;
  }

  // Accepts a scan of all components, in their order.
  bool scan(const uint8_t* segment, size_t size) {
    const auto components = static_cast<size_t>(frame_->components);
    if (components == 0 || size != 4 + 2 * components || segment[0] != components) return false;
    const uint8_t* const last = segment + 1 + 2 * components;
    if (last[0] != 0 || last[1] != DCTSIZE2 - 1 || last[2] != 0) return false;
    for (size_t c = 0; c < components; ++c) {
      const uint8_t* const from = segment + 1 + 2 * c;
      dc_[c] = from[1] >> 4;
      ac_[c] = from[1] & 15;
      if (from[0] != id_[c] || dc_[c] > 3 || ac_[c] > 3 || scan_->dc[dc_[c]] == nullptr ||
          scan_->ac[ac_[c]] == nullptr || !defined_[quantiser_[c]]) {
        return false;
      }
    }
    return true;
  }

  // Derives the layout from the segments, as libjpeg-turbo's jdapimin.c and jdinput.c do.
  bool layout() {
    const bool alone = frame_->components == 1;
    if (alone) {
      frame_->color = jpeg::kGrey;
    } else if (jfif_) {
      frame_->color = jpeg::kYcc;
    } else if (adobe_ >= 0) {
      if (adobe_ > 1) return false;
      frame_->color = adobe_ == 0 ? jpeg::kRgb : jpeg::kYcc;
    } else {
      frame_->color = id_[0] == 'R' && id_[1] == 'G' && id_[2] == 'B' ? jpeg::kRgb : jpeg::kYcc;
    }
    const int mcu_width = DCTSIZE * (alone ? 1 : frame_->max_h);
    const int mcu_height = DCTSIZE * (alone ? 1 : frame_->max_v);
    scan_->data = data_;
    scan_->end = bytes_;
    scan_->components = frame_->components;
    scan_->mcus_per_row = static_cast<uint32_t>(round_up(frame_->width, mcu_width));
    scan_->mcu_rows = static_cast<uint32_t>(round_up(frame_->height, mcu_height));
    size_t blocks = 0;  // of the finest component
    for (int c = 0; c < frame_->components; ++c) {
      Frame::Component& component = frame_->component[c];
      const int64_t across = int64_t{frame_->width} * component.h;
      const int64_t down = int64_t{frame_->height} * component.v;
      component.width = round_up(across, frame_->max_h);
      component.height = round_up(down, frame_->max_v);
      component.across = alone ? 1 : component.h;
      component.down = alone ? 1 : component.v;
      blocks = std::max(blocks, size_t(round_up(across, int64_t{frame_->max_h} * DCTSIZE)) *
                                    size_t(round_up(down, int64_t{frame_->max_v} * DCTSIZE)));
      for (int i = 0; i < component.across * component.down; ++i) {
        if (scan_->blocks == kMaxBlocks) return false;
        scan_->component[scan_->blocks] = static_cast<uint8_t>(c);
        scan_->dc_table[scan_->blocks] = dc_[c];
        scan_->ac_table[scan_->blocks] = ac_[c];
        ++scan_->blocks;
      }
    }
    return file_bytes_ >= blocks / 8;  // JpegDecoder refuses smaller files
  }

  const uint8_t* data_;
  size_t bytes_, file_bytes_;
  Tables* tables_;
  Frame* frame_;
  Scan* scan_;
  bool jfif_ = false;
  int adobe_ = -1;  // the transform of Adobe's segment, if there is one
  bool defined_[4] = {};
  uint8_t id_[kMaxComponents] = {}, quantiser_[kMaxComponents] = {};
  uint8_t dc_[kMaxComponents] = {}, ac_[kMaxComponents] = {};
};

}  // namespace

bool frame_of(const jpeg_decompress_struct& codec, Frame* frame) {
  *frame = {};
  switch (codec.jpeg_color_space) {
    case JCS_GRAYSCALE:
      frame->color = jpeg::kGrey;
      break;
    case JCS_YCbCr:
      frame->color = jpeg::kYcc;
      break;
    case JCS_RGB:
      frame->color = jpeg::kRgb;
      break;
    default:
      return false;
  }
  if ((frame->color == jpeg::kGrey) != (codec.num_components == 1)) return false;
  frame->width = static_cast<int32_t>(codec.image_width);
  frame->height = static_cast<int32_t>(codec.image_height);
  frame->max_h = codec.max_h_samp_factor;
  frame->max_v = codec.max_v_samp_factor;
  frame->components = codec.num_components;
  for (int c = 0; c < codec.num_components; ++c) {
    const jpeg_component_info& from = codec.comp_info[c];
    if (from.quant_table == nullptr) return false;
    static_assert(sizeof from.quant_table->quantval == 64 * sizeof(uint16_t), "16 bits");
    frame->component[c] = {static_cast<int32_t>(from.downsampled_width),
                           static_cast<int32_t>(from.downsampled_height),
                           from.MCU_width,
                           from.MCU_height,
                           from.h_samp_factor,
                           from.v_samp_factor,
                           from.quant_table->quantval};
  }
  return true;
}

bool read_frame(const uint8_t* data, size_t bytes, size_t file_bytes, Tables* tables, Frame* frame,
                Scan* scan) {
  return Reader(data, bytes, file_bytes, tables, frame, scan).read();
}

}  // namespace ts::image
