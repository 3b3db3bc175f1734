#include "decode/inflater.h"

#include <memory>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "decode/inflate.h"
#include "torch/tensor.h"

namespace ts::decode {
namespace {

using deflate::kAlign;
using deflate::Range;

static_assert(sizeof(deflate::Result) == sizeof(ts_gpu_inflate_result), "one is the other");
static_assert(deflate::kWindow == TS_INFLATER_WINDOW_BYTES, "the header has this number");

[[noreturn]] void throw_range(int64_t index, const std::string& what) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "range " + std::to_string(index) + ": " + what);
}

bool lies_in(size_t begin, size_t bytes, size_t all) {
  return begin <= all && bytes <= all - begin;
}

}  // namespace

size_t range_head_bytes(int64_t ranges) {
  const size_t bytes = static_cast<size_t>(ranges) * sizeof(Range);
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

Range checked_range(int64_t index, const ts_gpu_inflate_range& r, size_t head, size_t bytes,
                    size_t rooms_bytes, size_t behind) {
  if (r.input % kAlign != 0 || r.input < head || !lies_in(r.input, r.input_bytes, bytes)) {
    throw_range(index,
                "its input is not inside the staging memory, behind the head, at a "
                "multiple of 16 bytes");
  }
  if (!lies_in(r.window, r.window_bytes, bytes)) {
    throw_range(index, "its window is not inside the staging memory");
  }
  if (r.input_bytes > deflate::kMaxInput || r.window_bytes > deflate::kMaxInput) {
    throw_range(index, "its input or its window has more than 256 MiB");
  }
  if (r.skip_bits < 0 || r.skip_bits > 7) throw_range(index, "skip_bits must be from 0 to 7");
  if (r.skip > deflate::kMaxOutput || r.bytes > deflate::kMaxOutput - r.skip) {
    throw_range(index, "skip and bytes are more than 1 GiB");
  }
  if (r.room % kAlign != 0 ||
      !lies_in(r.room, deflate::kWindow + r.skip + r.bytes + behind, rooms_bytes)) {
    throw_range(index, "its room is not inside the rooms, at a multiple of 16 bytes");
  }
  Range range = {};
  range.input = r.input;
  range.window = r.window;
  range.room = r.room;
  range.input_bytes = static_cast<uint32_t>(r.input_bytes);
  range.skip_bits = static_cast<uint32_t>(r.skip_bits);
  range.window_bytes = static_cast<uint32_t>(r.window_bytes);
  range.skip = static_cast<uint32_t>(r.skip);
  range.bytes = static_cast<uint32_t>(r.bytes);
  range.behind = static_cast<uint32_t>(behind);
  return range;
}

}  // namespace ts::decode

ts_gpu_inflater::ts_gpu_inflater(int32_t on, int64_t ranges, size_t staging_bytes)
    : device(on),
      max_ranges(ranges),
      staging(ts::decode::memory_on(on, staging_bytes)),
      outcomes(
          ts::decode::memory_on(on, static_cast<size_t>(ranges) * sizeof(ts::deflate::Result))) {}

void ts_gpu_inflater::run(uint8_t* from, size_t bytes, const ts_gpu_inflate_range* ranges,
                          int64_t count, uint8_t* rooms, size_t rooms_bytes,
                          ts_gpu_inflate_result* results, const ts::decode::Queue& queue,
                          const Mark& mark) {
  using namespace ts::decode;
  const size_t head = range_head_bytes(count);
  auto* const heads = reinterpret_cast<ts::deflate::Range*>(from);
  // All checks precede the first enqueued work.
  for (int64_t i = 0; i < count; ++i) {
    heads[i] = checked_range(i, ranges[i], head, bytes, rooms_bytes);
  }
  if (count == 0) return;

  for (const at::Tensor* memory : {&staging, &outcomes}) queue.keep(*memory);
  const auto done = [&](int piece) {
    if (mark) mark(piece);
  };
  done(-1);
  queue.copy_in(staging.mutable_data_ptr(), from, bytes);
  done(0);
  InflateWork work = {};
  work.ranges = static_cast<const ts::deflate::Range*>(staging.const_data_ptr());
  work.staging = static_cast<const uint8_t*>(staging.const_data_ptr());
  work.rooms = rooms;
  work.results = static_cast<ts::deflate::Result*>(outcomes.mutable_data_ptr());
  work.count = static_cast<uint32_t>(count);
  queue.launch(work);
  done(1);
  queue.copy_out(results, work.results, static_cast<size_t>(count) * sizeof(ts::deflate::Result));
}

size_t ts_gpu_inflater_head_bytes(int64_t ranges) {
  return ranges <= 0 ? 0 : ts::decode::range_head_bytes(ranges);
}

ts_error* ts_gpu_inflater_new(int32_t device, int64_t max_ranges, size_t staging_bytes,
                              ts_gpu_inflater** inflater) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(max_ranges >= 1 && max_ranges <= 1 << 20, "max_ranges must be from 1 to 2^20");
    ts::require(staging_bytes > 0, "memory of 0 bytes");
    ts::decode::ready_device(device, "an inflater's memory");
    *inflater = std::make_unique<ts_gpu_inflater>(device, max_ranges, staging_bytes).release();
  });
}

void ts_gpu_inflater_free(ts_gpu_inflater* inflater) {
  const std::unique_ptr<ts_gpu_inflater> owned(inflater);
}

ts_error* ts_gpu_inflater_run(ts_gpu_inflater* inflater, uint8_t* staging, size_t bytes,
                              const ts_gpu_inflate_range* ranges, int64_t count, ts_tensor* rooms,
                              ts_gpu_inflate_result* results, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(inflater != nullptr, "inflater is NULL");
    ts::require(staging != nullptr && results != nullptr, "staging or results is NULL");
    ts::require(ranges != nullptr || count == 0, "ranges is NULL");
    ts::require(count >= 0 && count <= inflater->max_ranges,
                "count is negative, or over the inflater's max_ranges");
    ts::require(bytes <= inflater->staging.nbytes(), "bytes is over the inflater's staging_bytes");
    ts::require(reinterpret_cast<uintptr_t>(staging) % ts::deflate::kAlign == 0,
                "staging is not aligned to 16 bytes");
    ts::require(bytes >= ts_gpu_inflater_head_bytes(count), "the staging memory has no head");
    const at::Tensor to = ts::value_of(rooms, "rooms");
    const ts::decode::Queue queue(stream);
    ts::require(
        queue.device() == inflater->device && ts::device_index(to.device()) == inflater->device,
        "stream, rooms and inflater are on different devices");
    ts::require(to.scalar_type() == at::ScalarType::Byte && to.is_contiguous(),
                "rooms must be contiguous uint8");
    auto* const memory = to.mutable_data_ptr<uint8_t>();
    ts::require(reinterpret_cast<uintptr_t>(memory) % ts::deflate::kAlign == 0,
                "rooms is not aligned to 16 bytes");
    queue.keep(to);
    inflater->run(staging, bytes, ranges, count, memory, to.nbytes(), results, queue, nullptr);
    ts::mark_written(to);
  });
}
