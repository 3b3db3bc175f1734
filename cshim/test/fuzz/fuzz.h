// Helpers of the fuzzers. A wrong result aborts the process, which libFuzzer reports as a finding.
//
//   make fuzz                                        all, and the Go fuzzers, for a minute each
//   make fuzz FUZZ_TIME=1200 TARGETS="jpeg_fuzz=2"   two processes of one fuzzer, for 20 minutes
//   cshim/build/bin/jpeg_fuzz FILE                   one input, without clang
//
// corpus/ keeps a small part of the corpora that the fuzzers grew, and all findings; ctest replays
// it. The file name of a finding describes the finding.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "image/entries.h"
#include "image/exif.h"
#include "image/resize.h"
#include "torchstream_image.h"

namespace fuzz {

using Bytes = std::vector<uint8_t>;

inline void demand(bool condition) {
  if (!condition) std::abort();
}

// Draws choices from a hash of the input, so that any file is a seed.
class Choices {
 public:
  Choices(const uint8_t* data, size_t size) : state_(ts::image::xxh64(data, size, 1)) {}

  int32_t draw(int32_t from, int32_t to) {  // inclusive
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return from + static_cast<int32_t>((state_ >> 33) % static_cast<uint64_t>(to - from + 1));
  }

 private:
  uint64_t state_;
};

// Reads numbers from the input itself. Returns zeros at the end of the input.
class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : at_(data), end_(data + size) {}

  template <typename T>
  T take() {
    T value = {};
    const size_t n = std::min(sizeof value, left());
    std::memcpy(&value, at_, n);
    at_ += n;
    return value;
  }
  // Returns mostly a number from `from` to `to`, and sometimes any number.
  int32_t number(int32_t from, int32_t to) {
    const auto byte = take<uint8_t>();
    if (byte == 0xFF) return take<int32_t>();
    return from + static_cast<int32_t>(byte % (int64_t{to} - from + 1));
  }
  size_t left() const { return static_cast<size_t>(end_ - at_); }
  const uint8_t* rest() const { return at_; }

 private:
  const uint8_t *at_, *end_;
};

struct Outcome {
  explicit Outcome(ts_error* error) {
    if (error == nullptr) return;
    code = ts_error_code(error);
    message = ts_error_message(error);
    demand(!message.empty());
    ts_error_free(error);
  }
  // Demands success, or an error that bytes can cause: damaged or unsupported.
  void of_bytes() const {
    demand(code == TS_ERROR_NONE || code == TS_ERROR_DECODE || code == TS_ERROR_UNSUPPORTED);
  }

  int32_t code = TS_ERROR_NONE;
  std::string message;
};

struct Picture {
  int32_t width = 0, height = 0;
  Bytes pixels;  // RGB, without gaps; its memory ends with the last pixel

  Picture(int32_t w, int32_t h)
      : width(w), height(h), pixels(static_cast<size_t>(w) * static_cast<size_t>(h) * 3, 0x5A) {}
  size_t stride() const { return static_cast<size_t>(width) * 3; }
};

inline ts_image_geometry whole(const ts_image_info& info) {
  const int32_t w = info.width;
  const int32_t h = info.height;
  return {sizeof(ts_image_geometry), 0, 0, w, h, w, h, 0, 0, w, h, 0, false, 0, false};
}

// Returns a random valid geometry for an image.
inline ts_image_geometry any_geometry(Choices* choices, int32_t width, int32_t height) {
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.orientation = choices->draw(0, 1) == 0 ? 0 : choices->draw(1, 8);
  if (g.orientation >= 5) std::swap(width, height);
  g.crop_width = choices->draw(1, width);
  g.crop_height = choices->draw(1, height);
  g.crop_x = choices->draw(0, width - g.crop_width);
  g.crop_y = choices->draw(0, height - g.crop_height);
  const bool resized = choices->draw(0, 1) == 0;
  g.resize_width = resized ? choices->draw(1, 40) : g.crop_width;
  g.resize_height = resized ? choices->draw(1, 40) : g.crop_height;
  g.window_width = choices->draw(1, g.resize_width);
  g.window_height = choices->draw(1, g.resize_height);
  g.window_x = choices->draw(0, g.resize_width - g.window_width);
  g.window_y = choices->draw(0, g.resize_height - g.window_height);
  g.flip = choices->draw(0, 1) == 1;
  g.interpolation = choices->draw(TS_INTERPOLATION_DEFAULT, TS_INTERPOLATION_BICUBIC);
  return g;
}

