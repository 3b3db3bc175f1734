#include "decode/decoder.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "decode/inflater.h"
#include "decode/read.h"
#include "jpeg/plan.h"
#include "jpeg/stages.h"
#include "torch/tensor.h"

namespace ts::decode {
namespace {

using jpeg::Place;
using jpeg::Plan;

using jpeg::aligned_plan;

size_t head_bytes(int64_t images) {
  return aligned_plan(static_cast<size_t>(images) * sizeof(Place));
}

// Of a batch with files, the device reads each file, and the memory before and after each.
size_t read_head_bytes(int64_t files) {
  return files <= 0 ? 0 : aligned_plan((2 * static_cast<size_t>(files) + 1) * sizeof(Read));
}

[[noreturn]] void throw_image(int64_t index, const std::string& what) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "image " + std::to_string(index) + ": " + what);
}

size_t head_of(const ts_gpu_decoder::Batch& batch) {
  return ts_gpu_decoder_reading_head_bytes(batch.count, batch.member_count, batch.files.count);
}

// Returns a plan, after checking that it is one and is inside the staging memory. The planner is
// responsible for its contents.
const Plan& checked_plan(int64_t index, const ts_gpu_decoder::Batch& batch) {
  const ts_gpu_decode_image& image = batch.images[index];
  if (image.plan < head_of(batch) || image.plan % jpeg::kPlanAlign != 0 ||
      image.plan > batch.bytes || batch.bytes - image.plan < sizeof(Plan)) {
    throw_image(index, "its plan is not inside the staging memory, behind the head");
  }
  const Plan& plan = *reinterpret_cast<const Plan*>(batch.staging + image.plan);
  if (plan.magic != jpeg::kPlanMagic || plan.bytes > batch.bytes - image.plan) {
    throw_image(index, "it has no plan of ts_image_plan_segments");
  }
  const size_t result = static_cast<size_t>(plan.x.size) * static_cast<size_t>(plan.y.size) * 3;
  if (image.result > batch.results_bytes || batch.results_bytes - image.result < result) {
    throw_image(index, "its pixels do not fit into the results");
  }
  return plan;
}

// Checks the plans. Writes the members' ranges after the places, and the position of its scan into
// each member's plan.
void check_plans(const ts_gpu_decoder& decoder, const ts_gpu_decoder::Batch& batch) {
  auto* const ranges = reinterpret_cast<deflate::Range*>(batch.staging + head_bytes(batch.count));
  for (int64_t i = 0; i < batch.member_count; ++i) {
    const ts_gpu_decode_member& member = batch.members[i];
    ranges[i] = checked_range(i, member.range, head_of(batch), batch.bytes, decoder.rooms_bytes,
                              jpeg::kScanSlack);
    const auto index = static_cast<int64_t>(member.image);
    require(member.image < static_cast<size_t>(batch.count), "a member's image is none");
    const Plan& plan = checked_plan(index, batch);
    if (member.scan > member.range.bytes || plan.scan_bytes > member.range.bytes - member.scan) {
      throw_image(index, "its scan is not inside its member's range");
    }
    const size_t scan =
        decoder.rooms_at + member.range.room + deflate::kWindow + member.range.skip + member.scan;
    const auto at = static_cast<uint32_t>(scan - batch.images[index].plan);
    // A batch may run again.
    if (plan.scan_at != 0 && plan.scan_at != at) {
      throw_image(index, "its plan has its own compressed data, or two members are of the image");
    }
    uint8_t* const to = batch.staging + batch.images[index].plan + offsetof(Plan, scan_at);
    std::memcpy(to, &at, sizeof at);
  }
  // Any other plan contains its scan. A plan that was a member's in another run does not.
  int64_t others = batch.count - batch.member_count;
  for (int64_t i = 0; i < batch.count; ++i) {
    const Plan& plan = checked_plan(i, batch);
    const bool own = plan.scan_at != 0 && plan.scan_at <= plan.bytes &&
                     plan.scan_bytes <= plan.bytes - plan.scan_at;
    if (own && --others < 0)
      throw_image(i, "its plan has its compressed data, and it is a member's");
  }
  require(others == 0, "an image without compressed data in its plan has no member");
}

