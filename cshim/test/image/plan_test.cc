// The decoder of plans (src/jpeg), emulated on the host, gives the pixels of the host's decoder,
// and never accesses memory other than its own, whatever the bytes.
#include <algorithm>
#include <cstring>
#include <thread>

#include "image/emulate.h"
#include "image/entropy.h"
#include "image/jpeg_plan.h"
#include "image/jpeg_scan.h"
#include "image/libjpeg_whole.h"

namespace {

using namespace samples;

// Plans in memory of exactly the plan's size. Returns nothing if only the host can decode the
// image.
Bytes plan_of(JpegDecoder* decoder, const Bytes& file, const ts_image_geometry& geometry,
              const Bytes& blob, uint64_t* proof) {
  const Bytes exact(file);
  const ts_image_info info = jpeg_header(exact.data(), exact.size());
  const EntriesIn in = {blob.data(), blob.size(), proof};
  Bytes plan;
  PlanMemory to = {};
  const size_t size = decoder->plan(exact.data(), exact.size(), info, geometry, in, &to);
  plan.resize(size);
  if (size == 0) return plan;
  to = {plan.data(), size, nullptr};
  EXPECT_EQ(decoder->plan(exact.data(), exact.size(), info, geometry, in, &to), size);
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

// A row of the crop without room in a block's shared memory is resampled outside it.
TEST(Plan, WideCropsEqualTheHostsDecoder) {
  Random random(72);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  constexpr int kWidth = ts::jpeg::kStripPixels + 40;
  constexpr int kHeight = 24;
  for (const Kind& kind : kKinds) {
    const Bytes file = usual(random, kind, kWidth, kHeight);
    Blob blob = make_blob(&decoder, file, 8);
    ASSERT_GT(blob.bytes.size(), 0u);
    for (const int width :
         {kWidth, ts::jpeg::kStripPixels + 1, ts::jpeg::kStripPixels, ts::jpeg::kStripPixels - 7}) {
      ts_image_geometry g = crop(3, 1, std::min(width, kWidth - 3), kHeight - 2);
      for (const int resized : {g.crop_width, 90}) {
        g.resize_width = g.window_width = resized;
        g.flip = !g.flip;
        const Bytes plan = plan_of(&decoder, file, g, blob.bytes, &blob.proof);
        ASSERT_GT(plan.size(), 0u) << kind.name;
        emulate::Device device(plan);
        ASSERT_TRUE(device.entropy()) << kind.name;
        device.finish();
        ASSERT_EQ(device.result, host_pixels(host.get(), file, g)) << kind.name << " " << width;
      }
    }
  }
}

// A result that is much wider than its crop is divided among several blocks of threads.
TEST(Plan, WideResultsHaveSeveralStrips) {
  Random random(74);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (const Kind& kind : kKinds) {
    const Bytes file = usual(random, kind, 20, 200);
    Blob blob = make_blob(&decoder, file, 8);
    ASSERT_GT(blob.bytes.size(), 0u);
    ts_image_geometry g = crop(2, 3, 8, 190);
    g.resize_width = g.window_width = 2000;
    g.resize_height = g.window_height = 40;
    const Bytes plan = plan_of(&decoder, file, g, blob.bytes, &blob.proof);
    ASSERT_GT(plan.size(), 0u) << kind.name;
    const int32_t rows = ts::jpeg::plan_at(plan.data()).strip_rows;
    EXPECT_EQ(rows, 32) << kind.name;
    emulate::Device device(plan);
    ASSERT_TRUE(device.entropy()) << kind.name;
    device.finish();
    ASSERT_EQ(device.result, host_pixels(host.get(), file, g)) << kind.name;
  }
}

TEST(Plan, AbsurdQuantisersGiveTheHostsPixels) {
  Random random(72);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (int i = 0; i < 400 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = usual(random, kKinds[random() % 8], width, height);
    make_quantisers_absurd(random, &file);
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
      // In the header, only numbers that determine the entries' positions. The lowest predictors
      // (bytes 44 to 49) change all entries alike, so that the entries still agree: only the proof
      // detects that.
      const size_t at = 36 + random() % (forgery.size() - 36 - 8);
      if (at >= 44 && at < 50) continue;
      forgery[at] = static_cast<uint8_t>(forgery[at] ^ 1 << random() % 8);
    }
    seal(&forgery, file);
    if (forgery == blob.bytes) continue;
    const ts_image_geometry g = draw_geometry(random, width, height, 90);
    // Neither a proof of other entries nor a missing proof gives a plan.
    uint64_t other = blob.proof;
    ASSERT_EQ(plan_of(&decoder, file, g, forgery, &other).size(), 0u);
    other = 0;
    ASSERT_EQ(plan_of(&decoder, file, g, forgery, &other).size(), 0u);
    const Bytes plan = plan_of(&decoder, file, g, forgery, nullptr);
    if (plan.empty()) continue;
    ++planned;
    emulate::Device device(plan);
    const bool good = device.entropy();
    ASSERT_EQ(device.unwritten(), 0u);
    device.finish();
    failed += !good;
    wrong += good && device.result != host_pixels(host.get(), file, g);
  }
  EXPECT_GT(planned, 200);
  EXPECT_GT(failed, planned / 4);
  // Nothing checks the end of an image's last segment. Its entry is proven, or trusted.
  EXPECT_LT(wrong, planned / 10);
}

// Bytes that change on the way to the device.
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
    ASSERT_EQ(device.unwritten(), 0u);
    device.finish();
  }
  EXPECT_GT(failed, tried / 2);
}

