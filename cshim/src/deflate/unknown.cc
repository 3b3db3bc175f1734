#include "deflate/unknown.h"

#include <algorithm>

namespace ts::image {
namespace {

constexpr uint64_t kWindowBytes = TS_INFLATER_WINDOW_BYTES;

}  // namespace

void UnknownWindow::start() {
  clear();
  bits_.fill(~uint64_t{0});
  known_ = end_ = kWindowBytes;
}

void UnknownWindow::clear() {
  known_ = end_ = 0;
  reach_ = 0;
  copies_.clear();
}

// Clears the bits of the positions from known_ to `before`.
void UnknownWindow::forget(uint64_t before) {
  if (before <= known_) return;
  if (before - known_ >= kRing) {
    bits_.fill(0);
  } else {
    for (uint64_t i = known_; i < before;) {
      const uint64_t n = std::min(before - i, 64 - i % 64);
      const uint64_t ones = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
      bits_[i % kRing / 64] &= ~(ones << i % 64);
      i += n;
    }
  }
  known_ = before;
}

bool UnknownWindow::any(uint64_t from, uint64_t to) const {
  for (uint64_t i = from; i < to;) {
    const uint64_t n = std::min(to - i, 64 - i % 64);
    const uint64_t ones = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
    if (bits_[i % kRing / 64] & ones << i % 64) return true;
    i += n;
  }
  return false;
}

void UnknownWindow::match(uint64_t source, uint32_t length, uint32_t distance) {
  if (source >= end_) return;
  const uint64_t at = source + distance;
  forget(at + length);
  if (!any(source, std::min(source + length, at))) return;
  copies_.push_back(
      {static_cast<uint32_t>(at), static_cast<uint16_t>(distance), static_cast<uint16_t>(length)});
  if (source < kWindowBytes) {
    reach_ = std::max(reach_, static_cast<uint32_t>(kWindowBytes - source));
  }
  for (uint64_t i = at; i < at + length;) {
    const uint64_t n = std::min(at + length - i, 64 - i % 64);
    const uint64_t ones = n == 64 ? ~uint64_t{0} : (uint64_t{1} << n) - 1;
    bits_[i % kRing / 64] |= ones << i % 64;
    i += n;
  }
  end_ = at + length;
}

}  // namespace ts::image
