// A progressive JPEG is rewritten as a baseline one with the same coefficients, or not at all.
#include <algorithm>
#include <cstdlib>

#include "image/emulate.h"
#include "image/entropy.h"

namespace {

using namespace samples;

// Adds the scans of coefficients `first` to `last` of some components: one without their lowest
// bits, and one for each of the lowest bits.
void add_scans(Random& random, const std::vector<int>& components, int first, int last,
               std::vector<jpeg_scan_info>* scans) {
  for (int low = uniform(random, 0, 3), high = 0; low >= 0; high = low--) {
    jpeg_scan_info scan = {};
    scan.comps_in_scan = static_cast<int>(components.size());
    std::copy(components.begin(), components.end(), scan.component_index);
    scan.Ss = first;
    scan.Se = last;
    scan.Ah = high;
    scan.Al = low;
    scans->push_back(scan);
    if (low == 0) break;
  }
}

// Returns a script that transmits every bit of every coefficient.
std::vector<jpeg_scan_info> draw_script(Random& random, int components) {
  std::vector<jpeg_scan_info> scans;
  if (components == 3 && random() % 2 == 0) {
    add_scans(random, {0, 1, 2}, 0, 0, &scans);
  } else if (components == 3 && random() % 2 == 0) {
    add_scans(random, {0}, 0, 0, &scans);
    add_scans(random, {1, 2}, 0, 0, &scans);
  } else {
    for (int c = 0; c < components; ++c) add_scans(random, {c}, 0, 0, &scans);
  }
  for (int c = components - 1; c >= 0; --c) {
    for (int first = 1; first < 64;) {
      const int last = random() % 2 == 0 ? 63 : uniform(random, first, 63);
      add_scans(random, {c}, first, last, &scans);
      first = last + 1;
    }
  }
  return scans;
}

Bytes progressive(Random& random, const Kind& kind, int width, int height) {
  JpegOptions options;
  options.coding = Coding::kProgressive;
  const int qualities[] = {1, 20, 50, 75, 90, 100};
  options.quality = qualities[random() % 6];
  options.baseline = random() % 2 == 0;
  if (random() % 3 == 0) options.restart_interval = uniform(random, 1, 12);
  if (random() % 3 != 0) options.scans = draw_script(random, kind.channels);
  for (int c = 0; c < 3; ++c) {
    options.sampling[c][0] = kind.factors[c][0];
    options.sampling[c][1] = kind.factors[c][1];
  }
  if (kind.channels == 3 && random() % 5 == 0) options.stored = JCS_RGB;
  Image image = picture(random, width, height, kind.channels);
  if (random() % 4 == 0) {
    for (auto& byte : image.pixels) byte = static_cast<uint8_t>(random());
  }
  return encode_jpeg(image, options);
}

// Writes to memory of exactly the size that the call needs, a byte more than the file's own.
Bytes transcoded(JpegDecoder* decoder, const Bytes& file) {
  const Bytes exact(file);
  Bytes to(2 * file.size() + 4096);
  to.resize(decoder->transcode(exact.data(), exact.size(), to.data(), to.size()));
  if (to.empty()) return to;
  Bytes fitting(to.size() + 1);
  EXPECT_EQ(decoder->transcode(exact.data(), exact.size(), fitting.data(), fitting.size()),
            to.size());
  fitting.pop_back();
  EXPECT_EQ(fitting, to);
  Bytes narrow(to.size());
  EXPECT_EQ(decoder->transcode(exact.data(), exact.size(), narrow.data(), narrow.size()), 0u);
  return to;
}

struct Coefficients {
  std::vector<int> frame;       // sizes, sampling factors and colours
  std::vector<int16_t> values;  // of the blocks that contain samples of the image
  std::vector<uint16_t> quantisers;
};

bool operator==(const Coefficients& a, const Coefficients& b) {
  return a.frame == b.frame && a.values == b.values && a.quantisers == b.quantisers;
}

// Reads a good file with libjpeg.
Coefficients coefficients_of(const Bytes& file) {
  Coefficients read;
  jpeg_decompress_struct codec;
  jpeg_error_mgr errors;
  codec.err = jpeg_std_error(&errors);  // exits on an error
  jpeg_create_decompress(&codec);
  jpeg_mem_src(&codec, file.data(), static_cast<unsigned long>(file.size()));
  jpeg_read_header(&codec, TRUE);
  jvirt_barray_ptr* const arrays = jpeg_read_coefficients(&codec);
  read.frame = {static_cast<int>(codec.image_width), static_cast<int>(codec.image_height),
                codec.num_components, codec.jpeg_color_space};
  for (int c = 0; c < codec.num_components; ++c) {
    const jpeg_component_info& component = codec.comp_info[c];
    read.frame.insert(read.frame.end(), {component.h_samp_factor, component.v_samp_factor});
    read.quantisers.insert(read.quantisers.end(), std::begin(component.quant_table->quantval),
                           std::end(component.quant_table->quantval));
    for (JDIMENSION row = 0; row < component.height_in_blocks; ++row) {
      JBLOCKARRAY blocks = codec.mem->access_virt_barray(reinterpret_cast<j_common_ptr>(&codec),
                                                         arrays[c], row, 1, FALSE);
      const auto* const from = &blocks[0][0][0];
      read.values.insert(read.values.end(), from, from + size_t{component.width_in_blocks} * 64);
    }
  }
  EXPECT_EQ(errors.num_warnings, 0);
  jpeg_destroy_decompress(&codec);
  return read;
}

Bytes plan_of(JpegDecoder* decoder, const Bytes& file, const ts_image_geometry& geometry,
              const Blob& blob) {
  const ts_image_info info = jpeg_header(file.data(), file.size());
  uint64_t proof = blob.proof;
  const EntriesIn in = {blob.bytes.data(), blob.bytes.size(), &proof};
  PlanMemory to = {};
  Bytes plan(decoder->plan(file.data(), file.size(), info, geometry, in, &to));
  to = {plan.data(), plan.size(), nullptr};
  if (!plan.empty()) decoder->plan(file.data(), file.size(), info, geometry, in, &to);
  return plan;
}

TEST(Transcode, KeepsCoefficientsAndPixels) {
  Random random(111);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 40 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes file = progressive(random, kind, width, height);
      const Bytes baseline = transcoded(&decoder, file);
      ASSERT_GT(baseline.size(), 0u) << kind.name << " " << width << " x " << height;
      ASSERT_FALSE(jpeg_header(baseline.data(), baseline.size()).progressive);
      ASSERT_TRUE(coefficients_of(baseline) == coefficients_of(file)) << kind.name;
      const Blob blob =
          make_blob(&decoder, baseline, static_cast<uint32_t>(uniform(random, 1, 20)));
      ASSERT_GT(blob.bytes.size(), 0u);
      for (int k = 0; k < 4; ++k) {
        const ts_image_geometry g =
            k == 0 ? crop(0, 0, width, height) : draw_geometry(random, width, height, 90);
        Image expected, pixels;
        const Outcome original = decode(host.get(), file, g, &expected);
        ASSERT_EQ(original.code, TS_ERROR_NONE) << original.message;
        const Outcome copy = decode(host.get(), baseline, g, &pixels);
        ASSERT_EQ(copy.code, TS_ERROR_NONE) << copy.message;
        ASSERT_EQ(pixels.pixels, expected.pixels) << kind.name;
        const Bytes plan = plan_of(&decoder, baseline, g, blob);
        ASSERT_GT(plan.size(), 0u) << kind.name;
        emulate::Device device(plan);
        ASSERT_TRUE(device.entropy());
        device.finish();
        ASSERT_EQ(device.result, expected.pixels) << kind.name << " " << width << " x " << height;
      }
    }
  }
}

