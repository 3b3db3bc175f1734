#include "image/jpeg.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "image/entries.h"
#include "image/exif.h"
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

// Decodes the whole image with libjpeg and its defaults, at 1/reduction of its size.
Image reference(const Bytes& bytes, int reduction = 1) {
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);
  jpeg_create_decompress(&codec);
  jpeg_mem_src(&codec, bytes.data(), bytes.size());
  jpeg_read_header(&codec, TRUE);
  codec.out_color_space = codec.num_components == 4 ? JCS_CMYK : JCS_RGB;
  codec.scale_denom = static_cast<unsigned>(reduction);
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

// The pixels of a box equal the whole decode's at every reduction too, with our entropy decoder,
// with entries and with libjpeg-turbo alone.
TEST(Jpeg, ReducedCropsEqualTheReducedWhole) {
  ts::image::JpegDecoder own(1 << 20);
  ts::image::JpegDecoder libjpeg(1 << 20);
  libjpeg.set_own(false);
  ASSERT_TRUE(own.own());
  ts::image::Resizer resizer;
  Random random(11);
  const int sizes[][2] = {{8, 8}, {16, 33}, {97, 131}, {203, 77}};
  const Coding codings[] = {Coding::kBaseline, Coding::kProgressive, Coding::kCoarseProgressive,
                            Coding::kSeparateScans};
  for (const Sampling& sampling : kSamplings) {
    for (const Coding coding : codings) {
      for (const auto& size : sizes) {
        const int restart = uniform(random, 0, 2) == 0 ? uniform(random, 1, 5) : 0;
        const Bytes bytes =
            encode_jpeg(picture(random, size[0], size[1]), options_for(sampling, coding, restart));
        Bytes blob(1 << 16);
        ts::image::EntriesOut out = {3, blob.data(), blob.size()};
        own.make_entries(bytes.data(), bytes.size(), &out);
        const ts::image::EntriesIn entries = {blob.data(), out.written, nullptr};
        for (const int reduction : {2, 4, 8}) {
          const Image whole = reference(bytes, reduction);
          for (int i = 0; i < 12; ++i) {
            // Whole samples, so that nothing is resized.
            int width = uniform(random, 1, size[0] / reduction);
            int height = uniform(random, 1, size[1] / reduction);
            if (i == 0) width = size[0] / reduction, height = size[1] / reduction;
            const int x = uniform(random, 0, size[0] / reduction - width);
            const int y = uniform(random, 0, size[1] / reduction - height);
            ts_image_geometry g =
                crop(x * reduction, y * reduction, width * reduction, height * reduction);
            g.resize_width = g.window_width = width;
            g.resize_height = g.window_height = height;
            const Bytes expected = part(whole, x, y, width, height).pixels;
            const auto decode = [&](ts::image::JpegDecoder* decoder,
                                    const ts::image::EntriesIn* in) {
              Bytes got(expected.size());
              const ts::image::Box box =
                  resizer.start(g, got.data(), static_cast<size_t>(width) * 3, reduction);
              decoder->decode(bytes.data(), bytes.size(), box, &resizer, in);
              return got;
            };
            const std::string name =
                std::string(sampling.name) + " coding " + std::to_string(static_cast<int>(coding)) +
                " 1/" + std::to_string(reduction) + ": " + std::to_string(width) + " x " +
                std::to_string(height) + " at " + std::to_string(x) + ", " + std::to_string(y);
            ASSERT_EQ(decode(&own, nullptr), expected) << name;
            ASSERT_EQ(decode(&libjpeg, nullptr), expected) << name;
            if (out.written > 0) {
              ASSERT_EQ(decode(&own, &entries), expected) << name;
            }
          }
        }
      }
    }
  }
  EXPECT_GT(own.stats().entries_used, 1000);
}

