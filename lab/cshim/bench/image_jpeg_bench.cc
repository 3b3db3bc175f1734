// The cost of each step of decoding a JPEG, on one thread: image_jpeg_bench ARCHIVE.tar[.gz]
// [PASSES]
// A third argument selects the rows whose names contain it.
// Prints CPU milliseconds for each image, the median of the passes, which alternate. The crop is a
// RandomResizedCrop(224), the same for every row.
#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "image/entries.h"
#include "image/jpeg.h"
#include "image/resize.h"
#include "image_bench.h"

using namespace bench;
using namespace ts::image;

namespace {

struct Row {
  std::string what;
  std::function<void(size_t)> one;
  std::vector<double> passes;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) stop("usage: image_jpeg_bench ARCHIVE.tar[.gz] [PASSES [NAME]]");
  const int passes = argc > 2 ? std::atoi(argv[2]) : 5;
  std::vector<Bytes> files;
  std::vector<ts_image_info> infos;
  std::vector<ts_image_geometry> crops;
  std::mt19937 random(1);
  size_t bytes = 0;
  for (Bytes& file : members(argv[1])) {
    ts_image_info info = {};
    info.size = sizeof info;
    check(ts_image_get_info(file.data(), file.size(), &info));
    if (info.format != TS_IMAGE_FORMAT_JPEG) continue;
    infos.push_back(info);
    crops.push_back(random_resized_crop(random, info.width, info.height, 224));
    bytes += file.size();
    files.push_back(std::move(file));
  }
  if (files.empty()) stop("no JPEG in the archive");
  const auto count = static_cast<double>(files.size());

  JpegDecoder own(1 << 28);
  JpegDecoder libjpeg(1 << 28);
  libjpeg.set_own(false);
  Resizer resizer;
  Resizer scalar(Kernel::kScalar);
  Bytes out;
  const auto decode = [&](JpegDecoder* decoder, size_t i, ts_image_geometry g, bool resize,
                          const EntriesIn* in = nullptr, EntriesOut* made = nullptr) {
    if (!resize) {
      g.resize_width = g.window_width = g.crop_width;
      g.resize_height = g.window_height = g.crop_height;
      g.window_x = g.window_y = 0;
      g.flip = false;
    }
    const size_t stride = static_cast<size_t>(g.window_width) * 3;
    out.resize(std::max(out.size(), stride * static_cast<size_t>(g.window_height)));
    check(ts::guard("decode", [&] {
      const Box box = resizer.start(g, out.data(), stride);
      decoder->decode(files[i].data(), files[i].size(), box, &resizer, in, made);
    }));
  };
  const auto whole = [&](size_t i) {
    ts_image_geometry g = {};
    g.size = sizeof g;
    g.crop_width = infos[i].width;
    g.crop_height = infos[i].height;
    return g;
  };
  size_t largest = 0, widest = 0;
  for (size_t i = 0; i < files.size(); ++i) {
    largest = std::max(largest, files[i].size());
    widest = std::max(widest, static_cast<size_t>(infos[i].width) * 3);
  }
  Bytes buffer(largest + 1024);
  Bytes source((widest + kRowSlack) * 64);
  for (auto& byte : source) byte = static_cast<uint8_t>(random());

