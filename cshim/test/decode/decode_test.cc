// The decoder of plans, on a GPU and on the CPU, gives the pixels of the host's decoder, byte for
// byte.
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <tuple>

#include "deflate/streams.h"
#include "image/steps.h"
#include "image/unsynchronised.h"
#include "jpeg/plan.h"
#include "jpeg/sync.h"
#include "support.h"

namespace {

using namespace samples;

constexpr size_t kAlign = 16;
constexpr uint8_t kPoison = 0xa5;
constexpr size_t kGap = 6;  // between the entries of some images

struct Job {
  Bytes file, blob, expected;
  ts_image_geometry geometry;
  Ops ops = {};  // operations on the pixels
};

// Returns a file with its entries (or none), a geometry, and the host's pixels.
Job job_of(Random& random, ts_image_decoder* host, Bytes file, const ts_image_geometry& geometry,
           bool entries) {
  Job job;
  job.file = std::move(file);
  job.geometry = geometry;
  if (entries) {
    job.blob.resize(1 << 20);
    ts_image_entries_made made = {};
    const int spacings[] = {1, 2, 3, 5, 8, 16, 60};
    EXPECT_OK(ts_image_make_entries(host, job.file.data(), job.file.size(),
                                    {job.blob.data(), job.blob.size(), spacings[random() % 7]},
                                    &made));
    job.blob.resize(made.bytes);
  }
  Image image;
  const Outcome outcome = decode(host, job.file, job.geometry, &image);
  EXPECT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
  job.expected = image.pixels;
  return job;
}

// Returns a job with a file of the given size, and a geometry with results of at most this many
// pixels a side.
Job draw_job_of(Random& random, ts_image_decoder* host, const Kind& kind, int width, int height,
                int side, bool entries) {
  Bytes file = usual(random, kind, width, height);
  return job_of(random, host, std::move(file), draw_geometry(random, width, height, side), entries);
}

Job draw_job(Random& random, ts_image_decoder* host, const Kind& kind, bool entries = true) {
  int width, height;
  draw_size(random, &width, &height);
  if (random() % 4 == 0) {
    width = uniform(random, 200, 500);
    height = uniform(random, 200, 400);
  }
  return draw_job_of(random, host, kind, width, height, 250, entries);
}

struct FreeGpuDecoder {
  void operator()(ts_gpu_decoder* decoder) const { ts_gpu_decoder_free(decoder); }
};
using GpuDecoder = std::unique_ptr<ts_gpu_decoder, FreeGpuDecoder>;

GpuDecoder new_gpu_decoder(int32_t device, int64_t images, size_t staging, size_t scratch) {
  ts_gpu_decoder* decoder = nullptr;
  EXPECT_OK(ts_gpu_decoder_new(device, images, staging, scratch, &decoder));
  return GpuDecoder(decoder);
}

// A batch in host memory.
struct Staged {
  int32_t device;
  test::HostMemory memory;
  size_t capacity;
  size_t used;
  std::vector<ts_gpu_decode_image> images;
  size_t result_bytes = 0;

  Staged(int32_t on, size_t bytes, int64_t count)
      : device(on), memory(on, bytes), capacity(bytes), used(ts_gpu_decoder_head_bytes(count)) {}

  bool add(ts_image_decoder* host, const Job& job) {
    size_t planned = 0;
    uint8_t* const to = memory.data() + used;
    EXPECT_OK(ts_image_plan_segments(host, job.file.data(), job.file.size(), &job.geometry,
                                     {job.blob.data(), job.blob.size()}, nullptr, to,
                                     capacity - used, &planned));
    if (planned == 0 || planned > capacity - used) return false;
    EXPECT_OK(ts_image_plan_augment(to, capacity - used, job.ops.data(),
                                    static_cast<int64_t>(job.ops.size()), &planned));
    if (planned == 0 || planned > capacity - used) return false;
    images.push_back({used, result_bytes});
    used += (planned + kAlign - 1) / kAlign * kAlign;
    result_bytes += job.expected.size();
    return true;
  }
  ts::jpeg::Plan plan(size_t image) const {
    ts::jpeg::Plan plan;
    std::memcpy(&plan, memory.data() + images[image].plan, sizeof plan);
    return plan;
  }
  // Reports whether the search surely settles the image, even if no guess reaches a true state, as
  // in noise of the highest quality. Otherwise the host may have to decode the image.
  bool surely_found(size_t image) const {
    return plan(image).subsequences <= ts::jpeg::kSyncLaunches * ts::jpeg::kSyncThreads;
  }
};

// Decodes the batch on a new stream, and returns the results and the flags.
Bytes run(ts_gpu_decoder* decoder, const Staged& staged, std::vector<int32_t>* failed) {
  const ts_stream stream = test::stream_on(staged.device);
  const auto count = static_cast<int64_t>(staged.images.size());
  test::Tensor results =
      test::empty({static_cast<int64_t>(staged.result_bytes)}, TS_DTYPE_UINT8, staged.device);
  const test::HostMemory flags(staged.device, staged.images.size() * sizeof(int32_t));
  // The results were allocated on another stream, which may still use their memory.
  test::synchronize(staged.device);
  EXPECT_OK(ts_gpu_decoder_run(decoder, staged.memory.data(), staged.used, staged.images.data(),
                               count, results, reinterpret_cast<int32_t*>(flags.data()), stream));
  test::synchronize(staged.device);
  failed->resize(staged.images.size());
  std::memcpy(failed->data(), flags.data(), failed->size() * sizeof(int32_t));
  return test::read<uint8_t>(results);
}

TEST(Decode, WithoutAGpuThereIsNoDecoder) {
  if (ts_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  ts_gpu_decoder* decoder = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU", ts_gpu_decoder_new(0, 1, 1 << 20, 1 << 20, &decoder));
  EXPECT_EQ(decoder, nullptr);
  ts_gpu_decoder_free(nullptr);
}

class DecodeOn : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (GetParam() != TS_DEVICE_CPU) NEEDS_GPUS(1);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpu, DecodeOn, testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Cpu, DecodeOn, testing::Values(TS_DEVICE_CPU));

TEST_P(DecodeOn, CropsEqualTheHostsDecoder) {
  Random random(81);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 96;
  // The small scratch memory decodes a batch in parts.
  for (const size_t scratch : {size_t{512} << 20, size_t{6} << 20}) {
    const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, scratch);
    ASSERT_NE(decoder, nullptr);
    for (int batch = 0; batch < 12 * rounds(); ++batch) {
      Staged staged(GetParam(), 32 << 20, kBatch);
      std::vector<Job> jobs;
      for (int64_t i = 0; i < kBatch; ++i) {
        Job job = draw_job(random, host.get(), kKinds[random() % 8]);
        ASSERT_TRUE(staged.add(host.get(), job));
        jobs.push_back(std::move(job));
      }
      std::vector<int32_t> failed;
      const Bytes results = run(decoder.get(), staged, &failed);
      for (size_t i = 0; i < jobs.size(); ++i) {
        ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i;
        const auto* got = results.data() + staged.images[i].result;
        ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
            << "batch " << batch << ", image " << i << ": " << jobs[i].geometry.resize_width
            << " x " << jobs[i].geometry.resize_height;
      }
    }
  }
}

