// Entry points give the same pixels for less work, with any blob.
#include "image/entries.h"

#include <cstring>

#include "image/entropy.h"
#include "image/xxh3.h"

namespace {

using namespace samples;

TEST(Entries, DigestIsXxh64) {
  const auto digest = [](const std::string& text) {
    return xxh64(reinterpret_cast<const uint8_t*>(text.data()), text.size(), 0);
  };
  EXPECT_EQ(digest(""), 0xEF46DB3751D8E999u);
  EXPECT_EQ(digest("a"), 0xD24EC4F1A98C6E5Bu);
  EXPECT_EQ(digest("abc"), 0x44BC2CF5AD770999u);
  EXPECT_EQ(digest("Nobody inspects the spammish repetition"), 0xFBCEA83C8A378BF1u);
}

TEST(Entries, ProofsDigestIsXxh3) {
  Bytes data(5000);
  for (size_t i = 0; i < data.size(); ++i) {
    data[i] = static_cast<uint8_t>(i * i + i * 7 + (i >> 8) * 13);
  }
  constexpr uint64_t kSeed = 0x9E3779B97F4A7C15;
  const struct {
    size_t bytes;
    uint64_t plain, seeded;
  } expected[] = {
      // of the Python package xxhash: xxh3_64_intdigest(data, seed)
      {241, 0x2D6873B128D3F478, 0x913B1BE6BB897720},
      {242, 0x16CCAF13DB0186E4, 0xAB224FAA1F00AE56},
      {255, 0xB13E6556C9BB22FD, 0xA859F098173EC0C4},
      {256, 0x4FBBF0042A727538, 0xAB253FB8EF6A33E9},
      {257, 0x1CC3CC2D5F5A3541, 0x366B17D63D9C04BB},
      {1023, 0x499AF4D89961690C, 0xD5912CD403063072},
      {1024, 0x56521DD0A152F7EC, 0xE362AFD3C9C753B6},
      {1025, 0xFF41B8721B12B901, 0x19051C028352258E},
      {1088, 0x8DD638610A688366, 0x6243D9A18F657596},
      {2048, 0x018E88BFBE0A5671, 0xA2C96C0DECA5AEC0},
      {2049, 0x189734D4849829DD, 0x93B2D63CD2684EF7},
      {4999, 0xF900D3D0EDC298EC, 0x9039216C5301DDD0},
  };
  for (const auto& e : expected) {
    const Bytes exact(data.begin(), data.begin() + static_cast<std::ptrdiff_t>(e.bytes));
    for (const auto vectors : {Vectors::kNone, Vectors::kAvx2, Vectors::kAvx512}) {
      if (vectors > vectors_of_processor()) continue;
      EXPECT_EQ(xxh3(exact.data(), exact.size(), 0, vectors), e.plain) << e.bytes;
      EXPECT_EQ(xxh3(exact.data(), exact.size(), kSeed, vectors), e.seeded) << e.bytes;
    }
  }
}

TEST(Entries, PackedPointsAreReadBack) {
  Random random(31);
  for (int i = 0; i < 500; ++i) {
    const int count = uniform(random, 1, 60);
    std::vector<EntryPoint> points;
    uint32_t bit = 0;
    const auto step = uint32_t{1} << uniform(random, 0, 24);
    const int range = 1 << uniform(random, 0, 15);
    for (int k = 0; k < count; ++k) {
      EntryPoint point = {bit, {}};
      for (auto& dc : point.dc) dc = static_cast<int16_t>(uniform(random, -range, range - 1));
      points.push_back(point);
      bit += static_cast<uint32_t>(random()) % step;
    }
    const uint32_t spacing = static_cast<uint32_t>(uniform(random, 1, 100));
    const EntriesOf of = {random(), 1u << 30, 600, uint64_t{spacing} * static_cast<uint32_t>(count),
                          spacing};
    const size_t size = pack_entries(of, points, nullptr, 0);
    ASSERT_GT(size, 0u);
    Bytes blob(size);
    ASSERT_EQ(pack_entries(of, points, blob.data(), size), size);
    Entries entries;
    ASSERT_TRUE(entries.attach(blob.data(), blob.size()));
    ASSERT_EQ(entries.count(), points.size());
    EXPECT_EQ(entries.of().digest, of.digest);
    EXPECT_EQ(entries.of().mcus, of.mcus);
    for (uint32_t k = 0; k < entries.count(); ++k) ASSERT_TRUE(entries.at(k) == points[k]);
    // A change of any byte is detected.
    const size_t at = random() % size;
    blob[at] = static_cast<uint8_t>(blob[at] ^ 1 << random() % 8);
    EXPECT_FALSE(entries.attach(blob.data(), blob.size()));
  }
}

TEST(Entries, CropsEqualTheWholeDecode) {
  Random random(32);
  JpegDecoder decoder(1 << 24);
  JpegDecoder libjpeg(1 << 24);
  libjpeg.set_own(false);
  int64_t used = 0, verified = 0;
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 60 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes file = usual(random, kind, width, height);
      const uint32_t spacings[] = {1, 2, 3, 5, 8, 16, 100};
      const uint32_t spacing = spacings[random() % 7];
      Blob blob = make_blob(&decoder, file, spacing);
      ASSERT_GT(blob.bytes.size(), 0u);
      ASSERT_NE(blob.proof, 0u);
      for (int k = 0; k < 12; ++k) {
        const Box box = k == 0 ? Box{0, 0, width, height} : draw_box(random, width, height);
        const Result expected = decode_by(&libjpeg, file, box);
        ASSERT_EQ(expected.code, TS_ERROR_NONE) << expected.message;
        uint64_t unproven = 0;
        EntriesIn in = {blob.bytes.data(), blob.bytes.size(), &blob.proof};
        if (k % 3 == 1) in.proof = nullptr;
        if (k % 3 == 2) in.proof = &unproven;
        const Result got = decode_by(&decoder, file, box, &in);
        ASSERT_EQ(got.code, TS_ERROR_NONE) << got.message;
        ASSERT_EQ(got.pixels, expected.pixels)
            << kind.name << " " << width << " x " << height << ": " << box.width() << " x "
            << box.height() << " at " << box.x0 << ", " << box.y0 << " spacing " << spacing;
        ++(k % 3 == 2 ? verified : used);
        if (k % 3 == 2) {
          ASSERT_EQ(unproven, blob.proof);
        }
      }
    }
  }
  EXPECT_EQ(decoder.stats().entries_used, used);
  EXPECT_EQ(decoder.stats().entries_verified, verified);
  EXPECT_EQ(decoder.stats().entries_refused, 0);
  EXPECT_EQ(decoder.stats().gave_up, 0);
}

