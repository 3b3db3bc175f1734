// The rate at which a GPU decodes crops of JPEGs: decode_bench [IMAGES [ROUNDS [ARCHIVE.tar[.gz]]]]
// Decodes a batch of IMAGES (256) photographs of the archive, or of synthetic ones of about 109 KB,
// three quarters of them 4:4:4, to RandomResizedCrop(224). Compares every pixel with the host's.
// Exits with 1 if a pixel differs.
// Prints a JSON object with the milliseconds of each stage: for the entries of an index (spacing
// -1), for an entry every 8 and every 16 MCUs, and (spacing 0) for images without entries. The GPU
// finds their entries in the stages "sync", "sums" and "entries", with subsequences of the
// planner's size and of other sizes. "passes" is how often a subsequence is decoded for its state.
// "rounds" is the number of decodes that must run one after the other. Both are for the first
// images, counted on the host. "unsynchronised" has images whose search takes longest. "turns" is a
// batch's time if two decoders on two streams alternate, and "issue" the host's part of it.
// "operations" has the milliseconds of each operation of Transform.Ops on all images of the batch
// ("augment"), the milliseconds of the batch with it, and the host's microseconds for each image.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>

#include "image_bench.h"
#include "jpeg/loops.h"
#include "operations.h"
#include "photographs.h"
#include "pieces.h"
#include "test/image/unsynchronised.h"
#include "torchstream.h"

using namespace bench;

namespace {

constexpr size_t kPixels = size_t{kSide} * kSide * 3;
constexpr size_t kAlign = 16;
constexpr int64_t kIndexed = -1;  // the spacing that the decoder chooses
constexpr size_t kCounted = 16;   // images whose search is counted on the host

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

struct Batch {
  std::vector<Bytes> files;
  std::vector<ts_image_geometry> crops;
};

// Divides the scan of a plan without entries into other subsequences than the planner does.
void cut(uint8_t* memory, uint32_t subsequence_bytes) {
  auto& plan = *reinterpret_cast<ts::jpeg::Plan*>(memory);
  plan.subsequence_bytes = subsequence_bytes;
  plan.subsequences = (plan.scan_bytes + subsequence_bytes - 1) / subsequence_bytes;
}

// Finds the entries of an image.
Bytes entries_of(ts_image_decoder* host, const Bytes& file, int64_t spacing) {
  Bytes blob(file.size() + 1024);
  ts_image_entries_made made = {};
  check(ts_image_make_entries(host, file.data(), file.size(),
                              {blob.data(), blob.size(), spacing == kIndexed ? 0 : spacing},
                              &made));
  blob.resize(made.bytes);
  return blob;
}

// Counts the cost of the search, over separate images.
class SearchCost {
 public:
  void add(const uint8_t* memory) {
    const ts::jpeg::Plan& plan = ts::jpeg::plan_at(memory);
    const auto all = std::make_unique<ts::jpeg::SearchTables>();
    ts::jpeg::build_tables(plan, memory, all.get());
    const auto tables = std::make_unique<ts::jpeg::PassTables>(ts::jpeg::pass_tables(plan, *all));
    std::vector<ts::jpeg::SyncState> starts(plan.subsequences), ends(plan.subsequences);
    std::vector<ts::jpeg::SyncState> borders(size_t{2} * ts::jpeg::sync_blocks(plan));
    std::vector<ts::jpeg::SyncSum> sums(plan.subsequences);
    const ts::jpeg::SyncCost cost = ts::jpeg::synchronise(
        plan, memory, *tables, {starts.data(), ends.data(), borders.data(), sums.data(), nullptr},
        ts::jpeg::kSyncThreads, ts::jpeg::kSyncLaunches);
    passes_ += cost.passes;
    subsequences_ += plan.subsequences;
    rounds_ += cost.rounds;
    max_rounds_ = std::max(max_rounds_, cost.rounds);
    ++images_;
  }

  std::string json() const {
    if (images_ == 0) return "";
    char text[128];
    std::snprintf(text, sizeof text, ", \"passes\": %.2f, \"rounds\": %.1f, \"max_rounds\": %.0f",
                  static_cast<double>(passes_) / static_cast<double>(subsequences_),
                  static_cast<double>(rounds_) / static_cast<double>(images_),
                  static_cast<double>(max_rounds_));
    return text;
  }