// The kernels' code for cases that ordinary photographs do not reach: an inverse DCT that
// overflows, and rows without room in shared memory.
TEST_P(DecodeOn, AbsurdQuantisersAndWideCropsGiveTheHostsPixels) {
  Random random(87);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 96;
  constexpr int kWidth = ts::jpeg::kStripPixels + 40;
  constexpr int kHeight = 24;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, size_t{512} << 20);
  ASSERT_NE(decoder, nullptr);
  for (int batch = 0; batch < 6 * rounds(); ++batch) {
    Staged staged(GetParam(), 32 << 20, kBatch);
    std::vector<Job> jobs;
    for (int64_t i = 0; i < kBatch; ++i) {
      const Kind& kind = kKinds[random() % 8];
      const bool wide = i % 8 == 0;
      int width = kWidth, height = kHeight;
      if (!wide) draw_size(random, &width, &height);
      Bytes file = usual(random, kind, width, height);
      if (!wide || random() % 2 == 0) make_quantisers_absurd(random, &file);
      ts_image_geometry g = draw_geometry(random, width, height, 150);
      if (wide && g.orientation < 5) {  // otherwise a row of the crop is a column of the file
        g.crop_x = static_cast<int32_t>(random() % 40);
        g.crop_width = kWidth - g.crop_x;
      }
      Job job = job_of(random, host.get(), std::move(file), g, true);
      ASSERT_TRUE(staged.add(host.get(), job));
      jobs.push_back(std::move(job));
    }
    std::vector<int32_t> failed;
    const Bytes results = run(decoder.get(), staged, &failed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i;
      const auto* got = results.data() + staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
          << "batch " << batch << ", image " << i << ", crop of " << jobs[i].geometry.crop_width
          << " pixels";
    }
  }
}

// Operations on the pixels, in a batch with images that have none.
TEST_P(DecodeOn, AugmentedCropsEqualTheHosts) {
  Random random(86);
  const Decoder host = new_decoder();
  const HostAugmenter augmenter = new_host_augmenter();
  constexpr int64_t kBatch = 48;
  for (const size_t scratch : {size_t{512} << 20, size_t{6} << 20}) {
    const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, scratch);
    ASSERT_NE(decoder, nullptr);
    for (int batch = 0; batch < 6 * rounds(); ++batch) {
      Staged staged(GetParam(), 32 << 20, kBatch);
      std::vector<Job> jobs;
      for (int64_t i = 0; i < kBatch; ++i) {
        Job job = draw_job(random, host.get(), kKinds[random() % 8]);
        const Image image = {job.geometry.window_width, job.geometry.window_height, 3,
                             job.expected};
        job.ops = draw_steps(random, 4, image.width, image.height);
        job.expected = run_on_host(augmenter.get(), image, job.ops);
        ASSERT_TRUE(staged.add(host.get(), job));
        jobs.push_back(std::move(job));
      }
      std::vector<int32_t> failed;
      const Bytes results = run(decoder.get(), staged, &failed);
      for (size_t i = 0; i < jobs.size(); ++i) {
        ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i;
        const auto* got = results.data() + staged.images[i].result;
        ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
            << "batch " << batch << ", image " << i << ": " << jobs[i].ops.size() << " operations";
      }
    }
  }
}

// Arbitrary bytes replace some images' segments or entries. They are flagged or not, nothing
// faults, and the other images are right. Every position of a batch is damaged once.
TEST_P(DecodeOn, DamagedSegmentsDisturbNoNeighbour) {
  Random random(82);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 64;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, size_t{256} << 20);
  ASSERT_NE(decoder, nullptr);
  int64_t flagged = 0;
  for (int batch = 0; batch < 20 * rounds(); ++batch) {
    Staged staged(GetParam(), 32 << 20, kBatch);
    std::vector<Job> jobs;
    for (int64_t i = 0; i < kBatch; ++i) {
      Job job = draw_job(random, host.get(), kKinds[random() % 8]);
      ASSERT_TRUE(staged.add(host.get(), job));
      jobs.push_back(std::move(job));
    }
    for (size_t i = batch % 2; i < jobs.size(); i += 2) {
      uint8_t* const plan = staged.memory.data() + staged.images[i].plan;
      const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(plan);
      // No entries: one segment starts with the scan.
      const uint32_t entries = header.segments_at - header.entries_at;
      const bool forge = entries != 0 && random() % 4 == 0;
      const uint32_t begin = forge ? header.entries_at : header.scan_at;
      const uint32_t bytes = forge ? entries : header.scan_bytes;
      for (int changes = uniform(random, 1, 60); changes > 0; --changes) {
        uint8_t& byte = plan[begin + random() % bytes];
        byte = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
      }
    }
    std::vector<int32_t> failed;
    const Bytes results = run(decoder.get(), staged, &failed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (i % 2 == static_cast<size_t>(batch % 2)) {
        flagged += failed[i];
        continue;
      }
      ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i;
      const auto* got = results.data() + staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
          << "batch " << batch << ", image " << i;
    }
  }
  EXPECT_GT(flagged, 20 * kBatch / 4);
}

// Damaged images give the same pixels whatever was decoded before: no memory is zeroed, so even
// blocks that a segment does not reach must be written.
TEST_P(DecodeOn, DamagedSegmentsShowNothingOfEarlierBatches) {
  Random random(87);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 16;
  constexpr size_t kScratch = 128 << 20;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, kScratch);
  ASSERT_NE(decoder, nullptr);
  // Fills at least the memory that the damaged batches need, each time with other values.
  const auto fill = [&] {
    Staged staged(GetParam(), 32 << 20, kBatch);
    for (int64_t i = 0; i < kBatch; ++i) {
      Job job = draw_job_of(random, host.get(), kKinds[random() % 8], 500, 400, 250, true);
      job.geometry.crop_x = job.geometry.crop_y = 0;
      job.geometry.crop_width = job.geometry.orientation >= 5 ? 400 : 500;
      job.geometry.crop_height = job.geometry.orientation >= 5 ? 500 : 400;
      if (!staged.add(host.get(), job)) FAIL() << "image " << i << " has no room";
    }
    std::vector<int32_t> failed;
    run(decoder.get(), staged, &failed);
  };
  int64_t flagged = 0;
  int64_t tried = 0;
  for (int batch = 0; batch < 4 * rounds(); ++batch) {
    Staged staged(GetParam(), 32 << 20, kBatch);
    for (int64_t i = 0; i < kBatch; ++i) {
      ASSERT_TRUE(staged.add(host.get(), draw_job(random, host.get(), kKinds[random() % 8])));
    }
    for (size_t i = 0; i < staged.images.size(); ++i) {
      if (staged.plan(i).subsequences != 0) continue;  // a search's remains depend on timing
      uint8_t* const plan = staged.memory.data() + staged.images[i].plan;
      const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(plan);
      for (int changes = uniform(random, 1, 60); changes > 0; --changes) {
        uint8_t& byte = plan[header.scan_at + random() % header.scan_bytes];
        byte = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
      }
      ++tried;
    }
    fill();
    std::vector<int32_t> failed, again;
    const Bytes first = run(decoder.get(), staged, &failed);
    fill();
    const Bytes second = run(decoder.get(), staged, &again);
    ASSERT_EQ(failed, again) << "batch " << batch;
    for (size_t i = 0; i < staged.images.size(); ++i) {
      flagged += failed[i];
      const size_t begin = staged.images[i].result;
      const size_t end =
          i + 1 < staged.images.size() ? staged.images[i + 1].result : staged.result_bytes;
      ASSERT_EQ(std::memcmp(first.data() + begin, second.data() + begin, end - begin), 0)
          << "batch " << batch << ", image " << i << ", which is flagged: " << failed[i];
    }
  }
  EXPECT_GT(flagged, tried / 2);
}

// Plans without entries, in a batch with plans that have entries.
TEST_P(DecodeOn, WholeScansEqualTheHostsDecoder) {
  Random random(84);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 48;  // under racecheck this takes a hundred times as long
  int left = 0;                   // images left to the host
  for (const size_t scratch : {size_t{512} << 20, size_t{8} << 20}) {
    const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 48 << 20, scratch);
    ASSERT_NE(decoder, nullptr);
    for (int batch = 0; batch < 2 * rounds(); ++batch) {
      Staged staged(GetParam(), 48 << 20, kBatch);
      std::vector<Job> jobs;
      for (int64_t i = 0; i < kBatch; ++i) {
        Job job = draw_job(random, host.get(), kKinds[random() % 8], random() % 4 == 0);
        ASSERT_TRUE(staged.add(host.get(), job));
        jobs.push_back(std::move(job));
      }
      std::vector<int32_t> failed;
      const Bytes results = run(decoder.get(), staged, &failed);
      for (size_t i = 0; i < jobs.size(); ++i) {
        if (failed[i] != 0 && !staged.surely_found(i)) {
          ++left;
          continue;
        }
        ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i << ", "
                                << jobs[i].file.size() << " bytes, entries " << jobs[i].blob.size();
        const auto* got = results.data() + staged.images[i].result;
        ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
            << "batch " << batch << ", image " << i << ", entries " << jobs[i].blob.size();
      }
    }
  }
  EXPECT_LE(left, rounds());
}