static_assert(jpeg::kScanSlack == 16 && jpeg::kPlanAlign == 16,
              "the kernel that reads files stores 16 bytes at once, and 16 zeros after a file");

// The room for a file's bytes in the staging memory.
struct FileRoom {
  size_t begin;
  const ts_gpu_decode_file* file;
  uint32_t bytes;
  bool digests;  // the room starts with the digests of the bytes
  size_t end() const { return begin + aligned_plan(bytes) + (digests ? jpeg::kScanSlack : 0); }
};

// Returns the room for an image's part of a file, after checking that it is its plan's last part.
// check_plans has checked the plan.
FileRoom part_room(const ts_gpu_decoder::Batch& batch, const ts_gpu_decode_file& file) {
  const size_t at = batch.images[file.image].plan;
  const Plan& plan = *reinterpret_cast<const Plan*>(batch.staging + at);
  const FileRoom room = {at + plan.scan_at, &file, plan.scan_bytes, true};
  if (plan.scan_at == 0 || plan.scan_at % jpeg::kPlanAlign != 0 || plan.scan_bytes == 0 ||
      room.end() != at + plan.bytes || plan.subsequences != 0) {
    throw_image(static_cast<int64_t>(file.image), "its plan is not of a part of a file");
  }
  return room;
}

// Returns the room for a member's input. Zeros follow the input, so nothing else may be there.
// check_plans has checked the member.
FileRoom input_room(const ts_gpu_decoder::Batch& batch, const ts_gpu_decode_member& member,
                    const ts_gpu_decode_file& file) {
  const ts_gpu_inflate_range& range = member.range;
  const FileRoom room = {range.input, &file, static_cast<uint32_t>(range.input_bytes), false};
  const bool apart = range.window_bytes == 0 || range.window >= room.end() ||
                     range.window + range.window_bytes <= room.begin;
  if (room.bytes == 0 || room.end() > batch.bytes || !apart) {
    throw_image(
        static_cast<int64_t>(file.image),
        "its compressed bytes have no room of a multiple of 16 bytes in the staging memory");
  }
  return room;
}

// Returns the rooms for a batch's files, in the order of the staging memory.
std::vector<FileRoom> file_rooms(const ts_gpu_decoder::Batch& batch) {
  std::vector<const ts_gpu_decode_member*> members(static_cast<size_t>(batch.count));
  for (int64_t i = 0; i < batch.member_count; ++i) {
    members[batch.members[i].image] = &batch.members[i];
  }
  std::vector<FileRoom> rooms;
  for (int64_t i = 0; i < batch.files.count; ++i) {
    const ts_gpu_decode_file& file = batch.files.list[i];
    require(file.image < members.size(), "a file's image is none");
    require(file.from != nullptr, "a file's memory is NULL");
    const ts_gpu_decode_member* const member = members[file.image];
    rooms.push_back(member == nullptr ? part_room(batch, file) : input_room(batch, *member, file));
    require(member != nullptr || batch.files.key != nullptr,
            "the key of the files' digests is NULL");
  }
  std::sort(rooms.begin(), rooms.end(),
            [](const FileRoom& a, const FileRoom& b) { return a.begin < b.begin; });
  return rooms;
}

// Writes the ranges that the device reads after the members' ranges: the files, and the staging
// memory between them. Their count is 0 without files.
ReadWork list_reads(const ts_gpu_decoder::Batch& batch) {
  ReadWork work = {};
  const ts_gpu_decode_files& files = batch.files;
  if (files.count == 0) return work;
  if (files.key != nullptr) std::memcpy(&work.key, files.key, sizeof work.key);
  const size_t head = head_of(batch);
  auto* const reads = reinterpret_cast<Read*>(batch.staging + head - read_head_bytes(files.count));
  const auto add = [&](Read read, size_t begin, size_t end) {
    if (begin == end) return;
    read.to = begin;
    read.bytes = static_cast<uint32_t>(end - begin);
    read.first = work.pieces;
    work.pieces += pieces_of(read.bytes);
    reads[work.count++] = read;
  };
  size_t done = head;
  const auto add_plans = [&](size_t end) {
    add({batch.staging + done, nullptr, 0, 0, 0, 0, 0}, done, end);
  };
  for (const FileRoom& room : file_rooms(batch)) {
    require(room.begin >= done, "two files are of one image");
    add_plans(room.begin);
    const auto* const digests = reinterpret_cast<const uint64_t*>(batch.staging + room.begin);
    add({room.file->from, room.digests ? digests : nullptr, 0, 0, 0,
         static_cast<uint32_t>(room.file->image), 0},
        room.begin, room.begin + room.bytes);
    done = room.end();
  }
  add_plans(batch.bytes);
  return work;
}

