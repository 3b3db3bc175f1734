// The search for a scan's entry points (jpeg/sync.h), emulated on the host, finds the states and
// entries of a decoder that reads the scan from its start, and accesses nothing outside the scan,
// whatever the bytes.
#include <cstring>
#include <tuple>

#include "image/emulate.h"
#include "image/entropy.h"
#include "image/unsynchronised.h"

namespace {

using namespace samples;
using ts::jpeg::SyncState;

Bytes plan_of(JpegDecoder* decoder, const Bytes& file, const ts_image_geometry& geometry) {
  const Bytes exact(file);
  const ts_image_info info = jpeg_header(exact.data(), exact.size());
  PlanMemory to = {};
  Bytes plan(decoder->plan_scan(exact.data(), exact.size(), info, geometry, &to));
  if (plan.empty()) return plan;
  to = {plan.data(), plan.size(), nullptr};
  EXPECT_EQ(decoder->plan_scan(exact.data(), exact.size(), info, geometry, &to), plan.size());
  return plan;
}

// Returns the number of MCUs between two entries of a plan.
uint32_t spacing_of(const Bytes& plan) {
  return reinterpret_cast<const ts::jpeg::Plan*>(plan.data())->spacing;
}

// Returns the states at the starts of the subsequences of a decoder that reads the whole scan.
std::vector<SyncState> sequential(const emulate::Device& device) {
  const auto tables = device.pass_tables();
  const ts::jpeg::Plan& plan = device.plan();
  SyncState state = {};
  std::vector<SyncState> states;
  for (uint32_t i = 0; i < plan.subsequences; ++i) {
    states.push_back(state);
    ts::jpeg::pass_subsequence(plan, device.base(), *tables, ts::jpeg::end_of_subsequence(plan, i),
                               &state);
  }
  return states;
}

// Compares the found entries with a blob's. Returns the number of different entries.
int other_entries(const emulate::Device& device, const Bytes& blob) {
  Entries entries;
  if (!entries.attach(blob.data(), blob.size())) return -1;
  EXPECT_EQ(entries.count(), device.plan().entries);
  int differ = 0;
  for (uint32_t i = 0; i < entries.count(); ++i) {
    const EntryPoint want = entries.at(i);
    const ts::jpeg::Entry got = ts::jpeg::entry_at(device.plan(), device.base(), i);
    differ += got.bit != want.bit || got.dc[0] != want.dc[0] || got.dc[1] != want.dc[1] ||
              got.dc[2] != want.dc[2];
  }
  return differ;
}

TEST(Sync, EntriesAreTheIndexes) {
  Random random(91);
  JpegDecoder decoder(1 << 24);
  uint64_t passes = 0, subsequences = 0;
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 60 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes file = usual(random, kind, width, height);
      const Bytes plan = plan_of(&decoder, file, crop(0, 0, width, height));
      ASSERT_GT(plan.size(), 0u) << kind.name;
      const Blob blob = make_blob(&decoder, file, spacing_of(plan));
      ASSERT_GT(blob.bytes.size(), 0u);
      // One launch is enough for one block. Small blocks need many.
      for (const auto& [threads, launches, guessed] :
           {std::tuple<uint32_t, uint32_t, bool>{1 << 20, 1, false},
            {3, 400, false},
            {3, 400, true}}) {
        emulate::Device device(plan);
        ASSERT_TRUE(device.synchronise(threads, launches, i % 2 == 0, guessed))
            << kind.name << " " << width << " x " << height << ", " << threads << " threads";
        ASSERT_EQ(other_entries(device, blob.bytes), 0)
            << kind.name << " " << width << " x " << height << ", " << threads << " threads";
        const std::vector<SyncState> states = sequential(device);
        ASSERT_TRUE(states == device.starts) << kind.name;
        if (launches == 1) {
          passes += device.passes;
          subsequences += device.plan().subsequences;
        }
      }
    }
  }
  EXPECT_LT(passes, 9 * subsequences);  // 7.4: half of the files are noise
}

