// Compares our entropy decoder with libjpeg-turbo's: coefficients, pixels and verdicts.
#include "image/entropy.h"

#include <cstring>
#include <string>

#include "image/jpeg_entropy.h"
#include "image/jpeg_scan.h"

namespace {

using namespace samples;
using namespace ts::image;

// Compares libjpeg's coefficients with ours, for the blocks inside the image.
void compare_coefficients(const Bytes& bytes, EntropyDecoder* decoder, const std::string& what) {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&codec);
  jpeg_mem_src(&codec, bytes.data(), bytes.size());
  jpeg_read_header(&codec, TRUE);
  jpeg_start_decompress(&codec);
  HuffmanCode codes[2][4];
  Scan scan;
  ASSERT_TRUE(describe_scan(codec, bytes.data(), bytes.size(), codes, &scan)) << what;
  ASSERT_TRUE(decoder->start(scan)) << what;
  jpeg_abort_decompress(&codec);
  jpeg_mem_src(&codec, bytes.data(), bytes.size());
  jpeg_read_header(&codec, TRUE);
  jvirt_barray_ptr* arrays = jpeg_read_coefficients(&codec);
  int16_t blocks[kMaxBlocks][64];
  int16_t(*pointers[kMaxBlocks])[64];
  for (int i = 0; i < kMaxBlocks; ++i) pointers[i] = &blocks[i];
  int compared = 0;
  for (uint32_t y = 0; y < scan.mcu_rows; ++y) {
    for (uint32_t x = 0; x < scan.mcus_per_row; ++x) {
      std::memset(blocks, 0, sizeof blocks);
      ASSERT_TRUE(decoder->next(pointers)) << what << " MCU " << x << ", " << y;
      int block = 0;
      for (int c = 0; c < codec.num_components; ++c) {
        const jpeg_component_info& component = codec.comp_info[c];
        const bool alone = codec.num_components == 1;
        const auto across = static_cast<uint32_t>(alone ? 1 : component.h_samp_factor);
        const auto down = static_cast<uint32_t>(alone ? 1 : component.v_samp_factor);
        for (uint32_t v = 0; v < down; ++v) {
          for (uint32_t h = 0; h < across; ++h, ++block) {
            const uint32_t row = y * down + v;
            const uint32_t column = x * across + h;
            if (row >= component.height_in_blocks || column >= component.width_in_blocks) continue;
            JBLOCKARRAY expected = codec.mem->access_virt_barray(
                reinterpret_cast<j_common_ptr>(&codec), arrays[c], row, 1, FALSE);
            ASSERT_EQ(std::memcmp(expected[0][column], blocks[block], sizeof blocks[block]), 0)
                << what << " component " << c << " block " << column << ", " << row;
            ++compared;
          }
        }
      }
    }
  }
  ASSERT_GT(compared, 0);
  ASSERT_TRUE(decoder->finish_scan());
  jpeg_destroy_decompress(&codec);
}