// Adds an image's needs to the needs of the images that are decoded with it.
void widen(const Plan& plan, Work* work) {
  const auto count = [](const jpeg::Axis& a, int32_t b) {
    return static_cast<uint32_t>(a.size) * static_cast<uint32_t>(b);
  };
  work->subsequences = std::max(work->subsequences, plan.subsequences);
  work->paths = std::max(work->paths, plan.subsequences * plan.blocks);
  work->segments = std::max(work->segments, plan.segments);
  work->blocks = std::max(work->blocks, plan.total_blocks);
  work->strips = std::max(work->strips, static_cast<uint32_t>(jpeg::strip_count(plan)));
  work->outputs = std::max(work->outputs, count(plan.x, plan.y.size));
  work->steps = std::max(work->steps, plan.steps);
}

}  // namespace
}  // namespace ts::decode

ts_gpu_decoder::ts_gpu_decoder(int32_t on, int64_t max, size_t staged, size_t scratch_bytes,
                               size_t rooms)
    : device(on),
      max_images(max),
      staging_bytes(staged),
      rooms_at(ts::jpeg::aligned_plan(staged)),
      rooms_bytes(rooms),
      staging(ts::decode::memory_on(on, rooms_at + rooms)),
      scratch(ts::decode::memory_on(on, scratch_bytes)),
      flags(ts::decode::memory_on(on, static_cast<size_t>(max) * sizeof(int32_t))),
      outcomes(ts::decode::memory_on(
          on, rooms == 0 ? 1 : static_cast<size_t>(max) * sizeof(ts::deflate::Result))) {}

void ts_gpu_decoder::run(const Batch& batch, const ts::decode::Queue& queue, const Mark& mark) {
  using namespace ts::decode;
  const int64_t count = batch.count;
  const ts_gpu_decode_image* const images = batch.images;
  uint8_t* const from = batch.staging;
  const auto capacity = static_cast<uint64_t>(scratch.nbytes());
  // All checks, and all places, precede the first enqueued work.
  check_plans(*this, batch);
  auto* const places = reinterpret_cast<Place*>(from);
  for (int64_t first = 0; first < count;) {
    uint64_t total = 0;
    int64_t end = first;
    for (; end < count; ++end) {
      const Plan& plan = *reinterpret_cast<const Plan*>(from + images[end].plan);
      const ts::jpeg::Scratch needs = ts::jpeg::scratch_of(plan);
      if (needs.total() > capacity) {
        throw_image(end, "it needs " + std::to_string(needs.total()) +
                             " bytes of scratch memory, and the decoder has " +
                             std::to_string(capacity));
      }
      if (total + needs.total() > capacity) break;
      Place& place = places[end];
      place.plan = images[end].plan;
      place.coefficients = place.columns = place.sync = total;
      place.samples = total + needs.shared();
      place.room = place.samples + needs.samples;
      place.weights = place.room + needs.room;
      place.tables = place.weights + needs.weights;
      place.result = images[end].result;
      total += needs.total();
    }
    first = end;
  }
  if (count == 0) return;
  ReadWork read = list_reads(batch);

  for (const at::Tensor* used : {&staging, &scratch, &flags, &outcomes}) queue.keep(*used);
  auto* const flag = static_cast<int32_t*>(flags.mutable_data_ptr());
  const size_t flag_bytes = static_cast<size_t>(count) * sizeof(int32_t);
  const auto done = [&](int piece) {
    if (mark) mark(piece);
  };
  done(-1);
  auto* const memory = static_cast<uint8_t*>(staging.mutable_data_ptr());
  queue.copy_in(memory, from, read.count > 0 ? head_of(batch) : batch.bytes);
  queue.zero(flag, flag_bytes);
  if (read.count > 0) {
    read.reads =
        reinterpret_cast<const Read*>(memory + head_of(batch) - read_head_bytes(batch.files.count));
    read.staging = memory;
    read.failed = flag;
    queue.launch(read);
  }
  InflateWork inflate = {};
  inflate.ranges = reinterpret_cast<const ts::deflate::Range*>(memory + head_bytes(count));
  inflate.staging = memory;
  inflate.rooms = memory + rooms_at;
  inflate.results = static_cast<ts::deflate::Result*>(outcomes.mutable_data_ptr());
  inflate.count = static_cast<uint32_t>(batch.member_count);
  if (inflate.count > 0) queue.launch(inflate);
  done(0);
  for (int64_t first = 0; first < count;) {
    Work work = {};
    int64_t end = first;
    // A place at the start of the memory again belongs to the next images.
    for (; end < count && (end == first || places[end].coefficients != 0); ++end) {
      widen(*reinterpret_cast<const Plan*>(from + images[end].plan), &work);
    }
    work.places = reinterpret_cast<const Place*>(memory) + first;
    work.staging = memory;
    work.scratch = static_cast<uint8_t*>(scratch.mutable_data_ptr());
    work.results = batch.results;
    work.failed = flag + first;
    work.images = static_cast<uint32_t>(end - first);
    for (int stage = 0; stage < kStages; ++stage) {
      queue.launch(static_cast<Stage>(stage), work);
      done(1 + stage);
    }
    first = end;
  }
  queue.copy_out(batch.failed, flag, flag_bytes);
  if (inflate.count == 0) return;
  queue.copy_out(batch.inflated, inflate.results, inflate.count * sizeof(ts::deflate::Result));
}

