// Synthetic photographs as JPEGs, for benchmarks without an archive.
#pragma once

#include <algorithm>
#include <cstdio>
// jpeglib.h needs cstdio before it.
#include <jpeglib.h>

#include "image_bench.h"

namespace bench {

// Returns pixels with a photograph's spectrum: noise whose amplitude falls with its frequency.
inline Bytes synthetic(std::mt19937& random, int width, int height) {
  std::vector<double> sum(static_cast<size_t>(width) * static_cast<size_t>(height) * 3, 128.0);
  std::normal_distribution<double> normal(0, 1);
  for (int cell = 128; cell >= 1; cell /= 2) {
    const int across = width / cell + 2;
    const int down = height / cell + 2;
    std::vector<double> grid(static_cast<size_t>(across) * static_cast<size_t>(down) * 3);
    for (size_t i = 0; i < grid.size(); i += 3) {
      const double light = normal(random);
      for (size_t c = 0; c < 3; ++c) grid[i + c] = light + 0.35 * normal(random);
    }
    const double amplitude = 4.0 * std::pow(cell, 0.55);
    for (int y = 0; y < height; ++y) {
      for (int x = 0; x < width; ++x) {
        const double fx = static_cast<double>(x % cell) / cell;
        const double fy = static_cast<double>(y % cell) / cell;
        const auto at = [&](int column, int row, int c) {
          return grid[(static_cast<size_t>(row) * static_cast<size_t>(across) +
                       static_cast<size_t>(column)) *
                          3 +
                      static_cast<size_t>(c)];
        };
        for (int c = 0; c < 3; ++c) {
          const int gx = x / cell;
          const int gy = y / cell;
          const double top = at(gx, gy, c) * (1 - fx) + at(gx + 1, gy, c) * fx;
          const double bottom = at(gx, gy + 1, c) * (1 - fx) + at(gx + 1, gy + 1, c) * fx;
          sum[(static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)) * 3 +
              static_cast<size_t>(c)] += amplitude * (top * (1 - fy) + bottom * fy);
        }
      }
    }
  }
  Bytes pixels(sum.size());
  for (size_t i = 0; i < sum.size(); ++i) {
    pixels[i] = static_cast<uint8_t>(std::clamp(sum[i], 0.0, 255.0));
  }
  return pixels;
}

inline Bytes encode(const Bytes& pixels, int width, int height, int quality, bool subsampled) {
  jpeg_compress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_compress(&codec);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&codec, &out, &size);
  codec.image_width = static_cast<JDIMENSION>(width);
  codec.image_height = static_cast<JDIMENSION>(height);
  codec.input_components = 3;
  codec.in_color_space = JCS_RGB;
  jpeg_set_defaults(&codec);
  jpeg_set_quality(&codec, quality, TRUE);
  codec.optimize_coding = TRUE;  // every image has its own tables
  codec.comp_info[0].h_samp_factor = codec.comp_info[0].v_samp_factor = subsampled ? 2 : 1;
  jpeg_start_compress(&codec, TRUE);
  while (codec.next_scanline < codec.image_height) {
    JSAMPROW row = const_cast<uint8_t*>(pixels.data()) +
                   size_t{codec.next_scanline} * static_cast<size_t>(width) * 3;
    jpeg_write_scanlines(&codec, &row, 1);
  }
  jpeg_finish_compress(&codec);
  jpeg_destroy_compress(&codec);
  Bytes bytes(out, out + size);
  std::free(out);
  return bytes;
}

inline std::vector<Bytes> photographs(size_t count) {
  constexpr int kWidth = 470;
  constexpr int kHeight = 400;
  constexpr size_t kTypical = 109 << 10;
  std::mt19937 random(1);
  int quality[2] = {0, 0};
  std::vector<Bytes> files;
  for (size_t i = 0; i < count; ++i) {
    const Bytes pixels = synthetic(random, kWidth, kHeight);
    const bool subsampled = i % 4 == 3;
    int& q = quality[subsampled ? 1 : 0];
    for (; q == 0 || (q < 100 && i < 4 &&
                      encode(pixels, kWidth, kHeight, q, subsampled).size() < kTypical);) {
      q = std::max(q, 39) + 1;
    }
    files.push_back(encode(pixels, kWidth, kHeight, q, subsampled));
  }
  return files;
}

}  // namespace bench