// The entries that a run found in whole scans are copied back, and give the blobs that the host
// makes.
TEST_P(DecodeOn, FoundEntriesAreTheHosts) {
  Random random(85);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 48;
  constexpr size_t kScratch = 8 << 20;
  constexpr int64_t kMaxImages = 65535;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kMaxImages, 48 << 20, kScratch);
  ASSERT_NE(decoder, nullptr);
  int packed = 0;
  for (int batch = 0; batch < 2 * rounds(); ++batch) {
    Staged staged(GetParam(), 48 << 20, kBatch);
    std::vector<Job> jobs;
    std::vector<ts_image_search> searches;
    std::vector<ts_gpu_decode_entries> entries;
    size_t wanted = 0;
    for (int64_t i = 0; i < kBatch; ++i) {
      const bool known = i % 4 == 0;
      Job job = draw_job(random, host.get(), kKinds[random() % 8], known);
      ts_image_search search = {};
      if (known) {
        ASSERT_TRUE(staged.add(host.get(), job));
      } else {
        size_t at = 0, planned = 0;
        ASSERT_OK(ts_image_plan_scan(
            host.get(), job.file.data(), job.file.size(), &job.geometry,
            {staged.memory.data() + staged.used, staged.capacity - staged.used, nullptr}, &search,
            &at, &planned));
        ASSERT_GT(planned, 0u);
        const size_t bytes = size_t{search.entries} * ts::jpeg::kScanEntryBytes;
        entries.push_back({staged.used, wanted, bytes});
        wanted += bytes + (i % 5 == 0 ? kGap : 0);
        staged.images.push_back({staged.used, staged.result_bytes});
        staged.used += (planned + kAlign - 1) / kAlign * kAlign;
        staged.result_bytes += job.expected.size();
        searches.push_back(search);
      }
      jobs.push_back(std::move(job));
    }
    const ts_stream stream = test::stream_on(staged.device);
    test::Tensor results =
        test::empty({static_cast<int64_t>(staged.result_bytes)}, TS_DTYPE_UINT8, staged.device);
    const test::HostMemory flags(staged.device, kBatch * sizeof(int32_t));
    // Often enough to fill the scratch memory, from which they are copied.
    const size_t turns = 1 + (batch == 0 ? kScratch / wanted + 1 : 0);
    const size_t once = entries.size();
    for (size_t turn = 1; turn < turns; ++turn) {
      for (size_t i = 0; i < once; ++i) {
        entries.push_back({entries[i].plan, entries[i].to + turn * wanted, entries[i].bytes});
      }
    }
    ASSERT_LE(entries.size(), static_cast<size_t>(kMaxImages));
    const test::HostMemory found(staged.device, turns * wanted);
    std::memset(found.data(), kPoison, turns * wanted);
    test::synchronize(staged.device);
    EXPECT_OK(ts_gpu_decoder_run(decoder.get(), staged.memory.data(), staged.used,
                                 staged.images.data(), kBatch, results,
                                 reinterpret_cast<int32_t*>(flags.data()), stream));
    const auto count = static_cast<int64_t>(entries.size());
    EXPECT_OK(ts_gpu_decoder_copy_entries(decoder.get(), staged.memory.data(), staged.used,
                                          entries.data(), count, found.data(), turns * wanted,
                                          stream));
    const auto refused = [&](ts_gpu_decode_entries other, size_t room, const char* text) {
      EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, text,
                   ts_gpu_decoder_copy_entries(decoder.get(), staged.memory.data(), staged.used,
                                               &other, 1, found.data(), room, stream));
    };
    refused(entries[0], entries[0].bytes - 1, "no room");
    refused({entries[0].plan, SIZE_MAX, entries[0].bytes}, wanted, "no room");
    refused({entries[0].plan, 0, entries[0].bytes - 1}, wanted, "so many entries");
    refused({staged.images[0].plan, 0, 10}, wanted, "no plan of ts_image_plan_scan");
    refused({entries[0].plan + 8, 0, entries[0].bytes}, wanted, "inside the staging memory");
    refused({staged.used, 0, entries[0].bytes}, wanted, "inside the staging memory");
    test::synchronize(staged.device);
    for (size_t turn = 1; turn < turns; ++turn) {
      ASSERT_EQ(std::memcmp(found.data(), found.data() + turn * wanted, wanted), 0) << turn;
    }
    for (size_t k = 0; k < once; ++k) {
      const size_t end = entries[k].to + entries[k].bytes;
      for (size_t at = end; at < (k + 1 < once ? entries[k + 1].to : wanted); ++at) {
        ASSERT_EQ(found.data()[at], kPoison) << "byte " << at;
      }
    }
    for (size_t i = 0, k = 0; i < jobs.size(); ++i) {
      if (reinterpret_cast<const int32_t*>(flags.data())[i] != 0) {
        ASSERT_TRUE(i % 4 != 0 && !staged.surely_found(i)) << i;
        ++k;
        continue;
      }
      if (i % 4 == 0) continue;
      Bytes want(1 << 16), got(1 << 16);
      ts_image_entries_made makes = {}, made = {};
      EXPECT_OK(ts_image_make_entries(host.get(), jobs[i].file.data(), jobs[i].file.size(),
                                      {want.data(), want.size(), 0}, &makes));
      EXPECT_OK(ts_image_pack_entries(&searches[k], found.data() + entries[k].to, entries[k].bytes,
                                      {got.data(), got.size(), 0}, &made));
      ASSERT_EQ(made.bytes, makes.bytes);
      ASSERT_EQ(made.proof, makes.proof);
      ASSERT_EQ(std::memcmp(got.data(), want.data(), made.bytes), 0);
      packed += made.bytes != 0;
      ++k;
    }
  }
  EXPECT_GT(packed, 10);
}

// Images whose search takes longest, among others. The host decodes those whose search does not
// finish.
TEST_P(DecodeOn, UnsynchronisedImagesEqualTheHosts) {
  const Decoder host = new_decoder();
  Random random(28);
  constexpr int64_t kBatch = 12;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 48 << 20, size_t{256} << 20);
  Staged staged(GetParam(), 48 << 20, kBatch);
  std::vector<Job> jobs;
  for (int64_t i = 0; i < kBatch; ++i) {
    Job job = draw_job(random, host.get(), kKinds[i % 8], false);
    if (i % 3 != 0) {
      const bool subsampled = i % 2 == 0;
      const int side = subsampled ? 16 : 8;
      const bool large = i % 6 == 5;
      const int columns = large ? 60 : 20;
      const int rows = large ? 50 : 15;
      job.file = unsynchronised::image(random, columns, rows, subsampled);
      job.geometry = draw_geometry(random, columns * side, rows * side, 250);
      Image image;
      const Outcome outcome = decode(host.get(), job.file, job.geometry, &image);
      ASSERT_EQ(outcome.code, TS_ERROR_NONE) << outcome.message;
      job.expected = image.pixels;
    }
    ASSERT_TRUE(staged.add(host.get(), job));
    jobs.push_back(std::move(job));
  }
  std::vector<int32_t> failed;
  const Bytes results = run(decoder.get(), staged, &failed);
  for (size_t i = 0; i < jobs.size(); ++i) {
    ASSERT_EQ(failed[i], i % 6 == 5 ? 1 : 0) << i;
    if (failed[i] != 0) continue;
    const uint8_t* const got = results.data() + staged.images[i].result;
    ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0) << i;
  }
}

