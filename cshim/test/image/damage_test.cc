// Decodes damaged images with each answer to damage: refuse, warn, partial.
#include <zlib.h>

#include <cstring>
#include <string>

#include "image/libjpeg_whole.h"
#include "image/samples.h"

namespace {

using namespace samples;

Decoder tolerant(int32_t damage) {
  Decoder decoder = new_decoder();
  EXPECT_EQ(Outcome(ts_image_decoder_set_damage(decoder.get(), damage)).code, TS_ERROR_NONE);
  return decoder;
}

std::string tolerated(const Decoder& decoder) { return ts_image_decoder_tolerated(decoder.get()); }

// Changes, removes or inserts bytes, or cuts off the end.
Bytes damage(Random& random, Bytes bytes) {
  const int size = static_cast<int>(bytes.size());
  const auto at = bytes.begin() + uniform(random, 2, size - 1);
  switch (uniform(random, 0, 4)) {
    case 0:
      for (int i = uniform(random, 1, 6); i > 0; --i) {
        bytes[static_cast<size_t>(uniform(random, 2, size - 1))] =
            static_cast<uint8_t>(uniform(random, 0, 255));
      }
      break;
    case 1:
      bytes.erase(at, at + std::min<std::ptrdiff_t>(bytes.end() - at, uniform(random, 1, 60)));
      break;
    case 2:
      bytes.insert(at, static_cast<size_t>(uniform(random, 1, 20)),
                   static_cast<uint8_t>(uniform(random, 0, 255)));
      break;
    case 3:
      bytes.resize(static_cast<size_t>(size - uniform(random, 1, size / 2)));
      break;
    default:
      bytes.resize(static_cast<size_t>(size - uniform(random, 1, 12)));
  }
  return bytes;
}

// Expects the results that an image with any damage must have with an answer other than "refuse".
void expect_consistent(Random& random, const Bytes& bytes, int32_t answer) {
  const Decoder strict = new_decoder();
  const Decoder decoder = tolerant(answer);
  ts_image_info info = {};
  info.size = sizeof info;
  if (Outcome(ts_image_get_info(bytes.data(), bytes.size(), &info)).code != TS_ERROR_NONE ||
      info.width > 300 || info.height > 300) {
    return;
  }
  const ts_image_geometry whole = crop(0, 0, info.width, info.height);
  Image got;
  Image refused;
  const bool opened = decode(decoder.get(), bytes, whole, &got).code == TS_ERROR_NONE;
  const std::string met = tolerated(decoder);
  const bool good = decode(strict.get(), bytes, whole, &refused).code == TS_ERROR_NONE;
  ASSERT_TRUE(opened || !good);
  if (good) {
    ASSERT_EQ(met, "");
    ASSERT_EQ(got.pixels, refused.pixels);
  }
  ASSERT_EQ(opened && !good, !met.empty());
  Bytes by_libjpeg;
  if (opened && info.format == TS_IMAGE_FORMAT_JPEG && info.components != 4) {
    ASSERT_TRUE(libjpeg_whole::decode(bytes.data(), bytes.size(), &by_libjpeg));
    ASSERT_EQ(got.pixels, by_libjpeg);
  }
  for (int i = 0; i < 4; ++i) {
    const int w = uniform(random, 1, info.width);
    const int h = uniform(random, 1, info.height);
    const int x = uniform(random, 0, info.width - w);
    const int y = uniform(random, 0, info.height - h);
    Image cropped;
    Image strictly;
    const auto geometry = crop(x, y, w, h);
    const bool some = decode(decoder.get(), bytes, geometry, &cropped).code == TS_ERROR_NONE;
    if (opened) {
      ASSERT_TRUE(some);
      ASSERT_EQ(cropped.pixels, part(got, x, y, w, h).pixels);
    } else if (some) {  // the damage is below the crop, and not in the file's structure
      ASSERT_EQ(decode(strict.get(), bytes, geometry, &strictly).code, TS_ERROR_NONE);
    }
    // Only files without damage get entry points.
    Bytes blob(4096);
    ts_image_entries_made made = {};
    cropped.pixels.assign(cropped.pixels.size(), 0);
    if (!some) continue;
    ASSERT_EQ(
        Outcome(ts_image_decode_make_entries(decoder.get(), bytes.data(), bytes.size(), &geometry,
                                             cropped.pixels.data(), static_cast<size_t>(w) * 3,
                                             {blob.data(), blob.size(), 2}, &made))
            .code,
        TS_ERROR_NONE);
    if (opened) {
      ASSERT_EQ(cropped.pixels, part(got, x, y, w, h).pixels);
    }
    if (made.bytes != 0) {
      ASSERT_TRUE(good);
    }
  }
}

TEST(Damage, JpegsEqualLibjpegsDecodeAtEveryCrop) {
  Random random(21);
  for (const Coding coding : {Coding::kBaseline, Coding::kProgressive, Coding::kSeparateScans,
                              Coding::kCoarseProgressive, Coding::kArithmetic}) {
    for (const int interval : {0, 3}) {
      JpegOptions options;
      options.coding = coding;
      options.restart_interval = interval;
      options.sampling[0][0] = options.sampling[0][1] = 2;
      const Bytes good = encode_jpeg(picture(random, 70, 60), options);
      for (int i = 0; i < 120; ++i) {
        const Bytes bad = damage(random, good);
        for (const int32_t answer : {TS_IMAGE_DAMAGE_WARN, TS_IMAGE_DAMAGE_PARTIAL}) {
          expect_consistent(random, bad, answer);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

TEST(Damage, PngsAreTheSameAtEveryCrop) {
  Random random(22);
  for (const bool interlaced : {false, true}) {
    for (const int color_type : {PNG_COLOR_TYPE_RGB, PNG_COLOR_TYPE_PALETTE}) {
      const Bytes good = encode_png(random, 40, 31, {color_type, 8, interlaced, false}).bytes;
      for (int i = 0; i < 150; ++i) {
        const Bytes bad = damage(random, good);
        for (const int32_t answer : {TS_IMAGE_DAMAGE_WARN, TS_IMAGE_DAMAGE_PARTIAL}) {
          expect_consistent(random, bad, answer);
          if (HasFatalFailure()) return;
        }
      }
    }
  }
}

// Expects the verdicts of the three answers on one file. A verdict on damage to the file's
// structure does not depend on the crop.
void expect_verdicts(const Bytes& bytes, bool warned, bool partial, const char* what,
                     const ts_image_geometry& part = crop(0, 0, 1, 1)) {
  Image got;
  EXPECT_EQ(decode(tolerant(TS_IMAGE_DAMAGE_REFUSE).get(), bytes, part, &got).code, TS_ERROR_DECODE)
      << what;
  EXPECT_EQ(decode(tolerant(TS_IMAGE_DAMAGE_WARN).get(), bytes, part, &got).code,
            warned ? TS_ERROR_NONE : TS_ERROR_DECODE)
      << what;
  EXPECT_EQ(decode(tolerant(TS_IMAGE_DAMAGE_PARTIAL).get(), bytes, part, &got).code,
            partial ? TS_ERROR_NONE : TS_ERROR_DECODE)
      << what;
}

size_t find(const Bytes& bytes, int marker) {
  for (size_t i = 2; i + 1 < bytes.size(); ++i) {
    if (bytes[i] == 0xFF && bytes[i + 1] == marker) return i;
  }
  ADD_FAILURE() << "no marker " << marker;
  return 0;
}

TEST(Damage, EachKindOfJpegDamageHasItsVerdict) {
  Random random(23);
  const Bytes good = encode_jpeg(picture(random, 90, 80), {});
  const auto inserted = [&](int marker, const Bytes& junk) {
    Bytes bytes(good);
    bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(find(bytes, marker)), junk.begin(),
                 junk.end());
    return bytes;
  };
  expect_verdicts(inserted(0xDB, {1, 2, 3}), true, true, "bytes between the header's segments");
  expect_verdicts(inserted(0xD9, {0xFF, 0xFE, 0, 0}), true, true, "a segment of impossible length");
  // APP14 "Adobe", version 100, flags, transform 9, in a file that is not JFIF.
  Bytes adobe = inserted(0xDB, {0xFF, 0xEE, 0, 14, 'A', 'd', 'o', 'b', 'e', 0, 100, 0, 0, 0, 0, 9});
  adobe[find(adobe, 0xE0) + 1] = 0xE1;
  expect_verdicts(adobe, true, true, "an unknown Adobe transform");
  Bytes spectral(good);
  spectral[find(spectral, 0xDA) + 12] = 62;
  expect_verdicts(spectral, true, true, "invalid parameters of the scan");
  Bytes bytes(good);
  bytes.resize(bytes.size() - 2);
  expect_verdicts(bytes, true, true, "no end marker");
  bytes.resize(bytes.size() - 200);
  expect_verdicts(bytes, false, true, "cut off");
  bytes.insert(bytes.end(), {0xFF, 0xD9});
  Image got;
  const Decoder decoder = tolerant(TS_IMAGE_DAMAGE_WARN);
  ASSERT_EQ(decode(decoder.get(), bytes, crop(0, 0, 90, 80), &got).code, TS_ERROR_NONE);
  EXPECT_NE(tolerated(decoder).find("premature end of data"), std::string::npos)
      << tolerated(decoder);
  EXPECT_EQ(Bytes(got.pixels.end() - 3, got.pixels.end()), (Bytes{128, 128, 128})) << "not grey";
  ASSERT_EQ(decode(decoder.get(), good, crop(0, 0, 90, 80), &got).code, TS_ERROR_NONE);
  EXPECT_EQ(tolerated(decoder), "");
}

// Returns a PNG chunk with its checksum, wrong if `wrong` is set.
Bytes chunk(const char* name, const Bytes& data, bool wrong = false) {
  Bytes out(12 + data.size());
  const auto put = [&](size_t at, uLong value) {
    for (int shift = 24; shift >= 0; shift -= 8) out[at++] = static_cast<uint8_t>(value >> shift);
  };
  put(0, data.size());
  std::memcpy(out.data() + 4, name, 4);
  std::copy(data.begin(), data.end(), out.begin() + 8);
  put(8 + data.size(), crc32(0, out.data() + 4, static_cast<uInt>(4 + data.size())) ^
                           static_cast<uLong>(wrong ? 1 : 0));
  return out;
}

TEST(Damage, EachKindOfPngDamageHasItsVerdict) {
  const int side = 50;
  Random random(24);
  Bytes raw;
  for (int y = 0; y < side; ++y) {
    raw.push_back(0);
    for (int x = 0; x < side; ++x) raw.push_back(static_cast<uint8_t>(uniform(random, 0, 6)));
  }
  uLongf size = compressBound(raw.size());
  Bytes packed(size);
  ASSERT_EQ(compress(packed.data(), &size, raw.data(), raw.size()), Z_OK);
  packed.resize(size);
  const Bytes half(packed.begin(), packed.begin() + static_cast<std::ptrdiff_t>(size / 2));
  const Bytes rest(packed.begin() + static_cast<std::ptrdiff_t>(size / 2), packed.end());
  const Bytes unchecked(packed.begin(), packed.end() - 4);  // without zlib's checksum
  Bytes wrong(packed);
  wrong.back() = static_cast<uint8_t>(wrong.back() ^ 1);
  Bytes palette(3 * 7);
  for (size_t i = 0; i < palette.size(); ++i) palette[i] = static_cast<uint8_t>(200 - 9 * i);
  const Bytes other(palette.rbegin(), palette.rend());
  const auto file = [](std::initializer_list<Bytes> chunks) {
    Bytes out = {0x89, 'P', 'N', 'G', '\r', '\n', 0x1A, '\n'};
    for (const Bytes& c : chunks) out.insert(out.end(), c.begin(), c.end());
    return out;
  };
  const Bytes ihdr = chunk("IHDR", {0, 0, 0, side, 0, 0, 0, side, 8, 3, 0, 0, 0});
  const Bytes plte = chunk("PLTE", palette);
  const Bytes idat = chunk("IDAT", packed);
  const Bytes iend = chunk("IEND", {});

  expect_verdicts(file({ihdr, chunk("tEXt", {'a', 0, 'b'}, true), plte, idat, iend}), true, true,
                  "the checksum of an ancillary chunk");
  expect_verdicts(file({ihdr, plte, chunk("IDAT", half, true), chunk("IDAT", rest), iend}), true,
                  true, "the checksum of image data");
  expect_verdicts(file({ihdr, plte, idat}), true, true, "no end chunk");
  expect_verdicts(file({ihdr, plte, chunk("IDAT", unchecked), iend}), true, true,
                  "no checksum of zlib", crop(0, 0, side, side));
  expect_verdicts(file({ihdr, plte, chunk("IDAT", wrong), iend}), false, true,
                  "the checksum of zlib", crop(0, 0, side, side));
  expect_verdicts(file({ihdr, plte, chunk("IDAT", half), iend}), false, true, "cut off",
                  crop(0, 0, side, side));
  expect_verdicts(file({ihdr, chunk("PLTE", palette, true), idat, iend}), false, false,
                  "the checksum of the palette");
  expect_verdicts(file({ihdr, idat, iend}), false, false, "no palette");

  const Bytes twice = file({ihdr, plte, chunk("PLTE", other), idat, iend});
  expect_verdicts(twice, true, true, "two palettes");
  Image got;
  Image expected;
  ASSERT_EQ(decode(tolerant(TS_IMAGE_DAMAGE_WARN).get(), twice, crop(0, 0, side, side), &got).code,
            TS_ERROR_NONE);
  ASSERT_EQ(decode(new_decoder().get(), file({ihdr, chunk("PLTE", other), idat, iend}),
                   crop(0, 0, side, side), &expected)
                .code,
            TS_ERROR_NONE);
  EXPECT_EQ(got.pixels, expected.pixels) << "the last palette counts";

  ASSERT_EQ(decode(tolerant(TS_IMAGE_DAMAGE_PARTIAL).get(), file({ihdr, plte, chunk("IDAT", half)}),
                   crop(0, 0, side, side), &got)
                .code,
            TS_ERROR_NONE);
  EXPECT_EQ(Bytes(got.pixels.end() - 3, got.pixels.end()),
            Bytes(palette.begin(), palette.begin() + 3))
      << "not the palette's first colour";
}

TEST(Damage, ErrorsHaveAnOffset) {
  EXPECT_EQ(ts_error_offset(nullptr), -1);
  ts_error_set_offset(nullptr, 5);
  ts_error* error = ts_error_new(TS_ERROR_CALLBACK, "test", "as planned");
  EXPECT_EQ(ts_error_offset(error), -1);
  ts_error_set_offset(error, 5);
  EXPECT_EQ(ts_error_offset(error), 5);
  ts_error_free(error);

  const Bytes bytes = {0xFF, 0xD8, 0xFF, 0xDB, 0, 1};  // a segment of impossible length
  ts_image_info info = {};
  info.size = sizeof info;
  error = ts_image_get_info(bytes.data(), bytes.size(), &info);
  EXPECT_EQ(ts_error_code(error), TS_ERROR_DECODE);
  EXPECT_EQ(ts_error_offset(error), 6);
  EXPECT_STREQ(ts_error_message(error),
               "truncated JPEG: no end marker up to the file's end at byte 6");
  ts_error_free(error);
  error = ts_image_get_info(bytes.data(), 0, &info);
  EXPECT_EQ(ts_error_code(error), TS_ERROR_UNSUPPORTED);
  EXPECT_EQ(ts_error_offset(error), -1);
  ts_error_free(error);
}

TEST(Damage, ArgumentsAreChecked) {
  const Decoder decoder = new_decoder();
  for (const int32_t answer : {-1, 3}) {
    EXPECT_EQ(Outcome(ts_image_decoder_set_damage(decoder.get(), answer)).code,
              TS_ERROR_INVALID_ARGUMENT);
  }
  EXPECT_EQ(Outcome(ts_image_decoder_set_damage(nullptr, 0)).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_STREQ(ts_image_decoder_tolerated(nullptr), "");
  EXPECT_EQ(tolerated(decoder), "");
}

}  // namespace