// Plans from the part of a file before its scan, and adds the scan where the decoder finds it.
// Returns nothing if only the host can decode the image.
Bytes plan_of_head(JpegDecoder* decoder, const Bytes& file, size_t scan,
                   const ts_image_geometry& geometry, const Bytes& blob) {
  const Bytes front(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(scan));
  const FileHead head = {front.data(), front.size(), file.size(), scan};
  const EntriesIn in = {blob.data(), blob.size(), nullptr};
  PlanMemory none = {};
  const ts_image_info info = jpeg_header(front.data(), front.size());
  Bytes plan(decoder->plan_head(head, info, geometry, in, &none));
  if (plan.empty()) return plan;
  const size_t size = plan.size();
  PlanMemory to = {plan.data(), size, nullptr};
  EXPECT_EQ(decoder->plan_head(head, info, geometry, in, &to), size);
  auto& header = *reinterpret_cast<ts::jpeg::Plan*>(plan.data());
  EXPECT_EQ(header.scan_at, 0u);
  EXPECT_EQ(header.scan_bytes, file.size() - scan);
  header.scan_at = static_cast<uint32_t>(size) + 3;  // not aligned
  plan.resize(size + 3);
  plan.insert(plan.end(), file.begin() + static_cast<std::ptrdiff_t>(scan), file.end());
  plan.resize(plan.size() + ts::jpeg::kScanSlack);
  return plan;
}

TEST(Plan, HeadsGiveTheHostsPixels) {
  Random random(77);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 30 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      Bytes file = usual(random, kind, width, height);
      if (i % 3 == 0) file.insert(file.end(), {0xFF, 0xD9, 1, 2, 0xFF, 0, 7});  // after the end
      const Blob blob = make_blob(&decoder, file, static_cast<uint32_t>(uniform(random, 1, 9)));
      ASSERT_GT(blob.bytes.size(), 0u);
      Entries entries;
      ASSERT_TRUE(entries.attach(blob.bytes.data(), blob.bytes.size()));
      if (i % 4 == 0) {  // truncates the previous image
        const Bytes cut(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(file.size() / 2));
        Resizer sink;
        EXPECT_THROW(decoder.decode(cut.data(), cut.size(), {0, 0, 1, 1}, &sink), ts::Failure);
      }
      for (int k = 0; k < 8; ++k) {
        const ts_image_geometry g =
            k == 0 ? crop(0, 0, width, height) : draw_geometry(random, width, height, 90);
        const Bytes plan = plan_of_head(&decoder, file, entries.of().scan, g, blob.bytes);
        ASSERT_GT(plan.size(), 0u) << kind.name;
        emulate::Device device(plan);
        ASSERT_TRUE(device.entropy()) << kind.name << " " << width << " x " << height;
        device.finish();
        ASSERT_EQ(device.result, host_pixels(host.get(), file, g)) << kind.name;
      }
    }
  }
}

