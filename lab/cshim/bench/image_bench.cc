// The cost of an image on one thread: image_bench ARCHIVE.tar[.gz] [PASSES]
// Prints CPU milliseconds for each image, the best of the passes: header; whole decode to RGB; the
// crop of a RandomResizedCrop(224) decoded without a resize; the same with the resize and flip (the
// work of a training loader); the resize alone.
#include "image_bench.h"

#include <algorithm>
#include <functional>

using namespace bench;

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: image_bench ARCHIVE.tar[.gz] [PASSES]");
  const int passes = argc > 2 ? std::atoi(argv[2]) : 3;
  const std::vector<Bytes> files = members(argv[1]);
  if (files.empty()) stop("no files in the archive");
  std::mt19937 random(1);
  ts_image_info unread = {};
  unread.size = sizeof unread;
  std::vector<ts_image_info> infos(files.size(), unread);
  std::vector<ts_image_geometry> crops;
  size_t bytes = 0;
  double pixels = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    check(ts_image_get_info(files[i].data(), files[i].size(), &infos[i]));
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
    ts_image_info info = {};
    info.size = sizeof info;
    check(ts_image_get_info(files[i].data(), files[i].size(), &info));
  });
  measure("whole decode", [&](size_t i) {
    const int w = infos[i].width;
    const int h = infos[i].height;
    decode(i, {sizeof(ts_image_geometry), 0, 0, w, h, w, h, 0, 0, w, h, 1, false, 0, false});
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
