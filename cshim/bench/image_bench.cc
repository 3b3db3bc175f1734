// What an image costs, on one thread: image_bench ARCHIVE.tar[.gz] [PASSES]
//
// Prints CPU milliseconds per image, the best of the passes: header; whole decode to RGB; the crop
// of a RandomResizedCrop(224) decoded without a resize; the same with the resize and flip (what a
// training loader does); the resize alone.
#include <time.h>
#include <zlib.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "torchstream.h"

namespace {

using Bytes = std::vector<uint8_t>;

[[noreturn]] void stop(const std::string& why) {
  std::fprintf(stderr, "image_bench: %s\n", why.c_str());
  std::exit(1);
}

void check(ts_error* error) {
  if (error != nullptr) stop(ts_error_message(error));
}

double cpu_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return static_cast<double>(now.tv_sec) + 1e-9 * static_cast<double>(now.tv_nsec);
}

// The regular members of a tar file, gzipped or not.
std::vector<Bytes> members(const char* path) {
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

// As torchvision draws it: area from 8 % to 100 %, aspect ratio from 3/4 to 4/3, ten attempts.
ts_image_geometry random_resized_crop(std::mt19937& random, int width, int height, int side) {
  std::uniform_real_distribution<double> area(0.08, 1);
  std::uniform_real_distribution<double> ratio(std::log(3.0 / 4), std::log(4.0 / 3));
  ts_image_geometry g = {0, 0, width, height, side, side, 0, 0, side, side, false};
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

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: image_bench ARCHIVE.tar[.gz] [PASSES]");
  const int passes = argc > 2 ? std::atoi(argv[2]) : 3;
  const std::vector<Bytes> files = members(argv[1]);
  if (files.empty()) stop("no files in the archive");
  std::mt19937 random(1);
  std::vector<ts_image_info> infos(files.size());
  std::vector<ts_image_geometry> crops;
  size_t bytes = 0;
  double pixels = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    check(ts_image_header(files[i].data(), files[i].size(), &infos[i]));
    crops.push_back(random_resized_crop(random, infos[i].width, infos[i].height, 224));
    bytes += files[i].size();
    pixels += static_cast<double>(infos[i].width) * infos[i].height;
  }
  const auto count = static_cast<double>(files.size());
  std::printf("%zu images, %.1f KB and %.3f megapixels on average, %s\n", files.size(),
              static_cast<double>(bytes) / count / 1024, pixels / count / 1e6, ts_jpeg_version());

  ts_image_decoder* decoder = nullptr;
  check(ts_image_decoder_new(0, &decoder));
  Bytes out;
  const auto measure = [&](const char* what, const std::function<void(size_t)>& one) {
    double best = 1e300;
    for (int pass = 0; pass < passes; ++pass) {
      const double start = cpu_seconds();
      for (size_t i = 0; i < files.size(); ++i) one(i);
      best = std::min(best, 1000 * (cpu_seconds() - start));
    }
    std::printf("%-28s %8.4f ms an image %10.0f images/s\n", what, best / count,
                1000 * count / best);
  };
  const auto decode = [&](size_t i, const ts_image_geometry& g) {
    const size_t stride = static_cast<size_t>(g.window_width) * 3;
    out.resize(std::max(out.size(), stride * static_cast<size_t>(g.window_height)));
    check(ts_image_decode(decoder, files[i].data(), files[i].size(), &g, out.data(), stride));
  };

  measure("header", [&](size_t i) {
    ts_image_info info;
    check(ts_image_header(files[i].data(), files[i].size(), &info));
  });
  measure("whole decode", [&](size_t i) {
    const int w = infos[i].width;
    const int h = infos[i].height;
    decode(i, {0, 0, w, h, w, h, 0, 0, w, h, false});
  });
  measure("crop decode", [&](size_t i) {
    ts_image_geometry g = crops[i];
    g.resize_width = g.window_width = g.crop_width;
    g.resize_height = g.window_height = g.crop_height;
    g.flip = false;
    decode(i, g);
  });
  measure("crop decode, resize, flip", [&](size_t i) { decode(i, crops[i]); });

  size_t widest = 0;
  for (const auto& info : infos)
    widest =
        std::max(widest, static_cast<size_t>(info.width) * 3 * static_cast<size_t>(info.height));
  Bytes source(widest);
  for (auto& byte : source) byte = static_cast<uint8_t>(random());
  out.resize(std::max<size_t>(out.size(), 224 * 224 * 3));
  measure("resize, flip", [&](size_t i) {
    check(ts_image_resize(decoder, source.data(), infos[i].width, infos[i].height,
                          static_cast<size_t>(infos[i].width) * 3, &crops[i], out.data(), 224 * 3));
  });
  ts_image_decoder_free(decoder);
}