TEST(Transcode, LeavesOtherFilesAlone) {
  Random random(112);
  JpegDecoder decoder(1 << 24);
  const auto size = [&](int channels, const JpegOptions& options) {
    return transcoded(&decoder, encode_jpeg(picture(random, 60, 50, channels), options)).size();
  };
  JpegOptions options;
  for (const Coding coding :
       {Coding::kBaseline, Coding::kSeparateScans, Coding::kArithmetic,
        Coding::kCoarseProgressive}) {  // the last one lacks coefficients, and is smoothed
    options.coding = coding;
    EXPECT_EQ(size(3, options), 0u) << static_cast<int>(coding);
    EXPECT_EQ(size(1, options), 0u) << static_cast<int>(coding);
  }
  options.coding = Coding::kProgressive;
  EXPECT_EQ(size(4, options), 0u);
  EXPECT_GT(size(3, options), 0u);
}

// Components of 3 and 2 samples: libjpeg reads the coefficients, but does not decode the image.
TEST(Transcode, LeavesFractionalSamplingAlone) {
  const std::string hex =
      "ffd8ffdb0043000101010101010101010101010101010101010101010101010101010101010101010101"
      "0101010101010101010101010101010101010101010101010101010101ffc20011080008001803013100"
      "022100032100ffc4001500010100000000000000000000000000000001ffc40015100101000000000000"
      "00000000000000000001ffda000c0301000200030000000001ffda0008010100013f001fffda00080102"
      "00013f003fffda0008010300013f003fffd9";
  Bytes file;
  for (size_t i = 0; i < hex.size(); i += 2) {
    file.push_back(static_cast<uint8_t>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  }
  JpegDecoder decoder(1 << 20);
  ASSERT_EQ(coefficients_of(file).frame[4], 3);
  EXPECT_EQ(decode_by(&decoder, file, {0, 0, 24, 8}).code, TS_ERROR_UNSUPPORTED);
  EXPECT_EQ(transcoded(&decoder, file).size(), 0u);
}

// A file that lacks its last scans starts like a good one. Without them it is another image.
TEST(Transcode, NeedsEveryScan) {
  Random random(113);
  JpegDecoder decoder(1 << 24);
  JpegOptions options;
  options.coding = Coding::kProgressive;
  const Bytes file = encode_jpeg(picture(random, 80, 70), options);
  std::vector<size_t> scans;
  for (size_t i = 0; i + 1 < file.size(); ++i) {
    if (file[i] == 0xFF && file[i + 1] == 0xDA) scans.push_back(i);
  }
  ASSERT_GT(scans.size(), 4u);
  for (const size_t end : scans) {
    Bytes cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(end));
    cut.insert(cut.end(), {0xFF, 0xD9});
    const Outcome outcome(ts::guard(__func__, [&] {
      Bytes to(2 * file.size());
      EXPECT_EQ(decoder.transcode(cut.data(), cut.size(), to.data(), to.size()), 0u);
    }));
    EXPECT_EQ(outcome.code, end == scans[0] ? TS_ERROR_DECODE : TS_ERROR_NONE) << outcome.message;
  }
}

