#include "decode/decoder.h"

#include <algorithm>
#include <memory>
#include <string>

#include "base/error.h"
#include "base/thread.h"
#include "jpeg/plan.h"
#include "torch/tensor.h"

namespace ts::decode {
namespace {

using jpeg::Place;
using jpeg::Plan;

size_t head_bytes(int64_t images) {
  const size_t bytes = static_cast<size_t>(images) * sizeof(Place);
  return (bytes + jpeg::kPlanAlign - 1) / jpeg::kPlanAlign * jpeg::kPlanAlign;
}

[[noreturn]] void throw_image(int64_t index, const std::string& what) {
  throw Failure(TS_ERROR_INVALID_ARGUMENT, "image " + std::to_string(index) + ": " + what);
}

// Returns a plan, after checking that it is one and lies within the staging memory. Its inside is
// the planner's.
const Plan& checked_plan(int64_t index, const ts_gpu_decode_image& image, const uint8_t* staging,
                         size_t head, size_t bytes, size_t results_bytes) {
  if (image.plan < head || image.plan % jpeg::kPlanAlign != 0 || image.plan > bytes ||
      bytes - image.plan < sizeof(Plan)) {
    throw_image(index, "its plan is not inside the staging memory, behind the head");
  }
  const Plan& plan = *reinterpret_cast<const Plan*>(staging + image.plan);
  if (plan.magic != jpeg::kPlanMagic || plan.bytes > bytes - image.plan) {
    throw_image(index, "it has no plan of ts_image_plan_segments");
  }
  const size_t result = static_cast<size_t>(plan.x.size) * static_cast<size_t>(plan.y.size) * 3;
  if (image.result > results_bytes || results_bytes - image.result < result) {
    throw_image(index, "its pixels do not fit into the results");
  }
  return plan;
}

// Adds an image's needs to those of the images that are decoded with it.
void widen(const Plan& plan, Work* work) {
  const auto count = [](const jpeg::Axis& a, int32_t b) {
    return static_cast<uint32_t>(a.size) * static_cast<uint32_t>(b);
  };
  work->subsequences = std::max(work->subsequences, plan.subsequences);
  work->segments = std::max(work->segments, plan.segments);
  work->blocks = std::max(work->blocks, plan.total_blocks);
  work->pixels = std::max(work->pixels, static_cast<uint32_t>(plan.x.source_size) *
                                            static_cast<uint32_t>(plan.y.source_size));
  work->columns = std::max(work->columns, count(plan.x, plan.y.source_size));
  work->outputs = std::max(work->outputs, count(plan.x, plan.y.size));
}

}  // namespace
}  // namespace ts::decode

ts_gpu_decoder::ts_gpu_decoder(int32_t on, int64_t images, size_t staging_bytes,
                               size_t scratch_bytes)
    : device(on),
      max_images(images),
      staging(ts::decode::memory_on(on, staging_bytes)),
      scratch(ts::decode::memory_on(on, scratch_bytes)),
      flags(ts::decode::memory_on(on, static_cast<size_t>(images) * sizeof(int32_t))) {}