namespace ts::decode {
namespace {

void make(int32_t device, int64_t max_images, size_t staging_bytes, size_t scratch_bytes,
          size_t rooms_bytes, ts_gpu_decoder** decoder) {
  enter_thread();
  require(decoder != nullptr, "decoder is NULL");
  require(max_images >= 1 && max_images <= 65535, "max_images must be from 1 to 65535");
  require(staging_bytes > 0 && scratch_bytes > 0, "memory of 0 bytes");
  require(staging_bytes <= INT64_MAX - jpeg::kPlanAlign, "staging_bytes is over all memory");
  // A plan refers to the rooms by an offset of 32 bits.
  require(rooms_bytes == 0 || (staging_bytes <= UINT32_MAX - jpeg::kPlanAlign &&
                               rooms_bytes <= UINT32_MAX - aligned_plan(staging_bytes)),
          "the staging memory and the rooms have 4 GiB or more");
  ready_device(device, "a decoder's memory");
  *decoder = std::make_unique<ts_gpu_decoder>(device, max_images, staging_bytes, scratch_bytes,
                                              rooms_bytes)
                 .release();
}

// Runs a batch whose results are written to the tensor's memory.
void run(ts_gpu_decoder* decoder, ts_gpu_decoder::Batch batch, ts_tensor* results,
         ts_stream stream) {
  enter_thread();
  require(decoder != nullptr, "decoder is NULL");
  require(batch.staging != nullptr && batch.failed != nullptr, "staging or failed is NULL");
  require(batch.images != nullptr || batch.count == 0, "images is NULL");
  require(batch.count >= 0 && batch.count <= decoder->max_images,
          "count is negative, or over the decoder's max_images");
  require(batch.member_count >= 0 && batch.member_count <= batch.count,
          "member_count is negative, or over count");
  require(batch.bytes <= decoder->staging_bytes, "bytes is over the decoder's staging_bytes");
  require(reinterpret_cast<uintptr_t>(batch.staging) % jpeg::kPlanAlign == 0,
          "staging is not aligned to 16 bytes");
  const ts_gpu_decode_files& files = batch.files;
  require(files.count >= 0 && files.count <= batch.count,
          "the number of files is negative, or over count");
  require(files.count == 0 || files.list != nullptr, "list of the files is NULL");
  require(files.count == 0 || batch.bytes <= UINT32_MAX,
          "the staging memory of a batch with files has 4 GiB or more");
  require(batch.bytes >= head_of(batch), "the staging memory has no head");
  const at::Tensor to = value_of(results, "results");
  const Queue queue(stream);
  require(queue.device() == decoder->device && device_index(to.device()) == decoder->device,
          "stream, results and decoder are on different devices");
  require(to.scalar_type() == at::ScalarType::Byte && to.is_contiguous(),
          "results must be contiguous uint8");
  queue.keep(to);
  batch.results = to.mutable_data_ptr<uint8_t>();
  batch.results_bytes = to.nbytes();
  decoder->run(batch, queue, nullptr);
  mark_written(to);
}

void run_members(ts_gpu_decoder* decoder, const ts_gpu_decoder::Batch& batch, ts_tensor* results,
                 ts_stream stream) {
  require(batch.member_count == 0 || (batch.members != nullptr && batch.inflated != nullptr),
          "members or inflated is NULL");
  run(decoder, batch, results, stream);
}

static_assert(jpeg::kScanEntryBytes % 2 == 0 && jpeg::kPlanAlign % 2 == 0,
              "the kernel gathers two bytes at once");

// Gathers pieces of the staging memory one after another in the scratch memory, which is free after
// the stages of a run, and copies them from there to the host.
class Gathering {
 public:
  Gathering(const ts_gpu_decoder& decoder, const Queue& queue, uint8_t* memory)
      : queue_(queue), memory_(memory), capacity_(decoder.scratch.nbytes()) {
    work_.staging = static_cast<const uint8_t*>(decoder.staging.const_data_ptr());
    work_.gathered = static_cast<uint8_t*>(decoder.scratch.mutable_data_ptr());
  }
  // `bytes` must not exceed the scratch memory.
  void add(size_t from, size_t bytes, size_t to) {
    if (bytes > capacity_ - used_) flush();
    if (work_.count == GatherWork::kMaxPieces) launch();
    // Bytes that follow the previous ones on both sides are part of the same copy.
    if (copy_bytes_ != 0 && to != copy_to_ + copy_bytes_) copy();
    if (copy_bytes_ == 0) copy_to_ = to;
    work_.pieces[work_.count++] = {from, used_, static_cast<uint32_t>(bytes)};
    used_ += bytes;
    copy_bytes_ += bytes;
  }
  // Copies everything that has not been copied yet.
  void flush() {
    copy();
    used_ = copied_ = 0;
  }

