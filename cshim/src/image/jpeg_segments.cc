// Reads the marker segments of a JPEG file without libjpeg, cheaply enough to check every file
// before it is decoded.
#include <algorithm>
#include <cstring>
#include <string>

#include "base/error.h"
#include "image/damage.h"
#include "image/jpeg.h"

namespace ts::image {
namespace {

[[noreturn]] void damaged(const std::string& what, size_t at) {
  throw_damage("damaged JPEG: " + what, at);
}

[[noreturn]] void truncated(size_t bytes) {
  throw_damage("truncated JPEG: no end marker up to the file's end", bytes);
}

[[noreturn]] void unsupported(const std::string& what) {
  throw Failure(TS_ERROR_UNSUPPORTED, "JPEG: " + what + " is not supported");
}

enum Marker : int {
  kSof0 = 0xC0,
  kDht = 0xC4,
  kJpg = 0xC8,
  kDac = 0xCC,
  kSof15 = 0xCF,
  kRst0 = 0xD0,
  kRst7 = 0xD7,
  kSoi = 0xD8,
  kEoi = 0xD9,
  kSos = 0xDA,
  kDri = 0xDD,
  kTem = 0x01,
};

bool is_frame(int marker) {
  return marker >= kSof0 && marker <= kSof15 && marker != kDht && marker != kJpg && marker != kDac;
}

class Segments {
 public:
  Segments(const uint8_t* data, size_t bytes) : data_(data), bytes_(bytes) {}

  // Returns the next marker, and moves segment() to its content. Skips the damage that libjpeg
  // skips with a warning: bytes before the marker, and a length below 2.
  int find_next() {
    while (at_ + 1 < bytes_ &&
           (data_[at_] != 0xFF || data_[at_ + 1] == 0xFF || data_[at_ + 1] == 0)) {
      ++at_;
    }
    return next(/*strict=*/false);
  }

  // Returns the next marker, and moves segment() to its content. Throws unless a marker starts
  // here.
  int next(bool strict = true) {
    if (at_ >= bytes_) truncated(bytes_);
    if (data_[at_] != 0xFF) damaged("no marker where one is due", at_);
    while (at_ < bytes_ && data_[at_] == 0xFF) ++at_;  // any number of fill bytes
    if (at_ >= bytes_) truncated(bytes_);
    const int marker = data_[at_++];
    size_ = 0;
    if (marker == 0) damaged("no marker where one is due", at_ - 2);
    if (marker == kSoi || marker == kEoi || marker == kTem ||
        (marker >= kRst0 && marker <= kRst7)) {
      return marker;
    }
    if (bytes_ - at_ < 2) truncated(bytes_);
    size_t length = static_cast<size_t>(data_[at_]) << 8 | data_[at_ + 1];
    if (!strict) length = std::max<size_t>(length, 2);
    if (length < 2) damaged("a segment of impossible length", at_);
    if (bytes_ - at_ < length) truncated(bytes_);
    segment_ = data_ + at_ + 2;
    size_ = length - 2;
    at_ += length;
    if (marker == kDri) {
      if (size_ != 2) damaged("a restart interval of impossible length", at_);
      restarts_ = (segment_[0] | segment_[1]) != 0;
    }
    return marker;
  }

  // Steps over the entropy-coded bytes of a scan, up to the marker that ends it.
  void skip_scan() {
    int expected = kRst0;
    while (true) {
      const void* found = at_ < bytes_ ? std::memchr(data_ + at_, 0xFF, bytes_ - at_) : nullptr;
      if (found == nullptr) truncated(bytes_);
      const auto start = static_cast<size_t>(static_cast<const uint8_t*>(found) - data_);
      at_ = start + 1;
      while (at_ < bytes_ && data_[at_] == 0xFF) ++at_;
      if (at_ >= bytes_) truncated(bytes_);
      const int marker = data_[at_];
      if (marker == 0) {  // a data byte 0xFF
        ++at_;
      } else if (marker >= kRst0 && marker <= kRst7) {
        if (!restarts_ || marker != expected) damaged("an unexpected restart marker", start);
        expected = marker == kRst7 ? kRst0 : marker + 1;
        ++at_;
      } else {
        at_ = start;
        return;
      }
    }
  }

  const uint8_t* segment() const { return segment_; }
  size_t size() const { return size_; }
  size_t at() const { return at_; }

 private:
  const uint8_t* data_;
  size_t bytes_;
  size_t at_ = 2;  // after the start marker
  const uint8_t* segment_ = nullptr;
  size_t size_ = 0;
  bool restarts_ = false;
};

}  // namespace

bool is_jpeg(const uint8_t* data, size_t bytes) {
  return bytes >= 3 && data[0] == 0xFF && data[1] == kSoi && data[2] == 0xFF;
}

ts_image_info jpeg_header(const uint8_t* data, size_t bytes) {
  Segments segments(data, bytes);
  while (true) {
    const int marker = segments.find_next();
    if (marker == kSoi || marker == kEoi || marker == kSos) {
      damaged("no frame header before marker " + std::to_string(marker), segments.at());
    }
    if (!is_frame(marker)) continue;
    const uint8_t* frame = segments.segment();
    if (segments.size() < 6) damaged("a frame header of impossible length", segments.at());
    const int process = marker - kSof0;
    if (process > 2 && process != 9 && process != 10) {
      unsupported(process == 3 || process == 11 ? "the lossless process"
                                                : "a hierarchical process");
    }
    if (frame[0] != 8) unsupported(std::to_string(frame[0]) + " bits a sample");
    ts_image_info info = {};
    info.format = TS_IMAGE_FORMAT_JPEG;
    info.height = frame[1] << 8 | frame[2];
    info.width = frame[3] << 8 | frame[4];
    info.components = frame[5];
    info.bit_depth = 8;
    info.progressive = process == 2 || process == 10;
    if (info.width == 0 || info.height == 0) damaged("an image without pixels", segments.at());
    if (segments.size() != 6 + 3 * static_cast<size_t>(info.components)) {
      damaged("a frame header of impossible length", segments.at());
    }
    if (info.components != 1 && info.components != 3 && info.components != 4) {
      unsupported("an image of " + std::to_string(info.components) + " components");
    }
    return info;
  }
}

void jpeg_check(const uint8_t* data, size_t bytes) {
  Segments segments(data, bytes);
  bool scanned = false;
  while (true) {
    const int marker = segments.next();
    if (marker == kSoi) damaged("a second start marker", segments.at());
    if (marker == kEoi) break;
    if (marker == kSos) {
      segments.skip_scan();
      scanned = true;
    }
  }
  if (!scanned) damaged("an end marker before any image data", segments.at());
}

}  // namespace ts::image