// Heads are kept from earlier reads of their files, and entries come from an index.
TEST(Plan, WrongHeadsDoNoHarm) {
  Random random(78);
  JpegDecoder decoder(1 << 24);
  int planned = 0, refused = 0;
  for (int i = 0; i < 2000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    const Blob blob = make_blob(&decoder, file, 4);
    Entries entries;
    ASSERT_TRUE(entries.attach(blob.bytes.data(), blob.bytes.size()));
    const size_t scan = entries.of().scan;
    Bytes front(file.begin(), file.begin() + static_cast<std::ptrdiff_t>(scan));
    FileHead head = {front.data(), front.size(), file.size(), scan};
    switch (random() % 5) {
      case 0:
        head.file_bytes += random() % 3;
        break;
      case 1:
        head.scan -= random() % 3;
        break;
      case 2:
        head.bytes = random() % head.bytes;
        break;
      default:
        front[2 + random() % (front.size() - 2)] = static_cast<uint8_t>(random());
    }
    const ts_image_geometry g = crop(0, 0, 1, 1);
    const EntriesIn in = {blob.bytes.data(), blob.bytes.size(), nullptr};
    PlanMemory none = {};
    ts_image_info info = {};
    try {
      info = jpeg_header(head.data, head.bytes);
    } catch (const ts::Failure&) {
      ++refused;
      continue;
    }
    Bytes plan(decoder.plan_head(head, info, g, in, &none));
    PlanMemory to = {plan.data(), plan.size(), nullptr};
    if (!plan.empty()) decoder.plan_head(head, info, g, in, &to);
    if (plan.empty()) {
      ++refused;
      continue;
    }
    ++planned;
    const auto size = static_cast<uint32_t>(plan.size());
    reinterpret_cast<ts::jpeg::Plan*>(plan.data())->scan_at = size;
    plan.insert(plan.end(), file.begin() + static_cast<std::ptrdiff_t>(scan), file.end());
    plan.resize(plan.size() + ts::jpeg::kScanSlack);
    emulate::Device device(plan);
    device.entropy();
    device.finish();
  }
  EXPECT_GT(planned, 200);
  EXPECT_GT(refused, 200);
}

// The geometry is checked with a header that another parser has read. A plan for an image of
// another size would read outside it, however well the entries are proven.
TEST(Plan, AnotherHeadersImageHasNone) {
  Random random(79);
  JpegDecoder decoder(1 << 24);
  const Bytes file = encode_jpeg(picture(random, 100, 80), {});
  Blob blob = make_blob(&decoder, file, 4);
  Entries entries;
  ASSERT_TRUE(entries.attach(blob.bytes.data(), blob.bytes.size()));
  const FileHead head = {file.data(), entries.of().scan, file.size(), entries.of().scan};
  const EntriesIn proven = {blob.bytes.data(), blob.bytes.size(), &blob.proof};
  const EntriesIn trusted = {blob.bytes.data(), blob.bytes.size(), nullptr};
  const ts_image_geometry g = crop(0, 0, 8, 8);
  const auto is_planned = [&](const ts_image_info& info) {
    PlanMemory none = {};
    const bool whole = decoder.plan_scan(file.data(), file.size(), info, g, &none) > 0;
    EXPECT_EQ(decoder.plan(file.data(), file.size(), info, g, proven, &none) > 0, whole);
    EXPECT_EQ(decoder.plan(file.data(), file.size(), info, g, trusted, &none) > 0, whole);
    EXPECT_EQ(decoder.plan_head(head, info, g, trusted, &none) > 0, whole);
    return whole;
  };
  const ts_image_info own = jpeg_header(file.data(), file.size());
  EXPECT_TRUE(is_planned(own));
  ts_image_info other = own;
  --other.width;
  EXPECT_FALSE(is_planned(other));
  other = own;
  --other.height;
  EXPECT_FALSE(is_planned(other));
  other = own;
  other.components = 1;
  EXPECT_FALSE(is_planned(other));
}

