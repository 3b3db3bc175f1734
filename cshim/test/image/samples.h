// Images for the image tests: pixels from a seed, and encoders for every feature of JPEG and PNG
// that the decoders handle.
#pragma once

#include <gtest/gtest.h>
#include <jpeglib.h>
#include <png.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "torchstream_image.h"

namespace samples {

using Bytes = std::vector<uint8_t>;
using Random = std::mt19937;

// Returns a number from low to high, inclusive, the same on every platform.
inline int uniform(Random& random, int low, int high) {
  return low + static_cast<int>(random() % static_cast<uint32_t>(high - low + 1));
}

struct Image {
  int width = 0, height = 0, channels = 3;
  Bytes pixels;
  const uint8_t* at(int x, int y) const {
    return pixels.data() +
           (static_cast<size_t>(y) * static_cast<size_t>(width) + static_cast<size_t>(x)) *
               static_cast<size_t>(channels);
  }
};

// Returns an image of slopes, hard edges and noise. Neighbouring samples differ, so that a test
// notices a wrong neighbour.
inline Image picture(Random& random, int width, int height, int channels = 3) {
  Image image{width, height, channels, {}};
  const int phase = uniform(random, 0, 255);
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      for (int c = 0; c < channels; ++c) {
        int value = phase + x * (3 + c) + y * (5 - c);
        if ((x / 7 + y / 5 + c) % 3 == 0) value += 90;
        image.pixels.push_back(static_cast<uint8_t>(value + uniform(random, 0, 40)));
      }
    }
  }
  return image;
}

enum class Coding { kBaseline, kProgressive, kCoarseProgressive, kSeparateScans, kArithmetic };

struct JpegOptions {
  Coding coding = Coding::kBaseline;
  int quality = 90;
  int restart_interval = 0;  // in MCUs
  int sampling[4][2] = {{1, 1}, {1, 1}, {1, 1}, {1, 1}};
  J_COLOR_SPACE stored = JCS_UNKNOWN;  // unknown: libjpeg chooses
  bool optimize = false;               // makes Huffman tables for this image
  bool baseline = true;                // limits quantisers to 8 bits at any quality
  std::vector<jpeg_scan_info> scans;   // for kProgressive; none: libjpeg's
};

inline Bytes encode_jpeg(const Image& image, const JpegOptions& options) {
  jpeg_compress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);  // exits on an error, which valid options never cause
  errors.emit_message = [](j_common_ptr, int) {};
  jpeg_create_compress(&codec);
  unsigned char* out = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&codec, &out, &size);
  codec.image_width = static_cast<JDIMENSION>(image.width);
  codec.image_height = static_cast<JDIMENSION>(image.height);
  codec.input_components = image.channels;
  codec.in_color_space = image.channels == 1   ? JCS_GRAYSCALE
                         : image.channels == 3 ? JCS_RGB
                                               : JCS_CMYK;
  jpeg_set_defaults(&codec);
  if (options.stored != JCS_UNKNOWN) jpeg_set_colorspace(&codec, options.stored);
  jpeg_set_quality(&codec, options.quality, options.baseline ? TRUE : FALSE);
  codec.optimize_coding = options.optimize ? TRUE : FALSE;
  for (int c = 0; c < codec.num_components; ++c) {
    codec.comp_info[c].h_samp_factor = options.sampling[c][0];
    codec.comp_info[c].v_samp_factor = options.sampling[c][1];
  }
  codec.restart_interval = static_cast<unsigned>(options.restart_interval);
  std::vector<jpeg_scan_info> script;
  switch (options.coding) {
    case Coding::kBaseline:
      break;
    case Coding::kProgressive:
      script = options.scans;
      if (script.empty()) jpeg_simple_progression(&codec);
      break;
    case Coding::kCoarseProgressive:  // omits every coefficient's lowest bit, so libjpeg smooths
      for (int c = 0; c < codec.num_components; ++c) {
        script.push_back({1, {c, 0, 0, 0}, 0, 0, 0, 1});
        script.push_back({1, {c, 0, 0, 0}, 1, 2, 0, 1});
      }
      break;
    case Coding::kSeparateScans:
      for (int c = 0; c < codec.num_components; ++c)
        script.push_back({1, {c, 0, 0, 0}, 0, 63, 0, 0});
      break;
    case Coding::kArithmetic:
      codec.arith_code = TRUE;
      break;
  }
  if (!script.empty()) {
    codec.scan_info = script.data();
    codec.num_scans = static_cast<int>(script.size());
  }
  jpeg_start_compress(&codec, TRUE);
  const size_t stride = static_cast<size_t>(image.width) * static_cast<size_t>(image.channels);
  while (codec.next_scanline < codec.image_height) {
    JSAMPROW row = const_cast<uint8_t*>(image.pixels.data()) + codec.next_scanline * stride;
    jpeg_write_scanlines(&codec, &row, 1);
  }
  jpeg_finish_compress(&codec);
  jpeg_destroy_compress(&codec);
  Bytes bytes(out, out + size);
  std::free(out);
  return bytes;
}

