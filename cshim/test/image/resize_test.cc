#include "image/resize.h"

#include <malloc.h>

#include <cstring>

#include "image/exif.h"
#include "image/samples.h"

namespace {

using namespace samples;
using ts::image::Box;
using ts::image::Kernel;
using ts::image::Resizer;

// Returns a random geometry for an image of the given size: any crop, any resize up to `max_side`
// pixels a side, any window.
ts_image_geometry random_geometry(Random& random, int width, int height, int max_side) {
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.crop_width = uniform(random, 1, width);
  g.crop_height = uniform(random, 1, height);
  g.crop_x = uniform(random, 0, width - g.crop_width);
  g.crop_y = uniform(random, 0, height - g.crop_height);
  // One in eight keeps the length of a side, which is then copied instead of resized.
  g.resize_width = uniform(random, 0, 7) == 0 ? g.crop_width : uniform(random, 1, max_side);
  g.resize_height = uniform(random, 0, 7) == 0 ? g.crop_height : uniform(random, 1, max_side);
  const bool whole = uniform(random, 0, 1) == 0;
  g.window_width = whole ? g.resize_width : uniform(random, 1, g.resize_width);
  g.window_height = whole ? g.resize_height : uniform(random, 1, g.resize_height);
  g.window_x = uniform(random, 0, g.resize_width - g.window_width);
  g.window_y = uniform(random, 0, g.resize_height - g.window_height);
  g.flip = uniform(random, 0, 1) == 1;
  g.interpolation = uniform(random, TS_INTERPOLATION_DEFAULT, TS_INTERPOLATION_BICUBIC);
  return g;
}

std::string describe(const ts_image_geometry& g) {
  const auto box = [](int x, int y, int w, int h) {
    return std::to_string(w) + "x" + std::to_string(h) + "+" + std::to_string(x) + "+" +
           std::to_string(y);
  };
  return "crop " + box(g.crop_x, g.crop_y, g.crop_width, g.crop_height) + " resize " +
         box(0, 0, g.resize_width, g.resize_height) + " window " +
         box(g.window_x, g.window_y, g.window_width, g.window_height) + (g.flip ? " flip" : "") +
         " interpolation " + std::to_string(g.interpolation);
}

// Resizes by pushing rows in groups of `group`, or of random sizes if `group` is 0. Only the bytes
// that the resizer asked for are readable.
Image run(Resizer* resizer, Random& random, const Image& source, const ts_image_geometry& g,
          int group) {
  Image out{g.window_width, g.window_height, 3, {}};
  const size_t stride = static_cast<size_t>(g.window_width) * 3;
  out.pixels.assign(stride * static_cast<size_t>(g.window_height), 0xA5);
  const Box box = resizer->start(g, out.pixels.data(), stride);
  EXPECT_GE(box.x0, g.crop_x);
  EXPECT_GE(box.y0, g.crop_y);
  EXPECT_LE(box.x1, g.crop_x + g.crop_width);
  EXPECT_LE(box.y1, g.crop_y + g.crop_height);
  const size_t row = static_cast<size_t>(box.width()) * 3 + ts::image::kRowSlack;
  for (int y = box.y0; y < box.y1;) {
    const int rows = std::min(group == 0 ? uniform(random, 1, 9) : group, box.y1 - y);
    Bytes band(row * static_cast<size_t>(rows), 0xEE);
    for (int i = 0; i < rows; ++i) {
      std::memcpy(band.data() + static_cast<size_t>(i) * row, source.at(box.x0, y + i),
                  static_cast<size_t>(box.width()) * 3);
    }
    resizer->push(band.data(), row, rows);
    y += rows;
  }
  return out;
}

TEST(Resize, KernelsAndRowGroupsGiveTheSameBytes) {
  Random random(1);
  Resizer scalar(Kernel::kScalar);
  if (ts::image::best_kernel() == Kernel::kScalar) GTEST_SKIP() << "this processor has no AVX2";
  for (int i = 0; i < 3000; ++i) {
    const bool last = i % 2 == 1 && ts::image::best_kernel() == Kernel::kAvx512;
    Resizer best(last ? Kernel::kAvx512 : Kernel::kAvx2);
    const bool tall = i % 10 == 0;
    const Image source =
        picture(random, uniform(random, 1, tall ? 12 : 90), uniform(random, 1, tall ? 900 : 90));
    const ts_image_geometry g = random_geometry(random, source.width, source.height, 70);
    const Image expected = run(&scalar, random, source, g, 1000);
    ASSERT_EQ(run(&best, random, source, g, 0).pixels, expected.pixels) << describe(g);
    ASSERT_EQ(run(&best, random, source, g, 16).pixels, expected.pixels) << describe(g);
  }
}

TEST(Resize, WindowIsAPartOfTheWholeAndFlipMirrorsIt) {
  Random random(2);
  Resizer resizer;
  for (int i = 0; i < 500; ++i) {
    const Image source = picture(random, uniform(random, 1, 120), uniform(random, 1, 120));
    const ts_image_geometry g = random_geometry(random, source.width, source.height, 90);
    ts_image_geometry all = g;
    all.window_x = all.window_y = 0;
    all.window_width = g.resize_width;
    all.window_height = g.resize_height;
    all.flip = false;
    const Image whole = run(&resizer, random, source, all, 0);
    Image expected = part(whole, g.window_x, g.window_y, g.window_width, g.window_height);
    if (g.flip) {
      const Image plain = expected;
      for (int y = 0; y < g.window_height; ++y) {
        for (int x = 0; x < g.window_width; ++x) {
          std::memcpy(const_cast<uint8_t*>(expected.at(x, y)), plain.at(g.window_width - 1 - x, y),
                      3);
        }
      }
    }
    ASSERT_EQ(run(&resizer, random, source, g, 0).pixels, expected.pixels) << describe(g);
  }
}

// Resizing a stored image gives the same bytes as turning it upright first.
TEST(Resize, TurnedImagesAreResizedUpright) {
  Random random(6);
  const Decoder decoder = new_decoder();
  for (int i = 0; i < 3000; ++i) {
    const int32_t orientation = 2 + i % 7;
    const bool tall = i % 10 == 0;
    const Image stored =
        picture(random, uniform(random, 1, tall ? 900 : 90), uniform(random, 1, tall ? 12 : 90));
    Image upright{stored.width, stored.height, 3, {}};
    if (orientation >= 5) std::swap(upright.width, upright.height);
    for (int y = 0; y < upright.height; ++y) {
      for (int x = 0; x < upright.width; ++x) {
        int32_t from_x = x;
        int32_t from_y = y;
        ts::image::stored_place(orientation, upright.width, upright.height, &from_x, &from_y);
        upright.pixels.insert(upright.pixels.end(), stored.at(from_x, from_y),
                              stored.at(from_x, from_y) + 3);
      }
    }
    ts_image_geometry g = random_geometry(random, upright.width, upright.height, 70);
    const size_t stride = static_cast<size_t>(g.window_width) * 3;
    Bytes expected(stride * static_cast<size_t>(g.window_height), 0xA5);
    Bytes got(expected.size(), 0x5A);
    const auto resize = [&](const Image& image, Bytes* out) {
      return Outcome(ts_image_resize(decoder.get(), image.pixels.data(), image.width, image.height,
                                     static_cast<size_t>(image.width) * 3, &g, out->data(), stride))
          .code;
    };
    ASSERT_EQ(resize(upright, &expected), TS_ERROR_NONE);
    g.orientation = orientation;
    ASSERT_EQ(resize(stored, &got), TS_ERROR_NONE);
    ASSERT_EQ(got, expected) << describe(g) << " orientation " << orientation;
  }
}

// After a turned image a decoder holds no more rows than one row of the result needs.
TEST(Resize, TurnedImagesAreNotHeld) {
  Random random(7);
  const Image stored = picture(random, 3000, 2000);
  Bytes out(64 * 64 * 3);
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.crop_width = 2000;
  g.crop_height = 3000;
  g.resize_width = g.resize_height = g.window_width = g.window_height = 64;
  g.orientation = 6;
  const auto allocated = [] {
    const struct mallinfo2 info = mallinfo2();
    return static_cast<int64_t>(info.uordblks + info.hblkhd);
  };
  const Decoder decoder = new_decoder();
  const int64_t before = allocated();
  ASSERT_EQ(Outcome(ts_image_resize(decoder.get(), stored.pixels.data(), stored.width,
                                    stored.height, 9000, &g, out.data(), 192))
                .code,
            TS_ERROR_NONE);
  EXPECT_LT(allocated() - before, 4 << 20);
}

// The C function accepts rows of any stride, and accesses no byte between or around them.
TEST(Resize, StridesAreKept) {
  Random random(3);
  const Decoder decoder = new_decoder();
  Resizer resizer;
  for (int i = 0; i < 300; ++i) {
    const Image source = picture(random, uniform(random, 1, 40), uniform(random, 1, 40));
    const ts_image_geometry g = random_geometry(random, source.width, source.height, 40);
    const size_t row = static_cast<size_t>(source.width) * 3;
    const size_t src_stride =
        row + static_cast<size_t>(uniform(random, 0, 1) * uniform(random, 0, 20));
    Bytes src(src_stride * static_cast<size_t>(source.height - 1) + row);
    for (int y = 0; y < source.height; ++y) {
      std::memcpy(src.data() + static_cast<size_t>(y) * src_stride, source.at(0, y), row);
    }
    const size_t out_row = static_cast<size_t>(g.window_width) * 3;
    const size_t dst_stride = out_row + static_cast<size_t>(uniform(random, 0, 20));
    Bytes dst(dst_stride * static_cast<size_t>(g.window_height - 1) + out_row, 0xA5);
    const Outcome outcome(ts_image_resize(decoder.get(), src.data(), source.width, source.height,
                                          src_stride, &g, dst.data(), dst_stride));
    ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
    const Image expected = run(&resizer, random, source, g, 0);
    for (int y = 0; y < g.window_height; ++y) {
      const uint8_t* got = dst.data() + static_cast<size_t>(y) * dst_stride;
      ASSERT_EQ(std::memcmp(got, expected.at(0, y), out_row), 0) << describe(g);
      const size_t beside = y + 1 < g.window_height ? dst_stride - out_row : 0;
      for (size_t k = 0; k < beside; ++k) ASSERT_EQ(got[out_row + k], 0xA5);
    }
  }
}

// A flat image stays flat at every scale, because the rounded weights of an output add up to one.
TEST(Resize, FlatImagesStayFlat) {
  Random random(4);
  Resizer resizer;
  for (const int value : {0, 1, 127, 254, 255}) {
    for (const int side : {1, 2, 3, 50, 224, 800}) {
      Image source{61, 300, 3, Bytes(61 * 300 * 3, static_cast<uint8_t>(value))};
      ts_image_geometry g = {sizeof g, 0,    0,    61, 300,   side, side, 0,
                             0,        side, side, 0,  false, 0,    false};
      for (g.interpolation = 0; g.interpolation <= TS_INTERPOLATION_BICUBIC; ++g.interpolation) {
        for (const uint8_t got : run(&resizer, random, source, g, 16).pixels) {
          ASSERT_EQ(got, value) << describe(g);
        }
      }
    }
  }
}

TEST(Resize, ImpossibleGeometriesAreRefused) {
  const Decoder decoder = new_decoder();
  const Bytes src(20 * 10 * 3, 7);
  Bytes dst(8 * 8 * 3);
  const ts_image_geometry good = {sizeof good, 0, 0, 20, 10, 8, 8, 0, 0, 8, 8, 0, false, 0, false};
  const auto call = [&](const ts_image_geometry& g, size_t src_stride = 60, size_t dst_stride = 24,
                        int width = 20, int height = 10) {
    return Outcome(ts_image_resize(decoder.get(), src.data(), width, height, src_stride, &g,
                                   dst.data(), dst_stride));
  };
  ASSERT_EQ(call(good).code, TS_ERROR_NONE);
  const int32_t max = INT32_MAX;
  const int32_t min = INT32_MIN;
  int32_t ts_image_geometry::*const fields[] = {
      &ts_image_geometry::crop_x,       &ts_image_geometry::crop_y,
      &ts_image_geometry::crop_width,   &ts_image_geometry::crop_height,
      &ts_image_geometry::resize_width, &ts_image_geometry::resize_height,
      &ts_image_geometry::window_x,     &ts_image_geometry::window_y,
      &ts_image_geometry::window_width, &ts_image_geometry::window_height};
  for (const auto field : fields) {
    for (const int32_t value : {min, -1, max, max - 19}) {
      ts_image_geometry g = good;
      g.*field = value;
      EXPECT_EQ(call(g).code, TS_ERROR_INVALID_ARGUMENT) << describe(g);
    }
  }
  for (const auto field : {&ts_image_geometry::crop_width, &ts_image_geometry::resize_height,
                           &ts_image_geometry::window_width}) {
    ts_image_geometry g = good;
    g.*field = 0;
    EXPECT_EQ(call(g).code, TS_ERROR_INVALID_ARGUMENT) << describe(g);
  }
  for (const auto field : {&ts_image_geometry::crop_x, &ts_image_geometry::window_y}) {
    ts_image_geometry g = good;
    g.*field = 1;  // one past the edge
    EXPECT_EQ(call(g).code, TS_ERROR_INVALID_ARGUMENT) << describe(g);
  }
  for (const int32_t value : {min, -1, TS_INTERPOLATION_BICUBIC + 1, max}) {
    ts_image_geometry g = good;
    g.interpolation = value;
    EXPECT_EQ(call(g).code, TS_ERROR_INVALID_ARGUMENT) << describe(g);
  }
  EXPECT_EQ(call(good, 59).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(good, 60, 23).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(good, 60, 24, 0).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(good, 60, 24, 20, -1).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(good, SIZE_MAX / 4).code, TS_ERROR_INVALID_ARGUMENT);
  const Outcome null_source(
      ts_image_resize(decoder.get(), nullptr, 20, 10, 60, &good, dst.data(), 24));
  EXPECT_EQ(null_source.code, TS_ERROR_INVALID_ARGUMENT);
  const Outcome null_decoder(
      ts_image_resize(nullptr, src.data(), 20, 10, 60, &good, dst.data(), 24));
  EXPECT_EQ(null_decoder.code, TS_ERROR_INVALID_ARGUMENT);
  const Outcome null_geometry(
      ts_image_resize(decoder.get(), src.data(), 20, 10, 60, nullptr, dst.data(), 24));
  EXPECT_EQ(null_geometry.code, TS_ERROR_INVALID_ARGUMENT);
}

}  // namespace