// From any state, true or not, over good bytes and damaged ones, reading words gives the same
// result as the careful way.
TEST(Sync, WordsAreTheCarefulWay) {
  Random random(97);
  JpegDecoder decoder(1 << 24);
  int by_words = 0, tried = 0;
  for (int i = 0; i < 150 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width * 3, height * 3);
    Bytes bytes = plan_of(&decoder, file, crop(0, 0, width * 3, height * 3));
    ASSERT_GT(bytes.size(), 0u);
    const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(bytes.data());
    uint8_t* const scan = bytes.data() + header.scan_at;
    for (int changes = i % 3 == 0 ? 0 : uniform(random, 1, 40); changes > 0; --changes) {
      const size_t at = random() % header.scan_bytes;
      scan[at] = static_cast<uint8_t>(random());
      // Consecutive stuffed bytes, and 0xFF bytes without a stuffed byte after them.
      for (size_t k = at; k + 1 < header.scan_bytes && random() % 2 == 0; k += 2) {
        scan[k] = 0xFF;
        scan[k + 1] = random() % 8 == 0 ? static_cast<uint8_t>(random()) : 0;
      }
    }
    const emulate::Device device(bytes);
    const auto tables = device.pass_tables();
    const ts::jpeg::Plan& plan = device.plan();
    for (int k = 0; k < 200; ++k) {
      const uint32_t byte = random() % plan.scan_bytes;
      if (byte != 0 && device.base()[plan.scan_at + byte - 1] == 0xFF) continue;
      const uint32_t block = random() % plan.blocks;
      const uint32_t coefficient = random() % 3 == 0 ? 0 : random() % 64;
      const SyncState from = {byte * 8 + static_cast<uint32_t>(random() % 8),
                              static_cast<uint16_t>(block << 6 | coefficient), 0};
      const uint32_t until =
          ts::jpeg::end_of_words(plan, (byte + static_cast<uint32_t>(uniform(random, 1, 600))) * 8);
      if (from.bit >= until * 8) continue;
      ++tried;
      SyncState words = from, careful = from;
      ts::jpeg::SyncSum sum = {};
      ts::jpeg::Passing use;
      if (!ts::jpeg::pass_words(plan, device.base(), *tables, until, &words, &sum, &use)) {
        ASSERT_TRUE(words == from);
        continue;
      }
      ++by_words;
      const ts::jpeg::SyncSum want =
          ts::jpeg::pass_carefully(plan, device.base(), *tables, until * 8, &careful);
      ASSERT_TRUE(words == careful) << i << " " << from.bit << " to " << until * 8 << ": "
                                    << words.bit << ", not " << careful.bit;
      ASSERT_EQ(sum.blocks, want.blocks);
      ASSERT_EQ(want.markers, 0u);
      for (int c = 0; c < 3; ++c) ASSERT_EQ(sum.dc[c], want.dc[c]);
    }
  }
  EXPECT_GT(by_words, tried / 4);
  EXPECT_LT(by_words, tried);
}

TEST(Sync, CropsEqualTheHostsDecoder) {
  Random random(92);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  for (const Kind& kind : kKinds) {
    for (int i = 0; i < 20 * rounds(); ++i) {
      int width, height;
      draw_size(random, &width, &height);
      const Bytes file = usual(random, kind, width, height);
      for (int k = 0; k < 6; ++k) {
        const ts_image_geometry g = draw_geometry(random, width, height, 90);
        const Bytes plan = plan_of(&decoder, file, g);
        ASSERT_GT(plan.size(), 0u) << kind.name;
        emulate::Device device(plan);
        ASSERT_TRUE(device.synchronise(ts::jpeg::kSyncThreads, ts::jpeg::kSyncLaunches));
        ASSERT_TRUE(device.entropy()) << kind.name << " " << width << " x " << height;
        device.finish();
        Image image;
        const Outcome outcome = decode(host.get(), file, g, &image);
        ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
        ASSERT_EQ(device.result, image.pixels) << kind.name << " " << width << " x " << height;
      }
    }
  }
}