// Arbitrary bytes replace some scans: the other images are right, and nothing faults.
TEST_P(DecodeOn, DamagedScansDisturbNoNeighbour) {
  Random random(85);
  const Decoder host = new_decoder();
  constexpr int64_t kBatch = 32;
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), kBatch, 32 << 20, size_t{256} << 20);
  ASSERT_NE(decoder, nullptr);
  int64_t flagged = 0;
  for (int batch = 0; batch < 4 * rounds(); ++batch) {
    Staged staged(GetParam(), 32 << 20, kBatch);
    std::vector<Job> jobs;
    for (int64_t i = 0; i < kBatch; ++i) {
      Job job = draw_job(random, host.get(), kKinds[random() % 8], false);
      ASSERT_TRUE(staged.add(host.get(), job));
      jobs.push_back(std::move(job));
    }
    for (size_t i = batch % 2; i < jobs.size(); i += 2) {
      uint8_t* const plan = staged.memory.data() + staged.images[i].plan;
      const auto& header = *reinterpret_cast<const ts::jpeg::Plan*>(plan);
      const bool noise = random() % 4 == 0;  // nothing synchronises
      for (int changes = noise ? static_cast<int>(header.scan_bytes) : uniform(random, 1, 60);
           changes > 0; --changes) {
        uint8_t& byte = plan[header.scan_at + random() % header.scan_bytes];
        byte = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
      }
    }
    std::vector<int32_t> failed;
    const Bytes results = run(decoder.get(), staged, &failed);
    for (size_t i = 0; i < jobs.size(); ++i) {
      if (i % 2 == static_cast<size_t>(batch % 2)) {
        flagged += failed[i];
        continue;
      }
      if (failed[i] != 0 && !staged.surely_found(i)) continue;
      ASSERT_EQ(failed[i], 0) << "batch " << batch << ", image " << i;
      const auto* got = results.data() + staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, jobs[i].expected.data(), jobs[i].expected.size()), 0)
          << "batch " << batch << ", image " << i;
    }
  }
  EXPECT_GT(flagged, 4 * kBatch / 4);
}

// Images in deflate streams and in mapped files, in a batch with images in plans.
struct StagedMembers {
  Staged staged;
  std::vector<Job> jobs;
  std::vector<ts_gpu_decode_member> members;
  std::vector<uint32_t> checksums;
  size_t rooms = 0;
  std::vector<ts_gpu_decode_file> files;
  std::vector<uint64_t> key;  // of the files' digests
};

constexpr size_t kMemberBatch = 24;
constexpr size_t kMemberStaging = 16 << 20;

StagedMembers new_members(int32_t device, size_t images) {
  StagedMembers batch{Staged(device, kMemberStaging, 0), {}, {}, {}, 0, {}, {}};
  const auto count = static_cast<int64_t>(images);
  batch.staged.used = ts_gpu_decoder_reading_head_bytes(count, count, count);
  return batch;
}

// Stages the batch's last job in its own deflate stream, which starts some bytes before the file
// and continues after it.
void add_member(Random& random, ts_image_decoder* host, StagedMembers* batch) {
  Staged& staged = batch->staged;
  const Job& job = batch->jobs.back();
  const size_t scan = job.blob[20] | size_t{job.blob[21]} << 8;  // image/entries.h
  const ts_image_head head = {job.file.data(), scan, job.file.size(), scan};
  size_t planned = 0;
  EXPECT_OK(ts_image_plan_head(host, &head, &job.geometry, {job.blob.data(), job.blob.size()},
                               staged.memory.data() + staged.used, staged.capacity - staged.used,
                               &planned));
  EXPECT_GT(planned, 0u);
  ts_gpu_decode_member member = {};
  member.image = staged.images.size();
  staged.images.push_back({staged.used, staged.result_bytes});
  staged.used += planned;
  staged.result_bytes += job.expected.size();

  Bytes content(random() % 2000);
  for (uint8_t& byte : content) byte = static_cast<uint8_t>(random());
  member.range.skip = content.empty() ? 0 : random() % content.size();
  member.scan = content.size() - member.range.skip + scan;
  content.insert(content.end(), job.file.begin(), job.file.end());
  member.range.bytes = content.size() - member.range.skip;
  const auto* const range = content.data() + member.range.skip;
  batch->checksums.push_back(
      static_cast<uint32_t>(crc32(0, range, static_cast<uInt>(member.range.bytes))));
  content.resize(content.size() + random() % 2000, 7);
  const Bytes stream = streams::deflated(content, 6, Z_DEFAULT_STRATEGY);
  ASSERT_LE(stream.size(), staged.capacity - staged.used);
  std::memcpy(staged.memory.data() + staged.used, stream.data(), stream.size());
  member.range.input = staged.used;
  member.range.input_bytes = stream.size();
  member.range.room = batch->rooms;
  staged.used += (stream.size() + kAlign - 1) / kAlign * kAlign;
  batch->rooms += (TS_INFLATER_WINDOW_BYTES + member.range.skip + member.range.bytes + 2 * kAlign) /
                  kAlign * kAlign;
  batch->members.push_back(member);
}

StagedMembers draw_members(int32_t device, Random& random, ts_image_decoder* host) {
  StagedMembers batch = new_members(device, kMemberBatch);
  for (size_t i = 0; i < kMemberBatch; ++i) {
    batch.jobs.push_back(draw_job(random, host, kKinds[random() % 8]));
    if (i % 3 == 2) {
      EXPECT_TRUE(batch.staged.add(host, batch.jobs.back()));
    } else {
      add_member(random, host, &batch);
    }
  }
  return batch;
}

GpuDecoder new_inflating_decoder(int32_t device, size_t rooms, size_t images = kMemberBatch) {
  ts_gpu_decoder* decoder = nullptr;
  EXPECT_OK(ts_gpu_decoder_new_inflating(device, static_cast<int64_t>(images), kMemberStaging,
                                         256 << 20, rooms, &decoder));
  return GpuDecoder(decoder);
}

// Decodes the batch on a new stream into poisoned memory.
Bytes run_members(ts_gpu_decoder* decoder, const StagedMembers& batch, std::vector<int32_t>* failed,
                  std::vector<ts_gpu_inflate_result>* inflated) {
  const Staged& staged = batch.staged;
  const ts_stream stream = test::stream_on(staged.device);
  const test::Tensor poison =
      test::make(Bytes(staged.result_bytes, kPoison), {static_cast<int64_t>(staged.result_bytes)});
  test::Tensor results;
  EXPECT_OK(ts_tensor_to(poison, staged.device, -1, false, results.out()));
  const test::HostMemory flags(staged.device, staged.images.size() * sizeof(int32_t));
  const test::HostMemory outcomes(staged.device,
                                  batch.members.size() * sizeof(ts_gpu_inflate_result));
  test::synchronize(staged.device);
  const ts_gpu_decode_files files = {batch.files.data(), static_cast<int64_t>(batch.files.size()),
                                     batch.key.data()};
  EXPECT_OK(ts_gpu_decoder_run_reading(
      decoder, staged.memory.data(), staged.used, staged.images.data(),
      static_cast<int64_t>(staged.images.size()), batch.members.data(),
      static_cast<int64_t>(batch.members.size()), files, results,
      reinterpret_cast<int32_t*>(flags.data()),
      reinterpret_cast<ts_gpu_inflate_result*>(outcomes.data()), stream));
  test::synchronize(staged.device);
  failed->resize(staged.images.size());
  std::memcpy(failed->data(), flags.data(), failed->size() * sizeof(int32_t));
  inflated->resize(batch.members.size());
  std::memcpy(inflated->data(), outcomes.data(), inflated->size() * sizeof(ts_gpu_inflate_result));
  return test::read<uint8_t>(results);
}

