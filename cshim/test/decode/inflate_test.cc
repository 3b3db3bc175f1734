// The inflater of ranges, on a GPU and on the CPU, gives the bytes, checksums and verdicts of the
// tests' team, which deflate/parallel_test.cc compares with zlib.
#include <algorithm>
#include <cstring>
#include <memory>
#include <random>

#include "deflate/streams.h"
#include "deflate/team.h"
#include "support.h"

namespace {

using streams::Bytes;
using streams::deflated;
using streams::random_bytes;
using Random = std::mt19937;

constexpr size_t kAlign = 16;
constexpr size_t kWindow = TS_INFLATER_WINDOW_BYTES;
constexpr uint8_t kPoison = 0xa5;
constexpr size_t kLarge = 200000;  // maximum bytes of a stream's output

struct FreeInflater {
  void operator()(ts_inflater* inflater) const { ts_inflater_free(inflater); }
  void operator()(ts_gpu_inflater* inflater) const { ts_gpu_inflater_free(inflater); }
};
using GpuInflater = std::unique_ptr<ts_gpu_inflater, FreeInflater>;

GpuInflater new_gpu_inflater(int32_t device, int64_t ranges, size_t staging) {
  ts_gpu_inflater* inflater = nullptr;
  EXPECT_OK(ts_gpu_inflater_new(device, ranges, staging, &inflater));
  return GpuInflater(inflater);
}

struct Job {
  Bytes input, window;
  uint32_t skip_bits = 0, skip = 0, bytes = 0;
};

// Sets a job to start at a random checkpoint of the stream of `size` bytes, or at its start.
void enter(Random& random, const Bytes& stream, size_t size, Job* job) {
  ts_inflater* made = nullptr;
  EXPECT_OK(ts_inflater_new(8192, &made));
  const std::unique_ptr<ts_inflater, FreeInflater> inflater(made);
  EXPECT_OK(ts_inflater_reset(made, 0, 0));
  Bytes output(size);
  ts_inflate_progress progress = {};
  EXPECT_OK(
      ts_inflater_run(made, stream.data(), stream.size(), true, output.data(), 0, size, &progress));
  job->input = stream;
  size_t left = size;
  for (uint32_t i = random() % 12; i > 0; --i) {
    ts_inflate_checkpoint checkpoint = {};
    EXPECT_OK(ts_inflater_get_checkpoint(made, &checkpoint));
    if (checkpoint.window == nullptr || checkpoint.output >= size) break;
    left = size - checkpoint.output;
    job->input.assign(stream.begin() + static_cast<ptrdiff_t>(checkpoint.bit / 8), stream.end());
    job->skip_bits = checkpoint.bit % 8;
    job->window = team::pack_window(checkpoint.window, checkpoint.used);
  }
  job->skip = random() % 3 == 0 ? 0 : static_cast<uint32_t>(random() % left);
  job->bytes = static_cast<uint32_t>(left) - job->skip;
  if (random() % 3 == 0) job->bytes = static_cast<uint32_t>(random() % (job->bytes + 1));
}

Job draw_job(Random& random, size_t max) {
  constexpr int kStrategies[] = {Z_DEFAULT_STRATEGY, Z_DEFAULT_STRATEGY, Z_FIXED, Z_HUFFMAN_ONLY,
                                 Z_RLE};
  const size_t size = 1 + random() % (random() % 4 == 0 ? max : max / 5);
  const Bytes data = random_bytes(&random, size, static_cast<int>(random() % 5));
  const Bytes stream = deflated(data, static_cast<int>(random() % 10), kStrategies[random() % 5],
                                1 + static_cast<int>(random() % 9));
  Job job;
  enter(random, stream, size, &job);
  return job;
}

team::Inflated by_host(const Job& job) {
  return team::inflate<team::Loop>(job.input, job.skip_bits, job.window, job.skip, job.bytes);
}

// A batch in host memory, with gaps between its rooms.
struct Staged {
  int32_t device;
  test::HostMemory memory;
  size_t used;
  std::vector<ts_gpu_inflate_range> ranges;
  size_t rooms = kAlign;