// Arbitrary bytes replace a scan's: the found entries equal the host decoder's, or the host is told
// to decode the image.
TEST(Sync, DamagedScansAreFound) {
  Random random(93);
  JpegDecoder decoder(1 << 24);
  int found = 0, tried = 0, good = 0;
  for (int i = 0; i < 4000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    Bytes plan = plan_of(&decoder, file, crop(0, 0, width, height));
    ASSERT_GT(plan.size(), 0u);
    const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(plan.data());
    for (int changes = uniform(random, 1, 20); changes > 0; --changes) {
      uint8_t& byte = plan[header.scan_at + random() % header.scan_bytes];
      byte = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
    }
    ++tried;
    emulate::Device device(plan);
    if (!device.synchronise(static_cast<uint32_t>(uniform(random, 1, 9)),
                            static_cast<uint32_t>(uniform(random, 1, 60)), false, i % 2 == 0)) {
      ++found;
      continue;
    }
    // The remaining case is a scan without an anomaly: the segments agree with each other too.
    ++good;
    ASSERT_TRUE(device.entropy()) << i;
  }
  EXPECT_GT(found, tried / 2);
  EXPECT_GT(good, tried / 100);
}

// The same damage in a file: the host's decoder detects it, or has the same entries.
TEST(Sync, VerdictsAreTheHosts) {
  Random random(94);
  JpegDecoder decoder(1 << 24);
  int same = 0, refused = 0;
  for (int i = 0; i < 4000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = usual(random, kKinds[random() % 8], width, height);
    const Bytes whole = plan_of(&decoder, file, crop(0, 0, width, height));
    ASSERT_GT(whole.size(), 0u);
    const size_t scan =
        file.size() - reinterpret_cast<const ts::jpeg::Plan*>(whole.data())->scan_bytes - 2;
    for (int changes = uniform(random, 1, 3); changes > 0; --changes) {
      file[scan + random() % (file.size() - scan)] = static_cast<uint8_t>(random());
    }
    Blob blob;
    Bytes plan;
    try {
      blob = make_blob(&decoder, file, spacing_of(whole));
      plan = plan_of(&decoder, file, crop(0, 0, width, height));
    } catch (const ts::Failure&) {
      continue;  // the file's structure is damaged
    }
    ASSERT_GT(plan.size(), 0u);
    emulate::Device device(plan);
    const bool good = device.synchronise(64, 20, false, i % 2 == 0);
    ASSERT_EQ(good, blob.bytes.size() > 0) << i;
    if (good) {
      ASSERT_EQ(other_entries(device, blob.bytes), 0) << i;
      ++same;
    } else {
      ++refused;
    }
  }
  EXPECT_GT(same, 100);
  EXPECT_GT(refused, 100);
}

// Nothing synchronises a decoder in the equal bits of a flat image: its subsequences are decoded
// one after the other, within a block of threads in one launch.
TEST(Sync, FlatImagesAreFound) {
  JpegDecoder decoder(1 << 24);
  uint64_t passes = 0, subsequences = 0;
  for (const Kind& kind : kKinds) {
    JpegOptions options;
    for (int c = 0; c < 3; ++c) {
      options.sampling[c][0] = kind.factors[c][0];
      options.sampling[c][1] = kind.factors[c][1];
    }
    Image image{1200, 900, kind.channels, {}};
    image.pixels.assign(size_t{1200} * 900 * static_cast<size_t>(kind.channels), 250);
    const Bytes file = encode_jpeg(image, options);
    const Bytes plan = plan_of(&decoder, file, crop(0, 0, 1200, 900));
    const Blob blob = make_blob(&decoder, file, spacing_of(plan));
    emulate::Device device(plan);
    EXPECT_TRUE(device.synchronise(ts::jpeg::kSyncThreads, ts::jpeg::kSyncLaunches)) << kind.name;
    EXPECT_EQ(other_entries(device, blob.bytes), 0) << kind.name;
    passes += device.passes;
    subsequences += device.plan().subsequences;
  }
  EXPECT_LT(passes, 14 * subsequences);  // 11.7
}