TEST_P(DecodeOn, MembersOfStreamsEqualTheHostsDecoder) {
  Random random(86);
  const Decoder host = new_decoder();
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  for (int round = 0; round < 6 * rounds(); ++round) {
    const StagedMembers batch = draw_members(GetParam(), random, host.get());
    for (int turn = 0; turn < 2; ++turn) {  // the second time with plans that have been run
      std::vector<int32_t> failed;
      std::vector<ts_gpu_inflate_result> inflated;
      const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
      for (size_t i = 0; i < batch.members.size(); ++i) {
        ASSERT_EQ(inflated[i].failed, 0) << i;
        ASSERT_EQ(inflated[i].checksum, batch.checksums[i]) << i;
      }
      for (size_t i = 0; i < batch.jobs.size(); ++i) {
        ASSERT_EQ(failed[i], 0) << "round " << round << ", image " << i;
        const Bytes& expected = batch.jobs[i].expected;
        const auto* got = results.data() + batch.staged.images[i].result;
        ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
            << "round " << round << ", image " << i;
      }
    }
  }
}

// Arbitrary bytes replace some streams: their failure or their checksum reports it, nothing faults,
// and the other images are right.
TEST_P(DecodeOn, DamagedMembersDisturbNoNeighbour) {
  Random random(87);
  const Decoder host = new_decoder();
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  int64_t found = 0, damaged = 0;
  for (int round = 0; round < 8 * rounds(); ++round) {
    StagedMembers batch = draw_members(GetParam(), random, host.get());
    std::vector<bool> changed(kMemberBatch);
    for (size_t i = 0; i < batch.members.size(); i += 2) {
      const ts_gpu_inflate_range& range = batch.members[i].range;
      for (int changes = uniform(random, 1, 30); changes > 0; --changes) {
        uint8_t& byte = batch.staged.memory.data()[range.input + random() % range.input_bytes];
        byte = static_cast<uint8_t>(random());
      }
      if (i % 4 == 0) batch.members[i].range.input_bytes /= 2;
      changed[batch.members[i].image] = true;
    }
    std::vector<int32_t> failed;
    std::vector<ts_gpu_inflate_result> inflated;
    const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
    for (size_t i = 0; i < batch.members.size(); i += 2) {
      ++damaged;
      found += inflated[i].failed != 0 || inflated[i].checksum != batch.checksums[i];
    }
    for (size_t i = 0; i < batch.jobs.size(); ++i) {
      if (changed[i]) continue;
      ASSERT_EQ(failed[i], 0) << "round " << round << ", image " << i;
      const Bytes& expected = batch.jobs[i].expected;
      const auto* got = results.data() + batch.staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
          << "round " << round << ", image " << i;
    }
  }
  EXPECT_GT(found, damaged * 3 / 4);  // changes after the range are not detected
}

// A file in memory with a read-only mapping, which a GPU can read.
class MappedFile {
 public:
  MappedFile(int32_t device, const Bytes& content)
      : bytes_(content.size()), file_(memfd_create("decode_test", MFD_CLOEXEC)) {
    write(0, content.data(), content.size());
    void* const mapped = mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file_, 0);
    EXPECT_NE(mapped, MAP_FAILED);
    data_ = static_cast<const uint8_t*>(mapped);
    if (device != TS_DEVICE_CPU) EXPECT_OK(ts_pinned_register_read_only(data_, bytes_, &pinned_));
  }
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;
  ~MappedFile() {
    EXPECT_OK(ts_pinned_destroy(pinned_));
    munmap(const_cast<uint8_t*>(data_), bytes_);
    close(file_);
  }
  const uint8_t* data() const { return data_; }
  void write(size_t at, const uint8_t* from, size_t count) {
    EXPECT_EQ(pwrite(file_, from, count, static_cast<off_t>(at)), static_cast<ssize_t>(count));
  }

 private:
  size_t bytes_;
  int file_;
  const uint8_t* data_ = nullptr;
  ts_pinned* pinned_ = nullptr;
};

constexpr size_t kPiece = 4096;

// The digest of imageloader/internal/digest, word by word.
uint64_t digest_of(const std::vector<uint64_t>& key, const uint8_t* data, size_t bytes) {
  Bytes piece(data, data + bytes);
  piece.resize(kPiece);
  uint64_t lanes[8] = {};
  for (size_t i = 0; i < kPiece / 8; ++i) {
    uint64_t word;
    std::memcpy(&word, piece.data() + 8 * i, 8);
    const uint64_t keyed = word ^ key[i / 8 + i % 8];
    lanes[i % 8] += (keyed & 0xFFFFFFFF) * (keyed >> 32);
    lanes[i % 8 ^ 1] += word;
  }
  uint64_t digest = bytes * 0x9E3779B97F4A7C15;
  for (size_t i = 0; i < 8; i += 2) {
    const auto product =
        static_cast<unsigned __int128>(lanes[i] ^ key[72 + i]) * (lanes[i + 1] ^ key[72 + i + 1]);
    digest += static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
  }
  digest = (digest ^ digest >> 37) * 0x165667919E3779F9;
  return digest ^ digest >> 32;
}

// Images of mapped files.
struct FileBatch {
  StagedMembers batch;
  std::unique_ptr<MappedFile> mapped;
  std::vector<ts_image_part> parts;  // one for each of the batch's files
};

// Stages the batch's last job, whose file is at `at` of `content`.
void add_file(ts_image_decoder* host, const Bytes& content, size_t at, FileBatch* to) {
  StagedMembers& batch = to->batch;
  Staged& staged = batch.staged;
  const Job& job = batch.jobs.back();
  const size_t scan = job.blob[20] | size_t{job.blob[21]} << 8;  // image/entries.h
  const ts_image_head head = {job.file.data(), scan, job.file.size(), scan};
  uint64_t used = staged.used;
  ts_image_part part = {};
  EXPECT_OK(ts_image_plan_part(host, &head, &job.geometry, {job.blob.data(), job.blob.size()},
                               kPiece, {staged.memory.data(), staged.capacity, &used}, &part));
  ASSERT_GT(part.planned, 0u);
  uint8_t* const room = staged.memory.data() + part.to;
  std::memset(room, kPoison, part.bytes);
  for (size_t i = 0; i * kPiece < part.bytes; ++i) {
    const size_t piece = at + part.file + i * kPiece;
    const uint64_t digest =
        digest_of(batch.key, content.data() + piece, std::min(kPiece, part.bytes - i * kPiece));
    std::memcpy(room + 8 * i, &digest, sizeof digest);
  }
  const auto* const from = reinterpret_cast<const uint8_t*>(at + part.file);  // until it is mapped
  batch.files.push_back({staged.images.size(), from});
  to->parts.push_back(part);
  staged.images.push_back({part.at, staged.result_bytes});
  staged.used = used;
  staged.result_bytes += job.expected.size();
}

// Moves the last member's input to the end of `content`, as the device is to read it.
void move_input(Random& random, Bytes* content, FileBatch* to) {
  StagedMembers& batch = to->batch;
  const ts_gpu_decode_member& member = batch.members.back();
  uint8_t* const input = batch.staged.memory.data() + member.range.input;
  content->resize(content->size() + random() % 50);
  const auto* const from = reinterpret_cast<const uint8_t*>(content->size());  // until it is mapped
  content->insert(content->end(), input, input + member.range.input_bytes);
  std::memset(input, kPoison, (member.range.input_bytes + kAlign - 1) / kAlign * kAlign);
  batch.files.push_back({member.image, from});
}

