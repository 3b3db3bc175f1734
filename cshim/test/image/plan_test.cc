// The decoder of plans (src/jpeg), emulated on the host: the pixels of the host's decoder, and no
// access outside of its memory whatever the bytes.
#include <cstring>

#include "image/emulate.h"
#include "image/entropy.h"
#include "image/jpeg_plan.h"

namespace {

using namespace samples;

// Plans in memory of exactly the plan's size. Returns nothing for an image of the host's.
Bytes plan_of(JpegDecoder* decoder, const Bytes& file, const ts_image_geometry& geometry,
              const Bytes& blob, uint64_t* proof) {
  const Bytes exact(file);
  const ts_image_info info = jpeg_header(exact.data(), exact.size());
  const EntriesIn in = {blob.data(), blob.size(), proof};
  Bytes plan;
  const size_t size = decoder->plan(exact.data(), exact.size(), info, geometry, in, nullptr, 0);
  plan.resize(size);
  if (size == 0) return plan;
  EXPECT_EQ(decoder->plan(exact.data(), exact.size(), info, geometry, in, plan.data(), size), size);
  return plan;
}

Bytes host_pixels(ts_image_decoder* decoder, const Bytes& file, const ts_image_geometry& g) {
  Image image;
  const Outcome outcome = decode(decoder, file, g, &image);
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  return image.pixels;
}

TEST(Plan, CropsEqualTheHostsDecoder) {
  Random random(71);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 60 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes file = usual(random, kind, width, height);
      const uint32_t spacings[] = {1, 2, 3, 5, 8, 16, 60};
      const uint32_t spacing = spacings[random() % 7];
      Blob blob = make_blob(&decoder, file, spacing);
      ASSERT_GT(blob.bytes.size(), 0u);
      for (int k = 0; k < 12; ++k) {
        const ts_image_geometry g =
            k == 0 ? crop(0, 0, width, height) : draw_geometry(random, width, height, 90);
        const Bytes plan = plan_of(&decoder, file, g, blob.bytes, &blob.proof);
        ASSERT_GT(plan.size(), 0u) << kind.name;
        emulate::Device device(plan);
        ASSERT_TRUE(device.entropy())
            << kind.name << " " << width << " x " << height << " spacing " << spacing;
        device.finish();
        const Bytes expected = host_pixels(host.get(), file, g);
        ASSERT_EQ(device.result, expected)
            << kind.name << " " << width << " x " << height << ": " << g.crop_width << " x "
            << g.crop_height << " at " << g.crop_x << ", " << g.crop_y << " to " << g.resize_width
            << " x " << g.resize_height << " orientation " << g.orientation << " spacing "
            << spacing;
      }
    }
  }
}

// Changes the quantisers to any values, so that coefficients leave the range of 8-bit samples and
// the inverse DCT overflows.
TEST(Plan, AbsurdQuantisersGiveTheHostsPixels) {
  Random random(72);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (int i = 0; i < 400 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = usual(random, kKinds[random() % 8], width, height);
    for (size_t at = 2; at + 4 < file.size() && file[at + 1] != 0xDA;) {
      if (file[at + 1] == 0xFF) {
        ++at;
        continue;
      }
      const size_t length = size_t{file[at + 2]} << 8 | file[at + 3];
      for (size_t k = at + 4; file[at + 1] == 0xDB && k < at + 2 + length;) {
        const size_t bytes = file[k] >> 4 == 0 ? 64 : 128;
        for (size_t q = k + 1; q <= k + bytes; ++q) {
          if (random() % 4 == 0) file[q] = static_cast<uint8_t>(random() | 1);
        }
        k += bytes + 1;
      }
      at += 2 + length;
    }
    Blob blob = make_blob(&decoder, file, 4);
    ASSERT_GT(blob.bytes.size(), 0u);
    const ts_image_geometry g = draw_geometry(random, width, height, 90);
    const Bytes plan = plan_of(&decoder, file, g, blob.bytes, &blob.proof);
    ASSERT_GT(plan.size(), 0u);
    emulate::Device device(plan);
    ASSERT_TRUE(device.entropy());
    device.finish();
    ASSERT_EQ(device.result, host_pixels(host.get(), file, g)) << i;
  }
}