TEST(Entries, EntriesMadeWhileDecodingAreTheSame) {
  Random random(33);
  JpegDecoder decoder(1 << 24);
  for (int i = 0; i < 200; ++i) {
    const int width = uniform(random, 20, 300);
    const int height = uniform(random, 20, 300);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    const uint32_t spacing = static_cast<uint32_t>(uniform(random, 0, 9));
    const Blob alone = make_blob(&decoder, file, spacing);
    Bytes buffer(file.size());
    EntriesOut out = {spacing, buffer.data(), buffer.size()};
    const Box box = draw_box(random, width, height);
    const Result plain = decode_by(&decoder, file, box);
    const Result got = decode_by(&decoder, file, box, nullptr, &out);
    ASSERT_EQ(got.pixels, plain.pixels);
    ASSERT_EQ(out.written, alone.bytes.size());
    ASSERT_EQ(out.proof, alone.proof);
    if (out.written <= buffer.size()) {
      buffer.resize(out.written);
      ASSERT_EQ(buffer, alone.bytes);
    }
    if (spacing == 0) {
      EXPECT_LE(out.written, file.size() * 15 / 1000);
      EXPECT_TRUE(out.written != 0 || file.size() < 12000) << file.size();
    }
  }
}

TEST(Entries, EntriesOfAnotherFileAreRefused) {
  Random random(34);
  JpegDecoder decoder(1 << 24);
  JpegDecoder libjpeg(1 << 24);
  libjpeg.set_own(false);
  int64_t refused = 0;
  for (int i = 0; i < 400 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Kind& kind = kKinds[random() % 8];
    const Bytes old = usual(random, kind, width, height);
    Blob blob = make_blob(&decoder, old, 3);
    Bytes file = usual(random, kind, width, height);
    if (i % 2 == 0) {  // the same file with one bit changed
      file = old;
      const size_t at = file.size() / 2 + random() % (file.size() / 2);
      file[at] = static_cast<uint8_t>(file[at] ^ 1 << random() % 8);
    }
    if (file == old) continue;  // files of very few pixels can be equal
    const Box box = draw_box(random, width, height);
    const Result expected = decode_by(&libjpeg, file, box);
    for (int way = 0; way < 3; ++way) {
      uint64_t unproven = 0;
      const EntriesIn in = {blob.bytes.data(), blob.bytes.size(),
                            way == 0   ? nullptr
                            : way == 1 ? &blob.proof
                                       : &unproven};
      const Result got = decode_by(&decoder, file, box, &in);
      ASSERT_EQ(got.code, expected.code) << i << got.message << expected.message;
      ASSERT_EQ(got.message, expected.message);
      ASSERT_EQ(got.pixels, expected.pixels);
      ASSERT_EQ(unproven, 0u);
      // Damage may be found before or after the entries are checked.
      refused += got.code == TS_ERROR_NONE;
    }
  }
  EXPECT_GE(decoder.stats().entries_refused, refused);
  EXPECT_EQ(decoder.stats().entries_used + decoder.stats().entries_verified, 0);
}

