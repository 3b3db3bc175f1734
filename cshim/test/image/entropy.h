// JPEG files of every usual kind, and the ways to decode them, for the tests of the entropy decoder
// and of entry points. TS_TEST_ROUNDS=N multiplies the number of rounds by N, for long runs, which
// start with the same seeds.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/error.h"
#include "image/entries.h"
#include "image/jpeg.h"
#include "image/jpeg_entropy.h"
#include "image/samples.h"

namespace samples {

using namespace ts::image;

inline int rounds() {
  const char* value = std::getenv("TS_TEST_ROUNDS");
  return value == nullptr ? 1 : std::max(1, std::atoi(value));
}

struct Kind {
  const char* name;
  int channels;
  int factors[3][2];
};

inline const Kind kKinds[] = {
    {"444", 3, {{1, 1}, {1, 1}, {1, 1}}},  {"422", 3, {{2, 1}, {1, 1}, {1, 1}}},
    {"420", 3, {{2, 2}, {1, 1}, {1, 1}}},  {"440", 3, {{1, 2}, {1, 1}, {1, 1}}},
    {"411", 3, {{4, 1}, {1, 1}, {1, 1}}},  {"mixed chroma", 3, {{2, 2}, {2, 1}, {1, 2}}},
    {"grey", 1, {{1, 1}, {1, 1}, {1, 1}}}, {"grey 2x2", 1, {{2, 2}, {1, 1}, {1, 1}}},
};

// Returns a random file of a usual kind.
inline Bytes usual(Random& random, const Kind& kind, int width, int height) {
  JpegOptions options;
  const int qualities[] = {1, 5, 20, 50, 75, 90, 97, 100};
  options.quality = qualities[random() % 8];
  options.baseline = random() % 2 == 0;  // otherwise 16-bit quantisers at low qualities
  options.optimize = random() % 2 == 0;
  if (random() % 3 == 0) options.restart_interval = uniform(random, 1, 12);
  for (int c = 0; c < 3; ++c) {
    options.sampling[c][0] = kind.factors[c][0];
    options.sampling[c][1] = kind.factors[c][1];
  }
  Image image = picture(random, width, height, kind.channels);
  if (random() % 3 == 0) {  // noise: every coefficient, and the longest codes
    for (auto& byte : image.pixels) byte = static_cast<uint8_t>(random());
  }
  Bytes bytes = encode_jpeg(image, options);
  if (random() % 4 == 0) {  // fill bytes before markers, including restart markers
    for (size_t i = 2; i + 1 < bytes.size(); ++i) {
      if (bytes[i] != 0xFF || bytes[i + 1] == 0 || bytes[i + 1] == 0xFF) continue;
      const auto fill = static_cast<size_t>(uniform(random, 0, 3));
      bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(i), fill, 0xFF);
      i += fill + 1;
      if (bytes[i] < 0xD0 || bytes[i] > 0xD8) {
        if (bytes[i] == 0xD9) break;
        i += static_cast<size_t>(bytes[i + 1]) << 8 | bytes[i + 2];
      }
    }
  }
  return bytes;
}

// Changes the quantisers of a file to any values, so that coefficients leave the range of 8-bit
// samples and the inverse DCT overflows.
inline void make_quantisers_absurd(Random& random, Bytes* file) {
  Bytes& of = *file;
  for (size_t at = 2; at + 4 < of.size() && of[at + 1] != 0xDA;) {
    if (of[at + 1] == 0xFF) {
      ++at;
      continue;
    }
    const size_t length = size_t{of[at + 2]} << 8 | of[at + 3];
    for (size_t k = at + 4; of[at + 1] == 0xDB && k < at + 2 + length;) {
      const size_t bytes = of[k] >> 4 == 0 ? 64 : 128;
      for (size_t q = k + 1; q <= k + bytes; ++q) {
        if (random() % 4 == 0) of[q] = static_cast<uint8_t>(random() | 1);
      }
      k += bytes + 1;
    }
    at += 2 + length;
  }
}