// A batch whose images are half in files, at every alignment, and in plans and in streams, of which
// most are in files too.
FileBatch draw_files(int32_t device, Random& random, ts_image_decoder* host) {
  FileBatch drawn{new_members(device, kMemberBatch), nullptr, {}};
  StagedMembers& batch = drawn.batch;
  for (int i = 0; i < 80; ++i) batch.key.push_back(random() | uint64_t{random()} << 32);
  Bytes content;
  for (size_t i = 0; i < kMemberBatch; ++i) {
    batch.jobs.push_back(draw_job(random, host, kKinds[random() % 8]));
    if (i % 4 == 2) {
      EXPECT_TRUE(batch.staged.add(host, batch.jobs.back()));
    } else if (i % 4 == 3) {
      add_member(random, host, &batch);
      if (random() % 4 != 0) move_input(random, &content, &drawn);
    } else {
      content.resize(content.size() + random() % 300);
      if (i % 8 == 0) content.resize((content.size() + 511) / 512 * 512);  // as in a tar
      const Bytes& file = batch.jobs.back().file;
      content.insert(content.end(), file.begin(), file.end());
      add_file(host, content, content.size() - file.size(), &drawn);
    }
  }
  content.resize((content.size() + kPiece - 1) / kPiece * kPiece);  // whole pages are registered
  drawn.mapped = std::make_unique<MappedFile>(device, content);
  for (ts_gpu_decode_file& file : batch.files) {
    file.from = drawn.mapped->data() + reinterpret_cast<uintptr_t>(file.from);
  }
  std::shuffle(batch.files.begin(), batch.files.end(), random);
  return drawn;
}

TEST_P(DecodeOn, FilesEqualTheHostsDecoder) {
  Random random(90);
  const Decoder host = new_decoder();
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  for (int round = 0; round < 6 * rounds(); ++round) {
    const FileBatch files = draw_files(GetParam(), random, host.get());
    const StagedMembers& batch = files.batch;
    for (int turn = 0; turn < 2; ++turn) {
      std::vector<int32_t> failed;
      std::vector<ts_gpu_inflate_result> inflated;
      const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
      for (size_t i = 0; i < batch.members.size(); ++i) {
        ASSERT_EQ(inflated[i].failed, 0) << "round " << round << ", member " << i;
        ASSERT_EQ(inflated[i].checksum, batch.checksums[i])
            << "round " << round << ", member " << i;
      }
      for (size_t i = 0; i < batch.jobs.size(); ++i) {
        ASSERT_EQ(failed[i], 0) << "round " << round << ", image " << i;
        const Bytes& expected = batch.jobs[i].expected;
        const auto* got = results.data() + batch.staged.images[i].result;
        ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
            << "round " << round << ", image " << i;
      }
    }
  }
}

// Members alone need no key. Bytes that change in a member's file have another checksum, or fail.
TEST_P(DecodeOn, ChangedMembersOfFilesDisturbNoNeighbour) {
  Random random(93);
  const Decoder host = new_decoder();
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  int64_t found = 0, changes = 0;
  for (int round = 0; round < 8 * rounds(); ++round) {
    FileBatch files{draw_members(GetParam(), random, host.get()), nullptr, {}};
    StagedMembers& batch = files.batch;
    Bytes content;
    std::vector<ts_gpu_decode_member> members;
    members.swap(batch.members);
    for (const ts_gpu_decode_member& member : members) {
      batch.members.push_back(member);
      move_input(random, &content, &files);
    }
    content.resize((content.size() + kPiece - 1) / kPiece * kPiece);
    files.mapped = std::make_unique<MappedFile>(GetParam(), content);
    std::vector<bool> changed(kMemberBatch);
    for (size_t i = 0; i < batch.files.size(); ++i) {
      ts_gpu_decode_file& file = batch.files[i];
      const auto at = reinterpret_cast<uintptr_t>(file.from);
      file.from = files.mapped->data() + at;
      if (i % 2 == 0) continue;
      Bytes bytes(file.from, file.from + members[i].range.input_bytes);
      for (int n = uniform(random, 1, 30); n > 0; --n) {
        bytes[random() % bytes.size()] = static_cast<uint8_t>(random());
      }
      files.mapped->write(at, bytes.data(), bytes.size());
      changed[file.image] = true;
    }
    std::vector<int32_t> failed;
    std::vector<ts_gpu_inflate_result> inflated;
    const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
    for (size_t i = 0; i < members.size(); ++i) {
      const bool wrong = inflated[i].failed != 0 || inflated[i].checksum != batch.checksums[i];
      if (changed[members[i].image]) {
        ++changes;
        found += wrong;
        continue;
      }
      ASSERT_FALSE(wrong) << "round " << round << ", member " << i;
    }
    for (size_t i = 0; i < batch.jobs.size(); ++i) {
      if (changed[i]) continue;
      ASSERT_EQ(failed[i], 0) << "round " << round << ", image " << i;
      const Bytes& expected = batch.jobs[i].expected;
      const auto* got = results.data() + batch.staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
          << "round " << round << ", image " << i;
    }
  }
  EXPECT_GT(found, changes * 3 / 4);  // changes after the range are not detected
}

// One changed bit in any read piece flags its image, and no other one.
TEST_P(DecodeOn, ChangedFilesAreFlagged) {
  Random random(91);
  const Decoder host = new_decoder();
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  for (int round = 0; round < 8 * rounds(); ++round) {
    const FileBatch files = draw_files(GetParam(), random, host.get());
    const StagedMembers& batch = files.batch;
    std::vector<bool> changed(kMemberBatch);
    for (const ts_gpu_decode_file& file : batch.files) {
      if (random() % 2 == 0 || file.image % 4 == 3) continue;  // a member has no digests
      const size_t last = files.batch.staged.plan(file.image).scan_bytes - 1;
      const size_t choices[] = {0, last, random() % (last + 1)};
      const uint8_t* const at = file.from + choices[random() % 3];
      const auto other = static_cast<uint8_t>(*at ^ 1U << random() % 8);
      files.mapped->write(static_cast<size_t>(at - files.mapped->data()), &other, 1);
      changed[file.image] = true;
    }
    std::vector<int32_t> failed;
    std::vector<ts_gpu_inflate_result> inflated;
    const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
    for (size_t i = 0; i < batch.jobs.size(); ++i) {
      ASSERT_EQ(failed[i], changed[i] ? 1 : 0) << "round " << round << ", image " << i;
      if (changed[i]) continue;
      const Bytes& expected = batch.jobs[i].expected;
      const auto* got = results.data() + batch.staged.images[i].result;
      ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
          << "round " << round << ", image " << i;
    }
  }
}

