// Shared by the image benchmarks: an archive's files, and the crops that a training loader draws.
#pragma once

#include <time.h>
#include <zlib.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string>
#include <vector>

#include "torchstream_image.h"

namespace bench {

using Bytes = std::vector<uint8_t>;

[[noreturn]] inline void stop(const std::string& why) {
  std::fprintf(stderr, "%s\n", why.c_str());
  std::exit(1);
}

inline void check(ts_error* error) {
  if (error != nullptr) stop(ts_error_message(error));
}

inline double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The regular members of a tar file, gzipped or not.
inline std::vector<Bytes> members(const char* path) {
  gzFile file = gzopen(path, "rb");
  if (file == nullptr) stop(std::string("cannot open ") + path);
  std::vector<Bytes> out;
  char header[512];
  while (gzread(file, header, sizeof header) == sizeof header && header[0] != 0) {
    const auto size =
        static_cast<size_t>(std::strtoull(std::string(header + 124, 12).c_str(), nullptr, 8));
    Bytes bytes((size + 511) / 512 * 512);
    if (gzread(file, bytes.data(), static_cast<unsigned>(bytes.size())) !=
        static_cast<int>(bytes.size())) {
      stop(std::string(path) + " ends early");
    }
    bytes.resize(size);
    if (header[156] == '0' || header[156] == 0) out.push_back(std::move(bytes));
  }
  gzclose(file);
  return out;
}

// Drawn as in torchvision: area from 8 % to 100 %, aspect ratio from 3/4 to 4/3, ten attempts.
inline ts_image_geometry random_resized_crop(std::mt19937& random, int width, int height,
                                             int side) {
  std::uniform_real_distribution<double> area(0.08, 1);
  std::uniform_real_distribution<double> ratio(std::log(3.0 / 4), std::log(4.0 / 3));
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.crop_width = width;
  g.crop_height = height;
  g.resize_width = g.resize_height = g.window_width = g.window_height = side;
  for (int i = 0; i < 10; ++i) {
    const double pixels = width * static_cast<double>(height) * area(random);
    const double aspect = std::exp(ratio(random));
    const auto w = static_cast<int>(std::lround(std::sqrt(pixels * aspect)));
    const auto h = static_cast<int>(std::lround(std::sqrt(pixels / aspect)));
    if (w < 1 || h < 1 || w > width || h > height) continue;
    g.crop_x = static_cast<int>(random() % static_cast<unsigned>(width - w + 1));
    g.crop_y = static_cast<int>(random() % static_cast<unsigned>(height - h + 1));
    g.crop_width = w;
    g.crop_height = h;
    break;
  }
  g.flip = random() % 2 == 1;
  return g;
}

}  // namespace bench