 private:
  uint64_t passes_ = 0, subsequences_ = 0, rounds_ = 0, max_rounds_ = 0, images_ = 0;
};

// Returns the figures of one spacing, as a JSON object. Spacing 0: no entries, and subsequences of
// subsequence_bytes bytes. Counts images that differ from the host's.
std::string measure(const Batch& batch, int64_t spacing, uint32_t subsequence_bytes, int rounds,
                    int* wrong) {
  const size_t count = batch.files.size();
  ts_image_decoder* host = nullptr;
  check(ts_image_decoder_new(0, &host));
  size_t capacity = ts_gpu_decoder_head_bytes(static_cast<int64_t>(count));
  size_t compressed = 0;
  std::vector<Bytes> blobs;
  for (const Bytes& file : batch.files) {
    Bytes blob;
    if (spacing != 0) blob = entries_of(host, file, spacing);
    capacity += file.size() + blob.size() + 65536;
    compressed += file.size();
    blobs.push_back(std::move(blob));
  }
  ts_pinned* pinned = nullptr;
  check(ts_pinned_new(capacity, &pinned));
  uint8_t* const staging = ts_pinned_data(pinned);
  size_t used = 0;
  double plan_seconds = 0;
  std::vector<ts_gpu_decode_image> images;
  for (int pass = 0; pass < 3; ++pass) {  // the last one counts
    used = ts_gpu_decoder_head_bytes(static_cast<int64_t>(count));
    images.clear();
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < count; ++i) {
      const Bytes& file = batch.files[i];
      size_t planned = 0;
      uint64_t* const trusted = nullptr;
      check(ts_image_plan_segments(host, file.data(), file.size(), &batch.crops[i],
                                   {blobs[i].data(), blobs[i].size()}, trusted, staging + used,
                                   capacity - used, &planned));
      if (planned == 0) stop("an image has no plan");
      if (spacing == 0) cut(staging + used, subsequence_bytes);
      images.push_back({used, i * kPixels});
      used += (planned + kAlign - 1) / kAlign * kAlign;
    }
    plan_seconds = seconds_since(begin);
  }
  SearchCost search;
  for (size_t i = 0; spacing == 0 && i < std::min<size_t>(count, kCounted); ++i) {
    search.add(staging + images[i].plan);
  }
  Bytes expected(count * kPixels);
  const auto begin = std::chrono::steady_clock::now();
  for (size_t i = 0; i < count; ++i) {
    const Bytes& file = batch.files[i];
    uint8_t* const to = expected.data() + i * kPixels;
    if (spacing == 0) {
      check(ts_image_decode(host, file.data(), file.size(), &batch.crops[i], to, kSide * 3));
      continue;
    }
    check(ts_image_decode_with_entries(host, file.data(), file.size(), &batch.crops[i],
                                       {blobs[i].data(), blobs[i].size()}, to, kSide * 3, nullptr));
  }
  const double host_seconds = seconds_since(begin);

  ts_gpu_decoder* decoder = nullptr;
  check(ts_gpu_decoder_new(0, static_cast<int64_t>(count), capacity, count << 22, &decoder));
  ts_stream stream = {};
  check(ts_stream_from_pool(0, 0, &stream));
  const int64_t shape[1] = {static_cast<int64_t>(count * kPixels)};
  ts_tensor* results = nullptr;
  check(ts_tensor_new(shape, 1, TS_DTYPE_UINT8, 0, TS_MEMORY_FORMAT_CONTIGUOUS, &results));
  ts_pinned* flags = nullptr;
  check(ts_pinned_new(count * sizeof(int32_t), &flags));
  auto* const failed = reinterpret_cast<int32_t*>(ts_pinned_data(flags));
  double times[TS_BENCH_DECODE_PIECES] = {};
  check(ts_bench_gpu_decode(decoder, staging, used, images.data(), static_cast<int64_t>(count),
                            results, failed, stream, rounds, times));
  // Two decoders alternate, as a prefetcher's slots would: one copies while the other decodes.
  ts_gpu_decoder* second = nullptr;
  check(ts_gpu_decoder_new(0, static_cast<int64_t>(count), capacity, count << 22, &second));
  ts_stream beside = {};
  check(ts_stream_from_pool(0, 0, &beside));
  std::chrono::steady_clock::time_point turns;
  for (int round = -2; round < 2 * rounds; ++round) {
    if (round == 0) {
      check(ts_stream_synchronize(stream));
      check(ts_stream_synchronize(beside));
      turns = std::chrono::steady_clock::now();
    }
    // Both write the same positions in the staging memory, and the same pixels.
    check(ts_gpu_decoder_run(round % 2 == 0 ? decoder : second, staging, used, images.data(),
                             static_cast<int64_t>(count), results, failed,
                             round % 2 == 0 ? stream : beside));
  }
  const double issue_seconds = seconds_since(turns) / (2 * rounds);
  check(ts_stream_synchronize(stream));
  check(ts_stream_synchronize(beside));
  const double turn_seconds = seconds_since(turns) / (2 * rounds);
  Bytes got(count * kPixels);
  check(ts_tensor_read(results, got.data(), got.size()));
  int different = 0;
  for (size_t i = 0; i < count; ++i) {
    different += failed[i] != 0 ||
                 std::memcmp(got.data() + i * kPixels, expected.data() + i * kPixels, kPixels) != 0;
  }
  *wrong += different;
  ts_tensor_free(results);
  ts_gpu_decoder_free(decoder);
  ts_gpu_decoder_free(second);
  check(ts_pinned_destroy(flags));
  check(ts_pinned_destroy(pinned));
  ts_image_decoder_free(host);