inline void draw_size(Random& random, int* width, int* height) {
  const int limits[] = {3, 17, 40, 150};
  *width = uniform(random, 1, limits[random() % 4]);
  *height = uniform(random, 1, limits[random() % 4]);
}

struct Result {
  int32_t code = TS_ERROR_NONE;
  std::string message;
  Bytes pixels;
};

// Decodes a JPEG like image.cc.
inline Result decode_by(JpegDecoder* decoder, const Bytes& bytes, const Box& box,
                        const EntriesIn* in = nullptr, EntriesOut* out = nullptr) {
  const Bytes exact(bytes);
  const int32_t width = box.width();
  const int32_t height = box.height();
  const ts_image_geometry geometry = {sizeof geometry, box.x0, box.y0, width, height,
                                      width,           height, 0,      0,     width,
                                      height,          0,      false,  0,     false};
  Result result;
  result.pixels.resize(static_cast<size_t>(width) * static_cast<size_t>(height) * 3);
  const Outcome outcome(ts::guard(__func__, [&] {
    Resizer resizer;
    const Box needed =
        resizer.start(geometry, result.pixels.data(), static_cast<size_t>(width) * 3);
    decoder->decode(exact.data(), exact.size(), needed, &resizer, in, out);
  }));
  result.code = outcome.code;
  result.message = outcome.message;
  if (result.code != TS_ERROR_NONE) result.pixels.clear();
  return result;
}

inline Box draw_box(Random& random, int width, int height) {
  const int w = random() % 4 == 0 ? std::min(width, 3) : uniform(random, 1, width);
  const int h = random() % 4 == 0 ? std::min(height, 3) : uniform(random, 1, height);
  const int x = uniform(random, 0, width - w);
  const int y = uniform(random, 0, height - h);
  return {x, y, x + w, y + h};
}

// Returns a random geometry for an image of this size, resized to at most `side` pixels a side.
inline ts_image_geometry draw_geometry(Random& random, int width, int height, int side) {
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.orientation = random() % 3 == 0 ? uniform(random, 2, 8) : uniform(random, 0, 1);
  if (g.orientation >= 5) std::swap(width, height);
  const Box box = draw_box(random, width, height);
  g.crop_x = box.x0;
  g.crop_y = box.y0;
  g.crop_width = box.width();
  g.crop_height = box.height();
  g.resize_width = random() % 4 == 0 ? g.crop_width : uniform(random, 1, side);
  g.resize_height = random() % 4 == 0 ? g.crop_height : uniform(random, 1, side);
  const Box window = random() % 2 == 0 ? Box{0, 0, g.resize_width, g.resize_height}
                                       : draw_box(random, g.resize_width, g.resize_height);
  g.window_x = window.x0;
  g.window_y = window.y0;
  g.window_width = window.width();
  g.window_height = window.height();
  g.flip = random() % 2 == 0;
  g.interpolation = uniform(random, 0, 3);
  return g;
}

struct Blob {
  Bytes bytes;
  uint64_t proof = 0;
};

// Makes the entries of a file.
inline Blob make_blob(JpegDecoder* decoder, const Bytes& file, uint32_t spacing) {
  Blob blob;
  blob.bytes.resize(1 << 20);
  EntriesOut out = {spacing, blob.bytes.data(), blob.bytes.size()};
  decoder->make_entries(file.data(), file.size(), &out);
  blob.bytes.resize(out.written);
  blob.proof = out.proof;
  return blob;
}

// Corrects the digests, like a forger.
inline void seal(Bytes* blob, const Bytes& file) {
  const auto put = [&](size_t at, auto value) { std::memcpy(&(*blob)[at], &value, sizeof value); };
  put(8, xxh64(file.data(), file.size(), 0));
  put(16, static_cast<uint32_t>(file.size()));
  put(56, xxh64(blob->data() + 64, blob->size() - 64, xxh64(blob->data(), 56, 0)));
}

}  // namespace samples
