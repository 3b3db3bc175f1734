// Thousands of damaged files: each call returns pixels, or an error of the right kind. Built with
// -DTS_SANITIZE=ON, the address and undefined-behaviour sanitizers check every call.
#include <zlib.h>

#include <cstring>

#include "image/entries.h"
#include "image/samples.h"

namespace {

using namespace samples;
using ts::image::xxh64;

std::vector<Bytes> seeds(Random& random) {
  std::vector<Bytes> out;
  for (const Coding coding : {Coding::kBaseline, Coding::kProgressive, Coding::kCoarseProgressive,
                              Coding::kSeparateScans, Coding::kArithmetic}) {
    for (const int channels : {1, 3, 4}) {
      JpegOptions options;
      options.coding = coding;
      options.quality = 60;
      options.restart_interval = channels == 3 ? 2 : 0;
      if (channels == 3) options.sampling[0][0] = options.sampling[0][1] = 2;
      out.push_back(encode_jpeg(picture(random, 43, 37, channels), options));
    }
  }
  for (const bool interlaced : {false, true}) {
    out.push_back(
        encode_png(random, 13, 11, {PNG_COLOR_TYPE_RGB_ALPHA, 16, interlaced, false}).bytes);
    out.push_back(encode_png(random, 21, 9, {PNG_COLOR_TYPE_PALETTE, 2, interlaced, true}).bytes);
    out.push_back(encode_png(random, 21, 9, {PNG_COLOR_TYPE_GRAY, 8, interlaced, false}).bytes);
  }
  for (const char* name : {"lossy.webp", "lossy-alpha.webp", "lossless.webp", "lossless-alpha.webp",
                           "orientation-6.jpg", "orientation-6.png", "orientation-6.webp"}) {
    out.push_back(read_file(std::string("data/") + name));
  }
  return out;
}

// Reads the header, then decodes by a random geometry for the size in the header.
void exercise(ts_image_decoder* decoder, Random& random, const Bytes& bytes) {
  const Bytes exact(bytes);
  ts_image_info info = {};
  info.size = sizeof info;
  const Outcome header(ts_image_get_info(exact.data(), exact.size(), &info));
  ASSERT_TRUE(header.code == TS_ERROR_NONE || header.code == TS_ERROR_DECODE ||
              header.code == TS_ERROR_UNSUPPORTED)
      << header.code << header.message;
  if (header.code != TS_ERROR_NONE) {
    ASSERT_FALSE(header.message.empty());
    info.width = info.height = 8;
  }
  ts_image_geometry g = {};
  g.size = sizeof g;
  g.orientation = uniform(random, 0, 2) == 0 ? uniform(random, 0, 8) : 0;
  if (g.orientation >= 5) std::swap(info.width, info.height);
  g.crop_width = uniform(random, 1, info.width);
  g.crop_height = uniform(random, 1, info.height);
  g.crop_x = uniform(random, 0, info.width - g.crop_width);
  g.crop_y = uniform(random, 0, info.height - g.crop_height);
  g.resize_width = g.window_width = uniform(random, 1, 30);
  g.resize_height = g.window_height = uniform(random, 1, 30);
  g.flip = uniform(random, 0, 1) == 1;
  Image got;
  const Outcome outcome = decode(decoder, bytes, g, &got);
  ASSERT_TRUE(outcome.code == TS_ERROR_NONE || outcome.code == TS_ERROR_DECODE ||
              outcome.code == TS_ERROR_UNSUPPORTED)
      << outcome.code << outcome.message;
  ASSERT_TRUE(header.code == TS_ERROR_NONE || outcome.code == header.code) << outcome.message;
}

TEST(Fuzz, EveryTruncationReturns) {
  Random random(1);
  const Decoder decoder = new_decoder(1 << 22);
  for (const Bytes& seed : seeds(random)) {
    for (size_t size = 0; size < seed.size(); ++size) {
      exercise(decoder.get(), random,
               Bytes(seed.begin(), seed.begin() + static_cast<std::ptrdiff_t>(size)));
      if (HasFatalFailure()) return;
    }
  }
}

TEST(Fuzz, MutatedFilesReturn) {
  Random random(2);
  const Decoder decoder = new_decoder(1 << 22);
  const std::vector<Bytes> originals = seeds(random);
  for (int i = 0; i < 20000; ++i) {
    Bytes bytes = originals[random() % originals.size()];
    // Half of the changes are in the first 200 bytes, which have the headers.
    for (int changes = uniform(random, 1, 4); changes > 0; --changes) {
      const size_t range = random() % 2 == 0 ? bytes.size() : std::min<size_t>(bytes.size(), 200);
      const size_t at = random() % range;
      switch (random() % 5) {
        case 0:
          bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << random() % 8);
          break;
        case 1:
          bytes[at] = static_cast<uint8_t>(random());
          break;
        case 2:
          bytes[at] = random() % 2 == 0 ? 0xFF : 0;
          break;
        case 3:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       static_cast<uint8_t>(random()));
          break;
        default:
          bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
      }
    }
    exercise(decoder.get(), random, bytes);
    if (HasFatalFailure()) return;
  }
}