 private:
  void launch() {
    if (work_.count != 0) queue_.launch(work_);
    work_.count = 0;
  }
  void copy() {
    launch();
    if (copy_bytes_ != 0)
      queue_.copy_out(memory_ + copy_to_, work_.gathered + copied_, copy_bytes_);
    copied_ += copy_bytes_;
    copy_bytes_ = 0;
  }

  const Queue& queue_;
  uint8_t* const memory_;
  const size_t capacity_;
  GatherWork work_ = {};
  size_t used_ = 0, copied_ = 0;  // bytes of the scratch memory
  size_t copy_to_ = 0, copy_bytes_ = 0;
};

void copy_entries(const ts_gpu_decoder* decoder, const uint8_t* staging, size_t bytes,
                  const ts_gpu_decode_entries* entries, int64_t count, uint8_t* memory,
                  size_t memory_bytes, ts_stream stream) {
  enter_thread();
  require(decoder != nullptr, "decoder is NULL");
  require(count >= 0 && count <= decoder->max_images,
          "count is negative, or over the decoder's max_images");
  require(count == 0 || (staging != nullptr && entries != nullptr && memory != nullptr),
          "staging, entries or memory is NULL");
  require(bytes <= decoder->staging_bytes, "bytes is over the decoder's staging_bytes");
  const Queue queue(stream);
  require(queue.device() == decoder->device, "stream and decoder are on different devices");
  const auto plan_of = [&](int64_t i) -> const Plan& {
    return *reinterpret_cast<const Plan*>(staging + entries[i].plan);
  };
  for (int64_t i = 0; i < count; ++i) {
    const ts_gpu_decode_entries& from = entries[i];
    if (from.plan % jpeg::kPlanAlign != 0 || from.plan > bytes ||
        bytes - from.plan < sizeof(Plan)) {
      throw_image(i, "its plan is not inside the staging memory");
    }
    const Plan& plan = plan_of(i);
    if (plan.magic != jpeg::kPlanMagic || plan.bytes > bytes - from.plan ||
        plan.subsequences == 0 || plan.entries_at > plan.bytes ||
        from.bytes != uint64_t{plan.entries} * jpeg::kScanEntryBytes ||
        from.bytes > plan.bytes - plan.entries_at) {
      throw_image(i, "it has no plan of ts_image_plan_scan with so many entries");
    }
    if (from.to > memory_bytes || from.bytes > memory_bytes - from.to) {
      throw_image(i, "the memory has no room for its entries");
    }
    if (plan.entries_at % 2 != 0 || from.bytes > decoder->scratch.nbytes()) {
      throw_image(i, "its entries are at an odd byte, or larger than the scratch memory");
    }
  }
  for (const at::Tensor* used : {&decoder->staging, &decoder->scratch}) queue.keep(*used);
  Gathering gathering(*decoder, queue, memory);
  for (int64_t i = 0; i < count; ++i) {
    gathering.add(entries[i].plan + plan_of(i).entries_at, entries[i].bytes, entries[i].to);
  }
  gathering.flush();
}

}  // namespace
}  // namespace ts::decode

