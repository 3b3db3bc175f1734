#include <cstring>
#include <string>

#include "image/samples.h"

namespace {

using namespace samples;

struct Sampling {
  const char* name;
  int factors[3][2];
};

const Sampling kSamplings[] = {
    {"444", {{1, 1}, {1, 1}, {1, 1}}},          {"422", {{2, 1}, {1, 1}, {1, 1}}},
    {"420", {{2, 2}, {1, 1}, {1, 1}}},          {"440", {{1, 2}, {1, 1}, {1, 1}}},
    {"411", {{4, 1}, {1, 1}, {1, 1}}},          {"410", {{4, 2}, {1, 1}, {1, 1}}},
    {"441", {{1, 4}, {1, 1}, {1, 1}}},          {"24", {{2, 4}, {1, 1}, {1, 1}}},
    {"mixed chroma", {{2, 2}, {2, 1}, {1, 2}}}, {"fine chroma", {{1, 1}, {2, 2}, {1, 2}}},
    {"4 2 1", {{4, 1}, {2, 1}, {1, 1}}},        {"tripled", {{3, 1}, {1, 1}, {1, 1}}},
    {"all doubled", {{2, 1}, {2, 1}, {2, 1}}},
};

JpegOptions options_for(const Sampling& sampling, Coding coding, int restart_interval) {
  JpegOptions options;
  options.coding = coding;
  options.restart_interval = restart_interval;
  for (int c = 0; c < 3; ++c) {
    options.sampling[c][0] = sampling.factors[c][0];
    options.sampling[c][1] = sampling.factors[c][1];
  }
  return options;
}

// Decodes the whole image with libjpeg and its defaults.
Image reference(const Bytes& bytes) {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&codec);
  jpeg_mem_src(&codec, bytes.data(), bytes.size());
  jpeg_read_header(&codec, TRUE);
  codec.out_color_space = codec.num_components == 4 ? JCS_CMYK : JCS_RGB;
  jpeg_start_decompress(&codec);
  Image image{static_cast<int>(codec.output_width),
              static_cast<int>(codec.output_height),
              codec.output_components,
              {}};
  const size_t stride = static_cast<size_t>(image.width) * static_cast<size_t>(image.channels);
  image.pixels.resize(stride * static_cast<size_t>(image.height));
  while (codec.output_scanline < codec.output_height) {
    JSAMPROW row = image.pixels.data() + codec.output_scanline * stride;
    jpeg_read_scanlines(&codec, &row, 1);
  }
  jpeg_finish_decompress(&codec);
  jpeg_destroy_decompress(&codec);
  return image;
}

// The pixels of a box equal those of the whole decode, although the rest of the file is not
// decoded.
TEST(Jpeg, CropsEqualTheWholeDecode) {
  const Decoder decoder = new_decoder();
  Random random(1);
  const int sizes[][2] = {{1, 1}, {2, 3}, {9, 5}, {16, 33}, {31, 64}, {97, 131}, {203, 77}};
  const Coding codings[] = {Coding::kBaseline, Coding::kProgressive, Coding::kCoarseProgressive,
                            Coding::kSeparateScans, Coding::kArithmetic};
  int boxes = 0;
  for (const Sampling& sampling : kSamplings) {
    for (const Coding coding : codings) {
      for (const auto& size : sizes) {
        const int restart = uniform(random, 0, 2) == 0 ? uniform(random, 1, 5) : 0;
        const Image source = picture(random, size[0], size[1]);
        const Bytes bytes = encode_jpeg(source, options_for(sampling, coding, restart));
        const Image whole = reference(bytes);
        for (int i = 0; i < 60; ++i) {
          int width = uniform(random, 1, size[0]);
          int height = uniform(random, 1, size[1]);
          if (i == 0) width = size[0], height = size[1];
          if (i % 4 == 1) width = std::min(width, 3);
          if (i % 4 == 2) height = std::min(height, 3);
          const int x = uniform(random, 0, size[0] - width);
          const int y = uniform(random, 0, size[1] - height);
          Image got;
          const Outcome outcome = decode(decoder.get(), bytes, crop(x, y, width, height), &got);
          ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
          ASSERT_EQ(got.pixels, part(whole, x, y, width, height).pixels)
              << sampling.name << " coding " << static_cast<int>(coding) << " restart " << restart
              << " " << size[0] << " x " << size[1] << ": " << width << " x " << height << " at "
              << x << ", " << y;
          ++boxes;
        }
      }
    }
  }
  EXPECT_GT(boxes, 20000);
}