// The worst case: every subsequence waits for the previous one. Everything that the launches reach
// is found, at a bounded cost, and the host decodes a longer scan.
TEST(Sync, UnsynchronisedImagesEnd) {
  Random random(97);
  JpegDecoder decoder(1 << 24);
  constexpr uint32_t kThreads = ts::jpeg::kSyncThreads;
  constexpr uint32_t kReach = ts::jpeg::kSyncLaunches * kThreads;  // subsequences
  int found = 0;
  for (const auto& [columns, rows, subsampled] : {std::tuple<int, int, bool>{20, 17, false},
                                                  {26, 21, false},
                                                  {15, 20, true},
                                                  {60, 50, false},
                                                  {30, 25, true}}) {
    const Bytes file = unsynchronised::image(random, columns, rows, subsampled);
    const int side = subsampled ? 16 : 8;
    const Bytes plan = plan_of(&decoder, file, crop(0, 0, columns * side, rows * side));
    ASSERT_GT(plan.size(), 0u);
    const Blob blob = make_blob(&decoder, file, spacing_of(plan));
    ASSERT_GT(blob.bytes.size(), 0u);
    for (const bool guessed : {false, true}) {
      emulate::Device device(plan);
      const uint32_t subsequences = device.plan().subsequences;
      const bool reached = subsequences <= kReach;
      EXPECT_EQ(device.synchronise(kThreads, ts::jpeg::kSyncLaunches, false, guessed), reached)
          << subsequences;
      // Photographs need 2.5.
      EXPECT_GT(device.passes, (guessed ? 10 : 40) * subsequences);
      EXPECT_LE(device.passes, kReach * (kThreads + 1) / 2 * ts::jpeg::sync_blocks(device.plan()));
      if (!reached) continue;
      EXPECT_EQ(other_entries(device, blob.bytes), 0);
      ++found;
    }
  }
  EXPECT_EQ(found, 6);
}

// For a few images, paths save the rounds in which the states of 4:2:0 find the right block.
TEST(Sync, PathsSpareRounds) {
  Random random(98);
  JpegDecoder decoder(1 << 24);
  uint64_t plain = 0, guessed = 0;
  for (int i = 0; i < 8; ++i) {
    JpegOptions options;
    options.quality = 95;
    options.sampling[0][0] = options.sampling[0][1] = 2;
    const Bytes file = encode_jpeg(picture(random, 480, 400), options);
    const Bytes plan = plan_of(&decoder, file, crop(0, 0, 480, 400));
    ASSERT_GT(plan.size(), 0u);
    emulate::Device one(plan), other(plan);
    ASSERT_TRUE(one.synchronise(1 << 20, 1));
    ASSERT_TRUE(other.synchronise(1 << 20, 1, false, true));
    EXPECT_TRUE(one.starts == other.starts);
    plain += one.rounds;
    guessed += other.rounds;
  }
  EXPECT_GT(plain, 2 * guessed) << guessed;  // 109 and 46
}

// A scan with too few bits for the blocks of its frame is left to the host: a plan of it would have
// entries for all of them.
TEST(Sync, FewerBitsThanBlocksHaveNoPlan) {
  JpegDecoder decoder(1 << 24);
  Image image{64, 64, 1, Bytes(size_t{64} * 64, 250)};
  Bytes file = encode_jpeg(image, {});
  const Bytes plan = plan_of(&decoder, file, crop(0, 0, 8, 8));
  ASSERT_GT(plan.size(), 0u);
  const uint32_t bytes = reinterpret_cast<const ts::jpeg::Plan*>(plan.data())->scan_bytes;
  const uint8_t marker[] = {0xFF, 0xC0};
  const auto frame = std::search(file.begin(), file.end(), marker, marker + 2);
  ASSERT_NE(frame, file.end());
  const auto claim = [&](uint32_t blocks) {
    const uint32_t width = 8 * blocks;
    frame[5] = 0;
    frame[6] = 8;
    frame[7] = static_cast<uint8_t>(width >> 8);
    frame[8] = static_cast<uint8_t>(width);
    return plan_of(&decoder, file, crop(0, 0, 8, 8)).size();
  };
  EXPECT_GT(claim(4 * bytes), 0u);  // two bits a block
  EXPECT_EQ(claim(4 * bytes + 1), 0u);
}