TEST_P(DecodeOn, WrongFilesAreErrors) {
  Random random(92);
  const Decoder host = new_decoder();
  FileBatch files = draw_files(GetParam(), random, host.get());
  StagedMembers& batch = files.batch;
  const Staged& staged = batch.staged;
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), 16 << 20);
  ASSERT_NE(decoder, nullptr);
  const test::Tensor results =
      test::empty({static_cast<int64_t>(staged.result_bytes)}, TS_DTYPE_UINT8, GetParam());
  const test::HostMemory flags(GetParam(), kMemberBatch * sizeof(int32_t));
  const test::HostMemory outcomes(GetParam(), kMemberBatch * sizeof(ts_gpu_inflate_result));
  using Files = std::vector<ts_gpu_decode_file>;
  const auto refused = [&](const char* text, auto change, const uint64_t* key) {
    Files list = batch.files;
    change(&list);
    EXPECT_FAILS(
        TS_ERROR_INVALID_ARGUMENT, text,
        ts_gpu_decoder_run_reading(decoder.get(), staged.memory.data(), staged.used,
                                   staged.images.data(), static_cast<int64_t>(staged.images.size()),
                                   batch.members.data(), static_cast<int64_t>(batch.members.size()),
                                   {list.data(), static_cast<int64_t>(list.size()), key}, results,
                                   reinterpret_cast<int32_t*>(flags.data()),
                                   reinterpret_cast<ts_gpu_inflate_result*>(outcomes.data()),
                                   test::stream_on(GetParam())));
  };
  const uint64_t* const key = batch.key.data();
  refused(
      "key", [](Files*) {}, nullptr);
  refused(
      "a file's image", [](Files* f) { f->front().image = kMemberBatch; }, key);
  refused(
      "memory is NULL", [](Files* f) { f->front().from = nullptr; }, key);
  auto& plan = *reinterpret_cast<ts::jpeg::Plan*>(staged.memory.data() + staged.images[0].plan);
  plan.subsequences = 1;  // as in a plan of a whole scan
  refused(
      "not of a part of a file", [](Files*) {}, key);
  plan.subsequences = 0;
  refused(
      "two files", [](Files* f) { f->front().image = f->back().image; }, key);
  const size_t member = batch.members[0].image;
  const auto of_member = [&](Files* f) { *f = {{member, files.mapped->data()}}; };
  ts_gpu_inflate_range& range = batch.members[0].range;
  const ts_gpu_inflate_range right = range;
  range.input_bytes = 0;
  refused("no room of a multiple of 16 bytes", of_member, nullptr);
  range = right;
  range.input_bytes = (range.input_bytes - 1) / kAlign * kAlign + 1;  // 15 zeros follow
  range.window = range.input + range.input_bytes + kAlign - 2;
  range.window_bytes = 1;
  refused("no room of a multiple of 16 bytes", of_member, nullptr);
  range.window = range.input - 1;
  range.window_bytes = 2;
  refused("no room of a multiple of 16 bytes", of_member, nullptr);
  range.window = 0;
  range.window_bytes = 0;
  range.input = staged.used / kAlign * kAlign;
  range.input_bytes = staged.used - range.input;
  refused("no room", of_member, nullptr);
  range = right;
  refused(
      "over count", [](Files* f) { f->resize(kMemberBatch + 1, f->back()); }, key);
}

// Overwrites some or all of the bytes. At least one changes.
void spoil(Random& random, uint8_t* bytes, size_t count) {
  ASSERT_GT(count, 0U);
  const Bytes before(bytes, bytes + count);
  do {
    const bool all = random() % 4 == 0;
    const size_t changes = all ? count : uniform(random, 1, 60);
    for (size_t i = 0; i < changes; ++i) {
      bytes[all ? i : random() % count] = random() % 4 == 0 ? 0xFF : static_cast<uint8_t>(random());
    }
  } while (std::equal(before.begin(), before.end(), bytes));
}

// Fuzzed images and forged indexes, in every position of a batch, of every kind that a device
// decodes: with entries, with operations, whole scans, and members of deflate streams. The images
// are small, because compute-sanitizer makes every access slow, and the test has parts that can be
// checked in parallel.
constexpr int kFuzzedParts = 16;
constexpr int kFuzzedBatches = 10;
constexpr size_t kFuzzedBatch = 128;
static_assert(kFuzzedParts * kFuzzedBatches * kFuzzedBatch / 2 >= 10000, "half of them are fuzzed");

