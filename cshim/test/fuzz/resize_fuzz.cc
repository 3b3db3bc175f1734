// libFuzzer: resizing by any geometry, valid or not. All kernels give the same pixels. A window
// equals the same part of the whole result, and a flip is its mirror image. Turning the image
// upright first gives the same pixels.
#include <memory>

#include "fuzz.h"

namespace {

using namespace fuzz;
using ts::image::Box;
using ts::image::Kernel;
using ts::image::kRowSlack;
using ts::image::Resizer;

constexpr int32_t kMaxWindow = 96;

// Resizes with one kernel, and pushes `group` rows at a time.
Bytes by_kernel(Kernel kernel, int32_t group, const Picture& source, const ts_image_geometry& g) {
  Picture out(g.window_width, g.window_height);
  Resizer resizer(kernel);
  const Box box = resizer.start(g, out.pixels.data(), out.stride());
  const size_t bytes = static_cast<size_t>(box.width()) * 3;
  for (int32_t y = box.y0; y < box.y1;) {
    const int32_t count = std::min(group, box.y1 - y);
    // The memory of the rows ends with the last row, except for the promised slack.
    Bytes rows;
    for (const int32_t end = y + count; y < end; ++y) {
      const uint8_t* const from = source.pixels.data() + static_cast<size_t>(y) * source.stride() +
                                  static_cast<size_t>(box.x0) * 3;
      rows.insert(rows.end(), from, from + bytes);
    }
    rows.resize(rows.size() + kRowSlack, 0xEE);
    rows.shrink_to_fit();
    resizer.push(rows.data(), bytes, count);
  }
  return out.pixels;
}

// Turns an image upright by the definition of the orientations.
Picture turned(const Picture& stored, int32_t orientation) {
  const bool sideways = orientation >= 5;
  Picture out(sideways ? stored.height : stored.width, sideways ? stored.width : stored.height);
  for (int32_t y = 0; y < out.height; ++y) {
    for (int32_t x = 0; x < out.width; ++x) {
      int32_t from_x = sideways ? y : x;
      int32_t from_y = sideways ? x : y;
      // Orientations 2, 3, 7 and 8 read columns from the right; 3, 4, 6 and 7 rows from the bottom.
      if (orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8) {
        from_x = stored.width - 1 - from_x;
      }
      if (orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7) {
        from_y = stored.height - 1 - from_y;
      }
      std::memcpy(&out.pixels[static_cast<size_t>(y) * out.stride() + static_cast<size_t>(x) * 3],
                  &stored.pixels[static_cast<size_t>(from_y) * stored.stride() +
                                 static_cast<size_t>(from_x) * 3],
                  3);
    }
  }
  return out;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static ts_image_decoder* const decoder = new_decoder(0);
  Reader in(data, size);
  Picture source(1 + in.take<uint8_t>() % 80, 1 + in.take<uint8_t>() % 80);
  Choices choices(data, size);
  const bool flat = choices.draw(0, 3) == 0;
  for (uint8_t& byte : source.pixels) {
    byte = static_cast<uint8_t>(flat ? 255 : choices.draw(0, 255));
  }

  ts_image_geometry g = {};
  g.size = sizeof g;
  g.orientation = in.number(0, 8);
  const bool sideways = g.orientation >= 5;
  const int32_t width = sideways ? source.height : source.width;
  const int32_t height = sideways ? source.width : source.height;
  g.crop_x = in.number(0, width - 1);
  g.crop_y = in.number(0, height - 1);
  g.crop_width = in.number(1, std::max(1, width));
  g.crop_height = in.number(1, std::max(1, height));
  const bool large = in.take<uint8_t>() % 8 == 0;
  g.resize_width = large ? in.take<uint16_t>() : in.number(1, 120);
  g.resize_height = large ? in.take<uint16_t>() : in.number(1, 120);
  g.window_x = large ? in.take<uint16_t>() : in.number(0, 60);
  g.window_y = large ? in.take<uint16_t>() : in.number(0, 60);
  g.window_width = in.number(1, 60);
  g.window_height = in.number(1, 60);
  g.flip = in.take<uint8_t>() % 2 == 1;
  const auto gap = static_cast<size_t>(in.take<uint8_t>() % 3);
  g.interpolation = in.number(TS_INTERPOLATION_DEFAULT, TS_INTERPOLATION_BICUBIC);

  // Has room for the result if its size is possible.
  const bool room = g.window_width >= 1 && g.window_width <= kMaxWindow && g.window_height >= 1 &&
                    g.window_height <= kMaxWindow;
  if (!room && int64_t{g.window_width} * g.window_height > 0 && g.window_width > 0) return -1;
  const size_t stride = (room ? static_cast<size_t>(g.window_width) * 3 : 3) + gap;
  Bytes out(stride * static_cast<size_t>(room ? g.window_height : 1) - gap, 0x5A);
  const Outcome outcome(ts_image_resize(decoder, source.pixels.data(), source.width, source.height,
                                        source.stride(), &g, out.data(), stride));
  const auto inside = [](int64_t begin, int64_t count, int64_t all) {
    return begin >= 0 && count >= 1 && begin + count <= all;
  };
  const bool possible =
      g.orientation >= 0 && g.orientation <= 8 && g.interpolation >= 0 &&
      g.interpolation <= TS_INTERPOLATION_BICUBIC && inside(g.crop_x, g.crop_width, width) &&
      inside(g.crop_y, g.crop_height, height) && g.resize_width <= 65535 &&
      g.resize_height <= 65535 && inside(g.window_x, g.window_width, g.resize_width) &&
      inside(g.window_y, g.window_height, g.resize_height);
  demand(outcome.code == (possible ? TS_ERROR_NONE : TS_ERROR_INVALID_ARGUMENT));
  if (!possible) return 0;

  const Picture upright = turned(source, g.orientation);
  ts_image_geometry plain = g;
  plain.orientation = 0;
  const Bytes scalar = by_kernel(Kernel::kScalar, 1, upright, plain);
  const int32_t group = choices.draw(1, 20);
  for (const Kernel kernel : {Kernel::kAvx2, Kernel::kAvx512}) {
    if (kernel <= ts::image::best_kernel()) {
      demand(scalar == by_kernel(kernel, group, upright, plain));
    }
  }
  const size_t row = static_cast<size_t>(g.window_width) * 3;
  for (size_t y = 0; y < static_cast<size_t>(g.window_height); ++y) {
    demand(std::memcmp(&out[y * stride], &scalar[y * row], row) == 0);
    if (y + 1 == static_cast<size_t>(g.window_height)) break;
    for (size_t i = row; i < stride; ++i) demand(out[y * stride + i] == 0x5A);
  }

  if (int64_t{g.resize_width} * g.resize_height > 1 << 14) return 0;
  plain.window_x = plain.window_y = 0;
  plain.window_width = g.resize_width;
  plain.window_height = g.resize_height;
  plain.flip = false;
  const Bytes everything = by_kernel(Kernel::kScalar, group, upright, plain);
  for (int32_t y = 0; y < g.window_height; ++y) {
    for (int32_t x = 0; x < g.window_width; ++x) {
      const int32_t from_x = g.window_x + (g.flip ? g.window_width - 1 - x : x);
      const auto from = static_cast<size_t>(g.window_y + y) * static_cast<size_t>(g.resize_width) +
                        static_cast<size_t>(from_x);
      const auto to =
          static_cast<size_t>(y) * static_cast<size_t>(g.window_width) + static_cast<size_t>(x);
      demand(std::memcmp(&everything[from * 3], &scalar[to * 3], 3) == 0);
    }
  }
  return 0;
}