TEST(Jpeg, GreyIsTripled) {
  Random random(2);
  const Bytes bytes = encode_jpeg(picture(random, 37, 29, 1), {});
  const Decoder decoder = new_decoder();
  Image got;
  ASSERT_EQ(decode(decoder.get(), bytes, crop(3, 4, 30, 20), &got).code, TS_ERROR_NONE);
  const Image whole = reference(bytes);
  EXPECT_EQ(got.pixels, part(whole, 3, 4, 30, 20).pixels);
  for (size_t i = 0; i < got.pixels.size(); i += 3) {
    ASSERT_EQ(got.pixels[i], got.pixels[i + 1]);
    ASSERT_EQ(got.pixels[i], got.pixels[i + 2]);
  }
}

// Images of four components take a code path of their own, also cropped and subsampled.
TEST(Jpeg, CmykAndYcckAreConvertedLikePillow) {
  Random random(3);
  const Decoder decoder = new_decoder();
  for (const J_COLOR_SPACE stored : {JCS_CMYK, JCS_YCCK}) {
    JpegOptions options;
    options.stored = stored;
    if (stored == JCS_YCCK) {
      for (const int c : {0, 3}) options.sampling[c][0] = options.sampling[c][1] = 2;
    }
    const Bytes bytes = encode_jpeg(picture(random, 61, 43, 4), options);
    const Image ink = reference(bytes);
    Image whole{61, 43, 3, {}};
    for (size_t i = 0; i < ink.pixels.size(); i += 4) {
      const double light = ink.pixels[i + 3];
      for (size_t c = 0; c < 3; ++c) {
        const double covered = static_cast<int>((255 - ink.pixels[i + c]) * light / 255 + 0.5);
        whole.pixels.push_back(static_cast<uint8_t>(std::max(0.0, light - covered)));
      }
    }
    for (int i = 0; i < 50; ++i) {
      const int width = uniform(random, 1, 61);
      const int height = uniform(random, 1, 43);
      const int x = uniform(random, 0, 61 - width);
      const int y = uniform(random, 0, 43 - height);
      Image got;
      const Outcome outcome = decode(decoder.get(), bytes, crop(x, y, width, height), &got);
      ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
      ASSERT_EQ(got.pixels, part(whole, x, y, width, height).pixels);
    }
  }
}

TEST(Jpeg, HeaderDescribesTheStoredImage) {
  Random random(4);
  const struct {
    Coding coding;
    int channels;
    bool progressive;
  } cases[] = {{Coding::kBaseline, 1, false},
               {Coding::kBaseline, 3, false},
               {Coding::kBaseline, 4, false},
               {Coding::kProgressive, 3, true},
               {Coding::kArithmetic, 3, false}};
  for (const auto& c : cases) {
    JpegOptions options;
    options.coding = c.coding;
    const Bytes bytes = encode_jpeg(picture(random, 45, 67, c.channels), options);
    ts_image_info info = {};
    info.size = sizeof info;
    ASSERT_EQ(Outcome(ts_image_get_info(bytes.data(), bytes.size(), &info)).code, TS_ERROR_NONE);
    EXPECT_EQ(info.format, TS_IMAGE_FORMAT_JPEG);
    EXPECT_EQ(info.width, 45);
    EXPECT_EQ(info.height, 67);
    EXPECT_EQ(info.components, c.channels);
    EXPECT_EQ(info.bit_depth, 8);
    EXPECT_EQ(info.progressive, c.progressive);
  }
}

TEST(Jpeg, TruncationIsFoundWithAnyCrop) {
  Random random(5);
  const Decoder decoder = new_decoder();
  for (const Coding coding : {Coding::kBaseline, Coding::kProgressive}) {
    const Bytes bytes = encode_jpeg(picture(random, 80, 60), options_for(kSamplings[2], coding, 2));
    for (size_t size = 0; size < bytes.size(); ++size) {
      const Bytes cut(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(size));
      Image got;
      const Outcome outcome = decode(decoder.get(), cut, crop(0, 0, 1, 1), &got);
      ASSERT_EQ(outcome.code, size < 3 ? TS_ERROR_UNSUPPORTED : TS_ERROR_DECODE)
          << size << outcome.message;
    }
    Bytes longer(bytes);
    longer.insert(longer.end(), {0, 0, 0xFF, 0xD8, 7});  // bytes after the end are ignored
    Image got;
    EXPECT_EQ(decode(decoder.get(), longer, crop(0, 0, 80, 60), &got).code, TS_ERROR_NONE);
  }
}

