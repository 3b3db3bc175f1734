// Tests of the JPEG encoder, against libjpeg's own calls.

#include <climits>
#include <cstring>

#include "image/samples.h"

namespace {

using namespace samples;

// A file has the bytes that libjpeg writes for rows of any stride, needs a byte of room more than
// it has, and leaves the memory after that room alone.
TEST(Encode, FileIsLibjpegs) {
  Random random(211);
  const Decoder decoder = new_decoder();
  for (int i = 0; i < 200; ++i) {
    const Image image = picture(random, uniform(random, 1, 70), uniform(random, 1, 70));
    JpegOptions options;
    options.quality = uniform(random, 1, 100);
    options.sampling[0][0] = options.sampling[0][1] = 2;
    const Bytes expected = encode_jpeg(image, options);
    const size_t row = size_t{3} * static_cast<size_t>(image.width);
    const size_t stride = row + static_cast<size_t>(uniform(random, 0, 9));
    Bytes rows(stride * static_cast<size_t>(image.height - 1) + row);
    for (int y = 0; y < image.height; ++y) {
      std::memcpy(rows.data() + static_cast<size_t>(y) * stride, image.at(0, y), row);
    }
    for (const size_t room : {size_t{0}, expected.size(), expected.size() + 1}) {
      Bytes file(room);
      size_t written = 7;
      const Outcome outcome(ts_image_encode_jpeg(decoder.get(), rows.data(), image.width,
                                                 image.height, stride, options.quality, file.data(),
                                                 room, &written));
      ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
      if (room <= expected.size()) {
        ASSERT_EQ(written, 0u) << room;
        continue;
      }
      file.resize(written);
      ASSERT_EQ(file, expected) << image.width << " x " << image.height;
    }
  }
}

// Encoding leaves a decoder as it was.
TEST(Encode, DecoderStillDecodes) {
  Random random(212);
  const Decoder decoder = new_decoder();
  const Image image = picture(random, 40, 30);
  const Bytes file = encode_jpeg(image, {});
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.crop_width = g.resize_width = g.window_width = 40;
  g.crop_height = g.resize_height = g.window_height = 30;
  Bytes before(40 * 30 * 3);
  Bytes after(before.size());
  const auto decode = [&](Bytes* to) {
    return Outcome(ts_image_decode(decoder.get(), file.data(), file.size(), &g, to->data(), 40 * 3))
        .code;
  };
  ASSERT_EQ(decode(&before), TS_ERROR_NONE);
  Bytes small(10);
  size_t written = 7;
  EXPECT_EQ(Outcome(ts_image_encode_jpeg(decoder.get(), image.pixels.data(), 40, 30, 120, 90,
                                         small.data(), small.size(), &written))
                .code,
            TS_ERROR_NONE);
  EXPECT_EQ(written, 0u);
  ASSERT_EQ(decode(&after), TS_ERROR_NONE);
  EXPECT_EQ(after, before);
}

TEST(Encode, CFunctionChecksItsArguments) {
  const Decoder decoder = new_decoder();
  const Bytes pixels(20 * 10 * 3, 7);
  Bytes to(4096, 0xA5);
  size_t written = 7;
  const auto call = [&](ts_image_decoder* d, const uint8_t* from, int32_t width, int32_t height,
                        size_t stride, int32_t quality, uint8_t* buffer, size_t* size) {
    return Outcome(ts_image_encode_jpeg(d, from, width, height, stride, quality, buffer, to.size(),
                                        size))
        .code;
  };
  ts_image_decoder* d = decoder.get();
  const uint8_t* from = pixels.data();
  EXPECT_EQ(call(nullptr, from, 20, 10, 60, 90, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(d, nullptr, 20, 10, 60, 90, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(d, from, 20, 10, 60, 90, nullptr, &written), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(d, from, 20, 10, 60, 90, to.data(), nullptr), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(d, from, 20, 10, 59, 90, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  for (const int32_t side : {INT_MIN, -1, 0, 65501, INT_MAX}) {
    EXPECT_EQ(call(d, from, side, 10, SIZE_MAX, 90, to.data(), &written),
              TS_ERROR_INVALID_ARGUMENT);
    EXPECT_EQ(call(d, from, 20, side, 60, 90, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  }
  for (const int32_t quality : {INT_MIN, 0, 101, INT_MAX}) {
    EXPECT_EQ(call(d, from, 20, 10, 60, quality, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  }
  EXPECT_EQ(written, 7u);
  EXPECT_EQ(to, Bytes(4096, 0xA5));
  EXPECT_EQ(call(d, from, 20, 10, 60, 90, to.data(), &written), TS_ERROR_NONE);
  EXPECT_GT(written, 0u);
}

}  // namespace
