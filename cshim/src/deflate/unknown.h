// Inflating from the middle of a stream, before the window is known.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "torchstream_image.h"

namespace ts::image {

// Records the matches whose bytes depend on an unknown window. Positions count from the first byte
// of the window: 0 to 32767 are the window, and output starts at 32768. Copying the recorded
// matches again, in order, makes the output right once the window is known.
class UnknownWindow {
 public:
  using Copy = ts_inflate_copy;

  // Starts with a window of which every byte is unknown.
  void start();
  void clear();

  // Returns the position after the last byte that depends on the window, or 0 if there is none.
  uint64_t end() const { return end_; }
  // Records a match if it copies such a byte: `length` bytes, from position `source`.
  void match(uint64_t source, uint32_t length, uint32_t distance);

  const std::vector<Copy>& copies() const { return copies_; }
  // Returns how many bytes before the output the matches copy from: 0 to 32768.
  uint32_t reach() const { return reach_; }

 private:
  static constexpr uint64_t kRing = 65536;

  void forget(uint64_t before);
  bool any(uint64_t from, uint64_t to) const;

  // One bit for each of the last 65,536 positions before known_: whether the byte depends on the
  // window.
  std::array<uint64_t, kRing / 64> bits_;
  uint64_t known_ = 0;
  uint64_t end_ = 0;
  uint32_t reach_ = 0;
  std::vector<Copy> copies_;
};

}  // namespace ts::image