  const auto number = [](double value) {
    char text[32];
    std::snprintf(text, sizeof text, "%.4f", value);
    return std::string(text);
  };
  const auto images_of = static_cast<double>(count);
  const char* names[] = {"copy",      "tables",  "sync",    "sums",    "entries", "entropy",
                         "transform", "weights", "columns", "results", "augment", "all"};
  std::string json = "{\"spacing\": " + std::to_string(spacing) +
                     ", \"subsequence_bytes\": " + std::to_string(subsequence_bytes) +
                     search.json() + ", \"different\": " + std::to_string(different) +
                     ", \"file_bytes\": " + number(static_cast<double>(compressed) / images_of) +
                     ", \"staged_bytes\": " + number(static_cast<double>(used) / images_of) +
                     ", \"plan_us\": " + number(plan_seconds * 1e6 / images_of) +
                     ", \"host_decode_us\": " + number(host_seconds * 1e6 / images_of) +
                     ", \"issue_ms\": " + number(issue_seconds * 1e3) +
                     ", \"turns_ms\": " + number(turn_seconds * 1e3) +
                     ", \"turns_images_per_second\": " + number(images_of / turn_seconds);
  for (int i = 0; i < TS_BENCH_DECODE_PIECES; ++i) {
    json += std::string(", \"") + names[i] + "_ms\": " + number(times[i]) + ", \"" + names[i] +
            "_images_per_second\": " + number(1e3 * images_of / times[i]);
  }
  return json + "}";
}

// Returns images of 106 KB. In the search, each of their subsequences waits for the previous one.
Batch unsynchronised_batch(size_t count) {
  constexpr int kColumns = 26;
  constexpr int kRows = 21;
  Batch batch;
  std::mt19937 random(3);
  for (size_t i = 0; i < count; ++i) {
    batch.files.push_back(unsynchronised::image(random, kColumns, kRows, false));
    batch.crops.push_back(random_resized_crop(random, kColumns * 8, kRows * 8, kSide));
  }
  return batch;
}