  std::vector<Row> rows;
  const auto row = [&](std::string what, std::function<void(size_t)> one) {
    rows.push_back({std::move(what), std::move(one), {}});
  };
  row("whole, libjpeg-turbo", [&](size_t i) { decode(&libjpeg, i, whole(i), false); });
  row("whole, own Huffman", [&](size_t i) { decode(&own, i, whole(i), false); });
  row("crop, libjpeg-turbo", [&](size_t i) { decode(&libjpeg, i, crops[i], false); });
  row("crop, own Huffman", [&](size_t i) { decode(&own, i, crops[i], false); });
  row("crop, own, entries made", [&](size_t i) {
    EntriesOut made = {0, buffer.data(), buffer.size()};
    decode(&own, i, crops[i], false, nullptr, &made);
  });
  row("entries made alone", [&](size_t i) {
    EntriesOut made = {0, buffer.data(), buffer.size()};
    own.make_entries(files[i].data(), files[i].size(), &made);
  });
  struct Made {
    std::vector<Bytes> blobs;
    std::vector<uint64_t> proofs;
  };
  std::vector<Made> made_by_spacing;
  const uint32_t spacings[] = {0, 1, 4, 8, 16, 32};
  made_by_spacing.reserve(std::size(spacings));
  for (const uint32_t spacing : spacings) {
    Made made;
    double total = 0;
    int without = 0;
    for (const Bytes& file : files) {
      EntriesOut to = {spacing, buffer.data(), buffer.size()};
      own.make_entries(file.data(), file.size(), &to);
      made.blobs.emplace_back(buffer.begin(),
                              buffer.begin() + static_cast<std::ptrdiff_t>(to.written));
      made.proofs.push_back(to.proof);
      total += static_cast<double>(to.written);
      without += to.written == 0;
    }
    made_by_spacing.push_back(std::move(made));
    const std::string name = spacing == 0 ? "chosen" : std::to_string(spacing);
    std::printf("entries, spacing %-7s %6.2f %% of the files, %d files without\n", name.c_str(),
                100 * total / static_cast<double>(bytes), without);
    Made* kept = &made_by_spacing.back();
    row("crop, entries " + name, [&, kept](size_t i) {
      const EntriesIn in = {kept->blobs[i].data(), kept->blobs[i].size(), &kept->proofs[i]};
      decode(&own, i, crops[i], false, kept->blobs[i].empty() ? nullptr : &in);
    });
  }
  std::vector<uint64_t> planned((largest + (256 << 10)) / sizeof(uint64_t));
  row("crop, planned for a GPU", [&](size_t i) {
    Made& kept = made_by_spacing[0];
    const EntriesIn in = {kept.blobs[i].data(), kept.blobs[i].size(), &kept.proofs[i]};
    check(ts::guard("plan", [&] {
      PlanMemory to = {reinterpret_cast<uint8_t*>(planned.data()),
                       planned.size() * sizeof(uint64_t), nullptr};
      own.plan(files[i].data(), files[i].size(), infos[i], crops[i], in, &to);
    }));
  });
  row("crop, entries verified", [&](size_t i) {
    uint64_t proof = 0;
    const Bytes& blob = made_by_spacing[0].blobs[i];
    const EntriesIn in = {blob.data(), blob.size(), &proof};
    decode(&own, i, crops[i], false, &in);
  });
  row("crop, entries chosen, resize", [&](size_t i) {
    Made& kept = made_by_spacing[0];
    const EntriesIn in = {kept.blobs[i].data(), kept.blobs[i].size(), &kept.proofs[i]};
    decode(&own, i, crops[i], true, kept.blobs[i].empty() ? nullptr : &in);
  });
  row("crop, own, resize", [&](size_t i) { decode(&own, i, crops[i], true); });
  uint64_t sum = 0;
  row("digest of the file", [&](size_t i) { sum += xxh64(files[i].data(), files[i].size(), 0); });
  row("check of the segments", [&](size_t i) { jpeg_check(files[i].data(), files[i].size()); });
  const auto resize = [&](Resizer* by, size_t i) {
    Bytes& to = out;
    to.resize(std::max<size_t>(to.size(), 224 * 224 * 3));
    const Box box = by->start(crops[i], to.data(), 224 * 3);
    const size_t stride = static_cast<size_t>(box.width()) * 3 + kRowSlack;
    for (int32_t y = 0; y < box.height(); y += 16) {
      by->push(source.data(), stride, std::min(16, box.height() - y));
    }
  };
  row("resize, flip", [&](size_t i) { resize(&resizer, i); });
  row("resize, flip, scalar", [&](size_t i) { resize(&scalar, i); });

  for (int pass = 0; pass < passes; ++pass) {
    for (Row& r : rows) {
      if (argc > 3 && r.what.find(argv[3]) == std::string::npos) continue;
      const double start = cpu_seconds();
      for (size_t i = 0; i < files.size(); ++i) r.one(i);
      r.passes.push_back(1000 * (cpu_seconds() - start) / count);
    }
  }
  std::printf("%zu JPEGs, %.1f KB on average, %s, %d passes\n", files.size(),
              static_cast<double>(bytes) / count / 1024, ts_jpeg_version(), passes);
  for (Row& r : rows) {
    if (r.passes.empty()) continue;
    std::sort(r.passes.begin(), r.passes.end());
    std::printf("%-30s %8.4f ms an image (%.4f to %.4f)\n", r.what.c_str(),
                r.passes[r.passes.size() / 2], r.passes.front(), r.passes.back());
  }
  const JpegStats& stats = own.stats();
  std::printf(
      "%lld own, %lld libjpeg-turbo, %lld gave up; entries: %lld used, %lld refused (%llx)\n",
      static_cast<long long>(stats.own), static_cast<long long>(stats.libjpeg),
      static_cast<long long>(stats.gave_up), static_cast<long long>(stats.entries_used),
      static_cast<long long>(stats.entries_refused), static_cast<unsigned long long>(sum));
}