// Returns the weights that one side of the result is computed from: weights of the reduced image's
// samples, by the definition, for each output of the upright image.
std::vector<std::vector<double>> weights_of(int at, int size, int outputs, int samples,
                                            int reduction, bool mirrored, bool cubic) {
  const double begin = static_cast<double>(at) / reduction;
  const double end = static_cast<double>(at + size) / reduction;
  const double scale = (end - begin) / outputs;
  const int first = at / reduction;
  const int last = (at + size + reduction - 1) / reduction;
  std::vector<std::vector<double>> all;
  for (int i = 0; i < outputs; ++i) {
    const double center = mirrored ? end - scale * (i + 0.5) : begin + scale * (i + 0.5);
    std::vector<double> weights(static_cast<size_t>(samples));
    double total = 0;
    for (int k = first; k < last; ++k) {
      const double x = std::fabs(k + 0.5 - center) / scale;
      double weight = x < 1 ? 1 - x : 0;
      if (cubic) {
        weight = x < 1   ? (1.5 * x - 2.5) * x * x + 1
                 : x < 2 ? ((2.5 - 0.5 * x) * x - 4) * x + 2
                         : 0;
      }
      total += weights[static_cast<size_t>(k)] = weight;
    }
    for (double& weight : weights) weight /= total;
    all.push_back(weights);
  }
  return all;
}

// dct_scaling gives the resized box of the reduced image, at the reduction that the header
// documents, for every orientation.
TEST(Jpeg, DctScalingResizesTheReducedImage) {
  const Decoder decoder = new_decoder();
  Random random(12);
  int seen[9] = {};
  for (int n = 0; n < 250; ++n) {
    const int width = uniform(random, 20, 400);
    const int height = uniform(random, 20, 400);
    const Bytes bytes = encode_jpeg(picture(random, width, height), {});
    ts_image_geometry g = {};
    g.size = sizeof g;
    g.dct_scaling = true;
    g.orientation = uniform(random, 0, 8);
    g.interpolation =
        uniform(random, 0, 1) == 0 ? TS_INTERPOLATION_DEFAULT : TS_INTERPOLATION_BICUBIC;
    const bool turned = g.orientation >= 5;
    const int upright_width = turned ? height : width;
    const int upright_height = turned ? width : height;
    g.crop_width = uniform(random, upright_width / 2, upright_width);
    g.crop_height = uniform(random, upright_height / 2, upright_height);
    g.crop_x = uniform(random, 0, upright_width - g.crop_width);
    g.crop_y = uniform(random, 0, upright_height - g.crop_height);
    g.resize_width = g.window_width = uniform(random, 1, std::max(1, g.crop_width / 3));
    g.resize_height = g.window_height = uniform(random, 1, std::max(1, g.crop_height / 3));
    Image got;
    ASSERT_EQ(decode(decoder.get(), bytes, g, &got).code, TS_ERROR_NONE);
    int reduction = 1;
    for (const int next : {2, 4, 8}) {
      if (g.crop_width >= 2 * next * g.resize_width &&
          g.crop_height >= 2 * next * g.resize_height) {
        reduction = next;
      }
    }
    ++seen[reduction];
    if (reduction == 1) {
      Image plain;
      g.dct_scaling = false;
      ASSERT_EQ(decode(decoder.get(), bytes, g, &plain).code, TS_ERROR_NONE);
      ASSERT_EQ(got.pixels, plain.pixels);
      continue;
    }
    const Image whole = reference(bytes, reduction);
    int32_t corners[2][2] = {{g.crop_x, g.crop_y},
                             {g.crop_x + g.crop_width - 1, g.crop_y + g.crop_height - 1}};
    for (auto& corner : corners) {
      ts::image::stored_place(g.orientation, upright_width, upright_height, &corner[0], &corner[1]);
    }
    const bool cubic = g.interpolation == TS_INTERPOLATION_BICUBIC;
    const auto axis = [&](int k, int outputs, int samples) {
      return weights_of(std::min(corners[0][k], corners[1][k]),
                        std::abs(corners[0][k] - corners[1][k]) + 1, outputs, samples, reduction,
                        corners[0][k] > corners[1][k], cubic);
    };
    const auto columns = axis(0, turned ? g.resize_height : g.resize_width, whole.width);
    const auto rows = axis(1, turned ? g.resize_width : g.resize_height, whole.height);
    int worst = 0;
    for (int y = 0; y < g.resize_height; ++y) {
      for (int x = 0; x < g.resize_width; ++x) {
        const auto& across = columns[static_cast<size_t>(turned ? y : x)];
        const auto& down = rows[static_cast<size_t>(turned ? x : y)];
        for (int c = 0; c < 3; ++c) {
          double sum = 0;
          for (int j = 0; j < whole.height; ++j) {
            if (down[static_cast<size_t>(j)] == 0) continue;
            double line = 0;
            for (int i = 0; i < whole.width; ++i) {
              line += across[static_cast<size_t>(i)] * whole.at(i, j)[c];
            }
            sum += down[static_cast<size_t>(j)] * line;
          }
          const int expected = static_cast<int>(std::lround(std::clamp(sum, 0.0, 255.0)));
          worst = std::max(worst, std::abs(expected - got.at(x, y)[c]));
        }
      }
    }
    ASSERT_LE(worst, cubic ? 3 : 1) << "orientation " << g.orientation << ", 1/" << reduction;
  }
  for (const int reduction : {1, 2, 4, 8}) EXPECT_GT(seen[reduction], 4) << reduction;
}