size_t find(const Bytes& bytes, int marker) {
  for (size_t i = 2; i + 1 < bytes.size(); ++i) {
    if (bytes[i] == 0xFF && bytes[i + 1] == marker) return i;
  }
  ADD_FAILURE() << "no marker " << marker;
  return 0;
}

TEST(Jpeg, MisplacedRestartMarkersAreFoundWithAnyCrop) {
  Random random(6);
  const Decoder decoder = new_decoder();
  const Bytes good =
      encode_jpeg(picture(random, 200, 200), options_for(kSamplings[0], Coding::kBaseline, 3));
  Bytes bad(good);
  bad[find(bad, 0xD5) + 1] = 0xD6;
  Image got;
  EXPECT_EQ(decode(decoder.get(), good, crop(0, 0, 8, 8), &got).code, TS_ERROR_NONE);
  const Outcome outcome = decode(decoder.get(), bad, crop(0, 0, 8, 8), &got);
  EXPECT_EQ(outcome.code, TS_ERROR_DECODE);
  EXPECT_NE(outcome.message.find("restart marker"), std::string::npos) << outcome.message;
}

// Damage to entropy-coded data below the crop is not searched for, and changes no pixel above it.
TEST(Jpeg, DamageBelowTheCropIsIgnored) {
  Random random(11);
  const Decoder decoder = new_decoder();
  const Bytes good = encode_jpeg(picture(random, 100, 200), {});
  Bytes bad(good);
  bad.erase(bad.end() - 1000, bad.end() - 500);
  Image expected;
  ASSERT_EQ(decode(decoder.get(), good, crop(10, 20, 80, 30), &expected).code, TS_ERROR_NONE);
  Image got;
  EXPECT_EQ(decode(decoder.get(), bad, crop(10, 20, 80, 30), &got).code, TS_ERROR_NONE);
  EXPECT_EQ(got.pixels, expected.pixels);
  EXPECT_EQ(decode(decoder.get(), bad, crop(10, 20, 80, 180), &got).code, TS_ERROR_DECODE);
}

// Damage that libjpeg-turbo repairs with a warning is an error with libjpeg-turbo's message, and
// the decoder remains usable.
TEST(Jpeg, WarningsAreDamage) {
  Random random(7);
  const Decoder decoder = new_decoder();
  const Bytes good = encode_jpeg(picture(random, 200, 200), {});
  Bytes bad(good);
  const size_t scan = find(bad, 0xDA);
  const auto middle = bad.begin() + static_cast<std::ptrdiff_t>((scan + bad.size()) / 2);
  bad.erase(middle, middle + 300);
  Image got;
  const Outcome outcome = decode(decoder.get(), bad, crop(0, 0, 200, 200), &got);
  EXPECT_EQ(outcome.code, TS_ERROR_DECODE);
  EXPECT_NE(outcome.message.find("Corrupt JPEG data"), std::string::npos) << outcome.message;
  EXPECT_EQ(decode(decoder.get(), good, crop(0, 0, 200, 200), &got).code, TS_ERROR_NONE);
  EXPECT_EQ(got.pixels, reference(good).pixels);
}

// libjpeg keeps tables for the next image. The pixels of a file without tables must not depend on
// the image before.
TEST(Jpeg, TablesAreNotInheritedFromTheImageBefore) {
  Random random(12);
  JpegOptions options;
  options.quality = 40;
  options.optimize = true;
  const Bytes before = encode_jpeg(picture(random, 64, 64), options);
  for (const uint8_t lost :
       {0xC4, 0xDB}) {  // Huffman codes (the standard's are supplied), quantisers
    Bytes bytes = encode_jpeg(picture(random, 64, 64), {});
    for (size_t i = 2; bytes[i + 1] != 0xDA;) {
      const size_t size = 2 + (static_cast<size_t>(bytes[i + 2]) << 8 | bytes[i + 3]);
      const auto from = bytes.begin() + static_cast<std::ptrdiff_t>(i);
      if (bytes[i + 1] == lost) {
        bytes.erase(from, from + static_cast<std::ptrdiff_t>(size));
      } else {
        i += size;
      }
    }
    const Decoder fresh = new_decoder();
    const Decoder used = new_decoder();
    Image expected, got;
    ASSERT_EQ(decode(used.get(), before, crop(0, 0, 64, 64), &got).code, TS_ERROR_NONE);
    const Outcome first = decode(fresh.get(), bytes, crop(0, 0, 64, 64), &expected);
    const Outcome second = decode(used.get(), bytes, crop(0, 0, 64, 64), &got);
    EXPECT_EQ(first.code, lost == 0xC4 ? TS_ERROR_NONE : TS_ERROR_DECODE) << first.message;
    EXPECT_EQ(second.code, first.code) << second.message;
    EXPECT_EQ(second.message, first.message);
    if (first.code == TS_ERROR_NONE) {
      EXPECT_EQ(got.pixels, expected.pixels);
    }
  }
}