// Decodes an image file of any format: the header, the whole image, and a resized and turned part,
// which must equal the same part resized and turned from the whole image. Returns whether both
// decodes succeeded, and writes the whole image to *out.
inline bool image_file(ts_image_decoder* decoder, const uint8_t* input, size_t size,
                       int64_t max_pixels, Picture* out) {
  const Bytes file(input, input + size);  // so that ASAN detects reads beyond its ends
  ts_image_info info = {};
  info.size = sizeof info;
  const Outcome header(ts_image_get_info(file.data(), file.size(), &info));
  header.of_bytes();
  ts_image_geometry g = {sizeof g, 0, 0, 1, 1, 1, 1, 0, 0, 1, 1, 0, false, 0, false};
  Picture pixel(1, 1);
  if (header.code != TS_ERROR_NONE || int64_t{info.width} * info.height > max_pixels) {
    const Outcome decoded(ts_image_decode(decoder, file.data(), file.size(), &g,
                                          pixel.pixels.data(), pixel.stride()));
    decoded.of_bytes();
    demand(decoded.code != TS_ERROR_NONE &&
           (header.code == TS_ERROR_NONE || decoded.code == header.code));
    return false;
  }
  demand(info.width >= 1 && info.height >= 1 && info.orientation >= 1 && info.orientation <= 8);

  *out = Picture(info.width, info.height);
  g = whole(info);
  const Outcome decoded(
      ts_image_decode(decoder, file.data(), file.size(), &g, out->pixels.data(), out->stride()));
  decoded.of_bytes();

  Choices choices(file.data(), file.size());
  g = any_geometry(&choices, info.width, info.height);
  Picture part(g.window_width, g.window_height);
  const Outcome parted(
      ts_image_decode(decoder, file.data(), file.size(), &g, part.pixels.data(), part.stride()));
  parted.of_bytes();
  if (parted.code != TS_ERROR_NONE) {
    // Damage in a part is damage in the whole image.
    demand(decoded.code == parted.code);
    return false;
  }
  if (decoded.code != TS_ERROR_NONE) return false;
  Picture expected(g.window_width, g.window_height);
  demand(ts_image_resize(decoder, out->pixels.data(), out->width, out->height, out->stride(), &g,
                         expected.pixels.data(), expected.stride()) == nullptr);
  demand(part.pixels == expected.pixels);
  return true;
}

inline ts_image_decoder* new_decoder(int64_t max_pixels) {
  ts_image_decoder* decoder = nullptr;
  demand(ts_image_decoder_new(max_pixels, &decoder) == nullptr);
  return decoder;
}

// Decodes an image file with every answer to damage. An image that a stricter answer decodes has
// the same pixels with a laxer answer. A part of a damaged image equals that part of the whole
// image. Calls check(pixels, width, height) with each whole image.
template <typename Check>
void damaged_file(ts_image_decoder* decoder, const uint8_t* input, size_t size, int64_t max_pixels,
                  Check&& check) {
  const Bytes file(input, input + size);  // so that ASAN detects reads beyond its ends
  ts_image_info info = {};
  info.size = sizeof info;
  if (Outcome(ts_image_get_info(file.data(), file.size(), &info)).code != TS_ERROR_NONE ||
      int64_t{info.width} * info.height > max_pixels) {
    return;
  }
  Choices choices(file.data(), file.size());
  Picture last(1, 1);
  bool opened = false;
  for (const int32_t answer :
       {TS_IMAGE_DAMAGE_REFUSE, TS_IMAGE_DAMAGE_WARN, TS_IMAGE_DAMAGE_PARTIAL}) {
    demand(ts_image_decoder_set_damage(decoder, answer) == nullptr);
    Picture picture(info.width, info.height);
    ts_image_geometry g = whole(info);
    const Outcome decoded(ts_image_decode(decoder, file.data(), file.size(), &g,
                                          picture.pixels.data(), picture.stride()));
    decoded.of_bytes();
    const bool met = *ts_image_decoder_tolerated(decoder) != 0;
    if (decoded.code != TS_ERROR_NONE) {
      demand(!opened && !met);
      continue;
    }
    if (opened) demand(picture.pixels == last.pixels);
    if (answer == TS_IMAGE_DAMAGE_REFUSE) demand(!met);
    opened = true;
    last = picture;
    check(picture.pixels, info.width, info.height);
    g = any_geometry(&choices, info.width, info.height);
    Picture part(g.window_width, g.window_height);
    demand(ts_image_decode(decoder, file.data(), file.size(), &g, part.pixels.data(),
                           part.stride()) == nullptr);
    Picture expected(g.window_width, g.window_height);
    demand(ts_image_resize(decoder, picture.pixels.data(), picture.width, picture.height,
                           picture.stride(), &g, expected.pixels.data(),
                           expected.stride()) == nullptr);
    demand(part.pixels == expected.pixels);
  }
  demand(ts_image_decoder_set_damage(decoder, TS_IMAGE_DAMAGE_REFUSE) == nullptr);
}

}  // namespace fuzz