// Returns a progressive file of one block with a DC coefficient, and the first AC coefficient
// unless it is 0.
Bytes one_block(int dc, int ac) {
  Bytes file = {0xFF, 0xD8, 0xFF, 0xDB, 0, 67, 0};
  file.insert(file.end(), 64, 1);
  file.insert(file.end(), {0xFF, 0xC2, 0, 11, 8, 0, 8, 0, 8, 1, 1, 0x11, 0});
  const auto size_of = [](int value) {
    int size = 0;
    while (std::abs(value) >> size != 0) ++size;
    return size;
  };
  // Two codes: 0 is a value of this many bits, and 10 the end of the block.
  const auto scan = [&](int table, int first, int last, int value) {
    file.insert(file.end(), {0xFF, 0xC4, 0, 21, static_cast<uint8_t>(table << 4), 1, 1});
    file.insert(file.end(), 14, 0);
    file.insert(file.end(), {static_cast<uint8_t>(size_of(value)), 0});
    file.insert(file.end(), {0xFF, 0xDA, 0, 8, 1, 1, 0, static_cast<uint8_t>(first),
                             static_cast<uint8_t>(last), 0});
    uint64_t bits = 0;
    int count = 0;
    const auto put = [&](int what, int n) {
      bits = bits << n | static_cast<uint32_t>(what), count += n;
    };
    if (value != 0) {
      put(0, 1);
      put(value > 0 ? value : value + (1 << size_of(value)) - 1, size_of(value));
    }
    if (value == 0 || table == 1) put(2, 2);
    while (count % 8 != 0) put(1, 1);
    while (count > 0) {
      count -= 8;
      const auto byte = static_cast<uint8_t>(bits >> count);
      file.push_back(byte);
      if (byte == 0xFF) file.push_back(0);
    }
  };
  scan(0, 0, 0, dc);
  scan(1, 1, 63, ac);
  file.insert(file.end(), {0xFF, 0xD9});
  return file;
}