// Forged entries with correct digests. Every chain of entries is compared with the scan before it
// is used, so that the pixels are right even where forged entries agree with each other.
TEST(Entries, ForgedEntriesGiveTheSamePixels) {
  Random random(35);
  JpegDecoder decoder(1 << 24);
  JpegDecoder libjpeg(1 << 24);
  libjpeg.set_own(false);
  int64_t forged = 0;
  for (int i = 0; i < 1500 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    const uint32_t spacing = static_cast<uint32_t>(uniform(random, 1, 4));
    const Blob blob = make_blob(&decoder, file, spacing);
    Bytes forgery = blob.bytes;
    if (i % 2 == 0) {
      for (int changes = uniform(random, 1, 3); changes > 0; --changes) {
        const size_t at = random() % 3 == 0 ? random() % forgery.size()
                                            : std::min(forgery.size() - 1, 36 + random() % 60);
        forgery[at] = static_cast<uint8_t>(forgery[at] ^ 1 << random() % 8);
      }
      seal(&forgery, file);
    } else {
      // Points of this file that are one MCU further than they claim: each segment ends where the
      // next one starts.
      const Blob all = make_blob(&decoder, file, 1);
      Entries points;
      ASSERT_TRUE(points.attach(all.bytes.data(), all.bytes.size()));
      std::vector<EntryPoint> shifted;
      for (uint32_t k = 0; k < points.count(); k += spacing) {
        shifted.push_back(points.at(std::min(k + 1, points.count() - 1)));
      }
      EntriesOf of = points.of();
      of.spacing = spacing;
      forgery.resize(1 << 16);
      forgery.resize(pack_entries(of, shifted, forgery.data(), forgery.size()));
    }
    if (forgery == blob.bytes) continue;
    ++forged;
    const Box box = draw_box(random, width, height);
    const Result expected = decode_by(&libjpeg, file, box);
    uint64_t unproven = 0;
    uint64_t of_another = blob.proof;
    for (uint64_t* proof : {&unproven, &of_another}) {
      const EntriesIn in = {forgery.data(), forgery.size(), proof};
      const Result got = decode_by(&decoder, file, box, &in);
      ASSERT_EQ(got.code, expected.code) << got.message;
      ASSERT_EQ(got.pixels, expected.pixels) << i;
    }
    // A change of bytes that no entry depends on may leave all entries right. Then, and only then,
    // the blob is accepted.
    if (unproven != 0) {
      Entries a, b;
      ASSERT_TRUE(a.attach(blob.bytes.data(), blob.bytes.size()));
      ASSERT_TRUE(b.attach(forgery.data(), forgery.size()));
      ASSERT_EQ(a.count(), b.count());
      for (uint32_t k = 0; k < a.count(); ++k) ASSERT_TRUE(a.at(k) == b.at(k));
    }
    // A forgery that is trusted only by its digests may give other pixels, but does no other harm.
    const EntriesIn trusted = {forgery.data(), forgery.size(), nullptr};
    ASSERT_EQ(decode_by(&decoder, file, box, &trusted).code, TS_ERROR_NONE);
  }
  EXPECT_GT(forged, 1000);
  EXPECT_GT(decoder.stats().entries_refused, forged);
}