size_t ts_gpu_decoder_head_bytes(int64_t images) {
  return images <= 0 ? 0 : ts::decode::head_bytes(images);
}

size_t ts_gpu_decoder_inflating_head_bytes(int64_t images, int64_t members) {
  return ts_gpu_decoder_head_bytes(images) +
         (members <= 0 ? 0 : ts::decode::range_head_bytes(members));
}

size_t ts_gpu_decoder_reading_head_bytes(int64_t images, int64_t members, int64_t files) {
  return ts_gpu_decoder_inflating_head_bytes(images, members) + ts::decode::read_head_bytes(files);
}

ts_error* ts_gpu_decoder_new(int32_t device, int64_t max_images, size_t staging_bytes,
                             size_t scratch_bytes, ts_gpu_decoder** decoder) {
  return ts::guard(__func__, [&] {
    ts::decode::make(device, max_images, staging_bytes, scratch_bytes, 0, decoder);
  });
}

ts_error* ts_gpu_decoder_new_inflating(int32_t device, int64_t max_images, size_t staging_bytes,
                                       size_t scratch_bytes, size_t rooms_bytes,
                                       ts_gpu_decoder** decoder) {
  return ts::guard(__func__, [&] {
    ts::require(rooms_bytes > 0, "rooms of 0 bytes");
    ts::decode::make(device, max_images, staging_bytes, scratch_bytes, rooms_bytes, decoder);
  });
}

void ts_gpu_decoder_free(ts_gpu_decoder* decoder) {
  const std::unique_ptr<ts_gpu_decoder> owned(decoder);
}

ts_error* ts_gpu_decoder_run(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                             const ts_gpu_decode_image* images, int64_t count, ts_tensor* results,
                             int32_t* failed, ts_stream stream) {
  return ts::guard(__func__, [&] {
    const ts_gpu_decoder::Batch batch = {staging, bytes, images, count,   nullptr, 0,
                                         nullptr, 0,     failed, nullptr, {}};
    ts::decode::run(decoder, batch, results, stream);
  });
}

ts_error* ts_gpu_decoder_run_inflating(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                                       const ts_gpu_decode_image* images, int64_t count,
                                       const ts_gpu_decode_member* members, int64_t member_count,
                                       ts_tensor* results, int32_t* failed,
                                       ts_gpu_inflate_result* inflated, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::decode::run_members(
        decoder,
        {staging, bytes, images, count, members, member_count, nullptr, 0, failed, inflated, {}},
        results, stream);
  });
}

ts_error* ts_gpu_decoder_run_reading(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                                     const ts_gpu_decode_image* images, int64_t count,
                                     const ts_gpu_decode_member* members, int64_t member_count,
                                     ts_gpu_decode_files files, ts_tensor* results, int32_t* failed,
                                     ts_gpu_inflate_result* inflated, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::decode::run_members(
        decoder,
        {staging, bytes, images, count, members, member_count, nullptr, 0, failed, inflated, files},
        results, stream);
  });
}

ts_error* ts_gpu_decoder_copy_entries(ts_gpu_decoder* decoder, const uint8_t* staging, size_t bytes,
                                      const ts_gpu_decode_entries* entries, int64_t count,
                                      uint8_t* memory, size_t memory_bytes, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::decode::copy_entries(decoder, staging, bytes, entries, count, memory, memory_bytes, stream);
  });
}