// Returns the milliseconds of each operation on the pixels of a batch, and the host's microseconds
// for each image, as JSON objects. Counts images that differ from the host's.
std::string measure_operations(const Batch& batch, int rounds, int* wrong) {
  const size_t count = batch.files.size();
  ts_image_decoder* host = nullptr;
  check(ts_image_decoder_new(0, &host));
  ts_augmenter* augmenter = nullptr;
  check(ts_augmenter_new(&augmenter));
  size_t capacity = ts_gpu_decoder_head_bytes(static_cast<int64_t>(count));
  std::vector<Bytes> blobs;
  Bytes pixels(count * kPixels);
  for (size_t i = 0; i < count; ++i) {
    const Bytes& file = batch.files[i];
    blobs.push_back(entries_of(host, file, 8));
    capacity += file.size() + blobs[i].size() + 65536;
    check(ts_image_decode_with_entries(host, file.data(), file.size(), &batch.crops[i],
                                       {blobs[i].data(), blobs[i].size()},
                                       pixels.data() + i * kPixels, kSide * 3, nullptr));
  }
  ts_pinned* pinned = nullptr;
  check(ts_pinned_new(capacity, &pinned));
  uint8_t* const staging = ts_pinned_data(pinned);
  ts_gpu_decoder* decoder = nullptr;
  check(ts_gpu_decoder_new(0, static_cast<int64_t>(count), capacity, count << 22, &decoder));
  ts_stream stream = {};
  check(ts_stream_from_pool(0, 0, &stream));
  const int64_t shape[1] = {static_cast<int64_t>(count * kPixels)};
  ts_tensor* results = nullptr;
  check(ts_tensor_new(shape, 1, TS_DTYPE_UINT8, 0, TS_MEMORY_FORMAT_CONTIGUOUS, &results));
  ts_pinned* flags = nullptr;
  check(ts_pinned_new(count * sizeof(int32_t), &flags));
  auto* const failed = reinterpret_cast<int32_t*>(ts_pinned_data(flags));
  std::string json;
  for (const Operation& operation : kOperations) {
    size_t used = ts_gpu_decoder_head_bytes(static_cast<int64_t>(count));
    std::vector<ts_gpu_decode_image> images;
    for (size_t i = 0; i < count; ++i) {
      const Bytes& file = batch.files[i];
      size_t planned = 0;
      check(ts_image_plan_segments(host, file.data(), file.size(), &batch.crops[i],
                                   {blobs[i].data(), blobs[i].size()}, nullptr, staging + used,
                                   capacity - used, &planned));
      if (planned == 0) stop("an image has no plan");
      check(ts_image_plan_augment(staging + used, capacity - used, &operation.op, 1, &planned));
      if (planned == 0) stop("a GPU does not run an operation");
      images.push_back({used, i * kPixels});
      used += planned;
    }
    double times[TS_BENCH_DECODE_PIECES] = {};
    check(ts_bench_gpu_decode(decoder, staging, used, images.data(), static_cast<int64_t>(count),
                              results, failed, stream, rounds, times));
    Bytes got(count * kPixels);
    check(ts_tensor_read(results, got.data(), got.size()));
    Bytes expected = pixels;
    const auto begin = std::chrono::steady_clock::now();
    for (size_t i = 0; i < count; ++i) {
      check(ts_augmenter_run(augmenter, expected.data() + i * kPixels, kSide, kSide, kSide * 3,
                             &operation.op, 1));
    }
    const double host_seconds = seconds_since(begin);
    int different = 0;
    for (size_t i = 0; i < count; ++i) {
      different += failed[i] != 0 || std::memcmp(got.data() + i * kPixels,
                                                 expected.data() + i * kPixels, kPixels) != 0;
    }
    *wrong += different;
    char text[256];
    std::snprintf(text, sizeof text,
                  "%s{\"name\": \"%s\", \"augment_ms\": %.4f, \"all_ms\": %.4f, "
                  "\"host_us\": %.2f, \"different\": %d}",
                  json.empty() ? "" : ", ", operation.name, times[TS_BENCH_DECODE_AUGMENT],
                  times[TS_BENCH_DECODE_ALL], host_seconds * 1e6 / static_cast<double>(count),
                  different);
    json += text;
  }
  ts_tensor_free(results);
  ts_gpu_decoder_free(decoder);
  check(ts_pinned_destroy(flags));
  check(ts_pinned_destroy(pinned));
  ts_augmenter_free(augmenter);
  ts_image_decoder_free(host);
  return json;
}

}  // namespace

int main(int argc, char** argv) {
  const int images = argc > 1 ? std::atoi(argv[1]) : 256;
  const int rounds = argc > 2 ? std::atoi(argv[2]) : 30;
  if (images < 1 || rounds < 1) stop("usage: decode_bench [IMAGES [ROUNDS [ARCHIVE.tar[.gz]]]]");
  Batch batch;
  if (argc > 3) {
    for (Bytes& file : members(argv[3])) {
      ts_image_info info = {};
      info.size = sizeof info;
      check(ts_image_get_info(file.data(), file.size(), &info));
      if (info.format == TS_IMAGE_FORMAT_JPEG && !info.progressive && info.components != 4 &&
          batch.files.size() < static_cast<size_t>(images)) {
        batch.files.push_back(std::move(file));
      }
    }
    if (batch.files.empty()) stop("no baseline JPEG in the archive");
  } else {
    batch.files = photographs(static_cast<size_t>(images));
  }
  std::mt19937 random(2);
  for (const Bytes& file : batch.files) {
    ts_image_info info = {};
    info.size = sizeof info;
    check(ts_image_get_info(file.data(), file.size(), &info));
    batch.crops.push_back(random_resized_crop(random, info.width, info.height, kSide));
  }
  int wrong = 0;
  std::string json = "{\"images\": " + std::to_string(batch.files.size()) +
                     ", \"rounds\": " + std::to_string(rounds) + ", \"spacings\": [";
  json += measure(batch, kIndexed, 0, rounds, &wrong);
  for (const int64_t spacing : {8, 16}) json += ", " + measure(batch, spacing, 0, rounds, &wrong);
  for (const uint32_t bytes : {ts::jpeg::kSubsequenceBytes, 128u, 512u}) {
    json += ", " + measure(batch, 0, bytes, rounds, &wrong);
  }
  json +=
      "], \"unsynchronised\": " + measure(unsynchronised_batch(batch.files.size()), 0,
                                          ts::jpeg::kSubsequenceBytes, std::min(rounds, 5), &wrong);
  json += ", \"operations\": [" + measure_operations(batch, rounds, &wrong);
  std::printf("%s]}\n", json.c_str());
  return wrong == 0 ? 0 : 1;
}