TEST(Entries, UnsuitableFilesGetNoEntries) {
  Random random(36);
  JpegDecoder decoder(1 << 24);
  for (const Coding coding : {Coding::kProgressive, Coding::kArithmetic, Coding::kSeparateScans}) {
    JpegOptions options;
    options.coding = coding;
    EXPECT_EQ(make_blob(&decoder, encode_jpeg(picture(random, 400, 300), options), 4).bytes.size(),
              0u);
  }
  EXPECT_EQ(make_blob(&decoder, encode_jpeg(picture(random, 400, 300, 4), {}), 4).bytes.size(), 0u);
  EXPECT_EQ(make_blob(&decoder, encode_jpeg(picture(random, 30, 20), {}), 0).bytes.size(), 0u);
  Bytes damaged = encode_jpeg(picture(random, 400, 300), {});
  EXPECT_GT(make_blob(&decoder, damaged, 0).bytes.size(), 0u);
  const auto middle = damaged.begin() + static_cast<std::ptrdiff_t>(damaged.size() / 2);
  damaged.erase(middle, middle + 500);
  EXPECT_EQ(make_blob(&decoder, damaged, 0).bytes.size(), 0u);
}

TEST(Entries, CFunctionsMakeVerifyAndCountEntries) {
  Random random(37);
  const Decoder decoder = new_decoder();
  const Bytes file = encode_jpeg(picture(random, 400, 300), {});
  Bytes buffer(file.size());
  ts_image_entries_made made = {1, 1};
  ASSERT_EQ(Outcome(ts_image_make_entries(decoder.get(), file.data(), file.size(),
                                          {buffer.data(), 10, 0}, &made))
                .code,
            TS_ERROR_NONE);
  EXPECT_GT(made.bytes, 10u);
  EXPECT_EQ(made.proof, 0u);
  const ts_image_geometry g = crop(33, 50, 200, 100);
  Image plain;
  ASSERT_EQ(decode(decoder.get(), file, g, &plain).code, TS_ERROR_NONE);
  Bytes pixels(plain.pixels.size());
  ASSERT_EQ(Outcome(ts_image_decode_make_entries(decoder.get(), file.data(), file.size(), &g,
                                                 pixels.data(), 600,
                                                 {buffer.data(), buffer.size(), 0}, &made))
                .code,
            TS_ERROR_NONE);
  EXPECT_EQ(pixels, plain.pixels);
  EXPECT_NE(made.proof, 0u);
  for (const uint64_t given : {uint64_t{0}, made.proof}) {
    std::fill(pixels.begin(), pixels.end(), uint8_t{0});
    uint64_t proof = given;
    ASSERT_EQ(Outcome(ts_image_decode_with_entries(decoder.get(), file.data(), file.size(), &g,
                                                   {buffer.data(), made.bytes}, pixels.data(), 600,
                                                   &proof))
                  .code,
              TS_ERROR_NONE);
    EXPECT_EQ(pixels, plain.pixels);
    EXPECT_EQ(proof, made.proof);
  }
  ASSERT_EQ(Outcome(ts_image_decode_with_entries(decoder.get(), file.data(), file.size(), &g,
                                                 {nullptr, 0}, pixels.data(), 600, nullptr))
                .code,
            TS_ERROR_NONE);
  ts_image_decoder_stats stats = {};
  stats.size = sizeof stats;
  ASSERT_EQ(Outcome(ts_image_decoder_get_stats(decoder.get(), &stats)).code, TS_ERROR_NONE);
  EXPECT_EQ(stats.jpeg_own, 5);
  EXPECT_EQ(stats.entries_made, 1);
  EXPECT_EQ(stats.entries_used, 1);
  EXPECT_EQ(stats.entries_verified, 1);
  EXPECT_EQ(stats.entries_refused, 1);
}

}  // namespace