TEST(Plan, ForgedEntriesDoNoHarm) {
  Random random(73);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  int planned = 0, failed = 0, wrong = 0;
  for (int i = 0; i < 3000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    const Blob blob = make_blob(&decoder, file, static_cast<uint32_t>(uniform(random, 1, 4)));
    Bytes forgery = blob.bytes;
    for (int changes = uniform(random, 1, 3); changes > 0; --changes) {
      // Of the header only numbers that decide where entries are. The lowest predictors (bytes 44
      // to 49) change all entries alike, so that they still meet: only the proof finds that.
      const size_t at = 36 + random() % (forgery.size() - 36 - 8);
      if (at >= 44 && at < 50) continue;
      forgery[at] = static_cast<uint8_t>(forgery[at] ^ 1 << random() % 8);
    }
    seal(&forgery, file);
    if (forgery == blob.bytes) continue;
    const ts_image_geometry g = draw_geometry(random, width, height, 90);
    // A proof of other entries, and none at all, make no plan.
    uint64_t other = blob.proof;
    ASSERT_EQ(plan_of(&decoder, file, g, forgery, &other).size(), 0u);
    other = 0;
    ASSERT_EQ(plan_of(&decoder, file, g, forgery, &other).size(), 0u);
    const Bytes plan = plan_of(&decoder, file, g, forgery, nullptr);
    if (plan.empty()) continue;
    ++planned;
    emulate::Device device(plan);
    const bool good = device.entropy();
    device.finish();
    failed += !good;
    wrong += good && device.result != host_pixels(host.get(), file, g);
  }
  EXPECT_GT(planned, 200);
  EXPECT_GT(failed, planned / 4);
  // Nothing meets the end of an image's last segment. Its entry is proven, or trusted.
  EXPECT_LT(wrong, planned / 10);
}

// Bytes that change on their way to the device.
TEST(Plan, DamagedSegmentsDoNoHarm) {
  Random random(74);
  JpegDecoder decoder(1 << 24);
  int failed = 0, tried = 0;
  for (int i = 0; i < 3000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    Blob blob = make_blob(&decoder, file, static_cast<uint32_t>(uniform(random, 1, 9)));
    const ts_image_geometry g = draw_geometry(random, width, height, 90);
    Bytes plan = plan_of(&decoder, file, g, blob.bytes, &blob.proof);
    ASSERT_GT(plan.size(), 0u);
    const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(plan.data());
    const uint32_t begin = random() % 4 == 0 ? header.entries_at : header.scan_at;
    const uint32_t end =
        begin == header.scan_at ? begin + header.scan_bytes : header.segments_at - 8;
    for (int changes = uniform(random, 1, 40); changes > 0; --changes) {
      uint8_t& byte = plan[begin + random() % (end - begin)];
      byte = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
    }
    ++tried;
    emulate::Device device(plan);
    failed += !device.entropy();
    device.finish();
  }
  EXPECT_GT(failed, tried / 2);
}

TEST(Plan, WhatOnlyTheHostDecodesHasNone) {
  Random random(75);
  JpegDecoder decoder(1 << 24);
  const ts_image_geometry g = crop(0, 0, 100, 80);
  const Bytes file = encode_jpeg(picture(random, 100, 80), {});
  Blob blob = make_blob(&decoder, file, 4);
  EXPECT_GT(plan_of(&decoder, file, g, blob.bytes, &blob.proof).size(), 0u);
  EXPECT_EQ(plan_of(&decoder, file, g, {}, nullptr).size(), 0u);
  Blob far = make_blob(&decoder, file, 1000);  // segments that are too long for a thread
  ASSERT_GT(far.bytes.size(), 0u);
  EXPECT_EQ(plan_of(&decoder, file, g, far.bytes, &far.proof).size(), 0u);
  ts_image_geometry huge = g;  // more pixels than a plan can count
  huge.resize_width = huge.resize_height = huge.window_width = huge.window_height = 65535;
  EXPECT_EQ(plan_of(&decoder, file, huge, blob.bytes, &blob.proof).size(), 0u);
  const Bytes high = encode_jpeg(picture(random, 100, 2000), {});
  Blob marked = make_blob(&decoder, high, 4);
  ts_image_geometry wide = crop(0, 0, 100, 2000);
  wide.resize_height = wide.window_height = 10;
  wide.resize_width = wide.window_width = 20000;
  EXPECT_GT(plan_of(&decoder, high, wide, marked.bytes, &marked.proof).size(), 0u);
  wide.resize_width = wide.window_width = 40000;  // 320 MB of columns
  EXPECT_EQ(plan_of(&decoder, high, wide, marked.bytes, &marked.proof).size(), 0u);
  JpegOptions options;
  options.coding = Coding::kProgressive;
  const Bytes progressive = encode_jpeg(picture(random, 100, 80), options);
  Bytes claimed = blob.bytes;
  seal(&claimed, progressive);
  EXPECT_EQ(plan_of(&decoder, progressive, g, claimed, nullptr).size(), 0u);
}