TEST(Jpeg, LimitsAreCheckedBeforeMemoryIsAllocated) {
  Random random(8);
  const Bytes bytes =
      encode_jpeg(picture(random, 64, 64), options_for(kSamplings[0], Coding::kProgressive, 0));
  Image got;
  const Decoder small = new_decoder(64 * 64 - 1);
  const Outcome over = decode(small.get(), bytes, crop(0, 0, 1, 1), &got);
  EXPECT_EQ(over.code, TS_ERROR_UNSUPPORTED);
  EXPECT_NE(over.message.find("64 x 64"), std::string::npos) << over.message;
  const Decoder enough = new_decoder(64 * 64);
  EXPECT_EQ(decode(enough.get(), bytes, crop(0, 0, 1, 1), &got).code, TS_ERROR_NONE);

  // The header promises far more pixels than the bytes can hold.
  Bytes huge(bytes);
  const size_t frame = find(huge, 0xC2);
  huge[frame + 5] = huge[frame + 7] = 0x30;  // 12,352 x 12,352
  const Decoder decoder = new_decoder();
  const Outcome outcome = decode(decoder.get(), huge, crop(0, 0, 1, 1), &got);
  EXPECT_EQ(outcome.code, TS_ERROR_DECODE);
  EXPECT_NE(outcome.message.find("too few"), std::string::npos) << outcome.message;
}

// A file may repeat scans without end, each of which costs a pass over all coefficients.
TEST(Jpeg, TooManyScansAreRefused) {
  Random random(9);
  const Bytes bytes =
      encode_jpeg(picture(random, 64, 64), options_for(kSamplings[0], Coding::kSeparateScans, 0));
  const auto first = bytes.begin() + static_cast<std::ptrdiff_t>(find(bytes, 0xDA));
  const Bytes scans(first, bytes.end() - 2);  // all three components
  Image got;
  const Decoder decoder = new_decoder();
  for (const int repeats : {33, 34}) {
    Bytes many(bytes.begin(), first);
    for (int i = 0; i < repeats; ++i) many.insert(many.end(), scans.begin(), scans.end());
    many.insert(many.end(), {0xFF, 0xD9});
    const Outcome outcome = decode(decoder.get(), many, crop(0, 0, 64, 64), &got);
    EXPECT_EQ(outcome.code, repeats == 33 ? TS_ERROR_NONE : TS_ERROR_UNSUPPORTED)
        << outcome.message;
    EXPECT_EQ(outcome.message.find("more than 100 scans") != std::string::npos, repeats == 34)
        << outcome.message;
  }
}

TEST(Jpeg, UnsupportedProcessesAndPrecisionsAreNamed) {
  Random random(10);
  const Bytes good = encode_jpeg(picture(random, 16, 16), {});
  const size_t frame = find(good, 0xC0);
  const struct {
    size_t at;
    uint8_t value;
    int32_t code;
    const char* text;
  } cases[] = {
      {1, 0xC3, TS_ERROR_UNSUPPORTED, "lossless"}, {1, 0xC5, TS_ERROR_UNSUPPORTED, "hierarchical"},
      {4, 12, TS_ERROR_UNSUPPORTED, "12 bits"},    {9, 2, TS_ERROR_DECODE, "frame header"},
      {6, 0, TS_ERROR_DECODE, "without pixels"},   {3, 3, TS_ERROR_DECODE, "frame header"}};
  const Decoder decoder = new_decoder();
  for (const auto& c : cases) {
    Bytes bytes(good);
    bytes[frame + c.at] = c.value;
    if (c.at == 6) bytes[frame + 5] = 0;
    ts_image_info info = {};
    info.size = sizeof info;
    const Outcome header(ts_image_get_info(bytes.data(), bytes.size(), &info));
    EXPECT_EQ(header.code, c.code) << header.message;
    EXPECT_NE(header.message.find(c.text), std::string::npos) << header.message;
    Image got;
    EXPECT_EQ(decode(decoder.get(), bytes, crop(0, 0, 1, 1), &got).code, c.code);
  }
}

TEST(Jpeg, VersionNamesTheLibrary) {
  EXPECT_EQ(std::string(ts_jpeg_version()).rfind("libjpeg-turbo ", 0), 0u);
  EXPECT_GT(std::strlen(ts_jpeg_version()), std::strlen("libjpeg-turbo 2"));
}

}  // namespace