// Where dct_scaling does not apply it changes no pixel: for small crops, nearest, other formats,
// and damaged images.
TEST(Jpeg, DctScalingIsForLargeGoodJpegsAlone) {
  Random random(13);
  const Image source = picture(random, 200, 160);
  const Bytes good = encode_jpeg(source, {});
  Bytes damaged = good;
  damaged.insert(damaged.begin() + 4 + (good[4] << 8 | good[5]), 40, 0x55);  // between segments
  const Decoder decoder = new_decoder();
  ASSERT_EQ(Outcome(ts_image_decoder_set_damage(decoder.get(), TS_IMAGE_DAMAGE_WARN)).code,
            TS_ERROR_NONE);
  const auto differs = [&](const Bytes& file, int side, int32_t interpolation) {
    ts_image_geometry g = crop(0, 0, 200, 160);
    g.resize_width = g.window_width = side;
    g.resize_height = g.window_height = side;
    g.interpolation = interpolation;
    Image plain;
    Image scaled;
    EXPECT_EQ(decode(decoder.get(), file, g, &plain).code, TS_ERROR_NONE);
    g.dct_scaling = true;
    EXPECT_EQ(decode(decoder.get(), file, g, &scaled).code, TS_ERROR_NONE);
    return plain.pixels != scaled.pixels;
  };
  EXPECT_TRUE(differs(good, 20, TS_INTERPOLATION_BILINEAR));
  EXPECT_FALSE(differs(good, 41, TS_INTERPOLATION_BILINEAR));
  EXPECT_FALSE(differs(good, 20, TS_INTERPOLATION_NEAREST));
  EXPECT_FALSE(differs(damaged, 20, TS_INTERPOLATION_BILINEAR));
  const Bytes png = read_file("data/rgb.png");
  ts_image_geometry g = crop(0, 0, 47, 31);
  g.resize_width = g.resize_height = g.window_width = g.window_height = 4;
  Image plain;
  Image scaled;
  EXPECT_EQ(decode(decoder.get(), png, g, &plain).code, TS_ERROR_NONE);
  g.dct_scaling = true;
  EXPECT_EQ(decode(decoder.get(), png, g, &scaled).code, TS_ERROR_NONE);
  EXPECT_EQ(plain.pixels, scaled.pixels);
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

// Images with four components have a separate code path, also when cropped and subsampled.
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

// Damage to entropy-coded data below the crop is not detected, and changes no pixel above it.
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
// the previous image.
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

  // The header claims far more pixels than the bytes can hold.
  Bytes huge(bytes);
  const size_t frame = find(huge, 0xC2);
  huge[frame + 5] = huge[frame + 7] = 0x30;  // 12,352 x 12,352
  const Decoder decoder = new_decoder();
  const Outcome outcome = decode(decoder.get(), huge, crop(0, 0, 1, 1), &got);
  EXPECT_EQ(outcome.code, TS_ERROR_DECODE);
  EXPECT_NE(outcome.message.find("too few"), std::string::npos) << outcome.message;
}

// A file may repeat scans without end, and each costs a pass over all coefficients.
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