TEST(Sync, ManyFillBytesAreTheHosts) {
  Random random(96);
  JpegDecoder decoder(1 << 24);
  JpegOptions options;
  options.restart_interval = 3;
  const Bytes file = encode_jpeg(picture(random, 200, 150), options);
  size_t marker = 0;
  for (size_t i = 0; i + 1 < file.size(); ++i) {
    if (file[i] == 0xFF && file[i + 1] == 0xD0 + 5) marker = i;
  }
  ASSERT_GT(marker, 0u);
  for (const auto& [fill, good] : {std::pair<size_t, bool>{60, true}, {64, false}, {5000, false}}) {
    Bytes filled = file;
    filled.insert(filled.begin() + static_cast<std::ptrdiff_t>(marker), fill, 0xFF);
    const Bytes plan = plan_of(&decoder, filled, crop(0, 0, 200, 150));
    ASSERT_GT(make_blob(&decoder, filled, spacing_of(plan)).bytes.size(), 0u);
    emulate::Device device(plan);
    EXPECT_EQ(device.synchronise(128, 4), good) << fill;
  }
}

TEST(Sync, WhatOnlyTheHostDecodesHasNoPlan) {
  Random random(95);
  JpegDecoder decoder(1 << 24);
  JpegOptions options;
  options.coding = Coding::kProgressive;
  const Bytes progressive = encode_jpeg(picture(random, 100, 80), options);
  EXPECT_EQ(plan_of(&decoder, progressive, crop(0, 0, 100, 80)).size(), 0u);
  ts_image_geometry huge = crop(0, 0, 100, 80);  // more pixels than a plan can count
  huge.resize_width = huge.resize_height = huge.window_width = huge.window_height = 65535;
  const Bytes file = encode_jpeg(picture(random, 100, 80), {});
  EXPECT_EQ(plan_of(&decoder, file, huge).size(), 0u);
  EXPECT_THROW(plan_of(&decoder, Bytes(file.begin(), file.end() - 100), crop(0, 0, 100, 80)),
               ts::Failure);
}

#define ASSERT_NO_ERROR(call) ASSERT_EQ(Outcome(call).message, "")

// Plans as ts_image_plan_scan does.
Bytes search_plan(JpegDecoder* decoder, const Bytes& file, const ts_image_geometry& geometry,
                  ts_image_search* search) {
  const ts_image_info info = jpeg_header(file.data(), file.size());
  const ScanOptions options = {true, search};
  PlanMemory to = {};
  Bytes plan(decoder->plan_scan(file.data(), file.size(), info, geometry, &to, options));
  to = {plan.data(), plan.size(), nullptr};
  decoder->plan_scan(file.data(), file.size(), info, geometry, &to, options);
  return plan;
}