TEST(Plan, CFunctionPlansAndChecksItsArguments) {
  Random random(76);
  const Decoder decoder = new_decoder();
  const Bytes file = encode_jpeg(picture(random, 400, 300), {});
  Bytes blob(1 << 16);
  ts_image_entries_made made = {};
  ASSERT_EQ(Outcome(ts_image_make_entries(decoder.get(), file.data(), file.size(),
                                          {blob.data(), blob.size(), 8}, &made))
                .code,
            TS_ERROR_NONE);
  blob.resize(made.bytes);
  ts_image_geometry g = crop(33, 50, 200, 100);
  std::vector<uint64_t> memory(1 << 15);
  auto* const buffer = reinterpret_cast<uint8_t*>(memory.data());
  const auto plan = [&](uint8_t* to, size_t capacity, uint64_t* proof, size_t* planned) {
    return Outcome(ts_image_plan_segments(decoder.get(), file.data(), file.size(), &g,
                                          {blob.data(), blob.size()}, proof, to, capacity,
                                          planned));
  };
  size_t planned = 0;
  uint64_t proof = made.proof;
  ASSERT_EQ(plan(nullptr, 0, &proof, &planned).code, TS_ERROR_NONE);
  const size_t needed = planned;
  ASSERT_GT(needed, 0u);
  ASSERT_EQ(plan(buffer, needed, &proof, &planned).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, needed);
  Image expected;
  ASSERT_EQ(decode(decoder.get(), file, g, &expected).code, TS_ERROR_NONE);
  emulate::Device device(Bytes(buffer, buffer + planned));
  ASSERT_TRUE(device.entropy());
  device.finish();
  EXPECT_EQ(device.result, expected.pixels);

  // Without entries and proof the plan has the whole scan.
  const auto scan = [&](const Bytes& from, uint8_t* to, size_t capacity) {
    return Outcome(ts_image_plan_segments(decoder.get(), from.data(), from.size(), &g, {nullptr, 0},
                                          nullptr, to, capacity, &planned));
  };
  ASSERT_EQ(scan(file, nullptr, 0).code, TS_ERROR_NONE);
  ASSERT_GT(planned, needed);
  ASSERT_LE(planned, memory.size() * sizeof memory[0]);
  ASSERT_EQ(scan(file, buffer, planned).code, TS_ERROR_NONE);
  emulate::Device searching(Bytes(buffer, buffer + planned));
  ASSERT_TRUE(searching.synchronise(128, 4) && searching.entropy());
  searching.finish();
  EXPECT_EQ(searching.result, expected.pixels);
  EXPECT_EQ(scan(Bytes(file.begin(), file.end() - 50), buffer, needed).code, TS_ERROR_DECODE);

  proof = 0;  // not verified yet
  ASSERT_EQ(plan(buffer, needed, &proof, &planned).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, 0u);
  EXPECT_EQ(plan(nullptr, 16, nullptr, &planned).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(plan(buffer + 8, needed, nullptr, &planned).code, TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(plan(buffer, needed, nullptr, nullptr).code, TS_ERROR_INVALID_ARGUMENT);
  g.crop_x = 300;
  EXPECT_EQ(plan(buffer, needed, nullptr, &planned).code, TS_ERROR_INVALID_ARGUMENT);
  g.crop_x = 33;
  g.resize_width = g.window_width = 40;  // reduced by libjpeg-turbo's inverse DCT
  g.resize_height = g.window_height = 20;
  g.dct_scaling = true;
  ASSERT_EQ(plan(buffer, 1 << 18, nullptr, &planned).code, TS_ERROR_NONE);
  EXPECT_EQ(planned, 0u);
  g.dct_scaling = false;
  ASSERT_EQ(plan(buffer, 1 << 18, nullptr, &planned).code, TS_ERROR_NONE);
  EXPECT_GT(planned, 0u);
}

}  // namespace