struct PngOptions {
  int color_type = PNG_COLOR_TYPE_RGB;
  int depth = 8;
  bool interlaced = false;
  bool transparency = false;  // a tRNS chunk
};

inline int png_samples(int color_type) {
  if (color_type == PNG_COLOR_TYPE_GRAY || color_type == PNG_COLOR_TYPE_PALETTE) return 1;
  if (color_type == PNG_COLOR_TYPE_GRAY_ALPHA) return 2;
  return color_type == PNG_COLOR_TYPE_RGB ? 3 : 4;
}

struct PngSample {
  Bytes bytes;
  Image rgb;  // the expected pixels
};

// Returns a PNG of random samples, and its pixels by the rules of torchstream_image.h, which this
// function implements independently.
inline PngSample encode_png(Random& random, int width, int height, const PngOptions& options) {
  const int samples = png_samples(options.color_type);
  const size_t row_bytes = (static_cast<size_t>(width) * static_cast<size_t>(samples) *
                                static_cast<size_t>(options.depth) +
                            7) /
                           8;
  Bytes raw(row_bytes * static_cast<size_t>(height));
  for (auto& byte : raw) byte = static_cast<uint8_t>(random());
  const int colors = 1 << std::min(options.depth, 8);
  std::vector<png_color> palette(static_cast<size_t>(colors));
  for (auto& color : palette) {
    color = {static_cast<png_byte>(random()), static_cast<png_byte>(random()),
             static_cast<png_byte>(random())};
  }

  PngSample sample;
  sample.rgb = {width, height, 3, {}};
  for (int y = 0; y < height; ++y) {
    for (int x = 0; x < width; ++x) {
      uint8_t value[4] = {};
      for (int s = 0; s < samples; ++s) {
        const size_t bit =
            (static_cast<size_t>(x) * static_cast<size_t>(samples) + static_cast<size_t>(s)) *
            static_cast<size_t>(options.depth);
        const uint8_t byte =
            raw[static_cast<size_t>(y) * row_bytes + bit / 8];  // the high byte of 16 bits
        value[s] =
            options.depth >= 8
                ? byte
                : static_cast<uint8_t>(byte >> (8 - options.depth - static_cast<int>(bit % 8)) &
                                       ((1 << options.depth) - 1));
      }
      if (options.color_type == PNG_COLOR_TYPE_PALETTE) {
        const png_color& color = palette[value[0]];
        sample.rgb.pixels.insert(sample.rgb.pixels.end(), {color.red, color.green, color.blue});
      } else if (samples <= 2) {
        const auto grey =
            static_cast<uint8_t>(options.depth < 8 ? value[0] * 255 / (colors - 1) : value[0]);
        sample.rgb.pixels.insert(sample.rgb.pixels.end(), 3, grey);
      } else {
        sample.rgb.pixels.insert(sample.rgb.pixels.end(), value, value + 3);
      }
    }
  }

  png_structp png = png_create_write_struct(PNG_LIBPNG_VER_STRING, nullptr, nullptr, nullptr);
  png_infop info = png_create_info_struct(png);
  png_set_write_fn(
      png, &sample.bytes,
      [](png_structp p, png_bytep data, size_t size) {
        auto* out = static_cast<Bytes*>(png_get_io_ptr(p));
        out->insert(out->end(), data, data + size);
      },
      nullptr);
  png_set_IHDR(png, info, static_cast<png_uint_32>(width), static_cast<png_uint_32>(height),
               options.depth, options.color_type,
               options.interlaced ? PNG_INTERLACE_ADAM7 : PNG_INTERLACE_NONE,
               PNG_COMPRESSION_TYPE_DEFAULT, PNG_FILTER_TYPE_DEFAULT);
  if (options.color_type == PNG_COLOR_TYPE_PALETTE) png_set_PLTE(png, info, palette.data(), colors);
  if (options.transparency) {
    png_byte alpha[2] = {0, 128};
    png_color_16 color = {0, 1, 1, 1, 1};
    png_set_tRNS(png, info, alpha, 2, &color);
  }
  png_write_info(png, info);
  std::vector<png_bytep> rows;
  for (int y = 0; y < height; ++y) rows.push_back(raw.data() + static_cast<size_t>(y) * row_bytes);
  png_write_image(png, rows.data());
  png_write_end(png, info);
  png_destroy_write_struct(&png, &info);
  return sample;
}