// The blob of the entries found in a file equals the one that its whole decode makes, and so does
// its proof.
TEST(Sync, BlobsAreTheHosts) {
  Random random(98);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  int packed = 0, none = 0, given_up = 0;
  for (int i = 0; i < 400 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    const int times = uniform(random, 1, 8);  // small files have no blob
    width *= times;
    height *= times;
    const Bytes file = usual(random, kKinds[random() % 8], width, height);
    const Blob blob = make_blob(&decoder, file, 0);
    const ts_image_geometry g = draw_geometry(random, width, height, 90);
    ts_image_search search = {};
    Bytes memory(8 << 20);
    const auto skip = static_cast<size_t>(-reinterpret_cast<uintptr_t>(memory.data()) % 16);
    size_t at = 0, planned = 0;
    ts_image_plans plans = {memory.data() + skip, memory.size() - 16, nullptr};
    ASSERT_NO_ERROR(ts_image_plan_scan(host.get(), file.data(), file.size(), &g, plans, &search,
                                       &at, &planned));
    ASSERT_GT(planned, 0u);
    ASSERT_LE(planned, plans.bytes);
    EXPECT_EQ(at, 0u);
    emulate::Device device(Bytes(plans.data, plans.data + planned));
    if (!device.synchronise(ts::jpeg::kSyncThreads, ts::jpeg::kSyncLaunches)) {
      ++given_up;  // several blocks of threads, with bits that synchronise too slowly
      continue;
    }
    const ts::jpeg::Plan& plan = device.plan();
    ASSERT_EQ(search.entries, plan.entries);
    ASSERT_EQ(search.spacing, plan.spacing);
    ASSERT_TRUE(search.wanted == 0 || search.wanted % search.spacing == 0);
    const uint8_t* const found = device.base() + plan.entries_at;
    const size_t found_bytes = size_t{plan.entries} * ts::jpeg::kScanEntryBytes;
    Bytes made(1 << 16);
    ts_image_entries_made got = {};
    ASSERT_NO_ERROR(
        ts_image_pack_entries(&search, found, found_bytes, {made.data(), made.size(), 0}, &got));
    made.resize(got.bytes);
    ASSERT_EQ(made, blob.bytes) << width << " x " << height;
    ASSERT_EQ(got.proof, blob.proof);
    (got.bytes == 0 ? none : packed) += 1;
    if (got.bytes == 0) continue;
    Bytes small(got.bytes - 1, 7);
    const Bytes before = small;
    ASSERT_NO_ERROR(
        ts_image_pack_entries(&search, found, found_bytes, {small.data(), small.size(), 0}, &got));
    EXPECT_EQ(got.bytes, made.size());
    EXPECT_EQ(small, before);
    // Entries in an impossible order, as from a null device.
    const Bytes zeros(found_bytes);
    if (blob.bytes.size() < 100) continue;
    ASSERT_NO_ERROR(ts_image_pack_entries(&search, zeros.data(), zeros.size(),
                                          {small.data(), small.size(), 0}, &got));
    EXPECT_EQ(got.bytes, 0u);
  }
  EXPECT_GT(packed, 40);
  EXPECT_GT(none, 40);
  EXPECT_LT(given_up, packed / 10);
}

// Whichever bytes of a file change, a decoder that tolerates damage can decode a file that has a
// plan, and the pixels equal the host's unless the device flags the image.
TEST(Sync, PlannedFilesAreGood) {
  Random random(99);
  JpegDecoder decoder(1 << 24);
  const Decoder host = new_decoder();
  ASSERT_NO_ERROR(ts_image_decoder_set_damage(host.get(), TS_IMAGE_DAMAGE_WARN));
  int refused = 0, flagged = 0, good = 0;
  for (int i = 0; i < 4000 * rounds(); ++i) {
    int width, height;
    draw_size(random, &width, &height);
    Bytes file = usual(random, kKinds[random() % 8], width, height);
    const uint8_t marker[] = {0xFF, 0xDA};
    const auto scan = static_cast<size_t>(
        std::search(file.begin(), file.end(), marker, marker + 2) - file.begin());
    for (int changes = uniform(random, 0, 3); changes > 0; --changes) {
      const size_t in_scan = scan + random() % (file.size() - scan);
      const auto place = file.begin() + static_cast<std::ptrdiff_t>(in_scan);
      switch (random() % 10) {
        case 0:
        case 8:
        case 9:
          file[2 + random() % (scan - 2)] = static_cast<uint8_t>(random());
          break;
        case 1:
          file[file.size() - 1 - random() % 3] = static_cast<uint8_t>(random());
          break;
        case 2:
          file.erase(place, place + std::min<std::ptrdiff_t>(file.end() - place, random() % 40));
          break;
        case 3: {
          const uint8_t other[] = {0xFF, static_cast<uint8_t>(random())};
          file.insert(place, other, other + 2);
          break;
        }
        case 4:
          file.insert(file.end() - 2, random() % 5, static_cast<uint8_t>(random()));
          break;
        default:
          file[in_scan] = static_cast<uint8_t>(random());
      }
      if (file.size() < scan + 8) break;
    }
    Bytes plan;
    ts_image_geometry g = {};
    ts_image_search search = {};
    try {
      const ts_image_info info = jpeg_header(file.data(), file.size());
      if (info.width > 1000 || info.height > 1000 || info.progressive != 0) continue;
      g = draw_geometry(random, info.width, info.height, 90);
      plan = search_plan(&decoder, file, g, random() % 2 == 0 ? &search : nullptr);
    } catch (const ts::Failure&) {
    }
    if (plan.empty()) {
      ++refused;
      continue;
    }
    Image image;
    const Outcome outcome = decode(host.get(), file, g, &image);
    ASSERT_EQ(outcome.code, TS_ERROR_NONE) << i << ": " << outcome.message;
    emulate::Device device(plan);
    if (!device.synchronise(64, 20) || !device.entropy()) {
      ++flagged;
      continue;
    }
    ++good;
    ASSERT_STREQ(ts_image_decoder_tolerated(host.get()), "") << i;
    device.finish();
    ASSERT_EQ(device.result, image.pixels) << i;
  }
  EXPECT_GT(refused, 500);
  EXPECT_GT(flagged, 400);
  EXPECT_GT(good, 500);
}

