// A JPEG on which the search for entry points (jpeg/sync.h) takes longest.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <random>
#include <utility>
#include <vector>

namespace unsynchronised {

using Bytes = std::vector<uint8_t>;

constexpr int kBlockBytes = 65;

// Returns an image of this many MCUs, with 4:2:0 if `subsampled` is set, else 4:4:4. A symbol of
// its scan has 8 bits, the DC difference 16, and each bit except the last of a byte is 0. A decoder
// that starts at a wrong byte finds blocks of 65 bytes like the right one, but never reaches the
// right position.
inline Bytes image(std::mt19937& random, int columns, int rows, bool subsampled) {
  const int side = subsampled ? 16 : 8;
  const int width = columns * side;
  const int height = rows * side;
  Bytes file = {0xFF, 0xD8};
  const auto add = [&](std::initializer_list<int> bytes) {
    for (const int byte : bytes) file.push_back(static_cast<uint8_t>(byte));
  };
  add({0xFF, 0xDB, 0, 67, 0});  // quantisers: all 1
  file.insert(file.end(), 64, 1);
  const int factors = subsampled ? 0x22 : 0x11;
  add({0xFF, 0xC0, 0, 17, 8, height >> 8, height & 0xFF, width >> 8, width & 0xFF, 3});
  add({1, factors, 0, 2, 0x11, 0, 3, 0x11, 0});
  // Two codes of one code word of 7 bits: a DC difference of 9 bits, and an AC value of one.
  for (const auto& [table, symbol] : {std::pair<int, int>{0x00, 9}, {0x10, 1}}) {
    add({0xFF, 0xC4, 0, 20, table, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, symbol});
  }
  add({0xFF, 0xDA, 0, 12, 3, 1, 0, 2, 0, 3, 0, 0, 63, 0});
  int dc[3] = {0, 0, 0};
  for (int mcu = 0; mcu < columns * rows; ++mcu) {
    const int luminance = subsampled ? 4 : 1;
    for (int block = 0; block < luminance + 2; ++block) {
      int& predictor = dc[block < luminance ? 0 : block - luminance + 1];
      const int bit = static_cast<int>(random() & 1);
      const bool up = predictor <= 0;
      predictor += up ? 256 + bit : bit - 511;
      add({up ? 1 : 0, bit});
      for (int i = 1; i < 64; ++i) file.push_back(static_cast<uint8_t>(random() & 1));
    }
  }
  add({0xFF, 0xD9});
  return file;
}

}  // namespace unsynchronised