TEST(Plan, WhatOnlyTheHostDecodesHasNone) {
  Random random(75);
  JpegDecoder decoder(1 << 24);
  const ts_image_geometry g = crop(0, 0, 100, 80);
  const Bytes file = encode_jpeg(picture(random, 100, 80), {});
  Blob blob = make_blob(&decoder, file, 4);
  EXPECT_GT(plan_of(&decoder, file, g, blob.bytes, &blob.proof).size(), 0u);
  EXPECT_EQ(plan_of(&decoder, file, g, {}, nullptr).size(), 0u);
  Blob far = make_blob(&decoder, file, 1000);  // segments too long for a thread
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

// The facts that a plan takes from an image's headers.
struct Headers {
  Frame frame;
  Scan scan;
  Tables tables;
  std::vector<uint16_t> quantisers;

  bool operator==(const Headers& other) const {
    const Frame &a = frame, &b = other.frame;
    if (a.width != b.width || a.height != b.height || a.max_h != b.max_h || a.max_v != b.max_v ||
        a.components != b.components || a.color != b.color || quantisers != other.quantisers) {
      return false;
    }
    for (int c = 0; c < a.components; ++c) {
      const Frame::Component &x = a.component[c], &y = b.component[c];
      if (x.width != y.width || x.height != y.height || x.across != y.across || x.down != y.down ||
          x.h != y.h || x.v != y.v) {
        return false;
      }
    }
    const Scan &p = scan, &q = other.scan;
    if (p.begin != q.begin || p.end != q.end || p.components != q.components ||
        p.blocks != q.blocks || p.mcus_per_row != q.mcus_per_row || p.mcu_rows != q.mcu_rows ||
        p.restart_interval != q.restart_interval) {
      return false;
    }
    const auto same_code = [](const HuffmanCode* x, const HuffmanCode* y) {
      return std::memcmp(x->counts + 1, y->counts + 1, 16) == 0 &&
             std::memcmp(x->symbols, y->symbols, sizeof x->symbols) == 0;
    };
    for (int i = 0; i < p.blocks; ++i) {
      if (p.component[i] != q.component[i] || p.dc_table[i] != q.dc_table[i] ||
          p.ac_table[i] != q.ac_table[i] || !same_code(p.dc[p.dc_table[i]], q.dc[q.dc_table[i]]) ||
          !same_code(p.ac[p.ac_table[i]], q.ac[q.ac_table[i]])) {
        return false;
      }
    }
    return true;
  }

  void keep_quantisers() {
    quantisers.clear();
    for (int c = 0; c < frame.components; ++c) {
      const uint16_t* const from = frame.component[c].quantisers;
      quantisers.insert(quantisers.end(), from, from + 64);
    }
  }
};

// Reads the headers with libjpeg. Its errors and warnings jump, so no frame below owns anything.
bool read_with_libjpeg(const Bytes& file, Headers* headers) {
  libjpeg_whole::Codec state;
  jpeg_decompress_struct* codec = &state.codec;
  codec->err = jpeg_std_error(&state.errors);
  codec->client_data = &state;
  state.errors.error_exit = [](j_common_ptr failed) {
    std::longjmp(static_cast<libjpeg_whole::Codec*>(failed->client_data)->jump, 1);
  };
  state.errors.emit_message = [](j_common_ptr warned, int level) {
    if (level < 0) warned->err->error_exit(warned);
  };
  bool good = false;
  if (setjmp(state.jump) == 0) {
    jpeg_create_decompress(codec);
    jpeg_mem_src(codec, file.data(), static_cast<unsigned long>(file.size()));
    jpeg_read_header(codec, TRUE);
    jpeg_start_decompress(codec);
    good = describe_scan(*codec, file.data(), file.size(), headers->tables.codes, &headers->scan) &&
           frame_of(*codec, &headers->frame);
    if (good) headers->keep_quantisers();
  }
  jpeg_destroy_decompress(codec);
  return good;
}

// Usual headers are read without libjpeg. The result must equal libjpeg's.
TEST(Plan, HeadersAreLibjpegs) {
  Random random(77);
  int read = 0, refused = 0;
  for (int i = 0; i < 6000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = usual(random, kKinds[random() % 8], width, height);
    Headers own, expected;
    ASSERT_TRUE(
        read_frame(file.data(), file.size(), file.size(), &own.tables, &own.frame, &own.scan));
    const bool damaged = random() % 4 != 0;
    for (int changes = damaged ? uniform(random, 1, 3) : 0; changes > 0; --changes) {
      file[2 + random() % (own.scan.begin - 2)] ^= static_cast<uint8_t>(1 << random() % 8);
    }
    if (damaged && random() % 8 == 0) file.resize(random() % own.scan.begin);
    const Bytes exact(file);
    if (!read_frame(exact.data(), exact.size(), exact.size(), &own.tables, &own.frame, &own.scan)) {
      ASSERT_TRUE(damaged);
      continue;
    }
    own.keep_quantisers();
    if (!read_with_libjpeg(exact, &expected)) {
      ++refused;  // no proof of such a file exists
      continue;
    }
    ++read;
    ASSERT_TRUE(own == expected) << i;
  }
  EXPECT_GT(read, 2000 * rounds());
  EXPECT_LT(refused, read / 2);
}

TEST(Plan, SharedMemoryIsFilledByThreads) {
  Random random(78);
  const Bytes file = encode_jpeg(picture(random, 300, 200), {});
  JpegDecoder maker(1 << 24);
  const Blob blob = make_blob(&maker, file, 8);
  const ts_image_geometry g = crop(33, 50, 200, 100);
  uint64_t proof = blob.proof;
  const Bytes alone = plan_of(&maker, file, g, blob.bytes, &proof);
  ASSERT_GT(alone.size(), 0u);
  constexpr size_t kPlans = 40, kThreads = 4;
  std::vector<uint64_t> memory((kPlans * alone.size() + alone.size() / 2) / 8);
  auto* const data = reinterpret_cast<uint8_t*>(memory.data());
  uint64_t used = 0;
  std::vector<size_t> places[kThreads];
  std::vector<std::thread> threads;
  for (auto& mine : places) {
    threads.emplace_back([&] {
      const Decoder decoder = new_decoder();
      uint64_t own = blob.proof;
      for (size_t i = 0; i < kPlans; ++i) {
        size_t at = 0, planned = 0;
        EXPECT_EQ(Outcome(ts_image_plan_append(decoder.get(), file.data(), file.size(), &g,
                                               {blob.bytes.data(), blob.bytes.size()}, &own,
                                               {data, memory.size() * 8, &used}, &at, &planned))
                      .code,
                  TS_ERROR_NONE);
        if (planned != 0) {
          EXPECT_EQ(planned, alone.size());
          mine.push_back(at);
        }
      }
    });
  }
  for (auto& thread : threads) thread.join();
  std::vector<size_t> all;
  for (const auto& mine : places) all.insert(all.end(), mine.begin(), mine.end());
  std::sort(all.begin(), all.end());
  ASSERT_EQ(all.size(), kPlans);
  EXPECT_EQ(used, kPlans * alone.size());
  for (size_t i = 0; i < all.size(); ++i) {
    EXPECT_EQ(all[i], i * alone.size());
    EXPECT_EQ(Bytes(data + all[i], data + all[i] + alone.size()), alone);
  }
  // A refused call reserves no memory.
  const Decoder decoder = new_decoder();
  const auto append = [&](uint64_t token, ts_image_plans plans, size_t* planned) {
    size_t at;
    return Outcome(ts_image_plan_append(decoder.get(), file.data(), file.size(), &g,
                                        {blob.bytes.data(), blob.bytes.size()}, &token, plans, &at,
                                        planned))
        .code;
  };
  size_t planned = 1;
  used = 16;
  EXPECT_EQ(append(0, {data, memory.size() * 8, &used}, &planned), TS_ERROR_NONE);
  EXPECT_EQ(planned, 0u);
  EXPECT_EQ(used, 16u);
  used = UINT64_MAX - 15;
  planned = 1;
  EXPECT_EQ(append(blob.proof, {data, memory.size() * 8, &used}, &planned), TS_ERROR_NONE);
  EXPECT_EQ(planned, 0u);
  EXPECT_EQ(append(blob.proof, {data, memory.size() * 8, nullptr}, &planned),
            TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(append(blob.proof, {data + 8, 16, &used}, &planned), TS_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(append(blob.proof, {nullptr, 16, &used}, &planned), TS_ERROR_INVALID_ARGUMENT);
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