  Staged(int32_t on, size_t capacity, const std::vector<Job>& jobs)
      : device(on),
        memory(on, capacity),
        used(ts_gpu_inflater_head_bytes(static_cast<int64_t>(jobs.size()))) {
    for (const Job& job : jobs) {
      ts_gpu_inflate_range range = {};
      range.input = place(job.input);
      range.input_bytes = job.input.size();
      range.window = place(job.window);
      range.window_bytes = job.window.size();
      range.skip = job.skip;
      range.bytes = job.bytes;
      range.skip_bits = static_cast<int32_t>(job.skip_bits);
      range.room = rooms;
      rooms = (rooms + kWindow + job.skip + job.bytes + 2 * kAlign) / kAlign * kAlign;
      ranges.push_back(range);
    }
    EXPECT_LE(used, capacity);
  }
  size_t place(const Bytes& bytes) {
    const size_t at = used;
    if (!bytes.empty()) std::memcpy(memory.data() + at, bytes.data(), bytes.size());
    used = (used + bytes.size() + kAlign - 1) / kAlign * kAlign;
    return at;
  }
};

// Inflates the batch on a new stream into poisoned rooms, and returns these and the results.
Bytes run(ts_gpu_inflater* inflater, const Staged& staged,
          std::vector<ts_gpu_inflate_result>* results) {
  const ts_stream stream = test::stream_on(staged.device);
  const test::Tensor poison =
      test::make(Bytes(staged.rooms, kPoison), {static_cast<int64_t>(staged.rooms)});
  test::Tensor rooms;
  EXPECT_OK(ts_tensor_to(poison, staged.device, -1, false, rooms.out()));
  const size_t bytes = staged.ranges.size() * sizeof(ts_gpu_inflate_result);
  const test::HostMemory outcomes(staged.device, bytes);
  std::memset(outcomes.data(), kPoison, bytes);
  // The rooms were written on another stream.
  test::synchronize(staged.device);
  EXPECT_OK(ts_gpu_inflater_run(inflater, staged.memory.data(), staged.used, staged.ranges.data(),
                                static_cast<int64_t>(staged.ranges.size()), rooms,
                                reinterpret_cast<ts_gpu_inflate_result*>(outcomes.data()), stream));
  test::synchronize(staged.device);
  results->resize(staged.ranges.size());
  std::memcpy(results->data(), outcomes.data(), bytes);
  return test::read<uint8_t>(rooms);
}

// Expects the host's outcome of each job, zeros as the output of a failed one, and the poison
// between the rooms.
void expect_outcomes(const std::vector<team::Inflated>& expected, const Staged& staged,
                     const std::vector<ts_gpu_inflate_result>& results, const Bytes& rooms) {
  size_t end = 0;  // end of the previous room
  for (size_t i = 0; i < expected.size(); ++i) {
    ASSERT_EQ(results[i].failed, expected[i].failed ? 1 : 0) << "range " << i;
    const size_t room = staged.ranges[i].room;
    for (; end < room; ++end) ASSERT_EQ(rooms[end], kPoison) << "byte " << end;
    end = room + expected[i].room.size();
    if (expected[i].failed) {
      const uint8_t* const output = rooms.data() + room + kWindow;
      const size_t bytes = staged.ranges[i].skip + staged.ranges[i].bytes;
      ASSERT_EQ(std::count(output, output + bytes, 0), static_cast<ptrdiff_t>(bytes))
          << "range " << i;
      continue;
    }
    ASSERT_EQ(results[i].checksum, expected[i].checksum) << "range " << i;
    ASSERT_EQ(std::memcmp(rooms.data() + room, expected[i].room.data(), expected[i].room.size()), 0)
        << "range " << i;
  }
  for (; end < rooms.size(); ++end) ASSERT_EQ(rooms[end], kPoison) << "byte " << end;
}

TEST(Inflate, WithoutAGpuThereIsNoInflater) {
  if (ts_device_count() > 0) GTEST_SKIP() << "there is a GPU";
  ts_gpu_inflater* inflater = nullptr;
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU", ts_gpu_inflater_new(0, 1, 1 << 20, &inflater));
  EXPECT_EQ(inflater, nullptr);
  ts_gpu_inflater_free(nullptr);
}

class InflateOn : public testing::TestWithParam<int32_t> {
 protected:
  void SetUp() override {
    if (GetParam() != TS_DEVICE_CPU) NEEDS_GPUS(1);
  }
};

INSTANTIATE_TEST_SUITE_P(Gpu, InflateOn, testing::Values(0));
INSTANTIATE_TEST_SUITE_P(Cpu, InflateOn, testing::Values(TS_DEVICE_CPU));

// On the CPU a GPU's threads run one after the other, and with the code that the expected outcomes
// come from. So a few batches are enough to show that they are staged and returned correctly.
size_t batches_on(int32_t device, size_t on_gpu) { return device == TS_DEVICE_CPU ? 2 : on_gpu; }

TEST_P(InflateOn, BytesEqualTheHosts) {
  Random random(91);
  constexpr size_t kBatch = 150;
  constexpr size_t kCapacity = 64 << 20;
  const GpuInflater inflater = new_gpu_inflater(GetParam(), kBatch, kCapacity);
  ASSERT_NE(inflater, nullptr);
  for (size_t batch = 0; batch < batches_on(GetParam(), 8); ++batch) {
    std::vector<Job> jobs;
    std::vector<team::Inflated> expected;
    for (size_t i = 0; i < kBatch; ++i) {
      jobs.push_back(draw_job(random, kLarge));
      expected.push_back(by_host(jobs.back()));
      ASSERT_FALSE(expected.back().failed);
    }
    const Staged staged(GetParam(), kCapacity, jobs);
    for (int turn = 0; turn < 3; ++turn) {
      std::vector<ts_gpu_inflate_result> results;
      const Bytes rooms = run(inflater.get(), staged, &results);
      ASSERT_NO_FATAL_FAILURE(expect_outcomes(expected, staged, results, rooms))
          << "batch " << batch << ", turn " << turn;
    }
  }
}

// Damaged inputs and windows in every position of a batch have the host's verdict, nothing faults,
// and the other ranges are right.
TEST_P(InflateOn, DamagedRangesDisturbNoNeighbour) {
  Random random(92);
  constexpr size_t kBatch = 64;
  constexpr size_t kCapacity = 32 << 20;
  const GpuInflater inflater = new_gpu_inflater(GetParam(), kBatch, kCapacity);
  ASSERT_NE(inflater, nullptr);
  size_t failed = 0;
  const size_t batches = batches_on(GetParam(), 20);
  for (size_t batch = 0; batch < batches; ++batch) {
    std::vector<Job> jobs;
    std::vector<team::Inflated> expected;
    for (size_t i = 0; i < kBatch; ++i) {
      Job job = draw_job(random, kLarge);
      if (i % 2 == batch % 2) {
        for (uint32_t changes = 1 + random() % 40; changes > 0; --changes) {
          Bytes& in = random() % 4 == 0 && !job.window.empty() ? job.window : job.input;
          in[random() % in.size()] = static_cast<uint8_t>(random());
        }
        if (random() % 4 == 0) job.input.resize(random() % job.input.size());
        if (random() % 16 == 0) job.input = random_bytes(&random, 30000, 0);
      }
      expected.push_back(by_host(job));
      failed += expected.back().failed;
      jobs.push_back(std::move(job));
    }
    const Staged staged(GetParam(), kCapacity, jobs);
    std::vector<ts_gpu_inflate_result> results;
    const Bytes rooms = run(inflater.get(), staged, &results);
    ASSERT_NO_FATAL_FAILURE(expect_outcomes(expected, staged, results, rooms)) << "batch " << batch;
  }
  EXPECT_GT(failed, batches * kBatch / 8);
}

// One small batch, good and damaged, with several steps, for compute-sanitizer's racecheck, under
// which the tests above take too long.
TEST_P(InflateOn, SmallBatchEqualsTheHosts) {
  Random random(93);
  constexpr size_t kBatch = 16;
  constexpr size_t kCapacity = 4 << 20;
  const GpuInflater inflater = new_gpu_inflater(GetParam(), kBatch, kCapacity);
  ASSERT_NE(inflater, nullptr);
  std::vector<Job> jobs;
  std::vector<team::Inflated> expected;
  for (size_t i = 0; i < kBatch; ++i) {
    Job job = draw_job(random, 50000);
    if (i % 4 == 3) job.input[random() % job.input.size()] ^= 16;
    expected.push_back(by_host(job));
    jobs.push_back(std::move(job));
  }
  const Staged staged(GetParam(), kCapacity, jobs);
  std::vector<ts_gpu_inflate_result> results;
  const Bytes rooms = run(inflater.get(), staged, &results);
  ASSERT_NO_FATAL_FAILURE(expect_outcomes(expected, staged, results, rooms));
}

TEST_P(InflateOn, WrongArgumentsAreErrors) {
  ts_gpu_inflater* none = nullptr;
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "max_ranges", ts_gpu_inflater_new(0, 0, 1, &none));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "0 bytes", ts_gpu_inflater_new(0, 1, 0, &none));
  EXPECT_FAILS(TS_ERROR_NO_DEVICE, "GPU", ts_gpu_inflater_new(ts_device_count(), 1, 1, &none));
  constexpr size_t kCapacity = 4096;
  const GpuInflater inflater = new_gpu_inflater(GetParam(), 2, kCapacity);
  ASSERT_NE(inflater, nullptr);
  Job job;
  job.input = deflated({1, 2, 3, 4}, 6, Z_DEFAULT_STRATEGY);
  job.bytes = 4;
  const Staged staged(GetParam(), kCapacity, {job});
  const auto room = static_cast<int64_t>(staged.rooms);
  test::Tensor rooms = test::empty({room}, TS_DTYPE_UINT8, GetParam());
  const test::HostMemory outcomes(GetParam(), 64);
  const ts_stream stream = test::stream_on(GetParam());
  const auto call = [&](size_t bytes, const ts_gpu_inflate_range& range, int64_t count) {
    return ts_gpu_inflater_run(inflater.get(), staged.memory.data(), bytes, &range, count, rooms,
                               reinterpret_cast<ts_gpu_inflate_result*>(outcomes.data()), stream);
  };
  const ts_gpu_inflate_range good = staged.ranges[0];
  EXPECT_OK(call(staged.used, good, 0));
  EXPECT_OK(call(staged.used, good, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "max_ranges", call(staged.used, good, 3));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "staging_bytes", call(kCapacity + 1, good, 1));
  EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, "head", call(8, good, 1));
  const auto refused = [&](const char* text, auto change) {
    ts_gpu_inflate_range range = good;
    change(&range);
    EXPECT_FAILS(TS_ERROR_INVALID_ARGUMENT, text, call(staged.used, range, 1));
  };
  refused("range 0: its input", [](ts_gpu_inflate_range* r) { r->input = 0; });
  refused("its input", [](ts_gpu_inflate_range* r) { r->input += 1; });
  refused("its input", [](ts_gpu_inflate_range* r) { r->input_bytes = SIZE_MAX; });
  refused("its window", [](ts_gpu_inflate_range* r) { r->window = SIZE_MAX; });
  refused("its window", [](ts_gpu_inflate_range* r) { r->window_bytes = SIZE_MAX; });
  refused("skip_bits", [](ts_gpu_inflate_range* r) { r->skip_bits = 8; });
  refused("skip_bits", [](ts_gpu_inflate_range* r) { r->skip_bits = -1; });
  refused("1 GiB", [](ts_gpu_inflate_range* r) { r->skip = SIZE_MAX; });
  refused("1 GiB", [](ts_gpu_inflate_range* r) { r->bytes = SIZE_MAX; });
  refused("its room", [](ts_gpu_inflate_range* r) { r->room += 1; });
  refused("its room", [](ts_gpu_inflate_range* r) { r->bytes = 64; });
  test::synchronize(GetParam());
}

}  // namespace