TEST(Transcode, RefusesCoefficientsOutsideOfTheBaselineRange) {
  JpegDecoder decoder(1 << 20);
  const struct {
    int dc, ac;
    bool written;
  } cases[] = {{5, 0, true},         {1023, 0, true},      {-1024, 0, true},  {1024, 0, false},
               {-1025, 0, false},    {2047, 0, false},     {16000, 0, false}, {0, 1023, true},
               {0, -1023, true},     {0, 1024, false},     {0, -1024, false}, {7, 16383, false},
               {-1024, -1023, true}, {-1024, -1024, false}};
  for (const auto& c : cases) {
    const Bytes file = one_block(c.dc, c.ac);
    const Coefficients read = coefficients_of(file);
    ASSERT_EQ(read.values.size(), 64u);
    ASSERT_EQ(read.values[0], c.dc);
    ASSERT_EQ(read.values[1], c.ac);
    const Bytes baseline = transcoded(&decoder, file);
    EXPECT_EQ(!baseline.empty(), c.written) << c.dc << ", " << c.ac;
    EXPECT_TRUE(baseline.empty() || coefficients_of(baseline) == read);
  }
}

// Whatever the bytes are, a rewritten file comes from an image that decodes without a warning, and
// has the same pixels.
TEST(Transcode, DamagedFilesAreRefusedOrTheSame) {
  Random random(114);
  JpegDecoder decoder(1 << 20);
  int written = 0, refused = 0;
  for (int i = 0; i < 3000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = progressive(random, kKinds[random() % 8], width, height);
    for (int changes = uniform(random, 1, 3); changes > 0; --changes) {
      file[random() % file.size()] ^= static_cast<uint8_t>(1 << random() % 8);
    }
    if (random() % 8 == 0) file.resize(uniform(random, 1, static_cast<int>(file.size())));
    Bytes baseline(2 * file.size() + 4096);
    ts_image_info info = {};
    const Bytes exact(file);
    const Outcome outcome(ts::guard(__func__, [&] {
      info = jpeg_header(exact.data(), exact.size());
      if (int64_t{info.width} * info.height > 1 << 20) info.width = 0;
      baseline.resize(info.width == 0 ? 0
                                      : decoder.transcode(exact.data(), exact.size(),
                                                          baseline.data(), baseline.size()));
    }));
    if (outcome.code != TS_ERROR_NONE) {
      EXPECT_TRUE(outcome.code == TS_ERROR_DECODE || outcome.code == TS_ERROR_UNSUPPORTED)
          << outcome.message;
      continue;
    }
    if (baseline.empty()) {
      ++refused;
      continue;
    }
    ++written;
    const Box box = {0, 0, info.width, info.height};
    const Result expected = decode_by(&decoder, file, box);
    ASSERT_EQ(expected.code, TS_ERROR_NONE) << i << ": " << expected.message;
    const Result pixels = decode_by(&decoder, baseline, box);
    ASSERT_EQ(pixels.code, TS_ERROR_NONE) << i << ": " << pixels.message;
    ASSERT_EQ(pixels.pixels, expected.pixels) << i;
  }
  EXPECT_GT(written, 300);
  EXPECT_GT(refused, 300);
}

TEST(Transcode, CFunctionChecksItsArguments) {
  Random random(115);
  JpegOptions options;
  options.coding = Coding::kProgressive;
  const Bytes file = encode_jpeg(picture(random, 40, 30), options);
  const Decoder decoder = new_decoder();
  Bytes to(2 * file.size());
  size_t written = 7;
  const auto call = [&](ts_image_decoder* d, uint8_t* buffer, size_t* size) {
    return Outcome(ts_image_transcode(d, file.data(), file.size(), buffer, to.size(), size)).code;
  };
  EXPECT_EQ(call(nullptr, to.data(), &written), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(decoder.get(), nullptr, &written), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(call(decoder.get(), to.data(), nullptr), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(written, 7u);
  EXPECT_EQ(call(decoder.get(), to.data(), &written), TS_ERROR_NONE);
  EXPECT_GT(written, 0u);
  const Decoder small = new_decoder(100);
  written = 7;
  EXPECT_EQ(call(small.get(), to.data(), &written), TS_ERROR_UNSUPPORTED);
  EXPECT_EQ(written, 7u);
}

}  // namespace