TEST(Entropy, CoefficientsEqualLibjpegs) {
  Random random(21);
  for (const Instructions instructions : {Instructions::kBaseline, best_instructions()}) {
    EntropyDecoder decoder(instructions);
    for (const Kind& kind : kKinds) {
      for (int i = 0; i < 150 * rounds(); ++i) {
        int width, height;
        draw_size(random, &width, &height);
        if (i == 0) width = height = 1;
        if (i == 1) width = 700, height = 500;  // larger than one window of the bit stream
        compare_coefficients(usual(random, kind, width, height), &decoder,
                             std::string(kind.name) + " round " + std::to_string(i));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST(Entropy, CropsEqualLibjpegsWithoutGivingUp) {
  Random random(22);
  JpegDecoder own(1 << 24);
  JpegDecoder libjpeg(1 << 24);
  libjpeg.set_own(false);
  ASSERT_TRUE(own.own()) << "the linked libjpeg has another layout";
  int64_t crops = 0;
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 60 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes bytes = usual(random, kind, width, height);
      for (int k = 0; k < 12; ++k, ++crops) {
        const Box box = k == 0 ? Box{0, 0, width, height} : draw_box(random, width, height);
        const Result expected = decode_by(&libjpeg, bytes, box);
        const Result got = decode_by(&own, bytes, box);
        ASSERT_EQ(got.code, TS_ERROR_NONE) << got.message;
        ASSERT_EQ(expected.code, TS_ERROR_NONE) << expected.message;
        ASSERT_EQ(got.pixels, expected.pixels)
            << kind.name << " " << width << " x " << height << ": " << box.width() << " x "
            << box.height() << " at " << box.x0 << ", " << box.y0;
      }
    }
  }
  EXPECT_EQ(own.stats().own, crops);
  EXPECT_EQ(own.stats().libjpeg, 0);
  EXPECT_EQ(libjpeg.stats().own, 0);
  EXPECT_EQ(libjpeg.stats().libjpeg, crops);
}

TEST(Entropy, UnusualFilesAreLeftToLibjpeg) {
  Random random(23);
  const Decoder decoder = new_decoder();
  struct {
    Coding coding;
    int channels;
    bool own;
  } const cases[] = {{Coding::kBaseline, 3, true},       {Coding::kBaseline, 1, true},
                     {Coding::kBaseline, 4, false},      {Coding::kProgressive, 3, false},
                     {Coding::kProgressive, 1, false},   {Coding::kArithmetic, 3, false},
                     {Coding::kSeparateScans, 3, false}, {Coding::kCoarseProgressive, 3, false}};
  int64_t own = 0, libjpeg = 0;
  for (const auto& c : cases) {
    JpegOptions options;
    options.coding = c.coding;
    const Bytes bytes = encode_jpeg(picture(random, 45, 67, c.channels), options);
    Image got;
    ASSERT_EQ(decode(decoder.get(), bytes, crop(3, 4, 30, 20), &got).code, TS_ERROR_NONE);
    ++(c.own ? own : libjpeg);
    ts_image_decoder_stats stats = {};
    stats.size = sizeof stats;
    ASSERT_EQ(Outcome(ts_image_decoder_get_stats(decoder.get(), &stats)).code, TS_ERROR_NONE);
    EXPECT_EQ(stats.jpeg_own, own);
    EXPECT_EQ(stats.jpeg_libjpeg, libjpeg);
    EXPECT_EQ(stats.jpeg_gave_up, 0);
  }
}

// For damage of every kind after the headers, the verdict and the message equal those without our
// decoder. So do the pixels where libjpeg decodes in spite of the damage.
TEST(Entropy, DamageGetsLibjpegsVerdict) {
  Random random(24);
  JpegDecoder own(1 << 24);
  JpegDecoder libjpeg(1 << 24);
  libjpeg.set_own(false);
  int failed = 0, repaired = 0;
  for (int i = 0; i < 6000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes bytes = usual(random, kKinds[random() % 8], width, height);
    for (int changes = uniform(random, 1, 4); changes > 0 && !bytes.empty(); --changes) {
      const size_t at = random() % bytes.size();
      switch (random() % 6) {
        case 0:
          bytes[at] = static_cast<uint8_t>(bytes[at] ^ 1 << random() % 8);
          break;
        case 1:
          bytes[at] = static_cast<uint8_t>(random());
          break;
        case 2:
          bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
          break;
        case 3:
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at),
                       static_cast<uint8_t>(random()));
          break;
        case 4: {  // misplaced fill bytes, restart marker, stuffed byte or end marker
          const uint8_t pairs[] = {0xFF, static_cast<uint8_t>(0xD0 + random() % 8), 0, 0xD9};
          const uint8_t pair[] = {0xFF, pairs[random() % 4], 0};
          bytes.insert(bytes.begin() + static_cast<std::ptrdiff_t>(at), pair,
                       pair + uniform(random, 2, 3));
          break;
        }
        default: {  // removes a part in the middle
          const size_t size = std::min(bytes.size() - at, random() % 300);
          const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(at);
          if (size < bytes.size()) bytes.erase(from, from + static_cast<std::ptrdiff_t>(size));
        }
      }
    }
    const Box box = draw_box(random, width, height);
    const Result expected = decode_by(&libjpeg, bytes, box);
    const Result got = decode_by(&own, bytes, box);
    ASSERT_EQ(got.code, expected.code) << i << " " << got.message << " / " << expected.message;
    ASSERT_EQ(got.message, expected.message) << i;
    ASSERT_EQ(got.pixels, expected.pixels) << i;
    (got.code == TS_ERROR_NONE ? repaired : failed) += 1;
  }
  EXPECT_GT(failed, 500);
  EXPECT_GT(repaired, 500);
  EXPECT_GT(own.stats().gave_up, 100);
  EXPECT_GT(own.stats().own, 500);
}

}  // namespace