class FuzzedOn : public testing::TestWithParam<std::tuple<int32_t, int>> {
 protected:
  void SetUp() override {
    if (std::get<0>(GetParam()) != TS_DEVICE_CPU) NEEDS_GPUS(1);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpu, FuzzedOn,
                         testing::Combine(testing::Values(0), testing::Range(0, kFuzzedParts)));
INSTANTIATE_TEST_SUITE_P(Cpu, FuzzedOn,
                         testing::Combine(testing::Values(TS_DEVICE_CPU),
                                          testing::Range(0, kFuzzedParts)));

// The four kinds of images alternate.
enum { kWithEntries, kWithOperations, kWholeScan, kMember, kFuzzedKinds };

// Returns a batch with gaps between the results. In the next part each kind is at other positions.
// In a `larger` batch the search of some whole scans has up to several blocks of threads, and more
// guesses than it follows as paths.
StagedMembers draw_fuzzed(Random& random, ts_image_decoder* host, ts_augmenter* augmenter,
                          int32_t device, int part, bool larger) {
  StagedMembers batch = new_members(device, kFuzzedBatch);
  for (size_t i = 0; i < kFuzzedBatch; ++i) {
    const auto kind = static_cast<int>((i + static_cast<size_t>(part)) % kFuzzedKinds);
    const bool large = larger && kind == kWholeScan && i / kFuzzedKinds % 4 == 0;
    const int side = large ? 200 : 48;
    batch.jobs.push_back(draw_job_of(random, host, kKinds[random() % 8], uniform(random, 1, side),
                                     uniform(random, 1, side), 40, kind != kWholeScan));
    Job& job = batch.jobs.back();
    if (kind == kWithOperations) {
      const Image image = {job.geometry.window_width, job.geometry.window_height, 3, job.expected};
      job.ops = draw_steps(random, 4, image.width, image.height);
      job.expected = run_on_host(augmenter, image, job.ops);
    }
    if (kind == kMember) {
      add_member(random, host, &batch);
    } else {
      EXPECT_TRUE(batch.staged.add(host, job));
    }
    batch.staged.result_bytes += kAlign;
  }
  return batch;
}

void fuzz(Random& random, size_t image, StagedMembers* batch) {
  Staged& staged = batch->staged;
  const ts::jpeg::Plan plan = staged.plan(image);
  uint8_t* const bytes = staged.memory.data() + staged.images[image].plan;
  const uint32_t entries = plan.segments_at - plan.entries_at;
  const auto member = std::find_if(batch->members.begin(), batch->members.end(),
                                   [&](const auto& m) { return m.image == image; });
  const bool forge = plan.subsequences == 0 && entries != 0 && random() % 2 == 0;
  if (forge) {
    spoil(random, bytes + plan.entries_at, entries);
  } else if (member != batch->members.end()) {
    ts_gpu_inflate_range& range = member->range;
    spoil(random, staged.memory.data() + range.input, range.input_bytes);
    if (random() % 4 == 0) range.input_bytes = random() % (range.input_bytes + 1);
  } else {
    spoil(random, bytes + plan.scan_at, plan.scan_bytes);
  }
}

TEST_P(FuzzedOn, DisturbNoNeighbour) {
  const auto [device, part] = GetParam();
  Random random(static_cast<unsigned>(1000 + part));
  const Decoder host = new_decoder();
  const HostAugmenter augmenter = new_host_augmenter();
  const GpuDecoder decoder = new_inflating_decoder(device, 16 << 20, kFuzzedBatch);
  ASSERT_NE(decoder, nullptr);
  int flagged = 0, fuzzed = 0;
  for (int round = 0; round < kFuzzedBatches; ++round) {
    StagedMembers batch =
        draw_fuzzed(random, host.get(), augmenter.get(), device, part, round / 2 % 2 != 0);
    // Every second image of each kind is fuzzed, and the others in the next batch.
    const auto is_fuzzed = [&](size_t i) {
      return (i / kFuzzedKinds + static_cast<size_t>(round)) % 2 == 0;
    };
    for (size_t i = 0; i < kFuzzedBatch; ++i) {
      if (is_fuzzed(i)) fuzz(random, i, &batch);
    }
    std::vector<int32_t> failed;
    std::vector<ts_gpu_inflate_result> inflated;
    const Bytes results = run_members(decoder.get(), batch, &failed, &inflated);
    for (size_t k = 0; k < batch.members.size(); ++k) {
      if (is_fuzzed(batch.members[k].image)) continue;
      ASSERT_EQ(inflated[k].failed, 0) << "round " << round << ", member " << k;
      ASSERT_EQ(inflated[k].checksum, batch.checksums[k]) << "round " << round << ", member " << k;
    }
    for (size_t i = 0; i < kFuzzedBatch; ++i) {
      const Bytes& expected = batch.jobs[i].expected;
      const uint8_t* const got = results.data() + batch.staged.images[i].result;
      for (size_t k = 0; k < kAlign; ++k) {
        ASSERT_EQ(got[expected.size() + k], kPoison) << "round " << round << ", image " << i;
      }
      if (is_fuzzed(i)) {
        ++fuzzed;
        flagged += failed[i];
        continue;
      }
      ASSERT_EQ(failed[i], 0) << "round " << round << ", image " << i;
      ASSERT_EQ(std::memcmp(got, expected.data(), expected.size()), 0)
          << "round " << round << ", image " << i;
    }
  }
  EXPECT_EQ(fuzzed, kFuzzedBatches * static_cast<int>(kFuzzedBatch) / 2);
  EXPECT_GT(flagged, fuzzed / 4);
}

TEST_P(DecodeOn, WrongMembersAreErrors) {
  Random random(88);
  const Decoder host = new_decoder();
  const StagedMembers batch = draw_members(GetParam(), random, host.get());
  const GpuDecoder decoder = new_inflating_decoder(GetParam(), batch.rooms);
  ASSERT_NE(decoder, nullptr);
  ts_gpu_decoder* none = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "rooms",
               ts_gpu_decoder_new_inflating(GetParam(), 1, 1 << 20, 1 << 20, 0, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "4 GiB",
               ts_gpu_decoder_new_inflating(GetParam(), 1, 1 << 20, 1 << 20, UINT32_MAX, &none));
  const Staged& staged = batch.staged;
  const test::Tensor results =
      test::empty({static_cast<int64_t>(staged.result_bytes)}, TS_DTYPE_UINT8, GetParam());
  const test::HostMemory flags(GetParam(), kMemberBatch * sizeof(int32_t));
  const test::HostMemory outcomes(GetParam(), kMemberBatch * sizeof(ts_gpu_inflate_result));
  const auto refused = [&](const char* text, auto change) {
    std::vector<ts_gpu_decode_member> members = batch.members;
    change(&members);
    EXPECT_FAILS(
        TS_ERROR_INVALID_ARGUMENT, text,
        ts_gpu_decoder_run_inflating(
            decoder.get(), staged.memory.data(), staged.used, staged.images.data(),
            static_cast<int64_t>(staged.images.size()), members.data(),
            static_cast<int64_t>(members.size()), results, reinterpret_cast<int32_t*>(flags.data()),
            reinterpret_cast<ts_gpu_inflate_result*>(outcomes.data()),
            test::stream_on(GetParam())));
  };
  using Members = std::vector<ts_gpu_decode_member>;
  refused("a member's image", [](Members* m) { m->front().image = kMemberBatch; });
  refused("its scan", [](Members* m) { m->front().scan += 1; });
  refused("its scan", [](Members* m) { m->front().scan = SIZE_MAX; });
  refused("its room", [](Members* m) { m->back().range.bytes += 64; });
  refused("its input", [](Members* m) { m->front().range.input = 0; });
  refused("two members", [](Members* m) {
    (*m)[1] = (*m)[0];
    (*m)[1].range.room += 64;
  });
  refused("has no member", [](Members* m) { m->pop_back(); });
  EXPECT_FAILS(
      TS_ERROR_INVALID_ARGUMENT, "has no member",
      ts_gpu_decoder_run(decoder.get(), staged.memory.data(), staged.used, staged.images.data(),
                         static_cast<int64_t>(staged.images.size()), results,
                         reinterpret_cast<int32_t*>(flags.data()), test::stream_on(GetParam())));
}

TEST_P(DecodeOn, WrongArgumentsAreErrors) {
  Random random(83);
  const Decoder host = new_decoder();
  ts_gpu_decoder* none = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "max_images",
               ts_gpu_decoder_new(0, 0, 1 << 20, 1 << 20, &none));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU",
               ts_gpu_decoder_new(ts_device_count(), 1, 1 << 20, 1 << 20, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "staging_bytes",
               ts_gpu_decoder_new(GetParam(), 1, SIZE_MAX, 1 << 20, &none));
  EXPECT_EQ(none, nullptr);
  const GpuDecoder decoder = new_gpu_decoder(GetParam(), 2, 4 << 20, 4096);
  ASSERT_NE(decoder, nullptr);
  Staged staged(GetParam(), 4 << 20, 1);
  Job job = draw_job(random, host.get(), kKinds[0]);
  job.geometry = crop(0, 0, 1, 1);
  job.expected.resize(3);
  ASSERT_TRUE(staged.add(host.get(), job));
  test::Tensor results = test::empty({64}, TS_DTYPE_UINT8, GetParam());
  const test::HostMemory flags(GetParam(), 64);
  auto* failed = reinterpret_cast<int32_t*>(flags.data());
  const ts_stream stream = test::stream_on(GetParam());
  const auto call = [&](size_t bytes, const ts_gpu_decode_image& image, int64_t count) {
    return ts_gpu_decoder_run(decoder.get(), staged.memory.data(), bytes, &image, count, results,
                              failed, stream);
  };
  ts_gpu_decode_image image = staged.images[0];
  EXPECT_OK(call(staged.used, image, 0));
  if (GetParam() != TS_DEVICE_CPU) {
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "different devices",
                 ts_gpu_decoder_run(decoder.get(), staged.memory.data(), staged.used, &image, 1,
                                    results, failed, test::stream_on(TS_DEVICE_CPU)));
  }
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "max_images", call(staged.used, image, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "staging_bytes", call((4 << 20) + 1, image, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "head", call(8, image, 1));
  image.plan = 0;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "inside", call(staged.used, image, 1));
  image.plan = staged.images[0].plan + kAlign;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "no plan", call(staged.used, image, 1));
  image = {staged.images[0].plan, 63};
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "fit", call(staged.used, image, 1));
  Staged large(GetParam(), 4 << 20, 1);
  const Bytes file = encode_jpeg(picture(random, 300, 300), {});
  Job wide;
  wide.file = file;
  wide.geometry = crop(0, 0, 300, 300);
  wide.blob.resize(1 << 16);
  ts_image_entries_made made = {};
  ASSERT_OK(ts_image_make_entries(host.get(), file.data(), file.size(),
                                  {wide.blob.data(), wide.blob.size(), 8}, &made));
  wide.blob.resize(made.bytes);
  ASSERT_TRUE(large.add(host.get(), wide));
  test::Tensor room = test::empty({300 * 300 * 3}, TS_DTYPE_UINT8, GetParam());
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "scratch",
               ts_gpu_decoder_run(decoder.get(), large.memory.data(), large.used,
                                  large.images.data(), 1, room, failed, stream));
}

// If memory is used and freed while a thread is inside a memory pool or captures, LibTorch forgets
// the streams that used it (cuda/allocator.h). So the memory is kept until that ends.
TEST(DecodeGpu, ResultsThatEndBesideAMemoryPoolAreKept) {
  NEEDS_GPUS(1);
  const int64_t kBytes = 8 << 20;
  const auto allocated = [] {
    ts_device_memory memory = {};
    memory.size = sizeof memory;
    EXPECT_OK(ts_device_get_memory(0, &memory));
    return static_cast<int64_t>(memory.allocated_bytes);
  };
  const GpuDecoder decoder = new_gpu_decoder(0, 1, 1 << 12, 1 << 12);
  ASSERT_NE(decoder, nullptr);
  const test::HostMemory staging(0, 1 << 12);
  const test::HostMemory flags(0, 64);
  test::Tensor results = test::empty({kBytes}, TS_DTYPE_UINT8, 0);
  test::synchronize(0);
  ts_memory_pool* pool = nullptr;
  ASSERT_OK(ts_memory_pool_new(0, &pool));
  ASSERT_OK(ts_memory_pool_enter(pool));
  EXPECT_OK(ts_gpu_decoder_run(decoder.get(), staging.data(), 0, nullptr, 0, results,
                               reinterpret_cast<int32_t*>(flags.data()), test::stream_on(0)));
  const int64_t before = allocated();
  results.free();
  EXPECT_EQ(allocated(), before);
  ASSERT_OK(ts_memory_pool_exit(pool));
  EXPECT_EQ(allocated(), before - kBytes);
  ASSERT_OK(ts_memory_pool_destroy(pool));
}

}  // namespace