void ts_gpu_decoder::run(uint8_t* from, size_t bytes, const ts_gpu_decode_image* images,
                         int64_t count, uint8_t* results, size_t results_bytes, int32_t* failed,
                         const ts::decode::Queue& queue, const Mark& mark) {
  using namespace ts::decode;
  const auto capacity = static_cast<uint64_t>(scratch.nbytes());
  const size_t head = head_bytes(count);
  // Every check, and all places, come before anything is enqueued.
  auto* const places = reinterpret_cast<Place*>(from);
  for (int64_t first = 0; first < count;) {
    uint64_t total = 0;
    uint64_t coefficients = 0;
    int64_t end = first;
    for (; end < count; ++end) {
      const Plan& plan = checked_plan(end, images[end], from, head, bytes, results_bytes);
      const ts::jpeg::Scratch needs = ts::jpeg::scratch_of(plan);
      if (needs.total() > capacity) {
        throw_image(end, "it needs " + std::to_string(needs.total()) +
                             " bytes of scratch memory, and the decoder has " +
                             std::to_string(capacity));
      }
      if (total + needs.total() > capacity) break;
      total += needs.total();
      coefficients += needs.coefficients;
    }
    // The coefficients of all images lie together, to be zeroed at once.
    uint64_t coefficient = 0;
    uint64_t other = coefficients;
    for (int64_t i = first; i < end; ++i) {
      const ts::jpeg::Scratch needs =
          ts::jpeg::scratch_of(*reinterpret_cast<const Plan*>(from + images[i].plan));
      Place& place = places[i];
      place.plan = images[i].plan;
      place.coefficients = coefficient;
      place.samples = other;
      place.pixels = place.samples + needs.samples;
      place.columns = place.pixels + needs.pixels;
      place.weights = place.columns + needs.columns;
      place.sync = place.weights + needs.weights;
      place.result = images[i].result;
      coefficient += needs.coefficients;
      other += needs.total() - needs.coefficients;
    }
    first = end;
  }
  if (count == 0) return;

  for (const at::Tensor* memory : {&staging, &scratch, &flags}) queue.keep(*memory);
  auto* const flag = static_cast<int32_t*>(flags.mutable_data_ptr());
  const size_t flag_bytes = static_cast<size_t>(count) * sizeof(int32_t);
  const auto done = [&](int piece) {
    if (mark) mark(piece);
  };
  done(-1);
  queue.copy_in(staging.mutable_data_ptr(), from, bytes);
  queue.zero(flag, flag_bytes);
  done(0);
  for (int64_t first = 0; first < count;) {
    Work work = {};
    uint64_t zeroed = 0;
    int64_t end = first;
    // Places that begin at the front again are those of the next images.
    for (; end < count && (end == first || places[end].coefficients != 0); ++end) {
      const Plan& plan = *reinterpret_cast<const Plan*>(from + images[end].plan);
      widen(plan, &work);
      zeroed = places[end].coefficients + ts::jpeg::scratch_of(plan).coefficients;
    }
    work.places = static_cast<const Place*>(staging.const_data_ptr()) + first;
    work.staging = static_cast<uint8_t*>(staging.mutable_data_ptr());
    work.scratch = static_cast<uint8_t*>(scratch.mutable_data_ptr());
    work.results = results;
    work.failed = flag + first;
    work.images = static_cast<uint32_t>(end - first);
    queue.zero(work.scratch, zeroed);
    done(1);
    for (int stage = 0; stage < kStages; ++stage) {
      queue.launch(static_cast<Stage>(stage), work);
      done(2 + stage);
    }
    first = end;
  }
  queue.copy_out(failed, flag, flag_bytes);
}

size_t ts_gpu_decoder_head_bytes(int64_t images) {
  return images <= 0 ? 0 : ts::decode::head_bytes(images);
}

ts_error* ts_gpu_decoder_new(int32_t device, int64_t max_images, size_t staging_bytes,
                             size_t scratch_bytes, ts_gpu_decoder** decoder) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(max_images >= 1 && max_images <= 65535, "max_images must be from 1 to 65535");
    ts::require(staging_bytes > 0 && scratch_bytes > 0, "memory of 0 bytes");
    ts::decode::ready_device(device, "a decoder's memory");
    *decoder = std::make_unique<ts_gpu_decoder>(device, max_images, staging_bytes, scratch_bytes)
                   .release();
  });
}

void ts_gpu_decoder_free(ts_gpu_decoder* decoder) {
  const std::unique_ptr<ts_gpu_decoder> owned(decoder);
}

ts_error* ts_gpu_decoder_run(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                             const ts_gpu_decode_image* images, int64_t count, ts_tensor* results,
                             int32_t* failed, ts_stream stream) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(decoder != nullptr, "decoder is NULL");
    ts::require(staging != nullptr && failed != nullptr, "staging or failed is NULL");
    ts::require(images != nullptr || count == 0, "images is NULL");
    ts::require(count >= 0 && count <= decoder->max_images,
                "count is negative, or over the decoder's max_images");
    ts::require(bytes <= decoder->staging.nbytes(), "bytes is over the decoder's staging_bytes");
    ts::require(reinterpret_cast<uintptr_t>(staging) % ts::jpeg::kPlanAlign == 0,
                "staging is not aligned to 16 bytes");
    ts::require(bytes >= ts_gpu_decoder_head_bytes(count), "the staging memory has no head");
    const at::Tensor to = ts::value_of(results, "results");
    const ts::decode::Queue queue(stream);
    ts::require(
        queue.device() == decoder->device && ts::device_index(to.device()) == decoder->device,
        "stream, results and decoder are on different devices");
    ts::require(to.scalar_type() == at::ScalarType::Byte && to.is_contiguous(),
                "results must be contiguous uint8");
    queue.keep(to);
    decoder->run(staging, bytes, images, count, to.mutable_data_ptr<uint8_t>(), to.nbytes(), failed,
                 queue, nullptr);
    ts::mark_written(to);
  });
}