// ---- calls of the C functions ----------------------------------------------------------------

struct FreeDecoder {
  void operator()(ts_image_decoder* decoder) const { ts_image_decoder_free(decoder); }
};
using Decoder = std::unique_ptr<ts_image_decoder, FreeDecoder>;

// The outcome of a call. Frees the error.
struct Outcome {
  int32_t code = TS_ERROR_NONE;
  std::string message;
  explicit Outcome(ts_error* error) {
    if (error == nullptr) return;
    code = ts_error_code(error);
    message = ts_error_message(error);
    ts_error_free(error);
  }
};

inline Decoder new_decoder(int64_t max_pixels = 0) {
  ts_image_decoder* decoder = nullptr;
  const Outcome outcome(ts_image_decoder_new(max_pixels, &decoder));
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  return Decoder(decoder);
}

inline ts_image_geometry crop(int x, int y, int width, int height) {
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.crop_x = x;
  g.crop_y = y;
  g.crop_width = g.resize_width = g.window_width = width;
  g.crop_height = g.resize_height = g.window_height = height;
  return g;
}

// Decodes the window's pixels. The memory of input and output has exactly the promised size, so
// that the address sanitizer detects every access beyond it.
inline Outcome decode(ts_image_decoder* decoder, const Bytes& bytes,
                      const ts_image_geometry& geometry, Image* out) {
  *out = {geometry.window_width, geometry.window_height, 3, {}};
  const size_t stride = static_cast<size_t>(std::max(geometry.window_width, 0)) * 3;
  out->pixels.assign(stride * static_cast<size_t>(std::max(geometry.window_height, 0)), 0xA5);
  const Bytes exact(bytes);
  return Outcome(
      ts_image_decode(decoder, exact.data(), exact.size(), &geometry, out->pixels.data(), stride));
}

inline Image part(const Image& whole, int x, int y, int width, int height) {
  Image out{width, height, whole.channels, {}};
  for (int row = y; row < y + height; ++row) {
    const uint8_t* from = whole.at(x, row);
    out.pixels.insert(out.pixels.end(), from, from + width * whole.channels);
  }
  return out;
}

inline Bytes read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  EXPECT_TRUE(file) << path << ": run the test in cshim/test";
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

}  // namespace samples
