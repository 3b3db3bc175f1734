#include <zlib.h>

#include <cstring>

#include "image/samples.h"

namespace {

using namespace samples;

const struct {
  int color_type, depth;
} kKinds[] = {
    {PNG_COLOR_TYPE_GRAY, 1},        {PNG_COLOR_TYPE_GRAY, 2},      {PNG_COLOR_TYPE_GRAY, 4},
    {PNG_COLOR_TYPE_GRAY, 8},        {PNG_COLOR_TYPE_GRAY, 16},     {PNG_COLOR_TYPE_GRAY_ALPHA, 8},
    {PNG_COLOR_TYPE_GRAY_ALPHA, 16}, {PNG_COLOR_TYPE_PALETTE, 1},   {PNG_COLOR_TYPE_PALETTE, 2},
    {PNG_COLOR_TYPE_PALETTE, 4},     {PNG_COLOR_TYPE_PALETTE, 8},   {PNG_COLOR_TYPE_RGB, 8},
    {PNG_COLOR_TYPE_RGB, 16},        {PNG_COLOR_TYPE_RGB_ALPHA, 8}, {PNG_COLOR_TYPE_RGB_ALPHA, 16}};

TEST(Png, EveryKindDecodesToTheDefinedPixelsAtEveryCrop) {
  Random random(1);
  const Decoder decoder = new_decoder();
  for (const auto& kind : kKinds) {
    for (int variant = 0; variant < 4; ++variant) {
      PngOptions options{kind.color_type, kind.depth, (variant & 1) != 0, (variant & 2) != 0};
      if ((kind.color_type & PNG_COLOR_MASK_ALPHA) != 0) options.transparency = false;
      const int width = uniform(random, 1, 60);
      const int height = uniform(random, 1, 60);
      const PngSample sample = encode_png(random, width, height, options);
      ts_image_info info = {};
      info.size = sizeof info;
      ASSERT_EQ(Outcome(ts_image_get_info(sample.bytes.data(), sample.bytes.size(), &info)).code,
                TS_ERROR_NONE);
      EXPECT_EQ(info.format, TS_IMAGE_FORMAT_PNG);
      EXPECT_EQ(info.width, width);
      EXPECT_EQ(info.height, height);
      EXPECT_EQ(info.components,
                kind.color_type == PNG_COLOR_TYPE_PALETTE ? 3 : png_samples(kind.color_type));
      EXPECT_EQ(info.bit_depth, kind.depth);
      EXPECT_EQ(info.progressive, options.interlaced);
      for (int i = 0; i < 20; ++i) {
        const int w = i == 0 ? width : uniform(random, 1, width);
        const int h = i == 0 ? height : uniform(random, 1, height);
        const int x = uniform(random, 0, width - w);
        const int y = uniform(random, 0, height - h);
        Image got;
        const Outcome outcome = decode(decoder.get(), sample.bytes, crop(x, y, w, h), &got);
        ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
        ASSERT_EQ(got.pixels, part(sample.rgb, x, y, w, h).pixels)
            << "colour type " << kind.color_type << ", " << kind.depth << " bits, variant "
            << variant;
      }
    }
  }
}

TEST(Png, TruncationIsFoundWithAnyCrop) {
  Random random(2);
  const Decoder decoder = new_decoder();
  const Bytes bytes = encode_png(random, 20, 15, {}).bytes;
  for (size_t size = 0; size < bytes.size(); ++size) {
    const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
    Image got;
    const Outcome outcome = decode(decoder.get(), cut, crop(0, 0, 1, 1), &got);
    ASSERT_EQ(outcome.code, size < 8 ? TS_ERROR_UNSUPPORTED : TS_ERROR_DECODE)
        << size << outcome.message;
  }
  Bytes longer(bytes);
  longer.insert(longer.end(), {1, 2, 3});  // bytes after the end are ignored
  Image got;
  EXPECT_EQ(decode(decoder.get(), longer, crop(0, 0, 20, 15), &got).code, TS_ERROR_NONE);
}

// Checksums cover every byte after the signature, so every flipped bit is found, whichever part is
// decoded.
TEST(Png, EveryFlippedBitIsFoundWithAnyCrop) {
  Random random(3);
  const Decoder decoder = new_decoder();
  const Bytes bytes = encode_png(random, 12, 9, {PNG_COLOR_TYPE_PALETTE, 4, false, true}).bytes;
  for (size_t bit = 8 * 8; bit < bytes.size() * 8; ++bit) {
    Bytes bad(bytes);
    bad[bit / 8] = static_cast<uint8_t>(bad[bit / 8] ^ 1 << bit % 8);
    Image got;
    ASSERT_EQ(decode(decoder.get(), bad, crop(0, 0, 1, 1), &got).code, TS_ERROR_DECODE) << bit;
  }
}

void set_big_endian(uint8_t* at, uint32_t value) {
  for (int i = 0; i < 4; ++i) at[i] = static_cast<uint8_t>(value >> (24 - 8 * i));
}

// Returns the file with another size in its header, and the header's checksum corrected.
Bytes with_size(const Bytes& bytes, uint32_t width, uint32_t height) {
  Bytes out(bytes);
  set_big_endian(&out[16], width);
  set_big_endian(&out[20], height);
  set_big_endian(&out[29], static_cast<uint32_t>(crc32(0, &out[12], 17)));
  return out;
}

TEST(Png, LimitsAreCheckedBeforeMemoryIsAllocated) {
  Random random(4);
  for (const bool interlaced : {false, true}) {
    const Bytes bytes =
        encode_png(random, 10, 10, {PNG_COLOR_TYPE_RGB, 8, interlaced, false}).bytes;
    Image got;
    const Decoder small = new_decoder(99);
    EXPECT_EQ(decode(small.get(), bytes, crop(0, 0, 1, 1), &got).code, TS_ERROR_UNSUPPORTED);
    const Decoder decoder = new_decoder();
    const Outcome huge =
        decode(decoder.get(), with_size(bytes, 13000, 13000), crop(0, 0, 1, 1), &got);
    EXPECT_EQ(huge.code, TS_ERROR_DECODE);
    EXPECT_NE(huge.message.find("too little image data"), std::string::npos) << huge.message;
    for (const uint32_t side : {0u, 0x80000000u, 0xFFFFFFFFu}) {
      EXPECT_EQ(decode(decoder.get(), with_size(bytes, side, 1), crop(0, 0, 1, 1), &got).code,
                TS_ERROR_DECODE);
    }
    EXPECT_EQ(
        decode(decoder.get(), with_size(bytes, 0x7FFFFFFF, 0x7FFFFFFF), crop(0, 0, 1, 1), &got)
            .code,
        TS_ERROR_UNSUPPORTED);
    // One long side needs memory too, for rows and weights.
    EXPECT_EQ(decode(decoder.get(), with_size(bytes, 1000000, 1), crop(0, 0, 1, 1), &got).code,
              TS_ERROR_DECODE);
    for (const uint32_t side : {1000001u, 178000000u}) {
      EXPECT_EQ(decode(decoder.get(), with_size(bytes, side, 1), crop(0, 0, 1, 1), &got).code,
                TS_ERROR_UNSUPPORTED);
      EXPECT_EQ(decode(decoder.get(), with_size(bytes, 1, side), crop(0, 0, 1, 1), &got).code,
                TS_ERROR_UNSUPPORTED);
    }
    // Missing data of the last row is found when that row is decoded.
    const Outcome taller =
        decode(decoder.get(), with_size(bytes, 10, 11), crop(0, 0, 10, 11), &got);
    EXPECT_EQ(taller.code, TS_ERROR_DECODE) << taller.message;
  }
}

TEST(Format, UnknownFormatsAreRefusedByName) {
  const struct {
    Bytes bytes;
    const char* text;
  } cases[] = {{{}, "empty"},
               {{'G', 'I', 'F', '8', '9', 'a'}, "GIF"},
               {{'B', 'M'}, "BMP"},
               {{0xFF, 0xD8}, "unknown"},
               {{0x89, 'P', 'N', 'G'}, "unknown"},
               {{'h', 'e', 'l', 'l', 'o'}, "unknown"}};
  const Decoder decoder = new_decoder();
  for (const auto& c : cases) {
    ts_image_info info = {};
    info.size = sizeof info;
    info.width = 77;
    const Outcome header(ts_image_get_info(c.bytes.data(), c.bytes.size(), &info));
    EXPECT_EQ(header.code, TS_ERROR_UNSUPPORTED);
    EXPECT_NE(header.message.find(c.text), std::string::npos) << header.message;
    EXPECT_EQ(info.width, 77);  // unchanged
    Image got;
    EXPECT_EQ(decode(decoder.get(), c.bytes, crop(0, 0, 1, 1), &got).code, TS_ERROR_UNSUPPORTED);
  }
}

TEST(Decoder, ArgumentsAreCheckedFirst) {
  Random random(5);
  const Bytes bytes = encode_png(random, 10, 10, {}).bytes;
  const Decoder decoder = new_decoder();
  ts_image_decoder* untouched = nullptr;
  EXPECT_EQ(Outcome(ts_image_decoder_new(-1, &untouched)).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(untouched, nullptr);
  EXPECT_EQ(Outcome(ts_image_decoder_new(0, nullptr)).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(Outcome(ts_image_get_info(bytes.data(), bytes.size(), nullptr)).code,
            TS_ERROR_INVALID_ARGUMENT);
  ts_image_info info = {};
  info.size = sizeof info;
  EXPECT_EQ(Outcome(ts_image_get_info(nullptr, 3, &info)).code, TS_ERROR_INVALID_ARGUMENT);
  Image got;
  EXPECT_EQ(decode(decoder.get(), bytes, crop(0, 0, 11, 10), &got).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(decode(decoder.get(), bytes, crop(-1, 0, 2, 2), &got).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(decode(decoder.get(), bytes, crop(0, 10, 1, 1), &got).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(decode(nullptr, bytes, crop(0, 0, 1, 1), &got).code, TS_ERROR_INVALID_ARGUMENT);
  uint8_t pixel[3];
  const ts_image_geometry one = crop(0, 0, 1, 1);
  EXPECT_EQ(
      Outcome(ts_image_decode(decoder.get(), bytes.data(), bytes.size(), &one, nullptr, 3)).code,
      TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(
      Outcome(ts_image_decode(decoder.get(), bytes.data(), bytes.size(), nullptr, pixel, 3)).code,
      TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(
      Outcome(ts_image_decode(decoder.get(), bytes.data(), bytes.size(), &one, pixel, 2)).code,
      TS_ERROR_INVALID_ARGUMENT);
  ts_image_decoder_free(nullptr);
}

}  // namespace
