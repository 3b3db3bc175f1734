// The time of each stage of decoding or inflating a batch on a GPU.
#include "pieces.h"

#include <c10/cuda/CUDAException.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <functional>
#include <vector>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/stream.h"
#include "decode/decoder.h"
#include "decode/inflater.h"
#include "torch/tensor.h"

namespace ts {
namespace {

static_assert(ts_gpu_decoder::kPieces == TS_BENCH_DECODE_ALL, "the pieces have these numbers");
static_assert(ts_gpu_inflater::kPieces == TS_BENCH_INFLATE_ALL, "the pieces have these numbers");

// A timing event of the current device.
class Timer {
 public:
  Timer() { C10_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Timer() { cudaEventDestroy(event_); }
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;
  void record(cudaStream_t stream) { C10_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  double since(const Timer& begin) const {
    float milliseconds = 0;
    C10_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, begin.event_, event_));
    return milliseconds;
  }

 private:
  cudaEvent_t event_ = nullptr;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

using Mark = std::function<void(int piece)>;

// Does a run `rounds` times, twice: first one after the other, for the time of a whole run, and
// then each separately, with a mark after each piece of work.
void time_pieces(cudaStream_t stream, int32_t rounds, int pieces,
                 const std::function<void(const Mark&)>& run, double* milliseconds) {
  Timer begin, end;
  begin.record(stream);
  for (int32_t i = 0; i < rounds; ++i) run(nullptr);
  end.record(stream);
  C10_CUDA_CHECK(cudaStreamSynchronize(stream));
  milliseconds[pieces] = end.since(begin) / rounds;

  std::vector<std::vector<double>> took(static_cast<size_t>(pieces));
  constexpr size_t kMarks = 1024;
  std::vector<Timer> timers(kMarks);
  for (int32_t i = 0; i < rounds; ++i) {
    std::vector<int> marked;
    run([&](int piece) {
      require(marked.size() < kMarks, "the batch is done in too many parts");
      timers[marked.size()].record(stream);
      marked.push_back(piece);
    });
    C10_CUDA_CHECK(cudaStreamSynchronize(stream));
    std::vector<double> sum(took.size());
    for (size_t k = 1; k < marked.size(); ++k) {
      sum[static_cast<size_t>(marked[k])] += timers[k].since(timers[k - 1]);
    }
    for (size_t k = 0; k < sum.size(); ++k) took[k].push_back(sum[k]);
  }
  for (size_t k = 0; k < took.size(); ++k) milliseconds[k] = median(took[k]);
}

// Throws the error that a call of the library returned.
void checked(ts_error* error) {
  if (error != nullptr) throw_error(error);
}

}  // namespace
}  // namespace ts

ts_error* ts_bench_gpu_decode(ts_gpu_decoder* decoder, uint8_t* staging, size_t bytes,
                              const ts_gpu_decode_image* images, int64_t count, ts_tensor* results,
                              int32_t* failed, ts_stream stream, int32_t rounds,
                              double* milliseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(milliseconds != nullptr, "milliseconds is NULL");
    // Checks the arguments, and loads the kernels.
    ts::checked(
        ts_gpu_decoder_run(decoder, staging, bytes, images, count, results, failed, stream));
    const at::Tensor to = ts::value_of(results, "results");
    const auto on = ts::checked_stream(stream);
    const ts::decode::Queue queue(stream);
    C10_CUDA_CHECK(cudaStreamSynchronize(on.stream()));
    const auto run = [&](const ts_gpu_decoder::Mark& mark) {
      decoder->run({staging,
                    bytes,
                    images,
                    count,
                    nullptr,
                    0,
                    to.mutable_data_ptr<uint8_t>(),
                    to.nbytes(),
                    failed,
                    nullptr,
                    {}},
                   queue, mark);
    };
    ts::time_pieces(on.stream(), rounds, ts_gpu_decoder::kPieces, run, milliseconds);
  });
}

ts_error* ts_bench_gpu_inflate(ts_gpu_inflater* inflater, uint8_t* staging, size_t bytes,
                               const ts_gpu_inflate_range* ranges, int64_t count, ts_tensor* rooms,
                               ts_gpu_inflate_result* results, ts_stream stream, int32_t rounds,
                               double* milliseconds) {
  return ts::guard(__func__, [&] {
    ts::enter_thread();
    ts::require(rounds > 0, "rounds must be at least 1");
    ts::require(milliseconds != nullptr, "milliseconds is NULL");
    // Checks the arguments, and loads the kernel.
    ts::checked(
        ts_gpu_inflater_run(inflater, staging, bytes, ranges, count, rooms, results, stream));
    const at::Tensor to = ts::value_of(rooms, "rooms");
    const auto on = ts::checked_stream(stream);
    const ts::decode::Queue queue(stream);
    C10_CUDA_CHECK(cudaStreamSynchronize(on.stream()));
    const auto run = [&](const ts_gpu_inflater::Mark& mark) {
      inflater->run(staging, bytes, ranges, count, to.mutable_data_ptr<uint8_t>(), to.nbytes(),
                    results, queue, mark);
    };
    ts::time_pieces(on.stream(), rounds, ts_gpu_inflater::kPieces, run, milliseconds);
  });
}