// PNG's checksums reject most mutations. These mutations have correct checksums, so that they reach
// the decoder.
TEST(Fuzz, MutatedPngsWithCorrectChecksumsReturn) {
  Random random(3);
  const Decoder decoder = new_decoder(1 << 22);
  std::vector<Bytes> originals;
  for (const Bytes& seed : seeds(random)) {
    if (seed[0] == 0x89) originals.push_back(seed);
  }
  for (int i = 0; i < 5000; ++i) {
    Bytes bytes = originals[random() % originals.size()];
    size_t at = 8;
    while (at + 12 <= bytes.size()) {
      const size_t size = static_cast<size_t>(bytes[at + 2]) << 8 | bytes[at + 3];
      if (size > 0 && random() % 3 == 0)
        bytes[at + 8 + random() % size] = static_cast<uint8_t>(random());
      const auto sum =
          static_cast<uint32_t>(crc32(0, &bytes[at + 4], static_cast<unsigned>(size + 4)));
      for (size_t k = 0; k < 4; ++k)
        bytes[at + 8 + size + k] = static_cast<uint8_t>(sum >> (24 - 8 * k));
      at += size + 12;
    }
    exercise(decoder.get(), random, bytes);
    if (HasFatalFailure()) return;
  }
}

// A damaged JPEG, turned or not, gives the same result with entry points as without. Forged entry
// points change nothing unless they are trusted, and are harmless then.
TEST(Fuzz, EntriesOfDamagedTurnedFilesAreHarmless) {
  Random random(4);
  const Decoder decoder = new_decoder(1 << 22);
  std::vector<Bytes> originals = {read_file("data/orientation-6.jpg")};
  for (const int channels : {1, 3}) {
    JpegOptions options;
    options.restart_interval = channels == 3 ? 3 : 0;
    if (channels == 3) options.sampling[0][0] = options.sampling[0][1] = 2;
    originals.push_back(encode_jpeg(picture(random, 87, 61, channels), options));
  }
  int with_entries = 0;
  for (int i = 0; i < 6000; ++i) {
    Bytes bytes = originals[random() % originals.size()];
    if (i % 4 != 0) {
      bytes[random() % bytes.size()] ^= static_cast<uint8_t>(1 << random() % 8);
    }
    ts_image_info info = {};
    info.size = sizeof info;
    if (Outcome(ts_image_get_info(bytes.data(), bytes.size(), &info)).code != TS_ERROR_NONE)
      continue;
    ts_image_geometry g = {};
    g.size = sizeof g;
    g.orientation = uniform(random, 0, 8);
    if (g.orientation >= 5) std::swap(info.width, info.height);
    g.crop_width = uniform(random, 1, info.width);
    g.crop_height = uniform(random, 1, info.height);
    g.crop_x = uniform(random, 0, info.width - g.crop_width);
    g.crop_y = uniform(random, 0, info.height - g.crop_height);
    g.resize_width = g.window_width = uniform(random, 1, 30);
    g.resize_height = g.window_height = uniform(random, 1, 30);
    Image plain;
    const Outcome expected = decode(decoder.get(), bytes, g, &plain);

    const size_t stride = static_cast<size_t>(g.window_width) * 3;
    Image got = plain;
    const auto as_expected = [&](const Outcome& outcome) {
      ASSERT_EQ(outcome.code, expected.code) << outcome.message;
      ASSERT_EQ(outcome.message, expected.message);
      if (expected.code == TS_ERROR_NONE) {
        ASSERT_EQ(got.pixels, plain.pixels);
      }
      got.pixels.assign(got.pixels.size(), 0x5A);
    };
    got.pixels.assign(got.pixels.size(), 0x5A);
    Bytes blob(1 << 14);
    ts_image_entries_made written = {};
    as_expected(Outcome(ts_image_decode_make_entries(
        decoder.get(), bytes.data(), bytes.size(), &g, got.pixels.data(), stride,
        {blob.data(), blob.size(), uniform(random, 1, 12)}, &written)));
    if (HasFatalFailure()) return;
    if (written.bytes == 0 || written.bytes > blob.size()) continue;
    ++with_entries;
    const Bytes made(blob.begin(), blob.begin() + static_cast<std::ptrdiff_t>(written.bytes));
    const auto by = [&](const Bytes& entries, uint64_t* with) {
      return Outcome(ts_image_decode_with_entries(decoder.get(), bytes.data(), bytes.size(), &g,
                                                  {entries.data(), entries.size()},
                                                  got.pixels.data(), stride, with));
    };
    uint64_t first = 0;
    as_expected(by(made, &first));
    as_expected(by(made, &written.proof));
    as_expected(by(made, nullptr));
    if (HasFatalFailure()) return;
    Bytes forged = made;
    for (int changes = uniform(random, 1, 3); changes > 0; --changes) {
      forged[random() % forged.size()] ^= static_cast<uint8_t>(1 << random() % 8);
    }
    const uint64_t digest =
        xxh64(forged.data() + 64, forged.size() - 64, xxh64(forged.data(), 56, 0));
    std::memcpy(forged.data() + 56, &digest, sizeof digest);
    first = 0;
    as_expected(by(forged, &first));
    as_expected(by(forged, &written.proof));
    if (HasFatalFailure()) return;
    by(forged, nullptr);
  }
  EXPECT_GT(with_entries, 1000);
}

}  // namespace