// libjpeg-turbo warns about the header, so the image is damaged, whatever its scan contains.
TEST(Sync, OtherVersionsOfJfifHaveNoPlan) {
  Random random(101);
  JpegDecoder decoder(1 << 24);
  Bytes file = encode_jpeg(picture(random, 100, 80), {});
  EXPECT_GT(plan_of(&decoder, file, crop(0, 0, 100, 80)).size(), 0u);
  const uint8_t name[] = "JFIF";
  const auto version = std::search(file.begin(), file.end(), name, name + 5) + 5;
  ASSERT_EQ(*version, 1);
  *version = 2;
  EXPECT_THROW(plan_of(&decoder, file, crop(0, 0, 100, 80)), ts::Failure);
}

TEST(Sync, OtherSearchesAreRefused) {
  Random random(100);
  const Decoder host = new_decoder();
  const Bytes file = usual(random, kKinds[2], 150, 150);
  const ts_image_geometry g = crop(0, 0, 150, 150);
  ts_image_search search = {};
  size_t at = 0, planned = 0;
  ASSERT_NO_ERROR(ts_image_plan_scan(host.get(), file.data(), file.size(), &g,
                                     {nullptr, 0, nullptr}, &search, &at, &planned));
  ASSERT_GT(planned, 0u);
  Bytes found(size_t{search.entries} * ts::jpeg::kScanEntryBytes);
  ts_image_entries_made made = {};
  const auto refusal = [&](const ts_image_search* of, size_t bytes, ts_image_entries_made* to) {
    const Outcome outcome(ts_image_pack_entries(of, found.data(), bytes, {nullptr, 0, 0}, to));
    EXPECT_EQ(outcome.code, TS_ERROR_INVALID_ARGUMENT);
    return outcome.message;
  };
  const auto has = [](const std::string& message, const char* part) {
    return message.find(part) != std::string::npos;
  };
  EXPECT_TRUE(has(refusal(nullptr, found.size(), &made), "search is NULL"));
  EXPECT_TRUE(has(refusal(&search, found.size() - 1, &made), "another size"));
  EXPECT_TRUE(has(refusal(&search, found.size(), nullptr), "made is NULL"));
  ts_image_search other = search;
  other.spacing = 0;
  EXPECT_TRUE(has(refusal(&other, found.size(), &made), "not one of"));
  other = search;
  other.scan = other.file_bytes + 1;
  EXPECT_TRUE(has(refusal(&other, found.size(), &made), "not one of"));
  other = search;
  ++other.entries;
  EXPECT_TRUE(has(refusal(&other, found.size(), &made), "not one of"));
}

}  // namespace
